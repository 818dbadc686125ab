"""The balanced representative of an orbit: ‖incoming‖ = ‖outgoing‖ at every unit.

With x = log c and a = Σ_taps w², the balanced scales minimize the convex function

    F(x) = ½ Σ_e a_e · exp(2(x[head e] − x[tail e])),   ∂F/∂x_u = ‖incoming u‖² − ‖outgoing u‖²,   x[0] = 0,

whose Hessian is twice the Laplacian of the network with the weights a·exp(…), grounded at unit 0: positive definite
where every unit lies on a path of non-zero weights from ground to ground. The exponential is a product of one of the
head and one of the tail, so everything is products of the matrices a with vectors. Newton's method with conjugate
gradients spreads a change of x within a layer in a few iterations; from layer to layer it would take one for each, so
the layers as wholes are solved for directly, in the start and in the preconditioner: the number of iterations does not
grow with the depth. Their matrix is sparse where there are many of them, and its cost grows with the depth alone.

An id may also be a linear form of units (gates, attention): x = M·u. F is convex in u, with gradient Mᵀ∂F/∂x and
Hessian MᵀAM. Forms and the units in them belong to no layer, and the diagonal preconditions them.

Shapes: a is `(group, out, in)`; a vector of units is `(n,)`, of ids `(N,)`, N ≥ n; entry 0 is ground, also of a layer
vector.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gspace.analysis import Edges
from gspace.analysis.result import Form
from gspace.group.solve import Pattern, conjugate_gradients
from gspace.group.stacks import Stack, alike, between, factors, gather, products, stacked
from gspace.sharding import Reduce, alone, edges_on, pieces

Report = Callable[[int, float], object]  # is told the iteration and the error that is left


class Forms(NamedTuple):
    """M: terms `coefficient`·u[`unit`] of x[`id`], behind the units themselves."""

    ids: int
    id: Tensor
    unit: Tensor
    coefficient: Tensor

    def at_nodes(self, u: Tensor) -> Tensor:
        """M·u, `(N,)`."""
        x = torch.cat([u, u.new_zeros(self.ids - len(u))])
        return x.index_add_(0, self.id, self.coefficient * u[self.unit])

    def collect(self, x: Tensor, n: int) -> Tensor:
        """Mᵀ·x, `(n,)`."""
        return x[:n].index_add(0, self.unit, self.coefficient * x[self.id])

    def pulls(self, sides: Tensor, n: int) -> Tensor:
        """What pulls each unit's scale down and what pulls it up, `(2, n)`: their difference is Mᵀ·(into − out)."""
        terms = torch.where(self.coefficient < 0, sides.flip(0)[:, self.id], sides[:, self.id])
        return sides[:, :n].index_add(1, self.unit, self.coefficient.abs() * terms)


@dataclass(frozen=True, eq=False)
class Network:
    """The edges between live units, as far as they are here.

    Attributes:
        stacks: Their parameters.
        M: Ids from units.
        reduce: Adds up the sums of all processes that hold a part of them.
        layer: Number of the layer of every id, `(N,)`; 0 is ground.
        layers: How many there are.
        links: Pairs of layers that edges join, here or elsewhere, as head · layers + tail, in order.
        pattern: Matrices with an entry for each of these pairs.
    """

    stacks: Sequence[Stack]
    M: Forms
    reduce: Reduce
    layer: Tensor
    layers: int
    links: Tensor
    pattern: Pattern


