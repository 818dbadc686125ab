"""Homogeneous linear equations between log-scales, solved exactly as they come.

A node stands for the log-scale x of an element or unit. Node 0 is ground, x = 0. Node 1, `ANY`, marks a literal zero or
infinity, which takes any scale. An equation x_a = x_b makes a the child of b in a union-find that whole tensors enter
at once. Every other equation is solved for its newest node, whose link is a linear form {node: coefficient} over older
ones; there are few of those, and their arithmetic is that of Fractions.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from fractions import Fraction

import torch
from torch import Tensor

GROUND, ANY = 0, 1
Number = int | Fraction
Form = dict[int, Number]


class Equations:
    """The solved equations.

    Attributes:
        parent: The union-find; a root stands for its class.
        forms: Links of roots, with several terms or a coefficient other than one.
        linked: Roots that have a form.
    """

    def __init__(self) -> None:
        self.count = 2
        self.parent = torch.arange(1024, device="cpu")
        self.linked = torch.zeros_like(self.parent, dtype=torch.bool)
        self.forms: dict[int, Form] = {}
        self._derived: dict[frozenset[tuple[int, Number]], int] = {}

    def copy(self) -> "Equations":
        other = copy(self)
        other.parent, other.linked = self.parent.clone(), self.linked.clone()
        other.forms, other._derived = dict(self.forms), dict(self._derived)
        return other

    def fresh(self, *shape: int) -> Tensor:
        """New nodes."""
        n = math.prod(shape)
        nodes = torch.arange(self.count, self.count + n).view(shape)
        self.count += n
        if self.count > len(self.parent):
            more = max(len(self.parent), self.count - len(self.parent))
            self.parent = torch.cat([self.parent, torch.arange(len(self.parent), len(self.parent) + more)])
            self.linked = torch.cat([self.linked, torch.zeros(more, dtype=torch.bool)])
        return nodes

    def find(self, nodes: Tensor) -> Tensor:
        """The oldest node of each node's class."""
        (few,) = thin(nodes)
        found = self.parent[few]
        while True:
            further = self.parent[found]
            if torch.equal(further, found):
                return found.expand(nodes.shape)
            self.parent[few] = further
            found = further

    def _root(self, node: int) -> int:
        above = int(self.parent[node])
        while above != node:
            node, above = above, int(self.parent[above])
        return node

    def form(self, node: int) -> Form:
        """x_node over free nodes."""
        node = self._root(node)
        form = self.forms.get(node)
        if form is None:
            return {node: 1} if node else {}
        if all(j == self._root(j) and not self.linked[j] for j in form):
            return form
        form = self.combine((c, j) for j, c in self.forms.pop(node).items())
        self.define(node, form)
        return form

    def combine(self, terms: Iterable[tuple[Number, int]]) -> Form:
        """Σ c·x over free nodes."""
        total: Form = {}
        for c, node in terms:
            for j, k in self.form(node).items():
                total[j] = total.get(j, 0) + c * k
        return {j: c for j, c in total.items() if c}

    def vanish(self, terms: Iterable[tuple[Number, int]]) -> bool:
        """Adds Σ c·x = 0; whether it was new."""
        form = self.combine(terms)
        if not form:
            return False
        pivot = max(form)
        c = form.pop(pivot)
        link = {j: -k if c == 1 else k if c == -1 else Fraction(-k) / c for j, k in form.items()}
        self.define(pivot, link)
        return True

    def define(self, node: int, form: Form) -> None:
        """x_node is this form from now on; it was free, or is new."""
        form = {j: int(c) if c.denominator == 1 else c for j, c in form.items()}
        self.linked[node] = len(form) > 1 or not {1}.issuperset(form.values())
        if bool(self.linked[node]):
            self.forms[node] = form
        else:
            self.parent[node] = next(iter(form), GROUND)

    def tie(self, a: Tensor, b: Tensor) -> int:
        """Adds x_a = x_b, element by element; how many of these equations were new. `ANY` agrees with everything."""
        a, b = thin(self.find(a), self.find(b))
        differ = a != b
        if not bool(differ.any()):
            return 0
        differ &= (a != ANY) & (b != ANY)
        a, b = a[differ], b[differ]
        if not self.forms:
            return self._join(a, b)
        linked = self.linked[a] | self.linked[b]
        new = self._join(a[~linked], b[~linked])
        for i, j in zip(*(t.tolist() for t in pairs(a[linked], b[linked])[0]), strict=True):
            new += self.vanish(((1, i), (-1, j)))
        return new

    def _join(self, a: Tensor, b: Tensor) -> int:
        """Makes one class of each pair of classes; the oldest node stands for it."""
        new = 0
        while a.numel():
            young, old = torch.maximum(a, b), torch.minimum(a, b)
            before = self.parent[young]
            self.parent.scatter_reduce_(0, young, old, "amin")
            new += int(young[self.parent[young] != before].unique().numel())
            a, b = self.find(young), self.find(old)
            differ = a != b
            a, b = a[differ], b[differ]
        return new

    def ground(self, *nodes: Tensor) -> int:
        """Adds x = 0; how many of these equations were new."""
        found = [thin(t)[0].reshape(-1) for t in nodes]
        return self.tie(torch.cat(found).unique(), torch.zeros((), dtype=torch.long)) if found else 0

    def sum(self, p: Number, a: Tensor, q: Number, b: Tensor) -> Tensor:
        """Nodes with x = p·x_a + q·x_b, `ANY` where one of them is."""
        a, b = (self.find(t) for t in torch.broadcast_tensors(a, b))
        if p == 1 and not bool(thin(b)[0].any()):
            return a
        if q == 1 and not bool(thin(a)[0].any()):
            return b
        (left, right), which = pairs(*squash(a, b))
        result = torch.tensor([self._sum(p, i, q, j) for i, j in zip(left.tolist(), right.tolist(), strict=True)])
        return result[which].expand(a.shape)

    def _sum(self, p: Number, i: int, q: Number, j: int) -> int:
        if ANY in (i, j):
            return ANY
        form = self.combine(((p, i), (q, j)))
        if not form:
            return GROUND
        if len(form) == 1 and 1 in form.values():
            return next(iter(form))
        key = frozenset(form.items())
        if key not in self._derived:  # the same node each time
            self._derived[key] = int(self.fresh(1))
            self.define(self._derived[key], form)
        return self._derived[key]


