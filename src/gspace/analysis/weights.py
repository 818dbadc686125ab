"""Parameters as edges: each use of one says that its elements scale with x[head] − x[tail].

Both are planes over the parameter, O(in + out) for a matrix. Where a use meets elements that were used before, both are
true: h₁ − t₁ − h₂ + t₂ is a sum of functions of separate dimensions and vanishes everywhere, so each of them is
constant, and the constants add up to 0.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from gspace.analysis.equations import ANY, GROUND, Equations, constant, squash
from gspace.analysis.memory import Place, Plane, Raw, Sizes, geometry, key_of, locate

LARGEST = 1 << 20  # elements of a matrix that are followed one by one
ZERO = torch.tensor(GROUND, device="cpu")


class Leaf:
    """A parameter.

    Attributes:
        head, tail, seen: Nodes of its elements, and whether they were used.
        shift: `shift` + w is what scales (1 for a gain written 1 + w).
        groups: Of a convolution.
        kinds: Names of what it was used for: "edge", "norm" (γ or β of a BatchNorm), "pinned", "zero" (zeros were
            multiplied by it).
        table: Dimensions of which the widest use has read several rows, but not all.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter, self.place = parameter, geometry(parameter)
        self.last = self.place[2] + sum((n - 1) * step for n, step in zip(*self.place[:2], strict=True))
        one = [1] * parameter.dim()
        self.head, self.tail = (Plane(self.place, torch.zeros(one, dtype=torch.long)) for _ in range(2))
        self.seen = Plane(self.place, torch.zeros(one, dtype=torch.bool))
        self.shift, self.groups = 0.0, 1
        self.kinds: set[str] = set()
        self.table: set[int] = set()


