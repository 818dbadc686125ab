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
may take a step together, each with a part of every parameter (`part`): their sums are added up there, nowhere else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gspace.analysis import Edges
from gspace.devices import on_cpu
from gspace.optim.skeleton import Skeleton, by_edge
from gspace.sharding import Reduce, alone, edges_on

Number = float | Tensor
BatchNormRule = Literal["released", "paper", "exact"]


@dataclass(frozen=True, eq=False)
class Layer:
    """One parameter and its place on the skeleton, on the device of the parameter.

    Attributes:
        edges: Its edges, `head` and `tail` on the device.
        entries: Index of its skeleton entries, one tensor per dimension of the parameter.
        root: Unit whose trained incoming skeleton weight the entry is, else 0, `(entries,)`.
        free: Unit whose free weight the entry is, else 0, `(entries,)`.
        entry_tail: Unit that the entry reads, `(entries,)`.
        entry_head: Unit that the entry writes, `(entries,)`.
        absorbed: Rows whose scale a norm absorbs, `(group, out)` bool, with `batch_norm="exact"`; None if none are.
        counts: Whether its sums count: not if another process holds the same and counts them.
    """

    edges: Edges
    entries: tuple[Tensor, ...]
    root: Tensor
    free: Tensor
    entry_tail: Tensor
    entry_head: Tensor
    absorbed: Tensor | None = None
    counts: bool = True

    def rows(self, vector: Tensor, like: Tensor) -> Tensor:
        """A unit vector at the heads, shaped to broadcast against the view of a weight."""
        return vector[self.edges.head].reshape(*self.edges.head.shape, *[1] * (like.dim() - 2)).to(like.dtype)

    def columns(self, vector: Tensor, like: Tensor) -> Tensor:
        """A unit vector at the tails."""
        g, n = self.edges.tail.shape
        return vector[self.edges.tail].reshape(g, 1, n, *[1] * (like.dim() - 3)).to(like.dtype)


class Coordinates(NamedTuple):
    """Ĩ and Õ, `(H + 1,)` each."""

    incoming: Tensor
    outgoing: Tensor


