"""The balanced representative of an orbit: ‖incoming‖ = ‖outgoing‖ at every unit.

With x = log c and a = Σ_taps w², the balanced scales minimize the convex function

    F(x) = ½ Σ_e a_e · exp(2(x[head e] − x[tail e])),   ∂F/∂x_u = ‖incoming u‖² − ‖outgoing u‖²,   x[0] = 0,

whose Hessian is twice the Laplacian of the network with the weights a·exp(…), grounded at unit 0: positive definite
where every unit lies on a path of non-zero weights from ground to ground. Newton's method with conjugate gradients
needs one pair of matrix-vector products per layer and iteration, however deep the network is.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gspace.graph import Edges


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
    strength = squares(edges, weights)
    if not strength:
        return torch.zeros(n, dtype=torch.float64, device="cpu")
    device = strength[0].device
    free = torch.ones(n, dtype=torch.bool, device=device)
    if fixed is not None:
        free &= ~fixed.to(device)
    free[0] = False
    unit = torch.where(free, torch.arange(n, device=device), 0)  # fixed units act as ground
    heads, tails = [unit[e.head.to(device)] for e in edges], [unit[e.tail.to(device)] for e in edges]
    relabelled = [
        Edges(e.name, h, t, e.swap, e.normalized, e.first, e.last) for e, h, t in zip(edges, heads, tails, strict=True)
    ]
    live = live_units(relabelled, strength, n)
    strength = [a * (live[h][:, :, None] & live[t][:, None, :]) for a, h, t in zip(strength, heads, tails, strict=True)]
    free &= live

    def energies(x: Tensor) -> list[Tensor]:
        return [
            a * (2 * (x[h][:, :, None] - x[t][:, None, :])).exp()
            for a, h, t in zip(strength, heads, tails, strict=True)
        ]

    def gather(parts: Sequence[Tensor], ids: Sequence[Tensor]) -> Tensor:
        return torch.zeros(n, dtype=torch.float64, device=device).index_add(
            0, torch.cat([i.reshape(-1) for i in ids]), torch.cat([p.reshape(-1) for p in parts])
        )

    def sides(energy: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return gather([E.sum(2) for E in energy], heads), gather([E.sum(1) for E in energy], tails)

    def hessian(energy: Sequence[Tensor], total: Tensor, d: Tensor) -> Tensor:
        up = gather([torch.einsum("goi,gi->go", E, d[t]) for E, t in zip(energy, tails, strict=True)], heads)
        down = gather([torch.einsum("goi,go->gi", E, d[h]) for E, h in zip(energy, heads, strict=True)], tails)
        return torch.where(free, 2 * (total * d - up - down), 0)

    x = torch.zeros(n, dtype=torch.float64, device=device)
    for _ in range(12):  # damped fixed-point sweeps: in log scale, so that factors of any size shrink geometrically
        into, out = sides(energies(x))
        x = x + torch.where(free, 0.25 * (out / into).log(), 0)
    for _ in range(100):
        energy = energies(x)
        into, out = sides(energy)
        gradient = torch.where(free, into - out, 0)
        total = torch.where(free, into + out, 1)
        if float((gradient.abs() / total).max()) < 1e-13:
            break
        step = _conjugate_gradients(lambda d, E=energy, t=total: hessian(E, t, d), -gradient, 2 * total)
        # F is a sum of exponentials: a step of at most 1 in log scale keeps Newton's quadratic model honest.
        step = step / step.abs().max().clamp(min=1)
        slope, value, t = float(gradient @ step), float(sum(E.sum() for E in energy)) / 2, 1.0
        while (
            t > 1e-6
            and float(sum(E.sum() for E in energies(x + t * step))) / 2 > value + 1e-4 * t * slope + 1e-14 * value
        ):
            t /= 2
        x = x + t * step
    return x


def _conjugate_gradients(operator, b: Tensor, diagonal: Tensor, tolerance: float = 1e-14, limit: int = 2000) -> Tensor:  # type: ignore[no-untyped-def]
    """Solves operator(x) = b with Jacobi preconditioning."""
    x = torch.zeros_like(b)
    r = b.clone()
    z = r / diagonal
    p = z.clone()
    rz = r @ z
    goal = float(rz) * tolerance**2
    for _ in range(limit):
        if float(rz) <= goal or float(rz) == 0:
            break
        q = operator(p)
        alpha = rz / (p @ q)
        x, r = x + alpha * p, r - alpha * q
        z = r / diagonal
        rz, old = r @ z, rz
        p = z + (rz / old) * p
    return x
