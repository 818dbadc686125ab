"""Steps that see neither the scales of units nor those of rows before a BatchNorm: `batch_norm="exact"`.

Two kinds of scales leave a network with BatchNorm as it is. A unit u: γ, β and all other weights that write u times
c_u, columns that read u over c_u. A row r that a norm absorbs: the row, its bias and running mean times a_r, the
running variance times a_r². Coordinates that neither changes:

    G(u) = |I(u)|                  gauge of a unit: in(u) is γ of the first norm that writes u and has one other than 0
    b_e = w_e · G(tail)/G(head)    edges whose row no norm absorbs: β, later γ's of a stream, the last layer
    t_r = w_r · G(tail)/n_r        rows that a norm absorbs, n_r = ‖w_r · G(tail)‖: points on the unit sphere

γ is the gain of any norm. Of units that have none, in(u) is the largest weight of the first layer that writes them,
with a reference as in `step.py` that makes G(u) the norm of the row, so that b of the row has norm 1 at first. in(u)
never moves: what it could express, the columns that read u express. That is why γ stands still. It is not out(u), as
elsewhere, because that may lie in an absorbed row, whose scale means nothing.

    ∂ℓ/∂b = g · G(head)/G(tail),   ∂ℓ/∂t = g · n_r/G(tail) less its part along t

An optimizer sees b, and 0 in place of t: it is asked for a change d, so that its weight decay finds nothing to decay.
d is projected, d − ⟨d, t⟩t, and followed by the way back to the sphere, t′ = (t + d)/‖t + d‖; w_r = t′·n_r/G(tail). The
row keeps its norm, in coordinates, so running statistics stay true. A bias before a norm does nothing and is not moved.
A scale that a norm divides out of several rows at once, as LayerNorm does, is left: these rows move in coordinates b.

Shapes: as in `step.py`. Units are those of the exact view; absorbed rows are ground.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, Edges
from gspace.analysis.result import ids_of, plain
from gspace.devices import on_cpu
from gspace.optim.arguments import require_finite
from gspace.optim.choice import Chosen
from gspace.optim.plan import Layer
from gspace.optim.skeleton import (
    COEFFICIENTS,
    NO_PATH,
    NOT_TRAINED,
    Picked,
    by_edge,
    skeleton_of,
    sorted_out,
    trained_names,
    trained_units,
)
from gspace.optim.walks import best_places, connected, first_edges, flat_index, largest, nearer, rows_of, steps_of
from gspace.sharding import weights_of

ONLY_ZEROS = "have only zeros in the gains that write them, or without a gain in their first row of weights"
SHARED = "scales before a norm are each shared by several rows or other weights"


@on_cpu
def view(analysis: Analysis) -> Analysis:
    """The exact view in place of the transparent one; absorbed rows are ground."""
    H, found = analysis.H, plain(analysis.edges, analysis.forms)
    edges = tuple(replace(e, head=e.head * (e.head <= H), tail=e.tail * (e.tail <= H)) for e in found)
    return replace(analysis, transparent=edges, H_paper=H)


@on_cpu
def absorbed_rows(analysis: Analysis) -> tuple[dict[str, Tensor], int]:
    """Rows that a norm absorbs, `(group, out)` bool by parameter, and how many share their scale and are left out.

    A row has a sphere of its own if no other row has the same scale and no column reads it. Biases count for nothing.
    They are told by their name: a gain looks the same, and must not stand still.
    """
    n, edges = 1 + analysis.H + analysis.H_absorbed, plain(analysis.edges, analysis.forms)
    written, read = torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.bool)
    for e in edges:
        read[e.tail.reshape(-1)] = True
        rows = torch.bincount(e.head.reshape(-1), minlength=n)
        if not (_is_called_bias(e) and e.tail.shape[1] == 1 and bool((rows[1:] <= 1).all())):
            written += rows
    own = (written == 1) & ~read
    own[: 1 + analysis.H] = False
    masks = {e.name: own[e.head] for e in edges if bool(own[e.head].any())}
    return masks, int((~own[1 + analysis.H :]).sum())


def _is_called_bias(e: Edges) -> bool:
    """By the name of the tensor, not a module's: a gain looks the same."""
    return "bias" in e.name.rpartition(".")[2]


