"""What a compiled step works on: the tables of a network on its device, and what changes from step to step."""

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspace.devices import on_cpu
from gspace.step import BatchNormRule, Layer
from gspace.tables import RECORD, Builder, Tables, Tile, as_matrix

Groups = Sequence[Mapping[str, Any]]


class Given(NamedTuple):
    """What one step is given, besides the parameters.

    Attributes:
        groups: The optimizer's parameter groups.
        grads, buffers: Gradients and momentum buffers; they lie in memory like their parameters, None is a missing one.
        fresh: Whether the buffer is new, per parameter.
        incoming, outgoing: The coordinates Ĩ and Õ.
        root_buffer: Momentum of the trained skeleton paths; None without momentum.
        root_fresh: Whether that is new.
    """

    groups: Groups
    grads: Sequence[Tensor | None]
    buffers: Sequence[Tensor | None]
    fresh: list[bool]
    incoming: Tensor
    outgoing: Tensor
    root_buffer: Tensor | None
    root_fresh: bool


def is_dense(parameter: Tensor) -> bool:
    """Whether its elements fill a stretch of memory without gaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(parameter.stride(), parameter.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def refusal(layers: Sequence[Layer], weights: Sequence[Tensor], rule: BatchNormRule, tile: Tile = Tile()) -> str | None:
    """Why these parameters do not fit into tables, None if they do."""
    if len({(w.device, w.dtype) for w in weights}) > 1:
        return "parameters differ in dtype or device"
    for layer, weight in zip(layers, weights, strict=True):
        matrix, name = as_matrix(layer.edges.view(weight)), layer.edges.name
        if matrix is None:
            return f"{name} is not dense in memory"
        if layer.edges.normalized and rule == "released":
            if matrix.swap and matrix.row_div > 1:
                return f"{name} feeds a BatchNorm, is stored (in, out) and has its taps on rows"
            if not matrix.swap and matrix.column_div > tile.width:
                return f"{name} feeds a BatchNorm and has {matrix.column_div} taps"
    return None


class Network:
    """The tables of a network on its device, and the memory that a step works in: O(H), and a little per chunk.

    Args:
        layers, weights: Parameters that touch units.
        outside: Other parameters of the same dtype and device: plain SGD, in the same passes.
        groups: Parameter group of each of `weights` and `outside`.
        root: Root of each unit.
        unit_group: Parameter group of in(r) of each root r.
        ratio, raw: Where path ratios are left, bounded and not; ones.
        max_ratio, max_drift: Kept as 0 where there is no bound.
        fold_items: Items of one program of the fold, where each is the sum of many.
    """

    @on_cpu
    def __init__(
        self,
        layers: Sequence[Layer],
        weights: Sequence[Tensor],
        outside: Sequence[Tensor],
        groups: Sequence[int],
        root: Tensor,
        unit_group: Tensor,
        ratio: Tensor,
        raw: Tensor,
        *,
        rule: BatchNormRule,
        spread: bool,
        max_ratio: float,
        max_drift: float,
        max_path_grad_norm: float | None,
        tile: Tile,
        fold_items: int,
    ) -> None:
        self.parameters = [*weights, *outside]
        self.spread, self.tile, self.fold_items = spread, tile, fold_items
        self.max_ratio, self.max_drift = (
            0.0 if bound == math.inf else float(bound) for bound in (max_ratio, max_drift)
        )
        self.max_norm = max_path_grad_norm
        device = weights[0].device
        self.dtype = torch.float64 if weights[0].dtype == torch.float64 else torch.float32
        builder = Builder(rule, tile, len(root), fold_items)
        for layer, w, group in zip(layers, weights, groups, strict=False):
            builder.add_layer(layer, w, group)
        for p, group in zip(outside, groups[len(weights) :], strict=True):
            builder.add_plain(p, group)
        found, self.sizes = builder.finish(root.cpu(), unit_group.cpu())
        self.tables = Tables(*(t.contiguous().to(device) for t in found))
        self.root = root.to(device, torch.int32)
        self.normalized = self.sizes.norms > 1
        self.weighted = self.normalized and rule == "paper"
        self.taps = bool((found.params[:, RECORD.index("period")] > 1).any())

        def scratch(size: int, fill: float = 0.0) -> Tensor:
            return torch.full((max(size, 1),), fill, dtype=self.dtype, device=device)

        H = len(root)
        self.partial, self.sums = scratch(self.sizes.partials), scratch(self.sizes.sums)
        self.norms = scratch(self.sizes.norms, 1.0)
        self.factors, self.root_grad = scratch(6 * H), scratch(H)
        self.ratio, self.raw = ratio, raw
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
