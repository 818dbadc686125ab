"""What a trace without an example input does not know: how large a batch is, and how many dimensions stand before it.

Operations that change either must not pass for those that keep it. Each network is rescaled by what `analyze` leaves,
with and without an example input; its output must not move.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gspace
from invariance import rescaling_change
from parts import EXACT, Net

Forward = Callable[..., Tensor]


def _input(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


IMAGES, VIDEO = _input(6, 3, 4, 4), _input(2, 3, 3, 4, 4)
NUMPY: dict[str, Any] = {"axis": 0, "keepdims": True}  # torch takes numpy's names too
VECTORS, TOKENS, FRAMES = _input(4, 5), _input(4, 6, 5), _input(2, 4, 3, 5)


def _build(forward: Forward) -> nn.Module:
    torch.manual_seed(0)
    return Net(
        forward,
        a=nn.Linear(5, 6),
        b=nn.Linear(5, 6),
        c=nn.Linear(6, 2),
        k=nn.Conv2d(3, 4, 3, padding=1),
        j=nn.Conv2d(4, 4, 3, padding=1),
        o=nn.Linear(64, 2),
        two=nn.Linear(2 * 64, 2),
        three=nn.Linear(3 * 64, 2),
        head=nn.Linear(4, 2),
        m=nn.Linear(5, 1),
        n=nn.Linear(5, 1),
        w=nn.Linear(1, 2),
        turned=nn.Linear(2, 2),
        bias=nn.Parameter(torch.randn(1, 1, 4, 1, 1)),
    ).double()


def _clips(s: Any, x: Tensor) -> Tensor:
    f = F.relu(s.k(x.flatten(0, 1)))  # frames are folded into the batch
    clip = f.mean((2, 3)).view(x.size(0), x.size(1), 4).sum(1)
    return s.three(F.relu(s.j(f)).view(clip.size(0), -1)) + clip.sum()


def _unequal(s: Any, x: Tensor) -> Tensor:
    first, second = F.relu(s.k(x)).split([4, 2], 0)
    return s.two(first.reshape(second.size(0), -1))


def _shifted(s: Any, x: Tensor) -> Tensor:
    h = F.relu(s.k(x))
    n, c, high, wide = h.shape
    return s.o(torch.cat([h.new_zeros(n, 1, high, wide), h], 1)[:, :c].flatten(1))


def _queries(s: Any, x: Tensor) -> Tensor:
    f = F.relu(s.k(x)).mean((2, 3))
    return s.c(F.relu(s.a(f.new_ones(f.shape[0], 7, 5)))[:, 0]) + s.head(f)


def _gated(s: Any, x: Tensor) -> Tensor:
    h = F.relu(s.k(x))
    batch = h.size(0)
    h = F.pad(h * torch.sigmoid(F.relu(s.j(h)).mean((2, 3), keepdim=True)), (0, 0))
    return s.o(torch.cat([h[:, :2], h.chunk(2, 1)[1]], 1).view(batch, -1))


NETWORKS: dict[str, tuple[Forward, Tensor]] = {
    "frames folded into the batch": (_clips, VIDEO),
    "every second sample": (lambda s, x: s.two((h := F.relu(s.k(x))).reshape(h[::2].size(0), -1)), IMAGES),
    "samples joined": (
        lambda s, x: s.two(torch.cat([h := F.relu(s.k(x)), F.relu(s.j(h))]).view(h.size(0), -1)),
        IMAGES,
    ),
    "parts of a batch": (_unequal, IMAGES),
    "all dimensions turned round": (lambda s, x: s.turned(F.relu(s.a(x)).T.split(2, -2)[0]), FRAMES),
    "halves of the frames": (lambda s, x: s.c(F.relu(s.a(x)).chunk(2, -3)[0]), FRAMES),
    "parts of the frames": (lambda s, x: s.c(F.relu(s.a(x)).tensor_split(3, -3)[1]), FRAMES),
    "halves of a sample": (lambda s, x: s.c(F.relu(s.a(x))[-1].chunk(2, -2)[0]), TOKENS),
    "frames joined": (lambda s, x: s.c(torch.cat([F.relu(s.a(x)), F.relu(s.b(x))], -3)[..., :6]), FRAMES),
    "channels shifted by zeros": (_shifted, IMAGES),
    "new tokens": (_queries, IMAGES),
    "keepdims": (lambda s, x: s.head(F.relu(s.k(x)).mean(**NUMPY)[0].mean((-1, -2))), IMAGES),
    "squeezed by keepdims": (lambda s, x: s.head(F.relu(s.k(x)).mean(**(NUMPY | {"axis": (2, 3)})).flatten(1)), IMAGES),
    "one unit times all inputs": (
        lambda s, x: s.w(torch.cat([F.relu(s.m(x)) * x, F.relu(s.n(x)) * x], -1)[..., 1:2]),
        VECTORS,
    ),
    "a bias with more dimensions": (lambda s, x: s.o(F.relu(s.k(x) + s.bias)[:, 0].flatten(1)), IMAGES),
    "a factor with more dimensions": (lambda s, x: s.o(F.relu(s.k(x) * s.bias)[:, 0].flatten(1)), IMAGES),
    "gated, padded, cut and joined": (_gated, IMAGES),
}


@pytest.mark.parametrize("known", [False, True], ids=["symbolic", "example"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_batch_is_not_taken_for_another(name: str, known: bool) -> None:
    forward, x = NETWORKS[name]
    model = _build(forward)
    found = gspace.analyze(model, x if known else None)
    assert rescaling_change(model, (x,), found) < EXACT


@pytest.mark.parametrize("known", [False, True], ids=["symbolic", "example"])
@pytest.mark.parametrize(
    ("name", "units"), [("gated, padded, cut and joined", 4), ("keepdims", 4), ("squeezed by keepdims", 4)]
)
def test_what_keeps_the_batch_keeps_its_units(name: str, units: int, known: bool) -> None:
    forward, x = NETWORKS[name]
    assert units == gspace.analyze(_build(forward), x if known else None).H


@pytest.mark.parametrize("product", [torch.matmul, torch.mm, lambda a, h: torch.bmm(a[None], h[None])[0]])
def test_a_graph_convolution_keeps_its_units(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    def forward(s: Any, x: Tensor, near: Tensor) -> Tensor:
        return product(near, s.c(F.relu(product(near, s.a(x)))))

    model, inputs = _build(forward), (VECTORS, _input(4, 4))
    found = gspace.analyze(model, inputs)
    assert found.H == 6
    assert rescaling_change(model, inputs, found) < EXACT


@pytest.mark.parametrize("known", [False, True], ids=["symbolic", "example"])
@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.c(s.near @ F.relu(s.a(x))),
        lambda s, x: s.c(F.relu(s.a(x)) @ (x @ x.mT)),
        lambda s, x: s.d((x @ x.mT) @ F.relu(s.a(x)).mT),
        lambda s, x: s.c((x @ x.mT)[0] @ F.relu(s.a(x))),
    ],
    ids=["a buffer", "from the right", "over units", "a vector"],
)
def test_products_with_what_no_scale_changes(forward: Any, known: bool) -> None:
    model = _build(forward)
    model.register_buffer("near", _input(6, 6))
    model.d = nn.Linear(6, 2).double()
    inputs = (_input(6, 5),)
    assert rescaling_change(model, inputs, gspace.analyze(model, inputs if known else None)) < EXACT
