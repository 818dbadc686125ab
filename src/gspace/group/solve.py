"""Linear equations of balancing: those of layers, solved directly, and those of all units, by conjugate gradients."""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DENSE = 300  # layers up to which a dense matrix is faster


class Pattern:
    """Matrices with entries at the diagonal, at all (k, l) and at all (l, k); row and column 0 are left out."""

    def __init__(self, count: int, k: Tensor, l: Tensor) -> None:
        every = torch.arange(count, device=k.device)
        self.count, self.rows, self.columns = count, torch.cat([every, k, l]), torch.cat([every, l, k])
        self.elimination = _eliminated(count, self.rows.tolist(), self.columns.tolist()) if count > DENSE else None

    def solver(self, diagonal: Tensor, upper: Tensor, lower: Tensor) -> Callable[[Tensor], Tensor]:
        """b ↦ A⁻¹b for the sum A of this diagonal, `upper` at (k, l) and `lower` at (l, k)."""
        values, n = torch.cat([diagonal, upper, lower]), self.count
        if self.elimination is not None:
            return self.elimination.solver(values)
        matrix = values.new_zeros(n * n).index_add_(0, self.rows * n + self.columns, values).reshape(n, n)
        scale = matrix.diagonal().abs().clamp(min=1e-300).rsqrt()[1:]
        inverse = torch.linalg.inv_ex(matrix[1:, 1:] * scale * scale[:, None])[0] * scale * scale[:, None]
        return lambda b: inverse @ b


class Elimination(NamedTuple):
    """Elimination without pivots: these matrices are diagonally dominant. Entries have places in one list.

    Attributes:
        size: How many places there are; the first is for what is left out.
        given: Place of each value that a matrix is made of.
        steps: For each row i that is eliminated: i, the place of (i, i), those of (i, j) and (j, i) with j, for every j
            that is left, and what changes: the places of (j, k), (j, i) and (i, k).
    """

    size: int
    given: list[int]
    steps: list[tuple[int, int, list[tuple[int, int, int]], list[tuple[int, int, int]]]]

    def solver(self, values: Tensor) -> Callable[[Tensor], Tensor]:
        given = torch.tensor(self.given, device=values.device)
        a = values.new_zeros(self.size).index_add_(0, given, values).tolist()
        for _, pivot, ends, changes in self.steps:
            a[pivot] = a[pivot] or 1.0
            for _, _, below in ends:
                a[below] /= a[pivot]
            for target, below, beside in changes:
                a[target] -= a[below] * a[beside]

        def solve(b: Tensor) -> Tensor:
            x = [0.0, *b.tolist()]
            for i, _, ends, _ in self.steps:
                for j, _, below in ends:
                    x[j] -= a[below] * x[i]
            for i, pivot, ends, _ in reversed(self.steps):
                known = 0.0
                for j, beside, _ in ends:
                    known += a[beside] * x[j]
                x[i] = (x[i] - known) / a[pivot]
            return torch.tensor(x[1:], dtype=b.dtype, device=b.device)

        return solve


def _eliminated(count: int, rows: Sequence[int], columns: Sequence[int]) -> Elimination:
    """The order in which rows are eliminated, fewest neighbours first, and the entries that this takes."""
    places = {(0, 0): 0}

    def place(i: int, j: int) -> int:
        return places.setdefault((i, j), len(places))

    near: list[dict[int, None]] = [{} for _ in range(count)]  # in order
    for i, j in zip(rows, columns, strict=True):
        if i and j:
            near[i][j] = near[j][i] = None
    given = [place(i, j) if i and j else 0 for i, j in zip(rows, columns, strict=True)]
    waiting = [(len(near[i]), i) for i in range(1, count)]
    heapq.heapify(waiting)
    steps = []
    while waiting:
        degree, i = heapq.heappop(waiting)
        if degree != len(near[i]):  # it has other neighbours by now
            if near[i]:
                heapq.heappush(waiting, (len(near[i]), i))
            continue
        near[i].pop(i, None)
        left = list(near[i])
        ends = [(j, place(i, j), place(j, i)) for j in left]
        steps.append((i, place(i, i), ends, [(place(j, k), place(j, i), place(i, k)) for j in left for k in left]))
        for j in left:
            del near[j][i]
            near[j].update(near[i])
        near[i] = {}
    return Elimination(len(places), given, steps)


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
