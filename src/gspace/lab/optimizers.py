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

from gspace import GSGD, init_skeleton_
from gspace.baselines import FrozenSkeletonSGD, PathSGD
from gspace.lab.errors import RecipeError
from gspace.lab.models import stage_ends
from gspace.lab.seeds import generator

if TYPE_CHECKING:
    from gspace.lab.recipe import Recipe

Rate = float | Tensor
Builder = Callable[[nn.Module, "Recipe", Rate, Tensor], Optimizer]

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


def _sgd(model: nn.Module, recipe: Recipe, rate: Rate, example: Tensor) -> Optimizer:
    return torch.optim.SGD(model.parameters(), rate, **_momentum(recipe), **_way(rate))


def _sgd_frozen(model: nn.Module, recipe: Recipe, rate: Rate, example: Tensor) -> Optimizer:
    optimizer = FrozenSkeletonSGD(model, rate, **symmetry(model, recipe), **_momentum(recipe), **_way(rate))
    optimizer.rechoose()  # in the first weights, before a CUDA graph is captured
    return optimizer


def _gsgd(model: nn.Module, recipe: Recipe, rate: Rate, example: Tensor) -> Optimizer:
    bounds = {"reference": recipe.reference, "max_ratio": recipe.max_ratio, "max_drift": recipe.max_drift}
    given: dict[str, Any] = {name: value for name, value in bounds.items() if value is not None}
    rules: dict[str, Any] = {"batch_norm": recipe.batch_norm, "allocation": recipe.allocation}
    optimizer = GSGD(model, rate, **_momentum(recipe), **rules, **symmetry(model, recipe), **given)
    optimizer.rechoose()  # in the first weights, before a CUDA graph is captured
    return optimizer


def _path_sgd(model: nn.Module, recipe: Recipe, rate: Rate, example: Tensor) -> Optimizer:
    return PathSGD(model, rate, **_momentum(recipe), example_input=example)


OPTIMIZERS: Mapping[str, Builder] = {
    "sgd": _sgd,
    "sgd-frozen": _sgd_frozen,  # control: SGD that leaves the free skeleton weights as they are
    "gsgd": _gsgd,
    "path-sgd": _path_sgd,
}


def build_optimizer(model: nn.Module, recipe: Recipe, rate: Rate, example: Tensor) -> Optimizer:
    """The recipe's optimizer; what it refuses is an error of the recipe."""
    try:
        return OPTIMIZERS[recipe.optimizer](model, recipe, rate, example)
    except ValueError as error:
        raise RecipeError(f"{recipe.optimizer} refuses this recipe: {' '.join(str(error).split())}") from error


def _own_signs(recipe: Recipe) -> torch.Generator:
    return generator(recipe.seed, "signs")


def _common_signs(recipe: Recipe) -> torch.Generator:
    """The same for every seed, and none of theirs."""
    return generator(0, "signs", "common")


def _skeleton(
    sign: Any, draws: Callable[[Recipe], torch.Generator] = _own_signs
) -> Callable[[nn.Module, Recipe], None]:
    def initialise(model: nn.Module, recipe: Recipe) -> None:
        init_skeleton_(model, sign, draws(recipe), **symmetry(model, recipe))

    return initialise


def _as_built(model: nn.Module, recipe: Recipe) -> None:
    """The network's own initial weights."""


def _torchvision(model: nn.Module, recipe: Recipe) -> None:
    """Convolutions as torchvision's ResNets draw them, w ~ N(0, 2/fan-out): torch's have a sixth of that variance."""
    draws = generator(recipe.seed, "init", "torchvision")
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=draws)


def _torchvision_skeleton(model: nn.Module, recipe: Recipe) -> None:
    _torchvision(model, recipe)
    _skeleton("positive")(model, recipe)


INITS: Mapping[str, Callable[[nn.Module, Recipe], None]] = {
    "default": _as_built,
    "torchvision": _torchvision,
    "skeleton": _skeleton("positive"),
    "torchvision-skeleton": _torchvision_skeleton,
    "skeleton-random-signs": _skeleton("random"),
    "skeleton-common-signs": _skeleton("random", _common_signs),
}
