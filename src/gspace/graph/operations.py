"""The table of operations: what each one does to the spaces of its inputs.

Names are canonical: `F.relu`, `x.relu_()`, `nn.ReLU()` and `aten.relu` are all `"relu"`. An operation that is not in
the table is opaque: it pins what it reads and what it returns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gspace.graph import movement, pieces
from gspace.graph.arithmetic import (
    add,
    both_pinned,
    cast,
    clamp,
    compare,
    div,
    join,
    like,
    masked_fill,
    mul,
    pinned,
    prelu,
    same,
    threshold,
    where,
)
from gspace.graph.layers import (
    addmm,
    batch_norm,
    conv,
    embedding,
    extremum,
    functional_batch_norm,
    interpolate,
    linear,
    matmul,
    max_pool_with_indices,
    pixel_shuffle,
    pixel_unshuffle,
    pool,
    reduce,
)
from gspace.graph.sizes import attribute, rank, size
from gspace.graph.spaces import Rule

POINTWISE = (
    "relu leaky_relu rrelu abs neg positive dropout dropout1d dropout2d dropout3d feature_dropout native_dropout"
)
COPIES = "contiguous clone detach alias lift_fresh_copy float double half bfloat16 cuda cpu requires_grad_"
CASTS = "to _to_copy type_as"
INHOMOGENEOUS = (
    "relu6 hardtanh gelu silu mish elu selu celu tanh sigmoid softplus softsign tanhshrink hardswish hardsigmoid "
    "logsigmoid log_sigmoid hardshrink softshrink exp log log1p sqrt rsqrt square sin cos erf softmax "
    "log_softmax softmin _softmax _log_softmax alpha_dropout feature_alpha_dropout layer_norm "
    "group_norm instance_norm rms_norm local_response_norm normalize sign round floor ceil reciprocal"
)
LIKE = "zeros_like ones_like empty_like rand_like randn_like full_like new_zeros new_ones new_empty new_full new_tensor"
# In-place variants share a rule only where the result keeps the layout of its input: a stale name then still fits.
INPLACE = {
    *(*POINTWISE.split(), *INHOMOGENEOUS.split()),
    *"add sub mul div threshold clamp clamp_min masked_fill pow".split(),
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
    "pow": both_pinned,
    "prelu": prelu,
    "linear": linear,
    "matmul": matmul,
    **dict.fromkeys("mm bmm".split(), lambda walk, x, mat2: matmul(walk, x, mat2)),
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
    "channel_shuffle": movement.channel_shuffle,
    **dict.fromkeys("gt lt ge le eq ne".split(), compare),
    "masked_fill": masked_fill,
    "where": where,
    "repeat": movement.repeat,
    "index_select": pieces.index_select,
    "pad": pieces.pad,
    "constant_pad_nd": pieces.constant_pad,
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
    **dict.fromkeys("split split_with_sizes".split(), pieces.split(torch.split)),
    "chunk": pieces.split(torch.chunk),
    "tensor_split": pieces.split(torch.tensor_split),
    "unbind": pieces.unbind,
    "select": pieces.select,
    "narrow": pieces.narrow,
    "slice": pieces.slice_,
    "getitem": pieces.index,
    **dict.fromkeys("cat concat concatenate".split(), pieces.cat),
    "stack": pieces.stack,
    **dict.fromkeys("size sym_size".split(), size),
    "getattr": attribute,
    "_assert_tensor_metadata": lambda walk, x, *args, **kwargs: None,  # what export writes beside a cast
    "dim": rank,
}


# What writes a sample for each that it reads. What moves, cuts, sums or broadcasts says itself if it does.
KEEPS_BATCH = {
    *(*POINTWISE.split(), *COPIES.split(), *CASTS.split(), *INHOMOGENEOUS.split(), *LIKE.split()),
    *"clamp clip clamp_min threshold prelu".split(),
    *"linear addmm embedding batch_norm functional_batch_norm".split(),
    *(name for name in FUNCTIONS if name.startswith(("interpolate", "upsample")) or "_pool" in name),
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
