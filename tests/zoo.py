"""The test zoo: architectures people train, in plain `torch.nn`, narrow but with their real structure.

Every model starts from 3 image channels (or what its docstring says); `width` multiplies what it needs to.
Convolutions in front of a BatchNorm have no bias, as in the originals.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[], nn.Module]


def mlp(*widths: int, bias: bool = True, activation: Activation = nn.ReLU, norm: bool = False) -> nn.Sequential:
    """Linear layers of the given widths, the activation (after a BatchNorm if `norm`) between them."""
    layers: list[nn.Module] = []
    for n, (i, o) in enumerate(itertools.pairwise(widths)):
        hidden = n < len(widths) - 2
        layers.append(nn.Linear(i, o, bias=bias and not (norm and hidden)))
        if hidden:
            layers += [nn.BatchNorm1d(o), activation()] if norm else [activation()]
    return nn.Sequential(*layers)


def prelu_mlp() -> nn.Sequential:
    """One slope per channel, then one slope for all."""
    return nn.Sequential(nn.Linear(5, 7), nn.PReLU(7), nn.Linear(7, 6), nn.PReLU(), nn.Linear(6, 4))


def lenet() -> nn.Sequential:
    """LeNet-5 on 1 x 28 x 28, with ReLU and max pooling; 16 channels of 4 x 4 are flattened."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def conv_bn(
    i: int, o: int, kernel: int = 3, stride: int = 1, groups: int = 1, activation: Activation | None = nn.ReLU
) -> nn.Sequential:
    """Convolution, BatchNorm, activation (none where it is None)."""
    layers: list[nn.Module] = [
        nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(o),
    ]
    return nn.Sequential(*layers, *([activation()] if activation else []))


def vgg(norm: bool) -> nn.Sequential:
    """VGG-11 at 1/16 of its width on 32 x 32; without the last pooling, so that 2 x 2 positions are flattened."""
    layers: list[nn.Module] = []
    i = 3
    for o in (4, 0, 8, 0, 16, 16, 0, 32, 32, 0, 32, 32):
        if not o:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [conv_bn(i, o)] if norm else [nn.Conv2d(i, o, 3, padding=1), nn.ReLU(inplace=True)]
        i = o
    head = [nn.Linear(128, 24), nn.ReLU(), nn.Dropout(), nn.Linear(24, 24), nn.ReLU(), nn.Dropout(), nn.Linear(24, 10)]
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Sequential(*head))


def plain(width: int = 4, depths: Sequence[int] = (6, 8, 12, 6)) -> nn.Sequential:
    """Plain-34: a stem, then stages of doubling width, stride 2 at each new one."""
    layers = [conv_bn(3, width)]
    i = width
    for stage, depth in enumerate(depths):
        for n in range(depth):
            o = width << stage
            layers.append(conv_bn(i, o, stride=2 if stage and not n else 1))
            i = o
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 10))


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, i: int, planes: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(i, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = conv_bn(i, planes, 1, stride, activation=None) if stride > 1 or i != planes else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, i: int, planes: int, stride: int, groups: int) -> None:
        super().__init__()
        o = 4 * planes
        self.reduce = conv_bn(i, planes, 1)
        self.spatial = conv_bn(planes, planes, 3, stride, groups)
        self.expand = conv_bn(planes, o, 1, activation=None)
        self.downsample = conv_bn(i, o, 1, stride, activation=None) if stride > 1 or i != o else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.expand(self.spatial(self.reduce(x))) + self.downsample(x))


