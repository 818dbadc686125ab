"""Rules for operations that compute entry by entry: pointwise functions, sums, products, comparisons, casts.

A rule takes the walk and the abstract arguments of a call (`Activation`, `Weight`, `Buffer`, `Size` or plain Python
values) and returns the abstract result.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gspace.graph.spaces import (
    UNKNOWN_SIZE,
    Activation,
    Buffer,
    DType,
    Parts,
    Ranked,
    Size,
    Walk,
    Weight,
    along,
    grounded,
    ranked,
)

NOT_HOMOGENEOUS = "it is not positively homogeneous"


def flatten_arguments(values: Any) -> list[Any]:
    """The abstract values in nested tuples, lists, slices and dicts."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, slice):
        values = [values.start, values.stop, values.step]
    if isinstance(values, (tuple, list)):
        return [leaf for value in values for leaf in flatten_arguments(value)]
    return [values]


def opaque(walk: Walk, *args: Any, reason: str = "no rule is known for it", **kwargs: Any) -> Activation:
    """Ground on both sides."""
    for value in flatten_arguments([args, kwargs]):
        if isinstance(value, Parts):
            value = value.part
        if isinstance(value, Activation):
            walk.pin(value, reason)
        elif isinstance(value, (Weight, Buffer)):
            walk.misuse(value, reason)
    return Activation()


