"""Runs recipes: one network, or several as a stack, on a CPU or a GPU, begun or continued.

    summary = train(recipe, "runs")              # one run
    summaries = train_many(recipes, "runs")      # MLPs that differ in seed and rate, all at once
    gspace train --queue jobs.json --out runs    # every recipe of a list (sweep.py)

Everything random in iteration i is a function of (seed, i), see seeds.py; the state of a run is its weights, its
optimizer and i. A run that is stopped, by a signal or by force, continues from its checkpoint to the same bits.
"""

import functools
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gspace.lab.data import load, subset
from gspace.lab.engine import Engine, arithmetic, number_type
from gspace.lab.errors import RecordError, RequestError
from gspace.lab.learners import LEARNERS, largest_stack, stack_key, stackable
from gspace.lab.loop import Loop, Stop, Watch, stop_requests
from gspace.lab.recipe import Recipe
from gspace.lab.record import CHECKPOINT, Json, Run, environment, open_run, read_run
from gspace.lab.seeds import derive
from gspace.lab.transform import feed

_data = functools.lru_cache(maxsize=2)(load)


@dataclass(frozen=True)
class Session:
    """What runs of one call have in common."""

    data_dir: str | Path | None = None  # see `data.data_folder`
    engine: Engine = field(default_factory=Engine)
    watch: Watch | None = None  # told of the progress
    stop: Stop | None = None  # if left out, signals are caught for the call's time


def train(recipe: Recipe, out: str | Path, **session: Any) -> Json:
    """Runs a recipe to its end, from its checkpoint if there is one, and returns its summary; a finished one has it.

    `out` is the folder of run folders, `session` has fields of `Session`. Raises `Interrupted` when a signal stops it,
    after a checkpoint, and `BusyError` if another process is at work on it.
    """
    with open_run(Path(out), recipe) as run:
        if run.summary is None:
            _work([run], "single", Session(**session))
        assert run.summary is not None, "the loop ends with a summary or an exception"
        return run.summary


def train_many(recipes: Sequence[Recipe], out: str | Path, **session: Any) -> list[Json]:
    """`train` for MLPs that differ in seed and learning rate alone, all at once as stacked weights.

    Each run has its own folder, as if it had been trained alone, and the same numbers up to rounding. Finished runs are
    left as they are; an interrupted stack continues as the stack it was, with those of it that were not asked for; new
    runs make new ones.
    """
    for recipe in recipes:
        if not stackable(recipe) or stack_key(recipe) != stack_key(recipes[0]):
            raise RequestError(f"{recipe.folder} cannot be stacked: only MLPs that differ in seed and lr alone can")
    with ExitStack() as stack:
        runs = [stack.enter_context(open_run(Path(out), recipe)) for recipe in recipes]
        _work_in_stacks(runs, Session(**session))
        return [run.summary or {} for run in runs]


def _work_in_stacks(runs: Sequence[Run], session: Session) -> None:
    """Trains what is unfinished: interrupted runs as they were begun, the rest in stacks, or alone where faster."""
    found = {run.folder.name: run for run in runs}
    fresh: list[str] = []
    stacks: dict[tuple[str, ...], str] = {}
    for name, run in found.items():
        state = run.load() if run.summary is None else None
        if state is not None:
            kind, members = state["kind"], tuple(state["members"])
            if kind not in LEARNERS or (kind == "single" and len(members) > 1):
                raise RecordError(f"{run.folder / CHECKPOINT} is of {len(members)} {kind} runs, which there are not")
            stacks[members] = kind
        elif run.summary is None:
            fresh.append(name)
    begun = {name for members in stacks for name in members}  # also one whose own checkpoint was deleted
    fresh = [name for name in fresh if name not in begun]
    size = largest_stack(runs[0].recipe, session.engine.resolve().device)
    for i in range(0, len(fresh), size):
        stacks[tuple(fresh[i : i + size])] = "single" if size == 1 else "stacked"
    for members, kind in stacks.items():
        with ExitStack() as held:
            for name in members:
                if name not in found:  # begun with these, and the stack cannot go on without its weights
                    folder = runs[0].folder.parent / name
                    recipe = read_run(folder).recipe
                    if stack_key(recipe) != stack_key(runs[0].recipe):
                        raise RecordError(f"{runs[0].folder / CHECKPOINT} names {name}, which no stack has beside it")
                    found[name] = held.enter_context(open_run(folder.parent, recipe))
            _work([found[name] for name in members], kind, session)


def _work(runs: Sequence[Run], kind: str, session: Session) -> None:
    """From run folders to the loop: data, network, checkpoint, display."""
    started = time.perf_counter()
    recipe, engine = runs[0].recipe, session.engine.resolve()
    data = _data(recipe.data, session.data_dir, engine.device)
    data = subset(data, train=recipe.train_size, test=recipe.test_size, validation=recipe.validation)
    source = feed(data, recipe.inputs, recipe.augment, number_type(recipe.precision))
    with arithmetic(recipe.precision, engine.deterministic), torch.random.fork_rng(), ExitStack() as stack:
        if engine.graph:
            stack.enter_context(torch.cuda.device(engine.device))  # streams and graphs belong to the current device
        torch.manual_seed(derive(recipe.seed, "noise"))
        loop = Loop(runs, LEARNERS[kind]([run.recipe for run in runs], source, engine), source, engine)
        for run in runs:
            run.begin(environment(engine=asdict(engine), iteration=loop.iteration))
        stop = session.stop or stack.enter_context(stop_requests())
        loop.prepare(started)
        loop.run(session.watch, stop)
