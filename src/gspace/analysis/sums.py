"""The other meaning of a run: sums over paths, Σ |v(path)|^p, in place of values.

`Sums` is a `Run` whose shadows are sums. Every parameter w enters as |w|^p and every input as ones. Rules (`pathrules`)
compute with them by torch's own operations, and a `tape` writes down what they do, to be done again for other
weights and another p without the model. All of it is in float64: weights that are rescaled by 1e±6 keep their digits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gspace.analysis.forward import PathError
from gspace.analysis.memory import Memory, key_of
from gspace.analysis.run import Call, Run, facts
from gspace.analysis.tape import Tape
from gspace.sharding import whole

LAYERS = 6  # products in a row before a sum is renormalized
NOTHING = -1e30  # the exponent of zeros: they hide nothing small beside them
CHOSEN = "which entries are chosen depends on the input"
CHANCE = "it depends on chance"
READ = "its values are read outside of the network"


class Power(NamedTuple):
    """Sums of |v|^p: values · 2^exponent, nowhere negative.

    Attributes:
        values: Any shape.
        exponent: A scalar, which is a constant to autograd: the product does not depend on it. None stands for 0.
        layers: Products of weights since it was renormalized.
    """

    values: Tensor
    exponent: Tensor | None = None
    layers: int = 0

    def at(self, exponent: Tensor | None) -> Tensor:
        """The values that go with another exponent."""
        if exponent is self.exponent or exponent is None:
            return self.values
        return self.values * torch.exp2(-exponent if self.exponent is None else self.exponent - exponent)

    def renormalized(self) -> "Power":
        """The same number with its largest entry in [½, 1)."""
        shift = torch.frexp(self.values.amax()).exponent.double()
        return Power(self.values * torch.exp2(-shift), shift if self.exponent is None else self.exponent + shift)


def merged(function: Callable[..., Tensor], *xs: Power) -> Power:
    """A function that moves or adds entries, on values with one exponent."""
    found = [x.exponent for x in xs if x.exponent is not None]
    if found and len(found) < len(xs):
        found.append(torch.zeros_like(found[0]))
    common = None if not found else torch.stack(found).amax() if len(found) > 1 else found[0]
    return Power(function(*(x.at(common) for x in xs)), common, max(x.layers for x in xs))


def multiplied(function: Callable[..., Tensor], x: Power, y: Power) -> Power:
    """A function that is linear in both."""
    x, y = (z.renormalized() if z.layers >= LAYERS and z.values.numel() else z for z in (x, y))
    shift = y.exponent if x.exponent is None else x.exponent if y.exponent is None else x.exponent + y.exponent
    return Power(function(x.values, y.values), shift, max(x.layers, y.layers) + 1)


class Sums(Run):
    """Sums over the paths of one run.

    Attributes:
        p: The exponent, a scalar on the tape.
    """

    def __init__(self, rules: dict[str, Any], p: Tensor) -> None:
        super().__init__(rules, Memory(lambda t: self.constant(_all_of(t)).values))
        self.tape = Tape(lambda t: t in self.memory)
        self.p = self.tape.enter(p)
        self.starts = False  # a path starts here: a constant is contracted with a weight
        self._scales: dict[int, tuple[Tensor | None, int]] = {}

    def is_activation(self, t: Any) -> bool:
        return isinstance(t, Tensor) and t in self.memory and self.depends_on_data(t)

    def is_weight(self, t: Any) -> bool:
        return isinstance(t, Tensor) and t in self.memory and not self.depends_on_data(t)

    def constant(self, t: Tensor | float) -> Power:
        """|t|^p of a fixed number."""
        wide = (
            t.double() if isinstance(t, Tensor) else torch.tensor(float(t), dtype=torch.float64, device=self.p.device)
        )
        fixed = wide not in self.tape
        if fixed and not bool(wide.isfinite().all()):
            raise self.refusal("an infinite number or NaN meets activations")
        values = wide.abs().pow(self.p)
        return Power(values, values.new_full((), NOTHING) if fixed and not bool(wide.any()) else None)

    def read(self, t: Any) -> Power:
        """The sums of a tensor or number."""
        if not isinstance(t, Tensor) or t not in self.memory:
            return self.constant(t)
        found = self.memory.read(t)
        if not isinstance(found, Tensor):
            raise self.refusal("it reads memory in a dtype of another size")
        return Power(found, *self._scales[key_of(t)])

    def write(self, t: Tensor, x: Power | None) -> None:
        if x is None:
            self.memory.write(t, None)
            return
        if t.numel() * t.element_size() != t.untyped_storage().nbytes():  # one exponent for all that is there
            base = merged(lambda there, new: there, self.read(_all_of(t)), x)
            self.memory.write(_all_of(t), base.values.contiguous())
            x = Power(x.at(base.exponent), base.exponent, base.layers)
        self.memory.write(t, (x.values if x.values.shape == t.shape else x.values.expand(t.shape)).contiguous())
        self._scales[key_of(t)] = x.exponent, x.layers

    # The run ----------------------------------------------------------------------------------------------------------

    def applied(self, rule: Any, call: Call) -> Any:
        """A rule, or the reason why there is none; what data or chance have chosen has no paths."""
        if not callable(rule):
            raise self.refusal(rule)
        for t in tree_leaves(call.args):
            if (
                isinstance(t, Tensor)
                and t not in self.memory
                and (self.depends_on_data(t) or self.depends_on_chance(t))
            ):
                raise self.refusal(CHANCE if self.depends_on_chance(t) else CHOSEN)
        return rule(self, call)

    def settle(self, name: str, tensors: Sequence[Any], outs: Sequence[Tensor], results: Sequence[Any]) -> None:
        for t, result in zip(outs, results, strict=False):
            self.write(t, result)
        self.given(outs if self.starts else ())
        self.starts = False

    def escaped(self, t: Tensor, name: str) -> None:
        self.operation = name
        raise self.refusal(READ)

    def branched(self, chance: bool) -> None:
        raise self.refusal(CHANCE if chance else CHOSEN)

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = super()._dispatch(func, args, kwargs)
        if facts(func)[0] in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"):
            tree_map(Tensor.zero_, out)
        return out

    def refusal(self, reason: str) -> PathError:
        module, kind = self.modules[-1] if self.modules else ("the model", "")
        return PathError(
            f"no sum over paths: {module!r} ({kind}), {self.operation}: {reason}.\n"
            "Only positively homogeneous operations pass values along paths: replace this one, or measure the parts "
            "before and behind it."
        )


def power(t: Tensor, p: float) -> Tensor:
    """|t|^p in float64, of all of t if it is sharded."""
    t = whole(t)
    wide = (t.abs() if t.is_complex() else t).double().contiguous()
    if p == 2:
        return wide.square() if wide is t or wide.requires_grad else wide.square_()
    return wide.abs() if p == 1 else wide.abs().pow(p)


def _all_of(t: Tensor) -> Tensor:
    """The storage of a tensor, one element after the other."""
    n = t.untyped_storage().nbytes() // t.element_size()
    return t.detach().as_strided((n,), (1,), 0)
