"""Shadow memory: for every storage the nodes of its elements, so that views and writes through them need no rule.

A shadow is written with the geometry (sizes, strides, offset) of the tensor that was written, and read with that of any
other view of the same storage. Nodes that do not change along a dimension are kept expanded (stride 0). The shadow of a
parameter, and of a copy of one, is `Raw`: a place in the parameter, for which no node is made before one is needed.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Sizes = tuple[int, ...]


class Raw(NamedTuple):
    """Elements of a parameter's storage, not yet read: the element at index i is at `offset` + Σ i·strides."""

    key: int
    sizes: Sizes
    strides: Sizes
    offset: int

    def stride(self) -> Sizes:
        return self.strides

    def as_strided(self, size: Sequence[int], stride: Sequence[int], storage_offset: int) -> "Raw":
        return Raw(self.key, tuple(size), tuple(stride), self.offset + storage_offset)


class Shadow(NamedTuple):
    """What was written to a storage: `content` with the sizes of the tensor, and where that tensor lies."""

    storage: StorageWeakRef
    itemsize: int
    sizes: Sizes
    strides: Sizes
    offset: int
    content: Tensor | Raw


def key_of(t: Tensor) -> int:
    """Identifies a storage while a `StorageWeakRef` to it is held; 0 for a sparse tensor, which has none."""
    return t.untyped_storage()._cdata if t.layout is torch.strided else 0


def geometry(t: Tensor) -> tuple[Sizes, Sizes, int]:
    return tuple(t.shape), tuple(t.stride()), int(t.storage_offset())


class Memory:
    """The shadows of all storages that hold anything but ground."""

    def __init__(self, blank: Callable[[Tensor], Tensor], made: Callable[[Raw], Tensor] | None = None) -> None:
        self.shadows: dict[int, Shadow] = {}
        self._blank = blank  # what elements of a storage are that nothing was written to
        self._made = made  # the nodes of a parameter's elements

    def __contains__(self, t: Tensor) -> bool:
        return key_of(t) in self.shadows

    def read(self, t: Tensor) -> Tensor | Raw | None:
        """The nodes of `t`; None: ground, or memory of another element size."""
        shadow = self.shadows.get(key_of(t))
        if shadow is None or shadow.itemsize != t.element_size():
            return None
        sizes, strides, offset = geometry(t)
        if (sizes, strides, offset) == shadow[2:5]:
            return shadow.content
        parts = locate(sizes, strides, offset, shadow)
        if parts is None:
            return self._flat(t, shadow).as_strided(sizes, strides, offset)
        split, steps, start = parts
        content = shadow.content
        if isinstance(content, Tensor):
            if sizes == content.shape[::-1] and [s for ss in steps for s in ss] == list(content.stride()[::-1]):
                return content.permute(*reversed(range(content.dim())))
            start += int(content.storage_offset())
            found = content.as_strided([n for ns in split for n in ns], [s for ss in steps for s in ss], start)
            return found if found.shape == t.shape else found.reshape(sizes)
        merged = [_merge(ns, ss) for ns, ss in zip(split, steps, strict=True)]
        if None in merged:
            return self._flat(t, shadow).as_strided(sizes, strides, offset)
        return content.as_strided(sizes, [s for s in merged if s is not None], start)

    def write(self, t: Tensor, content: Tensor | Raw | None) -> None:
        """`content` has the sizes of `t`, or is to be expanded to them; None: there is nothing to know."""
        key, (sizes, strides, offset) = key_of(t), geometry(t)
        storage, old = t.untyped_storage(), self.shadows.get(key)
        whole = t.numel() * t.element_size() == storage.nbytes()
        if content is None:
            if whole or old is None:
                self.shadows.pop(key, None)
                return
            content = self._blank(t).as_strided(sizes, strides, offset)
        if isinstance(content, Tensor) and content.shape != t.shape:
            content = content.expand(sizes)
        if not whole:
            flat = self._blank(t) if old is None else self._flat(t, old).clone()
            flat.as_strided(sizes, strides, offset).copy_(self.nodes(content))
            sizes, strides, offset, content = (len(flat),), (1,), 0, flat
        self.shadows[key] = Shadow(StorageWeakRef(storage), t.element_size(), sizes, strides, offset, content)

    def nodes(self, content: Tensor | Raw) -> Tensor:
        """Nodes as a tensor."""
        if isinstance(content, Tensor):
            return content
        assert self._made is not None
        return self._made(content)

    def _flat(self, t: Tensor, shadow: Shadow) -> Tensor:
        """What is known of the whole storage, element by element; kept instead of what was written."""
        flat = self._blank(t)
        flat.as_strided(shadow.sizes, shadow.strides, shadow.offset).copy_(self.nodes(shadow.content))
        self.shadows[key_of(t)] = shadow._replace(sizes=(len(flat),), strides=(1,), offset=0, content=flat)
        return flat

    def forget(self) -> None:
        """Drops the shadows of storages that are gone."""
        for key in [key for key, shadow in self.shadows.items() if shadow.storage.expired()]:
            del self.shadows[key]


def locate(
    sizes: Sizes, strides: Sizes, offset: int, shadow: Shadow
) -> tuple[list[list[int]], list[list[int]], int] | None:
    """A view in terms of what was written: for each of its dimensions, parts with their sizes and content strides.

    A dimension of the view walks along one dimension of the writer, or along several that it has merged, innermost
    last. None: it does neither.
    """
    dims = sorted(
        ((step, n, inner) for n, step, inner in zip(shadow.sizes, shadow.strides, shadow.content.stride(), strict=True)
         if n > 1),
        reverse=True,
    )  # fmt: skip
    start, at = 0, offset - shadow.offset
    if at < 0:
        return None
    room = []
    for step, n, inner in dims:
        first = min(at // step, n - 1) if step else 0
        at -= first * step
        start += first * inner
        room.append(n - first)
    if at:
        return None
    split, steps = [], []
    for n, stride in zip(sizes, strides, strict=True):
        if n == 1 or stride == 0:
            split.append([n])
            steps.append([0])
            continue
        parts = _walk(n, stride, dims, room)
        if parts is None:
            return None
        split.append([size for size, _ in parts])
        steps.append([step for _, step in parts])
    return split, steps, start


def _walk(n: int, stride: int, dims: Sequence[tuple[int, int, int]], room: list[int]) -> list[tuple[int, int]] | None:
    """(size, content stride) of each dimension of the writer that n steps of `stride` walk along."""
    parts: list[tuple[int, int]] = []
    for k in reversed(range(len(dims))):
        step, size, inner = dims[k]
        if step == 0 or stride % step or stride // step >= size:
            continue
        jump = stride // step
        if jump * (n - 1) < room[k]:
            room[k] -= jump * (n - 1)
            return [(n, jump * inner), *parts]
        if room[k] != size or size % jump or n % (size // jump):
            return None  # begins in the middle of a row and goes over its end
        parts = [(size // jump, jump * inner), *parts]
        room[k] = min(jump, room[k])
        n, stride = n // (size // jump), step * size
        if k == 0 or dims[k - 1][0] != stride:
            return None
    return None


def _merge(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of several dimensions walked as one; None: there is none."""
    for (outer, inner), n in zip(pairwise(strides), sizes[1:], strict=True):
        if outer != inner * n:
            return None
    return strides[-1]
