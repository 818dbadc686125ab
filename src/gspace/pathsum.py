"""Sums over all paths of a network, by one forward pass: Σ_paths |v(path)|^p = Σ_outputs f_{|w|^p}(1).

One run of the model says which steps the sum takes (`analysis.record`). They are then done for any p, with the weights
of the moment and without the model. As derivatives of the sum are sums over paths too, autograd through them gives
gradients of path norms and Path-SGD's κ.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from gspace.analysis import refuse
from gspace.analysis.examples import few_rows, guesses, refusal
from gspace.analysis.forward import Inputs, TraceError, arguments, set_mode, tensors_in, untouched, unwrap
from gspace.analysis.operations import PATHS
from gspace.analysis.record import Kind, PathError, Record, Step
from gspace.analysis.sums import LARGE, Logs, Numbers, Power, fetched, power

__all__ = ["PathError", "PathGraph", "Power", "as_input_of", "path_graph", "power"]


@dataclass(frozen=True)
class PathGraph:
    """The path sum of a model, step by step. Weights are read from the model each time: it serves a whole training.

    Attributes:
        model: The model.
        steps: What to do, in order; the result of each is a register.
        outputs: The registers of the model's outputs.
        samples: How many samples they are of.
    """

    model: nn.Module
    steps: Sequence[Step]
    outputs: tuple[int, ...]
    samples: int

    def sum(self, p: float = 2, powers: Mapping[int, Power] | None = None) -> Power:
        """Σ_paths |v|^p of one sample as a scalar `Power`; `powers` replaces |w|^p by the `id` of a parameter."""
        device = next((t.device for t in self.model.parameters()), torch.device("cpu"))
        kind: Any = Numbers if p <= LARGE else Logs
        sums = kind(p, device, powers or {})
        values: list[Any] = []
        for method, inputs, constants in self.steps:  # in float64, which autocast leaves alone
            values.append(getattr(sums, method)(*[values[i] for i in inputs], *constants))
        total: Power = sums.total(*[values[i] for i in self.outputs])
        return total if self.samples == 1 else total._replace(values=total.values / self.samples)

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
    ['leaf', 'ones', 'moved', 'matmul']
    """
    inner = unwrap(model)
    refuse(inner)
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
            record.enter(t, (inner.get_submodule(path), last))
    for t in tree_leaves((args, kwargs)):
        if isinstance(t, Tensor):
            record.enter(t, None)
    try:
        with _named(record, inner), record:
            out = inner(*args, **kwargs)
    except (TraceError, PathError):
        raise
    except Exception as error:
        message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise TraceError(f"the model does not accept this example_input: {type(error).__name__}: {message}") from error
    outputs = [record.read(t) for t in tensors_in(out) if (x := record.find(t)) is not None and x.register >= 0]
    if not any(x.kind is Kind.ACTIVATION for x in outputs):
        raise PathError("no output of the model depends on its input")
    return PathGraph(model, *_needed(record.steps, [x.register for x in outputs]), samples)


def _needed(steps: Sequence[Step], outputs: Sequence[int]) -> tuple[list[Step], tuple[int, ...]]:
    """The steps that an output depends on."""
    used = set(outputs)
    for register in reversed(range(len(steps))):
        if register in used:
            used.update(steps[register].inputs)
    place = {register: k for k, register in enumerate(sorted(used))}
    kept = [steps[r]._replace(inputs=tuple(place[i] for i in steps[r].inputs)) for r in sorted(used)]
    return kept, tuple(place[r] for r in outputs)


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
