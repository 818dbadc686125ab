"""What a compiled step works on: the tables of a network on its device, and what changes from step to step."""

import math
from array import array
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspace.devices import on_cpu
from gspace.optim.fast.tables import RECORD, Builder, Tables, Tile, as_matrix
from gspace.optim.step import BatchNormRule, Plan
from gspace.sharding import alone

Groups = Sequence[Mapping[str, Any]]


class Task(NamedTuple):
    """What an implementation of the step is bound to.

    Attributes:
        plan: The skeleton.
        weights: Parameters that touch units.
        groups: Parameter group of each.
        unit_group: Parameter group of in(r) of each root r.
        ratio, raw: Where path ratios are left, bounded and not; ones.
        rule: What is done before a BatchNorm.
        spread: Whether free weights take part of a path's change.
        max_ratio, max_drift, max_path_grad_norm: Bounds.
    """

    plan: Plan
    weights: Sequence[Tensor]
    groups: Sequence[int]
    unit_group: Tensor
    ratio: Tensor
    raw: Tensor
    rule: BatchNormRule
    spread: bool
    max_ratio: float
    max_drift: float
    max_path_grad_norm: float | None


class Given(NamedTuple):
    """What one step is given, besides the parameters.

    Attributes:
        groups: The optimizer's parameter groups.
        grads, buffers: Gradients and momentum buffers; they lie in memory like their parameters, None is a missing one.
        fresh: Whether the buffer is new, per parameter. Where path values are shown, they are the buffers, and this is
            the address of their gradient.
    """

    groups: Groups
    grads: Sequence[Tensor | None]
    buffers: Sequence[Tensor | None]
    fresh: Sequence[int]


class Outcome(IntEnum):
    """What became of a step; nothing has moved unless it was taken. On a GPU only the device knows."""

    TAKEN = 1
    NOT_FINITE = 0
    NO_PATH = -1


def depths(following: Tensor) -> Tensor:
    """How many steps it takes from each unit to ground, which follows itself."""
    depth, at = (following != torch.arange(len(following), device=following.device)).long(), following
    while bool((depth[at] > 0).any()):
        depth, at = depth + depth[at], at[at]
    return depth


def is_dense(parameter: Tensor) -> bool:
    """Whether its elements fill a stretch of memory without gaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(parameter.stride(), parameter.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def refusal(task: Task, tile: Tile = Tile()) -> str | None:
    """Why these parameters do not fit into tables, None if they do."""
    if task.plan.reduce is not alone:
        return "parameters are divided among processes"
    if len({(w.device, w.dtype) for w in task.weights}) > 1:
        return "parameters differ in dtype or device"
    for layer, weight in zip(task.plan.layers, task.weights, strict=True):
        matrix, name = as_matrix(layer.edges.view(weight)), layer.edges.name
        if matrix is None:
            return f"{name} is not dense in memory"
        if layer.edges.normalized and task.rule == "released":
            if matrix.swap and matrix.row_div > 1:
                return f"{name} feeds a BatchNorm, is stored (in, out) and has its taps on rows"
            if not matrix.swap and matrix.column_div > tile.width:
                return f"{name} feeds a BatchNorm and has {matrix.column_div} taps"
    return None


class Network:
    """The tables of a network on its device, and the memory that a step works in: O(H), and a little per chunk.

    Args:
        task: What the step is bound to. Its `max_ratio` and `max_drift` are kept as 0 where there is no bound.
        outside: Other parameters of the same dtype and device, with their groups: plain SGD, in the same passes.
        fold_items: Items of one program of the fold, where each is the sum of many.
    """

    @on_cpu
    def __init__(self, task: Task, outside: Sequence[tuple[Tensor, int]], tile: Tile, fold_items: int) -> None:
        self.parameters = [*task.weights, *(p for p, _ in outside)]
        self.groups = [*task.groups, *(group for _, group in outside)]
        self.spread, self.tile, self.fold_items = task.spread, tile, fold_items
        self.max_ratio, self.max_drift = (
            0.0 if bound == math.inf else float(bound) for bound in (task.max_ratio, task.max_drift)
        )
        self.max_norm = task.max_path_grad_norm
        device, dtype = task.weights[0].device, task.weights[0].dtype
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        builder = Builder(task.rule, tile, len(task.plan.root), fold_items)
        for layer, w, group in zip(task.plan.layers, task.weights, task.groups, strict=True):
            builder.add_layer(layer, w, group)
        for p, group in outside:
            builder.add_plain(p, group)
        found, self.sizes = builder.finish(task.plan, task.unit_group.cpu())
        self.tables = Tables(*(t.contiguous().to(device) for t in found))
        self.root = task.plan.root.to(device, torch.int32)
        self.normalized = self.sizes.norms > 1
        self.weighted = self.normalized and task.rule == "paper"
        self.taps = bool((found.params[:, RECORD.index("period")] > 1).any())

        def scratch(size: int, fill: float = 0.0) -> Tensor:
            return torch.full((max(size, 1),), fill, dtype=self.dtype, device=device)

        H = len(task.plan.root)
        self.partial, self.sums = scratch(self.sizes.partials), scratch(self.sizes.sums)
        self.norms = scratch(self.sizes.norms, 1.0)
        self.factors, self.root_grad, self.coordinates = scratch(6 * H), scratch(H), scratch(2 * H)
        self.ratio, self.raw = task.ratio, task.raw
        self.squares = scratch(len(self.tables.chunks))


def addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    """Where tensors lie; 0 for one that is missing."""
    try:
        return list(map(Tensor.data_ptr, tensors))  # type: ignore[arg-type]  # half the time of the line below
    except TypeError:
        return [0 if x is None else x.data_ptr() for x in tensors]


def hyper_parameters(groups: Groups, *, read: bool) -> "array[float]":
    """Hyper-parameters as the passes read them. Those in tensors on a device: read, which waits for it, or 0."""
    numbers = array("d")
    for group in groups:
        lr, decay = (
            0.0 if isinstance(x, Tensor) and x.device.type != "cpu" and not read else float(x)
            for x in (group["lr"], group["weight_decay"])
        )
        sign = -1.0 if group["maximize"] else 1.0
        numbers.extend((lr, group["momentum"], group["dampening"], group["nesterov"], decay, sign))
    return numbers
