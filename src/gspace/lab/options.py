"""Command-line options that several commands share; those of a recipe and an engine are generated from their fields."""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import torch

from gspace.lab.cli import argument
from gspace.lab.data import load
from gspace.lab.display import display
from gspace.lab.engine import Cluster, Engine
from gspace.lab.errors import RequestError
from gspace.lab.loop import stop_requests
from gspace.lab.models import UNUSED
from gspace.lab.recipe import Kind, Recipe, kind_of
from gspace.lab.record import make_folder
from gspace.lab.train import Session

MOST_SEEDS = 10_000


def add_runs(parser: argparse.ArgumentParser) -> None:
    """What every command that trains has: where runs and data are, how and where they are computed."""
    parser.add_argument("--out", type=Path, default=Path("runs"), metavar="DIR", help="run folders (default: runs)")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="folder of data sets (default: $GSPACE_DATA)")
    parser.add_argument("--download", action="store_true", help="download data sets that are absent")
    group = parser.add_argument_group("how to compute")
    add_fields(group, Engine)
    told = "stop after this time, with a checkpoint; run again to continue"
    group.add_argument("--minutes", type=_positive, metavar="X", help=told)
    group.add_argument("--threads", type=_count, metavar="N", help="CPU threads (default: torch's own choice)")
    group = parser.add_argument_group("many runs (docs/sweeps.md)")
    group.add_argument("--slice", type=_slice, metavar="K/N", help="the K-th of N fixed shares, for N processes")
    told = "this process, or a Ray cluster (default: local)"
    group.add_argument("--engine", choices=("local", "ray"), default="local", help=told)
    group.add_argument("--address", help="of the Ray cluster (default: one of this machine alone)")
    group.add_argument("--gpus-per-run", type=_positive, metavar="X", help="GPUs of a Ray task (default: a CPU alone)")


def add_fields(group: Any, kind: type) -> None:
    """One option per field of a recipe or an engine, from the field's own type, help text and choices."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        flag, of = "--" + field.name.replace("_", "-"), kind_of(hints[field.name])
        choices = f": {', '.join(field.metadata['choices'])}" if field.metadata.get("choices") else ""
        value: Any = field.default
        shown = ",".join(map(str, value)) or "none" if of.many else str(value)
        told = "default:" in field.metadata["help"] or value in (None, "")
        default = "" if told else f" (default: {shown})"
        text = f"{field.metadata['help']}{choices}{default}".replace("%", "%%")
        if of.item is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            metavar = {int: "N", float: "X", str: "NAME"}[of.item] + (",..." if of.many else "")
            read = _positive if kind is Engine and of.item is float else reader(of)
            group.add_argument(flag, type=read, help=text, metavar=metavar)


def given(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    return {field.name: value for field in fields(kind) if (value := getattr(args, field.name)) is not None}


def cluster(args: argparse.Namespace) -> Cluster | None:
    if args.engine == "ray":
        return Cluster(args.address, args.gpus_per_run or 0.0, args.threads or 1)
    if args.address or args.gpus_per_run:
        raise RequestError("--address and --gpus-per-run are for --engine ray")
    return None


@contextmanager
def session(args: argparse.Namespace, runs: int) -> Iterator[Session]:
    """What the runs of one command have in common; shows their progress, and ends them cleanly on a signal."""
    with display(runs, quiet=args.json or args.engine == "ray") as watch, stop_requests(args.minutes) as stop:
        yield Session(args.data_dir, Engine(**given(args, Engine)), watch, stop)


def prepare(recipes: Sequence[Recipe], args: argparse.Namespace) -> None:
    """Makes ready: one error for a device, a data set or a folder that is not there, not one for each run."""
    if args.engine == "local":
        Engine(**given(args, Engine)).resolve()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    for name in dict.fromkeys(recipe.data for recipe in recipes):
        load(name, args.data_dir, download=args.download)
    make_folder(args.out)


def recipe(args: argparse.Namespace) -> Recipe:
    """The recipe file's fields, if one was named, and over them those given on the command line.

    Of two lengths the one on the command line replaces the other. A size that the network lacks is refused here alone:
    it is part of the identity of runs, and recorded ones may hold it.
    """
    base, named = read_json(args.recipe, dict, "recipe") if args.recipe else {}, given(args, Recipe)
    if {"iterations", "epochs"} & named.keys():
        base = {**base, "iterations": None, "epochs": None}
    made = Recipe.from_dict({**base, **named})
    if UNUSED[made.model] in named:
        raise RequestError(f"--{UNUSED[made.model]} has no effect on the network {made.model!r}: leave it out")
    return made


def read_json(path: Path, kind: type, what: str) -> Any:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, kind):
        raise RequestError(f"{path} is no {what}")
    return value


def reader(kind: Kind) -> Callable[[str], Any]:
    """From text to a field's type. What cannot be read stays text, which the recipe refuses by the field's name.

    >>> reader(Kind(int, many=True))("64,64"), reader(Kind(float))("inf"), reader(Kind(int))("many")
    ((64, 64), inf, 'many')
    """

    def read(text: str) -> Any:
        try:
            return kind.item(text)
        except ValueError:
            return text

    return (lambda text: tuple(map(read, text.split(",")))) if kind.many else read


def _seeds(text: str) -> list[int]:
    ranges = [(int(first), int(last or first)) for first, _, last in (part.partition("-") for part in text.split(","))]
    few = all(first <= last for first, last in ranges) and sum(b - a + 1 for a, b in ranges) <= MOST_SEEDS
    return [seed for first, last in ranges for seed in range(first, last + 1)] if few else []


numbers = argument(_seeds, bool, f"list of at most {MOST_SEEDS:,} seeds: write 0,1,2 or 0-2")
_slice = argument(
    lambda text: tuple(map(int, text.split("/"))),
    lambda part: len(part) == 2 and 1 <= part[0] <= part[1],
    "slice: write 1/4, 2/4, 3/4 or 4/4 for a quarter",
)
_count = argument(int, lambda value: value >= 1, "whole number from 1 on")
_positive = argument(float, lambda value: 0 < value < math.inf, "positive number")
