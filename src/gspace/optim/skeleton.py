"""The skeleton method (Sec. 4.1 of the paper) for any DAG and any widths.

Every hidden unit u has two skeleton weights: out(u), an edge of the *last* weight that reads u, and in(u), an edge of
the *first* weight that writes u. Last and first make both walks acyclic even where residual streams are tied. The H
weights out(u) are *free*: they never change during training. The basis path of a non-free edge e is
in-path(tail e) · e · out-path(head e); there are m − H of them. Units that lie on no path from ground to ground (nobody
reads them, or only what nobody reads) have no skeleton, and no skeleton leads through them.

Shapes: unit vectors are `(H + 1,)`, entry 0 is ground. For an MLP of equal widths, "aligned" is the skeleton of the
paper letter for letter (axes here are (out, in), there (in, out)).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, Edges, require_module
from gspace.analysis.result import plain
from gspace.devices import on_cpu
from gspace.group.balance import balanced_log_scales
from gspace.optim.arguments import require_finite, require_one_of
from gspace.optim.walks import pick, rows_of, walks
from gspace.sharding import weights_of

Choice = Literal["aligned", "pivoted"]
NOT_TRAINED = "touch a parameter that is not trained (frozen, or not in params=)"
COEFFICIENTS = "have other coefficients than one (queries and keys, squares, 1 + w, weights in no (out, in) form)"
APART = (
    "are not in the paper's view (rows of padding, weights also used transposed, BatchNorms of inputs without a scale)"
)
NO_PATH = "lie on no path from input to output, or only on paths through a norm that is the output"
ONLY_ZEROS = "have skeleton weights of 0 (in the first weight that writes them or the last that reads them)"


@dataclass(frozen=True, eq=False)
class Skeleton:
    """The skeleton weights of every unit an optimizer can use.

    Attributes:
        edges: The edges; units that an optimizer cannot use are ground here.
        H: Number of units.
        in_edge: Which of `edges` holds in(u); −1 for ground.
        in_index: Flat index of in(u) in that parameter.
        out_edge: Which of `edges` holds out(u), the free weight of u.
        out_index: Flat index of out(u).
        parent: Unit that in(u) reads.
        child: Unit that out(u) writes.
        root: First unit going up in-path(u), u included, whose incoming skeleton weight is not free.
        unused: Units of the analysis that are ground here, with the reason.
    """

    edges: tuple[Edges, ...]
    H: int
    in_edge: Tensor
    in_index: Tensor
    out_edge: Tensor
    out_index: Tensor
    parent: Tensor
    child: Tensor
    root: Tensor
    unused: tuple[str, ...] = ()

    @property
    def roots(self) -> Tensor:
        """Units whose incoming skeleton weight is trained."""
        return (self.root == torch.arange(self.H + 1, device=self.root.device)).nonzero()[1:, 0]


@on_cpu
def build_skeleton(
    model: nn.Module,
    analysis: Analysis,
    *,
    choice: Choice = "aligned",
    trained: set[str] | None = None,
    balanced: Tensor | None = None,
) -> Skeleton:
    """Chooses in(u) and out(u) for every unit of the transparent view.

    Args:
        choice: "aligned" takes the diagonal, as the paper does; "pivoted" the largest |w| in the balanced
            representative, for networks that were not initialised on the skeleton.
        trained: Names of the parameters that are trained (default: those that require a gradient). A unit that
            touches any other parameter is left out, as is one whose skeleton weight is 0 on a side.
        balanced: The log scales that balance the transparent view, `(H + 1,)`, if they are known.

    >>> import gspace
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> gspace.build_skeleton(model, gspace.analyze(model)).H
    8
    """
    require_one_of("choice", choice, ("aligned", "pivoted"))
    require_module(model)
    if not isinstance(analysis, Analysis):
        raise TypeError(f"analysis is what gspace.analyze returns, got {type(analysis).__name__}")
    require_finite(model)
    weights = weights_of(model)
    if trained is None:
        trained = trained_names(model, model.parameters())
    edges, n = analysis.transparent, analysis.H_paper + 1
    rows = rows_of(edges)
    live, chosen = found = walks(rows, n)
    x = None
    if choice == "pivoted":
        x = (balanced_log_scales(edges, weights, n) if balanced is None else balanced).cpu()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    (in_index, parent), (out_index, child) = (pick(rows, found, weights, shapes, side, x) for side in chosen)
    picked = Picked(chosen["head"], in_index, parent, chosen["tail"], out_index, child)
    into, out = (values_at(edges, weights, *places).cpu() for places in (picked[:2], picked[3:5]))
    reasons = {
        NOT_TRAINED: ~trained_units(edges, trained, n),
        NO_PATH: ~live,
        ONLY_ZEROS: (into == 0) | (out == 0),
    }
    usable, unused = sorted_out(reasons)
    outside = {COEFFICIENTS: analysis.special, APART: _apart(analysis)}
    told = (f"{count} units {why}" for why, count in outside.items() if count)
    return skeleton_of(edges, picked, usable, (*told, *unused))


def _apart(analysis: Analysis) -> int:
    """Exact units that the paper's view does not have: there a weight has one head and one tail."""
    exact = {e.name: e for e in plain(analysis.edges, analysis.forms)}
    both = [(exact[p.name], p) for p in analysis.transparent if p.name in exact]
    ends = ([t.reshape(-1) for e in view for t in (e.head, e.tail)] for view in zip(*both, strict=True))
    mine, theirs = map(torch.cat, ends) if both else torch.zeros(2, 0, dtype=torch.long)
    left = mine[theirs > 0].unique()
    return analysis.H - analysis.special - int(((left > 0) & (left <= analysis.H)).sum())


