"""InGSpace: any torch optimizer, acting on path values instead of weights."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gspace import saved
from gspace import step as algorithm
from gspace.analysis import Analysis, Inputs, Residual
from gspace.base import Allocation, GSpaceOptimizer, wide
from gspace.hooks import step_within
from gspace.reference import Reference
from gspace.skeleton import Skeleton
from gspace.step import BatchNormRule, Layer


class InGSpace(GSpaceOptimizer):
    """Runs `optimizer_class` on v: the path values of a model's basis paths, and its parameters outside every unit.

    Each parameter that touches units is shown to the inner optimizer as a tensor of the same shape that holds path
    values (0 at skeleton entries), and the trained skeleton paths of each parameter group as one further row, which is
    never decayed. The inner optimizer sees ∂ℓ/∂v as gradient, steps, and the new values are allocated to weights. The
    memory of ∂ℓ/∂v is used for that: after a step it holds nothing of interest.

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
        self._owned: dict[Tensor, Tensor] = {}
        self._roots: list[tuple[Tensor, nn.Parameter]] = []
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

    def _place(self) -> None:
        super()._place()
        self._make_inner()

    def _make_inner(self) -> None:
        """Makes the inner optimizer; the state of what it owned before goes on."""
        known = {key: self.inner.state[p] for key, p in self._owned.items() if p in self.inner.state}
        rows = [(at, self.inner.state[row]) for at, row in self._roots if len(at) and row in self.inner.state]
        self._values = [nn.Parameter(torch.zeros_like(wide(w))) for w in self._weights]
        for v in self._values:
            v.grad = torch.zeros_like(v)
        self._roots = []
        roots = self.skeleton.roots.to(self._root.device)
        groups: list[dict[str, Any]] = []
        for g, group in enumerate(self.param_groups):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            mine = [v for v, at in zip(self._values, self._layer_group, strict=True) if at == g]
            groups.append({**options, "params": mine + self._outside[g]})
            at = roots[self._unit_group[roots] == g]
            row = nn.Parameter(torch.zeros_like(self._last[0][at][None]))
            self._roots.append((at, row))
            undecayed = {"weight_decay": 0} if "weight_decay" in options else {}
            groups.append({**options, "params": [row] if len(at) else [], **undecayed})
        self.inner: Optimizer = self.optimizer_class(groups, **self.optimizer_kwargs)
        # The tensor of the inner optimizer that stands for a parameter. Trained skeleton paths are told by their units.
        self._owned = {p: p for group in self._outside for p in group}
        self._owned.update(zip(self._weights, self._values, strict=True))
        self.inner.state.update({self._owned[key]: state for key, state in known.items() if key in self._owned})
        self.inner.state.update({row: found for at, row in self._roots if (found := _gathered(rows, at))})
        self.inner.load_state_dict(self.inner.state_dict())  # casts the state to where the parameters are now

    def _restart(self, weights: Sequence[Tensor]) -> None:
        for p in [*(self._owned[w] for w in weights if w in self._owned), *(row for _, row in self._roots)]:
            self.inner.state.pop(p, None)

    def _sync_groups(self) -> None:
        """Schedulers write hyper-parameters into our groups; the inner optimizer reads its own."""
        for g, group in enumerate(self.param_groups):
            for k, inner in enumerate(self.inner.param_groups[2 * g : 2 * g + 2]):
                for key, value in group.items():
                    if key not in ("params", "param_names") and not (k == 1 and key == "weight_decay"):
                        inner[key] = value

    def _sync_back(self) -> None:
        """Some optimizers count steps in their groups: the next step finds there what this one left."""
        for group, inner in zip(self.param_groups, self.inner.param_groups[::2], strict=True):
            group.update({key: value for key, value in inner.items() if key not in ("params", "param_names")})

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), "inner": self.inner.state_dict(), "optimizer": self.optimizer_class.__name__}

    def _saved_skeleton(self, own: Mapping[str, Any]) -> Skeleton:
        skeleton, mine = super()._saved_skeleton(own), self.optimizer_class.__name__
        saved.require_torchs(own["inner"])
        groups = own["inner"]["param_groups"]
        if own.get("optimizer", mine) != mine and any(self.inner.defaults.keys() - group.keys() for group in groups):
            raise ValueError(f"this is the state of an InGSpace with {own['optimizer']}, not with {mine}")
        return skeleton

    def _load_own_state(self, own: Mapping[str, Any]) -> None:
        super()._load_own_state(own)
        self.inner.load_state_dict(own["inner"])

    # One step ---------------------------------------------------------------------------------------------------------

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = self._begin(closure)
        self._sync_groups()
        read = self._read()
        if read is None:
            self._hide()
            step_within(self.inner)
        else:
            self._show(*read)
            step_within(self.inner)
            self._allocate(read[0])
        self._sync_back()
        return loss

    def _hide(self) -> None:
        """No gradient: the inner optimizer leaves path values alone."""
        for v in [*self._values, *(row for _, row in self._roots)]:
            v.grad = None

    def _show(self, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Writes v and ∂ℓ/∂v into the tensors of the inner optimizer."""
        root_grad = self._root_path_grads(weights, grads)
        value = self.incoming * self.outgoing
        for layer, weight, grad, v in zip(self._layers, weights, grads, self._values, strict=True):
            view = layer.edges.view(weight)
            if v.grad is None:  # a copy has none, and none is there after a step without gradients
                v.grad = torch.zeros_like(v)
            self._path_values(layer, view, layer.edges.view(v.detach()))
            gradient = layer.edges.view(v.grad)
            torch.mul(layer.edges.view(grad), layer.columns(self.incoming.reciprocal(), view), out=gradient)
            gradient.mul_(layer.rows(self.outgoing.reciprocal(), view))
            if layer.edges.normalized:
                gradient.mul_(algorithm.row_norms(view, self.batch_norm))
            v[layer.entries] = 0
            v.grad[layer.entries] = 0
        for at, row in self._roots:
            row.copy_(value[at][None])
            row.grad = root_grad[at][None].to(row.dtype)

    def _path_values(self, layer: Layer, view: Tensor, out: Tensor) -> Tensor:
        """v = w·Ĩ(tail)·Õ(head), written into `out`."""
        torch.mul(view, layer.columns(self.incoming, view), out=out)
        return out.mul_(layer.rows(self.outgoing, view))

    def _allocate(self, weights: Sequence[Tensor]) -> None:
        """Reads v' back and allocates it to weights, as `allocate_weights` does: lr·d is v − v' here.

        All of it happens in the memory of the gradients, which have done their work: weights are many, and fresh memory
        costs more than arithmetic.
        """
        raw = torch.ones_like(self.incoming)
        value = self.incoming * self.outgoing
        for at, row in self._roots:
            raw[at] = row[0] / value[at]
        ratio, _ = algorithm.path_ratio(value, (1 - raw) * value, 1.0, self.max_ratio, self.max_drift)
        every, spread = self._spread_ratios(ratio, raw)
        for k, (layer, weight, v) in enumerate(zip(self._layers, weights, self._values, strict=True)):
            view = layer.edges.view(weight)
            entries = algorithm.allocate_skeleton(layer, weight[layer.entries], every, spread)
            scratch = torch.empty_like(v) if v.grad is None else v.grad
            moved = self._path_values(layer, view, layer.edges.view(scratch)).sub_(layer.edges.view(v))
            moved.mul_(layer.columns(self.incoming.reciprocal(), view))
            view.sub_(moved.mul_(layer.rows(self.outgoing.reciprocal(), view)))
            view.mul_(layer.columns((every * spread).reciprocal(), view))
            if self.allocation == "spread":
                view.mul_(layer.rows(spread, view))
            self._write(layer, self._weights[k], weight, entries)
        self._advance(every, spread)


def _gathered(rows: Sequence[tuple[Tensor, Mapping[str, Any]]], at: Tensor) -> dict[str, Any]:
    """State of the trained skeleton paths of the units `at`, from the rows `(units, state)` that they were in.

    What a row has for each path follows the path (0 where it had none); what it counts or sums up as a whole is that
    of the first row.
    """
    rows = [(units.to(at.device), state) for units, state in rows]
    mine = [(units, state) for units, state in rows if bool(torch.isin(at, units).any())]
    if len(mine) == 1 and torch.equal(mine[0][0], at):
        return copy.deepcopy(dict(mine[0][1]))
    size = 1 + int(torch.cat([at, *(units for units, _ in mine)]).max()) if mine else 0
    result: dict[str, Any] = {}
    for key in dict.fromkeys(key for _, state in mine for key in state):
        having = [(units, state[key]) for units, state in mine if key in state]
        value = having[0][1]
        if all(isinstance(v, Tensor) and v.shape == (1, len(units)) for units, v in having):
            full = value.new_zeros(1, size)
            for units, v in having:
                full[:, units.to(value.device)] = v.to(value)
            value = full[:, at.to(value.device)]
        result[key] = copy.deepcopy(value)
    return result
