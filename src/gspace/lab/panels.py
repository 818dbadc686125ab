"""From records to curves: against epochs, or each run's end against what a table varies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from gspace.lab.cells import Cell, Method, data_label
from gspace.lab.document import Panel, Series
from gspace.lab.record import Record
from gspace.lab.schedule import images_of, steps_per_epoch
from gspace.lab.tabulate import MEASURES, Found, Measure, outcome

CURVES = (("train_loss", "training loss", 1.0, True), ("test_error", "test error, %", 100.0, True))


def panels(cells: Sequence[Cell], found: Found, measures: Sequence[str]) -> list[Panel]:
    """What can be drawn of the cells; empty where nothing has ended."""
    made: list[Panel] = []
    for part in dict.fromkeys(cell.part for cell in cells):
        members = [cell for cell in cells if cell.part == part]
        grid = bool(members[0].recipes[0].validation)
        keys = measures[:1] if grid else measures
        if members[0].axis:
            models = list(dict.fromkeys(cell.recipes[0].model for cell in members))
            for data, model in dict.fromkeys((cell.recipes[0].data, cell.recipes[0].model) for cell in members):
                some = [c for c in members if (c.recipes[0].data, c.recipes[0].model) == (data, model)]
                made += _against_axis(f"{part}, {model}" if len(models) > 1 else part, some, found, keys)
        elif "test_error" not in measures or part in POINTS:
            made += _points(part, members, found, MEASURES[keys[0]])
        elif not grid:
            made += _against_epochs("" if part == "test error" else part, members, found)
    return [_coloured(panel, cells) for panel in made if panel.series]


def _coloured(panel: Panel, cells: Sequence[Cell]) -> Panel:
    """One colour per method in all panels of an experiment."""
    hues = {label: k for k, label in enumerate(dict.fromkeys(_plain(cell.method.label) for cell in cells))}
    return replace(panel, series=tuple(replace(series, hue=hues[series.label]) for series in panel.series))


POINTS = ("MLPs",)  # too many lines for curves


def _against_axis(part: str, cells: Sequence[Cell], found: Found, measures: Sequence[str]) -> Iterator[Panel]:
    """Every method's end against the axis; then how far it is below SGD, run by run (Fig. 4's Δ)."""
    title = f"{part}, {data_label(cells[0].recipes[0])}"
    label = cells[0].axis.label if cells[0].axis else ""
    methods = list(dict.fromkeys(cell.method for cell in cells))
    for key in measures:
        measure = MEASURES[key]
        ends = {
            (cell.method, cell.axis.of(cell.recipes[0])): outcome(cell.recipes, found, measure).values
            for cell in cells
            if cell.axis
        }
        drawn = [
            _along(m, {x: list(seeds.values()) for (method, x), seeds in ends.items() if method == m}) for m in methods
        ]
        y_label = measure.measured_on(cells[0].recipes[0])
        yield Panel(title, label, y_label, _drawn(drawn), log_x=True, log_y=key == "fit_loss")
        base = next((method for method in methods if method.key == "sgd"), None)
        if base is None or cells[0].recipes[0].validation:
            continue
        below = [
            _along(m, {x: _gaps(ends[base, x], seeds) for (method, x), seeds in ends.items() if method == m})
            for m in methods
            if m != base
        ]
        yield Panel(title, label, f"Δ {measure.label}: SGD minus", _drawn(below), log_x=True)


def _along(method: Method, points: Mapping[float, list[float]]) -> Series:
    return _series(method.label, sorted((x, y) for x, y in points.items() if y), method.control)


def _gaps(base: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Per seed that both finished."""
    return [base[seed] - other[seed] for seed in sorted(base.keys() & other.keys())]


def _points(part: str, cells: Sequence[Cell], found: Found, measure: Measure) -> Iterator[Panel]:
    lines = tuple(dict.fromkeys(cell.line for cell in cells))
    methods = list(dict.fromkeys(cell.method for cell in cells))
    series = []
    for k, method in enumerate(methods):
        beside = 0.6 * (k + 0.5) / len(methods) - 0.3  # methods side by side around each line's tick
        ends = [
            (lines.index(cell.line) + beside, list(outcome(cell.recipes, found, measure).values.values()))
            for cell in cells
            if cell.method == method
        ]
        series.append(_series(method.label, [(x, y) for x, y in ends if y], method.control))
    yield Panel(part, "", measure.label, _drawn(series), ticks=lines)


def _against_epochs(part: str, cells: Sequence[Cell], found: Found) -> Iterator[Panel]:
    for line in dict.fromkeys(cell.line for cell in cells):
        for key, label, scale, log in CURVES:
            series = [
                _series(cell.method.label, curve([found[r] for r in cell.recipes if r in found], key, scale), control)
                for cell in cells
                if cell.line == line
                for control in [cell.method.control]
            ]
            yield Panel(f"{part}: {line}" if part else line, "epoch", label, _drawn(series), log_y=log)


def curve(records: Sequence[Record], key: str, scale: float) -> list[tuple[float, list[float]]]:
    """Points of several runs, joined at the iterations they share; a diverged run ends early."""
    points: dict[float, list[float]] = {}
    ends = []
    for record in records:
        epoch = steps_per_epoch(record.recipe, images_of(record.recipe))
        own = {line["iteration"] / epoch: scale * line[key] for line in record.metrics if line[key] is not None}
        ends.append(max(own, default=-1.0))
        for x, y in own.items():
            points.setdefault(x, []).append(y)
    return sorted((x, y) for x, y in points.items() if len(y) == sum(end >= x for end in ends))


def _series(label: str, points: Sequence[tuple[float, list[float]]], control: bool) -> Series:
    return Series(
        _plain(label),
        tuple(x for x, _ in points),
        tuple(fmean(y) for _, y in points),
        tuple(min(y) for _, y in points),
        tuple(max(y) for _, y in points),
        control,
    )


def _plain(label: str) -> str:
    """Without Markdown's marks."""
    return label.replace("`", "")


def _drawn(series: Sequence[Series]) -> tuple[Series, ...]:
    return tuple(s for s in series if s.x)
