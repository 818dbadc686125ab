"""model → graph: every positive rescaling that leaves the function of a network unchanged (Sec. 3.1 of the paper).

`analyze` traces the model, walks the graph, and solves the collected equations: provisional ids that must share one
scale become one unit, and those that must keep their scale become ground, unit 0. Two views come out of one walk
(they differ only with BatchNorm, see docs/theory.md): *exact*, where a BatchNorm divides the scale of its rows out and
γ, β write the unit, and *transparent*, where BatchNorm is ignored, as in the paper.

Shapes: `head` is `(group, out)`, `tail` is `(group, in)`, a parameter is viewed as `(group, out, in, *taps)`.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gspace.devices import on_cpu
from gspace.spaces import PinnedAt, Use, Walk
from gspace.trace import Inputs, Traced, trace, unwrap
from gspace.walk import Walker

Residual = Literal["pin", "tie"]


@dataclass(frozen=True)
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
    """

    name: str
    head: Tensor
    tail: Tensor
    swap: bool
    normalized: bool
    first: int
    last: int

    def fits(self, parameter: Tensor) -> bool:
        """Whether `parameter` has this many outputs and inputs."""
        try:
            return self.view(parameter).shape[:3] == (*self.head.shape, self.tail.shape[1])
        except RuntimeError:  # it cannot be divided so
            return False

    def view(self, parameter: Tensor) -> Tensor:
        """`parameter` as `(group, out, in, *taps)`, without a copy whatever its strides."""
        if parameter.numel() == 0:
            return parameter.reshape(*self.head.shape, self.tail.shape[1])
        if parameter.dim() != 1 and self.head.numel() != parameter.numel():
            split = parameter.unflatten(0, (self.head.shape[0], -1))
            return split.transpose(1, 2) if self.swap else split
        return parameter.reshape(*self.head.shape, 1)


def magnitude(weight: Tensor) -> Tensor:
    """|w| in float64; complex weights have one too, though no scale of their own."""
    return (weight if weight.is_complex() else weight.double()).abs().double()


@dataclass(frozen=True)
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
        return f"{self.count} channels at {self.where} ({self.operation}): {self.reason}"


