"""A step in torch's own operations: path values are shown to an optimizer, what it makes of them is given to weights.

The optimizer sees a tensor for each parameter that touches a unit, of its shape: path values, and ∂ℓ/∂v as gradient. At
the entry of a trained skeleton path it sees 0 and the gradient of that path, and is asked for the change: weight decay
finds nothing to decay there. At free entries it sees 0 and no gradient. So the state that it keeps for a tensor is
state of the parameter, entry by entry.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gspace.optim import exact, step
from gspace.optim.plan import Ends, Layer, Plan, plan
from gspace.optim.skeleton import Skeleton
from gspace.optim.step import BatchNormRule, Coordinates

Allocation = Literal["fixed", "spread"]


class Rules(NamedTuple):
    """What is decided in a step apart from the optimizer's hyper-parameters."""

    batch_norm: BatchNormRule
    allocation: Allocation
    max_ratio: float
    max_drift: float


class Bundle(NamedTuple):
    """Layers as a step sees them: vectors, as γ, β and biases, are one. A network has many, and each is small.

    Attributes:
        plan: For these layers.
        members: The layers of the network's plan that each one is.
    """

    plan: Plan
    members: list[list[int]]

    def joined(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the network's layers, for these layers."""
        return [tensors[k[0]] if len(k) == 1 else torch.cat([tensors[i] for i in k]) for k in self.members]

    def give(self, joined: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Writes what is joined back to tensors of the network's layers."""
        sources, targets = [], []
        for some, whole in zip(self.members, joined, strict=True):
            parts = whole.split([tensors[k].numel() for k in some]) if len(some) > 1 else [whole]
            for k, part in zip(some, parts, strict=True):
                if part is not tensors[k]:
                    sources.append(part)
                    targets.append(tensors[k])
        if targets:
            torch._foreach_copy_(targets, sources)


def bundle(skeleton: Skeleton, given: Plan, weights: Sequence[Tensor]) -> Bundle:
    """For the plan of a network."""
    alike: dict[Hashable, list[int]] = {}
    for k, (layer, w) in enumerate(zip(given.layers, weights, strict=True)):
        kind = (w.dtype, w.device, layer.edges.normalized, layer.counts)
        alike.setdefault(kind if w.dim() == 1 else k, []).append(k)
    members = list(alike.values())
    layers = [_one([given.layers[k] for k in some]) for some in members]
    return Bundle(plan(skeleton, layers, given.reference, given.reduce), members)


def _one(layers: Sequence[Layer]) -> Layer:
    """Vectors as one, of which every entry is a group."""
    first = layers[0]
    if len(layers) == 1:
        return first
    heads = [x.edges.head for x in layers]
    starts = [0, *itertools.accumulate(head.numel() for head in heads)]
    absorbed = [head < 0 if x.absorbed is None else x.absorbed for x, head in zip(layers, heads, strict=True)]
    head, tail, mask = (
        torch.cat([x.reshape(-1, 1) for x in every])
        for every in (heads, [x.edges.tail.expand_as(x.edges.head) for x in layers], absorbed)
    )
    return replace(
        first,
        edges=replace(first.edges, head=head, tail=tail),
        entries=(torch.cat([x.entries[0] + start for x, start in zip(layers, starts, strict=False)]),),
        root=torch.cat([x.root for x in layers]),
        free=torch.cat([x.free for x in layers]),
        entry_tail=torch.cat([x.entry_tail for x in layers]),
        entry_head=torch.cat([x.entry_head for x in layers]),
        shape=torch.Size((starts[-1], 1, 1)),
        reads=any(x.reads for x in layers),
        writes=any(x.writes for x in layers),
        absorbed=mask if any(x.absorbed is not None for x in layers) else None,
    )


def observed(
    plan: Plan, rule: BatchNormRule, weights: Sequence[Tensor], grads: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Coordinates, Tensor]:
    """The coordinates of the weights of now, and ∂ℓ/∂v of the trained skeleton paths; none is trained in `exact.py`."""
    if rule == "exact":
        gauge = step.measure(plan, weights, dtype).incoming.abs()
        return Coordinates(gauge, gauge.reciprocal()), torch.zeros_like(gauge)
    at, sums = step.observe(plan, weights, grads, dtype, rule)
    return at, step.root_gradient(plan, sums, at)


def show(
    plan: Plan,
    rule: BatchNormRule,
    at: Coordinates,
    root_grad: Tensor,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    shown: Sequence[Tensor],
    path_grads: Sequence[Tensor],
) -> list[Ends]:
    """Writes v and ∂ℓ/∂v into `shown` and `path_grads`, which are shaped like the weights; returns Ĩ and Õ at ends."""
    values, slopes, ends = _views(plan, shown), _views(plan, path_grads), plan.ends(*at)
    for layer, weight, grad, v, slope, of in zip(plan.layers, weights, grads, values, slopes, ends, strict=True):
        view = layer.view(weight)
        _write(v, step.scaled, view, of)
        _write(slope, step.path_gradient, layer, view, grad, of, rule)
    exact.to_spheres_(plan.layers, values, slopes)
    at_entries = root_grad[plan.entries.root]
    plan.put(shown, torch.zeros_like(at_entries))
    plan.put(path_grads, at_entries)
    return ends


def allocate(
    plan: Plan,
    rules: Rules,
    at: Coordinates,
    ends: Sequence[Ends],
    weights: Sequence[Tensor],
    shown: Sequence[Tensor],
    room: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Gives what became of the path values to the weights, in place; returns R of the roots, bounded and not.

    `shown` is written over, and so is `room`, tensors like the weights.
    """
    ratio, raw = _ratios(plan, rules, at, shown)
    entries, every = plan.at_entries(weights), ratio[plan.root]
    if rules.batch_norm == "exact":
        ratios = [Ends(None, None)] * len(weights)
    else:
        spread = every.abs().rsqrt() if rules.allocation == "spread" else None
        c = torch.ones_like(every) if spread is None else spread
        entries = step.entries_after(plan.entries, entries, every, c)
        ratios = plan.ends(every * c, None if spread is None else c.reciprocal())
    views, changes = _views(plan, weights), _views(plan, shown)
    rooms = [None] * len(views) if room is None or torch.compiler.is_compiling() else _views(plan, room)
    before = [step.scaled(view, of, out) for view, of, out in zip(views, ends, rooms, strict=True)]
    exact.to_changes_(plan.layers, before, changes)
    for view, change, of, ratio_of in zip(views, changes, ends, ratios, strict=True):
        _write(change, step.unscaled, change, of)
        _write(view, step.weights_after, view, change, ratio_of)
    plan.put(weights, entries)
    return ratio, raw


def _ratios(plan: Plan, rules: Rules, at: Coordinates, shown: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    value = at.incoming * at.outgoing
    if rules.batch_norm == "exact":
        return torch.ones_like(value), torch.ones_like(value)
    change = plan.at_units(plan.at_entries(shown).to(value.dtype))[: len(value)]
    change = torch.where(plan.is_root, plan.reduce(change), 0)
    return step.path_ratio(value, -change, 1.0, rules.max_ratio, rules.max_drift)


def _views(plan: Plan, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [layer.view(t) for layer, t in zip(plan.layers, tensors, strict=True)]


def _write(target: Tensor, function: Callable[..., Tensor], *given: Any) -> None:
    """`function` of what is given, straight into `target`; `torch.compile` does that by itself."""
    result = function(*given, out=None if torch.compiler.is_compiling() else target)
    if result is not target:
        target.copy_(result)


def wide(x: Tensor) -> Tensor:
    """At least float32: a ratio near 1 has no place in 16 bits."""
    return x.float() if x.itemsize < 4 else x
