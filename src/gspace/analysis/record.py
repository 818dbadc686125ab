"""Records what a run does to sums over paths, to be computed again later for other weights without the model.

`Record` is a `TorchDispatchMode`. Behind every storage that depends on inputs or parameters stands the register that
was written to it. A rule (`pathrules`) reads registers and appends steps (`sums` says what they may be). Views, and
writes through them, need none. The register of a step is its place in the list.
"""

import math
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gspace.analysis.follow import Call, Calls, bound, facts
from gspace.analysis.memory import Sizes, geometry, key_of
from gspace.analysis.sums import Slot, Source

LAYERS = 4  # products of weights in a row before a sum is renormalized
CHOSEN = "which entries are chosen depends on the input"
CHANCE = "it depends on chance"
READ = "its values are read outside of the network"
SLOT, BOTH = Slot(0), {"base": Slot(0), "t": Slot(1)}


class PathError(ValueError):
    """A network has no path sum, or its input is not known; the message names the place and the way out."""


class Kind(Enum):
    """What a number is: with respect to paths, all but the last are followed."""

    ACTIVATION = "depends on the input of the network, or on ground"
    WEIGHT = "a parameter, or made of such"
    CONSTANT = "a buffer or another fixed number"
    OPAQUE = "not to be used on a path: chosen by data or by chance"


class Value(NamedTuple):
    """A register, or, if it is opaque, the reason."""

    register: int
    kind: Kind
    layers: int = 0
    reason: str = ""


class Content(NamedTuple):
    """What was written to a storage, and where the tensor lies that it was written to."""

    storage: StorageWeakRef
    itemsize: int
    sizes: Sizes
    strides: Sizes
    offset: int
    value: Value


class Step(NamedTuple):
    """A method of `sums.Numbers` and `sums.Logs`, the registers it reads, and its other arguments."""

    method: str
    inputs: tuple[int, ...]
    constants: tuple[Any, ...]


Rule = Callable[["Record", Call], "Value | list[Value | None] | None"]