class ResNet(nn.Module):
    """ResNet and ResNeXt of He et al. and Xie et al., ImageNet stem."""

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], depths: Sequence[int], width: int = 4, groups: int = 1
    ) -> None:
        super().__init__()
        self.stem = conv_bn(3, width, 7, 2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        i = width
        for stage, depth in enumerate(depths):
            for n in range(depth):
                blocks.append(block(i, width << stage, 2 if stage and not n else 1, groups))
                i = (width << stage) * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(i, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.stem(x)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class PreActBlock(nn.Module):
    def __init__(self, i: int, o: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(i), nn.Conv2d(i, o, 3, stride, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(o), nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.equal = i == o and stride == 1
        if not self.equal:
            self.shortcut = nn.Conv2d(i, o, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x))
        shortcut = x if self.equal else self.shortcut(y)
        return shortcut + self.conv2(self.dropout(F.relu(self.bn2(self.conv1(y)))))


class PreActResNet(nn.Module):
    """Pre-activation ResNet; with `factor` > 1 and dropout, the Wide ResNet of Zagoruyko and Komodakis."""

    def __init__(self, factor: int = 1, depths: Sequence[int] = (2, 2, 2), dropout: float = 0.0) -> None:
        super().__init__()
        i = 4
        self.stem = nn.Conv2d(3, i, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        for stage, depth in enumerate(depths):
            for n in range(depth):
                o = (4 * factor) << stage
                blocks.append(PreActBlock(i, o, 2 if stage and not n else 1, dropout))
                i = o
        self.blocks = nn.Sequential(*blocks)
        self.bn, self.fc = nn.BatchNorm2d(i), nn.Linear(i, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.bn(self.blocks(self.stem(x)))).mean(dim=(2, 3)))


class DenseLayer(nn.Module):
    def __init__(self, i: int, growth: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(i), nn.Conv2d(i, 2 * growth, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(2 * growth), nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))], 1)


def densenet(growth: int = 4) -> nn.Sequential:
    """DenseNet-BC with two blocks of three layers."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1, bias=False)]
    i = 8
    for block in range(2):
        for _ in range(3):
            layers.append(DenseLayer(i, growth))
            i += growth
        if not block:
            layers += [nn.BatchNorm2d(i), nn.ReLU(), nn.Conv2d(i, i // 2, 1, bias=False), nn.AvgPool2d(2)]
            i //= 2
    layers += [nn.BatchNorm2d(i), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 10)]
    return nn.Sequential(*layers)


def mobilenet(activation: Activation) -> nn.Sequential:
    """MobileNet v1: depthwise 3 x 3 and pointwise convolutions in turn."""
    layers = [conv_bn(3, 8, activation=activation)]
    for i, o, stride in ((8, 16, 1), (16, 16, 2), (16, 32, 2)):
        layers += [conv_bn(i, i, 3, stride, groups=i, activation=activation), conv_bn(i, o, 1, activation=activation)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class InvertedResidual(nn.Module):
    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.residual = i == o and stride == 1
        self.layers = nn.Sequential(
            conv_bn(i, 2 * i, 1, activation=nn.ReLU6),
            conv_bn(2 * i, 2 * i, 3, stride, groups=2 * i, activation=nn.ReLU6),
            conv_bn(2 * i, o, 1, activation=None),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


def mobilenet_v2() -> nn.Sequential:
    """ReLU6 pins the expanded channels; the linear bottlenecks between the blocks keep their scale."""
    blocks = (InvertedResidual(8, 12, 2), InvertedResidual(12, 16, 2), InvertedResidual(16, 16, 1))
    head = (conv_bn(16, 24, 1, activation=nn.ReLU6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
    return nn.Sequential(conv_bn(3, 8, activation=nn.ReLU6), *blocks, *head)


class Fire(nn.Module):
    def __init__(self, i: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(i, squeeze, 1)
        self.expand1 = nn.Conv2d(squeeze, expand, 1)
        self.expand3 = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.expand1(x)), F.relu(self.expand3(x))], dim=1)


def squeezenet() -> nn.Sequential:
    """The classifier is a convolution whose ReLU is averaged into the output."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(Fire(8, 4, 6), Fire(12, 4, 8), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(nn.Dropout(), nn.Conv2d(16, 10, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


class Inception(nn.Module):
    """Four branches over one input: 1x1; 1x1 then 3x3; 1x1 then 5x5; pooling then 1x1."""

    def __init__(self, i: int) -> None:
        super().__init__()
        relu = nn.ReLU()
        self.branches = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(i, 4, 1), relu),
                nn.Sequential(nn.Conv2d(i, 3, 1), relu, nn.Conv2d(3, 6, 3, padding=1), relu),
                nn.Sequential(nn.Conv2d(i, 2, 1), relu, nn.Conv2d(2, 4, 5, padding=2), relu),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(i, 2, 1), relu),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def inception() -> nn.Sequential:
    stem = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*stem, Inception(8), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def double_conv(i: int, o: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.ReLU())


