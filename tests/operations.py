"""Single operations, and layers that are changed from outside, between layers of 7 and 6 units."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

Operation = Callable[[Tensor], Tensor]


class Saturate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


PINNING: dict[str, tuple[Operation, str]] = {
    # an operation that is not homogeneous, and the name of the pin
    "nn.ReLU6": (nn.ReLU6(), "hardtanh"),
    "F.relu6": (F.relu6, "hardtanh"),
    "nn.Hardtanh": (nn.Hardtanh(), "hardtanh"),
    "nn.GELU": (nn.GELU(), "gelu"),
    "F.gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), "gelu"),
    "nn.SiLU": (nn.SiLU(), "silu"),
    "F.silu in place": (lambda x: F.silu(x, inplace=True), "silu"),
    "nn.Mish": (nn.Mish(), "mish"),
    "nn.Tanh": (nn.Tanh(), "tanh"),
    "x.tanh_()": (lambda x: x.tanh_(), "tanh"),
    "torch.sigmoid": (torch.sigmoid, "sigmoid"),
    "x.softmax": (lambda x: x.softmax(-1), "_softmax"),
    "nn.LogSoftmax": (nn.LogSoftmax(-1), "_log_softmax"),
    "nn.ELU": (nn.ELU(), "elu"),
    "nn.Softplus": (nn.Softplus(), "softplus"),
    "nn.Hardswish": (nn.Hardswish(), "hardswish"),
    "nn.Softshrink": (nn.Softshrink(), "softshrink"),
    "exp": (torch.exp, "exp"),
    "sin": (torch.sin, "sin"),
    "round": (torch.round, "round"),
    "floor division": (lambda x: x // 0.5, "div"),
    "remainder": (lambda x: x % 1, "remainder"),
    "threshold with a value": (nn.Threshold(0.0, 0.5), "threshold"),
    "threshold above 0": (lambda x: F.threshold(x, 0.1, 0.0), "threshold"),
    "clamp from above": (lambda x: x.clamp(max=0.5), "clamp"),
    "clamp_ to an interval": (lambda x: x.clamp_(0, 1), "clamp"),
    "autograd.Function": (Saturate.apply, "clamp"),
    "x * sigmoid(x)": (lambda x: x * torch.sigmoid(x), "sigmoid"),
    # what meets a constant has no scale either
    "x + 1.0": (lambda x: x + 1.0, "add"),
    "1.0 - x": (lambda x: 1.0 - x, "rsub"),
    "x > 0.1": (lambda x: (x > 0.1) * x, "gt"),
    "noise": (lambda x: x + torch.randn_like(x), "add"),
    "nn.AlphaDropout": (nn.AlphaDropout(0.3), "add"),
    "nn.FeatureAlphaDropout": (nn.FeatureAlphaDropout(0.3), "add"),
}

KEEPING: dict[str, Operation] = {
    # f(c·x) = cᵖ·f(x)
    "nn.Threshold(0, 0)": nn.Threshold(0.0, 0.0),
    "clamp from below at 0": lambda x: x.clamp(min=0),
    "clamp_min_": lambda x: x.clamp_min_(0),
    "nn.RReLU": nn.RReLU(),
    "nn.PReLU": nn.PReLU(),
    "abs": torch.abs,
    "-x": lambda x: -x,
    "0.5 * x": lambda x: 0.5 * x,
    "x / 3": lambda x: x / 3,
    "dropout": nn.Dropout(0.5),
    "random mask": lambda x: x * torch.rand_like(x),
    "there and back": lambda x: x.unsqueeze(-2).transpose(-1, -2).squeeze(-1).contiguous(),
    "detach": lambda x: x.detach(),
    "x ** 2": lambda x: x**2,
    "x * x": lambda x: x * x,
    "1.0 / x": lambda x: 1.0 / x,
    "square root": lambda x: x.abs().sqrt(),
    "a cast": lambda x: x.to(torch.float64),
    "sign": lambda x: x * x.sign(),
}

ALIKE: dict[str, tuple[Operation, int, int]] = {
    # one scale for all 7; then what a norm absorbs, and gains behind it
    "sort of the channels": (lambda x: x.sort(-1).values, 1, 0),
    "cumulative sum": (lambda x: x.cumsum(-1), 1, 0),
    "x / (1 + |x|), without the 1": (lambda x: x / x.abs().sum(), 1, 0),
    "F.normalize": (F.normalize, 0, 1),
    "nn.LayerNorm": (nn.LayerNorm(7), 7, 1),
    "nn.GroupNorm": (nn.GroupNorm(1, 7), 7, 1),
    "nn.RMSNorm": (nn.RMSNorm(7), 7, 1),
    "nn.BatchNorm1d": (nn.BatchNorm1d(7), 7, 7),
}


# A network 5-7-6-3 that is changed ------------------------------------------------------------------------------------


def saturated(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.tanh()


def replaced(model: Any) -> None:
    layer = model[2]
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias).tanh()


class AbsoluteWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.abs(), self.bias)


class ShiftedReLU(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.1)


def swapped(model: Any, k: int, module: nn.Module) -> None:
    model[k] = module.double()


CHANGED: dict[str, tuple[Callable[[Any], object], int]] = {
    # what is done to it, and the units that there are then
    # 7 rows of v are free: their norm is divided out
    "weight_norm, first layer": (lambda m: weight_norm(m[0]), 7 + 13),
    "weight_norm, parametrized first layer": (lambda m: parametrizations.weight_norm(m[0]), 7 + 13),
    # a norm over columns leaves one scale to the 7 in front; 6 rows of v are free, and 6 are behind
    "weight_norm": (lambda m: weight_norm(m[2]), 1 + 6 + 6),
    "weight_norm, parametrized": (lambda m: parametrizations.weight_norm(m[2]), 1 + 6 + 6),
    # one scale from the first layer to the last: what stands between has none
    "spectral_norm": (lambda m: spectral_norm(m[2]), 1),
    "spectral_norm, parametrized": (lambda m: parametrizations.spectral_norm(m[2]), 1),
    "orthogonal": (lambda m: parametrizations.orthogonal(m[2]), 1),
    "pruned weight": (lambda m: prune.l1_unstructured(m[2], "weight", 0.5), 13),
    "pruned bias": (lambda m: prune.random_unstructured(m[2], "bias", 0.5), 13),
    "forward hook on a layer": (lambda m: m[2].register_forward_hook(saturated), 7),
    "forward hook on an activation": (lambda m: m[1].register_forward_hook(saturated), 6),
    "forward pre-hook": (lambda m: m[2].register_forward_pre_hook(lambda m, x: (x[0].tanh(),)), 6),
    "forward hook on the model": (lambda m: m.register_forward_hook(saturated), 13),
    "backward hook": (lambda m: m[2].register_full_backward_hook(lambda *_: None), 13),
    "forward replaced": (replaced, 7),
    "a subclass of Linear": (lambda m: swapped(m, 2, AbsoluteWeight(7, 6)), 13),
    "a subclass of ReLU": (lambda m: swapped(m, 1, ShiftedReLU()), 6),
}
