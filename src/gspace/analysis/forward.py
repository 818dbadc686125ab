"""Runs a model and leaves no trace: whatever a forward pass changes is put back, also when it raises."""

import random
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
ONE_AT_A_TIME = threading.RLock()  # while it lasts, a run changes the model and flags of torch


class TraceError(ValueError):
    """A model could not be run or followed; the message says what to do."""


def unwrap(model: nn.Module) -> nn.Module:
    """The module behind `torch.compile`, `DataParallel`, `DistributedDataParallel` and `AveragedModel`."""
    wrappers = {
        "OptimizedModule": "_orig_mod",
        "DataParallel": "module",
        "DistributedDataParallel": "module",
        "AveragedModel": "module",
    }
    while type(model).__name__ in wrappers and type(model).__module__.startswith("torch."):
        model = getattr(model, wrappers[type(model).__name__])
    return model


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


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an output, in tuples, lists, dicts and dataclasses. Other objects, such as caches, are none."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in fields(value)]
    return [t for part in value for t in tensors_in(part)] if isinstance(value, (tuple, list)) else []


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Attributes, buffers, training flags, generators and torch's fast paths are afterwards what they were before."""
    with ONE_AT_A_TIME, ExitStack() as later:
        for m in model.modules():
            later.callback(_put_back, m, dict(vars(m)), {k: _copy(v) for k, v in vars(m).items() if _is_container(v)})
            vars(m).pop("_compiled_call_impl", None)  # compiled models run as they are written
        for b in model.buffers():
            if not b.is_meta:
                later.callback(_restore, b, b.detach().clone())
        later.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        for generator in {g for m in model.modules() for g in vars(m).values() if isinstance(g, torch.Generator)}:
            later.callback(generator.set_state, generator.get_state())
        later.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"]
            later.callback(numpy.random.set_state, numpy.random.get_state())
        devices = {p.device.index for p in (*model.parameters(), *model.buffers()) if p.device.type == "cuda"}
        later.enter_context(torch.random.fork_rng(sorted(i for i in devices if i is not None)))
        later.enter_context(torch.inference_mode(False))
        later.enter_context(torch.no_grad())
        yield


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, set))


def _copy(value: Any) -> Any:
    return value.copy()


def _put_back(module: nn.Module, attributes: dict[str, Any], contents: dict[str, Any]) -> None:
    for name, before in contents.items():
        now = attributes[name]
        if isinstance(now, list):
            if len(now) != len(before) or any(x is not y for x, y in zip(now, before, strict=True)):
                now[:] = before
        elif isinstance(now, set):
            now.intersection_update(before)
            now.update(before)
        elif list(now) != list(before) or any(now[k] is not before[k] for k in before):
            now.clear()
            now.update(before)
    if vars(module).keys() != attributes.keys() or any(vars(module)[k] is not v for k, v in attributes.items()):
        vars(module).clear()
        vars(module).update(attributes)


def _restore(buffer: Tensor, before: Tensor) -> None:
    with torch.no_grad():
        if not torch.equal(buffer.nan_to_num() if buffer.is_floating_point() else buffer, before) or (
            buffer.is_floating_point() and not torch.equal(buffer, before)
        ):
            buffer.copy_(before)


def set_mode(model: nn.Module, training: bool) -> None:
    """Flags alone: `train()` may be overridden to do work."""
    for m in model.modules():
        m.training = training


def kept(model: nn.Module, before: set[int]) -> list[Tensor]:
    """Activations that a run has left in attributes, for others to read: as good as an output."""
    return [t for t in attributes(model) if id(t) not in before]


def attributes(model: nn.Module) -> list[Tensor]:
    """Tensors that modules hold outside of their parameters and buffers."""
    found: list[Tensor] = []
    for m in model.modules():
        for name, value in vars(m).items():
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, (dict, list, tuple)) and value and name not in HELD:
                found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found


HELD = frozenset(vars(nn.Module()))  # what every module has