class Flow(NamedTuple):
    """Sums around each unit, `(H + 1,)` each.

    Attributes:
        out, free, root: Sums of s = w·g over its out-edges, its free edge, in(u) if that is trained.
        norm: What the released rule divides q by: the norm of the row at the tap of in(u), 1 without a BatchNorm.
    """

    out: Tensor
    free: Tensor
    root: Tensor
    norm: Tensor


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything a step needs to know of a skeleton, on the device of the parameters.

    Attributes:
        layers: The parameters that touch a unit.
        root: Root of each unit, `(H + 1,)`.
        place: Where in(u) and then out(u) stand among the entries of all layers, counted from 1; 0: elsewhere.
        present: Whether there is such a weight at all: not for ground.
        reference: What they are divided by, float64. All three are `(2·(H + 1),)`.
        following: Parent of each unit as one that is written, child as one that is read (plus H + 1). `(2·(H + 1),)`.
        jumps: Where walks along `following` have come after 1, 2, 4 … steps, until all are at ground.
        reduce: Adds up what every process has summed over its weights.
    """

    layers: tuple[Layer, ...]
    root: Tensor
    place: Tensor
    present: Tensor
    reference: Tensor
    following: Tensor
    jumps: tuple[Tensor, ...]
    reduce: Reduce = alone


def plan(skeleton: Skeleton, layers: Sequence[Layer], references: Tensor, reduce: Reduce = alone) -> Plan:
    """For a skeleton, its layers, or the parts of them that are here, and the references of in(u) and out(u)."""
    device = layers[0].root.device if layers else torch.device("cpu")
    n, none = skeleton.H + 1, torch.zeros(1, dtype=torch.long, device=device)
    root, free = (torch.cat([none, *(getattr(x, of).to(device) for x in layers)]) for of in ("root", "free"))
    counts = torch.tensor([True, *(x.counts for x in layers)], device=device)
    counts = counts.repeat_interleave(torch.tensor([1, *(len(x.root) for x in layers)], device=device))
    place, number = torch.zeros(2 * n, dtype=torch.long, device=device), torch.arange(len(root), device=device)
    place[root[counts]], place[n + free[counts]] = number[counts], number[counts]
    place[0] = place[n] = 0
    root, parent = skeleton.root.to(device), skeleton.parent.to(device)
    units = torch.arange(n, device=device)
    place[:n] = torch.where(root == units, place[:n], place[n + parent])  # in(u) of another unit is out(parent)
    following = torch.cat([parent, skeleton.child.to(device) + n])
    present = torch.cat([skeleton.in_edge, skeleton.out_edge]).to(device) >= 0
    reference = references.to(device).reshape(-1)
    return Plan(tuple(layers), root, place, present, reference, following, jumps_of(following), reduce)


def jumps_of(following: Tensor) -> tuple[Tensor, ...]:
    """Where walks along `following` have come after 1, 2, 4 … steps, until all are at ground, which follows itself."""
    jumps, at = [], following
    while bool((following[at] != at).any()):
        jumps.append(at)
        at = at[at]
    return tuple(jumps)


def path_products(value: Tensor, jumps: Sequence[Tensor]) -> Tensor:
    """Products of `value` over walks to ground: what a unit has collected, times what the one it has come to has."""
    for at in jumps:
        value = value * value[at]
    return value


@on_cpu
def layers_of(
    skeleton: Skeleton, weights: Mapping[str, Tensor], absorbed: Mapping[str, Tensor] | None = None
) -> list[Layer]:
    """Every parameter that touches a unit, or has rows that a norm absorbs."""
    layers, masks, names = [], absorbed or {}, [e.name for e in skeleton.edges]
    trained = torch.where(skeleton.root == torch.arange(skeleton.H + 1), skeleton.in_edge, -1)
    units, is_free = torch.arange(skeleton.H + 1).repeat(2), torch.arange(2).repeat_interleave(skeleton.H + 1)
    order = by_edge(torch.cat([trained, skeleton.out_edge]), len(names))
    sizes, places = [len(some) for some in order], torch.cat([torch.empty(0, dtype=torch.long), *order])
    units, is_free = units[places], is_free[places]
    of_all = (
        torch.where(is_free > 0, skeleton.out_index[units], skeleton.in_index[units]),
        torch.where(is_free > 0, 0, units),
        torch.where(is_free > 0, units, 0),
        torch.where(is_free > 0, units, skeleton.parent[units]),
        torch.where(is_free > 0, skeleton.child[units], units),
    )
    for e, *of_entries in zip(skeleton.edges, *(x.split(sizes) for x in of_all), strict=True):
        if e.name not in masks and not bool(e.head.any() | e.tail.any()):
            continue
        weight = weights[e.name]
        device = weight.device
        index, root, free, tail, head = (x.to(device) for x in of_entries)
        mask = masks[e.name].to(device) if e.name in masks else None
        layers.append(Layer(edges_on(e, device), unraveled(index, weight.shape), root, free, tail, head, mask))
    return layers


def unraveled(index: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Flat indices into a tensor of this shape as one index for each dimension; `torch.unravel_index` checks more."""
    found = []
    for size in reversed(shape[1:]):
        found.append(index % size)
        index = index // size
    return (index, *reversed(found))[: len(shape)]


