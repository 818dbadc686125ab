"""Steps compiled: in Triton for a GPU, in C for a CPU that has a compiler.

`step.py` is the definition and `eager.py` takes its steps; the passes here do the same for all parameters at once: a
whole step of SGD, or the two halves around another optimizer's. For GSGD `fused=` and `foreach=` choose as they do in
torch.optim: None takes what is compiled if that is possible, `fused=True` insists on it, any value of `foreach`, or
`fused=False`, asks for torch's operations. What fits no table (mixed dtypes, weights with gaps in memory) is left to
them too.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from gspace.optim.fast import native
from gspace.optim.fast.network import Given, Groups, Network, Outcome, Task, addresses, is_dense
from gspace.optim.fast.tables import Tile

_GRAD, _DTYPE = attrgetter("grad"), attrgetter("dtype")

State = Any  # of an optimizer, by parameter
# What the passes multiply by where another optimizer moves path values.
PLAIN = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "maximize": False}
Rest = list[list[Tensor]]  # other parameters of each group


class Way(Protocol):
    """One implementation, bound to a network."""

    def step(self, given: Given) -> Outcome: ...

    def show(self, given: Given) -> Outcome: ...

    def give(self, given: Given) -> None: ...


def choose(task: Task, groups: Groups, outside: Rest) -> "Bound | str":
    """What takes the steps of a task, or why torch's operations do; `groups` may say what is wanted."""
    fused = [group["fused"] for group in groups]
    if not any(fused):
        asked = [
            f"{key}={value}" for key in ("foreach", "fused") for group in groups if (value := group[key]) is not None
        ]
        if asked:
            return asked[0]
    reasons = []
    for attempt in (_triton, _native):
        found = attempt(task, outside)
        if isinstance(found, Bound):
            return found
        reasons.append(found)
    if any(fused) and task.weights:
        raise RuntimeError(f"fused=True, but {', and '.join(reasons)}. Leave fused=None to take what is available.")
    return "; ".join(reasons)


def _triton(task: Task, outside: Rest) -> "Bound | str":
    if not task.weights or task.weights[0].device.type != "cuda":
        return "no parameter on a GPU touches a unit"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    from gspace.optim.fast import launch

    return launch.refusal(task) or bind(task, outside, launch.FusedStep, Tile(), launch.FOLD)


def _native(task: Task, outside: Rest) -> "Bound | str":
    return native.refusal(task) or bind(task, outside, native.NativeStep, native.TILE, native.FOLD)


def bind(task: Task, outside: Rest, way: Callable[[Network], Way], tile: Tile, fold_items: int) -> "Bound":
    """A way with the tables of a task; other parameters that lie alike in memory are moved in the same passes."""
    home = task.weights[0].device, task.weights[0].dtype
    taken = [
        (p, g)
        for g, some in enumerate(outside)
        for p in some
        if (p.device, p.dtype) == home and is_dense(p) and (p.grad is None or not p.grad.is_sparse)
    ]
    known = {id(p) for p, _ in taken}
    rest = [[p for p in some if id(p) not in known] for some in outside]
    network = Network(task, taken, tile, fold_items)
    return Bound(way(network), network.parameters, network.groups, len(task.weights), rest)


