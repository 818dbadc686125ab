"""One step in G-space (Algorithm 1 of the paper) as pure functions over edges and unit vectors.

Shapes: a weight is viewed as `(group, out, in, *taps)`; a unit vector is `(H + 1,)`, entry 0 is ground. `grad` is
∂ℓ/∂w, `path_grad` is ∂ℓ/∂v. The coordinates of a network are two unit vectors, the products of skeleton weights before
and behind a unit over their references: `incoming` Ĩ(u) = I(u)/I_ref(u) and `outgoing` Õ(u) = O(u)/O_ref(u). Then

    v_e = w_e · Ĩ(tail e) · Õ(head e)     for an edge e that is not on the skeleton,
    v_r = Ĩ(r) · Õ(r)                     for the trained skeleton edge in(r) of a root r.

A step is: the coordinates of the weights of now and one reduction of w·g per unit (`observe`), arithmetic on unit
vectors (`root_gradient`, `path_ratio`), and one update per weight (`weights_after`). Nothing is remembered between
steps but the skeleton and its references, and nothing loops over units or depth.

What is summed over weights of the whole network is a unit vector, and goes through `Plan.reduce`. So several processes
may take a step together, each with a part of every parameter (`plan.part`): their sums are added up there alone.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gspace.optim.plan import Ends, Entries, Layer, Plan

Number = float | Tensor
BatchNormRule = Literal["released", "paper", "exact"]


class Coordinates(NamedTuple):
    """Ĩ and Õ, `(H + 1,)` each."""

    incoming: Tensor
    outgoing: Tensor


class Flow(NamedTuple):
    """Sums around each unit, `(H + 1,)` each.

    Attributes:
        out, free, root: Sums of s = w·g over its out-edges, its free edge, in(u); the last matters if that is trained.
        norm: What the released rule divides q by: the norm of the row at the tap of in(u), 1 without a BatchNorm.
    """

    out: Tensor
    free: Tensor
    root: Tensor
    norm: Tensor


def path_products(value: Tensor, jumps: Sequence[Tensor]) -> Tensor:
    """Products of `value` over walks to ground: what a unit has collected, times what the one it has come to has."""
    for at in jumps:
        value = value * value[at]
    return value


def observe(
    plan: Plan, weights: Sequence[Tensor], grads: Sequence[Tensor], dtype: torch.dtype, rule: BatchNormRule
) -> tuple[Coordinates, Flow]:
    """The coordinates of the weights of now, and the sums of w·g: all that a step has to know of the whole network."""
    n = len(plan.root)
    values, sums = _flow(plan, weights, grads, dtype, rule)
    everything = plan.reduce(torch.cat([plan.at_units(values.to(plan.reference)), *sums]))
    out, free, root, norm = everything[2 * n :].to(dtype).chunk(4)
    return _products(plan, everything[: 2 * n], dtype), Flow(out, free, root, torch.where(norm > 0, norm, 1))


def measure(plan: Plan, weights: Sequence[Tensor], dtype: torch.dtype) -> Coordinates:
    """Ĩ and Õ in the weights of now, `(H + 1,)` each: products of skeleton weights over their references."""
    values = plan.at_entries(weights).to(plan.reference)
    return _products(plan, plan.reduce(plan.at_units(values)), dtype)


def _products(plan: Plan, values: Tensor, dtype: torch.dtype) -> Coordinates:
    ratio = path_products(torch.where(plan.present, values / plan.reference, 1), plan.jumps)
    into, out = ratio.to(dtype).chunk(2)
    return Coordinates(into, out)


def row_norms(view: Tensor, rule: BatchNormRule) -> Tensor:
    """‖w‖ of the rows before a BatchNorm, to broadcast against the view: per tap ("released") or whole ("paper")."""
    dims = [2] if rule == "released" else list(range(2, view.dim()))
    return view.square().sum(dims, keepdim=True).sqrt()


def _flow(
    plan: Plan, weights: Sequence[Tensor], grads: Sequence[Tensor], dtype: torch.dtype, rule: BatchNormRule
) -> tuple[Tensor, Flow]:
    """Values at the skeleton entries, and s = w·g reduced to unit vectors; `norm` is 0 where there is none.

    With BatchNorm the paper multiplies every gradient of a row by its norm n; the released code leaves these sums alone
    and divides what arrives at a trained skeleton weight by n at its tap.
    """
    values = plan.at_entries(weights)
    at_entries, norms = (values * plan.at_entries(grads)).to(dtype), torch.zeros_like(values, dtype=dtype)
    columns, parts = [at_entries[:0]], norms.split([x.at.root.numel() for x in plan.layers])
    for layer, weight, grad, norm in zip(plan.layers, weights, grads, parts, strict=True):
        w, n = layer.view(weight), None
        if layer.edges.normalized:
            n = row_norms(w, rule)
            norm.copy_(_at(layer, n, weight))
        if layer.reads:
            s = w * layer.view(grad)
            if n is not None and rule == "paper":
                s *= n
            columns.append(s.sum(1).reshape(-1) * layer.counts)
    if rule == "paper":
        at_entries, norms = at_entries * torch.where(norms > 0, norms, 1), torch.zeros_like(norms)
    root, free = plan.at_units(at_entries).chunk(2)
    out = torch.zeros_like(root).index_add(0, plan.tails, torch.cat(columns))
    return values, Flow(out, free, root, plan.at_units(norms)[: len(root)])


def _at(layer: Layer, n: Tensor, weight: Tensor) -> Tensor:
    """Row norms at the skeleton entries."""
    full = n.expand(layer.shape)
    return (full.transpose(1, 2) if layer.edges.swap else full).reshape(weight.shape)[layer.entries]


def root_gradient(plan: Plan, sums: Flow, at: Coordinates) -> Tensor:
    """∂ℓ/∂v of the trained skeleton paths, `(H + 1,)`, 0 for units that are no root: the inverse chain rule (Sec. 4.2).

    Every basis path that starts like in-path(d), root(d) = r, contains in(r). Hence s at in(r) is q(r) = v·∂ℓ/∂v plus
    the q of all non-free out-edges behind it, and those add up to their s:
        q(r) = s(in r) − Σ_{d: root(d) = r} (Σ s over out-edges of d − s of its free edge).
    """
    behind = torch.zeros_like(sums.out).index_add(0, plan.root, sums.out - sums.free)
    q = torch.where(plan.is_root, sums.root - behind, 0)
    return q / sums.norm / (at.incoming * at.outgoing)


def path_ratio(
    path_value: Tensor, direction: Tensor, lr: Number, max_ratio: float, max_drift: float
) -> tuple[Tensor, Tensor]:
    """R(r) = v'/v = 1 − lr·d/v of the roots, and the same before the guards, `(H + 1,)` each.

    `max_ratio` bounds R to [1/max_ratio, max_ratio], `max_drift` bounds |v'| to [1/max_drift, max_drift] or, where it
    lies outside already, lets it only return. Path values start at ±1 in the balanced reference and on a fresh
    skeleton, and do not depend on the representative; Ĩ alone does. `inf` is no bound at all, negative ratios included.
    """
    raw = 1 - lr * direction / path_value
    ratio = raw
    if max_ratio != float("inf"):
        ratio = ratio.clamp(1 / max_ratio, max_ratio)
    if max_drift != float("inf"):
        size = path_value.abs()
        low, high = size.clamp(max=1 / max_drift) / size, size.clamp(min=max_drift) / size
        ratio = torch.minimum(torch.maximum(ratio, low), high)
    return ratio, raw


def scaled(view: Tensor, at: Ends, out: Tensor | None = None) -> Tensor:
    """v = w·Ĩ(tail)·Õ(head) of the edges that are not on the skeleton; entries that are have no meaning.

    Here and below, `out` is room for the result, which may be the view itself.
    """
    for factor in at:
        view = view if factor is None else torch.mul(view, factor, out=out)
    return view


def unscaled(view: Tensor, at: Ends, out: Tensor | None = None) -> Tensor:
    """The inverse of `scaled`."""
    for factor in at:
        view = view if factor is None else torch.div(view, factor, out=out)
    return view


def path_gradient(
    layer: Layer, view: Tensor, grad: Tensor, at: Ends, rule: BatchNormRule, out: Tensor | None = None
) -> Tensor:
    """∂ℓ/∂v = g·(n)/(Ĩ(tail)·Õ(head)) of the same edges."""
    g = layer.view(grad)
    if layer.edges.normalized and rule != "exact":
        g = torch.mul(g, row_norms(view, rule), out=out)
    return unscaled(g, at, out)


def weights_after(view: Tensor, change: Tensor, ratio: Ends, out: Tensor | None = None) -> Tensor:
    """Weights after the step, for edges that are not on the skeleton (Weight-Allocation, Sec. 4.3).

    v' = v + change·Ĩ(tail)·Õ(head) and w' = v'/(Ĩ'(tail)·Õ'(head)) with Ĩ' = Ĩ·R·c, Õ' = Õ/c, hence
        w' = (w + change) / (R(tail)·c(tail)) · c(head).
    `ratio` is R·c and 1/c: c = 1 keeps the free weights fixed; any other positive c is another projection of Theorem
    4.1. Written additively: a ratio could never move a weight that is 0.
    """
    return unscaled(torch.add(view, change, out=out), ratio, out)


def entries_after(at: Entries, values: Tensor, ratio: Tensor, spread: Tensor) -> Tensor:
    """Skeleton entries after the step: free ones keep their value, in(r) takes R(r)/R(tail); both follow c."""
    change = ratio[at.root] / torch.where(at.root > 0, ratio[at.tail], 1)
    return values * (change * spread[at.head] / spread[at.tail]).to(values.dtype)
