"""Small pieces for tests of the analysis: inputs, and a network written as one function of its parts."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Three layers in float64: rounding stays near 1e-15.
EXACT = 1e-12


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


VECTORS = (normal(6, 5),)
TOKENS = (normal(4, 5, 5),)
IMAGES = (normal(4, 5, 6, 6),)


class Net(nn.Module):
    """A forward pass written as one function of the parts."""

    def __init__(self, forward: Callable[..., Tensor], **parts: object) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *x: Tensor) -> Tensor:
        return self.function(self, *x)
