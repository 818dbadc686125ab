"""`gspace reproduce NAME`: the runs of a table or figure of the paper, those that are not finished, then its report."""

import argparse
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gspace.lab import options
from gspace.lab.archive import read_records, scores_of
from gspace.lab.cells import LENGTHS, Cell, Experiment, Scores, Variant, costs, guessed, jobs
from gspace.lab.errors import RequestError
from gspace.lab.experiments import EXPERIMENTS
from gspace.lab.recipe import Recipe, check_name
from gspace.lab.record import Record
from gspace.lab.report import assemble, publish
from gspace.lab.sweep import NOTHING_LEFT, run_all, share


def configure(parser: argparse.ArgumentParser) -> None:
    names = "\n".join(f"  {name:16}{e.source or 'ours':18}{e.question}" for name, e in EXPERIMENTS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"experiments:\n{names}\n\nRunning it again skips what is finished and continues what was stopped."
    parser.add_argument("name", metavar="NAME", help="an experiment of the list below")
    parser.add_argument("--quick", action="store_true", help="small networks on the digits, minutes on a CPU")
    told = "fraction of the schedule, marked as such (default: 1)"
    parser.add_argument("--length", choices=LENGTHS, default="1", help=told)
    told = "records that count as finished runs too"
    parser.add_argument("--results", type=Path, metavar="DIR", nargs="+", default=[], help=told)
    parser.add_argument("--list", action="store_true", help="show the runs and what is left to pay, run nothing")
    parser.add_argument("--json", action="store_true", help="with --list: the file for `gspace train --queue`")
    group = parser.add_argument_group("only some of the runs (lists are separated by commas)")
    for name, (what, example, _) in FILTERS.items():
        group.add_argument(f"--{name}", metavar="NAME,...", help=f"{what}s, for example {example}")
    group.add_argument("--seeds", type=options.numbers, metavar="N,...", help="seeds, for example 0,1,2 or 0-2")
    options.add_runs(parser)


def run(args: argparse.Namespace) -> int:
    """Runs what is not finished and writes the report; 1 if a run failed."""
    experiment = EXPERIMENTS[check_name("experiment", args.name, EXPERIMENTS)]
    if args.quick and args.length != "1":
        raise RequestError("--quick has a schedule of its own: leave --length out")
    variant = Variant(args.quick, LENGTHS[args.length])

    def cells(scores: Scores) -> list[Cell]:
        return selected(variant.cells(experiment, scores), args)

    if args.list:
        scores = scores_of(recorded(args))
        left, all_left = (unfinished(cells(known), scores) for known in (scores, guessed(scores)))
        print(as_queue(left) if args.json else as_text(experiment, variant, cells(scores), scores))
        if len(all_left) > len(left) and not args.json:
            print(f"decided by these: {len(all_left) - len(left)} more, about {costs(all_left)} in all")
        return 0
    failed = work(cells, args)
    again = ["--out", str(args.out), *(["--results", *map(str, args.results)] if args.results else [])]
    document = assemble(recorded(args), [experiment], f"{experiment.command}{variant.flags}", f" {shlex.join(again)}")
    print("\n".join(map(str, publish(document, args.out / "report" / experiment.name))))
    return 1 if failed else 0


def work(cells: Callable[[Scores], list[Cell]], args: argparse.Namespace) -> int:
    """Runs the cells, then those that their results decide, and so on; returns how many runs failed."""
    tried: set[Recipe] = set()
    scores = scores_of(recorded(args))
    failed, cluster = 0, options.cluster(args)
    expected = unfinished(cells(guessed(scores)), scores)
    if not expected:
        print(NOTHING_LEFT)
    options.prepare(expected, args)
    with options.session(args, len(expected)) as session:
        while todo := [recipe for recipe in unfinished(cells(scores), scores) if recipe not in tried]:
            mine = share(todo, args.slice) if args.slice else todo
            failed += run_all(mine, args.out, session, cluster)
            tried.update(todo)
            scores = scores_of(recorded(args))
        others = unfinished(cells(scores), scores) if args.slice else []
        if others and not failed:
            print(f"{len(others)} runs are in other slices; when they are done, run this again for what they decide")
    return failed


def unfinished(cells: Sequence[Cell], scores: Scores) -> list[Recipe]:
    return [recipe for recipe in jobs(cells) if scores(recipe) is None]


def recorded(args: argparse.Namespace) -> list[Record]:
    return read_records([*([args.out] if args.out.exists() else []), *args.results])


def selected(cells: Sequence[Cell], args: argparse.Namespace) -> list[Cell]:
    """The cells and runs that the filters leave; a filter that names nothing is an error."""
    kept = list(cells)
    for name, (what, _, key) in FILTERS.items():
        asked = getattr(args, name)
        if asked is not None:
            there = sorted({key(cell) for cell in cells})
            wanted = [check_name(what, one, there) for one in asked.strip(",").split(",")]
            kept = [cell for cell in kept if key(cell) in wanted]
    if args.seeds is not None:
        kept = [replace(c, recipes=tuple(r for r in c.recipes if r.seed in args.seeds)) for c in kept]
    kept = [cell for cell in kept if cell.recipes]
    if not kept:
        raise RequestError("no run of the experiment fits all of these filters")
    return kept


# What a filter names, an example, and that of a cell.
FILTERS: Mapping[str, tuple[str, str, Callable[[Cell], str]]] = {
    "data": ("data set", "cifar10", lambda cell: cell.recipes[0].stands_for or cell.recipes[0].data),
    "model": ("network", "plain-34", lambda cell: cell.recipes[0].model),
    "method": ("method", "sgd,gsgd", lambda cell: cell.method.key),
}


def as_queue(recipes: Sequence[Recipe]) -> str:
    """The list that `gspace train --queue` takes, a recipe per line."""
    return "[\n" + ",\n".join(json.dumps(recipe.short()) for recipe in recipes) + "\n]"


def as_text(experiment: Experiment, variant: Variant, cells: Sequence[Cell], scores: Scores) -> str:
    """The experiment in words, its runs per table and method, and what is left to pay."""
    lines = [f"{experiment.name}: {experiment.question}"]
    lines += [f"  {note}" for note in (*filter(None, (experiment.source, variant.label)), *experiment.notes)]
    for part in dict.fromkeys(cell.part for cell in cells):
        lines.append(f"{part}:")
        for method in dict.fromkeys(cell.method for cell in cells if cell.part == part):
            runs = jobs([cell for cell in cells if (cell.part, cell.method) == (part, method)])
            finished = sum(scores(recipe) is not None for recipe in runs)
            control = " (control)" if method.control else ""
            lines.append(f"  {method.key:20}{len(runs):5} runs, {finished} finished  {method.label}{control}")
    left = unfinished(cells, scores)  # in the order in which they run: it decides what is stacked and compiled
    lines.append(f"left: {len(left)} runs, about {costs(left)}")
    return "\n".join(lines)
