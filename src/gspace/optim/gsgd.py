"""GSGD: SGD on the values of basis paths. Bookkeeping only; the mathematics is in `step.py`."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from gspace.analysis import Analysis, Inputs
from gspace.optim import fast
from gspace.optim.arguments import number
from gspace.optim.base import GSpaceOptimizer, Statistics
from gspace.optim.built import Built
from gspace.optim.eager import Allocation, wide
from gspace.optim.fast import Bound
from gspace.optim.reference import Reference
from gspace.optim.step import BatchNormRule, Number
from gspace.sharding import local

T = TypeVar("T")


class GSGD(GSpaceOptimizer):
    """SGD on the values of basis paths (the paper's 𝒢-SGD), for any model `analyze` understands.

    It never changes the function it is given and starts from any network: on the skeleton (`init_skeleton_`) with the
    paper's coordinates, elsewhere with coordinates measured in the balanced representative. Momentum, Nesterov and
    weight decay (½λΣv² over basis paths with a non-skeleton weight) act on path values. Parameters that touch no unit
    get plain SGD; a model without units gives exactly `torch.optim.SGD`.

    The skeleton is chosen at the first step whose rate is not 0, in the weights of that moment, and kept in the state.
    Everything else follows from the weights, at every step: they may be loaded, moved, averaged or rescaled by anybody
    at any time. A module or parameter that is replaced is refused. Units that touch a frozen parameter are not used; a
    layer that is thawed or added after the first step is trained in plain coordinates until `rechoose()`. A missing
    gradient counts as 0: the weight still follows the paths in front of it. Without any gradient a step does nothing.
    bfloat16 and float16 parameters are updated in float32 and rounded; what is smaller than their rounding is lost, as
    in `torch.optim.SGD`. Float32 parameters under autocast lose nothing and are faster.

    Args:
        model: The model, not its parameters.
        lr, momentum, dampening, nesterov, weight_decay, maximize: As in `torch.optim.SGD`. A step can be captured in a
            CUDA graph after one that was not; with lr in a tensor on the device, replays follow it.
        foreach, fused: As in `torch.optim.SGD`: None takes the fastest way there is (`fast/`), `fused=True` insists
            on kernels, Triton's on a GPU and compiled C on a CPU; `foreach` or `fused=False` takes torch's operations.
        params: torch's parameter groups, if they differ in hyper-parameters or leave parameters out.
        reference: "one" (the paper's v) or "balanced". None: "one" if every free skeleton weight is ±1, as
            `init_skeleton_` leaves it, and no path value is farther from it than a factor of 2. A rescaling changes
            that: say which to compare rescaled networks.
        batch_norm: Rule for rows before a BatchNorm: "released" (the authors' code), "paper", or "exact", where neither
            the scale of a unit nor that of such a row matters (`exact.py`; γ stands still there, on purpose).
        analysis: What `analyze` says of the model, for other options than `residual="pin"`, which is the paper's.
        example_input: For `analyze`, where there is no analysis.
        max_ratio: Bound on the ratio by which a trained skeleton path changes in one step.
        max_drift: Bound on its value over training.
        max_path_grad_norm: Clips the norm of ∂ℓ/∂v, where clipping ∂ℓ/∂w would not be invariant: of the parameters that
            touch units. The others (output biases, pinned layers) are neither measured nor clipped.
        allocation: "fixed" never changes free skeleton weights; "spread" shares each ratio between both sides.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> optimizer = GSGD(model, lr=0.1, momentum=0.9)
    >>> model(torch.ones(2, 4)).square().mean().backward()
    >>> optimizer.step()
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
        self._skips_told = 0  # steps not taken that the user knows of
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            **shared,
        }
        super().__init__(
            model,
            params,
            defaults,
            example_input=example_input,
            analysis=analysis,
            reference=reference,
            batch_norm=batch_norm,
            max_ratio=max_ratio,
            max_drift=max_drift,
            allocation=allocation,
        )

    def state_dict(self) -> dict[str, Any]:
        skipped = self._skipped()
        if skipped not in (0, self._skips_told):
            warnings.warn(f"{skipped} steps were not taken: a gradient was not finite", RuntimeWarning, stacklevel=2)
            self._skips_told = skipped
        return super().state_dict()

    def statistics(self) -> Statistics:
        """What `InGSpace.statistics` has; also which `way` takes the steps, and how many a GPU has `skipped`.

        A step is skipped because a gradient is not finite.
        """
        way = self._way
        name = type(way).__name__ if isinstance(way, Bound) else way and f"torch's operations: {way}"
        return Statistics(super().statistics(), way=name or "", skipped=self._skipped())

    def _skipped(self) -> int:
        return self._way.skipped() if isinstance(self._way, Bound) else 0

    # One step ---------------------------------------------------------------------------------------------------------

    def _wishes(self) -> Any:
        asked = [(group["foreach"], group["fused"]) for group in self.param_groups]
        return self.max_path_grad_norm, self._damped(), asked

    def _damped(self) -> bool:
        return any(group["momentum"] != 0 and group["dampening"] != 0 for group in self.param_groups)

    def _choose_way(self, built: Built) -> Bound | str:
        groups, fused = self.param_groups, any(group["fused"] for group in self.param_groups)
        asked = [f"{key}={group[key]}" for key in ("foreach", "fused") for group in groups if group[key] is not None]
        found = asked[0] if asked and not fused else super()._choose_way(built)
        if fused and isinstance(found, str) and built.weights:
            raise RuntimeError(f"fused=True, but {found}. Leave fused=None to take what is available.")
        return found

    def _whole(self, built: Built) -> list[tuple[Tensor, int]] | None:
        """One pass moves all parameters, if they lie alike in memory, by SGD without clipping and dampening."""
        if self.max_path_grad_norm is not None or self._damped():
            return None
        others = [(p, g) for g, some in enumerate(built.outside) for p in some]
        alike = all(fast.fits(p, built.weights[0]) for p, _ in others) if built.weights else False
        return others if alike else None

    def _by_kernels(self, built: Built, way: Bound) -> bool:
        if way.whole:
            outcome = way.step(self.param_groups, self.state)
            if outcome is not None or self._whole(built) is not None:
                return self._taken(built, outcome)
            way = built.way = type(way)(built, self._rules(), None)  # a sparse gradient has come outside of units
        return super()._by_kernels(built, way)

    def _canvas(self, built: Built) -> tuple[list[Tensor], list[Tensor]]:
        new = torch.compiler.is_compiling() or built.plan.root.device.type != "cpu"
        if new or torch.is_inference_mode_enabled():
            return _like(built.weights), _like(built.weights)
        if built.moved is None:  # new memory costs a CPU more than a step
            built.moved = _like(built.weights), _like(built.weights)
        return built.moved

    def _move(self, built: Built, shown: Sequence[Tensor] | None, path_grads: Sequence[Tensor] | None) -> None:
        for group, some in zip(self.param_groups, built.outside, strict=True):
            self._plain(group, some)  # first: what torch refuses, it refuses before anything moves
        if shown is not None and path_grads is not None:
            if self.max_path_grad_norm is not None:
                self._clip(built, self.max_path_grad_norm, [local(g) for g in path_grads])
            for g, group in enumerate(self.param_groups):
                mine = [k for k, of in enumerate(built.groups) if of == g]
                for places in alike(mine, self._sharded):
                    values, slopes, owners = ([x[k] for k in places] for x in (shown, path_grads, built.weights))
                    plain_sgd(group, self.state, values, slopes, owners)

    def _clip(self, built: Built, most: float, slopes: Sequence[Tensor]) -> None:
        counted = (g for layer, g in zip(built.plan.layers, slopes, strict=True) if layer.counts)
        squares = [g.double().square().sum() for g in counted]
        none = torch.zeros((), dtype=torch.float64, device=built.plan.root.device)
        total = built.plan.reduce(sum(squares, start=none)).sqrt()
        shrink = (most / (total + 1e-6)).clamp(max=1)
        for slope in slopes:
            slope.mul_(shrink.to(slope.dtype))

    def _plain(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Plain SGD for what touches no unit, by torch itself."""
        active = [p for p in parameters if p.grad is not None]
        for some in alike(active, self._sharded):
            plain_sgd(group, self.state, some, [p.grad for p in some if p.grad is not None])


def _like(weights: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(wide(w)) for w in weights]


def alike(some: list[T], sharded: bool) -> list[list[T]]:
    """Lists of parameters that torch moves in one call: no plain tensors beside sharded ones, nor two meshes."""
    return [[x] for x in some] if sharded else [some] if some else []


def plain_sgd(
    group: Mapping[str, Any],
    state: Any,
    values: list[Tensor],
    directions: list[Tensor],
    parameters: Sequence[Tensor] | None = None,
) -> None:
    """A step of torch's SGD on `values`, with the hyper-parameters of `group`, along these directions.

    `state` is by parameter; the parameters are the values themselves if they are not given.
    """
    owners = values if parameters is None else parameters
    buffers: list[Tensor | None] = []
    if group["momentum"] != 0:
        kept = [state[p].get("momentum_buffer") for p in owners]
        pairs = zip(kept, values, strict=True)
        buffers = [b if b is None or parameters is None else b.to(v.device, v.dtype) for b, v in pairs]
    lr, fused = group["lr"], group["fused"]
    sparse = any(d.is_sparse for d in directions)
    mixed = len({buffer is None for buffer in buffers}) > 1
    if fused is None and group["foreach"] is None and isinstance(lr, Tensor) and lr.is_cuda and not (sparse or mixed):
        # torch's other ways read a rate on the device from the host: a wait, and no CUDA graph.
        lr, fused = lr.float(), True
    rest = ("weight_decay", "momentum", "dampening", "nesterov", "maximize", "foreach")
    options = {key: group[key] for key in rest}
    sgd(values, directions, buffers, has_sparse_grad=sparse, lr=lr, fused=fused, **options)
    for p, buffer in zip(owners, buffers, strict=False):
        state[p]["momentum_buffer"] = buffer if parameters is None or buffer is None else buffer.to(p.dtype)
