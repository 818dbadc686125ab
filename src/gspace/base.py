"""What GSGD and InGSpace share: the skeleton, the coordinates Ĩ and Õ, and keeping both true to the weights.

A step advances Ĩ and Õ along with the weights it writes. They depend on nothing but the values of skeleton weights, so
they can be measured at any time; that is done before the next step whenever somebody else wrote, moved or loaded the
weights. Coordinates that agree with the weights up to √eps, as far as rounding may take them in many steps, are kept as
they are: saving, copying or resuming never changes a trajectory. If others put a different network there, a skeleton is
chosen in it, as if the optimizer were made then.

Shapes: unit vectors are `(H + 1,)`, entry 0 is ground.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gspace import saved
from gspace import step as algorithm
from gspace.analysis import Analysis, Inputs, Residual, analyzed
from gspace.arguments import (
    analyze_options,
    guards,
    require_model,
    require_numbers,
    require_one_of,
    require_own,
    warn_of_no_units,
    warn_of_other_weights,
    warn_of_zeros,
)
from gspace.hooks import hooked, loss_of
from gspace.reference import Reference, are_others, choose_skeleton, measure_reference, products
from gspace.skeleton import Skeleton
from gspace.step import BatchNormRule, Layer
from gspace.watch import Watch, fingerprint

Allocation = Literal["fixed", "spread"]

_LATER = ("shapes", "trained", "optimizer")  # what states did not have at first


class GSpaceOptimizer(Optimizer):
    """Bookkeeping of an optimizer that moves in G-space; a subclass adds what happens to path values in `_step`."""

    _begun = True  # a step was taken, or a state loaded
    _fast: Any = None  # the implementation that is bound to where the parameters lie (`fast/`)

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
        require_model(model)
        require_one_of("batch_norm", batch_norm, ("released", "paper"))
        require_one_of("reference", reference, (None, "one", "balanced"))
        require_one_of("allocation", allocation, ("fixed", "spread"))
        bounds = guards(max_ratio, max_drift, allocation)
        require_numbers(defaults)
        self.model = model
        self.batch_norm, self.allocation = batch_norm, allocation
        self.max_ratio, self.max_drift = bounds
        self._ready = False
        super().__init__(list(model.parameters()) if params is None else params, defaults)
        self.analysis = analyzed(model, analysis, analyze_options(example_input, residual, pin), "pin")
        self._wanted = reference
        self._adopt(*self._find_skeleton())
        warn_of_no_units(self.analysis, type(self).__name__, stacklevel=3)
        warn_of_zeros(self.skeleton, type(self).__name__, stacklevel=3)
        self._ready, self._begun = True, False

    # Construction -----------------------------------------------------------------------------------------------------

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _find_skeleton(self) -> tuple[Reference, Skeleton]:
        return choose_skeleton(self.model, self.analysis, self._wanted, self._parameters())

    def _adopt(self, reference: Reference, skeleton: Skeleton) -> None:
        """Takes a skeleton and measures its reference in the weights of now."""
        self.reference, self.skeleton = reference, skeleton
        weights = dict(self.model.named_parameters())
        self._reference_in, self._reference_out = measure_reference(skeleton, self.analysis, weights, reference)
        self._place()
        self.incoming, self.outgoing = self._measure()
        self._start = fingerprint(self.model.parameters())
        self._mark()

    def _place(self) -> None:
        """Everything that depends on where the parameters live and which group they are in."""
        weights = dict(self.model.named_parameters())
        self._layers = algorithm.plan(self.skeleton, weights)
        self._weights = [weights[layer.edges.name] for layer in self._layers]
        device = self._weights[0].device if self._weights else torch.device("cpu")
        group_of = {id(p): g for g, group in enumerate(self.param_groups) for p in group["params"]}
        self._layer_group = [group_of[id(w)] for w in self._weights]
        self._root = self.skeleton.root.to(device)
        self._unit_group = torch.zeros(self.skeleton.H + 1, dtype=torch.long, device=device)
        for layer, g in zip(self._layers, self._layer_group, strict=True):
            self._unit_group[layer.root] = g
        inside = {id(w) for w in self._weights}
        self._outside = [[p for p in group["params"] if id(p) not in inside] for group in self.param_groups]
        dtype = torch.float64 if any(w.dtype == torch.float64 for w in self._weights) else torch.float32
        self._last = tuple(torch.ones(self.skeleton.H + 1, dtype=dtype, device=device) for _ in range(2))
        self._narrow = any(wide(w) is not w for w in self._weights)
        self._fast = None
        self._watch = Watch(self.model, self.param_groups, self._weights)

    @torch.no_grad()
    def _measure(self) -> tuple[Tensor, Tensor]:
        """Ĩ and Õ of the weights as they are."""
        result = []
        now = products(self.skeleton, dict(self.model.named_parameters()))
        for (log, sign), (ref, ref_sign) in zip(now, (self._reference_in, self._reference_out), strict=True):
            value = sign * ref_sign.to(sign) * (log - ref.to(log)).exp()
            result.append(value.to(self._last[0]))
        return result[0], result[1]

    # Keeping up with the model ----------------------------------------------------------------------------------------

    def _mark(self) -> None:
        """The weights are those the coordinates belong to. Rounded to 16 bits they may not be: measure them again."""
        if self._narrow:
            self._watch.forget()
        else:
            self._watch.mark()

    def _check(self) -> None:
        """The model must be the one that was analyzed; weights that others changed give new coordinates."""
        replaced = self._watch.replaced()
        if replaced is not None:
            raise RuntimeError(
                f"the model was changed after {type(self).__name__} was made: {replaced!r} is not what it was. "
                f"Make a new {type(self).__name__} for the changed model."
            )
        if self._watch.regrouped(self.param_groups) or self._watch.thawed():
            self._refit()
        if not self._begun and fingerprint(self.model.parameters()) != self._start:
            self._reconsider()
        if self._watch.rewritten():
            self._follow()

    def _follow(self) -> None:
        """Takes Ĩ and Õ from the weights, except where they agree to √eps: many steps round that far."""
        moved = self._watch.moved()
        if moved:
            self._place()
        else:
            self._watch.know_memory()
        fresh = self._measure()
        paths = self.incoming * self.outgoing, fresh[0] * fresh[1]
        if self._wanted != "one" and are_others(*paths, self.max_drift):
            warn_of_other_weights(type(self).__name__)
            self._start_again(*self._find_skeleton())
            return
        if not all(bool(x.isfinite().all() & (x != 0).all()) for x in fresh):
            raise RuntimeError(
                f"weights were changed so that a path value of {type(self).__name__} is 0 or not finite. "
                f"Make a new {type(self).__name__}: it will choose other skeleton weights."
            )
        for name, new in zip(("incoming", "outgoing"), fresh, strict=True):
            old = getattr(self, name).to(new)
            close = (new - old).abs() <= torch.finfo(new.dtype).eps ** 0.5 * old.abs()
            setattr(self, name, old.copy_(torch.where(close, old, new)))
        if moved:
            self._move_state()
        self._mark()

    def _reconsider(self) -> None:
        """Before the first step nothing depends on the skeleton: that of the weights as they are now is taken.

        Unless they were rescaled, and measured by ones so far: they still are.
        """
        if not all(bool(p.isfinite().all()) for p in self._parameters()):
            return
        reference, skeleton = self._find_skeleton()
        if (self.reference, reference, skeleton.H) == ("one", "balanced", self.skeleton.H):
            before, (into, out) = self.incoming * self.outgoing, self._measure()
            if torch.allclose(into * out, before.to(into), rtol=torch.finfo(into.dtype).eps ** 0.5, atol=0):
                return
        self._start_again(reference, skeleton)

    def _start_again(self, reference: Reference, skeleton: Skeleton) -> None:
        """Another skeleton, and no state. All of it, or nothing."""
        with saved.all_or_nothing(self):
            self._adopt(reference, skeleton)
        self._restart(self._parameters())
        warn_of_zeros(skeleton, type(self).__name__, stacklevel=3)

    def _move_state(self) -> None:
        """State goes where the parameters went."""
        for p, state in self.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.shape == p.shape:
                    state[key] = value.to(p.device, p.dtype)

    def _refit(self) -> None:
        """Units that a new or thawed parameter brings in, or a frozen one takes away. All of it, or nothing."""
        with saved.all_or_nothing(self):  # the inner optimizer of a subclass may refuse it
            reference, skeleton = self._find_skeleton()
            pairs = zip(skeleton.edges, self.skeleton.edges, strict=True)
            if all(torch.equal(a.head, b.head) and torch.equal(a.tail, b.tail) for a, b in pairs):
                self._place()
            else:
                before = self._weights
                self._adopt(reference, skeleton)
                self._restart([*before, *self._weights])

    def _restart(self, weights: Sequence[Tensor]) -> None:
        """Forgets what these parameters accumulated in other coordinates."""
        for w in weights:
            self.state.pop(w, None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, for example a layer that was frozen until now.

        If they bring in new units, the coordinates of the whole network are measured anew, and momentum and other
        state of parameters that touch units starts again.
        """
        super().add_param_group(param_group)
        try:
            require_own(self.param_groups[-1]["params"], self.model)
            if self._ready:
                self._refit()
        except Exception:
            self.param_groups.pop()
            raise

    # State ------------------------------------------------------------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        return {
            "reference": self.reference,
            **saved.of_skeleton(self.skeleton, dict(self.model.named_parameters())),
            "reference_in": self._reference_in,
            "reference_out": self._reference_out,
            "incoming": self.incoming,
            "outgoing": self.outgoing,
            "trained": list(self._watch.trained),
        }

    def _saved_skeleton(self, own: Mapping[str, Any]) -> Skeleton:
        if {*own, *_LATER} != {*self._own_state(), *_LATER}:
            raise ValueError(f"this is the state of another optimizer, not of {type(self).__name__}")
        skeleton = saved.skeleton_of(own, self.skeleton, dict(self.model.named_parameters()), self._parameters())
        coordinates = own["incoming"], own["outgoing"]
        saved.require(own["reference"] in ("one", "balanced"), f"it has reference {own['reference']!r}")
        saved.require(all(len(own[key]) == 2 for key in ("reference_in", "reference_out")), "it has half a reference")
        saved.require_units(skeleton.H + 1, "its reference", *own["reference_in"], *own["reference_out"])
        saved.require_units(skeleton.H + 1, "its coordinates", *coordinates)
        sound = all(bool((x.isfinite() & (x != 0)).all()) for x in coordinates)
        saved.require(sound, "a coordinate is 0 or not finite")
        trained = self._watch.trained
        saved.require(len(own.get("trained", trained)) == len(trained), "it tells of another number of parameters")
        return skeleton

    def _load_own_state(self, own: Mapping[str, Any]) -> None:
        self.reference = own["reference"]
        self._reference_in, self._reference_out = tuple(own["reference_in"]), tuple(own["reference_out"])
        self._place()
        like = self._measure()[0]
        self.incoming, self.outgoing = (own[name].to(like, copy=True) for name in ("incoming", "outgoing"))
        self._watch.trained = list(own.get("trained", self._watch.trained))  # what was thawed since is noticed
        self._watch.forget()  # the weights may be loaded after this, or before, or never
        self._begun = True

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with "gspace": skeleton and coordinates. Hooks see all of it.

        It holds what steps write in place, not copies: copy it to keep it beside further steps.
        """
        if self._watch.regrouped(self.param_groups):
            self._refit()
        return saved.save(self, super().state_dict, {"gspace": self._own_state()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        found: list[tuple[Skeleton, Mapping[str, Any]]] = []
        if self._watch.regrouped(self.param_groups):
            self._refit()

        def take(state: dict[str, Any]) -> dict[str, Any]:
            if "gspace" not in state:
                raise ValueError(
                    f"this is not the state of a {type(self).__name__}: it has no coordinates "
                    "(torch.distributed.checkpoint drops them: save what state_dict() returns)"
                )
            found.append((self._saved_skeleton(state["gspace"]), state["gspace"]))
            return {key: value for key, value in state.items() if key != "gspace"}

        def keep() -> None:
            self.skeleton, own = found[0]
            self._load_own_state(own)

        saved.load(self, super().load_state_dict, state_dict, take, keep)

    def __getstate__(self) -> dict[str, Any]:
        return saved.portable(self, "_fast")

    # One step ---------------------------------------------------------------------------------------------------------

    profile_hook_step = staticmethod(hooked)  # torch wraps `step` in it when the first optimizer of a class is made

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Inside of `torch.compile` it is a call from the graph: there is nothing to gain in it."""
        result = _uncompiled(self, closure) if torch.compiler.is_compiling() else self._step(closure)
        self._begun = True
        return result

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        raise NotImplementedError

    def _begin(self, closure: Callable[[], Any] | None) -> Any:
        """What comes before every step: the closure, and whether it may be taken."""
        loss = loss_of(closure)
        if not capturing():
            self._check()
            self._refuse_non_finite()
        return loss

    def _read(self) -> tuple[Sequence[Tensor], Sequence[Tensor]] | None:
        """Weights that touch units and their gradients (a missing one is 0), at least in float32; None: no gradient."""
        if all(w.grad is None for w in self._weights):
            return None
        for layer, w in zip(self._layers, self._weights, strict=True):
            if w.grad is not None and w.grad.is_sparse:
                raise RuntimeError(
                    f"{layer.edges.name} has a sparse gradient: G-space mixes all of its entries; use dense ones"
                )
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in self._weights]
        if not self._narrow:
            return self._weights, grads
        return [wide(w) for w in self._weights], [wide(g) for g in grads]

    def _refuse_non_finite(self) -> None:
        grads = [
            (p, p.grad._values() if p.grad.is_sparse else p.grad) for p in self._parameters() if p.grad is not None
        ]
        if not grads or any(g.device.type != "cpu" for _, g in grads):
            return
        # A sum is finite only if every term is; if it is not, it may have overflowed.
        if bool(torch.stack([g.sum().abs().float() for _, g in grads]).isfinite().all()):
            return
        bad = next((p for p, g in grads if not bool(g.isfinite().all())), None)
        if bad is not None:
            name = next(name for name, p in self.model.named_parameters() if p is bad)
            raise RuntimeError(f"the gradient of {name} is not finite; no weight and no state was changed")

    def _inverses(self, layer: Layer, view: Tensor) -> Tensor:
        """1/(Ĩ(tail)·Õ(head)), to broadcast against the view."""
        return layer.columns(self.incoming.reciprocal(), view) * layer.rows(self.outgoing.reciprocal(), view)

    def _root_path_grads(self, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
        """∂ℓ/∂v of the trained skeleton paths, `(H + 1,)`, by the inverse chain rule."""
        sums = algorithm.flow(self._layers, weights, grads, self.incoming, self.batch_norm)
        q = algorithm.inverse_chain_rule(sums, self._root)
        norms = algorithm.root_norms(self._layers, weights, self.incoming, self.batch_norm)
        return q / norms / (self.incoming * self.outgoing)

    def _spread_ratios(self, ratio: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """R of every unit from R of the roots, and the scales c that spread it (ones where free weights stay fixed)."""
        self._last[0].copy_(ratio)
        self._last[1].copy_(raw)
        every = ratio[self._root]
        spread = every.abs().rsqrt() if self.allocation == "spread" else torch.ones_like(every)
        return every, spread

    def _write(self, layer: Layer, parameter: Tensor, weight: Tensor, entries: Tensor) -> None:
        """Puts the new weights and their skeleton entries into the parameter; `weight` is what `_read` gave."""
        weight[layer.entries] = entries
        if weight is not parameter:
            parameter.copy_(weight)

    def _advance(self, every: Tensor, spread: Tensor) -> None:
        self.incoming.mul_(every * spread)
        self.outgoing.div_(spread)
        self._mark()

    def statistics(self) -> dict[str, Any]:
        """The last step: quantiles of the path ratios, how many were clipped, path values and learning rates per unit.

        Computed when called; a step only keeps two unit vectors for it. Before the first step every ratio is 1.
        """
        ratio, raw = self._last
        roots = self.skeleton.roots.to(self._root.device)
        value = (self.incoming * self.outgoing)[1:]
        here: dict[str, Any] = {"dtype": torch.float64, "device": value.device}
        rates = [torch.as_tensor(group["lr"], **here).reshape(()) for group in self.param_groups]
        at = torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0], dtype=ratio.dtype, device=ratio.device)
        quantiles = ratio[roots].quantile(at).tolist() if len(roots) else []
        return {
            "ratio_quantiles": dict(zip(at.tolist(), quantiles, strict=False)),
            "clipped": int((ratio != raw)[roots].sum()),
            "roots": len(roots),
            "path_value": value,
            "effective_lr": torch.stack(rates)[self._unit_group[self._root][1:]] / value.double().square(),
        }


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(optimizer: GSpaceOptimizer, closure: Callable[[], Any] | None) -> Any:
    return optimizer._step(closure)


def capturing() -> bool:
    """Whether a CUDA graph is being recorded: nothing may be read from the device then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def wide(x: Tensor) -> Tensor:
    """At least float32: a ratio near 1 has no place in 16 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
