"""What an optimizer in G-space derives from its state and its parameters, and keeps as long as those are there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspace.optim import shards
from gspace.optim.choice import KEY, Chosen
from gspace.optim.plan import Bundle, Plan, bundle, layers_of, plan
from gspace.sharding import local

Groups = Sequence[dict[str, Any]]
_TRAINED, _DEVICE, _DTYPE = map(attrgetter, ("requires_grad", "device", "dtype"))
_NOTHING: dict[str, Any] = {}


@dataclass(eq=False)
class Built:
    """What a step works with, what it was built from, and what a step leaves for the next one.

    Attributes:
        chosen: The skeleton and its references.
        plan: The same for a step.
        bundle: The same for a step in torch's operations.
        weights, groups: The parameters of the plan's layers, and the number of their group.
        outside: The other parameters of each group.
        unit_group: Group of in(r) of each root r, `(H + 1,)`.
        last: R of the roots in the last step, bounded and not.
        dtype: Of unit vectors.
        seen: What it was built from.
        way, way_for: What takes the steps, or why torch's operations do; the settings that was found for.
        moved: What the optimizer moves in place of weights.
        steady: A step was taken with it: all state there is has been made.
    """

    chosen: Chosen
    plan: Plan
    bundle: Bundle
    weights: list[Tensor]
    groups: list[int]
    outside: list[list[Tensor]]
    unit_group: Tensor
    last: tuple[Tensor, Tensor]
    dtype: torch.dtype
    seen: "Seen"
    way: Any = None
    way_for: Any = None
    moved: Any = None
    steady: bool = False

    def holds(self, groups: Groups, state: Any) -> bool:
        """Whether it was built from just this."""
        return seen(groups, state).same(self.seen)


class Seen(NamedTuple):
    """All parameters and what the state says of them, which are compared by identity, and how they look."""

    parameters: list[Tensor]
    tables: list[Tensor | None]
    looks: tuple[list[Any], ...]

    def same(self, then: "Seen") -> bool:
        """Whether nothing has changed since then."""
        alike = self.looks == then.looks  # and as many
        return alike and all(map(is_, self.parameters, then.parameters)) and all(map(is_, self.tables, then.tables))


def seen(groups: Groups, state: Any) -> Seen:
    """Of all parameters of an optimizer."""
    listed = [p for group in groups for p in group["params"]]
    tables = [state.get(p, _NOTHING).get(KEY) for p in listed]
    sizes, strides = [len(group["params"]) for group in groups], list(map(Tensor.stride, listed))
    looks = list(map(_TRAINED, listed)), list(map(_DTYPE, listed)), list(map(_DEVICE, listed)), strides
    return Seen(listed, tables, (sizes, *looks))


def build(
    chosen: Chosen, named: Mapping[str, Tensor], absorbed: Mapping[str, Tensor], groups: Groups, state: Any
) -> Built:
    """For parameters by name, and the rows of theirs that a norm absorbs (`exact.py`)."""
    group_of = {id(p): g for g, group in enumerate(groups) for p in group["params"]}
    mine = {name: mask for name, mask in absorbed.items() if named[name].requires_grad and id(named[name]) in group_of}
    layers = layers_of(chosen.skeleton, named, mine)
    weights = [named[layer.edges.name] for layer in layers]
    dtype = torch.float64 if any(w.dtype == torch.float64 for w in weights) else torch.float32
    planned = plan(chosen.skeleton, shards.divided(layers, named), chosen.references, shards.reduce_of(named, dtype))
    of_weights = [group_of[id(w)] for w in weights]
    of_edges = [group_of.get(id(named[e.name]), 0) for e in chosen.skeleton.edges]
    unit_group = torch.tensor([*of_edges, 0], device="cpu")[chosen.skeleton.in_edge].to(planned.root.device)
    inside = {id(w) for w in weights}
    outside = [[p for p in group["params"] if id(p) not in inside] for group in groups]
    ratio, raw = torch.ones(2, chosen.skeleton.H + 1, dtype=dtype, device=planned.root.device).unbind()
    together = bundle(chosen.skeleton, planned, list(map(local, weights)))
    of_step = planned, together, weights, of_weights, outside, unit_group, (ratio, raw), dtype
    return Built(chosen, *of_step, seen(groups, state))
