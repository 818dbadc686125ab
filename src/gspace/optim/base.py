"""What GSGD and InGSpace share: the choice of a skeleton, and a step that is a function of what it is given.

A step depends on the weights, the gradients, the state of each parameter and the hyper-parameters, and on nothing else.
The skeleton is chosen at the first step whose rate is not 0, in the weights of that moment, and kept in the state
(`choice.py`); Ĩ and Õ are computed from the weights at every step. So weights may be loaded, moved, averaged, rescaled
or broadcast by anybody at any time. What a step derives from the state, it keeps as long as that state is there.

Shapes: unit vectors are `(H + 1,)`, entry 0 is ground.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, Inputs, analyzed
from gspace.optim import choice, eager, exact, fast, shards
from gspace.optim.arguments import (
    given,
    guards,
    require_dense,
    require_numbers,
    require_one_device,
    require_one_of,
    warn_of_no_units,
    warn_of_thawed,
)
from gspace.optim.built import Built, build
from gspace.optim.choice import Chosen
from gspace.optim.eager import Allocation, Rules, wide
from gspace.optim.fast import Bound
from gspace.optim.fast.network import Outcome
from gspace.optim.fast.tables import Tile
from gspace.optim.held import OfModel, State, doubt_of_gradients
from gspace.optim.hooks import capturing, loss_of
from gspace.optim.reference import Reference
from gspace.optim.skeleton import Skeleton, trained_names
from gspace.optim.step import BatchNormRule, Coordinates, measure
from gspace.sharding import Together, local, local_gradient, reshard

_OF_GROUPS = {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


class GSpaceOptimizer(OfModel):
    """An optimizer that moves in G-space; a subclass says what happens to path values in `_move`."""

    _built: Built | None = None
    _unused: tuple[str, ...]  # units that stay outside of G-space, with the reason

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
        max_ratio: float,
        max_drift: float,
        allocation: Allocation,
    ) -> None:
        mine = self._hold(model, params)
        require_one_of("batch_norm", batch_norm, ("released", "paper", "exact"))
        require_one_of("reference", reference, (None, "one", "balanced"))
        require_one_of("allocation", allocation, ("fixed", "spread"))
        bounds = guards(max_ratio, max_drift, allocation)
        if batch_norm == "exact" and (allocation == "spread" or reference is not None):
            raise ValueError("batch_norm='exact' has coordinates of its own: it takes no allocation and no reference")
        require_numbers(defaults)
        self.batch_norm, self.allocation = batch_norm, allocation
        self.max_ratio, self.max_drift = bounds
        super().__init__(mine, defaults)
        self.analysis = analyzed(model, analysis, given(example_input), "pin")
        self._view, self._absorbed = self.analysis, dict[str, Tensor]()
        if batch_norm == "exact":
            self._view, (self._absorbed, _) = exact.view(self.analysis), exact.absorbed_rows(self.analysis)
        self._wanted, self._unused = reference, ()
        self._told: set[str] = set()
        warn_of_no_units(self._view, type(self).__name__, stacklevel=3)

    # The choice -------------------------------------------------------------------------------------------------------

    def rechoose(self) -> None:
        """Chooses the skeleton in the weights of now. State of parameters that touch units starts again."""
        chosen = self._choose(final=True)
        weights = dict(self.model.named_parameters())
        for e in choice.touching(self._view):
            self.state.pop(weights[e.name], None)
        self.adopt(chosen)

    def _choose(self, *, final: bool) -> Chosen:
        mine = trained_names(self.model, self._parameters())
        require_one_device(choice.touching(self._view), self.model, mine, type(self).__name__)
        if self.batch_norm == "exact":
            return exact.choose(self.model, self.analysis, self._parameters(), final=final)
        return choice.choose(self.model, self.analysis, self._wanted, self._parameters(), final=final)

    def adopt(self, chosen: Chosen) -> None:
        """Puts a skeleton and its references into the state."""
        choice.put(chosen, self.model, self._view, self.state, self._parameters())
        self._built = self._build(chosen)
        if chosen.final:
            self._unused = chosen.skeleton.unused
            choice.warn_of_unused(chosen.skeleton, type(self).__name__, stacklevel=6)

    def _read(self) -> Chosen | None:
        """What is chosen in the state; None if nothing is."""
        weights = dict(self.model.named_parameters())
        trained = trained_names(self.model, self._parameters())
        chosen = choice.read(self.model, self._view, self.state, trained, free=self.batch_norm != "exact")
        known = {name for name, p in weights.items() if choice.kept(self.state, p) is not None}
        late = {e.name for e in choice.touching(self._view)} & trained - known - self._told
        if chosen is not None and late:
            self._told |= late
            warn_of_thawed(sorted(late), type(self).__name__)
        return chosen

    def _current(self) -> Built:
        """What a step works with now; chooses a skeleton if none is, or if the one that is was not final."""
        built = self._built
        if built is None or not built.holds(self.param_groups, self.state):
            chosen = self._read()
            built = self._built = None if chosen is None else self._build(chosen)
        if built is not None and (built.chosen.final or not self._moving()):
            return built
        if capturing():
            raise RuntimeError(
                f"the first step of {type(self).__name__} chooses its skeleton, which a CUDA graph cannot hold: "
                "take a step before the capture, or call rechoose()"
            )
        shards.require_gradients(self.model, self._parameters())
        shards.require_alike(self.model)
        self.adopt(self._choose(final=self._moving()))
        assert self._built is not None
        return self._built

    def _look(self) -> Built:
        """What a step would work with, without choosing anything for good."""
        if self._built is not None and self._built.holds(self.param_groups, self.state):
            return self._built
        return self._build(self._read() or self._choose(final=False))

    def _build(self, chosen: Chosen) -> Built:
        return build(chosen, dict(self.model.named_parameters()), self._absorbed, self.param_groups, self.state)

    @property
    def chosen(self) -> Chosen:
        """The skeleton and its references; before the first step, what would be chosen now."""
        return self._look().chosen

    @property
    def skeleton(self) -> Skeleton:
        """The skeleton; before the first step, what would be chosen now."""
        return self.chosen.skeleton

    @property
    def reference(self) -> Reference:
        """In which units path values are measured (docs/theory.md)."""
        return "one" if bool((self.chosen.references == 1).all()) else "balanced"

    @property
    def incoming(self) -> Tensor:
        """Ĩ in the weights of now, `(H + 1,)`."""
        return self._measured(self._look()).incoming

    @property
    def outgoing(self) -> Tensor:
        """Õ in the weights of now, `(H + 1,)`."""
        return self._measured(self._look()).outgoing

    @torch.no_grad()
    def _measured(self, built: Built) -> Coordinates:
        return measure(built.plan, list(map(local, built.weights)), built.dtype)

    # State ------------------------------------------------------------------------------------------------------------

    def _loaded(self, state_dict: State) -> None:
        """Looks at a state that was loaded before it is believed: kernels would write wherever it sends them."""
        self._built = None
        for group in state_dict["param_groups"]:
            missing, foreign = self.defaults.keys() - group.keys(), group.keys() - self.defaults.keys() - _OF_GROUPS
            if missing and foreign:  # one that is older lacks some, one of another optimizer has others
                raise ValueError(
                    f"this is the state of another optimizer than this {type(self).__name__}: its groups have "
                    f"{', '.join(sorted(foreign))}, but not {', '.join(sorted(missing))}"
                )
        chosen = self._read()
        weights = dict(self.model.named_parameters())
        touched = [weights[e.name] for e in choice.touching(self._view)]
        kept = [self.state[p] for p in touched if p in self.state]
        if chosen is None and any(kept):
            raise ValueError(
                f"this is not the state of a {type(self).__name__}: it says nothing of a skeleton, "
                "and momentum of weights is no momentum of paths"
            )
        if chosen is not None:
            self._unused = ()

    # One step ---------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. `torch.compile` follows it once a skeleton is chosen; the first one is a call from its graph."""
        if not torch.compiler.is_compiling():
            return self._step(closure)
        if self._built is None or not self._built.steady or self._sharded:
            return torch.compiler.disable(self._step)(closure)
        loss = loss_of(closure)
        self._by_torch(self._built)
        return loss

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = loss_of(closure)
        if self._sharded:
            reshard(self.model)
        if not capturing():
            self._held.require_same(type(self).__name__)
        built = self._current()
        way = self._find_way(built)
        if isinstance(way, str) or not self._by_kernels(built, way):
            self._require_gradients(built)
            self._by_torch(built)
        built.steady = built.chosen.final
        return loss

    def _require_gradients(self, built: Built) -> None:
        reduce = built.plan.reduce
        if isinstance(reduce, Together) and any(p.grad is not None for p in built.weights):
            reduce.doubt = doubt_of_gradients(self.model, self._parameters())  # goes along with the step's first sum
        else:
            shards.require_gradients(self.model, self._parameters())

    def use(self, way: type[Bound] | str, tile: Tile | None = None) -> None:
        """Takes steps by this implementation as long as nothing moves; for tests and measurements.

        With such tiles, or in torch's operations, where `way` says why.
        """
        built = self._current()
        self._find_way(built)
        whole = self._whole(built)
        built.way = way if isinstance(way, str) else way(built, self._rules(), whole, tile)

    def _find_way(self, built: Built) -> Bound | str:
        """The compiled step, kept until parameters move or settings change."""
        settings = self._rules(), self._wishes()
        if built.way is None or settings != built.way_for or (isinstance(built.way, Bound) and built.way.stale()):
            built.way, built.way_for = self._choose_way(built), settings
        return built.way

    @property
    def _way(self) -> Bound | str | None:
        return None if self._built is None else self._built.way

    def _choose_way(self, built: Built) -> Bound | str:
        return fast.choose(built, self._rules(), self._whole(built))

    def _wishes(self) -> Any:
        """What else a way depends on."""

    def _whole(self, built: Built) -> Sequence[tuple[Tensor, int]] | None:
        """Other parameters that a compiled step moves too, with their groups; None: it only shows and gives."""

    @torch.no_grad()
    def _by_kernels(self, built: Built, way: Bound) -> bool:
        """A compiled step; False, and nothing has moved, if torch's operations must see to it."""
        shown, path_grads = self._canvas(built)
        if not self._taken(built, way.show(shown, path_grads)):
            return False
        shards.require_gradients(self.model, (p for some in built.outside for p in some))
        self._move(built, shown, path_grads)
        way.give()
        return True

    def _taken(self, built: Built, outcome: Outcome | None) -> bool:
        if outcome == Outcome.NO_PATH:
            self._require_paths(self._measured(built), built.weights)
        return outcome == Outcome.TAKEN  # or no gradient has come, one is sparse or not finite, or a sum of w·g is not

    @torch.no_grad()
    def _by_torch(self, built: Built) -> None:
        """A step in torch's operations."""
        if all(w.grad is None for w in built.weights):
            self._move(built, None, None)
            return
        require_dense(self.model, built.weights, "G-space mixes all of its entries")
        weights, slopes = built.weights, [w.grad for w in built.weights]
        shown, path_grads = canvas = self._canvas(built)
        if self._sharded:  # the optimizer sees what is sharded, this step what is here
            weights, slopes = [local(w) for w in weights], [local_gradient(w) for w in weights]
            shown, path_grads = [local(v) for v in shown], [local(g) for g in path_grads]
        bundle, rules = built.bundle, self._rules()
        pairs = zip(weights, slopes, strict=True)
        grads = bundle.joined([torch.zeros_like(wide(w)) if g is None else wide(g) for w, g in pairs])
        now = bundle.joined([wide(w) for w in weights])
        v, slope = bundle.joined(shown), bundle.joined(path_grads)
        at, root_grad = eager.observed(bundle.plan, self.batch_norm, now, grads, built.dtype)
        self._require_paths(at, weights)
        ends = eager.show(bundle.plan, self.batch_norm, at, root_grad, now, grads, v, slope)
        bundle.give(v, shown)
        bundle.give(slope, path_grads)
        self._move(built, *canvas)
        last = eager.allocate(bundle.plan, rules, at, ends, now, bundle.joined(shown), slope)
        torch._foreach_copy_(built.last, last)
        bundle.give(now, weights)

    def _rules(self) -> Rules:
        return Rules(self.batch_norm, self.allocation, self.max_ratio, self.max_drift)

    def _require_paths(self, at: Coordinates, weights: Iterable[Tensor]) -> None:
        """On a CPU; a network that has diverged is left to itself, as it may be one of several side by side."""
        if at.incoming.device.type != "cpu" or torch.compiler.is_compiling():
            return
        if not bool(((at.incoming == 0) | (at.incoming * at.outgoing == 0)).any()):
            return
        if self._sharded or all(bool(w.isfinite().all()) for w in weights):  # what one rank says, all must
            raise RuntimeError(
                f"weights were changed so that a path value of {type(self).__name__} is 0: "
                "rechoose() takes other skeleton weights"
            )

    def _canvas(self, built: Built) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Tensors like the weights, for v and ∂ℓ/∂v."""
        raise NotImplementedError

    def _move(self, built: Built, shown: Sequence[Tensor] | None, path_grads: Sequence[Tensor] | None) -> None:
        """What the optimizer does to path values (None: no gradient has come), in place, and to other parameters."""
        raise NotImplementedError

    def statistics(self) -> "Statistics":
        """The last step: quantiles of the path ratios, how many were clipped, path values and learning rates per unit.

        Computed when called; a step only keeps two unit vectors for it. Before the first step every ratio is 1.
        `unused` are the units that stay outside of G-space, with the reason. Printed, a tensor is its range.
        """
        built = self._look()
        ratio, raw = built.last
        skeleton = built.chosen.skeleton
        roots = skeleton.roots.to(ratio.device)
        at = self._measured(built)
        value = (at.incoming * at.outgoing)[1:]
        here: dict[str, Any] = {"dtype": torch.float64, "device": value.device}
        rates = [torch.as_tensor(group["lr"], **here).reshape(()) for group in self.param_groups]
        levels = (0.0, 0.05, 0.5, 0.95, 1.0)
        quantiles = ratio[roots].quantile(ratio.new_tensor(levels)).tolist() if len(roots) else []
        return Statistics(
            ratio_quantiles=dict(zip(levels, quantiles, strict=False)),
            clipped=int((ratio != raw)[roots].sum()),
            roots=len(roots),
            path_value=value,
            effective_lr=torch.stack(rates)[built.unit_group[built.plan.root][1:]] / value.double().square(),
            unused=self._unused or skeleton.unused or _left_out(self._view.H_paper - skeleton.H),
        )


class Statistics(dict[str, Any]):
    """What `statistics` returns."""

    def __repr__(self) -> str:
        return "\n".join(f"{key:<15}  {_brief(value) or 'none'}" for key, value in self.items())


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{len(value)} values" + (f", {value.min():.4g} to {value.max():.4g}" if len(value) else "")
    if isinstance(value, dict):
        return ", ".join(f"{key:g}: {number:.4g}" for key, number in value.items())
    return "; ".join(value) if isinstance(value, tuple) else str(value)


def _left_out(count: int) -> tuple[str, ...]:
    told = f"{count} units were left out when the skeleton was chosen, or touch a layer that is frozen now"
    return (told,) * (count > 0)
