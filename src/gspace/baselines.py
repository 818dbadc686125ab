"""What G-SGD is compared with: Path-SGD, and SGD with the free skeleton frozen.

The third control, SGD from the skeleton initialisation, is `init_skeleton_(model)` and `torch.optim.SGD`.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gspace import saved
from gspace.analysis import Analysis, Inputs, Residual, analyzed, unwrap
from gspace.arguments import analyze_options, require_model, require_numbers, require_own
from gspace.hooks import loss_of
from gspace.optim import plain_sgd
from gspace.pathsum import as_input_of, path_graph, path_kappa
from gspace.reference import choose_skeleton
from gspace.step import Number, plan
from gspace.watch import fingerprint


class PathSGD(Optimizer):
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
        interval: κ is computed every `interval` steps. The scales do not change in between, so the update still
            commutes with them. Captured in a CUDA graph, every replay does what the captured step did.
        example_input: A batch the model accepts; without one, inputs are guessed as in `analyze`.
        analysis: The result of `analyze(model)`.

    Raises:
        PathError: The model has no path norm. BatchNorm counts as the affine map of evaluation mode.
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
        interval: int = 1,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        example_input: Inputs | None = None,
        analysis: Analysis | None = None,
    ) -> None:
        require_model(model)
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f"interval must be a positive number of steps, got {interval!r}")
        options: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
        }
        # torch's own constructor checks what it shares with us.
        torch.optim.SGD([torch.zeros(1, device="cpu")], **options)
        require_numbers(options)
        self.model, self.interval = model, interval
        self._edges: list[Tensor] = []
        super().__init__(list(model.parameters()) if params is None else params, {**options, "steps": 0})
        self.graph = path_graph(model, example_input)
        alike = as_input_of(model, example_input)
        found = analyzed(model, analysis, {} if alike is None or analysis is not None else {"example_input": alike})
        edges, slopes = {e.name for e in found.edges}, {id(p) for p in self.graph.slopes()}
        self._edges = [p for name, p in model.named_parameters() if name in edges and id(p) not in slopes]
        trained = self._trained()  # what cannot be summed is refused here, not at the first step
        self._leave_out([p for p, k in zip(trained, path_kappa(self.graph, trained), strict=True) if k is None])

    def __getstate__(self) -> dict[str, Any]:
        return saved.portable(self)

    def _leave_out(self, unreached: Sequence[Tensor]) -> None:
        """Parameters that evaluation mode does not run, such as those of an auxiliary head, have no κ."""
        if unreached:
            names = [name for name, p in self.model.named_parameters() if any(p is u for u in unreached)]
            warnings.warn(
                f"no path of the network in evaluation mode runs through {', '.join(names)}: plain SGD for them",
                stacklevel=3,
            )
            self._edges = [p for p in self._edges if not any(p is u for u in unreached)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            require_own(self.param_groups[-1]["params"], self.model)
        except ValueError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch does, but κ keeps the precision it was saved in."""
        found: list[dict[str, Any]] = []

        def take(state: dict[str, Any]) -> dict[str, Any]:
            if any("steps" not in group for group in state["param_groups"]):
                raise ValueError("this is the state of another optimizer, not of PathSGD")
            found.append(state)
            return state

        def keep() -> None:
            theirs = (i for group in found[0]["param_groups"] for i in group["params"])
            mine = (p for group in self.param_groups for p in group["params"])
            for i, p in zip(theirs, mine, strict=True):
                kappa = found[0]["state"].get(i, {}).get("kappa")
                if kappa is not None:
                    self.state[p]["kappa"] = kappa.to(p.device, copy=True)

        saved.load(self, super().load_state_dict, state_dict, take, keep)

    def _trained(self) -> list[Tensor]:
        """The edges of the network among the parameters."""
        edges = {id(p) for p in self._edges}
        mine = (p for group in self.param_groups for p in group["params"])
        return [p for p in mine if p.requires_grad and id(p) in edges]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # which step it is, is no part of a compiled step
    def _refresh(self) -> None:
        """κ of every edge that is trained, wide enough for all of it; counts the step."""
        stale = any(group["steps"] % self.interval == 0 for group in self.param_groups)
        trained = self._trained()
        if stale or any("kappa" not in self.state[p] for p in trained):
            found = list(zip(trained, path_kappa(self.graph, trained), strict=True))
            self._leave_out([p for p, kappa in found if kappa is None])
            for p, kappa in found:
                if kappa is not None:
                    self.state[p]["kappa"] = kappa
        for group in self.param_groups:
            group["steps"] += 1

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        self._refresh()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _direction(self, p: Tensor, grad: Tensor) -> Tensor:
        """g/κ, 0 where κ is."""
        kappa = self.state[p].get("kappa")
        if kappa is None:
            return grad
        if grad.is_sparse:
            raise RuntimeError("PathSGD does not support sparse gradients of weights on paths; use dense ones")
        return torch.where(kappa > 0, grad / kappa, 0).to(p.dtype)

    def _step_group(self, group: dict[str, Any]) -> None:
        active = [p for p in group["params"] if p.grad is not None]
        if not active:
            return
        directions = [self._direction(p, p.grad) for p in active]
        plain_sgd(group, self.state, active, directions)


