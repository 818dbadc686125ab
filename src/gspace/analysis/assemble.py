"""From the equations of a run to an `Analysis`: free nodes become units, everything else a linear form of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from gspace.analysis.equations import ANY, Equations, pairs, squash
from gspace.analysis.follow import Follow
from gspace.analysis.memory import key_of
from gspace.analysis.result import Analysis, Edges, Form, Pin, Residual, Statistic, UnitGroup, ids_of, plain, renumbered
from gspace.analysis.weights import Leaf, layout

APART = "its entries are not in order in memory: contiguous() would do"
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

    def inside(self, ids: Iterable[Tensor]) -> frozenset[int]:
        """Units that these are, or are linear forms of."""
        found = torch.cat([NONE, *(t.reshape(-1) for t in ids)]).unique().tolist()
        return frozenset(u for i in found for u, _ in self.forms.get(i, ((i, 1),)) if u)


def assemble(follow: Follow, model: nn.Module, residual: Residual) -> Analysis:
    names, norms = dict(model.named_parameters()), follow.norms.values()
    known = {id(p): name for name, p in names.items()}
    unseen = {known[id(p)]: p.numel() for p in follow.unread()}
    leaves = _edges(follow, known, unseen)
    nodes, transparent, exact = list(leaves.values()), _transparent(follow), follow.equations
    exact.ground(*(norm.written for norm in norms if not norm.affine))
    absorbed = [*follow.absorbed, *(norm.absorbed for norm in norms)]
    units = _number(exact, nodes, absorbed, [nodes for nodes, _ in follow.statistics.values()])
    edges, H, total = renumbered(nodes, units.of), units.exact, units.exact + units.absorbed
    paper_nodes = [e for leaf, e in leaves.items() if "edge" in leaf.kinds]
    paper = _number(transparent, paper_nodes, (), ())
    paper_edges = plain(renumbered(paper_nodes, paper.of), paper.forms)
    paper_units = ids_of(paper_edges).unique()
    H_paper, gaps = len(paper_units) - 1, int(paper_units[-1]) >= len(paper_units)
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
        transparent=renumbered(paper_edges, lambda ids: torch.searchsorted(paper_units, ids)) if gaps else paper_edges,
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
        passes={kind: units.inside([units.of(torch.cat(nodes))]) for kind, nodes in follow.passed.items()},
    )


def _transparent(follow: Follow) -> Equations:
    """The view of the paper: BatchNorm is not there, and a weight that is used twice has one head and one tail."""
    equations = follow.equations.copy()
    for norm in follow.norms.values():
        equations.tie(norm.absorbed, norm.written)
    shifted = [leaf.head.content for leaf in follow.positions if leaf.shift]
    equations.ground(*follow.absorbed, *follow.untrained, *shifted)  # what other norms divide out is exact at no ε
    for first, second in follow.weights.repeats:
        given = zip(first, second, strict=True)
        least = [[squash(equations.find(t))[0].shape for t in use] for use in (first, second)]  # parts are kept whole
        if all(a.shape == b.shape for a, b in given) or least[0] == least[1]:
            for one, other in zip(first, second, strict=True):
                equations.tie(one, other)
        else:
            equations.ground(*first, *second)
    return equations


def _edges(follow: Follow, names: Mapping[int, str], unseen: dict[str, int]) -> dict[Leaf, Edges]:
    """The parameters that are edges between nodes, in the order of their first use; adds to `unseen`."""
    equations, edges = follow.equations, {}
    into_norm = torch.zeros(equations.count, dtype=torch.bool)
    for norm in follow.norms.values():
        into_norm[equations.find(norm.absorbed)] = True
    into_norm[: ANY + 1] = False
    for leaf, position in follow.positions.items():
        if not leaf.kinds & {"edge", "norm"}:
            continue
        name, found = names[id(leaf.parameter)], layout(leaf, equations)
        if found is None:
            follow.pins.append(Pin("view", name, min(leaf.place[0][:2]), "too many parts to be followed one by one"))
            equations.ground(leaf.head.content, leaf.tail.content)
            continue
        head, tail, swap, missing = found
        unseen.update({name: missing} if missing else {})
        normalized = bool(follow.norms) and bool(into_norm[equations.find(leaf.head.content)].all())
        made = Edges(name, head, tail, swap, normalized, *position, leaf.shift)
        if made.lies_apart(leaf.parameter):
            follow.pins.append(Pin("view", name, min(leaf.place[0][:2]), APART))
            equations.ground(leaf.head.content, leaf.tail.content)
            continue
        edges[leaf] = made
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
    plain, linked = _split(equations, [ids_of(edges), *others])
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


def members(edges: Sequence[Edges], H: int, total: int, forms: Mapping[int, Form]) -> dict[UnitGroup, list[int]]:
    """Units 1…total by who writes and who reads them. Each side of a parameter adds a random signature to its units."""
    side, unit = _sides(edges, total, forms)
    drawn = torch.randint(1 << 60, (2 * len(edges),), generator=torch.Generator().manual_seed(0))
    signature = (torch.arange(total + 1) > H).long().index_add(0, unit, drawn[side])
    member = signature[1:].unique(return_inverse=True)[1]
    parts = (member.argsort(stable=True) + 1).split(member.bincount().tolist())
    groups = {units[0]: units for units in sorted(part.tolist() for part in parts)}
    names: dict[int, tuple[list[str], list[str]]] = {u: ([], []) for u in groups}
    first = torch.isin(unit, torch.tensor([*groups], dtype=torch.long))
    for s, u in zip(side[first].tolist(), unit[first].tolist(), strict=True):
        names[u][s % 2].append(edges[s // 2].name)
    kinds: dict[bool, Literal["exact", "absorbed"]] = {False: "exact", True: "absorbed"}
    return {UnitGroup(len(g), tuple(names[u][0]), tuple(names[u][1]), kinds[u > H]): g for u, g in groups.items()}


def _sides(edges: Sequence[Edges], total: int, forms: Mapping[int, Form]) -> tuple[Tensor, Tensor]:
    """Pairs of a side and a unit, each once: side 2·k is what parameter k grows with, 2·k + 1 what it shrinks with."""
    sizes = torch.tensor([t.numel() for e in edges for t in (e.head, e.tail)], dtype=torch.long)
    side, unit = pairs(torch.arange(len(sizes)).repeat_interleave(sizes), ids_of(edges)[1:])[0]
    linked = zip(side[unit > total].tolist(), unit[unit > total].tolist(), strict=True)
    behind = [(s if c > 0 else s ^ 1, u) for s, node in linked for u, c in forms[node]]
    here = (unit > 0) & (unit <= total)
    sides, units = torch.tensor(behind, dtype=torch.long).reshape(-1, 2).unbind(1)
    return pairs(torch.cat([side[here], sides]), torch.cat([unit[here], units]))[0]


def _pinned(pins: Sequence[Pin]) -> tuple[Pin, ...]:
    """Pins alike as one."""
    merged: dict[Pin, int] = {}
    for pin in pins:
        alike = replace(pin, count=0)
        merged[alike] = merged.get(alike, 0) + pin.count
    return tuple(replace(alike, count=count) for alike, count in merged.items())