@dataclass(frozen=True)
class Analysis:
    """The rescaling symmetry of a model. Holds names and unit ids, no reference to the model.

    Attributes:
        H: Hidden units whose scale is free, exactly.
        H_absorbed: Rows whose scale a BatchNorm divides out (exact as its ε → 0).
        H_paper: Units when BatchNorm is ignored, the count of the paper.
        m: Trainable scalars.
        dim: m minus the units whose weights are all trainable: the dimension of G-space.
        edges: The exact view; units 1…H are exact, H + 1…H + H_absorbed absorbed.
        transparent: The view of the paper, units 1…H_paper.
        statistics: Running statistics that follow absorbed units.
        units: Groups of units alike, in the order they are written.
        pinned: What is not scaled, and the operation that pinned it.
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
    residual: Residual = "pin"

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
        return {**counts, "units": [vars(g) for g in self.units], "pinned": [vars(p) for p in self.pinned]}

    def __str__(self) -> str:
        rows = [("units", "kind", "written by", "read by")]
        rows += [(str(g.count), g.kind, ", ".join(g.written), ", ".join(g.read)) for g in self.units]
        lines = _aligned(rows)
        lines += [
            "",
            f"m = {self.m:,} weights   H = {self.H:,} units   m − H = {self.dim:,}   H/m = {self.invariant_ratio:.3g}",
        ]
        if self.H_absorbed or self.H_paper != self.H:
            lines.append(
                f"BatchNorm: {self.H_absorbed:,} absorbed rows; {self.H_paper:,} units where it is ignored (the paper)"
            )
        if self.pinned:
            lines += ["", "pinned:"] + [f"  {pin}" for pin in self.pinned]
        return "\n".join(lines)


def _aligned(rows: Sequence[tuple[str, ...]], limit: int = 60) -> list[str]:
    cut = [tuple(cell if len(cell) <= limit else cell[: limit - 1] + "…" for cell in row) for row in rows]
    widths = [max(len(row[i]) for row in cut) for i in range(len(cut[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cut]


def analyze(
    model: nn.Module,
    example_input: Inputs | None = None,
    *,
    residual: Residual = "pin",
    pin: Iterable[str] = (),
) -> Analysis:
    """Finds every positive rescaling of `model` that leaves its function unchanged.

    Args:
        model: Any module; wrappers (`DataParallel`, `torch.compile`) are looked through.
        example_input: A batch the model accepts (tensor, tuple or dict). With one, sizes are known, and
            `torch.export` follows what symbolic tracing cannot. Without one, four things are taken for granted:
            images come in batches, what a linear layer hands to a BatchNorm1d is a matrix, what an Embedding reads is
            (batch, tokens), and inputs that have a default are left at it. Pass one if that is not so.
        residual: "pin" grounds both operands of an addition, the paper's choice; "tie" gives them one scale.
        pin: Names of modules whose output units are pinned.

    Control flow is followed once per mode: a branch on a draw from a generator of the model's own is not noticed.

    Raises:
        TraceError: The forward pass cannot be followed; the message names the line and the way out.

    >>> net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
    >>> analysis = analyze(net)
    >>> analysis.H, analysis.m, analysis.dim
    (8, 56, 48)
    """
    if residual not in ("pin", "tie"):
        raise ValueError(f"residual must be 'pin' or 'tie', got {residual!r}")
    return _solved(trace(model, example_input), model, residual, pin)


def analyzed(model: nn.Module, analysis: Analysis | None, options: Mapping[str, Any]) -> Analysis:
    """What the caller has, or what `analyze(model, **options)` finds; both at once would contradict each other."""
    if analysis is None:
        return analyze(model, **options)
    if not isinstance(analysis, Analysis):
        raise TypeError(f"analysis is what gspace.analyze returns, got {type(analysis).__name__}")
    if options:
        raise ValueError(f"pass either analysis= or {', '.join(options)}=, not both")
    parameters = dict(model.named_parameters())
    for e in analysis.edges:
        if e.name not in parameters or not e.fits(parameters[e.name]):
            raise ValueError(
                f"the analysis is of another model: this one has no parameter {e.name!r} of that size "
                "(a wrapped model is another one: analyze what you pass here)"
            )
    return analysis


@on_cpu
def _solved(traced: Sequence[Traced], model: nn.Module, residual: Residual, pin: Iterable[str]) -> Analysis:
    """What follows from the graphs of `model`; its own code is not run again."""
    modules = dict(unwrap(model).named_modules(remove_duplicate=False))
    walk = Walk(residual)
    names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    walker = Walker(walk, names, _hooked(modules), _known(pin, modules))
    for one in traced:
        walker.run(one)
    _unfollowed(walk, model)
    _aliased(walk, model)
    _complex(walk, model)
    return _assemble(walk, model, residual)


def _known(pin: Iterable[str], modules: dict[str, nn.Module]) -> set[str]:
    listed = [pin] if isinstance(pin, str) else list(pin)
    if not all(isinstance(name, str) for name in listed):
        raise TypeError(f"pin takes names of modules, got {listed!r}")
    names = {name.removeprefix("module.").removeprefix("_orig_mod.") for name in listed}
    for name in names - modules.keys():
        close = difflib.get_close_matches(name, modules)
        raise ValueError(f"pin: the model has no module {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return names


def _hooked(modules: dict[str, nn.Module]) -> dict[str, str]:
    reason = "a forward hook on {!r} may change anything inside it"
    hooks = {name: reason.format(name or "the model") for name, m in modules.items() if _hooks(m)}
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        hooks[""] = "a forward hook on every module may change anything"
    return hooks


def _hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _unfollowed(walk: Walk, model: nn.Module) -> None:
    """Pins, for the report, the channels of weights that only operations without a rule read, if nothing else does."""
    followed = {use.name for use in walk.uses}
    reported = {(pin.operation, pin.where) for pin in walk.pins}
    for name, p in model.named_parameters():
        why, sizes = walk.misused.get(name), [n for n in p.shape if n > 1]
        if why and name not in followed and len(sizes) > 1 and (why.operation, why.where) not in reported:
            walk.pins.append(replace(why, ids=walk.fresh(min(sizes[:2])), reason=f"{name}: {why.reason}"))


def _aliased(walk: Walk, model: nn.Module) -> None:
    """Different tensors that share memory: scaling one would scale the other unseen.

    They do if their ranges of bytes overlap, even where one lies in the gaps of the other. Tensors side by side in one
    buffer (`vector_to_parameters`) do not.
    """
    ranges = []
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if p.device.type != "meta" and p.layout == torch.strided and p.numel():
            first = p.untyped_storage().data_ptr() + int(p.storage_offset()) * p.element_size()
            last = sum((n - 1) * step for n, step in zip(p.shape, p.stride(), strict=True))
            ranges.append((str(p.device), first, first + (last + 1) * p.element_size(), name))
    together: list[list[str]] = []
    device, end = "", 0
    for place, first, stop, name in sorted(ranges):
        if place != device or first >= end:
            together.append([])
            device, end = place, 0
        together[-1].append(name)
        end = max(end, stop)
    for shared in together:
        for name in shared if len(shared) > 1 else ():
            others = ", ".join(other for other in shared if other != name)
            walk.misused.setdefault(name, PinnedAt(torch.empty(0), "alias", name, f"shares its memory with {others}"))


def _complex(walk: Walk, model: nn.Module) -> None:
    """A positive scale leaves the phase of a complex weight alone; paths and skeletons here are real."""
    for name, p in model.named_parameters():
        if p.is_complex():
            walk.misused.setdefault(name, PinnedAt(torch.empty(0), "complex", name, "its values are complex"))


# Solving the equations ------------------------------------------------------------------------------------------------


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


def _assemble(walk: Walk, model: nn.Module, residual: Residual) -> Analysis:
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
        dim=m - H + sum(1 for u in _touched(edges, trainable, frozen=True) if 0 < u <= H),
        edges=edges,
        transparent=_edges(kept, paper_number[transparent], into_norm),
        statistics=tuple(statistics.values()),
        units=_groups(edges, H, H + H_absorbed),
        pinned=_pinned(pins),
        residual=residual,
    )


def _touched(edges: Sequence[Edges], trainable: set[str], frozen: bool) -> set[int]:
    """Units that touch a frozen parameter."""
    ids = [t.reshape(-1) for e in edges if (e.name not in trainable) == frozen for t in (e.head, e.tail)]
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
    groups = []
    for k in first.argsort().tolist():
        u = int(first[k]) + 1
        written = tuple(e.name for e in edges if bool((e.head == u).any()))
        read = tuple(e.name for e in edges if bool((e.tail == u).any()))
        groups.append(UnitGroup(int(counts[k]), written, read, "absorbed" if u > H else "exact"))
    return tuple(groups)


def _pinned(pins: Sequence[PinnedAt]) -> tuple[Pin, ...]:
    merged: dict[tuple[str, str, str], set[int]] = {}
    for pin in pins:
        ids = set(pin.ids.unique().tolist()) - {0}
        if ids:
            merged.setdefault((pin.operation, pin.where, pin.reason), set()).update(ids)
    return tuple(Pin(operation, where, len(ids), reason) for (operation, where, reason), ids in merged.items())
