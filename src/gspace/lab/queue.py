"""Runs a list of recipes, one after the other; several processes may work on one list.

    gspace train --queue jobs.json --out runs

`jobs.json` is a list of recipes (the fields that are not at their default). A process takes the next run that is
neither finished nor held by another one, and holds its folder while it works. MLPs that differ in seed and rate alone
are taken together, as one stack. A run that fails is reported and left; running the queue again continues it.

The exit code is 1 if a run failed, else 0, also if runs were left to other processes: they share the list, and each
does its part. `gspace train --seeds` and `gspace reproduce` were asked for all of their runs and end in 4 instead;
`gspace reproduce --wait` waits for the other processes.
"""

import gc
import json
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from gspace.lab.errors import BusyError, Interrupted, LabError, RecipeError
from gspace.lab.lock import locked
from gspace.lab.loop import Progress
from gspace.lab.recipe import Recipe
from gspace.lab.record import LOCK, SUMMARY, Run, open_run
from gspace.lab.schema import Line
from gspace.lab.stacked import stack_key, stackable
from gspace.lab.stopping import interruption
from gspace.lab.train import Session, work_alone, work_in_stacks


@dataclass(frozen=True)
class Tally:
    """What became of the runs of a list.

    Attributes:
        runs: How many there are.
        failed: Could not be run.
        held: Those left to other processes.
        before: Were finished already.
    """

    runs: int = 0
    failed: int = 0
    held: frozenset[Recipe] = frozenset()
    before: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.runs + other.runs, self.failed + other.failed, self.held | other.held, self.before + other.before
        )


def read_queue(path: Path) -> list[Recipe]:
    """The recipes of a JSON list."""
    try:
        jobs = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from error
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise RecipeError(f"{path} is no list of recipes")
    return [_entry(job, f"{path}, recipe {k} of {len(jobs)}") for k, job in enumerate(jobs, 1)]


def _entry(job: Line, where: str) -> Recipe:
    try:
        return Recipe.from_dict(job)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from error


def batches(recipes: Sequence[Recipe], largest: int) -> Iterator[list[Recipe]]:
    """Runs to be taken together: neighbours that can be stacked, at most `largest`; all others alone."""
    for key, group in groupby(recipes, key=lambda recipe: stack_key(recipe) if stackable(recipe) else recipe):
        members = list(dict.fromkeys(group))
        size = largest if stackable(key) else 1
        for start in range(0, len(members), size):
            yield members[start : start + size]


def run_queue(recipes: Sequence[Recipe], out: Path, session: Session, *, stack: int = 16) -> Tally:
    """Works through the recipes; returns what became of them. Raises `Interrupted` when a signal stops it."""
    tally = Tally()
    later: list[list[Recipe]] = []
    for members in batches(list(dict.fromkeys(recipes)), stack):
        taken = _try(members, out, session, whole=True)
        if taken is None:
            later.append(members)
        else:
            tally += taken
    for members in later:
        tally += _try(members, out, session, whole=False) or Tally()
    return tally


def _try(members: Sequence[Recipe], out: Path, session: Session, *, whole: bool) -> Tally | None:
    """Takes what is free, and says what fails."""
    _check_stop(session, f"before {members[0].folder}")
    try:
        return _take(members, out, session, whole=whole)
    except (Interrupted, BrokenPipeError):
        raise
    except BusyError as error:  # of one that the stack was begun with
        print(f"{members[0].folder}: {error}", flush=True)
        return Tally(len(members), held=frozenset(members))
    except LabError as error:
        print(f"{members[0].folder}: {error}", file=sys.stderr)
    except Exception:  # noqa: BLE001 -- one run must not keep the others from running; the traceback is shown
        print(f"{members[0].folder}: failed\n{traceback.format_exc()}", file=sys.stderr)
    finally:
        gc.collect()  # networks and CUDA graphs refer to themselves
    return Tally(len(members), failed=len(members))


def _check_stop(session: Session, where: str) -> None:
    signum = session.stop() if session.stop else None
    if signum:
        raise interruption(signum, where, session.minutes)


def _take(members: Sequence[Recipe], out: Path, session: Session, *, whole: bool) -> Tally | None:
    """Trains those members that are neither finished nor held by another process.

    All processes claim in this order, so whoever has the first of a stack is about to take all of it: with `whole`,
    None if that is another process. What is free later it did not want.
    """
    with ExitStack() as held:
        first = _claim(held, out, members[0])
        if first is None and len(members) > 1 and whole:
            return None
        claimed = [first, *(_claim(held, out, recipe) for recipe in members[1:])]
        runs = [run for run in claimed if run is not None]
        unfinished = [run for run in runs if run.summary is None]
        taken = {run.recipe for run in runs}
        left = [recipe for recipe in members if recipe not in taken and not (out / recipe.folder / SUMMARY).exists()]
        for recipe in left:
            print(f"{recipe.folder}: held by another process, left to it", flush=True)
        if stackable(members[0]) and unfinished:
            work_in_stacks(runs, session)
        else:
            for run in unfinished:
                work_alone(run, session)
        for run in unfinished:
            report(run.recipe, run.summary or {})
        return Tally(len(members), held=frozenset(left), before=len(members) - len(left) - len(unfinished))


def _claim(held: ExitStack, out: Path, recipe: Recipe) -> Run | None:
    try:
        return held.enter_context(open_run(out, recipe))
    except BusyError:
        return None


def wait_for_others(held: Collection[Recipe], out: Path, session: Session) -> None:
    """Returns once a process has let go of one of these runs. Raises `Interrupted` when a signal stops it."""
    print("waiting for the runs of other processes", flush=True)
    while True:
        _check_stop(session, "waiting for other processes")
        time.sleep(1.0)
        if not all(map(_busy, (out / recipe.folder for recipe in held))):
            return


def _busy(folder: Path) -> bool:
    try:
        with locked(folder / LOCK):
            return False
    except BusyError:
        return True


def conclude(tally: Tally, *, shared: bool = False) -> int:
    """Says in a last line what the lines of the runs do not say, and returns the exit code.

    Runs that other processes hold are an error, as one such run is, unless the list is `shared`: a queue is meant to be
    worked on by several processes, and each of them has done its part when the rest is in the others' hands.
    """
    if tally.held:
        hint = "" if shared else ": run again when they have ended"
        print(f"{len(tally.held)} of {tally.runs} runs left to other processes{hint}", file=sys.stderr, flush=True)
    elif tally.runs and tally.before == tally.runs:
        print("1 run, finished before" if tally.runs == 1 else f"{tally.runs} runs, all finished before", flush=True)
    if tally.failed:
        return 1
    return BusyError.exit_code if tally.held and not shared else 0


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
        what = "validation" if progress.recipes[0].validation else "test"
        print(
            f"  {progress.recipes[0].folder} {progress.iteration}/{progress.total} loss {loss} {what} error % {error} "
            f"{progress.images_per_second:.0f} images/s {progress.seconds_left:.0f} s left",
            flush=True,
        )
