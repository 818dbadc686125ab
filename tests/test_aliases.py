"""Tensors that change or move behind the graph's back: writes in place, rearranged parameters, casts, hidden reads.

Each network is rescaled by what `analyze` leaves, with and without an example input; its output must not move.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gspace
from invariance import rescaling_change
from parts import EXACT, Net

N, WIDTH = 4, 8
VECTORS = (torch.randn(N, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)
SQUARE = (torch.randn(N, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)
TOKENS = (torch.randn(N, WIDTH, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)
IMAGES = (torch.randn(N, 3, 10, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)
VIDEO = (torch.randn(N, 3, 2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)

Forward = Callable[[Any, Tensor], Any]


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(1)))


def _gate_written(s: Any, x: Tensor) -> Tensor:
    gate = torch.sigmoid(s.b(x))
    gate.mul_(F.relu(s.a(x)))
    return s.c(gate)


def _scaled_in_place(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    h.mul_(s.g)
    return s.c(F.relu(h))


def _ground_written(s: Any, x: Tensor) -> Tensor:
    m = torch.ones_like(s.a(x))
    m.mul_(F.relu(s.a(x)))
    return s.c(m)


def _augmented(s: Any, x: Tensor) -> Tensor:
    g = torch.sigmoid(s.b(x))
    y = g
    y *= F.relu(s.a(x))
    return s.c(g)


def _through_a_view(s: Any, x: Tensor) -> Tensor:
    h = F.relu(s.a(x))
    h.view(-1, 2, 4).mul_(s.q)
    return s.c(h)


def _through_a_part(s: Any, x: Tensor) -> Tensor:
    h = F.relu(s.a(x))
    u, _ = h.chunk(2, 1)
    u.mul_(s.g4)
    return s.c(h)


def _through_data(s: Any, x: Tensor) -> Tensor:
    h = F.relu(s.a(x))
    h.data.mul_(s.g)
    return s.c(h)


def _two_batches(s: Any, x: Tensor) -> Tensor:
    f, h = F.relu(s.k(x[:, 0])), F.relu(s.k(x.flatten(0, 1)))
    return s.o(h.view(f.size(0), -1)) + s.p(f.flatten(1))


NETWORKS: dict[str, tuple[Forward, tuple[Tensor, ...]]] = {
    "scaled in place": (_scaled_in_place, VECTORS),
    "a gate written in place": (_gate_written, VECTORS),
    "ground written in place": (_ground_written, VECTORS),
    "augmented assignment to an alias": (_augmented, VECTORS),
    "written through a view": (_through_a_view, VECTORS),
    "written through a part": (_through_a_part, VECTORS),
    "written through .data": (_through_data, VECTORS),
    "out=": (lambda s, x: (g := torch.sigmoid(s.b(x)), torch.mul(g, F.relu(s.a(x)), out=g), s.c(g))[2], VECTORS),
    "a permuted weight": (lambda s, x: s.c(F.relu(F.linear(F.relu(s.a(x)), s.w.permute(1, 0)))), VECTORS),
    "a weight with its axes moved": (lambda s, x: s.c(F.relu(F.linear(F.relu(s.a(x)), s.w.movedim(0, 1)))), VECTORS),
    "a bias along the tokens": (lambda s, x: s.c(F.relu(s.a(x) + s.g.unsqueeze(-1))), TOKENS),
    "a scale along the tokens": (lambda s, x: s.c(F.relu(s.a(x) * s.g.unsqueeze(-1))), TOKENS),
    "a layer scale": (lambda s, x: s.o(F.relu(s.k(x) * s.g[:4, None, None]).flatten(1)), IMAGES),
    "a mean over a third dimension": (lambda s, x: s.c(F.relu(s.a(x)).mean(2)), TOKENS),
    "a maximum over a third dimension": (lambda s, x: s.c(F.relu(s.a(x)).amax(2)), TOKENS),
    "a convolution over tokens": (
        lambda s, x: s.d(F.relu(s.t(F.relu(s.a(x)).transpose(-1, -2))).mean(1)),
        TOKENS,
    ),
    "rounded by a cast": (lambda s, x: s.c((F.relu(s.a(x)) * 4).to(torch.int32).to(torch.float64)), VECTORS),
    "cast to the type of indices": (lambda s, x: s.c((F.relu(s.a(x)) * 4).type_as(s.i).to(torch.float64)), VECTORS),
    "used as an index": (lambda s, x: s.c(s.e((F.relu(s.a(x)).amax(-1) * 3).clamp(0, 8).to(torch.long))), VECTORS),
    "a penalty on all parameters": (
        lambda s, x: torch.cat([s.c(F.relu(s.a(x))), sum((p**2).sum() for p in s.parameters()).expand(N, 1)], 1),
        VECTORS,
    ),
    "a maximum with a bias": (lambda s, x: torch.maximum(s.f(F.relu(s.a(x))), s.a.bias), VECTORS),
    "a value in a new tensor": (lambda s, x: s.c(F.relu(s.a(x))) + x.new_full((1,), 1.0) * s.a.bias.sum(), VECTORS),
    "the batch of another activation": (_two_batches, VIDEO),
    "flattened tokens": (lambda s, x: s.l(F.relu(s.a(x)).flatten(1, 2)), TOKENS),
    "flipped channels": (lambda s, x: s.c(F.relu(s.a(x)).flip(-1) + F.relu(s.b(x))), VECTORS),
    "flipped images": (lambda s, x: s.o(torch.flip(F.relu(s.k(x)), (1, 3)).flatten(1)), IMAGES),
    "flipped, once flattened": (lambda s, x: s.o(F.relu(s.k(x)).flatten(1).flip(1)), IMAGES),
    "flipped tokens": (lambda s, x: s.c(F.relu(s.a(x)).flip(1)), TOKENS),
    "flipped channels, counted from the front": (lambda s, x: s.c(F.relu(s.a(x)).flip(2) + F.relu(s.b(x))), TOKENS),
    "a flipped bias": (lambda s, x: s.c(F.relu(F.linear(x, s.a.weight, s.a.bias.flip(0)))), VECTORS),
    "a rolled bias": (lambda s, x: s.c(F.relu(F.linear(x, s.a.weight, s.a.bias.roll(1)))), VECTORS),
    "rolled channels": (lambda s, x: s.c(F.relu(s.a(x)).roll(3, -1) + F.relu(s.b(x))), VECTORS),
    "rolled as one vector": (lambda s, x: s.c(F.relu(s.a(x)).roll(3)), VECTORS),
    "rolled windows": (lambda s, x: s.o(torch.roll(F.relu(s.k(x)), (1, -2), (2, 3)).flatten(1)), IMAGES),
    "rolled, once flattened": (lambda s, x: s.o(F.relu(s.k(x)).flatten(1).roll(4, 1)), IMAGES),
    "rows gathered": (lambda s, x: s.c(F.relu(s.a(x)).index_select(0, torch.tensor([1, 0, 3, 3, 2]))), VECTORS),
    "channels gathered": (lambda s, x: s.c(F.relu(s.a(x)).index_select(-1, torch.arange(WIDTH))), VECTORS),
    "tokens gathered": (lambda s, x: s.c(F.relu(s.a(x)).index_select(1, torch.tensor([4, 2]))), TOKENS),
    "as many rows gathered as there are samples": (
        lambda s, x: s.l(F.relu(s.a(x)).index_select(0, torch.arange(N).repeat(WIDTH)).view(x.size(0), -1)),
        VECTORS,
    ),
    "rows repeated": (lambda s, x: s.c(F.relu(s.a(x)).repeat(2, 1)), VECTORS),
    "rows repeated into channels": (lambda s, x: s.l(F.relu(s.a(x)).repeat(WIDTH, 1).view(x.size(0), -1)), VECTORS),
    "channels repeated": (lambda s, x: s.l(F.relu(s.a(x)).repeat(1, WIDTH)), VECTORS),
    "channels repeated in a new dimension": (lambda s, x: s.c(F.relu(s.a(x)).repeat(2, 1, 1)), VECTORS),
    "tokens repeated": (lambda s, x: s.c(F.relu(s.a(x)).repeat(1, 3, 1)), TOKENS),
    "shuffled maps": (lambda s, x: s.o(torch.channel_shuffle(F.relu(s.k(x)), 2).flatten(1)), IMAGES),
    "shuffled tokens": (lambda s, x: s.c(torch.channel_shuffle(F.relu(s.a(x)), 2)), TOKENS),
    "filled with 0": (lambda s, x: s.c(F.relu(s.a(x)).masked_fill(x[:, :1] > 1, 0)), VECTORS),
    "filled with 0 in place": (lambda s, x: s.c(s.a(x).masked_fill_(x[:, :1] > 1, 0).relu()), VECTORS),
    "filled with 1": (lambda s, x: s.c(F.relu(s.a(x)).masked_fill(x[:, :1] > 1, 1)), VECTORS),
    "filled with 0 where another layer is large": (
        lambda s, x: s.c(F.relu(s.a(x)).masked_fill(s.b(x) > 1, 0)),
        VECTORS,
    ),
    "0 where another layer is negative": (lambda s, x: s.c(torch.where(s.b(x) > 0, s.a(x), 0)), VECTORS),
    "0 where it is positive": (lambda s, x: s.c(torch.where(s.a(x) > 0, 0.0, s.a(x))), VECTORS),
    "0 where it is not, as a method": (lambda s, x: s.c(s.a(x).where(s.b(x) > 0, 0)), VECTORS),
    "1 where it is negative": (lambda s, x: s.c(torch.where(s.a(x) > 0, s.a(x), 1)), VECTORS),
    "a leaky ReLU by hand": (lambda s, x: s.c(torch.where((h := s.a(x)) > 0, h, 0.1 * h)), VECTORS),
    "a leaky ReLU by hand, as a method": (lambda s, x: s.c((h := s.a(x)).where(h > 0, -h)), VECTORS),
    "a leaky ReLU that is shifted": (lambda s, x: s.c(torch.where((h := s.a(x)) > 0, h, 0.1 * h + x[:, :1])), VECTORS),
    "a constant or a layer": (lambda s, x: s.c(torch.where(s.a(x) > 0, x[:, :1].expand(-1, WIDTH), s.a(x))), VECTORS),
    "one layer or the other": (lambda s, x: s.c(torch.where(x[:, :1] > 0, s.a(x), s.b(x))), VECTORS),
    "a mask with more dimensions": (lambda s, x: s.c(torch.where(x[:, :1] > 0, F.relu(s.a(x[0])), 0)[:, :8]), VECTORS),
    "one layer larger than the other": (lambda s, x: s.c(torch.where(s.a(x) > s.b(x), s.a(x), 0)), VECTORS),
    "signs as numbers": (lambda s, x: s.c((s.a(x) > 0).to(torch.float64)), VECTORS),
    "mm": (lambda s, x: s.c(torch.mm(F.relu(s.a(x)), s.w).relu()), VECTORS),
    "addmm with factors": (lambda s, x: s.c(torch.addmm(s.g, F.relu(s.a(x)), s.w, beta=2, alpha=-3).relu()), VECTORS),
    "addmm of two layers": (lambda s, x: s.c(torch.addmm(s.b(x), F.relu(s.a(x)), s.w).relu()), VECTORS),
    "addmm of activations": (lambda s, x: torch.addmm(x[:, :N], F.relu(s.a(x)), F.relu(s.b(x)).t()), VECTORS),
}


KEPT = {
    "rows gathered": WIDTH,
    "tokens gathered": WIDTH,
    "rows repeated": WIDTH,
    "channels repeated": WIDTH,
    "channels repeated in a new dimension": WIDTH,
    "tokens repeated": WIDTH,
    "shuffled maps": 4,
    "shuffled tokens": WIDTH,
    "filled with 0": WIDTH,
    "filled with 0 in place": WIDTH,
    "filled with 1": 0,
    "filled with 0 where another layer is large": WIDTH,
    "0 where another layer is negative": 2 * WIDTH,
    "0 where it is positive": WIDTH,
    "0 where it is not, as a method": 2 * WIDTH,
    "1 where it is negative": 0,
    "a leaky ReLU by hand": WIDTH,
    "a leaky ReLU by hand, as a method": WIDTH,
    "a leaky ReLU that is shifted": 0,
    "a constant or a layer": 0,
    "signs as numbers": WIDTH,
    "mm": 2 * WIDTH,
    "addmm with factors": 2 * WIDTH,
    "addmm of two layers": WIDTH,
}


@pytest.mark.parametrize("name", KEPT)
def test_what_chooses_or_repeats_entries_keeps_their_units(name: str) -> None:
    forward, inputs = NETWORKS[name]
    assert KEPT[name] == gspace.analyze(_build(forward), inputs).H


@pytest.mark.parametrize("known", [False, True], ids=["symbolic", "example"])
@pytest.mark.parametrize(
    ("name", "units"),
    [("flipped channels", WIDTH), ("flipped images", 4), ("rolled channels", WIDTH), ("rolled windows", 4)],
)
def test_what_only_changes_places_keeps_its_units(name: str, units: int, known: bool) -> None:
    """Channels that are added in another order tie two layers, unit by unit."""
    forward, inputs = NETWORKS[name]
    found = gspace.analyze(_build(forward), inputs if known else None, residual="tie")
    assert units == found.H


def _build(forward: Forward) -> nn.Module:
    torch.manual_seed(0)
    return Net(
        forward,
        a=nn.Linear(5, WIDTH),
        b=nn.Linear(5, WIDTH),
        c=nn.Linear(WIDTH, 3),
        d=nn.Linear(WIDTH, 3),
        e=nn.Embedding(9, WIDTH),
        f=nn.Linear(WIDTH, WIDTH),
        l=nn.Linear(WIDTH * WIDTH, 3),
        k=nn.Conv2d(3 if forward is not _two_batches else 2, 4, 3),
        t=nn.Conv1d(WIDTH, WIDTH, 1),
        o=nn.Linear(256 if forward is not _two_batches else 48, 3),
        p=nn.Linear(16, 3),
        g=_parameter(WIDTH),
        g4=_parameter(4),
        q=_parameter(2, 1),
        w=_parameter(WIDTH, WIDTH),
        i=nn.Parameter(torch.zeros(1, dtype=torch.long), requires_grad=False),
    ).double()


@pytest.mark.parametrize("known", [False, True], ids=["symbolic", "example"])
@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_changes_behind_the_graph(name: str, known: bool) -> None:
    forward, inputs = NETWORKS[name]
    model = _build(forward)
    with torch.no_grad():
        model(*inputs)
    try:
        found = gspace.analyze(model, inputs if known else None)
    except gspace.TraceError:
        return
    assert rescaling_change(model, inputs, found) < EXACT


def test_a_changed_transformer_layer_is_pinned() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert gspace.analyze(layer).H == 16
    layer.linear1.register_forward_hook(lambda module, args, output: torch.tanh(output))
    assert gspace.analyze(layer).H == 0
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer.dropout = nn.Tanh()  # type: ignore[assignment]
    assert gspace.analyze(layer).H == 0


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_a_branch_on_a_draw_is_refused(draw: Callable[[], float]) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.relu(s.a(x))
        return s.c(h) if draw() < 0.5 else s.d(h)

    with pytest.raises(gspace.TraceError, match="random"):
        gspace.analyze(_build(forward))