class Bound:
    """A way, and the parameters it moves.

    Args:
        parameters: Those that touch units, and perhaps others.
        groups: Their parameter groups.
        units: How many touch units; they come first.
        rest: The other parameters of each group: torch's own step.
    """

    def __init__(self, way: Way, parameters: Sequence[Tensor], groups: Sequence[int], units: int, rest: Rest) -> None:
        self.way, self.parameters, self.groups, self.units, self.rest = way, list(parameters), groups, units, rest
        self.gpu = self.parameters[0].is_cuda
        self.places, self.strides = addresses(parameters), [p.stride() for p in parameters]
        self.plain = [PLAIN] * (max(groups) + 1)
        self.dtypes = {p.dtype for p in parameters}
        self.nothing: list[Tensor | None] = [None] * len(parameters)
        self.never = [False] * len(parameters)
        self.complete = not any(rest)
        self.single = [i for i, p in enumerate(parameters) if p.numel() == 1]

    def stale(self) -> bool:
        """Whether parameters lie elsewhere or otherwise in memory since this was made."""
        return (
            addresses(self.parameters) != self.places
            or list(map(Tensor.stride, self.parameters)) != self.strides
            or set(map(_DTYPE, self.parameters)) != self.dtypes
        )

    def step(self, groups: Groups, state: State) -> Outcome | None:
        """Takes a step for the parameters that it moves; None if torch's operations must see to the gradients."""
        grads = self._grads()
        if grads is None:
            return None
        for group, some in [] if self.complete else list(zip(groups, self.rest, strict=True)):
            _refuse_unfused(group, some)
        buffers, fresh = self.nothing, self.never
        if any(group["momentum"] != 0 for group in groups):
            buffers, fresh = self._buffers(groups, state, grads)
        outcome = self.way.step(Given(groups, grads, buffers, fresh))
        if outcome != Outcome.TAKEN:
            self._forget(state, fresh)
        return outcome

    def show(self, values: Sequence[Tensor], slopes: Sequence[Tensor]) -> tuple[Given, Outcome] | None:
        """Writes v and ∂ℓ/∂v of the parameters; None if torch's operations must see to the gradients."""
        grads = self._grads()
        if grads is None:
            return None
        given = Given(self.plain, grads, values, addresses(slopes))
        return given, self.way.show(given)

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

    def _buffers(
        self, groups: Groups, state: State, grads: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[bool]]:
        buffers: list[Tensor | None] = []
        fresh = []
        for i, (p, g, group) in enumerate(zip(self.parameters, grads, self.groups, strict=True)):
            has = groups[group]["momentum"] != 0 and (i < self.units or g is not None)
            buffer = state[p].get("momentum_buffer") if has and p in state else None
            fresh.append(has and buffer is None)
            if has:
                buffer = torch.zeros_like(p) if buffer is None else _like(p, buffer)
                state[p]["momentum_buffer"] = buffer
            buffers.append(buffer)
        return buffers, fresh

    def _forget(self, state: State, fresh: Sequence[bool]) -> None:
        """Buffers made for a step that was not taken."""
        for p, new in zip(self.parameters, fresh, strict=True):
            if new:
                del state[p]["momentum_buffer"]
                if not state[p]:
                    del state[p]

    def sparse(self) -> bool:
        """Whether a parameter outside of units, which it moves too, has a sparse gradient by now."""
        return any(p.grad is not None and p.grad.is_sparse for p in self.parameters[self.units :])

    def skipped(self) -> int:
        """How many steps a GPU has not taken because a gradient was not finite. Waits for the device."""
        flags = getattr(self.way, "flags", None)
        return 0 if flags is None else int(flags[2])


def _refuse_unfused(group: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
    """What torch's fused SGD would refuse after the units have moved."""
    if not group["fused"]:
        return
    for p in parameters:
        if p.grad is not None and (p.grad.is_sparse or not p.is_floating_point()):
            what = "a sparse gradient" if p.grad.is_sparse else f"dtype {p.dtype}"
            raise RuntimeError(
                f"fused=True, but a parameter of shape {tuple(p.shape)} outside of every unit has {what}. "
                "Leave fused=None to take what is available."
            )


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """`value` with the strides, dtype and device of the parameter; strides of dimensions of size 1 mean nothing."""
    if (value.dtype, value.device, value.shape) == (parameter.dtype, parameter.device, parameter.shape):
        if value.stride() == parameter.stride():
            return value
        strides = zip(parameter.shape, parameter.stride(), value.stride(), strict=True)
        if all(size == 1 or mine == other for size, mine, other in strides):
            return value
    return torch.empty_like(parameter).copy_(value)
