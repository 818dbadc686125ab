"""Solves the equations of a walk: provisional ids that share one scale become one unit, pinned ones ground."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, Edges, Pin, Residual, Statistic, UnitGroup
from gspace.graph.spaces import PinnedAt, Use, Walk


def _components(n: int, ties: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Smallest id of the connected component of each of `n` ids."""
    label = torch.arange(n)
    if not ties:
        return label
    a, b = torch.cat([t[0] for t in ties]), torch.cat([t[1] for t in ties])
    while True:
        low = torch.minimum(label[a], label[b])
        new = label.scatter_reduce(0, label[a], low, "amin").scatter_reduce(0, label[b], low, "amin")
        while not torch.equal(new, new[new]):
            new = new[new]
        if torch.equal(new, label):
            return label
        label = new


def _parameter_constraints(walk: Walk) -> tuple[dict[str, list[Use]], list[tuple[Tensor, Tensor]], list[PinnedAt]]:
    """A parameter used twice ties its uses; used in two layouts, or in a way no rule knows, it pins them."""
    uses: dict[str, list[Use]] = {}
    for use in walk.uses:
        uses.setdefault(use.name, []).append(use)
    ties: list[tuple[Tensor, Tensor]] = []
    pins: list[PinnedAt] = []
    for name, listed in uses.items():
        first = listed[0]
        alike = all(
            u.swap == first.swap and u.head.shape == first.head.shape and u.tail.shape == first.tail.shape
            for u in listed
        )
        ids = torch.cat([t.reshape(-1) for u in listed for t in (u.head, u.tail)])
        if name in walk.misused:
            why = walk.misused[name]
            pins.append(PinnedAt(ids, why.operation, why.where, f"{name}: {why.reason}"))
        elif not alike:
            pins.append(PinnedAt(ids, "shared", name, "used in two layouts (once transposed)"))
        for u in listed[1:] if alike else ():
            ties += [(first.head.reshape(-1), u.head.reshape(-1)), (first.tail.reshape(-1), u.tail.reshape(-1))]
    statistics: dict[str, Tensor] = {}
    for norm in walk.norms:
        for name, _ in norm.statistics:
            if name in walk.misused:
                pins.append(
                    PinnedAt(
                        norm.absorbed, walk.misused[name].operation, name, "its running statistic is read elsewhere"
                    )
                )
            ties.append((statistics.setdefault(name, norm.absorbed), norm.absorbed))
    return uses, ties, pins


def assemble(walk: Walk, model: nn.Module, residual: Residual) -> Analysis:
    uses, ties, parameter_pins = _parameter_constraints(walk)
    pins = walk.pins + parameter_pins
    ties = walk.ties + ties + [(p.ids, torch.zeros_like(p.ids)) for p in pins]
    grounded_norms = [(n.written, torch.zeros_like(n.written)) for n in walk.norms if not n.affine]
    exact = _components(walk.count, ties + grounded_norms)
    transparent = _components(walk.count, ties + [(n.absorbed, n.written) for n in walk.norms])
    absorbed = torch.zeros(walk.count, dtype=torch.bool)
    for norm in walk.norms:
        absorbed[exact[norm.absorbed]] = True
    into_norm = torch.zeros(walk.count, dtype=torch.bool)
    for norm in walk.norms:
        into_norm[norm.absorbed] = True
    into_norm[0] = False

    kept = {name: [u for u in listed if not u.affine] for name, listed in uses.items()}
    exact_number, H, H_absorbed = _number(exact, uses, absorbed)
    paper_number, H_paper, _ = _number(transparent, kept, torch.zeros_like(absorbed))
    edges = _edges(uses, exact_number[exact], into_norm)
    statistics = {
        name: Statistic(name, exact_number[exact[n.absorbed]], power)
        for n in walk.norms
        for name, power in n.statistics
    }
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    m = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Analysis(
        H=H,
        H_absorbed=H_absorbed,
        H_paper=H_paper,
        m=m,
        dim=m - H + sum(1 for u in _frozen(edges, trainable) if 0 < u <= H),
        edges=edges,
        transparent=_edges(kept, paper_number[transparent], into_norm),
        statistics=tuple(statistics.values()),
        units=_groups(edges, H, H + H_absorbed),
        pinned=_pinned(pins),
        residual=residual,
    )


