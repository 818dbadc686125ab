"""Sums over all paths of a network, by one forward pass: Σ_paths |v(path)|^p = Σ_outputs f_{|w|^p}(1).

One run of the model (`analysis.sums`) writes down what the sum takes. That is then done for any p, with the weights of
the moment and without the model. As derivatives of the sum are sums over paths too, autograd through it gives gradients
of path norms and Path-SGD's κ.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gspace.analysis import refuse
from gspace.analysis.examples import attempted, few_rows
from gspace.analysis.forward import (
    Inputs,
    PathError,
    TraceError,
    arguments,
    set_mode,
    tensors_in,
    untouched,
    unwrap,
)
from gspace.analysis.memory import key_of
from gspace.analysis.operations import PATHS
from gspace.analysis.run import called
from gspace.analysis.sums import Sums
from gspace.analysis.tape import Program, Tape
from gspace.optim.arguments import require_values
from gspace.sharding import any_sharded, whole, whole_copy

__all__ = ["PathError", "PathGraph", "PathKappa", "as_input_of", "path_graph", "path_kappa"]


@dataclass(frozen=True)
class PathGraph:
    """The path sum of a model, step by step. Weights are read from the model each time: it serves a whole training.

    Attributes:
        model: The model.
        weights, buffers: Modules, and the names of their parameters and buffers that the sum is made of.
        program: From p, |w|^p and buffers to the sum and its exponent.
        samples: How many samples it is of.
    """

    model: nn.Module
    weights: Sequence[tuple[nn.Module, str]]
    buffers: Sequence[tuple[nn.Module, str]]
    program: Program
    samples: int

    def inputs(self, powers: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """Powers of the parameters of now, and copies of buffers, no wider: the program may write to them."""
        found = powers([whole(_held(m._parameters, m, name)).contiguous() for m, name in self.weights])
        buffers = [_held(m._buffers, m, name) for m, name in self.buffers]
        wide = found[0].dtype if found else torch.float64
        return found + [b.to(wide if b.dtype == torch.float64 else b.dtype, copy=True) for b in buffers]

    def sum(self, p: float, inputs: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """Σ_paths |v|^p of one sample as value · 2^exponent, None for 0; of the weights of now, or of these inputs."""
        given = self.inputs(lambda ws: [w.abs().double().pow(p) for w in ws]) if inputs is None else inputs
        device = given[0].device if given else torch.device("cpu")
        total, exponent = self.program(torch.full((), float(p), dtype=torch.float64, device=device), *given)
        return total / self.samples if self.samples > 1 else total, exponent


def _held(held: Mapping[str, Tensor | None], module: nn.Module, name: str) -> Tensor:
    found = held.get(name)
    if found is None:
        raise RuntimeError(f"{type(module).__name__} no longer has {name!r}: the path sum is of another model")
    return found


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
    >>> [line.function for line in graph.program.lines]
    ['aten.pow.Tensor_Tensor', 'aten.t.default', 'aten.matmul.default', 'aten.sum.default']
    """
    inner = unwrap(model)
    refuse(inner)
    require_values(inner)
    inner = whole_copy(inner) if any_sharded(inner) else inner
    with untouched(inner):
        set_mode(inner, False)
        alike = None if example_input is None else [as_input_of(model, example_input)]
        return attempted(lambda batches: _recorded(model, inner, batches[0]), inner, alike)


def as_input_of(model: nn.Module, inputs: Any) -> Any:
    """`inputs` on the model's device, floating-point tensors in its dtype: only their shapes matter."""
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    plain = dict(inputs) if isinstance(inputs, Mapping) else inputs
    if like is None:
        return plain
    return tree_map_only(Tensor, lambda x: x.to(like.device, like.dtype if x.is_floating_point() else x.dtype), plain)


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
    kinds = (inner.named_parameters(), inner.named_buffers())
    weights, buffers = ({name: t for name, t in kind if t.layout is torch.strided and t.numel()} for kind in kinds)
    device = next((t.device for t in (*weights.values(), *buffers.values())), torch.device("cpu"))
    sums = Sums(PATHS, torch.tensor(2.0, dtype=torch.float64, device=device))
    with sums.tape:
        for name, p in weights.items():
            ones = torch.ones(p.shape, dtype=torch.float64, device=p.device)  # |w|^p, but values do not matter here
            p.data = sums.mark(sums.tape.enter(ones))  # put back by `untouched`
            sums.parameters[key_of(p)] = name
        for t in buffers.values():
            sums.tape.enter(t)
        out = called(sums, inner, tree_map_only(Tensor, sums.input, batch))
        outputs = [t for t in tensors_in(out) if t in sums.scales]
        if not any(map(sums.is_activation, outputs)):
            raise PathError("no output of the model depends on its input")
        total = sums.merged(lambda *xs: functools.reduce(torch.add, [x.sum() for x in xs]), *outputs)
    program = sums.tape.program(1 + len(weights) + len(buffers), [total, sums.scales[key_of(total)].exponent])
    return PathGraph(model, _owners(model, weights), _owners(model, buffers), program, samples)


