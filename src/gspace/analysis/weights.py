"""Parameters as edges: each use of one says that its elements scale with x[head] − x[tail].

A use is kept as vectors, O(in + out) for a matrix: where it lies in the parameter's storage, and nodes `head` and
`tail` that broadcast to its sizes. Where two uses overlap, both are true. On the grid of strides that they share,
h₁ − t₁ − h₂ + t₂ is a sum of functions of separate dimensions and vanishes everywhere: each of them is constant, and
the constants add up to 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gspace.analysis.equations import ANY, GROUND, Equations, squash
from gspace.analysis.memory import Raw

LARGEST = 1 << 20  # elements of a matrix that are followed one by one


@dataclass(frozen=True, eq=False)
class Use:
    """Elements of a parameter's storage used as edges; `shift` + w is what scales (1 for a gain written 1 + w)."""

    place: Raw
    head: Tensor
    tail: Tensor
    shift: float
    normalizes: bool = False  # γ or β of a BatchNorm
    pinned: bool = False  # read in a way that lets no scale change it: no edge
    groups: int = 1  # of a convolution


@dataclass
class Weights:
    """Every use of every parameter, by storage.

    Attributes:
        regions: Where in each storage parameters begin and end; those that overlap are one.
        uses: By storage and begin of the region, in the order of the run.
        repeats: Pairs of terms (h₁, t₁), (h₂, t₂) of elements that were used twice.
        clashes: Terms of uses whose places overlap in a way that no grid describes.
        idle: Regions of parameters that only zeros were multiplied by: any scale will do.
    """

    equations: Equations
    regions: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    uses: dict[tuple[int, int], list[Use]] = field(default_factory=dict)
    repeats: list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = field(default_factory=list)
    clashes: list[Tensor] = field(default_factory=list)
    idle: set[tuple[int, int]] = field(default_factory=set)

    def enter(self, key: int, begin: int, end: int) -> None:
        """A parameter's elements in its storage."""
        regions = self.regions.setdefault(key, [])
        touching = [r for r in regions if r[0] < end and begin < r[1]]
        joined = min([begin, *(r[0] for r in touching)]), max([end, *(r[1] for r in touching)])
        self.regions[key] = sorted([r for r in regions if r not in touching] + [joined])

    def region(self, raw: Raw) -> tuple[int, int]:
        return raw.key, next(begin for begin, end in reversed(self.regions[raw.key]) if begin <= raw.offset)

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
        self.use(Use(place, head, tail, shift, normalizes, groups=groups))
        return head

    def ground(self, raw: Raw) -> int:
        """No scale may change these elements; how many channels that are (of a matrix the smaller side), 0 if known."""
        zero, place = torch.zeros((), dtype=torch.long), _without_repeats(raw)
        for use in self.uses.get(self.region(raw), ()):
            if use.place == place and self._same(use.head, zero) and self._same(use.tail, zero):
                return 0
        self.use(Use(place, zero, zero, 0.0, pinned=True))
        return min([n for n in place.sizes if n > 1][:2], default=1)

    def free(self) -> int:
        """How many classes of nodes the uses touch."""
        ends = [t.reshape(-1) for uses in self.uses.values() for use in uses for t in (use.head, use.tail)]
        return len(self.equations.find(torch.cat(ends)).unique()) if ends else 0

    def _same(self, a: Tensor, b: Tensor) -> bool:
        (a,), (b,) = squash(self.equations.find(a)), squash(self.equations.find(b))
        return torch.equal(a, b) if a.dim() == b.dim() else torch.equal(a.reshape(-1), b.reshape(-1))

    def use(self, new: Use) -> None:
        """Enters a use; what an earlier one says of the same elements is made to agree with it."""
        rank = len(new.place.sizes)
        new = replace(new, head=_of_rank(new.head, rank), tail=_of_rank(new.tail, rank))
        region = self.region(new.place)
        earlier = self.uses.setdefault(region, [])
        for use in earlier:
            self._reconcile(use, new, region[1])
        earlier.append(new)

    def _reconcile(self, a: Use, b: Use, begin: int) -> None:
        strides = sorted({s for u in (a, b) for n, s in zip(u.place.sizes, u.place.strides, strict=True) if n > 1})
        first, second = (on_grid(u, strides[::-1], begin) for u in (a, b))
        if first is None or second is None:
            if _apart(a.place, b.place):
                return
            both = torch.cat([t.reshape(-1) for u in (a, b) for t in (u.head, u.tail)])
            self.clashes.append(both.unique())
            self.equations.ground(both)
            return
        (starts_a, sizes_a, terms_a), (starts_b, sizes_b, terms_b) = first, second
        for d, (i, j, n, m) in enumerate(zip(starts_a, starts_b, sizes_a, sizes_b, strict=True)):
            start, end = max(i, j), min(i + n, j + m)
            if start >= end:
                return
            terms_a = [t.narrow(d, start - i, end - start) for t in terms_a]
            terms_b = [t.narrow(d, start - j, end - start) for t in terms_b]
        self.repeats.append(((terms_a[0], terms_a[1]), (terms_b[0], terms_b[1])))
        if a.shift != b.shift:
            self.clashes.append(torch.cat([t.reshape(-1) for t in (*terms_a, *terms_b)]).unique())
            self.equations.ground(self.clashes[-1])
            return
        self._agree([(1, terms_a[0]), (-1, terms_a[1]), (-1, terms_b[0]), (1, terms_b[1])])

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


