"""Parameters as `Edges`: which node each output of a parameter writes, and which each input reads.

Shapes: a parameter is viewed as `(group, out, in, *taps)`, or stored `(group, in, out, *taps)` and swapped.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gspace.analysis.equations import Equations, squash
from gspace.analysis.weights import LARGEST, Use, on_grid


class Layout(NamedTuple):
    """Nodes of a parameter.

    Attributes:
        head: `(group, out)`.
        tail: `(group, in)`.
        swap: Stored (in, out).
        shift: `shift` + w is what scales.
        unseen: Elements that no run has read.
    """

    head: Tensor
    tail: Tensor
    swap: bool
    shift: float
    unseen: int


class Box(NamedTuple):
    """A use in terms of the parameter's dimensions: nodes have size 1 along those in which they do not change."""

    starts: list[int]
    sizes: list[int]
    head: Tensor
    tail: Tensor


def layout(parameter: Tensor, begin: int, uses: Sequence[Use], equations: Equations) -> Layout:
    """How `parameter` is laid out, given all that was done with it."""
    shape = list(parameter.shape) or [1]
    boxes: list[Box] = []
    for use in uses:
        box = _box(parameter, begin, use, equations)
        if box is not None and not any((box.starts, box.sizes) == (b.starts, b.sizes) for b in boxes):
            boxes.append(box)
    boxes = [_extended(b, shape) if all(_within(other, b) for other in boxes) else b for b in boxes]
    whole = next((b for b in boxes if b.sizes == shape), None)
    joined = whole or _joined(boxes, shape)
    if joined is not None:
        head, tail = joined.head, joined.tail
        for groups, swap in [(uses[0].groups, False), (uses[0].groups, True), *_candidates(shape, head, tail)]:
            found = _fitted(shape, head, tail, groups, swap)
            if found is not None:
                return Layout(*found, swap, uses[0].shift, 0)
    return _elementwise(parameter, begin, uses, equations)


def _box(parameter: Tensor, begin: int, use: Use, equations: Equations) -> Box | None:
    """`use` along the dimensions of the parameter; None if it does not lie along them."""
    steps = [s if n > 1 else 0 for n, s in zip(parameter.shape, parameter.stride(), strict=True)]
    strides = {s for n, s in zip(use.place.sizes, use.place.strides, strict=True) if n > 1} | set(steps) - {0}
    grid = on_grid(use, sorted(strides, reverse=True), begin)
    if grid is None:
        return None
    starts, sizes, terms = grid
    order = sorted(strides, reverse=True)
    starts_of, sizes_of, dims_of = [], [], []
    for n, step in zip(parameter.shape, steps, strict=True):
        dims = [k for k, s in enumerate(order) if step and step <= s < step * n]
        start = sum(starts[k] * order[k] for k in dims) // step if step else 0
        count = 1
        for k in dims:
            count *= sizes[k]
        starts_of.append(start)
        sizes_of.append(count)
        dims_of.append(dims)
    merged = []
    for term in terms:
        (few,) = squash(equations.find(term))
        shape = []
        for dims in dims_of:
            vary = any(few.shape[k] > 1 for k in dims)
            few = few.expand([sizes[k] if vary and k in dims else n for k, n in enumerate(few.shape)])
            shape.append(_product(few.shape[k] for k in dims))
        merged.append(few.permute([k for dims in dims_of for k in dims]).reshape(shape or [1]))
    return Box(starts_of or [0], sizes_of or [1], *merged)


def _product(sizes: object) -> int:
    n = 1
    for size in sizes:  # type: ignore[attr-defined]
        n *= size
    return n


def _within(inner: Box, outer: Box) -> bool:
    places = zip(inner.starts, inner.sizes, outer.starts, outer.sizes, strict=True)
    return all(j <= i and i + n <= j + m for i, n, j, m in places)


