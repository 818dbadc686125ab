"""The skeleton method (Sec. 4.1 of the paper) for any DAG and any widths.

Every hidden unit u has two skeleton weights: out(u), an edge of the *last* weight that reads u, and in(u), an edge of
the *first* weight that writes u. Last and first make both walks acyclic even where residual streams are tied. The H
weights out(u) are *free*: they never change during training. The basis path of a non-free edge e is
in-path(tail e) · e · out-path(head e); there are m − H of them. Units that lie on no path from ground to ground (nobody
reads them, or only what nobody reads) have no skeleton, and no skeleton leads through them.

Shapes: unit vectors are `(H + 1,)`, entry 0 is ground. For an MLP of equal widths, "aligned" is the skeleton of the
paper letter for letter (axes here are (out, in), there (in, out)).
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, Edges, magnitude, require_module
from gspace.devices import on_cpu
from gspace.group.balance import balanced_log_scales
from gspace.optim.arguments import require_finite
from gspace.sharding import weights_of

Choice = Literal["aligned", "pivoted"]
Side = Literal["head", "tail"]
BLOCK = 1 << 18  # weights that are looked at together
NOT_TRAINED = "touch a parameter that is not trained (frozen, or not in params=)"
COEFFICIENTS = "have other coefficients than one (queries and keys, squares, 1 + w, weights in no (out, in) form)"
ONLY_ZEROS = "have skeleton weights of 0 (in the first weight that writes them or the last that reads them)"


@dataclass(frozen=True, eq=False)
class Skeleton:
    """The skeleton weights of every unit an optimizer can use.

    Attributes:
        edges: The edges; units that an optimizer cannot use are ground here.
        H: Number of units.
        in_edge: Which of `edges` holds in(u); −1 for ground.
        in_index: Flat index of in(u) in that parameter.
        out_edge: Which of `edges` holds out(u), the free weight of u.
        out_index: Flat index of out(u).
        parent: Unit that in(u) reads.
        child: Unit that out(u) writes.
        root: First unit going up in-path(u), u included, whose incoming skeleton weight is not free.
        unused: Units of the analysis that are ground here, with the reason.
    """

    edges: tuple[Edges, ...]
    H: int
    in_edge: Tensor
    in_index: Tensor
    out_edge: Tensor
    out_index: Tensor
    parent: Tensor
    child: Tensor
    root: Tensor
    unused: tuple[str, ...] = ()

    @property
    def roots(self) -> Tensor:
        """Units whose incoming skeleton weight is trained."""
        return (self.root == torch.arange(self.H + 1, device=self.root.device)).nonzero()[1:, 0]


@on_cpu
def build_skeleton(
    model: nn.Module,
    analysis: Analysis,
    *,
    choice: Choice = "aligned",
    trained: set[str] | None = None,
    balanced: Tensor | None = None,
) -> Skeleton:
    """Chooses in(u) and out(u) for every unit of the transparent view.

    Args:
        choice: "aligned" takes the diagonal, as the paper does; "pivoted" the largest |w| in the balanced
            representative, for networks that were not initialised on the skeleton.
        trained: Names of the parameters that are trained (default: those that require a gradient). A unit that
            touches any other parameter is left out, as is one whose skeleton weight is 0 on a side.
        balanced: The log scales that balance the transparent view, `(H + 1,)`, if they are known.

    >>> import gspace
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> gspace.build_skeleton(model, gspace.analyze(model)).H
    8
    """
    if choice not in ("aligned", "pivoted"):
        raise ValueError(f"choice must be 'aligned' or 'pivoted', got {choice!r}")
    require_module(model)
    if not isinstance(analysis, Analysis):
        raise TypeError(f"analysis is what gspace.analyze returns, got {type(analysis).__name__}")
    require_finite(model)
    weights = weights_of(model)
    if trained is None:
        trained = trained_names(model, model.parameters())
    edges, n = analysis.transparent, analysis.H_paper + 1
    live = connected(edges, n)
    in_edge, out_edge = first_edges(edges, live, "head"), first_edges(edges, live, "tail")
    x = None
    if choice == "pivoted":
        x = (balanced_log_scales(edges, weights, n) if balanced is None else balanced).cpu()
    in_index, in_size, parent = pick(edges, weights, live, in_edge, "head", x)
    out_index, out_size, child = pick(edges, weights, live, out_edge, "tail", x)
    reasons = {
        NOT_TRAINED: ~trained_units(edges, trained, n),
        "lie on no path from input to output": ~live,
        ONLY_ZEROS: (in_size == 0) | (out_size == 0),
    }
    usable, unused = sorted_out(reasons)
    special = [f"{analysis.special} units {COEFFICIENTS}"] if analysis.special else []
    picked = Picked(in_edge, in_index, parent, out_edge, out_index, child)
    return skeleton_of(edges, picked, usable, (*special, *unused))


def sorted_out(reasons: Mapping[str, Tensor]) -> tuple[Tensor, list[str]]:
    """Units for which none of the reasons holds, `(n,)` bool, and how many each of them takes away; ground is True."""
    usable, unused = torch.ones_like(next(iter(reasons.values()))), []
    for reason, found in reasons.items():
        lost = int((found & usable)[1:].sum())
        usable &= ~found
        unused += [f"{lost} units {reason}"] * (lost > 0)
    usable[0] = True
    return usable, unused


class Picked(NamedTuple):
    """in(u) and out(u) of every unit of an analysis, `(n,)` each: where they are, and the unit at their other end."""

    in_edge: Tensor
    in_index: Tensor
    parent: Tensor
    out_edge: Tensor
    out_index: Tensor
    child: Tensor


def skeleton_of(edges: Sequence[Edges], picked: Picked, usable: Tensor, unused: tuple[str, ...] = ()) -> Skeleton:
    """The skeleton of the units that are `usable`, `(n,)`; they are numbered anew, and all others are ground."""
    usable = usable.index_fill(0, torch.tensor([0]), True)
    number = torch.where(usable, usable.cumsum(0) - 1, 0)
    kept = usable.nonzero()[:, 0]
    in_edge, in_index, parent, out_edge, out_index, child = (x[kept] for x in picked)
    parent, child = number[parent], number[child]
    in_edge[0] = out_edge[0] = -1
    parent[0] = child[0] = in_index[0] = out_index[0] = 0
    free = (parent > 0) & (in_edge == out_edge[parent]) & (in_index == out_index[parent])
    root = torch.where(free, parent, torch.arange(len(kept)))
    while not torch.equal(root, root[root]):
        root = root[root]
    relabelled = tuple(replace(e, head=number[e.head], tail=number[e.tail]) for e in edges)
    return Skeleton(relabelled, len(kept) - 1, in_edge, in_index, out_edge, out_index, parent, child, root, unused)


def trained_names(model: nn.Module, parameters: Iterable[Tensor]) -> set[str]:
    """Names of those of `parameters` that are trained."""
    mine = {id(p) for p in parameters if p.requires_grad}
    return {name for name, p in model.named_parameters() if id(p) in mine}


def trained_units(edges: Sequence[Edges], trained: Collection[str], n: int) -> Tensor:
    """Units that touch no other parameters than those of these names, `(n,)` bool."""
    result = torch.ones(n, dtype=torch.bool)
    for e in edges:
        if e.name not in trained:
            result[e.head.reshape(-1)] = result[e.tail.reshape(-1)] = False
    result[0] = True
    return result


def by_edge(which: Tensor, count: int) -> list[Tensor]:
    """The units of each of `count` edges, in order; `which` is −1 for units that have none."""
    order = which.argsort(stable=True)
    parts: list[Tensor] = list(order.split(torch.bincount(which + 1, minlength=count + 1).tolist()))
    return parts[1:]


def connected(edges: Sequence[Edges], n: int) -> Tensor:
    """Units from which a walk leads up to ground and one down to ground, `(n,)` bool; ground is True."""
    live = torch.ones(n, dtype=torch.bool)
    while True:
        found = (first_edges(edges, live, "head") >= 0) & (first_edges(edges, live, "tail") >= 0)
        found[0] = True
        if torch.equal(found, live):
            return live
        live = found


def first_edges(edges: Sequence[Edges], live: Tensor, side: Side) -> Tensor:
    """Which of `edges` takes each live unit a step nearer to ground; −1 where none does.

    For the side "head" that is the first that writes it, for "tail" the last that reads it, of those whose other end is
    nearer itself: a stream that is tied comes back to its units, a walk along these edges does not.
    """
    place = _places(edges, side)
    result = torch.full(live.shape, -1)
    for k in place.argsort(stable=True).tolist():
        here, there = _ends(edges[k], side)
        units = here[_nearer(there, live, place, result, k).any(1)].reshape(-1)
        units = units[(result[units] < 0) & live[units]]
        result[units] = k
    result[0] = -1
    return result


def _ends(e: Edges, side: Side) -> tuple[Tensor, Tensor]:
    """The units of that side, and those at the other end."""
    return (e.head, e.tail) if side == "head" else (e.tail, e.head)


def _places(edges: Sequence[Edges], side: Side) -> Tensor:
    """Where each of `edges` stands on the way from ground, `(edges,)`."""
    return torch.tensor([e.first if side == "head" else -e.last for e in edges], dtype=torch.long)


def _nearer(ids: Tensor, live: Tensor, place: Tensor, chosen: Tensor, k: int) -> Tensor:
    """Which of `ids` are ground, or live units whose own edge stands before that of number k; shaped like them."""
    own = chosen[ids]
    return (ids == 0) | (live[ids] & (own >= 0) & (place[own] < place[k]))


def largest_writers(
    edges: Sequence[Edges], weights: Mapping[str, Tensor], level: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """in(u) of units that are `wanted`, `(n,)` bool: the largest entry, by |w|·level(tail), of the first that writes u.

    Returns which of `edges` holds it (−1: all are 0), its flat index, and the unit that it reads. `level` of such a
    unit becomes the norm of the row, in place; units that are not wanted have theirs before.
    """
    n, place = len(level), _places(edges, "head")
    number = torch.where(wanted, torch.arange(n), 0)
    bare = [replace(e, head=number[e.head], tail=number[e.tail]) for e in edges]
    live = torch.ones(n, dtype=torch.bool)
    chosen = first_edges(bare, live, "head")
    edge, index, other = torch.full((n,), -1), torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)
    for k in place.argsort(stable=True).tolist():
        e, here = edges[k], bare[k].head
        rows = (chosen[here] == k) & (here > 0)
        if not bool(rows.any()):
            continue
        near, weight = _nearer(bare[k].tail, live, place, chosen, k) * level[e.tail], weights[e.name].detach()
        best, end, taps = _largest(e, weight, near, "head")
        view = e.view(weight).cpu().double()
        norms = (view * near.reshape(len(near), 1, -1, *[1] * (view.dim() - 3))).flatten(2).norm(dim=2)
        g, a = (rows & _best_place(here, best) & (best > 0)).nonzero(as_tuple=True)
        u, b = here[g, a], end[g, a]
        edge[u], level[u], other[u] = k, norms[g, a], e.tail[g, b]
        index[u] = flat_index(e, weight.shape, g, a, b, taps[g, a])
    return edge, index, other


def _occurrences(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each entry of `(group, n)` ids: where its unit occurs first in the group, how often, and how often before."""
    groups, n = ids.shape
    key = (ids + torch.arange(groups)[:, None] * (int(ids.max()) + 1)).reshape(-1)
    order = key.argsort(stable=True)
    _, run, count = key[order].unique_consecutive(return_inverse=True, return_counts=True)
    start = count.cumsum(0) - count
    first, often, before = torch.empty_like(key), torch.empty_like(key), torch.empty_like(key)
    first[order], often[order], before[order] = order[start[run]], count[run], torch.arange(len(key)) - start[run]
    return (first % n).reshape(ids.shape), often.reshape(ids.shape), before.reshape(ids.shape)