def pairs(a: Tensor, b: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The distinct pairs of nodes, and which of them each element has."""
    code, which = torch.unique((a << 32) | b, return_inverse=True)
    return (code >> 32, code & 0xFFFFFFFF), which


def thin(*tensors: Tensor) -> Sequence[Tensor]:
    """The same nodes with size 1 along every dimension that all of them are expanded over; reads none."""
    found = torch.broadcast_tensors(*tensors) if len(tensors) > 1 else tensors
    return _narrow(found, lambda t, d: t.stride(d) == 0) if all(0 in t.stride() for t in found) else found


def squash(*tensors: Tensor) -> Sequence[Tensor]:
    """The same nodes with size 1 along every dimension in which none of them changes."""
    return _narrow(torch.broadcast_tensors(*tensors) if len(tensors) > 1 else tensors, constant)


def _narrow(tensors: Sequence[Tensor], same: Callable[[Tensor, int], bool]) -> Sequence[Tensor]:
    for d, n in enumerate(tensors[0].shape):
        if n > 1 and all(same(t, d) for t in tensors):
            tensors = [t.narrow(d, 0, 1) for t in tensors]
    return tensors


def constant(t: Tensor, d: int) -> bool:
    """Whether nodes are the same along dimension `d`."""
    if t.shape[d] <= 1 or t.stride(d) == 0:
        return True
    first = t.narrow(d, 0, 1)
    return torch.equal(first, t.narrow(d, 1, 1)) and bool((t == first).all())
