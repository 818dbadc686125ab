"""The coordinates of a network in G-space: the values of its basis paths, differentiable, and the way back.

    v_e = w_e · Ĩ(tail e) · Õ(head e)     for an edge e that is not on the skeleton,
    v_r = Ĩ(r) · Õ(r)                     for the trained skeleton edge in(r) of a root r,

with Ĩ = I/I_ref and Õ = O/O_ref as in `step.py`, which measures them. A parameter that touches no unit is its own path.

Two views: "transparent" is that of the paper and of GSGD, where BatchNorm is ignored; "exact" gives values that no
rescaling changes, with BatchNorm too. They agree without BatchNorm.

Shapes: the values of a parameter are `(group, out, in, *taps)`, as `Edges.view` shows it; unit vectors are `(H + 1,)`.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, Edges, analyzed, require_module
from gspace.analysis.result import plain
from gspace.devices import on_cpu
from gspace.optim.arguments import require_one_of
from gspace.optim.plan import Ends, Layer, Plan, layers_of, plan
from gspace.optim.reference import CHOICE, Reference, entry_references, reference_of
from gspace.optim.skeleton import Skeleton, build_skeleton
from gspace.optim.step import entries_after, measure, weights_after
from gspace.optim.walks import connected
from gspace.sharding import refuse_sharded

View = Literal["transparent", "exact"]


@dataclass(frozen=True, eq=False)
class Coordinates:
    """A skeleton and the reference its path products are measured in.

    Attributes:
        skeleton: The skeleton weights.
        plan: The same, and the references, for `measure`.
        others: Names of the trainable parameters that touch no unit.
        roots: Units whose incoming skeleton weight is trained, `(roots,)`.
        on_path: 0 at weights of units that lie on no path, else 1, by parameter, for those that have such.
    """

    skeleton: Skeleton
    plan: Plan
    others: tuple[str, ...]
    roots: Tensor
    on_path: Mapping[str, Tensor]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The parameters that touch a unit."""
        return self.plan.layers


@dataclass(frozen=True, eq=False)
class PathValues:
    """The basis paths of a network.

    Attributes:
        edges: Values of the non-skeleton paths by parameter, 0 at entries on the skeleton and on no path.
        roots: Values of the trained skeleton paths, `(roots,)`.
    """

    edges: Mapping[str, Tensor]
    roots: Tensor

    def vector(self) -> Tensor:
        """All of them, flat (with a 0 for every entry that has none)."""
        return torch.cat([*(v.reshape(-1) for v in self.edges.values()), self.roots])


def coordinates(
    model: nn.Module,
    *,
    reference: Reference | None = None,
    view: View = "transparent",
    analysis: Analysis | None = None,
    **options: Any,
) -> Coordinates:
    """The coordinates that `GSGD(model, reference=…)` would use, or those of the exact view.

    Args:
        reference: "one", the paper's v; "balanced", measured in the balanced representative of the model as it is now;
            None: "one" if every free skeleton weight is ±1 (GSGD also asks that path values are near it).
        view: See above.
        analysis: The result of `analyze(model)`; otherwise `options` (`example_input`, `residual`, `pin`) are for it.
    """
    require_one_of("view", view, ("transparent", "exact"))
    require_one_of("reference", reference, (None, "one", "balanced"))
    require_module(model)
    refuse_sharded(dict(model.named_parameters()), "a path coordinate")
    found = analyzed(model, analysis, options, "pin")
    if view == "exact":
        found = _exact(found)
    reference = reference or reference_of(model, found)
    skeleton = build_skeleton(model, found, choice=CHOICE[reference])
    if skeleton.unused:
        why = "; ".join(skeleton.unused)
        left_out = f"units of this model have no path value: {why}. What is measured may change with their scale"
        warnings.warn(f"{left_out}, or leave them out.", stacklevel=3)
    weights = dict(model.named_parameters())
    planned = plan(skeleton, layers_of(skeleton, weights), entry_references(skeleton, found, weights, reference))
    inside = {layer.edges.name for layer in planned.layers}
    others = tuple(name for name, p in weights.items() if p.requires_grad and name not in inside)
    return Coordinates(skeleton, planned, others, skeleton.roots.to(planned.root.device), _on_path(found, weights))


