"""The training loop: one for a single network and for a stack of them, on a CPU or a GPU, begun or continued.

    summary = train(recipe, "runs")              # one run
    summaries = train_many(recipes, "runs")      # MLPs that differ in seed and rate, all at once
    python -m gspace.lab.train --queue jobs.json --out runs     # every recipe of a list, shared by several processes

Everything random in iteration i is a function of (seed, i), see seeds.py; the state of a run is its weights, its
optimizer and i. A run that is stopped, by a signal or by force, continues from its checkpoint to the same bits.
"""

import functools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gspace.lab.data import DataSet, load, subset
from gspace.lab.download import Progress as DownloadProgress
from gspace.lab.engine import Engine, arithmetic, capture, number_type
from gspace.lab.errors import Interrupted, RecipeError, RecordError
from gspace.lab.learners import Learner, Single, Stacked
from gspace.lab.recipe import Recipe
from gspace.lab.record import CHECKPOINT, METRICS, SUMMARY, Line, Run, environment, finite, open_run, read_run
from gspace.lab.schedule import drops, evaluation_interval, learning_rate, points, steps_per_epoch, total_iterations
from gspace.lab.seeds import derive
from gspace.lab.stacked import largest_stack, stack_key, stackable
from gspace.lab.transform import Feed, epoch_rows, feed

HEARTBEAT = 0.5  # seconds between two reports of progress

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


@dataclass(frozen=True)
class Progress:
    """What a display is told, now and then and at each point of the curve.

    Attributes:
        recipes: The runs in progress (more than one in a stack).
        iteration, total: How far they are.
        loss, error: Means over the training batches since the last point of the curve, per run.
        images_per_second: Of this session, evaluation not counted.
        seconds_left: Estimate.
        lines: The new point of each run's curve, if there is one (None for a run that has diverged before).
    """

    recipes: tuple[Recipe, ...]
    iteration: int
    total: int
    loss: tuple[float, ...]
    error: tuple[float, ...]
    images_per_second: float
    seconds_left: float
    lines: tuple[Line | None, ...] = ()


Watch = Callable[[Progress], None]
Stop = Callable[[], int | None]


@dataclass(frozen=True)
class Session:
    """What runs of one call have in common.

    Attributes:
        data_dir: Where the data sets are, see `data.data_folder`.
        engine: How to compute.
        watch: Told of the progress.
        download: If given, data sets that are absent are downloaded, and this is told of it.
        stop: Number of the signal that asks to stop, or None; signals are caught for the call's time if left out.
        minutes: The time after which `stop` gives SIGALRM, if there is such a limit.
    """

    data_dir: str | Path | None = None
    engine: Engine = field(default_factory=Engine)
    watch: Watch | None = None
    download: DownloadProgress | None = None
    stop: Stop | None = None
    minutes: float | None = None


def train(recipe: Recipe, out: str | Path, **session: Any) -> Line:
    """Runs a recipe to its end, from its checkpoint if there is one, and returns its summary.

    A finished run returns the summary it has. Raises `Interrupted` when a signal stops it, after a checkpoint, and
    `BusyError` if another process is at work on it.

    Args:
        out: Folder of run folders.
        session: Fields of `Session`.
    """
    with open_run(Path(out), recipe) as run:
        work_alone(run, Session(**session))
        assert run.summary is not None, "the loop ends with a summary or an exception"
        return run.summary


def train_many(recipes: Sequence[Recipe], out: str | Path, **session: Any) -> list[Line]:
    """`train` for MLPs that differ in seed and learning rate alone, all at once as stacked weights.

    Each run has its own folder, as if it had been trained alone, and the same numbers up to rounding. Finished runs are
    left as they are; an interrupted stack continues as the stack it was, new runs make new ones.
    """
    for recipe in recipes:
        if not stackable(recipe) or stack_key(recipe) != stack_key(recipes[0]):
            raise RecipeError(f"{recipe.folder} cannot be stacked: only MLPs that differ in seed and lr alone can")
    with ExitStack() as stack:
        runs = [stack.enter_context(open_run(Path(out), recipe)) for recipe in recipes]
        work_in_stacks(runs, Session(**session))
        return [run.summary or {} for run in runs]


def work_alone(run: Run, session: Session) -> None:
    """Trains one run, unless it is finished."""
    if run.summary is None:
        _work([run], _single, session)


