"""Which implementation takes the steps of GSGD, and what it needs to be handed each time.

`step.py` is the definition. The same two passes exist fused, for a GPU (`launch.py`, Triton) and for a CPU
(`native.py`, C, where there is a compiler), and in few operations for a CPU (`foreach.py`). `fused=` and `foreach=`
choose as they do in torch.optim: None takes the best that is available, `fused=True` insists, `foreach=False` is the
definition, one weight after the other. What fits none of them (mixed dtypes, weights with gaps in memory) is left to
the definition too.
"""

import importlib.util
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gspace.base import GSpaceOptimizer, capturing
from gspace.fast import foreach, native
from gspace.fast.network import Given, Network, Task, addresses, is_dense
from gspace.fast.tables import Tile

if TYPE_CHECKING:
    from gspace.optim import GSGD


_GRAD, _DTYPE = attrgetter("grad"), attrgetter("dtype")


class Way(Protocol):
    """One implementation, bound to the parameters of an optimizer.

    `step` moves weights, momentum buffers and coordinates in place. It says False, and has moved nothing, if a gradient
    is not finite; on a GPU only the device knows, and nothing moves there.
    """

    def step(self, given: Given) -> bool: ...


def step(optimizer: "GSGD") -> bool:
    """Takes a step for `optimizer`; False if that is left to the definition."""
    bound = optimizer._fast
    if bound is None or (isinstance(bound, Bound) and bound.gpu and capturing()):  # else `checks` has just seen to it
        bound = bind(optimizer)
    return isinstance(bound, Bound) and bound.step(optimizer)


def checks(optimizer: "GSGD") -> bool:
    """Whether the step itself finds out that a gradient is not finite."""
    bound = bind(optimizer)
    return isinstance(bound, Bound) and bound.complete


def bind(optimizer: "GSGD") -> "Bound | Declined":
    """The way of `optimizer`, or why there is none; kept until its parameters move or its settings change."""
    bound = optimizer._fast
    if bound is None or bound.stale(optimizer):
        found = _choose(optimizer)
        bound = optimizer._fast = Declined(optimizer, found) if isinstance(found, str) else found
    return bound


def name(optimizer: "GSGD") -> str:
    """Which way is bound to `optimizer`; empty before the first step."""
    bound = optimizer._fast
    if bound is None:
        return ""
    return type(bound.way).__name__ if isinstance(bound, Bound) else f"the definition: {bound.reason}"


def _choose(optimizer: "GSGD") -> "Bound | str":
    foreach_wanted, fused_wanted = ([group[key] for group in optimizer.param_groups] for key in ("foreach", "fused"))
    if any(fused_wanted):
        tries = [_triton, _native]
    elif False in foreach_wanted:
        return "foreach=False"
    else:
        tries = [_foreach] if any(foreach_wanted) or False in fused_wanted else [_triton, _native, _foreach]
    reasons = []
    for attempt in tries:
        found = attempt(optimizer)
        if isinstance(found, Bound):
            return found
        reasons.append(found)
    if any(fused_wanted) and optimizer._layers:
        raise RuntimeError(f"fused=True, but {', and '.join(reasons)}. Leave fused=None to take what is available.")
    return "; ".join(reasons)


def task(optimizer: "GSGD") -> Task:
    """What a way of `optimizer` is bound to."""
    o = optimizer
    ratio, raw = o._last
    return Task(
        layers=o._layers,
        weights=o._weights,
        groups=o._layer_group,
        root=o._root,
        unit_group=o._unit_group,
        ratio=ratio,
        raw=raw,
        rule=o.batch_norm,
        spread=o.allocation == "spread",
        max_ratio=o.max_ratio,
        max_drift=o.max_drift,
        max_path_grad_norm=o.max_path_grad_norm,
    )


def _triton(optimizer: "GSGD") -> "Bound | str":
    weights = optimizer._weights
    if not weights or weights[0].device.type != "cuda":
        return "no parameter on a GPU touches a unit"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    from gspace.fast import launch

    reason = launch.refusal(task(optimizer))
    return reason or _tabulate(optimizer, launch.FusedStep, Tile(), launch.FOLD)


def _native(optimizer: "GSGD") -> "Bound | str":
    reason = native.refusal(task(optimizer))
    return reason or _tabulate(optimizer, native.NativeStep, native.TILE, native.FOLD)


def _foreach(optimizer: "GSGD") -> "Bound | str":
    this = task(optimizer)
    reason = foreach.refusal(this)
    return reason or Bound(optimizer, foreach.ForeachStep(this), this.weights, this.groups, optimizer._outside)


def _tabulate(optimizer: "GSGD", way: Callable[[Network], Way], tile: Tile, fold_items: int) -> "Bound":
    o = optimizer
    home = o._weights[0].device, o._weights[0].dtype
    outside = [
        (p, g)
        for g, some in enumerate(o._outside)
        for p in some
        if (p.device, p.dtype) == home and is_dense(p) and (p.grad is None or not p.grad.is_sparse)
    ]
    taken = {id(p) for p, _ in outside}
    rest = [[p for p in some if id(p) not in taken] for some in o._outside]
    network = Network(task(o), outside, tile, fold_items)
    return Bound(o, way(network), network.parameters, network.groups, rest)