def _frozen(edges: Sequence[Edges], trainable: set[str]) -> set[int]:
    """Units that touch a frozen parameter."""
    ids = [t.reshape(-1) for e in edges if e.name not in trainable for t in (e.head, e.tail)]
    return set(torch.cat(ids).unique().tolist()) if ids else set()


def _number(label: Tensor, uses: dict[str, list[Use]], last: Tensor) -> tuple[Tensor, int, int]:
    """New ids by component: ground 0, then the components that edges touch in order of use, those in `last` behind."""
    touched = [t.reshape(-1) for listed in uses.values() for u in listed for t in (u.head, u.tail)]
    number = torch.zeros(len(label), dtype=torch.long)
    if not touched:
        return number, 0, 0
    ids = label[torch.cat(touched)].unique()
    ids = ids[ids > 0]
    front, back = ids[~last[ids]], ids[last[ids]]
    number[torch.cat([front, back])] = torch.arange(1, len(ids) + 1)
    return number, len(front), len(back)


def _edges(uses: dict[str, list[Use]], unit: Tensor, into_norm: Tensor) -> tuple[Edges, ...]:
    result = []
    for name, listed in uses.items():
        if listed:
            use, positions = listed[0], [u.position for u in listed]
            normalized = any(bool(into_norm[u.head].all()) for u in listed)
            head, tail = unit[use.head], unit[use.tail]
            result.append(Edges(name, head, tail, use.swap, normalized, min(positions), max(positions)))
    return tuple(result)


def _groups(edges: Sequence[Edges], H: int, total: int) -> tuple[UnitGroup, ...]:
    """Groups units by who writes and who reads them: each parameter adds a random signature to its units."""
    generator = torch.Generator().manual_seed(0)
    signature = torch.zeros(total + 1, 2, dtype=torch.long)
    for e in edges:
        for column, ids in enumerate((e.head, e.tail)):
            signature[ids.unique(), column] += torch.randint(1 << 60, (1,), generator=generator)
    kind = (torch.arange(total + 1) > H).long()
    keys, inverse, counts = torch.cat([signature, kind[:, None]], 1)[1:].unique(
        dim=0, return_inverse=True, return_counts=True
    )
    first = torch.full((len(keys),), total, dtype=torch.long).scatter_reduce(0, inverse, torch.arange(total), "amin")
    units = first[first.argsort()] + 1  # one of each group
    place = torch.full((total + 1,), -1).index_put((units,), torch.arange(len(units)))
    names: list[tuple[list[str], list[str]]] = [([], []) for _ in units]  # who writes and who reads it
    for e in edges:
        for column, ids in enumerate((e.head, e.tail)):
            for k in place[ids.unique()].tolist():
                if k >= 0:
                    names[k][column].append(e.name)
    groups = []
    for u, count, (written, read) in zip(units.tolist(), counts[first.argsort()].tolist(), names, strict=True):
        groups.append(UnitGroup(count, tuple(written), tuple(read), "absorbed" if u > H else "exact"))
    return tuple(groups)


def _pinned(pins: Sequence[PinnedAt]) -> tuple[Pin, ...]:
    merged: dict[tuple[str, str, str], set[int]] = {}
    for pin in pins:
        ids = set(pin.ids.unique().tolist()) - {0}
        if ids:
            merged.setdefault((pin.operation, pin.where, pin.reason), set()).update(ids)
    return tuple(Pin(operation, where, len(ids), reason) for (operation, where, reason), ids in merged.items())