@dataclass
class Weights:
    """All parameters.

    Attributes:
        note: Called with a number of channels and a reason where something is pinned here.
        leaves: By storage.
        repeats: Pairs (h₁, t₁), (h₂, t₂) of elements that were used twice.
        zeros: Uses with zeros alone: parameter, place, nodes of the result.
    """

    equations: Equations
    note: Callable[[int, str], None]
    leaves: dict[int, list[Leaf]] = field(default_factory=dict)
    repeats: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = field(default_factory=list)
    zeros: list[tuple[Leaf, Place, Tensor]] = field(default_factory=list)

    def enter(self, parameter: nn.Parameter) -> None:
        self.leaves.setdefault(key_of(parameter), []).append(Leaf(parameter))

    def leaf(self, raw: Raw) -> Leaf | None:
        """The parameter these elements belong to; None for one that shares a storage and is not followed."""
        return next((leaf for leaf in self.leaves[raw.key] if leaf.place[2] <= raw.offset <= leaf.last), None)

    def _found(self, raw: Raw) -> tuple[Leaf, Place]:
        """Parameter and place of these elements, each once; what cannot be followed is set to ground."""
        leaf = self.leaf(raw)
        assert leaf is not None
        sizes = tuple(1 if step == 0 else n for n, step in zip(raw.sizes, raw.strides, strict=True))
        place = sizes, tuple(0 if n == 1 else s for n, s in zip(sizes, raw.strides, strict=True)), raw.offset
        block = not overlap(place) and (leaf.parameter.numel() <= LARGEST or locate(place, leaf.place) is not None)
        if not block and self._pinned(leaf, leaf.place):
            self.note(min(sizes), "a part of a parameter that is no block of it")
            leaf.head = leaf.tail = Plane(leaf.place, torch.zeros([1] * len(leaf.place[0]), dtype=torch.long))
        return leaf, place

    def nodes(self, raw: Raw) -> Tensor:
        """A node for each element of `raw`, with its log-scale."""
        leaf, place = self._found(raw)
        if not leaf.shift and bool(leaf.seen.read(place).all()):
            head, tail = (plane.read(place) for plane in (leaf.head, leaf.tail))
            if head.numel() * tail.numel() > LARGEST:
                head, tail = (squash(self.equations.find(t))[0] for t in (head, tail))
            if head.numel() * tail.numel() <= LARGEST or not bool(tail.any()):
                return self.equations.sum(1, head, -1, tail).expand(raw.sizes)
        return self.edges(raw, ZERO, place[0]).expand(raw.sizes)

    def edges(
        self, raw: Raw, tail: Tensor, shape: Sequence[int], shift: float = 0.0, kind: str = "edge", groups: int = 1
    ) -> Tensor:
        """Nodes of the given shape that `raw` writes from `tail`: those of an earlier use that was the same, or new."""
        leaf, place = self._found(raw)
        tail = tail.reshape([1] * (len(shape) - tail.dim()) + list(tail.shape))
        if leaf.kinds <= {"pinned", "zero"}:
            leaf.groups = groups
        if bool((tail == ANY).any()):
            parts = [] if shift or leaf.shift else _runs(place, tail, shape)
            if parts:
                return self._with_zeros(leaf, parts, self.equations.fresh(*shape), kind)
            tail = torch.where(tail == ANY, GROUND, tail)
        if shift == leaf.shift and bool(leaf.seen.read(place).all()) and self._same(leaf.tail.read(place), tail):
            (head,) = squash(self.equations.find(leaf.head.read(place)))
            if all(n in (1, size) for n, size in zip(head.shape, shape, strict=True)):
                leaf.kinds.add(kind)
                return head.expand(tuple(shape))
        head = self.equations.fresh(*shape)
        if leaf.kinds <= {"pinned", "zero"}:
            leaf.shift = shift
        if leaf.shift != shift:
            self.equations.ground(head, tail, leaf.head.content, leaf.tail.content)
            self.note(max(place[0]), "a gain that is used with 1 added to it and without")
        self._use(leaf, place, head, tail, kind)
        return head

    def _with_zeros(self, leaf: Leaf, parts: Iterable[tuple[Place, Tensor]], head: Tensor, kind: str) -> Tensor:
        """A use in which some parts multiply zeros: `settle_zeros` says what they map."""
        for place, tail in parts:
            if bool((tail == ANY).all()):
                leaf.kinds.add("zero")
                self.zeros.append((leaf, place, head))
            else:
                self._use(leaf, place, head, tail, kind)
        return head

    def ground(self, raw: Raw) -> int:
        """No scale may change these elements; how many channels that are (of a matrix the smaller side), 0 if known."""
        leaf, place = self._found(raw)
        return channels(place[0]) if self._pinned(leaf, place) else 0

    def _pinned(self, leaf: Leaf, place: Place) -> bool:
        ends = (plane.read(place) for plane in (leaf.head, leaf.tail))
        if bool(leaf.seen.read(place).all()) and all(self._same(t, ZERO) for t in ends):
            return False
        zero = torch.zeros([1] * len(place[0]), dtype=torch.long)
        self._use(leaf, place, zero, zero, "pinned")
        return True

    def settle_zeros(self) -> list[Leaf]:
        """What multiplied zeros maps as in its other uses. Returns parameters without any: these are pinned.

        Another batch, or a longer one, may have no zeros there.
        """
        alone: dict[Leaf, None] = {}
        for leaf, place, head in self.zeros:
            other = squash(self.equations.find(leaf.head.read(place)))[0]
            known = bool(leaf.seen.read(place).all())
            if known and all(n in (1, size) for n, size in zip(other.shape, head.shape, strict=True)):
                self.equations.tie(head, other.expand(head.shape))
                continue
            self.equations.ground(head)
            if not known:
                self._pinned(leaf, place)
                alone[leaf] = None
        return list(alone)

    def free(self) -> int:
        """How many classes of nodes the uses touch."""
        ends = [t.content.reshape(-1) for leaves in self.leaves.values() for f in leaves for t in (f.head, f.tail)]
        return len(self.equations.find(torch.cat(ends)).unique()) if ends else 0

    def _same(self, a: Tensor, b: Tensor) -> bool:
        (a,), (b,) = squash(self.equations.find(a)), squash(self.equations.find(b))
        return torch.equal(a.reshape(-1), b.reshape(-1)) and (a.shape == b.shape or min(a.dim(), b.dim()) == 0)

    def _use(self, leaf: Leaf, place: Place, head: Tensor, tail: Tensor, kind: str) -> None:
        """Enters a use; what earlier ones say of the same elements is made to agree with it."""
        leaf.kinds.add(kind)
        seen, before = leaf.seen.read(place), [plane.read(place) for plane in (leaf.head, leaf.tail)]
        again = bool(seen.any())
        if again:
            self._agree(*_where(seen, place[0], (before, (head, tail))))
        if bool(seen.all()):
            return
        walks = locate(place, leaf.place)
        rows = [math.prod(n for walk in (walks[0] if walks else ()) for n, at, _ in walk if at == d)
                for d in range(len(leaf.place[0]))]  # fmt: skip
        alike = {d for d, (n, size) in enumerate(zip(rows, leaf.place[0], strict=True)) if 1 < n < size}
        leaf.table = alike if _count(seen, place[0]) == _count(leaf.seen.content, leaf.seen.place[0]) else set()
        for plane, old, new in zip((leaf.head, leaf.tail), before, (head, tail), strict=True):
            plane.write(place, torch.where(seen, old, new) if again else new)
        leaf.seen.write(place, torch.ones([1] * seen.dim(), dtype=torch.bool))

    def _agree(self, first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
        """h₁ − t₁ = h₂ − t₂ at every point of a grid."""
        self.repeats.append((first, second))
        terms = zip((1, -1, -1, 1), (*first, *second), strict=True)
        few = [(sign, squash(self.equations.find(t))[0]) for sign, t in terms]
        varies = [{d for d, n in enumerate(t.shape) if n > 1} for _, t in few]
        parts: list[set[int]] = []
        for dims in varies:  # dimensions that one term depends on belong together
            joined = dims.union(*(p for p in parts if p & dims))
            parts = [p for p in parts if not p & dims] + ([joined] if dims else [])
        total = ZERO
        for part in [*parts, set()]:
            f = ZERO
            for (sign, t), dims in zip(few, varies, strict=True):
                if bool(dims) == bool(part) and dims <= part:
                    f = self.equations.sum(1, f, sign, t)
            first_one = f
            for d in part:
                first_one = first_one.narrow(d, 0, 1)
            self.equations.tie(f, first_one)
            total = self.equations.sum(1, total, 1, first_one.reshape(()))
        self.equations.tie(total, ZERO)


def _runs(place: Place, tail: Tensor, shape: Sequence[int]) -> list[tuple[Place, Tensor]]:
    """Parts of a place that literal zeros are multiplied with, and those with none; none if they are in no one row.

    Along that row the result has one scale, as the sum over it.
    """
    sizes, strides, offset = place
    along = [d for d, n in enumerate(tail.shape) if n > 1 and bool((tail != tail.narrow(d, 0, 1)).any())]
    if not along:
        return [(place, tail)]
    d = along[0]
    if len(along) > 1 or shape[d] != 1 or len(sizes) != tail.dim():
        return []
    zero = (tail == ANY).movedim(d, 0).flatten(1)[:, 0]
    ends = [0, *((zero[1:] != zero[:-1]).nonzero()[:, 0] + 1).tolist(), len(zero)]
    return [
        (((*sizes[:d], b - a, *sizes[d + 1 :]), strides, offset + a * strides[d]), tail.narrow(d, a, b - a))
        for a, b in pairwise(ends)
    ]


def channels(sizes: Sequence[int]) -> int:
    """Which axis holds channels only a rule knows: the smaller of the first two."""
    return min([n for n in sizes if n > 1][:2], default=1)


def _count(seen: Tensor, sizes: Sizes) -> int:
    return int(seen.sum()) * math.prod(sizes) // max(seen.numel(), 1)


def _where(seen: Tensor, sizes: Sizes, pairs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Pairs of nodes where elements were seen: rows of one dimension, or element by element."""
    along = [d for d, n in enumerate(seen.shape) if n > 1]
    if len(along) > 1:
        return [[t.expand(sizes)[seen.expand(sizes)] for t in pair] for pair in pairs]
    rows = seen.reshape(-1).nonzero()[:, 0]
    return [
        [t if not along or t.shape[along[0]] == 1 else t.index_select(along[0], rows) for t in pair] for pair in pairs
    ]


def overlap(place: Place) -> bool:
    """Whether a step along a dimension may land on entries of shorter steps, as in what `expand` returns."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(*place[:2], strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False


def layout(leaf: Leaf, equations: Equations) -> tuple[Tensor, Tensor, bool, int] | None:
    """Head `(group, out)`, tail `(group, in)`, whether the parameter is stored (in, out), and elements not read.

    None: it would have to be followed element by element, and is too large for that. Rows of a table that were not
    read have the scale of those that were, where that is one.
    """
    shape = leaf.place[0]
    seen, head, tail = (plane.read(leaf.place) for plane in (leaf.seen, leaf.head, leaf.tail))
    head, tail = equations.find(head), equations.find(tail)
    for d in leaf.table:
        rows = seen.transpose(0, d).reshape(seen.shape[d], -1).any(1).nonzero()[:, 0]
        some = [t if t.shape[d] == 1 else t.index_select(d, rows) for t in (seen, head, tail)]
        if all(constant(t, d) for t in some):
            seen, head, tail = (t.narrow(d, 0, 1) for t in some)
    (head,), (tail,) = squash(head), squash(tail)
    missing = math.prod(shape) - _count(seen, shape)
    both = [sum(n > 1 for n in t.shape[:3]) > 1 for t in (head, tail)]  # by expert, and along its matrix
    if leaf.groups == 1 and any(both) and (found := _stacked(shape, head, tail)):
        return *found, missing
    for groups, swap in _candidates(shape, head, tail, leaf.groups) if len(shape) > 1 else ():
        one, other = (tail, head) if swap else (head, tail)  # along the first dimension; along the second, by group
        rows = other.reshape(other.shape[0], -1).expand(shape[0], -1).reshape(groups, shape[0] // groups, -1)
        if max(one.shape[1:]) == max(other.shape[2:], default=1) == 1 and constant(rows, 1):
            first = one.reshape(-1).expand(shape[0]).reshape(groups, -1)
            second = rows[:, 0].expand(groups, shape[1])
            return (second, first, True, missing) if swap else (first, second, False, missing)
    if bool(tail.any()) and (found := _stacked(shape, head, tail)):
        return *found, missing
    if len(shape) == 1 and bool(tail.any()):
        return head.expand(shape)[:, None], tail.expand(shape)[:, None], False, missing
    if head.numel() * tail.numel() > LARGEST:
        return None
    nodes = equations.sum(1, head, -1, tail).expand(shape)  # one for each element, from ground
    return nodes.reshape(1, -1), torch.zeros(1, 1, dtype=torch.long), False, missing


def _stacked(shape: Sizes, head: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, bool] | None:
    """A matrix for each entry of the first dimension, as experts in one tensor have them."""
    for swap in (False, True) if len(shape) > 2 and min(shape[1:3]) > 1 else ():
        one, other = (tail, head) if swap else (head, tail)
        if max(*one.shape[2:], other.shape[1], *other.shape[3:]) == 1:
            first = one.reshape(one.shape[:2]).expand(shape[:2])
            second = other.reshape(other.shape[0], -1).expand(shape[0], shape[2])
            return (second, first, True) if swap else (first, second, False)
    return None


def _candidates(shape: Sizes, head: Tensor, tail: Tensor, groups: int) -> Iterator[tuple[int, bool]]:
    """Numbers of groups that the nodes may have, likely ones first, and whether they are swapped."""
    groups = groups if shape[0] % groups == 0 else 1
    yield from ((groups, False), (groups, True), (1, False), (1, True))
    for swap, term in ((False, tail), (True, head)):  # the side that depends on the group
        rows = term.reshape(term.shape[0], -1)
        changes = (rows[1:] != rows[:-1]).any(1).nonzero()[:, 0] + 1
        yield shape[0] // math.gcd(shape[0], *changes.tolist()), swap
