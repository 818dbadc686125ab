"""What a person sees while runs are training: bars on a terminal, lines in a log.

`display` serves a queue of any length: a bar for all runs and the numbers of the one in progress. `board` shows a few
cells at once, each with its own line.
"""

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from statistics import fmean
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from gspace.lab import queue
from gspace.lab.experiment import Cell, data_label
from gspace.lab.loop import Progress as Told
from gspace.lab.recipe import Recipe

SPARKS = "▁▂▃▄▅▆▇█"


class Display(Protocol):
    """Told of progress."""

    def watch(self, told: Told) -> None: ...
    def download(self, name: str, done: int, total: int | None) -> None: ...


@contextmanager
def display(total: int, *, quiet: bool = False) -> Iterator[Display]:
    """Bars if standard error is a terminal, else lines on standard output; with `quiet`, nothing."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Lines(quiet)
        return
    bars = Bars(total)
    to_screen = sys.stdout.isatty()  # else results go to a file
    with Live(bars.body, console=console, refresh_per_second=8, transient=True, redirect_stdout=to_screen):
        yield bars


class Lines:
    """A line per point of the curve, and per tenth of a download."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.tenths: dict[str, int] = {}

    def watch(self, told: Told) -> None:
        if not self.quiet:
            queue.show(told)

    def download(self, name: str, done: int, total: int | None) -> None:
        tenth = 10 * done // total if total else 0
        if not self.quiet and self.tenths.get(name) != tenth:
            self.tenths[name] = tenth
            print(f"{name}: {done / 1e6:.0f} MB" + (f" of {total / 1e6:.0f}" if total else ""), flush=True)


class Bars:
    """A bar for all runs, one for the run in progress, its numbers and the shape of its curve."""

    def __init__(self, total: int) -> None:
        text = TextColumn("{task.description}")
        self.runs = Progress(text, BarColumn(), TextColumn("{task.completed:.1f}/{task.total:.0f} runs"))
        self.steps = Progress(text, BarColumn(), TextColumn("{task.fields[left]}"))
        self.files = Progress(text, BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self.table = Table.grid(padding=(0, 2))
        self.body = Group(self.files, self.runs, self.steps, self.table)
        self.all = self.runs.add_task("all", total=total)
        self.now: TaskID | None = None
        self.parts: dict[tuple[Recipe, ...], float] = {}
        self.curves: dict[tuple[Recipe, ...], list[float]] = {}
        self.downloads: dict[str, TaskID] = {}

    def watch(self, told: Told) -> None:
        self.parts[told.recipes] = len(told.recipes) * told.iteration / told.total
        self.runs.update(self.all, completed=sum(self.parts.values()))
        if self.now is None:
            self.now = self.steps.add_task("", total=told.total, left="")
        left = f"{told.iteration:,}/{told.total:,} iterations, {_clock(told.seconds_left)} left"
        name = describe(told.recipes)
        self.steps.update(self.now, description=name, completed=told.iteration, total=told.total, left=left)
        curve = self.curves.setdefault(told.recipes, [])
        if told.lines:
            curve += [line["test_error"] for line in told.lines[:1] if line is not None]
        self.body.renderables[-1] = _numbers(told, curve)

    def download(self, name: str, done: int, total: int | None) -> None:
        if name not in self.downloads:
            self.downloads[name] = self.files.add_task(name, total=total)
        self.files.update(self.downloads[name], completed=done, total=total)


def describe(recipes: tuple[Recipe, ...]) -> str:
    """What is being trained, in a few words."""
    first = recipes[0]
    many = f"{len(recipes)} at once" if len(recipes) > 1 else f"seed {first.seed}"
    shape = f"{first.model} {'×'.join(map(str, first.hidden))}" if first.model == "mlp" else first.model
    return f"{data_label(first)}, {shape}, {first.optimizer}, lr {first.lr:g}, {many}"


def sparkline(values: list[float], width: int = 40) -> str:
    """The shape of a curve in one line of text.

    >>> sparkline([3, 2, 1, 1])
    '█▅▁▁'
    """
    shown = values[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in shown)


def _numbers(told: Told, curve: list[float]) -> Table:
    loss, error = told.loss[0], told.error[0]
    table = Table.grid(padding=(0, 2))
    test = f"test error {100 * curve[-1]:.2f} %  {sparkline(curve)}" if curve else ""
    table.add_row(f"loss {loss:.4f}", f"error {100 * error:.2f} %", f"{told.images_per_second:,.0f} images/s", test)
    return table


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def board(cells: Sequence[Cell], console: Console) -> Iterator[Display]:
    """A line per cell that moves while it trains, in place of what is printed meanwhile; a log keeps the latter."""
    if not console.is_terminal:
        yield Lines(quiet=True)
        return
    shown = Board(cells)
    with Live(shown, console=console, refresh_per_second=8, redirect_stdout=False), redirect_stdout(io.StringIO()):
        yield shown


class Board:
    """The cells of a table while they train: how far, training loss, test error and the shape of its curve."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = cells
        self.cell_of = {recipe: cell for cell in cells for recipe in cell.recipes}
        self.parts: dict[Recipe, float] = {}
        self.last: dict[Cell, tuple[float, float]] = {}
        self.curves: dict[Cell, list[float]] = {}  # of the run in progress

    def watch(self, told: Told) -> None:
        cell = self.cell_of[told.recipes[0]]
        if told.recipes[0] not in self.parts:
            self.curves[cell] = []
        self.parts |= dict.fromkeys(told.recipes, told.iteration / told.total)
        self.last[cell] = (fmean(told.loss), told.images_per_second)
        errors = [line["test_error"] for line in told.lines if line is not None]
        if errors:
            self.curves[cell].append(fmean(errors))

    def download(self, name: str, done: int, total: int | None) -> None: ...

    def __rich__(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("", "", "loss", "test error %", "images/s", ""):
            table.add_column(name, justify="left" if not name else "right")
        above = ""
        for cell in self.cells:
            if cell.row != above:
                table.add_row(f"[bold]{cell.row}[/bold]")
                above = cell.row
            table.add_row(*self._line(cell))
        return table

    def _line(self, cell: Cell) -> tuple[RenderableType, ...]:
        done = sum(self.parts.get(recipe, 0.0) for recipe in cell.recipes) / len(cell.recipes)
        bar = ProgressBar(total=1.0, completed=done, width=20)
        if cell not in self.last:
            return (cell.method.label, bar)
        loss, speed = self.last[cell]
        curve = self.curves.get(cell, [])
        error = f"{100 * curve[-1]:.2f}" if curve else ""
        return (cell.method.label, bar, f"{loss:.4f}", error, f"{speed:,.0f}", sparkline(curve, 24))
