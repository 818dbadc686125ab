"""One scale per channel that can move from the layer that writes the channels into all layers that read them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from torch import Tensor

from gspace.analysis.result import aligned, starred


class Side(NamedTuple):
    """Entries of a parameter that scale with the channels of a mapping: p[slice] + offset is multiplied by c^exponent.

    Attributes:
        parameter: Its name in the model.
        dim: The dimension along which the channels lie; 0 for a number.
        slice: Where, one slice per dimension; `slice(None)` is all of it.
        exponent: Power of the scale: 1 for a layer that writes the channels, −1 for one that reads them.
        offset: 1 for a gain that is written 1 + w.
        channels: The channel of each position along `dim`; a head of values that several queries share repeats.
    """

    parameter: str
    dim: int
    slice: tuple[slice, ...]
    exponent: float
    offset: float
    channels: range | tuple[int, ...]

    def __str__(self) -> str:
        at = ", ".join(":" if s == slice(None) else f"{s.start}:{s.stop}" for s in self.slice)
        return f"{self.parameter}[{at}]^{self.exponent:+g} along {self.dim}"


def multiply_(p: Tensor, side: Side, log: Tensor) -> None:
    """Multiplies p[slice] + offset by e^(exponent · log) of its channels, in place."""
    factor = (side.exponent * log[list(side.channels)]).exp().to(p.device)
    part = p[side.slice]
    factor = factor.reshape([-1 if d == side.dim else 1 for d in range(p.dim())])
    part.copy_((part + side.offset) * factor - side.offset)


class Hook(NamedTuple):
    """Where an activation with these channels can be seen: the first input, or the output, of a module."""

    module: str
    where: Literal["input", "output"]


@dataclass(frozen=True)
class Mapping:
    """A scale per channel. Multiply the sources by it and divide the sinks: the function of the model does not change.

    Attributes:
        smooth_layer: The layer whose output channels carry the scale: a module, or a parameter that is no module's
            `weight`. Where several write the same channels (a residual stream), the first of `writers`.
        balance_layers: All layers that read these channels.
        size: Number of channels.
        kind: "norm" (a norm's gain), "attention" (values → output), "query-key", "gate", "relu", or "linear" (nothing
            in between).
        sources: What is multiplied.
        sinks: What is divided.
        hook: Where a statistic of the activation is taken; None if no module sees it.
        writers: All layers that write these channels.
        units: Their numbers in the analysis.
    """

    smooth_layer: str
    balance_layers: tuple[str, ...]
    size: int
    kind: str
    sources: tuple[Side, ...] = field(repr=False)
    sinks: tuple[Side, ...] = field(repr=False)
    hook: Hook | None = field(repr=False)
    writers: tuple[str, ...] = field(repr=False)
    units: range | tuple[int, ...] = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, fit for JSON."""
        return {
            "smooth_layer": self.smooth_layer,
            "balance_layers": list(self.balance_layers),
            "size": self.size,
            "kind": self.kind,
            "writers": list(self.writers),
            "hook": None if self.hook is None else list(self.hook),
            "sources": [_plain(side) for side in self.sources],
            "sinks": [_plain(side) for side in self.sinks],
        }


class Mappings(list[Mapping]):
    """The mappings of a model; printed, those that repeat from layer to layer are one line."""

    def __str__(self) -> str:
        if not self:
            return "no mappings: no scale can move between layers of this model"
        found: dict[tuple[Any, ...], list[Mapping]] = {}
        for m in self:
            names = m.writers, m.balance_layers
            alike = m.kind, m.size, *(starred(n) if any(map(str.isalpha, "".join(n))) else n for n in names)
            found.setdefault(alike, []).append(m)
        rows = [("channels", "kind", "smooth", "balance")]
        for (kind, size, writers, readers), same in found.items():
            if len(same) == 1:
                writers, readers = same[0].writers, same[0].balance_layers
            times = f" × {len(same)}" if len(same) > 1 else ""
            rows.append((f"{size}{times}", kind, joined(writers), joined(readers)))
        return "\n".join(aligned(rows, limit=110))


def joined(names: Sequence[str]) -> str:
    """Names with their common path written once.

    >>> joined(["layers.0.mlp.gate", "layers.0.mlp.up"])
    'layers.0.mlp.{gate, up}'
    """
    if len(names) == 1:
        return names[0]
    shared = common([name.split(".")[:-1] for name in names])
    rest = [".".join(name.split(".")[shared:]) for name in names]
    return ".".join([*names[0].split(".")[:shared], "{" + ", ".join(rest) + "}"])


def common(paths: Sequence[Sequence[str]]) -> int:
    """How many parts these paths have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))


def _plain(side: Side) -> dict[str, Any]:
    ends = [[s.start, s.stop] for s in side.slice]
    return {**side._asdict(), "slice": ends, "channels": list(side.channels)}
