"""A step in torch's own operations: path values are shown to an optimizer, what it makes of them is given to weights.

The optimizer sees a tensor for each parameter that touches a unit, of its shape: path values, and ∂ℓ/∂v as gradient. At
the entry of a trained skeleton path it sees 0 and the gradient of that path, and is asked for the change: weight decay
finds nothing to decay there. At free entries it sees 0 and no gradient. So the state that it keeps for a tensor is
state of the parameter, entry by entry.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gspace.optim import exact, step
from gspace.optim.plan import Ends, Plan
from gspace.optim.step import BatchNormRule, Coordinates

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
