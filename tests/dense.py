"""Networks small enough to be written out path by path, and torch's optimizers acting on path values.

`SMALL` are the cases of every test against the definition; H and m − H are derived by hand beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import gspace
import zoo
from gspace.optim.skeleton import build_skeleton
from gspace.paths.explicit import Basis, Update, Wiring, as_function, basis_paths, wire


@dataclass(frozen=True)
class Small:
    """One small network.

    Attributes:
        shape: Shape of an input, without the batch.
        dim: m − H, m counting the weights that are edges.
        paths: What the enumeration must give, checked by running the network with weights in {0, 1}: its paths exactly
            ("exact"), its paths and sequences that are none ("more"), or pieces of paths, which cannot be checked this
            way, because ground lies inside or an operation is not a sum ("pieces").
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    H: int
    dim: int
    residual: Literal["pin", "tie"] = "pin"
    paths: Literal["exact", "more", "pieces"] = "exact"


class Residual(nn.Module):
    """A stem, two residual blocks of different widths, a head; linear layers."""

    def __init__(self) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.stem, self.head = linear(2, 2), linear(2, 2)
        self.up1, self.down1, self.up2, self.down2 = linear(2, 3), linear(3, 2), linear(2, 1), linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.down1(self.up1(x).relu())).relu()
        x = (x + self.down2(self.up2(x).relu())).relu()
        return self.head(x)


class ConvResidual(nn.Module):
    """Biased convolutions, a projection shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv1, self.conv2 = nn.Conv1d(1, 2, 2), nn.Conv1d(2, 2, 2, padding=1), nn.Conv1d(2, 2, 2)
        self.shortcut, self.head = nn.Conv1d(2, 2, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (self.shortcut(x) + self.conv2(self.conv1(x).relu())).relu()
        return self.head(x.mean(-1))


class Concat(nn.Module):
    """A dense block: the second layer's channels are appended to the first's; one is dropped by a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x).relu()
        return self.c(torch.cat([a, self.b(a).relu()], -1)[..., 1:])


class Shared(nn.Module):
    """One layer used twice on a residual stream: paths with squares."""

    def __init__(self) -> None:
        super().__init__()
        linear = partial(nn.Linear, 2, 2, bias=False)
        self.stem, self.shared, self.head = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = x + self.shared(x).relu()
        x = x + self.shared(x).relu()
        return self.head(x)


class Recurrent(Shared):
    """The same without the stream: the layer cannot be skipped, but its units do not show it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head(self.shared(self.shared(x).relu()).relu())


class Loop(Shared):
    """The shared layer on both sides of another: basis paths with squares."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.stem(x).relu()).relu()
        return self.head(self.shared(self.between(x).relu()).relu())


class Streams(nn.Module):
    """Two activations that are read one by one before an addition ties them."""

    def __init__(self) -> None:
        super().__init__()
        linear = partial(nn.Linear, 2, 2, bias=False)
        self.a, self.b, self.of_a, self.of_b, self.of_sum = linear(), linear(), linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).relu(), self.b(x).relu()
        return torch.cat([self.of_a(a), self.of_b(b), self.of_sum(a + b)], 1)


