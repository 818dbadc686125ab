"""`gspace mappings SPEC`: the scales that a quantizer may move between layers, or what is wrong with a table."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import gspace
from gspace.lab.analyze import add_model, analyzed
from gspace.lab.display import steps
from gspace.lab.errors import RequestError
from gspace.quantization import Mappings, awq, smoothquant
from gspace.quantization.export import Exported

FORMATS: dict[str, Callable[[nn.Module, Mappings], list[Any]]] = {
    "json": lambda model, found: [m.to_dict() for m in found],
    "awq": awq,
    "smoothquant": smoothquant,
}


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    told = (
        "a JSON list of [smooth layer, [balance layers]], of [[balance layers], smooth layer] as SmoothQuant has them, "
        "or of objects with smooth_layer and balance_layers; names may be regular expressions behind re:"
    )
    parser.add_argument("--check", metavar="FILE", type=Path, help=told)
    told = "a table, everything as JSON, or what llm-compressor's modifiers read (default: table)"
    parser.add_argument("--format", choices=("table", *FORMATS), default="table", help=told)


def run(args: argparse.Namespace) -> int:
    """Prints the mappings, or one line per problem of the table; 1 if there are problems, else 0."""
    table = None if args.check is None else _read(args.check)
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints
        model, analysis, inputs, _ = analyzed(args)
        with steps(2) as begin:
            begin("find the mappings")
            found = gspace.mappings(model, analysis=analysis)
            begin("try the table")
            problems = [] if table is None else gspace.check_mappings(model, table, inputs or None, analysis=analysis)
    if table is not None:
        print("\n".join(problems) if problems else f"exact: {len(table)} entries")
        return 1 if problems else 0
    if args.format == "table":
        print(found)
        return 0
    made = FORMATS[args.format](model, found)
    print(json.dumps(made, indent=1))
    if isinstance(made, Exported) and made.left_out:
        left = f"{len(found) - len(made)} of {len(found)} mappings are left out"
        reasons = (f"  {len(some)}: {why}" for why, some in made.left_out.items())
        print(f"gspace: {left}, {args.format} has no form for them:", *reasons, sep="\n", file=sys.stderr)
    return 0


def _read(path: Path) -> list[Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"cannot read the table {str(path)!r}: {why}") from error
    if not isinstance(table, list) or not table:
        raise RequestError(f"{str(path)!r} holds no table: write a list of [smooth layer, [balance layers]]")
    return table
