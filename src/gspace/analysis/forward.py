"""Runs a model and leaves no trace: whatever a forward pass changes is put back, also when it raises."""

import random
import sys
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from types import ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
ONE_AT_A_TIME = threading.RLock()  # while it lasts, a run changes the model and flags of torch


class TraceError(ValueError):
    """A model could not be run or followed; the message says what to do."""


class PathError(ValueError):
    """A network has no path sum; the message names the place and the way out."""


def unwrap(model: nn.Module) -> nn.Module:
    """The module behind `torch.compile`, `DataParallel`, `DistributedDataParallel` and `AveragedModel`."""
    while type(model).__name__ in WRAPPERS and type(model).__module__.startswith("torch."):
        model = getattr(model, "_orig_mod" if type(model).__name__ == "OptimizedModule" else "module")
    return model


WRAPPERS = frozenset("OptimizedModule DataParallel DistributedDataParallel AveragedModel".split())


def arguments(example_input: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One batch as positional and keyword arguments."""
    match example_input:
        case Tensor():
            return (example_input,), {}
        case Mapping():
            return (), dict(example_input)
        case tuple() | list():
            return tuple(example_input), {}
    raise TypeError(f"example_input must be a Tensor, a tuple or a dict of inputs, got {type(example_input).__name__}")


def copied(example: Inputs, model: nn.Module) -> Inputs:
    """A batch with other tensors and objects, for a model that writes into its inputs; what was one stays one.

    Modules and parameters of the model are themselves, and an input that cannot be copied is taken as it is.
    """
    memo: dict[int, Any] = {id(m): m for m in model.modules()}
    for t in tensors_in(arguments(example), caches=True):
        kept = isinstance(t, nn.Parameter)
        memo[id(t)] = t if kept else t.detach().clone().requires_grad_(t.requires_grad)

    def copy(value: Any) -> Any:
        with suppress(Exception):
            return deepcopy(value, memo)
        return value

    args, kwargs = arguments(example)
    return {name: copy(value) for name, value in kwargs.items()} if kwargs else tuple(map(copy, args))


def tensors_in(value: Any, *, caches: bool = False) -> list[Tensor]:
    """The tensors of inputs or outputs, in containers and in attributes of objects, each once.

    A module is none of these. Nor is a cache of keys and values, if it comes out: the model reads it again.
    """
    found: dict[int, Any] = {}
    waiting = [(value, False)]
    while waiting:
        value, attribute = waiting.pop()
        if isinstance(value, PLAIN) or id(value) in found:
            continue
        if not caches and any(kind.__name__.endswith("Cache") for kind in type(value).__mro__):
            continue
        found[id(value)] = value
        if isinstance(value, Tensor):
            continue
        if isinstance(value, Iterator) and not attribute:
            raise TraceError("the model returns an iterator, which can be read once: return a list or tuple")
        parts = value.values() if isinstance(value, Mapping) else value
        inside = list(parts) if isinstance(parts, (Sequence, Set, ValuesView)) else []
        waiting += [(part, True) for part in reversed(_attributes(value))]
        waiting += [(part, attribute) for part in reversed(inside)]
    return [t for t in found.values() if isinstance(t, Tensor)]


def in_caches(value: Any) -> list[Tensor]:
    """Those that are in caches of keys and values alone."""
    others = {id(t) for t in tensors_in(value)}
    return [t for t in tensors_in(value, caches=True) if id(t) not in others]


PLAIN = (nn.Module, type, str, bytes, bytearray, memoryview, array, range, int, float, complex, NoneType)


def _attributes(value: Any) -> list[Any]:
    """What an object holds, in slots too."""
    held = []
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with suppress(Exception):  # it may not be set
                held.append(vars(kind)[f"_{kind.__name__}{name}" if name.startswith("__") else name].__get__(value))
    with suppress(Exception):
        held += vars(value).values()
    return held


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Attributes, buffers, gradients, flags, generators and torch's fast paths are afterwards what they were before."""
    with ONE_AT_A_TIME, ExitStack() as later:
        modules, parameters, buffers = list(model.modules()), list(model.parameters()), list(model.buffers())
        held = _held([*buffers, *(d for m in modules for d in (vars(m), *_objects(m)))])
        empty = [value for value in held if isinstance(value, CONTAINERS) and not value]  # most of what a module has
        ways = [_way_back(value) for value in held if not isinstance(value, CONTAINERS) or value]
        ways += [(_restore_parameter, p, p.data, p.grad, p.requires_grad) for p in parameters]
        ways += [(setattr, m, "training", m.training) for m in modules if isinstance(m, torch.jit.ScriptModule)]
        later.callback(_go_back, ways, empty)
        for m in modules:
            if vars(m).get("_compiled_call_impl") is not None:
                vars(m)["_compiled_call_impl"] = None  # compiled models run as they are written
        for p in parameters:
            p.grad = None
        later.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        later.enter_context(sdpa_kernel(SDPBackend.MATH))  # the same operations in both modes and on every device
        if any(isinstance(m, nn.RNNBase) for m in modules):  # they have kernels for all of a layer
            later.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
            torch._C._set_mkldnn_enabled(False)  # `torch.backends.mkldnn.flags` warns of TF32
            later.enter_context(torch.backends.cudnn.flags(enabled=False))
        later.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"]
            later.callback(numpy.random.set_state, numpy.random.get_state())
        devices = {p.device.index for p in (*parameters, *buffers) if p.device.type == "cuda"}
        later.enter_context(torch.random.fork_rng(sorted(i for i in devices if i is not None)))
        later.enter_context(torch.inference_mode(False))
        later.enter_context(torch.no_grad())
        for m in modules:  # what was made in inference mode cannot be written outside of it
            for name, buffer in list(m._buffers.items()):
                if buffer is not None and buffer.is_inference():
                    m._buffers[name] = buffer.clone()
        yield


def _go_back(ways: Sequence[tuple[Any, ...]], empty: Sequence[Any]) -> None:
    """Restores in the opposite order, all that can be."""
    errors = []
    for restore, *state in [*((_empty, container) for container in empty), *reversed(ways)]:
        try:
            restore(*state)
        except Exception as error:  # noqa: BLE001 -- a container may raise anything, and the others are to be restored
            errors.append(error)
    if errors:
        raise errors[0]


def _held(values: Iterable[Any]) -> list[Any]:
    """Containers, however deep, and what in them a run may change in place."""
    found: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) not in found and isinstance(value, (*CONTAINERS, tuple)):
            waiting += value.values() if isinstance(value, dict) else value
        elif not _can_change(value):
            continue
        found[id(value)] = value
    return [value for value in found.values() if not isinstance(value, tuple)]


