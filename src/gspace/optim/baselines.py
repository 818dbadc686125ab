"""What G-SGD is compared with: Path-SGD, and SGD with the free skeleton frozen.

The third control, SGD from the skeleton initialisation, is `init_skeleton_(model)` and `torch.optim.SGD`.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from gspace.analysis import Analysis, Inputs, analyzed
from gspace.optim import choice
from gspace.optim.arguments import given, require_dense, require_finite, require_numbers
from gspace.optim.built import Seen, seen
from gspace.optim.gsgd import alike, plain_sgd
from gspace.optim.held import OfModel, State
from gspace.optim.hooks import capturing, loss_of
from gspace.optim.plan import layers_of
from gspace.optim.shards import divided, require_alike, require_gradients
from gspace.optim.skeleton import Skeleton
from gspace.optim.step import Number
from gspace.paths.pathsum import PathKappa, as_input_of, path_graph, path_kappa
from gspace.sharding import cut, like, local, local_gradient, reshard


class ModelSGD(OfModel, torch.optim.SGD):
    """torch's SGD, made of a model."""

    def __init__(self, model: nn.Module, lr: Number, params: Iterable[Any] | None, **options: Any) -> None:
        super().__init__(self._hold(model, params), lr, **options)
        require_numbers(self.defaults)

    def _look(self) -> None:
        """Nothing stands against a step."""
        if self._sharded:
            reshard(self.model)
        self._held.require_same(type(self).__name__)
        require_gradients(self.model, self._parameters())


