"""`gspace report RUNS ...`: tables, figures and one HTML page, from recorded runs alone.

    gspace report runs --out report             # report.md, report.html, figures/*.png and *.svg
    gspace report runs --export results         # adds the finished runs to results/table-1.jsonl and the like: small
                                                # records to commit, from which a report can be made again

The same records give the same bytes.
"""

import argparse
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspace.lab.archive import collect, read_records, scores_of
from gspace.lab.cells import DATA_NAMES, LENGTHS, Cell, Experiment, Method, Scores, Variant, guessed, jobs
from gspace.lab.cost import CPU, GPU, duration, estimate
from gspace.lab.document import Document, Section, Table, code, markdown, page
from gspace.lab.errors import RecordError
from gspace.lab.experiments import EXPERIMENTS
from gspace.lab.figures import draw, panels
from gspace.lab.recipe import Recipe, check_name
from gspace.lab.record import Record, make_folder, write_atomic
from gspace.lab.tabulate import ERROR, Found, claims, outcome, tables, write

TITLE = "Measured with gspace"
READING = (
    "Numbers are mean ± sample standard deviation (number of runs). A run that diverged is counted, not averaged. "
    "Differences are between runs of one seed; a negative one favours the method named first. Curves are means; the "
    "band is from the smallest to the largest run. Training loss is, in tables, that of the finished network on all "
    "training images as they are; in curves, the mean over the batches since the last point, as they were trained on.",
    "*SGD from skeleton init* starts where G-SGD starts. *Free skeleton frozen* also keeps the skeleton weights that "
    "G-SGD never changes, one out of every unit. *Skeleton paths held* is G-SGD that keeps its other skeleton weights "
    "too. *Ratio* and *drift* bound how far the value of a skeleton path may go in one step and in all.",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUNS", type=Path, nargs="+", help="folders of run folders or of records")
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="where to (default: report)")
    parser.add_argument("--only", metavar="NAME,...", help="experiments to report on (default: all that were begun)")
    told = "instead, add finished runs to the files there, one per experiment"
    parser.add_argument("--export", type=Path, metavar="DIR", help=told)


def run(args: argparse.Namespace) -> int:
    records = read_records(args.runs)
    if not records:
        raise RecordError(f"no runs below {', '.join(map(str, args.runs))}")
    if args.export:
        added = collect(records, args.export, homes(records))
        print("\n".join(f"{path}: {count} new" for path, count in added.items()) or "every finished run was there")
        return 0
    names = args.only.split(",") if args.only else list(EXPERIMENTS)
    chosen = [EXPERIMENTS[check_name("experiment", name, EXPERIMENTS)] for name in names]
    only = f" --only {args.only}" if args.only else ""
    folders = shlex.join(map(str, args.runs))
    document = assemble(records, chosen, f"gspace report {folders}{only}", f" --results {folders}")
    written = publish(document, args.out)
    print("\n".join(map(str, written)))
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
    make_folder(out / "figures")
    text, html = out / "report.md", out / "report.html"
    drawn = [
        path for some in document.sections if some.panels for path in draw(some.panels, out / "figures" / some.name)
    ]
    write_atomic(text, markdown(document, "figures").encode())
    pictures = {path.stem: path.read_bytes() for path in drawn if path.suffix == ".svg"}
    write_atomic(html, page(document, pictures).encode())
    return [text, html, *drawn]


@dataclass(frozen=True)
class Part:
    """An experiment at one size, as far as it has been run.

    Attributes:
        cells: Those that are decided.
        left: Runs to do and their methods, a guess where they depend on others that are not done.
    """

    experiment: Experiment
    variant: Variant
    cells: Sequence[Cell]
    left: Mapping[Recipe, Method]

    @property
    def name(self) -> str:
        """File name of its figure."""
        length = "" if self.variant.length == 1 else str(self.variant.length).replace("/", "-of-")
        marks = ("quick" if self.variant.quick else "", length)
        return "-".join(filter(None, (self.experiment.name, *marks)))

    @property
    def command(self) -> str:
        return f"{self.experiment.command}{self.variant.flags}"


def assemble(
    records: Sequence[Record], experiments: Sequence[Experiment], command: str, counting: str = ""
) -> Document:
    """The document that the records give, by `command`; with the options `counting` a run of the rest knows them."""
    found = {record.recipe: record for record in records}
    parts = shown([part for experiment in experiments for part in begun(experiment, found)], found)
    known = {recipe for part in parts for recipe in jobs(part.cells)}
    others = [record for record in records if record.recipe not in known]
    appendix = (
        _missing(experiments, parts, found, counting),
        _diverged(records),
        _others(others),
        _environments(records),
    )
    kept, summary = ([table for table in some if table.rows] for some in (appendix, [claims(experiments, found)]))
    sections = tuple(section(part, found) for part in parts)
    return Document(TITLE, command, READING, sections, tuple(kept), tuple(summary))