class Declined:
    """Why the definition takes the steps, and for what that was found."""

    def __init__(self, optimizer: "GSGD", reason: str) -> None:
        self.reason = reason
        self.seen = self._circumstances(optimizer)

    def _circumstances(self, optimizer: "GSGD") -> tuple[Any, ...]:
        weights = optimizer._weights
        return addresses(weights), [w.stride() for w in weights], _settings(optimizer)

    def stale(self, optimizer: "GSGD") -> bool:
        return self._circumstances(optimizer) != self.seen


class Bound:
    """A way, and the parameters it moves.

    Args:
        parameters: Those that touch units, and perhaps others.
        groups: Their parameter groups.
        rest: The other parameters of each group: torch's own step.
    """

    def __init__(
        self, optimizer: "GSGD", way: Way, parameters: Sequence[Tensor], groups: Sequence[int], rest: list[list[Tensor]]
    ) -> None:
        self.way, self.parameters, self.groups, self.rest = way, list(parameters), list(groups), rest
        self.units, self.gpu = len(optimizer._weights), self.parameters[0].is_cuda
        self.places, self.strides = addresses(parameters), [p.stride() for p in parameters]
        self.settings = _settings(optimizer)
        self.dtypes = {p.dtype for p in parameters}
        self.nothing: list[Tensor | None] = [None] * len(parameters)
        self.never = [False] * len(parameters)
        self.complete = not any(rest)
        self.single = [i for i, p in enumerate(parameters) if p.numel() == 1]

    def stale(self, optimizer: "GSGD") -> bool:
        """Whether parameters lie elsewhere or otherwise in memory, or a guard was set, since this was made."""
        return (
            addresses(self.parameters) != self.places
            or list(map(Tensor.stride, self.parameters)) != self.strides
            or _settings(optimizer) != self.settings
        )

    def step(self, optimizer: "GSGD") -> bool:
        grads = self._grads()
        if grads is None:
            GSpaceOptimizer._refuse_non_finite(optimizer)  # the definition relies on it, and what is bound instead
            if any(p.grad is not None and p.grad.is_sparse for p in self.parameters[self.units :]):
                optimizer._fast = None  # without them, then
                return step(optimizer)
            return False
        groups = optimizer.param_groups
        others = [] if self.complete else list(zip(groups, self.rest, strict=True))
        for group, some in others:
            _refuse_unfused(group, some)
        buffers, fresh, root_fresh = self.nothing, self.never, False
        root_buffer: Tensor | None = None
        if any(group["momentum"] != 0 for group in groups):
            buffers, fresh = self._buffers(optimizer, grads)
            root_fresh = "momentum_buffer" not in optimizer._root_state
            if root_fresh:
                optimizer._root_state["momentum_buffer"] = torch.zeros_like(optimizer.incoming)
            root_buffer = optimizer._root_state["momentum_buffer"]
        coordinates = optimizer.incoming, optimizer.outgoing
        if not self.way.step(Given(groups, grads, buffers, fresh, *coordinates, root_buffer, root_fresh)):
            self._forget(optimizer, fresh, root_fresh)
            GSpaceOptimizer._refuse_non_finite(optimizer)
            return False  # every gradient is finite, but a sum of w·g is not
        optimizer._mark()
        for group, some in others:
            optimizer._step_outside(group, some)
        return True

    def _grads(self) -> list[Tensor | None] | None:
        """Gradients that lie in memory like their parameters; None if the definition must see to them."""
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

    def _buffers(self, optimizer: "GSGD", grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[bool]]:
        buffers: list[Tensor | None] = []
        fresh = []
        for i, (p, g, group) in enumerate(zip(self.parameters, grads, self.groups, strict=True)):
            has = optimizer.param_groups[group]["momentum"] != 0 and (i < self.units or g is not None)
            buffer = optimizer.state[p].get("momentum_buffer") if has and p in optimizer.state else None
            fresh.append(has and buffer is None)
            if has:
                buffer = torch.zeros_like(p) if buffer is None else _like(p, buffer)
                optimizer.state[p]["momentum_buffer"] = buffer
            buffers.append(buffer)
        return buffers, fresh

    def _forget(self, optimizer: "GSGD", fresh: Sequence[bool], root_fresh: bool) -> None:
        """Buffers made for a step that was not taken."""
        for p, new in zip(self.parameters, fresh, strict=True):
            if new:
                del optimizer.state[p]["momentum_buffer"]
                if not optimizer.state[p]:
                    del optimizer.state[p]
        if root_fresh:
            del optimizer._root_state["momentum_buffer"]


def _refuse_unfused(group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
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


def _settings(optimizer: "GSGD") -> tuple[Any, ...]:
    o = optimizer
    ways = [(group["foreach"], group["fused"]) for group in o.param_groups]
    return o.max_ratio, o.max_drift, o.max_path_grad_norm, o.batch_norm, o.allocation, ways


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """`value` with the strides and dtype of the parameter; strides of dimensions of size 1 mean nothing."""
    if value.dtype == parameter.dtype:
        if value.stride() == parameter.stride():
            return value
        strides = zip(parameter.shape, parameter.stride(), value.stride(), strict=True)
        if all(size == 1 or mine == other for size, mine, other in strides):
            return value
    return torch.empty_like(parameter).copy_(value)


def skipped_steps(optimizer: Any) -> int:
    """How many steps a GPU has not taken because a gradient was not finite. Waits for the device."""
    bound = optimizer._fast
    flags = getattr(bound.way, "flags", None) if isinstance(bound, Bound) else None
    return int(flags[2]) if flags is not None else 0
