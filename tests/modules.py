"""Small modules as data: each with the number of its scales, derived by hand in the line above it.

`H` counts exact units, `H_absorbed` those that are free as ε → 0. Widths differ, so that no axis passes for another.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from attentions import (
    Attention,
    BiasedAttention,
    Cached,
    CrossAttention,
    FusedAttention,
    NormedAttention,
    TorchAttention,
    by_hand,
    flash,
    grouped,
    linear_attention,
    masked,
    math,
    repeated,
    rotary,
)
from layers import (
    Bags,
    DenseExperts,
    Experts,
    Flat,
    Gated,
    Hypernetwork,
    Inplace,
    LanguageModel,
    LayerDrop,
    LayerScale,
    LoRA,
    Normalize,
    PreNorm,
    Reads,
    Recurrent,
    RMSNorm,
    SqueezeExcite,
    StandardConv,
    TorchRecurrent,
    Twice,
)
from parts import Net


@dataclass(frozen=True)
class Module:
    """A small module and what `analyze` must say about it.

    Attributes:
        shapes: Shape of each input, without the batch.
        vocabulary: Inputs are integers below it (0: normal floats).
        free: Single weights that no output depends on at any weights, which are no unit, and scales that are left out.
            None: derivatives cannot tell.
        why: What makes them free, or what hides from derivatives.
    """

    name: str
    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    H: int
    H_absorbed: int = 0
    vocabulary: int = 0
    free: int | None = 0
    why: str = ""


VECTOR, TOKENS, IMAGE, TEXT = ((4,),), ((3, 4),), ((2, 5, 5),), ((3,),)
SHIFT = "a key's bias adds the same to all logits of a query"


def sequence(*layers: nn.Module) -> Callable[[], nn.Module]:
    """A factory of copies; `randomize_` draws their weights."""
    return partial(deepcopy, nn.Sequential(*layers))


def _ends(x: Tensor) -> Tensor:
    """The one of 3 rows that each row of a batch is added to."""
    return (torch.arange(len(x)) % 3)[:, None]


def net(forward: Callable[..., Tensor], **shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    """A network as one function of linear layers (in, out) and of parameters of other shapes (a list)."""

    def part(shape: tuple[int, ...] | list[int]) -> nn.Module | nn.Parameter:
        return nn.Parameter(torch.empty(*shape)) if isinstance(shape, list) else nn.Linear(*shape)

    return lambda: Net(forward, **{name: part(shape) for name, shape in shapes.items()})


def conv(i: int, o: int, kernel: int = 1, **options: int) -> nn.Module:
    return nn.Conv2d(i, o, kernel, bias=False, **options)


def weight_normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(4, 5)), nn.ReLU(), nn.Linear(5, 3))


NORMS = (
    # Gain and bias write 4 channels that the head reads; the data in front has no scale.
    Module("layer-norm", sequence(nn.LayerNorm(4), nn.Linear(4, 3)), VECTOR, H=4),
    # The gains' 5; the row in front has one scale, which the norm divides out.
    Module("layer-norm-absorbs", sequence(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)), VECTOR, 5, 1),
    # No gain, no scale behind the norm; 1 in front of it.
    Module(
        "layer-norm-plain",
        sequence(nn.Linear(4, 5), nn.LayerNorm(5, elementwise_affine=False), nn.Linear(5, 3)),
        VECTOR,
        H=0,
        H_absorbed=1,
    ),
    # As layer-norm-absorbs.
    Module("rms-norm", sequence(nn.Linear(4, 5), nn.RMSNorm(5, eps=1e-6), nn.Linear(5, 3)), VECTOR, 5, 1),
    Module("rms-norm-by-hand", sequence(nn.Linear(4, 5), RMSNorm(5), nn.Linear(5, 3)), VECTOR, 5, 1),
    # 1 + w is scaled in place of w.
    Module("rms-norm-offset", sequence(nn.Linear(4, 5), RMSNorm(5, 1.0), nn.Linear(5, 3)), VECTOR, 5, 1),
    # 6 gains; each of the 2 groups of 3 channels has one scale in front.
    Module("group-norm", sequence(conv(2, 6), nn.GroupNorm(2, 6), nn.ReLU(), conv(6, 3)), IMAGE, 6, 2),
    # 5 gains; every channel is divided by its own size.
    Module(
        "instance-norm", sequence(conv(2, 5), nn.InstanceNorm2d(5, affine=True), nn.ReLU(), conv(5, 3)), IMAGE, 5, 5
    ),
    # 5 gains; 5 rows.
    Module("batch-norm", sequence(conv(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), conv(5, 3)), IMAGE, 5, 5),
    # Gains 4 + 4 and the hidden 5; the stream has one scale that both norms divide out.
    Module("pre-norm-block", PreNorm, ((3,),), 13, 1),
    # The stream's 4, and the branch's 4 behind gains of their own.
    Module("layer-scale", partial(LayerScale, 4), ((3,),), 8),
    # The stream's 4, and the branch's 4 behind one gain: they differ from the stream by one factor.
    Module("re-zero", partial(LayerScale, 1), ((3,),), 5),
    # Filters have a scale each that the deviation divides out; gain and bias write 5.
    Module("weight-standardization", sequence(StandardConv(2, 5, 3), nn.ReLU(), conv(5, 3)), IMAGE, 5, 5),
    # Rows of v have a scale each that ‖v‖ divides out, without ε; g and bias write 5.
    Module("weight-norm-hook", partial(weight_normed, nn.utils.weight_norm), VECTOR, 10),
    Module("weight-norm", partial(weight_normed, parametrizations.weight_norm), VECTOR, 10),
    # The row has one scale that its size divides out; ε is the least size.
    Module("normalize", sequence(nn.Linear(4, 5), Normalize(), nn.Linear(5, 3)), VECTOR, 0, 1),
)

ATTENTION = (
    # 2 heads of 2: V → O 4, Q → K 4.
    Module("attention-fused", Attention, TOKENS, 8),
    Module("attention-math", partial(Attention, math), TOKENS, 8),
    Module("attention-flash", partial(Attention, flash), TOKENS, 8),
    Module("attention-by-hand", partial(Attention, by_hand), TOKENS, 8),
    Module("attention-masked", partial(Attention, masked), TOKENS, 8),
    # Biases scale along; those of the keys do nothing.
    Module("attention-bias", partial(Attention, bias=True), TOKENS, 8, free=4, why=SHIFT),
    # 4 query heads read 2 heads of keys and values: V → O 2·2, Q → K 2·2.
    Module("attention-grouped", partial(Attention, grouped, 4), TOKENS, 8),
    Module("attention-repeated", partial(Attention, repeated, 4), TOKENS, 8),
    # One head of keys and values: 2 + 2.
    Module("attention-multi-query", partial(Attention, repeated, 3, 1), TOKENS, 4),
    # V → O 4; the two channels of a rotary pair mix: Q → K 1 a head.
    Module("attention-rotary", partial(Attention, rotary), TOKENS, 6),
    # V → O 4; the gains of q and k, shared by the heads, make 2; 2 + 2 heads are divided by their size.
    Module("attention-qk-norm", NormedAttention, TOKENS, 6, 4),
    # V → O 4, one rotary pair of gains.
    Module("attention-qk-norm-rotary", partial(NormedAttention, rotary), TOKENS, 5, 4),
    # 4 + 4, from slices of one weight.
    Module("attention-split", partial(FusedAttention, "split"), TOKENS, 8),
    Module("attention-chunk", partial(FusedAttention, "chunk"), TOKENS, 8),
    Module("attention-reshape", partial(FusedAttention, "reshape"), TOKENS, 8),
    # 4 + 4; the weights it returns are ground anyway.
    Module("attention-torch", partial(TorchAttention, False), TOKENS, 8),
    Module("attention-torch-weights", partial(TorchAttention, True), TOKENS, 8),
    Module("attention-cross", CrossAttention, ((3, 4), (3, 5)), 8),
    # The table is added to logits, which are ground.
    Module("attention-bias-table", BiasedAttention, TOKENS, 8),
    # V → O 4, Q → K 4, and one factor a head that numerator and denominator share.
    Module("attention-linear", partial(Attention, linear_attention), TOKENS, 10),
    # A cache is no output: 8. Keys and values as tensors are: 0.
    Module("cache-object", partial(Cached, False), TOKENS, 8),
    Module("cache-tensors", partial(Cached, True), TOKENS, 0),
)

GATES = (
    # up → down 5; the gate's activation is not homogeneous.
    Module("swiglu", partial(Gated, F.silu), VECTOR, 5),
    Module("geglu", partial(Gated, F.gelu), VECTOR, 5),
    # Gate and up have a scale each, which down takes back: 5 + 5.
    Module("reglu", partial(Gated, F.relu), VECTOR, 10),
    Module("bilinear", partial(Gated, nn.Identity()), VECTOR, 10),
    # The first half of 10 is up, the second goes through a sigmoid.
    Module("glu", sequence(nn.Linear(4, 10), nn.GLU(), nn.Linear(5, 3)), VECTOR, 5),
    # 5; down takes back the square of the scale.
    Module("squared-relu", net(lambda n, x: n.b(F.relu(n.a(x)).square()), a=(4, 5), b=(5, 3)), VECTOR, 5),
    # x·sigmoid(x) is no scale of x.
    Module("silu-by-hand", net(lambda n, x: n.b(n.a(x) * n.a(x).sigmoid()), a=(4, 5), b=(5, 3)), VECTOR, 0),
    # 5 channels, which squeeze and head read, and the squeezed 3.
    Module("squeeze-excite", SqueezeExcite, IMAGE, 8),
)

PRODUCTS = (
    # 5 hidden each: only the notation differs.
    Module("matmul", net(lambda n, x: F.relu(x @ n.a) @ n.b, a=[4, 5], b=[5, 3]), VECTOR, 5),
    Module(
        "einsum",
        net(lambda n, x: torch.einsum("bh,ho->bo", F.relu(torch.einsum("bi,hi->bh", x, n.a)), n.b), a=[5, 4], b=[5, 3]),
        VECTOR,
        5,
    ),
    # 3 tokens with weights of their own: 3·5.
    Module(
        "bmm",
        net(
            lambda n, x: torch.bmm(F.relu(torch.bmm(x.transpose(0, 1), n.a)), n.b).transpose(0, 1),
            a=[3, 4, 5],
            b=[3, 5, 2],
        ),
        TOKENS,
        15,
    ),
    # 2 heads of 3 from one tensor of weights: 6.
    Module(
        "einsum-heads",
        net(
            lambda n, x: torch.einsum("bhe,heo->bo", F.relu(torch.einsum("bd,hde->bhe", x, n.a)), n.b),
            a=[2, 4, 3],
            b=[2, 3, 5],
        ),
        VECTOR,
        6,
    ),
    # x'Wx: both factors are the data's; 5 behind it.
    Module(
        "bilinear-layer",
        lambda: Net(lambda n, x: n.b(F.relu(n.a(x, x))), a=nn.Bilinear(4, 4, 5), b=nn.Linear(5, 3)),
        VECTOR,
        5,
    ),
    # One weight is a product of two of rank 2, and writes 5.
    Module("low-rank", net(lambda n, x: n.c(F.relu(x @ (n.a @ n.b))), a=[4, 2], b=[2, 5], c=(5, 3)), VECTOR, 7),
    # The product's 2 and the hidden 5, whether it is added to the output or to the weight.
    Module("lora", partial(LoRA, False), VECTOR, 7),
    Module("lora-merged", partial(LoRA, True), VECTOR, 7),
    # Hidden 3 of the maker, and the 5 rows that it makes.
    Module("hypernetwork", Hypernetwork, ((4,), (2,)), 8),
)

TABLES = (
    # 4 channels of token and position together, and the hidden 5.
    Module("embedding", partial(LanguageModel, False, False), TEXT, 9, vocabulary=7),
    Module("embedding-padding", partial(LanguageModel, False, False, 0), TEXT, 9, vocabulary=7),
    # 4 channels of a bag and the hidden 5.
    Module("embedding-bag-sum", partial(Bags, "sum", None), TEXT, 9, vocabulary=7),
    Module("embedding-bag-max", partial(Bags, "max", None), TEXT, 9, vocabulary=7),
    Module("embedding-bag-mean", partial(Bags, "mean", 0), TEXT, 9, vocabulary=7, free=4, why="padding is not read"),
    # Hidden 5; a scale of the stream comes back squared from the tied head.
    Module("embedding-tied", partial(LanguageModel, True, False), TEXT, 5, vocabulary=7),
    # The norm's 4 gains and the hidden 5; the stream's 4 are one before the norm.
    Module("embedding-norm", partial(LanguageModel, False, True), TEXT, 9, 1, vocabulary=7),
    # Hidden 5. The stream may grow by c if the gains shrink by it: absorbed, 1.
    Module("embedding-tied-norm", partial(LanguageModel, True, True), TEXT, 5, 1, vocabulary=7),
    # The state is one set of units over all steps: 4, 4 + 4 in two layers, 5.
    Module("rnn-relu", lambda: TorchRecurrent(nn.RNN(3, 4, nonlinearity="relu", batch_first=True)), ((3, 3),), 4),
    Module("rnn-relu-deep", lambda: TorchRecurrent(nn.RNN(3, 4, 2, "relu", batch_first=True)), ((3, 3),), 8),
    Module("rnn-by-hand", Recurrent, ((3, 3),), 5),
    # Every state goes through sigmoids and tanh.
    Module("lstm", lambda: TorchRecurrent(nn.LSTM(3, 4, batch_first=True)), ((3, 3),), 0),
    # 3 experts of 5; the router's softmax is ground.
    Module("experts", Experts, VECTOR, 15),
    Module("experts-dense", DenseExperts, VECTOR, 15),
    # The stream's 4 and 3 + 3 inside the blocks, dropped or not.
    Module("layerdrop", LayerDrop, ((3,),), 10),
)

CONVOLUTIONS = (
    # 3 + 5; in groups 4 + 6.
    Module(
        "conv-transpose", sequence(conv(2, 3), nn.ReLU(), nn.ConvTranspose2d(3, 5, 2), nn.ReLU(), conv(5, 2)), IMAGE, 8
    ),
    Module(
        "conv-transpose-groups",
        sequence(conv(2, 4), nn.ReLU(), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.ReLU(), conv(6, 2)),
        IMAGE,
        10,
    ),
    # 5 pointwise, 5 depthwise.
    Module("depthwise", sequence(conv(2, 5), nn.ReLU(), conv(5, 5, 3, groups=5), nn.ReLU(), conv(5, 3)), IMAGE, 10),
    # Pools and copies keep 5 channels apart; a pixel shuffle puts 4 channels into each of 2.
    Module(
        "pools",
        sequence(conv(2, 5), nn.MaxPool2d(2), nn.AvgPool2d(2, 1), nn.Upsample(scale_factor=2), conv(5, 3)),
        IMAGE,
        5,
    ),
    Module("pixel-shuffle", sequence(conv(2, 8), nn.ReLU(), nn.PixelShuffle(2), conv(2, 3)), IMAGE, 2),
    # Slopes have no scale.
    Module("prelu", sequence(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, 3)), VECTOR, 5),
    Module("leaky", sequence(nn.Linear(4, 5), nn.LeakyReLU(0.2), nn.Linear(5, 3)), VECTOR, 5),
    # The larger of two: pairs share a scale.
    Module("maxout", net(lambda n, x: n.b(n.a(x).unflatten(-1, (5, 2)).amax(-1)), a=(4, 10), b=(5, 3)), VECTOR, 5),
)

WAYS = (
    # 3 + 2, wherever they are written.
    Module("in-place", Inplace, VECTOR, 5),
    # 5 hidden, from slices of one vector.
    Module("flat-parameter", Flat, VECTOR, 5),
    # 5 that first, shared and last hold together; and shared may grow by t if the second use is taken back by last.
    Module("used-twice", Twice, VECTOR, 6),
    # The first 5 are read as a number and stay; the next layer keeps its 6.
    Module(
        "reads-item",
        partial(Reads, lambda x: x.abs().amax().item()),
        VECTOR,
        6,
        free=None,
        why="item() has no gradient",
    ),
    # Which of the 5 is largest does not depend on their common scale: 1; then 6.
    Module(
        "reads-argmax",
        partial(Reads, lambda x: 1 + max(x.argmax(-1).tolist())),
        VECTOR,
        7,
        free=None,
        why="argmax has no gradient",
    ),
    # Sorting compares the 5.
    Module("sorted", net(lambda n, x: n.b(F.relu(n.a(x)).sort(-1).values), a=(4, 5), b=(5, 3)), VECTOR, 1),
    Module("gather", net(lambda n, x: n.b(F.relu(n.a(x))[:, [0, 2, 2, 4, 1, 3]]), a=(4, 5), b=(6, 3)), VECTOR, 5),
    # Zeros beside the data: their sum has no scale, so neither have the 5.
    Module(
        "zeros-and-data",
        net(
            lambda n, x: n.b(F.relu(n.a(x)) + x.new_zeros(len(x), 6).slice_scatter(x, 1, 0, 4).sum(-1, True)),
            a=(4, 5),
            b=(5, 3),
        ),
        VECTOR,
        0,
    ),
    # Rows are put among zeros in an order that data choose: one scale.
    Module(
        "zeros-by-order",
        net(
            lambda n, x: n.b(x.new_zeros(len(x), 5).index_copy(0, x[:, 0].argsort(), F.relu(n.a(x)))),
            a=(4, 5),
            b=(5, 3),
        ),
        VECTOR,
        1,
        free=4,
        why="columns are not told apart where data choose rows",
    ),
    # Rows are added up where an index of rows says, the same for each entry: 5.
    Module(
        "scattered-rows",
        net(
            lambda n, x: n.b(x.new_zeros(3, 5).scatter_add(0, _ends(x).expand(-1, 5), F.relu(n.a(x)))),
            a=(4, 5),
            b=(5, 3),
        ),
        VECTOR,
        5,
    ),
    Module(
        "scattered-entries",
        net(
            lambda n, x: n.b(x.new_zeros(3, 5).scatter_add(0, _ends(x).repeat(1, 5), F.relu(n.a(x)))),
            a=(4, 5),
            b=(5, 3),
        ),
        VECTOR,
        1,
        free=4,
        why="columns are not told apart where each entry has an index of its own",
    ),
    # The second smallest of the rows, in each of 5 columns.
    Module("kthvalue", net(lambda n, x: n.b(n.a(x).abs().kthvalue(2, 0, True).values), a=(4, 5), b=(5, 3)), VECTOR, 5),
    # A tanh pins what goes in; 6 behind it.
    Module("tanh", sequence(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)), VECTOR, 6),
)

MODULES = (*NORMS, *ATTENTION, *GATES, *PRODUCTS, *TABLES, *CONVOLUTIONS, *WAYS)
