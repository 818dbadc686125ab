"""InGSpace: any torch optimizer, acting on path values instead of weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gspace import step as algorithm
from gspace.graph import Analysis, Residual
from gspace.optim import Allocation, Reference, _GSpaceOptimizer
from gspace.step import BatchNormRule
from gspace.trace import Inputs


class InGSpace(_GSpaceOptimizer):
    """Runs `optimizer_class` on v: the path values of a model's basis paths, and its parameters outside every unit.

    Each parameter that touches units is shown to the inner optimizer as a tensor of the same shape that holds path
    values (0 at skeleton entries), and the trained skeleton paths of each parameter group as one further row, which is
    never decayed. The inner optimizer sees ∂ℓ/∂v as gradient, steps, and the new values are allocated to weights.

    Args:
        model: The model, not its parameters.
        optimizer_class: For example `torch.optim.Adam`.
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
        residual: Residual = "pin",
        pin: Iterable[str] = (),
        max_ratio: float = 1.5,
        max_drift: float = 10.0,
        allocation: Allocation = "fixed",
        example_input: Inputs | None = None,
        analysis: Analysis | None = None,
        **kwargs: Any,
    ) -> None:
        if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
            raise TypeError(f"optimizer_class must be a torch.optim.Optimizer class, got {optimizer_class!r}")
        self.optimizer_class, self.optimizer_kwargs = optimizer_class, kwargs
        self.inner: Optimizer | None = None
        # Any parameters do to learn (and check) the defaults of the inner optimizer.
        probe = optimizer_class([nn.Parameter(torch.zeros(2, 2))], **kwargs)
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

    def _build(self) -> None:
        super()._build()
        self._make_inner()

    def _make_inner(self) -> None:
        """The tensors the inner optimizer owns: path values, roots, and the outside parameters themselves."""
        self._values = [nn.Parameter(torch.zeros_like(w)) for w in self._weights]
        groups: list[dict[str, Any]] = []
        self._roots: list[tuple[Tensor, nn.Parameter]] = []
        for g, group in enumerate(self.param_groups):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            mine = [v for v, at in zip(self._values, self._layer_group, strict=True) if at == g]
            groups.append({**options, "params": mine + self._outside[g]})
            units = (self._unit_group == g) & (self._root == torch.arange(len(self._root), device=self._root.device))
            units[0] = False
            at = units.nonzero()[:, 0]
            row = nn.Parameter(torch.zeros(1, len(at), dtype=self.incoming.dtype, device=self.incoming.device))
            self._roots.append((at, row))
            groups.append({**options, "params": [row], **({"weight_decay": 0} if "weight_decay" in options else {})})
        self.inner = self.optimizer_class(groups, **self.optimizer_kwargs)

    def _sync_groups(self) -> None:
        """Schedulers write hyper-parameters into our groups; the inner optimizer reads its own."""
        if self.inner is None:
            return
        for g, group in enumerate(self.param_groups):
            for k, inner in enumerate(self.inner.param_groups[2 * g : 2 * g + 2]):
                for key, value in group.items():
                    if key not in ("params", "param_names") and not (k == 1 and key == "weight_decay"):
                        inner[key] = value

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "inner": self.inner.state_dict() if self.inner is not None else None}

    def _load_own_state(self, own: dict[str, Any]) -> None:
        super()._load_own_state(own)
        self._make_inner()
        if self.inner is not None:
            self.inner.load_state_dict(own["inner"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not torch.compiler.is_compiling():
            self._check()
            self._refuse_non_finite()
        self._sync_groups()
        self._show()
        if self.inner is not None:
            self.inner.step()
        self._allocate()
        return loss

    def _show(self) -> None:
        """Writes v and ∂ℓ/∂v into the tensors of the inner optimizer."""
        if not self._layers:
            return
        grads = self._grads()
        root_grad = self._root_path_grads(grads)
        value = self.incoming * self.outgoing
        for layer, weight, grad, v in zip(self._layers, self._weights, grads, self._values, strict=True):
            view = layer.edges.view(weight)
            inverse = self._inverses(layer, view)
            if v.grad is None:
                v.grad = torch.zeros_like(v)
            layer.edges.view(v.detach()).copy_(view / inverse)
            layer.edges.view(v.grad).copy_(algorithm.path_gradient(layer, view, grad, inverse, 0, self.batch_norm))
            v[layer.entries] = 0
            v.grad[layer.entries] = 0
        for at, row in self._roots:
            row.copy_(value[at][None])
            row.grad = root_grad[at][None].to(row.dtype)

    def _allocate(self) -> None:
        """Reads v' back and allocates it to weights."""
        if not self._layers:
            return
        raw = torch.ones_like(self.incoming)
        value = self.incoming * self.outgoing
        for at, row in self._roots:
            raw[at] = row[0] / value[at]
        ratio, _ = algorithm.path_ratio(value, (1 - raw) * value, 1.0, self.max_ratio, self.max_drift)
        every, spread = self._finish(ratio, raw)
        for layer, weight, v in zip(self._layers, self._weights, self._values, strict=True):
            view = layer.edges.view(weight)
            inverse = self._inverses(layer, view)
            entries = algorithm.allocate_skeleton(layer, weight[layer.entries], every, spread)
            moved = layer.edges.view(v) * inverse
            view.copy_(moved * layer.columns(1 / (every * spread), view) * layer.rows(spread, view))
            weight[layer.entries] = entries
        self._advance(every, spread)
