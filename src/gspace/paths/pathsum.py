"""Sums over all paths of a network, by one forward pass: Σ_paths |v(path)|^p = Σ_outputs f_{|w|^p}(1).

One run of the model says which steps the sum takes (`analysis.record`). They are then done for any p, with the weights
of the moment and without the model. As derivatives of the sum are sums over paths too, autograd through them gives
gradients of path norms and Path-SGD's κ.
"""

import functools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from gspace.analysis import refuse
from gspace.analysis.examples import few_rows, guesses, refusal
from gspace.analysis.forward import Inputs, TraceError, arguments, set_mode, tensors_in, untouched, unwrap
from gspace.analysis.operations import PATHS
from gspace.analysis.record import Kind, Outside, PathError, Record, Step
from gspace.analysis.sums import LARGE, Logs, Numbers, Power, fetched, power
from gspace.sharding import any_sharded, whole_copy

__all__ = ["PathError", "PathGraph", "Power", "as_input_of", "path_graph", "path_kappa"]


class Row(NamedTuple):
    """The use of a parameter in a linear layer of one row: the step, its place there, whether it was transposed."""

    register: int
    place: int
    turned: bool


@dataclass(frozen=True)
class PathGraph:
    """The path sum of a model, step by step. Weights are read from the model each time: it serves a whole training.

    Attributes:
        model: The model.
        steps: What to do, in order; the result of each is a register.
        outputs: The registers of the model's outputs.
        samples: How many samples they are of.
        rows: Leaves that are used once, in a linear layer of one row.
    """

    model: nn.Module
    steps: Sequence[Step]
    outputs: tuple[int, ...]
    samples: int
    rows: Mapping[int, Row]

    def sum(self, p: float = 2, powers: Mapping[int, Power] | None = None) -> Power:
        """Σ_paths |v|^p of one sample as a scalar `Power`; `powers` replaces |w|^p by the `id` of a parameter."""
        return self.run(p, powers or {})[0]

    def run(self, p: float, powers: Mapping[int, Power], watched: Container[int] = ()) -> tuple[Power, list[Any]]:
        """The sum, and all registers; autograd begins at those `watched` at the latest."""
        device = next((t.device for t in self.model.parameters()), torch.device("cpu"))
        kind: Any = Numbers if p <= LARGE else Logs
        sums = kind(p, device, powers)
        values: list[Any] = []
        for register, (method, inputs, constants) in enumerate(self.steps):  # in float64, which autocast leaves alone
            value = getattr(sums, method)(*[values[i] for i in inputs], *constants)
            if register in watched and not value.values.requires_grad:
                value.values.requires_grad_()
            values.append(value)
        total: Power = sums.total(*[values[i] for i in self.outputs])
        return total if self.samples == 1 else total._replace(values=total.values / self.samples), values

    def slopes(self) -> list[Tensor]:
        """Parameters that are the slopes of a PReLU: no edges, and no rescaling changes them."""
        found = {i for step in self.steps if step.method == "at_least_one" for i in step.inputs}
        for register in reversed(range(len(self.steps))):
            if register in found:
                found.update(self.steps[register].inputs)
        return [fetched(self.steps[i].constants[0]) for i in sorted(found) if self.steps[i].method == "leaf"]


def path_graph(model: nn.Module, example_input: Inputs | None = None) -> PathGraph:
    """Runs `model` once, in evaluation mode, and keeps what its path sum takes.

    Args:
        model: Any module whose operations are positively homogeneous.
        example_input: A batch the model accepts, of which one row is run if the model takes it alone. The sum is that
            of a sample of its size; values do not matter. Without one, inputs are guessed as in `analyze`.

    Raises:
        PathError: An operation has no path sum.
        TraceError: The model does not take the example, or none could be guessed.

    >>> graph = path_graph(nn.Linear(3, 2, bias=False))
    >>> [step.method for step in graph.steps]
    ['leaf', 'ones', 'moved', 'row']
    """
    inner = unwrap(model)
    refuse(inner)
    inner = whole_copy(inner) if any_sharded(inner) else inner
    with untouched(inner):
        set_mode(inner, False)
        if example_input is not None:
            return _recorded(model, inner, as_input_of(model, example_input))
        tried: list[tuple[Inputs, Exception]] = []
        for guess in guesses(inner):
            try:
                return _recorded(model, inner, guess)
            except TraceError as error:
                tried.append((guess, error))
        raise refusal(tried)


