"""The two ways in which sums over paths are computed: as numbers, and, where p is large, as logarithms.

Each has the same few methods. A recorded step of a network (`record`) is the name of one, what it reads, and constants.
Everything is done in float64, so that weights rescaled by 1e±6 keep all their digits, squared and in float32 too.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gspace.sharding import whole

LARGE = 4  # beyond this p, powers of weights of one network no longer fit one exponent per tensor
NOTHING = -1e30  # an exponent, or a logarithm, of 0
Source = Tensor | tuple[nn.Module, str]


class Power(NamedTuple):
    """|t|^p of a tensor, or a sum of such: values · 2^exponent, nowhere negative.

    Attributes:
        values: Any shape.
        exponent: A scalar, which is a constant to autograd: the product does not depend on it. None stands for 0.
    """

    values: Tensor
    exponent: Tensor | None = None

    def at(self, exponent: Tensor | None) -> Tensor:
        """The values that go with another exponent."""
        if exponent is self.exponent or exponent is None:
            return self.values
        return torch.ldexp(self.values, -exponent if self.exponent is None else self.exponent - exponent)

    def renormalized(self) -> "Power":
        """The same number with its largest entry in [½, 1)."""
        if not self.values.numel():
            return self
        shift = torch.frexp(self.values.detach().amax()).exponent.double()
        return Power(torch.ldexp(self.values, -shift), shift if self.exponent is None else self.exponent + shift)


class Slot(NamedTuple):
    """Stands for the k-th input of a step among its arguments."""

    k: int


def fetched(source: Source) -> Tensor:
    """A parameter or buffer as it is now, or a constant."""
    if isinstance(source, Tensor):
        return source
    module, name = source
    found: Tensor | None = module._parameters.get(name)
    found = module._buffers.get(name) if found is None else found
    if found is None:
        raise RuntimeError(f"{type(module).__name__} no longer has {name!r}: the path sum is of another model")
    return found


def _filled(args: Mapping[str, Any], given: Sequence[Any]) -> dict[str, Any]:
    def fill(value: Any) -> Any:
        if isinstance(value, Slot):
            return given[value.k]
        return [fill(v) for v in value] if isinstance(value, list) else value

    return {name: fill(value) for name, value in args.items()}


def power(t: Tensor, p: float) -> Tensor:
    """|t|^p in float64, of all of t if it is sharded."""
    t = whole(t)
    wide = t.abs().double() if t.is_complex() else t.double()
    if p == 2 and wide is not t and not wide.requires_grad:
        return wide.square_()
    return wide.square() if p == 2 else wide.abs().pow(p) if p != 1 else wide.abs()


class Numbers:
    """Sums as numbers with one exponent per tensor, renormalized every few layers: any depth fits."""

    def __init__(self, p: float, device: torch.device, powers: Mapping[int, Power]) -> None:
        self.p, self.device, self.powers = p, device, powers

    def leaf(self, source: Source, zero: bool) -> Power:
        t = fetched(source)
        known = self.powers.get(id(t))
        if known is not None:
            return known
        values = power(t.to(self.device), self.p)
        return Power(values, values.new_full((), NOTHING) if zero else None)  # zeros hide nothing small beside them

    def ones(self, shape: Sequence[int]) -> Power:
        return Power(torch.ones(shape, dtype=torch.float64, device=self.device))

    def deviation(self, source: Source, eps: float) -> Power:
        """1/σ^p of a variance."""
        return Power((fetched(source).to(self.device, torch.float64) + eps).pow(-self.p / 2))

    def moved(self, *given: Any) -> Power:
        """The operation itself, on values with one exponent."""
        *xs, name, args = given
        exponent = _common(xs)
        return Power(_function(name)(**_filled(args, [x.at(exponent) for x in xs])), exponent)

    def add(self, x: Power, y: Power) -> Power:
        exponent = _common((x, y))
        return Power(x.at(exponent) + y.at(exponent), exponent)

    def multiply(self, x: Power, y: Power) -> Power:
        return Power(x.values * y.values, _product(x, y))

    def inverse(self, x: Power) -> Power:
        return Power(1 / x.values, None if x.exponent is None else -x.exponent)

    def matmul(self, x: Power, y: Power) -> Power:
        return Power(x.values @ y.values, _product(x, y))

    def row(self, x: Power, y: Power, bias: Power | None = None) -> Power:
        """A linear layer of one row."""
        if bias is None:
            return self.matmul(x, y)
        if bias.exponent is x.exponent is y.exponent is None:
            return Power(torch.addmm(bias.values, x.values, y.values))
        return self.add(self.matmul(x, y), bias)

    def convolve(self, x: Power, w: Power, *options: Any) -> Power:
        return Power(torch.convolution(x.values, w.values, None, *options), _product(x, w))

    def sum(self, x: Power, dims: tuple[int, ...], keep: bool) -> Power:
        return x._replace(values=x.values.sum(dims, keep))

    def at_least_one(self, x: Power) -> Power:
        return Power(x.at(None if x.exponent is None else torch.zeros_like(x.exponent)).clamp(min=1))

    def renormalized(self, x: Power) -> Power:
        return x.renormalized()

    def total(self, *outputs: Power) -> Power:
        """The sum of all entries."""
        exponent = _common(outputs)
        values = [x.at(exponent).sum() for x in outputs]
        return Power(torch.stack(values).sum() if len(values) > 1 else values[0], exponent)


class Logs:
    """Sums as logarithms of every entry: nothing leaves the range of numbers, at any p. Slow, for large p."""

    def __init__(self, p: float, device: torch.device, powers: Mapping[int, Power]) -> None:
        self.p, self.device, self.powers = p, device, powers

    def leaf(self, source: Source, zero: bool) -> Tensor:
        t = fetched(source)
        known = self.powers.get(id(t))
        if known is not None:
            return known.values.log().clamp(min=NOTHING) + math.log(2) * (
                0 if known.exponent is None else known.exponent
            )
        size = power(t.to(self.device), 1)
        return torch.where(size == 0, NOTHING, self.p * torch.where(size == 0, 1, size).log())

    def ones(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def deviation(self, source: Source, eps: float) -> Tensor:
        return -self.p / 2 * (fetched(source).to(self.device, torch.float64) + eps).log()

    def moved(self, *given: Any) -> Tensor:
        *xs, name, args = given
        kept = _function(name)(**_filled(args, [torch.ones_like(x) for x in xs]))  # 0 where it fills up
        return torch.where(kept == 0, NOTHING, _function(name)(**_filled(args, xs)))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.logaddexp(x, y)

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def inverse(self, x: Tensor) -> Tensor:
        return -x

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """Column by column, so that no product of three sizes is ever in memory at once."""
        if y.dim() == 1:
            return (x + y).logsumexp(-1)
        columns = [(x + (c.unsqueeze(-2) if x.dim() > 1 else c)).logsumexp(-1) for c in y.unbind(-1)]
        return torch.stack(columns, -1)

    def row(self, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.matmul(x, y) if bias is None else self.add(self.matmul(x, y), bias)

    def convolve(
        self,
        x: Tensor,
        w: Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> Tensor:
        """Windows of the input, one output channel after the other."""
        dims = w.dim() - 2
        around = list(zip(padding, padding, strict=True))
        if transposed:  # the convolution of an input that is spread out, with the kernel turned around
            spread = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)]
            wide = x.new_full((*x.shape[:2], *spread), NOTHING)
            places: list[Any] = [slice(None, None, s) for s in (1, 1, *stride)]
            wide[tuple(places)] = x
            reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
            around = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
            w = w.flip(list(range(2, 2 + dims))).unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
            x, stride = wide, [1] * dims
        x = F.pad(x, [side for pair in reversed(around) for side in pair], value=NOTHING)
        for d, (k, s, gap) in enumerate(zip(w.shape[2:], stride, dilation, strict=True)):
            x = x.unfold(2 + d, (k - 1) * gap + 1, s)[..., ::gap]
        x = x.unflatten(1, (groups, -1))  # batch, group, in, places, taps
        per_group = len(w) // groups
        over = [2, *range(3 + dims, 3 + 2 * dims)]
        kernels = w.reshape(groups, per_group, -1, *[1] * dims, *w.shape[2:])
        return torch.stack([(x + kernels[:, o]).logsumexp(over) for o in range(per_group)], 2).flatten(1, 2)

    def sum(self, x: Tensor, dims: tuple[int, ...], keep: bool) -> Tensor:
        return x.logsumexp(dims, keep) if dims else x

    def at_least_one(self, x: Tensor) -> Tensor:
        return x.clamp(min=0)

    def renormalized(self, x: Tensor) -> Tensor:
        return x

    def total(self, *outputs: Tensor) -> Power:
        log = torch.cat([x.flatten() for x in outputs]).logsumexp(0)
        exponent = (log.detach() / math.log(2)).ceil()
        return Power(torch.where(log < NOTHING / 2, 0, (log - exponent * math.log(2)).exp()), exponent)


def _common(xs: Sequence[Power]) -> Tensor | None:
    found = [x.exponent for x in xs if x.exponent is not None]
    if not found:
        return None
    if len(found) < len(xs):
        found.append(torch.zeros_like(found[0]))
    return torch.stack(found).amax() if len(found) > 1 else found[0]


def _product(x: Power, y: Power) -> Tensor | None:
    if x.exponent is None or y.exponent is None:
        return x.exponent if y.exponent is None else y.exponent
    return x.exponent + y.exponent


def reshaped(t: Tensor, order: tuple[int, ...], sizes: tuple[int, ...], back: tuple[int, ...]) -> Tensor:
    t = t.permute(order) if order else t
    t = t.reshape(sizes) if t.shape != torch.Size(sizes) else t
    return t.permute(back) if back else t


def strided(t: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    t = t.contiguous()
    return t.as_strided(sizes, strides, offset + t.storage_offset())


def written(base: Tensor, t: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    whole = base.contiguous().clone()
    whole.as_strided(sizes, strides, offset).copy_(t)
    return whole


@functools.cache
def _function(name: str) -> Any:
    """An operation of torch ("aten.flip.default"), or one of those above. By name, so that a graph can be pickled."""
    found: Any = {"reshaped": reshaped, "strided": strided, "written": written}.get(name)
    return found or functools.reduce(getattr, name.split("."), torch.ops)
