"""`gspace report RUNS ...`: tables, figures and one HTML page, from recorded runs alone.

    gspace report runs --out report             # report.md, report.html, figures/*.svg
    gspace report runs --export results         # adds the finished runs to results/table-1.jsonl and the like: small
                                                # records to commit, from which a report can be made again

The same records give the same bytes.
"""

import argparse
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gspace.lab.archive import collect, read_records, scores_of
from gspace.lab.cells import CPU, DATA_NAMES, GPU, LENGTHS, Cell, Experiment, Variant, costs, data_label, guessed, jobs
from gspace.lab.claims import claims
from gspace.lab.display import steps
from gspace.lab.document import Document, Section, Table, code, markdown, page
from gspace.lab.errors import RecordError
from gspace.lab.experiments import EXPERIMENTS, FACTS
from gspace.lab.figures import draw, panels
from gspace.lab.recipe import Recipe
from gspace.lab.record import Record, write_atomic
from gspace.lab.tabulate import ERROR, Found, outcome, tables, write


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUNS", type=Path, nargs="+", help="folders of run folders or of records")
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="where to (default: report)")
    told = "instead, add finished runs to the files there, one per experiment"
    parser.add_argument("--export", type=Path, metavar="DIR", help=told)


def run(args: argparse.Namespace) -> int:
    records = read_records(args.runs)
    if not records:
        raise RecordError(f"no runs below {', '.join(map(str, args.runs))}")
    if args.export:  # what is there may decide which experiment a new run belongs to
        added = collect(records, args.export, homes(read_records([*args.runs, *args.export.glob("*.jsonl")])))
        print("\n".join(f"{path}: {count} new" for path, count in added.items()) or "every finished run was there")
        return 0
    folders = shlex.join(map(str, args.runs))
    document = assemble(records, list(EXPERIMENTS.values()), f"gspace report {folders}", f" --results {folders}")
    print("\n".join(map(str, publish(document, args.out))))
    return 0


def homes(records: Sequence[Record]) -> Callable[[Recipe], str]:
    """The experiment that a run is recorded with: the first that it belongs to."""
    found = {record.recipe: record for record in records}
    names = {
        recipe: experiment.name
        for experiment in reversed(EXPERIMENTS.values())
        for part in begun(experiment, found)
        for recipe in jobs(part.cells)
    }
    return lambda recipe: names.get(recipe, "other")


def publish(document: Document, out: Path) -> list[Path]:
    """Writes the document below `out`; returns the Markdown file, the page and the figures."""
    text, html = out / "report.md", out / "report.html"
    drawn = []
    with steps(len(document.sections)) as begin:
        for some in document.sections:
            begin(f"draw {some.name}")
            drawn += [draw(some.panels, out / "figures" / f"{some.name}.svg")] if some.panels else []
    write_atomic(text, markdown(document, "figures").encode())
    pictures = {path.stem: path.read_bytes() for path in drawn}
    write_atomic(html, page(document, pictures).encode())
    return [text, html, *drawn]


class Part(NamedTuple):
    """An experiment at one size, and those of its cells that are decided."""

    experiment: Experiment
    variant: Variant
    cells: Sequence[Cell]


def assemble(
    records: Sequence[Record], experiments: Sequence[Experiment], command: str, counting: str = ""
) -> Document:
    """The document that the records give, by `command`; with the options `counting` a run of the rest knows them."""
    found = {record.recipe: record for record in records}
    every: list[Part] = []
    with steps(len(experiments)) as begin:
        for experiment in experiments:
            begin(f"tabulate {experiment.name}")
            every += begun(experiment, found)
    parts = shown(every, found)
    known = {recipe for part in parts for recipe in jobs(part.cells)}
    others = [record for record in records if record.recipe not in known]
    short, each = claims(experiments, found)
    rest = (_missing(experiments, parts, found, counting), _diverged(records), _others(others), _environments(records))
    kept, summary = (tuple(table for table in some if table.rows) for some in ((each, *rest), [short]))
    sections, reading = tuple(section(part, found) for part in parts), tuple(FACTS["text"]["reading"])
    return Document("Measured with gspace", command, reading, sections, kept, summary)


def begun(experiment: Experiment, found: Found) -> Iterator[Part]:
    """The sizes of an experiment of which at least one run is recorded."""
    scores, quick = scores_of(found.values()), {recipe.quick for recipe in found}
    sizes = [Variant(length=length) for length in LENGTHS.values()] if False in quick else []
    for variant in (*sizes, *([Variant(quick=True)] if True in quick else [])):
        cells = variant.cells(experiment, scores)
        if any(recipe in found for recipe in jobs(cells)):
            yield Part(experiment, variant, cells)