class FrozenSkeletonSGD(torch.optim.SGD):
    """`torch.optim.SGD` that never changes the free skeleton weights: G-SGD's control without its geometry.

    They are put back after every step, so momentum and weight decay do not reach them either. Which ones they are is
    chosen at the start, and again before the first step if other weights were loaded by then.

    Args:
        model: The model, not its parameters.
        params: torch's parameter groups.
        analysis, example_input, residual, pin: As for GSGD, which finds the same skeleton: aligned if the model is
            on it, otherwise pivoted.
        lr, options: As in `torch.optim.SGD`.
    """

    _begun = True  # a step was taken, or a state loaded

    def __init__(
        self,
        model: nn.Module,
        lr: Number = 1e-3,
        *,
        params: Iterable[Any] | None = None,
        analysis: Analysis | None = None,
        example_input: Inputs | None = None,
        residual: Residual = "pin",
        pin: Iterable[str] = (),
        **options: Any,
    ) -> None:
        require_model(model)
        super().__init__(list(model.parameters()) if params is None else params, lr, **options)
        self.model, self.analysis = (
            model,
            analyzed(model, analysis, analyze_options(example_input, residual, pin), "pin"),
        )
        self._choose()
        self._begun = False

    def _choose(self) -> None:
        """The free skeleton weights of the network as it is now, `(weight, indices)` by the name of the parameter."""
        weights = dict(self.model.named_parameters())
        mine = [p for group in self.param_groups for p in group["params"]]
        _, self.skeleton = choose_skeleton(self.model, self.analysis, None, mine)
        name_of = {id(p): name for name, p in self._named().items()}
        self._free: dict[str, tuple[Tensor, tuple[Tensor, ...]]] = {}
        for layer in plan(self.skeleton, weights):
            weight = weights[layer.edges.name]
            self._free[name_of[id(weight)]] = weight, tuple(i[layer.free > 0] for i in layer.entries)
        self._seen = fingerprint(weights.values())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self) -> None:
        """Before the first step: other weights than those it was made with have another skeleton."""
        if self._seen != fingerprint(self.model.parameters()):
            self._choose()
        self._begun = True

    def _named(self) -> dict[str, Tensor]:
        """Parameters under the names they have without `DataParallel`, `torch.compile` and the like around them."""
        return dict(unwrap(self.model).named_parameters())

    def __getstate__(self) -> dict[str, Any]:
        return saved.portable(self)

    def state_dict(self) -> dict[str, Any]:
        frozen = {name: entries for name, (_, entries) in self._free.items()}
        shapes = {name: tuple(weight.shape) for name, (weight, _) in self._free.items()}
        return saved.save(self, super().state_dict, {"frozen": frozen, "shapes": shapes})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        found: dict[str, tuple[Tensor, tuple[Tensor, ...]]] = {}
        weights = self._named()

        def take(state: dict[str, Any]) -> dict[str, Any]:
            if "frozen" not in state:
                raise ValueError("this is the state of another optimizer, not of FrozenSkeletonSGD")
            for name, entries in state["frozen"].items():
                here = next((n for n in (name, _bare(name)) if n in weights), None)
                if here is None:
                    raise ValueError(f"this state belongs to another network: it freezes {name}, which is not here")
                if state.get("shapes", {}).get(name, weights[here].shape) != weights[here].shape:  # at first none
                    raise ValueError("this state belongs to another network: its layers have other sizes")
                entries = tuple(entries)
                saved.require(len(entries) == weights[here].dim(), f"it freezes no single weights of {name}")
                torch.empty(weights[here].shape, device="cpu")[tuple(i.cpu() for i in entries)]  # those are there
                found[here] = weights[here], entries
            return {key: value for key, value in state.items() if key not in ("frozen", "shapes")}

        def keep() -> None:
            self._free, self._begun = found, True

        saved.load(self, super().load_state_dict, state_dict, take, keep)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        if not self._begun:
            self._begin()
        places = [(weight, tuple(i.to(weight.device) for i in entries)) for weight, entries in self._free.values()]
        before = [weight[entries] for weight, entries in places]
        inspect.unwrap(torch.optim.SGD.step)(self)  # hooks run around this step, not within it
        for (weight, entries), value in zip(places, before, strict=True):
            weight[entries] = value
        return loss


def _bare(name: str) -> str:
    """The name of a parameter without those of wrappers, which states once had."""
    while name.startswith(("module.", "_orig_mod.")):
        name = name.partition(".")[2]
    return name
