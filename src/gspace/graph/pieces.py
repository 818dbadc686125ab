"""Rules for operations that cut pieces out of an activation, or join some.

As in `movement.py`, most apply the operation itself to the ids.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gspace.graph.arithmetic import opaque
from gspace.graph.movement import followed, lost, rearrange
from gspace.graph.spaces import (
    UNKNOWN_RANK,
    UNKNOWN_SIZE,
    Activation,
    Buffer,
    Parts,
    Size,
    Walk,
    Weight,
    along,
    compress,
    counts_from_front,
    grounded,
    ranked,
)


def index(walk: Walk, x: Any, key: Any) -> Any:
    """`x[key]` of a tuple, a shape, a split or an activation."""
    if isinstance(x, Parts):
        return x.part
    if isinstance(x, (tuple, list, dict)):
        return x[key]
    if isinstance(x, (Weight, Buffer)):
        return followed(walk, x, lambda t: t[key])
    if not isinstance(x, Activation) or not ranked(x):
        return Activation()
    keys = list(key) if isinstance(key, tuple) else [key]
    front = [k for k in keys[: keys.index(Ellipsis) if Ellipsis in keys else None] if k is not None]
    if x.loose and any(k != slice(None) for k in front[1:]):
        return lost(walk, x, UNKNOWN_RANK)
    plain = all(k is None or k is Ellipsis or isinstance(k, (int, slice)) for k in keys)
    if (
        not plain
        or x.spread
        or any(isinstance(b, Size) for k in keys if isinstance(k, slice) for b in (k.start, k.stop))
    ):
        return lost(walk, x, "indexed by a tensor" if not plain else UNKNOWN_SIZE)
    if Ellipsis not in keys:
        keys.append(Ellipsis)
    at = keys.index(Ellipsis)
    used = sum(k is not None and k is not Ellipsis for k in keys)
    keys[at : at + 1] = [slice(None)] * (len(x.shape) - used)
    ids_key: list[Any] = []
    shape: list[int | None] = []
    dim = 0
    for j, k in enumerate(keys):
        if k is None:
            ids_key.append(None)
            shape.append(None if x.loose and j < at else 1)  # counted from the front: from the end it is another
            continue
        size, constant = x.shape[dim], x.ids.shape[dim] == 1
        if x.loose and not constant and k != slice(None) and (j < at or size is None):
            return lost(walk, x, UNKNOWN_RANK)  # counted from the front, or joined along a dimension that was
        if isinstance(k, int):
            ids_key.append(0 if constant else k)
        else:
            ids_key.append(slice(None) if constant else k)
            shape.append(None if size is None and k != slice(None) else size if size is None else len(range(size)[k]))
        dim += 1
    try:
        ids = x.ids[tuple(ids_key)].clone()
    except IndexError:
        return lost(walk, x, UNKNOWN_SIZE)
    if x.ids.numel() and not ids.numel():  # nothing is left: whoever reads it would find no unit to pin
        return lost(walk, x, UNKNOWN_RANK if x.loose else UNKNOWN_SIZE)
    return Activation(ids, tuple(shape), lead=x.lead if keys[:1] == [slice(None)] else 0)


def cut(walk: Walk, x: Any, dim: int, key: Any) -> Any:
    """`x[key]` along one dimension: select, narrow and aten's slice."""
    if not isinstance(x, Activation) or x.shape is None:
        return index(walk, x, key)
    if dim < 0:
        return index(walk, x, (Ellipsis, key) + (slice(None),) * (-dim - 1))
    return index(walk, x, (slice(None),) * dim + (key,))


def select(walk: Walk, x: Any, dim: int, at: int) -> Any:
    return cut(walk, x, dim, at)


def narrow(walk: Walk, x: Any, dim: int, start: int, length: int) -> Any:
    return cut(walk, x, dim, slice(start, start + length or None))  # -2, 2: to the end, not to 0


