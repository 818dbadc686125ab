"""Homogeneous linear equations between log-scales, solved exactly as they come.

A node stands for the log-scale x of an element or unit. Node 0 is ground, x = 0. Node 1, `ANY`, marks a literal zero or
infinity, which takes any scale. An equation x_a = x_b makes a the child of b in a union-find that whole tensors enter
at once. So do multiples, x_a = p·x_b. Every other equation is solved for its newest node, whose link is a linear form
{node: coefficient} over older ones; there are few of those, and their arithmetic is that of Fractions.
"""

from collections.abc import Callable, Iterable, Sequence
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
        factor: Which of `factors` a root is times its `base`; 0: it is no multiple of another node.
        forms: Links of roots with several terms.
        linked: Roots that have a base or a form.
    """

    def __init__(self) -> None:
        self.count = 2
        self.parent = torch.arange(1024, device="cpu")
        self.base, self.factor = torch.zeros_like(self.parent), torch.zeros_like(self.parent)
        self.linked = torch.zeros_like(self.parent, dtype=torch.bool)
        self.factors: list[Number] = [1]
        self.forms: dict[int, Form] = {}
        self._derived: dict[frozenset[tuple[int, Number]], int] = {}
        self._multiples: dict[Number, Tensor] = {}

    def copy(self) -> "Equations":
        other = Equations()
        other.count, other.factors = self.count, self.factors
        other.parent, other.base, other.factor, other.linked = (
            t.clone() for t in (self.parent, self.base, self.factor, self.linked)
        )
        other.forms = {node: dict(form) for node, form in self.forms.items()}
        return other

    def fresh(self, *shape: int) -> Tensor:
        """New nodes."""
        n = 1
        for size in shape:
            n *= size
        nodes = torch.arange(self.count, self.count + n).view(shape)
        self.count += n
        if self.count > len(self.parent):
            more = max(len(self.parent), self.count - len(self.parent))
            self.parent = torch.cat([self.parent, torch.arange(len(self.parent), len(self.parent) + more)])
            self.base, self.factor, self.linked = (
                torch.cat([t, torch.zeros(more, dtype=t.dtype)]) for t in (self.base, self.factor, self.linked)
            )
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
            if node and bool(self.linked[node]):
                p = self.factors[int(self.factor[node])]
                return {j: p * c for j, c in self.form(int(self.base[node])).items()}
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
        form = {j: _exact(c) for j, c in form.items()}
        if len(form) > 1:
            self.forms[node] = form
            self.linked[node] = True
        elif form and 1 not in form.values():
            ((base, p),) = form.items()
            self.base[node], self.factor[node] = base, self._factor(p)
            self.linked[node] = True
        else:
            self.parent[node] = next(iter(form), GROUND)
            self.linked[node] = False

    def _factor(self, p: Number) -> int:
        if p not in self.factors[1:]:
            self.factors.append(p)
        return self.factors.index(p, 1)

    def tie(self, a: Tensor, b: Tensor) -> int:
        """Adds x_a = x_b, element by element; how many of these equations were new. `ANY` agrees with everything."""
        a, b = thin(self.find(a), self.find(b))
        differ = (a != b) & (a != ANY) & (b != ANY)
        if not bool(differ.any()):
            return 0
        a, b = pairs(a[differ], b[differ])[0]
        linked = self.linked[a] | self.linked[b]
        new = self._join(a[~linked], b[~linked])
        if not bool(linked.any()):
            return new
        a, b = a[linked], b[linked]
        f, g = self.factor[a], self.factor[b]  # equal multiples: their bases are equal, and so are they
        alike = ((f == g) | (a == GROUND) | (b == GROUND)) & (f + g > 0)
        if bool(alike.any()):
            new += self.tie(self.base[a[alike]], self.base[b[alike]])
            young, old = torch.maximum(a, b)[alike], torch.minimum(a, b)[alike]
            self.parent.scatter_reduce_(0, young, self.find(old), "amin")
        for i, j in zip(a[~alike].tolist(), b[~alike].tolist(), strict=True):
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

    def ground(self, nodes: Tensor) -> int:
        """Adds x = 0; how many of these equations were new."""
        return self.tie(nodes.unique(), torch.zeros((), dtype=torch.long))

    def cancel(self, a: Tensor, b: Tensor) -> int:
        """Adds x_a + x_b = 0, element by element; how many of these equations were new."""
        a, b = thin(*squash(self.find(a), self.find(b)))
        a, b = pairs(a, b)[0]
        new = 0
        for one, other in ((a, b), (b, a)):  # all that one node cancels are equal
            order = one.argsort(stable=True)
            first = torch.cat([one.new_ones(1), one[order].diff()]).cumsum(0).unique(return_inverse=True)[1]
            head = torch.zeros(len(order), dtype=torch.long).scatter_reduce(0, first, order, "amin", include_self=False)
            kept = (one[order] > ANY) & (other[order] > ANY)
            new += self.tie(other[order][kept], other[head[first]][kept])
        a, b = pairs(self.find(a), self.find(b))[0]
        real = (a != ANY) & (b != ANY) & (self._cancelled(1, a, 1, b) < 0)
        young, old = torch.maximum(a, b)[real], torch.minimum(a, b)[real]
        plain = (old > ANY) & (old != young) & ~self.linked[old] & ~self.linked[young]
        plain &= torch.isin(young, old, invert=True) & (young.unique(return_inverse=True)[1].bincount()[
            young.unique(return_inverse=True)[1]] == 1)  # fmt: skip
        self.base[young[plain]], self.factor[young[plain]] = old[plain], self._factor(-1)
        self.linked[young[plain]] = True
        for i, j in zip(young[~plain].tolist(), old[~plain].tolist(), strict=True):
            new += self.vanish(((1, i), (1, j)))
        return new + int(plain.sum())

    def sum(self, p: Number, a: Tensor, q: Number, b: Tensor) -> Tensor:
        """Nodes with x = p·x_a + q·x_b, `ANY` where one of them is."""
        shape = torch.broadcast_shapes(a.shape, b.shape)
        a, b = squash(self.find(a), self.find(b))
        if p == 1 and not bool(b.any()):
            return a.expand(shape)
        if q == 1 and not bool(a.any()):
            return b.expand(shape)
        if not bool(b.any()):
            return self._times(p, a).expand(shape)
        (left, right), which = pairs(a, b)
        result = self._cancelled(p, left, q, right)
        for k in (result < 0).nonzero()[:, 0].tolist():
            result[k] = self._sum(p, int(left[k]), q, int(right[k]))
        return result[which].expand(shape)

    def _cancelled(self, p: Number, a: Tensor, q: Number, b: Tensor) -> Tensor:
        """Ground where p·x_a + q·x_b is 0 because both are multiples of one node; −1 where that is not so."""
        bases = [torch.where(self.factor[t] > 0, self.base[t], t) for t in (a, b)]
        same = (self.find(bases[0]) == self.find(bases[1])) & (a > ANY) & (b > ANY)
        f, g = (self.factor[t] * self.linked[t] for t in (a, b))
        result = torch.full_like(a, -1)
        for i, j in set(zip(f[same].tolist(), g[same].tolist(), strict=True)):
            if p * self.factors[i] + q * self.factors[j] == 0:
                result[same & (f == i) & (g == j)] = GROUND
        return result

    def _times(self, p: Number, nodes: Tensor) -> Tensor:
        """Nodes with x = p·x, made when they are first asked for."""
        few, which = nodes.unique(return_inverse=True)
        plain = (few > ANY) & ~self.linked[few]
        known = self._multiples.setdefault(p, torch.zeros(0, dtype=torch.long))
        if len(known) < self.count:
            known = self._multiples[p] = torch.cat([known, torch.zeros(self.count - len(known), dtype=torch.long)])
        missing = few[plain & (known[few] == 0)]
        made = known[missing] = self.fresh(len(missing))
        self.base[made], self.factor[made], self.linked[made] = missing, self._factor(p), True
        result = torch.where(plain, known[few], few)
        for k in (~plain & (few > ANY)).nonzero()[:, 0].tolist():
            result[k] = self._sum(p, int(few[k]), 1, GROUND)
        return result[which]

    def _sum(self, p: Number, i: int, q: Number, j: int) -> int:
        if ANY in (i, j):
            return ANY
        form = self.combine(((p, i), (q, j)))
        if not form:
            return GROUND
        if len(form) == 1 and 1 in form.values():
            return next(iter(form))
        return self._derive(form)

    def _derive(self, form: Form) -> int:
        """A node of this form, the same each time."""
        key = frozenset(form.items())
        node = self._derived.get(key)
        if node is None:
            node = self._derived[key] = int(self.fresh(1))
            self.define(node, form)
        return node


def _exact(c: Number) -> Number:
    return int(c) if c.denominator == 1 else c


def pairs(a: Tensor, b: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The distinct pairs of nodes, and which of them each element has."""
    code, which = torch.unique((a << 32) | b, return_inverse=True)
    return (code >> 32, code & 0xFFFFFFFF), which


def thin(*tensors: Tensor) -> list[Tensor]:
    """The same nodes with size 1 along every dimension that all of them are expanded over; reads none."""
    return _narrow(tensors, lambda t, d: t.stride(d) == 0)


def squash(*tensors: Tensor) -> list[Tensor]:
    """The same nodes with size 1 along every dimension in which none of them changes."""
    return _narrow(tensors, constant)


def _narrow(tensors: Sequence[Tensor], same: Callable[[Tensor, int], bool]) -> list[Tensor]:
    found = list(torch.broadcast_tensors(*tensors))
    for d in range(found[0].dim()):
        if found[0].shape[d] > 1 and all(same(t, d) for t in found):
            found = [t.narrow(d, 0, 1) for t in found]
    return found


def constant(t: Tensor, d: int) -> bool:
    """Whether nodes are the same along dimension `d`."""
    if t.shape[d] <= 1 or t.stride(d) == 0:
        return True
    first = t.narrow(d, 0, 1)
    return torch.equal(first, t.narrow(d, 1, 1)) and bool((t == first).all())
