"""Parameters as edges: each use of one says that its elements scale with x[head] − x[tail].

A use is kept as vectors, O(in + out) for a matrix: which indices it has along each dimension of the parameter, and
nodes `head` and `tail` that broadcast to them. Where two uses overlap, both are true: h₁ − t₁ − h₂ + t₂ is a sum of
functions of separate dimensions and vanishes everywhere, so each of them is constant, and the constants add up to 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gspace.analysis.equations import ANY, GROUND, Equations, squash
from gspace.analysis.memory import Place, Raw, geometry, key_of, locate

LARGEST = 1 << 20  # elements of a matrix that are followed one by one


@dataclass(frozen=True, eq=False)
class Use:
    """Elements of a parameter used as edges; `shift` + w is what scales (1 for a gain written 1 + w).

    Attributes:
        head, tail: Nodes as the operation sees them, at `place`.
        rows: Indices along each dimension of the parameter, ascending.
        terms: Head and tail along those dimensions.
        normalizes: γ or β of a BatchNorm.
        pinned: Read in a way that lets no scale change it: no edge.
        groups: Of a convolution.
    """

    place: Raw
    head: Tensor
    tail: Tensor
    rows: list[Tensor]
    terms: list[Tensor]
    shift: float = 0.0
    normalizes: bool = False
    pinned: bool = False
    groups: int = 1


@dataclass
class Weights:
    """Every use of every parameter.

    Attributes:
        note: Called with a number of channels and a reason where something is pinned here.
        places: By storage, the parameters; one that is used in another shape than its own as one long row.
        uses: By storage and begin of the parameter, in the order of the run.
        repeats: Pairs of terms (h₁, t₁), (h₂, t₂) of elements that were used twice.
        idle: Parameters that only zeros were multiplied by: any scale will do.
    """

    equations: Equations
    note: Callable[[int, str], None]
    places: dict[int, list[Place]] = field(default_factory=dict)
    uses: dict[tuple[int, int], list[Use]] = field(default_factory=dict)
    repeats: list[tuple[list[Tensor], list[Tensor]]] = field(default_factory=list)
    idle: set[tuple[int, int]] = field(default_factory=set)

    def enter(self, parameter: Tensor) -> None:
        places = self.places.setdefault(key_of(parameter), [])
        places.append(geometry(parameter))
        places.sort(key=lambda place: -place[2])

    def _parameter(self, raw: Raw) -> Place:
        return next(place for place in self.places[raw.key] if place[2] <= raw.offset)

    def region(self, raw: Raw) -> tuple[int, int]:
        """Which parameter that is."""
        return raw.key, self._parameter(raw)[2]

    def nodes(self, raw: Raw) -> Tensor:
        """A node for each element of `raw`, with its log-scale."""
        place = _without_repeats(raw)
        for use in self.uses.get(self.region(raw), ()):
            small = use.head.numel() * use.tail.numel() <= LARGEST or not bool(use.tail.any())
            if use.place == place and not use.shift and small:
                return self.equations.sum(1, use.head, -1, use.tail).expand(raw.sizes)
        return self.edges(raw, torch.zeros((), dtype=torch.long), place.sizes).expand(raw.sizes)

    def edges(
        self,
        raw: Raw,
        tail: Tensor,
        shape: Sequence[int],
        shift: float = 0.0,
        normalizes: bool = False,
        groups: int = 1,
    ) -> Tensor:
        """Nodes of the given shape that `raw` writes from `tail`: those of an earlier use that was the same, or new."""
        place, literal = _without_repeats(raw), tail == ANY
        if bool(literal.all()):  # all of it is multiplied by zeros
            self.idle.add(self.region(raw))
            return torch.tensor(ANY).expand(tuple(shape))
        tail = torch.where(literal, GROUND, tail) if bool(literal.any()) else tail
        for use in self.uses.get(self.region(raw), ()):
            if (use.place, use.shift, use.head.shape) == (place, shift, tuple(shape)) and self._same(use.tail, tail):
                return use.head
        head = self.equations.fresh(*shape)
        self._use(place, head, tail, shift=shift, normalizes=normalizes, groups=groups)
        return head

    def ground(self, raw: Raw) -> int:
        """No scale may change these elements; how many channels that are (of a matrix the smaller side), 0 if known."""
        zero, place = torch.zeros((), dtype=torch.long), _without_repeats(raw)
        for use in self.uses.get(self.region(raw), ()):
            if use.place == place and self._same(use.head, zero) and self._same(use.tail, zero):
                return 0
        self._use(place, zero, zero, pinned=True)
        return min([n for n in place.sizes if n > 1][:2], default=1)

    def free(self) -> int:
        """How many classes of nodes the uses touch."""
        ends = [t.reshape(-1) for uses in self.uses.values() for use in uses for t in (use.head, use.tail)]
        return len(self.equations.find(torch.cat(ends)).unique()) if ends else 0

    def _same(self, a: Tensor, b: Tensor) -> bool:
        (a,), (b,) = squash(self.equations.find(a)), squash(self.equations.find(b))
        return torch.equal(a, b) if a.dim() == b.dim() else torch.equal(a.reshape(-1), b.reshape(-1))

    def _use(self, place: Raw, head: Tensor, tail: Tensor, **options: Any) -> None:
        """Enters a use; what an earlier one says of the same elements is made to agree with it."""
        parameter = self._parameter(place)
        earlier = self.uses.setdefault((place.key, parameter[2]), [])
        block = _block(place, parameter, (head, tail)) or self._in_a_row(place, parameter, earlier, (head, tail))
        if block is None:
            self.equations.ground(torch.cat([head.reshape(-1), tail.reshape(-1)]))
            self.note(min(place.sizes), "a part of a parameter that is no block of it")
            zero, options = torch.zeros((), dtype=torch.long), {"pinned": True}
            place, head, tail = Raw(place.key, *parameter), zero, zero
            block = [torch.arange(n) for n in parameter[0]], [zero.reshape([1] * len(parameter[0]))] * 2
        earlier.append(Use(place, head, tail, *block, **options))
        for use in earlier[:-1]:
            self._reconcile(use, earlier[-1])

    def _in_a_row(self, place: Raw, parameter: Place, earlier: list[Use], ends: Sequence[Tensor]) -> Any:
        """Takes a parameter for one long row, element by element, where a use has another shape than its own."""
        n = math.prod(parameter[0])
        row = (n,), (1,), parameter[2]
        uses = [(use.place, (use.head, use.tail)) for use in earlier]
        blocks = [_block(where, row, nodes) for where, nodes in (*uses, (place, ends))]
        if n > LARGEST or None in blocks:
            return None
        earlier[:] = [replace(use, rows=b[0], terms=b[1]) for use, b in zip(earlier, blocks, strict=False) if b]
        self.places[place.key] = [row if p is parameter else p for p in self.places[place.key]]
        return blocks[-1]

    def _reconcile(self, a: Use, b: Use) -> None:
        first, second = a.terms, b.terms
        for d, (i, j) in enumerate(zip(a.rows, b.rows, strict=True)):
            if not torch.equal(i, j):
                first, second = _at(first, d, torch.isin(i, j)), _at(second, d, torch.isin(j, i))
                if not bool(torch.isin(i, j).any()):
                    return
        self.repeats.append((first, second))
        if a.shift != b.shift:
            self.equations.ground(torch.cat([t.reshape(-1) for t in (*first, *second)]))
            self.note(max(map(len, a.rows)), "a gain that is used with 1 added to it and without")
            return
        self._agree([(1, first[0]), (-1, first[1]), (-1, second[0]), (1, second[1])])

    def _agree(self, terms: Sequence[tuple[int, Tensor]]) -> None:
        """Σ ±x = 0 at every point of a grid."""
        few = [(sign, squash(self.equations.find(t))[0]) for sign, t in terms]
        varies = [{d for d, n in enumerate(t.shape) if n > 1} for _, t in few]
        parts: list[set[int]] = []
        for dims in varies:  # dimensions that one term depends on belong together
            joined = dims.union(*(p for p in parts if p & dims))
            parts = [p for p in parts if not p & dims] + ([joined] if dims else [])
        total = torch.zeros((), dtype=torch.long)
        for part in [*parts, set()]:
            f = torch.zeros((), dtype=torch.long)
            for (sign, t), dims in zip(few, varies, strict=True):
                if bool(dims) == bool(part) and dims <= part:
                    f = self.equations.sum(1, f, sign, t)
            first = f
            for d in part:
                first = first.narrow(d, 0, 1)
            self.equations.tie(f, first)
            total = self.equations.sum(1, total, 1, first.reshape(()))
        self.equations.tie(total, torch.tensor(GROUND))


def _at(terms: list[Tensor], d: int, chosen: Tensor) -> list[Tensor]:
    return [t if t.shape[d] == 1 else t.index_select(d, chosen.nonzero()[:, 0]) for t in terms]


def _without_repeats(raw: Raw) -> Raw:
    """The same place with size 1 along dimensions that are expanded."""
    sizes = tuple(1 if s == 0 else n for n, s in zip(raw.sizes, raw.strides, strict=True))
    strides = tuple(0 if n == 1 else s for n, s in zip(sizes, raw.strides, strict=True))
    return raw._replace(sizes=sizes, strides=strides)


def _block(place: Raw, parameter: Place, ends: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]] | None:
    """The indices of a place along each dimension of a parameter, and nodes so; None if they are no product of such."""
    shape = parameter[0]
    dense = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    found = locate(place[1:], parameter, dense)
    if found is None:
        return None
    split, steps, start = found
    sizes, jumps = ([n for part in parts for n in part] for parts in (split, steps))
    along = [[k for k, step in enumerate(jumps) if dense[d] <= step < dense[d] * n] for d, n in enumerate(shape)]
    rows = []
    for d, dims in enumerate(along):
        index = torch.tensor(start // dense[d] % shape[d])
        for k in dims:
            index = index[..., None] + torch.arange(sizes[k]) * (jumps[k] // dense[d])
        rows.append(index.reshape(-1))
    if any(len(index.unique()) < len(index) for index in rows):
        return None
    order = [k for dims in along for k in dims]
    terms = []
    for t in ends:
        t = t.reshape([1] * (len(split) - t.dim()) + list(t.shape))
        t = t.reshape([n for m, ns in zip(t.shape, split, strict=True) for n in (ns if m > 1 else [1] * len(ns))])
        varies = [any(t.shape[k] > 1 for k in dims) for dims in along]
        wide = {k for dims, one in zip(along, varies, strict=True) if one for k in dims}
        t = t.expand([sizes[k] if k in wide else n for k, n in enumerate(t.shape)])
        t = t.permute([*order, *(k for k in range(t.dim()) if k not in order)])
        t = t.reshape([len(i) if one else 1 for i, one in zip(rows, varies, strict=True)])
        for d, index in enumerate(rows):
            t = t.index_select(d, index.argsort()) if varies[d] else t
        terms.append(t)
    return [index.sort().values for index in rows], terms
