"""The balanced representative of an orbit: ‖incoming‖ = ‖outgoing‖ at every unit.

With x = log c and a = Σ_taps w², the balanced scales minimize the convex function

    F(x) = ½ Σ_e a_e · exp(2(x[head e] − x[tail e])),   ∂F/∂x_u = ‖incoming u‖² − ‖outgoing u‖²,   x[0] = 0,

whose Hessian is twice the Laplacian of the network with the weights a·exp(…), grounded at unit 0: positive definite
where every unit lies on a path of non-zero weights from ground to ground. Newton's method with conjugate gradients
needs one pair of matrix-vector products per layer and iteration. Within a layer a change of x spreads in a few
iterations; from layer to layer it would take one for each, so the layers as wholes, few enough for a dense matrix, are
solved for directly, in the start and in the preconditioner: the number of iterations does not grow with the depth.

Shapes: an energy is `(group, out, in)`; a unit vector is `(n,)`, entry 0 is ground; so is entry 0 of a layer vector.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gspace.analysis import Edges


@dataclass(frozen=True)
class Stack:
    """Parameters with equal numbers of outputs and inputs, one after the other along the group axis.

    Attributes:
        strength: a of every edge between live units, `(group, out, in)`.
        head: Unit that each output writes, `(group, out)`.
        tail: Unit that each input reads, `(group, in)`.
    """

    strength: Tensor
    head: Tensor
    tail: Tensor


def squares(edges: Sequence[Edges], weights: Mapping[str, Tensor]) -> list[Tensor]:
    """a = Σ over taps of w² in float64, `(group, out, in)` for each parameter."""
    result = []
    for e in edges:
        w = e.view(weights[e.name].detach())
        result.append(w.flatten(3).double().square().sum(3) if w.dim() > 3 else w.double().square())
    return result


def live_units(edges: Sequence[Edges], strength: Sequence[Tensor], n: int) -> Tensor:
    """Units on a path of non-zero weights from ground to ground, `(n,)` bool; ground is True."""
    device = strength[0].device if strength else torch.device("cpu")
    ahead, behind = (torch.zeros(n, dtype=torch.bool, device=device) for _ in range(2))
    ahead[0] = behind[0] = True
    links = [(e.head.to(device), e.tail.to(device), a > 0) for e, a in zip(edges, strength, strict=True)]
    while True:
        before = int(ahead.sum() + behind.sum())
        for head, tail, link in links:
            ahead[head[(link & ahead[tail][:, None, :]).any(2)]] = True
        for head, tail, link in reversed(links):
            behind[tail[(link & behind[head][:, :, None]).any(1)]] = True
        if int(ahead.sum() + behind.sum()) == before:
            return ahead & behind


def balanced_log_scales(
    edges: Sequence[Edges], weights: Mapping[str, Tensor], n: int, fixed: Tensor | None = None
) -> Tensor:
    """log c of the balanced representative, `(n,)`; 0 for ground, for `fixed` units and for units that are not live.

    Units that no ground-to-ground path of non-zero weights meets keep their scale, and what they write or read counts
    for no other unit: their weights could be made as small as one likes without changing the function.
    """
    device = weights[edges[0].name].device if edges else torch.device("cpu")
    x = torch.zeros(n, dtype=torch.float64, device=device)
    free = torch.ones(n, dtype=torch.bool, device=device)
    if fixed is not None:
        free &= ~fixed.to(device)
    free[0] = False
    unit = torch.where(free, torch.arange(n, device=device), 0)  # fixed units act as ground
    edges = [replace(e, head=unit[e.head.to(device)], tail=unit[e.tail.to(device)]) for e in edges]
    edges = [e for e in edges if bool(e.head.any()) or bool(e.tail.any())]  # from ground to ground: a constant in F
    if not edges:
        return x
    strength = squares(edges, weights)
    live = live_units(edges, strength, n)
    free &= live
    layer, stacks = layers(edges, free), _stacked(edges, strength, live)
    del strength
    for _ in range(12):  # damped fixed-point sweeps: in log scale, so that factors of any size shrink geometrically
        into, out = sides(stacks, energies(stacks, x), n)
        change = torch.where(free, 0.25 * (out / into).log(), 0)
        x = x + change
        if not bool((change.abs() > 1e-3).any()):
            break
    x, energy = _layers_balanced(stacks, x, layer)
    for _ in range(100):
        into, out = sides(stacks, energy, n)
        gradient = torch.where(free, into - out, 0)
        total = torch.where(free, into + out, 1)
        error = float((gradient.abs() / total).max())
        product = partial(hessian, stacks, energy, total, free)
        condition = two_level(total, layer, layer_links(stacks, energy, layer))
        # Newton's own next error is of the order error²: digits beyond it, or beyond six a step, would be wasted.
        step = conjugate_gradients(product, -gradient, condition, min(max(error, 1e-6), 0.1))
        # F is a sum of exponentials: a step of at most 1 in log scale keeps Newton's quadratic model honest.
        step = step / step.abs().max().clamp(min=1)
        slope, value, t = float(gradient @ step), _half_sum(energy), 1.0
        energy = energies(stacks, x + step)
        while t > 1e-6 and _half_sum(energy) > value + 1e-4 * t * slope + 1e-14 * value:
            t /= 2
            energy = energies(stacks, x + t * step)
        x = x + t * step
        if not error >= 1e-13:  # after one more step: along slow directions x is less exact than its gradient
            break
    return x


def layers(edges: Sequence[Edges], free: Tensor) -> Tensor:
    """Number of the layer of every unit, `(n,)`: free units with one first writer share it; 0 for all others."""
    writer = torch.zeros(len(free), dtype=torch.long, device=free.device)
    for k in sorted(range(len(edges)), key=lambda k: -edges[k].first):
        writer[edges[k].head.reshape(-1)] = k + 1
    return torch.where(free, writer, 0).unique(return_inverse=True)[1]


def _stacked(edges: Sequence[Edges], strength: Sequence[Tensor], live: Tensor) -> list[Stack]:
    alike: dict[torch.Size, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for e, a in zip(edges, strength, strict=True):
        between = live[e.head][:, :, None] & live[e.tail][:, None, :]
        alike.setdefault(a.shape[1:], []).append((a * between, e.head, e.tail))
    return [Stack(*map(torch.cat, zip(*same, strict=True))) for same in alike.values()]


# Sums over edges ------------------------------------------------------------------------------------------------------


def energies(stacks: Sequence[Stack], x: Tensor) -> list[Tensor]:
    """a·exp(2(x[head] − x[tail])) of every edge; F is half their sum."""
    return [(2 * x[s.head][:, :, None] - 2 * x[s.tail][:, None, :]).exp_().mul_(s.strength) for s in stacks]


def _half_sum(energy: Sequence[Tensor]) -> float:
    return float(sum(E.sum() for E in energy)) / 2


def _gather(size: int, ids: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    index, values = torch.cat([i.reshape(-1) for i in ids]), torch.cat([p.reshape(-1) for p in parts])
    return values.new_zeros(size).index_add(0, index, values)


def sides(stacks: Sequence[Stack], energy: Sequence[Tensor], n: int) -> tuple[Tensor, Tensor]:
    """‖incoming‖² and ‖outgoing‖² of every unit, `(n,)` each."""
    into = _gather(n, [s.head for s in stacks], [E.sum(2) for E in energy])
    return into, _gather(n, [s.tail for s in stacks], [E.sum(1) for E in energy])


def hessian(stacks: Sequence[Stack], energy: Sequence[Tensor], total: Tensor, free: Tensor, d: Tensor) -> Tensor:
    """2Σ over the edges at u of E·(d[u] − d[other end]), `(n,)`, 0 where u is not free; `total` = Σ E."""
    up = [E @ d[s.tail][:, :, None] for s, E in zip(stacks, energy, strict=True)]
    down = [d[s.head][:, None, :] @ E for s, E in zip(stacks, energy, strict=True)]
    sums = _gather(len(d), [s.head for s in stacks] + [s.tail for s in stacks], up + down)
    return torch.where(free, 2 * (total * d - sums), 0)


def layer_links(stacks: Sequence[Stack], energy: Sequence[Tensor], layer: Tensor) -> Tensor:
    """Energy of all edges that write layer k and read layer l, `(layers, layers)`."""
    count = int(layer.max()) + 1
    result = energy[0].new_zeros(count * count)
    for s, E in zip(stacks, energy, strict=True):
        result.index_add_(0, (layer[s.head][:, :, None] * count + layer[s.tail][:, None, :]).reshape(-1), E.reshape(-1))
    return result.reshape(count, count)


# Layers as wholes -----------------------------------------------------------------------------------------------------


def _layers_balanced(stacks: Sequence[Stack], x: Tensor, layer: Tensor) -> tuple[Tensor, list[Tensor]]:
    """x with each layer scaled as a whole so that the layers are balanced, and its energies.

    Newton's method, here on the logarithms: with E the links between layers,

        f_k = log Σ_l E_kl − log Σ_l E_lk = 0,   ∂f_k/∂y_l = 2(2δ_kl − E_kl/Σ_l E_kl − E_lk/Σ_l E_lk).

    In a chain without biases f is linear in y: one step removes factors of any size, where Newton's method on F, a sum
    of exponentials, needs a step for each factor e. It is only a start, and taken only if F falls.
    """
    energy = energies(stacks, x)
    links = layer_links(stacks, energy, layer)
    y, identity = links.new_zeros(len(links)), torch.eye(len(links), dtype=links.dtype, device=links.device)
    for _ in range(20):
        E = links * (2 * (y[:, None] - y)).exp()
        into, out = E.sum(1), E.sum(0)
        f = (into / out).log()[1:]
        if not bool((f.abs() > 1e-2).any()):
            break
        jacobian = 2 * (2 * identity - E / into[:, None] - E.T / out[:, None])
        y[1:] -= torch.linalg.solve_ex(jacobian[1:, 1:], f)[0]
    moved = x + y[layer]
    other = energies(stacks, moved)
    return (moved, other) if _half_sum(other) < _half_sum(energy) else (x, energy)


def two_level(total: Tensor, layer: Tensor, links: Tensor) -> Callable[[Tensor], Tensor]:
    """The preconditioner r ↦ D⁻¹r + P(PᵀAP)⁻¹Pᵀr of the Hessian A.

    D is the diagonal of A and P copies a value per layer to its units, so PᵀAP is the Hessian of the layers as wholes.
    D⁻¹ alone is good for all but the slow directions, and those are nearly constant on layers: within one, units that
    read and write the same others are closely tied.
    """
    both = links + links.T
    small = 2 * (both.sum(1).diag() - both)[1:, 1:]
    scale = small.diagonal().rsqrt()
    # The ridge, far below the gap of any chain of layers, is for layers that hardly hang together with ground.
    small = small * scale * scale[:, None] + 1e-12 * torch.eye(len(scale), dtype=scale.dtype, device=scale.device)
    inverse = torch.zeros_like(links)
    inverse[1:, 1:] = torch.cholesky_inverse(torch.linalg.cholesky_ex(small)[0]) * scale * scale[:, None]
    return lambda r: r / (2 * total) + (inverse @ _gather(len(links), [layer], [r]))[layer]


def conjugate_gradients(
    operator: Callable[[Tensor], Tensor],
    b: Tensor,
    condition: Callable[[Tensor], Tensor],
    tolerance: float,
    limit: int = 2000,
) -> Tensor:
    """Solves operator(x) = b, preconditioned, until the residual has fallen by `tolerance`."""
    x = torch.zeros_like(b)
    r = b.clone()
    z = condition(r)
    p = z.clone()
    rz = r @ z
    goal = float(rz) * tolerance**2
    for _ in range(limit):
        if not float(rz) > goal:
            break
        q = operator(p)
        alpha = rz / (p @ q)
        x, r = x + alpha * p, r - alpha * q
        z = condition(r)
        rz, old = r @ z, rz
        p = z + (rz / old) * p
    return x
