"""One run of a model under a `TorchDispatchMode`: every ATen call arrives with real tensors, control flow just happens.

Behind every storage lies a shadow (`memory`) of what is known of it, nodes of scales (`follow`); or the values are sums
over paths (`sums`). The rule of an operation (`operations`) reads those of its inputs and says those of its outputs.
Views, and writes through them, need no rule. What depends on the inputs, and on chance, is known by storage too.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gspace.analysis.examples import first_line
from gspace.analysis.forward import Inputs, PathError, TraceError, arguments
from gspace.analysis.memory import key_of


@dataclass(frozen=True)
class Call:
    """One call of an operation, its arguments by name, defaults filled in."""

    name: str
    function: Any
    args: dict[str, Any]

    @property
    def results(self) -> int:
        """How many there are."""
        return len(self.function._schema.returns)

    @property
    def in_place(self) -> bool:
        return bool(facts(self.function)[1])

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, *names: str) -> Any:
        """The first of these arguments that the operation has."""
        return next((self.args[name] for name in names if name in self.args), None)

    def run(self, /, **changed: Any) -> Any:
        """The operation itself on other values."""
        return self.function(**{**self.args, **changed})


class Run(TorchDispatchMode):
    """What is common to both meanings of a run.

    Attributes:
        rules: By operation; "" is the rule of those that are in no row.
        parameters: Names of parameters by storage.
        modules: In which module the run is, by name and kind; the innermost last.
        leaked: Whether data have left torch, and may come back as numbers that look like constants.
    """

    supports_higher_order_operators = True  # to refuse them
    creates: frozenset[str] = frozenset()  # operations whose result is known though nothing is that they read

    def __init__(self, rules: Mapping[str, Any], memory: Any) -> None:
        super().__init__()
        self.rules, self.memory = rules, memory
        self.parameters: dict[int, str] = {}
        self.modules: list[tuple[str, str]] = []
        self.operation, self.leaked = "", False
        self._data: dict[int, StorageWeakRef] = {}
        self._chance: dict[int, StorageWeakRef] = {}
        self._limit = 256

    # What the meanings do in their own ways ---------------------------------------------------------------------------

    def applied(self, rule: Any, call: Call) -> Any:
        """What a rule says of the outputs: one thing for each, or one for all of them."""
        return rule(self, call)

    def outcome(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """What the operation returns, given what a rule says of it."""
        return func(*args, **kwargs)

    def settle(self, name: str, tensors: Sequence[Any], outs: Sequence[Tensor], results: Sequence[Any]) -> None:
        """Writes results to the shadows of the outputs, if they are not where they belong already."""

    def escaped(self, t: Tensor, name: str) -> None:
        """Values leave torch."""

    def branched(self, chance: bool) -> None:
        """A value that depends on data, or on chance, is read by Python."""

    def left(self, module: nn.Module, output: Any) -> None:
        """A module returns."""

    # Data and chance --------------------------------------------------------------------------------------------------

    def given(self, inputs: Sequence[Tensor]) -> None:
        """Inputs of the model, and what else is data."""
        self._data.update((key_of(t), StorageWeakRef(t.untyped_storage())) for t in inputs if key_of(t))

    def depends_on_data(self, t: Any) -> bool:
        return isinstance(t, Tensor) and key_of(t) in self._data

    def depends_on_chance(self, t: Any) -> bool:
        return isinstance(t, Tensor) and key_of(t) in self._chance

    def _taint(self, random: bool, name: str, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        for table, drawn in ((self._data, False), (self._chance, random)):
            if drawn or (name not in MADE and any(key_of(t) in table for t in tensors)):
                table.update((key_of(t), StorageWeakRef(t.untyped_storage())) for t in outs if key_of(t))
                if name == "_local_scalar_dense":
                    self.branched(table is self._chance)
        if len(self.memory) + len(self._data) > self._limit:
            self.memory.forget()
            for table in (self._data, self._chance):
                for key in [key for key, storage in table.items() if storage.expired()]:
                    del table[key]
            kept = len(self.memory) + len(self._data)
            self._limit = kept + max(64, kept // 2)

    # The run ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            raise TraceError(f"{func.name()} (torch.cond, flex_attention …) cannot be followed: write it without")
        with torch._C.DisableTorchFunction():  # shadows are where they are, whatever the default device
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, writes, is_view, defaults = facts(func)
        if is_view and not writes:
            return func(*args, **kwargs)  # memory that is known already
        given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        tensors = tensors_among(given.values())
        if any(t.is_nested for t in tensors):
            raise TraceError("nested tensors cannot be followed: pad them")
        targets = tensors_among(given[target] for target in writes)
        for t in targets:
            if key_of(t) in self.parameters and t.numel():
                raise written(self.parameters[key_of(t)])
        result: Any = None
        silent = is_view
        empty = not all(t.numel() for t in tensors)  # an expert that no row reaches says nothing of its weights
        if empty and not any(a.is_out for a in func._schema.arguments):  # torch resizes what is given as `out`
            silent = not any(t.numel() for t in targets or tensors_among([func(*args, **kwargs)]))
        if not silent and (name in self.creates or any(t in self.memory for t in tensors)):
            self.operation = name
            if name not in self.rules and (others := decomposition(func)) is not None:
                with self:
                    return others(*args, **kwargs)
            try:
                result = self.applied(self.rules.get(name, self.rules[""]), Call(name, func, given))
            except (RuntimeError, IndexError):  # sizes that do not fit: torch's own words, if it says so too
                func(*args, **kwargs)
                raise
        out = self.outcome(func, args, kwargs, result)
        outs = tensors_among(out if isinstance(out, (tuple, list)) else [out])
        if name not in self.rules:  # it may write into what it does not return
            outs += [t for t in targets if not any(t is known for known in outs)]
        if result is not None or (writes and not silent and any(t in self.memory for t in outs)):
            self.settle(name, tensors, outs, result if isinstance(result, list) else [result] * len(outs))
        self._taint(torch.Tag.nondeterministic_seeded in func.tags, name, tensors, outs)
        return out


MADE = frozenset("ones_like zeros_like full_like empty_like new_ones new_zeros new_full new_empty".split())
VIEWS = frozenset(
    "detach alias lift lift_fresh _unsafe_view _reshape_alias transpose t squeeze unsqueeze as_strided "
    "unsafe_split unsafe_split_with_sizes unsafe_chunk".split()
)


class Escapes(TorchFunctionMode):
    """Values that leave torch, which a dispatch mode does not see."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ESCAPES and args and isinstance(args[0], Tensor):
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self.run.leaked |= self.run.depends_on_data(args[0]) or self.run.depends_on_chance(args[0])
                if args[0] in self.run.memory:
                    self.run.escaped(args[0].detach(), name)
        return func(*args, **(kwargs or {}))


