"""What `analyze` finds: the edges of a network, its units, what is pinned and why. Data only.

Shapes: `head` is `(group, out)`, `tail` is `(group, in)`, a parameter is viewed as `(group, out, in, *taps)`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

Residual = Literal["pin", "tie"]
Form = tuple[tuple[int, int | Fraction], ...]  # units and coefficients: the log-scale Σ c·x[u]


@dataclass(frozen=True, eq=False)
class Edges:
    """One parameter tensor, seen as edges between units.

    Attributes:
        name: The parameter's name in the model.
        head: Unit that each output writes, `(group, out)`.
        tail: Unit that each input reads, `(group, in)`; a bias, γ or β reads ground.
        swap: The parameter is stored (in, out), as that of a transposed convolution.
        normalized: Its output goes straight into a BatchNorm.
        first: Position of its first use in the forward pass.
        last: Position of its last use.
        shift: `shift` + w is what scales: 1 for a gain that is written 1 + w.
    """

    name: str
    head: Tensor
    tail: Tensor
    swap: bool
    normalized: bool
    first: int
    last: int
    shift: float = 0.0

    def fits(self, parameter: Tensor) -> bool:
        """Whether `parameter` has this many outputs and inputs."""
        try:
            like = torch.empty(parameter.shape, device="meta")  # it may be sharded
            return self.view(like).shape[:3] == (*self.head.shape, self.tail.shape[1])
        except RuntimeError:  # it cannot be divided so
            return False

    def view(self, parameter: Tensor) -> Tensor:
        """`parameter` as `(group, out, in, *taps)`; a copy only if entries that are units by themselves lie apart."""
        if parameter.numel() == 0:
            return parameter.reshape(*self.head.shape, self.tail.shape[1], *parameter.shape[2:])
        if parameter.dim() != 1 and self.head.numel() != parameter.numel():
            split = parameter if self.stacked(parameter.shape) else parameter.unflatten(0, (len(self.head), -1))
            return split.transpose(1, 2) if self.swap else split
        return parameter.reshape(*self.head.shape, 1)

    def lies_apart(self, parameter: Tensor) -> bool:
        """Whether its entries are units by themselves, and not in order in memory: `view` would be a copy."""
        single = parameter.dim() > 1 and self.head.numel() == parameter.numel()
        return single and self.view(parameter.detach()).untyped_storage()._cdata != parameter.untyped_storage()._cdata

    def stacked(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape has a dimension for its groups, the first one, as experts in one tensor."""
        ends = self.head.shape[1], self.tail.shape[1]
        return tuple(shape[:3]) == (len(self.head), *(reversed(ends) if self.swap else ends))

    def part(self, shape: Sequence[int], dim: int, start: int, stop: int) -> "Edges":
        """The edges of `parameter.narrow(dim, start, stop - start)`, for a parameter of this shape.

        Where groups are divided, each row is a group of its own.
        """
        head, tail, here = self.head, self.tail, torch.arange(start, stop, device=self.head.device)
        single = len(shape) == 1 or head.numel() == math.prod(shape)  # one weight for each output
        if single:
            every = torch.arange(head.numel(), device=head.device).reshape(*shape)
            here = every.narrow(dim, start, stop - start).flatten()
        if self.stacked(shape) and not single:
            head, tail = (head[here], tail[here]) if dim == 0 else (head, tail)
            dim -= 1  # that of a matrix
        if single or (dim == 0 and len(head) > 1 and not self.stacked(shape)):
            rows, columns = (tail, head) if self.swap and not single else (head, tail)
            group, rows = here // rows.shape[1], rows.reshape(-1)[here, None]
            head, tail = (columns[group], rows) if self.swap and not single else (rows, columns[group])
        elif 0 <= dim < 2 and (dim == 0) != self.swap:
            head = head[:, here]
        elif 0 <= dim < 2:
            tail = tail[:, here]
        return replace(self, head=head, tail=tail)


def magnitude(weight: Tensor) -> Tensor:
    """|w| in float64; complex weights have one too, though no scale of their own."""
    return (weight if weight.is_complex() else weight.double()).abs().double()


@dataclass(frozen=True, eq=False)
class Statistic:
    """A running statistic of BatchNorm: it scales with `unit` to the given power."""

    name: str
    unit: Tensor
    power: int


@dataclass(frozen=True)
class UnitGroup:
    """Units that are written and read by the same parameters."""

    count: int
    written: tuple[str, ...]
    read: tuple[str, ...]
    kind: Literal["exact", "absorbed"]


