"""The networks of the experiments, by name: the paper's and a depthwise separable one. They know nothing of gspace.

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

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

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
    final = 2 * width * ((height + 3) // 4) * ((breadth + 3) // 4)
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(final, classes),
    )


def convolution(inputs: int, outputs: int, *, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, groups=groups, bias=False)


def conv_bn_relu(inputs: int, outputs: int, **options: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(conv=convolution(inputs, outputs, **options), norm=nn.BatchNorm2d(outputs), relu=nn.ReLU())
    )


def separable(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    """A 3×3 convolution of each channel by itself, then a 1×1 convolution that mixes them (Howard et al., 2017)."""
    return nn.Sequential(
        OrderedDict(
            depthwise=conv_bn_relu(inputs, inputs, stride=stride, groups=inputs),
            pointwise=conv_bn_relu(inputs, outputs, size=1),
        )
    )


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
