"""Small networks written out scalar by scalar: every path from an input (or ground) to an output, by plain loops.

An activation is an array of lists of paths; a path is its fixed factor and the weights on it, as (name, flat index).
Nothing here knows of the library: these are the definitions that sums over paths are tested against.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn

Step = tuple[str, int]
Path = tuple[float, tuple[Step, ...]]


def source(*shape: int) -> np.ndarray:
    """Inputs: one path of length 0 each."""
    return _filled(shape, lambda _: [(1.0, ())])


def _filled(shape: tuple[int, ...], paths: Callable[[tuple[int, ...]], list[Path]]) -> np.ndarray:
    out = np.empty(shape, dtype=object)
    for at in np.ndindex(*shape):
        out[at] = paths(at)
    return out


def through(paths: list[Path], *steps: Step, factor: float = 1.0) -> list[Path]:
    return [(f * factor, weights + steps) for f, weights in paths]


def linear(x: np.ndarray, name: str, layer: nn.Linear) -> np.ndarray:
    """`(in,)` → `(out,)`."""

    def paths(at: tuple[int, ...]) -> list[Path]:
        (o,) = at
        found = [p for i in range(len(x)) for p in through(x[i], (f"{name}.weight", o * len(x) + i))]
        return found + ([(1.0, ((f"{name}.bias", o),))] if layer.bias is not None else [])

    return _filled((layer.out_features,), paths)


def _window(
    at: tuple[int, ...], kernel: int, stride: int, padding: int, size: int
) -> Iterator[tuple[int, int, int, int]]:
    """Tap and input position of every entry of a window that lies inside."""
    for a, b in product(range(kernel), repeat=2):
        y, x = at[0] * stride - padding + a, at[1] * stride - padding + b
        if 0 <= y < size and 0 <= x < size:
            yield a, b, y, x


def conv(x: np.ndarray, name: str, layer: nn.Conv2d) -> np.ndarray:
    """`(in, n, n)` → `(out, n', n')`."""
    k, s, p, g = layer.kernel_size[0], layer.stride[0], int(layer.padding[0]), layer.groups
    n = (x.shape[1] + 2 * p - k) // s + 1
    inside, outside = x.shape[0] // g, layer.out_channels // g

    def paths(at: tuple[int, ...]) -> list[Path]:
        o, *where = at
        found = []
        for i in range(inside):
            for a, b, y, z in _window(tuple(where), k, s, p, x.shape[1]):
                step = (f"{name}.weight", ((o * inside + i) * k + a) * k + b)
                found += through(x[o // outside * inside + i, y, z], step)
        return found + ([(1.0, ((f"{name}.bias", o),))] if layer.bias is not None else [])

    return _filled((layer.out_channels, n, n), paths)


def pool(x: np.ndarray, kernel: int, stride: int, padding: int, share: Callable[[int], float]) -> np.ndarray:
    """Every entry of a window, with a factor that may depend on how many there are."""
    n = (x.shape[1] + 2 * padding - kernel) // stride + 1

    def paths(at: tuple[int, ...]) -> list[Path]:
        window = list(_window(at[1:], kernel, stride, padding, x.shape[1]))
        return [p for _, _, y, z in window for p in through(x[at[0], y, z], factor=share(len(window)))]

    return _filled((x.shape[0], n, n), paths)


def batch_norm(x: np.ndarray, name: str, layer: nn.BatchNorm2d) -> np.ndarray:
    """γ/σ·(x − mean) + β with the running statistics."""
    sigma = (layer.running_var + layer.eps).sqrt()

    def paths(at: tuple[int, ...]) -> list[Path]:
        c = at[0]
        entering = [*x[at], (-float(layer.running_mean[c]), ())]
        return [*through(entering, (f"{name}.weight", c), factor=float(1 / sigma[c])), (1.0, ((f"{name}.bias", c),))]

    return _filled(x.shape, paths)


def mean(x: np.ndarray) -> np.ndarray:
    """Over everything but the first dimension."""
    n = x[0].size
    return _filled((len(x),), lambda at: [p for paths in x[at[0]].flat for p in through(paths, factor=1 / n)])


def add(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return _filled(x.shape, lambda at: x[at] + y[at])


@dataclass(frozen=True)
class Enumerated:
    """All paths of a network and its weights."""

    paths: list[Path]
    weights: dict[str, Tensor]

    def total(self, p: float) -> Tensor:
        """Σ_paths |v|^p; differentiable."""
        flat = {name: w.reshape(-1) for name, w in self.weights.items()}
        values = [f * torch.stack([flat[n][i] for n, i in steps] or [torch.ones(())]).prod() for f, steps in self.paths]
        return torch.stack(values).abs().pow(p).sum()

    def kappa(self) -> dict[str, Tensor]:
        """Σ over paths and over the occurrences of a weight on them of the squared product of everything else."""
        squares = {name: w.detach().reshape(-1).square().tolist() for name, w in self.weights.items()}
        result = {name: torch.zeros(w.numel(), dtype=torch.float64) for name, w in self.weights.items()}
        for factor, steps in self.paths:
            for k, (name, index) in enumerate(steps):
                rest = [squares[n][i] for j, (n, i) in enumerate(steps) if j != k]
                result[name][index] += factor**2 * float(np.prod(rest))
        return {name: kappa.reshape(self.weights[name].shape) for name, kappa in result.items()}


def enumerated(model: nn.Module, outputs: np.ndarray) -> Enumerated:
    return Enumerated([path for paths in outputs.flat for path in paths], dict(model.named_parameters()))


# Networks ------------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A network that can write out its own paths; `shape` is that of one sample."""

    shape: tuple[int, ...]

    def unrolled(self) -> np.ndarray:
        raise NotImplementedError


