"""Tells whether a model still holds the parameters and submodules it held when it was looked at."""

from itertools import chain
from operator import is_

from torch import nn


class Held:
    """What the modules of a model hold now."""

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
