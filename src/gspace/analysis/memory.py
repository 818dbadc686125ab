"""Shadow memory: what is known of the elements of every storage, so that views and writes through them need no rule.

A `Plane` is written with the geometry (sizes, strides, offset) of one tensor and read with that of any other view of
the same memory. What does not change along a dimension is kept with size 1 there. The shadow of a parameter, and of a
copy of one, is `Raw`: a place in the parameter, for which no node is made before one is needed.
"""

import math
from collections.abc import Callable, Container, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Sizes = tuple[int, ...]
Place = tuple[Sizes, Sizes, int]  # sizes, strides, offset: the element at index i is at offset + Σ i·strides
Part = tuple[int, int, int]  # n steps along dimension d, each `jump` indices long


class Raw(NamedTuple):
    """Elements of a parameter's storage, not yet read."""

    key: int
    sizes: Sizes
    strides: Sizes
    offset: int

    def unsqueeze(self, d: int) -> "Raw":
        sizes, strides = list(self.sizes), list(self.strides)
        sizes.insert(d, 1)
        strides.insert(d, 0)
        return self._replace(sizes=tuple(sizes), strides=tuple(strides))

    def seen(self, place: Place, there: Place) -> "Raw | None":
        """The part of it that a view reads; None if that is no strided block."""
        found = locate(place, there)
        if found is None or any(len(walk) > 1 for walk in found[0]):
            return None
        strides = tuple(jump and jump * self.strides[d] for ((_, d, jump),) in found[0])
        start = sum(map(math.prod, zip(found[1], self.strides, strict=True)))
        return Raw(self.key, place[0], strides, self.offset + start)


def key_of(t: Tensor) -> int:
    """Identifies a storage while a `StorageWeakRef` to it is held; 0 for a sparse tensor, which has none."""
    return t.untyped_storage()._cdata if t.layout is torch.strided else 0


def geometry(t: Tensor) -> Place:
    return tuple(t.shape), tuple(t.stride()), int(t.storage_offset())


class Plane:
    """One thing for each element at `place`."""

    def __init__(self, place: Place, content: Tensor) -> None:
        self.place, self.content = place, content

    def read(self, place: Place) -> Tensor:
        """That of a view, of size 1 along dimensions in which it is known not to change."""
        if place == self.place:
            return self.content
        if self.content.numel() == 1:
            return self.content.reshape([1] * len(place[0]))
        walks, start = self._walks(place)
        return _strided(self.content, walks, start).reshape(
            [math.prod(n for n, _, _ in walk) if _varies(self.content, walk) else 1 for walk in walks]
        )

    def write(self, place: Place, content: Tensor) -> None:
        """Dimensions that are written in part, or along which the content changes, are kept whole from now on."""
        if place == self.place and content.dim() == len(place[0]):
            self.content = content
            return
        walks, start = self._walks(place)
        sizes = self.place[0]
        parts = [part for walk in walks for part in walk]
        whole = [math.prod(n for n, at, _ in parts if at == d) == size for d, size in enumerate(sizes)]
        changes = {d for n, walk in zip(content.shape, walks, strict=True) if n > 1 for _, d, _ in walk}
        wide = [n > 1 or not whole[d] or d in changes for d, n in enumerate(self.content.shape)]
        shape = [n if keep else 1 for n, keep in zip(sizes, wide, strict=True)]
        self.content = self.content.expand(shape).clone(memory_format=torch.contiguous_format)
        walks = [[(n if jump and shape[d] > 1 else 1, d, jump) for n, d, jump in walk] for walk in walks]
        split = [n if size > 1 else 1 for size, walk in zip(content.shape, walks, strict=True) for n, _, _ in walk]
        _strided(self.content, walks, start).copy_(content.reshape(split))

    def _walks(self, place: Place) -> tuple[list[list[Part]], list[int]]:
        """Where a view lies; if that cannot be said in terms of the dimensions, all is one long row from now on."""
        found = locate(place, self.place)
        if found is None:
            sizes, strides, offset = self.place
            row = self.content.new_zeros(sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) + 1)
            row.as_strided(sizes, strides, 0).copy_(self.content)
            self.place, self.content = ((len(row),), (1,), offset), row
            found = locate(place, self.place)
        assert found is not None
        return found


def _varies(content: Tensor, walk: Sequence[Part]) -> bool:
    return any(jump and content.shape[d] > 1 and content.stride(d) for _, d, jump in walk)


def _strided(content: Tensor, walks: Sequence[Sequence[Part]], start: Sequence[int]) -> Tensor:
    """A view of `content` with a dimension for each part, of size 1 where no part of a walk changes it."""
    steps = [0 if n == 1 else step for n, step in zip(content.shape, content.stride(), strict=True)]
    offset = int(content.storage_offset()) + sum(map(math.prod, zip(start, steps, strict=True)))
    parts = [(n if _varies(content, walk) else 1, jump and jump * steps[d]) for walk in walks for n, d, jump in walk]
    return content.as_strided([n for n, _ in parts], [step for _, step in parts], offset)


