"""timm's classifiers keep the units that tracing their graph gave, and gain those it could not follow.

`H` and `H_absorbed` are those of `analyze(model, example, residual="tie")` by graph, the engine before this one, on
timm 1.0.31; `gain` and `gain_absorbed` are what one run finds more, derived in `why`.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import gspace
from invariance import randomize_
from moved import moved


@dataclass(frozen=True)
class Classifier:
    """One of timm's models.

    Attributes:
        size: Height and width of its images.
        sized: The model is told the size.
    """

    name: str
    H: int
    H_absorbed: int
    gain: int = 0
    gain_absorbed: int = 0
    why: str = ""
    size: int = 64
    sized: bool = False


CLASSIFIERS = (
    Classifier("resnet10t", 1976, 2936),
    Classifier("resnet18", 2880, 4800),
    Classifier("legacy_seresnet18", 3000, 4800),
    Classifier("resnext26ts", 0, 15480),
    Classifier("skresnet18", 3136, 6976),
    Classifier("resnetv2_18", 3904, 2880),
    Classifier("regnetx_002", 7160, 10424),
    Classifier("regnety_002", 7892, 10424),
    Classifier("mobilenetv3_small_050", 640, 3248),
    Classifier("mobilenetv2_035", 256, 7040),
    Classifier("efficientnet_lite0", 784, 21008),
    Classifier("mnasnet_small", 8176, 8464),
    Classifier("efficientnet_b0", 784, 21008),
    Classifier("ghostnet_050", 6524, 5492),
    Classifier("dla46_c", 2624, 4032),
    Classifier("lcnet_050", 96, 2736),
    Classifier("fasternet_t0", 1130, 4840),
    Classifier("starnet_s1", 9288, 3560),
    Classifier("spnasnet_100", 18480, 19752),
    Classifier("tinynet_e", 400, 7120),
    Classifier("ese_vovnet19b_dw", 7808, 5568),
    Classifier("repvgg_a0", 1664, 11824),
    Classifier("hrnet_w18_small", 6384, 12016),
    Classifier("dpn48b", 21636, 16922),
    Classifier("gernet_s", 13021, 17277),
    Classifier(
        "convnext_atto",
        1840,
        0,
        gain=1840 + (40 + 80 + 160) + 320,
        gain_absorbed=1 + 4 + 12,
        why="gains of the norms in blocks, between stages, before the head; stem, streams, depthwise convolutions",
    ),
    Classifier(
        "vit_tiny_patch16_224",
        0,
        0,
        gain=12 * 4 * 192 + 192,
        gain_absorbed=1,
        why="two gains, V → O, Q → K a block, the last norm; the stream",
        sized=True,
    ),
    Classifier(
        "mixer_s32_224",
        0,
        0,
        gain=8 * (512 + 1) + 512,
        gain_absorbed=1,
        why="gains before the MLP of channels, one scale before that of tokens, common to channels; last norm; stream",
        sized=True,
    ),
    Classifier(
        "poolformer_s12",
        3328,
        0,
        gain=3328 + 3328 + 512,
        gain_absorbed=4,
        why="gains before the pool, taken back by layer scale, and before the MLP; last norm; the streams of 4 stages",
    ),
    Classifier(
        "edgenext_xx_small",
        1312,
        0,
        gain=1008 + 304 + 160 + 168 + 12,
        gain_absorbed=2 * 304 + 1 + 4 + 9,
        why="gains in blocks, before attention, between stages, before the head; V → O a head, whose channels mix; "
        "rows of q and k divided by their length, stem, streams, depthwise convolutions",
    ),
    Classifier(
        "levit_128s",
        768,
        240,
        gain=928 + 384 + (128 + 256),
        gain_absorbed=7680 + 3712 + 2560 + 1920 + 1920 + 640 + 384 + 384,
        why="Q → K in blocks and between stages, two streams; rows of the linear layers whose BatchNorm reads them "
        "flattened (MLP, qkv, projection; kv, MLP, projection, q between stages), and the last stream",
        size=224,
    ),
    Classifier(
        "pvt_v2_b0",
        4864,
        0,
        gain=1024 + 1024 + 512 + 1024 + 1024 + 256 + 256,
        gain_absorbed=4 + 4 + 6,
        why="V → O, Q → K, norms of reduced keys, of attention, of the MLP, between stages, before the head; patches, "
        "streams, reductions",
    ),
    Classifier(
        "xcit_nano_12_p16_224",
        6400,
        240,
        gain=3 * 1536 + 48 + 256 + 256 + 256 + 128,
        gain_absorbed=2 * 1536 + 4,
        why="three norms a block, V → O a head, whose channels mix; V → O, Q → K, first norm of both class blocks; "
        "last norm; rows of q and k divided by their length, the stream of patches, three of the class token",
        sized=True,
    ),
    Classifier(
        "mobilevit_xxs",
        216,
        2056,
        gain=4 * 736 + 240,
        gain_absorbed=3,
        why="two gains, V → O, Q → K in 9 transformer blocks, the norm behind each of 3 groups of them; 3 streams",
    ),
    Classifier(
        "nf_regnet_b0",
        3304,
        0,
        gain_absorbed=17_856,
        why="filters that weight standardization divides by their deviation",
    ),
)
every_classifier = pytest.mark.parametrize("case", CLASSIFIERS, ids=lambda case: case.name)


def images(case: Classifier, seed: int) -> Tensor:
    return torch.randn(2, 3, case.size, case.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(case: Classifier) -> nn.Module:
    timm = pytest.importorskip("timm", exc_type=ImportError)
    options = {"img_size": case.size} if case.sized else {}
    return randomize_(timm.create_model(case.name, pretrained=False, **options), 0).double()


@pytest.mark.slow
@every_classifier
def test_units_are_kept_or_gained(case: Classifier) -> None:
    """And a draw of all of them moves no output; 1e-9 because BatchNorm amplifies rounding in deep networks."""
    model = build(case)
    found = gspace.analyze(model, images(case, 0), residual="tie")
    assert (found.H, found.H_absorbed) == (case.H + case.gain, case.H_absorbed + case.gain_absorbed)
    for mode, change in moved(model, images(case, 1), found).items():
        assert change <= 1e-9, mode
