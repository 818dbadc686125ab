"""Is this the model that was analyzed? Parameters of equal names and sizes may be wired otherwise.

Every module is known by its class and by the strings and functions among its attributes, which say how its parts are
used. Numbers and flags are no part of it (an ε, a dropout rate, a counter, gradient checkpointing may change), nor are
weights, hooks and the mode: a copy is the same model.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from gspace.sharding import class_of

_OF_ALL = frozenset(vars(nn.Module()))  # what every module has, for torch's own use


def modules_of(model: nn.Module) -> dict[str, str]:
    """Each module by its name, in order, as a text that a copy shares."""
    found = {}
    for name, m in model.named_modules(remove_duplicate=False):
        told = {key: _said(value) for key, value in vars(m).items() if _tells(key, value)}
        found[name] = f"{class_of(m).__module__}.{class_of(m).__qualname__} {told}"
    return found


def other_module(known: Mapping[str, str], model: nn.Module) -> str | None:
    """The first module that is not as it was, None if all are. Without a description nothing is compared."""
    now = modules_of(model) if known else {}
    names = (name for name in {**known, **now} if known.get(name) != now.get(name))
    return next(names, None)


def _tells(name: str, value: Any) -> bool:
    if name in _OF_ALL or "checkpoint" in name:
        return False
    if isinstance(value, tuple | list):
        return bool(value) and all(isinstance(part, str) for part in value)
    return isinstance(value, str) or callable(value)


def _said(value: Any) -> Any:
    return value if isinstance(value, str | tuple | list) else getattr(value, "__qualname__", type(value).__qualname__)
