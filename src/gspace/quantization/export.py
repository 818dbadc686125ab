"""Mappings as llm-compressor reads them, plain data: nothing of it is imported.

Both modifiers divide the smooth layer's output and multiply `weight` of the balance layers along their inputs, one
factor per channel. What they cannot express is left out: heads of values that several queries share, queries against
keys, experts in one parameter, layers stored (in, out), channels that several layers write.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from gspace.analysis import unwrap
from gspace.quantization.mapping import Mapping, Side


def awq(model: nn.Module, mappings: Iterable[Mapping]) -> list[dict[str, Any]]:
    """Arguments of `AWQMapping`, one dict per mapping that AWQ can apply.

    >>> from gspace import mappings
    >>> net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> awq(net, mappings(net))[0]
    {'smooth_layer': '0', 'balance_layers': ['1']}
    """
    return [
        {"smooth_layer": m.smooth_layer, "balance_layers": list(m.balance_layers)}
        for m in mappings
        if _fits(unwrap(model), m, fused=True)
    ]


def smoothquant(model: nn.Module, mappings: Iterable[Mapping]) -> list[list[Any]]:
    """Entries `[balance_layers, smooth_layer]` of `SmoothQuantModifier(mappings=…)`, for norms.

    Its statistic is the smooth layer's output, which is what the balance layers read only behind a norm.

    >>> import gspace, torch
    >>> net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))
    >>> smoothquant(net, gspace.mappings(net, torch.randn(2, 4)))
    [[['1'], '0']]
    """
    return [
        [list(m.balance_layers), m.smooth_layer]
        for m in mappings
        if m.kind == "norm" and _fits(unwrap(model), m, fused=False)
    ]


def _fits(model: nn.Module, m: Mapping, fused: bool) -> bool:
    modules = dict(model.named_modules())
    if m.kind == "query-key" or len(m.writers) > 1 or not {m.smooth_layer, *m.balance_layers} <= modules.keys():
        return False
    linear = all(isinstance(modules[name], nn.Linear) for name in m.balance_layers)
    read = all(_whole(s, 1, m.size) for s in m.sinks)
    return linear and read and all(_written(model, s, m.size, fused) for s in m.sources)


def _whole(side: Side, dim: int, size: int) -> bool:
    """All of the parameter, channel by channel, with the first power."""
    everything = all(s == slice(None) for s in side.slice)
    return everything and side.dim == dim and abs(side.exponent) == 1 and side.channels == range(size)


def _written(model: nn.Module, side: Side, size: int, fused: bool) -> bool:
    if _whole(side, 0, size):
        return True
    shape = model.get_parameter(side.parameter).shape
    last = (slice(shape[0] - size, shape[0]), *[slice(None)] * (len(shape) - 1))
    return fused and len(shape) > 1 and side[1:4] == (0, last, 1) and side.channels == range(size)