def sorted_out(reasons: Mapping[str, Tensor]) -> tuple[Tensor, list[str]]:
    """Units for which none of the reasons holds, `(n,)` bool, and how many each of them takes away; ground is True."""
    usable, unused = torch.ones_like(next(iter(reasons.values()))), []
    for reason, found in reasons.items():
        lost = int((found & usable)[1:].sum())
        usable &= ~found
        unused += [f"{lost} units {reason}"] * (lost > 0)
    usable[0] = True
    return usable, unused


class Picked(NamedTuple):
    """in(u) and out(u) of every unit of an analysis, `(n,)` each: where they are, and the unit at their other end."""

    in_edge: Tensor
    in_index: Tensor
    parent: Tensor
    out_edge: Tensor
    out_index: Tensor
    child: Tensor


def skeleton_of(edges: Sequence[Edges], picked: Picked, usable: Tensor, unused: tuple[str, ...] = ()) -> Skeleton:
    """The skeleton of the units that are `usable`, `(n,)`; they are numbered anew, and all others are ground."""
    usable = usable.index_fill(0, torch.tensor([0]), True)
    number = torch.where(usable, usable.cumsum(0) - 1, 0)
    kept = usable.nonzero()[:, 0]
    in_edge, in_index, parent, out_edge, out_index, child = (x[kept] for x in picked)
    parent, child = number[parent], number[child]
    in_edge[0] = out_edge[0] = -1
    parent[0] = child[0] = in_index[0] = out_index[0] = 0
    free = (parent > 0) & (in_edge == out_edge[parent]) & (in_index == out_index[parent])
    root = torch.where(free, parent, torch.arange(len(kept)))
    while not torch.equal(root, root[root]):
        root = root[root]
    if not bool(usable.all()):
        edges = [replace(e, head=number[e.head], tail=number[e.tail]) for e in edges]
    return Skeleton(tuple(edges), len(kept) - 1, in_edge, in_index, out_edge, out_index, parent, child, root, unused)


def trained_names(model: nn.Module, parameters: Iterable[Tensor]) -> set[str]:
    """Names of those of `parameters` that are trained."""
    mine = {id(p) for p in parameters if p.requires_grad}
    return {name for name, p in model.named_parameters() if id(p) in mine}


def trained_units(edges: Sequence[Edges], trained: Collection[str], n: int) -> Tensor:
    """Units that touch no other parameters than those of these names, `(n,)` bool."""
    result = torch.ones(n, dtype=torch.bool)
    for e in edges:
        if e.name not in trained:
            result[e.head.reshape(-1)] = result[e.tail.reshape(-1)] = False
    result[0] = True
    return result


def by_edge(which: Tensor, count: int) -> list[Tensor]:
    """The units of each of `count` edges, in order; `which` is −1 for units that have none."""
    order = which.argsort(stable=True)
    parts: list[Tensor] = list(order.split(torch.bincount(which + 1, minlength=count + 1).tolist()))
    return parts[1:]


def values_at(edges: Sequence[Edges], weights: Mapping[str, Tensor], which: Tensor, index: Tensor) -> Tensor:
    """The weights at `index[u]` of edge `which[u]`, `(n,)` float64, 1 for units that have none; differentiable."""
    units, device = by_edge(which.cpu(), len(edges)), weights[next(iter(weights))].device if weights else which.device
    values = [torch.empty(0, dtype=torch.float64, device=device)]
    for e, some in zip(edges, units, strict=True):
        if len(some):
            flat = weights[e.name].reshape(-1)
            values.append(flat[index[some].to(flat.device)].to(values[0]))
    order = torch.cat([torch.empty(0, dtype=torch.long, device="cpu"), *units])
    return torch.ones_like(which, dtype=torch.float64, device=device).index_put((order.to(device),), torch.cat(values))
