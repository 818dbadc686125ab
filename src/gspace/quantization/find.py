"""Analysis → mappings: for each group of units, where every parameter scales with them.

A parameter scales with x[head] − x[tail], ids that are units or linear forms of units. Here this is turned round: for a
group of units, the boxes of each parameter in which they lie along one dimension, and the power with which they count.
"""

from collections.abc import Container, Iterator, Sequence
from collections.abc import Mapping as Table
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from gspace.analysis import Analysis, Edges, Inputs, analyze, analyzed, require_module, unwrap
from gspace.analysis.assemble import members
from gspace.devices import on_cpu
from gspace.optim.arguments import given, require_seen
from gspace.quantization.mapping import Hook, Mapping, Mappings, Side
from gspace.sharding import refuse_sharded

KINDS = ("attention", "gate", "relu")  # what a scale goes through, the first that applies


def mappings(
    model: nn.Module, example_input: Inputs | None = None, *, analysis: Analysis | None = None, **options: Any
) -> Mappings:
    """Every group of channels whose scale can move from the layer that writes them into those that read them, exactly.

    Args:
        model: Any module; on the meta device too. Names are those of the module inside of a wrapper (`DataParallel`).
        example_input: A batch the model accepts, or a list of several, as for `analyze`.
        analysis: What `analyze` has found, instead of an example.
        options: `residual`, `pin`, `modes` for `analyze`.

    Raises:
        ValueError: Weights that no example has used (experts, say): they may read a scale too.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> print(mappings(net))
    channels  kind  smooth  balance
    8         relu  0       2
    """
    found = analyzed(unwrap(model), analysis, {**options, **given(example_input)})
    require_seen(found)
    refuse_sharded(dict(model.named_parameters()), "a mapping")
    return on_cpu(_mappings)(unwrap(model), found)


def examined(model: nn.Module, example_input: Inputs | None, analysis: Analysis | None) -> tuple[nn.Module, Analysis]:
    """The model inside of wrappers, with whole parameters, and its analysis."""
    require_module(model)
    inner = unwrap(model)
    refuse_sharded(dict(inner.named_parameters()), "a mapping")
    return inner, analyze(inner, example_input) if analysis is None else analyzed(inner, analysis, {})


def _mappings(model: nn.Module, found: Analysis) -> Mappings:
    total = found.H + found.H_absorbed
    named = members(found.edges, found.H, total, found.forms).items()
    groups = [units for group, units in named if group.kind == "exact"]  # what a norm absorbs has its ε in the way
    member, place = torch.full((2, 1 + total), -1)
    for k, units in enumerate(groups):
        member[units], place[units] = k, torch.arange(len(units))
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules(remove_duplicate=False))
    boxes: list[list[tuple[Side, bool]]] = [[] for _ in groups]
    for e in found.edges:
        for k, side, reads in _boxes(e, tuple(parameters[e.name].shape), found, member, place):
            boxes[k].append((side, reads))
    made = [_mapping(modules, parameters, found, *group) for group in zip(groups, boxes, strict=True)]
    return Mappings(m for m in made if m is not None)


def _mapping(
    modules: Table[str, nn.Module],
    parameters: Table[str, Tensor],
    found: Analysis,
    units: Sequence[int],
    boxes: Sequence[tuple[Side, bool]],
) -> Mapping | None:
    sources, sinks = (tuple(side for side, _ in boxes if side.exponent * way > 0) for way in (1, -1))
    writers, readers = (
        tuple(dict.fromkeys(layer(s.parameter, parameters) for s in sides)) for sides in (sources, sinks)
    )
    if not writers or not readers:
        return None
    if not all(reads for side, reads in boxes if side.exponent < 0):
        kind = "query-key"
    elif all(parameters[s.parameter].dim() == 1 for s in sources):
        kind = "norm"
    else:
        kind = next((kind for kind in KINDS if units[0] in found.passes.get(kind, ())), "linear")
    hook = None if kind == "query-key" else _hook(modules, kind, writers, sinks, parameters)
    numbers = short(torch.tensor(units))
    return Mapping(writers[0], readers, len(units), kind, sources, sinks, hook, writers, numbers)


