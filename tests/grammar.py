"""Random networks from a small grammar: layers, pools, residual blocks, concatenations, splits and repeated modules.

A network is drawn as data (nested frozen classes, so that hypothesis can shrink it) and then built, on vectors
(linear layers) or on images (convolutions). Widths follow from what stands before: a block never has to fit.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky": nn.LeakyReLU,
    "prelu": nn.PReLU,
    "none": nn.Identity,
    "dropout": nn.Dropout,
    "relu6": nn.ReLU6,
    "tanh": nn.Tanh,
}
POOLS = {"max": nn.MaxPool2d, "avg": nn.AvgPool2d}


@dataclass(frozen=True)
class Layer:
    """A linear layer or convolution, BatchNorm if `norm`, activation."""

    width: int
    activation: str
    norm: bool = False
    bias: bool = True
    kernel: int = 1
    groups: int = 1


@dataclass(frozen=True)
class Pool:
    """Halves an image; nothing on vectors."""

    kind: str


@dataclass(frozen=True)
class Residual:
    """x + body(x), a projection where the width changes, then a ReLU."""

    body: tuple["Block", ...]


@dataclass(frozen=True)
class Concat:
    """Branches over one input, side by side."""

    branches: tuple[tuple["Block", ...], ...]


@dataclass(frozen=True)
class Split:
    """Half of the channels pass, the rest goes through the body."""

    body: tuple["Block", ...]


@dataclass(frozen=True)
class Repeat:
    """One layer of constant width applied twice."""

    layer: Layer


Block = Layer | Pool | Residual | Concat | Split | Repeat


@dataclass(frozen=True)
class Network:
    """Blocks on vectors or images, then a linear head (behind `flatten` or a mean over positions)."""

    kind: Literal["vector", "image"]
    blocks: tuple[Block, ...]
    flatten: bool
    residual: Literal["pin", "tie"]


CHANNELS, SIZE, OUTPUTS = 3, 5, 3


def networks(kind: Literal["vector", "image"]) -> st.SearchStrategy[Network]:
    layers = st.builds(
        Layer,
        width=st.integers(1, 6),
        activation=st.sampled_from(["relu"] * 4 + list(ACTIVATIONS)),
        norm=st.booleans(),
        bias=st.booleans(),
        kernel=st.sampled_from([1, 3]),
        groups=st.integers(1, 4),
    )

    def nest(blocks: st.SearchStrategy[Block]) -> st.SearchStrategy[Block]:
        body = st.lists(blocks, min_size=1, max_size=2).map(tuple)
        branches = st.lists(body, min_size=2, max_size=3).map(tuple)
        return st.one_of(st.builds(Residual, body), st.builds(Concat, branches), st.builds(Split, body))

    inner = st.recursive(st.one_of(layers, st.builds(Repeat, layers)), nest, max_leaves=5)
    outer = st.one_of(inner, st.builds(Pool, st.sampled_from(sorted(POOLS)))) if kind == "image" else inner
    blocks = st.lists(outer, min_size=2, max_size=5).map(tuple)
    return st.builds(Network, st.just(kind), blocks, st.booleans(), st.sampled_from(["pin", "tie"]))


class ResidualModule(nn.Module):
    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ConcatModule(nn.Module):
    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class SplitModule(nn.Module):
    def __init__(self, body: nn.Module, passing: int, rest: int) -> None:
        super().__init__()
        self.body, self.sizes = body, [passing, rest]

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.split(x, self.sizes, dim=1)
        return torch.cat((self.body(right), left), dim=1)


class RepeatModule(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


def _layer(layer: Layer, i: int, o: int, image: bool) -> nn.Module:
    groups = math.gcd(layer.groups, i, o)
    main = (
        nn.Conv2d(i, o, layer.kernel, padding=layer.kernel // 2, groups=groups, bias=layer.bias)
        if image
        else nn.Linear(i, o, bias=layer.bias)
    )
    norm = [(nn.BatchNorm2d if image else nn.BatchNorm1d)(o)] if layer.norm else []
    return nn.Sequential(main, *norm, ACTIVATIONS[layer.activation]())


def _build(block: Block, i: int, image: bool) -> tuple[nn.Module, int]:
    """The module of a block that reads `i` channels, and the number it writes."""
    match block:
        case Layer():
            return _layer(block, i, block.width, image), block.width
        case Pool():
            return POOLS[block.kind](2, ceil_mode=True), i
        case Residual():
            body, o = _chain(block.body, i, image)
            return ResidualModule(body, nn.Identity() if o == i else _layer(Layer(o, "none"), i, o, image)), o
        case Concat():
            built = [_chain(branch, i, image) for branch in block.branches]
            return ConcatModule([module for module, _ in built]), sum(o for _, o in built)
        case Split() if i > 1:
            body, o = _chain(block.body, i - i // 2, image)
            return SplitModule(body, i // 2, i - i // 2), o + i // 2
        case Split():
            return _chain(block.body, i, image)
        case Repeat():
            return RepeatModule(_layer(block.layer, i, i, image)), i


def _chain(blocks: tuple[Block, ...], i: int, image: bool) -> tuple[nn.Module, int]:
    modules = []
    for block in blocks:
        module, i = _build(block, i, image)
        modules.append(module)
    return nn.Sequential(*modules), i


def build(network: Network) -> nn.Module:
    image = network.kind == "image"
    body, channels = _chain(network.blocks, CHANNELS, image)
    if not image:
        return nn.Sequential(body, nn.Linear(channels, OUTPUTS))
    size = SIZE
    for block in network.blocks:
        size = math.ceil(size / 2) if isinstance(block, Pool) else size
    pool = [] if network.flatten else [nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(body, *pool, nn.Flatten(), nn.Linear(channels * (size**2 if network.flatten else 1), OUTPUTS))


def shape(network: Network) -> tuple[int, ...]:
    return (CHANNELS, SIZE, SIZE) if network.kind == "image" else (CHANNELS,)