def _of_rank(t: Tensor, rank: int) -> Tensor:
    return t.reshape([1] * (rank - t.dim()) + list(t.shape))


def _without_repeats(raw: Raw) -> Raw:
    """The same place with size 1 along dimensions that are expanded."""
    sizes = tuple(1 if s == 0 else n for n, s in zip(raw.sizes, raw.strides, strict=True))
    strides = tuple(0 if n == 1 else s for n, s in zip(sizes, raw.strides, strict=True))
    return raw._replace(sizes=sizes, strides=strides)


def _apart(a: Raw, b: Raw) -> bool:
    ends = [p.offset + sum((n - 1) * s for n, s in zip(p.sizes, p.strides, strict=True)) for p in (a, b)]
    return ends[0] < b.offset or ends[1] < a.offset


def on_grid(use: Use, strides: Sequence[int], begin: int) -> tuple[list[int], list[int], list[Tensor]] | None:
    """Start and size of a use along each stride, largest first, and its head and tail so; None: it does not fit."""
    sizes, steps, offset = use.place.sizes, use.place.strides, use.place.offset - begin
    order = sorted((d for d, n in enumerate(sizes) if n > 1), key=lambda d: -steps[d])
    flat = [d for d, n in enumerate(sizes) if n == 1]
    terms = [t.expand(sizes).permute([*order, *flat]).reshape([sizes[d] for d in order]) for t in (use.head, use.tail)]
    found: list[int] = []
    for k in range(len(strides)):
        d = order[0] if order else -1
        at = len(found)
        if d >= 0 and steps[d] == strides[k]:
            found.append(terms[0].shape[at])
            order = order[1:]
        elif d >= 0 and steps[d] < strides[k] and terms[0].shape[at] * steps[d] > strides[k]:
            inner = strides[k] // steps[d]
            if strides[k] % steps[d] or terms[0].shape[at] % inner or (offset // steps[d]) % inner:
                return None
            terms = [t.unflatten(at, (-1, inner)) for t in terms]
            found.append(terms[0].shape[at])
        else:
            terms = [t.unsqueeze(at) for t in terms]
            found.append(1)
    starts, at = [], offset
    for s in strides:
        starts.append(at // s)
        at %= s
    # Along every stride a use must stay inside the next larger one, or the grid would count elements twice.
    for k in range(1, len(strides)):
        if (starts[k] + found[k] - 1) * strides[k] >= strides[k - 1]:
            return None
    return (starts, found, terms) if at == 0 or not strides else None
