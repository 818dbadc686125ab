"""A step where parameters are divided: the parts of layers that are here, and what processes tell each other."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from gspace.optim.held import doubt_of_gradients
from gspace.optim.hooks import capturing
from gspace.optim.plan import Layer, part
from gspace.sharding import Reduce, Together, alone, box, counts, is_sharded, require_copies, widest_mesh


def divided(layers: Sequence[Layer], weights: Mapping[str, Tensor]) -> list[Layer]:
    """Of each layer what is here."""
    if not any(map(is_sharded, weights.values())):
        return list(layers)
    found, widest = [], widest_mesh(weights)
    for layer in layers:
        p = weights[layer.edges.name]
        shape = list(p.shape)
        for dim, (start, stop) in enumerate(box(p)):
            if (start, stop) != (0, shape[dim]):
                layer = part(layer, shape, dim, start, stop)
                shape[dim] = stop - start
        found.append(replace(layer, counts=counts(widest, p)))
    return found


def reduce_of(weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> Reduce:
    """Sums over all processes that hold a part of these weights."""
    return Together(widest_mesh(weights), dtype) if any(map(is_sharded, weights.values())) else alone


def require_gradients(model: nn.Module, parameters: Iterable[Tensor]) -> None:
    """All of them are finite, on every process. While a CUDA graph is recorded, nobody asks."""
    mine = list(parameters)
    doubt = "" if capturing() else doubt_of_gradients(model, mine)
    if any(map(is_sharded, mine)):
        Together(widest_mesh(dict(model.named_parameters())), torch.float32).agree(doubt)
    elif doubt:
        raise RuntimeError(doubt)


def require_alike(model: nn.Module) -> None:
    """Before something is chosen for good: copies of a parameter are copies."""
    weights = dict(model.named_parameters())
    if any(map(is_sharded, weights.values())):
        require_copies(weights, widest_mesh(weights))
