"""Runs a list of recipes: one after the other in this process, or as the tasks of a Ray cluster (docs/sweeps.md).

MLPs that differ in seed and rate alone are trained together, as one stack. What is finished is left alone, what was
stopped is continued. A run that fails is reported and left; running the list again continues it.
"""

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from gspace.lab.display import steps
from gspace.lab.errors import BusyError, DeviceError, Interrupted, LabError, RecipeError, RecordError
from gspace.lab.recipe import Recipe
from gspace.lab.record import SUMMARY, read_summary
from gspace.lab.schema import Line
from gspace.lab.stacked import stack_key, stackable
from gspace.lab.stopping import interruption
from gspace.lab.train import Session, train, train_many

PATIENCE = 60  # seconds
RETRIES = 5  # of a task whose node or process died, or that failed


@dataclass(frozen=True)
class Cluster:
    """Where the runs of a sweep are computed, if not here.

    Attributes:
        address: Of a Ray cluster ("auto": the one of this machine); None starts one of this machine alone.
        gpus: Share of a GPU that each run, or stack of MLPs, takes.
        threads: Its CPU threads.
    """

    address: str | None = None
    gpus: float = 0.0
    threads: int = 1


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


def share(recipes: Sequence[Recipe], part: tuple[int, int]) -> list[Recipe]:
    """Those of the k-th of n slices, k from 1. Which slice a run is in depends on nothing but its recipe.

    MLPs that can be stacked are in one slice. Other runs of a table are dealt by the hash of their recipes.
    """
    k, n = part
    return [recipe for recipe in recipes if int(_group(recipe).identity, 16) % n == k - 1]


def _group(recipe: Recipe) -> Recipe:
    return stack_key(recipe) if stackable(recipe) else recipe


def batches(recipes: Sequence[Recipe], largest: int) -> Iterator[list[Recipe]]:
    """Runs to be taken together: neighbours that can be stacked, at most `largest`; all others alone."""
    for key, group in groupby(recipes, key=_group):
        members = list(dict.fromkeys(group))
        size = largest if stackable(key) else 1
        for start in range(0, len(members), size):
            yield members[start : start + size]


def finished(out: Path, recipe: Recipe) -> bool:
    return (out / recipe.folder / SUMMARY).exists()


def run_all(recipes: Sequence[Recipe], out: Path, session: Session, stack: int = 16, on: Cluster | None = None) -> int:
    """Works through the recipes; returns how many failed. Raises `Interrupted` when a signal stops it."""
    left = [some for some in batches(list(dict.fromkeys(recipes)), stack) if not all(finished(out, r) for r in some)]
    return _on_ray(left, out.resolve(), session, on) if on else sum(_here(some, out, session) for some in left)


def _here(members: Sequence[Recipe], out: Path, session: Session) -> int:
    """Runs these in this process; returns how many of them failed, and says why."""
    _check_stop(session, f"before {members[0].folder}")
    new = [recipe for recipe in members if not finished(out, recipe)]
    try:
        _train(members, out, session)
    except (Interrupted, BrokenPipeError):
        raise
    except LabError as error:
        print(f"{members[0].folder}: {error}", file=sys.stderr)
        return len(new)
    except Exception:  # noqa: BLE001 -- one run must not keep the others from running; the traceback is shown
        print(f"{members[0].folder}: failed\n{traceback.format_exc()}", file=sys.stderr)
        return len(new)
    finally:
        gc.collect()  # networks and CUDA graphs refer to themselves
    for recipe in new:
        report(recipe, read_summary(out / recipe.folder, recipe))
    return 0


def _train(members: Sequence[Recipe], out: Path, session: Session) -> None:
    fields: dict[str, Any] = vars(session)
    if stackable(members[0]):
        train_many(members, out, **fields)
    else:
        train(members[0], out, **fields)


def _check_stop(session: Session, where: str) -> None:
    signum = session.stop() if session.stop else None
    if signum:
        raise interruption(signum, where, session.minutes)


def _on_ray(tasks: Sequence[Sequence[Recipe]], out: Path, session: Session, on: Cluster) -> int:
    """Each of these is a task, which Ray starts again where a node dies; `out` is a folder that all nodes share."""
    if not tasks:
        return 0
    try:
        import ray
    except ImportError as error:
        raise DeviceError("--engine ray needs Ray: pip install 'gspace[integrations]'") from error
    try:
        ray.init(on.address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise DeviceError(f"no Ray cluster at {on.address or 'this machine'}: {error}") from error
    plain = replace(session, watch=None, stop=None)  # what can be sent
    if on.address is None and on.gpus > ray.cluster_resources().get("GPU", 0):
        raise DeviceError(f"{on.gpus:g} GPUs a run were asked for, and this machine has fewer")
    needs = {"num_cpus": on.threads, "num_gpus": on.gpus}
    run = ray.remote(_task).options(max_retries=RETRIES, retry_exceptions=True, **needs)
    left = {run.remote(members, out, plain, on.threads): members for members in tasks}
    failed = 0
    try:
        with steps(len(tasks)) as show:
            while left:
                ended, _ = ray.wait(list(left), timeout=0.5)
                _check_stop(session, f"with {len(left)} tasks to do")
                for task in ended:
                    failed += _ended(left.pop(task), out, partial(ray.get, task))
                    show(f"{len(tasks) - len(left)} of {len(tasks)} tasks")
    finally:
        for task in left:
            ray.cancel(task)  # as Ctrl-C does: with a checkpoint
        if left:
            ray.wait(list(left), num_returns=len(left), timeout=60)
    return failed


def _task(members: Sequence[Recipe], out: Path, session: Session, threads: int) -> None:
    """What a worker does. What it raises makes Ray try again, from the checkpoint."""
    torch.set_num_threads(threads)
    for _ in range(PATIENCE):
        try:
            return _train(members, out, session)
        except BusyError:  # a process of a node that was given up may take its time to end
            time.sleep(1.0)
    _train(members, out, session)


def _ended(members: Sequence[Recipe], out: Path, result: Callable[[], None]) -> int:
    try:
        result()
        if not all(finished(out, recipe) for recipe in members):
            raise RecordError(f"{out} has no record of it: --out must be a folder that all nodes share")
    except Exception as error:  # noqa: BLE001 -- Ray wraps whatever was raised on a node
        print(f"{members[0].folder}: {' '.join(str(error).split())}", file=sys.stderr)
        return len(members)
    for recipe in members:
        report(recipe, read_summary(out / recipe.folder, recipe))
    return 0


def conclude(runs: int, before: int, failed: int) -> int:
    """Says in a last line what the lines of the runs do not say, and returns the exit code."""
    if runs and before == runs:
        print("1 run, finished before" if runs == 1 else f"{runs} runs, all finished before", flush=True)
    return 1 if failed else 0


def report(recipe: Recipe, summary: Line | None) -> None:
    """One line per run that has ended."""
    shown = ("status", "test_error", "train_loss", "wall_seconds", "images_per_second", "overhead_seconds")
    values = ", ".join(f"{name} {_short(summary[name])}" for name in shown if summary and name in summary)
    print(f"{recipe.folder}: {values}", flush=True)


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