def layer(parameter: str, names: Container[str]) -> str:
    """The module whose weight or bias this is; a parameter of another name stands for itself."""
    module, _, leaf = parameter.rpartition(".")
    weight = leaf.replace("bias", "weight")
    if weight == "weight":
        return module or parameter
    whole = f"{module}.{weight}" if module else weight
    return whole if whole in names else parameter


def _hook(
    modules: Table[str, nn.Module], kind: str, writers: Sequence[str], sinks: Sequence[Side], names: Container[str]
) -> Hook | None:
    """The norm, which sees all tokens, or a reader, if possible one whose channels lie where torch puts them."""
    if kind == "norm" and len(writers) == 1 and writers[0] in modules:
        return Hook(writers[0], "output")
    seen = []
    for side in sinks:
        name = layer(side.parameter, names)
        module = modules.get(name)
        if module is None or (len(side.slice) < 2 and len(side.channels) == 1):  # a number scales any width
            continue
        grouped = isinstance(module, _ConvNd) and module.groups > 1
        depthwise = grouped and module.groups == module.in_channels == module.out_channels
        if (depthwise or not grouped) and (side.dim == 0 or all(s == slice(None) for s in side.slice[:1])):
            seen.append(Hook(name, "input"))
    return min(seen, key=lambda hook: channel_dim(modules[hook.module]) is None, default=None)


def channel_dim(module: nn.Module) -> int | None:
    """Where the channels of its input and output lie; only torch's own `forward` tells."""
    return CHANNEL_DIM.get(getattr(type(module), "forward", None))


CHANNEL_DIM: Table[Any, int] = {
    **dict.fromkeys((nn.Linear.forward, nn.LayerNorm.forward, nn.RMSNorm.forward), -1),
    **dict.fromkeys((_BatchNorm.forward, nn.GroupNorm.forward), 1),
    _InstanceNorm.forward: 1,
    nn.Conv1d.forward: -2,  # with a batch or without
    nn.Conv2d.forward: -3,
    nn.Conv3d.forward: -4,
}


def touched(found: Analysis) -> set[str]:
    """Parameters that scale with a unit."""
    return {e.name for e in found.edges if bool(e.head.any()) or bool(e.tail.any())}


# Boxes ----------------------------------------------------------------------------------------------------------------


def _boxes(
    e: Edges, shape: tuple[int, ...], found: Analysis, member: Tensor, place: Tensor
) -> Iterator[tuple[int, Side, bool]]:
    """Groups of units, entries of a parameter that scale with them, and whether it reads them as an input."""
    total = found.H + found.H_absorbed
    single = e.head.numel() == torch.Size(shape).numel() and (len(shape) != 1 or shape == (1,))
    for ids, sign in zip(_ids(e, shape), (1, -1), strict=True):
        reads = sign < 0 or (single and not e.tail.any())  # entries one by one: who reads is not told apart
        for units, powers in _terms(ids, total, found.forms):
            groups = member[units]
            for k in groups.unique().tolist():
                for way in (1, -1) if k >= 0 else ():
                    here = (groups == k) & (powers * way > 0)
                    if bool(here.any()):
                        for side in _sides(e, shape, sign, torch.where(here, place[units], -1), powers):
                            yield k, side, reads


def along(e: Edges, shape: Sequence[int], writes: bool) -> int:
    """The dimension of a parameter along which the channels lie that it writes, or reads."""
    return 0 if len(shape) < 2 or writes != e.swap else 1