def begun(experiment: Experiment, found: Found) -> Iterator[Part]:
    """The sizes of an experiment of which at least one run is recorded."""
    scores = scores_of(list(found.values()))
    for variant in variants(found):
        cells = variant.cells(experiment, scores)
        if any(recipe in found for recipe in jobs(cells)):
            yield Part(experiment, variant, cells, _left(experiment, variant, scores))


def _left(experiment: Experiment, variant: Variant, scores: Scores) -> dict[Recipe, Method]:
    cells = variant.cells(experiment, guessed(scores))
    methods = {recipe: cell.method for cell in reversed(cells) for recipe in cell.recipes}
    return {recipe: methods[recipe] for recipe in jobs(cells) if scores(recipe) is None}


def shown(parts: Sequence[Part], found: Found) -> list[Part]:
    """Those that have a run of their own (short runs may belong to several), and those whose runs no other shows."""
    runs = [{recipe for recipe in jobs(part.cells) if recipe in found} for part in parts]
    owners = Counter(recipe for some in runs for recipe in some)
    kept = [any(owners[recipe] == 1 for recipe in some) for some in runs]
    for k, some in sorted(enumerate(runs), key=lambda numbered: -len(numbered[1])):
        kept[k] = kept[k] or not some <= set().union(*(one for one, there in zip(runs, kept, strict=True) if there))
    return [part for part, there in zip(parts, kept, strict=True) if there]


def variants(recipes: Collection[Recipe]) -> Iterator[Variant]:
    """Every size that the recorded runs can be of."""
    full = any(not recipe.quick for recipe in recipes)
    yield from (Variant(length=length) for length in LENGTHS.values() if full)
    yield from [Variant(quick=True)] if any(recipe.quick for recipe in recipes) else []


def section(part: Part, found: Found) -> Section:
    experiment = part.experiment
    source = f"{experiment.source} of the paper" if experiment.source else "not in the paper"
    label = f" ({part.variant.label})" if part.variant.label else ""
    stands = sorted({cell.line.rsplit(", ", 1)[-1] for cell in part.cells if cell.recipes[0].stands_for})
    return Section(
        name=part.name,
        title=f"{experiment.name}: {source}{label}",
        command=part.command,
        text=(
            experiment.question,
            *experiment.notes,
            *(f"**{label.capitalize()}.**" for label in [part.variant.label] if label),
            *(f"**Not the paper's data: {stand}.**" for stand in stands),
        ),
        tables=tuple(tables(part.cells, found)),
        panels=tuple(panels(part.cells, found)),
    )


def _missing(experiments: Sequence[Experiment], parts: Sequence[Part], found: Found, counting: str) -> Table:
    """What is not finished of what was begun, and the experiments of which nothing is; of each method how many runs."""
    there = {part.experiment for part in parts if not part.variant.quick and part.variant.length == 1}
    scores = scores_of(list(found.values()))
    absent = [Part(e, Variant(), (), _left(e, Variant(), scores)) for e in experiments if e not in there]
    rows = []
    for part in (*parts, *absent):
        sets = list(dict.fromkeys(recipe.stands_for or recipe.data for recipe in part.left))
        for data in sets:
            runs = [recipe for recipe in part.left if (recipe.stands_for or recipe.data) == data]
            machine = CPU if part.variant.quick else GPU
            cost = f"{duration(estimate(runs, machine))} on {machine.name}"
            command = code(f"{part.command}{f' --data {data}' if len(sets) > 1 else ''}{counting}")
            count = Counter(part.left[recipe].key for recipe in runs)
            which = ", ".join(f"{n} {key}" for key, n in count.items())
            name = f"{part.experiment.name}{part.variant.flags}, {DATA_NAMES[data]}"
            rows.append((name, command, which, str(len(runs)), cost))
    return Table("Missing", ("experiment", "command", "which", "runs", "about"), tuple(rows), 3)


def _diverged(records: Sequence[Record]) -> Table:
    ended = [(record.recipe, record.summary) for record in records if record.summary is not None]
    rows = [
        (recipe.folder, _settings(recipe), f"{summary['iteration']} of {summary['iterations']}")
        for recipe, summary in ended
        if summary["status"] == "diverged"
    ]
    return Table("Diverged runs", ("run", "settings", "at iteration"), tuple(rows), 2)


def _others(records: Sequence[Record]) -> Table:
    """Runs that belong to no experiment above."""
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