@torch.no_grad()
@on_cpu
def choose(model: nn.Module, analysis: Analysis, parameters: Iterable[Tensor], *, final: bool) -> Chosen:
    """in(u) of every exact unit in the weights of now. `analysis` is that of the model, not its exact view.

    A gain γ is a vector that reads ground, is not called a bias, and writes the unit before anything else does, or
    right behind a BatchNorm. The first gain of a unit that is not 0 is its in(u).
    """
    require_finite(model)
    weights = weights_of(model)
    dims = {name: p.dim() for name, p in model.named_parameters()}
    exact, trained = view(analysis), trained_names(model, parameters)
    edges, n = exact.transparent, exact.H_paper + 1
    _, shared = absorbed_rows(analysis)
    vectors = {e.name for e in edges if dims[e.name] < 2 and not bool(e.tail.any())}  # γ, β and biases
    in_edge, in_index, parent = torch.full((n,), -1), torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)
    gauge, written, gained = torch.ones(n, dtype=torch.float64), *torch.zeros(2, n, dtype=torch.bool)
    paper = {e.name for e in analysis.transparent}  # without γ of a BatchNorm, which counts wherever it writes
    for k in sorted(range(len(edges)), key=lambda k: edges[k].first):
        unit = edges[k].head.reshape(-1)
        if edges[k].name in vectors and not _is_called_bias(edges[k]):
            value = weights[edges[k].name].cpu().reshape(-1).double().abs()
            gained[unit] |= ~written[unit] | (edges[k].name not in paper)
            first = (unit > 0) & gained[unit] & (in_edge[unit] < 0) & (value > 0)
            in_edge[unit[first]], gauge[unit[first]] = k, value[first]
            in_index[unit[first]] = torch.arange(len(unit))[first]
        written[unit] = True
    gained[0] = True
    references = torch.ones(2, n, dtype=torch.float64)
    rows = [replace(e, head=e.head * (e.name not in vectors)) for e in edges]
    edge, index, other = largest_writers(rows, weights, gauge, ~gained)
    for k, units in enumerate(by_edge(edge, len(edges))):
        value = weights[edges[k].name].detach().cpu().reshape(-1)[index[units]].double()
        references[0, units] = value * gauge[other[units]] / gauge[units]
    found = edge >= 0
    in_edge[found], in_index[found], parent[found] = edge[found], index[found], other[found]
    live = connected(edges, n)
    reasons = {
        COEFFICIENTS: ~torch.isin(torch.arange(n), ids_of(edges)),
        NOT_TRAINED: ~trained_units(edges, trained, n),
        NO_PATH: ~live & (in_edge < 0),
        ONLY_ZEROS: in_edge < 0,
    }
    usable, unused = sorted_out(reasons)
    unused += [f"{shared} {SHARED}"] if shared else []
    nothing = torch.zeros(n, dtype=torch.long)
    skeleton = skeleton_of(edges, Picked(in_edge, in_index, parent, nothing - 1, nothing, nothing), usable)
    return Chosen(replace(skeleton, unused=tuple(unused)), references[:, usable], final)


def largest_writers(
    edges: Sequence[Edges], weights: Mapping[str, Tensor], level: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """in(u) of units that are `wanted`, `(n,)` bool: the largest entry, by |w|·level(tail), of the first that writes u.

    Returns which of `edges` holds it (−1: all are 0), its flat index, and the unit that it reads. `level` of such a
    unit becomes the norm of the row, in place; units that are not wanted have theirs before.
    """
    n, live = len(level), torch.ones_like(wanted)
    number = torch.where(wanted, torch.arange(n), 0)
    bare = [replace(e, head=number[e.head], tail=number[e.tail]) for e in edges]
    rows = rows_of(bare)
    chosen = first_edges(rows, live, "head")
    nearest = nearer(rows, live, chosen, "head").split([e.tail.numel() for e in edges])
    edge, index, other = torch.full((n,), -1), torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)
    for k in rows.ends["head"].place.argsort(stable=True).tolist():
        e, here = edges[k], bare[k].head
        if not bool((chosen[here] == k).any()):
            continue
        near, weight = nearest[k].reshape(e.tail.shape) * level[e.tail], weights[e.name].detach()
        view = e.view(weight)
        best, end, tap = largest(view, near, "head")
        norms = (view.cpu().double() * near.reshape(len(near), 1, -1, *[1] * (view.dim() - 3))).flatten(2).norm(dim=2)
        places = ((chosen[here] == k) & (best > 0)).reshape(-1).nonzero()[:, 0]
        at = places[best_places(here.reshape(-1)[places], best.reshape(-1)[places], n)]
        g, a = at // here.shape[1], at % here.shape[1]
        u, b = here[g, a], end[g, a]
        edge[u], level[u], other[u] = k, norms[g, a], e.tail[g, b]
        index[u] = flat_index(torch.tensor(steps_of(e, weight.shape)), g, a, b, tap[g, a])
    return edge, index, other


