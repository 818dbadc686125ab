"""`gspace train`: one recipe with a few seeds, or a list of recipes, here or as the tasks of a Ray cluster.

MLPs that differ in seed and rate alone are trained together, as one stack. What is finished is left alone, what was
stopped is continued. A run that fails is reported and left; running the list again continues it (docs/sweeps.md).
"""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from gspace.lab import options
from gspace.lab.display import steps
from gspace.lab.engine import Cluster
from gspace.lab.errors import BusyError, DeviceError, Interrupted, LabError, RecordError, RequestError, reason
from gspace.lab.learners import batches, stack_or_run, stackable
from gspace.lab.loop import interruption
from gspace.lab.recipe import DEFAULTS, Recipe
from gspace.lab.record import SUMMARY, Json, Run
from gspace.lab.train import Session, train, train_many

PATIENCE = 60  # seconds
RETRIES = 5  # of a task whose node or process died, or that failed
NOTHING_LEFT = "every run was finished before"
EXAMPLES = """examples:
  gspace train --epochs 20 --optimizer gsgd --init skeleton --lr 0.1
      an MLP on scikit-learn's digits, by G-SGD from the paper's initialisation

  gspace train --recipe runs/SOME-RUN/recipe.json --lr 0.05 --seeds 0-4
      a recorded run again, with another rate and five seeds

Each run has a folder below --out, named by what it is and the hash of its recipe. Running the same command again
continues what was stopped, and leaves alone what is finished. A run that diverges is a result, not an error."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="JSON file of fields to start from")
    parser.add_argument("--queue", type=Path, metavar="FILE", help="JSON list of recipes to run instead")
    parser.add_argument("--seeds", type=options.numbers, metavar="N,...", help="several seeds, for example 0-4")
    parser.add_argument("--json", action="store_true", help="print recipes and summaries as JSON")
    options.add_runs(parser)
    options.add_fields(parser.add_argument_group("the recipe"), Recipe)


def run(args: argparse.Namespace) -> int:
    if args.queue:
        ignored = [name for name in (*DEFAULTS, "recipe", "seeds") if getattr(args, name) is not None]
        if ignored:
            raise RequestError(f"--queue has recipes of its own: leave out --{ignored[0].replace('_', '-')}")
        recipes = read_queue(args.queue)
    else:
        one = options.recipe(args)
        recipes = [one.but(seed=seed) for seed in args.seeds] if args.seeds else [one]
    recipes = share(recipes, args.slice) if args.slice else recipes
    cluster, failed = options.cluster(args), 0
    options.prepare(recipes, args)
    told = redirect_stdout(sys.stderr) if args.json else nullcontext()  # the standard output is for the JSON alone
    with told, options.session(args, len(recipes)) as session:
        if len(recipes) == 1 and not (args.queue or cluster):  # what goes wrong is then this command's error
            report(recipes[0], train(recipes[0], args.out, **vars(session)))
        else:
            failed = run_all(recipes, args.out, session, cluster)
    if args.json:
        runs = [Run(args.out / recipe.folder, recipe) for recipe in recipes]
        ended = [{"folder": str(run.folder), "recipe": run.recipe.short(), "summary": run.summary} for run in runs]
        print(json.dumps(ended, indent=1))
    return 1 if failed else 0


def read_queue(path: Path) -> list[Recipe]:
    jobs, recipes = options.read_json(path, list, "list of recipes"), []
    for k, job in enumerate(jobs, 1):
        try:
            recipes.append(Recipe.from_dict(job))
        except RequestError as error:
            raise RequestError(f"{path}, recipe {k} of {len(jobs)}: {error}") from error
    return recipes


def share(recipes: Sequence[Recipe], part: tuple[int, int]) -> list[Recipe]:
    """Those of the k-th of n slices, k from 1. Which slice a run is in depends on nothing but its recipe.

    MLPs that can be stacked are in one slice. Other runs of a table are dealt by the hash of their recipes.
    """
    k, n = part
    return [recipe for recipe in recipes if int(stack_or_run(recipe).identity, 16) % n == k - 1]


def finished(out: Path, recipe: Recipe) -> bool:
    return (out / recipe.folder / SUMMARY).exists()


def run_all(recipes: Sequence[Recipe], out: Path, session: Session, on: Cluster | None = None) -> int:
    """Works through the recipes; returns how many failed. Raises `Interrupted` when a signal stops it."""
    every = batches(list(dict.fromkeys(recipes)))
    left = [(members, new) for members in every if (new := [r for r in members if not finished(out, r)])]
    if recipes and not left:
        print(NOTHING_LEFT, flush=True)
    if on:
        return _on_ray(left, out.resolve(), session, on)
    failed = 0
    for members, new in left:
        _check_stop(session, f"before {members[0].folder}")
        failed += _done(new, out, partial(_train, members, out, session))
    return failed


def _done(new: Sequence[Recipe], out: Path, work: Callable[[], None]) -> int:
    """Does the work of these runs; returns how many of them failed, and says why."""
    try:
        work()
        if not all(finished(out, recipe) for recipe in new):
            raise RecordError(f"{out} has no record of it: --out must be a folder that all nodes share")
    except (Interrupted, BrokenPipeError):
        raise
    except LabError as error:
        print(f"{new[0].folder}: {error}", file=sys.stderr)
    except Exception:  # noqa: BLE001 -- one run must not keep the others from running; the traceback is shown
        print(f"{new[0].folder}: failed\n{traceback.format_exc()}", file=sys.stderr)
    else:
        for recipe in new:
            report(recipe, Run(out / recipe.folder, recipe).summary)
        return 0
    finally:
        gc.collect()  # networks and CUDA graphs refer to themselves
    return len(new)


def _train(members: Sequence[Recipe], out: Path, session: Session) -> None:
    if stackable(members[0]):
        train_many(members, out, **vars(session))
    else:
        train(members[0], out, **vars(session))


def _check_stop(session: Session, where: str) -> None:
    signum = session.stop() if session.stop else None
    if signum:
        raise interruption(signum, where)


def _on_ray(tasks: Sequence[tuple[list[Recipe], list[Recipe]]], out: Path, session: Session, on: Cluster) -> int:
    """Each of these is a task, which Ray starts again where a node dies; `out` is a folder that all nodes share."""
    if not tasks:
        return 0
    try:
        import ray
    except ImportError as error:
        raise DeviceError("--engine ray needs Ray: pip install ray") from error
    try:
        ray.init(on.address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise DeviceError(f"no Ray cluster at {on.address or 'this machine'}: {error}") from error
    plain = replace(session, watch=None, stop=None)  # what can be sent
    if on.address is None and on.gpus > ray.cluster_resources().get("GPU", 0):
        raise DeviceError(f"{on.gpus:g} GPUs a run were asked for, and this machine has fewer")
    needs = {"num_cpus": on.threads, "num_gpus": on.gpus}
    run = ray.remote(_task).options(max_retries=RETRIES, retry_exceptions=True, **needs)
    left = {run.remote(members, out, plain, on.threads): new for members, new in tasks}
    failed = 0

    def result(task: object) -> None:
        try:
            ray.get(task)
        except Exception as error:  # Ray wraps whatever was raised on a node
            raise RecordError(reason(error)) from error

    try:
        with steps(len(tasks)) as show:
            while left:
                ended, _ = ray.wait(list(left), timeout=0.5)
                _check_stop(session, f"with {len(left)} tasks to do")
                for task in ended:
                    failed += _done(left.pop(task), out, partial(result, task))
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


def report(recipe: Recipe, summary: Json | None) -> None:
    shown = ("status", "test_error", "train_loss", "wall_seconds", "images_per_second", "overhead_seconds")
    values = [(name, summary[name]) for name in shown if summary and name in summary]
    texts = (f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in values)
    print(f"{recipe.folder}: {', '.join(texts)}", flush=True)
