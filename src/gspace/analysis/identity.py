"""Is this the model that was analyzed? Parameters of equal names and sizes may be wired otherwise.

Every module is known by its class, the code of its forward and its settings: numbers, strings, functions, in
containers or not. Weights, dtypes, devices, hooks and the mode are no part of it, so a copy is the same model. What
other objects hold, such as a configuration, is not looked at.
"""

import hashlib
from collections.abc import Mapping
from inspect import getattr_static
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

_OF_ALL = frozenset(vars(nn.Module()))  # what every module has, for torch's own use
_DEPTH = 5  # functions may hold functions that hold them


def modules_of(model: nn.Module) -> dict[str, str]:
    """A digest of each module by its name, in order."""
    forwards: dict[type, str] = {}
    found = {}
    for k, (name, m) in enumerate(model.named_modules(remove_duplicate=False)):
        kind = type(m)
        if kind not in forwards:
            forwards[kind] = f"{kind.__qualname__} {_described(getattr_static(kind, 'forward', None), _DEPTH)}"
        settings = {k: v for k, v in vars(m).items() if k not in _OF_ALL}
        text = f"{k} {forwards[kind]} {_described(settings, _DEPTH)}"
        found[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def other_module(known: Mapping[str, str], model: nn.Module) -> str | None:
    """The first module that is not as it was, None if all are. Without a description nothing is compared."""
    now = modules_of(model) if known else {}
    names = (name for name in {**known, **now} if known.get(name) != now.get(name))
    return next(names, None)


def _described(value: Any, depth: int) -> str:
    """A text that is the same for a copy, in this process or another."""
    if isinstance(value, str | int | float | complex | bytes):
        return repr(value)
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, type):
        return value.__qualname__
    if depth > 0:
        if isinstance(value, FunctionType):
            inside = [_content(cell) for cell in value.__closure__ or ()]
            return _described([value.__code__, value.__defaults__, inside], depth - 1)
        if isinstance(value, CodeType):
            return f"{value.co_code.hex()} {value.co_names} {_described(value.co_consts, depth - 1)}"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {_described(v, depth - 1)}' for k, v in value.items() if _plain(k))}}}"
        if isinstance(value, tuple | list):
            return f"({', '.join(_described(v, depth - 1) for v in value)})"
    return str(getattr(value, "__name__", type(value).__qualname__))


def _plain(key: Any) -> bool:
    return isinstance(key, str | int)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
