"""In which units path values are measured: I_ref and O_ref (docs/theory.md), and which skeleton goes with them.

A pair of products is ((log|I|, sign I), (log|O|, sign O)), `(H + 1,)` each.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis
from gspace.balance import balanced_log_scales
from gspace.skeleton import Choice, Skeleton, build_skeleton, path_products, skeleton_values

Reference = Literal["one", "balanced"]
Products = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
CHOICE: Mapping[Reference, Choice] = {"one": "aligned", "balanced": "pivoted"}


def reference_of(model: nn.Module, analysis: Analysis) -> Reference:
    """ "one" if every aligned free weight is ±1, as `init_skeleton_` leaves a network."""
    skeleton = build_skeleton(model, analysis, choice="aligned")
    _, free = skeleton_values(skeleton, dict(model.named_parameters()))
    return "one" if skeleton.H > 0 and bool((free.abs() == 1).all()) else "balanced"


def products(skeleton: Skeleton, weights: Mapping[str, Tensor]) -> Products:
    """I and O of every unit; differentiable."""
    into, out = skeleton_values(skeleton, weights)
    return path_products(into, skeleton.parent), path_products(out, skeleton.child)


@torch.no_grad()
def measured(skeleton: Skeleton, weights: Mapping[str, Tensor], reference: Reference) -> Products:
    """I_ref and O_ref in the weights of now."""
    (log_in, sign_in), (log_out, sign_out) = products(skeleton, weights)
    if reference == "one":
        nothing = torch.zeros_like(log_in), torch.ones_like(sign_in)
        return nothing, nothing
    # In the balanced representative I(u) is I(u)·c(u) and O(u) is O(u)/c(u): Ĩ = 1/c, Õ = c, both positive.
    shift = balanced_log_scales(skeleton.edges, weights, skeleton.H + 1)
    return (log_in + shift, sign_in), (log_out - shift, sign_out)
