"""What all our optimizers ask before a step, and what they do when they are copied or loaded."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import Optimizer

from gspace.optim.arguments import require_model, require_own_group
from gspace.optim.hooks import hooked, watched
from gspace.sharding import any_sharded, local, refuse_redundancy

State = dict[str, Any]
_SHAPE = attrgetter("shape")


class Held:
    """The parameters and submodules that the modules of a model held when an optimizer was made."""

    def __init__(self, model: nn.Module) -> None:
        self.seen = [
            (path, owner, dict(owner))
            for path, m in model.named_modules()
            for owner in (m._parameters, m._modules)
            if isinstance(owner, dict)  # a scripted module has others: changes in it are not noticed
        ]
        self.owners = [owner for _, owner, _ in self.seen]
        self.sizes = list(map(len, self.owners))
        self.filled = [owner for owner in self.owners if owner]
        self.names = [name for owner in self.filled for name in owner]
        self.values = [value for owner in self.filled for value in owner.values()]
        self.shaped = {name: p for name, p in model.named_parameters() if not isinstance(p, UninitializedParameter)}
        self.shapes = [p.shape for p in self.shaped.values()]

    def require_same(self, owner: str) -> None:
        """Raises if a module holds other objects, or under other names, in another order or of other shapes."""
        if (
            list(map(len, self.owners)) == self.sizes
            and all(map(is_, chain.from_iterable(map(dict.values, self.filled)), self.values))
            and all(map(is_, chain.from_iterable(self.filled), self.names))
            and list(map(_SHAPE, self.shaped.values())) == self.shapes
        ):
            return
        where = next(self._changes(), None)
        if where is not None:
            raise RuntimeError(
                f"the model was changed after {owner} was made: {where!r} is not what it was. "
                f"Make a new {owner} for the changed model."
            )

    def _changes(self) -> Iterator[str]:
        for path, here, seen in self.seen:
            for name in (*seen, *here):
                if name not in here or name not in seen or here[name] is not seen[name]:
                    yield f"{path}.{name}".strip(".")
        yield from (name for (name, p), shape in zip(self.shaped.items(), self.shapes, strict=True) if p.shape != shape)


class OfModel(Optimizer):
    """An optimizer that is made of a model, and clears gradients and calls its step as `hooks.py` says."""

    profile_hook_step = staticmethod(hooked)  # torch wraps `step` in it when the first optimizer of a class is made
    _exact: tuple[str, ...] = ()  # what of the state of a parameter stays in the precision it was saved in

    def _hold(self, model: nn.Module, params: Iterable[Any] | None) -> Iterable[Any]:
        """Takes the model; returns the parameters to be trained, or their groups."""
        require_model(model)
        refuse_redundancy(type(self).__name__)
        self.model, self._held, self._sharded = model, Held(model), any_sharded(model)
        return list(model.parameters()) if params is None else params

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _moving(self) -> bool:
        return any("lr" not in group or bool(group["lr"] != 0) for group in self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters. After the first step in G-space, they train in plain coordinates until `rechoose()`."""
        super().add_param_group(param_group)
        require_own_group(self, self.model)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch does; it names this too, for a profiler that is not there."""
        if watched() or not set_to_none:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def __getstate__(self) -> State:
        """What a copy takes along: all but hooks, the `step` that a scheduler wraps, and what follows from the rest."""
        alone = {"step", "_zero_grad_profile_name", "_built", "_free"}
        return {k: v for k, v in vars(self).items() if k not in alone and not k.startswith("_optimizer_")}

    def load_state_dict(self, state_dict: State) -> None:
        """As torch does, all of it or nothing: what is damaged, or belongs to another network, is refused.

        torch casts what is kept for a parameter to its dtype. For parameters of 16 bits what was wider stays so.
        """
        found: list[State] = []
        before = vars(self).copy()
        hook = self.register_load_state_dict_pre_hook(lambda _, given: found.append(given))  # others have unwrapped it
        try:
            if not isinstance(state_dict, Mapping):
                raise ValueError(f"this state is damaged: it is an object of {type(state_dict).__name__}")
            super().load_state_dict(dict(state_dict))
            hook.remove()
            if {"gspace", "frozen"} & found[0].keys():
                raise ValueError(
                    "gspace 0.1.0 saved this state, and later versions cannot go on from it: load the weights"
                )
            for group in self.param_groups:
                for key, value in self.defaults.items():
                    group.setdefault(key, value)
            ids = (i for group in found[0]["param_groups"] for i in group["params"])
            for p, i in zip(self._parameters(), ids, strict=True):
                _keep_width(p, found[0]["state"].get(i, {}), self.state, self._exact)
            _require_shapes(self)
            self._loaded(found[0])
        except Exception as error:
            hook.remove()
            vars(self).clear()
            vars(self).update(before)
            if isinstance(error, AttributeError | IndexError | KeyError | RuntimeError | TypeError):
                raise ValueError(f"this state is damaged ({type(error).__name__}: {error})") from error
            raise

    def _loaded(self, state_dict: State) -> None:
        """Looks at a state that was loaded before it is believed."""
        raise NotImplementedError


def doubt_of_gradients(model: nn.Module, parameters: Iterable[Tensor]) -> str:
    """What speaks against a step with these gradients, as far as they are here, or nothing.

    On a CPU; nobody waits for another device to ask.
    """
    owners = [p for p in parameters if p.grad is not None]
    grads = [g._values() if g.is_sparse else g for g in (local(p.grad) for p in owners)]
    if not grads or any(g.device.type != "cpu" for g in grads):
        return ""
    # A norm is finite only if every entry is; if it is not, it may have overflowed.
    if bool(torch.stack(torch._foreach_norm(grads)).isfinite().all()):
        return ""
    bad = next((p for p, g in zip(owners, grads, strict=True) if not bool(g.isfinite().all())), None)
    name = next((name for name, p in model.named_parameters() if p is bad), None)
    return f"the gradient of {name} is not finite; no weight and no state was changed" if name else ""


def _require_shapes(optimizer: Optimizer) -> None:
    """torch's fused steps read and write as many numbers as a parameter has, whatever the state has."""
    for group in optimizer.param_groups:
        for p in group["params"] if group.get("fused") else ():
            for name, t in optimizer.state.get(p, {}).items():
                if name not in ("step", "skeleton") and isinstance(t, Tensor) and t.shape != p.shape:
                    raise ValueError(f"this state is damaged: {name} has another shape than its parameter")


def _keep_width(p: Tensor, saved: Mapping[str, Any], state: Any, exact: tuple[str, ...]) -> None:
    wide = torch.promote_types(p.dtype, torch.float32)
    for key, value in saved.items():
        if key in ("momentum_buffer", *exact) and not (isinstance(value, Tensor) and value.shape == p.shape):
            raise ValueError(f"this state is damaged: {key} of a parameter is no tensor of its shape")
        if isinstance(value, Tensor) and key != "step":
            narrowed = value.is_floating_point() and wide != p.dtype != value.dtype
            if key in exact or narrowed:
                state[p][key] = value.to(p.device, value.dtype if key in exact else wide, copy=True)