def slice_(walk: Walk, x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    return cut(walk, x, dim, slice(start, end, step))


def split(operation: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """split, chunk: the ids are cut where they change along `dim`; along any other dimension every part is alike."""

    def rule(walk: Walk, x: Activation, sections: Any, dim: int = 0) -> Any:
        if not ranked(x):
            return Parts(Activation())
        if x.spread or (x.loose and counts_from_front(dim, len(x.shape))):
            return Parts(lost(walk, x, UNKNOWN_SIZE if x.spread else UNKNOWN_RANK))
        front, dim = dim >= 0, dim % len(x.shape)
        lead = x.lead if dim else 0
        if x.ids.shape[dim] == 1:
            return Parts(Activation(x.ids, tuple(None if d == dim else s for d, s in enumerate(x.shape)), lead=lead))
        if x.loose and (front or x.shape[dim] is None):
            return Parts(lost(walk, x, UNKNOWN_RANK))
        try:
            parts = operation(x.ids, sections, dim)
        except (RuntimeError, TypeError):
            return Parts(lost(walk, x, UNKNOWN_SIZE))
        shapes = [tuple(p.shape[d] if d == dim else s for d, s in enumerate(x.shape)) for p in parts]
        return tuple(Activation(p, shape, lead=lead) for p, shape in zip(parts, shapes, strict=True))

    return rule


def unbind(walk: Walk, x: Activation, dim: int = 0) -> Any:
    if not ranked(x):
        return Parts(Activation())
    if x.ids.shape[dim] == 1:
        return Parts(select(walk, x, dim, 0))
    return tuple(select(walk, x, dim, at) for at in range(x.ids.shape[dim]))


def cat(walk: Walk, values: Sequence[Any], dim: int = 0, **kwargs: Any) -> Activation:
    """Ids are joined along the dimension that holds the units; along any other the spaces are tied."""
    dim = kwargs.get("axis", dim)
    for v in values:
        if isinstance(v, (Weight, Buffer)):
            walk.misuse(v, "concatenated with an activation")
    held = [grounded(v.shape) if isinstance(v, (Weight, Buffer)) else v for v in values]
    given = [x for x in held if isinstance(x, Activation)]
    xs = [x for x in given if ranked(x) and not x.spread]
    if len(xs) < len(given):
        walk.pin(given, f"joined with a value whose size is not known; {UNKNOWN_SIZE.split('; ')[1]}")
        return Activation()
    rank = len(xs[0].shape)
    if any(len(x.shape) != rank for x in xs):
        walk.pin(xs, "joined with a value of another rank")
        return Activation()
    unclear = any(x.loose for x in xs) and counts_from_front(dim, rank)
    if unclear and dim < 0:
        walk.pin(xs, UNKNOWN_RANK)
        return Activation()
    dim %= rank
    lead = next((x.lead for x in xs if x.lead), 0) if dim else 0  # all have the same, or torch refuses
    known = [s for s in (x.shape[dim] for x in xs) if s is not None]
    shape = list(xs[0].shape)
    shape[dim] = sum(known) if len(known) == len(xs) and not unclear else None
    ids = [x.ids for x in xs]
    joins = any(i.shape[dim] > 1 for i in ids) or all(i.numel() == 1 for i in ids)
    if joins and len(known) == len(xs):
        others = torch.broadcast_shapes(*[[1 if d == dim else n for d, n in enumerate(i.shape)] for i in ids])
        laid = [i.expand([s if d == dim else n for d, n in enumerate(others)]) for i, s in zip(ids, known, strict=True)]
        return Activation(compress(torch.cat(laid, dim)), tuple(shape), lead=lead)
    if joins and any(i.shape[dim] > 1 for i in ids):
        walk.pin(xs, UNKNOWN_SIZE)
        return grounded(shape)
    for other in ids[1:]:
        walk.tie(ids[0], other)
    wide = max(ids, key=lambda i: i.numel())
    return Activation(wide, tuple(shape), lead=lead)


def stack(walk: Walk, values: Sequence[Any], dim: int = 0) -> Activation:
    lifted = [rearrange(torch.unsqueeze)(walk, v, dim) if isinstance(v, Activation) else v for v in values]
    return cat(walk, lifted, dim)


def constant_pad(walk: Walk, x: Activation, pads: Sequence[Any], value: float = 0) -> Activation:
    return pad(walk, x, pads, "constant", value)


def pad(
    walk: Walk, x: Activation, pads: Sequence[Any], mode: str = "constant", value: float | None = None
) -> Activation:
    """Zeros and mirrored entries keep the space, a constant ≠ 0 does not. Channels of zeros take any scale."""
    if not ranked(x):
        return Activation()
    if mode == "constant" and value not in (None, 0):
        return lost(walk, x, f"padded with the constant {value}", x.shape)
    if len(pads) > 2 * len(x.shape):
        return lost(walk, x, UNKNOWN_RANK)
    ids, shape = x.ids, list(x.shape)
    for step, (low, high) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        d = len(shape) - 1 - step
        size = shape[d]
        shape[d] = None if size is None or not isinstance(low, int) or not isinstance(high, int) else size + low + high
        if (low, high) == (0, 0) or (ids.shape[d] == 1 and size != 1 and not x.spread):
            continue
        if mode != "constant" or x.spread or size is None or low < 0 or high < 0 or ids.numel() != ids.shape[d]:
            return lost(walk, x, "padded along the dimension that holds these units", tuple(shape))
        ids = along(torch.cat([walk.fresh(low), ids.reshape(-1).expand(size), walk.fresh(high)]), ids.dim(), d)
    return Activation(ids, tuple(shape), x.spread, lead=x.lead if len(pads) < 2 * len(shape) else 0)


def index_select(walk: Walk, x: Any, dim: int, index: Any) -> Activation:
    """Entries gathered along a dimension that holds no units."""
    if not (isinstance(x, Activation) and isinstance(index, (Activation, Buffer)) and index.shape is not None):
        return opaque(walk, x, index, reason=UNKNOWN_SIZE)
    opaque(walk, index, reason="used as indices")
    if not ranked(x):
        return Activation()
    if x.loose or x.spread or x.shape[dim % len(x.shape)] is None:
        return opaque(walk, x, reason=UNKNOWN_SIZE)
    if x.ids.shape[dim] > 1:
        return opaque(walk, x, reason="indexed by a tensor")
    found = index.shape[0] if index.shape else 1
    return Activation(x.ids, tuple(found if d == dim % len(x.shape) else s for d, s in enumerate(x.shape)))