@dataclass(frozen=True)
class Pin:
    """Channels that one operation keeps from being scaled.

    Which axis of a parameter holds channels only a rule knows: without one, `count` is the smaller of the first two.
    """

    operation: str
    where: str
    count: int
    reason: str

    def __str__(self) -> str:
        return self.told(str(self.count))

    def told(self, count: str) -> str:
        """Its line, with `count` channels: equal ones are told once, "8 × 12"."""
        return f"{count} channels at {self.where} ({self.operation}): {self.reason}"


T = TypeVar("T", UnitGroup, Pin)


@dataclass(frozen=True, eq=False)
class Analysis:
    """The rescaling symmetry of a model. Holds names and unit ids, no reference to the model.

    Attributes:
        H: Hidden units whose scale is free, exactly.
        H_absorbed: Rows whose scale a BatchNorm divides out (exact as its ε → 0).
        H_paper: Units when BatchNorm is ignored, the count of the paper.
        m: Trainable scalars.
        dim: m minus the units whose weights are all trainable: the dimension of G-space.
        edges: The exact view; units 1…H are exact, H + 1…H + H_absorbed absorbed, larger ids are keys of `forms`.
        transparent: The view of the paper, units 1…H_paper.
        statistics: Running statistics that follow absorbed units.
        units: Groups of units alike, in the order they are written.
        pinned: What is not scaled, and the operation that pinned it.
        residual: What was done with residual streams.
        forms: Ids of `edges` whose log-scale is not that of one unit: −1 times it on the key side of an attention, 2
            times before a squared ReLU, the sum of two behind a gate.
        unseen: Parameters with elements that no run has read, and how many: nothing is known of them.
        passes: Units whose scale goes through a "relu", a "gate" (a product of two activations) or an "attention".
        modules: What the modules of the model were, to know it again.
    """

    H: int
    H_absorbed: int
    H_paper: int
    m: int
    dim: int
    edges: tuple[Edges, ...] = field(repr=False)
    transparent: tuple[Edges, ...] = field(repr=False)
    statistics: tuple[Statistic, ...] = field(repr=False)
    units: tuple[UnitGroup, ...] = field(repr=False)
    pinned: tuple[Pin, ...] = field(repr=False)
    residual: Residual = "tie"
    forms: Mapping[int, Form] = field(default_factory=dict, repr=False)
    unseen: Mapping[str, int] = field(default_factory=dict, repr=False)
    passes: Mapping[str, frozenset[int]] = field(default_factory=dict, repr=False)
    modules: Mapping[str, str] = field(default_factory=dict, repr=False)

    def log_scales(self, units: Tensor) -> Tensor:
        """Log-scales of all ids of `edges`, given those of ground and units, `(1 + H + H_absorbed,)`."""
        top = max([len(units) - 1, *self.forms])
        log = torch.zeros(top + 1, dtype=torch.float64, device=units.device)
        log[: len(units)] = units
        if self.forms:
            terms = [(node, u, float(c)) for node, form in self.forms.items() for u, c in form]
            nodes, of, coefficients = zip(*terms, strict=True)
            values = log[list(of)] * torch.tensor(coefficients, dtype=torch.float64, device=log.device)
            log.index_add_(0, torch.tensor(nodes, device=log.device), values)
        return log

    @property
    def special(self) -> int:
        """Exact units that skeletons leave out: they have a coefficient other than one somewhere, or scale 1 + w."""
        if not self.forms and not any(e.shift for e in self.edges):
            return 0
        left = ids_of(plain(self.edges, self.forms)).unique()
        return self.H - int(((left > 0) & (left <= self.H)).sum())

    @property
    def invariant_ratio(self) -> float:
        """H/m, the share of directions in weight space that do not change the network."""
        return self.H / self.m if self.m else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything the printed table shows, as plain Python values."""
        counts = {
            name: getattr(self, name)
            for name in ("H", "H_absorbed", "H_paper", "m", "dim", "invariant_ratio", "residual")
        }
        forms = {str(node): [[u, str(c)] for u, c in form] for node, form in self.forms.items()}
        lists = {"units": [vars(g) for g in self.units], "pinned": [vars(p) for p in self.pinned]}
        return {**counts, **lists, "forms": forms, "unseen": dict(self.unseen)}

    def __str__(self) -> str:
        rows = [("units", "kind", "written by", "read by")]
        rows += [(_times(g.count, n), g.kind, ", ".join(g.written), ", ".join(g.read)) for g, n in folded(self.units)]
        lines = aligned(rows) if self.units else ["no unit can be rescaled"]
        lines += [
            "",
            f"m = {self.m:,} weights   H = {self.H:,} units   m − H = {self.dim:,}   H/m = {self.invariant_ratio:.3g}",
        ]
        if self.H_absorbed:
            lines.append(f"norms absorb {self.H_absorbed:,} more, up to their ε")
        if self.special:
            lines.append(f"optimizers leave out {self.special:,} of them, with other powers (as queries and keys)")
        if self.H_paper != self.H - self.special:
            lines.append(f"{self.H_paper:,} units in the paper's view, which optimizers take by default")
        inside = [pin for pin in self.pinned if pin.operation != "output"]
        if inside:
            lines += ["", "pinned:"] + [f"  {pin.told(_times(pin.count, n))}" for pin, n in folded(inside)]
        if self.unseen:
            lines += ["", "not used by the example, so nothing is known of:"]
            lines += [f"  {n:,} weights of {name}" for name, n in self.unseen.items()]
        return "\n".join(lines)


FEW = 4  # groups alike that are still listed one by one


def folded(items: Sequence[T]) -> list[tuple[T, int]]:
    """Groups or pins that repeat from layer to layer as one, numbers in their names as *, and how often they occur.

    A few whose modules have numbers for names, as in `nn.Sequential`, stay apart: a * alone says nothing.

    >>> a, b = (UnitGroup(4, (f"layers.{k}.up",), (f"layers.{k}.down",), "exact") for k in (0, 1))
    >>> folded([a, b])
    [(UnitGroup(count=4, written=('layers.*.up',), read=('layers.*.down',), kind='exact'), 2)]
    """
    found: dict[T, list[T]] = {}
    for item in items:
        texts: dict[str, Any] = {k: starred(v) if isinstance(v, tuple) else v for k, v in vars(item).items()}
        texts |= {k: starred((v,))[0] for k, v in texts.items() if isinstance(v, str)}
        found.setdefault(replace(item, **texts), []).append(item)
    rows: list[tuple[T, int]] = []
    for alike, same in found.items():
        modules = [alike.where] if isinstance(alike, Pin) else [name.rpartition(".")[0] for name in alike.written]
        together = len(same) > (1 if any(map(str.isalpha, "".join(modules))) else FEW)
        rows += [(alike, len(same))] if together else [(item, 1) for item in same]
    return rows


def starred(names: Sequence[str]) -> tuple[str, ...]:
    """Names with their numbers as *, each once."""
    return tuple(dict.fromkeys(re.sub(r"(?<![\w])\d+(?![\w])", "*", name) for name in names))


def _times(count: int, times: int) -> str:
    return str(count) if times == 1 else f"{count} × {times}"


def ids_of(edges: Sequence[Edges]) -> Tensor:
    """Ground, and the ids at both ends of all edges."""
    ends = [t.reshape(-1) for e in edges for t in (e.head, e.tail)]
    return torch.cat([torch.zeros(1, dtype=torch.long, device="cpu"), *ends])


def renumbered(edges: Sequence[Edges], number: Callable[[Tensor], Tensor]) -> tuple[Edges, ...]:
    """The same edges with other ids, all of which are asked for at once."""
    sizes = [t.numel() for e in edges for t in (e.head, e.tail)]
    found = iter(number(ids_of(edges))[1:].split(sizes))  # copies: a part is saved with all of its storage
    return tuple(
        replace(e, head=next(found).reshape(e.head.shape).clone(), tail=next(found).reshape(e.tail.shape).clone())
        for e in edges
    )


def plain(edges: Sequence[Edges], forms: Mapping[int, Form]) -> tuple[Edges, ...]:
    """The same edges where every unit has coefficient one; units that do not, or that shift, are ground."""
    shifted = {u for e in edges if e.shift for u in e.head.unique().tolist()}
    if not forms and not shifted:
        return tuple(edges)
    ground = {u for form in forms.values() for u, c in form if c != 1} | shifted
    number = torch.arange(1 + max([int(ids_of(edges).max()), *forms]))
    for node, form in forms.items():
        left = [u for u, c in form if u not in ground]
        ground.update(left[1:])
        number[node] = left[0] if left else 0
    number[torch.isin(number, torch.tensor(sorted(ground), dtype=torch.long))] = 0
    return renumbered(edges, lambda ids: number[ids])


def aligned(rows: Sequence[tuple[str, ...]], limit: int = 60) -> list[str]:
    """Lines with cells in columns; a cell longer than `limit` is cut."""
    cut = [tuple(cell if len(cell) <= limit else cell[: limit - 1] + "…" for cell in row) for row in rows]
    widths = [max(len(row[i]) for row in cut) for i in range(len(cut[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cut]
