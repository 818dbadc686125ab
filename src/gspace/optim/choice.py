"""What an optimizer has chosen, as state of its parameters: `state[p]["skeleton"]`.

It lists the entries of p that are skeleton weights, and the reference of each: what its value is divided by. I_ref and
O_ref of a unit are the products of references along its paths, so Ĩ = I/I_ref and Õ = O/O_ref follow from the weights
at any time, and nothing else has to be remembered.

The list is a tensor of bytes, `(1 + rows + columns, 16)`, whatever was chosen: checkpoints want sizes that do not
change. A line is a position in p (int64, −1 for none) and a reference (float64). The first line says whether the choice
is final, and how many entries p has; the next ones, as many as p has outputs, list in(u) of the units it writes, the
others, as many as inputs, out(u) of the units it reads. Bytes, because `Optimizer.load_state_dict` casts every tensor
to the dtype of its parameter: whole numbers below 256 survive that in bfloat16, positions and references would not.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, Edges
from gspace.devices import on_cpu
from gspace.group.balance import balanced_log_scales
from gspace.optim.reference import Reference, entry_references, products, reference_of
from gspace.optim.skeleton import Picked, Skeleton, build_skeleton, skeleton_of, trained_names, trained_units
from gspace.optim.walks import laid_out
from gspace.sharding import weights_of

KEY = "skeleton"  # in the state of a parameter
FINAL, PROVISIONAL = 2, 1
FAR = 2.0  # a path value that is so many times another one is no small change of it


class Chosen(NamedTuple):
    """A skeleton, the references of in(u) and out(u), `(2, H + 1)` float64, and whether that is final."""

    skeleton: Skeleton
    references: Tensor
    final: bool


def touching(analysis: Analysis) -> list[Edges]:
    """Parameters that touch a unit of the transparent view."""
    return [e for e in analysis.transparent if bool(e.head.any() | e.tail.any())]


@torch.no_grad()
def choose(
    model: nn.Module, analysis: Analysis, wanted: Reference | None, parameters: Iterable[Tensor], *, final: bool = True
) -> Chosen:
    """The skeleton that an optimizer of `parameters` takes in the weights of now.

    If no reference is wanted: as `reference_of`, but "one" only if path values are near it. Steps are divided by their
    squares.
    """
    weights, trained = weights_of(model), trained_names(model, parameters)
    if (wanted or reference_of(model, analysis)) == "one":
        skeleton = build_skeleton(model, analysis, trained=trained)
        into, out = products(skeleton, weights)
        near = ((into * out).abs() <= FAR) & ((into * out).abs() >= 1 / FAR)
        if wanted is not None or bool(near.all()):
            return Chosen(skeleton, entry_references(skeleton, analysis, weights, "one"), final)
    x = balanced_log_scales(analysis.transparent, weights, analysis.H_paper + 1)
    skeleton = build_skeleton(model, analysis, choice="pivoted", trained=trained, balanced=x)
    return Chosen(skeleton, entry_references(skeleton, analysis, weights, "balanced", x), final)


@on_cpu
def written(chosen: Chosen, edges: Sequence[Edges], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """State of the parameters of these sizes, by their names; `edges` are of those that touch units."""
    skeleton, number = chosen.skeleton, {name: k for k, name in enumerate(sizes)}
    ends = {e.name: (e.head.numel(), e.tail.numel()) for e in edges}
    outputs, inputs = torch.tensor([ends.get(name, (0, 0)) for name in sizes]).long().reshape(-1, 2).unbind(1)
    lines = 1 + outputs + inputs
    start = lines.cumsum(0) - lines
    positions, values = torch.full((int(lines.sum()),), -1), torch.zeros(int(lines.sum()), dtype=torch.float64)
    positions[start] = FINAL if chosen.final else PROVISIONAL
    values[start] = torch.tensor(list(sizes.values()), dtype=torch.float64)
    of = torch.tensor([number.get(e.name, -1) for e in skeleton.edges] + [-1])  # that of ground is the last
    for which, index, reference, first in (
        (skeleton.in_edge, skeleton.in_index, chosen.references[0].cpu(), start + 1),
        (skeleton.out_edge, skeleton.out_index, chosen.references[1].cpu(), start + 1 + outputs),
    ):
        units = of[which].argsort(stable=True)
        units = units[of[which[units]] >= 0]
        mine = of[which[units]]
        count = torch.bincount(mine, minlength=len(start))
        at = first[mine] + torch.arange(len(units)) - (count.cumsum(0) - count)[mine]
        positions[at], values[at] = index[units], reference[units]
    table = torch.cat([x.view(torch.uint8).reshape(-1, 8) for x in (positions, values)], 1)
    return {name: t.clone() for name, t in zip(sizes, table.split(lines.tolist()), strict=True)}


def put(chosen: Chosen, model: nn.Module, analysis: Analysis, state: Any, parameters: Iterable[Tensor]) -> None:
    """Writes a choice into the state of those of `parameters` that are trained.

    Those that touch no unit have the first line alone: `torch.distributed.checkpoint` wants state for all or none.
    """
    touched = touching(analysis)
    trained = trained_names(model, parameters) if touched else ()
    weights = {name: p for name, p in model.named_parameters() if name in trained}
    tables = written(chosen, touched, {name: p.numel() for name, p in weights.items()})
    for name, p in weights.items():
        state[p][KEY] = tables[name].to(p.device)


@on_cpu
def read(
    model: nn.Module, analysis: Analysis, state: Any, trained: Collection[str], *, free: bool = True
) -> Chosen | None:
    """What was chosen, of units that touch trained parameters only; None if the state says nothing of a skeleton.

    Without `free` weights units have no out(u).

    Raises:
        ValueError: The tables are damaged or belong to another network; a step would write anywhere.
    """
    shapes = {name: p.shape for name, p in model.named_parameters()}
    tables = {name: table for name, p in model.named_parameters() if (table := kept(state, p)) is not None}
    touched = {e.name for e in touching(analysis)}
    if not touched & tables.keys():
        return None
    for name in tables.keys() - touched:
        _lines(tables.pop(name), 1)
    edges, n = analysis.transparent, analysis.H_paper + 1
    picked = Picked(*(torch.full((n,), fill) for fill in (-1, 0, 0, -1, 0, 0)))
    references = torch.ones(2, n, dtype=torch.float64)
    final = True
    for k, e in enumerate(edges):
        if e.name not in tables:
            continue
        size = 1 + e.head.numel() + e.tail.numel()
        positions, values = _lines(tables[e.name], size)
        final &= int(positions[0]) == FINAL
        count = shapes[e.name].numel()
        _require_size(float(values[0]) == count)
        require(bool(((positions[1:] >= -1) & (positions[1:] < count)).all()), "its skeleton names no weights")
        for side, start, stop in ((0, 1, 1 + e.head.numel()), (1, 1 + e.head.numel(), size)):
            some = (positions[start:stop] >= 0).nonzero()[:, 0] + start
            at = positions[some]
            head, tail = units_at(e, shapes[e.name], at)
            here, there = (head, tail) if side == 0 else (tail, head)
            edge, index, other = picked[3 * side : 3 * side + 3]
            require(bool((here > 0).all()), "its skeleton names no units")
            edge[here], index[here], other[here], references[side][here] = k, at, there, values[some]
    require(bool((references.isfinite() & (references != 0)).all()), "a reference is 0 or not finite")
    for following in (picked.parent, picked.child):
        require(not bool(walked(following).any()), "its skeleton goes round in a circle")
    usable = (picked.in_edge >= 0) & ((picked.out_edge >= 0) | (not free)) & trained_units(edges, trained, n)
    skeleton = skeleton_of(edges, picked, usable)
    usable[0] = True
    references[:, 0] = 1
    return Chosen(skeleton, references[:, usable], final)


def kept(state: Any, p: Tensor) -> Tensor | None:
    """What the state of an optimizer says of a parameter's part of the skeleton."""
    return state[p].get(KEY) if p in state else None


