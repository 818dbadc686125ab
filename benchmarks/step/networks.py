"""The networks and optimizers that are timed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gspace
from gspace.lab.models import build_model, mlp
from gspace.optim.baselines import PathSGD


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 beside a shortcut (He et al., 2016)."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.norm2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv3, self.norm3 = nn.Conv2d(planes, 4 * planes, 1, bias=False), nn.BatchNorm2d(4 * planes)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * planes, 1, stride, bias=False), nn.BatchNorm2d(4 * planes)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.norm2(self.conv2(y)))
        return torch.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def resnet50() -> nn.Sequential:
    """ResNet-50 for 1000 classes, 25.6 million weights in 161 parameters."""
    blocks, inputs = [], 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for i in range(count):
            blocks.append(Bottleneck(inputs, 64 * 2**stage, 2 if stage and not i else 1))
            inputs = 256 * 2**stage
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def square(width: int, layers: int) -> nn.Sequential:
    """An MLP whose every weight is width × width."""
    return mlp((1, 1, width), width, (width,) * (layers - 1))


@dataclass(frozen=True)
class Network:
    """A network of the benchmark.

    Attributes:
        shape: Of one input.
        batch: Inputs per iteration.
        gpu_only: Too slow to iterate on a CPU.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    gpu_only: bool = False


CIFAR, IMAGE = (3, 32, 32), (3, 224, 224)
NETWORKS: Mapping[str, Network] = {
    "mlp-784-5x64-10": Network(partial(mlp, (1, 28, 28), 10, (64,) * 5), (1, 28, 28), 64),
    "mlp-49-2x1024-10": Network(partial(mlp, (1, 7, 7), 10, (1024, 1024)), (1, 7, 7), 64),
    "plain-34": Network(partial(build_model, "plain-34", CIFAR, 10), CIFAR, 128, gpu_only=True),
    "resnet-34": Network(partial(build_model, "resnet-34", CIFAR, 10), CIFAR, 128, gpu_only=True),
    "resnet-50": Network(resnet50, IMAGE, 32, gpu_only=True),
    "mlp-100M": Network(partial(square, 4096, 6), (1, 1, 4096), 128, gpu_only=True),
}

Rate = float | Tensor
Maker = Callable[[nn.Module, Rate, float, Tensor], Any]  # model, rate, momentum, a batch


def _adam(lr: Rate) -> dict[str, bool]:
    """Fused; in a CUDA graph with its count of steps on the device."""
    return {"fused": True, "capturable": isinstance(lr, Tensor)}


OPTIMIZERS: Mapping[str, Maker] = {
    "SGD fused": lambda model, lr, mu, _: torch.optim.SGD(model.parameters(), lr, momentum=mu, fused=True),
    "SGD foreach": lambda model, lr, mu, _: torch.optim.SGD(model.parameters(), lr, momentum=mu, foreach=True),
    "GSGD fused": lambda model, lr, mu, _: gspace.GSGD(model, lr, momentum=mu, fused=True),
    "GSGD definition": lambda model, lr, mu, _: gspace.GSGD(model, lr, momentum=mu, foreach=False),
    "InGSpace(SGD)": lambda model, lr, mu, _: gspace.InGSpace(model, torch.optim.SGD, lr=lr, momentum=mu, fused=True),
    "AdamW fused": lambda model, lr, mu, _: torch.optim.AdamW(model.parameters(), lr, **_adam(lr)),
    "InGSpace(AdamW)": lambda model, lr, mu, _: gspace.InGSpace(model, torch.optim.AdamW, lr=lr, **_adam(lr)),
    "PathSGD": lambda model, lr, mu, x: PathSGD(model, lr, momentum=mu, example_input=x),
}
FUSED, FOREACH, OURS = "SGD fused", "SGD foreach", "GSGD fused"
