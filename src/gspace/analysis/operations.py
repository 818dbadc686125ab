"""Every operation that is known, one row for those that behave alike: names, and what they do to scales.

Names are those of ATen, without the underscore of a call in place. An operation that is in no row is written by others
where torch knows how, and else pins what it reads: never wrong, only unused.
"""

from gspace.analysis import rules
from gspace.analysis.follow import Rule

TABLE: tuple[tuple[str, Rule], ...] = (
    ("", rules.unknown),
    # entry by entry
    ("relu leaky_relu abs neg rrelu_with_noise rrelu_with_noise_functional tril triu positive", rules.homogeneous),
    ("native_dropout", rules.dropout),
    ("clamp clamp_min clamp_max threshold hardtanh", rules.clamped),
    ("_prelu_kernel prelu", rules.prelu),
    ("glu", rules.glu),
    ("mul div", rules.product),
    ("sqrt rsqrt reciprocal square pow", rules.power),
    ("add sub rsub where maximum minimum fmax fmin masked_fill lerp", rules.added),
    ("lt le gt ge eq ne", rules.compared),
    ("addcmul addcdiv", rules.product_added),
    # movement
    ("clone _to_copy copy contiguous", rules.copied),
    (
        "repeat flip roll index_copy slice_scatter select_scatter diag_embed diagonal_scatter pixel_shuffle "
        "pixel_unshuffle channel_shuffle native_channel_shuffle split_with_sizes_copy masked_select "
        "repeat_interleave take",
        rules.moved,
    ),
    (
        "im2col reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
        "replication_pad3d upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d",
        rules.resampled,
    ),
    ("cat stack", rules.joined),
    ("constant_pad_nd", rules.padded),
    ("index index_select gather embedding take_along_dim", rules.chosen),
    ("index_add scatter scatter_add scatter_reduce index_put masked_scatter", rules.collected),
    # reductions
    (
        "sum mean amax amin max min median nanmedian aminmax norm linalg_vector_norm std var var_mean std_mean nansum",
        rules.reduced,
    ),
    ("cumsum sort topk argmax argmin cummax cummin argsort", rules.along),
    (
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d max_pool1d "
        "max_pool2d max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d "
        "mkldnn_max_pool2d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa col2im fractional_max_pool2d",
        rules.pooled,
    ),
    # layers
    ("mm bmm addmm baddbmm mv addmv dot vdot", rules.matrix_product),
    ("linear mkldnn_linear _addmm_activation", rules.linear),
    ("convolution _convolution cudnn_convolution mkldnn_convolution convolution_overrideable", rules.convolution),
    ("_grouped_mm", rules.grouped_product),
    ("_trilinear", rules.trilinear),
    (
        "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable",
        rules.attention,
    ),
    # norms
    ("native_layer_norm _fused_rms_norm rms_norm", rules.layer_norm),
    ("native_group_norm", rules.group_norm),
    (
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm "
        "_batch_norm_with_update _batch_norm_no_update miopen_batch_norm",
        rules.batch_norm,
    ),
    ("_weight_norm_interface", rules.weight_norm),
    # what no positive scale changes
    ("zeros zeros_like new_zeros zero full new_full full_like scalar_tensor fill", rules.created),
    (
        "ones_like empty_like rand_like randn_like empty new_empty new_ones bernoulli uniform normal exponential "
        "random empty_strided new_empty_strided randint_like sign sgn signbit isnan isinf isfinite logical_not "
        "logical_and logical_or nonzero is_same_size sym_size _has_compatible_shallow_copy_type set_data "
        "resize _assert_tensor_metadata any all",
        rules.ground,
    ),
    ("_local_scalar_dense item equal is_nonzero allclose", rules.read_out),
    # what every scale changes
    (
        "sigmoid tanh gelu silu elu celu selu mish softplus hardsigmoid hardswish log_sigmoid_forward exp expm1 log "
        "log1p log2 log10 sin cos erf erfinv softmax _softmax log_softmax _log_softmax logsumexp softshrink hardshrink "
        "floor ceil round "
        "trunc frac remainder fmod logcumsumexp native_alpha_dropout prod cumprod",
        rules.nonlinear,
    ),
)

RULES: dict[str, Rule] = {name: rule for names, rule in TABLE for name in names.split(" ")}
