"""Follows the scales of a model through one run: every ATen call adds its equations (`rules.py`).

`Follow` is a `Run` whose shadows are nodes. A rule reads those of its inputs, adds equations, and says which nodes the
outputs have. An operation without a rule sets what it reads to ground, with its name, the module and the reason.
"""

import gc
import math
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from gspace.analysis.equations import ANY, GROUND, Equations, squash, thin
from gspace.analysis.forward import Inputs, arguments, copied, in_caches, set_mode, tensors_in
from gspace.analysis.memory import Memory, Raw, Shadow, geometry, key_of
from gspace.analysis.result import Pin
from gspace.analysis.run import Run, called, written
from gspace.analysis.weights import LARGEST, ZERO, Leaf, Weights, channels, overlap

Nodes = Tensor | Raw | None
CREATED = frozenset("zeros zeros_like new_zeros zero full new_full full_like scalar_tensor fill".split())
QUIET, MOST = 5, 24  # where chance decides a branch: runs in a row that must say nothing new, and runs at most


class Norm(NamedTuple):
    """A BatchNorm: divides the scale of `absorbed` out and writes `written`."""

    absorbed: Tensor
    written: Tensor
    affine: bool


class Follow(Run):
    """The equations of a model's run, and what else the analysis needs of it.

    Attributes:
        pinned: Modules whose outputs are set to ground.
        absorbed: Nodes that an ε other than a BatchNorm's keeps from being exact symmetries.
        untrained: Nodes that embeddings write whose row of padding is never trained.
        norms: BatchNorms, in the order of the run.
        statistics: Running statistics by storage: nodes and power of their scale.
        powers: By storage, the power of what its nodes stand for, if nobody has asked for it yet.
        positions: First and last use of the parameters, in the order of the run.
        branches: How many branches depended on chance.
        held: Storages of parameters and buffers, whose values may change.
        passed: What nodes went through, by the names of `PASSES`.
    """

    creates = CREATED

    def __init__(self, rules: Mapping[str, Any], model: nn.Module, residual: str, pinned: Container[nn.Module]) -> None:
        self.equations = Equations()
        me = weakref.proxy(self)  # no cycle: what a run has made is freed with it
        self.weights = Weights(self.equations, lambda count, reason: me.note(count, reason))
        super().__init__(rules, Memory(_blank, self.weights.nodes))
        self.model, self.residual, self.pinned = model, residual, pinned
        self.pins: list[Pin] = []
        self.absorbed: list[Tensor] = []
        self.untrained: list[Tensor] = []
        self.norms: dict[tuple[int, ...], Norm] = {}
        self.statistics: dict[int, tuple[Tensor, int]] = {}
        self.powers: dict[int, int] = {}
        self.positions: dict[Leaf, tuple[int, int]] = {}
        self.passed: dict[str, list[Tensor]] = {}
        self.position = self.branches = 0
        self.held: set[int] = set()

    def enter(self, left: Container[str]) -> None:
        """Every parameter, before it is read; those that share memory, are complex or are to be left stay ground."""
        spans: dict[int, list[tuple[str, int, int]]] = {}
        for name, t in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if t.layout == torch.strided and t.numel():
                spans.setdefault(key_of(t), []).append((name, *_span(t)))
        self.held.update(spans)
        for name, p in self.model.named_parameters():
            if not p.numel():
                continue
            self.parameters[key_of(p)] = name
            begin, end = _span(p)
            others = [other for other, b, e in spans[key_of(p)] if other != name and begin < e and b < end]
            reasons = {
                ("alias", f"shares its memory with {', '.join(others)}"): bool(others),
                ("alias", "its entries may share memory"): overlap(geometry(p)),
                ("complex", "its values are complex"): p.is_complex(),
                ("pin", "pinned on request"): name in left,
            }
            found = [reason for reason, holds in reasons.items() if holds]
            if found and (p.is_floating_point() or p.is_complex()):
                self.pins.append(Pin(found[0][0], name, channels(p.shape), f"{name}: {found[0][1]}"))
            elif p.is_floating_point():
                self.weights.enter(p)
                n = p.untyped_storage().nbytes() // p.element_size()
                self.memory.write(p.detach().as_strided((n,), (1,), 0), Raw(key_of(p), (n,), (1,), 0))

    def unread(self) -> list[nn.Parameter]:
        """Parameters that no run has read."""
        return [leaf.parameter for leaves in self.weights.leaves.values() for leaf in leaves if not leaf.kinds]

    def misses_experts(self) -> bool:
        """Whether a parameter was not read, or one of several in one tensor was not."""
        stacked = [leaf for leaves in self.weights.leaves.values() for leaf in leaves if leaf.parameter.dim() > 2]
        return bool(self.unread()) or not all(bool(leaf.seen.content.all()) for leaf in stacked)

    def end(self) -> None:
        """Once, behind all runs."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        for leaf in self.weights.settle_zeros():
            name = names[id(leaf.parameter)]
            reason = f"{name}: the example multiplies it by zeros alone"
            self.pins.append(Pin("zero", name, channels(leaf.place[0]), reason))

    def run(self, example: Inputs, modes: Sequence[bool]) -> None:
        """One run in each mode; where chance decides a branch, runs until several in a row say nothing new."""
        for training in modes:
            set_mode(self.model, training)
            quiet, free = 0, -1
            for _ in range(MOST):
                tossed = self.branches
                self._once(example)
                before, free = free, self.weights.free() if self.branches > tossed else -1
                quiet = quiet + 1 if free == before else 0
                if self.branches == tossed or quiet == QUIET:
                    break

    def _once(self, example: Inputs) -> None:
        self.position = 0
        self.memory.keep({*self.parameters, *self.statistics})  # no scale follows what else an earlier run has left
        torch.clear_autocast_cache()
        for p in self.model.parameters():
            p.grad = None
        example = copied(example, self.model)
        self.given(tensors_in(arguments(example), caches=True))
        out = called(self, self.model, example)
        for name, p in self.model.named_parameters():
            if key_of(p) not in self.parameters and p.numel():
                raise written(name)
        with torch._C.DisableTorchFunction():
            self._public(tensors_in(out), "an output of the model", "output")
            given = [t for t in tensors_in(arguments(example)) if key_of(t) not in self.parameters]
            self._public(given, "kept where others may read it", "attribute")
            caches = in_caches([out, arguments(example)])
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]  # which are put back
            known = {*self.parameters, *self.statistics, *map(key_of, [*caches, *grads])}
            del out, example, given  # and the graph behind them
            for shadow in self._alive(known):  # as good as an output
                content = shadow.content if isinstance(shadow.content, Raw) else shadow.content.content
                self.pin(content, "kept where others may read it", "attribute")

    def _public(self, tensors: Iterable[Tensor], reason: str, operation: str) -> None:
        """Pins what the caller sees."""
        for t in tensors:
            self.pin(self.ids(t), reason, operation)

    def _alive(self, known: Container[int]) -> list[Shadow]:
        """Shadows of what depends on the inputs and outlives the run, in storages that are not known."""

        def now() -> list[Shadow]:
            found = [s for key, s in self.memory.shadows.items() if key in self._data and key not in known]
            return [s for s in found if not s.storage.expired()]

        if now():
            gc.collect()  # a cycle of references is nobody's
        return now()

    # Shadows ----------------------------------------------------------------------------------------------------------

    def unknown(self, t: Any) -> bool:
        """Whether another run may have other values here, or there are none (meta device)."""
        if not isinstance(t, Tensor):
            return False
        return self.leaked or t.is_meta or self.depends_on_data(t) or self.depends_on_chance(t)

    def content(self, t: Any) -> Tensor | Raw:
        """What is known of a tensor or number."""
        if not isinstance(t, Tensor):
            return torch.tensor(ANY if t == 0 or abs(t) == math.inf else GROUND)
        power = self.powers.pop(key_of(t), 1)
        if t not in self.memory:
            literal = t.dim() == 0 and t.is_floating_point() and not (self.unknown(t) or key_of(t) in self.held)
            zero = literal and bool((t == 0) | t.isinf())
            return torch.tensor(ANY if zero else GROUND).expand(t.shape)
        if power != 1:
            plane = self.memory.plane(t)
            plane.content = self.equations.sum(power, plane.content, 1, ZERO)
        found = self.memory.read(t)
        if found is None:  # the same memory, seen in another dtype
            shadow = self.memory.shadows.pop(key_of(t)).content
            whole = isinstance(shadow, Raw) and [
                Raw(shadow.key, *leaf.place) for leaf in self.weights.leaves[shadow.key]
            ]
            for part in whole or [shadow.content]:
                self.pin(part, "read in a dtype of another size")
            return ZERO.expand(t.shape)
        if isinstance(found, Raw):
            leaf = self.weights.leaf(found)
            if leaf is None:
                return ZERO.expand(t.shape)
            first, _ = self.positions.get(leaf, (self.position, 0))
            self.positions[leaf] = min(first, self.position), self.position
            self.position += 1
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

    # Equations --------------------------------------------------------------------------------------------------------

    def pin(self, content: Tensor | Raw, reason: str, operation: str = "") -> None:
        """Sets nodes to ground."""
        new = self.weights.ground(content) if isinstance(content, Raw) else self.equations.ground(squash(content)[0])
        if new:
            self.note(new, reason, operation)

    def note(self, count: int, reason: str, operation: str = "") -> None:
        where = self.modules[-1][0] if self.modules else "the model"
        self.pins.append(Pin(operation or self.operation, where, count, reason))

    def absorb(self, nodes: Tensor) -> Tensor:
        """An ε is in the way: a symmetry only as it goes to 0. The nodes with it; a literal 0 is none any more."""
        few = squash(nodes)[0]
        found = self.equations.find(few).unique()
        if bool((found > ANY).any()):
            self.absorbed.append(found[found > ANY])
        return torch.where(nodes == ANY, GROUND, nodes) if bool((few == ANY).any()) else nodes

    def add(self, x: Any, y: Any) -> Tensor:
        """What is added or compared has one scale; with residual="pin", two activations that differ have none."""
        a, b = torch.broadcast_tensors(self.ids(x), self.ids(y))
        fa, fb = thin(a, b)
        if self.residual == "pin" and self.depends_on_data(x) and self.depends_on_data(y):
            differ = (fa != fb) & (fa > ANY) & (fb > ANY)
            if bool(differ.any()):
                left, right = fa[differ].unique(), fb[differ].unique()
                if not torch.equal(left, right):  # a rotary embedding adds a value to a permutation of itself
                    reason = "a residual connection (residual='tie' would tie the two streams)"
                    self.pin(torch.cat([left, right]), reason)
        met = ((fa == GROUND) | (fb == GROUND)) & (fa != ANY) & (fb != ANY) & (fa != fb)
        if bool(met.any()):
            self.pin(torch.maximum(fa, fb)[met], "meets what has no scale")
        before = [self.equations.find(t) for t in (fa, fb)] if self.equations.forms else []
        result = self.tied(a, b)
        lost = sum(len(t[(t > ANY) & (self.equations.find(t) == GROUND)].unique()) for t in before)
        if lost:
            self.note(lost, "added to a power of itself, or to what scales otherwise")
        return result

    def tied(self, a: Tensor, b: Tensor) -> Tensor:
        """Nodes that must be the same: the first, or the second where the first is `ANY`."""
        a, b = torch.broadcast_tensors(a, b)
        new, literal = self.equations.tie(a, b), bool((thin(a)[0] == ANY).any())
        return self.equations.find(torch.where(a == ANY, b, a) if literal else a) if new or literal else a

    def reduce(self, nodes: Tensor, dims: Sequence[int] | int | None = None, keep: bool = True) -> Tensor:
        """One scale over `dims` (all, if None or empty)."""
        rank = nodes.dim()
        listed = [dims] if isinstance(dims, int) else list(dims or range(rank))
        listed = sorted({d % rank for d in listed} if rank else set())
        if not nodes.numel():
            left = [1 if d in listed else n for d, n in enumerate(nodes.shape) if keep or d not in listed]
            return torch.tensor(GROUND).expand(left)  # another batch may have rows here
        for d in listed:
            if nodes.stride(d) == 0 and nodes.shape[d] > 1:
                nodes = nodes.narrow(d, 0, 1)
        if any(nodes.shape[d] > 1 for d in listed):
            one = torch.where(nodes == ANY, -1, nodes).amax(listed, True)  # a literal zero is of no weight
            one = torch.where(one < 0, ANY, one)
            self.equations.tie(nodes, one)
            nodes = one
        nodes = self.equations.find(nodes)
        return nodes if keep else nodes.reshape([n for d, n in enumerate(nodes.shape) if d not in listed])

    def contract(self, a: Tensor | Raw, b: Tensor | Raw, dims: Sequence[int] = (), groups: int = 1) -> Tensor:
        """x_a + x_b of factors that broadcast. They are summed over `dims`, of size 1 in the result: one scale there.

        A parameter is edges from the other factor to the result, which has one scale along what it is repeated over.
        """
        for nodes, raw in ((a, b), (b, a)):
            if isinstance(raw, Raw) and isinstance(nodes, Tensor):
                repeated = [d for d, step in enumerate(raw.strides) if step == 0 or raw.sizes[d] == 1]
                shape = [1 if d in (*dims, *repeated) else n for d, n in enumerate(raw.sizes)]
                return self.weights.edges(
                    raw, self.reduce(nodes, repeated) if repeated else nodes, shape, groups=groups
                )
        left, right = (squash(self.equations.find(self.memory.nodes(x)))[0] for x in (a, b))
        if math.prod(torch.broadcast_shapes(left.shape, right.shape)) > LARGEST:
            self.pin(torch.cat([left.unique(), right.unique()]), "too many different scales meet in one product")
            return ZERO.expand([1] * left.dim())
        total = self.equations.sum(1, left, 1, right)
        return self.reduce(total, dims) if dims else total

    # The run ----------------------------------------------------------------------------------------------------------

    def settle(self, name: str, tensors: Sequence[Any], outs: Sequence[Tensor], results: Sequence[Any]) -> None:
        """Remembers what scales go through, too; a product counts where both factors are activations."""
        for t, nodes in zip(outs, results, strict=False):
            known = None if isinstance(nodes, Tensor) and not bool(thin(nodes)[0].any()) else nodes
            if t.layout is torch.strided and t.is_floating_point():
                self.memory.write(t, known)
            elif known is not None:
                self.pin(known, "turned into numbers that are not floating, or sparse")
        kind, first = PASSES.get(name), results[0]
        if kind and isinstance(first, Tensor) and (kind == "relu" or sum(map(self.depends_on_data, tensors)) > 1):
            self.passed.setdefault(kind, []).append(thin(first)[0].unique())

    def escaped(self, t: Tensor, name: str) -> None:
        content = self.content(t)
        self.pin(content, "its values are read outside of torch", name)
        if isinstance(content, Tensor):
            self.memory.write(t, None)  # or written there: nothing is known of it

    def branched(self, chance: bool) -> None:
        self.branches += chance

    def left(self, module: nn.Module, output: Any) -> None:
        if module in self.pinned:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                for t in tensors_in(output):
                    self.pin(self.ids(t), "pinned on request", "pin")


PASSES = {
    **dict.fromkeys("relu leaky_relu rrelu_with_noise _prelu_kernel prelu clamp_min threshold".split(), "relu"),
    "bmm": "attention",
    "mul": "gate",
}


def _span(t: Tensor) -> tuple[int, int]:
    """Its first byte, and the one behind its last."""
    first, last = int(t.storage_offset()), sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return first * t.element_size(), (first + last + 1) * t.element_size()


def _blank(t: Tensor) -> Tensor:
    return torch.zeros(t.untyped_storage().nbytes() // t.element_size(), dtype=torch.long)