def _lines(table: Any, size: int) -> tuple[Tensor, Tensor]:
    require(isinstance(table, Tensor), "its skeleton is no tensor")
    _require_size(table.shape == (size, 16))
    plain = table.detach().cpu()
    bytes_ = plain.to(torch.uint8)
    require(torch.equal(bytes_.double(), plain.double()), "its skeleton is not written in bytes")
    positions, values = bytes_.split(8, 1)
    numbers, references = positions.contiguous().view(torch.int64)[:, 0], values.contiguous().view(torch.float64)[:, 0]
    require(0 <= int(numbers[0]) <= FINAL, "its skeleton is neither final nor provisional")
    return numbers, references


def _require_size(same: bool) -> None:
    if not same:
        raise ValueError("this state belongs to another network: its layers have other sizes")


def walked(following: Tensor) -> Tensor:
    """Where walks have come that should have ended at ground, `(n,)`: 0 if they have."""
    for _ in range(len(following).bit_length()):
        following = following[following]
    return following


def units_at(e: Edges, shape: torch.Size, index: Tensor) -> tuple[Tensor, Tensor]:
    """The units that entries of a parameter write and read."""
    view = laid_out(e, shape)
    group, out, into = (index // step % n for step, n in zip(view.stride()[:3], view.shape[:3], strict=True))
    return e.head[group, out], e.tail[group, into]


def require(sound: bool, what: str) -> None:
    if not sound:
        raise ValueError(f"this state is damaged: {what}")


def warn_of_unused(skeleton: Skeleton, owner: str, stacklevel: int) -> None:
    """One line for all units that stay outside of G-space: the caller may not expect it."""
    if skeleton.unused:
        warnings.warn(
            f"{owner} cannot use all units of this model: {'; '.join(skeleton.unused)}. Their weights are trained in "
            "plain coordinates, where their scale matters.",
            UserWarning,
            stacklevel=stacklevel + 1,
        )
