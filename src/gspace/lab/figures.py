"""Panels as PNG and SVG (matplotlib), the same bytes each time."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from gspace.lab.document import Panel, Series
from gspace.lab.record import write_atomic

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#444444")
"""Okabe and Ito's, told apart by every kind of eye."""
DASHES = ("-", "-.", ":")
"""Of the first curves, and of those whose colour is another's."""
MANY = 5  # curves whose names would cover them

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "svg.hashsalt": "gspace",  # ids in the file do not depend on the moment
    "svg.fonttype": "none",
}


def draw(panels: Sequence[Panel], path: Path) -> list[Path]:
    """Writes `path`.png and .svg with all panels, two in a row."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2 * columns, 3.4 * rows), layout="constrained")
        for place, panel in enumerate(panels):
            _panel(figure.add_subplot(rows, columns, place + 1), panel)
        return [save(figure, path.with_name(f"{path.name}.{kind}")) for kind in ("png", "svg")]


def save(figure: Figure, path: Path) -> Path:
    """Without the date and the version that would change the bytes."""
    empty = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    kind = path.suffix[1:]
    with matplotlib.rc_context(STYLE):
        buffer = BytesIO()
        figure.savefig(buffer, format=kind, dpi=130, metadata=empty[kind])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())
    return path


def _panel(axes: Axes, panel: Panel) -> None:
    for series in panel.series:
        drawn = _points if panel.ticks else _line
        drawn(axes, series, COLOURS[series.hue % len(COLOURS)])
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.log_x:
        axes.set_xscale("log")
        _number(axes.xaxis)
    if panel.log_y:
        axes.set_yscale("log")
        _number(axes.yaxis)
    if panel.ticks:
        axes.set_xticks(range(len(panel.ticks)), panel.ticks)
        axes.set_ylim(bottom=0)
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18), "ncols": 2, "frameon": False}
    axes.legend(fontsize=7, framealpha=0.6, **(below if len(panel.series) > MANY else {}))


def _number(axis: Axis) -> None:
    """Plain numbers along a logarithmic axis that is short enough for them."""
    low, high = axis.get_view_interval()
    if high < 1000 * low:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def _line(axes: Axes, series: Series, colour: str) -> None:
    few = "o" if len(series.x) <= 12 else None
    dashes = "--" if series.control else DASHES[series.hue // len(COLOURS) % len(DASHES)]
    axes.plot(
        series.x, series.y, dashes, color=colour, marker=few, markersize=3, linewidth=series.width, label=series.label
    )
    axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.15, linewidth=0)


def _points(axes: Axes, series: Series, colour: str) -> None:
    below = [y - low for y, low in zip(series.y, series.low, strict=True)]
    above = [high - y for y, high in zip(series.y, series.high, strict=True)]
    style: dict[str, Any] = {"fmt": "o", "markersize": 5, "capsize": 3}
    axes.errorbar(series.x, series.y, (below, above), color=colour, label=series.label, **style)