def work_in_stacks(runs: Sequence[Run], session: Session) -> None:
    """Trains what is unfinished of `runs`: interrupted ones as they were begun, the rest in new stacks, or one by one
    where that is faster."""
    found = {run.folder.name: run for run in runs}
    fresh: list[str] = []
    stacks: dict[tuple[str, ...], str] = {}
    for name, run in found.items():
        state = run.load() if run.summary is None else None
        if state is not None:
            stacks[tuple(state["members"])] = state["kind"]
        elif run.summary is None:
            fresh.append(name)
    begun = {name for members in stacks for name in members}  # also one whose own checkpoint was deleted
    fresh = [name for name in fresh if name not in begun]
    size = largest_stack(runs[0].recipe, session.engine.resolve().device)
    for i in range(0, len(fresh), size):
        stacks[tuple(fresh[i : i + size])] = Single.kind if size == 1 else Stacked.kind
    for members, kind in stacks.items():
        with ExitStack() as held:
            for name in members:
                if name not in found:
                    found[name] = held.enter_context(_companion(runs[0].folder.parent / name, members, found))
            _work([found[name] for name in members], LEARNERS[kind], session)


def _companion(folder: Path, members: Sequence[str], found: Mapping[str, Run]) -> AbstractContextManager[Run]:
    """A run that nobody asked for because it has ended; the stack it was begun in cannot go on without its weights."""
    if not (folder / SUMMARY).exists():
        asked = next(name for name in members if name in found)
        raise RecordError(f"{asked} was begun in one stack with {folder.name}: continue both together")
    return open_run(folder.parent, read_run(folder).recipe)


def _single(recipes: Sequence[Recipe], source: Feed, engine: Engine) -> Learner:
    (recipe,) = recipes
    return Single(recipe, source, engine)


LEARNERS: Mapping[str, Callable[[Sequence[Recipe], Feed, Engine], Learner]] = {
    Single.kind: _single,
    Stacked.kind: Stacked,
}


@functools.lru_cache(maxsize=2)
def _data(name: str, data_dir: str | Path | None, device: str, download: DownloadProgress | None) -> DataSet:
    return load(name, data_dir, device, download=download)


def _work(runs: Sequence[Run], learner: Callable[[Sequence[Recipe], Feed, Engine], Learner], session: Session) -> None:
    """From run folders to the loop: data, network, checkpoint, display."""
    started = time.perf_counter()
    recipe, engine = runs[0].recipe, session.engine.resolve()
    data = _data(recipe.data, session.data_dir, engine.device, session.download)
    data = subset(data, train=recipe.train_size, test=recipe.test_size, validation=recipe.validation)
    source = feed(data, recipe.inputs, recipe.augment, number_type(recipe.precision))
    with arithmetic(recipe.precision, engine.deterministic), torch.random.fork_rng(), ExitStack() as stack:
        if engine.graph:
            stack.enter_context(torch.cuda.device(engine.device))  # streams and graphs belong to the current device
        torch.manual_seed(derive(recipe.seed, "noise"))
        loop = Loop(runs, learner([run.recipe for run in runs], source, engine), source, engine)
        for run in runs:
            run.begin(environment(engine=asdict(engine), iteration=loop.iteration))
        watches = [session.watch] if session.watch else []
        if engine.tensorboard:
            watches.append(stack.enter_context(_tensorboard(runs, loop.iteration)))
        stop = session.stop or stack.enter_context(stop_requests())
        loop.prepare(started)
        loop.run(watches, stop, session.minutes)


