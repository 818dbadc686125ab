"""What a step needs to know of a network: its parameters as layers of edges, and its skeleton, on their device.

Shapes: as in `step.py`.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gspace.analysis import Edges
from gspace.devices import on_cpu
from gspace.optim.skeleton import Skeleton, by_edge
from gspace.optim.walks import laid_out
from gspace.sharding import Reduce, alone, edges_on


class Ends(NamedTuple):
    """A unit vector at the tails of a layer and one at its heads, to broadcast against its view; None is 1 everywhere.

    `columns` is `(group, 1, in, *taps)`, `rows` is `(group, out, 1, …)`.
    """

    columns: Tensor | None
    rows: Tensor | None


class Entries(NamedTuple):
    """Units at skeleton entries, `(entries,)` each.

    Attributes:
        root: Unit whose trained incoming skeleton weight the entry is, else 0.
        free: Unit whose free weight the entry is, else 0.
        tail: Unit that the entry reads.
        head: Unit that the entry writes.
    """

    root: Tensor
    free: Tensor
    tail: Tensor
    head: Tensor


@dataclass(frozen=True, eq=False)
class Layer:
    """One parameter and its place on the skeleton, on the device of the parameter.

    Attributes:
        edges: Its edges, `head` and `tail` on the device.
        entries: Index of its skeleton entries, one tensor per dimension of the parameter.
        at: The units there.
        shape: Of its view, `(group, out, in, *taps)`.
        reads, writes: Whether it reads a unit, and writes one: ground has no scale.
        absorbed: Rows whose scale a norm absorbs, `(group, out)` bool, with `batch_norm="exact"`; None if none are.
        counts: Whether its sums count: not if another process holds the same and counts them.
    """

    edges: Edges
    entries: tuple[Tensor, ...]
    at: Entries
    shape: torch.Size
    reads: bool = True
    writes: bool = True
    absorbed: Tensor | None = None
    counts: bool = True

    def view(self, parameter: Tensor) -> Tensor:
        """As `edges.view`, with the shape known."""
        group, out, inputs, *taps = self.shape
        if self.edges.swap:
            return parameter.reshape(group, inputs, out, *taps).transpose(1, 2)
        return parameter.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything a step needs to know of a skeleton, on the device of the parameters.

    Attributes:
        layers: The parameters that touch a unit.
        entries: Their skeleton entries, one layer after the other.
        tails, heads: Unit of each column, tap by tap, and of each row, of layers that read units and that write them.
        root: Root of each unit, `(H + 1,)`.
        is_root: Whether it is one itself, `(H + 1,)`.
        place: Where in(u) and then out(u) stand among the entries of all layers, counted from 1; 0: elsewhere.
        present: Whether there is such a weight at all: not for ground.
        reference: What they are divided by, float64. All three are `(2·(H + 1),)`.
        following: Parent of each unit as one that is written, child as one that is read (plus H + 1). `(2·(H + 1),)`.
        jumps: Where walks along `following` have come after 1, 2, 4 … steps, until all are at ground.
        reduce: Adds up what every process has summed over its weights.
    """

    layers: tuple[Layer, ...]
    entries: Entries
    tails: Tensor
    heads: Tensor
    root: Tensor
    is_root: Tensor
    place: Tensor
    present: Tensor
    reference: Tensor
    following: Tensor
    jumps: tuple[Tensor, ...]
    reduce: Reduce = alone

    def ends(self, incoming: Tensor, outgoing: Tensor | None) -> list[Ends]:
        """Unit vectors at the ends of all layers; None is 1 everywhere."""
        shapes = [(x.shape[0], 1, *x.shape[2:]) if x.reads else None for x in self.layers]
        columns = _pieces(incoming[self.tails], shapes)
        if outgoing is None:
            return [Ends(c, None) for c in columns]
        shapes = [(*x.shape[:2], *[1] * (len(x.shape) - 2)) if x.writes else None for x in self.layers]
        return list(map(Ends, columns, _pieces(outgoing[self.heads], shapes)))

    def at_entries(self, tensors: Sequence[Tensor]) -> Tensor:
        """Their values at the skeleton entries of the layers, `(entries,)`."""
        here, pairs = self.root.device, zip(self.layers, tensors, strict=True)
        parts = [t[x.entries].reshape(-1).to(here) for x, t in pairs if x.at.root.numel()]
        return torch.cat(parts) if parts else self.reference[:0]

    def put(self, tensors: Sequence[Tensor], values: Tensor) -> None:
        """Writes values to the skeleton entries of the layers."""
        parts = values.split([x.at.root.numel() for x in self.layers])
        for layer, t, part in zip(self.layers, tensors, parts, strict=True):
            if layer.at.root.numel():
                t[layer.entries] = part.to(t)

    def at_units(self, values: Tensor) -> Tensor:
        """Of values at skeleton entries those of in(u) and out(u), `(2·(H + 1),)`; 0 for those that are elsewhere."""
        return torch.cat([values.new_zeros(1), values])[self.place]


