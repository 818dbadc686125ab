"""What is computed with some tensors, written down, to be done again with others."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gspace.analysis.memory import geometry, key_of

Place = int | tuple[Any, ...]  # of a value, or of those of a list


class Step(NamedTuple):
    """An operation by its name, so that it can be pickled; where its arguments are, and where its results go."""

    function: str
    args: tuple[Place, ...]
    kwargs: dict[str, Place]
    into: Place


class Tape(TorchDispatchMode):
    """Writes down the operations that depend on its inputs, but for those on tensors that are `skipped`.

    Attributes:
        steps: What was done.
        values: By place: inputs and results, and constants as they were.
    """

    def __init__(self, skipped: Callable[[Tensor], bool] | None = None) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.values: list[Any] = []
        self._skipped = skipped
        self._places: dict[int, tuple[int, Tensor]] = {}
        self._constants: set[int] = set()
        self._memory: dict[Any, int] = {}
        self._makers: dict[int, Step] = {}

    def __contains__(self, t: Tensor) -> bool:
        return id(t) in self._places

    def enter(self, t: Tensor) -> Tensor:
        self._places[id(t)] = len(self.values), t
        self._memory.setdefault(_where(t), len(self.values))
        self.values.append(t)
        return t

    def place(self, value: Any) -> Place:
        if isinstance(value, Tensor) and value in self:
            return self._places[id(value)][0]
        if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            return tuple(map(self.place, value))
        self._constants.add(len(self.values))
        self.values.append(value.detach().clone() if isinstance(value, Tensor) else value)
        return len(self.values) - 1

    def maker(self, t: Tensor) -> Step | None:
        """The step that it comes from."""
        return self._makers.get(self._places[id(t)][0]) if t in self else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not any(t in self for t in tensors) or (self._skipped and any(map(self._skipped, tensors))):
            return func(*args, **kwargs)
        given = tuple(map(self.place, args)), {k: self.place(v) for k, v in kwargs.items()}
        out = func(*args, **kwargs)
        made = tree_leaves(out)
        if func.is_view and len(made) == 1 and (known := self._memory.get(_where(made[0]))) is not None:
            self._places[id(made[0])] = known, made[0]  # transposed twice, say
            return out
        for t in made:
            if isinstance(t, Tensor):
                self.enter(t)
        into: Any = tuple(map(self.place, made))
        self.steps.append(Step(str(func), *given, into[0] if isinstance(out, Tensor) else into))
        self._makers.update(dict.fromkeys(into, self.steps[-1]))
        return out

    def program(self, inputs: int, outputs: Sequence[Tensor | None]) -> "Program":
        """What the outputs take, of the `inputs` that were entered first."""
        places: Any = tuple(map(self.place, outputs))
        needed: set[int] = set(places)
        kept: list[Step] = []
        for step in reversed(self.steps):
            if not needed.isdisjoint(_flat(step.into)) or _function(step.function)._schema.is_mutable:
                needed.update(_flat((step.args, tuple(step.kwargs.values()))))
                kept.append(step)
        constants = {k: self.values[k] for k in self._constants & needed}
        return Program(tuple(reversed(kept)), inputs, constants, places)


@dataclass(frozen=True)
class Program:
    """Steps in order: the first places are its inputs, `outputs` its results."""

    steps: tuple[Step, ...]
    inputs: int
    constants: dict[int, Any]
    outputs: tuple[int, ...]

    def __call__(self, *inputs: Tensor) -> list[Any]:
        """It was written down in float64, and is done in the dtype of its first input."""
        kind = inputs[0].device, inputs[0].dtype
        found: list[Any] = (self._compiled.get(kind) or self._compile(*kind))(*inputs)
        return found

    def __reduce__(self) -> Any:
        return Program, (self.steps, self.inputs, self.constants, self.outputs)

    @functools.cached_property
    def _compiled(self) -> dict[Any, Callable[..., Any]]:
        return {}

    def _compile(self, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
        """The steps as a function of Python, which takes half of the time of a loop over them."""
        known: dict[str, Any] = {f"f{i}": _function(step.function) for i, step in enumerate(self.steps)}
        for k, value in self.constants.items():
            if isinstance(value, Tensor):
                value = value.to(device, dtype if value.dtype == torch.float64 else value.dtype)
            known[_text(k)] = dtype if value is torch.float64 else value
        lines = [f"def program({', '.join(map(_text, range(self.inputs)))}):"]
        for i, (_, args, kwargs, into) in enumerate(self.steps):
            given = [*map(_text, args), *(f"{name}={_text(k)}" for name, k in kwargs.items())]
            lines.append(f" {_text(into)} = f{i}({', '.join(given)})")
        exec("\n".join([*lines, f" return {_text(self.outputs)}"]), known)
        self._compiled[device, dtype] = known["program"]
        return known["program"]


def _text(place: Place) -> str:
    return f"v{place}" if isinstance(place, int) else f"[{', '.join(map(_text, place))}]"


def _where(t: Tensor) -> Any:
    return key_of(t), t.dtype, *geometry(t)


def _flat(place: Any) -> Iterator[int]:
    if isinstance(place, int):
        yield place
    else:
        for part in place:
            yield from _flat(part)


@functools.cache
def _function(name: str) -> Any:
    return functools.reduce(getattr, name.split("."), torch.ops)