def _extended(box: Box, shape: Sequence[int]) -> Box:
    """Rows of a table that were not read have the scale of those that were, where that is one."""
    starts, sizes = list(box.starts), list(box.sizes)
    for d, n in enumerate(shape):
        if box.head.shape[d] == 1 and box.tail.shape[d] == 1 and sizes[d] > 1:
            starts[d], sizes[d] = 0, n
    return box._replace(starts=starts, sizes=sizes)


def _joined(boxes: Sequence[Box], shape: Sequence[int]) -> Box | None:
    """Slices along the first dimension that fill the parameter, as one."""
    ordered = sorted(boxes, key=lambda b: b.starts[0])
    at = 0
    for box in ordered:
        if box.starts[0] != at or box.sizes[1:] != list(shape[1:]):
            return None
        at += box.sizes[0]
    if at != shape[0] or not ordered:
        return None
    sides = []
    for side in ("head", "tail"):
        terms = [getattr(b, side) for b in ordered]
        wide = [max(t.shape[d] for t in terms) for d in range(1, len(shape))]
        terms = [t.expand(b.sizes[0], *wide) for t, b in zip(terms, ordered, strict=True)]
        sides.append(squash(torch.cat(terms))[0])
    return Box([0] * len(shape), list(shape), *sides)


def _candidates(shape: Sequence[int], head: Tensor, tail: Tensor) -> list[tuple[int, bool]]:
    found = [(1, False), (1, True)]
    if len(shape) > 1:
        for swap, term in ((False, tail), (True, head)):  # the side that depends on the group
            rows = term.reshape(term.shape[0], -1)
            changes = (rows[1:] != rows[:-1]).any(1).nonzero()[:, 0] + 1
            if len(changes):
                size = int(changes[0])
                if shape[0] % size == 0:
                    found.append((shape[0] // size, swap))
    return found


def _fitted(shape: Sequence[int], head: Tensor, tail: Tensor, groups: int, swap: bool) -> tuple[Tensor, Tensor] | None:
    """Head and tail as `(group, out)` and `(group, in)`; None if they are not of that form."""
    if len(shape) == 1:
        if groups > 1 or swap:
            return None
        if bool(tail.any()):
            return head.expand(shape).reshape(-1, 1), tail.expand(shape).reshape(-1, 1)
        return head.expand(shape).reshape(1, -1), torch.zeros(1, 1, dtype=torch.long)
    rows, columns = shape[0] // groups, shape[1]
    one, other = (tail, head) if swap else (head, tail)  # along the first dimension; along the second, by group
    if max(one.shape[1:], default=1) > 1 or max(other.shape[2:], default=1) > 1:
        return None
    first = one.reshape(one.shape[0]).expand(shape[0]).reshape(groups, rows)
    by_group = other.reshape(other.shape[:2]).expand(shape[0], columns).reshape(groups, rows, columns)
    if rows > 1 and not torch.equal(by_group[:, :1].expand(by_group.shape), by_group):
        return None
    second = by_group[:, 0]
    return (second, first) if swap else (first, second)


def _elementwise(parameter: Tensor, begin: int, uses: Sequence[Use], equations: Equations) -> Layout:
    """One node for each element, from ground."""
    sizes, strides = parameter.shape, parameter.stride()
    span = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    nodes, seen = torch.zeros(span, dtype=torch.long), torch.zeros(span, dtype=torch.bool)
    for use in reversed(uses):
        if use.head.numel() * use.tail.numel() > LARGEST:
            equations.ground(torch.cat([use.head.reshape(-1), use.tail.reshape(-1)]))
        where = use.place.sizes, use.place.strides, use.place.offset - begin
        nodes.as_strided(*where).copy_(equations.sum(1, use.head, -1, use.tail))
        seen.as_strided(*where).fill_(True)
    found, known = (t.as_strided(sizes, strides).reshape(1, -1) for t in (nodes, seen))
    return Layout(found, torch.zeros(1, 1, dtype=torch.long), False, uses[0].shift, int((~known).sum()))
