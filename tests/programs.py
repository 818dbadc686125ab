"""Small networks whose forward pass is tricky to follow, each with the number of its units.

A program is one function of parts (`PARTS`); only those that it uses are built. `a` and `b` read the data, so that
their outputs, 8 units each (4 channels of images), are the units in question; `c` and what has no reader behind it
return. Where a line does not say otherwise, H is the number of those that nothing sets to ground; units that are added,
compared or joined are one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VECTORS, TOKENS, IMAGES, FRAMES, VIDEO = (4, 5), (4, 6, 5), (4, 2, 3, 3), (2, 4, 3, 5), (2, 3, 2, 3, 3)
SQUARE = (4, 8, 5)  # as many tokens as channels: only the place tells which are which
ONE, TWO = (1, 2, 3, 3), (2, 4, 5)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=torch.float64))


def buffer(*shape: int) -> nn.Buffer:
    return nn.Buffer(normal(*shape, seed=3))


def layer(kind: Callable[..., nn.Module], *sizes: int, **options: Any) -> Callable[[], nn.Module]:
    return partial(kind, *sizes, **options, dtype=torch.float64)


PARTS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys("ab", layer(nn.Linear, 5, 8)),
    **dict.fromkeys("cd", layer(nn.Linear, 8, 3)),
    "f": layer(nn.Linear, 8, 8),
    "pair": layer(nn.Linear, 4, 3),
    "t": layer(nn.Conv1d, 8, 8, 1),
    "e": layer(nn.Embedding, 9, 8),
    "k": layer(nn.Conv2d, 2, 4, 3, padding=1),
    "i": layer(nn.Conv2d, 2, 4, 3, padding=1),
    "j": layer(nn.Conv2d, 4, 4, 3, padding=1),
    "p": layer(nn.Conv2d, 2, 8, 3, padding=1),
    "rgb": layer(nn.Conv2d, 2, 3, 3),
    "map": layer(nn.Conv2d, 2, 1, 1),
    "o": layer(nn.Linear, 36, 2),
    "two": layer(nn.Linear, 72, 2),
    "three": layer(nn.Linear, 108, 2),
    "five": layer(nn.Linear, 180, 2),
    "l": layer(nn.Linear, 64, 3),
    "long": layer(nn.Linear, 48, 3),
    "head": layer(nn.Linear, 4, 2),
    "wide": layer(nn.Linear, 3, 2),
    "m": layer(nn.Linear, 5, 1),
    "n": layer(nn.Linear, 5, 1),
    "w1": layer(nn.Linear, 1, 2),
    "turned": layer(nn.Linear, 2, 2),
    "small": layer(nn.Conv1d, 2, 6, 1),
    "large": layer(nn.Conv1d, 4, 6, 1),
    "depthwise": layer(nn.Conv2d, 4, 4, 1, groups=4, bias=False),
    "inorm": layer(nn.InstanceNorm2d, 4, affine=True),
    "bn": layer(nn.BatchNorm1d, 8),
    "bn6": layer(nn.BatchNorm1d, 6),
    "g": partial(parameter, 8),
    "g4": partial(parameter, 4),
    "one": partial(parameter, 1),
    "q": partial(parameter, 2, 1),
    "w": partial(parameter, 8, 8),
    "v": partial(parameter, 8, 5),
    "u": partial(parameter, 5, 8),
    "bias5": partial(parameter, 1, 1, 4, 1, 1),
    "near": partial(buffer, 4, 4),
    "times": partial(buffer, 5, 1, 1, 1),
}


class Parts(nn.Module):
    """A forward pass as one function of the parts; a part is built when it is first asked for."""

    def __init__(self, forward: Callable[..., Any], *examples: Tensor) -> None:
        super().__init__()
        self.function, self.open = forward, True
        with torch.no_grad():
            self(*examples)
        self.open = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in PARTS or not self.open:
                raise
        self.open = False  # torch asks whether there is such an attribute before it registers one
        setattr(self, name, PARTS[name]())
        self.open = True
        return super().__getattr__(name)

    def forward(self, *x: Tensor) -> Any:
        return self.function(self, *x)


@dataclass(frozen=True)
class Program:
    """A forward pass, the shapes of its inputs with the batch, and what `analyze` must say.

    `derivatives` is False where values are read or rounded: a rank cannot tell how many units there are.
    """

    forward: Callable[..., Any]
    H: int
    shapes: tuple[int, ...] | tuple[tuple[int, ...], ...] = VECTORS
    H_absorbed: int = 0
    derivatives: bool = True

    def inputs(self, seed: int) -> tuple[Tensor, ...]:
        shapes = self.shapes if isinstance(self.shapes[0], tuple) else (self.shapes,)
        return tuple(normal(*shape, seed=seed + k) for k, shape in enumerate(shapes))

    def build(self) -> nn.Module:
        return Parts(self.forward, *self.inputs(0))


# Writes ---------------------------------------------------------------------------------------------------------------


def scaled_in_place(s: Any, x: Tensor) -> Tensor:
    h = s.a(x)
    h.mul_(s.g)
    return s.c(F.relu(h))


def gate_written(s: Any, x: Tensor) -> Tensor:
    gate = torch.sigmoid(s.b(x))
    gate.mul_(F.relu(s.a(x)))
    return s.c(gate)


def ground_written(s: Any, x: Tensor) -> Tensor:
    m = torch.ones_like(s.a(x))
    m.mul_(F.relu(s.a(x)))
    return s.c(m)


def augmented(s: Any, x: Tensor) -> Tensor:
    g = torch.sigmoid(s.b(x))
    y = g
    y *= F.relu(s.a(x))
    return s.c(g)


def through_a_view(s: Any, x: Tensor) -> Tensor:
    h = F.relu(s.a(x))
    h.view(-1, 2, 4).mul_(s.q)
    return s.c(h)


def through_a_part(s: Any, x: Tensor) -> Tensor:
    h = F.relu(s.a(x))
    h.chunk(2, 1)[0].mul_(s.g4)
    return s.c(h)


def through_data(s: Any, x: Tensor) -> Tensor:
    h = F.relu(s.a(x))
    h.data.mul_(s.g)
    return s.c(h)


def assigned(s: Any, x: Tensor) -> Tensor:
    h, other = F.relu(s.a(x)), F.relu(s.b(x))
    h[:, 2:5] = other[:, :3]
    return s.c(h)


def zeros_filled(s: Any, x: Tensor) -> Tensor:
    h = torch.zeros(len(x), 8, dtype=x.dtype)
    h[:, :4].copy_(F.relu(s.a(x))[:, :4])
    h[:, 4:] += F.relu(s.b(x))[:, 4:]
    return s.c(h)


WRITES = {
    # 8 in front of the gain and 8 behind it
    "scaled in place": Program(scaled_in_place, 16),
    "a gate written in place": Program(gate_written, 8, derivatives=False),
    "ground written in place": Program(ground_written, 8),
    "augmented assignment to an alias": Program(augmented, 8, derivatives=False),
    # 8, and a factor for each half
    "written through a view": Program(through_a_view, 10, derivatives=False),
    # 8, and 4 behind the gain
    "written through a part": Program(through_a_part, 12, derivatives=False),
    "written through .data": Program(through_data, 16, derivatives=False),
    "out=": Program(
        lambda s, x: (g := torch.sigmoid(s.b(x)), torch.mul(g, F.relu(s.a(x)), out=g), s.c(g))[2], 8, derivatives=False
    ),
    # 5 of a and 3 of b are read; 3 and 5 are not
    "written into a slice": Program(assigned, 16, derivatives=False),
    "zeros, filled by two layers": Program(zeros_filled, 16),
    "x.add_(1), result unused": Program(lambda s, x: (h := s.a(x), h.add_(1.0), s.c(h))[2], 0),
    "x.mul_(2), result unused": Program(lambda s, x: (h := s.a(x), h.mul_(2.0), s.c(h))[2], 8),
    "relu in place, result unused": Program(lambda s, x: (h := s.a(x), F.relu(h, inplace=True), s.c(h))[2], 8),
}

# Parameters used in several ways --------------------------------------------------------------------------------------

PARAMETERS = {
    # the data has no scale; one part writes 5 hidden units, the other reads them
    "columns of one parameter in turn": Program(lambda s, x: F.linear(x, s.u[:, :5]).relu() @ s.u[:, 5:], 5),
    "rows of one parameter, multiplied": Program(lambda s, x: x @ (s.v[:5] @ s.v[5:].t()), 5),
    # 8 of a, 8 behind w
    "a permuted weight": Program(lambda s, x: s.c(F.relu(F.linear(F.relu(s.a(x)), s.w.permute(1, 0)))), 16),
    "a weight with its axes moved": Program(lambda s, x: s.c(F.relu(F.linear(F.relu(s.a(x)), s.w.movedim(0, 1)))), 16),
    "a weight viewed in another shape": Program(lambda s, x: s.c(F.relu(F.linear(x, s.u.view(8, 5)))), 8),
    "einsum": Program(lambda s, x: s.c(F.relu(torch.einsum("bi,ih->bh", x, s.u))), 8),
    # one number per token is added to all channels: one scale for all of them
    "a bias along the tokens": Program(lambda s, x: s.c(F.relu(s.a(x) + s.g.unsqueeze(-1))), 1, SQUARE),
    # 8 channels, and one factor that all tokens share
    "a scale along the tokens": Program(lambda s, x: s.c(F.relu(s.a(x) * s.g.unsqueeze(-1))), 9, SQUARE),
    "a layer scale": Program(lambda s, x: s.o(F.relu(s.k(x) * s.g4[:, None, None]).flatten(1)), 8, IMAGES),
    "a flipped bias": Program(lambda s, x: s.c(F.relu(F.linear(x, s.a.weight, s.a.bias.flip(0)))), 8),
    "a rolled bias": Program(lambda s, x: s.c(F.relu(F.linear(x, s.a.weight, s.a.bias.roll(1)))), 8),
    # every weight is in the output
    "a penalty on all parameters": Program(
        lambda s, x: torch.cat([s.c(F.relu(s.a(x))), sum((p**2).sum() for p in s.parameters()).expand(len(x), 1)], 1), 0
    ),
    "a maximum with a bias": Program(lambda s, x: torch.maximum(s.f(F.relu(s.a(x))), s.a.bias), 0),
    "a value in a new tensor": Program(lambda s, x: s.c(F.relu(s.a(x))) + x.new_full((1,), 1.0) * s.a.bias.sum(), 0),
    "mm": Program(lambda s, x: s.c(torch.mm(F.relu(s.a(x)), s.w).relu()), 16),
    "addmm with factors": Program(lambda s, x: s.c(torch.addmm(s.g, F.relu(s.a(x)), s.w, beta=2, alpha=-3).relu()), 16),
    "addmm of two layers": Program(lambda s, x: s.c(torch.addmm(s.b(x), F.relu(s.a(x)), s.w).relu()), 16),
    # both write the same 8 products
    "addmm of activations": Program(lambda s, x: torch.addmm(x[:, :4], F.relu(s.a(x)), F.relu(s.b(x)).t()), 8),
    # c·w in the encoder and in the decoder is c²
    "decoder is the transposed encoder": Program(lambda s, x: F.linear(F.relu(F.linear(x, s.v)), s.v.t()), 0),
    "transposed by matmul": Program(lambda s, x: F.relu(x @ s.u) @ s.u.T, 0),
    "weight also in the output": Program(lambda s, x: s.c(F.relu(F.linear(x, s.v))) + s.v.sum(), 0),
    # one factor, which the norm divides out
    "weight divided by its norm": Program(lambda s, x: s.c(F.relu(F.linear(x, s.v / s.v.norm()))), 1),
    "a column of the weight is the bias": Program(lambda s, x: s.c(F.relu(F.linear(x, s.v, s.v[:, 0]))), 8),
    "one bias for two layers": Program(lambda s, x: s.c(F.relu(F.linear(F.relu(F.linear(x, s.v, s.g)), s.w, s.g))), 8),
    "one value as bias of all channels": Program(lambda s, x: s.c(F.relu(F.linear(x, s.v) + s.one)), 1),
    # 8 of the layer, and the factor that is theirs
    "one learned factor for all channels": Program(lambda s, x: s.c(F.relu(s.a(x)) * s.one), 9),
    "a learned factor per channel": Program(lambda s, x: s.c(F.relu(s.a(x)) * s.g), 16),
    "γ also in the output": Program(lambda s, x: s.c(F.relu(s.bn(s.a(x)))) + s.bn.weight.sum(), 0, H_absorbed=8),
    # γ, β and the row in front scale together, with the mean
    "running mean also added": Program(
        lambda s, x: s.c(F.relu(s.bn(s.a(x))) + s.bn.running_mean), 0, H_absorbed=8, derivatives=False
    ),
    # the rows of both layers share running statistics
    "one BatchNorm twice": Program(lambda s, x: s.c(F.relu(s.bn(s.f(F.relu(s.bn(s.a(x))))))), 8, H_absorbed=8),
    # 4 in front; with them γ, so that neither norm sees a change; each norm absorbs 4 rows
    "one InstanceNorm behind one weight, twice": Program(
        lambda s, x: s.o(F.relu(s.inorm(s.depthwise(F.relu(s.inorm(s.depthwise(F.relu(s.k(x)))))))).flatten(1)),
        4,
        IMAGES,
        H_absorbed=8,
    ),
    "a bias with more dimensions": Program(lambda s, x: s.o(F.relu(s.k(x) + s.bias5)[:, 0].flatten(1)), 4, IMAGES),
    "a factor with more dimensions": Program(lambda s, x: s.o(F.relu(s.k(x) * s.bias5)[:, 0].flatten(1)), 8, IMAGES),
    "an embedding that is also the output": Program(lambda s, x: F.linear(s.e((x > 0).long().sum(1)), s.e.weight), 0),
}

# Values that are chosen, compared, rounded or read --------------------------------------------------------------------

CHOICES = {
    "rounded by a cast": Program(
        lambda s, x: s.c((F.relu(s.a(x)) * 4).to(torch.int32).to(torch.float64)), 0, derivatives=False
    ),
    "a sum of whole numbers": Program(
        lambda s, x: s.o(
            (10 * F.relu(s.k(x))).sum((2, 3), dtype=torch.long, keepdim=True).double().expand(-1, -1, 3, 3).flatten(1)
        ),
        0,
        IMAGES,
        derivatives=False,
    ),
    "used as an index": Program(
        lambda s, x: s.c(s.e((F.relu(s.a(x)).amax(-1) * 3).clamp(0, 8).to(torch.long))), 8, derivatives=False
    ),
    "filled with 0": Program(lambda s, x: s.c(F.relu(s.a(x)).masked_fill(x[:, :1] > 1, 0)), 8),
    "filled with 0 in place": Program(lambda s, x: s.c(s.a(x).masked_fill_(x[:, :1] > 1, 0).relu()), 8),
    "filled with 1": Program(lambda s, x: s.c(F.relu(s.a(x)).masked_fill(x[:, :1] > 1, 1)), 0),
    "filled with 0 where another layer is large": Program(
        lambda s, x: s.c(F.relu(s.a(x)).masked_fill(s.b(x) > 1, 0)), 8, derivatives=False
    ),
    "0 where another layer is negative": Program(
        lambda s, x: s.c(torch.where(s.b(x) > 0, s.a(x), 0)), 16, derivatives=False
    ),
    "0 where it is positive": Program(lambda s, x: s.c(torch.where(s.a(x) > 0, 0.0, s.a(x))), 8),
    "0 where it is not, as a method": Program(lambda s, x: s.c(s.a(x).where(s.b(x) > 0, 0)), 16, derivatives=False),
    "1 where it is negative": Program(lambda s, x: s.c(torch.where(s.a(x) > 0, s.a(x), 1)), 0),
    "a leaky ReLU by hand": Program(lambda s, x: s.c(torch.where((h := s.a(x)) > 0, h, 0.1 * h)), 8),
    "a leaky ReLU by hand, as a method": Program(lambda s, x: s.c((h := s.a(x)).where(h > 0, -h)), 8),
    "a leaky ReLU that is shifted": Program(lambda s, x: s.c(torch.where((h := s.a(x)) > 0, h, 0.1 * h + x[:, :1])), 0),
    "a constant or a layer": Program(lambda s, x: s.c(torch.where(s.a(x) > 0, x[:, :1].expand(-1, 8), s.a(x))), 0),
    "one layer or the other": Program(lambda s, x: s.c(torch.where(x[:, :1] > 0, s.a(x), s.b(x))), 8),
    "a mask with more dimensions": Program(lambda s, x: s.c(torch.where(x[:, :1] > 0, F.relu(s.a(x[0])), 0)[:, :8]), 8),
    "one layer larger than the other": Program(
        lambda s, x: s.c(torch.where(s.a(x) > s.b(x), s.a(x), 0)), 8, derivatives=False
    ),
    "signs as numbers": Program(lambda s, x: s.c((s.a(x) > 0).to(torch.float64)), 8, derivatives=False),
    "x > 0.1": Program(lambda s, x: s.c((h := s.a(x)) * (h > 0.1)), 0, derivatives=False),
    "a number made of detached weights": Program(
        lambda s, x: s.c(F.relu(s.a(x))) * float(s.a.state_dict()["weight"].norm()), 0, derivatives=False
    ),
    # one factor, which comes back from the norm and from `c`
    "a norm of detached weights": Program(
        lambda s, x: s.c(F.relu(s.a(x))) * s.a.state_dict()["weight"].norm(), 1, derivatives=False
    ),
    # 8 behind the norm; the rows in front have one scale, which `c` takes back
    "a constant made of a statistic": Program(
        lambda s, x: s.c(F.relu(s.bn(s.a(x)))) * torch.rsqrt(s.bn.running_var + 1e-30).sum(),
        8,
        H_absorbed=1,
        derivatives=False,
    ),
    "a mask of rows": Program(lambda s, x: s.c(F.relu(s.a(x))[x[:, 0] > -9]), 8),
    "places of maxima": Program(
        lambda s, x: s.c(
            (h := F.relu(s.a(x)))
            * (h.unflatten(1, (4, 2)).max(2, keepdim=True).indices == 0).flatten(1).repeat_interleave(2, 1)
        ),
        4,
        derivatives=False,
    ),
    "a branch on the batch": Program(lambda s, x: s.c(F.relu(s.a(x)) if len(x) < 9 else s.a(x).tanh()), 8),
    "read by numpy": Program(
        lambda s, x: s.c(F.relu(s.a(x)) * float(s.b(x).detach().numpy().max())), 8, derivatives=False
    ),
}

# Products -------------------------------------------------------------------------------------------------------------

PRODUCTS = {
    "a buffer from the left": Program(lambda s, x: s.c(s.near @ F.relu(s.a(x))), 8),
    # a matrix of the data mixes all units
    "the data from the right": Program(lambda s, x: s.d(F.relu(s.a(x)) @ F.pad(x @ x.mT, (0, 4, 0, 4))), 1),
    "the data over units": Program(lambda s, x: s.head(F.pad(x @ x.mT, (0, 4)) @ F.relu(s.a(x)).mT), 1),
    "a graph convolution": Program(lambda s, x: s.near @ s.c(F.relu(s.near @ s.a(x))), 8),
    "a graph convolution by mm": Program(lambda s, x: s.near.mm(s.c(F.relu(s.near.mm(s.a(x))))), 8),
    "a graph convolution by bmm": Program(
        lambda s, x: torch.bmm(s.near[None], s.c(F.relu(torch.bmm(s.near[None], s.a(x)[None]))))[0], 8
    ),
    # a gate has a scale of its own
    "gate by hand": Program(lambda s, x: s.pair((h := s.a(x))[:, :4] * h[:, 4:]), 8),
    "one unit times all inputs": Program(
        lambda s, x: s.w1(torch.cat([F.relu(s.m(x)) * x, F.relu(s.n(x)) * x], -1)[..., 1:2]), 2
    ),
    "x * x": Program(lambda s, x: s.c((h := s.a(x)) * h), 8),
    "x ** 2": Program(lambda s, x: s.c(s.a(x) ** 2), 8),
    "1 / x": Program(lambda s, x: s.c(1.0 / (s.a(x).abs())), 8),
    "divided by its sum": Program(lambda s, x: s.c((h := s.a(x)) / h.abs().sum()), 1),
    "x / (1 + |x|)": Program(lambda s, x: s.c((h := s.a(x)) / (1 + h.abs().sum())), 0),
    "torch.add(x, 2, y)": Program(lambda s, x: s.c(torch.add(F.relu(s.a(x)), F.relu(s.b(x)), alpha=2)), 8),
    "x.sub(2, y)": Program(lambda s, x: s.c(F.relu(s.a(x)).sub(F.relu(s.b(x)), alpha=2)), 8),
}
