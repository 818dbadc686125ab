"""Rules for operations that move entries of an activation without changing them; `pieces.py` cuts and joins.

Most apply the operation itself to the ids. Without an example input some sizes are unknown (`None`): a rule that would
need one pins its input and asks for `example_input`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from gspace.graph.arithmetic import opaque
from gspace.graph.spaces import (
    UNKNOWN_RANK,
    UNKNOWN_SIZE,
    Activation,
    Buffer,
    Ranked,
    Rule,
    Size,
    Sizes,
    Walk,
    Weight,
    compress,
    counts_from_front,
    grounded,
    ranked,
)

_BATCH = 3  # stands for an unknown batch size while ids are reshaped; a view that splits the batch then shows


def _flat(sizes: Sequence[Any]) -> list[Any]:
    """Both `view(a, b)` and `view((a, b))`."""
    return list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else list(sizes)


def lost(walk: Walk, x: Activation, reason: str, shape: Sizes | None = None) -> Activation:
    walk.pin(x, reason)
    return grounded(shape)


def _same_batch(x: Activation, size: Any) -> bool:
    return isinstance(size, Size) and size.batch > 0 and size.batch == x.lead


def _vector(w: Weight, operation: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Weight | None:
    """A parameter with one long axis stays one value per channel, however it is laid out."""
    try:
        moved = operation(torch.empty(w.shape, device="meta"), *args, **kwargs)
    except (RuntimeError, IndexError, TypeError):
        return None
    long = [[s for s in shape if s > 1] for shape in (w.shape, moved.shape)]
    whole = len(long[0]) == 1 and long[0] == long[1]
    return Weight(w.name, tuple(moved.shape)) if whole and not w.swap else None


def followed(walk: Walk, w: Weight | Buffer, operation: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    """A parameter or buffer that is moved on its way into an operation."""
    found = _vector(w, operation, *args, **kwargs) if isinstance(w, Weight) else None
    if found is None:
        walk.misuse(w, "rearranged on its way into an operation")
        return Activation()
    return found


def _moves(operation: Callable[..., Tensor]) -> Callable[[Rule], Rule]:
    """A rule for activations of known rank, for any value: parameters are followed through the operation itself."""

    def decorate(rule: Rule) -> Rule:
        @wraps(rule)
        def whole(walk: Walk, x: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(x, (Weight, Buffer)):
                return followed(walk, x, operation, *args, **kwargs)
            return rule(walk, x, *args, **kwargs) if ranked(x) else Activation()

        return whole

    return decorate


def reshape(walk: Walk, x: Any, *sizes: Any, **kwargs: Any) -> Activation:
    """view, reshape: ids are laid out over the full activation, reshaped, and compressed again."""
    target = _flat(sizes or tuple(kwargs.values()))
    if isinstance(x, (Weight, Buffer)):
        return followed(walk, x, torch.reshape, target)
    shape: Sizes = tuple(s if isinstance(s, int) and s >= 0 else None for s in target)
    if not ranked(x):
        return grounded(shape)
    known = [s for s in x.shape[1:] if s is not None]
    if len(known) < len(x.shape) - 1 or x.spread:
        # `x.view(x.size(0), -1)` flattens, whatever the sizes are.
        keeps_batch = len(target) == 2 and _same_batch(x, target[0])
        return flatten(walk, x, 1) if keeps_batch else lost(walk, x, UNKNOWN_SIZE, shape)
    if any(_same_batch(x, s) for s in target[1:]):  # a batch that is not the leading size
        return lost(walk, x, UNKNOWN_SIZE, shape)
    batch = x.shape[0] or _BATCH

    def laid_out(*more: int) -> Tensor:
        """The ids with these dimensions in front of all."""
        front = (*more, batch)
        return x.ids.expand(*front, *known).reshape([front[0] if _same_batch(x, s) else s for s in target])

    try:
        ids = laid_out()
    except (RuntimeError, TypeError):
        return lost(walk, x, UNKNOWN_SIZE, shape)
    units = compress(ids)
    if x.loose and not all(_same_units(units, lambda *m: compress(laid_out(*m)), *more) for more in ((5,), (5, 7))):
        return lost(walk, x, UNKNOWN_RANK)
    if x.shape[0] is None and (ids.shape[:1] != (batch,) or target[0] == batch):
        return lost(walk, x, UNKNOWN_SIZE, shape)
    keeps = _same_batch(x, target[0]) or (not x.loose and ids.shape[:1] == (batch,))
    sizes = (x.shape[0], *ids.shape[1:]) if x.shape[0] is None else tuple(ids.shape)
    if x.loose:  # -1 also stands for what may be in front; there only what a number says is known
        sizes = tuple(s if isinstance(t, int) and t >= 0 else None for s, t in zip(sizes, target, strict=True))
    return Activation(units, sizes, lead=x.lead if keeps else 0)


def _same_units(ids: Tensor, operation: Callable[..., Tensor], *args: Any, **kwargs: Any) -> bool:
    """Whether an operation that is given more dimensions in front leaves units as far from the last, in this order."""
    try:
        found = operation(*args, **kwargs)
    except (RuntimeError, IndexError, TypeError):
        return True  # such an input the model does not accept
    where = [[d - x.dim() for d in range(x.dim()) if x.shape[d] > 1] for x in (ids, found)]
    return where[0] == where[1] and torch.equal(ids.reshape(-1), found.reshape(-1))


@_moves(torch.flatten)
def flatten(walk: Walk, x: Ranked, start_dim: int = 0, end_dim: int = -1) -> Activation:
    rank = len(x.shape)
    if x.loose and (counts_from_front(start_dim, rank) or counts_from_front(end_dim, rank) or end_dim == 0):
        return lost(walk, x, UNKNOWN_RANK)
    if start_dim == 0 and rank > 1 and x.shape[0] is None:
        return lost(walk, x, "flattened together with the batch")
    start, end = start_dim % rank, end_dim % rank
    lead = x.lead if start else 0
    merged = x.shape[start : end + 1]
    if start == end:
        return x
    known = [s for s in merged if s is not None]
    if len(known) == len(merged) and not x.spread:
        ids = x.ids.expand([*x.ids.shape[:start], *known, *x.ids.shape[end + 1 :]]).flatten(start, end)
        return Activation(compress(ids), (*x.shape[:start], math.prod(known), *x.shape[end + 1 :]), lead=lead)
    inner = x.ids.shape[start + 1 : end + 1]
    outer = x.ids.shape[:start]
    if end == rank - 1 and math.prod(inner) == 1 and math.prod(outer) == 1 and not x.spread:
        return Activation(x.ids.reshape(*outer, -1), (*x.shape[:start], None), spread=True, lead=lead)
    return lost(walk, x, UNKNOWN_SIZE, (*x.shape[:start], None, *x.shape[end + 1 :]))


def rearrange(operation: Callable[..., Tensor]) -> Rule:
    """permute, transpose, movedim …: the operation applied to the ids and, through a probe, to the sizes."""

    @_moves(operation)
    def rule(walk: Walk, x: Ranked, *args: Any, **kwargs: Any) -> Activation:
        probe = torch.empty([i + 2 for i in range(len(x.shape))], device="meta")
        try:
            moved = operation(probe, *args, **kwargs)
            ids = operation(x.ids, *args, **kwargs)
        except (RuntimeError, IndexError, TypeError):
            return lost(walk, x, UNKNOWN_SIZE)
        if x.spread and moved.shape[-1:] != probe.shape[-1:]:
            return lost(walk, x, UNKNOWN_SIZE)
        if x.loose:
            wider = [x.ids.reshape(*more, *x.ids.shape) for more in ((1,), (1, 1))]
            if not all(_same_units(ids, operation, t, *args, **kwargs) for t in wider):
                return lost(walk, x, UNKNOWN_RANK)
        shape = tuple(x.shape[s - 2] if s > 1 else 1 for s in moved.shape)
        if x.loose:  # a size stays known where it is as far from the last, however many dimensions are in front
            shape = tuple(
                s if _same_place(operation, probe, d - moved.dim(), *args, **kwargs) else None
                for d, s in enumerate(shape)
            )
        stays = moved.shape[:1] == probe.shape[:1] and not x.loose
        return Activation(ids.contiguous(), shape, x.spread, lead=x.lead if stays else 0)

    return rule


def _same_place(operation: Callable[..., Tensor], probe: Tensor, at: int, *args: Any, **kwargs: Any) -> bool:
    """Whether the size at `at`, from the end, is the same one if the probe has more dimensions in front."""
    moved = operation(probe, *args, **kwargs)
    for more in ((90,), (90, 91)):
        try:
            wider = operation(probe.new_empty([*more, *probe.shape]), *args, **kwargs)
        except (RuntimeError, IndexError, TypeError):
            continue  # such an input the model does not accept
        if wider.shape[at] != moved.shape[at]:
            return False
    return True


def flip(walk: Walk, x: Any, *dims: Any, **kwargs: Any) -> Activation:
    along = _flat(dims or tuple(kwargs.values()))
    return _reordered(walk, x, lambda t: torch.flip(t, along))


def roll(walk: Walk, x: Any, shifts: Any, dims: Any = None) -> Activation:
    if dims is None or dims in ((), []):  # as one long vector: sizes are not known
        return lost(walk, x, UNKNOWN_SIZE) if isinstance(x, Activation) else _reordered(walk, x, torch.clone)
    return _reordered(walk, x, lambda t: torch.roll(t, shifts, dims))


def _reordered(walk: Walk, x: Any, operation: Callable[[Tensor], Tensor]) -> Activation:
    """Entries change places along a dimension; where one stands for several, how they do is not known."""
    if isinstance(x, (Weight, Buffer)):
        walk.misuse(x, "rearranged on its way into an operation")
        return Activation()
    return lost(walk, x, UNKNOWN_SIZE) if x.spread else rearrange(operation)(walk, x)


def transpose(walk: Walk, x: Activation | Weight, *args: Any, **kwargs: Any) -> Activation | Weight:
    """Also follows a two-dimensional parameter: `F.linear(h, w.t())` uses it the other way round."""
    if isinstance(x, Weight):
        if len(x.shape) == 2:
            return Weight(x.name, x.shape[::-1], not x.swap)
        walk.misuse(x, "transposed")
        return grounded(x.shape)
    return rearrange(torch.transpose if args or kwargs else torch.t)(walk, x, *args, **kwargs)


def reverse(walk: Walk, x: Activation | Weight) -> Activation | Weight:
    """`x.T`: all dimensions, not the last two alone."""
    if isinstance(x, Weight):
        return transpose(walk, x)
    return rearrange(lambda t: t.permute(*range(t.dim() - 1, -1, -1)))(walk, x)


def squeeze(walk: Walk, x: Activation, *dims: Any, **kwargs: Any) -> Activation:
    dims = tuple(_flat(dims or tuple(kwargs.values())))
    if not ranked(x):
        return Activation()
    wanted = {d % len(x.shape) for d in dims} if dims else set(range(len(x.shape)))
    if any(x.shape[d] is None for d in wanted) or x.spread:
        return lost(walk, x, UNKNOWN_SIZE)
    kept = [d for d in range(len(x.shape)) if d not in wanted or x.shape[d] != 1]
    lead = x.lead if 0 in kept else 0
    return Activation(x.ids.reshape([x.ids.shape[d] for d in kept]), tuple(x.shape[d] for d in kept), lead=lead)


def expand(walk: Walk, x: Activation, *sizes: Any, **kwargs: Any) -> Activation:
    target = _flat(sizes or tuple(kwargs.values()))
    if not ranked(x) or x.spread:
        return lost(walk, x, UNKNOWN_SIZE)
    more = len(target) - len(x.shape)
    old: Sizes = (1,) * more + x.shape
    shape = tuple(o if t == -1 else (t if isinstance(t, int) else None) for t, o in zip(target, old, strict=True))
    stays = not more and (target[:1] == [-1] or _same_batch(x, target[0]))
    return Activation(x.ids.reshape([1] * more + list(x.ids.shape)), shape, lead=x.lead if stays else 0)


def expand_as(walk: Walk, x: Activation, other: Any) -> Activation:
    """To the sizes of another value, which has no other part in it."""
    if getattr(other, "shape", None) is None:
        return lost(walk, x, UNKNOWN_SIZE)
    result = expand(walk, x, other.shape)
    return replace(result, lead=other.lead) if isinstance(other, Activation) and ranked(result) else result


@_moves(torch.unflatten)
def unflatten(walk: Walk, x: Ranked, dim: int, sizes: Any) -> Activation:
    """One dimension, not the batch, as several."""
    if x.loose or x.spread or dim % len(x.shape) == 0:
        return lost(walk, x, UNKNOWN_RANK if x.loose else UNKNOWN_SIZE)
    at = dim % len(x.shape)
    parts, whole = list(_flat(tuple(sizes))), x.shape[at]
    if not all(isinstance(n, int) for n in parts) or (whole is None and x.ids.shape[at] > 1):
        return lost(walk, x, UNKNOWN_SIZE)
    if -1 in parts:
        rest = math.prod(n for n in parts if n != -1)
        parts[parts.index(-1)] = None if whole is None else whole // rest
    fine = parts if x.ids.shape[at] > 1 else [1] * len(parts)
    ids = x.ids.reshape(*x.ids.shape[:at], *fine, *x.ids.shape[at + 1 :])
    return Activation(ids, (*x.shape[:at], *parts, *x.shape[at + 1 :]), lead=x.lead)


def channel_shuffle(walk: Walk, x: Any, groups: int) -> Activation:
    """The channels, dimension 1, as (groups, channels/groups), transposed."""
    if not isinstance(x, Activation) or x.loose or x.spread:
        return opaque(walk, x, reason=UNKNOWN_RANK)
    if x.ids is None or x.ids.shape[1] == 1:
        return x
    return Activation(x.ids.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2), x.shape, lead=x.lead)


def repeat(walk: Walk, x: Any, *times: Any) -> Activation:
    """Copies side by side along every dimension; where the id does not change, any number of them."""
    if not isinstance(x, Activation) or x.loose or x.spread:
        return opaque(walk, x, times, reason=UNKNOWN_RANK)
    if not ranked(x):
        return Activation()
    listed = _flat(times)
    more = len(listed) - len(x.shape)
    ids, shape = x.ids.reshape([1] * more + list(x.ids.shape)), (1,) * more + x.shape
    copies = [n if size > 1 else 1 for n, size in zip(listed, ids.shape, strict=True)]
    if not all(isinstance(n, int) for n in copies) or (x.shape[0] is None and (more or listed[0] != 1)):
        return opaque(walk, x, reason=UNKNOWN_SIZE)
    sizes = (s * n if isinstance(s, int) and isinstance(n, int) else None for s, n in zip(shape, listed, strict=True))
    return Activation(ids.repeat(copies), tuple(sizes), lead=x.lead if x.shape[0] is None else 0)
