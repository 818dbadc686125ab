"""GSGD: SGD on the values of basis paths. Bookkeeping only; the mathematics is in `step.py`."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from gspace import fast, saved
from gspace import step as algorithm
from gspace.analysis import Analysis, Inputs, Residual
from gspace.arguments import number
from gspace.base import Allocation, GSpaceOptimizer
from gspace.reference import Reference
from gspace.skeleton import Skeleton
from gspace.step import BatchNormRule, Layer, Number


class GSGD(GSpaceOptimizer):
    """SGD on the values of basis paths (the paper's 𝒢-SGD), for any model `analyze` understands.

    It never changes the function it is given and starts from any network: on the skeleton (`init_skeleton_`) with the
    paper's coordinates, elsewhere with coordinates measured in the balanced representative. Momentum, Nesterov and
    weight decay (½λΣv² over basis paths with a non-skeleton weight) act on path values. Parameters that touch no unit
    get plain SGD; a model without units gives exactly `torch.optim.SGD`.

    A missing gradient counts as 0: the weight still follows the paths in front of it. Without any gradient a step does
    nothing. A unit that touches a frozen parameter is not used; freezing or unfreezing one later is noticed. Weights
    that others write are measured before the next step (a write into `p.data` is the one that cannot be noticed); a
    module or parameter that is replaced is refused. bfloat16 and float16 parameters are updated in float32 and rounded,
    and their coordinates measured at every step; what is smaller than their rounding is lost, as in `torch.optim.SGD`.
    Float32 parameters under autocast lose nothing and are faster.

    Args:
        model: The model, not its parameters.
        lr, momentum, dampening, nesterov, weight_decay, maximize: As in `torch.optim.SGD`. A step can be captured in a
            CUDA graph without further ado; with lr in a tensor on the device, replays follow it.
        foreach, fused: As in `torch.optim.SGD`: None takes the fastest way there is (`fast/`), `fused=True` insists
            on kernels, Triton's on a GPU and compiled C on a CPU, `foreach=False` takes one weight after the other.
        params: torch's parameter groups, if they differ in hyper-parameters or leave parameters out.
        reference: "one" (the paper's v) or "balanced". None: "one" if every free skeleton weight is ±1, as
            `init_skeleton_` leaves it, and no path value is farther from it than a factor of 2. A rescaling changes
            that: say which to compare rescaled networks.
        batch_norm: Rule for rows before a BatchNorm, "released" (the authors' code) or "paper".
        residual, pin, example_input, analysis: See `analyze`.
        max_ratio: Bound on the ratio by which a trained skeleton path changes in one step.
        max_drift: Bound on its value over training.
        max_path_grad_norm: Clips the norm of ∂ℓ/∂v, where clipping ∂ℓ/∂w would not be invariant: of the parameters that
            touch units. The others (output biases, pinned layers) are neither measured nor clipped.
        allocation: "fixed" never changes free skeleton weights; "spread" shares each ratio between both sides.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: Number = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
        weight_decay: Number = 0,
        *,
        params: Iterable[Any] | None = None,
        reference: Reference | None = None,
        batch_norm: BatchNormRule = "released",
        residual: Residual = "pin",
        pin: Iterable[str] = (),
        max_ratio: float = 1.5,
        max_drift: float = 1.1,
        max_path_grad_norm: float | None = None,
        allocation: Allocation = "fixed",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        example_input: Inputs | None = None,
        analysis: Analysis | None = None,
    ) -> None:
        # torch's own constructor checks the hyper-parameters it shares with us.
        shared: dict[str, Any] = {"maximize": maximize, "foreach": foreach, "fused": fused}
        torch.optim.SGD([torch.zeros(1, device="cpu")], lr, momentum, dampening, weight_decay, nesterov, **shared)
        limit = None if max_path_grad_norm is None else number(max_path_grad_norm)
        if limit is not None and not limit > 0:
            raise ValueError(f"max_path_grad_norm must be positive, got {max_path_grad_norm!r}")
        self.max_path_grad_norm = limit
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
        }
        super().__init__(
            model,
            params,
            defaults,
            example_input=example_input,
            analysis=analysis,
            reference=reference,
            batch_norm=batch_norm,
            residual=residual,
            pin=pin,
            max_ratio=max_ratio,
            max_drift=max_drift,
            allocation=allocation,
        )

    def _adopt(self, reference: Reference, skeleton: Skeleton) -> None:
        super()._adopt(reference, skeleton)
        self._told = 0  # steps not taken that the user knows of
        self._root_state: dict[str, Tensor] = {}  # as `state` for a parameter, for the trained skeleton paths

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "root_state": dict(self._root_state)}  # momentum that comes later is not in it

    def _saved_skeleton(self, own: Mapping[str, Any]) -> Skeleton:
        skeleton = super()._saved_skeleton(own)
        saved.require_units(skeleton.H + 1, "momentum of its skeleton paths", *own["root_state"].values())
        return skeleton

    def _load_own_state(self, own: Mapping[str, Any]) -> None:
        super()._load_own_state(own)
        self._root_state = {key: value.to(self.incoming, copy=True) for key, value in own["root_state"].items()}

    def _move_state(self) -> None:
        super()._move_state()
        self._root_state = {key: value.to(self.incoming) for key, value in self._root_state.items()}

    def state_dict(self) -> dict[str, Any]:
        skipped = fast.skipped_steps(self)
        if skipped not in (0, self._told):
            warnings.warn(f"{skipped} steps were not taken: a gradient was not finite", RuntimeWarning, stacklevel=2)
            self._told = skipped
        return super().state_dict()

    def statistics(self) -> dict[str, Any]:
        """As in the base class; also which `way` takes the steps, and how many a GPU has `skipped`.

        A step is skipped because a gradient is not finite.
        """
        return {**super().statistics(), "way": fast.name(self), "skipped": fast.skipped_steps(self)}

    def _per_unit(self, key: str) -> Any:
        """A hyper-parameter for every root: a number, or a unit vector where groups differ."""
        values = [group[key] for group in self.param_groups]
        if all(value is values[0] or (not isinstance(value, Tensor) and value == values[0]) for value in values):
            return values[0]
        dtype, device = self.incoming.dtype, self.incoming.device
        stacked = torch.stack([torch.as_tensor(v, dtype=dtype, device=device).reshape(()) for v in values])
        return stacked[self._unit_group]

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = self._begin(closure)
        if not fast.step(self):
            self._step_units()
            for group, outside in zip(self.param_groups, self._outside, strict=True):
                self._step_outside(group, outside)
        return loss

    def _refuse_non_finite(self) -> None:
        if not fast.checks(self):
            super()._refuse_non_finite()

    def _step_units(self) -> None:
        read = self._read()
        if read is None:
            return
        weights, grads = read
        groups = [self.param_groups[g] for g in self._layer_group]
        root_grad = self._root_path_grads(weights, grads) * (1 - 2 * self._per_unit("maximize"))
        grads = [-g if group["maximize"] else g for g, group in zip(grads, groups, strict=True)]
        shrink = self._shrink(weights, grads, root_grad)
        direction = self._root_direction(root_grad * shrink)
        value = self.incoming * self.outgoing
        every, spread = self._spread_ratios(
            *algorithm.path_ratio(value, direction, self._per_unit("lr"), self.max_ratio, self.max_drift)
        )
        for k, (layer, weight, grad, group) in enumerate(zip(self._layers, weights, grads, groups, strict=True)):
            view = layer.edges.view(weight)
            inverse = self._inverses(layer, view)
            path_grad = algorithm.path_gradient(layer, view, grad, inverse, self.batch_norm) * shrink
            if isinstance(group["weight_decay"], Tensor) or group["weight_decay"] != 0:
                path_grad = path_grad + group["weight_decay"] * (view / inverse)
            moved = self._momentum(layer, self._weights[k], path_grad, group)
            entries = algorithm.allocate_skeleton(layer, weight[layer.entries], every, spread)
            new = algorithm.allocate_weights(layer, view, moved, inverse, every, spread, group["lr"])
            view.copy_(new)
            self._write(layer, self._weights[k], weight, entries)
        self._advance(every, spread)

    def _shrink(self, weights: Sequence[Tensor], grads: Sequence[Tensor], root_grad: Tensor) -> Number:
        """Factor that brings ‖∂ℓ/∂v‖ under `max_path_grad_norm`."""
        if self.max_path_grad_norm is None:
            return 1
        total = root_grad.square().sum()
        for layer, weight, grad in zip(self._layers, weights, grads, strict=True):
            view = layer.edges.view(weight)
            path_grad = torch.empty_like(weight)
            layer.edges.view(path_grad).copy_(
                algorithm.path_gradient(layer, view, grad, self._inverses(layer, view), self.batch_norm)
            )
            path_grad[layer.entries] = 0
            total = total + path_grad.square().sum().to(total.dtype)
        return (self.max_path_grad_norm / (total.sqrt() + 1e-6)).clamp(max=1)

    def _root_direction(self, root_grad: Tensor) -> Tensor:
        momentum, dampening = self._per_unit("momentum"), self._per_unit("dampening")
        if not isinstance(momentum, Tensor) and momentum == 0:
            return root_grad
        buffer = self._root_state.get("momentum_buffer")
        if buffer is None:
            new = root_grad.clone()
            buffer = self._root_state["momentum_buffer"] = torch.zeros_like(root_grad)
        else:
            new = buffer * momentum + root_grad * (1 - dampening)
        # Where a group has no momentum its buffer waits, as torch's do; switched on later it begins at 0.
        buffer.copy_(torch.where(momentum == 0, buffer, new) if isinstance(momentum, Tensor) else new)
        nesterov, direction = self._per_unit("nesterov"), buffer
        if isinstance(nesterov, Tensor):
            direction = torch.where(nesterov > 0, root_grad + momentum * buffer, buffer)
        elif nesterov:
            direction = root_grad + momentum * buffer
        return torch.where(momentum == 0, root_grad, direction) if isinstance(momentum, Tensor) else direction

    def _momentum(self, layer: Layer, weight: Tensor, path_grad: Tensor, group: dict[str, Any]) -> Tensor:
        if group["momentum"] == 0:
            return path_grad
        state = self.state[weight]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(weight)
            layer.edges.view(state["momentum_buffer"]).copy_(path_grad)
            buffer = layer.edges.view(state["momentum_buffer"])
        else:
            buffer = layer.edges.view(state["momentum_buffer"])
            buffer.mul_(group["momentum"]).add_(path_grad, alpha=1 - group["dampening"])
        return path_grad + group["momentum"] * buffer if group["nesterov"] else buffer

    def _step_outside(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Plain SGD for what touches no unit, by torch itself."""
        active = [p for p in parameters if p.grad is not None]
        if not active:
            return
        plain_sgd(group, self.state, active, [p.grad for p in active if p.grad is not None])


def plain_sgd(group: dict[str, Any], state: Any, parameters: list[Tensor], directions: list[Tensor]) -> None:
    """A step of torch's SGD with the hyper-parameters of `group` along these directions."""
    buffers: list[Tensor | None] = []
    if group["momentum"] != 0:
        buffers = [state[p].get("momentum_buffer") for p in parameters]
    lr, fused = group["lr"], group["fused"]
    sparse = any(d.is_sparse for d in directions)
    mixed = len({buffer is None for buffer in buffers}) > 1
    if fused is None and group["foreach"] is None and isinstance(lr, Tensor) and lr.is_cuda and not (sparse or mixed):
        # torch's other ways read a rate on the device from the host: a wait, and no CUDA graph.
        lr, fused = lr.float(), True
    rest = ("weight_decay", "momentum", "dampening", "nesterov", "maximize", "foreach")
    options = {key: group[key] for key in rest}
    sgd(parameters, directions, buffers, has_sparse_grad=sparse, lr=lr, fused=fused, **options)
    for p, buffer in zip(parameters, buffers, strict=False):
        state[p]["momentum_buffer"] = buffer
