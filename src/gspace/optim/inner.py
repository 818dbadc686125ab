"""InGSpace: any torch optimizer, acting on path values instead of weights."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gspace.analysis import Analysis, Inputs, Residual
from gspace.optim.base import Built, GSpaceOptimizer
from gspace.optim.choice import KEY
from gspace.optim.eager import Allocation, wide
from gspace.optim.held import portable
from gspace.optim.hooks import step_within
from gspace.optim.reference import Reference
from gspace.optim.step import BatchNormRule

_OWN = ("params", "param_names")  # of a group, and nobody else's


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

    _inner: tuple[Built, Optimizer, list[nn.Parameter]] | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[Optimizer],
        *,
        params: Iterable[Any] | None = None,
        reference: Reference | None = None,
        batch_norm: BatchNormRule = "released",
        residual: Residual = "pin",
        pin: Iterable[str] = (),
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
            residual=residual,
            pin=pin,
            max_ratio=max_ratio,
            max_drift=max_drift,
            allocation=allocation,
        )

    # The inner optimizer ----------------------------------------------------------------------------------------------

    def _probe(self, groups: Iterable[dict[str, Any]]) -> None:
        """Raises what the inner optimizer has against these groups."""
        self.optimizer_class([dict(group) for group in groups], **self.optimizer_kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._probe(self.param_groups[-1:])
        except Exception:
            self.param_groups.pop()
            raise

    @property
    def inner(self) -> Optimizer:
        """The inner optimizer of the next step, without its state, which is here."""
        return self._made(self._look())[0]

    def _made(self, built: Built) -> tuple[Optimizer, list[nn.Parameter]]:
        """The inner optimizer and the tensors it moves instead of weights, kept as long as `built`."""
        if self._inner is None or self._inner[0] is not built:
            shown = [nn.Parameter(torch.empty_like(wide(w))) for w in built.weights]
            groups = []
            for g, group in enumerate(self.param_groups):
                mine = [v for v, at in zip(shown, built.groups, strict=True) if at == g]
                options = {key: value for key, value in group.items() if key not in _OWN}
                groups.append({**options, "params": mine + built.outside[g]})
            self._inner = built, self.optimizer_class(groups, **self.optimizer_kwargs), shown
        return self._inner[1:]

    def __getstate__(self) -> dict[str, Any]:
        return portable(self, "_built", "_inner")

    # One step ---------------------------------------------------------------------------------------------------------

    def _canvas(self, built: Built) -> tuple[list[Tensor], list[Tensor]]:
        shown = self._made(built)[1]
        for v in shown:
            if v.grad is None:
                v.grad = torch.empty_like(v)
        return [v.detach() for v in shown], [v.grad for v in shown if v.grad is not None]

    def _move(self, built: Built, shown: Sequence[Tensor] | None, path_grads: Sequence[Tensor] | None) -> None:
        inner, tensors = self._made(built)
        if shown is None:  # no gradient: the inner optimizer leaves path values alone
            for tensor in tensors:
                tensor.grad = None
        pairs: list[tuple[Tensor, Tensor]] = list(zip(built.weights, tensors, strict=True))
        pairs += [(p, p) for some in built.outside for p in some]
        # Schedulers write hyper-parameters into our groups, and some optimizers count steps in theirs.
        for group, its in zip(self.param_groups, inner.param_groups, strict=True):
            its.update({key: value for key, value in group.items() if key not in _OWN})
        inner.state.clear()
        for p, v in pairs:
            if p in self.state:
                inner.state[v] = {key: _at(v, x) for key, x in self.state[p].items() if key != KEY}
        step_within(inner)
        for p, v in pairs:
            if inner.state.get(v):
                self.state[p].update(inner.state[v])
        for group, its in zip(self.param_groups, inner.param_groups, strict=True):
            group.update({key: value for key, value in its.items() if key not in _OWN})


def _at(v: Tensor, value: Any) -> Any:
    """What an inner optimizer keeps for each entry, where and as wide as what it moves."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.shape == v.shape:
        return value.to(v.device, torch.promote_types(value.dtype, v.dtype))
    return value
