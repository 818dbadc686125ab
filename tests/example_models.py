"""Small networks to try the command line on: `gspace analyze example_models.py:lenet --verify`."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(widths: Sequence[int] = (64, 32, 32, 10), bias: bool = True) -> nn.Module:
    """A perceptron: one unit per hidden neuron."""
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [nn.Linear(n_in, n_out, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet(classes: int = 10) -> nn.Module:
    """Convolutions, max pooling, and a flatten that spreads each channel over 5 × 5 inputs of the next layer."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120), nn.ReLU(),
        nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, classes),
    )  # fmt: skip


def plain(width: int = 16, depth: int = 4, classes: int = 10) -> nn.Module:
    """Convolution, BatchNorm, ReLU, `depth` times: γ and β write the units, the rows before BatchNorm are absorbed."""
    layers: list[nn.Module] = []
    for n_in in [3] + [width] * (depth - 1):
        layers += [nn.Conv2d(n_in, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


class Residual(nn.Module):
    """x + f(x): the addition pins the units on both sides, or ties them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def residual(width: int = 16, blocks: int = 2, classes: int = 10) -> nn.Module:
    """A stem, residual blocks, a linear head."""
    stem = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
    return nn.Sequential(*stem, *(Residual(width) for _ in range(blocks)), *head)


class Gate(nn.Module):
    """value(x) · sigmoid(gate(x)): sigmoid pins the gate, and what it multiplies keeps its scale."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.value = nn.Linear(n_in, n_out)
        self.gate = nn.Linear(n_in, n_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x) * torch.sigmoid(self.gate(x))


def gated(width: int = 32, classes: int = 10) -> nn.Module:
    """Two hidden layers, the second gated: the units of the gate are pinned and the report says by what."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), Gate(width, width), nn.Linear(width, classes))
