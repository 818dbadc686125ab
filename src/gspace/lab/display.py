"""What a person sees while something takes long: bars on a terminal, lines in a log. Bars need rich; nothing else does.

A bar stands on standard error and goes when it has done its work, so what is written to standard output stays clean.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

    from gspace.lab.loop import Moment, Watch
    from gspace.lab.recipe import Recipe


def seen() -> bool:
    """Whether bars can be drawn, and somebody would see them."""
    return find_spec("rich") is not None and (sys.stderr.isatty() or bool(os.environ.get("FORCE_COLOR")))


def bars() -> "Bars":
    """What draws bars, each with a text behind it; nothing is drawn where nobody would see it."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.table import Column

    note = TextColumn("{task.fields[note]}", table_column=Column())  # goes on in the next line, the bar stays
    columns = TextColumn("{task.description}"), BarColumn(20, table_column=Column(no_wrap=True)), note
    to_screen = sys.stdout.isatty()  # else results go to a file
    on = Console(stderr=True)
    return Bars(*columns, console=on, transient=True, redirect_stdout=to_screen, disable=not seen())


@contextmanager
def display(total: int, *, quiet: bool = False) -> "Iterator[Watch | None]":
    """A bar of all runs that names the one in progress, or lines on standard output; with `quiet`, nothing."""
    if quiet or not seen():
        yield None if quiet else show
        return
    with bars() as shown:
        bar = shown.add_task("", total=total, note="")
        parts: dict[tuple[Recipe, ...], float] = {}

        def watch(told: "Moment") -> None:
            parts[told.recipes] = len(told.recipes) * told.iteration / told.total
            done, first = sum(parts.values()), told.recipes[0]
            speed = f"{told.seconds_left:.0f} s left, loss {told.loss[0]:.4f}, {told.images_per_second:,.0f} images/s"
            many = f"{len(told.recipes)} at once" if len(told.recipes) > 1 else f"seed {first.seed}"
            name = f"{first.data}, {first.model}, {first.optimizer}, {many}"
            shown.update(bar, description=f"{done:.1f}/{total} runs", completed=done, note=f"{name}, {speed}")

        yield watch


def show(told: "Moment") -> None:
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
    if not seen():
        yield lambda name: None
        return
    with bars() as shown:
        task = shown.add_task("", total=total, note="")
        yield lambda name: shown.update(task, description=name, advance=1)


class DownloadBar:
    """The progress bar that pooch moves on; a line in a log."""

    def __init__(self, name: str) -> None:
        self.total, self.shown = 0, bars()
        self.shown.start()
        self.task = self.shown.add_task(name, note="")
        if self.shown.disable:
            print(f"downloading {name}", file=sys.stderr, flush=True)

    def update(self, count: int) -> None:
        self.shown.update(self.task, total=self.total or None, advance=count, note=f"{self.total / 1e6:.0f} MB")

    def reset(self) -> None:
        self.shown.reset(self.task)

    def close(self) -> None:
        self.shown.stop()