def as_input_of(model: nn.Module, inputs: Any) -> Any:
    """`inputs` with floating-point tensors in the dtype of the model: only their shapes matter."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    plain = dict(inputs) if isinstance(inputs, Mapping) else inputs
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, plain)


def _recorded(model: nn.Module, inner: nn.Module, batch: Inputs) -> PathGraph:
    """One row of the batch, or all of it where one is not taken."""
    one = few_rows(batch, 1)
    if one is not None:
        try:
            return _run(model, inner, one, 1)
        except TraceError:
            pass
    rows = [t.shape[0] for t in tree_leaves(arguments(batch)) if isinstance(t, Tensor) and t.dim()]
    return _run(model, inner, batch, rows[0] if rows else 1)


def _run(model: nn.Module, inner: nn.Module, batch: Inputs, samples: int) -> PathGraph:
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), arguments(batch))
    record = Record(PATHS)
    for name, t in [*inner.named_parameters(), *inner.named_buffers()]:
        if t.layout == torch.strided and t.numel():
            path, _, last = name.rpartition(".")
            record.enter(t, (unwrap(model).get_submodule(path), last))  # not that of a copy which was run
    for t in tree_leaves((args, kwargs)):
        if isinstance(t, Tensor):
            record.enter(t, None)
    try:
        with _named(record, inner), Outside(record), record:
            out = inner(*args, **kwargs)
    except (TraceError, PathError):
        raise
    except Exception as error:
        message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise TraceError(f"the model does not accept this example_input: {type(error).__name__}: {message}") from error
    outputs = [record.read(t) for t in tensors_in(out) if (x := record.find(t)) is not None and x.register >= 0]
    if not any(x.kind is Kind.ACTIVATION for x in outputs):
        raise PathError("no output of the model depends on its input")
    steps, registers = _needed(record.steps, [x.register for x in outputs])
    return PathGraph(model, steps, registers, samples, _rows(steps, registers))


def _needed(steps: Sequence[Step], outputs: Sequence[int]) -> tuple[list[Step], tuple[int, ...]]:
    """The steps that an output depends on."""
    used = set(outputs)
    for register in reversed(range(len(steps))):
        if register in used:
            used.update(steps[register].inputs)
    place = {register: k for k, register in enumerate(sorted(used))}
    kept = [steps[r]._replace(inputs=tuple(place[i] for i in steps[r].inputs)) for r in sorted(used)]
    return kept, tuple(place[r] for r in outputs)


def _rows(steps: Sequence[Step], outputs: Sequence[int]) -> dict[int, Row]:
    readers: dict[int, list[tuple[int, int]]] = {r: [(len(steps), 0)] * (r in outputs) for r in range(len(steps))}
    for register, step in enumerate(steps):
        for place, i in enumerate(step.inputs):
            readers[i].append((register, place))
    found = {}
    for leaf, step in enumerate(steps):
        uses, turned = readers[leaf], False
        if step.method == "leaf" and len(uses) == 1 and _is_transposition(steps, uses[0][0]):
            uses, turned = readers[uses[0][0]], True
        if len(uses) == 1 and uses[0][0] < len(steps) and steps[uses[0][0]].method == "row" and step.method == "leaf":
            found[leaf] = Row(*uses[0], turned)
    return found


def _is_transposition(steps: Sequence[Step], register: int) -> bool:
    """Whether a step that reads a leaf transposes it."""
    if register == len(steps) or steps[register].method != "moved" or steps[register].constants[0] != "reshaped":
        return False
    args, (leaf,) = steps[register].constants[1], steps[register].inputs
    shape = tuple(fetched(steps[leaf].constants[0]).shape)
    return bool((args["order"], args["sizes"], args["back"]) == ((1, 0), shape[::-1], ()))


def path_kappa(graph: PathGraph, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """κ_e = ∂(Σ_paths v²)/∂(w_e²) of every entry of `parameters`, by one forward and one backward pass of one sample.

    κ_e is the sum, over the paths through e, of the squared products of their other weights; a weight that occurs on a
    path several times (convolution, weight sharing) counts once per occurrence. None for a parameter on no path.

    In a linear layer of one row, y = x·W + b, it is δ = ∂Σ/∂y for b and the outer product of x and δ for W. It is in
    float32 where the parameter is and all of it fits, else in float64.
    """
    if not parameters:
        return []
    mine = {id(p) for p in parameters}
    leaves = {leaf: id(fetched(graph.steps[leaf].constants[0])) for leaf in graph.rows}
    rows = {leaves[leaf]: row for leaf, row in graph.rows.items() if leaves[leaf] in mine}
    watched = sorted({row.register for row in rows.values()})
    with torch.inference_mode(False), torch.enable_grad():
        powers = {id(p): Power(power(p.detach(), 2)) for p in parameters}
        others = [powers[id(p)].values.requires_grad_() for p in parameters if id(p) not in rows]
        total, values = graph.run(2, powers, frozenset(watched))
        at = [*(values[r].values for r in watched), *others]
        found = torch.autograd.grad(total.values, at, allow_unused=True)
    delta = dict(zip([*watched, *(id(p) for p in parameters if id(p) not in rows)], found, strict=True))

    def kappa(p: Tensor) -> Tensor | None:
        row = rows.get(id(p))
        if row is None:
            return None if delta[id(p)] is None else _narrow(p.dtype, _scaled(delta[id(p)], total.exponent))
        x, y = values[graph.steps[row.register].inputs[0]], values[row.register]
        d = _scaled(_scaled(delta[row.register], total.exponent), None if y.exponent is None else -y.exponent)
        if row.place == 2:
            return _narrow(p.dtype, d[0])
        h = _scaled(x.values.detach(), x.exponent)
        return _narrow(p.dtype, d.t(), h) if row.turned else _narrow(p.dtype, h.t(), d)

    return [kappa(p) for p in parameters]


def _scaled(t: Any, exponent: Tensor | None) -> Tensor:
    found: Tensor = t if exponent is None else torch.ldexp(t, exponent)
    return found


def _narrow(dtype: torch.dtype, *factors: Tensor) -> Tensor:
    """Their product, in float32 if all of it has its digits there. A GPU is not asked."""
    if dtype != torch.float64 and factors[0].device.type == "cpu" and all(f.numel() for f in factors):
        least, most = zip(*map(_ends, factors), strict=True)
        limits = torch.finfo(torch.float32)
        if min(*least, math.prod(least)) >= limits.tiny and max(*most, math.prod(most)) <= limits.max:
            factors = tuple(f.float() for f in factors)
    return functools.reduce(torch.mul, factors)


def _ends(t: Tensor) -> tuple[float, float]:
    """The least and the largest number; 1 stands for zeros."""
    least, most = t.aminmax()
    if not float(least) > 0:
        least, most = torch.where(t > 0, t, 1).aminmax()
    return float(least), float(most)


@contextmanager
def _named(record: Record, model: nn.Module) -> Iterator[None]:
    """While it lasts, `record` knows in which module it is."""
    names = {m: name for name, m in model.named_modules()}

    def before(module: nn.Module, args: Any) -> None:
        record.modules.append((names.get(module, ""), type(module).__name__))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        record.modules.pop()

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
