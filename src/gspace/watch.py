"""What others have changed in a model since an optimizer last looked at it."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

_EXPIRED = torch.UntypedStorage._expired
_VERSION, _DTYPE, _TRAINED = attrgetter("_version"), attrgetter("dtype"), attrgetter("requires_grad")


def fingerprint(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """What tells that one of them was written to, or lies elsewhere."""
    return [(t._version, t.data_ptr()) for t in tensors]


class Watch:
    """The parameters of an optimizer; each question names a way in which others change them.

    Attributes:
        weights: Those whose values matter from step to step.
        trained: Which parameters were trained, in the order of the groups.
    """

    _storages: Sequence[int] = ()  # a copy has none yet: its weights lie elsewhere, which is noticed too

    def __init__(self, model: nn.Module, groups: Sequence[Mapping[str, Any]], weights: Sequence[Tensor]) -> None:
        self.weights = weights
        self._held = Held(model)
        self._listed = [p for group in groups for p in group["params"]]
        self._sizes = [len(group["params"]) for group in groups]
        self.trained = list(map(_TRAINED, self._listed))
        self._home = [(w.device, w.dtype) for w in weights]
        self._seen: tuple[list[Any], ...] | None = None
        self.know_memory()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_memory", "_storages")}

    def know_memory(self) -> None:
        """Once the memory of a weight is gone, what others assign to it may come to lie at the same address."""
        self._memory = [StorageWeakRef(w.untyped_storage()) for w in self.weights]
        self._storages = [memory.cdata for memory in self._memory]

    def mark(self) -> None:
        """The weights are what they should be."""
        self._seen = self._now()

    def forget(self) -> None:
        """Nobody knows what the weights are."""
        self._seen = None

    def replaced(self) -> str | None:
        """The name of a module or parameter that is another object than it was."""
        return self._held.changed()

    def regrouped(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the list of parameters of a group is another one."""
        sizes = [len(group["params"]) for group in groups]
        here = (p for group in groups for p in group["params"])
        return sizes != self._sizes or not all(map(is_, here, self._listed))

    def thawed(self) -> bool:
        """Whether a parameter is trained that was not, or the other way round."""
        return list(map(_TRAINED, self._listed)) != self.trained

    def moved(self) -> bool:
        """Whether a weight is on another device, or of another dtype."""
        return [(w.device, w.dtype) for w in self.weights] != self._home

    def rewritten(self) -> bool:
        """Whether a weight was written to since `mark`, or assigned, or moved."""
        return self._seen != self._now() or any(map(_EXPIRED, self._storages))

    def _now(self) -> tuple[list[Any], ...]:
        weights = self.weights
        return list(map(_VERSION, weights)), list(map(Tensor.data_ptr, weights)), list(map(_DTYPE, weights))


class Held:
    """The parameters and submodules that the modules of a model hold now."""

    def __init__(self, model: nn.Module) -> None:
        self.seen = [
            (path, owner, dict(owner))
            for path, m in model.named_modules()
            for owner in (m._parameters, m._modules)
            if isinstance(owner, dict)  # a scripted module has others: changes in it are not noticed
        ]
        self.owners = [owner for _, owner, _ in self.seen]
        self.sizes = list(map(len, self.owners))
        self.filled = [owner for owner in self.owners if owner]
        self.names = [name for owner in self.filled for name in owner]
        self.values = [value for owner in self.filled for value in owner.values()]

    def changed(self) -> str | None:
        """The name of something that is not what it was, None if there is nothing."""
        if self._same():
            return None
        for path, owner, seen in self.seen:
            for name in (*seen, *owner):
                if name not in owner or name not in seen or owner[name] is not seen[name]:
                    return f"{path}.{name}".strip(".")
        return None

    def _same(self) -> bool:
        """Whether every module holds the same objects under the same names in the same order: the usual case, fast."""
        return (
            list(map(len, self.owners)) == self.sizes
            and all(map(is_, chain.from_iterable(map(dict.values, self.filled)), self.values))
            and all(map(is_, chain.from_iterable(self.filled), self.names))
        )