class UNet(nn.Module):
    """Two levels down, two up by transposed convolutions, skips by concatenation."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1, self.down2 = double_conv(3, width), double_conv(width, 2 * width)
        self.bottom = double_conv(2 * width, 4 * width)
        self.up2, self.join2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), double_conv(4 * width, 2 * width)
        self.up1, self.join1 = nn.ConvTranspose2d(2 * width, width, 2, 2), double_conv(2 * width, width)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        skip2 = self.down2(F.max_pool2d(skip1, 2))
        x = self.bottom(F.max_pool2d(skip2, 2))
        x = self.join2(torch.cat((skip2, self.up2(x)), dim=1))
        return self.out(self.join1(torch.cat((skip1, self.up1(x)), dim=1)))


class TransformerBlock(nn.Module):
    """Pre-norm attention and a ReLU feed-forward on (batch, tokens, 8), two heads."""

    def __init__(self, d: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, hidden), nn.Linear(hidden, d)
        self.scale = (d // 2) ** -0.5

    def attend(self, x: Tensor) -> Tensor:
        batch, tokens, d = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 2, d // 2).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(F.relu(self.fc1(self.norm2(x))))


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


class GatedUnit(nn.Module):
    """relu(Wx) * Vx after a hidden layer, then a linear readout."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 6)
        self.value, self.gate, self.out = nn.Linear(6, 7), nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.hidden(x))
        return self.out(F.relu(self.value(x)) * self.gate(x))


def tied_weights() -> nn.Sequential:
    """Two layers in a row share one weight, not their biases."""
    model = mlp(4, 5, 5, 5, 3)
    model[4].weight = model[2].weight
    return model


class Recurrent(nn.Module):
    """One module applied three times in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.step, self.decode = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.encode(x))
        for _ in range(3):
            x = F.relu(self.step(x))
        return self.decode(x)


class Siamese(nn.Module):
    """One encoder reads both inputs; a linear layer compares the two codes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.compare = mlp(4, 6, 5), nn.Linear(10, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.compare(torch.cat([F.relu(self.encoder(a)), F.relu(self.encoder(b))], dim=-1))


def conv1d() -> nn.Sequential:
    """A 1d network on (2, 16): strided and transposed convolutions, reflection padding, 4 x 8 flattened."""
    return nn.Sequential(
        *(nn.ReflectionPad1d(1), nn.Conv1d(2, 6, 3), nn.LeakyReLU(0.1), nn.MaxPool1d(2)),
        *(nn.Conv1d(6, 5, 3, stride=2, padding=1), nn.ReLU(), nn.ConvTranspose1d(5, 4, 2, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32, 3)),
    )


def conv3d() -> nn.Sequential:
    """A 3d network on (1, 6, 6, 6) with BatchNorm, grouped convolution and average pooling."""
    return nn.Sequential(
        *(nn.Conv3d(1, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4), nn.ReLU(), nn.AvgPool3d(2)),
        *(nn.Conv3d(4, 6, 3, padding=1, groups=2, bias=False), nn.BatchNorm3d(6), nn.ReLU()),
        *(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, 3)),
    )


