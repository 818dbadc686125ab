"""Command-line options that several commands share; those of a recipe are generated from its fields."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch

from gspace.lab.cli import argument
from gspace.lab.data import load
from gspace.lab.display import display
from gspace.lab.engine import Engine
from gspace.lab.errors import RecipeError
from gspace.lab.models import UNUSED
from gspace.lab.recipe import DEFAULTS, Recipe, check_fields
from gspace.lab.record import make_folder
from gspace.lab.stopping import stop_requests
from gspace.lab.sweep import Cluster
from gspace.lab.train import Session

MOST_SEEDS = 10_000


def add_engine(parser: argparse.ArgumentParser) -> None:
    """How to compute."""
    group = parser.add_argument_group("how to compute")
    group.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto, a GPU if there is one)"
    )
    group.add_argument(
        "--minutes", type=_positive, help="stop after this time, with a checkpoint; run again to continue"
    )
    group.add_argument("--threads", type=_count, metavar="N", help="CPU threads (default: torch's own choice)")
    group.add_argument("--stack", type=_count, default=16, help="most MLPs to train at once (default: 16)")
    group.add_argument(
        "--checkpoint-seconds", metavar="S", type=_positive, default=60.0, help="between checkpoints (default: 60)"
    )
    group.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (default: on a GPU)")
    group.add_argument("--graph", action=argparse.BooleanOptionalAction, help="CUDA graph (default: on a GPU)")
    group.add_argument("--deterministic", action="store_true", help="same bits each time on a GPU, at some cost")


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Where the runs of a list are computed."""
    group = parser.add_argument_group("many runs (docs/sweeps.md)")
    group.add_argument("--slice", type=_slice, metavar="K/N", help="the K-th of N fixed shares, for N processes")
    group.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="this process, or a Ray cluster (default: local)"
    )
    group.add_argument("--address", help="of the Ray cluster (default: one of this machine alone)")
    group.add_argument("--gpus-per-run", type=_positive, metavar="X", help="GPUs of a Ray task (default: a CPU alone)")


def cluster(args: argparse.Namespace) -> Cluster | None:
    """Where the runs are computed, if not here."""
    if args.engine == "ray":
        return Cluster(args.address, args.gpus_per_run or 0.0, args.threads or 1)
    if args.address or args.gpus_per_run:
        raise RecipeError("--address and --gpus-per-run are for --engine ray")
    return None


def add_data(parser: argparse.ArgumentParser) -> None:
    """Where data sets are."""
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="folder of data sets (default: $GSPACE_DATA)")
    parser.add_argument("--download", action="store_true", help="download data sets that are absent")


def engine(args: argparse.Namespace) -> Engine:
    return Engine(**{field.name: getattr(args, field.name) for field in fields(Engine)})


@contextmanager
def session(args: argparse.Namespace, runs: int) -> Iterator[Session]:
    """What the runs of one command have in common; shows their progress, and ends them cleanly on a signal."""
    with display(runs, quiet=args.json or args.engine == "ray") as watch, stop_requests(args.minutes) as stop:
        yield Session(args.data_dir, engine(args), watch, stop, args.minutes)


def prepare(recipes: Sequence[Recipe], args: argparse.Namespace) -> None:
    """Makes ready: one error for a device, a data set or a folder that is not there, not one for each run."""
    if args.engine == "local":
        engine(args).resolve()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    for name in dict.fromkeys(recipe.data for recipe in recipes):
        load(name, args.data_dir, download=args.download)
    make_folder(args.out)


def alone(json_alone: bool) -> AbstractContextManager[object]:
    """With --json the standard output holds nothing else."""
    return redirect_stdout(sys.stderr) if json_alone else nullcontext()


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """One option per field of a recipe, from the field's own type, help text and choices."""
    group = parser.add_argument_group("the recipe")
    hints = get_type_hints(Recipe)
    for field in fields(Recipe):
        flag = "--" + field.name.replace("_", "-")
        choices = f": {', '.join(field.metadata['choices'])}" if field.metadata["choices"] else ""
        default = "" if field.default in (None, "") else f" (default: {_shown(field.default)})"
        text = f"{field.metadata['help']}{choices}{default}".replace("%", "%%")
        if hints[field.name] is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            group.add_argument(flag, type=reader(hints[field.name]), help=text, metavar=_metavar(hints[field.name]))


def recipe(args: argparse.Namespace) -> Recipe:
    """The recipe file's fields, if one was named, and over them those given on the command line.

    The file is named in an error that the command line alone does not explain. A size that the network lacks is refused
    here alone: it is part of the identity of runs, and recorded ones may hold it.
    """
    given = {name: value for name in DEFAULTS if (value := getattr(args, name)) is not None}
    check_fields(given)
    try:
        base = _recipe_file(args.recipe, given) if args.recipe else {}
        made = Recipe.from_dict({**base, **given})
    except (RecipeError, OSError) as error:
        raise RecipeError(f"{args.recipe}: {error}" if args.recipe else str(error)) from error
    if UNUSED[made.model] in given:
        raise RecipeError(f"--{UNUSED[made.model]} has no effect on the network {made.model!r}: leave it out")
    return made


def _recipe_file(path: Path, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its fields; of two lengths the one on the command line replaces the other."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise RecipeError(f"it cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError("it is no recipe: it holds no JSON object")
    lengths = {"iterations", "epochs"}
    return {name: value for name, value in content.items() if name not in lengths or not lengths & given.keys()}


def reader(kind: Any) -> Callable[[str], Any]:
    """From text to a field's type. What cannot be read stays text, which the recipe refuses by the field's name.

    >>> reader(tuple[int, ...])("64,64"), reader(float | None)("inf"), reader(int)("many")
    ((64, 64), inf, 'many')
    """
    item, many = _item(kind)

    def read(text: str) -> Any:
        try:
            return item(text)
        except ValueError:
            return text

    return (lambda text: tuple(map(read, text.split(",")))) if many else read


def _item(kind: Any) -> tuple[type, bool]:
    """The type of a field, or of its items if there may be several; whether there may."""
    if isinstance(kind, UnionType):
        kind = next(k for k in get_args(kind) if k is not NoneType)
    return (get_args(kind)[0], True) if get_origin(kind) is tuple else (kind, False)


def _metavar(kind: Any) -> str:
    item, many = _item(kind)
    return {int: "N", float: "X", str: "NAME"}[item] + (",..." if many else "")


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _range(text: str) -> range:
    first, *last = map(int, text.split("-", 1))
    return range(first, (last or [first])[0] + 1)


def _seeds(text: str) -> list[int]:
    ranges = list(map(_range, text.split(",")))
    few = all(ranges) and sum(some.stop - some.start for some in ranges) <= MOST_SEEDS
    return [seed for some in ranges for seed in some] if few else []


numbers = argument(_seeds, bool, f"list of at most {MOST_SEEDS:,} seeds: write 0,1,2 or 0-2")
_slice = argument(
    lambda text: tuple(map(int, text.split("/"))),
    lambda part: len(part) == 2 and 1 <= part[0] <= part[1],
    "slice: write 1/4, 2/4, 3/4 or 4/4 for a quarter",
)
_count = argument(int, lambda value: value >= 1, "whole number from 1 on")
_positive = argument(float, lambda value: 0 < value < math.inf, "positive number")