ESCAPES = frozenset("numpy tolist __array__ __dlpack__ data_ptr".split())


def called(run: Run, model: nn.Module, example: Inputs) -> Any:
    """The output of the model, followed by `run`, which knows in which module it is."""
    args, kwargs = arguments(example)
    names = {m: name or "the model" for name, m in model.named_modules()}
    here = threading.get_ident()  # torch calls these hooks in every thread

    def before(module: nn.Module, args: Any) -> None:
        if module in names and threading.get_ident() == here:
            run.modules.append((names[module], type(module).__name__))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if module in names and run.modules and threading.get_ident() == here:
            run.left(module, output)
            run.modules.pop()

    run.modules.clear()
    hooks = register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)
    try:
        with hooks[0], hooks[1], Escapes(run), run:
            return model(*args, **kwargs)
    except (TraceError, PathError):
        raise
    except Exception as error:
        raise TraceError(f"the model does not accept this example_input: {first_line(error)}") from error


def written(name: str) -> TraceError:
    outside = "do that outside of it (a hook, the training loop), or analyze a mode that does not (modes='eval')"
    return TraceError(f"forward writes into parameter {name!r}: {outside}")


# Operations -----------------------------------------------------------------------------------------------------------


def decomposition(func: Any) -> Any:
    """torch's own way to write an operation by others, if there is one."""
    return func.decompose if func._can_decompose() else torch._decomp.decomposition_table.get(func)


@cache
def facts(func: Any) -> tuple[str, tuple[str, ...], bool, dict[str, Any]]:
    """Its name without the underscore of a call in place, the arguments it writes to, whether its result is a view.

    And all arguments, in order, with their defaults.
    """
    arguments = func._schema.arguments
    name = func._schema.name.removeprefix("aten::")
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    writes = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    is_view = (func.is_view or name in VIEWS) and not func._can_decompose()  # `reshape` may copy
    return name, writes, is_view, {a.name: a.default_value for a in arguments}


def tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments or results, which may be lists of them."""
    several = (v if isinstance(v, (tuple, list)) else (v,) for v in values)
    return [t for some in several for t in some if isinstance(t, Tensor)]