class PathSGD(ModelSGD):
    """Steepest descent with respect to the path norm (Neyshabur et al. 2015): w ← w − lr·g/κ.

    Under a rescaling w → s·w the gradient becomes g/s and κ becomes κ/s², so that the step becomes s times what it was:
    the update commutes with the group. It is torch's SGD with g/κ in place of g; momentum sums up g/κ, and weight
    decay adds λ·w to it, both of which scale like w and keep that property.

    Where κ = 0 every path through the weight has another zero weight. The function does not depend on it, its gradient
    is 0, and 0/0 counts as 0. (Dividing by κ + ε would do, but no ε scales with κ.) Parameters that are no edge of the
    network, such as slopes of a PReLU, no rescaling changes: they get plain SGD. So do, with a warning, those that
    evaluation mode does not run.

    Args:
        model: The model, not its parameters.
        lr, momentum, dampening, nesterov, weight_decay, maximize, foreach, fused: As in `torch.optim.SGD`.
        params: torch's parameter groups, if they differ in hyper-parameters or leave parameters out.
        interval: κ is computed every `interval` steps, and kept in the state if that is not in every step. The scales
            do not change in between, so the update still commutes with them. Captured in a CUDA graph, every replay
            does what the captured step did.
        example_input: A batch the model accepts; without one, inputs are guessed as in `analyze`.
        analysis: The result of `analyze(model)`.

    Raises:
        PathError: The model has no path norm. BatchNorm counts as the affine map of evaluation mode.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> optimizer = PathSGD(model, lr=1e-3)
    >>> model(torch.ones(2, 4)).square().mean().backward()
    >>> optimizer.step()
    """

    _exact = ("kappa",)

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
        interval: int = 1,
        example_input: Inputs | None = None,
        analysis: Analysis | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f"interval must be a positive number of steps, got {interval!r}")
        options |= {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(model, lr, params, **options)
        self._step_supports_amp_scaling = False  # gradients are looked at before the step
        self.defaults["steps"] = 0
        for group in self.param_groups:
            group.setdefault("steps", 0)
        self.interval, self.graph = interval, path_graph(model, example_input)
        alike = as_input_of(model, example_input)
        found = analyzed(model, analysis, {} if alike is None or analysis is not None else {"example_input": alike})
        edges = {e.name for e in found.edges}
        self._edges = [p for name, p in model.named_parameters() if name in edges]
        self._kappa = self._known(None)  # what cannot be summed is refused here, not at the first step

    def _loaded(self, state_dict: State) -> None:
        if any("steps" not in group for group in state_dict["param_groups"]):
            raise ValueError("this is the state of another optimizer, not of PathSGD")

    def _known(self, kappa: PathKappa | None) -> PathKappa:
        """κ of the edges of the network that are trained now."""
        edges = {id(p) for p in self._edges}
        trained = [p for p in self._parameters() if p.requires_grad and id(p) in edges]
        if kappa is not None and len(trained) == len(kappa.asked) and all(map(is_, trained, kappa.asked)):
            return kappa
        kappa = path_kappa(self.graph, trained)
        left_out = {id(p) for p in trained} - {id(p) for p in kappa.parameters}
        if left_out:  # such as an auxiliary head
            names = ", ".join(name for name, p in self.model.named_parameters() if id(p) in left_out)
            text = f"no path of the network in evaluation mode runs through {names}: plain SGD for them"
            warnings.warn(text, stacklevel=4)
        return kappa

    def _divisors(self) -> Mapping[int, list[Tensor]]:
        """Factors of κ for each trained edge of the network, by `id`; counts the step."""
        kappa = self._kappa = self._known(self._kappa)
        require_dense(self.model, kappa.parameters, "κ is that of all of its entries")
        if not (capturing() or any(group["steps"] for group in self.param_groups)):
            require_finite(self.model)
        stale = any(group["steps"] % self.interval == 0 for group in self.param_groups)
        for group in self.param_groups:
            group["steps"] += 1
        if not stale and all("kappa" in self.state[p] for p in kappa.parameters):
            return {id(p): [self.state[p]["kappa"]] for p in kappa.parameters}
        found = {id(p): factors for p, factors in zip(kappa.parameters, _divisors(kappa), strict=True)}
        for p in kappa.parameters if self._sharded or self.interval > 1 else ():
            found[id(p)] = [like(p, cut(functools.reduce(torch.mul, found[id(p)]), p).contiguous())]
            if self.interval > 1:
                (self.state[p]["kappa"],) = found[id(p)]
        return found

    def _directions(self) -> list[list[tuple[list[Tensor], list[Tensor]]]]:
        """Of each group parameters with a gradient, and g/κ; those together that torch moves in one call."""
        self._look()
        divisors = self._divisors()
        active = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        return [
            [(some, [self._over(p, divisors.get(id(p), [])) for p in some]) for some in alike(mine, self._sharded)]
            for mine in active
        ]

    def _over(self, p: Tensor, divisors: list[Tensor]) -> Tensor:
        """The gradient of p, divided by each of them."""
        grad: Any = like(p, local_gradient(p)) if self._sharded and divisors else p.grad  # type: ignore[arg-type]
        for k, divisor in enumerate(divisors):
            grad = grad.div_(divisor) if k else grad / divisor
        return grad if grad.dtype == p.dtype else grad.to(p.dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        compiling = torch.compiler.is_compiling()  # which step it is, is no part of a compiled step
        found = (torch.compiler.disable(self._directions) if compiling else self._directions)()
        for group, parts in zip(self.param_groups, found, strict=True):
            for some, directions in parts:
                plain_sgd(group, self.state, some, directions)
        return loss


NARROW = (torch.float32, torch.bfloat16, torch.float16)
SAFE = 2.0**40  # of float32: what products of such numbers cannot hold does not matter beside them


def _divisors(kappa: PathKappa) -> list[list[Tensor]]:
    """Factors of κ with ∞ in place of 0, as g/κ is 0 there; in float32 if that is safe. A GPU is not asked."""
    if kappa.complete and all(p.dtype in NARROW and p.device.type == "cpu" for p in kappa.parameters):
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
            found, least, most = kappa(torch.float32)
        if least.item() > 1 / SAFE and most.item() < SAFE:
            return found
    return [[f.masked_fill(f == 0, float("inf")) for f in factors] for factors in kappa()[0]]


class FrozenSkeletonSGD(ModelSGD):
    """`torch.optim.SGD` that never changes the free skeleton weights: G-SGD's control without its geometry.

    They are put back after every step, so momentum and weight decay do not reach them either. Which ones they are is
    chosen at the first step whose rate is not 0, as for GSGD, and kept in the state.

    Args:
        model: The model, not its parameters.
        params: torch's parameter groups.
        analysis, example_input: As for GSGD, which finds the same skeleton: aligned if the model is on it, otherwise
            pivoted.
        lr, options: As in `torch.optim.SGD`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> optimizer = FrozenSkeletonSGD(model, lr=0.1)
    >>> model(torch.ones(2, 4)).square().mean().backward()
    >>> optimizer.step()
    """

    _free: tuple[Seen, list[tuple[Tensor, tuple[Tensor, ...]]]] | None = None

    def __init__(
        self,
        model: nn.Module,
        lr: Number = 1e-3,
        *,
        params: Iterable[Any] | None = None,
        analysis: Analysis | None = None,
        example_input: Inputs | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, lr, params, **options)
        self.analysis = analyzed(model, analysis, given(example_input), "pin")

    def rechoose(self) -> None:
        """Chooses the skeleton in the weights of now."""
        self._choose(final=True)

    def _choose(self, *, final: bool) -> choice.Chosen:
        chosen = choice.choose(self.model, self.analysis, None, self._parameters(), final=final)
        choice.put(chosen, self.model, self.analysis, self.state, self._parameters())
        if final:
            choice.warn_of_unused(chosen.skeleton, type(self).__name__, stacklevel=7)
        return chosen

    def _chosen(self) -> choice.Chosen | None:
        return choice.read(self.model, self.analysis, self.state, dict(self.model.named_parameters()))

    @property
    def skeleton(self) -> Skeleton:
        """The skeleton; before the first step, what would be chosen now."""
        chosen = self._chosen() or choice.choose(self.model, self.analysis, None, self._parameters())
        return chosen.skeleton

    def _loaded(self, state_dict: State) -> None:
        if self._chosen() is None and any(self.state.values()):
            raise ValueError("this is the state of another optimizer, not of FrozenSkeletonSGD: it has no skeleton")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _frozen(self) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
        """What is here of parameters with free skeleton weights, and where those are; kept as long as the state is."""
        self._look()
        for group in self.param_groups:
            if group["weight_decay"] or group["fused"]:
                require_dense(self.model, group["params"], "weight_decay and fused=True are for all of its entries")
        if self._free is not None and seen(self.param_groups, self.state).same(self._free[0]):
            return [(local(weight), entries) for weight, entries in self._free[1]]
        chosen, moving = self._chosen(), self._moving()
        if chosen is None or (moving and not chosen.final):
            require_alike(self.model)
            chosen = self._choose(final=moving)
        weights = dict(self.model.named_parameters())
        found: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        for layer in divided(layers_of(chosen.skeleton, weights), weights):
            if bool(layer.at.free.any()):
                found.append((weights[layer.edges.name], tuple(i[layer.at.free > 0] for i in layer.entries)))
        if chosen.final:
            self._free = seen(self.param_groups, self.state), found
        return [(local(weight), entries) for weight, entries in found]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        places = self._frozen()
        before = [weight[entries] for weight, entries in places]
        inspect.unwrap(torch.optim.SGD.step)(self)  # hooks run around this step, not within it
        for (weight, entries), value in zip(places, before, strict=True):
            weight[entries] = value
        return loss