def _can_change(value: Any) -> bool:
    """Tensors of plain memory, but for parameters, which a run must not write; generators."""
    if isinstance(value, Tensor):
        special = isinstance(value, nn.Parameter) or value.is_meta or value.is_nested or value.is_quantized
        return value.layout is torch.strided and not special
    return isinstance(value, random.Random) or any(hasattr(value, name) for name in GENERATORS)


CONTAINERS = (dict, list, set, deque)
GENERATORS = ("set_state", "bit_generator")  # of torch and numpy


def _way_back(value: Any) -> tuple[Any, ...]:
    """A function and arguments that restore a container, a tensor or a generator."""
    match value:
        case Tensor():
            return _restore, value, value.detach().clone()
        case dict():
            return _restore_dict, value, dict(value)
        case list() | set() | deque():
            return _restore_container, value, list(value)
        case random.Random():
            return value.setstate, value.getstate()
    if hasattr(value, "bit_generator"):
        return setattr, value.bit_generator, "state", value.bit_generator.state
    return value.set_state, value.get_state()


def _restore_dict(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Key by key: another thread may read it."""
    if list(now) == list(before) and all(value is before[key] for key, value in now.items()):
        return
    for key in now.keys() - before.keys():
        del now[key]
    now.update(before)
    if list(now) != list(before):
        now.clear()
        now.update(before)


def _empty(now: Any) -> None:
    if now:
        now.clear()


def _restore_container(now: Any, before: list[Any]) -> None:
    if len(now) != len(before) or any(x is not y for x, y in zip(now, before, strict=True)):
        now.clear()
        (now.update if isinstance(now, set) else now.extend)(before)


def _restore_parameter(p: nn.Parameter, data: Tensor, grad: Tensor | None, requires_grad: bool) -> None:
    if p.untyped_storage()._cdata != data.untyped_storage()._cdata:
        p.data = data
    if p.requires_grad != requires_grad:
        p.requires_grad_(requires_grad)
    p.grad = grad


def _restore(buffer: Tensor, before: Tensor) -> None:
    """Where bytes differ: a write would count as a change, and NaN equals itself."""
    bare = (t.detach().resolve_conj().resolve_neg() for t in (buffer, before))
    now, then = (t.contiguous().reshape(-1).view(torch.uint8) for t in bare)
    if buffer.shape == before.shape and torch.equal(now, then):
        return
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        (buffer if buffer.shape == before.shape else buffer.resize_(before.shape)).copy_(before)


def set_mode(model: nn.Module, training: bool) -> None:
    """Flags alone: `train()` may be overridden to do work."""
    for m in model.modules():
        m.training = training


def _objects(module: nn.Module) -> list[dict[str, Any]]:
    """What plain objects hold that are attributes of a module: a model may keep its state there."""
    values = (value for name, value in vars(module).items() if name not in HELD and hasattr(value, "__dict__"))
    return [vars(value) for value in values if not callable(value) and not isinstance(value, (Tensor, ModuleType))]


HELD = frozenset(vars(nn.Module()))  # what every module has