def live_units(stacks: Sequence[Stack], unit: Tensor, units: Tensor, reduce: Reduce = alone) -> Tensor:
    """Which `units`, `(n,)` bool, lie on a path of non-zero weights from ground to ground; each id is a `unit`."""
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for s in stacks:
        link = s.strength != 0
        parts = map(s.of_each, (unit[s.tail], unit[s.head], link, link.flatten(1).all(1)))
        for k, (tail, head, here, full) in zip(s.members, zip(*parts, strict=True), strict=True):
            found[k] = tail, head, here[:, :1, :1] if bool(full.all()) else here
    links = [found[k] for k in sorted(found)]

    def reached(links: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        found = torch.zeros_like(units)
        found[:1] = True
        while True:
            before = int(found.sum())
            for source, target, link in links:
                found[target[(link & found[source][:, None, :]).any(2).expand(target.shape)]] = True
                if reduce is not alone:
                    found |= reduce(found.double()) > 0
            if bool((found >= units).all()) or int(found.sum()) == before:
                return found

    return reached(links) & reached([(head, tail, link.mT) for tail, head, link in reversed(links)])


def balanced_log_scales(
    edges: Sequence[Edges],
    weights: Mapping[str, Tensor],
    n: int,
    fixed: Tensor | None = None,
    forms: Mapping[int, Form] | None = None,
    progress: Report | None = None,
) -> Tensor:
    """log c of the balanced representative, `(n,)`; 0 for ground, for `fixed` units and for units that are not live.

    Units that no ground-to-ground path of non-zero weights meets keep their scale, and what they write or read counts
    for no other unit: their weights could be made as small as one likes without changing the function. A unit of a form
    keeps its scale if nothing pulls it one way: F has no minimum along it. Weights that are sharded stay where they
    are: sums over units cross processes.
    """
    here, parts, reduce = pieces(edges, weights)
    device = parts[0].device if edges else torch.device("cpu")
    M, plain = forms_of(forms or {}, n, device)
    u = torch.zeros(n, dtype=torch.float64, device=device)
    free = torch.arange(n, device=device) > 0
    if fixed is not None:
        free &= ~fixed.to(device)
    edges, here = ([edges_on(e, device) for e in some] for some in (edges, here))
    moves = torch.cat([free, free.new_ones(M.ids - n)])
    ids, of = _flat([torch.cat([e.head.reshape(-1), e.tail.reshape(-1)]) for e in edges], device)
    joins = of[moves[ids]].unique().tolist()  # all others are constant in F
    if not joins:
        return u
    edges, here, parts = [edges[k] for k in joins], [here[k] for k in joins], [parts[k] for k in joins]
    stacks = stacked(here, [w.detach().to(device) for w in parts])  # they may be on several devices
    _require_finite(edges, stacks)
    unit = torch.where(free & plain, torch.arange(n, device=device), 0)  # all others act as ground
    unit = torch.cat([unit, unit.new_zeros(M.ids - n)])
    live = live_units(stacks, unit, torch.zeros_like(free).index_fill_(0, unit[ids], True), reduce)[unit]
    free &= live[:n]
    layer = layers(edges, torch.cat([free & plain, live.new_zeros(M.ids - n)]))
    count = int(layer.max()) + 1
    links = _links(edges, layer, count)
    pattern = Pattern(count, links // count, links % count)
    net = Network([between(s, live) for s in stacks], M, reduce, layer, count, links, pattern)
    del stacks
    for _ in range(12):  # damped fixed-point sweeps: in log scale, so that factors of any size shrink geometrically
        into, out = sides(net, u)[:, :n]
        change = torch.where(free & plain, 0.25 * (out.log() - into.log()), 0)
        u = u + change
        if not float(change.abs().max()) > 1e-3:
            break
    # Beyond the rounding of the weights, digits of a scale mean nothing.
    goal = 1e-13 if any(w.dtype == torch.float64 for w in parts) else 1e-6
    return _newton(net, _layers_balanced(net, u), free, goal, progress)


def _newton(net: Network, u: Tensor, free: Tensor, goal: float, progress: Report | None) -> Tensor:
    """Minimizes F by Newton's method, until its gradient is `goal` of what pulls a unit either way."""
    both, n = sides(net, u), len(u)
    free = free & (net.M.pulls(both, n) > 0).all(0)
    for iteration in range(100):
        into, out = net.M.pulls(both, n)
        gradient, total = torch.where(free, into - out, 0), torch.where(free, into + out, 1)
        error = float((gradient.abs() / total).max())
        if progress is not None:
            progress(iteration, error)
        condition, product = two_level(net, u, total), partial(hessian, net, u, both.sum(0), free)
        # Newton's own next error is of the order error²: digits beyond it, or beyond six a step, would be wasted.
        step = conjugate_gradients(product, -gradient, condition, min(max(error, 1e-6), 0.1))
        # F is a sum of exponentials: a step of at most 1 in log scale keeps Newton's quadratic model honest.
        step = step / step.abs().max().clamp(min=1)
        slope, value, t = float(gradient @ step), float(both[0].sum()) / 2, 1.0
        both = sides(net, u + step)
        while t > 1e-6 and float(both[0].sum()) / 2 > value + 1e-4 * t * slope + 1e-14 * value:
            t /= 2
            both = sides(net, u + t * step)
        u = u + t * step
        if not error >= goal:  # after one more step: along slow directions u is less exact than its gradient
            break
    return u


def forms_of(forms: Mapping[int, Form], n: int, device: torch.device) -> tuple[Forms, Tensor]:
    """M, and the units that are in no form."""
    terms = [(node, unit, float(c)) for node, form in forms.items() for unit, c in form]
    node, unit, coefficient = torch.tensor(terms, dtype=torch.float64, device=device).reshape(-1, 3).unbind(1)
    plain = torch.ones(n, dtype=torch.bool, device=device).index_fill_(0, unit.long(), False)
    return Forms(1 + max([n - 1, *forms]), node.long(), unit.long(), coefficient), plain


def _flat(ids: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """All ids in one vector, and which of the given ones each is of."""
    sizes = torch.tensor([0, *map(len, ids)], device=device)
    every = torch.cat([torch.empty(0, dtype=torch.long, device=device), *ids])
    return every, torch.arange(-1, len(ids), device=device).repeat_interleave(sizes)


def layers(edges: Sequence[Edges], free: Tensor) -> Tensor:
    """Number of the layer of every id, `(N,)`: free units with one first writer share it; 0 for all others."""
    order = sorted(range(len(edges)), key=lambda k: -edges[k].first)  # the last to write stands first in the network
    heads, turn = _flat([edges[k].head.reshape(-1) for k in order], free.device)
    last = torch.full_like(free, -1, dtype=torch.long).scatter_reduce(0, heads, turn, "amax")
    writer = torch.tensor([*order, -1], device=free.device)[last] + 1
    return torch.where(free, writer, 0).unique(return_inverse=True)[1]


def _keys(layer: Tensor, count: int, head: Tensor, tail: Tensor) -> Tensor:
    """Pairs of layers that edges join, `(group, out, in)`; `(group, out, 1)` in the usual case, one layer is read."""
    rows, columns = layer[head][:, :, None], layer[tail][:, None, :]
    return rows * count + (columns[:, :, :1] if bool((columns == columns[:, :, :1]).all()) else columns)


def _links(edges: Sequence[Edges], layer: Tensor, count: int) -> Tensor:
    """All such pairs, in order."""
    found = []
    for same in alike(edges):
        head, tail = (torch.cat([getattr(edges[k], side) for k in same]) for side in ("head", "tail"))
        usual = (layer[tail] == layer[tail][:, :1]).all(1)
        found += [_keys(layer, count, head[some], tail[some]).unique() for some in (usual, ~usual)]
    return torch.cat(found).unique()


def _require_finite(edges: Sequence[Edges], stacks: Sequence[Stack]) -> None:
    for s in stacks:
        sound = s.strength.sum((1, 2)).isfinite()
        if not bool(sound.all()):
            k = next(k for k, some in zip(s.members, s.of_each(sound), strict=True) if not bool(some.all()))
            raise ValueError(f"{edges[k].name} holds weights that are not finite, or whose squares are not")


# Sums over edges ------------------------------------------------------------------------------------------------------


def flows(net: Network, x: Tensor, d: Tensor) -> Tensor:
    """Σ E·d[tail] over the edges into every id and Σ E·d[head] over those out of it, as far as they are here."""
    up, down = [], []
    for s in net.stacks:
        p, q = factors(s, x)
        above, below = products(s, q * d[s.tail][:, :, None], p * d[s.head][:, :, None])
        up.append(p * above)
        down.append(q * below)
    heads, tails = [s.head for s in net.stacks], [s.tail for s in net.stacks]
    return torch.stack([gather(len(x), heads, up), gather(len(x), tails, down)])


def sides(net: Network, u: Tensor) -> Tensor:
    """‖incoming‖² and ‖outgoing‖² of every id, `(2, N)`; either adds up to 2F, ground included."""
    return net.reduce(flows(net, net.M.at_nodes(u), torch.ones_like(net.layer, dtype=u.dtype)))


def hessian(net: Network, u: Tensor, total: Tensor, free: Tensor, d: Tensor) -> Tensor:
    """MᵀAMd, `(n,)`, 0 where a unit is not free.

    (Ax)_i = 2Σ over the edges at i of E·(x_i − x[other end]), and `total` = ΣE.
    """
    x = net.M.at_nodes(d)
    change = 2 * (total * x - net.reduce(flows(net, net.M.at_nodes(u), x).sum(0)))
    return torch.where(free, net.M.collect(change, len(d)), 0)


def layer_links(net: Network, u: Tensor) -> Tensor:
    """Energy of all edges that join each pair of `links`."""
    keys, parts, x = [], [], net.M.at_nodes(u)
    for s in net.stacks:
        p, q = factors(s, x)
        keys.append(_keys(net.layer, net.layers, s.head, s.tail).reshape(-1))
        if len(keys[-1]) == s.head.numel():
            parts.append(p * products(s, q, p)[0])
        else:
            a = s.strength if s.strength.dtype == torch.float64 else s.strength.double().square_()
            parts.append(p * a * q.mT)
    return net.reduce(gather(len(net.links), [torch.searchsorted(net.links, torch.cat(keys))], parts))


# Layers as wholes -----------------------------------------------------------------------------------------------------


def _layers_balanced(net: Network, u: Tensor) -> Tensor:
    """u with each layer scaled as a whole so that the layers are balanced.

    Newton's method, here on the logarithms: with E the links between layers,

        f_k = log Σ_l E_kl − log Σ_l E_lk = 0,   ∂f_k/∂y_l = 2(2δ_kl − E_kl/Σ_l E_kl − E_lk/Σ_l E_lk).

    In a chain without biases f is linear in y: one step removes factors of any size, where Newton's method on F, a sum
    of exponentials, needs a step for each factor e. It is only a start, and taken only if F falls.
    """
    count, k, l = net.layers, net.links // net.layers, net.links % net.layers
    energy, y = layer_links(net, u), u.new_zeros(count)
    for _ in range(20):
        E = energy * (2 * (y[k] - y[l])).exp()
        into, out = gather(count, [k], [E]), gather(count, [l], [E])
        f = into.log() - out.log()
        if not bool((f[1:].abs() > 1e-2).any()):
            break
        y[1:] -= net.pattern.solver(torch.full_like(y, 4), -2 * E / into[k], -2 * E / out[l])(f[1:])
    moved = u + y[net.layer[: len(u)]]
    before, after = (float(sides(net, at)[0].sum()) for at in (u, moved))
    return moved if after < before else u


def two_level(net: Network, u: Tensor, total: Tensor) -> Callable[[Tensor], Tensor]:
    """The preconditioner r ↦ D⁻¹r + P(PᵀAP)⁻¹Pᵀr of the Hessian A.

    D is the diagonal of A and P copies a value per layer to its units, so PᵀAP is the Hessian of the layers as wholes.
    D⁻¹ alone is good for all but the slow directions, and those are nearly constant on layers: within one, units that
    read and write the same others are closely tied.
    """
    k, l, layer = net.links // net.layers, net.links % net.layers, net.layer[: len(total)]
    energy = layer_links(net, u)
    diagonal = 2 * gather(net.layers, [k, l], [energy, energy])
    # The ridge, far below the gap of any chain of layers, is for layers that hardly hang together with ground.
    solve = net.pattern.solver(diagonal * (1 + 1e-12), -2 * energy, -2 * energy)

    def condition(r: Tensor) -> Tensor:
        of_layers = torch.zeros_like(diagonal)
        of_layers[1:] = solve(gather(net.layers, [layer], [r])[1:])
        return r / (2 * total) + of_layers[layer]

    return condition
