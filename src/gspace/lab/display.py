"""What a person sees while something takes long: bars on a terminal, lines in a log. Bars need rich; nothing else does.

A bar stands on standard error and goes when it has done its work, so what is written to standard output stays clean.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

    from gspace.lab.loop import Progress, Watch
    from gspace.lab.recipe import Recipe


def bars(*columns: Any) -> "Bars | None":
    """What draws bars, each with a text behind it; None where nobody would see them, or without rich."""
    if not (sys.stderr.isatty() or os.environ.get("FORCE_COLOR")):
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        return None
    texts = TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[note]}")
    to_screen = sys.stdout.isatty()  # else results go to a file
    return Progress(*texts, *columns, console=Console(stderr=True), transient=True, redirect_stdout=to_screen)


@contextmanager
def display(total: int, *, quiet: bool = False) -> "Iterator[Watch | None]":
    """A bar for all runs and one for that in progress, or lines on standard output; with `quiet`, nothing."""
    shown = None if quiet else bars()
    if shown is None:
        yield None if quiet else show
        return
    with shown:
        everything, now = (shown.add_task(name, total=total, note="") for name in ("all", ""))
        parts: dict[tuple[Recipe, ...], float] = {}

        def watch(told: "Progress") -> None:
            parts[told.recipes] = len(told.recipes) * told.iteration / told.total
            done = sum(parts.values())
            shown.update(everything, completed=done, note=f"{done:.1f}/{total} runs")
            note = f"{told.seconds_left:.0f} s left, loss {told.loss[0]:.4f}, {told.images_per_second:,.0f} images/s"
            name = describe(told.recipes)
            shown.update(now, description=name, completed=told.iteration, total=told.total, note=note)

        yield watch


def describe(recipes: "tuple[Recipe, ...]") -> str:
    """What is being trained, in a few words."""
    first = recipes[0]
    many = f"{len(recipes)} at once" if len(recipes) > 1 else f"seed {first.seed}"
    return f"{first.data}, {first.model}, {first.optimizer}, {many}"


def show(told: "Progress") -> None:
    """One line per point of the curve, for a log."""
    if any(told.lines):
        error = " ".join("-" if line is None else f"{100 * line['test_error']:.2f}" for line in told.lines)
        loss = " ".join(f"{value:.4f}" for value in told.loss)
        what = "validation" if told.recipes[0].validation else "test"
        where = f"  {told.recipes[0].folder} {told.iteration}/{told.total} loss {loss} {what} error % {error}"
        print(f"{where} {told.images_per_second:.0f} images/s {told.seconds_left:.0f} s left", flush=True)


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """A bar of so many steps; is told what comes next."""
    shown = bars()
    with shown or nullcontext():
        task = shown.add_task("", total=total, note="") if shown else None

        def begin(name: str) -> None:
            if shown is not None and task is not None:
                shown.update(task, description=name, advance=1)

        yield begin


class DownloadBar:
    """The progress bar that pooch moves on; a line in a log."""

    def __init__(self, name: str) -> None:
        self.total = 0
        self.shown = bars()
        if self.shown is None:
            print(f"downloading {name}", file=sys.stderr, flush=True)
            return
        self.shown.start()
        self.task = self.shown.add_task(name, note="")

    def update(self, count: int) -> None:
        if self.shown is not None:
            self.shown.update(self.task, total=self.total or None, advance=count, note=f"{self.total / 1e6:.0f} MB")

    def reset(self) -> None:
        if self.shown is not None:
            self.shown.reset(self.task)

    def close(self) -> None:
        if self.shown is not None:
            self.shown.stop()
