"""`gspace draw SPEC`: a small network with its skeleton and some of its basis paths, as SVG or PNG (Figure 2)."""

import argparse
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gspace import init_skeleton_
from gspace.lab.analyze import add_model, analyzed
from gspace.lab.errors import LabError, RecordError
from gspace.lab.figures import COLOURS, STYLE, save
from gspace.lab.wiring import Drawing, Kind, Line, arrange, basis_path
from gspace.optim.skeleton import Skeleton, build_skeleton

MOST = 4_000  # lines; beyond, a drawing shows nothing
FORMATS = (".svg", ".png")

LOOKS: dict[Kind, tuple[str, str, float]] = {  # label, colour, width
    "free": ("free skeleton weight, one per unit: never changes", "#d55e00", 1.9),
    "trained": ("trained skeleton weight", "#cc79a7", 1.9),
    "other": ("other weight", "#bbbbbb", 0.7),
}
MARKS = {  # node: shape, fill
    "unit": ("o", "#ffffff"),
    "start": ("s", "#dfe8f1"),
    "end": ("s", "#dfe8f1"),
}
WIDTHS = (6.0, 3.6, 1.6)  # of basis paths, one over the other


class DrawError(LabError):
    """A network that cannot be drawn."""

    exit_code = 2


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "pin")
    parser.add_argument("--out", type=Path, default=Path("network.svg"), metavar="FILE", help="ends in .svg or .png")
    parser.add_argument(
        "--skeleton",
        choices=("aligned", "pivoted"),
        default="aligned",
        help="diagonal weights, as in the paper, or the largest of the balanced network (default: aligned)",
    )


def run(args: argparse.Namespace) -> int:
    if args.out.suffix not in FORMATS:
        raise DrawError(f"cannot draw {args.out}: its name must end in {' or '.join(FORMATS)}")
    model, analysis, _, _ = analyzed(args)
    if args.skeleton == "aligned":
        init_skeleton_(model, analysis=analysis)
    skeleton = build_skeleton(model, analysis, choice=args.skeleton)
    drawing = arrange(model, skeleton)
    if not drawing.lines:
        raise DrawError(f"{args.spec} has no weights to draw")
    if len(drawing.lines) > MOST:
        raise DrawError(f"{args.spec} has {len(drawing.lines):,} lines, too many to see: draw one of up to {MOST:,}")
    try:
        save(picture(drawing, skeleton, f"H = {skeleton.H}, m = {analysis.m}"), args.out)
    except OSError as error:
        raise RecordError(f"cannot write {args.out}: {error.strerror or error}") from error
    print(args.out)
    return 0


def picture(drawing: Drawing, skeleton: Skeleton, facts: str) -> Figure:
    """The skeleton on the left, some basis paths on the right."""
    columns = 1 + max(x for x, _ in drawing.place.values())
    rows = 2 * max(abs(y) for _, y in drawing.place.values()) + 1
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(2 * min(7.0, 1.5 + 1.2 * columns), min(9.0, 1.8 + 0.36 * rows)), layout="constrained")
        left, right = figure.subplots(1, 2)
        _network(left, drawing)
        left.set_title(f"skeleton ({facts})")
        _network(right, drawing, pale=True)
        paths = examples(drawing, skeleton)
        for line, colour, width in zip(paths, COLOURS[::2], WIDTHS, strict=False):
            for part in basis_path(drawing, skeleton, line):
                _line(right, drawing, part, colour, width)
            (x0, y0), (x1, y1) = (drawing.place[node] for node in line)
            right.plot((x0 + x1) / 2, (y0 + y1) / 2, "D", color=colour, markersize=8, markeredgecolor="#333333")
        right.set_title(f"{len(paths)} basis paths; ◆ marks the weight of each alone")
        left.legend(handles=_handles(), fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncol=2)
        right.legend(
            [Line2D([], [], color=colour, lw=2) for _, colour in zip(paths, COLOURS[::2], strict=False)],
            [f"basis path of a weight of {drawing.names[line]}" for line in paths],
            fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 0.0),
        )  # fmt: skip
    return figure


def examples(drawing: Drawing, skeleton: Skeleton) -> list[Line]:
    """Lines whose basis paths are shown: a trained skeleton weight, then others from different layers."""
    trained = [line for line, kind in drawing.lines.items() if kind == "trained"][:1]
    others: dict[str, list[Line]] = {}
    for line, kind in drawing.lines.items():
        if kind == "other":
            others.setdefault(drawing.names[line], []).append(line)
    layers = list(others.values())
    picked = [lines[len(lines) // 2] for lines in layers[:: max(1, len(layers) // len(WIDTHS))]]
    return [*trained, *picked][: len(WIDTHS)]


def _network(axes: Axes, drawing: Drawing, pale: bool = False) -> None:
    order = sorted(drawing.lines, key=lambda line: drawing.lines[line] != "other")
    for line in order:
        _, colour, width = LOOKS["other" if pale else drawing.lines[line]]
        _line(axes, drawing, line, colour, width, below=True)
    for kind, (mark, fill) in MARKS.items():
        xs, ys = ([place[k] for node, place in drawing.place.items() if node[0] == kind] for k in (0, 1))
        axes.scatter(xs, ys, s=90, marker=mark, c=fill, edgecolors="#333333", zorder=3, linewidths=0.9)
    axes.set_axis_off()
    axes.margins(0.08)


def _line(axes: Axes, drawing: Drawing, line: Line, colour: str, width: float, below: bool = False) -> None:
    (x0, y0), (x1, y1) = (drawing.place[node] for node in line)
    axes.plot([x0, x1], [y0, y1], color=colour, linewidth=width, zorder=1 if below else 2, solid_capstyle="round")


def _handles() -> list[Line2D]:
    lines = [Line2D([], [], color=colour, lw=width, label=label) for label, colour, width in LOOKS.values()]
    nodes = (("unit", "hidden unit"), ("end", "input, output, or pinned: a chain ends here"))
    look: dict[str, Any] = {"color": "none", "markeredgecolor": "#333333"}
    marks = [Line2D([], [], marker=MARKS[k][0], markerfacecolor=MARKS[k][1], label=name, **look) for k, name in nodes]
    return [*lines, *marks]
