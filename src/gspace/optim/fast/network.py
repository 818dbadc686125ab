"""What a compiled step works on: the tables of a network on its device, and what changes from step to step."""

import math
from array import array
from collections.abc import Mapping, Sequence
from enum import IntEnum
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from gspace.devices import on_cpu
from gspace.optim.built import Built
from gspace.optim.eager import Rules
from gspace.optim.fast.tables import RECORD, Builder, Tables, Tile, as_matrix
from gspace.optim.plan import jumps_of
from gspace.sharding import alone

Groups = Sequence[Mapping[str, Any]]
Kind = Literal["step", "show", "give"]
State = Any  # of an optimizer, by parameter
# What the passes multiply by where another optimizer moves path values.
PLAIN = {"lr": 1.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "maximize": False}
_GRAD, _DTYPE = attrgetter("grad"), attrgetter("dtype")


class Given(NamedTuple):
    """What one step is given, besides the parameters.

    Attributes:
        groups: The optimizer's parameter groups.
        places: Addresses of gradients, momentum buffers, and nothing; or of gradients, path values to be shown, and
            their gradients. All lie in memory like their parameters; 0: missing.
    """

    groups: Groups
    places: list[int]


class Outcome(IntEnum):
    """What became of a step; nothing has moved unless it was taken. On a GPU only the device knows."""

    TAKEN = 1
    NOT_FINITE = 0
    NO_PATH = -1


def depths(following: Tensor) -> Tensor:
    """How many steps it takes from each unit to ground, which follows itself."""
    depth = (following != torch.arange(len(following), device=following.device)).long()
    for at in jumps_of(following):
        depth = depth + depth[at]
    return depth


