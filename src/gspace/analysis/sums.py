"""The other meaning of a run: sums over paths, Σ |v(path)|^p, in place of values.

The model runs on |w|^p in place of every parameter w, on ones in place of its inputs, and in float64: weights that are
rescaled by 1e±6 keep their digits. Then nothing is negative, and most operations do to sums what they do to values;
rules (`pathrules`) are for the others. A `tape` writes down what is done, to be done again for other weights and
another p without the model.

Sums of a deep network leave every range: those in a storage are what is there times 2^exponent.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gspace.analysis.forward import PathError
from gspace.analysis.memory import geometry, key_of
from gspace.analysis.run import Call, Run, facts
from gspace.analysis.tape import Tape, is_whole

LAYERS = 6  # products in a row before a sum is renormalized
NOTHING = -1e30  # the exponent of zeros: they hide nothing small beside them
EMPTY = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())
CHOSEN = "which entries are chosen depends on the input"
CHANCE = "it depends on chance"
READ = "its values are read outside of the network"


class Scale(NamedTuple):
    """Of the sums in a storage: an exponent, which is a constant to autograd (None: 0), and products in a row."""

    exponent: Tensor | None = None
    layers: int = 0


class Scales(dict[int, Scale]):
    """By storage; what is not here holds values. The tape keeps storages, so no number is used twice."""

    def __contains__(self, t: Any) -> bool:
        return isinstance(t, Tensor) and super().__contains__(key_of(t))

    def forget(self) -> None:
        """There is nothing to forget."""


class Sums(Run):
    """Sums over the paths of one run.

    Attributes:
        p: The exponent, a scalar on the tape.
    """

    def __init__(self, rules: dict[str, Any], p: Tensor) -> None:
        self.scales = Scales()
        super().__init__(rules, self.scales)
        self.tape = Tape()
        self.p = self.tape.enter(p)

    def is_activation(self, t: Any) -> bool:
        return t in self.scales and self.depends_on_data(t)

    def is_weight(self, t: Any) -> bool:
        return t in self.scales and not self.depends_on_data(t)

    # Arithmetic -------------------------------------------------------------------------------------------------------

    def mark(self, t: Tensor, exponent: Tensor | None = None, layers: int = 0) -> Tensor:
        """From now on its storage holds sums."""
        self.scales[key_of(t)] = Scale(exponent, layers)
        return t

    def constant(self, t: Tensor | float) -> Tensor:
        """|t|^p of a fixed number."""
        wide = t.double() if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64, device=self.p.device)
        fixed = wide not in self.tape
        if fixed and not bool(wide.isfinite().all()):
            raise self.refusal("an infinite number or NaN meets activations")
        values = wide.abs().pow(self.p)
        return self.mark(values, values.new_full((), NOTHING) if fixed and not bool(wide.any()) else None)

    def read(self, t: Any) -> Tensor:
        """The sums of a tensor or number; an integer that is an input counts as one."""
        if t not in self.scales:
            return self.constant(t)
        return t if t.is_floating_point() else self.constant(torch.ones(t.shape, device=t.device))

    def input(self, t: Tensor) -> Tensor:
        """Ones in place of an input of the model; its integers are what they are, and are read as ones."""
        like: Tensor = t.detach().clone()
        found = self.constant(torch.ones_like(like)) if t.is_floating_point() else self.mark(like)
        self.given([found])
        return found

    def merged(self, function: Callable[..., Tensor], *given: Any) -> Tensor:
        """A function that moves or adds entries: it takes them with one exponent."""
        xs = [self.read(t) for t in given]
        scales = [self.scales[key_of(x)] for x in xs]
        common = _common(s.exponent for s in scales)
        moved = (x if s.exponent is common else x * _ratio(s.exponent, common) for x, s in zip(xs, scales, strict=True))
        return self._made(xs, function(*moved), common, max(s.layers for s in scales))

    def multiplied(self, function: Callable[..., Tensor], *given: Any) -> Tensor:
        """A function that is linear in both of two."""
        x, y = (self._renormalized(self.read(t)) for t in given)
        (e, n), (f, m) = self.scales[key_of(x)], self.scales[key_of(y)]
        return self._made((x, y), function(x, y), f if e is None else e if f is None else e + f, max(n, m) + 1)

    def _made(self, xs: Sequence[Tensor], out: Tensor, exponent: Tensor | None, layers: int) -> Tensor:
        self.given([out] if any(map(self.depends_on_data, xs)) else [])
        return self.mark(out, exponent, layers)

    def _renormalized(self, t: Tensor) -> Tensor:
        """The same sums, with the largest in [½, 1), if it is time."""
        exponent, layers = self.scales[key_of(t)]
        if layers < LAYERS or not t.numel():
            return t
        shift = torch.frexp(t.amax()).exponent.double()
        return self.mark(t * torch.exp2(-shift), shift if exponent is None else exponent + shift)

    def store(self, t: Tensor, x: Tensor) -> None:
        """Writes sums into memory that is there, all of which has one exponent."""
        if not t.is_floating_point():
            raise self.refusal(CHOSEN)
        if not is_whole(t):
            n = t.untyped_storage().nbytes() // t.element_size()
            here = torch.arange(n, device=t.device).as_strided(
                *geometry(t)
            )  # `as_strided_scatter` has no right gradient
            t = t.detach().as_strided((n,), (1,), 0)
            x = self.merged(lambda there, new: there.index_put((here,), new.expand(here.shape)), t, x)
        self.tape.write(t, x)
        self.mark(t, *self.scales[key_of(x)])

    # The run ----------------------------------------------------------------------------------------------------------

    def applied(self, rule: Any, call: Call) -> Any:
        """What a rule makes, or the reason why there is none; what data or chance have chosen has no paths."""
        if not callable(rule):
            raise self.refusal(rule)
        for t in tree_leaves(call.args):
            if t not in self.scales and (self.depends_on_data(t) or self.depends_on_chance(t)):
                raise self.refusal(CHANCE if self.depends_on_chance(t) else CHOSEN)
        found = rule(self, call)
        if call.in_place and found is not None:
            self.store(call.get("out", "self"), found)
            return call.get("out", "self")
        return (found, *call.run()[1:]) if isinstance(found, Tensor) and call.results > 1 else found

    def outcome(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """That of a rule; memory that sums may be written to is wide, and empty memory is zero."""
        if result is not None:
            return result
        out, name = func(*args, **kwargs), facts(func)[0]
        if name in EMPTY:
            out.zero_()
        new = isinstance(out, Tensor) and not any(isinstance(t, Tensor) for t in tree_leaves(args))
        return out.double() if new and out.is_floating_point() else out

    def escaped(self, t: Tensor, name: str) -> None:
        self.operation = name
        raise self.refusal(READ)

    def branched(self, chance: bool) -> None:
        raise self.refusal(CHANCE if chance else CHOSEN)

    def refusal(self, reason: str) -> PathError:
        module, kind = self.modules[-1] if self.modules else ("the model", "")
        return PathError(
            f"no sum over paths: {module!r} ({kind}), {self.operation}: {reason}.\n"
            "Only positively homogeneous operations pass values along paths: replace this one, or measure the parts "
            "before and behind it."
        )


def _common(exponents: Any) -> Tensor | None:
    """The largest; None stands for 0."""
    listed = list(dict.fromkeys(exponents))
    found = [e for e in listed if e is not None]
    zeros = [torch.zeros_like(found[0])] if found and len(found) < len(listed) else []
    return None if not found else torch.stack(found + zeros).amax() if len(listed) > 1 else found[0]


def _ratio(exponent: Tensor | None, common: Tensor | None) -> Tensor:
    """What turns sums with one exponent into those with another."""
    assert common is not None
    return torch.exp2(-common if exponent is None else exponent - common)