def same(walk: Walk, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Positively homogeneous and channel by channel."""
    if not isinstance(x, Activation):
        return opaque(walk, x, *args, **kwargs)
    return x


def pinned(walk: Walk, x: Any, *args: Any, **kwargs: Any) -> Activation:
    """Pointwise or normalizing, and not positively homogeneous."""
    opaque(walk, x, *args, reason=NOT_HOMOGENEOUS, **kwargs)
    return grounded(x.shape) if isinstance(x, Activation) else Activation()


def like(walk: Walk, x: Any, *args: Any, **kwargs: Any) -> Activation:
    """zeros_like, randn_like …: only the shape is read, unless a value is handed over too; new_zeros … read none."""
    if any(isinstance(v, (Activation, Weight, Buffer)) for v in flatten_arguments([args, kwargs])):
        return opaque(walk, *args, **kwargs)
    return grounded(x.shape) if isinstance(x, Activation) and not walk.operation.startswith("new_") else Activation()


def threshold(walk: Walk, x: Any, threshold: Any, value: Any, *args: Any) -> Activation:
    return same(walk, x) if threshold == 0 and value == 0 else pinned(walk, x)


def clamp(walk: Walk, x: Any, min: Any = None, max: Any = None) -> Activation:
    zero = [bound is None or (isinstance(bound, (int, float)) and bound == 0) for bound in (min, max)]
    if all(zero):
        return same(walk, x)
    numbers = all(bound is None or isinstance(bound, (int, float)) for bound in (min, max))
    return pinned(walk, x) if numbers else opaque(walk, x, min, max, reason=NOT_HOMOGENEOUS)  # a bound may broadcast


def prelu(walk: Walk, x: Activation, slope: Any) -> Activation:
    """The slope has head = tail: it is never scaled."""
    if isinstance(slope, (Weight, Buffer)):
        walk.misuse(slope, "also the slope of a PReLU, which no scale changes")
        return x
    return x if slope.grounded else opaque(walk, x, slope)


def _as_activation(walk: Walk, value: Any) -> Activation:
    """Numbers, sizes and buffers as ground; parameters are for the caller."""
    if isinstance(value, Activation):
        return value
    if isinstance(value, Buffer):
        walk.misuse(value, "read beside an activation")
    return grounded(value.shape if isinstance(value, Buffer) else ())


def _broadcast(a: Activation, b: Activation) -> Activation:
    """Space of a pointwise result, given that ids agree: those of the operand that is not ground, over both shapes."""
    main, other = (b, a) if a.grounded and not b.grounded else (a, b)
    if not ranked(main):
        return main
    if not ranked(other):  # it may have more dimensions, in front
        return replace(main, shape=tuple(None if s == 1 else s for s in main.shape), loose=True, lead=0)
    rank = max(len(main.shape), len(other.shape))
    # In front of a loose operand there may be any size, not 1 alone.
    pad_main, pad_other = ((None if x.loose else 1,) * (rank - len(x.shape)) + x.shape for x in (main, other))
    shape = tuple(
        o if m == 1 else (m if o in (1, m) or m is not None else o) for m, o in zip(pad_main, pad_other, strict=True)
    )
    wide = torch.broadcast_shapes(main.ids.shape, other.ids.shape) if not main.spread else main.ids.shape
    ids = main.ids if other.grounded else main.ids.expand(wide)
    ids = ids.reshape([1] * (rank - ids.dim()) + list(ids.shape))
    return Activation(ids, shape, main.spread or other.spread, lead=_shared_lead(main, other))


def _shared_lead(*operands: Ranked) -> int:
    """The leading size of what they broadcast to; 0 if more than one of them may say it."""
    rank = max(len(x.shape) for x in operands)
    surely = not any(x.loose for x in operands)
    leads = {x.lead for x in operands if not surely or (len(x.shape) == rank and x.shape[:1] not in ((), (1,)))}
    return leads.pop() if len(leads) == 1 else 0


def add(walk: Walk, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
    """x + y: the two must share one scale. `residual` says whether they are tied or both pinned."""
    if args:  # torch.add(x, factor, y), deprecated but there
        return opaque(walk, x, y, *args, reason="added in a deprecated way, with the factor in the middle")
    if isinstance(y, (int, float)) and y == 0:
        return x
    if isinstance(x, (int, float)) and x == 0:
        return y
    if isinstance(x, Weight) and isinstance(y, Activation):
        x, y = y, x
    if isinstance(x, Activation) and isinstance(y, Weight):
        return _bias(walk, x, y)
    if any(isinstance(v, Weight) for v in (x, y)):
        return opaque(walk, x, y, reason="added to a value that is not an activation")
    a, b = _as_activation(walk, x), _as_activation(walk, y)
    if a.grounded and b.grounded:
        return _zero(_broadcast(a, b))
    if a.grounded or b.grounded:
        walk.pin([a, b], "added to a value that no scale changes")
        return _zero(_broadcast(a, b))
    assert a.ids is not None and b.ids is not None
    if a.ids.shape == b.ids.shape and torch.equal(a.ids, b.ids) and a.spread == b.spread:
        return _broadcast(a, b)
    if walk.residual == "pin":
        walk.pin([a, b], "a residual connection (residual='tie' would tie the two streams)")
        return _zero(_broadcast(a, b))
    if a.spread != b.spread or (a.spread and a.ids.shape != b.ids.shape):
        walk.pin([a, b], UNKNOWN_SIZE)
        return _zero(_broadcast(a, b))
    try:
        walk.tie(a.ids, b.ids)
    except RuntimeError:
        walk.pin([a, b], "the two spaces do not broadcast")
        return Activation()
    return _broadcast(a, b)


def join(walk: Walk, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
    """maximum, minimum: homogeneous where both operands share one scale, like a sum."""
    if any(isinstance(v, (Weight, Buffer)) for v in (x, y)):
        return opaque(walk, x, y)
    return add(walk, x, y)


def _zero(x: Activation) -> Activation:
    return Activation(None if x.ids is None else torch.zeros_like(x.ids), x.shape, lead=x.lead)


def _one_axis(shape: Sequence[int]) -> int | None:
    """The only axis (from the end) longer than 1."""
    long = [axis for axis in range(-len(shape), 0) if shape[axis] > 1]
    return long[0] if len(long) == 1 else None


def _fits(x: Ranked, w: Weight, axis: int) -> bool:
    """Whether the axis is one of x, and a parameter of more dimensions adds none that x is not known to have."""
    return x.ids.dim() >= (-axis if x.loose else len(w.shape))


def _bias(walk: Walk, x: Activation, bias: Weight) -> Activation:
    axis = _one_axis(bias.shape)
    if axis is None or not ranked(x) or x.spread or not _fits(x, bias, axis):
        return opaque(walk, x, bias, reason="a parameter added that is not one value per unit")
    walk.vector(bias, walk.channels(x, axis, bias.shape[axis]))
    return x if x.ids.dim() > -axis else replace(x, lead=0)


def mul(walk: Walk, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
    """Times something that no scale changes: same space. Times a parameter, one value per channel: new units."""
    if isinstance(x, Weight) and not isinstance(y, Weight):
        x, y = y, x
    if isinstance(x, Activation) and isinstance(y, Weight):
        return _diagonal(walk, x, y)
    if any(isinstance(v, Weight) for v in (x, y)):
        return opaque(walk, x, y, reason="multiplied with a value that is not an activation")
    a, b = _as_activation(walk, x), _as_activation(walk, y)
    if not a.grounded and not b.grounded:
        walk.pin([a, b], "the product of two activations")
        return _zero(_broadcast(a, b))
    if (a.spread or b.spread) and not (isinstance(x, (int, float, Size)) or isinstance(y, (int, float, Size))):
        return opaque(walk, a, b, reason=UNKNOWN_SIZE)
    return _broadcast(a, b)


def _diagonal(walk: Walk, x: Activation, scale: Weight) -> Activation:
    axis = _one_axis(scale.shape)
    if axis is None and all(s == 1 for s in scale.shape):
        walk.misuse(scale, "also one factor for many channels, which no scale changes")
        return x
    if axis is None or not ranked(x) or x.spread or not _fits(x, scale, axis):
        return opaque(walk, x, scale, reason="multiplied by a parameter that is not one value per unit")
    n = scale.shape[axis]
    tail, head = walk.channels(x, axis, n), walk.fresh(n)
    walk.weight(Weight(scale.name, (n,)), head, tail, groups=n)
    return Activation(along(head, x.ids.dim(), axis), x.shape, lead=x.lead if x.ids.dim() > -axis else 0)


def div(walk: Walk, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
    divisor = _as_activation(walk, y) if not isinstance(y, Weight) else None
    if divisor is None or not divisor.grounded or kwargs.get("rounding_mode") is not None:
        return opaque(walk, x, y, reason="divided by a value that has a scale of its own")
    return mul(walk, x, y)


def cast(walk: Walk, x: Any, *args: Any, **kwargs: Any) -> Any:
    """to, type_as …: the same values in another floating dtype, anything else rounds."""
    if not isinstance(x, Activation):
        return opaque(walk, x, *args, **kwargs)
    for value in flatten_arguments([args, kwargs]):
        whole = isinstance(value, torch.dtype) and not (value.is_floating_point or value.is_complex)
        unknown = isinstance(value, (DType, Weight, Buffer)) or (isinstance(value, Activation) and value.grounded)
        if whole or unknown:
            return opaque(walk, x, reason="cast to a dtype that is not known to be floating")
    return x


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0


def compare(walk: Walk, x: Any, y: Any) -> Activation:
    """x > 0 and the like: the sign of x, which no positive scale changes."""
    return grounded(x.shape) if isinstance(x, Activation) and _is_zero(y) else both_pinned(walk, x, y)


def both_pinned(walk: Walk, x: Any, y: Any, *args: Any, **kwargs: Any) -> Activation:
    """Entry by entry, of two values that may broadcast, and not positively homogeneous."""
    opaque(walk, x, y, *args, reason=NOT_HOMOGENEOUS, **kwargs)
    if any(isinstance(v, Weight) for v in (x, y)):
        return Activation()
    return _zero(_broadcast(_as_activation(walk, x), _as_activation(walk, y)))


def masked_fill(walk: Walk, x: Any, mask: Any, value: Any) -> Any:
    """0 at the entries of a mask: a product with 0 and 1."""
    return where(walk, mask, value, x)


def where(walk: Walk, x: Any, y: Any, other: Any) -> Any:
    """`torch.where(mask, h, 0)`, `torch.where(mask, 0, h)`, `h.where(mask, 0)`: a product with 0 and 1.

    Of two activations, as in `torch.where(h > 0, h, 0.1 * h)`, both must share one scale, as in a sum.
    """
    factors = [value for value in (x, y, other) if not _is_zero(value)]
    if len(factors) == 3 and all(isinstance(value, Activation) for value in factors):
        mask, first = (x, y) if x.grounded else (y, x)
        if mask.grounded and not first.grounded and not other.grounded:
            return mul(walk, mask, join(walk, first, other))
    if len(factors) != 2 or not all(isinstance(value, (Activation, Buffer)) for value in factors):
        return opaque(walk, x, y, other, reason="entries are replaced by something other than 0")
    return mul(walk, *factors)
