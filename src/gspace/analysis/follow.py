"""Follows the scales of a model through one run: every ATen call adds its equations (`rules.py`).

`Follow` is a `TorchDispatchMode`. Each operation arrives with real tensors. Its rule reads the nodes of its inputs from
shadow memory, adds equations, and says which nodes its outputs have. An operation without a rule sets what it reads to
ground, with its name, the module and the reason.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from gspace.analysis.equations import ANY, GROUND, Equations, squash, thin
from gspace.analysis.forward import TraceError
from gspace.analysis.memory import Memory, Raw, key_of
from gspace.analysis.weights import LARGEST, Weights

Nodes = Tensor | Raw | None
Rule = Callable[["Follow", "Call"], "Nodes | list[Nodes]"]


@dataclass(frozen=True)
class Call:
    """One call of an operation, its arguments by name, defaults filled in."""

    name: str
    function: Callable[..., Any]
    args: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, *names: str) -> Any:
        """The first of these arguments that the operation has."""
        return next((self.args[name] for name in names if name in self.args), None)

    def run(self, /, **changed: Any) -> Any:
        """The operation itself on other values."""
        return self.function(**{**self.args, **changed})


@dataclass(frozen=True)
class Pinned:
    """Equations x = 0 that an operation added."""

    operation: str
    where: str
    count: int
    reason: str


class Norm(NamedTuple):
    """A BatchNorm: divides the scale of `absorbed` out and writes `written`."""

    absorbed: Tensor
    written: Tensor
    affine: bool


class Follow(TorchDispatchMode):
    """The equations of a model's run, and what else the analysis needs of it.

    Attributes:
        absorbed: Nodes that an ε other than a BatchNorm's keeps from being exact symmetries.
        untrained: Nodes that embeddings write whose row of padding is never trained.
        norms: BatchNorms, in the order of the run.
        statistics: Running statistics by storage: nodes and power of their scale.
        positions: First and last use of the parameters, in the order of the run.
        branches: How many branches depended on chance.
        parameters: Names of parameters by storage.
        passed: What nodes went through, by the names of `PASSES`.
    """

    def __init__(self, rules: dict[str, Rule], residual: str) -> None:
        super().__init__()
        self.rules, self.residual = rules, residual
        self.equations = Equations()
        self.weights = Weights(self.equations)
        self.memory = Memory(self.weights.nodes)
        self.pins: list[Pinned] = []
        self.absorbed: list[Tensor] = []
        self.untrained: list[Tensor] = []
        self.norms: dict[tuple[int, ...], Norm] = {}
        self.statistics: dict[int, tuple[Tensor, int]] = {}
        self.positions: dict[tuple[int, int], tuple[int, int]] = {}
        self.passed: dict[str, list[Tensor]] = {}
        self.position = self.branches = self._ticks = 0
        self._data: dict[int, StorageWeakRef] = {}
        self._chance: dict[int, StorageWeakRef] = {}
        self.operation = ""
        self.modules: list[str] = []
        self.parameters: dict[int, str] = {}

    # Shadows ----------------------------------------------------------------------------------------------------------

    def enter(self, parameter: Tensor) -> None:
        """A parameter's elements, before any of them is read."""
        key, n = key_of(parameter), parameter.untyped_storage().nbytes() // parameter.element_size()
        last = sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
        begin = int(parameter.storage_offset())
        self.weights.enter(key, begin, begin + last + 1)
        if key not in self.memory.shadows:
            whole = parameter.detach().as_strided((n,), (1,), 0)
            self.memory.write(whole, Raw(key, (n,), (1,), 0))

    def depends_on_data(self, t: Any) -> bool:
        return isinstance(t, Tensor) and key_of(t) in self._data

    def unknown(self, t: Any) -> bool:
        """Whether another batch may have other values here, or there are none (meta device)."""
        return self.depends_on_data(t) or (isinstance(t, Tensor) and t.is_meta)

    def given(self, inputs: Sequence[Tensor]) -> None:
        """The inputs of the model: ground, and data."""
        self._data.update((key_of(t), StorageWeakRef(t.untyped_storage())) for t in inputs if key_of(t))

    def content(self, t: Any) -> Tensor | Raw:
        """What is known of a tensor or number."""
        if not isinstance(t, Tensor):
            return torch.tensor(ANY if t == 0 or abs(t) == math.inf else GROUND)
        shadow = self.memory.shadows.get(key_of(t))
        if shadow is None:
            literal = t.dim() == 0 and t.is_floating_point() and not (t.is_meta or self.depends_on_data(t))
            zero = literal and bool((t == 0) | t.isinf())
            return torch.tensor(ANY if zero else GROUND).expand(t.shape)
        found = self.memory.read(t)
        if found is None:  # the same memory, seen in another dtype
            self.pin(shadow.content, "read in a dtype of another size")
            self.memory.shadows.pop(key_of(t))
            return torch.tensor(GROUND).expand(t.shape)
        if isinstance(found, Raw):
            self._use(found)
        return found

    def ids(self, t: Any) -> Tensor:
        """Its nodes, one per element, expanded where they do not change."""
        found = self.content(t)
        nodes = self.weights.nodes(found) if isinstance(found, Raw) else found
        return self.equations.find(nodes)

    def raw(self, t: Any) -> Raw | None:
        """The place of a parameter's elements, if they are nothing else."""
        found = self.content(t) if isinstance(t, Tensor) and t in self.memory else None
        return found if isinstance(found, Raw) else None

    def _use(self, raw: Raw) -> None:
        region = self.weights.region(raw)
        first, _ = self.positions.get(region, (self.position, 0))
        self.positions[region] = min(first, self.position), self.position
        self.position += 1

    # Equations --------------------------------------------------------------------------------------------------------

    def where(self) -> str:
        return self.modules[-1] if self.modules else "the model"

    def pin(self, content: Tensor | Raw, reason: str, operation: str = "") -> None:
        """Sets nodes to ground."""
        new = self.weights.ground(content) if isinstance(content, Raw) else self.equations.ground(squash(content)[0])
        if new:
            self.pins.append(Pinned(operation or self.operation, self.where(), new, reason))

    def absorb(self, nodes: Tensor) -> None:
        """An ε is in the way: a symmetry only as it goes to 0."""
        found = self.equations.find(squash(nodes)[0]).unique()
        if bool((found > ANY).any()):
            self.absorbed.append(found[found > ANY])

    def add(self, x: Any, y: Any) -> Tensor:
        """What is added or compared has one scale; with residual="pin", two activations that differ have none."""
        a, b = torch.broadcast_tensors(self.ids(x), self.ids(y))
        if self.residual == "pin" and self.depends_on_data(x) and self.depends_on_data(y):
            fa, fb = thin(a, b)
            differ = (fa != fb) & (fa > ANY) & (fb > ANY)
            if bool(differ.any()):
                left, right = fa[differ].unique(), fb[differ].unique()
                if not torch.equal(left, right):  # a rotary embedding adds a value to a permutation of itself
                    reason = "a residual connection (residual='tie' would tie the two streams)"
                    self.pin(torch.cat([left, right]), reason)
        fa, fb = thin(a, b)
        met = ((fa == GROUND) | (fb == GROUND)) & (fa != ANY) & (fb != ANY) & (fa != fb)
        if bool(met.any()):
            self.pin(torch.maximum(fa, fb)[met], "meets what has no scale")
        return self.tied(a, b)

    def tied(self, a: Tensor, b: Tensor) -> Tensor:
        """Nodes that must be the same: the first, or the second where the first is `ANY`."""
        self.equations.tie(a, b)
        literal = thin(a)[0] == ANY
        return self.equations.find(torch.where(a == ANY, b, a) if bool(literal.any()) else a)

    def reduce(self, nodes: Tensor, dims: Sequence[int] | int | None = None, keep: bool = True) -> Tensor:
        """One scale over `dims` (all, if None or empty)."""
        rank = nodes.dim()
        listed = [dims] if isinstance(dims, int) else list(dims or range(rank))
        listed = sorted({d % rank for d in listed} if rank else set())
        if not nodes.numel():
            return torch.tensor(GROUND).expand([1 if d in listed else n for d, n in enumerate(nodes.shape)])
        nodes = self.equations.find(nodes)
        for d in listed:
            if nodes.stride(d) == 0 and nodes.shape[d] > 1:
                nodes = nodes.narrow(d, 0, 1)
        if listed and any(nodes.shape[d] > 1 for d in listed):
            one = nodes.amax(listed, True)
            self.equations.tie(nodes, one)
            nodes = self.equations.find(one)
        return nodes if keep else nodes.reshape([n for d, n in enumerate(nodes.shape) if d not in listed])

    def contract(self, a: Tensor | Raw, b: Tensor | Raw) -> Tensor:
        """(n, i, k) · (n, k, j) → (n, i, j): x_a + x_b is the same for all k, and the scale of the result."""
        (n, i, _), j = _sizes(a), _sizes(b)[2]
        if isinstance(b, Raw) and isinstance(a, Tensor):
            tail = self.reduce(a, [1] if b.strides[0] or n == 1 else [0, 1])
            return self.weights.edges(b, tail.transpose(1, 2), (len(tail), 1, j)).expand(n, i, j)
        if isinstance(a, Raw) and isinstance(b, Tensor):
            tail = self.reduce(b, [2] if a.strides[0] or n == 1 else [0, 2])
            return self.weights.edges(a, tail.transpose(1, 2), (len(tail), i, 1)).expand(n, i, j)
        left, right = (self.weights.nodes(x) if isinstance(x, Raw) else x for x in (a, b))
        left, right = squash(self.equations.find(left))[0][..., None], squash(self.equations.find(right))[0][:, None]
        if math.prod(torch.broadcast_shapes(left.shape, right.shape)) > LARGEST:
            self.pin(torch.cat([left.unique(), right.unique()]), "too many different scales meet in one product")
            return torch.tensor(GROUND).expand(n, i, j)
        return self.reduce(self.equations.sum(1, left, 1, right), 2)[:, :, 0].expand(n, i, j)

    # The run ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # nodes are on the CPU, whatever the default device
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, writes, is_view = facts(func)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for t in _targets(func, args, kwargs) if writes else ():
            if key_of(t) in self.parameters and t.numel():
                raise written(self.parameters[key_of(t)])
        result: Any = None
        rule = self.rules.get(name)
        if not is_view and (name in CREATES or any(t in self.memory for t in tensors)):
            self.operation = name
            if rule is None:
                decomposed = self._decomposed(func, args, kwargs)
                if decomposed is not NotImplemented:
                    return decomposed
                rule = self.rules[""]
            result = rule(self, Call(name, func, bound(func, args, kwargs)))
        out = func(*args, **kwargs)
        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if result is not None or (writes and not is_view and any(t in self.memory for t in outs)):
            listed = result if isinstance(result, list) else [result] * len(outs)
            for t, nodes in zip(outs, listed, strict=False):
                self._assign(t, nodes)
            if name in PASSES:
                self._pass(name, tensors, listed[0])
        self._taint(torch.Tag.nondeterministic_seeded in func.tags, name, tensors, outs)
        return out

    def whole(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Follows a function as one operation, whatever it is made of."""
        self.operation = name
        bound = {**dict(zip(ARGUMENTS[name], args, strict=False)), **kwargs}
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            nodes = self.rules[name](self, Call(name, func, bound))
            out = func(*args, **kwargs)
            self._assign(out, nodes[0] if isinstance(nodes, list) else nodes)
            self._pass(name, tree_leaves(bound), nodes[0] if isinstance(nodes, list) else nodes)
        self._taint(False, name, [t for t in tree_leaves(bound) if isinstance(t, Tensor)], [out])
        return out

    def _pass(self, name: str, tensors: Sequence[Any], nodes: Nodes) -> None:
        """Remembers what scales go through; a product counts where both factors are activations."""
        kind = PASSES[name]
        if isinstance(nodes, Tensor) and (kind == "relu" or sum(map(self.depends_on_data, tensors)) > 1):
            found = squash(nodes)[0].unique()
            self.passed.setdefault(kind, []).append(found[found > ANY])

    def _assign(self, t: Tensor, nodes: Nodes) -> None:
        if nodes is None:
            nodes = torch.tensor(GROUND)
        if t.layout is not torch.strided:
            self.pin(nodes, "turned into a sparse tensor")
        elif t.is_floating_point():
            self.memory.write(t, nodes if isinstance(nodes, Raw) else nodes.expand(t.shape))
        else:
            self.pin(nodes, "turned into numbers that are not floating")

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """torch's own way to write an operation without a rule by others, if there is one."""
        decomposition = func.decompose if func._can_decompose() else torch._decomp.decomposition_table.get(func)
        if decomposition is None:
            return NotImplemented
        with self:
            return decomposition(*args, **kwargs)

    def _taint(self, random: bool, name: str, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        for table, drawn in ((self._data, False), (self._chance, random)):
            if drawn or any(key_of(t) in table for t in tensors):
                table.update((key_of(t), StorageWeakRef(t.untyped_storage())) for t in outs if key_of(t))
                self.branches += table is self._chance and name == "_local_scalar_dense"
        self._ticks += 1
        if self._ticks % 256 == 0:
            self.memory.forget()
            for table in (self._data, self._chance):
                for key in [key for key, storage in table.items() if storage.expired()]:
                    del table[key]


ARGUMENTS = {"scaled_dot_product_attention": "query key value attn_mask dropout_p is_causal scale enable_gqa".split()}
PASSES = {
    **dict.fromkeys("relu leaky_relu rrelu_with_noise _prelu_kernel prelu clamp_min threshold".split(), "relu"),
    **dict.fromkeys("mul glu".split(), "gate"),
    **dict.fromkeys("bmm baddbmm scaled_dot_product_attention".split(), "attention"),
}
CREATES = frozenset("zeros zeros_like new_zeros zero full new_full full_like scalar_tensor fill".split())


class Calls(TorchFunctionMode):
    """What a dispatch mode does not see as such: values that leave torch, and attention before it is fused or not."""

    ESCAPES = frozenset("numpy tolist __array__ __dlpack__ data_ptr".split())

    def __init__(self, follow: Follow) -> None:
        super().__init__()
        self.follow = follow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in self.ESCAPES and args and isinstance(args[0], Tensor) and args[0] in self.follow.memory:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self.follow.pin(self.follow.content(args[0].detach()), "its values are read outside of torch", name)
        if name == "scaled_dot_product_attention":
            return self.follow.whole(name, func, args, kwargs)
        return func(*args, **kwargs)


def written(name: str) -> TraceError:
    return TraceError(f"forward writes into parameter {name!r}: do that outside of it (a hook, the training loop)")


def _targets(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    given = bound(func, args, kwargs)
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for name in names for t in tree_leaves(given.get(name)) if isinstance(t, Tensor)]


def _sizes(content: Tensor | Raw) -> tuple[int, ...]:
    return content.sizes if isinstance(content, Raw) else tuple(content.shape)


@cache
def facts(func: Any) -> tuple[str, bool, bool]:
    """Its name without the underscore of a call in place, whether it writes, and whether its result is a view."""
    name = func._schema.name.split("::")[1]
    writes = func._schema.is_mutable
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return name, writes, func.is_view or name in VIEWS


VIEWS = frozenset(
    "detach alias lift lift_fresh _unsafe_view _reshape_alias transpose t squeeze unsqueeze as_strided "
    "unsafe_split unsafe_split_with_sizes unsafe_chunk".split()
)


@cache
def _signature(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    arguments = func._schema.arguments
    return tuple(a.name for a in arguments), {a.name: a.default_value for a in arguments}


def bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names, defaults = _signature(func)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
