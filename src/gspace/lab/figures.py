"""From records to curves, against epochs or what a table varies, and to SVG, the same bytes each time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from gspace.lab.cells import Cell, Method, data_label
from gspace.lab.document import Panel, Series
from gspace.lab.recipe import images_of, steps_per_epoch
from gspace.lab.record import Record, write_atomic
from gspace.lab.tabulate import LOSS, Found, measures_of, outcome, parts_of

Points = Mapping[float, Sequence[float]]  # values by x

# Okabe and Ito's, told apart by every kind of eye.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#444444")
DASHES = ("-", "-.", ":")  # of the first curves, and of those whose colour is another's
MANY = 5  # curves whose names would cover them
WIDE = 50  # letters of a title that a panel has room for

STYLE = matplotlib.rc_params_from_file(str(files("gspace.lab") / "figures.mplstyle"), use_default_template=False)


def panels(cells: Sequence[Cell], found: Found) -> list[Panel]:
    """What can be drawn of the cells; empty where nothing has ended. A method has one colour in all of them."""
    made: list[Panel] = []
    for part, members in parts_of(cells).items():
        if members[0].axis:
            models = list(dict.fromkeys(cell.recipes[0].model for cell in members))
            for data, model in dict.fromkeys((cell.recipes[0].data, cell.recipes[0].model) for cell in members):
                some = [c for c in members if (c.recipes[0].data, c.recipes[0].model) == (data, model)]
                made += _against_axis(f"{part}, {model}" if len(models) > 1 else part, some, found)
        elif not members[0].recipes[0].validation:
            made += _against_epochs("" if part == "test error" else part, members, found)
    hues = {label: k for k, label in enumerate(dict.fromkeys(cell.method.label.replace("`", "") for cell in cells))}
    coloured = (tuple(replace(s, hue=hues[s.label]) for s in panel.series if s.points) for panel in made)
    return [replace(panel, series=series) for panel, series in zip(made, coloured, strict=True) if series]


def _against_axis(part: str, cells: Sequence[Cell], found: Found) -> Iterator[Panel]:
    """Every method's end against the axis; then how far it is below SGD, run by run (Fig. 4's Δ)."""
    first = cells[0].recipes[0]
    title, label = f"{part}, {data_label(first)}", cells[0].axis.label if cells[0].axis else ""
    methods = list(dict.fromkeys(cell.method for cell in cells))
    base = next((method for method in methods if method.key == "sgd"), None)
    for measure in measures_of(cells):
        ends: dict[Method, dict[float, Mapping[int, float]]] = {method: {} for method in methods}
        for cell in cells:
            if cell.axis:
                values = outcome(cell.recipes, found, measure).values
                ends[cell.method][cell.axis.of(cell.recipes[0])] = values
        drawn = [_series(m, {x: list(seeds.values()) for x, seeds in along.items()}) for m, along in ends.items()]
        yield Panel(title, label, measure.measured_on(first), tuple(drawn), log_x=True, log_y=measure is LOSS)
        if base is not None and not first.validation:
            own = ends.pop(base)
            for along in ends.values():  # per seed that both finished
                for x, seeds in along.items():
                    along[x] = {seed: own[x][seed] - value for seed, value in seeds.items() if seed in own[x]}
            below = [_series(m, {x: list(seeds.values()) for x, seeds in along.items()}) for m, along in ends.items()]
            yield Panel(title, label, f"Δ {measure.label}: SGD minus", tuple(below), log_x=True)


def _against_epochs(part: str, cells: Sequence[Cell], found: Found) -> Iterator[Panel]:
    for line in dict.fromkeys(cell.line for cell in cells):
        for key, label, scale in (("train_loss", "training loss", 1.0), ("test_error", "test error, %", 100.0)):
            own = [cell for cell in cells if cell.line == line]
            series = [_series(c.method, curve([found[r] for r in c.recipes if r in found], key, scale)) for c in own]
            yield Panel(f"{part}: {line}" if part else line, "epoch", label, tuple(series), log_y=True)


def curve(records: Sequence[Record], key: str, scale: float) -> Points:
    """Points of several runs, joined at the iterations they share; a diverged run ends early."""
    points: dict[float, list[float]] = {}
    ends = []
    for record in records:
        epoch = steps_per_epoch(record.recipe, images_of(record.recipe))
        own = {line["iteration"] / epoch: scale * line[key] for line in record.metrics if line[key] is not None}
        ends.append(max(own, default=-1.0))
        for x, y in own.items():
            points.setdefault(x, []).append(y)
    return {x: y for x, y in sorted(points.items()) if len(y) == sum(end >= x for end in ends)}


def _series(method: Method, points: Points) -> Series:
    return Series(method.label.replace("`", ""), tuple((x, y) for x, y in sorted(points.items()) if y), method.control)


def draw(panels: Sequence[Panel], path: Path) -> Path:
    """Writes all panels, two in a row."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2 * columns, 3.4 * rows), layout="constrained")
        for place, panel in enumerate(panels):
            _panel(figure.add_subplot(rows, columns, place + 1), panel)
        return save(figure, path)


def save(figure: Figure, path: Path) -> Path:
    """Without the date and the version that would change the bytes."""
    with matplotlib.rc_context(STYLE):
        buffer = BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    write_atomic(path, buffer.getvalue())
    return path


def _panel(axes: Axes, panel: Panel) -> None:
    for series in panel.series:
        _draw(axes, series)
    axes.set(title=fill(panel.title, WIDE), xlabel=panel.x_label, ylabel=panel.y_label)
    for log, axis in ((panel.log_x, axes.xaxis), (panel.log_y, axes.yaxis)):
        if log:
            axes.set(**{f"{axis.axis_name}scale": "log"})
            _number(axis)
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18), "ncols": 2, "frameon": False}
    axes.legend(fontsize=8, framealpha=0.6, **(below if len(panel.series) > MANY else {}))


def _number(axis: Axis) -> None:
    """Plain numbers along a logarithmic axis that is short enough for them."""
    low, high = axis.get_view_interval()
    if high < 1000 * low:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def _draw(axes: Axes, series: Series) -> None:
    x, y, low, high = series.drawn
    style: dict[str, Any] = {"color": COLOURS[series.hue % len(COLOURS)], "label": series.label}
    dashes = "--" if series.control else DASHES[series.hue // len(COLOURS) % len(DASHES)]
    axes.plot(x, y, dashes, marker="o" if len(x) <= 12 else None, markersize=3, linewidth=series.width, **style)
    if low != high:  # a band of one run has no width
        axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
