"""A parameter as `Edges`, heads and tails still nodes: which node each output writes, and which each input reads.

Shapes: a parameter is viewed as `(group, out, in, *taps)`, or stored `(group, in, out, *taps)` and swapped.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gspace.analysis.equations import Equations, squash
from gspace.analysis.weights import LARGEST, Use


def layout(shape: Sequence[int], uses: Sequence[Use], equations: Equations) -> tuple[Tensor, Tensor, bool, int] | None:
    """Head, tail and whether they are swapped, given all that was done with a parameter; and elements not read.

    None: it would have to be followed element by element, and is too large for that.
    """
    in_a_row = len(shape) != len(uses[0].rows)
    shape = [math.prod(shape)] if in_a_row else shape
    head, tail, unseen = _painted(shape, uses, equations)
    for groups, swap in () if in_a_row else _candidates(shape, head, tail, uses[0].groups):
        found = _fitted(shape, head, tail, groups, swap)
        if found is not None:
            return *found, swap, unseen
    if head.numel() * tail.numel() > LARGEST:
        return None
    nodes = equations.sum(1, head, -1, tail).expand(shape)  # one for each element, from ground
    return nodes.reshape(1, -1), torch.zeros(1, 1, dtype=torch.long), False, unseen


def _painted(shape: Sequence[int], uses: Sequence[Use], equations: Equations) -> tuple[Tensor, Tensor, int]:
    """Nodes of size 1 along dimensions in which they do not change, and how many elements have none.

    Where uses overlap, the first of them is as good as the others. Rows of a table that were not read have the scale of
    those that were, where that is one.
    """
    rows, terms = [use.rows for use in uses], [[squash(equations.find(t))[0] for t in use.terms] for use in uses]
    for k, (index, (head, tail)) in enumerate(zip(rows, terms, strict=True)):
        if [len(i) for i in index] != list(shape) and all(
            bool(torch.isin(i, j).all()) for use in uses for i, j in zip(use.rows, uses[k].rows, strict=True)
        ):
            alike = [head.shape[d] == tail.shape[d] == 1 and len(i) > 1 for d, i in enumerate(index)]
            rows[k] = [torch.arange(n) if one else i for n, one, i in zip(shape, alike, index, strict=True)]
        if [len(i) for i in rows[k]] == list(shape):
            return head, tail, 0
    partial = [any(len(index[d]) < n for index in rows) for d, n in enumerate(shape)]
    painted = []
    for layer in ([torch.tensor(True)] * len(uses), *zip(*terms, strict=True)):  # what is seen, heads, tails
        dims = [
            n if part or any(t.dim() and t.shape[d] > 1 for t in layer) else 1
            for d, (n, part) in enumerate(zip(shape, partial, strict=True))
        ]
        paint = torch.zeros(dims, dtype=layer[0].dtype)
        for index, t in reversed(list(zip(rows, layer, strict=True))):
            at = [i if n > 1 or len(i) == 1 else torch.zeros_like(i[:1]) for n, i in zip(dims, index, strict=True)]
            paint[tuple(i.reshape([-1 if k == d else 1 for k in range(len(at))]) for d, i in enumerate(at))] = t
        painted.append(paint)
    seen, head, tail = painted
    return squash(head)[0], squash(tail)[0], int((~seen).sum()) * math.prod(shape) // max(seen.numel(), 1)


def _candidates(shape: Sequence[int], head: Tensor, tail: Tensor, groups: int) -> Iterator[tuple[int, bool]]:
    """Numbers of groups that the nodes may have, likely ones first, and whether they are swapped."""
    yield from ((groups, False), (groups, True), (1, False), (1, True))
    for swap, term in ((False, tail), (True, head)) if len(shape) > 1 else ():  # the side that depends on the group
        rows = term.reshape(term.shape[0], -1)
        changes = (rows[1:] != rows[:-1]).any(1).nonzero()[:, 0] + 1
        if len(changes) and shape[0] % int(changes[0]) == 0:
            yield shape[0] // int(changes[0]), swap


def _fitted(shape: Sequence[int], head: Tensor, tail: Tensor, groups: int, swap: bool) -> tuple[Tensor, Tensor] | None:
    """Head and tail as `(group, out)` and `(group, in)`; None if they are not of that form."""
    if len(shape) < 2:
        if groups > 1 or swap:
            return None
        if bool(tail.any()):
            return head.expand(shape).reshape(-1, 1), tail.expand(shape).reshape(-1, 1)
        return head.expand(shape).reshape(1, -1), torch.zeros(1, 1, dtype=torch.long)
    rows, columns = shape[0] // groups, shape[1]
    one, other = (tail, head) if swap else (head, tail)  # along the first dimension; along the second, by group
    if max(one.shape[1:]) > 1 or max(other.shape[2:], default=1) > 1:
        return None
    first = one.reshape(one.shape[0]).expand(shape[0]).reshape(groups, rows)
    by_group = other.reshape(other.shape[:2]).expand(shape[0], columns).reshape(groups, rows, columns)
    if rows > 1 and not torch.equal(by_group[:, :1].expand(by_group.shape), by_group):
        return None
    return (by_group[:, 0], first) if swap else (first, by_group[:, 0])