def _ids(e: Edges, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Head and tail along the dimensions of the parameter, of size 1 along those in which they do not change."""
    rank = len(shape)
    (groups, out), inside = e.head.shape, e.tail.shape[1]
    if rank <= 1 or e.head.numel() == torch.Size(shape).numel():
        tail = e.tail.reshape([1] * max(rank, 1)) if e.tail.numel() == 1 else e.tail.expand(groups, out).reshape(shape)
        return e.head.reshape(shape or (1,)), tail
    if e.stacked(shape):
        head, tail, taps = e.head[:, :, None], e.tail[:, None, :], [1] * (rank - 3)
        head, tail = (head.mT, tail.mT) if e.swap else (head, tail)
        return head.reshape(*head.shape, *taps), tail.reshape(*tail.shape, *taps)
    taps = [1] * (rank - 2)
    one, other, rows = (e.tail, e.head, inside) if e.swap else (e.head, e.tail, out)
    first = one.reshape(groups * rows, 1, *taps)
    by_group = other[:, None].expand(groups, rows if groups > 1 else 1, other.shape[1])
    second = by_group.reshape(-1, other.shape[1], *taps)
    return (second, first) if e.swap else (first, second)


def _terms(ids: Tensor, total: int, forms: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Units and coefficients of linear forms; terms of the same unit group in different forms stay together."""
    if int(ids.max()) <= total:
        yield ids, torch.ones(1, dtype=torch.float64)
        return
    top = int(ids.max()) + 1
    behind = [i for i in ids.unique().tolist() if i > total]
    for k in range(max(len(forms[i]) for i in behind)):
        units, powers = torch.arange(top), torch.full((top,), float(k == 0), dtype=torch.float64)
        for i in behind:
            unit, power = forms[i][k] if k < len(forms[i]) else (0, 0)
            units[i], powers[i] = unit, float(power)
        yield units[ids], powers[ids]


def _sides(e: Edges, shape: tuple[int, ...], sign: int, channels: Tensor, powers: Tensor) -> Iterator[Side]:
    """Boxes in which channels change along one dimension alone; −1 is none."""
    full = shape or (1,)
    powers = torch.where(channels >= 0, sign * powers.expand(channels.shape), 0)
    pending = [((slice(None),) * len(full), channels, powers)]
    while pending:
        at, where, power = pending.pop()
        for d in range(where.dim()):
            if where.shape[d] > 1 and _constant(where, d) and _constant(power, d):
                where, power = where.narrow(d, 0, 1), power.narrow(d, 0, 1)
        varying = [d for d in range(where.dim()) if where.shape[d] > 1]
        if len(varying) > 1:
            d = varying[0]
            parts = list(_runs(d, where, power))
            pending += [
                (_cut(at, d, a, b), where.narrow(d, a, b - a), power.narrow(d, a, b - a)) for a, b in reversed(parts)
            ]
            continue
        d = varying[0] if varying else along(e, shape, sign > 0)
        begin, end, _ = at[d].indices(full[d])
        vector, weight = where.reshape(-1).expand(end - begin), power.reshape(-1).expand(end - begin)
        for a, b in _runs(0, weight):
            if float(weight[a]):
                spot = at if b - a == full[d] else _cut(at, d, begin + a, begin + b)
                yield Side(e.name, d, spot[: len(shape)], float(weight[a]), e.shift, short(vector[a:b]))


def _constant(t: Tensor, d: int) -> bool:
    return bool((t == t.narrow(d, 0, 1)).all())


def _runs(d: int, *tensors: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges along `d` in which none of these changes."""
    size = tensors[0].shape[d]
    changes = torch.zeros(max(size - 1, 0), dtype=torch.bool)
    for t in tensors:
        rows = t.movedim(d, 0).reshape(size, -1)
        changes |= (rows[1:] != rows[:-1]).any(1)
    ends = [*(changes.nonzero()[:, 0] + 1).tolist(), size]
    yield from zip([0, *ends[:-1]], ends, strict=True)


def _cut(at: tuple[slice, ...], d: int, a: int, b: int) -> tuple[slice, ...]:
    return (*at[:d], slice(a, b), *at[d + 1 :])


def short(numbers: Tensor) -> range | tuple[int, ...]:
    """Numbers in a row as a range."""
    first, n = int(numbers[0]), len(numbers)
    if torch.equal(numbers, torch.arange(first, first + n)):
        return range(first, first + n)
    return tuple(numbers.tolist())
