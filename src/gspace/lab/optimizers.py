"""Optimizers and initialisations by their names in a recipe.

A builder takes the model on its device, the recipe, the learning rate (a number, or a tensor that the device reads) and
an example of the model's input. A run and its controls build their skeleton from the same arguments (`symmetry`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gspace import GSGD, Analysis, analyze, init_skeleton_
from gspace.lab.errors import RequestError, reason
from gspace.lab.models import stage_ends
from gspace.lab.seeds import generator
from gspace.optim.baselines import FrozenSkeletonSGD, PathSGD

if TYPE_CHECKING:
    from gspace.lab.recipe import Recipe

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


def _analysis(model: nn.Module, recipe: Recipe) -> Analysis:
    return analyze(model, **symmetry(model, recipe))


def _momentum(recipe: Recipe) -> dict[str, Any]:
    return {"momentum": recipe.momentum, "nesterov": recipe.nesterov, "weight_decay": recipe.weight_decay}


def _way(rate: Rate) -> dict[str, Any]:
    """torch's step that never asks the host for a rate in a tensor is the fused one; elsewhere foreach is the best."""
    return {"fused": True} if isinstance(rate, Tensor) else {"foreach": True}


def _gsgd(model: nn.Module, recipe: Recipe, rate: Rate, example: Tensor) -> Optimizer:
    names = ("batch_norm", "allocation", "reference", "max_ratio", "max_drift")
    given = {name: value for name in names if (value := getattr(recipe, name)) not in (None, "fixed")}
    return GSGD(model, rate, **_momentum(recipe), **given, analysis=_analysis(model, recipe))


OPTIMIZERS: Mapping[str, Builder] = {
    "sgd": lambda model, r, rate, example: torch.optim.SGD(model.parameters(), rate, **_momentum(r), **_way(rate)),
    "sgd-frozen": lambda model, r, rate, example: FrozenSkeletonSGD(  # control: leaves the free skeleton as it is
        model, rate, analysis=_analysis(model, r), **_momentum(r), **_way(rate)
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


def _torchvision(model: nn.Module, recipe: Recipe) -> None:
    """Convolutions as torchvision's ResNets draw them, w ~ N(0, 2/fan-out): torch's have a sixth of that variance."""
    draws = generator(recipe.seed, "init", "torchvision")
    for layer in _convolutions(model):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu", generator=draws)


def _torchvision_skeleton(model: nn.Module, recipe: Recipe) -> None:
    _torchvision(model, recipe)
    INITS["skeleton"](model, recipe)


def _dirac_added(model: nn.Module, recipe: Recipe) -> None:
    """torch's draw, and 1 more at the centre of as many channels as a convolution can keep."""
    with torch.no_grad():
        for layer in _convolutions(model):
            layer.weight += nn.init.dirac_(torch.empty_like(layer.weight))


def _dirac(model: nn.Module, recipe: Recipe) -> None:
    """Convolutions that keep their width are the identity; the others keep torch's draw.

    With more outputs than inputs `dirac_` leaves rows of zeros, and a ReLU at 0 passes no gradient: dead units.
    """
    for layer in _convolutions(model):
        if layer.in_channels == layer.out_channels:
            nn.init.dirac_(layer.weight)


def _delta_orthogonal(model: nn.Module, recipe: Recipe) -> None:
    """Convolutions are an orthogonal matrix at their centre and 0 elsewhere (Xiao et al., 2018)."""
    draws = generator(recipe.seed, "init", "delta-orthogonal")
    with torch.no_grad():
        for layer in _convolutions(model):
            height, width = layer.kernel_size
            matrix = nn.init.orthogonal_(torch.empty(layer.weight.shape[:2]), generator=draws)
            layer.weight.zero_()[:, :, height // 2, width // 2] = matrix


def _convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


INITS: Mapping[str, Init] = {
    "default": lambda model, recipe: None,  # the network's own
    "torchvision": _torchvision,
    "skeleton": _skeleton("positive"),
    "torchvision-skeleton": _torchvision_skeleton,
    "skeleton-random-signs": _skeleton("random"),
    "skeleton-common-signs": _skeleton("random", common=True),
    "dirac-added": _dirac_added,
    "dirac": _dirac,
    "delta-orthogonal": _delta_orthogonal,
}