def fits(p: Tensor, like: Tensor) -> bool:
    """Whether passes over `like` can move p too: it fills a stretch of memory, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(p.stride(), p.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return (p.device, p.dtype) == (like.device, like.dtype) and not (p.grad is not None and p.grad.is_sparse)


class Bound:
    """A compiled step, bound to a network: its tables on the device, and memory of O(H) and a little per chunk.

    Args:
        rules: Its `max_ratio` and `max_drift` are kept as 0 where there is no bound.
        whole: Parameters outside of units, with their groups, that `step` moves too: plain SGD, in the same passes.
            None: there is no `step`, only `show` and `give`.
        tile: How large a part one program works on; see `tables.py`.
    """

    TILE: ClassVar[Tile] = Tile()

    @on_cpu
    def __init__(
        self,
        built: Built,
        rules: Rules,
        whole: Sequence[tuple[Tensor, int]] | None,
        tile: Tile | None = None,
    ) -> None:
        outside = whole or ()
        self.whole, self.units = whole is not None, len(built.weights)
        self.parameters = [*built.weights, *(p for p, _ in outside)]
        self.groups = [*built.groups, *(group for _, group in outside)]
        self.tile, self.spread = tile or self.TILE, rules.allocation == "spread"
        self.max_ratio, self.max_drift = (
            0.0 if bound == math.inf else float(bound) for bound in (rules.max_ratio, rules.max_drift)
        )
        device, dtype = built.weights[0].device, built.weights[0].dtype
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        H = len(built.plan.root)
        builder = Builder(self.tile, H)
        for layer, w, group in zip(built.plan.layers, built.weights, built.groups, strict=True):
            builder.add_layer(layer, w, group)
        for p, group in outside:
            builder.add_plain(p, group)
        found = builder.finish(built.plan, built.unit_group.cpu())
        self.tables = Tables(*(t.contiguous().to(device) for t in found))
        self.root = built.plan.root.to(device, torch.int32)
        self.normalized = builder.norms > 1
        self.taps = bool((found.params[:, RECORD.index("period")] > 1).any())

        def scratch(size: int, fill: float = 0.0) -> Tensor:
            return torch.full((max(size, 1),), fill, dtype=self.dtype, device=device)

        self.partial, self.sums = scratch(builder.partials), scratch(builder.sums)
        self.norms = scratch(builder.norms, 1.0)
        self.factors, self.root_grad, self.coordinates = scratch(6 * H, 1.0), scratch(H), scratch(2 * H)
        self.ratio, self.raw = built.last
        # What every step compares with, or takes where there is nothing.
        self.places, self.strides = addresses(self.parameters), [p.stride() for p in self.parameters]
        self.dtypes = {dtype}
        self.nothing = [0] * len(self.parameters)
        self.plain = [PLAIN] * (max(self.groups) + 1)
        self.single = [i for i, p in enumerate(self.parameters) if p.numel() == 1]
        self.given: Given | None = None  # what was shown

    @classmethod
    def refusal(cls, built: Built, rules: Rules, tile: Tile | None = None) -> str | None:
        """Why these parameters do not fit into tables, None if they do."""
        if built.plan.reduce is not alone:
            return "parameters are divided among processes"
        if rules.batch_norm == "exact":
            return "batch_norm='exact'"
        if len({(w.device, w.dtype) for w in built.weights}) > 1:
            return "parameters differ in dtype or device"
        for layer, weight in zip(built.plan.layers, built.weights, strict=True):
            matrix, name = as_matrix(layer.edges.view(weight)), layer.edges.name
            if matrix is None:
                return f"{name} is not dense in memory"
            if layer.edges.normalized:
                if rules.batch_norm == "paper":
                    return f"{name} feeds a BatchNorm, and batch_norm='paper'"
                if matrix.swap and matrix.row_div > 1:
                    return f"{name} feeds a BatchNorm, is stored (in, out) and has its taps on rows"
                if not matrix.swap and matrix.column_div > (tile or cls.TILE).width:
                    return f"{name} feeds a BatchNorm and has {matrix.column_div} taps"
        return None

    def stale(self) -> bool:
        """Whether parameters lie elsewhere in memory since this was made; what else may change is looked at before."""
        return addresses(self.parameters) != self.places

    def step(self, groups: Groups, state: State) -> Outcome | None:
        """Takes a step for all parameters; None if torch's operations must see to the gradients."""
        grads = self._grads()
        if grads is None:
            return None
        buffers, made = self.nothing, list[Tensor]()
        if any(group["momentum"] != 0 for group in groups):
            buffers, made = self._buffers(groups, state, grads)
        outcome = self._take("step", Given(groups, addresses(grads) + buffers + self.nothing))
        if outcome == Outcome.TAKEN:
            torch.autograd.graph.increment_version(self.parameters)
            return outcome
        for p in made:
            del state[p]["momentum_buffer"]
            if not state[p]:
                del state[p]
        return outcome

    def show(self, values: Sequence[Tensor], slopes: Sequence[Tensor]) -> Outcome | None:
        """Writes v and ∂ℓ/∂v of the parameters; None if torch's operations must see to the gradients."""
        grads = self._grads()
        if grads is None:
            return None
        self.given = Given(self.plain, addresses(grads) + addresses(values) + addresses(slopes))
        return self._take("show", self.given)

    def give(self) -> None:
        """Moves parameters to what became of v."""
        assert self.given is not None
        self._take("give", self.given)
        self.given = None
        torch.autograd.graph.increment_version(self.parameters)

    def _take(self, kind: Kind, given: Given) -> Outcome:
        raise NotImplementedError

    def skipped(self) -> int:
        """How many steps a GPU has not taken because a gradient was not finite."""
        return 0

    def _grads(self) -> list[Tensor | None] | None:
        """Gradients that lie in memory like their parameters."""
        grads = list(map(_GRAD, self.parameters))
        for i in self.single:  # what torch has not negated yet, where it lies like its parameter: an imaginary part
            if grads[i] is not None and grads[i].is_neg():
                grads[i] = grads[i].resolve_neg()
        try:  # the usual case
            if list(map(Tensor.stride, grads)) == self.strides and set(map(_DTYPE, grads)) == self.dtypes:
                return grads
        except (TypeError, RuntimeError):  # one is missing, or sparse
            pass
        if all(g is None for g in grads[: self.units]) or any(g.is_sparse for g in grads if g is not None):
            return None
        return [None if g is None else _like(p, g) for p, g in zip(self.parameters, grads, strict=True)]

    def _buffers(self, groups: Groups, state: State, grads: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
        """Addresses of momentum buffers, and the parameters for which one was made."""
        buffers: list[Tensor | None] = []
        made = []
        for i, (p, g, group) in enumerate(zip(self.parameters, grads, self.groups, strict=True)):
            buffer = None
            if groups[group]["momentum"] != 0 and (i < self.units or g is not None):
                buffer = state[p].get("momentum_buffer")
                made += [p] * (buffer is None)
                buffer = state[p]["momentum_buffer"] = torch.zeros_like(p) if buffer is None else _like(p, buffer)
            buffers.append(buffer)
        return addresses(buffers), made


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """`value` with the strides, dtype and device of the parameter; strides of dimensions of size 1 mean nothing."""
    if (value.dtype, value.device, value.shape) == (parameter.dtype, parameter.device, parameter.shape):
        strides = zip(parameter.shape, parameter.stride(), value.stride(), strict=True)
        if all(size == 1 or mine == other for size, mine, other in strides):
            return value
    return torch.empty_like(parameter).copy_(value)


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
        numbers.extend((lr, group["momentum"], group["nesterov"], decay, sign))
    return numbers
