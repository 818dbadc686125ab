"""The balanced representative of an orbit: ‖incoming‖ = ‖outgoing‖ at every unit.

With x = log c and a = Σ_taps w², the balanced scales minimize the convex function

    F(x) = ½ Σ_e a_e · exp(2(x[head e] − x[tail e])),   ∂F/∂x_u = ‖incoming u‖² − ‖outgoing u‖²,   x[0] = 0,

whose Hessian is twice the Laplacian of the network with the weights a·exp(…), grounded at unit 0: positive definite
where every unit lies on a path of non-zero weights from ground to ground. The exponential is a product of one of the
head and one of the tail, so everything is products of the matrices a with vectors. Newton's method with conjugate
gradients spreads a change of x within a layer in a few iterations; from layer to layer it would take one for each, so
the layers as wholes are solved for directly, in the start and in the preconditioner: the number of iterations does not
grow with the depth. Their matrix is sparse where there are many of them, and its cost grows with the depth alone.

Shapes: a is `(group, out, in)`; a unit vector is `(n,)`, entry 0 is ground; so is entry 0 of a layer vector.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gspace.analysis import Edges
from gspace.group.solve import conjugate_gradients, solver
from gspace.sharding import Reduce, alone, pieces

LARGE = 1 << 14  # entries of a matrix that is worth a product of its own
MANY, ROWS = 1 << 20, 1 << 18  # weights that are squared anew whenever they are needed, and so many at a time


@dataclass(frozen=True, eq=False)
class Stack:
    """Parameters with equal numbers of outputs and inputs, one after the other along the group axis.

    Attributes:
        strength: a of every edge between live units, `(group, out, in)`; where they are many, weights themselves, which
            are no float64.
        head: Unit that each output writes, `(group, out)`.
        tail: Unit that each input reads, `(group, in)`.
        taken: x that was taken into a, `(n,)`, if it could not be multiplied in.
    """

    strength: Tensor
    head: Tensor
    tail: Tensor
    taken: Tensor


@dataclass(frozen=True, eq=False)
class Network:
    """The edges between live units, as far as they are here.

    Attributes:
        stacks: Their parameters.
        reduce: Adds up the sums of all processes that hold a part of them.
        links: Pairs of layers that edges join, here or elsewhere, as head · layers + tail, in order.
        layer: Number of the layer of every unit, `(n,)`.
    """

    stacks: Sequence[Stack]
    reduce: Reduce
    links: Tensor
    layer: Tensor

    @property
    def layers(self) -> int:
        return int(self.layer.max()) + 1


def squares(edges: Sequence[Edges], weights: Mapping[str, Tensor]) -> list[Tensor]:
    """a = Σ over taps of w² in float64, `(group, out, in)` for each parameter."""
    return [_square(e, weights[e.name]) for e in edges]


def _strength(e: Edges, weight: Tensor) -> Tensor:
    view = e.view(weight.detach())
    narrow = view.is_floating_point() and view.dtype != torch.float64
    return view if narrow and view.dim() == 3 and view.numel() >= MANY and not e.shift else _square(e, weight)


def _square(e: Edges, weight: Tensor) -> Tensor:
    a = e.view(weight.detach()).to(torch.float64, copy=True).add_(e.shift).square_()
    return a.flatten(3).sum(3) if a.dim() > 3 else a


def _links(strength: Tensor) -> Tensor:
    """Where a is not 0, to broadcast; most often that is everywhere."""
    found = strength != 0
    return found[:, :1, :1] if bool(found.all()) else found


def live_units(edges: Sequence[Edges], strength: Sequence[Tensor], n: int, reduce: Reduce = alone) -> Tensor:
    """Units on a path of non-zero weights from ground to ground, `(n,)` bool; ground is True."""
    device = strength[0].device if strength else torch.device("cpu")
    ahead, behind = (torch.zeros(n, dtype=torch.bool, device=device) for _ in range(2))
    ahead[0] = behind[0] = True
    links = [(e.head.to(device), e.tail.to(device), _links(a)) for e, a in zip(edges, strength, strict=True)]

    def told(found: Tensor) -> None:
        if reduce is not alone:
            found |= reduce(found.double()) > 0

    while True:
        before = int(ahead.sum() + behind.sum())
        for head, tail, link in links:
            ahead[head[(link & ahead[tail][:, None, :]).any(2).expand(head.shape)]] = True
            told(ahead)
        for head, tail, link in reversed(links):
            behind[tail[(link & behind[head][:, :, None]).any(1).expand(tail.shape)]] = True
            told(behind)
        if int(ahead.sum() + behind.sum()) == before:
            return ahead & behind


def balanced_log_scales(
    edges: Sequence[Edges], weights: Mapping[str, Tensor], n: int, fixed: Tensor | None = None
) -> Tensor:
    """log c of the balanced representative, `(n,)`; 0 for ground, for `fixed` units and for units that are not live.

    Units that no ground-to-ground path of non-zero weights meets keep their scale, and what they write or read counts
    for no other unit: their weights could be made as small as one likes without changing the function. Weights that are
    sharded stay where they are: sums over units cross processes.
    """
    here, parts, reduce = pieces(edges, weights)
    device = parts[0].device if edges else torch.device("cpu")
    x = torch.zeros(n, dtype=torch.float64, device=device)
    free = torch.ones(n, dtype=torch.bool, device=device)
    if fixed is not None:
        free &= ~fixed.to(device)
    free[0] = False
    unit = torch.where(free, torch.arange(n, device=device), 0)  # fixed units act as ground
    edges, here = (
        [replace(e, head=unit[e.head.to(device)], tail=unit[e.tail.to(device)]) for e in some] for some in (edges, here)
    )
    joins = [k for k, e in enumerate(edges) if bool(e.head.any() | e.tail.any())]  # others are a constant in F
    if not joins:
        return x
    edges, here, parts = [edges[k] for k in joins], [here[k] for k in joins], [parts[k] for k in joins]
    # Beyond the rounding of the weights, digits of a scale mean nothing.
    goal = 1e-13 if any(w.dtype == torch.float64 for w in parts) else 1e-6
    strength = [_strength(e, w) for e, w in zip(here, parts, strict=True)]
    for e, a in zip(edges, strength, strict=True):
        if not bool(a.sum().isfinite()):
            raise ValueError(f"{e.name} holds weights that are not finite, or whose squares are not")
    live = live_units(here, strength, n, reduce)
    free &= live
    layer = layers(edges, free)
    net = Network(_stacked(here, strength, live), reduce, _pairs(edges, layer), layer)
    del strength
    start = torch.zeros_like(x)
    for _ in range(12):  # damped fixed-point sweeps: in log scale, so that factors of any size shrink geometrically
        into, out = sides(net, x)
        change = torch.where(free, 0.25 * (out.log() - into.log()), 0)
        x = x + change
        largest = float(change.abs().max())
        if largest > 10:  # as factors they might overflow
            _take_in(net.stacks, x)
            start, x = start + x, torch.zeros_like(x)
        if not largest > 1e-3:
            break
    _take_in(net.stacks, x)  # from here on x is small
    start, x = start + x, torch.zeros_like(x)
    x = _layers_balanced(net, x)
    into, out = sides(net, x)
    for _ in range(100):
        gradient = torch.where(free, into - out, 0)
        total = torch.where(free, into + out, 1)
        error = float((gradient.abs() / total).max())
        condition = two_level(total, layer, layer_links(net, x))
        # Newton's own next error is of the order error²: digits beyond it, or beyond six a step, would be wasted.
        product = partial(hessian, net, x, total, free)
        step = conjugate_gradients(product, -gradient, condition, min(max(error, 1e-6), 0.1))
        # F is a sum of exponentials: a step of at most 1 in log scale keeps Newton's quadratic model honest.
        step = step / step.abs().max().clamp(min=1)
        slope, value, t = float(gradient @ step), float(into.sum()) / 2, 1.0
        into, out = sides(net, x + step)
        while t > 1e-6 and float(into.sum()) / 2 > value + 1e-4 * t * slope + 1e-14 * value:
            t /= 2
            into, out = sides(net, x + t * step)
        x = x + t * step
        if not error >= goal:  # after one more step: along slow directions x is less exact than its gradient
            break
    return start + x


def layers(edges: Sequence[Edges], free: Tensor) -> Tensor:
    """Number of the layer of every unit, `(n,)`: free units with one first writer share it; 0 for all others."""
    writer = torch.zeros(len(free), dtype=torch.long, device=free.device)
    for k in sorted(range(len(edges)), key=lambda k: -edges[k].first):
        writer[edges[k].head.reshape(-1)] = k + 1
    return torch.where(free, writer, 0).unique(return_inverse=True)[1]


def _pairs(edges: Sequence[Edges], layer: Tensor) -> Tensor:
    """Pairs of layers that edges join, as head · layers + tail, in order."""
    count, keys = int(layer.max()) + 1, []
    for e in edges:
        head, tail = layer[e.head], layer[e.tail]
        if bool((tail == tail[:, :1]).all()):  # the usual case: one layer is read
            keys.append((head * count + tail[:, :1]).unique())
        else:
            keys.append((head[:, :, None] * count + tail[:, None, :]).unique())
    return torch.cat(keys).unique()


def _stacked(edges: Sequence[Edges], strength: list[Tensor], live: Tensor) -> list[Stack]:
    alike: dict[object, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for k, (e, a) in enumerate(zip(edges, strength, strict=True)):
        for ids, dim in ((e.head, 2), (e.tail, 1)):
            if not bool(live[ids].all()):
                a = a if a.dtype == torch.float64 else a.double().square_()
                a.mul_(live[ids].unsqueeze(dim))
        key = a.shape[1:] if a.dtype == torch.float64 else k  # weights themselves are not copied
        alike.setdefault(key, []).append((a, e.head, e.tail))
    zero = torch.zeros(len(live), dtype=torch.float64, device=live.device)
    stacks = []
    for same in alike.values():
        a, head, tail = (part[0] if len(part) == 1 else torch.cat(part) for part in zip(*same, strict=True))
        stacks.append(Stack(a, head, tail, zero.clone()))
    return stacks


# Sums over edges ------------------------------------------------------------------------------------------------------


def _take_in(stacks: Sequence[Stack], x: Tensor) -> None:
    """a ← a·exp(2(x[head] − x[tail])), in place."""
    for s in stacks:
        if s.strength.dtype != torch.float64:
            s.taken.add_(x)
            continue
        head, tail = x[s.head][:, :, None], x[s.tail][:, None, :]
        for k in range(0, len(s.strength), 64):  # some matrices at a time: their exponents lie as far apart as scales
            part = slice(k, k + 64)
            factor = (head[part] - tail[part]).exp_()
            s.strength[part].mul_(factor).mul_(factor)  # its square may be out of range where the product is not


def _factors(s: Stack, x: Tensor) -> tuple[Tensor, Tensor]:
    """exp(2x) of the heads and exp(−2x) of the tails, as columns."""
    x = x + s.taken
    return (2 * x[s.head]).exp()[:, :, None], (-2 * x[s.tail]).exp()[:, :, None]


def _product(a: Tensor, column: Tensor) -> Tensor:
    """a @ column, matrix by matrix where these are large: a batched product with one column is slow there."""
    if a.shape[1] * a.shape[2] < LARGE:
        return a @ column
    return torch.stack([torch.mv(matrix, v[:, 0]) for matrix, v in zip(a, column, strict=True)])[:, :, None]


def _products(s: Stack, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """a @ right and aᵀ @ left, columns both."""
    if s.strength.dtype == torch.float64:
        return _product(s.strength, right), _product(s.strength.mT, left)
    up, down = torch.empty_like(left), torch.zeros_like(right)
    step = max(1, ROWS // s.strength.shape[2])
    room = torch.empty(step, s.strength.shape[2], dtype=torch.float64, device=left.device)
    for matrix, r, l, u, d in zip(s.strength, right[..., 0], left[..., 0], up[..., 0], down[..., 0], strict=True):
        for k in range(0, len(matrix), step):
            some = matrix[k : k + step]
            a = room[: len(some)].copy_(some).square_()
            torch.mv(a, r, out=u[k : k + step])
            d.addmv_(a.mT, l[k : k + step])
    return up, down


def _gather(size: int, ids: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    index, values = torch.cat([i.reshape(-1) for i in ids]), torch.cat([p.reshape(-1) for p in parts])
    return values.new_zeros(size).index_add(0, index, values)


def sides(net: Network, x: Tensor) -> tuple[Tensor, Tensor]:
    """‖incoming‖² and ‖outgoing‖² of every unit, `(n,)` each; either adds up to 2F, ground included."""
    up, down, stacks = [], [], net.stacks
    for s in stacks:
        p, q = _factors(s, x)
        above, below = _products(s, q, p)
        up.append(p * above)
        down.append(q * below)
    ids = [s.head for s in stacks], [s.tail for s in stacks]
    into, out = net.reduce(torch.stack([_gather(len(x), ids[0], up), _gather(len(x), ids[1], down)]))
    return into, out


def hessian(net: Network, x: Tensor, total: Tensor, free: Tensor, d: Tensor) -> Tensor:
    """2Σ over the edges at u of E·(d[u] − d[other end]), `(n,)`, 0 where u is not free; `total` = Σ E."""
    up, down, stacks = [], [], net.stacks
    for s in stacks:
        p, q = _factors(s, x)
        above, below = _products(s, q * d[s.tail][:, :, None], p * d[s.head][:, :, None])
        up.append(p * above)
        down.append(q * below)
    sums = net.reduce(_gather(len(d), [s.head for s in stacks] + [s.tail for s in stacks], up + down))
    return torch.where(free, 2 * (total * d - sums), 0)


class Links(NamedTuple):
    """Energy of all edges that write layer `head` and read layer `tail`, for each pair of `layers` that has some."""

    layers: int
    head: Tensor
    tail: Tensor
    energy: Tensor


def layer_links(net: Network, x: Tensor) -> Links:
    count, layer = net.layers, net.layer
    keys, parts = [], []
    for s in net.stacks:
        p, q = _factors(s, x)
        head, tail = layer[s.head], layer[s.tail]
        if bool((tail == tail[:, :1]).all()):  # the usual case: one layer is read
            keys.append(head * count + tail[:, :1])
            parts.append(p * _products(s, q, p)[0])
        else:
            keys.append(head[:, :, None] * count + tail[:, None, :])
            a = s.strength if s.strength.dtype == torch.float64 else s.strength.double().square_()
            parts.append(p * a * q.mT)
    place = torch.searchsorted(net.links, torch.cat([k.reshape(-1) for k in keys]))
    energy = net.reduce(_gather(len(net.links), [place], parts))
    return Links(count, net.links // count, net.links % count, energy)


# Layers as wholes -----------------------------------------------------------------------------------------------------


def _layers_balanced(net: Network, x: Tensor) -> Tensor:
    """x with each layer scaled as a whole so that the layers are balanced.

    Newton's method, here on the logarithms: with E the links between layers,

        f_k = log Σ_l E_kl − log Σ_l E_lk = 0,   ∂f_k/∂y_l = 2(2δ_kl − E_kl/Σ_l E_kl − E_lk/Σ_l E_lk).

    In a chain without biases f is linear in y: one step removes factors of any size, where Newton's method on F, a sum
    of exponentials, needs a step for each factor e. It is only a start, and taken only if F falls.
    """
    count, k, l, energy = layer_links(net, x)
    y, every = x.new_zeros(count), torch.arange(count, device=x.device)
    for _ in range(20):
        E = energy * (2 * (y[k] - y[l])).exp()
        into, out = _gather(count, [k], [E]), _gather(count, [l], [E])
        f = into.log() - out.log()
        if not bool((f[1:].abs() > 1e-2).any()):
            break
        values = torch.cat([torch.full_like(y, 4), -2 * E / into[k], -2 * E / out[l]])
        y[1:] -= solver(count, torch.cat([every, k, l]), torch.cat([every, l, k]), values)(f[1:])
    moved = x + y[net.layer]
    before, after = (float(sides(net, at)[0].sum()) for at in (x, moved))
    return moved if after < before else x


def two_level(total: Tensor, layer: Tensor, links: Links) -> Callable[[Tensor], Tensor]:
    """The preconditioner r ↦ D⁻¹r + P(PᵀAP)⁻¹Pᵀr of the Hessian A.

    D is the diagonal of A and P copies a value per layer to its units, so PᵀAP is the Hessian of the layers as wholes.
    D⁻¹ alone is good for all but the slow directions, and those are nearly constant on layers: within one, units that
    read and write the same others are closely tied.
    """
    count, k, l, energy = links
    diagonal = 2 * _gather(count, [k, l], [energy, energy])
    # The ridge, far below the gap of any chain of layers, is for layers that hardly hang together with ground.
    every = torch.arange(count, device=k.device)
    values = torch.cat([diagonal * (1 + 1e-12), -2 * energy, -2 * energy])
    solve = solver(count, torch.cat([every, k, l]), torch.cat([every, l, k]), values)

    def condition(r: Tensor) -> Tensor:
        of_layers = torch.zeros_like(diagonal)
        of_layers[1:] = solve(_gather(count, [layer], [r])[1:])
        return r / (2 * total) + of_layers[layer]

    return condition
