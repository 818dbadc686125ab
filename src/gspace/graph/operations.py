"""The table of operations: what each one does to the spaces of its inputs.

Names are canonical: `F.relu`, `x.relu_()`, `nn.ReLU()` and `aten.relu` are all `"relu"`. An operation that is not in
the table is opaque: it pins what it reads and what it returns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gspace.graph import movement
from gspace.graph.layers import (
    add,
    batch_norm,
    cast,
    clamp,
    conv,
    div,
    embedding,
    extremum,
    functional_batch_norm,
    interpolate,
    join,
    like,
    linear,
    matmul,
    max_pool_with_indices,
    mul,
    opaque,
    pinned,
    pixel_shuffle,
    pixel_unshuffle,
    pool,
    prelu,
    reduce,
    same,
    threshold,
)
from gspace.graph.spaces import Activation, Buffer, DType, Parts, Rule, Size, Walk, Weight, grounded, ranked

# Sizes ----------------------------------------------------------------------------------------------------------------


def size(walk: Walk, x: Any, dim: int | None = None) -> Any:
    """Sizes, as numbers where they are known. The leading one of an input says nothing of the batch of what follows:
    frames of a video, for example, may be folded into it."""
    if isinstance(x, (Weight, Buffer)):
        sizes: Any = x.shape
    elif not isinstance(x, Activation) or x.shape is None:
        return Size() if dim is not None else Parts(Activation())
    else:
        found = (Size(x.lead if d == 0 else 0) if s is None else s for d, s in enumerate(x.shape))
        sizes = _FromTheEnd(found) if x.loose else tuple(found)
    return sizes if dim is None else sizes[dim]


class _FromTheEnd(tuple[Any, ...]):
    """Sizes of an activation that may have more dimensions in front: which one a positive number means is not known."""

    def __getitem__(self, key: Any) -> Any:
        return Size() if isinstance(key, int) and key > 0 else super().__getitem__(key)


def attribute(walk: Walk, x: Any, name: str) -> Any:
    rules: dict[str, Rule] = {
        "shape": size,
        "T": movement.transpose,
        "mT": lambda w, v: movement.transpose(w, v, -1, -2),
        "data": same,
        "device": lambda w, v: None,
        "dtype": lambda w, v: None if isinstance(v, Activation) and not v.grounded else DType(),
        "ndim": lambda w, v: len(v.shape) if v.shape else Size(),
        "requires_grad": lambda w, v: None,
        "values": lambda w, v: v[0],  # of max, min over a dimension
        "indices": lambda w, v: v[1],
    }
    return rules[name](walk, x) if name in rules else opaque(walk, x, reason=f"its attribute {name!r} is read")


# Compositions of other rules ------------------------------------------------------------------------------------------


def addmm(walk: Walk, x: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Activation:
    """beta·x + alpha·mat1 @ mat2: a linear layer whose parameter is stored (in, out), with bias x."""
    numbers = all(isinstance(factor, (int, float)) for factor in (beta, alpha))
    if not (numbers and isinstance(mat1, Activation) and isinstance(mat2, Weight)):
        return opaque(walk, x, mat1, mat2, beta, alpha, reason="its matrix is not a parameter")
    return linear(walk, mat1, Weight(mat2.name, mat2.shape[::-1], not mat2.swap), x)


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 0


def compare(walk: Walk, x: Any, y: Any) -> Activation:
    """x > 0 and the like: the sign of x, which no positive scale changes."""
    return grounded(x.shape) if isinstance(x, Activation) and _is_zero(y) else pinned(walk, x, y)


def masked_fill(walk: Walk, x: Any, mask: Any, value: Any) -> Any:
    """0 at the entries of a mask: a product with 0 and 1."""
    return where(walk, mask, value, x)


def where(walk: Walk, x: Any, y: Any, other: Any) -> Any:
    """`torch.where(mask, h, 0)`, `torch.where(mask, 0, h)`, `h.where(mask, 0)`: a product with 0 and 1."""
    factors = [value for value in (x, y, other) if not _is_zero(value)]
    if len(factors) != 2 or not all(isinstance(value, (Activation, Buffer)) for value in factors):
        return opaque(walk, x, y, other, reason="entries are replaced by something other than 0")
    return mul(walk, *factors)


def channel_shuffle(walk: Walk, x: Any, groups: int) -> Activation:
    """The channels, dimension 1, as (groups, channels/groups), transposed."""
    if not isinstance(x, Activation) or x.loose or x.spread:
        return opaque(walk, x, reason=movement.UNKNOWN_RANK)
    if x.ids is None or x.ids.shape[1] == 1:
        return x
    return Activation(x.ids.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2), x.shape)


def repeat(walk: Walk, x: Any, *times: Any) -> Activation:
    """Copies side by side along every dimension; where the id does not change, any number of them."""
    if not isinstance(x, Activation) or x.loose or x.spread:
        return opaque(walk, x, times, reason=movement.UNKNOWN_RANK)
    if not ranked(x):
        return Activation()
    listed = list(times[0]) if isinstance(times[0], (tuple, list)) else list(times)
    more = len(listed) - len(x.shape)
    ids, shape = x.ids.reshape([1] * more + list(x.ids.shape)), (1,) * more + x.shape
    copies = [n if size > 1 else 1 for n, size in zip(listed, ids.shape, strict=True)]
    if not all(isinstance(n, int) for n in copies) or (x.shape[0] is None and (more or listed[0] != 1)):
        return opaque(walk, x, reason=movement.UNKNOWN_SIZE)
    sizes = (s * n if isinstance(s, int) and isinstance(n, int) else None for s, n in zip(shape, listed, strict=True))
    return Activation(ids.repeat(copies), tuple(sizes))


def index_select(walk: Walk, x: Any, dim: int, index: Any) -> Activation:
    """Entries gathered along a dimension that holds no units."""
    if not (isinstance(x, Activation) and isinstance(index, (Activation, Buffer)) and index.shape is not None):
        return opaque(walk, x, index, reason=movement.UNKNOWN_SIZE)
    opaque(walk, index, reason="used as indices")
    if not ranked(x):
        return Activation()
    if x.loose or x.spread or x.shape[dim % len(x.shape)] is None:
        return opaque(walk, x, reason=movement.UNKNOWN_SIZE)
    if x.ids.shape[dim] > 1:
        return opaque(walk, x, reason="indexed by a tensor")
    found = index.shape[0] if index.shape else 1
    return Activation(x.ids, tuple(found if d == dim % len(x.shape) else s for d, s in enumerate(x.shape)))


# The table ------------------------------------------------------------------------------------------------------------

POINTWISE = (
    "relu leaky_relu rrelu abs neg positive dropout dropout1d dropout2d dropout3d feature_dropout native_dropout"
)
COPIES = "contiguous clone detach alias lift_fresh_copy float double half bfloat16 cuda cpu requires_grad_"
CASTS = "to _to_copy type_as"
INHOMOGENEOUS = (
    "relu6 hardtanh gelu silu mish elu selu celu tanh sigmoid softplus softsign tanhshrink hardswish hardsigmoid "
    "logsigmoid log_sigmoid hardshrink softshrink exp log log1p sqrt rsqrt pow square sin cos erf softmax "
    "log_softmax softmin _softmax _log_softmax alpha_dropout feature_alpha_dropout layer_norm "
    "group_norm instance_norm rms_norm local_response_norm normalize sign round floor ceil reciprocal"
)
LIKE = "zeros_like ones_like empty_like rand_like randn_like full_like new_zeros new_ones new_empty new_full new_tensor"
# In-place variants share a rule only where the result keeps the layout of its input: a stale name then still fits.
INPLACE = {
    *(*POINTWISE.split(), *INHOMOGENEOUS.split()),
    *"add sub mul div threshold clamp clamp_min masked_fill".split(),
}

FUNCTIONS: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE.split(), same),
    **dict.fromkeys(COPIES.split(), same),
    **dict.fromkeys(CASTS.split(), cast),
    **dict.fromkeys(INHOMOGENEOUS.split(), pinned),
    **dict.fromkeys(LIKE.split(), like),
    **dict.fromkeys("add sub".split(), add),
    **dict.fromkeys("mul multiply".split(), mul),
    **dict.fromkeys("div truediv divide".split(), div),
    **dict.fromkeys("maximum minimum".split(), join),
    **dict.fromkeys("mean sum amax amin".split(), reduce),
    **dict.fromkeys("max min".split(), extremum),
    **dict.fromkeys("clamp clip".split(), clamp),
    "clamp_min": lambda walk, x, min: clamp(walk, x, min),
    "threshold": threshold,
    "prelu": prelu,
    "linear": linear,
    "matmul": matmul,
    "mm": lambda walk, x, mat2: matmul(walk, x, mat2),
    "addmm": addmm,
    "embedding": embedding,
    "batch_norm": batch_norm,
    "functional_batch_norm": functional_batch_norm,
    **{f"conv{d}d": conv(d) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": conv(d, transposed=True) for d in (1, 2, 3)},
    **{f"{kind}_pool{d}d": pool(d) for d in (1, 2, 3) for kind in ("max", "avg")},
    **{f"adaptive_{kind}_pool{d}d": pool(d, adaptive=True) for d in (1, 2, 3) for kind in ("max", "avg")},
    **{f"max_pool{d}d_with_indices": max_pool_with_indices(d) for d in (1, 2, 3)},
    **dict.fromkeys(
        "interpolate upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d".split(), interpolate
    ),
    **dict.fromkeys("upsample_linear1d upsample_trilinear3d upsample_bicubic2d upsample".split(), interpolate),
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "channel_shuffle": channel_shuffle,
    **dict.fromkeys("gt lt ge le eq ne".split(), compare),
    "masked_fill": masked_fill,
    "where": where,
    "repeat": repeat,
    "index_select": index_select,
    "pad": movement.pad,
    "constant_pad_nd": movement.constant_pad,
    "flatten": movement.flatten,
    **dict.fromkeys("view reshape _unsafe_view".split(), movement.reshape),
    "permute": movement.rearrange(lambda x, *d, **k: torch.permute(x, k.get("dims", d[0] if len(d) == 1 else d))),
    "movedim": movement.rearrange(torch.movedim),
    "flip": movement.flip,
    "roll": movement.roll,
    "unsqueeze": movement.rearrange(torch.unsqueeze),
    **dict.fromkeys("transpose t swapaxes".split(), movement.transpose),
    "squeeze": movement.squeeze,
    **dict.fromkeys("expand broadcast_to".split(), movement.expand),
    "expand_as": movement.expand_as,
    "unflatten": movement.unflatten,
    **dict.fromkeys("split split_with_sizes".split(), movement.split(torch.split)),
    "chunk": movement.split(torch.chunk),
    "tensor_split": movement.split(torch.tensor_split),
    "unbind": movement.unbind,
    "select": movement.select,
    "narrow": movement.narrow,
    "slice": movement.slice_,
    "getitem": movement.index,
    **dict.fromkeys("cat concat concatenate".split(), movement.cat),
    "stack": movement.stack,
    **dict.fromkeys("size sym_size".split(), size),
    "getattr": attribute,
    "_assert_tensor_metadata": lambda walk, x, *args, **kwargs: None,  # what export writes beside a cast
    "dim": lambda walk, x: len(x.shape) if x.shape else Size(),
}


def _affine(*names: str) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda m: {name: getattr(m, name) for name in names}


def _norm(rank: int) -> Callable[[nn.Module], dict[str, Any]]:
    def arguments(m: nn.Module) -> dict[str, Any]:
        return {"weight": m.weight, "bias": m.bias, "mean": m.running_mean, "var": m.running_var, "rank": rank}

    return arguments


def _nothing(m: nn.Module) -> dict[str, Any]:
    return {}


def _pads(mode: str) -> Callable[[nn.Module], dict[str, Any]]:
    return lambda m: {"pads": m.padding, "mode": mode, "value": getattr(m, "value", None)}


def _table(names: str) -> dict[type[nn.Module], str]:
    """`"ReLU:relu"` → {nn.ReLU: "relu"}, for the modules that this version of torch has."""
    pairs = [pair.split(":") for pair in names.split()]
    return {getattr(nn, module): operation for module, operation in pairs if hasattr(nn, module)}


# Leaf modules: operation and the keyword arguments that the module holds.
MODULES: dict[type[nn.Module], tuple[str, Callable[[nn.Module], dict[str, Any]]]] = {
    nn.Linear: ("linear", _affine("weight", "bias")),
    nn.modules.linear.NonDynamicallyQuantizableLinear: ("linear", _affine("weight", "bias")),
    nn.Embedding: ("embedding", lambda m: {"b": m.weight, "padding_idx": m.padding_idx, "max_norm": m.max_norm}),
    nn.PReLU: ("prelu", lambda m: {"slope": m.weight}),
    nn.Threshold: ("threshold", _affine("threshold", "value")),
    nn.Flatten: ("flatten", _affine("start_dim", "end_dim")),
    nn.Softmax2d: ("softmax", _nothing),
    nn.PixelShuffle: ("pixel_shuffle", _affine("upscale_factor")),
    nn.PixelUnshuffle: ("pixel_unshuffle", _affine("downscale_factor")),
    nn.Unflatten: ("unflatten", lambda m: {"dim": m.dim, "sizes": m.unflattened_size}),
    nn.ChannelShuffle: ("channel_shuffle", _affine("groups")),
    nn.SyncBatchNorm: ("batch_norm", _norm(4)),
    **{getattr(nn, f"BatchNorm{d}d"): ("batch_norm", _norm(d + 2 if d > 1 else 2)) for d in (1, 2, 3)},
    **{getattr(nn, f"Conv{d}d"): (f"conv{d}d", _affine("weight", "bias", "groups")) for d in (1, 2, 3)},
    **{
        getattr(nn, f"ConvTranspose{d}d"): (f"conv_transpose{d}d", _affine("weight", "bias", "groups"))
        for d in (1, 2, 3)
    },
    **{getattr(nn, f"MaxPool{d}d"): (f"max_pool{d}d", _affine("return_indices")) for d in (1, 2, 3)},
    **{getattr(nn, f"AvgPool{d}d"): (f"avg_pool{d}d", _nothing) for d in (1, 2, 3)},
    **{
        getattr(nn, f"Adaptive{kind}Pool{d}d"): (f"adaptive_{kind.lower()}_pool{d}d", _affine("output_size"))
        for d in (1, 2, 3)
        for kind in ("Max", "Avg")
    },
    **{
        getattr(nn, f"{kind}Pad{d}d"): ("pad", _pads(mode))
        for d in (1, 2, 3)
        for kind, mode in (
            ("Zero", "constant"),
            ("Constant", "constant"),
            ("Reflection", "reflect"),
            ("Replication", "replicate"),
            ("Circular", "circular"),
        )
        if hasattr(nn, f"{kind}Pad{d}d")
    },
    **{
        module: (operation, _nothing)
        for module, operation in _table(
            "Identity:clone ReLU:relu LeakyReLU:leaky_relu RReLU:rrelu Dropout:dropout Dropout1d:dropout "
            "Dropout2d:dropout Dropout3d:dropout Upsample:interpolate UpsamplingNearest2d:interpolate "
            "UpsamplingBilinear2d:interpolate ReLU6:relu6 Hardtanh:hardtanh GELU:gelu SiLU:silu Mish:mish ELU:elu "
            "SELU:selu CELU:celu Tanh:tanh Sigmoid:sigmoid Softplus:softplus Softsign:softsign Tanhshrink:tanhshrink "
            "Hardswish:hardswish Hardsigmoid:hardsigmoid LogSigmoid:logsigmoid Hardshrink:hardshrink "
            "Softshrink:softshrink Softmax:softmax LogSoftmax:log_softmax Softmin:softmin AlphaDropout:alpha_dropout "
            "FeatureAlphaDropout:feature_alpha_dropout"
        ).items()
    },
    **{
        module: (operation, _affine("weight", "bias"))
        for module, operation in _table(
            "LayerNorm:layer_norm GroupNorm:group_norm InstanceNorm1d:instance_norm InstanceNorm2d:instance_norm "
            "InstanceNorm3d:instance_norm"
        ).items()
    },
    **{module: (operation, _affine("weight")) for module, operation in _table("RMSNorm:rms_norm").items()},
}
