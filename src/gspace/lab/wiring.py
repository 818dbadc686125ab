"""Where to draw the units of a small network, and which lines are skeleton weights: the paper's Figure 2 as data.

A node is a hidden unit, or a place where a chain begins or ends: an input, an output, a unit that is pinned. A line is
one or several weights between two nodes (the taps of a convolution, the pixels of a flattened channel). Biases and
BatchNorm's γ and β are not drawn: each would be a line from ground to its unit.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gspace.analysis import Edges
from gspace.optim.skeleton import Skeleton

Node = tuple[str, int, int]
"""("unit", 0, u), or ("start" | "end", k, i): input or output i of the k-th weight, where it is ground."""

Kind = Literal["free", "trained", "other"]
Line = tuple[Node, Node]


@dataclass(frozen=True)
class Drawing:
    """A network on the plane.

    Attributes:
        place: Column and height of every node.
        lines: Kind of every line: a free skeleton weight, a trained one, or neither.
        names: Parameter of every line.
    """

    place: Mapping[Node, tuple[float, float]]
    lines: Mapping[Line, Kind]
    names: Mapping[Line, str]


def arrange(model: nn.Module, skeleton: Skeleton) -> Drawing:
    """Each unit one column behind what it is first written from, weights in the order of their use."""
    weights = dict(model.named_parameters())
    lines: dict[Line, Kind] = {}
    names: dict[Line, str] = {}
    column: dict[Node, float] = {}
    reach: dict[Node, float] = {}  # where a node was written last: a residual stream is drawn where it was first
    drawn = [k for k, e in enumerate(skeleton.edges) if weights[e.name].dim() > 1]
    for k in sorted(drawn, key=lambda k: skeleton.edges[k].first):
        edges = skeleton.edges[k]
        for (tail, head), kind in _pairs(k, edges, weights[edges.name], skeleton):
            ends = [c for node, c in column.items() if node[0] == "end" and node[1] != k]
            column.setdefault(tail, max(ends, default=-0.5) + 0.5)
            column.setdefault(head, reach.get(tail, column[tail]) + 1)
            reach[head] = max(reach.get(head, 0.0), reach.get(tail, column[tail]) + 1)
            if lines.get((tail, head), "other") == "other":
                lines[tail, head] = kind
                names[tail, head] = edges.name
    return Drawing(_heights(column), lines, names)


def _pairs(k: int, edges: Edges, weight: Tensor, skeleton: Skeleton) -> Iterator[tuple[Line, Kind]]:
    kinds = edges.view(_kinds(k, weight, skeleton))
    group, out, into = kinds.shape[:3]
    strongest = kinds.reshape(group, out, into, -1).amax(3)
    for g in range(group):
        for i in range(into):
            for j in range(out):
                tail, head = int(edges.tail[g, i]), int(edges.head[g, j])
                start: Node = ("unit", 0, tail) if tail else ("start", k, g * into + i)
                end: Node = ("unit", 0, head) if head else ("end", k, g * out + j)
                yield (start, end), KINDS[int(strongest[g, j, i])]


KINDS: tuple[Kind, ...] = ("other", "trained", "free")


def _kinds(k: int, weight: Tensor, skeleton: Skeleton) -> Tensor:
    """Index into `KINDS` of every weight of the k-th parameter."""
    flat = torch.zeros(weight.numel(), dtype=torch.long)
    flat[skeleton.in_index[skeleton.in_edge == k]] = 1
    flat[skeleton.out_index[skeleton.out_edge == k]] = 2
    return flat.view(weight.shape)


def _heights(column: Mapping[Node, float]) -> dict[Node, tuple[float, float]]:
    members: dict[float, list[Node]] = defaultdict(list)
    for node in sorted(column):
        members[column[node]].append(node)
    return {node: (x, (len(nodes) - 1) / 2 - y) for x, nodes in members.items() for y, node in enumerate(nodes)}


def basis_path(drawing: Drawing, skeleton: Skeleton, line: Line) -> list[Line]:
    """in-path(tail) · line · out-path(head)."""
    into = {
        head: tail for (tail, head), kind in drawing.lines.items() if kind != "other" and _is_in(skeleton, tail, head)
    }
    out = {tail: head for (tail, head), kind in drawing.lines.items() if kind == "free"}
    before, after = [], []
    node = line[0]
    while node in into:
        before.append((into[node], node))
        node = into[node]
    node = line[1]
    while node in out:
        after.append((node, out[node]))
        node = out[node]
    return [*reversed(before), line, *after]


def _is_in(skeleton: Skeleton, tail: Node, head: Node) -> bool:
    """Whether the line holds in(head)."""
    if head[0] != "unit":
        return False
    parent = int(skeleton.parent[head[2]])
    return tail == ("unit", 0, parent) if parent else tail[0] == "start"