def part(layer: Layer, shape: Sequence[int], dim: int, start: int, stop: int) -> Layer:
    """The layer of `weight.narrow(dim, start, stop - start)`, for a weight of this shape.

    Raises:
        ValueError: It has rows before a norm, and would have parts of them. Their norms are no sums over units.
    """
    e, mask = layer.edges, layer.absorbed
    single = len(shape) == 1 or e.head.numel() == math.prod(shape)  # one weight for each output
    across = dim > 1 or (dim == 0) == e.swap  # its inputs are divided
    if e.stacked(shape):
        across = dim > 2 or (dim > 0 and (dim == 1) == e.swap)
    if not single and across and (e.normalized or mask is not None):
        raise ValueError(f"{e.name} has rows before a norm, which cannot be divided: shard its outputs instead")
    inside = (layer.entries[dim] >= start) & (layer.entries[dim] < stop)
    return replace(
        layer,
        edges=e.part(shape, dim, start, stop),
        entries=tuple(i[inside] - (start if d == dim else 0) for d, i in enumerate(layer.entries)),
        root=layer.root[inside],
        free=layer.free[inside],
        entry_tail=layer.entry_tail[inside],
        entry_head=layer.entry_head[inside],
        absorbed=None if mask is None else replace(e, head=mask).part(shape, dim, start, stop).head,
    )


def observe(
    plan: Plan, weights: Sequence[Tensor], grads: Sequence[Tensor], dtype: torch.dtype, rule: BatchNormRule
) -> tuple[Coordinates, Flow]:
    """The coordinates of the weights of now, and the sums of w·g: all that a step has to know of the whole network."""
    n = len(plan.root)
    sums = _flow(plan.layers, weights, grads, torch.zeros(n, dtype=dtype, device=plan.root.device), rule)
    everything = plan.reduce(torch.cat([_values(plan, weights), *sums]))
    out, free, root, norm = everything[2 * n :].to(dtype).chunk(4)
    return _products(plan, everything[: 2 * n], dtype), Flow(out, free, root, torch.where(norm > 0, norm, 1))


def measure(plan: Plan, weights: Sequence[Tensor], dtype: torch.dtype) -> Coordinates:
    """Ĩ and Õ in the weights of now, `(H + 1,)` each: products of skeleton weights over their references."""
    return _products(plan, plan.reduce(_values(plan, weights)), dtype)


def _values(plan: Plan, weights: Sequence[Tensor]) -> Tensor:
    """Values of in(u) and out(u), `(2·(H + 1),)`; 0 for those that are elsewhere."""
    parts = [weight[layer.entries].to(plan.reference) for layer, weight in zip(plan.layers, weights, strict=True)]
    return torch.cat([plan.reference.new_zeros(1), *parts])[plan.place]


def _products(plan: Plan, values: Tensor, dtype: torch.dtype) -> Coordinates:
    ratio = path_products(torch.where(plan.present, values / plan.reference, 1), plan.jumps)
    into, out = ratio.to(dtype).chunk(2)
    return Coordinates(into, out)


def row_norms(view: Tensor, rule: BatchNormRule) -> Tensor:
    """‖w‖ of the rows before a BatchNorm, to broadcast against the view: per tap ("released") or whole ("paper")."""
    dims = [2] if rule == "released" else list(range(2, view.dim()))
    return view.square().sum(dims, keepdim=True).sqrt()


def _flow(
    layers: Sequence[Layer], weights: Sequence[Tensor], grads: Sequence[Tensor], like: Tensor, rule: BatchNormRule
) -> Flow:
    """Reduces s = w·g to unit vectors; `norm` is 0 where there is none.

    With BatchNorm the paper multiplies every gradient of a row by its norm n; the released code leaves these sums alone
    and divides what arrives at a trained skeleton weight by n at its tap.
    """
    out, free, root, norm = (torch.zeros_like(like) for _ in range(4))
    for layer, weight, grad in zip(layers, weights, grads, strict=True):
        if not layer.counts:
            continue
        w, g = layer.edges.view(weight), layer.edges.view(grad)
        at_entries = (weight[layer.entries] * grad[layer.entries]).to(like.dtype)
        s = w * g
        if layer.edges.normalized:
            n = row_norms(w, rule)
            n_entries = _at(layer, n, weight).to(like.dtype)
            if rule == "paper":
                s, at_entries = s * n, at_entries * n_entries
            else:
                norm = norm.index_put((layer.root,), n_entries)
        columns = s.sum([1, *range(3, s.dim())])
        out = out.index_add(0, layer.edges.tail.reshape(-1), columns.reshape(-1).to(like.dtype))
        free = free.index_add(0, layer.free, at_entries)
        root = root.index_add(0, layer.root, at_entries)
    return Flow(out, free, root, norm)


