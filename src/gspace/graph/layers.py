"""Rules for operations that compute: pointwise functions, sums and products, layers, pools and reductions.

A rule takes the walk and the abstract arguments of a call (`Activation`, `Weight`, `Buffer`, `Size` or plain Python
values) and returns the abstract result.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gspace.graph.movement import UNKNOWN_RANK, UNKNOWN_SIZE
from gspace.graph.spaces import (
    Activation,
    Buffer,
    DType,
    Norm,
    Parts,
    Rule,
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


# Pointwise ------------------------------------------------------------------------------------------------------------


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
    """zeros_like, randn_like …: only the shape is read, unless a value is handed over too."""
    if any(isinstance(v, (Activation, Weight, Buffer)) for v in flatten_arguments([args, kwargs])):
        return opaque(walk, *args, **kwargs)
    return grounded(x.shape) if isinstance(x, Activation) else Activation()


def threshold(walk: Walk, x: Any, threshold: Any, value: Any, *args: Any) -> Activation:
    return same(walk, x) if threshold == 0 and value == 0 else pinned(walk, x)


def clamp(walk: Walk, x: Any, min: Any = None, max: Any = None) -> Activation:
    zero = [bound is None or (isinstance(bound, (int, float)) and bound == 0) for bound in (min, max)]
    return same(walk, x) if all(zero) else pinned(walk, x, min, max)


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
        return replace(main, loose=True)
    rank = max(len(main.shape), len(other.shape))
    pad_main, pad_other = (1,) * (rank - len(main.shape)) + main.shape, (1,) * (rank - len(other.shape)) + other.shape
    shape = tuple(
        o if m == 1 else (m if o in (1, m) or m is not None else o) for m, o in zip(pad_main, pad_other, strict=True)
    )
    wide = torch.broadcast_shapes(main.ids.shape, other.ids.shape) if not main.spread else main.ids.shape
    ids = main.ids if other.grounded else main.ids.expand(wide)
    return Activation(ids.reshape([1] * (rank - ids.dim()) + list(ids.shape)), shape, main.spread or other.spread)


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
    return Activation(None if x.ids is None else torch.zeros_like(x.ids), x.shape)


def _one_axis(shape: Sequence[int]) -> int | None:
    """The only axis (from the end) longer than 1."""
    long = [axis for axis in range(-len(shape), 0) if shape[axis] > 1]
    return long[0] if len(long) == 1 else None


def _bias(walk: Walk, x: Activation, bias: Weight) -> Activation:
    axis = _one_axis(bias.shape)
    if axis is None or x.ids is None or x.spread or x.ids.dim() < -axis:
        return opaque(walk, x, bias, reason="a parameter added that is not one value per unit")
    walk.vector(bias, walk.channels(x, axis, bias.shape[axis]))
    return x


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
    if axis is None or not ranked(x) or x.spread or x.ids.dim() < -axis:
        return opaque(walk, x, scale, reason="multiplied by a parameter that is not one value per unit")
    n = scale.shape[axis]
    tail, head = walk.channels(x, axis, n), walk.fresh(n)
    walk.weight(Weight(scale.name, (n,)), head, tail, groups=n)
    return Activation(along(head, x.ids.dim(), axis), x.shape)


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


# Layers ---------------------------------------------------------------------------------------------------------------


def _add_bias(walk: Walk, head: Tensor, bias: Any) -> None:
    if isinstance(bias, Weight) and not bias.swap and bias.shape == tuple(head.shape):
        walk.vector(bias, head)
    elif bias is not None:
        opaque(walk, bias)
        walk.pin(head, "its bias is not a parameter")


def linear(walk: Walk, x: Any, weight: Any, bias: Any = None) -> Activation:
    if not (isinstance(x, Activation) and isinstance(weight, Weight) and len(weight.shape) == 2):
        return opaque(walk, x, weight, bias, reason="its weight is not a parameter")
    out, n = weight.shape
    head = walk.fresh(out)
    walk.weight(weight, head, walk.channels(x, -1, n), groups=1)
    _add_bias(walk, head, bias)
    lead = x.shape[:-1] if ranked(x) else (None,)
    return Activation(along(head, len(lead) + 1, -1), (*lead, out), loose=not ranked(x) or x.loose)


def matmul(walk: Walk, x: Any, y: Any) -> Activation:
    """`x @ w` is a linear layer whose parameter is stored (in, out)."""
    if isinstance(x, Activation) and isinstance(y, Weight) and len(y.shape) == 2:
        return linear(walk, x, Weight(y.name, y.shape[::-1], not y.swap))
    return opaque(walk, x, y, reason="the product of two activations")


def conv(dims: int, transposed: bool = False) -> Rule:
    def rule(walk: Walk, x: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Activation:
        # F.conv: stride, padding, dilation, groups; F.conv_transpose: stride, padding, output_padding, groups.
        groups = kwargs.get("groups", args[3] if len(args) > 3 else 1)
        if not (isinstance(x, Activation) and isinstance(weight, Weight) and not weight.swap):
            return opaque(walk, x, weight, bias, reason="its weight is not a parameter")
        first, second = weight.shape[:2]
        out, n = (second * groups, first) if transposed else (first, second * groups)
        head = walk.fresh(out)
        walk.weight(weight, head, walk.channels(x, -dims - 1, n), groups, swap=transposed)
        _add_bias(walk, head, bias)
        rank = dims + 2 if x.ids is None else x.ids.dim()
        return Activation(along(head, rank, -dims - 1), (None,) * (rank - dims - 1) + (out,) + (None,) * dims)

    return rule


def batch_norm(
    walk: Walk, x: Any, weight: Any, bias: Any, mean: Any, var: Any, *args: Any, **kwargs: Any
) -> Activation:
    """The scale of the incoming space is divided out; γ and β write new units (docs/theory.md, Sec. 1).

    Without an example input, what a linear layer hands to a BatchNorm1d is taken as a matrix.
    """
    tensors = [t for t in (weight, bias, mean, var) if isinstance(t, (Weight, Buffer))]
    known = all(isinstance(t, Weight) for t in (weight, bias) if t is not None)
    known = known and all(isinstance(t, Buffer) for t in (mean, var) if t is not None)
    if not (isinstance(x, Activation) and known) or (x.ids is None and not tensors):
        return opaque(walk, x, weight, bias, mean, var)
    rank = kwargs.get("rank") or 2 if x.ids is None else x.ids.dim()
    n = tensors[0].shape[0] if tensors else x.ids.shape[1] if x.ids is not None else 0
    absorbed, written = walk.channels(x, 1 - rank, n), walk.fresh(n)
    statistics = tuple((t.name, power) for t, power in ((mean, 1), (var, 2)) if isinstance(t, Buffer))
    walk.norms.append(Norm(absorbed, written, weight is not None, statistics))
    for t in (weight, bias):
        if isinstance(t, Weight):
            walk.vector(t, written, affine=True)
    return Activation(along(written, rank, 1 - rank), (None,) * rank if x.shape is None else x.shape)


def functional_batch_norm(
    walk: Walk, x: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, *args: Any, **kw: Any
) -> Activation:
    return batch_norm(walk, x, weight, bias, mean, var)


def embedding(
    walk: Walk, a: Any, b: Any, padding_idx: Any = None, max_norm: Any = None, *args: Any, **kwargs: Any
) -> Activation:
    """A linear layer on one-hot vectors: `(V, D)`, stored (in, out), from ground."""
    weight, indices = (a, b) if isinstance(a, Weight) else (b, a)
    if not isinstance(weight, Weight) or weight.swap or (isinstance(b, Weight) and max_norm is not None):
        return opaque(walk, a, b, reason="its rows are renormalized, or are not a parameter")
    if isinstance(indices, Activation):
        walk.pin(indices, "used as indices")
    head = walk.fresh(weight.shape[1])
    if padding_idx is not None and not (weight is a and padding_idx == -1):  # ATen says -1 for none
        walk.pin(head, "the row of padding_idx is never trained")
    walk.weight(weight, head, torch.zeros(weight.shape[0], dtype=torch.long), 1, swap=True)
    # Indices of unknown rank are taken as (batch, tokens): what reads the result checks the number of channels.
    lead = indices.shape if isinstance(indices, Activation) and indices.shape is not None else (None, None)
    return Activation(along(head, len(lead) + 1, -1), (*lead, weight.shape[1]), loose=lead == (None, None))


def pool(dims: int, adaptive: bool = False) -> Rule:
    """Pools over the last `dims` dimensions, which must not be the one that holds the units."""

    def rule(walk: Walk, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Activation):
            return opaque(walk, x)
        if not ranked(x):
            return Activation()
        if x.spread or any(n > 1 for n in x.ids.shape[-dims:]):
            walk.pin(x, "pooled over the dimension that holds these units")
            return grounded(x.shape[:-dims] + (None,) * dims)
        size = (kwargs.get("output_size", args[0] if args else None)) if adaptive else None
        sizes = (
            (size,) * dims
            if isinstance(size, int)
            else tuple(size)
            if isinstance(size, (tuple, list))
            else (None,) * dims
        )
        result = Activation(x.ids, x.shape[:-dims] + sizes)
        return (result, grounded(result.shape)) if kwargs.get("return_indices") else result

    return rule


def max_pool_with_indices(dims: int) -> Rule:
    return lambda walk, x, *args, **kwargs: pool(dims)(walk, x, *args, **{**kwargs, "return_indices": True})


def interpolate(walk: Walk, x: Any, *args: Any, **kwargs: Any) -> Activation:
    return pool(max(len(x.shape or ()) - 2, 1))(walk, x)


def reduce(walk: Walk, x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Activation:
    """mean, sum, amax …: units that are reduced together are tied."""
    if not isinstance(x, Activation):
        return opaque(walk, x)
    if "dtype" in kwargs:  # sum(dtype=torch.long) rounds
        x = cast(walk, x, kwargs["dtype"])
    dim = kwargs.get("axis", dim)
    if not ranked(x):
        return Activation()
    if x.spread:
        return opaque(walk, x, reason=UNKNOWN_SIZE)
    rank = len(x.shape)
    given = () if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    if x.loose and any(d > 0 for d in given):
        return opaque(walk, x, reason=UNKNOWN_RANK)
    dims = {d % rank for d in given} if given else range(rank)
    ids, shape = x.ids, list(x.shape)
    for d in dims:
        first = ids.narrow(d, 0, 1)
        if ids.shape[d] > 1:
            walk.tie(first, ids)
        ids, shape[d] = first, 1
    kept = [d for d in range(rank) if keepdim or d not in dims]
    return Activation(ids.reshape([ids.shape[d] for d in kept]), tuple(shape[d] for d in kept))


def extremum(walk: Walk, x: Any, *args: Any, **kwargs: Any) -> Any:
    """max, min: of two tensors, or over a dimension with indices."""
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, (Activation, Weight, Buffer)):
        return join(walk, x, other)
    value = reduce(walk, x, *args, **kwargs)
    return (value, grounded(value.shape)) if args or kwargs else value


def pixel_shuffle(walk: Walk, x: Activation, upscale_factor: int) -> Activation:
    """The factor² channels that fill one output channel are tied."""
    if not ranked(x) or x.shape[-3] is None or x.ids.numel() not in (1, x.shape[-3]):
        return opaque(walk, x)
    ids = walk.channels(x, -3, x.shape[-3]).reshape(-1, upscale_factor**2)
    walk.tie(ids[:, :1], ids)
    return Activation(along(ids[:, 0], x.ids.dim(), -3), (*x.shape[:-3], ids.shape[0], None, None))


def pixel_unshuffle(walk: Walk, x: Activation, downscale_factor: int) -> Activation:
    """Every channel becomes factor² channels of its unit."""
    if not ranked(x) or x.shape[-3] is None or x.ids.numel() not in (1, x.shape[-3]):
        return opaque(walk, x)
    ids = walk.channels(x, -3, x.shape[-3]).repeat_interleave(downscale_factor**2)
    return Activation(along(ids, x.ids.dim(), -3), (*x.shape[:-3], len(ids), None, None))
