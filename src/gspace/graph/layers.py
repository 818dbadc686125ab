"""Rules for layers, pools and reductions: operations that contract or draw channels."""

from typing import Any

import torch
from torch import Tensor

from gspace.graph.arithmetic import cast, join, opaque
from gspace.graph.spaces import (
    UNKNOWN_RANK,
    UNKNOWN_SIZE,
    Activation,
    Buffer,
    Norm,
    Rule,
    Walk,
    Weight,
    along,
    counts_from_front,
    grounded,
    ranked,
)


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
    """`x @ w` is a linear layer whose parameter is stored (in, out); `adjacency @ h` sums over samples or tokens."""
    if isinstance(x, Activation) and isinstance(y, Weight) and len(y.shape) == 2:
        return linear(walk, x, Weight(y.name, y.shape[::-1], not y.swap))
    if isinstance(x, Buffer) or (isinstance(x, Activation) and x.grounded):
        return _mixed(walk, x, y)
    return opaque(walk, x, y, reason="the product of two activations")


def _mixed(walk: Walk, x: Activation | Buffer, y: Any) -> Activation:
    """A product from the left with what no scale changes; the dimension that it sums over must hold no units."""
    if not isinstance(y, Activation):
        return opaque(walk, x, y, reason="the product with a value that is not an activation")
    if x.shape is None or not ranked(y) or y.spread:
        return opaque(walk, x, y, reason=UNKNOWN_SIZE)
    rank = max(len(x.shape), len(y.shape))
    if min(len(x.shape), len(y.shape)) < 2:
        return opaque(walk, x, y, reason="the product with a vector")
    if y.ids.numel() != y.ids.shape[-1]:
        return opaque(walk, x, y, reason="a product that sums over units")
    if isinstance(x, Buffer):
        walk.misuse(x, "read beside an activation")
    shape = (*(None,) * (rank - 2), x.shape[-2], y.shape[-1])
    return Activation(along(y.ids.reshape(-1), rank, -1), shape)


def addmm(walk: Walk, x: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Activation:
    """beta·x + alpha·mat1 @ mat2: a linear layer whose parameter is stored (in, out), with bias x."""
    numbers = all(isinstance(factor, (int, float)) for factor in (beta, alpha))
    if not (numbers and isinstance(mat1, Activation) and isinstance(mat2, Weight)):
        return opaque(walk, x, mat1, mat2, beta, alpha, reason="its matrix is not a parameter")
    return linear(walk, mat1, Weight(mat2.name, mat2.shape[::-1], not mat2.swap), x)


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
        lead = x.lead if rank > dims + 1 else 0  # without a batch the channels lead
        shape = (None,) * (rank - dims - 1) + (out,) + (None,) * dims
        return Activation(along(head, rank, -dims - 1), shape, lead=lead)

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
    if x.loose:  # how many dimensions it resizes depends on the rank
        return opaque(walk, x, reason=UNKNOWN_RANK)
    return pool(max(len(x.shape or ()) - 2, 1))(walk, x)


def reduce(walk: Walk, x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Activation:
    """mean, sum, amax …: units that are reduced together are tied."""
    if not isinstance(x, Activation):
        return opaque(walk, x)
    if "dtype" in kwargs:  # sum(dtype=torch.long) rounds
        x = cast(walk, x, kwargs["dtype"])
    dim, keepdim = kwargs.get("axis", dim), kwargs.get("keepdims", keepdim)
    if not ranked(x):
        return Activation()
    if x.spread:
        return opaque(walk, x, reason=UNKNOWN_SIZE)
    rank = len(x.shape)
    given = () if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    if x.loose and any(counts_from_front(d, rank) for d in given):
        return opaque(walk, x, reason=UNKNOWN_RANK)
    dims = {d % rank for d in given} if given else range(rank)
    ids, shape = x.ids, list(x.shape)
    for d in dims:
        first = ids.narrow(d, 0, 1)
        if ids.shape[d] > 1:
            walk.tie(first, ids)
        ids, shape[d] = first, None if x.loose and 0 in given and d == 0 else 1  # other dimensions may follow the first
    kept = [d for d in range(rank) if keepdim or d not in dims]
    lead = 0 if 0 in dims else x.lead
    return Activation(ids.reshape([ids.shape[d] for d in kept]), tuple(shape[d] for d in kept), lead=lead)


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
    lead = x.lead if x.ids.dim() > 3 else 0
    return Activation(along(ids[:, 0], x.ids.dim(), -3), (*x.shape[:-3], ids.shape[0], None, None), lead=lead)


def pixel_unshuffle(walk: Walk, x: Activation, downscale_factor: int) -> Activation:
    """Every channel becomes factor² channels of its unit."""
    if not ranked(x) or x.shape[-3] is None or x.ids.numel() not in (1, x.shape[-3]):
        return opaque(walk, x)
    ids = walk.channels(x, -3, x.shape[-3]).repeat_interleave(downscale_factor**2)
    lead = x.lead if x.ids.dim() > 3 else 0
    return Activation(along(ids, x.ids.dim(), -3), (*x.shape[:-3], len(ids), None, None), lead=lead)
