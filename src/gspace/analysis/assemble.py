"""From the equations of a run to an `Analysis`: free nodes become units, everything else a linear form of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gspace.analysis.equations import ANY, Equations
from gspace.analysis.follow import Follow
from gspace.analysis.memory import key_of
from gspace.analysis.result import Analysis, Edges, Form, Pin, Residual, Statistic, UnitGroup, plain
from gspace.analysis.weights import layout


class Units(NamedTuple):
    """Numbers of units: 0 ground, then exact ones, absorbed ones, and behind them linear forms of those."""

    equations: Equations
    table: Tensor
    exact: int
    absorbed: int
    forms: dict[int, Form]

    def of(self, nodes: Tensor) -> Tensor:
        return self.table[self.equations.find(nodes)]

    def edges(self, edges: Sequence[Edges]) -> tuple[Edges, ...]:
        return tuple(replace(e, head=self.of(e.head), tail=self.of(e.tail)) for e in edges)


def assemble(follow: Follow, model: nn.Module, residual: Residual) -> Analysis:
    names, exact, transparent = dict(model.named_parameters()), follow.equations, _transparent(follow)
    for norm in follow.norms.values():
        if not norm.affine:
            exact.ground(norm.written)
    unseen = {name: names[name].numel() for name in unread(follow, model)}
    nodes = _edges(follow, names, exact, unseen, {"edge", "norm"})
    absorbed = [*follow.absorbed, *(norm.absorbed for norm in follow.norms.values())]
    units = _number(exact, nodes, absorbed, [nodes for nodes, _ in follow.statistics.values()])
    edges, H = units.edges(nodes), units.exact
    paper_nodes = _edges(follow, names, transparent, {}, {"edge"})
    paper = _number(transparent, paper_nodes, (), ())
    paper_edges, H_paper = _compact(plain(paper.edges(paper_nodes), paper.forms))
    buffers = {key_of(b): name for name, b in model.named_buffers()}
    m = sum(p.numel() for p in names.values() if p.requires_grad)
    return Analysis(
        H=H,
        H_absorbed=units.absorbed,
        H_paper=H_paper,
        m=m,
        dim=m - H + sum(1 for u in _frozen(edges, names, units.forms) if 0 < u <= H),
        edges=edges,
        transparent=paper_edges,
        statistics=tuple(
            Statistic(buffers[key], units.of(nodes), power)
            for key, (nodes, power) in follow.statistics.items()
            if key in buffers
        ),
        units=groups(edges, H, H + units.absorbed, units.forms),
        pinned=_pinned(follow.pins),
        residual=residual,
        forms=units.forms,
        unseen=unseen,
        passes=_passes(follow, units),
    )


def _passes(follow: Follow, units: Units) -> dict[str, frozenset[int]]:
    """Units that go through an operation, linear forms as the units in them."""
    found = {}
    for kind, nodes in follow.passed.items():
        ids = set(units.of(torch.cat(nodes)).tolist())
        found[kind] = frozenset(u for i in ids for u, _ in units.forms.get(i, ((i, 1),)) if u)
    return found


def unread(follow: Follow, model: nn.Module) -> list[str]:
    """Parameters that no run has read."""
    unused = {id(leaf.parameter) for leaves in follow.weights.leaves.values() for leaf in leaves if not leaf.kinds}
    return [name for name, p in model.named_parameters() if p.numel() and id(p) in unused]


def _transparent(follow: Follow) -> Equations:
    """The view of the paper: BatchNorm is not there, and a weight that is used twice has one head and one tail."""
    equations = follow.equations.copy()
    for norm in follow.norms.values():
        equations.tie(norm.absorbed, norm.written)
    for nodes in [*follow.absorbed, *follow.untrained]:  # what other norms divide out is no symmetry at their ε
        equations.ground(nodes)
    for first, second in follow.weights.repeats:
        if [t.shape for t in first] == [t.shape for t in second]:
            for one, other in zip(first, second, strict=True):
                equations.tie(one, other)
        else:
            for t in (*first, *second):
                equations.ground(t)
    for leaf in follow.positions:
        if leaf.shift:
            equations.ground(leaf.head.content)
    return equations


def _edges(
    follow: Follow, names: Mapping[str, Tensor], equations: Equations, unseen: dict[str, int], kinds: set[str]
) -> list[Edges]:
    """The parameters that are edges between nodes, in the order of their first use; adds to `unseen`."""
    into_norm = torch.zeros(follow.equations.count, dtype=torch.bool)
    for norm in follow.norms.values():
        into_norm[follow.equations.find(norm.absorbed)] = True
    into_norm[: ANY + 1] = False
    edges = []
    known = {id(p): name for name, p in names.items()}
    for leaf, position in follow.positions.items():
        if not leaf.kinds & kinds:
            continue
        name, found = known[id(leaf.parameter)], layout(leaf, equations)
        if found is None:
            follow.pins.append(Pin("view", name, min(leaf.place[0][:2]), "too many parts to be followed one by one"))
            equations.ground(torch.cat([plane.content.reshape(-1) for plane in (leaf.head, leaf.tail)]))
            continue
        head, tail, swap, missing = found
        unseen.update({name: missing} if missing else {})
        normalized = bool(into_norm[follow.equations.find(leaf.head.content)].all())
        edges.append(Edges(name, head, tail, swap, normalized, *position, leaf.shift))
    return edges


def _number(
    equations: Equations, edges: Sequence[Edges], absorbed: Sequence[Tensor], others: Sequence[Tensor]
) -> Units:
    """Numbers the free nodes that parameters touch, oldest first; those that an ε absorbs come last."""
    touched = [t.reshape(-1) for t in (*(t for e in edges for t in (e.head, e.tail)), *others)]
    none = torch.zeros(0, dtype=torch.long)
    ids = equations.find(torch.cat([*absorbed, none])).unique()
    ids = ids[ids > ANY]
    last = set(ids[~equations.linked[ids]].tolist())
    for node in ids[equations.linked[ids]].tolist():
        form = dict(equations.form(node))
        free_terms = [j for j in form if j not in last]
        if len(form) == 1:
            last.update(form)
        elif free_terms:  # the sum itself becomes the absorbed unit, in place of one of its terms
            unit, pivot = int(equations.fresh(1)), max(free_terms)
            c = form.pop(pivot)
            equations.define(pivot, {unit: Fraction(1) / c, **{j: Fraction(-k) / c for j, k in form.items()}})
            last.add(unit)
    ids = equations.find(torch.cat([*touched, none])).unique()
    ids = ids[ids > ANY]
    plain = ids[~equations.linked[ids]]
    forms = {node: equations.form(node) for node in ids[equations.linked[ids]].tolist()}
    inside = torch.tensor(sorted({j for form in forms.values() for j in form}), dtype=torch.long)
    free = torch.cat([plain, inside]).unique()
    late = torch.isin(free, torch.tensor(sorted(last), dtype=torch.long))
    ordered = torch.cat([free[~late], free[late]])
    table = torch.zeros(equations.count, dtype=torch.long)
    table[ordered] = torch.arange(1, len(ordered) + 1)
    behind: dict[int, Form] = {}
    known: dict[Form, int] = {}
    for node, form in forms.items():
        written = tuple(sorted((int(table[j]), c) for j, c in form.items()))
        if len(written) == 1 and written[0][1] == 1:
            table[node] = written[0][0]
        elif written:
            number = known.setdefault(written, len(ordered) + 1 + len(known))
            table[node], behind[number] = number, written
    return Units(equations, table, len(ordered) - int(late.sum()), int(late.sum()), behind)


def _compact(edges: Sequence[Edges]) -> tuple[tuple[Edges, ...], int]:
    """The same edges, units numbered without gaps, and how many there are."""
    sides = [t.reshape(-1) for e in edges for t in (e.head, e.tail)]
    units = torch.cat([torch.zeros(1, dtype=torch.long), *sides]).unique()
    number = torch.zeros(int(units.max()) + 1, dtype=torch.long)
    number[units] = torch.arange(len(units))
    return tuple(replace(e, head=number[e.head], tail=number[e.tail]) for e in edges), len(units) - 1


def _frozen(edges: Sequence[Edges], parameters: Mapping[str, Tensor], forms: Mapping[int, Form]) -> set[int]:
    """Units that touch a frozen parameter."""
    ids = [t.reshape(-1) for e in edges if not parameters[e.name].requires_grad for t in (e.head, e.tail)]
    found = set(torch.cat(ids).unique().tolist()) if ids else set()
    return found.union(*({u for u, _ in forms[node]} for node in found if node in forms))


def membership(edges: Sequence[Edges], H: int, total: int, forms: Mapping[int, Form]) -> Tensor:
    """The group of each unit 1…total, by who writes and who reads it: groups are numbered by their first units.

    Each parameter adds a random signature to its units.
    """
    generator = torch.Generator().manual_seed(0)
    signature = (torch.arange(total + 1) > H).long()
    for e in edges:
        for ids in _sides(e, total, forms):
            signature[ids] += torch.randint(1 << 60, (1,), generator=generator)
    keys, inverse = signature[1:].unique(return_inverse=True)
    first = torch.full((len(keys),), total, dtype=torch.long).scatter_reduce(0, inverse, torch.arange(total), "amin")
    return first.argsort().argsort()[inverse]


def groups(edges: Sequence[Edges], H: int, total: int, forms: Mapping[int, Form]) -> tuple[UnitGroup, ...]:
    """Units that are written and read by the same parameters."""
    member = membership(edges, H, total, forms)
    counts = member.bincount()
    units = torch.full((len(counts),), total).scatter_reduce(0, member, torch.arange(total), "amin") + 1
    place = torch.full((total + 1,), -1).index_put((units,), torch.arange(len(units)))
    names: list[tuple[list[str], list[str]]] = [([], []) for _ in units]  # who writes and who reads it
    for e in edges:
        for column, ids in enumerate(_sides(e, total, forms)):
            for k in place[ids].tolist():
                if k >= 0:
                    names[k][column].append(e.name)
    found = []
    for u, count, (written, read) in zip(units.tolist(), counts.tolist(), names, strict=True):
        found.append(UnitGroup(count, tuple(written), tuple(read), "absorbed" if u > H else "exact"))
    return tuple(found)


def _sides(e: Edges, total: int, forms: Mapping[int, Form]) -> tuple[Tensor, Tensor]:
    """Units that a parameter grows with, and units that it shrinks with."""
    sides = [side.unique() for side in (e.head, e.tail)]
    found = [[side[(side > 0) & (side <= total)]] for side in sides]
    for column, side in enumerate(sides):
        terms = [term for node in side[side > total].tolist() for term in forms[node]]
        for v, c in terms:
            found[column if c > 0 else 1 - column].append(torch.tensor([v]))
    return torch.cat(found[0]).unique(), torch.cat(found[1]).unique()


def _pinned(pins: Sequence[Pin]) -> tuple[Pin, ...]:
    """Pins alike as one."""
    merged: dict[Pin, int] = {}
    for pin in pins:
        alike = replace(pin, count=0)
        merged[alike] = merged.get(alike, 0) + pin.count
    return tuple(replace(alike, count=count) for alike, count in merged.items())
