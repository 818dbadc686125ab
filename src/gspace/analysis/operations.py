"""Every operation that is known, one row for those that behave alike: names, what they do to scales, and to path sums.

Names are those of ATen, without the underscore of a call in place. An operation that is in no row is written by others
where torch knows how. Else it pins what it reads: never wrong, only unused; and there is no path sum. Where an
operation that is known has none, the third entry is the reason.
"""

from collections.abc import Callable
from typing import Any

from gspace.analysis import pathrules as paths
from gspace.analysis import rules
from gspace.analysis.follow import CREATED
from gspace.analysis.pathrules import NOT_HOMOGENEOUS, UNKNOWN
from gspace.analysis.sums import READ

Rule = Callable[..., Any]
TABLE: tuple[tuple[str, Rule | None, Rule | str | None], ...] = (
    ("", rules.unknown, UNKNOWN),
    # entry by entry
    ("relu abs neg positive", rules.homogeneous, paths.same),
    ("leaky_relu rrelu_with_noise rrelu_with_noise_functional", rules.homogeneous, paths.leaky),
    ("tril triu", rules.homogeneous, paths.moved),
    ("native_dropout", rules.homogeneous, paths.same),
    ("clamp clamp_min clamp_max threshold hardtanh", rules.clamped, paths.clamped),
    ("_prelu_kernel prelu", rules.prelu, paths.prelu),
    ("mul", rules.product, paths.product),
    ("div", rules.product, paths.divided),
    ("sqrt rsqrt reciprocal pow", rules.power, NOT_HOMOGENEOUS),
    ("add sub maximum minimum fmax fmin", rules.added, paths.added),
    ("rsub masked_fill", rules.added, None),
    ("where", rules.added, paths.moved),
    ("lt le gt ge eq ne", rules.compared, paths.nothing),
    # movement
    ("clone _to_copy copy contiguous", rules.copied, paths.copied),
    (
        "repeat flip roll index_copy slice_scatter select_scatter diagonal_scatter pixel_shuffle "
        "pixel_unshuffle channel_shuffle native_channel_shuffle masked_select take",
        rules.moved,
        paths.moved,
    ),
    ("split_with_sizes_copy repeat_interleave", rules.moved, UNKNOWN),
    (
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
        "replication_pad3d upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d",
        None,
        paths.windows,
    ),
    ("diag_embed", rules.diagonal, paths.moved),
    ("cat", rules.joined, paths.moved),
    ("constant_pad_nd", rules.padded, paths.padded),
    ("index index_select gather take_along_dim", rules.chosen, paths.moved),
    ("embedding", rules.chosen, paths.embedding),
    ("_embedding_bag _embedding_bag_forward_only", rules.bags, UNKNOWN),
    ("index_put masked_scatter", rules.collected, paths.moved),
    ("index_add scatter scatter_add scatter_reduce", rules.collected, UNKNOWN),
    # reductions
    ("sum mean amax amin max min", rules.reduced, paths.reduced),
    (
        "norm linalg_vector_norm std var var_mean std_mean median nanmedian kthvalue mode aminmax nansum",
        rules.reduced,
        UNKNOWN,
    ),
    ("argmax argmin argsort", rules.along, paths.nothing),
    ("cumsum sort topk cummax cummin", rules.along, UNKNOWN),
    (
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d max_pool1d "
        "max_pool2d max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d "
        "mkldnn_max_pool2d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
        rules.pooled,
        paths.windows,
    ),
    ("fractional_max_pool2d", rules.pooled, UNKNOWN),
    # layers
    ("mm bmm", rules.matrix_product, paths.matrix_product),
    ("addmm", rules.matrix_product, None),
    (
        "convolution _convolution cudnn_convolution mkldnn_convolution convolution_overrideable",
        rules.convolution,
        paths.convolution,
    ),
    ("_grouped_mm", rules.grouped_product, UNKNOWN),
    ("_trilinear", rules.trilinear, UNKNOWN),
    # norms
    ("native_layer_norm _fused_rms_norm rms_norm", rules.layer_norm, NOT_HOMOGENEOUS),
    ("native_group_norm", rules.group_norm, NOT_HOMOGENEOUS),
    (
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm "
        "_batch_norm_with_update _batch_norm_no_update miopen_batch_norm",
        rules.batch_norm,
        paths.batch_norm,
    ),
    ("_weight_norm_interface", rules.weight_norm, NOT_HOMOGENEOUS),
    # what no positive scale changes
    (" ".join(CREATED), rules.created, paths.filled),
    (
        "ones_like empty_like rand_like randn_like empty new_empty new_ones uniform exponential random "
        "empty_strided new_empty_strided randint_like is_same_size sym_size _has_compatible_shallow_copy_type set_data "
        "resize _assert_tensor_metadata",
        rules.ground,
        paths.nothing,
    ),
    (
        "sign sgn signbit isnan isinf isfinite logical_not logical_and logical_or nonzero any all",
        rules.ground,
        paths.nothing,
    ),
    ("normal bernoulli", rules.drawn, paths.nothing),
    ("_local_scalar_dense item equal is_nonzero allclose", rules.read_out, READ),
    # what every scale changes
    (
        "sigmoid tanh gelu silu elu celu selu mish softplus hardsigmoid hardswish log_sigmoid_forward exp expm1 log "
        "log1p log2 log10 sin cos erf erfinv softmax _softmax log_softmax _log_softmax logsumexp softshrink hardshrink "
        "floor ceil round "
        "trunc frac remainder fmod logcumsumexp native_alpha_dropout prod cumprod",
        rules.nonlinear,
        NOT_HOMOGENEOUS,
    ),
)

RULES: dict[str, Rule] = {name: rule for names, rule, _ in TABLE for name in names.split(" ") if rule is not None}
PATHS: dict[str, Rule | str] = {name: rule for names, _, rule in TABLE for name in names.split(" ") if rule is not None}
