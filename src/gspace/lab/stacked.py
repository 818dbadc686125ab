"""Optimizers for several networks of one shape at once: weights `(network, out, in)`, one learning rate per network.

`STACKED` lists the optimizers that can do so, by their names in a recipe. An entry is built from the networks as they
are at iteration 0, their stacked weights, the recipes (which differ in seed and lr alone) and the tensor of rates.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gspace.lab.engine import Tree
from gspace.lab.optimizers import Held, held_entries
from gspace.lab.recipe import Recipe

Parameters = dict[str, nn.Parameter]


class StackedOptimizer(Protocol):
    """What `learners.Stacked` asks of an optimizer."""

    def step(self) -> None: ...
    def tensors(self) -> Tree: ...
    def state(self, network: int) -> dict[str, Any]: ...
    def load(self, network: int, state: Mapping[str, Any]) -> None: ...


def stack_parameters(models: Sequence[nn.Module], device: torch.device) -> Parameters:
    """The parameters of all networks, by name, stacked along a new first dimension."""
    named = [dict(model.named_parameters()) for model in models]
    return {name: nn.Parameter(torch.stack([p[name].detach() for p in named]).to(device)) for name in named[0]}


def stack_held(held: Sequence[Sequence[Held]], device: torch.device) -> list[Held]:
    """Held entries of each network -> held entries of the stacked parameters."""
    stacked = []
    for entries in zip(*held, strict=True):
        network = torch.cat([torch.full_like(h.index[0], k) for k, h in enumerate(entries)])
        index = (network, *(torch.cat(column) for column in zip(*(h.index for h in entries), strict=True)))
        values = torch.cat([h.values for h in entries]).to(device)
        stacked.append(Held(entries[0].name, tuple(i.to(device) for i in index), values))
    return stacked


class StackedSGD:
    """torch's SGD, in its order of operations, with a rate per network; and the control that holds skeleton weights."""

    def __init__(
        self, models: Sequence[nn.Module], parameters: Parameters, recipes: Sequence[Recipe], rates: Tensor
    ) -> None:
        recipe = recipes[0]
        self.parameters, self.rates = parameters, rates
        self.momentum, self.nesterov, self.decay = recipe.momentum, recipe.nesterov, recipe.weight_decay
        self.held = stack_held([held_entries(m, r) for m, r in zip(models, recipes, strict=True)], rates.device)
        buffered = parameters if self.momentum else {}
        self.buffers = {name: torch.zeros_like(p) for name, p in buffered.items()}

    @torch.no_grad()
    def step(self) -> None:
        rates = self.rates.view(-1, 1, 1)
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, "the loss reaches every weight of an MLP"
            direction = parameter.grad
            if self.decay:
                direction = direction.add_(parameter, alpha=self.decay)
            if self.momentum:
                buffer = self.buffers[name].mul_(self.momentum).add_(direction)
                direction = direction.add_(buffer, alpha=self.momentum) if self.nesterov else buffer
            parameter.addcmul_(direction, rates, value=-1)
        for held in self.held:
            self.parameters[held.name].index_put_(held.index, held.values)

    def tensors(self) -> Tree:
        return [self.buffers, self.rates]

    def state(self, network: int) -> dict[str, Any]:
        return {name: buffer[network].clone() for name, buffer in self.buffers.items()}

    def load(self, network: int, state: Mapping[str, Any]) -> None:
        for name, buffer in self.buffers.items():
            buffer[network].copy_(state[name])


Builder = Callable[[Sequence[nn.Module], Parameters, Sequence[Recipe], Tensor], StackedOptimizer]

STACKED: Mapping[str, Builder] = {"sgd": StackedSGD}


def stackable(recipe: Recipe) -> bool:
    """Whether several such runs can be trained at once."""
    return recipe.model == "mlp" and recipe.optimizer in STACKED


def stack_key(recipe: Recipe) -> Recipe:
    """Runs with the same key differ in seed and learning rate alone."""
    return recipe.but(seed=0, lr=1.0)