class Experts(nn.Module):
    """A stem, and two experts whose weights lie in one tensor, first (expert, out, in), then (expert, in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 3, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(2, 2, 3)), nn.Parameter(torch.randn(2, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bi,eoi->ebo", self.stem(x).relu(), self.up).relu()
        return (hidden @ self.down).sum(0)


def grouped() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(2, 4, 2, groups=2),
        nn.ReLU(),
        nn.Conv1d(4, 2, 2, groups=2, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


def transposed() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.ReLU(), nn.ConvTranspose2d(2, 3, 2, groups=1), nn.ReLU(), nn.Conv2d(3, 1, 1)
    )


def depthwise() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 2, groups=3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 1)
    )


SMALL = (
    # 6 + 2 + 5 = 13; m = 24 + 12 + 10 + 15 = 61
    Small("mlp", partial(zoo.mlp, 4, 6, 2, 5, 3, bias=False), (4,), H=13, dim=48),
    # 2 + 6 = 8; m = 4 + 12 + 18 = 34
    Small("mlp-wide", partial(zoo.mlp, 2, 2, 6, 3, bias=False), (2,), H=8, dim=26),
    # 4 + 3 = 7; m = (12 + 4) + (12 + 3) + (6 + 2) = 39
    Small("mlp-bias", partial(zoo.mlp, 3, 4, 3, 2), (3,), H=7, dim=32),
    # 4 + 2 = 6; m = (4·1·2 + 4) + 2·2·2 + (4·2 + 2) = 30
    Small("grouped", grouped, (2, 4), H=6, dim=24),
    # 2 + 3 = 5; m = (2·4 + 2) + (2·3·4 + 3) + (3 + 1) = 41
    Small("transposed", transposed, (1, 3, 3), H=5, dim=36),
    # 3 + 3 = 6; m = (6 + 3) + (3·4 + 3) + (6 + 2) = 32; the largest entry of a pool is not a sum of paths
    Small("depthwise", depthwise, (2, 3, 3), H=6, dim=26, paths="pieces"),
    # 3 + 2·2 = 7; m = 6 + 12 + 4 = 22
    Small("experts", Experts, (2,), H=7, dim=15),
    # 4 + 2 = 6; m = (12 + 4) + (8 + 2) + (10 + 2) = 38; unit 1 is read by b alone
    Small("concat", Concat, (3,), H=6, dim=32),
    # Inside the blocks: 3 + 1; m = 4 + 6 + 6 + 2 + 2 + 4 = 24
    Small("residual-pin", Residual, (2,), H=4, dim=20, paths="pieces"),
    # and the stream: 2
    Small("residual-tie", Residual, (2,), H=6, dim=18, residual="tie"),
    # Stem 2, inside 2; m = (4 + 2) + (8 + 2) + (8 + 2) + (4 + 2) + (4 + 2) = 38
    Small("conv-residual-pin", ConvResidual, (1, 4), H=4, dim=34, paths="pieces"),
    # and the stream behind the projection: 2
    Small("conv-residual-tie", ConvResidual, (1, 4), H=6, dim=32, residual="tie"),
    # The stream: 2; m = 12
    Small("shared", Shared, (2,), H=2, dim=10, residual="tie"),
    Small("recurrent", Recurrent, (2,), H=2, dim=10, paths="more"),
    # 2 in front of the shared layer, 2 behind it; m = 16
    Small("loop", Loop, (2,), H=4, dim=12, paths="more"),
    # The tied streams: 2; m = 20
    Small("streams", Streams, (2,), H=2, dim=18, residual="tie", paths="more"),
    # 3 + 2 = 5; m = (6 + 3) + (6 + 2) + (4 + 2) = 23; the 2 slopes are no edges
    Small("prelu", partial(zoo.mlp, 2, 3, 2, 2, activation=nn.PReLU), (2,), H=5, dim=18, paths="pieces"),
)


BY_NAME = {case.name: case for case in SMALL}


@dataclass(frozen=True)
class Explicit:
    """A small network in float64, its weights one by one, its basis paths, a batch and a loss.

    Attributes:
        weights: The weight vector of `basis.wiring`, `(m,)`.
        loss: ℓ as a function of a weight vector.
    """

    model: nn.Module
    analysis: gspace.Analysis
    wiring: Wiring
    basis: Basis
    weights: Tensor
    x: Tensor
    network: Callable[..., Any]
    loss: Callable[[Tensor], Tensor]


def explicit(case: Small, seed: int = 0, choice: Literal["aligned", "pivoted"] = "pivoted") -> Explicit:
    """The network of `case` in float64, with weights of both signs that keep away from 0."""
    generator = torch.Generator().manual_seed(seed)
    model = case.build().double()
    with torch.no_grad():
        for p in model.parameters():
            sign = torch.rand(p.shape, generator=generator).gt(0.4) * 2 - 1
            p.copy_(sign * (0.3 + torch.rand(p.shape, generator=generator)))
    x = torch.randn(16, *case.shape, generator=generator, dtype=torch.float64)
    analysis = gspace.analyze(model, x, residual=case.residual)
    parameters = dict(model.named_parameters())
    wiring = wire(analysis.transparent, parameters)
    basis = basis_paths(build_skeleton(model, analysis, choice=choice), parameters)
    network = as_function(model, basis.wiring)
    target = torch.randn(model(x).shape, generator=generator, dtype=torch.float64)

    def loss(weights: Tensor) -> Tensor:
        return (network(weights, x) - target).square().mean()

    return Explicit(model, analysis, wiring, basis, basis.wiring.flatten(parameters), x, network, loss)


def scaled(wiring: Wiring, weights: Tensor, generator: torch.Generator) -> Tensor:
    """g_c(w), c = e^N(0,1)."""
    c = torch.randn(wiring.H + 1, generator=generator, dtype=weights.dtype).exp()
    c[0] = 1
    return weights * c[wiring.head] / c[wiring.tail]


def sgd(lr: float) -> Update:
    """Plain gradient descent on path values."""
    return lambda v, path_grad: v - lr * path_grad


class OnPaths:
    """An optimizer of torch acting on v, as the `update` of `dense_step` and `autograd_step`.

    Weight decay acts on the non-skeleton basis paths only.
    """

    def __init__(
        self, basis: Basis, optimizer: Callable[..., torch.optim.Optimizer], weight_decay: float = 0.0, **options: Any
    ) -> None:
        self.parts = [~basis.on_skeleton, basis.on_skeleton]
        self.v = [torch.zeros(int(part.sum()), dtype=torch.float64, requires_grad=True) for part in self.parts]
        decay = {"weight_decay": weight_decay}
        groups = [{"params": [self.v[0]], **decay}, {"params": [self.v[1]], "weight_decay": 0.0}]
        self.optimizer = optimizer(groups, **options)

    def __call__(self, v: Tensor, path_grad: Tensor) -> Tensor:
        new = v.clone()
        with torch.no_grad():
            for parameter, part in zip(self.v, self.parts, strict=True):
                parameter.copy_(v[part])
                parameter.grad = path_grad[part].clone()
            self.optimizer.step()
            for parameter, part in zip(self.v, self.parts, strict=True):
                new[part] = parameter
        return new
