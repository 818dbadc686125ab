"""Spaces: which unit scales which entry of an activation, and the constraints that a forward pass puts on them.

A *space* is a tensor of ids that broadcasts against the activation: `(1, C, 1, 1)` behind a 2d convolution, `(1, F)`
behind a linear layer. Ids are provisional: every layer that writes channels draws fresh ones, and the walk collects
equations between them (`tie`) and with ground (`pin`), which `solve.py` solves at the end. Id 0 is ground.

Sizes that a symbolic trace cannot know are `None`; the leading one is then the batch. Nothing is guessed: an operation
that needs an unknown size pins its input and says so.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

Sizes = tuple[int | None, ...]
Rule = Callable[..., Any]
UNKNOWN_SIZE = "its sizes are not known in a symbolic trace; pass example_input to release these units"
UNKNOWN_RANK = "its rank is not known in a symbolic trace; pass example_input to release these units"


@dataclass(frozen=True)
class Activation:
    """An activation and its space. Either its rank is known, as `ids.dim()` = `len(shape)`, or both are None.

    Attributes:
        ids: `(…)` one id per entry, size 1 along dimensions where the id does not change; None: ground, rank unknown.
        shape: Sizes of the activation, None where unknown.
        spread: Each id stands for an unknown number of neighbours along the last dimension (a flattened map).
        loose: There may be more dimensions in front: a symbolic trace does not know the rank of its inputs.
        lead: Which unknown leading size it has: two activations with the same number have the same batch; 0: not said.
    """

    ids: Tensor | None = None
    shape: Sizes | None = None
    spread: bool = False
    loose: bool = False
    lead: int = 0

    def __post_init__(self) -> None:
        if (None if self.ids is None else self.ids.dim()) != (None if self.shape is None else len(self.shape)):
            raise ValueError(f"a space of {self.ids} for an activation of sizes {self.shape}")

    @property
    def grounded(self) -> bool:
        return self.ids is None or not bool(self.ids.any())


class Ranked(Activation):
    """What a type checker sees in an activation of known rank."""

    ids: Tensor
    shape: Sizes


def ranked(x: Activation) -> TypeGuard[Ranked]:
    return x.ids is not None


def counts_from_front(dim: int, rank: int) -> bool:
    """Whether `dim` is another one, seen from the last, if more dimensions stand before these `rank`; 0 stays first."""
    return dim > 0 or dim < -rank


@dataclass(frozen=True)
class Weight:
    """A parameter on its way into an operation; `swap` after an odd number of transpositions."""

    name: str
    shape: tuple[int, ...]
    swap: bool = False


@dataclass(frozen=True)
class Buffer:
    """A buffer on its way into an operation."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """A size read from an activation that is not known as a number; `batch` is its `lead` if it is the leading one."""

    batch: int = 0


@dataclass(frozen=True)
class DType:
    """The dtype of a value of which only the trace with an example input knows it."""


@dataclass(frozen=True)
class Parts:
    """What splitting along a dimension of unknown size gives: any number of parts, all of one space."""

    part: Activation


@dataclass(frozen=True)
class Use:
    """One use of a parameter as edges; `head` is `(group, out)`, `tail` is `(group, in)`, in provisional ids.

    `position` counts the uses of one forward pass.
    """

    name: str
    head: Tensor
    tail: Tensor
    swap: bool
    position: int
    affine: bool = False  # γ or β of a BatchNorm: no edge in the transparent view


@dataclass(frozen=True)
class Norm:
    """One BatchNorm: it divides the scale of `absorbed` out and writes `written`; its statistics follow `absorbed`."""

    absorbed: Tensor
    written: Tensor
    affine: bool
    statistics: tuple[tuple[str, int], ...]  # buffer name, power of the scale


@dataclass(frozen=True)
class PinnedAt:
    """Ids that an operation pins, with the evidence."""

    ids: Tensor
    operation: str
    where: str
    reason: str


@dataclass
class Walk:
    """Everything a walk over the graph collects."""

    residual: str
    count: int = 1
    ties: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    pins: list[PinnedAt] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)
    misused: dict[str, PinnedAt] = field(default_factory=dict)
    operation: str = ""
    where: str = ""
    position: int = 0
    leads: int = 0

    def at(self, operation: str, node: fx.Node, where: str) -> None:
        """Sets what the next pins are blamed on."""
        self.operation, self.where = operation, where or node.name

    def lead(self) -> int:
        """A leading size that is no other's."""
        self.leads += 1
        return self.leads

    def fresh(self, n: int) -> Tensor:
        ids = torch.arange(self.count, self.count + n)
        self.count += n
        return ids

    def tie(self, a: Tensor, b: Tensor) -> None:
        a, b = torch.broadcast_tensors(a, b)
        self.ties.append((a.reshape(-1), b.reshape(-1)))

    def pin(self, values: Activation | Tensor | Iterable[Activation], reason: str) -> None:
        """Ties every id of `values` to ground."""
        if isinstance(values, (Activation, Tensor)):
            ids = values.ids if isinstance(values, Activation) else values
            if ids is not None and bool(ids.any()):
                self.pins.append(PinnedAt(ids[ids > 0].unique(), self.operation, self.where, reason))
            return
        for value in values:
            self.pin(value, reason)

    def note(self, channels: int, reason: str) -> None:
        """Records channels that were never followed, for the report."""
        self.pin(self.fresh(channels), reason)

    def misuse(self, tensor: Weight | Buffer, reason: str) -> None:
        """A parameter or buffer read in a way no rule knows: every unit it touches elsewhere is pinned."""
        self.misused.setdefault(tensor.name, PinnedAt(torch.empty(0), self.operation, self.where, reason))

    def channels(self, x: Activation, axis: int, n: int) -> Tensor:
        """Ids of the `n` channels of `x` along `axis` (from the end), `(n,)`; zeros if they had to be pinned."""
        if not ranked(x):
            return torch.zeros(n, dtype=torch.long)
        ids = x.ids
        if x.spread and axis == -1 and n % ids.shape[-1] == 0 and ids.numel() == ids.shape[-1]:
            return ids.reshape(-1).repeat_interleave(n // ids.shape[-1])
        if not x.spread and ids.dim() >= -axis and ids.numel() == ids.shape[axis]:
            size = ids.shape[axis]
            if size == n or (size == 1 and x.shape[axis] == n):
                return ids.reshape(-1).expand(n)
        self.pin(x, f"{self.operation} does not contract the dimension that holds these units")
        return torch.zeros(n, dtype=torch.long)

    def weight(self, w: Weight, head: Tensor, tail: Tensor, groups: int, swap: bool = False) -> None:
        """A parameter used as edges from `tail` to `head`."""
        self._use(w.name, head.reshape(groups, -1), tail.reshape(groups, -1), swap != w.swap)

    def vector(self, w: Weight, head: Tensor, affine: bool = False) -> None:
        """A parameter with one entry per unit of `head`, as edges from ground: a bias, or BatchNorm's γ and β."""
        self._use(w.name, head.reshape(1, -1), torch.zeros(1, 1, dtype=torch.long), False, affine)

    def _use(self, name: str, head: Tensor, tail: Tensor, swap: bool, affine: bool = False) -> None:
        self.uses.append(Use(name, head, tail, swap, self.position, affine))
        self.position += 1


def along(ids: Tensor, rank: int, axis: int) -> Tensor:
    """`(n,)` ids laid along `axis` (from the end) of an activation of `rank` dimensions."""
    shape = [1] * rank
    shape[axis] = ids.numel()
    return ids.reshape(shape)


def compress(ids: Tensor) -> Tensor:
    """The smallest tensor that broadcasts to `ids`: size 1 along every dimension where the id does not change."""
    for dim in range(ids.dim()):
        first = ids.narrow(dim, 0, 1) if ids.shape[dim] else ids
        if ids.shape[dim] > 1 and bool((ids == first).all()):
            ids = first
    return ids.clone()


def grounded(shape: Sequence[int | None] | None) -> Activation:
    """A value that no scale changes."""
    return Activation() if shape is None else Activation(torch.zeros([1] * len(shape), dtype=torch.long), tuple(shape))