@on_cpu
def _on_path(found: Analysis, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    live = connected(found.transparent, found.H_paper + 1)
    masks: dict[str, Tensor] = {}
    for e in found.transparent if not bool(live.all()) else ():
        both = live[e.head][:, :, None] & live[e.tail][:, None, :]
        if not bool(both.all()):
            mask = torch.ones(weights[e.name].shape)
            view = e.view(mask)
            view.mul_(both.reshape(*both.shape, *[1] * (view.dim() - 3)))
            masks[e.name] = mask.to(weights[e.name])
    return masks


@on_cpu
def _exact(found: Analysis) -> Analysis:
    """The exact view in place of the transparent one: rows that a BatchNorm absorbs are ground if on a path."""
    live = connected(found.transparent, found.H_paper + 1)
    seen = {e.name: (live[e.head], live[e.tail]) for e in found.transparent}  # all but the BatchNorms' own parameters

    def relabelled(e: Edges) -> Edges:
        head, tail = seen.get(e.name, (torch.tensor(True),) * 2)
        return replace(e, head=e.head * ((e.head <= found.H) | ~head), tail=e.tail * ((e.tail <= found.H) | ~tail))

    total = found.H if bool(live.all()) else found.H + found.H_absorbed
    return replace(found, transparent=tuple(map(relabelled, plain(found.edges, found.forms))), H_paper=total)


def _measured(at: Coordinates, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Ĩ, Õ and the values of the trained skeleton paths, float64, differentiable in the skeleton weights."""
    into, out = measure(at.plan, [weights[layer.edges.name] for layer in at.layers], torch.float64)
    return into, out, (into * out)[at.roots]


def _factor(ends: Ends, view: Tensor) -> Tensor:
    """Ĩ(tail)·Õ(head), to broadcast against the view; neither of the two can overflow alone."""
    return reduce(torch.mul, (x for x in ends if x is not None)).to(view)


def off_skeleton(layer: Layer, weight: Tensor) -> Tensor:
    """1 off the skeleton, 0 on it, as the view."""
    mask = torch.ones_like(weight, requires_grad=False)
    mask[layer.entries] = 0
    return layer.edges.view(mask)


def basis_values(at: Coordinates, weights: Mapping[str, Tensor]) -> PathValues:
    """The values of the basis paths; differentiable in `weights`, which are by parameter name."""
    refuse_sharded(weights, "a path value")
    into, out, roots = _measured(at, weights)
    edges: dict[str, Tensor] = {}
    for layer, ends in zip(at.layers, at.plan.ends(into, out), strict=True):
        weight = weights[layer.edges.name]
        view = layer.edges.view(weight)
        edges[layer.edges.name] = view * _factor(ends, view) * off_skeleton(layer, weight.detach())
        if layer.edges.name in at.on_path:
            edges[layer.edges.name] = edges[layer.edges.name] * layer.edges.view(at.on_path[layer.edges.name])
    edges |= {name: weights[name] * at.on_path.get(name, 1) for name in at.others}
    return PathValues(edges, roots)


def displaced(at: Coordinates, weights: Mapping[str, Tensor], change: PathValues) -> dict[str, Tensor]:
    """The weights whose path values are v + change, free skeleton weights fixed (Weight-Allocation).

    Differentiable in `change`.
    """
    into, out, value = _measured(at, weights)
    ratio = torch.ones_like(into).index_put((at.roots,), 1 + change.roots.to(value) / value)
    every = ratio[at.plan.root]
    result = {name: weights[name] + change.edges[name] for name in at.others}
    before = [weights[layer.edges.name] for layer in at.layers]
    after = [torch.zeros_like(weight) for weight in before]
    ends, ratios = at.plan.ends(into, out), at.plan.ends(every, None)
    for layer, weight, new, of, ratio_of in zip(at.layers, before, after, ends, ratios, strict=True):
        view, columns = layer.edges.view(weight), ratio_of.columns
        change_w = change.edges[layer.edges.name] / _factor(of, view)
        in_front = Ends(None if columns is None else columns.to(view), None)
        layer.edges.view(new).copy_(weights_after(view, change_w, in_front))
        result[layer.edges.name] = new
    at.plan.put(after, entries_after(at.plan.entries, at.plan.at_entries(before), every, torch.ones_like(every)))
    return result


def unflatten(vector: Tensor, like: PathValues) -> PathValues:
    """The inverse of `PathValues.vector`."""
    shapes = [v.shape for v in like.edges.values()]
    parts: Sequence[Tensor] = vector.split([*(s.numel() for s in shapes), len(like.roots)])
    named = zip(like.edges, parts, shapes, strict=False)  # the last part are the roots
    return PathValues({name: part.reshape(s).to(like.edges[name]) for name, part, s in named}, parts[-1])
