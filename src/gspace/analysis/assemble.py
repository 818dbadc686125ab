"""From the equations of a run to an `Analysis`: free nodes become units, everything else a linear form of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from gspace.analysis.equations import ANY, Equations
from gspace.analysis.follow import Follow
from gspace.analysis.memory import key_of
from gspace.analysis.result import Analysis, Edges, Form, Pin, Residual, Statistic, UnitGroup, plain
from gspace.analysis.weights import layout

NONE = torch.zeros(0, dtype=torch.long, device="cpu")


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

    def inside(self, ids: Iterable[Tensor]) -> frozenset[int]:
        """Units that these are, or are linear forms of."""
        found = torch.cat([NONE, *(t.reshape(-1) for t in ids)]).unique().tolist()
        return frozenset(u for i in found for u, _ in self.forms.get(i, ((i, 1),)) if u)


def assemble(follow: Follow, model: nn.Module, residual: Residual) -> Analysis:
    names, exact, transparent = dict(model.named_parameters()), follow.equations, _transparent(follow)
    norms = follow.norms.values()
    exact.ground(*(norm.written for norm in norms if not norm.affine))
    known = {id(p): name for name, p in names.items()}
    unseen = {known[id(p)]: p.numel() for p in follow.unread()}
    nodes = _edges(follow, known, exact, unseen, {"edge", "norm"})
    absorbed = [*follow.absorbed, *(norm.absorbed for norm in norms)]
    units = _number(exact, nodes, absorbed, [nodes for nodes, _ in follow.statistics.values()])
    edges, H, total = units.edges(nodes), units.exact, units.exact + units.absorbed
    paper_nodes = _edges(follow, known, transparent, {}, {"edge"})
    paper = _number(transparent, paper_nodes, (), ())
    paper_edges, H_paper = _compact(plain(paper.edges(paper_nodes), paper.forms))
    buffers = {key_of(b): name for name, b in model.named_buffers()}
    m = sum(p.numel() for p in names.values() if p.requires_grad)
    frozen = units.inside(t for e in edges if not names[e.name].requires_grad for t in (e.head, e.tail))
    return Analysis(
        H=H,
        H_absorbed=units.absorbed,
        H_paper=H_paper,
        m=m,
        dim=m - H + sum(u <= H for u in frozen),
        edges=edges,
        transparent=paper_edges,
        statistics=tuple(
            Statistic(buffers[key], units.of(nodes), power)
            for key, (nodes, power) in follow.statistics.items()
            if key in buffers
        ),
        units=tuple(members(edges, H, total, units.forms)),
        pinned=_pinned(follow.pins),
        residual=residual,
        forms=units.forms,
        unseen=unseen,
        passes={kind: units.inside(map(units.of, nodes)) for kind, nodes in follow.passed.items()},
    )


def _transparent(follow: Follow) -> Equations:
    """The view of the paper: BatchNorm is not there, and a weight that is used twice has one head and one tail."""
    equations = follow.equations.copy()
    for norm in follow.norms.values():
        equations.tie(norm.absorbed, norm.written)
    shifted = [leaf.head.content for leaf in follow.positions if leaf.shift]
    equations.ground(*follow.absorbed, *follow.untrained, *shifted)  # what other norms divide out is exact at no ε
    for first, second in follow.weights.repeats:
        if [t.shape for t in first] == [t.shape for t in second]:
            for one, other in zip(first, second, strict=True):
                equations.tie(one, other)
        else:
            equations.ground(*first, *second)
    return equations


def _edges(
    follow: Follow, names: Mapping[int, str], equations: Equations, unseen: dict[str, int], kinds: set[str]
) -> list[Edges]:
    """The parameters that are edges between nodes, in the order of their first use; adds to `unseen`."""
    into_norm = torch.zeros(follow.equations.count, dtype=torch.bool)
    for norm in follow.norms.values():
        into_norm[follow.equations.find(norm.absorbed)] = True
    into_norm[: ANY + 1] = False
    edges = []
    for leaf, position in follow.positions.items():
        if not leaf.kinds & kinds:
            continue
        name, found = names[id(leaf.parameter)], layout(leaf, equations)
        if found is None:
            follow.pins.append(Pin("view", name, min(leaf.place[0][:2]), "too many parts to be followed one by one"))
            equations.ground(leaf.head.content, leaf.tail.content)
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
    plain, linked = _split(equations, absorbed)
    last = set(plain.tolist())
    for node in linked:
        form = dict(equations.form(node))
        free_terms = [j for j in form if j not in last]
        if len(form) == 1:
            last.update(form)
        elif free_terms:  # the sum itself becomes the absorbed unit, in place of one of its terms
            unit, pivot = int(equations.fresh(1)), max(free_terms)
            c = form.pop(pivot)
            equations.define(pivot, {unit: Fraction(1) / c, **{j: Fraction(-k) / c for j, k in form.items()}})
            last.add(unit)
    plain, linked = _split(equations, [*(t for e in edges for t in (e.head, e.tail)), *others])
    forms = {node: equations.form(node) for node in linked}
    inside = torch.tensor(sorted({j for form in forms.values() for j in form}), dtype=torch.long)
    free = torch.cat([plain, inside]).unique()
    late = torch.isin(free, torch.tensor(sorted(last), dtype=torch.long))
    ordered = torch.cat([free[~late], free[late]])
    table = torch.zeros(equations.count, dtype=torch.long)
    table[ordered] = torch.arange(1, len(ordered) + 1)
    behind: dict[Form, int] = {}
    for node, form in forms.items():
        written = tuple(sorted((int(table[j]), c) for j, c in form.items()))
        if len(written) == 1 and written[0][1] == 1:
            table[node] = written[0][0]
        elif written:
            table[node] = behind.setdefault(written, len(ordered) + 1 + len(behind))
    absent = int(late.sum())
    return Units(equations, table, len(ordered) - absent, absent, {number: form for form, number in behind.items()})


def _split(equations: Equations, nodes: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """The classes of nodes: free ones, and those that are linear forms."""
    ids = equations.find(torch.cat([NONE, *(t.reshape(-1) for t in nodes)])).unique()
    ids = ids[ids > ANY]
    return ids[~equations.linked[ids]], ids[equations.linked[ids]].tolist()


def _compact(edges: Sequence[Edges]) -> tuple[tuple[Edges, ...], int]:
    """The same edges, units numbered without gaps, and how many there are."""
    sides = [t.reshape(-1) for e in edges for t in (e.head, e.tail)]
    units = torch.cat([torch.zeros(1, dtype=torch.long), *sides]).unique()
    number = torch.zeros(int(units.max()) + 1, dtype=torch.long)
    number[units] = torch.arange(len(units))
    return tuple(replace(e, head=number[e.head], tail=number[e.tail]) for e in edges), len(units) - 1


def members(edges: Sequence[Edges], H: int, total: int, forms: Mapping[int, Form]) -> dict[UnitGroup, list[int]]:
    """Units 1…total by who writes and who reads them. Each parameter adds a random signature to its units."""
    generator = torch.Generator().manual_seed(0)
    signature = (torch.arange(total + 1) > H).long()
    sides = [(e.name, column, ids) for e in edges for column, ids in enumerate(_sides(e, total, forms))]
    for _, _, ids in sides:
        signature[ids] += torch.randint(1 << 60, (1,), generator=generator)
    member = signature[1:].unique(return_inverse=True)[1]
    parts = (member.argsort(stable=True) + 1).split(member.bincount().tolist())
    groups = {units[0]: units for units in sorted(part.tolist() for part in parts)}
    names: dict[int, tuple[list[str], list[str]]] = {u: ([], []) for u in groups}
    first = torch.zeros(total + 1, dtype=torch.bool).index_fill(0, torch.tensor([*groups], dtype=torch.long), True)
    for name, column, ids in sides:
        for u in ids[first[ids]].tolist():
            names[u][column].append(name)
    kinds: dict[bool, Literal["exact", "absorbed"]] = {False: "exact", True: "absorbed"}
    return {UnitGroup(len(g), tuple(names[u][0]), tuple(names[u][1]), kinds[u > H]): g for u, g in groups.items()}


def _sides(e: Edges, total: int, forms: Mapping[int, Form]) -> Iterator[Tensor]:
    """Units that a parameter grows with, and units that it shrinks with."""
    head, tail = e.head.unique(), e.tail.unique()
    for side, other in ((head, tail), (tail, head)):
        behind = [u for node in side[side > total].tolist() for u, c in forms[node] if c > 0]
        behind += [u for node in other[other > total].tolist() for u, c in forms[node] if c < 0]
        yield torch.cat([side[(side > 0) & (side <= total)], torch.tensor(behind, dtype=torch.long)]).unique()


def _pinned(pins: Sequence[Pin]) -> tuple[Pin, ...]:
    """Pins alike as one."""
    merged: dict[Pin, int] = {}
    for pin in pins:
        alike = replace(pin, count=0)
        merged[alike] = merged.get(alike, 0) + pin.count
    return tuple(replace(alike, count=count) for alike, count in merged.items())
