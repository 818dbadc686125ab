"""Runs a list of recipes, one after the other; several processes may work on one list.

    python -m gspace.lab.train --queue jobs.json --out runs

`jobs.json` is a list of recipes (the fields that are not at their default). A process takes the next run that is
neither finished nor held by another one, and holds its folder while it works. MLPs that differ in seed and rate alone
are taken together, as one stack. A run that fails is reported and left; running the queue again continues it.
"""

import argparse
import gc
import json
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

from gspace.lab.engine import Engine
from gspace.lab.errors import BusyError, Interrupted, LabError, RecipeError
from gspace.lab.recipe import Recipe
from gspace.lab.record import Line, Run, open_run
from gspace.lab.stacked import stack_key, stackable
from gspace.lab.train import Progress, Session, stop_requests, work_alone, work_in_stacks


def read_queue(path: Path) -> list[Recipe]:
    """The recipes of a JSON list."""
    try:
        jobs = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from error
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise RecipeError(f"{path} is no list of recipes")
    return [Recipe.from_dict(job) for job in jobs]


def batches(recipes: Sequence[Recipe], largest: int) -> Iterator[list[Recipe]]:
    """Runs to be taken together: neighbours that can be stacked, at most `largest`; all others alone."""
    for key, group in groupby(recipes, key=lambda recipe: stack_key(recipe) if stackable(recipe) else recipe):
        members = list(dict.fromkeys(group))
        size = largest if stackable(key) else 1
        for start in range(0, len(members), size):
            yield members[start : start + size]


def run_queue(recipes: Sequence[Recipe], out: Path, session: Session, *, stack: int = 16) -> int:
    """Works through the recipes; returns the number that failed. Raises `Interrupted` when a signal stops it."""
    failed = 0
    for members in batches(recipes, stack):
        signum = session.stop() if session.stop else None
        if signum:
            raise Interrupted(f"stopped by {signal.Signals(signum).name} before {members[0].folder}", signum)
        try:
            _take(members, out, session)
        except Interrupted:
            raise
        except LabError as error:
            failed += len(members)
            print(f"{members[0].folder}: {error}", file=sys.stderr)
        except Exception:  # noqa: BLE001 -- one run must not keep the others from running; the traceback is shown
            failed += len(members)
            print(f"{members[0].folder}: failed\n{traceback.format_exc()}", file=sys.stderr)
        gc.collect()  # networks and CUDA graphs refer to themselves
    return failed


def _take(members: Sequence[Recipe], out: Path, session: Session) -> None:
    """Trains those members that are neither finished nor held by another process."""
    with ExitStack() as held:
        first = _claim(held, out, members[0])
        if first is None:  # all processes claim in this order: whoever has the first takes the whole stack
            return
        others = (_claim(held, out, recipe) for recipe in members[1:])
        runs = [first, *(run for run in others if run is not None)]
        unfinished = [run for run in runs if run.summary is None]
        if stackable(members[0]):
            work_in_stacks(runs, session)
        else:
            for run in unfinished:
                work_alone(run, session)
        for run in unfinished:
            report(run.recipe, run.summary or {})


def _claim(held: ExitStack, out: Path, recipe: Recipe) -> Run | None:
    try:
        return held.enter_context(open_run(out, recipe))
    except BusyError:
        print(f"{recipe.folder}: held by another process, left to it", flush=True)
        return None


def report(recipe: Recipe, summary: Line) -> None:
    """One line per run that has ended."""
    shown = ("status", "test_error", "train_loss", "wall_seconds", "images_per_second", "overhead_seconds")
    values = ", ".join(f"{name} {_short(summary[name])}" for name in shown if name in summary)
    print(f"{recipe.folder}: {values}", flush=True)


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def show(progress: Progress) -> None:
    """One line per point of the curve, for a log."""
    if any(progress.lines):
        error = " ".join("-" if line is None else f"{100 * line['test_error']:.2f}" for line in progress.lines)
        loss = " ".join(f"{value:.4f}" for value in progress.loss)
        print(
            f"  {progress.recipes[0].folder} {progress.iteration}/{progress.total} loss {loss} test error % {error} "
            f"{progress.images_per_second:.0f} images/s {progress.seconds_left:.0f} s left",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m gspace.lab.train", description=__doc__.splitlines()[0])
    parser.add_argument("--queue", type=Path, required=True, help="JSON list of recipes")
    parser.add_argument("--out", type=Path, required=True, help="folder of run folders")
    parser.add_argument("--data-dir", type=Path, help="folder of data sets (else GSPACE_DATA)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--minutes", type=float, help="stop after this time, with a checkpoint")
    parser.add_argument("--stack", type=int, default=16, help="most MLPs to train at once")
    parser.add_argument("--checkpoint-seconds", type=float, default=60.0, help="time between checkpoints")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (default: on a GPU)")
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, help="CUDA graph (default: on a GPU)")
    parser.add_argument("--deterministic", action="store_true", help="same bits each time on a GPU, at some cost")
    parser.add_argument("--quiet", action="store_true", help="only a line per finished run")
    options = parser.parse_args(argv)
    engine = Engine(
        device=options.device,
        compile=options.compile,
        graph=options.graph,
        deterministic=options.deterministic,
        checkpoint_seconds=options.checkpoint_seconds,
    )
    try:
        with stop_requests() as stop:
            if options.minutes is not None:
                signal.setitimer(signal.ITIMER_REAL, 60 * options.minutes)
            session = Session(options.data_dir, engine, None if options.quiet else show, stop=stop)
            return 1 if run_queue(read_queue(options.queue), options.out, session, stack=options.stack) else 0
    except LabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