class Mlp(Small):
    shape = (3,)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 3, bias=False), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu())

    def unrolled(self) -> np.ndarray:
        x = source(3)
        for name in "abc":
            x = linear(x, name, getattr(self, name))
        return x


class Cnn(Small):
    """Strided, padded and grouped convolutions, max pooling, average pooling whose border windows differ."""

    shape = (1, 5, 5)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 2, 2, padding=1), nn.Conv2d(2, 2, 2, groups=2, bias=False)
        self.max, self.average = nn.MaxPool2d(2, 2), nn.AvgPool2d(2, 2, 1)
        self.fair = nn.AvgPool2d(2, 1, 1, count_include_pad=False)
        self.c = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.max(self.a(x).relu())
        x = self.average(self.fair(self.b(x).relu()))
        return self.c(x.flatten(1))

    def unrolled(self) -> np.ndarray:
        x = pool(conv(source(1, 5, 5), "a", self.a), 2, 2, 0, lambda n: 1.0)
        x = pool(conv(x, "b", self.b), 2, 1, 1, lambda n: 1 / n)
        x = pool(x, 2, 2, 1, lambda n: 1 / 4)
        return linear(x.reshape(-1), "c", self.c)


class ResNet(Small):
    """A residual block with BatchNorm and a projection, then a block that uses one convolution twice."""

    shape = (1, 2, 2)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(1, 2, 1, bias=False), nn.BatchNorm2d(2)
        self.a, self.a_norm = nn.Conv2d(2, 2, 2, padding=1, stride=2), nn.BatchNorm2d(2)
        self.short = nn.Conv2d(2, 2, 1, bias=False)
        self.twice, self.c = nn.Conv2d(2, 2, 1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(x)).relu()
        x = (self.short(x) + self.a_norm(self.a(x)) / 2).relu()
        x = x + self.twice(self.twice(x).relu())
        return self.c(x.mean((2, 3)))

    def unrolled(self) -> np.ndarray:
        x = batch_norm(conv(source(1, 2, 2), "stem", self.stem), "stem_norm", self.stem_norm)
        inner = batch_norm(conv(x, "a", self.a), "a_norm", self.a_norm)
        half = _filled(inner.shape, lambda at: through(inner[at], factor=0.5))
        x = add(conv(x, "short", self.short), half)
        x = add(x, conv(conv(x, "twice", self.twice), "twice", self.twice))
        return linear(mean(x), "c", self.c)


SMALL: tuple[type[Small], ...] = (Mlp, Cnn, ResNet)
