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
        i=nn.Conv2d(3, 4, 3, padding=1),
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
        five=nn.Linear(5 * 64, 2),
        map=nn.Conv2d(3, 1, 1),
        rgb=nn.Conv2d(3, 3, 3),
        gate=nn.Linear(4, 4),
        p=nn.Conv2d(3, 8, 3, padding=1),
        small=nn.Conv1d(2, 6, 1),
        large=nn.Conv1d(4, 6, 1),
        last=nn.Linear(48, 2),
        rows=nn.Buffer(torch.randn(1, 2)),
        times=nn.Buffer(torch.randn(5, 1, 1, 1)),
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


def _unbatched(s: Any, x: Tensor) -> Tensor:
    one = torch.sigmoid(F.adaptive_avg_pool2d(F.relu(s.p(x)), 2)[0])
    large = F.relu(s.large(F.pixel_shuffle(one, 2)))
    return s.last(s.small(one).view(large.size(0), -1))


def _pairs(s: Any, x: Tensor) -> Tensor:
    gate = torch.sigmoid(s.gate(x))
    return s.head(torch.cat([F.relu(s.map(x)) * gate, F.relu(s.map(-x)) * gate], -3)[..., 1, :, :])


def _compared(compare: Callable[[Tensor, Tensor], Tensor]) -> Forward:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.sigmoid(s.k(x))
        mask = compare(h.mean((2, 3), keepdim=True), h)  # as large as h
        return s.head((F.relu(s.i(x)).mean((2, 3), keepdim=True) * mask).flatten(1)[:, :4])

    return forward


def _first(size: Callable[[Any, Tensor], Any]) -> Forward:
    """As many units as another size says."""
    return lambda s, x: (h := F.relu(s.a(x)))[..., : size(s, h)]


ONE, THREE, TWO = _input(1, 3, 4, 4), _input(3, 4, 5), _input(3, 2, 5)

NETWORKS: dict[str, tuple[Forward, Tensor]] = {
    "a buffer over a batch of one": (lambda s, x: s.five((h := F.relu(s.k(x))).mul(s.times).view(h.size(0), -1)), ONE),
    "without a batch": (_unbatched, IMAGES),
    "a batch behind another size": (
        lambda s, x: (h := F.relu(s.rgb(x)).mean((2, 3))).view(-1, h.size(0))[:, :1],
        IMAGES,
    ),
    "padded beyond the rank": (lambda s, x: s.c(F.pad(F.relu(s.a(x)), (0, 0, 0, 0, 1, 1))[..., :6]), TOKENS),
    "a map times a gate of unknown rank": (_pairs, IMAGES),
    "the first of a mean": (_first(lambda s, h: h.mean(-2, keepdim=True).size(0)), THREE),
    "the first, transposed": (_first(lambda s, h: torch.sigmoid(h).mT.size(0)), THREE),
    "a new second dimension": (_first(lambda s, h: h.unsqueeze(1).size(-2)), THREE),
    "a new second dimension by index": (_first(lambda s, h: h[:, None].size(-2)), THREE),
    "a mean over the first": (_first(lambda s, h: h.mean(0, keepdim=True).size(-2)), THREE),
    "a view with -1": (_first(lambda s, h: h.view(h.size(0), -1, 6).size(-2)), THREE),
    "the number of dimensions": (_first(lambda s, h: h.dim()), THREE),
    "two sizes at once": (_first(lambda s, h: h.shape[:2][1]), THREE),
    "rows of a product": (_first(lambda s, h: (s.rows @ h).size(0)), TWO),
    "flattened from further in front": (lambda s, x: F.relu(s.a(x)).flatten(-3, -1)[..., 4:8], THREE),
    "resized tokens": (
        lambda s, x: s.c(F.interpolate(F.relu(s.a(x)).unsqueeze(-1), scale_factor=2.0).mean(-1)[..., :6]),
        THREE,
    ),
    "compared with a larger one": (_compared(torch.gt), IMAGES),
    "raised to a larger one": (_compared(torch.pow), IMAGES),
    "bounded by a larger one": (_compared(torch.clamp), IMAGES),
    "joined, with the batch of one": (
        lambda s, x: s.two(torch.cat([h := F.relu(s.k(x)), F.relu(s.k(-x))], 1).view(h.size(0), -1)),
        IMAGES,
    ),
    "expanded as another": (
        lambda s, x: s.o(
            F.relu(s.j(h := F.relu(s.k(x)))).mean((2, 3), keepdim=True).expand_as(h).reshape(h.size(0), -1)
        ),
        IMAGES,
    ),
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


UNITS = {  # that can be rescaled: without and with an example input
    "a buffer over a batch of one": (0, 4),
    "without a batch": (6, 12),
    "a batch behind another size": (0, 2),
    "padded beyond the rank": (0, 6),
    "a map times a gate of unknown rank": (1, 1),
    "the first of a mean": (0, 3),
    "the first, transposed": (0, 0),
    "a new second dimension": (0, 2),
    "a new second dimension by index": (0, 2),
    "a mean over the first": (0, 2),
    "a view with -1": (0, 2),
    "the number of dimensions": (0, 3),
    "two sizes at once": (0, 2),
    "rows of a product": (0, 3),
    "flattened from further in front": (0, 2),
    "resized tokens": (0, 0),
    "compared with a larger one": (0, 4),
    "raised to a larger one": (0, 4),
    "bounded by a larger one": (0, 4),
    "joined, with the batch of one": (4, 4),
    "expanded as another": (8, 8),
    "frames folded into the batch": (0, 4),
    "every second sample": (0, 4),
    "samples joined": (0, 4),
    "parts of a batch": (0, 4),
    "all dimensions turned round": (0, 0),
    "halves of the frames": (0, 6),
    "parts of the frames": (0, 6),
    "halves of a sample": (0, 6),
    "frames joined": (0, 6),
    "channels shifted by zeros": (0, 4),
    "new tokens": (4, 10),
    "keepdims": (4, 4),
    "squeezed by keepdims": (4, 4),
    "one unit times all inputs": (1, 2),
    "a bias with more dimensions": (0, 0),
    "a factor with more dimensions": (0, 0),
    "gated, padded, cut and joined": (4, 4),
}


@pytest.mark.parametrize("known", [False, True], ids=["symbolic", "example"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_batch_is_not_taken_for_another(name: str, known: bool) -> None:
    forward, x = NETWORKS[name]
    model = _build(forward)
    found = gspace.analyze(model, x if known else None)
    assert rescaling_change(model, (x,), found) < EXACT
    assert UNITS[name][known] == found.H


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
    ("forward", "units"),
    [
        (lambda s, x: s.c(s.near @ F.relu(s.a(x))), 6),
        (lambda s, x: s.c(F.relu(s.a(x)) @ (x @ x.mT)), 0),
        (lambda s, x: s.d((x @ x.mT) @ F.relu(s.a(x)).mT), 0),
        (lambda s, x: s.c((x @ x.mT)[0] @ F.relu(s.a(x))), 0),
    ],
    ids=["a buffer", "from the right", "over units", "a vector"],
)
def test_products_with_what_no_scale_changes(forward: Any, units: int, known: bool) -> None:
    model = _build(forward)
    model.register_buffer("near", _input(6, 6))
    model.d = nn.Linear(6, 2).double()
    inputs = (_input(6, 5),)
    found = gspace.analyze(model, inputs if known else None)
    assert rescaling_change(model, inputs, found) < EXACT
    assert units == found.H
