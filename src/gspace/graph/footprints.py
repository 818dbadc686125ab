"""What a forward pass leaves behind while it is traced: writes, activations in attributes, constants made of weights.

A trace runs the Python of a model. What it writes is taken back, writing into parameters is refused, and constants that
it computes from parameters or buffers are known by the memory they lie in: a rescaling would change them.
"""

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_MUTABLE = (list, dict, set, deque)


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and the like
        return id(tensor)


class Footprints(TorchDispatchMode):
    """Watches real tensors while a model is traced symbolically; all else is proxies."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._written: str | None = None
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._parameters = {_memory(p): name for name, p in model.named_parameters()}
        self._roots: dict[int, list[Tensor]] = {}
        for _, tensor in named:
            self._roots.setdefault(_memory(tensor), []).append(tensor)
        self.numbers: list[Tensor] = []  # parameters and buffers that were read as numbers
        self._made: dict[int, tuple[Tensor, list[Tensor]]] = {}  # the tensor is kept: its memory is not used again

    def written(self) -> str | None:
        """The name of a parameter that the forward pass writes into, or gives other memory."""
        moved = (name for name, p in self.model.named_parameters() if _memory(p) not in self._parameters)
        return self._written or next(moved, None)

    def behind(self, tensor: Tensor) -> list[Tensor]:
        """Parameters and buffers that this was computed from, or whose memory it shows."""
        at = _memory(tensor)
        return [*self._roots.get(at, ()), *(self._made[at][1] if at in self._made else ())]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in pytree.tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        sources = list({id(t): t for x in given for t in self.behind(x)}.values())
        schema = getattr(func, "_schema", None)  # control flow has none
        for argument, value in zip(schema.arguments if schema else (), args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                name = self._parameters.get(_memory(value))
                if name is not None:
                    self._written = name
                    raise RuntimeError(f"{name} is written")
        if func is torch.ops.aten._local_scalar_dense.default:
            self.numbers += sources
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and sources:
                self._made[_memory(x)] = (x, list({id(t): t for t in (*self.behind(x), *sources)}.values()))
        return result


def _inside(value: Any, seen: set[int]) -> Iterator[Any]:
    """A value and, if it is a container, all that it holds."""
    if id(value) in seen:
        return
    yield value
    if isinstance(value, (*_MUTABLE, tuple)):
        seen.add(id(value))
        for x in value.values() if isinstance(value, Mapping) else list(value):
            yield from _inside(x, seen)


def tensors_in(model: nn.Module, kind: type) -> list[Any]:
    """What of this kind modules hold in attributes, however deep, parameters and buffers aside."""
    own = ("_parameters", "_buffers", "_modules")
    values = [value for m in model.modules() for name, value in vars(m).items() if name not in own]
    seen: set[int] = set()
    return [x for value in values for x in _inside(value, seen) if issubclass(type(x), kind)]


@contextmanager
def unwritten(model: nn.Module) -> Iterator[None]:
    """Takes back what a forward pass writes while it is traced: assigned weights, buffers, attributes, containers."""
    buffers = [(b, b._version, b.detach().clone()) for b in model.buffers() if not b.is_inference()]
    weights = [(p, p.detach()) for p in model.parameters() if not p.is_inference()]
    owners = [(vars(m), dict(vars(m))) for m in model.modules()]
    seen: set[int] = set()
    held = [
        (x, copy.copy(x))
        for _, before in owners
        for value in before.values()
        for x in _inside(value, seen)
        if isinstance(x, _MUTABLE)
    ]
    try:
        yield
    finally:
        for own, before in owners:
            own.clear()
            own.update(before)
        for value, content in held:
            if not _same_content(value, content):
                value.clear()
                value.extend(content) if isinstance(value, (list, deque)) else value.update(content)
        with torch.no_grad():
            for p, memory in weights:
                if _memory(p) != _memory(memory):
                    p.data = memory
            for b, version, saved in buffers:
                if b._version != version:
                    b.copy_(saved)


def _same_content(a: Any, b: Any) -> bool:
    if isinstance(a, set):
        return bool(a == b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(x is y for x, y in zip(a.values(), b.values(), strict=True))
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
