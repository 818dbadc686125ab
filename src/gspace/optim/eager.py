"""A step in torch's own operations: path values are shown to an optimizer, what it makes of them is given to weights.

The optimizer sees a tensor for each parameter that touches a unit, of its shape: path values, and ∂ℓ/∂v as gradient. At
the entry of a trained skeleton path it sees 0 and the gradient of that path, and is asked for the change: weight decay
finds nothing to decay there. At free entries it sees 0 and no gradient. So the state that it keeps for a tensor is
state of the parameter, entry by entry.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gspace.optim import exact, step
from gspace.optim.step import BatchNormRule, Coordinates, Plan

Allocation = Literal["fixed", "spread"]


class Rules(NamedTuple):
    """What is decided in a step apart from the optimizer's hyper-parameters."""

    batch_norm: BatchNormRule
    allocation: Allocation
    max_ratio: float
    max_drift: float


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
) -> None:
    """Writes v and ∂ℓ/∂v into `shown` and `path_grads`, which are shaped like the weights."""
    for layer, weight, grad, v, path_grad in zip(plan.layers, weights, grads, shown, path_grads, strict=True):
        view = layer.edges.view(weight)
        slope = step.path_gradient(layer, view, grad, *at, rule)
        value, slope = exact.on_spheres(layer, step.scaled(layer, view, *at), slope)
        layer.edges.view(v).copy_(value)
        layer.edges.view(path_grad).copy_(slope)
        v[layer.entries] = 0
        path_grad[layer.entries] = root_grad[layer.root].to(path_grad.dtype)


def allocate(
    plan: Plan, rules: Rules, at: Coordinates, weights: Sequence[Tensor], shown: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Gives what became of the path values to the weights, in place; returns R of the roots, bounded and not."""
    ratio, raw = _ratios(plan, rules, at, shown)
    every = ratio[plan.root]
    spread = every.abs().rsqrt() if rules.allocation == "spread" else torch.ones_like(every)
    for layer, weight, v in zip(plan.layers, weights, shown, strict=True):
        view = layer.edges.view(weight)
        entries = step.entries_after(layer, weight[layer.entries], every, spread)
        change = exact.changes(layer, step.scaled(layer, view, *at), layer.edges.view(v))
        view.copy_(step.weights_after(layer, view, change, *at, every, spread))
        weight[layer.entries] = entries
    return ratio, raw


def _ratios(plan: Plan, rules: Rules, at: Coordinates, shown: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    value = at.incoming * at.outgoing
    if rules.batch_norm == "exact":
        return torch.ones_like(value), torch.ones_like(value)
    change = torch.zeros_like(value)
    for layer, v in zip(plan.layers, shown, strict=True):
        if layer.counts:
            change = change.index_put((layer.root,), v[layer.entries].to(change.dtype))
    change = torch.where(step.is_root(plan.root), plan.reduce(change), 0)
    return step.path_ratio(value, -change, 1.0, rules.max_ratio, rules.max_drift)


def wide(x: Tensor) -> Tensor:
    """At least float32: a ratio near 1 has no place in 16 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