def _at(layer: Layer, n: Tensor, weight: Tensor) -> Tensor:
    """Row norms at the skeleton entries."""
    full = torch.empty_like(weight)
    layer.edges.view(full).copy_(n.expand(layer.edges.view(full).shape))
    return full[layer.entries]


def root_gradient(plan: Plan, sums: Flow, at: Coordinates) -> Tensor:
    """∂ℓ/∂v of the trained skeleton paths, `(H + 1,)`, 0 for units that are no root: the inverse chain rule (Sec. 4.2).

    Every basis path that starts like in-path(d), root(d) = r, contains in(r). Hence s at in(r) is q(r) = v·∂ℓ/∂v plus
    the q of all non-free out-edges behind it, and those add up to their s:
        q(r) = s(in r) − Σ_{d: root(d) = r} (Σ s over out-edges of d − s of its free edge).
    """
    behind = torch.zeros_like(sums.out).index_add(0, plan.root, sums.out - sums.free)
    q = torch.where(is_root(plan.root), sums.root - behind, 0)
    return q / sums.norm / (at.incoming * at.outgoing)


def is_root(root: Tensor) -> Tensor:
    unit = torch.arange(len(root), device=root.device)
    return (root == unit) & (unit > 0)


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


def scaled(layer: Layer, view: Tensor, incoming: Tensor, outgoing: Tensor) -> Tensor:
    """v = w·Ĩ(tail)·Õ(head) of the edges that are not on the skeleton; entries that are have no meaning."""
    return view * layer.columns(incoming, view) * layer.rows(outgoing, view)


def path_gradient(
    layer: Layer, view: Tensor, grad: Tensor, incoming: Tensor, outgoing: Tensor, rule: BatchNormRule
) -> Tensor:
    """∂ℓ/∂v = g·(n)/(Ĩ(tail)·Õ(head)) of the same edges."""
    g = layer.edges.view(grad)
    if layer.edges.normalized and rule != "exact":
        g = g * row_norms(view, rule)
    return g * layer.columns(incoming.reciprocal(), view) * layer.rows(outgoing.reciprocal(), view)


def weights_after(
    layer: Layer, view: Tensor, change: Tensor, incoming: Tensor, outgoing: Tensor, ratio: Tensor, spread: Tensor
) -> Tensor:
    """Weights after the step, for edges that are not on the skeleton (Weight-Allocation, Sec. 4.3).

    v' = v + change and w' = v'/(Ĩ'(tail)·Õ'(head)) with Ĩ' = Ĩ·R·c, Õ' = Õ/c, hence
        w' = (w + change/(Ĩ(tail)·Õ(head))) / R(tail) · c(head)/c(tail).
    `spread` is c: all ones keeps the free weights fixed; any other positive c is another projection of Theorem 4.1.
    Written additively: a ratio could never move a weight that is 0.
    """
    moved = view + change * layer.columns(incoming.reciprocal(), view) * layer.rows(outgoing.reciprocal(), view)
    return moved * layer.columns((ratio * spread).reciprocal(), view) * layer.rows(spread, view)


def entries_after(layer: Layer, values: Tensor, ratio: Tensor, spread: Tensor) -> Tensor:
    """Skeleton entries after the step: free ones keep their value, in(r) takes R(r)/R(tail); both follow c."""
    change = ratio[layer.root] / torch.where(layer.root > 0, ratio[layer.entry_tail], 1)
    return values * (change * spread[layer.entry_head] / spread[layer.entry_tail]).to(values.dtype)
