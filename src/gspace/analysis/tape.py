"""What is computed with some tensors, written down as Python, to be done again with others."""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from gspace.analysis.memory import geometry, key_of

AS_STRIDED, CLONE = torch.ops.aten.as_strided.default, torch.ops.aten.clone.default
NAMES = re.compile(r"\b[vc]\d+\b")  # of variables and constants


class Line(NamedTuple):
    """`made = function(args)`; whether it writes to what it is given."""

    made: str
    function: str
    args: str
    writes: bool = False


class Tape(TorchDispatchMode):
    """Writes down the operations that depend on tensors that were entered.

    Attributes:
        lines: What was done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self._makers: dict[str, tuple[str, Sequence[Any]]] = {}
        self._copies: dict[str, str] = {}
        self._held: list[Tensor] = []  # an `id` is used once
        self._names: dict[int, tuple[str, int]] = {}
        self._by_place: dict[Any, str] = {}
        self._storages: dict[int, tuple[Tensor, int]] = {}  # a tensor there, and how often it was written to
        self._constants: dict[str, Any] = {}

    def __contains__(self, t: Any) -> bool:
        return isinstance(t, Tensor) and key_of(t) in self._storages

    def enter(self, t: Tensor, name: str | None = None) -> Tensor:
        self._names[id(t)] = name or f"v{len(self._held)}", self._storages.setdefault(key_of(t), (t, 0))[1]
        self._by_place.setdefault(self._place(t), self._names[id(t)][0])
        self._held.append(t)
        return t

    def write(self, t: Tensor, x: Tensor) -> None:
        """Writes x to all of a storage: from now on its views are views of x."""
        x = x.expand(t.shape).clone(memory_format=torch.contiguous_format)
        with _disable_current_modes():
            t.copy_(x)
        _, version = self._storages.get(key_of(t), (t, 0))
        self._storages[key_of(t)] = t, version + 1
        self.enter(t, self.name(x))

    def name(self, value: Any) -> str:
        """In the program; a constant is kept as it is now."""
        if value in self:
            base, version = self._storages[key_of(value)]
            if self._names.get(id(value), ("", -1))[1] != version:
                view = self._noted(AS_STRIDED, (base, *geometry(value)), {})
                self.enter(value, self._names[id(view)][0])
            return self._names[id(value)][0]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self.name, value))}]"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        name = f"c{len(self._constants)}"
        self._constants[name] = value.detach().clone() if isinstance(value, Tensor) else value
        return name

    def _place(self, t: Tensor) -> Any:
        return key_of(t), self._storages.get(key_of(t), (t, 0))[1], t.dtype, geometry(t)

    def maker(self, t: Tensor) -> tuple[str, Sequence[Any]]:
        """The operation that it comes from, and its arguments."""
        return self._makers.get(self.name(t), ("", ()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t in self for t in tree_leaves((args, kwargs or {}))):
            return self._noted(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _noted(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is AS_STRIDED:  # of all that is there: autograd does not look beyond a view
            args = self._storages[key_of(args[0])][0], *args[1:]
        given = [*map(self.name, args), *(f"{key}={self.name(value)}" for key, value in kwargs.items())]
        out = func(*args, **kwargs)
        if func.is_view and not isinstance(out, Tensor):
            return out  # views that autograd does not write to: each is taken by its place in memory
        if func.is_view and (known := self._by_place.get(self._place(out))) is not None:
            return self.enter(out, known)  # transposed twice, say
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._makers[self.name(self.enter(t))] = str(func), args
        made = "_" if out is None else self.name(out).replace("None", "_")
        if func is CLONE and out.stride() == args[0].stride() and is_whole(args[0]):
            self._copies[made] = self._copies.get(given[0], given[0])
        self.lines.append(Line(made, str(func), ", ".join(given), func._schema.is_mutable))
        return out

    def program(self, inputs: int, outputs: Sequence[Tensor | None]) -> "Program":
        """What the outputs take, of the `inputs` that were entered first. Without writes, copies are not needed."""
        result, lines, kept = self.name(outputs), self.lines, []
        if not any(line.writes for line in lines):
            lines = [line._replace(args=NAMES.sub(lambda m: self._copies.get(m[0], m[0]), line.args)) for line in lines]
        needed = set(NAMES.findall(result))
        for line in reversed(lines):
            if line.writes or needed.intersection(NAMES.findall(line.made)):
                needed.update(NAMES.findall(line.args))
                kept.append(line)
        constants = {name: value for name, value in self._constants.items() if name in needed}
        return Program(tuple(reversed(kept)), inputs, constants, result)


@dataclass(frozen=True)
class Program:
    """Lines in order: v0, v1, … are the inputs, `result` is what they make."""

    lines: tuple[Line, ...]
    inputs: int
    constants: dict[str, Any]
    result: str

    def __call__(self, *inputs: Tensor) -> list[Any]:
        """It was written down in float64, and is done in the dtype of its first input."""
        kind = inputs[0].device, inputs[0].dtype
        found: list[Any] = (self._compiled.get(kind) or self._compile(*kind))(*inputs)
        return found

    def __reduce__(self) -> Any:
        return Program, (self.lines, self.inputs, self.constants, self.result)

    @functools.cached_property
    def _compiled(self) -> dict[Any, Callable[..., Any]]:
        return {}

    def _compile(self, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
        known: dict[str, Any] = {"ops": torch.ops}
        for name, value in self.constants.items():
            if isinstance(value, Tensor):
                value = value.to(device, dtype if value.dtype == torch.float64 else value.dtype)
            known[name] = dtype if value is torch.float64 else device if isinstance(value, torch.device) else value
        text = [f" {line.made} = ops.{line.function}({line.args})" for line in self.lines]
        head = f"def program({', '.join(f'v{k}' for k in range(self.inputs))}):"
        exec("\n".join([head, *text, f" return {self.result}"]), known)
        return self._compiled.setdefault((device, dtype), known["program"])


def is_whole(t: Tensor) -> bool:
    """Whether it is all of its storage, one element after the other."""
    return t.is_contiguous() and t.numel() * t.element_size() == t.untyped_storage().nbytes()
