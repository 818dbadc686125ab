"""Walks from units to ground, on which skeletons are chosen; for all edges of a network at once.

Shapes: unit vectors are `(n,)`, entry 0 is ground. The ids of all parameters lie one after the other, a *place* each. A
*row* is a group of a parameter: whatever it reads meets whatever it writes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gspace.analysis import Edges, magnitude

Side = Literal["head", "tail"]
OTHER: Mapping[Side, Side] = {"head": "tail", "tail": "head"}
BLOCK = 1 << 18  # weights that are looked at together
FAR = torch.iinfo(torch.long).max


@dataclass(frozen=True, eq=False)
class Ends:
    """One side of all edges.

    Attributes:
        ids: Unit at each place.
        row: Row of each place.
        start: First place of each row.
        place: Where each of the edges stands on the way from ground to this side, `(edges,)`.
    """

    ids: Tensor
    row: Tensor
    start: Tensor
    place: Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """The edges of a network, row by row.

    Attributes:
        edges: The edges.
        ends: Both of their sides.
        edge: Which of the edges each row is of, `(rows,)`.
        first: First row of each of the edges.
    """

    edges: Sequence[Edges]
    ends: Mapping[Side, Ends]
    edge: Tensor
    first: Tensor


class Walks(NamedTuple):
    """Units from which a walk leads up to ground and one down to ground, and the edges of these walks.

    Attributes:
        live: Those units, `(n,)` bool; ground is True.
        chosen: By side, which of the edges takes each of them a step nearer to ground, `(n,)`; −1 for all others.
    """

    live: Tensor
    chosen: Mapping[Side, Tensor]


def rows_of(edges: Sequence[Edges]) -> Rows:
    groups = torch.tensor([len(e.head) for e in edges], dtype=torch.long)
    head = _ends([e.head for e in edges], groups, [e.first for e in edges])
    tail = _ends([e.tail for e in edges], groups, [-e.last for e in edges])
    edge = torch.arange(len(edges)).repeat_interleave(groups)
    return Rows(edges, {"head": head, "tail": tail}, edge, groups.cumsum(0) - groups)


def _ends(ids: Sequence[Tensor], groups: Tensor, place: Sequence[int]) -> Ends:
    widths = torch.tensor([i.shape[1] for i in ids], dtype=torch.long).repeat_interleave(groups)
    flat = torch.cat([torch.empty(0, dtype=torch.long), *(i.reshape(-1) for i in ids)])
    row = torch.arange(len(widths)).repeat_interleave(widths)
    return Ends(flat, row, widths.cumsum(0) - widths, torch.tensor(place, dtype=torch.long))


def walks(rows: Rows, n: int) -> Walks:
    """Of the units from 0 to n − 1."""
    live = torch.ones(n, dtype=torch.bool)
    while True:
        chosen = {side: first_edges(rows, live, side) for side in OTHER}
        found = (chosen["head"] >= 0) & (chosen["tail"] >= 0)
        found[0] = True
        if torch.equal(found, live):
            return Walks(live, chosen)
        live = found


def connected(edges: Sequence[Edges], n: int) -> Tensor:
    """Units from which a walk leads up to ground and one down to ground, `(n,)` bool; ground is True."""
    return walks(rows_of(edges), n).live


def first_edges(rows: Rows, live: Tensor, side: Side) -> Tensor:
    """Which of the edges takes each live unit a step nearer to ground, `(n,)`; −1 where none does.

    For the side "head" that is the first that writes it, for "tail" the last that reads it, of those whose other end is
    nearer itself: a stream that is tied comes back to its units, a walk along these edges does not.

    Whether a row has such an end depends on edges that stand before it, so there is one answer. It is guessed, that all
    rows have one, and corrected until it holds: at once for most networks.
    """
    mine, other = rows.ends[side], rows.ends[OTHER[side]]
    order = mine.place.argsort(stable=True)
    rank, number = order.argsort()[rows.edge][mine.row], torch.cat([order, torch.tensor([-1])])
    chosen, near = None, torch.ones(len(rows.edge), dtype=torch.bool)
    while True:
        some = near[mine.row] & live[mine.ids]
        first = torch.full(live.shape, len(order)).scatter_reduce(0, mine.ids[some], rank[some], "amin")
        found = number[first]
        found[0] = -1
        if chosen is not None and torch.equal(found, chosen):
            return found
        chosen, near = found, torch.zeros_like(near)
        near[other.row[nearer(rows, live, chosen, side)]] = True


def nearer(rows: Rows, live: Tensor, chosen: Tensor, side: Side) -> Tensor:
    """Places of the other side that hold ground, or live units whose own edge stands before the one of the place."""
    place, other = torch.cat([rows.ends[side].place, torch.tensor([FAR])]), rows.ends[OTHER[side]]
    level = torch.where(live, place[chosen], FAR)  # the last of them is that of edge −1
    level[0] = -FAR
    return level[other.ids] < place[rows.edge[other.row]]


# One edge for every unit ----------------------------------------------------------------------------------------------


def pick(
    rows: Rows,
    found: Walks,
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    side: Side,
    x: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """For every unit u one edge of its weight `chosen[u]`: flat index, and the unit at its other end.

    That one is nearer to ground. With log scales x, the one with the largest |w|·c(head)/c(tail). Without, the aligned
    edge: other index = position of u mod n, within the group, centre tap.
    """
    chosen, mine, other = found.chosen[side], rows.ends[side], rows.ends[OTHER[side]]
    near, of = nearer(rows, found.live, chosen, side), rows.edge[mine.row]
    count = torch.bincount(other.row[near], minlength=len(rows.edge))
    wanted = (chosen[mine.ids] == of) & (count[mine.row] > 0)
    steps = torch.tensor([steps_of(e, shapes[e.name]) for e in rows.edges], dtype=torch.long).reshape(-1, 4)
    if x is None:
        position, middle = _positions(mine)
        at = (wanted & middle).nonzero()[:, 0]
        last = torch.full_like(chosen, -1).scatter_reduce(0, mine.ids[at], at, "amax")  # one of several rows
        at = last[last >= 0]
        row = mine.row[at]
        end = near.nonzero()[:, 0][(count.cumsum(0) - count)[row] + position[at] % count[row]]
        tap = steps[of[at], -1] // 2
    else:
        at, end, tap = _largest(rows, weights, shapes, side, x, near, wanted)
    index, parent = torch.zeros_like(chosen), torch.zeros_like(chosen)
    u, k, row = mine.ids[at], of[at], mine.row[at]
    here, there = at - mine.start[row], end - other.start[row]
    out, into = (here, there) if side == "head" else (there, here)
    index[u], parent[u] = flat_index(steps[k], row - rows.first[k], out, into, tap), other.ids[end]
    return index, parent


def laid_out(e: Edges, shape: Sequence[int]) -> Tensor:
    """`e.view` of a parameter of this shape, in no memory: its sizes and strides."""
    return e.view(torch.empty(tuple(shape), device="meta"))


def steps_of(e: Edges, shape: Sequence[int]) -> tuple[int, ...]:
    """How far apart groups, outputs and inputs lie in a parameter of this shape, and how many taps, one by one, are."""
    view = laid_out(e, shape)
    return *view.stride()[:3], math.prod(view.shape[3:])


def flat_index(steps: Tensor, group: Tensor, out: Tensor, into: Tensor, tap: Tensor) -> Tensor:
    """Flat index into a parameter with these `steps_of` of entries of its `(group, out, in, tap)` view."""
    groups, outputs, inputs, _ = steps.unbind(-1)
    return group * groups + out * outputs + into * inputs + tap


def _positions(ends: Ends) -> tuple[Tensor, Tensor]:
    """Position of each place's unit among the distinct ones of its row; and whether it is the middle one it fills."""
    key = ends.row * (int(ends.ids.max()) + 1 if len(ends.ids) else 1) + ends.ids
    order = key.argsort(stable=True)
    _, run, count = key[order].unique_consecutive(return_inverse=True, return_counts=True)
    start = count.cumsum(0) - count
    first, middle = torch.empty_like(key), torch.zeros_like(key, dtype=torch.bool)
    first[order] = order[start[run]]
    middle[order[start + count // 2]] = True
    distinct = (first == torch.arange(len(key))).cumsum(0)
    return distinct[first] - distinct[ends.start[ends.row]], middle


def _largest(
    rows: Rows,
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    side: Side,
    x: Tensor,
    near: Tensor,
    wanted: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each unit has its largest edge: a wanted place, the one at its other end, which is near, and the tap."""
    mine, other, sign = rows.ends[side], rows.ends[OTHER[side]], 1 if side == "head" else -1
    factor = torch.where(near, (-sign * x[other.ids]).exp(), -1)
    best = torch.zeros(wanted.shape, dtype=torch.float64)
    end, tap = torch.zeros(wanted.shape, dtype=torch.long), torch.zeros(wanted.shape, dtype=torch.long)
    for some in _batches(rows, shapes, rows.edge[mine.row[wanted]].unique().tolist()):
        edges = [rows.edges[k] for k in some]
        groups, widths = len(edges[0].head), {"head": edges[0].head.shape[1], "tail": edges[0].tail.shape[1]}
        row = (rows.first[some][:, None] + torch.arange(groups)).reshape(-1, 1)
        here = mine.start[row] + torch.arange(widths[side])
        there = other.start[row] + torch.arange(widths[OTHER[side]])
        views = [e.view(weights[e.name].detach()).unsqueeze(3).flatten(3) for e in edges]  # kernels may differ
        view = views[0] if len(views) == 1 else torch.cat([v.cpu() for v in views])  # they may be on several devices
        value, at, tap[here] = largest(view, factor[there], side)
        best[here], end[here] = value.double(), there.gather(1, at)
    places = wanted.nonzero()[:, 0]
    units = mine.ids[places]
    at = places[best_places(units, best[places] * (sign * x[units]).exp(), len(x))]
    return at, end[at], tap[at]


def _batches(rows: Rows, shapes: Mapping[str, torch.Size], some: Sequence[int]) -> Iterator[list[int]]:
    """Those of the edges in lists of equal shape, with BLOCK weights at most, or one parameter."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for k in some:
        e = rows.edges[k]
        alike.setdefault((*e.head.shape, e.tail.shape[1], *steps_of(e, shapes[e.name])), []).append(k)
    for same in alike.values():
        count = max(1, BLOCK // max(1, shapes[rows.edges[same[0]].name].numel()))
        yield from (same[i : i + count] for i in range(0, len(same), count))


def largest(view: Tensor, factor: Tensor, side: Side) -> tuple[Tensor, Tensor, Tensor]:
    """The largest |w|·factor at each unit of a side, where at the other end it is, and its tap, `(group, n)` each.

    `factor` is of the other end, `(group, m)`.
    """
    view = view.flatten(3) if view.dim() > 3 else view.unsqueeze(3)
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


def best_places(ids: Tensor, value: Tensor, n: int) -> Tensor:
    """For each id that occurs, the first of the places that hold its largest value; none is below 0."""
    top = torch.zeros(n, dtype=value.dtype).scatter_reduce(0, ids, value, "amax")
    best = (value == top[ids]).nonzero()[:, 0]
    first = torch.full((n,), len(ids)).scatter_reduce(0, ids[best], best, "amin")
    return first[first < len(ids)]
