"""Parameters of one shape, one after the other: the squares of their weights, and products of these with vectors.

Shapes as in `balance`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gspace.analysis import Edges

LARGE = 1 << 14  # entries of a matrix that is worth a product of its own
MANY, ROWS = 1 << 20, 1 << 18  # weights that are squared anew whenever they are needed, and so many at a time


class Stack(NamedTuple):
    """Parameters with equal numbers of outputs and inputs, one after the other along the group axis.

    Attributes:
        strength: a of every edge between live units, `(group, out, in)`; where they are many, weights themselves, which
            are no float64.
        head: Id that each output writes, `(group, out)`.
        tail: Id that each input reads, `(group, in)`.
        members: Their numbers, and how many groups each has.
    """

    strength: Tensor
    head: Tensor
    tail: Tensor
    members: Mapping[int, int]

    def of_each(self, values: Tensor) -> tuple[Tensor, ...]:
        """What belongs to each member; the first axis is that of groups."""
        parts: tuple[Tensor, ...] = values.split(list(self.members.values()))
        return parts


def square(view: Tensor, shift: float = 0.0) -> Tensor:
    """a = Σ over taps of w² in float64, `(group, out, in)`, of the view of a weight."""
    a = view.detach().to(torch.float64, copy=True).add_(shift).square_()
    return a.flatten(3).sum(3) if a.dim() > 3 else a


def alike(edges: Sequence[Edges], apart: Collection[int] = ()) -> list[list[int]]:
    """Numbers of edges with equal numbers of outputs and inputs; those `apart` stay by themselves."""
    alike: dict[object, list[int]] = {}
    for k, e in enumerate(edges):
        alike.setdefault(k if k in apart else (e.head.shape[1], e.tail.shape[1]), []).append(k)
    return list(alike.values())


def stacked(edges: Sequence[Edges], weights: Sequence[Tensor]) -> list[Stack]:
    views = [e.view(w.detach()) for e, w in zip(edges, weights, strict=True)]
    narrow = (v.is_floating_point() and v.dtype != torch.float64 and v.dim() == 3 and v.numel() >= MANY for v in views)
    apart = {k for k, itself in enumerate(narrow) if itself and not edges[k].shift}  # weights that are not copied
    return [
        Stack(
            views[same[0]] if same[0] in apart else _squares([(views[k], edges[k].shift) for k in same]),
            torch.cat([edges[k].head for k in same]),
            torch.cat([edges[k].tail for k in same]),
            {k: len(edges[k].head) for k in same},
        )
        for same in alike(edges, apart)
    ]


def _squares(views: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Of several weights, with their shifts, one after the other; together if they are of one kind."""
    if len(views) > 1 and len({(v.shape[1:], shift) for v, shift in views}) == 1:
        return square(torch.cat([v for v, _ in views]), views[0][1])
    return square(*views[0]) if len(views) == 1 else torch.cat([square(*some) for some in views])


def between(s: Stack, live: Tensor) -> Stack:
    """The edges between live units."""
    a = s.strength
    for ids, dim in ((s.head, 2), (s.tail, 1)):
        if not bool(live[ids].all()):
            a = a if a.dtype == torch.float64 else a.double().square_()
            a.mul_(live[ids].unsqueeze(dim))
    return s._replace(strength=a)


def factors(s: Stack, x: Tensor) -> tuple[Tensor, Tensor]:
    """exp(2x) of the heads and exp(−2x) of the tails, as columns."""
    return (2 * x[s.head]).exp()[:, :, None], (-2 * x[s.tail]).exp()[:, :, None]


def _product(a: Tensor, column: Tensor) -> Tensor:
    """a @ column, matrix by matrix where these are large: a batched product with one column is slow there."""
    if a.shape[1] * a.shape[2] < LARGE:
        return a @ column
    return torch.stack([torch.mv(matrix, v[:, 0]) for matrix, v in zip(a, column, strict=True)])[:, :, None]


def products(s: Stack, right: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
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


def gather(size: int, ids: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    index, values = torch.cat([i.reshape(-1) for i in ids]), torch.cat([p.reshape(-1) for p in parts])
    return values.new_zeros(size).index_add(0, index, values)