class Loop:
    """The position of a training run and what moves it on."""

    def __init__(self, runs: Sequence[Run], learner: Learner, source: Feed, engine: Engine) -> None:
        self.runs, self.learner, self.source, self.engine = runs, learner, source, engine
        self.recipe = runs[0].recipe
        images = len(source.labels)
        self.epoch_steps = steps_per_epoch(self.recipe, images)
        self.total = total_iterations(self.recipe, images)
        self.interval = evaluation_interval(self.recipe, self.total)
        self.iteration = 0
        self.active = [k for k, run in enumerate(runs) if run.summary is None]
        self.seconds = 0.0  # of training in all sessions, evaluation not counted
        self.wall = 0.0  # the same with evaluation and checkpoints
        self.session = 0  # iterations of this one
        self.overhead = 0.0  # seconds to load, build, compile and capture
        self.drops = drops(self.recipe, self.total)
        self.advance: Callable[[Tensor], None] = learner.step
        self._resume()

    def _resume(self) -> None:
        """Continues from the checkpoint, which is in the folder of the first run; the others' folders point to it."""
        host, *others = self.runs
        state = host.load()
        if state is not None:
            if state["kind"] != self.learner.kind:
                raise RecordError(
                    f"{host.folder} was begun as a {state['kind']} run: continue it as such, or delete it"
                )
            self._check_curves(state["iteration"])
            self.iteration, self.seconds, self.wall = state["iteration"], state["seconds"], state["wall"]
            self.learner.load(state["learner"])
            self.learner.totals.copy_(state["totals"])
            torch.set_rng_state(state["random"])
        for k in self.active:
            self.runs[k].rewind(self.iteration)
        for run in others:
            run.save(self._kind())

    def _check_curves(self, iteration: int) -> None:
        """A curve may be ahead of the checkpoint, if a kill came before the next one; what it lacks is lost."""
        expected = points(self.interval, self.total, iteration)
        for run in (self.runs[k] for k in self.active):
            missing = sorted({*expected} - {line["iteration"] for line in run.metrics})
            if missing:
                again = "this run" if len(self.runs) == 1 else f"the {len(self.runs)} runs of its stack"
                raise RecordError(
                    f"{run.folder / METRICS} has no point at iteration {missing[0]}, but the checkpoint is at "
                    f"{iteration}: delete {self.runs[0].folder / CHECKPOINT} to start {again} again"
                )

    def _kind(self) -> Line:
        return {"kind": self.learner.kind, "members": [run.folder.name for run in self.runs]}

    def prepare(self, started: float) -> None:
        """Captures the step, if it is to be one CUDA graph."""
        if self.engine.graph and self.iteration < self.total:
            rows = self._rows(self.iteration // self.epoch_steps)[0]
            self.advance = capture(self.learner.step, rows, self.learner.live, self.learner.clear)
            torch.cuda.synchronize()
        self.overhead = time.perf_counter() - started

    def run(self, watches: Sequence[Watch], stop: Stop, minutes: float | None = None) -> None:
        """Iterates to the end, to divergence, or to a signal."""
        rows: Tensor | None = None
        rates: list[float] = []
        clock = beat = saved = time.perf_counter()
        elapsed = 0.0  # seconds of training in this session
        while self.iteration < self.total and self.active:
            epoch, step = divmod(self.iteration, self.epoch_steps)
            if rows is None or step == 0:
                rows = self._rows(epoch)
            if not rates or self.iteration in self.drops:
                rates = [learning_rate(run.recipe, self.iteration, self.total) for run in self.runs]
                self.learner.set_rates(rates)
            self.advance(rows[step])
            self.iteration += 1
            self.session += 1

            due = self.iteration % self.interval == 0 or self.iteration == self.total
            signum = stop()
            if not (due or signum or time.perf_counter() - beat > HEARTBEAT):
                continue
            totals = (self.learner.totals / self._since_line()).tolist()  # waits for the device
            elapsed += time.perf_counter() - clock
            self.seconds += time.perf_counter() - clock
            lines = self._point(totals, rates) if due else ()
            self._tell(watches, totals, lines, elapsed)
            now = time.perf_counter()
            self.wall += now - clock
            clock = now
            if signum and self.iteration < self.total:
                self._save()
                raise interruption(signum, f"at iteration {self.iteration} of {self.total}", minutes)
            if time.perf_counter() - saved > self.engine.checkpoint_seconds:
                self._save()
                saved = time.perf_counter()
            self.wall += time.perf_counter() - clock
            clock = beat = time.perf_counter()
        self._finish(elapsed)

    def _rows(self, epoch: int) -> Tensor:
        """The rows of an epoch, `(step, network, batch, 1 + draws)`, on the device."""
        size, images, augment = self.recipe.batch_size, len(self.source.labels), self.source.augment
        rows = torch.stack([epoch_rows(run.recipe.seed, epoch, images, size, augment) for run in self.runs], 1)
        if self.source.labels.is_cuda:
            return rows.pin_memory().to(self.source.labels.device, non_blocking=True)
        return rows

    def _since_line(self) -> int:
        """Iterations that `totals` sums over."""
        return (self.iteration - 1) % self.interval + 1

    def _point(self, totals: Sequence[Sequence[float]], rates: Sequence[float]) -> tuple[Line | None, ...]:
        """Measures, writes a point of each curve, and takes those out that have diverged."""
        scores = self.learner.test()
        self.learner.totals.zero_()
        lines: list[Line | None] = [None] * len(self.runs)
        for k in list(self.active):
            (loss, errors), (test_loss, test_error) = totals[k], scores[k]
            line = {
                "iteration": self.iteration,
                "epoch": self.iteration / self.epoch_steps,
                "lr": rates[k],
                "train_loss": finite(loss),
                "train_error": errors / self.recipe.batch_size,
                "test_loss": finite(test_loss),
                "test_error": test_error,
                "seconds": round(self.seconds, 3),
            }
            self.runs[k].append(line)
            lines[k] = line
            if not math.isfinite(loss):
                self.active.remove(k)
                self.runs[k].finish({"status": "diverged", **self._facts(k), **line, "test_error": None})
        return tuple(lines)

    def _tell(
        self,
        watches: Sequence[Watch],
        totals: Sequence[Sequence[float]],
        lines: tuple[Line | None, ...],
        seconds: float,
    ) -> None:
        progress = Progress(
            recipes=tuple(run.recipe for run in self.runs),
            iteration=self.iteration,
            total=self.total,
            loss=tuple(loss for loss, _ in totals),
            error=tuple(errors / self.recipe.batch_size for _, errors in totals),
            images_per_second=self._images() / seconds,
            seconds_left=(self.total - self.iteration) * seconds / self.session,
            lines=lines,
        )
        for watch in watches:
            watch(progress)

    def _images(self) -> int:
        return self.session * self.recipe.batch_size * len(self.runs)

    def _save(self) -> None:
        for run in self.runs[1:]:
            run.sync()
        self.runs[0].save(
            {
                **self._kind(),
                "iteration": self.iteration,
                "seconds": self.seconds,
                "wall": self.wall,
                "totals": self.learner.totals,
                "random": torch.get_rng_state(),
                "learner": self.learner.state(),
            }
        )

    def _facts(self, k: int) -> Line:
        """What a summary says besides the last point of the curve."""
        return {"identity": self.runs[k].recipe.identity, "iterations": self.total, "stacked": len(self.runs)}

    def _finish(self, seconds: float) -> None:
        if not self.active:
            return
        self._save()
        scores = self.learner.fit()
        speed = {"images_per_second": self._images() / seconds} if seconds else {}
        for k in self.active:
            run = self.runs[k]
            lines = run.metrics
            loss, error = scores[k]
            fit = {"fit_loss": finite(loss), "fit_error": error}
            best = {"best_test_error": min(line["test_error"] for line in lines)}
            overhead = {"wall_seconds": round(self.wall, 3), "overhead_seconds": round(self.overhead, 3)}
            run.finish(
                {"status": "finished", **self._facts(k), **(lines[-1] or {}), **best, **fit, **speed, **overhead}
            )


def interruption(signum: int, where: str, minutes: float | None) -> Interrupted:
    """What ends the work: a signal, or a limit of time, which comes as SIGALRM.

    >>> str(interruption(signal.SIGALRM, "at iteration 5 of 9", 90.0))
    'the 90 minutes are over at iteration 5 of 9; run again to continue'
    """
    why = f"stopped by {signal.Signals(signum).name}"
    if signum == signal.SIGALRM and minutes is not None:
        why = "the minute is over" if minutes == 1 else f"the {minutes:g} minutes are over"
    return Interrupted(f"{why} {where}; run again to continue", signum)


@contextmanager
def stop_requests(minutes: float | None = None) -> Iterator[Stop]:
    """Turns SIGINT, SIGTERM and SIGALRM into a request that the loop reads; a second one acts as it always did.

    With `minutes`, SIGALRM comes after that time.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {signum: signal.getsignal(signum) for signum in STOPPING}

    def receive(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        signal.signal(signum, before[signal.Signals(signum)])

    for signum in STOPPING:
        signal.signal(signum, receive)
    try:
        if minutes is not None:
            signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
        yield lambda: received[0] if received else None
    finally:
        if minutes is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def _tensorboard(runs: Sequence[Run], iteration: int) -> Iterator[Watch]:
    """Writes each new point of the curves for TensorBoard; what it has after `iteration` will be measured again."""
    from torch.utils.tensorboard import SummaryWriter

    writers = {run.recipe: SummaryWriter(str(run.folder / "tensorboard"), purge_step=iteration + 1) for run in runs}

    def write(progress: Progress) -> None:
        for recipe, line in zip(progress.recipes, progress.lines or (None,) * len(runs), strict=True):
            for name, value in line.items() if line else ():
                if value is not None and name != "iteration":
                    writers[recipe].add_scalar(name, value, progress.iteration)

    try:
        yield write
    finally:
        for writer in writers.values():
            writer.close()


if __name__ == "__main__":
    from gspace.lab.queue import main

    sys.exit(main())
