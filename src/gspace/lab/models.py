"""What a recipe names: networks (the paper's and a depthwise separable one), optimizers and initial weights.

Inputs are images `(batch, channel, height, width)`; outputs are class scores `(batch, class)`.

| name | layers |
|---|---|
| `mlp` | linear-ReLU per hidden width, linear; no biases, He initialisation |
| `cnn` | 3×3 conv-ReLU of width, 2·width, 2·width (the last two stride 2), linear; no BatchNorm, for 8×8 digits |
| `plain-n` | stem, then 2·blocks layers of conv-BN-ReLU per stage, pooling, linear |
| `resnet-n` | stem, then `blocks` basic blocks per stage, 1×1 projections, pooling, linear |
| `depthwise` | stem, then 2, 3, 6, 2 layers of 3×3 depthwise and 1×1 conv-BN-ReLU per stage, pooling, linear |

The four stages of the last three have 1, 2, 4, 8 times the first width (64 in the paper); each but the first
halves the image. n counts the layers with weights on the longest way: 2·Σ blocks + 2. PyTorch's default initialisation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gspace import GSGD, analyze, init_skeleton_
from gspace.lab.errors import RequestError, reason
from gspace.lab.seeds import generator
from gspace.optim.baselines import FrozenSkeletonSGD, PathSGD

if TYPE_CHECKING:
    from gspace.lab.recipe import Recipe

Shape = tuple[int, int, int]  # channel, height, width
Layer = Callable[..., nn.Module]

BLOCKS = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 110: (3, 8, 40, 3)}


def mlp(shape: Shape, classes: int, hidden: tuple[int, ...]) -> nn.Sequential:
    """`[inputs : *hidden : classes]`, ReLU between, no biases, w ~ N(0, 2/fan-in)."""
    channels, height, width = shape
    sizes = (channels * height * width, *hidden, classes)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        linear = nn.Linear(inputs, outputs, bias=False)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(shape: Shape, classes: int, width: int) -> nn.Sequential:
    """A plain convolutional network of three layers for small images."""
    channels, height, breadth = shape
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((channels, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1), nn.ReLU()]
    final = 2 * width * ((height + 3) // 4) * ((breadth + 3) // 4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(final, classes))


def convolution(inputs: int, outputs: int, *, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, groups=groups, bias=False)


def conv_bn_relu(inputs: int, outputs: int, **options: int) -> nn.Sequential:
    conv = convolution(inputs, outputs, **options)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs), relu=nn.ReLU()))


def separable(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    """A 3×3 convolution of each channel by itself, then a 1×1 convolution that mixes them (Howard et al., 2017)."""
    depthwise = conv_bn_relu(inputs, inputs, stride=stride, groups=inputs)
    return nn.Sequential(OrderedDict(depthwise=depthwise, pointwise=conv_bn_relu(inputs, outputs, size=1)))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, outputs, stride=stride)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = convolution(outputs, outputs)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = convolution(inputs, outputs, size=1, stride=stride)
            self.shortcut = nn.Sequential(OrderedDict(conv=projection, norm=nn.BatchNorm2d(outputs)))
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        return self.relu2(y + self.shortcut(x))


class StagedNet(nn.Module):
    """Stem, stages of growing width, global average pooling, linear.

    Args:
        layer: Builds one layer of a stage from its input and output width and its stride.
        counts: Number of such layers in each stage.
    """

    def __init__(self, layer: Layer, counts: Sequence[int], shape: Shape, classes: int, width: int) -> None:
        super().__init__()
        self.stem = conv_bn_relu(shape[0], width)
        self.stages = nn.Sequential()
        inputs = width
        for stage, count in enumerate(counts):
            outputs, stride = width * 2**stage, 1 if stage == 0 else 2
            layers = [layer(inputs, outputs, stride=stride), *(layer(outputs, outputs) for _ in range(count - 1))]
            self.stages.append(nn.Sequential(*layers))
            inputs = outputs
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.flatten(self.pool(self.stages(self.stem(x)))))


MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    **{f"plain-{n}": partial(StagedNet, conv_bn_relu, [2 * k for k in blocks]) for n, blocks in BLOCKS.items()},
    **{f"resnet-{n}": partial(StagedNet, BasicBlock, blocks) for n, blocks in BLOCKS.items()},
    "depthwise": partial(StagedNet, separable, (2, 3, 6, 2)),
}

UNUSED: Mapping[str, str] = {name: "width" if name == "mlp" else "hidden" for name in MODELS}  # the size it lacks


def build_model(
    name: str, shape: Shape, classes: int, *, hidden: tuple[int, ...] = (64, 64), width: int = 64
) -> nn.Module:
    """The network called `name` in the table, with weights drawn from torch's global generator."""
    return MODELS[name](shape, classes, hidden if name == "mlp" else width)


def stage_ends(model: nn.Module) -> tuple[str, ...]:
    """Names of the modules after which a new stage begins: the stem and every stage; empty for networks without."""
    return ("stem", *(f"stages.{i}" for i in range(len(model.stages)))) if isinstance(model, StagedNet) else ()


# Optimizers and initial weights. A builder takes the model on its device, the recipe, the learning rate (a number, or a
# tensor that the device reads) and an example of the model's input. A run and its controls build their skeleton from
# the same arguments (`symmetry`).

Rate = float | Tensor
Builder = Callable[[nn.Module, "Recipe", Rate, Tensor], Optimizer]
Init = Callable[[nn.Module, "Recipe"], None]

PINS: Mapping[str, Callable[[nn.Module], tuple[str, ...]]] = {
    "none": lambda model: (),
    "stages": stage_ends,
    "last": lambda model: stage_ends(model)[-1:],
}