class Record(TorchDispatchMode):
    """The steps of a model's run.

    Attributes:
        rules: By operation: what it does to path sums, or why it has none.
        modules: In which module the run is, by name and kind; the innermost last.
    """

    def __init__(self, rules: dict[str, Rule | str]) -> None:
        super().__init__()
        self.rules = rules
        self.steps: list[Step] = []
        self.modules: list[tuple[str, str]] = []
        self.operation = ""
        self._memory: dict[int, Content] = {}

    # Registers --------------------------------------------------------------------------------------------------------

    def step(
        self, method: str, *inputs: Value, constants: tuple[Any, ...] = (), kind: Kind | None = None, layers: int = 0
    ) -> Value:
        """Appends a step; its result is an activation if one of its inputs is, else a weight if one of them is."""
        kinds = {x.kind for x in inputs}
        if kind is None:
            kind = next((k for k in (Kind.ACTIVATION, Kind.WEIGHT) if k in kinds), Kind.CONSTANT)
        self.steps.append(Step(method, tuple(x.register for x in inputs), constants))
        passed = max((x.layers for x in inputs), default=0) + layers
        if passed >= LAYERS:
            self.steps.append(Step("renormalized", (len(self.steps) - 1,), ()))
            passed = 0
        return Value(len(self.steps) - 1, kind, passed)

    def move(self, function: str, /, *inputs: Value, **constants: Any) -> Value:
        """A step that moves entries: an operation by its name, or one of those in `sums`."""
        return self.step("moved", *inputs, constants=(function, constants))

    def product(self, method: str, x: Value, y: Value, *constants: Any) -> Value:
        """Of two activations there is none; a constant that is contracted with a weight is an input of the network."""
        kinds = {x.kind, y.kind}
        if kinds == {Kind.ACTIVATION}:
            raise self.refusal("it multiplies two activations")
        ground = method != "multiply" and kinds == {Kind.CONSTANT, Kind.WEIGHT}
        return self.step(method, x, y, constants=constants, kind=Kind.ACTIVATION if ground else None, layers=1)

    def constant(self, t: Tensor | float) -> Value:
        fixed = t.detach().clone() if isinstance(t, Tensor) else torch.tensor(float(t), dtype=torch.float64)
        if fixed.is_floating_point() and not bool(fixed.isfinite().all()):
            raise self.refusal("an infinite number or NaN meets activations")
        return self.step("leaf", constants=(fixed, not bool(fixed.any())))

    def enter(self, t: Tensor, source: Source | None) -> None:
        """A parameter or buffer, or, without a source, an input of the network, which counts as ones."""
        if source is None:
            self.write(t, self.step("ones", constants=(tuple(t.shape),), kind=Kind.ACTIVATION))
        else:
            kind = Kind.WEIGHT if isinstance(t, nn.Parameter) else Kind.CONSTANT
            self.write(t, self.step("leaf", constants=(source, False), kind=kind))

    def source(self, t: Tensor) -> Source:
        """The buffer that a tensor is, or its values."""
        content = self._memory.get(key_of(t))
        if content is not None and content[2:5] == geometry(t) and self.steps[content.value.register].method == "leaf":
            found: Source = self.steps[content.value.register].constants[0]
            return found
        return t.detach().clone()

    # Memory -----------------------------------------------------------------------------------------------------------

    def find(self, t: Tensor) -> Value | None:
        """What is known of the storage of `t`."""
        content = self._memory.get(key_of(t))
        return content.value if content is not None else None

    def read(self, t: Tensor | float) -> Value:
        """The register of a tensor or number."""
        content = self._memory.get(key_of(t)) if isinstance(t, Tensor) else None
        if content is None or not isinstance(t, Tensor):
            return self.constant(t)
        if content.itemsize != t.element_size():
            raise self.refusal("it reads memory in a dtype of another size")
        here, there = geometry(t), content[2:5]
        if here == there:
            return content.value
        mine, its = _dense(*here), _dense(*there)
        if mine is not None and its is not None and here[2] == there[2] and math.prod(here[0]) == math.prod(there[0]):
            return self.move("reshaped", content.value, t=SLOT, **_way(its, mine, here[0]))
        sizes, strides, offset = here
        return self.move("strided", self._flat(t, content), t=SLOT, sizes=sizes, strides=strides, offset=offset)

    def write(self, t: Tensor, value: Value) -> None:
        """`value` has the sizes of `t`."""
        key, storage, (sizes, strides, offset) = key_of(t), t.untyped_storage(), geometry(t)
        old = self._memory.get(key)
        whole = t.numel() * t.element_size() == storage.nbytes()
        if not whole and value.kind is not Kind.OPAQUE and not (old is None and value.kind is Kind.WEIGHT):
            base = self._flat(t, old) if old is not None else self.constant(_all_of(t))
            value = self.move("written", base, value, **BOTH, sizes=sizes, strides=strides, offset=offset)
            sizes, strides, offset = (storage.nbytes() // t.element_size(),), (1,), 0
        self._memory[key] = Content(StorageWeakRef(storage), t.element_size(), sizes, strides, offset, value)

    def _flat(self, t: Tensor, content: Content) -> Value:
        """The storage's elements, one after the other; kept instead of what was written."""
        n = t.untyped_storage().nbytes() // t.element_size()
        if content.value.kind is Kind.OPAQUE:
            raise self.refusal(content.value.reason)
        sizes, strides, offset = content[2:5]
        if (sizes, strides, offset) == ((n,), (1,), 0):
            return content.value
        dense = _dense(sizes, strides, offset)
        if dense is not None and math.prod(sizes) == n:
            flat = self.move("reshaped", content.value, t=SLOT, order=dense.order, sizes=(n,), back=())
        else:
            base = self.constant(torch.zeros(n, device=t.device))
            flat = self.move("written", base, content.value, **BOTH, sizes=sizes, strides=strides, offset=offset)
        self._memory[key_of(t)] = content._replace(sizes=(n,), strides=(1,), offset=0, value=flat)
        return flat

    # The run ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, writes, is_view = facts(func)
        if is_view:
            return func(*args, **kwargs)
        self.operation = name
        known = [self.find(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        kinds = {value.kind for value in known if value is not None}
        results: list[Value | None] = []
        if kinds & {Kind.ACTIVATION, Kind.WEIGHT}:
            for value in known:
                if value is not None and value.kind is Kind.OPAQUE:
                    raise self.refusal(value.reason)
            rule = self.rules.get(name)
            if rule is None and (decomposition := torch._decomp.decomposition_table.get(func)) is not None:
                with self:
                    return decomposition(*args, **kwargs)
            if not callable(rule):
                raise self.refusal(rule or self.rules[""])
            found = rule(self, Call(name, func, bound(func, args, kwargs)))
            results = found if isinstance(found, list) else [found]
            if torch.Tag.nondeterministic_seeded in func.tags and not any(results):  # rand_like …
                results = [opaque(CHANCE)]
        elif Kind.OPAQUE in kinds or torch.Tag.nondeterministic_seeded in func.tags:
            reason = next((v.reason for v in known if v is not None and v.reason), CHANCE)
            if name == "_local_scalar_dense":  # a branch, or an index
                raise self.refusal(reason)
            results = [opaque(reason)] * 8
        out = func(*args, **kwargs)
        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if name.startswith(("empty", "new_empty")):
            for t in outs:
                t.zero_()
        for t, value in zip(outs, results + [None] * len(outs), strict=False):
            if value is not None:
                self.write(t, value)
            elif writes:
                self._memory.pop(key_of(t), None)
        return out

    def refusal(self, reason: Any) -> PathError:
        module, kind = self.modules[-1] if self.modules else ("", "")
        return PathError(
            f"no sum over paths: {module or 'the model'!r} ({kind}), {self.operation}: {reason}.\n"
            "Only positively homogeneous operations pass values along paths: replace this one, or measure the parts "
            "before and behind it."
        )


class Outside(TorchFunctionMode):
    """Values that leave torch are read by no operation that a dispatch mode sees: no path goes on from there."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in Calls.ESCAPES and args and isinstance(args[0], Tensor):
            known = self.record.find(args[0])
            if known is not None and known.kind is not Kind.CONSTANT:
                self.record.operation = name
                raise self.record.refusal(READ)
        return func(*args, **(kwargs or {}))


def opaque(reason: str) -> Value:
    return Value(-1, Kind.OPAQUE, 0, reason)


# Geometry -------------------------------------------------------------------------------------------------------------


class Dense(NamedTuple):
    """A tensor without gaps: the order of its dimensions in memory, and their sizes in that order."""

    order: Sizes
    sizes: Sizes


def _dense(sizes: Sizes, strides: Sizes, offset: int) -> Dense | None:
    order = sorted(range(len(sizes)), key=lambda d: (-strides[d] if sizes[d] > 1 else -math.inf, d))
    step = 1
    for d in reversed(order):
        if sizes[d] > 1 and strides[d] != step:
            return None
        step *= sizes[d]
    return Dense(tuple(order), tuple(sizes[d] for d in order))


def _way(its: Dense, mine: Dense, sizes: Sizes) -> dict[str, Any]:
    """From one tensor without gaps to another in the same memory: its order in memory, other sizes, my order."""
    plain, order = tuple(range(len(its.order))), its.order
    back = tuple(sorted(range(len(mine.order)), key=lambda k: mine.order[k]))
    if its.sizes == mine.sizes:  # one permutation
        order, back = tuple(its.order[k] for k in back), ()
        return {"order": () if order == plain else order, "sizes": sizes, "back": ()}
    return {
        "order": () if order == plain else order,
        "sizes": mine.sizes,
        "back": () if back == tuple(range(len(back))) else back,
    }


def _all_of(t: Tensor) -> Tensor:
    n = t.untyped_storage().nbytes() // t.element_size()
    return t.detach().as_strided((n,), (1,), 0)
