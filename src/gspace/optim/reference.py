"""In which units path values are measured: I_ref and O_ref (docs/theory.md), and which skeleton goes with them."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis
from gspace.devices import on_cpu
from gspace.group.balance import balanced_log_scales
from gspace.optim.plan import jumps_of
from gspace.optim.skeleton import Choice, Skeleton, build_skeleton, values_at
from gspace.optim.step import path_products
from gspace.optim.walks import connected
from gspace.sharding import weights_of

Reference = Literal["one", "balanced"]
CHOICE: Mapping[Reference, Choice] = {"one": "aligned", "balanced": "pivoted"}


def skeleton_values(skeleton: Skeleton, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Values of in(u) and out(u), `(H + 1,)` float64 each, 1 for ground; differentiable."""
    into = values_at(skeleton.edges, weights, skeleton.in_edge, skeleton.in_index)
    return into, values_at(skeleton.edges, weights, skeleton.out_edge, skeleton.out_index)


def reference_of(model: nn.Module, analysis: Analysis) -> Reference:
    """ "one" if every aligned free weight is ±1, as `init_skeleton_` leaves a network."""
    skeleton = build_skeleton(model, analysis, choice="aligned")
    _, free = skeleton_values(skeleton, weights_of(model))
    return "one" if skeleton.H > 0 and bool((free.abs() == 1).all()) else "balanced"


def products(skeleton: Skeleton, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """I and O of every unit, `(H + 1,)` each; differentiable."""
    into, out = skeleton_values(skeleton, weights)
    up, down = (jumps_of(following.to(into.device)) for following in (skeleton.parent, skeleton.child))
    return path_products(into, up), path_products(out, down)


@torch.no_grad()
def entry_references(
    skeleton: Skeleton,
    analysis: Analysis,
    weights: Mapping[str, Tensor],
    reference: Reference,
    balanced: Tensor | None = None,
) -> Tensor:
    """What in(u) and out(u) are divided by, `(2, H + 1)` float64: 1, or their values in the balanced representative.

    There an edge is w·c(head)/c(tail): Ĩ = 1/c and Õ = c at first, both positive. `balanced` are the log scales that
    balance all units, if they are known.
    """
    into, out = skeleton_values(skeleton, weights)
    if reference == "one":
        return torch.ones_like(torch.stack([into, out]))
    if balanced is None or analysis.H_paper > skeleton.H:
        balanced = _balanced_log_scales(skeleton, analysis, weights)
    x = balanced.to(into.device)
    parent, child = skeleton.parent.to(x.device), skeleton.child.to(x.device)
    return torch.stack([into * (x - x[parent]).exp(), out * (x[child] - x).exp()])


@on_cpu
def _balanced_log_scales(skeleton: Skeleton, analysis: Analysis, weights: Mapping[str, Tensor]) -> Tensor:
    """Of the units of a skeleton, `(H + 1,)`. Of all others, those that lie on a path keep their scale like ground."""
    edges = analysis.transparent
    number = torch.zeros(analysis.H_paper + 1, dtype=torch.long)
    for e, own in zip(edges, skeleton.edges, strict=True):
        number[e.head], number[e.tail] = own.head, own.tail
    fixed = connected(edges, len(number)) & (number == 0)
    found = balanced_log_scales(edges, weights, len(number), fixed)
    units = number.argsort()[-skeleton.H - 1 :]  # one of those that are ground, then each unit of the skeleton
    return torch.where(number[units].to(found.device) > 0, found[units.to(found.device)], 0)