def shown(parts: Sequence[Part], found: Found) -> list[Part]:
    """Those that have a run of their own (short runs may belong to several), and those whose runs no other shows."""
    runs = [{recipe for recipe in jobs(part.cells) if recipe in found} for part in parts]
    owners = Counter(recipe for some in runs for recipe in some)
    kept = [any(owners[recipe] == 1 for recipe in some) for some in runs]
    for k, some in sorted(enumerate(runs), key=lambda numbered: -len(numbered[1])):
        kept[k] = kept[k] or not some <= set().union(*(one for one, there in zip(runs, kept, strict=True) if there))
    return [part for part, there in zip(parts, kept, strict=True) if there]


def section(part: Part, found: Found) -> Section:
    experiment, variant, cells = part
    source = f"{experiment.source} of the paper" if experiment.source else "not in the paper"
    label = f" ({variant.label})" if variant.label else ""
    stands = sorted({data_label(cell.recipes[0]) for cell in cells if cell.recipes[0].stands_for})
    warnings = [*filter(None, [variant.label.capitalize()]), *(f"Not the paper's data: {stand}" for stand in stands)]
    notes = "\n".join(f"- {note}" for note in experiment.notes)
    text = (experiment.question, *filter(None, [notes]), *(f"**{warning}.**" for warning in warnings))
    title, command = f"{experiment.name}: {source}{label}", f"{experiment.command}{variant.flags}"
    name = experiment.name + variant.flags.replace(" --length ", "-").replace(" --", "-").replace("/", "-of-")
    return Section(name, title, command, text, tuple(tables(cells, found)), tuple(panels(cells, found)))


def _missing(experiments: Sequence[Experiment], parts: Sequence[Part], found: Found, counting: str) -> Table:
    """What is not finished of what was begun, and the experiments of which nothing is; of each method how many runs.

    Runs that depend on others that are not done are a guess.
    """
    there = {part.experiment for part in parts if part.variant == Variant()}
    scores, rows = scores_of(found.values()), []
    for experiment, variant, _ in (*parts, *(Part(e, Variant(), ()) for e in experiments if e not in there)):
        cells = variant.cells(experiment, guessed(scores))
        methods = {recipe: cell.method for cell in reversed(cells) for recipe in cell.recipes}
        left: dict[str, list[Recipe]] = {}
        for recipe in jobs(cells):
            if scores(recipe) is None:
                left.setdefault(recipe.stands_for or recipe.data, []).append(recipe)
        for data, runs in left.items():
            cost = costs(runs, [CPU if variant.quick else GPU])
            only = f" --data {data}" if len(left) > 1 else ""
            command = code(f"{experiment.command}{variant.flags}{only}{counting}")
            which = ", ".join(f"{n} {key}" for key, n in Counter(methods[recipe].key for recipe in runs).items())
            name = f"{experiment.name}{variant.flags}, {DATA_NAMES[data]}"
            rows.append((name, command, which, str(len(runs)), cost))
    return Table("Missing", ("experiment", "command", "which", "runs", "about"), tuple(rows), 3)


def _diverged(records: Sequence[Record]) -> Table:
    rows = [
        (record.recipe.folder, _settings(record.recipe), f"{ended['iteration']} of {ended['iterations']}")
        for record in records
        if (ended := record.summary) is not None and ended["status"] == "diverged"
    ]
    return Table("Diverged runs", ("run", "settings", "at iteration"), tuple(rows), 2)


def _others(records: Sequence[Record]) -> Table:
    found = {record.recipe: record for record in records}
    rows = [(r.folder, _settings(r), write(outcome([r], found, ERROR), ERROR)) for r in found]
    held = any(recipe.validation for recipe in found)
    label = "test error, % (with validation: of those images)" if held else "test error, %"
    return Table("Other runs", ("run", "settings", label), tuple(rows), 2)


def _settings(recipe: Recipe) -> str:
    return ", ".join(f"{name} {value}" for name, value in recipe.short().items() if name != "seed")


def _environments(records: Sequence[Record]) -> Table:
    """Where the runs were computed, by their last session."""
    keys = ("gspace", "commit", "torch", "python", "platform", "cores", "gpu")
    last = [record.sessions[-1] if record.sessions else {} for record in records]
    count = Counter(tuple(str(session.get(key) or "–") for key in keys) for session in last)
    rows = []
    for values, n in sorted(count.items()):
        shown = dict(zip(keys, values, strict=True))
        shown["commit"] = shown["commit"][:12] + "+" * shown["commit"].endswith("+")  # a + if the tree had changes
        rows.append((*shown.values(), str(n)))
    return Table("Environment", (*keys, "runs"), tuple(rows), len(keys))