def symmetry(model: nn.Module, recipe: Recipe) -> dict[str, Any]:
    """The arguments of gspace's functions that decide which units there are."""
    return {"residual": recipe.residual, "pin": PINS[recipe.pin](model)}


def _momentum(recipe: Recipe) -> dict[str, Any]:
    return {"momentum": recipe.momentum, "nesterov": recipe.nesterov, "weight_decay": recipe.weight_decay}


def _way(rate: Rate) -> dict[str, Any]:
    """torch's step that never asks the host for a rate in a tensor is the fused one; elsewhere foreach is the best."""
    return {"fused": True} if isinstance(rate, Tensor) else {"foreach": True}


def _gsgd(model: nn.Module, recipe: Recipe, rate: Rate, example: Tensor) -> Optimizer:
    names = ("batch_norm", "allocation", "reference", "max_ratio", "max_drift")
    given = {name: value for name in names if (value := getattr(recipe, name)) not in (None, "fixed")}
    return GSGD(model, rate, **_momentum(recipe), **given, analysis=analyze(model, **symmetry(model, recipe)))


OPTIMIZERS: Mapping[str, Builder] = {
    "sgd": lambda model, r, rate, example: torch.optim.SGD(model.parameters(), rate, **_momentum(r), **_way(rate)),
    "sgd-frozen": lambda model, r, rate, example: FrozenSkeletonSGD(  # control: leaves the free skeleton as it is
        model, rate, analysis=analyze(model, **symmetry(model, r)), **_momentum(r), **_way(rate)
    ),
    "gsgd": _gsgd,
    "path-sgd": lambda model, r, rate, example: PathSGD(model, rate, **_momentum(r), example_input=example),
}


def build_optimizer(model: nn.Module, recipe: Recipe, rate: Rate, example: Tensor) -> Optimizer:
    """The recipe's optimizer; what it refuses is an error of the recipe."""
    try:
        optimizer = OPTIMIZERS[recipe.optimizer](model, recipe, rate, example)
        if isinstance(optimizer, FrozenSkeletonSGD | GSGD):
            optimizer.rechoose()  # in the first weights, before a CUDA graph is captured
        return optimizer
    except ValueError as error:
        raise RequestError(f"{recipe.optimizer} refuses this recipe: {reason(error)}") from error


def _skeleton(sign: Any, common: bool = False) -> Init:
    """The paper's start; signs drawn for each seed, or once for all and as for none of them."""

    def initialise(model: nn.Module, recipe: Recipe) -> None:
        draws = generator(0, "signs", "common") if common else generator(recipe.seed, "signs")
        init_skeleton_(model, sign, draws, **symmetry(model, recipe))

    return initialise


def _layers(kind: type[nn.Module], purpose: str, change: Callable[[Any, torch.Generator], object]) -> Init:
    """Changes the weights of every layer of a kind, with random numbers of its own."""

    def initialise(model: nn.Module, recipe: Recipe) -> None:
        draws = generator(recipe.seed, "init", purpose)
        with torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, kind):
                    change(layer, draws)

    return initialise


def _as_torchvision(layer: nn.Conv2d, draws: torch.Generator) -> None:
    """As in torchvision's ResNets, w ~ N(0, 2/fan-out): torch's have a sixth of that variance."""
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu", generator=draws)


def _uniform(layer: nn.BatchNorm2d, draws: torch.Generator) -> None:
    """As in torch before 1.2, γ ~ U(0, 1) where it is 1 today. Its other layers draw what they always drew."""
    nn.init.uniform_(layer.weight, generator=draws)


def _add_dirac(layer: nn.Conv2d, draws: torch.Generator) -> None:
    """torch's draw, and 1 more at the centre of as many channels as a convolution can keep."""
    layer.weight += nn.init.dirac_(torch.empty_like(layer.weight))


def _dirac(layer: nn.Conv2d, draws: torch.Generator) -> None:
    """The identity, where a convolution keeps its width; the others keep torch's draw.

    With more outputs than inputs `dirac_` leaves rows of zeros, and a ReLU at 0 passes no gradient: dead units.
    """
    if layer.in_channels == layer.out_channels:
        nn.init.dirac_(layer.weight)


def _delta_orthogonal(layer: nn.Conv2d, draws: torch.Generator) -> None:
    """An orthogonal matrix at the centre and 0 elsewhere (Xiao et al., 2018)."""
    height, width = layer.kernel_size
    matrix = nn.init.orthogonal_(torch.empty(layer.weight.shape[:2]), generator=draws)
    layer.weight.zero_()[:, :, height // 2, width // 2] = matrix


_SKELETON = _skeleton("positive")
_TORCHVISION = _layers(nn.Conv2d, "torchvision", _as_torchvision)
_UNIFORM = _layers(nn.BatchNorm2d, "uniform-gains", _uniform)

# What is done one after the other to the network's own weights.
INITS: Mapping[str, Sequence[Init]] = {
    "default": (),
    "torchvision": (_TORCHVISION,),
    "uniform-gains": (_UNIFORM,),
    "skeleton": (_SKELETON,),
    "torchvision-skeleton": (_TORCHVISION, _SKELETON),
    "uniform-gains-skeleton": (_UNIFORM, _SKELETON),
    "skeleton-random-signs": (_skeleton("random"),),
    "skeleton-common-signs": (_skeleton("random", common=True),),
    "dirac-added": (_layers(nn.Conv2d, "dirac-added", _add_dirac),),
    "dirac": (_layers(nn.Conv2d, "dirac", _dirac),),
    "delta-orthogonal": (_layers(nn.Conv2d, "delta-orthogonal", _delta_orthogonal),),
}