def _pieces(every: Tensor, shapes: Sequence[tuple[int, ...] | None]) -> list[Tensor | None]:
    """`every` cut into tensors of these shapes."""
    parts = iter(every.split([math.prod(shape) for shape in shapes if shape]))
    return [next(parts).view(shape) if shape else None for shape in shapes]


def plan(skeleton: Skeleton, layers: Sequence[Layer], references: Tensor, reduce: Reduce = alone) -> Plan:
    """For a skeleton, its layers, or the parts of them that are here, and the references of in(u) and out(u)."""
    device = layers[0].at.root.device if layers else torch.device("cpu")
    n, none = skeleton.H + 1, torch.zeros(0, dtype=torch.long, device=device)

    def every(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([none, *(part.reshape(-1).to(device) for part in parts)])

    entries = Entries(*(every(getattr(x.at, of) for x in layers) for of in Entries._fields))
    counts = every(torch.full_like(x.at.root, x.counts) for x in layers) > 0
    place, number = torch.zeros(2 * n, dtype=torch.long, device=device), torch.arange(len(counts), device=device) + 1
    place[entries.root[counts]], place[n + entries.free[counts]] = number[counts], number[counts]
    place[0] = place[n] = 0
    root, parent = skeleton.root.to(device), skeleton.parent.to(device)
    units = torch.arange(n, device=device)
    place[:n] = torch.where(root == units, place[:n], place[n + parent])  # in(u) of another unit is out(parent)
    following = torch.cat([parent, skeleton.child.to(device) + n])
    present = torch.cat([skeleton.in_edge, skeleton.out_edge]).to(device) >= 0
    reference = references.to(device).reshape(-1)

    taps = (x.edges.tail[:, :, None].expand(-1, -1, math.prod(x.shape[3:])) for x in layers if x.reads)
    tails, heads = every(taps), every(x.edges.head for x in layers if x.writes)
    is_root = (root == units) & (units > 0)
    of_units = root, is_root, place, present, reference, following, jumps_of(following)
    return Plan(tuple(layers), entries, tails, heads, *of_units, reduce)


def jumps_of(following: Tensor) -> tuple[Tensor, ...]:
    """Where walks along `following` have come after 1, 2, 4 … steps, until all are at ground, which follows itself."""
    jumps, at = [], following
    while bool((following[at] != at).any()):
        jumps.append(at)
        at = at[at]
    return tuple(jumps)


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
        reads, writes = bool(e.tail.any()), bool(e.head.any())
        if e.name not in masks and not (reads or writes):
            continue
        weight = weights[e.name]
        device = weight.device
        index, *at = (x.to(device) for x in of_entries)
        mask = masks[e.name].to(device) if e.name in masks else None
        entries, shape = torch.unravel_index(index, weight.shape), laid_out(e, weight.shape).shape
        layers.append(Layer(edges_on(e, device), entries, Entries(*at), shape, reads, writes, mask))
    return layers


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
    edges = e.part(shape, dim, start, stop)
    return replace(
        layer,
        edges=edges,
        shape=laid_out(edges, [stop - start if d == dim else size for d, size in enumerate(shape)]).shape,
        entries=tuple(i[inside] - (start if d == dim else 0) for d, i in enumerate(layer.entries)),
        at=Entries(*(x[inside] for x in layer.at)),
        absorbed=None if mask is None else replace(e, head=mask).part(shape, dim, start, stop).head,
    )


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
        at=Entries(*map(torch.cat, zip(*(x.at for x in layers), strict=True))),
        shape=torch.Size((starts[-1], 1, 1)),
        reads=any(x.reads for x in layers),
        writes=any(x.writes for x in layers),
        absorbed=mask if any(x.absorbed is not None for x in layers) else None,
    )
