"""Optimizers, initialisations and controls by their names in a recipe.

gspace's own optimizers are imported when a recipe asks for one, so that every other run works without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gspace.lab.models import stage_ends
from gspace.lab.seeds import generator

if TYPE_CHECKING:
    from gspace.lab.recipe import Recipe

Rate = float | Tensor

PINS: Mapping[str, Callable[[nn.Module], tuple[str, ...]]] = {"none": lambda model: (), "stages": stage_ends}


def symmetry(model: nn.Module, recipe: Recipe) -> dict[str, Any]:
    """The arguments of gspace's functions that decide which units there are: one choice for a run and its controls."""
    return {"residual": recipe.residual, "pin": PINS[recipe.pin](model)}


def _sgd(model: nn.Module, recipe: Recipe, rate: Rate) -> Optimizer:
    # A rate in a tensor stays out of the host's hands: torch's fused step reads it on the device.
    way = {"fused": True} if isinstance(rate, Tensor) else {"foreach": True}
    return torch.optim.SGD(model.parameters(), rate, **_momentum(recipe), **way)


def _gsgd(model: nn.Module, recipe: Recipe, rate: Rate) -> Optimizer:
    from gspace import GSGD

    return GSGD(model, rate, **_momentum(recipe), **_geometry(model, recipe), **_capturable(rate))


def _path_sgd(model: nn.Module, recipe: Recipe, rate: Rate) -> Optimizer:
    from gspace import PathSGD

    return PathSGD(model, rate)


def _momentum(recipe: Recipe) -> dict[str, Any]:
    return {"momentum": recipe.momentum, "nesterov": recipe.nesterov, "weight_decay": recipe.weight_decay}


def _geometry(model: nn.Module, recipe: Recipe) -> dict[str, Any]:
    bounds = {"reference": recipe.reference, "max_ratio": recipe.max_ratio, "max_drift": recipe.max_drift}
    given = {name: value for name, value in bounds.items() if value is not None}
    return {"batch_norm": recipe.batch_norm, **symmetry(model, recipe), **given}


def _capturable(rate: Rate) -> dict[str, Any]:
    return {"capturable": True} if isinstance(rate, Tensor) else {}


OPTIMIZERS: Mapping[str, Callable[[nn.Module, Recipe, Rate], Optimizer]] = {
    "sgd": _sgd,
    "gsgd": _gsgd,
    "path-sgd": _path_sgd,
}


def _skeleton_init(sign: str) -> Callable[[nn.Module, Recipe], None]:
    def initialise(model: nn.Module, recipe: Recipe) -> None:
        from gspace import init_skeleton_

        init_skeleton_(model, sign=sign, generator=generator(recipe.seed, "signs"), **symmetry(model, recipe))

    return initialise


def _keep_init(model: nn.Module, recipe: Recipe) -> None:
    """The network's own initial weights."""


INITS: Mapping[str, Callable[[nn.Module, Recipe], None]] = {
    "default": _keep_init,
    "skeleton": _skeleton_init("positive"),
    "skeleton-random-signs": _skeleton_init("random"),
}


@dataclass(frozen=True)
class Held:
    """Entries of one parameter that training leaves as they are.

    Attributes:
        name: The parameter's name.
        index: Position of each entry, one index tensor per dimension: works for any memory layout.
        values: What they are.
    """

    name: str
    index: tuple[Tensor, ...]
    values: Tensor


# Which of a unit's two skeleton weights are held: the outgoing one is free (never trained by G-SGD).
FROZEN: Mapping[str, tuple[str, ...]] = {"none": (), "free": ("out",), "skeleton": ("out", "in")}


def held_entries(model: nn.Module, recipe: Recipe) -> list[Held]:
    """The entries that `recipe.frozen` names, with their present values."""
    if not FROZEN[recipe.frozen]:
        return []
    from gspace import analyze
    from gspace.skeleton import build_skeleton

    skeleton = build_skeleton(model, analyze(model, **symmetry(model, recipe)))
    parameters = dict(model.named_parameters())
    sides = {
        "out": (skeleton.out_edge, skeleton.out_index),
        "in": (skeleton.in_edge, skeleton.in_index),
    }
    held = []
    for number, edges in enumerate(skeleton.edges):
        flat = torch.cat([index[edge == number] for edge, index in (sides[s] for s in FROZEN[recipe.frozen])]).unique()
        if len(flat):
            weight = parameters[edges.name].detach()
            position = torch.unravel_index(flat.to(weight.device), weight.shape)
            held.append(Held(edges.name, position, weight[position].clone()))
    return held


def hold(model: nn.Module, held: list[Held]) -> Callable[[], None]:
    """A function that puts the held entries back, to call after each step; on the device, without synchronisation."""
    parameters = dict(model.named_parameters())
    device = next(model.parameters()).device
    entries = [(parameters[h.name], tuple(i.to(device) for i in h.index), h.values.to(device)) for h in held]

    @torch.no_grad()
    def restore() -> None:
        for weight, index, values in entries:
            weight.index_put_(index, values)

    return restore
