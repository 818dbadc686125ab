"""A step where parameters are divided: the parts of layers that are here, and what processes tell each other."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from gspace.optim.step import Layer, part
from gspace.sharding import Together, box, meshes, require_copies


def divided(layers: Sequence[Layer], weights: Mapping[str, Tensor]) -> list[Layer]:
    """Of each layer what is here."""
    found, places = [], meshes(weights)
    for layer in layers:
        p = weights[layer.edges.name]
        shape = list(p.shape)
        for dim, (start, stop) in enumerate(box(p)):
            if (start, stop) != (0, shape[dim]):
                layer = part(layer, shape, dim, start, stop)
                shape[dim] = stop - start
        found.append(replace(layer, counts=places.counts(p)))
    return found


def together(weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> Together:
    """Sums over all processes that hold a part of these weights."""
    return Together(meshes(weights).widest, dtype)


def require_agreement(model: nn.Module, doubt: str) -> None:
    """Before something is chosen for good: nobody has a doubt, and copies of parameters are copies."""
    weights = dict(model.named_parameters())
    together(weights).agree(doubt)
    require_copies(weights, meshes(weights).widest)