def _owners(model: nn.Module, names: Iterable[str]) -> list[tuple[nn.Module, str]]:
    """Modules and names in them; what was run may have been a copy."""
    return [(unwrap(model).get_submodule(path), last) for path, _, last in (name.rpartition(".") for name in names)]


# Path-SGD -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PathKappa:
    """κ_e = ∂(Σ_paths v²)/∂(w_e²) of every entry of some parameters, by a forward and a backward pass of one sample.

    κ_e is the sum, over the paths through e, of the squared products of their other weights; a weight that occurs on a
    path several times (convolution, weight sharing) counts once per occurrence.

    Attributes:
        graph: The path sum.
        asked: The parameters that were asked for.
        parameters: Those of them that are on a path.
        counts: How many factors κ of each has: two for the outer product of a linear layer.
        program: From the squares of all parameters, and buffers, to factors, the least and the largest number.
        complete: Whether all parameters of the model are on paths and were asked for.
    """

    graph: PathGraph
    asked: Sequence[Tensor]
    parameters: Sequence[Tensor]
    counts: Sequence[int]
    program: Program
    complete: bool

    def __call__(self, dtype: torch.dtype = torch.float64) -> tuple[list[list[Tensor]], Tensor, Tensor]:
        """For each parameter tensors that broadcast to its shape, with κ as their product; and their extremes."""
        *found, least, most = self.program(*self.graph.inputs(lambda weights: _squares(weights, dtype)))
        return [found[end - n : end] for n, end in zip(self.counts, accumulate(self.counts), strict=True)], least, most


def path_kappa(graph: PathGraph, asked: Sequence[Tensor]) -> PathKappa:
    """Writes down both passes: then neither the model nor autograd is needed."""
    tape = Tape()
    with torch.inference_mode(False), torch.enable_grad():
        inputs = [tape.enter(t) for t in graph.inputs(_squares)]
        held = [m._parameters[name] for m, name in graph.weights]
        leaves = {id(p): x.requires_grad_() for p, x in zip(held, inputs, strict=False)}
        one = torch.ones((), dtype=torch.float64, device=inputs[0].device if inputs else None)
        with tape:
            total, exponent = graph.sum(2, inputs)
            scale = one if exponent is None else torch.exp2(exponent)
            at = [leaves[id(p)] for p in asked]
            found = torch.autograd.grad(total, at, scale, allow_unused=True) if at else ()
            factors = [_factors(tape, k) for k in found if k is not None]
            outputs = [f.detach() for some in factors for f in some]
            rows = [f.t() if f.dim() == 2 and f.shape[1] == 1 else f.reshape(1, -1) for f in outputs if f.numel()]
            outputs += torch.cat([one.reshape(1, 1), *rows], 1).aminmax()
    parameters = [p for p, k in zip(asked, found, strict=True) if k is not None]
    program, counts = tape.program(len(inputs), outputs), [len(some) for some in factors]
    return PathKappa(graph, list(asked), parameters, counts, program, len(parameters) == len(leaves))


def _squares(weights: Sequence[Tensor], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    wide = [(w.abs() if w.is_complex() else w).detach().to(dtype) for w in weights]
    return list(torch._foreach_mul(wide, wide)) if wide else []


def _factors(tape: Tape, kappa: Tensor) -> list[Tensor]:
    """A column and a row if it was made of them, as that of a linear layer y = x·W of one row: x and ∂Σ/∂y."""
    function, args = tape.maker(kappa)
    if function == "aten.mm.default" and args[0].shape[1] == 1:
        return list(args)
    if function == "aten.t.default":
        return [f.t() for f in reversed(_factors(tape, args[0]))]
    return [kappa]
