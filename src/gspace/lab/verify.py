"""Is the symmetry exact on this model? Rescale a float64 copy by factors e^N(0,1) and compare its outputs."""

import contextlib
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gspace import Analysis, random_scales, rescale_
from gspace.analysis.examples import guesses
from gspace.analysis.forward import Inputs, arguments, tensors_in, untouched
from gspace.lab.errors import LabError
from gspace.lab.spec import one_line


class Shape(NamedTuple):
    """What an input is like.

    Attributes:
        sizes: Its shape, batch first.
        below: Integers from 0 to this one, exclusive, as an embedding takes them; 0: normal numbers.
    """

    sizes: tuple[int, ...]
    below: int = 0


# Rounding of float64 (1e-16) grows with depth and with the spread of the factors; a wrong unit moves the output by
# more than 1e-3. In between, at 1e-9, lies the line.
TOLERANCE = 1e-9
MODES = ("eval", "train")  # in this order: a pass in training mode moves the running statistics


class InputError(LabError, ValueError):
    """The model and the input do not fit; the message fits on one line."""

    exit_code = 2


def largest_changes(
    model: nn.Module,
    analysis: Analysis,
    inputs: Inputs,
    generator: torch.Generator,
    begin: Callable[[str], None] = lambda step: None,
) -> dict[str, float]:
    """max |f(x; g_c(w)) − f(x; w)| / max |f(x; w)| over all outputs, in evaluation and in training mode.

    Both runs of a mode start from the same random state, so dropout draws the same mask. The model is left untouched.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InputError(
            "a model on the meta device has no values to verify: build it on the CPU or leave --verify out"
        )
    original = deepcopy(model).double()
    scales = random_scales(original, generator, analysis=analysis)
    rescaled = rescale_(deepcopy(original), scales, analysis=analysis)
    inputs = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)
    changes = {}
    for mode in MODES:
        begin(f"the model in {mode} mode")
        before = _outputs(original, inputs, mode)
        begin(f"its rescaled copy in {mode} mode")
        changes[mode] = _relative_change(before, _outputs(rescaled, inputs, mode), mode)
    return changes


def guess(model: nn.Module) -> Inputs:
    """The first guess of an input that the model accepts."""
    with untouched(model):
        for example in guesses(model):
            args, kwargs = arguments(example)
            with contextlib.suppress(Exception):  # the forward pass is the user's and may raise anything
                model(*args, **kwargs)
                return example
    raise InputError("cannot guess an input of the model: give --input-shape, for example 2,3,32,32")


def random_inputs(model: nn.Module, shapes: Sequence[Shape], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Inputs of the given shapes on the device of the model, integers where asked for, else in its dtype.

    The one input of a model that begins with an embedding is integers, whether asked for or not.
    """
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    first = next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)
    if len(shapes) == 1 and isinstance(first, nn.Embedding):
        shapes = [shapes[0]._replace(below=shapes[0].below or first.num_embeddings)]
    return tuple(
        torch.randint(below, sizes, generator=generator).to(like.device)
        if below
        else torch.randn(sizes, generator=generator).to(like)
        for sizes, below in shapes
    )


def _outputs(model: nn.Module, inputs: Inputs, mode: str) -> list[Tensor]:
    model.train(mode == "train")
    args, kwargs = arguments(inputs)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        try:
            return [t for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point() and t.numel()]
        except Exception as error:  # the forward pass is the user's and may raise anything
            shapes = " ".join(",".join(map(str, x.shape)) for x in tree_leaves(inputs) if isinstance(x, Tensor))
            raise InputError(
                f"the model does not accept an input of shape {shapes} in {mode} mode, give a fitting --input-shape: "
                f"{one_line(error)}"
            ) from error


def _relative_change(before: list[Tensor], after: list[Tensor], mode: str) -> float:
    if not before:
        raise InputError(f"the output of the model holds no floating-point number in {mode} mode: nothing to compare")
    if [y.shape for y in before] != [y.shape for y in after]:
        raise InputError(f"the shape of the output depends on the values in {mode} mode: nothing to compare")
    if not all(bool(y.isfinite().all()) for y in before):
        raise InputError(f"the output of the model is not finite in {mode} mode: nothing to compare")
    return max(map(_relative, before, after))


def _relative(before: Tensor, after: Tensor) -> float:
    size, change = float(before.abs().max()), float((after - before).abs().max())
    if not math.isfinite(change):
        return math.inf
    return change / size if size else (math.inf if change else 0.0)
