"""Sums over all paths of a network, by one forward pass: Σ_paths |v(path)|^p = Σ_outputs f_{|w|^p}(1).

One run of the model (`analysis.sums`) writes down what the sum takes. That is then done for any p, with the weights of
the moment and without the model. As derivatives of the sum are sums over paths too, autograd through it gives gradients
of path norms and Path-SGD's κ.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from gspace.analysis.operations import PATHS
from gspace.analysis.run import called
from gspace.analysis.sums import Power, Slot, Step, Sums, merged, played, power
from gspace.sharding import any_sharded, whole_copy

__all__ = ["PathError", "PathGraph", "Power", "as_input_of", "path_graph", "path_kappa"]


@dataclass(frozen=True)
class PathGraph:
    """The path sum of a model, step by step. Weights are read from the model each time: it serves a whole training.

    Attributes:
        model: The model.
        sources: Modules, and the names of their parameters and buffers that the sum is made of.
        steps: What to do, in order.
        outputs: The values and the exponent of the sum.
        samples: How many samples it is of.
    """

    model: nn.Module
    sources: Sequence[tuple[nn.Module, str]]
    steps: Sequence[Step]
    outputs: tuple[Slot, Slot | None]
    samples: int

    def sum(self, p: float = 2, powers: Mapping[int, Tensor] | None = None) -> Power:
        """Σ_paths |v|^p of one sample as a scalar `Power`; `powers` replaces |w|^p by the `id` of a parameter."""
        inputs = []
        for t in (_fetched(module, name) for module, name in self.sources):
            known = (powers or {}).get(id(t))
            fixed = t.clone() if not isinstance(t, nn.Parameter) else power(t, p) if known is None else known
            inputs.append(fixed)  # a copy of a buffer: what the model writes into it is on the tape too
        device = inputs[0].device if inputs else torch.device("cpu")
        values = played(self.steps, [torch.full((), float(p), dtype=torch.float64, device=device), *inputs])
        total, exponent = (None if slot is None else values[slot.k] for slot in self.outputs)
        assert total is not None
        return Power(total / self.samples if self.samples > 1 else total, exponent)


def _fetched(module: nn.Module, name: str) -> Tensor:
    found: Tensor | None = {**module._buffers, **module._parameters}.get(name)
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
    >>> [step.function for step in graph.steps]
    ['aten.pow.Tensor_Tensor', 'aten.permute.default', 'aten.matmul.default', 'aten.sum.default']
    """
    inner = unwrap(model)
    refuse(inner)
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
    named = {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
    held = {name: t for name, t in named.items() if t.layout is torch.strided and t.numel()}
    device = next((t.device for t in held.values()), torch.device("cpu"))
    sums = Sums(PATHS, torch.tensor(2.0, dtype=torch.float64, device=device))
    example: Any = tree_map_only(Tensor, lambda t: t.detach().clone(), batch)
    inputs = [t for t in tree_leaves(example) if isinstance(t, Tensor)]
    with sums.tape:
        entered = [(t, sums.tape.enter(power(t, 2) if isinstance(t, nn.Parameter) else t)) for t in held.values()]
        for t, values in entered:
            if values is not t:
                sums.write(t, Power(values))
        for t in inputs:
            sums.write(t, sums.constant(torch.ones(t.shape, dtype=torch.float64, device=device)))
        sums.given(inputs)
        out = called(sums, inner, example)
        outputs = [t for t in tensors_in(out) if t in sums.memory]
        if not any(map(sums.is_activation, outputs)):
            raise PathError("no output of the model depends on its input")
        total = merged(lambda *xs: functools.reduce(torch.add, [x.sum() for x in xs]), *map(sums.read, outputs))
    slots = sums.tape.slot(total.values), None if total.exponent is None else sums.tape.slot(total.exponent)
    own = unwrap(model)  # what was run may be a copy
    sources = [(own.get_submodule(path), last) for path, _, last in (name.rpartition(".") for name in held)]
    return PathGraph(model, sources, sums.tape.steps, slots, samples)


def path_kappa(graph: PathGraph, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """κ_e = ∂(Σ_paths v²)/∂(w_e²) of every entry of `parameters`, by one forward and one backward pass of one sample.

    κ_e is the sum, over the paths through e, of the squared products of their other weights; a weight that occurs on a
    path several times (convolution, weight sharing) counts once per occurrence. None for a parameter on no path. It is
    in float32 where the parameter is and all of it fits, else in float64.
    """
    if not parameters:
        return []
    with torch.inference_mode(False), torch.enable_grad():
        powers = {id(p): power(p.detach(), 2).requires_grad_() for p in parameters}
        total = graph.sum(2, powers)
        found = torch.autograd.grad(total.values, [powers[id(p)] for p in parameters], allow_unused=True)
    shift = total.exponent
    wide = [k if k is None or shift is None else torch.ldexp(k, shift) for k in found]
    return [None if k is None else _narrow(k, p.dtype) for k, p in zip(wide, parameters, strict=True)]


def _narrow(kappa: Tensor, dtype: torch.dtype) -> Tensor:
    """In float32 if all of it has its digits there. A GPU is not asked."""
    if dtype == torch.float64 or kappa.device.type != "cpu" or not kappa.numel():
        return kappa
    limits, (least, most) = torch.finfo(torch.float32), kappa.aminmax()
    if not float(least) > 0:
        least = torch.where(kappa > 0, kappa, 1).amin()
    return kappa.float() if float(least) >= limits.tiny and float(most) <= limits.max else kappa
