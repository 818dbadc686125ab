"""The zoo as data: every architecture with the numbers its structure dictates, derived by hand beside it.

Notation of the derivations: `3·4·9` is a 3 x 3 convolution from 3 to 4 channels, `+ 4` its bias, `2·n` the γ and β of
n normalized channels. Exact units of a network with BatchNorm are written by γ and β; absorbed units are the rows a
BatchNorm reads; in the paper's count BatchNorm is not there.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest
from torch import nn

import zoo

NONE: frozenset[str] = frozenset()
ADD = frozenset({"add"})


@dataclass(frozen=True)
class Case:
    """One network and what `analyze` must say about it.

    Attributes:
        shapes: Shape of each input, without the batch.
        dim: m − H.
        pinned: The operations that pin a unit, apart from "output".
        vocabulary: Inputs are integers below it (0: normal floats).
    """

    name: str
    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    H: int
    dim: int
    H_paper: int
    H_absorbed: int = 0
    residual: Literal["pin", "tie"] = "pin"
    pinned: frozenset[str] = NONE
    vocabulary: int = 0


IMAGE = ((3, 16, 16),)
LARGE = ((3, 48, 48),)
VECTOR = ((5,),)

RESNET18 = partial(zoo.ResNet, zoo.BasicBlock, (2, 2, 2, 2))
RESNET34 = partial(zoo.ResNet, zoo.BasicBlock, (3, 4, 6, 3))
RESNET50 = partial(zoo.ResNet, zoo.Bottleneck, (3, 4, 6, 3))
RESNEXT = partial(zoo.ResNet, zoo.Bottleneck, (2, 2, 2, 2), groups=2)
SMALL = partial(zoo.ResNet, zoo.BasicBlock, (2,), 2)
PROJECTION = partial(zoo.ResNet, zoo.BasicBlock, (1, 1), 2)
WIDE = partial(zoo.PreActResNet, 2, dropout=0.3)
LEAKY = partial(zoo.mlp, 5, 7, 6, 4, activation=partial(nn.LeakyReLU, 0.2))
NORMED = partial(zoo.mlp, 5, 8, 6, 3, norm=True)

CASES = (
    # 7 + 6 units; m = (5·7 + 7) + (7·6 + 6) + (6·4 + 4) = 42 + 48 + 28 = 118; 118 − 13 = 105
    Case("mlp", partial(zoo.mlp, 5, 7, 6, 4), VECTOR, H=13, dim=105, H_paper=13),
    # m = 5·7 + 7·6 + 6·4 = 101; 101 − 13 = 88
    Case("mlp-no-bias", partial(zoo.mlp, 5, 7, 6, 4, bias=False), VECTOR, H=13, dim=88, H_paper=13),
    # 6 + 2 + 5 = 13; m = (24 + 6) + (12 + 2) + (10 + 5) + (15 + 3) = 77; 77 − 13 = 64
    Case("mlp-unequal", partial(zoo.mlp, 4, 6, 2, 5, 3), ((4,),), H=13, dim=64, H_paper=13),
    # 6 + 2 + 6 = 14; m = (48 + 6) + (12 + 2) + (12 + 6) + (48 + 8) = 142; 142 − 14 = 128
    Case("autoencoder", partial(zoo.mlp, 8, 6, 2, 6, 8), ((8,),), H=14, dim=128, H_paper=14),
    # As mlp: a slope that is not trained changes nothing.
    Case("mlp-leaky", LEAKY, VECTOR, H=13, dim=105, H_paper=13),
    # As mlp, and 7 + 1 slopes that no scale touches: m = 118 + 8 = 126; 126 − 13 = 113
    Case("prelu", zoo.prelu_mlp, VECTOR, H=13, dim=113, H_paper=13),
    # γ, β write 8 + 6; the 8 + 6 rows are absorbed; m = 5·8 + 2·8 + 8·6 + 2·6 + (6·3 + 3) = 40 + 16 + 48 + 12 + 21 =
    #   137
    Case("mlp-bn", NORMED, VECTOR, H=14, dim=123, H_paper=14, H_absorbed=14),
    # The 6 normalized channels are ground, the 7 hidden ones a unit each; transparent: 6 + 7.
    # m = 5·6 + (6·7 + 7) + (7·3 + 3) = 30 + 49 + 24 = 103; 103 − 7 = 96
    Case("bn-no-affine", zoo.norm_without_affine, VECTOR, H=7, dim=96, H_paper=13, H_absorbed=6),
    # 6 + 16 channels, 120 + 84; m = (25·6 + 6) + (6·16·25 + 16) + (256·120 + 120) + (120·84 + 84) + (84·10 + 10)
    #   = 156 + 2,416 + 30,840 + 10,164 + 850 = 44,426; − 226 = 44,200
    Case("lenet", zoo.lenet, ((1, 28, 28),), H=226, dim=44_200, H_paper=226),
    # Channels 4 + 8 + 16 + 16 + 4·32 = 172, and 24 + 24 in the head: 220. Convolutions: (3·4·9 + 4) + (4·8·9 + 8) +
    #   (8·16·9 + 16) + (16·16·9 + 16) + (16·32·9 + 32) + 3·(32·32·9 + 32) = 112 + 296 + 1,168 + 2,320 + 4,640 + 27,744
    #   = 36,280; head (128·24 + 24) + (24·24 + 24) + (24·10 + 10) = 3,946; m = 40,226; − 220 = 40,006
    Case("vgg", partial(zoo.vgg, norm=False), ((3, 32, 32),), H=220, dim=40_006, H_paper=220),
    # No convolution bias (− 172), γ and β (+ 2·172): m = 40,226 + 172 = 40,398; − 220 = 40,178
    Case("vgg-bn", partial(zoo.vgg, norm=True), ((3, 32, 32),), H=220, dim=40_178, H_paper=220, H_absorbed=172),
    # Maps: stem 4, 6·4, 8·8, 12·16, 6·32: 4 + 24 + 64 + 192 + 192 = 476, all normalized.
    # Convolutions: 3·4·9 = 108; 6·(4·4·9) = 864; 4·8·9 + 7·(8·8·9) = 4,320; 8·16·9 + 11·(16·16·9) = 26,496;
    #   16·32·9 + 5·(32·32·9) = 50,688; sum 82,476; 2·476 = 952; linear 330; m = 83,758; − 476 = 83,282
    Case("plain-34", zoo.plain, IMAGE, H=476, dim=83_282, H_paper=476, H_absorbed=476),
    # Inside the 2 blocks of each stage: 2·(4 + 8 + 16 + 32) = 120. Rows: stem 4; 4·4; 4·8 + 8; 4·16 + 16; 4·32 + 32:
    #   300.
    # Convolutions: 3·4·49 = 588; 4·144 = 576; 4·8·9 + 3·576 + 4·8 = 2,048; 8,192; 32,768 (each stage 4 times the one
    #   before); sum 44,172; 2·300 = 600; linear 32·10 + 10 = 330; m = 45,102; − 120 = 44,982
    Case("resnet-18", RESNET18, LARGE, H=120, dim=44_982, H_paper=120, H_absorbed=300, pinned=ADD),
    # Tied: also the streams 4 (which the stem writes too) + 8 + 16 + 32 = 60; 45,102 − 180 = 44,922
    Case("resnet-18-tie", RESNET18, LARGE, H=180, dim=44_922, H_paper=180, H_absorbed=300, residual="tie"),
    # Inside: 3·4 + 4·8 + 6·16 + 3·32 = 236. Rows: 4 + 6·4 + 9·8 + 13·16 + 7·32 = 532. Convolutions: 588; 6·144 = 864;
    #   288 + 7·576 + 32 = 4,352; 1,152 + 11·2,304 + 128 = 26,624; 4,608 + 5·9,216 + 512 = 51,200; sum 83,628;
    #   2·532 = 1,064; 330; m = 85,022; − 236 = 84,786
    Case("resnet-34", RESNET34, LARGE, H=236, dim=84_786, H_paper=236, H_absorbed=532, pinned=ADD),
    # 236 + 60 = 296; 85,022 − 296 = 84,726
    Case("resnet-34-tie", RESNET34, LARGE, H=296, dim=84_726, H_paper=296, H_absorbed=532, residual="tie"),
    # Two inside each block, 2·236 = 472, and the stem's 4, which no add meets (the first shortcut is a projection):
    #   476.
    # Rows: 4 + 6·236 + projections 16 + 32 + 64 + 128 = 1,660. Stage with c inputs and p planes: first block c·p + 9p²
    #   + 4p² + 4c·p, others 17p²: 288 + 2·272 = 832; 1,472 + 3·1,088 = 4,736; 5,888 + 5·4,352 = 27,648; 23,552 +
    #   2·17,408 = 58,368; with the stem's 588: 92,172; 2·1,660 = 3,320; linear 1,290; m = 96,782; − 476 = 96,306
    Case("resnet-50", RESNET50, LARGE, H=476, dim=96_306, H_paper=476, H_absorbed=1660, pinned=ADD),
    # Streams 16 + 32 + 64 + 128 = 240; 476 + 240 = 716; 96,782 − 716 = 96,066
    Case("resnet-50-tie", RESNET50, LARGE, H=716, dim=96_066, H_paper=716, H_absorbed=1660, residual="tie"),
    # One stage of two blocks, width 2. Inside 2 + 2, the stream 2: 6. Rows: 2 + 4·2 = 10. m = 3·2·49 + 4·(2·2·9) + 2·10
    #   + (2·10 + 10) = 294 + 144 + 20 + 30 = 488; − 6 = 482
    Case("resnet-small-tie", SMALL, IMAGE, H=6, dim=482, H_paper=6, H_absorbed=10, residual="tie"),
    # Pinned: only the 4 inside; 488 − 4 = 484
    Case("resnet-small", SMALL, IMAGE, H=4, dim=484, H_paper=4, H_absorbed=10, pinned=ADD),
    # One block of each of two stages. Inside 2 + 4, streams 2 + 4: 12. Rows: 2 + (2 + 2) + (4 + 4 + 4) = 18.
    # m = 294 + 2·36 + (2·4·9 + 4·4·9 + 2·4) + 2·18 + (4·10 + 10) = 294 + 72 + 224 + 36 + 50 = 676; − 12 = 664
    Case("resnet-projection-tie", PROJECTION, IMAGE, H=12, dim=664, H_paper=12, H_absorbed=18, residual="tie"),
    # Two groups halve the 3 x 3: other blocks 12.5p². Inside 2·2·60 = 240, stem 4: 244. Rows 4 + 6·120 + 240 = 964.
    # Convolutions: 588; 216 + 200; 1,184 + 800; 4,736 + 3,200; 18,944 + 12,800; sum 42,668; 2·964 = 1,928; 1,290;
    #   m = 45,886; − 244 = 45,642
    Case("resnext", RESNEXT, LARGE, H=244, dim=45_642, H_paper=244, H_absorbed=964, pinned=ADD),
    # γ, β of bn1 and bn2 per block: (4+4)+(4+4) + (4+8)+(8+8) + (8+16)+(16+16) = 100, and the last 16: 116.
    # Absorbed: conv1 of each block, 2·(4 + 8 + 16) = 56. Transparent: the same 56, because what bn1 passes is the
    #   stream.
    # m = 108 + 4·144 + (288 + 3·576 + 32) + 8,192 + 2·116 + (16·10 + 10) = 11,326; − 116 = 11,210
    Case("preact", zoo.PreActResNet, IMAGE, H=116, dim=11_210, H_paper=56, H_absorbed=56, pinned=ADD),
    # Tied: the streams 4 + 8 + 16 = 28 are read by BatchNorms alone: absorbed 84; transparent 56 + 28 = 84.
    Case("preact-tie", zoo.PreActResNet, IMAGE, H=116, dim=11_210, H_paper=84, H_absorbed=84, residual="tie"),
    # WRN-16-2: (4+8)+(8+8) + (8+16)+(16+16) + (16+32)+(32+32) + 32 = 228. Absorbed: conv1 2·(8 + 16 + 32) = 112, the
    #   stem 4 (its own stream: the first shortcut is a projection), streams 8 + 16 + 32 = 56: 172, and the same
    #   transparent.
    # m = 108 + 2,048 + 8,192 + 32,768 + 2·228 + 330 = 43,902; − 228 = 43,674
    Case("wide-resnet-tie", WIDE, IMAGE, H=228, dim=43_674, H_paper=172, H_absorbed=172, residual="tie"),
    # γ, β: (8 + 12 + 16) + 3·8, transition 20, (10 + 14 + 18) + 3·8, last 22: 168. Rows: stem 8, 6·8, 6·4, transition
    #   10: 90, and transparent the same. m = 3·8·9 + 8·36 + 3·8·4·9 + 20·10 + 8·42 + 3·8·4·9 + 2·168 + (22·10 + 10) =
    #   216 + 288 + 864 + 200 + 336 + 864 + 336 + 230 = 3,334; − 168 = 3,166
    Case("densenet", zoo.densenet, IMAGE, H=168, dim=3166, H_paper=90, H_absorbed=90),
    # Stem 8, then depthwise and pointwise 8, 16, 16, 16, 16, 32: 112. m = 216 + 9·(8 + 16 + 16) + (128 + 256 + 512) +
    #   2·112 + 330 = 2,026; − 112 = 1,914
    Case("mobilenet", partial(zoo.mobilenet, nn.ReLU), IMAGE, H=112, dim=1914, H_paper=112, H_absorbed=112),
    # Every γ, β meets a ReLU6; the rows before BatchNorm stay absorbed.
    Case(
        "mobilenet-relu6",
        partial(zoo.mobilenet, nn.ReLU6),
        IMAGE,
        H=0,
        dim=2026,
        H_paper=0,
        H_absorbed=112,
        pinned=frozenset({"hardtanh"}),
    ),
    # Bottlenecks without activation: 12 (the 16 behind it meet the add). Rows: 8 + (16 + 16 + 12) + (24 + 24 + 16) +
    #   (32 + 32 + 16) + 24 = 220. m = 216 + (128 + 144 + 192) + (288 + 216 + 384) + (512 + 288 + 512) + 384 + 440 +
    #   250 = 3,954; − 12 = 3,942
    Case(
        "mobilenet-v2",
        zoo.mobilenet_v2,
        IMAGE,
        H=12,
        dim=3942,
        H_paper=12,
        H_absorbed=220,
        pinned=frozenset({"hardtanh", "add"}),
    ),
    # The stream of 16 as well: 28; 3,954 − 28 = 3,926
    Case(
        "mobilenet-v2-tie",
        zoo.mobilenet_v2,
        IMAGE,
        H=28,
        dim=3926,
        H_paper=28,
        H_absorbed=220,
        residual="tie",
        pinned=frozenset({"hardtanh"}),
    ),
    # 8 + (4 + 6 + 6) + (4 + 8 + 8) = 44; the last convolution is the output. m = 224 + (36 + 30 + 222) + (52 + 40 +
    #   296) + 170 = 1,070; − 44 = 1,026
    Case("squeezenet", zoo.squeezenet, ((3, 32, 32),), H=44, dim=1026, H_paper=44),
    # 8 + 4 + (3 + 6) + (2 + 4) + 2 = 29; m = 224 + 36 + (27 + 168) + (18 + 204) + 18 + 170 = 865; − 29 = 836
    Case("inception", zoo.inception, IMAGE, H=29, dim=836, H_paper=29),
    # (4 + 4) + (8 + 8) + (16 + 16) + 8 + (8 + 8) + 4 + (4 + 4) = 92; m = (112 + 148) + (296 + 584) + (1,168 + 2,320) +
    #   520 + (1,160 + 584) + 132 + (292 + 148) + 10 = 7,474; − 92 = 7,382
    Case("unet", zoo.UNet, ((3, 8, 8),), H=92, dim=7382, H_paper=92),
    # 2 heads of 4: Q → K 8, V → O 8, the feed-forward's 16, and the gains and biases of both norms write 8 + 8. What
    #   both branches add to is the data. m = (8·24 + 24) + (64 + 8) + 2·16 + (8·16 + 16) + (16·8 + 8) = 216 + 72 + 32 +
    #   144 + 136 = 600; − 48 = 552. Q and K scale with opposite signs: the paper's count leaves those 8 out.
    Case(
        "transformer",
        zoo.TransformerBlock,
        ((6, 8),),
        H=48,
        dim=552,
        H_paper=40,
        pinned=frozenset({"_softmax", "add"}),
    ),
    # torch's layer: norms stand behind the sums. The first writes the stream, which meets the branch in a sum and is
    #   pinned; the second writes the output: 8 + 8 + 16 = 32; 600 − 32 = 568
    Case(
        "transformer-torch",
        zoo.encoder_layer,
        ((6, 8),),
        H=32,
        dim=568,
        H_paper=24,
        pinned=frozenset({"softmax", "add"}),
    ),
    # 6 before the gate; its value and its gate have 7 scales each, which the readout takes back. m = 36 + 49 + 49 + 24
    #   = 158; − 20 = 138. The paper has no sums of scales: one of value and gate stays, 13.
    Case("gated", zoo.GatedUnit, VECTOR, H=20, dim=138, H_paper=13),
    # One weight for two layers makes its head and its tail one: 5; and it may grow by a factor t if the layers that it
    #   writes grow by t and t²: 6. m = 25 + 25 + 5 + 5 + 18 = 78; − 6 = 72
    Case("tied-weights", zoo.tied_weights, ((4,),), H=6, dim=72, H_paper=5),
    # 6 over all steps. m = 30 + 42 + 21 = 93; − 6 = 87
    Case("recurrent", zoo.Recurrent, ((4,),), H=6, dim=87, H_paper=6),
    # 6 + 5, shared by both inputs. m = (30 + 35) + 33 = 98; − 11 = 87
    Case("siamese", zoo.Siamese, ((4,), (4,)), H=11, dim=87, H_paper=11),
    # 6 + 5 + 4; m = (2·6·3 + 6) + (6·5·3 + 5) + (5·4·2 + 4) + (32·3 + 3) = 42 + 95 + 44 + 99 = 280; − 15 = 265
    Case("conv1d", zoo.conv1d, ((2, 16),), H=15, dim=265, H_paper=15),
    # 4 + 6; m = 108 + 8 + 6·2·27 + 12 + 21 = 473; − 10 = 463
    Case("conv3d", zoo.conv3d, ((1, 6, 6, 6),), H=10, dim=463, H_paper=10, H_absorbed=10),
    # Stem 8, 3·4 in each unit (the passing half has no weight), last 12: 44, all normalized.
    # m = 216 + 2·(16 + 36 + 16) + 96 + 2·44 + 130 = 666; − 44 = 622
    Case("shufflenet", zoo.shufflenet, IMAGE, H=44, dim=622, H_paper=44, H_absorbed=44),
    # 6 + 5; left and right (4 + 4) meet in the sum. m = 162 + 6 + 216 + 216 + 50 + 5 + 15 + 3 = 673; − 11 = 662
    Case("functional", zoo.Functional, ((3, 8, 8),), H=11, dim=662, H_paper=11, pinned=ADD),
    # Tied: 4 more; 673 − 15 = 658
    Case("functional-tie", zoo.Functional, ((3, 8, 8),), H=15, dim=658, H_paper=15, residual="tie"),
    # 4 + 4; m = (3·4 + 4) + (4·2 + 4) + (4·3 + 3) = 43; − 8 = 35
    Case("masked", zoo.Masked, ((3, 4, 4),), H=8, dim=35, H_paper=8),
    # As mlp.
    Case("signs", zoo.Signs, VECTOR, H=13, dim=105, H_paper=13),
    # The embedding is a linear map of one-hot tokens: 6 + 8. m = 66 + 56 + 36 = 158; − 14 = 144
    Case("embedding", zoo.BagOfWords, ((5,),), H=14, dim=144, H_paper=14, vocabulary=11),
    # 4 + 4 inside the blocks. m = 25 + 2·(24 + 25) + 18 = 141; − 8 = 133
    Case("residual", zoo.Residual, ((4,),), H=8, dim=133, H_paper=8, pinned=ADD),
    # And the stream's 5: 141 − 13 = 128
    Case("residual-tie", zoo.Residual, ((4,),), H=13, dim=128, H_paper=13, residual="tie"),
    # 4 + 8 + 4; m = (4·9 + 4) + (8·4 + 8) + (4·4 + 4) + (16·2 + 2) = 134; − 16 = 118
    Case("separable", zoo.separable, ((2, 5, 5),), H=16, dim=118, H_paper=16),
)


def slow_above(dim: int, cases: Iterable[Case] = CASES) -> list[Any]:
    """Parameters of a test for which larger networks are slow; smaller ones of the same kind stand for them."""
    return [pytest.param(case, id=case.name, marks=pytest.mark.slow if case.dim > dim else []) for case in cases]
