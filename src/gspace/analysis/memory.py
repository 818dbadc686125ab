"""Shadow memory: for every storage the nodes of its elements, so that views and writes through them need no rule.

A shadow is written with the geometry (sizes, strides, offset) of the tensor that was written, and read with that of any
other view of the same storage. Nodes that do not change along a dimension are kept expanded (stride 0). The shadow of a
parameter, and of a copy of one, is `Raw`: a place in the parameter, for which no node is made before one is needed.
"""

from collections.abc import Callable, Sequence
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
        place, content = geometry(t), shadow.content
        if place == shadow[2:5]:
            return content
        parts = locate(place, shadow[2:5], content.stride())
        if parts is None:
            return self._flat(t, shadow).as_strided(*place)
        joined = [_joined(*walk) for walk in zip(*parts[:2], strict=True)]
        split, steps = ([part[k] for walk in joined for part in walk] for k in (0, 1))
        if isinstance(content, Raw):
            simple = len(split) == t.dim()
            return content.as_strided(split, steps, parts[2]) if simple else self._flat(t, shadow).as_strided(*place)
        if t.shape == content.shape[::-1] and steps == list(content.stride()[::-1]):
            return content.permute(*reversed(range(content.dim())))
        found = content.as_strided(split, steps, parts[2] + int(content.storage_offset()))
        return found if found.shape == t.shape else found.reshape(t.shape)

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


def _joined(sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Parts that can be walked as one."""
    found: list[tuple[int, int]] = []
    for n, step in zip(sizes, strides, strict=True):
        whole = found and found[-1][1] == n * step
        found = [*found[:-1], (found[-1][0] * n, step)] if whole else [*found, (n, step)]
    return found


Place = tuple[Sizes, Sizes, int]  # sizes, strides, offset


def locate(place: Place, there: Place, inner: Sequence[int]) -> tuple[list[list[int]], list[list[int]], int] | None:
    """A view in terms of another one, `there`, whose elements lie elsewhere with strides `inner`.

    For each dimension of the view parts with their sizes and strides there, and the place of the first element. A
    dimension walks along one dimension of the other view, or along several that it has merged, innermost last. None:
    it does neither.
    """
    (sizes, strides, offset), (written, steps, begin) = place, there
    dims = sorted(((step, n, far) for n, step, far in zip(written, steps, inner, strict=True) if n > 1), reverse=True)
    start, at = 0, offset - begin
    if at < 0:
        return None
    room = []
    for step, n, far in dims:
        first = min(at // step, n - 1) if step else 0
        at -= first * step
        start += first * far
        room.append(n - first)
    if at:
        return None
    walks = [[(n, 0)] if n == 1 or stride == 0 else _walk(n, stride, dims, room)
             for n, stride in zip(sizes, strides, strict=True)]  # fmt: skip
    found = [walk for walk in walks if walk is not None]
    if len(found) < len(walks):
        return None
    return [[n for n, _ in walk] for walk in found], [[step for _, step in walk] for walk in found], start


def _walk(n: int, stride: int, dims: Sequence[tuple[int, int, int]], room: list[int]) -> list[tuple[int, int]] | None:
    """Sizes and strides of the parts that n steps of `stride` walk along."""
    parts: list[tuple[int, int]] = []
    for k in reversed(range(len(dims))):
        step, size, far = dims[k]
        if step == 0 or stride % step or stride // step >= size:
            continue
        jump = stride // step
        if jump * (n - 1) < room[k]:
            room[k] -= jump * (n - 1)
            return [(n, jump * far), *parts]
        if room[k] != size or size % jump or n % (size // jump):
            return None  # begins in the middle of a row and goes over its end
        parts = [(size // jump, jump * far), *parts]
        room[k] = min(jump, room[k])
        n, stride = n // (size // jump), step * size
        if k == 0 or dims[k - 1][0] != stride:
            return None
    return None
