"""InGSpace: any torch optimizer, acting on path values instead of weights."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gspace.analysis import Analysis, Inputs
from gspace.optim.base import GSpaceOptimizer
from gspace.optim.built import Built
from gspace.optim.choice import KEY
from gspace.optim.eager import Allocation, wide
from gspace.optim.hooks import step_within
from gspace.optim.reference import Reference
from gspace.optim.step import BatchNormRule


class InGSpace(GSpaceOptimizer):
    """Runs `optimizer_class` on v: the path values of a model's basis paths, and its parameters outside every unit.

    Each parameter that touches units is shown to the inner optimizer as a tensor of the same shape that holds path
    values, with ∂ℓ/∂v as gradient (`eager.py`). The inner optimizer steps, and the new values are allocated to weights.
    Trained skeleton paths, which are shown as changes, are never decayed. State of the inner optimizer is state of this
    one, under the parameter: it is saved, loaded and moved like any other.

    Args:
        model: The model, not its parameters.
        optimizer_class: For example `torch.optim.Adam`; any that has groups of parameters and needs no closure.
        kwargs: Passed to `optimizer_class`; the others are those of `GSGD`.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> optimizer = InGSpace(net, torch.optim.Adam, lr=1e-3)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[Optimizer],
        *,
        params: Iterable[Any] | None = None,
        reference: Reference | None = None,
        batch_norm: BatchNormRule = "released",
        max_ratio: float = 1.5,
        max_drift: float = 1.1,
        allocation: Allocation = "fixed",
        example_input: Inputs | None = None,
        analysis: Analysis | None = None,
        **kwargs: Any,
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            what = getattr(optimizer_class, "__name__", None) or f"an object of {type(optimizer_class).__name__}"
            raise TypeError(f"optimizer_class must be a torch.optim.Optimizer class, got {what}")
        if issubclass(optimizer_class, torch.optim.LBFGS):
            raise ValueError("LBFGS cannot be the inner optimizer: it takes one group of parameters and a closure")
        self.optimizer_class, self.optimizer_kwargs = optimizer_class, kwargs
        # Any parameters do to learn (and check) the defaults of the inner optimizer.
        probe = optimizer_class([nn.Parameter(torch.zeros(2, 2, device="cpu"))], **kwargs)
        super().__init__(
            model,
            params,
            {**probe.defaults},
            example_input=example_input,
            analysis=analysis,
            reference=reference,
            batch_norm=batch_norm,
            max_ratio=max_ratio,
            max_drift=max_drift,
            allocation=allocation,
        )

    # The inner optimizer ----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:  # what the inner optimizer has against it
            self.optimizer_class([dict(self.param_groups[-1])], **self.optimizer_kwargs)
        except Exception:
            self.param_groups.pop()
            raise

    @property
    def inner(self) -> Optimizer:
        """The inner optimizer of the next step, without its state, which is here."""
        return self._made(self._look()).optimizer

    def _made(self, built: Built) -> "Inner":
        """The inner optimizer and the tensors it moves instead of weights, kept as long as `built`."""
        if built.moved is None:
            shown = [nn.Parameter(torch.empty_like(wide(w))) for w in built.weights]
            groups = []
            for g, group in enumerate(self.param_groups):
                mine = [v for v, at in zip(shown, built.groups, strict=True) if at == g]
                groups.append({**_options(group), "params": mine + built.outside[g]})
            owners: dict[Tensor, Tensor] = dict(zip(shown, built.weights, strict=True))
            made = built.moved = Inner(
                self.optimizer_class(groups, **self.optimizer_kwargs),
                inspect.unwrap(self.optimizer_class.step),
                shown,
                [v.detach() for v in shown],
                [torch.empty_like(v, requires_grad=False) for v in shown],
                owners | {p: p for some in built.outside for p in some},
            )
            for v, new in made.optimizer.state.items():  # made with the optimizer (Adagrad before torch 2.13)
                kept = self.state[made.owners[v]]
                if len(kept) == (KEY in kept):
                    kept.update(new)
        return built.moved

    # One step ---------------------------------------------------------------------------------------------------------

    def _canvas(self, built: Built) -> tuple[list[Tensor], list[Tensor]]:
        made = self._made(built)
        return made.values, made.slopes

    def _move(self, built: Built, shown: Sequence[Tensor] | None, path_grads: Sequence[Tensor] | None) -> None:
        made = self._made(built)
        inner = made.optimizer
        # Schedulers write hyper-parameters into our groups, and some optimizers count steps in theirs.
        for group, its in zip(self.param_groups, inner.param_groups, strict=True):
            _bring(group, its)
        if torch.compiler.is_compiling():
            made.bare(inner)  # torch's wrappers break graphs; the state is there since the step before this graph
        else:
            for tensor, slope in zip(made.shown, made.slopes, strict=True):
                grad = None if shown is None else slope  # no gradient: path values are left alone
                if tensor.grad is not grad:
                    tensor.grad = grad
            inner.state.clear()
            for v, p in made.owners.items():
                kept = self.state.get(p, {})
                if len(kept) > (KEY in kept):
                    inner.state[v] = {key: _at(v, x) for key, x in kept.items() if key != KEY}
            step_within(inner)
            for v, new in inner.state.items():
                if new and v in made.owners:
                    self.state[made.owners[v]].update(new)
        for group, its in zip(self.param_groups, inner.param_groups, strict=True):
            _bring(its, group)


class Inner(NamedTuple):
    """An inner optimizer, and what it works on.

    Attributes:
        bare: Its step, without what torch wraps around that.
        shown: The tensors that it moves instead of weights.
        values, slopes: Their values, to be written, and gradients.
        owners: For all that it moves, the parameter.
    """

    optimizer: Optimizer
    bare: Callable[[Optimizer], Any]
    shown: list[nn.Parameter]
    values: list[Tensor]
    slopes: list[Tensor]
    owners: dict[Tensor, Tensor]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """What of a group is not its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _bring(source: dict[str, Any], target: dict[str, Any]) -> None:
    """What is new in the options of a group: `torch.compile` makes what it must write, and capturable, its own."""
    compiling = torch.compiler.is_compiling()
    for key, value in _options(source).items():
        if compiling and key == "capturable":
            continue
        if key not in target or target[key] is not value:
            target[key] = value


def _at(v: Tensor, value: Any) -> Any:
    """What an inner optimizer keeps for each entry, where and as wide as what it moves."""
    if not isinstance(value, Tensor) or (value.dtype == v.dtype and value.device == v.device):
        return value
    if value.is_floating_point() and value.shape == v.shape:
        return value.to(v.device, torch.promote_types(value.dtype, v.dtype))
    return value
