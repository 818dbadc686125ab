"""Linear equations of balancing: those of layers, solved directly, and those of all units, by conjugate gradients."""

import heapq
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DENSE = 300  # layers up to which a dense matrix is faster


def solver(diagonal: Tensor, k: Tensor, l: Tensor, upper: Tensor, lower: Tensor) -> Callable[[Tensor], Tensor]:
    """b ↦ A⁻¹b for the sum A of this diagonal, `upper` at (k, l) and `lower` at (l, k); row and column 0 left out."""
    count, every = len(diagonal), torch.arange(len(diagonal), device=k.device)
    rows, columns, values = torch.cat([every, k, l]), torch.cat([every, l, k]), torch.cat([diagonal, upper, lower])
    if count > DENSE:
        return _sparse_solver(count, rows.tolist(), columns.tolist(), values.tolist())
    matrix = values.new_zeros(count * count).index_add_(0, rows * count + columns, values).reshape(count, count)
    scale = matrix.diagonal().abs().clamp(min=1e-300).rsqrt()[1:]
    inverse = torch.linalg.inv_ex(matrix[1:, 1:] * scale * scale[:, None])[0] * scale * scale[:, None]
    return lambda b: inverse @ b


def _sparse_solver(
    count: int, rows: Sequence[int], columns: Sequence[int], values: Sequence[float]
) -> Callable[[Tensor], Tensor]:
    """Elimination without pivots, fewest neighbours first: these matrices are diagonally dominant."""
    A: list[dict[int, float]] = [{} for _ in range(count)]
    for i, j, value in zip(rows, columns, values, strict=True):
        if i and j:
            A[i][j] = A[i].get(j, 0.0) + value
            A[j].setdefault(i, 0.0)
    waiting = [(len(A[i]), i) for i in range(1, count)]
    heapq.heapify(waiting)
    steps: list[tuple[int, float, list[tuple[int, float]], list[tuple[int, float]]]] = []
    while waiting:
        degree, i = heapq.heappop(waiting)
        if degree != len(A[i]):  # it has other neighbours by now
            if A[i]:
                heapq.heappush(waiting, (len(A[i]), i))
            continue
        pivot = A[i].pop(i, 0.0) or 1.0
        row = list(A[i].items())
        below = [(j, A[j].pop(i) / pivot) for j, _ in row]
        for j, factor in below:
            target = A[j]
            for k, value in row:
                target[k] = target.get(k, 0.0) - factor * value
        A[i] = {}
        steps.append((i, pivot, row, below))

    def solve(b: Tensor) -> Tensor:
        x = [0.0, *b.tolist()]
        for i, _, _, below in steps:
            for j, factor in below:
                x[j] -= factor * x[i]
        for i, pivot, row, _ in reversed(steps):
            x[i] = (x[i] - sum(value * x[k] for k, value in row)) / pivot
        return torch.tensor(x[1:], dtype=b.dtype, device=b.device)

    return solve


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