# One step -------------------------------------------------------------------------------------------------------------


def to_spheres_(layers: Sequence[Layer], values: Sequence[Tensor], slopes: Sequence[Tensor]) -> None:
    """b and ∂ℓ/∂b become 0 and ∂ℓ/∂t = (g − ⟨g, b⟩b/n²)·n in absorbed rows. Both are views, written in place."""
    mine = [k for k, layer in enumerate(layers) if layer.absorbed is not None]
    if not mine:
        return
    rows = [k for k in mine if not _is_single(values[k])]
    if rows:
        b, g = [values[k] for k in rows], [slopes[k] for k in rows]
        absorbed, norm, dot = _masks(layers, rows), _cat(map(_norm, b)), _cat(map(_dot, g, b))
        along = -dot * absorbed / norm.clamp(min=torch.finfo(norm.dtype).tiny)
        pieces = zip(b, g, _cut(torch.where(absorbed, norm, 1), b), _cut(along, b), strict=True)
        for b_k, g_k, norm_k, along_k in pieces:
            g_k.mul_(norm_k).addcmul_(b_k, along_k)
    for k, other in zip(mine, _cut(~_masks(layers, mine), [values[k] for k in mine]), strict=True):
        values[k].mul_(other)
        if k not in rows:
            slopes[k].mul_(other)


def to_changes_(layers: Sequence[Layer], before: Sequence[Tensor], shown: Sequence[Tensor]) -> None:
    """What an optimizer has made of b becomes the change of b, in place; absorbed rows stay on their spheres.

    There d = shown − ⟨shown, t⟩t and t′ − t = d/‖t + d‖ − t·(1 − 1/‖t + d‖), where ‖t + d‖² = 1 + ‖d‖². Without a
    change of t nothing changes by a bit.
    """
    rows = [k for k, layer in enumerate(layers) if layer.absorbed is not None and not _is_single(before[k])]
    for k, layer in enumerate(layers):
        if k not in rows:
            shown[k].sub_(before[k])
            if layer.absorbed is not None:
                shown[k].mul_(_shaped(~layer.absorbed, shown[k]))
    if not rows:
        return
    b, d = [before[k] for k in rows], [shown[k] for k in rows]
    absorbed, norm, dot = _masks(layers, rows), _cat(map(_norm, b)), _cat(map(_dot, d, b))
    size = norm.clamp(min=torch.finfo(norm.dtype).tiny)
    for b_k, d_k, along in zip(b, d, _cut(torch.where(absorbed, dot / size / size, 1), b), strict=True):
        d_k.addcmul_(b_k, along, value=-1)
    shrink = torch.expm1(-0.5 * torch.log1p(_cat(map(_norm, d)).square())) * absorbed  # 1/‖t + d‖ − 1
    grow = torch.where(absorbed, torch.addcmul(norm, norm, shrink), 1)
    for b_k, d_k, grow_k, shrink_k in zip(b, d, _cut(grow, b), _cut(shrink, b), strict=True):
        d_k.mul_(grow_k).addcmul_(b_k, shrink_k)


def _is_single(b: Tensor) -> bool:
    """Rows of one entry, such as biases: their spheres are points."""
    return b.shape[2:].numel() == 1


def _shaped(rows: Tensor, view: Tensor) -> Tensor:
    return rows.reshape(*view.shape[:2], *[1] * (view.dim() - 2))


def _masks(layers: Sequence[Layer], rows: Sequence[int]) -> Tensor:
    return _cat(mask for k in rows if (mask := layers[k].absorbed) is not None)


def _cat(rows: Iterable[Tensor]) -> Tensor:
    """What layers have for each row, `(group, out)`, of all layers: the same few operations for one and for many."""
    return torch.cat([x.reshape(-1) for x in rows])


def _cut(every: Tensor, views: Sequence[Tensor]) -> list[Tensor]:
    """The inverse, to broadcast against the views."""
    parts = every.split([v.shape[0] * v.shape[1] for v in views])
    return [_shaped(part, v) for part, v in zip(parts, views, strict=True)]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(list(range(2, a.dim())))


def _norm(b: Tensor) -> Tensor:
    return torch.linalg.vector_norm(b, dim=list(range(2, b.dim())))
