"""Mappings as llm-compressor reads them, plain data: nothing of it is imported.

Both modifiers divide the smooth layer's output and multiply `weight` of the balance layers along their inputs, one
factor per channel. What they cannot express is left out, and `left_out` of the result says why.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from gspace.analysis import unwrap
from gspace.quantization.mapping import Mapping, Mappings, Side


class Exported(list[Any]):
    """Entries of a quantizer's table. `left_out` are the mappings that it has no form for, by reason."""

    def __init__(self, entries: Iterable[Any] = (), left_out: dict[str, Mappings] | None = None) -> None:
        super().__init__(entries)
        self.left_out = left_out or {}


def awq(model: nn.Module, mappings: Iterable[Mapping]) -> Exported:
    """Arguments of `AWQMapping`, one dict per mapping that AWQ can apply.

    >>> from gspace import mappings
    >>> net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> awq(net, mappings(net))[0]
    {'smooth_layer': '0', 'balance_layers': ['1']}
    """
    return _export(
        lambda m: {"smooth_layer": m.smooth_layer, "balance_layers": list(m.balance_layers)},
        mappings,
        lambda m: _misfit(unwrap(model), m),
    )


def smoothquant(model: nn.Module, mappings: Iterable[Mapping]) -> Exported:
    """Entries `[balance_layers, smooth_layer]` of `SmoothQuantModifier(mappings=…)`, for norms.

    Its statistic is the smooth layer's output, which is what the balance layers read only behind a norm.

    >>> import gspace
    >>> net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> table = smoothquant(net, gspace.mappings(net))
    >>> table, list(table.left_out)
    ([[['1'], '0']], ['no norm writes the channels'])
    """
    return _export(
        lambda m: [list(m.balance_layers), m.smooth_layer],
        mappings,
        lambda m: _misfit(unwrap(model), m) if m.kind == "norm" else "no norm writes the channels",
    )


def _export(entry: Callable[[Mapping], Any], mappings: Iterable[Mapping], misfit: Callable[[Mapping], str]) -> Exported:
    given = list(mappings)
    if not all(isinstance(m, Mapping) for m in given):
        raise TypeError("an export takes what gspace.mappings returns")
    every = [(m, misfit(m)) for m in given]
    reasons = dict.fromkeys(why for _, why in every if why)
    left_out = {reason: Mappings(m for m, why in every if why == reason) for reason in reasons}
    return Exported((entry(m) for m, why in every if not why), left_out)


def _misfit(model: nn.Module, m: Mapping) -> str:
    """Why no modifier can apply a mapping; nothing if one can."""
    modules, sides = dict(model.named_modules()), (*m.sources, *m.sinks)
    linear = all(isinstance(modules.get(name), nn.Linear) for name in m.balance_layers)
    read = all(_whole(s, 1, m.size) for s in m.sinks)
    written = all(_whole(s, 0, m.size) or _last(model, s, m.size) for s in m.sources)
    reasons = {
        "queries are scaled against keys": m.kind == "query-key",
        "several layers write the channels": len(m.writers) > 1,
        "a parameter is no module's weight": not {m.smooth_layer, *m.balance_layers} <= modules.keys(),
        "a layer that reads the channels is no nn.Linear": not linear,
        "a layer scales by a power of the factor": any(abs(s.exponent) != 1 for s in sides),
        "several rows or columns share a channel": any(len(set(s.channels)) < len(s.channels) for s in sides),
        "the channels are not the rows, or not the columns, of a whole layer": not (read and written),
    }
    return next((why for why, applies in reasons.items() if applies), "")


def _whole(side: Side, dim: int, size: int) -> bool:
    """All of the parameter, channel by channel."""
    everything = all(s == slice(None) for s in side.slice)
    return everything and side.dim == dim and side.channels == range(size)


def _last(model: nn.Module, side: Side, size: int) -> bool:
    """The last rows of a fused projection without a bias, channel by channel."""
    shape = model.get_parameter(side.parameter).shape
    if len(shape) < 2:
        return False
    last = (slice(shape[0] - size, shape[0]), *[slice(None)] * (len(shape) - 1))
    return side[1:4] == (0, last, 1) and side.channels == range(size)
