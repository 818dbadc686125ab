"""Rules for what is read from a value beside its entries: sizes and attributes."""

from typing import Any

from gspace.graph import movement
from gspace.graph.arithmetic import opaque, same
from gspace.graph.spaces import Activation, Buffer, DType, Parts, Rule, Size, Walk, Weight


def size(walk: Walk, x: Any, dim: int | None = None) -> Any:
    """Sizes, as numbers where they are known. The leading one of an input says nothing of the batch of what follows:
    frames of a video, for example, may be folded into it."""
    if isinstance(x, (Weight, Buffer)):
        sizes: Any = x.shape
    elif not isinstance(x, Activation) or x.shape is None:
        return Size() if dim is not None else Parts(Activation())
    else:
        found = (Size(x.lead if d == 0 else 0) if s is None else s for d, s in enumerate(x.shape))
        sizes = _FromTheEnd(found) if x.loose else tuple(found)
    return sizes if dim is None else sizes[dim]


class _FromTheEnd(tuple[Any, ...]):
    """Sizes of an activation that may have more dimensions in front: which one a positive number means is not known."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self._part(key)
        if key > 0 or not -len(self) <= key:
            return Size()
        found = super().__getitem__(key)
        return found if isinstance(found, Size) == (key == 0) else Size()  # only the first is the leading one

    def _part(self, key: slice) -> Any:
        if all(n is None or n < 0 for n in (key.start, key.stop)):
            found = super().__getitem__(key)
            return _FromTheEnd(found) if key.start is None else tuple(found)
        if key.start in (None, 0) and key.stop is not None and key.stop > 0:
            return tuple(self[n] for n in range(key.stop))
        return Parts(Activation())


def rank(walk: Walk, x: Any) -> Any:
    return len(x.shape) if x.shape is not None and not x.loose else Size()


def attribute(walk: Walk, x: Any, name: str) -> Any:
    rules: dict[str, Rule] = {
        "shape": size,
        "T": movement.reverse,
        "mT": lambda w, v: movement.transpose(w, v, -1, -2),
        "data": same,
        "device": lambda w, v: None,
        "dtype": lambda w, v: None if isinstance(v, Activation) and not v.grounded else DType(),
        "ndim": rank,
        "requires_grad": lambda w, v: None,
        "values": lambda w, v: v[0],  # of max, min over a dimension
        "indices": lambda w, v: v[1],
    }
    return rules[name](walk, x) if name in rules else opaque(walk, x, reason=f"its attribute {name!r} is read")
