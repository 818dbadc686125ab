"""GSGD and InGSpace: `torch.optim.Optimizer`s that move in G-space. Bookkeeping only; the mathematics is in `step.py`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.optim.sgd import sgd

from gspace import step as algorithm
from gspace.balance import balanced_log_scales
from gspace.graph import Analysis, Inputs, Residual, analyze
from gspace.skeleton import Skeleton, build_skeleton, path_products, skeleton_values
from gspace.step import BatchNormRule, Layer, Number

Reference = Literal["one", "balanced"]
Allocation = Literal["fixed", "spread"]


def on_skeleton(model: nn.Module, analysis: Analysis) -> bool:
    """Whether every aligned free weight is ±1, as `init_skeleton_` leaves a network."""
    skeleton = build_skeleton(model, analysis, choice="aligned")
    _, free = skeleton_values(skeleton, dict(model.named_parameters()))
    return skeleton.H > 0 and bool((free.abs() == 1).all())


class _GSpaceOptimizer(Optimizer):
    """What GSGD and InGSpace share: the skeleton, the coordinates Ĩ and Õ, and keeping them valid."""

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None,
        defaults: dict[str, Any],
        *,
        example_input: Inputs | None,
        analysis: Analysis | None,
        reference: Reference | None,
        batch_norm: BatchNormRule,
        residual: Residual,
        pin: Iterable[str],
        max_ratio: float,
        max_drift: float,
        allocation: Allocation,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"the first argument is the model, not its parameters; got {type(model).__name__}")
        _one_of("batch_norm", batch_norm, ("released", "paper"))
        _one_of("reference", reference, (None, "one", "balanced"))
        _one_of("allocation", allocation, ("fixed", "spread"))
        for name, bound in (("max_ratio", max_ratio), ("max_drift", max_drift)):
            if not bound > 1:
                raise ValueError(f"{name} must be greater than 1 (inf: no bound), got {bound}")
        if allocation == "spread" and max_ratio == float("inf"):
            raise ValueError("allocation='spread' takes roots of path ratios and needs a finite max_ratio")
        self.model = model
        self.batch_norm, self.allocation = batch_norm, allocation
        self.max_ratio, self.max_drift = max_ratio, max_drift
        self.analysis = analysis if analysis is not None else analyze(model, example_input, residual=residual, pin=pin)
        self._ready = False
        super().__init__(list(model.parameters()) if params is None else params, defaults)
        if reference is None:
            reference = "one" if on_skeleton(model, self.analysis) else "balanced"
        self.reference: Reference = reference
        self._build()
        self._ready = True

    # Construction -----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        names = {id(p): name for name, p in self.model.named_parameters()}
        mine = [p for group in self.param_groups for p in group["params"]]
        stranger = next((p for p in mine if id(p) not in names), None)
        if stranger is not None:
            raise ValueError(f"params holds a tensor of shape {tuple(stranger.shape)} that is no parameter of the model")
        trained = {names[id(p)] for p in mine if p.requires_grad}
        choice: Literal["aligned", "pivoted"] = "aligned" if self.reference == "one" else "pivoted"
        self.skeleton = build_skeleton(self.model, self.analysis, choice=choice, trained=trained)
        weights = dict(self.model.named_parameters())
        (log_in, sign_in), (log_out, sign_out) = self._products(weights)
        shift = torch.zeros_like(log_in)
        if self.reference == "balanced":
            # In the balanced representative I(u) is I(u)·c(u) and O(u) is O(u)/c(u): Ĩ = 1/c, Õ = c, both positive.
            shift = balanced_log_scales(self.skeleton.edges, weights, self.skeleton.H + 1)
            self._reference_in, self._reference_out = (log_in + shift, sign_in), (log_out - shift, sign_out)
        else:
            one = torch.ones_like(sign_in)
            self._reference_in, self._reference_out = (shift, one), (shift, one)
        self._prepare()

    def _products(self, weights: dict[str, nn.Parameter]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        into, out = skeleton_values(self.skeleton, weights)
        return path_products(into, self.skeleton.parent), path_products(out, self.skeleton.child)

    def _prepare(self) -> None:
        """Everything that depends on where the parameters live and what they hold now."""
        weights = dict(self.model.named_parameters())
        self._layers = algorithm.plan(self.skeleton, weights)
        self._weights = [weights[layer.edges.name] for layer in self._layers]
        dtype = torch.float64 if any(w.dtype == torch.float64 for w in self._weights) else torch.float32
        device = self._weights[0].device if self._weights else torch.device("cpu")
        (log_in, sign_in), (log_out, sign_out) = self._products(weights)
        (ref_in, ref_sign_in), (ref_out, ref_sign_out) = (
            tuple(x.to(log_in.device) for x in pair) for pair in (self._reference_in, self._reference_out)
        )
        self.incoming = (sign_in * ref_sign_in * (log_in - ref_in).exp()).to(device, dtype)
        self.outgoing = (sign_out * ref_sign_out * (log_out - ref_out).exp()).to(device, dtype)
        self._root = self.skeleton.root.to(device)
        group_of = {id(p): g for g, group in enumerate(self.param_groups) for p in group["params"]}
        self._layer_group = [group_of[id(w)] for w in self._weights]
        self._unit_group = torch.zeros(self.skeleton.H + 1, dtype=torch.long, device=device)
        for layer, g in zip(self._layers, self._layer_group, strict=True):
            self._unit_group[layer.root] = g
        inside = {id(w) for w in self._weights}
        self._outside = [[p for p in group["params"] if id(p) not in inside] for group in self.param_groups]
        self._links = [
            (owner, key, value)
            for m in self.model.modules()
            for owner in (m._parameters, m._modules)
            for key, value in owner.items()
        ]
        self._mark()

    def _mark(self) -> None:
        self._seen = [(w._version, w.device, w.dtype) for w in self._weights]

    def _check(self) -> None:
        """The model must be the one that was analyzed; weights that others changed give new coordinates."""
        for owner, key, value in self._links:
            if owner.get(key) is not value:
                raise RuntimeError(
                    f"the model was changed after {type(self).__name__} was made: {key!r} is another object now. "
                    f"Make a new {type(self).__name__} for the changed model."
                )
        if any((w._version, w.device, w.dtype) != seen for w, seen in zip(self._weights, self._seen, strict=True)):
            self._prepare()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._ready:
            self._build()

    # State ------------------------------------------------------------------------------------------------------------

    _CHOICE = ("in_edge", "in_index", "out_edge", "out_index", "parent", "child", "root")

    def _own_state(self) -> dict[str, Any]:
        return {
            "reference": self.reference,
            "skeleton": {name: getattr(self.skeleton, name) for name in self._CHOICE},
            "reference_in": self._reference_in,
            "reference_out": self._reference_out,
            "incoming": self.incoming,
            "outgoing": self.outgoing,
        }

    def _load_own_state(self, own: dict[str, Any]) -> None:
        choice = {name: own["skeleton"][name].cpu() for name in self._CHOICE}
        if len(choice["root"]) != self.skeleton.H + 1:
            raise ValueError(f"this state belongs to a network with {len(choice['root']) - 1} units, not {self.skeleton.H}")
        self.reference = own["reference"]
        self.skeleton = replace(self.skeleton, **choice)
        self._reference_in, self._reference_out = tuple(own["reference_in"]), tuple(own["reference_out"])
        self._prepare()
        self.incoming.copy_(own["incoming"])
        self.outgoing.copy_(own["outgoing"])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "gspace": self._own_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "gspace" not in state_dict:
            raise ValueError(f"this is not the state of a {type(self).__name__}: it has no coordinates")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "gspace"})
        self._load_own_state(state_dict["gspace"])

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_zero_grad_profile") and key != "step"}

    # One step ---------------------------------------------------------------------------------------------------------

    def _grads(self) -> list[Tensor]:
        """Gradients of the weights that touch units; a missing one counts as 0."""
        grads = []
        for layer, w in zip(self._layers, self._weights, strict=True):
            if w.grad is not None and w.grad.is_sparse:
                raise RuntimeError(f"{layer.edges.name} has a sparse gradient: G-space mixes all of its entries; use dense ones")
            grads.append(torch.zeros_like(w) if w.grad is None else w.grad)
        return grads

    def _refuse_non_finite(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        dense = [g for g in grads if not g.is_sparse]
        if not dense or any(g.device.type != "cpu" for g in dense):
            return
        if not bool(torch.stack(torch._foreach_norm(dense, torch.inf)).isfinite().all()):
            named = [(n, p.grad) for n, p in self.model.named_parameters() if p.grad is not None and not p.grad.is_sparse]
            name = next(n for n, g in named if not bool(g.isfinite().all()))
            raise RuntimeError(f"the gradient of {name} is not finite; no weight and no state was changed")

    def _inverses(self, layer: Layer, view: Tensor) -> Tensor:
        """1/(Ĩ(tail)·Õ(head)), to broadcast against the view."""
        return layer.columns(1 / self.incoming, view) * layer.rows(1 / self.outgoing, view)

    def _root_path_grads(self, grads: Sequence[Tensor]) -> Tensor:
        """∂ℓ/∂v of the trained skeleton paths, `(H + 1,)`, by the inverse chain rule."""
        sums = algorithm.flow(self._layers, self._weights, grads, self.incoming, self.batch_norm)
        q = algorithm.inverse_chain_rule(sums, self._root)
        norms = algorithm.root_norms(self._layers, self._weights, self.incoming, self.batch_norm)
        return q / norms / (self.incoming * self.outgoing)

    def _finish(self, ratio: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """R of every unit from R of the roots, and the scales c that spread it (ones where free weights stay fixed)."""
        self._last = (ratio, raw)
        every = ratio[self._root]
        spread = every.abs().rsqrt() if self.allocation == "spread" else torch.ones_like(every)
        spread[0] = 1
        return every, spread

    def _advance(self, every: Tensor, spread: Tensor) -> None:
        self.incoming.mul_(every * spread)
        self.outgoing.div_(spread)
        self._mark()

    def statistics(self) -> dict[str, Any]:
        """The last step: quantiles of the path ratios, how many were clipped, path values and learning rates per unit.

        Computed when called; a step only keeps two unit vectors for it.
        """
        if not hasattr(self, "_last"):
            raise RuntimeError("no step has been taken yet")
        ratio, raw = self._last
        roots = (self._root == torch.arange(len(self._root), device=self._root.device)).nonzero()[1:, 0]
        value = (self.incoming * self.outgoing)[1:]
        lr = torch.stack([torch.as_tensor(g["lr"], dtype=torch.float64) for g in self.param_groups])
        at = torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0], dtype=ratio.dtype, device=ratio.device)
        quantiles = ratio[roots].quantile(at).tolist() if len(roots) else []
        return {
            "ratio_quantiles": dict(zip(at.tolist(), quantiles, strict=False)),
            "clipped": int((ratio != raw)[roots].sum()),
            "roots": len(roots),
            "path_value": value,
            "effective_lr": lr.to(value.device)[self._unit_group[1:]] / value.double().square(),
        }


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(repr(a) for a in allowed)}, got {value!r}")


class GSGD(_GSpaceOptimizer):
    """SGD on the values of basis paths (the paper's 𝒢-SGD), for any model `analyze` understands.

    It never changes the function it is given and starts from any network: on the skeleton (`init_skeleton_`) with the
    paper's coordinates, elsewhere with coordinates measured in the balanced representative. Momentum, Nesterov and
    weight decay (½λΣv² over basis paths with a non-skeleton weight) act on path values. Parameters that touch no unit
    get plain SGD; a model without units gives exactly `torch.optim.SGD`.

    Args:
        model: The model, not its parameters.
        lr, momentum, dampening, nesterov, weight_decay, maximize, foreach, fused: As in `torch.optim.SGD`.
        params: torch's parameter groups, if they differ in hyper-parameters or leave parameters out.
        reference: "one" (the paper's v) or "balanced"; chosen from the weights if None.
        batch_norm: Rule for rows before a BatchNorm, "released" (the authors' code) or "paper".
        residual, pin, example_input, analysis: See `analyze`.
        max_ratio: Bound on the ratio by which a trained skeleton path changes in one step.
        max_drift: Bound on its value over training.
        max_path_grad_norm: Clips the norm of ∂ℓ/∂v; clipping ∂ℓ/∂w would not be invariant.
        allocation: "fixed" never changes free skeleton weights; "spread" shares each ratio between both sides of a unit.
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
        max_drift: float = 10.0,
        max_path_grad_norm: float | None = None,
        allocation: Allocation = "fixed",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        example_input: Inputs | None = None,
        analysis: Analysis | None = None,
    ) -> None:
        # torch's own constructor checks the hyper-parameters it shares with us.
        torch.optim.SGD([torch.zeros(1)], lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, foreach=foreach)
        if max_path_grad_norm is not None and not max_path_grad_norm > 0:
            raise ValueError(f"max_path_grad_norm must be positive, got {max_path_grad_norm}")
        self.max_path_grad_norm = max_path_grad_norm
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

    def _prepare(self) -> None:
        super()._prepare()
        if not hasattr(self, "_root_buffer") or self._root_buffer.shape != self.incoming.shape:
            self._root_buffer, self._root_fresh = torch.zeros_like(self.incoming), True
        self._root_buffer = self._root_buffer.to(self.incoming)

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "root_buffer": self._root_buffer, "root_fresh": self._root_fresh}

    def _load_own_state(self, own: dict[str, Any]) -> None:
        super()._load_own_state(own)
        self._root_buffer = own["root_buffer"].to(self.incoming).clone()
        self._root_fresh = own["root_fresh"]

    def _per_unit(self, key: str) -> Any:
        """A hyper-parameter for every root: a number, or a unit vector where groups differ."""
        values = [group[key] for group in self.param_groups]
        if all(value is values[0] or (not isinstance(value, Tensor) and value == values[0]) for value in values):
            return values[0]
        return torch.stack([torch.as_tensor(v).to(self.incoming) for v in values])[self._unit_group]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not torch.compiler.is_compiling():
            self._check()
            self._refuse_non_finite()
        if self._layers:
            self._step_units()
        for group, outside in zip(self.param_groups, self._outside, strict=True):
            self._step_outside(group, outside)
        return loss

    def _step_units(self) -> None:
        grads = self._grads()
        signs = [-1 if self.param_groups[g]["maximize"] else 1 for g in self._layer_group]
        grads = [g if sign == 1 else -g for g, sign in zip(grads, signs, strict=True)]
        root_grad = self._root_path_grads(grads)
        shrink = self._shrink(grads, root_grad)
        direction = self._root_direction(root_grad * shrink)
        value = self.incoming * self.outgoing
        every, spread = self._finish(
            *algorithm.path_ratio(value, direction, self._per_unit("lr"), self.max_ratio, self.max_drift)
        )
        for layer, weight, grad, g in zip(self._layers, self._weights, grads, self._layer_group, strict=True):
            group = self.param_groups[g]
            view = layer.edges.view(weight)
            inverse = self._inverses(layer, view)
            path_grad = algorithm.path_gradient(layer, view, grad, inverse, 0, self.batch_norm) * shrink
            if isinstance(group["weight_decay"], Tensor) or group["weight_decay"] != 0:
                path_grad = path_grad + group["weight_decay"] * (view / inverse)
            moved = self._momentum(layer, weight, path_grad, group)
            entries = algorithm.allocate_skeleton(layer, weight[layer.entries], every, spread)
            view.copy_(algorithm.allocate_weights(layer, view, moved, inverse, every, spread, group["lr"]))
            weight[layer.entries] = entries
        self._advance(every, spread)

    def _shrink(self, grads: Sequence[Tensor], root_grad: Tensor) -> Number:
        """Factor that brings ‖∂ℓ/∂v‖ under `max_path_grad_norm`."""
        if self.max_path_grad_norm is None:
            return 1
        total = root_grad.square().sum()
        for layer, weight, grad in zip(self._layers, self._weights, grads, strict=True):
            view = layer.edges.view(weight)
            path_grad = torch.empty_like(weight)
            layer.edges.view(path_grad).copy_(
                algorithm.path_gradient(layer, view, grad, self._inverses(layer, view), 0, self.batch_norm)
            )
            path_grad[layer.entries] = 0
            total = total + path_grad.square().sum().to(total.dtype)
        return (self.max_path_grad_norm / (total.sqrt() + 1e-6)).clamp(max=1)

    def _root_direction(self, root_grad: Tensor) -> Tensor:
        momentum, dampening = self._per_unit("momentum"), self._per_unit("dampening")
        if not isinstance(momentum, Tensor) and momentum == 0:
            return root_grad
        fresh = self._root_buffer.mul(momentum).add(root_grad * (1 - dampening)) if not self._root_fresh else root_grad
        self._root_buffer.copy_(fresh)
        self._root_fresh = False
        nesterov = self._per_unit("nesterov")
        look = root_grad + momentum * self._root_buffer
        return torch.where(nesterov > 0, look, self._root_buffer) if isinstance(nesterov, Tensor) else look if nesterov else self._root_buffer

    def _momentum(self, layer: Layer, weight: Tensor, path_grad: Tensor, group: dict[str, Any]) -> Tensor:
        if group["momentum"] == 0:
            return path_grad
        state = self.state[weight]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(weight)
            layer.edges.view(state["momentum_buffer"]).copy_(path_grad)
        else:
            layer.edges.view(state["momentum_buffer"]).mul_(group["momentum"]).add_(path_grad, alpha=1 - group["dampening"])
        buffer = layer.edges.view(state["momentum_buffer"])
        return path_grad + group["momentum"] * buffer if group["nesterov"] else buffer

    def _step_outside(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Plain SGD for what touches no unit, by torch itself."""
        active = [p for p in parameters if p.grad is not None]
        if not active:
            return
        buffers: list[Tensor | None] = [self.state[p].get("momentum_buffer") for p in active] if group["momentum"] != 0 else []
        sgd(
            active,
            [p.grad for p in active],  # type: ignore[misc]
            buffers,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            has_sparse_grad=any(p.grad.is_sparse for p in active if p.grad is not None),
            foreach=group["foreach"],
            fused=group["fused"],
        )
        for p, buffer in zip(active, buffers, strict=False):
            self.state[p]["momentum_buffer"] = buffer
