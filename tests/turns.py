"""Options take turns: of a product of parameters the default run takes a few combinations, the others are slow."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def chosen(axes: Sequence[Sequence[Any]], allowed: Callable[..., bool] = lambda *_: True) -> set[tuple[int, ...]]:
    """Indices of one combination for each entry of the longest axis.

    Each is the one whose other entries, and pairs of them, were least often chosen before: every entry has its turn.

    >>> sorted(chosen([["sgd", "adam", "path"], ["eager", "fused"]]))
    [(0, 0), (1, 1), (2, 0)]
    """
    longest = max(range(len(axes)), key=lambda k: len(axes[k]))
    every = [
        c for c in product(*(range(len(a)) for a in axes)) if allowed(*(a[i] for a, i in zip(axes, c, strict=True)))
    ]
    used: Counter[Any] = Counter()

    def parts(combination: tuple[int, ...]) -> list[Any]:
        entries = list(enumerate(combination))
        return entries + list(combinations(entries, 2))

    found = set()
    for i in range(len(axes[longest])):
        least = min((c for c in every if c[longest] == i), key=lambda c: sum(used[part] for part in parts(c)))
        used.update(parts(least))
        found.add(least)
    return found


def turns(
    names: str, *axes: Iterable[Any], allowed: Callable[..., bool] = lambda *_: True, **options: Any
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` by all combinations that are allowed, slow but for those that have their turn."""
    lists = [list(axis) for axis in axes]
    ours = chosen(lists, allowed)
    rows = []
    for indices in product(*map(range, map(len, lists))):
        values = [axis[i] for axis, i in zip(lists, indices, strict=True)]
        if allowed(*values):
            name = "-".join(str(getattr(value, "name", value)) for value in values)
            rows.append(pytest.param(*values, id=name, marks=[] if indices in ours else pytest.mark.slow))
    return pytest.mark.parametrize([name.strip() for name in names.split(",")], rows, **options)
