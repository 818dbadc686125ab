"""The training loop, the same for a single network and for a stack of them; `train.py` makes what it works on.

Signals, and a limit of time, are a request to stop that it reads where it can be stopped.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor

from gspace.lab.engine import Engine, capture
from gspace.lab.errors import Interrupted, RecordError, reason
from gspace.lab.learners import Learner
from gspace.lab.recipe import Recipe, changes, curve_interval, learning_rate, points, steps_per_epoch, total_iterations
from gspace.lab.record import CHECKPOINT, METRICS, Json, Run, finite
from gspace.lab.transform import EVALUATION_BATCH, Feed, epoch_rows

HEARTBEAT = 0.5  # seconds between two reports of progress


class Moment(NamedTuple):
    """What a display is told, now and then and at each point of the curve."""

    recipes: tuple[Recipe, ...]  # the runs in progress (more than one in a stack)
    iteration: int
    total: int
    loss: tuple[float, ...]  # per run, mean over the training batches since the last point of the curve
    images_per_second: float  # of this session, evaluation not counted
    seconds_left: float
    lines: tuple[Json | None, ...] = ()  # the new point of each curve, if there is one; None if it diverged before


Watch = Callable[[Moment], None]
Stop = Callable[[], int | None]  # number of the signal that asks to stop, or None


def interruption(signum: int, where: str) -> Interrupted:
    """What ends the work: a signal, or a limit of time, which comes as SIGALRM.

    >>> str(interruption(signal.SIGALRM, "at iteration 5 of 9"))
    'the minutes are over at iteration 5 of 9; run again to continue'
    """
    why = "the minutes are over" if signum == signal.SIGALRM else f"stopped by {signal.Signals(signum).name}"
    return Interrupted(f"{why} {where}; run again to continue", signum)


@contextmanager
def stop_requests(minutes: float | None = None) -> Iterator[Stop]:
    """Turns these signals into a request that the loop reads; a second one acts as it always did.

    With `minutes`, SIGALRM comes after that time. SIGHUP stays ignored where it is (`nohup`).
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]

    def receive(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        signal.signal(signum, before[signal.Signals(signum)])

    for signum in before:
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


class Loop:
    """The position of a training run and what moves it on."""

    def __init__(self, runs: Sequence[Run], learner: Learner, source: Feed, engine: Engine) -> None:
        self.runs, self.learner, self.source, self.engine = runs, learner, source, engine
        self.recipe = runs[0].recipe
        images = len(source.labels)
        self.epoch_steps = steps_per_epoch(self.recipe, images)
        self.total = total_iterations(self.recipe, images)
        self.interval = curve_interval(self.recipe, self.total)
        self.changes = changes(self.recipe, self.total)
        self.active = [k for k, run in enumerate(runs) if run.summary is None]
        self.iteration = 0
        self.seconds = 0.0  # of training in all sessions, evaluation not counted
        self.wall = 0.0  # the same with evaluation and checkpoints
        self.session = 0  # iterations of this one
        self.elapsed = 0.0  # seconds of training in it
        self.overhead = 0.0  # seconds to load, build, compile and capture
        self.advance: Callable[[Tensor], None] = learner.step
        self._resume()

    def _resume(self) -> None:
        """Continues from the checkpoint, which is in the folder of the first run; the others' folders point to it."""
        host, *others = self.runs
        state = host.load()
        if state is not None:
            if state["kind"] != self.learner.kind:
                begun = f"{host.folder} was begun as a {state['kind']} run"
                raise RecordError(f"{begun}: continue it as such, or delete it")
            self._load(state)
            self._check_curves()
        for k in self.active:
            self.runs[k].rewind(self.iteration)
        if others and state is None:
            self._save()  # before what points to it: a kill in between leaves no pointer to nothing
        for run in others:
            run.save(self._kind())

    def _load(self, state: Json) -> None:
        try:
            if state["members"] != self._kind()["members"] or state["iteration"] not in range(self.total + 1):
                raise ValueError(f"it is at iteration {state['iteration']} of {', '.join(state['members'])}")
            self.iteration, self.seconds, self.wall = state["iteration"], state["seconds"], state["wall"]
            self.learner.load(state["learner"])
            self.learner.totals.copy_(state["totals"])
            torch.set_rng_state(state["random"])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            misfit = f"{self.runs[0].folder / CHECKPOINT} does not fit this run ({reason(error)})"
            raise RecordError(f"{misfit}: delete it to start this run again") from error

    def _check_curves(self) -> None:
        """A curve may be ahead of the checkpoint, if a kill came before the next one; what it lacks is lost."""
        expected = points(self.interval, self.total, self.iteration)
        for run in (self.runs[k] for k in self.active):
            missing = sorted({*expected} - {line["iteration"] for line in run.metrics})
            if missing:
                again = "this run" if len(self.runs) == 1 else f"the {len(self.runs)} runs of its stack"
                raise RecordError(
                    f"{run.folder / METRICS} has no point at iteration {missing[0]}, but the checkpoint is at "
                    f"{self.iteration}: delete {self.runs[0].folder / CHECKPOINT} to start {again} again"
                )

    def _kind(self) -> Json:
        return {"kind": self.learner.kind, "members": [run.folder.name for run in self.runs]}

    def prepare(self, started: float) -> None:
        """Captures the step, if it is to be one CUDA graph."""
        if self.engine.graph and self.iteration < self.total:
            learner, rows = self.learner, self._rows(self.iteration // self.epoch_steps)[0]
            self.advance = capture(learner.step, rows, learner.live, learner.optimizer.zero_grad)
            torch.cuda.synchronize()
        self.overhead = time.perf_counter() - started

    def run(self, watch: Watch | None, stop: Stop) -> None:
        """Iterates to the end, to divergence, or to a signal."""
        rows: Tensor | None = None
        rates: list[float] = []
        recipes = tuple(run.recipe for run in self.runs)
        clock = beat = saved = time.perf_counter()
        while self.iteration < self.total and self.active:
            epoch, step = divmod(self.iteration, self.epoch_steps)
            if rows is None or step == 0:
                rows = self._rows(epoch)
            if not rates or self.iteration in self.changes:
                rates = [learning_rate(run.recipe, self.iteration, self.total) for run in self.runs]
                self.learner.set_rates(rates)
            self.advance(rows[step])
            self.iteration += 1
            self.session += 1

            due = self.iteration % self.interval == 0 or self.iteration == self.total
            signum = stop()
            if not (due or signum or time.perf_counter() - beat > HEARTBEAT):
                continue
            since = (self.iteration - 1) % self.interval + 1  # iterations that `totals` sums over
            totals = (self.learner.totals / since).tolist()  # waits for the device
            self.elapsed += time.perf_counter() - clock
            self.seconds += time.perf_counter() - clock
            lines = self._point(totals, rates) if due else ()
            try:
                if watch is not None:
                    left = (self.total - self.iteration) * self.elapsed / self.session
                    losses, speed = tuple(loss for loss, _ in totals), self._images() / self.elapsed
                    watch(Moment(recipes, self.iteration, self.total, losses, speed, left, lines))
            except OSError:  # nobody reads any more (`| head`), or the log has no room
                self._save()
                raise
            now = time.perf_counter()
            self.wall += now - clock
            clock = now
            if signum and self.iteration < self.total:
                self._save()
                raise interruption(signum, f"at iteration {self.iteration} of {self.total}")
            if time.perf_counter() - saved > self.engine.checkpoint_seconds:
                self._save()
                saved = time.perf_counter()
            self.wall += time.perf_counter() - clock
            clock = beat = time.perf_counter()
        self._finish()

    def _rows(self, epoch: int) -> Tensor:
        """The rows of an epoch, `(step, network, batch, 1 + draws)`, on the device."""
        size, images, augment = self.recipe.batch_size, len(self.source.labels), self.source.augment
        rows = torch.stack([epoch_rows(run.recipe.seed, epoch, images, size, augment) for run in self.runs], 1)
        if self.source.labels.is_cuda:
            return rows.pin_memory().to(self.source.labels.device, non_blocking=True)
        return rows

    def _point(self, totals: Sequence[Sequence[float]], rates: Sequence[float]) -> tuple[Json | None, ...]:
        """Measures, writes a point of each curve, and takes those out that have diverged."""
        scores = self.learner.score(self.source.test_batches())
        self.learner.totals.zero_()
        lines: list[Json | None] = [None] * len(self.runs)
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
            blown_up = self.iteration == self.total and not math.isfinite(test_loss)  # by the very last step
            if not math.isfinite(loss) or blown_up:
                self.active.remove(k)
                self.runs[k].finish({"status": "diverged", **self._facts(k), **line, "test_error": None})
        return tuple(lines)

    def _images(self) -> int:
        return self.session * self.recipe.batch_size * len(self.runs)

    def _save(self) -> None:
        for run in self.runs[1:]:
            run.sync()
        state = {"iteration": self.iteration, "seconds": self.seconds, "wall": self.wall}
        tensors = {"totals": self.learner.totals, "random": torch.get_rng_state(), "learner": self.learner.state()}
        self.runs[0].save({**self._kind(), **state, **tensors})

    def _facts(self, k: int) -> Json:
        """What a summary says besides the last point of the curve."""
        return {"identity": self.runs[k].recipe.identity, "iterations": self.total, "stacked": len(self.runs)}

    def _finish(self) -> None:
        if not self.active:
            return
        self._save()
        scores = self.learner.score(map(self.source.batch, self.source.still_rows().split(EVALUATION_BATCH)))
        times = {"images_per_second": self._images() / self.elapsed} if self.elapsed else {}
        times |= {"wall_seconds": round(self.wall, 3), "overhead_seconds": round(self.overhead, 3)}
        for k in self.active:
            lines, (loss, error) = self.runs[k].metrics, scores[k]
            best = {"best_test_error": min(line["test_error"] for line in lines)}
            fit = {"fit_loss": finite(loss), "fit_error": error}
            self.runs[k].finish({"status": "finished", **self._facts(k), **lines[-1], **best, **fit, **times})