def _position(ids: Tensor) -> Tensor:
    """Position of each entry's unit among the distinct units of its group, in order, `(group, n)`."""
    first, _, before = _occurrences(ids)
    return ((before == 0).cumsum(1) - 1).gather(1, first)


def _middle(ids: Tensor) -> Tensor:
    """True at the middle one of the places that each unit fills, `(group, n)`."""
    _, often, before = _occurrences(ids)
    return before == often // 2


def pick(
    edges: Sequence[Edges],
    weights: Mapping[str, Tensor],
    live: Tensor,
    chosen: Tensor,
    side: Side,
    x: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """For every unit u one edge of weight `chosen[u]` with u on `side`: flat index, |w|, and the unit at its other end.

    That one is nearer to ground. With log scales x, the one with the largest |w|·c(head)/c(tail). Without, the aligned
    edge: other index = position of u mod n, within the group, centre tap.
    """
    place = _places(edges, side)
    n = len(chosen)
    index, size, other = (
        torch.zeros(n, dtype=torch.long),
        torch.zeros(n, dtype=torch.float64),
        torch.zeros(n, dtype=torch.long),
    )
    for k, e in enumerate(edges):
        here, there = _ends(e, side)
        nearer = _nearer(there, live, place, chosen, k)
        wanted = (chosen[here] == k) & (here > 0) & nearer.any(1, keepdim=True)
        if not bool(wanted.any()):
            continue
        weight = weights[e.name].detach()
        if x is None:
            rows = wanted & _middle(here)
            g, a = rows.nonzero(as_tuple=True)
            ends = nearer.long().argsort(dim=1, descending=True, stable=True)  # those first
            b = ends[g, _position(here)[g, a] % nearer.sum(1)[g]]
            tap = torch.full_like(a, math.prod(e.view(weight).shape[3:]) // 2)
        else:
            sign = 1 if side == "head" else -1
            best, end, taps = _largest(e, weight, torch.where(nearer, (-sign * x[there]).exp(), -1), side)
            best = best * (sign * x[here]).exp()
            g, a = (wanted & _best_place(here, best)).nonzero(as_tuple=True)
            b, tap = end[g, a], taps[g, a]
        u = here[g, a]
        out, into = (a, b) if side == "head" else (b, a)
        index[u], other[u] = flat_index(e, weight.shape, g, out, into, tap), there[g, b]
        size[u] = magnitude(weight.reshape(-1)[index[u].to(weight.device)]).cpu()
    return index, size, other


def _largest(e: Edges, weight: Tensor, factor: Tensor, side: Side) -> tuple[Tensor, Tensor, Tensor]:
    """The largest |w|·factor at each unit of a side, where at the other end it is, and its tap, `(group, n)` each.

    `factor` is of the other end, `(group, m)`.
    """
    view = e.view(weight).flatten(3) if e.view(weight).dim() > 3 else e.view(weight).unsqueeze(3)
    dim, kept = (2, 1) if side == "head" else (1, 2)
    found = []
    for some in view.split(max(1, BLOCK * view.shape[kept] // max(1, view.numel())), kept):
        sizes = (magnitude(some) if some.is_complex() else some.abs()).cpu()
        sizes, taps = sizes.max(3) if sizes.shape[3] > 1 else (sizes[..., 0], None)
        best, end = (sizes * factor.unsqueeze(kept)).max(dim)
        tap = torch.zeros_like(end) if taps is None else taps.gather(dim, end.unsqueeze(dim)).squeeze(dim)
        found.append((best, end, tap))
    best, end, tap = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return best, end, tap


def flat_index(e: Edges, shape: torch.Size, group: Tensor, out: Tensor, into: Tensor, tap: Tensor) -> Tensor:
    """Flat index into a parameter of this shape of entries of its `(group, out, in, tap)` view."""
    if len(shape) == 1 or e.head.numel() == shape.numel():
        return group * e.head.shape[1] + out
    first, second = (into, out) if e.swap else (out, into)
    outer = shape[0] // e.head.shape[0]
    return ((group * outer + first) * shape[1] + second) * math.prod(shape[2:]) + tap


def _best_place(ids: Tensor, value: Tensor) -> Tensor:
    """True at the first of the places with the largest value among those that each unit fills, `(group, n)`."""
    n = int(ids.max()) + 1
    top = torch.zeros(n, dtype=value.dtype).scatter_reduce(0, ids.reshape(-1), value.reshape(-1), "amax")
    best = (value == top[ids]).reshape(-1)
    place = torch.arange(best.numel())
    first = torch.full((n,), best.numel()).scatter_reduce(0, ids.reshape(-1)[best], place[best], "amin")
    return (first[ids.reshape(-1)] == place).reshape(ids.shape)