class Shadow(NamedTuple):
    """What is known of a storage."""

    storage: StorageWeakRef
    itemsize: int
    place: Place
    content: Plane | Raw


class Memory:
    """The shadows of all storages that hold anything but ground."""

    def __init__(self, blank: Callable[[Tensor], Tensor], made: Callable[[Raw], Tensor] | None = None) -> None:
        self.shadows: dict[int, Shadow] = {}
        self._blank = blank  # what elements of a storage are that nothing was written to
        self._made = made  # the nodes of a parameter's elements

    def __contains__(self, t: Tensor) -> bool:
        return key_of(t) in self.shadows

    def __len__(self) -> int:
        return len(self.shadows)

    def read(self, t: Tensor) -> Tensor | Raw | None:
        """What is known of `t`; None: nothing, or it is memory of another element size."""
        shadow = self.shadows.get(key_of(t))
        if shadow is None or shadow.itemsize != t.element_size():
            return None
        if not t.numel():
            return self._blank(t).new_zeros(t.shape)
        if isinstance(shadow.content, Raw):
            found = shadow.content.seen(geometry(t), shadow.place)
            if found is not None:
                return found
        return self.plane(t).read(geometry(t)).expand(t.shape)

    def plane(self, t: Tensor) -> Plane:
        """The shadow of a storage as a plane."""
        shadow = self.shadows[key_of(t)]
        if isinstance(shadow.content, Plane):
            return shadow.content
        made = Plane(shadow.place, self.nodes(shadow.content))
        self.shadows[key_of(t)] = shadow._replace(content=made)
        return made

    def nodes(self, content: Tensor | Raw) -> Tensor:
        if isinstance(content, Tensor):
            return content
        assert self._made is not None
        return self._made(content)

    def write(self, t: Tensor, content: Tensor | Raw | None) -> None:
        """`content` broadcasts to the sizes of `t`; None: there is nothing to know."""
        key, place, storage = key_of(t), geometry(t), t.untyped_storage()
        known: Plane | Raw
        if t.numel() * t.element_size() == storage.nbytes():
            if content is None:
                self.shadows.pop(key, None)
                return
            known = Plane(place, content.expand(place[0])) if isinstance(content, Tensor) else content
        elif content is None and key not in self.shadows:
            return
        else:
            row = ((storage.nbytes() // t.element_size(),), (1,), 0)
            known = self.plane(t) if key in self.shadows else Plane(row, self._blank(t))
            new = Plane(row, self._blank(t)).read(place) if content is None else self.nodes(content)
            known.write(place, new.expand(place[0]))
            place = known.place
        self.shadows[key] = Shadow(StorageWeakRef(storage), t.element_size(), place, known)

    def keep(self, keys: Container[int]) -> None:
        """Drops the shadows of all other storages."""
        self.shadows = {key: shadow for key, shadow in self.shadows.items() if key in keys}

    def forget(self) -> None:
        """Drops the shadows of storages that are gone."""
        for key in [key for key, shadow in self.shadows.items() if shadow.storage.expired()]:
            del self.shadows[key]


@lru_cache(1 << 14)
def locate(place: Place, there: Place) -> tuple[list[list[Part]], list[int]] | None:
    """A view in terms of the dimensions of another one: for each dimension of the view a walk, and where it starts.

    A dimension walks along one dimension of the other view, or along several that it has merged, innermost last. None:
    it does neither.
    """
    (sizes, strides, offset), (written, steps, begin) = place, there
    start, room, at = [0] * len(written), list(written), offset - begin
    dims = sorted((d for d, n in enumerate(written) if n > 1), key=lambda d: (-steps[d], -written[d]))
    if at < 0:
        return None
    for d in dims:
        start[d] = min(at // steps[d], written[d] - 1) if steps[d] else 0
        at -= start[d] * steps[d]
        room[d] -= start[d]
    if at:
        return None
    walks = []
    for n, stride in zip(sizes, strides, strict=True):
        walk = [(n, 0, 0)] if n == 1 or stride == 0 else _walk(n, stride, dims, there, room)
        if walk is None:
            return None
        walks.append(walk)
    return walks, start


def _walk(n: int, stride: int, dims: Sequence[int], there: Place, room: list[int]) -> list[Part] | None:
    """The parts that n steps of `stride` walk along."""
    sizes, steps, _ = there
    parts: list[Part] = []
    for k in reversed(range(len(dims))):
        d, size, step = dims[k], sizes[dims[k]], steps[dims[k]]
        if step == 0 or stride % step or stride // step >= size:
            continue
        jump = stride // step
        if jump * (n - 1) < room[d]:
            room[d] -= jump * (n - 1)
            return [(n, d, jump), *parts]
        if room[d] != size or size % jump or n % (size // jump):
            return None  # begins in the middle of a row and goes over its end
        parts = [(size // jump, d, jump), *parts]
        room[d] = min(jump, room[d])
        n, stride = n // (size // jump), step * size
        if k == 0 or steps[dims[k - 1]] != stride:
            return None
    return None
