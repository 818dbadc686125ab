"""`gspace analyze SPEC`: the rescaling symmetry of a model, and a check that it is one."""

import argparse
import contextlib
import json
import sys

import torch
from torch import Tensor, nn

import gspace
from gspace.analysis.examples import redrawn
from gspace.lab.cli import argument
from gspace.lab.display import steps
from gspace.lab.spec import FORM, load_model, parse_spec
from gspace.lab.verify import MODES, TOLERANCE, Shape, guess, largest_changes, random_inputs


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="rescale a float64 copy by random factors e^N(0,1) and report how far the output moves",
    )


def add_model(parser: argparse.ArgumentParser, residual: str = "tie") -> None:
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
    parser.add_argument(
        "--residual",
        choices=("pin", "tie"),
        default=residual,
        help="what an addition does to its operands: tie their scales, or pin them (the paper's choice) "
        f"(default: {residual})",
    )
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
    else:
        print(analysis)
        if args.verify:
            print(_sentence(analysis.H, changes, exact))
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
        analysis = _analysis(model, inputs, args)
    return model, analysis, inputs, generator


def _analysis(model: nn.Module, inputs: tuple[Tensor, ...], args: argparse.Namespace) -> gspace.Analysis:
    try:
        return gspace.analyze(model, inputs or None, residual=args.residual, pin=tuple(args.pin))
    except gspace.TraceError as error:
        if inputs or "example_input" not in str(error):
            raise
        raise gspace.TraceError(
            f"{str(error).rstrip('.')}. On the command line, --input-shape gives one, once per input."
        ) from error


def _sentence(units: int, changes: dict[str, float], exact: bool) -> str:
    found = ", ".join(f"{change:.1e} ({mode})" for mode, change in changes.items())
    verdict = "verified" if exact else f"NOT a symmetry (tolerance {TOLERANCE:.0e}), please report this model"
    return f"{verdict}: {units} units scaled by e^N(0,1); largest relative change of the output in float64: {found}"


def _read_shape(text: str) -> Shape:
    sizes, colon, below = text.partition(":")
    return Shape(tuple(map(int, sizes.split(","))), int(below) or -1 if colon else 0)


_shape = argument(
    _read_shape,
    lambda shape: min(shape.sizes) >= 1 and shape.below >= 0,
    "shape: write positive sizes as in 2,3,32,32, or 2,16:1000 for integers below 1000",
)
seed = argument(int, lambda value: 0 <= value < 2**63, "seed: write an integer from 0 to 2^63 - 1")