class ShuffleUnit(nn.Module):
    """ShuffleNet v2: half of the channels pass, half are transformed, then both are interleaved."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            conv_bn(half, half, 1), conv_bn(half, half, 3, groups=half, activation=None), conv_bn(half, half, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        x = torch.cat((left, self.branch(right)), dim=1)
        batch, channels, height, width = x.shape
        return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)


def shufflenet() -> nn.Sequential:
    units = (conv_bn(3, 8), ShuffleUnit(8), ShuffleUnit(8), conv_bn(8, 12, 1))
    return nn.Sequential(*units, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10))


class Functional(nn.Module):
    """No layer modules: parameters, `F.conv2d`, `x.relu()`, `+`, `torch.cat`, `F.linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_bias = nn.Parameter(torch.empty(6, 3, 3, 3)), nn.Parameter(torch.empty(6))
        self.left, self.right = nn.Parameter(torch.empty(4, 6, 3, 3)), nn.Parameter(torch.empty(4, 6, 3, 3))
        self.mix, self.mix_bias = nn.Parameter(torch.empty(5, 10, 1, 1)), nn.Parameter(torch.empty(5))
        self.head, self.head_bias = nn.Parameter(torch.empty(3, 5)), nn.Parameter(torch.empty(3))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.stem, self.stem_bias, padding=1).relu()
        both = F.conv2d(x, self.left, padding=1).relu() + torch.relu(F.conv2d(x, self.right, padding=1))
        x = F.max_pool2d(torch.cat([x, both], 1), 2)
        x = F.conv2d(x, self.mix, self.mix_bias).relu_()
        return F.linear(x.mean((2, 3)), self.head, self.head_bias)


class Masked(nn.Module):
    """What only chooses, repeats or reorders: fixed masks, a channel shuffle, copies; then `addmm`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shuffle, self.second = nn.Conv2d(3, 4, 1), nn.ChannelShuffle(2), nn.Conv2d(4, 4, 1, groups=2)
        self.head, self.head_bias = nn.Parameter(torch.empty(4, 3)), nn.Parameter(torch.empty(3))
        self.register_buffer("border", torch.ones(4, 4).tril() > 0)
        for parameter in (self.head, self.head_bias):
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shuffle(F.relu(self.first(x)).masked_fill(self.border, 0))
        x = torch.where(self.border.t(), F.relu(self.second(x)), 0)
        x = x.repeat(1, 1, 2, 3).mean(3).amax(2)
        return torch.addmm(self.head_bias, x, self.head)


class Signs(nn.Module):
    """ReLUs written as masks of signs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(5, 7), nn.Linear(7, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(x.masked_fill(x < 0, 0))
        return self.out(torch.where(x > 0, x, 0.0))


class BagOfWords(nn.Module):
    """Embedding, mean over the tokens, and an MLP, on integers (batch, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp = nn.Embedding(11, 6), mlp(6, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.embed(x).mean(1))


class DeadEnds(nn.Module):
    """An auxiliary head whose result is dropped, and channels that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(5, 7), nn.Linear(7, 6), nn.Linear(3, 4)
        self.dropped = mlp(7, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        _, x = self.dropped(x), F.relu(self.second(x))
        return self.out(x[..., 3:])


class DeadStream(nn.Module):
    """A stream that goes on behind its last use, into nothing or into a head that is dropped."""

    def __init__(self, head: bool = True) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(4, 5), nn.Linear(5, 3)
        self.blocks = nn.ModuleList(mlp(5, 4, 5) for _ in range(2))
        self.dropped = nn.Linear(5, 2) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(x + self.blocks[0](x))
        result = self.out(x)
        self.dropped(F.relu(x + self.blocks[1](x)))
        return result


class Residual(nn.Module):
    """The smallest residual network: a stream of 5, two blocks, no normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(4, 5), nn.Linear(5, 3)
        self.blocks = nn.ModuleList(mlp(5, 4, 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.out(x)


def separable() -> nn.Sequential:
    """Depthwise with two outputs per channel, then pointwise in two groups, without normalization."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Conv2d(4, 8, 2, groups=4), nn.ReLU()),
        *(nn.Conv2d(8, 4, 1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)),
    )


def norm_without_affine() -> nn.Sequential:
    """The normalized channels have no scale of their own; the rows in front are still absorbed."""
    return nn.Sequential(
        nn.Linear(5, 6, bias=False),
        nn.BatchNorm1d(6, affine=False),
        nn.ReLU(),
        nn.Linear(6, 7),
        nn.ReLU(),
        nn.Linear(7, 3),
    )
