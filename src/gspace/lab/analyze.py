"""`gspace analyze SPEC`: the rescaling symmetry of a model, and with --verify a check that it is exact.

The check rescales a float64 copy by factors e^N(0,1) and compares its outputs.
"""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import gspace
from gspace.analysis.examples import guesses, redrawn
from gspace.analysis.forward import Inputs, arguments, tensors_in, untouched
from gspace.lab.cli import argument
from gspace.lab.display import steps
from gspace.lab.errors import RequestError, named
from gspace.lab.spec import FORM, load_model, parse_spec

# Rounding of float64 (1e-16) grows with depth and with the spread of the factors; a wrong unit moves the output by
# more than 1e-3. In between, at 1e-9, lies the line.
TOLERANCE = 1e-9
MODES = ("eval", "train")  # in this order: a pass in training mode moves the running statistics


class Shape(NamedTuple):
    """What an input is like.

    Attributes:
        sizes: Its shape, batch first.
        below: Integers from 0 to this one, exclusive, as an embedding takes them; 0: normal numbers.
    """

    sizes: tuple[int, ...]
    below: int = 0


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    told = "rescale a float64 copy by random factors e^N(0,1) and report how far the output moves"
    parser.add_argument("--verify", action="store_true", help=told)


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model and what of it is pinned."""
    parser.add_argument("spec", metavar="SPEC", help=f"{FORM}; it is imported and executed")
    parser.add_argument(
        "--input-shape",
        metavar="N,C,H,W",
        type=_shape,
        action="append",
        default=[],
        help="shape of an input, batch first; once per input (default: guessed from the model). "
        "N,T:V is one of integers below V",
    )
    ties = "what an addition does to its operands: tie their scales, or pin them (the paper's choice) (default: tie)"
    parser.add_argument("--residual", choices=("pin", "tie"), default="tie", help=ties)
    parser.add_argument("--pin", metavar="NAME", action="append", default=[], help="a module whose units to pin")
    parser.add_argument("--seed", type=seed, default=0, help="of the model, the inputs and the factors (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 if the verification failed, else 0."""
    changes: dict[str, float] = {}
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints
        model, analysis, inputs, generator = analyzed(args)
        if args.verify:
            with steps(2 * len(MODES)) as begin:
                example = redrawn(inputs or guess(model), generator)
                changes = largest_changes(model, analysis, example, generator, begin)
    exact = all(change <= TOLERANCE for change in changes.values())
    if args.json:
        verified = {"verify": {**changes, "tolerance": TOLERANCE, "exact": exact}} if args.verify else {}
        print(json.dumps({"spec": args.spec, **analysis.to_dict(), **verified}, indent=2))
        return 0 if exact else 1
    print(analysis)
    if args.verify:
        verdict = "verified" if exact else f"NOT a symmetry (tolerance {TOLERANCE:.0e}), please report this model"
        found = ", ".join(f"{change:.1e} ({mode})" for mode, change in changes.items())
        largest = f"largest relative change of the output in float64: {found}"
        print(f"{verdict}: {analysis.H} units scaled by e^N(0,1); {largest}")
    return 0 if exact else 1


def analyzed(args: argparse.Namespace) -> tuple[nn.Module, gspace.Analysis, tuple[Tensor, ...], torch.Generator]:
    """The model of the command line, its analysis, its inputs if shapes were given, and the seed's generator."""
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    with steps(2) as begin:
        begin(f"build {args.spec}")
        model = load_model(parse_spec(args.spec))
        inputs = random_inputs(model, args.input_shape, generator)
        begin("analyze")
        try:
            found = gspace.analyze(model, inputs or None, residual=args.residual, pin=tuple(args.pin))
        except gspace.TraceError as error:
            if inputs or "example_input" not in str(error):
                raise
            more = "On the command line, --input-shape gives one, once per input."
            raise gspace.TraceError(f"{str(error).rstrip('.')}. {more}") from error
    return model, found, inputs, generator


def largest_changes(
    model: nn.Module,
    analysis: gspace.Analysis,
    inputs: Inputs,
    generator: torch.Generator,
    begin: Callable[[str], None] = lambda step: None,
) -> dict[str, float]:
    """max |f(x; g_c(w)) − f(x; w)| / max |f(x; w)| over all outputs, in evaluation and in training mode.

    Both runs of a mode start from the same random state, so dropout draws the same mask. The model is left untouched.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise RequestError(
            "a model on the meta device has no values to verify: build it on the CPU or leave --verify out"
        )
    original = deepcopy(model).double()
    scales = gspace.random_scales(original, generator, analysis=analysis)
    rescaled = gspace.rescale_(deepcopy(original), scales, analysis=analysis)
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
    raise RequestError("cannot guess an input of the model: give --input-shape, for example 2,3,32,32")


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
            raise RequestError(
                f"the model does not accept an input of shape {shapes} in {mode} mode, give a fitting --input-shape: "
                f"{named(error)}"
            ) from error


def _relative_change(before: list[Tensor], after: list[Tensor], mode: str) -> float:
    wrong = {
        "output of the model holds no floating-point number": not before,
        "shape of the output depends on the values": [y.shape for y in before] != [y.shape for y in after],
        "output of the model is not finite": not all(bool(y.isfinite().all()) for y in before),
    }
    for what, so in wrong.items():
        if so:
            raise RequestError(f"the {what} in {mode} mode: nothing to compare")
    return max(map(_relative, before, after))


def _relative(before: Tensor, after: Tensor) -> float:
    size, change = float(before.abs().max()), float((after - before).abs().max())
    if not math.isfinite(change):
        return math.inf
    return change / size if size else (math.inf if change else 0.0)


def _read_shape(text: str) -> Shape:
    sizes, colon, below = text.partition(":")
    return Shape(tuple(map(int, sizes.split(","))), int(below) or -1 if colon else 0)


_shape = argument(
    _read_shape,
    lambda shape: min(shape.sizes) >= 1 and shape.below >= 0,
    "shape: write positive sizes as in 2,3,32,32, or 2,16:1000 for integers below 1000",
)
seed = argument(int, lambda value: 0 <= value < 2**63, "seed: write an integer from 0 to 2^63 - 1")
