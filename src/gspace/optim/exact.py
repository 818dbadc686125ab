"""Steps that see neither the scales of units nor those of rows before a BatchNorm: `batch_norm="exact"`.

Two kinds of scales leave a network with BatchNorm as it is. A unit u: γ, β and all other weights that write u times
c_u, columns that read u over c_u. A row r that a norm absorbs: the row, its bias and running mean times a_r, the
running variance times a_r². Coordinates that neither changes:

    G(u) = |I(u)|                  gauge of a unit: in(u) is γ of the first norm that writes u and has one other than 0
    b_e = w_e · G(tail)/G(head)    edges whose row no norm absorbs: β, later γ's of a stream, the last layer
    t_r = w_r · G(tail)/n_r        rows that a norm absorbs, n_r = ‖w_r · G(tail)‖: points on the unit sphere

Of units that no norm writes, in(u) is the largest weight of the first layer that does, with a reference as in `step.py`
that makes G(u) the norm of the row, so that b of the row has norm 1 at first. in(u) never moves: what it could express,
the columns that read u express. That is why γ stands still. It is not out(u), as elsewhere, because that may lie in an
absorbed row, whose scale means nothing.

    ∂ℓ/∂b = g · G(head)/G(tail),   ∂ℓ/∂t = g · n_r/G(tail) less its part along t

An optimizer sees b, and 0 in place of t: it is asked for a change d, so that its weight decay finds nothing to decay.
d is projected, d − ⟨d, t⟩t, and followed by the way back to the sphere, t′ = (t + d)/‖t + d‖; w_r = t′·n_r/G(tail). The
row keeps its norm, in coordinates, so running statistics stay true. A bias before a norm does nothing and is not moved.

Shapes: as in `step.py`. Units are those of the exact view; absorbed rows are ground.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gspace.analysis import Analysis, Edges
from gspace.analysis.result import plain
from gspace.devices import on_cpu
from gspace.optim.arguments import require_finite
from gspace.optim.choice import Chosen
from gspace.optim.skeleton import (
    NOT_TRAINED,
    Picked,
    by_edge,
    skeleton_of,
    sorted_out,
    trained_names,
    trained_units,
)
from gspace.optim.step import Layer
from gspace.optim.walks import best_places, connected, first_edges, flat_index, largest, nearer, rows_of, sizes_of
from gspace.sharding import weights_of

SHARED = "rows before a norm share their scale with other weights"


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
        if not ("bias" in e.name and e.tail.shape[1] == 1 and bool((rows[1:] <= 1).all())):
            written += rows
    own = (written == 1) & ~read
    own[: 1 + analysis.H] = False
    masks = {e.name: own[e.head] for e in edges if bool(own[e.head].any())}
    return masks, int((~own[1 + analysis.H :]).sum())


@torch.no_grad()
@on_cpu
def choose(model: nn.Module, analysis: Analysis, parameters: Iterable[Tensor], *, final: bool) -> Chosen:
    """in(u) of every exact unit in the weights of now. `analysis` is that of the model, not its exact view."""
    require_finite(model)
    weights = weights_of(model)
    dims = {name: p.dim() for name, p in model.named_parameters()}
    exact, trained = view(analysis), trained_names(model, parameters)
    edges, n = exact.transparent, exact.H_paper + 1
    _, shared = absorbed_rows(analysis)
    gains = {f"{name}.weight".lstrip(".") for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    in_edge, in_index, parent = torch.full((n,), -1), torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)
    gauge, normed = torch.ones(n, dtype=torch.float64), torch.zeros(n, dtype=torch.bool)
    for k in sorted((k for k, e in enumerate(edges) if e.name in gains), key=lambda k: edges[k].first):
        unit, value = edges[k].head.reshape(-1), weights[edges[k].name].cpu().reshape(-1).double().abs()
        first = (unit > 0) & (in_edge[unit] < 0) & (value > 0)
        in_edge[unit[first]], gauge[unit[first]] = k, value[first]
        in_index[unit[first]] = torch.arange(len(unit))[first]
        normed[unit] = True
    normed[0] = True
    references = torch.ones(2, n, dtype=torch.float64)
    layers = [e if dims[e.name] > 1 else replace(e, head=torch.zeros_like(e.head)) for e in edges]
    edge, index, other = largest_writers(layers, weights, gauge, ~normed)
    for k, units in enumerate(by_edge(edge, len(edges))):
        value = weights[edges[k].name].detach().cpu().reshape(-1)[index[units]].double()
        references[0, units] = value * gauge[other[units]] / gauge[units]
    found = edge >= 0
    in_edge[found], in_index[found], parent[found] = edge[found], index[found], other[found]
    live = connected(edges, n)
    reasons = {
        NOT_TRAINED: ~trained_units(edges, trained, n),
        "lie on no path from input to output": ~live & (in_edge < 0),
        "have no gain or incoming weight other than 0": in_edge < 0,
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
        index[u] = flat_index(torch.tensor(sizes_of(e, weight.shape)), g, a, b, tap[g, a])
    return edge, index, other


# One step -------------------------------------------------------------------------------------------------------------


def on_spheres(layer: Layer, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """b and ∂ℓ/∂b with 0 and ∂ℓ/∂t in place of absorbed rows."""
    if layer.absorbed is None:
        return b, g
    rows = _shaped(layer.absorbed, b)
    norm, t = _on_sphere(b)
    slope = 0 if _is_single(b) else _projected(g * norm, t)
    return torch.where(rows, 0, b), torch.where(rows, slope, g)


def changes(layer: Layer, b: Tensor, shown: Tensor) -> Tensor:
    """The changes of b that an optimizer has asked for; absorbed rows stay on their spheres."""
    change = shown - b
    if layer.absorbed is None:
        return change
    rows = _shaped(layer.absorbed, b)
    if _is_single(b):
        return torch.where(rows, 0, change)
    norm, t = _on_sphere(b)
    d = _projected(shown, t)
    square = _dot(d, d)
    length = (1 + square).sqrt()  # ‖t + d‖; without a change of t, nothing changes by a bit
    return torch.where(rows, (d - t * (square / (1 + length))) / length * norm, change)


def _is_single(b: Tensor) -> bool:
    """Rows of one entry, such as biases: their spheres are points."""
    return b.shape[2:].numel() == 1


def _shaped(mask: Tensor, view: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *[1] * (view.dim() - 2))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(list(range(2, a.dim())), keepdim=True)


def _on_sphere(b: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of each row and its direction; a row of zeros has none and stays."""
    norm = _dot(b, b).sqrt()
    return norm, b / torch.where(norm > 0, norm, 1)


def _projected(d: Tensor, t: Tensor) -> Tensor:
    return d - _dot(d, t) * t
