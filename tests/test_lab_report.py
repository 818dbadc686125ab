"""Reports: the statistics, the layout, the same bytes from the same records, and records small enough to commit."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from gspace.lab import archive, cli
from gspace.lab.cells import Cell, Method, Printed, Variant, best, jobs, seeds
from gspace.lab.document import Document, Panel, Section, Series, Table, markdown, narrow, page
from gspace.lab.errors import RecordError
from gspace.lab.experiments import EXPERIMENTS, RATE
from gspace.lab.figures import COLOURS, MANY, _panel, curve, panels
from gspace.lab.recipe import Recipe
from gspace.lab.record import Record, sealed
from gspace.lab.report import assemble, publish
from gspace.lab.tabulate import MEASURES, difference, mean_std, outcome, table, write
from gspace.lab.train import train_many

SGD = Method("sgd", "SGD", {"optimizer": "sgd"})
G_SGD = Method("gsgd", "G-SGD", {"optimizer": "gsgd"})
CONTROL = Method("sgd-skeleton", "SGD from skeleton init", {"init": "skeleton"}, True)
BASE = Recipe(data="cifar10", model="plain-34", iterations=100)
ERROR, LOSS = (MEASURES[key] for key in ("test_error", "fit_loss"))


def record(recipe: Recipe, error: float | None, *, loss: float = 0.5) -> Record:
    """A run that ended with this test error, or diverged at its second point."""
    status = "finished" if error is not None else "diverged"
    points = tuple(
        {"iteration": k, "train_loss": loss * 2 / k, "train_error": 0.5, "test_loss": 1.0, "test_error": (error or 0.9)}
        for k in (50, 100)
    )
    ended = {"status": status, "identity": recipe.identity}
    summary = {**ended, "iteration": 100, "iterations": 100, "test_error": error}
    measured = {"fit_loss": loss} if error is not None else {}
    return Record(recipe, ({"torch": "2.13.0", "gpu": None},), points, {**summary, **measured})


def cell(method: Method, count: int = 3, paper: Printed | None = None, row: str = "plain-34") -> Cell:
    return Cell("test error", row, method, seeds(method.on(BASE), count), paper)


def found(*groups: tuple[Cell, Sequence[float | None]]) -> dict[Recipe, Record]:
    return {r: record(r, e) for c, errors in groups for r, e in zip(c.recipes, errors, strict=False)}


# Statistics


def test_mean_and_sample_deviation_with_n() -> None:
    one = cell(SGD)
    got = outcome(one.recipes, found((one, (0.07, 0.08, 0.12))), ERROR)
    assert write(got, ERROR) == f"9.00 ± {math.sqrt((2**2 + 1**2 + 3**2) / 2):.2f} (3)"


def test_a_single_run_has_no_deviation_and_none_is_a_dash() -> None:
    one = cell(SGD)
    assert write(outcome(one.recipes, found((one, (0.0712,))), ERROR), ERROR) == "7.12 (1)"
    assert write(outcome(one.recipes, {}, ERROR), ERROR) == "–"


def test_a_diverged_run_is_counted_and_not_averaged() -> None:
    one = cell(SGD)
    assert write(outcome(one.recipes, found((one, (0.07, None, 0.09))), ERROR), ERROR) == "8.00 ± 1.41 (2), 1 diverged"
    assert write(outcome(one.recipes, found((one, (None, None))), ERROR), ERROR) == "2 diverged"


def test_an_unfinished_run_is_neither() -> None:
    one = cell(SGD)
    runs = found((one, (0.07, 0.09)))
    half = Record(one.recipes[2], (), (), None)
    assert write(outcome(one.recipes, {**runs, one.recipes[2]: half}, ERROR), ERROR) == "8.00 ± 1.41 (2)"


def test_differences_are_between_runs_of_one_seed() -> None:
    base, other = cell(SGD), cell(G_SGD)
    runs = found((base, (0.10, 0.30, 0.20)), (other, (0.09, 0.29)))
    assert difference(base, other, runs, ERROR) == "-1.00 ± 0.00 (2)"  # the third seed has no partner
    assert difference(base, other, found((base, (0.1,)), (other, (None,))), ERROR) == "–"


# Layout


def test_the_papers_number_stands_beside_ours_and_controls_last() -> None:
    base, other, control = cell(SGD, paper=Printed(7.76, 0.17)), cell(G_SGD, paper=Printed(7.0, 0.1)), cell(CONTROL)
    runs = found((base, (0.08,)), (other, (0.07,)), (control, (0.075,)))
    made = table("test error", [control, base, other], runs, ERROR)
    (row,) = made.rows
    assert list(zip(made.head, row, strict=True)) == [
        ("", "plain-34, CIFAR-10"),
        ("SGD: paper", "7.76 ± 0.17 (5)"),
        ("ours", "8.00 (1)"),
        ("G-SGD: paper", "7.00 ± 0.10 (5)"),
        ("ours", "7.00 (1)"),
        ("SGD from skeleton init (control)", "7.50 (1)"),
        ("G-SGD against SGD", "-1.00 (1)"),
        ("G-SGD against SGD from skeleton init", "-0.50 (1)"),
    ]


def test_a_start_that_is_no_control_is_compared_with_the_usual_one() -> None:
    base, other, start = cell(SGD), cell(G_SGD), cell(replace(CONTROL, control=False))
    runs = found((base, (0.08,)), (other, (0.07,)), (start, (0.06,)))
    made = table("test error", [base, start, other], runs, ERROR)
    (row,) = made.rows
    assert list(zip(made.head, row, strict=True))[4:] == [
        ("G-SGD against SGD", "-1.00 (1)"),
        ("G-SGD against SGD from skeleton init", "+1.00 (1)"),
        ("SGD from skeleton init against SGD", "-2.00 (1)"),
    ]


def test_a_control_that_was_not_run_is_named_above_its_table() -> None:
    base, other, control = cell(SGD), cell(G_SGD), cell(CONTROL)
    made = table("test error", [control, base, other], found((base, (0.08,))), ERROR)
    assert made.head == ("", "SGD", "G-SGD", "G-SGD against SGD")
    assert made.note == "Not run: SGD from skeleton init."


def test_digits_of_a_loss_end_with_those_of_its_spread() -> None:
    assert mean_std([0.5, 0.52], LOSS) == "0.510 ± 0.014 (2)"
    assert mean_std([-2e-5, -4e-5], LOSS, "+") == "-0.000030 ± 0.000014 (2)"
    assert mean_std([1200.0, 3400.0], LOSS) == "2300 ± 1556 (2)"
    assert mean_std([0.5, 0.5], LOSS) == "0.5 ± 0 (2)"
    assert mean_std([0.51234], LOSS) == "0.512 (1)"
    assert mean_std([1e300, -1e300], LOSS) == "0 ± 1.41e+300 (2)"


def test_the_papers_errors_do_not_stand_beside_losses() -> None:
    base = cell(SGD, paper=Printed(7.76, 0.17))
    assert table("test error", [base], found((base, (0.08,))), LOSS).head == ("", "SGD")


def test_many_methods_on_one_line_stand_below_each_other() -> None:
    methods = [Method(f"m{k}", f"method {k}", {"max_ratio": 2.0 + k}) for k in range(8)]
    made = table("short runs", [cell(method, 1) for method in methods], {}, ERROR)
    assert [row[0] for row in made.rows] == [method.label for method in methods]


def test_a_grid_is_labelled_as_validation() -> None:
    held = Cell("grid", "lr 0.1", SGD, seeds(BASE.but(validation=100), 1))
    assert table("grid", [held], {}, ERROR).title == "Grid: validation error, %"


def test_a_curve_joins_runs_and_ends_where_they_do() -> None:
    recipes = seeds(BASE.but(data="digits", model="mlp", batch_size=143, iterations=100), 2)  # 10 steps per epoch
    long, short = record(recipes[0], 0.1), record(recipes[1], 0.3)
    short = Record(short.recipe, short.sessions, short.metrics[:1], None)
    joined = curve([long, short], "test_error", 100)
    assert joined == {5.0: pytest.approx([10, 30]), 10.0: pytest.approx([10])}


def test_a_part_that_varies_one_quantity_is_drawn_against_it() -> None:
    lines = [Cell("grid", f"lr {lr}", SGD, seeds(BASE.but(lr=lr, validation=10), 1), axis=RATE) for lr in (1.0, 0.1)]
    (panel,) = panels(lines, found(*((c, (c.recipes[0].lr / 10,)) for c in lines)))
    assert (panel.x_label, panel.log_x) == ("learning rate", True)
    x, y, _, _ = panel.series[0].drawn
    assert (x, y) == ((0.1, 1.0), pytest.approx((1.0, 10.0)))


def test_the_gap_to_sgd_is_drawn_seed_by_seed() -> None:
    recipes = {m: [seeds(m.on(BASE, lr=lr), 2) for lr in (0.1, 1.0)] for m in (SGD, G_SGD)}
    lines = [Cell("p", f"lr {r[0].lr}", m, r, axis=RATE) for m, rows in recipes.items() for r in rows]
    errors = {lines[0]: (0.2, 0.4), lines[1]: (0.5, 0.5), lines[2]: (0.1, 0.2), lines[3]: (0.5, None)}
    _, gap, _, _ = panels(lines, found(*errors.items()))
    assert [series.label for series in gap.series] == ["G-SGD"]
    _, y, low, high = gap.series[0].drawn
    assert y == pytest.approx((15.0, 0.0))
    assert (low, high) == (pytest.approx((10.0, 0.0)), pytest.approx((20.0, 0.0)))


# From run folders


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MLPs of `signs --quick`, for an epoch of the digits, and one run of no experiment."""
    out = tmp_path_factory.mktemp("runs")
    cells = Variant(quick=True).cells(EXPERIMENTS["signs"], lambda recipe: None)
    recipes = [r for c in cells for r in c.recipes if r.model == "mlp" and r.hidden == (8, 8)]
    for init in ("skeleton", "skeleton-random-signs"):
        train_many([r for r in recipes if r.init == init], out)
    train_many([Recipe(epochs=0.2, lr=0.0123)], out)
    return out


def test_the_same_records_give_the_same_bytes_and_say_what_they_stand_on(runs: Path, tmp_path: Path) -> None:
    assert cli.main(["report", str(runs), "--out", str(tmp_path / "a")]) == 0
    assert cli.main(["report", str(runs), "--out", str(tmp_path / "b")]) == 0
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    names = ["signs-quick.svg"]
    assert [str(path) for path in files] == [*(f"figures/{name}" for name in names), "report.html", "report.md"]
    for path in files:
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()
    text = (tmp_path / "a" / "report.md").read_text()
    for said in (
        "signs: Sec. 11.2 of the paper (quick: small networks on the digits)",
        "digits in place of Fashion-MNIST",
        "`gspace reproduce signs --quick`",
        "figures/signs-quick.svg",
        "lr 0.0123",  # the run of no experiment
        "gspace reproduce table-1",  # missing, with its cost
        "on one NVIDIA H200",
    ):
        assert said in text, said
    row = next(line for line in text.splitlines() if line.startswith("| h = 8, digits"))
    first, *cells = (cell.strip() for cell in row.strip("|").split("|"))
    assert first == "h = 8, digits in place of Fashion-MNIST"
    assert [re.sub(r"\d+\.\d\d", "x", cell) for cell in cells] == ["x ± x (3)", "–", "x ± x (3)"]
    other = next(line for line in text.splitlines() if line.startswith("| h = 32, digits"))
    assert other.endswith("| – | – |")


def test_runs_of_no_experiment_are_listed() -> None:
    runs = [record(BASE.but(data="digits", model="mlp", lr=0.07), 0.1), record(BASE.but(data="digits", lr=0.08), None)]
    document = assemble(runs, [EXPERIMENTS["signs"]], "x")
    tables = {table.title: table.rows for table in document.appendix}
    assert document.sections == ()
    assert "10.00 (1)" in tables["Other runs"][0]
    assert len(tables["Diverged runs"]) == 1


# Records to commit


def home(recipe: Recipe) -> str:
    return recipe.data


def test_exported_records_are_small_and_give_the_same_tables(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = ["report", str(runs), "--export", str(tmp_path / "results")]
    assert cli.main(export) == 0
    files = {path: path.read_text() for path in (tmp_path / "results").iterdir()}
    assert {path.stem: len(text.splitlines()) for path, text in files.items()} == {
        "mlp-invariance": 2,  # of which `signs` has two runs
        "signs": 4,
        "other": 1,
    }
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert all(len(line) < 8000 for text in files.values() for line in text.splitlines())
    before = assemble(archive.read_records([runs]), [EXPERIMENTS["signs"]], "x")
    after = assemble(archive.read_records([tmp_path / "results"]), [EXPERIMENTS["signs"]], "x")
    assert after == before
    assert markdown(after, "figures") == markdown(before, "figures")
    twice = archive.read_records([*files, runs])
    assert len(twice) == 7
    assert all(one.summary for one in twice)
    assert cli.main(export) == 0
    assert capsys.readouterr().out == "every finished run was there\n"
    assert {path: path.read_text() for path in (tmp_path / "results").iterdir()} == files


def test_a_run_that_others_decided_goes_to_their_experiment(tmp_path: Path) -> None:
    """Exported later than the runs it was chosen by, and alone."""
    there, momentum, quick = tmp_path / "there", EXPERIMENTS["momentum"], Variant(quick=True)
    grid: list[Record] = []
    for _ in range(2):  # the rates, then the decays at the best of them
        left = jobs(quick.cells(momentum, archive.scores_of(grid)))
        grid += [record(recipe, 0.1) for recipe in left if recipe.validation and recipe not in {r.recipe for r in grid}]
    archive.collect(grid, there, lambda recipe: "momentum")
    decided = [recipe for recipe in jobs(quick.cells(momentum, archive.scores_of(grid))) if not recipe.validation]
    archive.collect([record(decided[0], 0.1)], tmp_path / "new", home)
    assert cli.main(["report", str(tmp_path / "new"), "--export", str(there)]) == 0
    assert {path.stem: len(archive.from_lines(path)) for path in there.iterdir()} == {"momentum": len(grid) + 1}


def test_a_record_survives_its_line(tmp_path: Path) -> None:
    one = record(BASE.but(max_drift=math.inf, validation=7), 0.123456789)
    back = archive.from_line(archive.to_line(one).encode(), "here")
    assert back.recipe == one.recipe
    assert back.summary == {**(one.summary or {}), "test_error": 0.12346}
    assert back.metrics[-1]["iteration"] == 100
    assert archive.to_line(back) == archive.to_line(one)


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    lines: list[dict[str, Any]] = [{"iteration": k} for k in range(1, 1001)]
    kept = archive.thinned(lines, 100)
    assert len(kept) == 100
    assert [line["iteration"] for line in kept[-2:]] == [990, 1000]
    assert archive.thinned(lines[:7], 100) == lines[:7]


def test_run_folders_and_records_choose_alike(tmp_path: Path) -> None:
    """Two rates with as many errors of 6,000 in all: rounding must not decide otherwise than before."""
    grid = [seeds(BASE.but(lr=lr, validation=6000), 2) for lr in (0.01, 0.03)]
    errors = {grid[0][0]: 739, grid[0][1]: 748, grid[1][0]: 755, grid[1][1]: 732}
    folders = [record(recipe, count / 6000) for recipe, count in errors.items()]
    archive.collect(folders, tmp_path, home)
    assert best(grid, archive.scores_of(folders)) == best(grid, archive.scores_of(archive.read_records([tmp_path])))


def test_finished_runs_are_added_to_their_files_and_stay_there(tmp_path: Path) -> None:
    runs = [record(recipe, 0.1 + recipe.seed / 7) for recipe in seeds(BASE, 3)]
    half = Record(BASE.but(seed=9), (), (), None)
    other = record(BASE.but(data="mnist"), 0.1)
    assert archive.collect([*runs[1:], half], tmp_path, home) == {tmp_path / "cifar10.jsonl": 2}
    changed = record(runs[1].recipe, 0.9)
    added = archive.collect([runs[0], changed, other], tmp_path, home)
    assert added == {tmp_path / "cifar10.jsonl": 1, tmp_path / "mnist.jsonl": 1}
    assert archive.collect(runs, tmp_path, lambda recipe: "elsewhere") == {}
    assert [archive.to_line(one) for one in archive.from_lines(tmp_path / "cifar10.jsonl")] == [
        archive.to_line(one) for one in sorted(runs, key=lambda one: one.recipe.folder)
    ]


ENDED = record(BASE, 0.5).summary or {}
DAMAGED: list[dict[str, Any]] = [
    {"summary": {}},
    {"summary": None},
    {"summary": {**ENDED, "test_error": "x"}},
    {"summary": {**ENDED, "test_error": 7}},
    {"summary": {**ENDED, "test_error": -0.5}},
    {"summary": {**ENDED, "test_error": None}},
    {"summary": {**ENDED, "test_error": True}},
    {"summary": {**ENDED, "test_error": 0.25}},
    {"summary": {**ENDED, "status": "foo"}},
    {"summary": {**ENDED, "status": "diverged"}},
    {"summary": {**ENDED, "identity": "0123456789ab"}},
    {"summary": {**ENDED, "iteration": 99}},
    {"summary": {**ENDED, "fit_los": 1.0}},
    {"summary": {name: value for name, value in ENDED.items() if name != "iterations"}},
    {"summary": 3},
    {"curve": {}},
    {"curve": {key: [1] for key in archive.COLUMNS}},
    {"curve": {"iteration": [100]}},
    {"recipe": {}},
    {"recipe": []},
    {"sessions": [1]},
    {"sessions": None},
    {"more": 1},
]


def damaged(tmp_path: Path, text: str) -> str:
    """What is said of a file whose second line is this."""
    path = tmp_path / "some.jsonl"
    path.write_text(archive.to_line(record(BASE, 0.5)) + text + "\n")
    with pytest.raises(RecordError, match=r"some\.jsonl, line 2 is no record of a run: \S") as caught:
        archive.read_records([tmp_path])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    content = json.loads(archive.to_line(record(BASE, 0.5)))
    del content["digest"]
    for change in DAMAGED:  # each with a right digest
        damaged(tmp_path, json.dumps(sealed({**content, **change}, BASE.identity)))
    for number in (math.nan, math.inf):
        damaged(tmp_path, json.dumps({**content, "summary": {**ENDED, "fit_loss": number}}))
    for name in content:
        rest = {key: value for key, value in content.items() if key != name}
        assert f"it has no {name!r}" in damaged(tmp_path, json.dumps(sealed(rest, BASE.identity)))
    assert "no digest: it was written before gspace 0.2" in damaged(tmp_path, json.dumps(content))
    for text in ("[]", "{}", "[" * 10_000, '{"recipe": {"lr": -1, "epochs": 1}, "curve": {}}'):
        damaged(tmp_path, text)


def test_a_record_of_version_0_1_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"{BASE.folder}.json"  # a run had a file of its own, with line breaks
    path.write_text(json.dumps({**json.loads(archive.to_line(record(BASE, 0.5))), "digest": None}, indent=1))
    for root in (tmp_path, path):
        with pytest.raises(RecordError, match=r"(is a record of gspace 0\.1|is no record of a run)"):
            archive.read_records([root])


def test_no_bit_of_a_committed_record_flips_silently(tmp_path: Path) -> None:
    content = archive.to_line(record(BASE, 0.5)).encode()
    whole, silent = archive.from_line(content, "here"), []
    for place in range(len(content)):
        flipped = content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
        try:
            if archive.from_line(flipped, "here") != whole:
                silent.append(place)
        except RecordError:
            continue
    assert silent == []


# The page and the Markdown

PANEL = Panel("title", "x", "y", (Series("a <b> & 'c'", ((1.0, (0.4, 0.6)), (2.0, (0.2, 0.3)))),), log_y=True)
DOCUMENT = Document(
    "A title",
    "gspace report <runs>",
    ("text with `code`, **bold** and </script>",),
    (
        Section(
            "s",
            "Section",
            "gspace x",
            ("text",),
            (Table("T", ("", "n | m"), (("a | b", "1"),), note="Not run: A."),),
            (PANEL,),
        ),
    ),
    (),
)
FIGURES = {"s": b'<svg xmlns="http://www.w3.org/2000/svg"/>'}


class Parts(HTMLParser):
    """The elements of a page, its text, and where its links and pictures lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_from_outside() -> None:
    text = page(DOCUMENT, FIGURES)
    addresses = Parts(text).addresses
    assert len(addresses) == 3  # an icon, a section, a figure
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert "@import" not in text
    assert "url(" not in text


def test_the_page_shows_no_mark_of_markdown() -> None:
    document = assemble([record(BASE, 0.1)], list(EXPERIMENTS.values()), "gspace report runs")
    shown = Parts(page(document, {section.name: b"<svg/>" for section in document.sections}))
    assert "*" not in shown.text.split("</style>")[-1]
    assert "`" not in shown.text
    assert {"em", "strong", "code", "table"} <= {*shown.tags, *Parts(page(DOCUMENT, FIGURES)).tags}
    assert "SGD from skeleton init starts where G-SGD starts." in shown.text


def test_text_cannot_break_the_page() -> None:
    text = page(DOCUMENT, FIGURES)
    assert "script" not in Parts(text).tags
    assert "text with <code>code</code>, <strong>bold</strong> and &lt;/script&gt;" in text


@pytest.mark.parametrize(
    "name",
    ["<script>alert(1)</script>", "a\n\n<b>b</b>", "[a](javascript:b)", "![a](http://b/c.png)", "`<b>", "a | b & c"],
)
def test_a_name_out_of_a_record_is_no_html(name: str) -> None:
    one = replace(record(BASE, 0.1), sessions=({"gpu": name, "torch": name},))
    experiment = EXPERIMENTS["table-1"]
    document = assemble([one], [experiment], f"gspace report {name}", f" --results {name}")
    plain = assemble([record(BASE, 0.1)], [experiment], "gspace report x", " --results x")
    figures = {section.name: b"<svg/>" for section in document.sections}
    shown, usual = Parts(page(document, figures)), Parts(page(plain, figures))
    assert shown.tags == usual.tags
    assert shown.addresses == usual.addresses
    (row,) = [
        line for line in markdown(document, "figures").splitlines() if line.endswith("| 1 |") and "gpu" not in line
    ][-1:]
    assert "<" not in row.replace("`", "")
    assert "](" not in row


def test_a_table_that_is_too_wide_is_turned_on_the_page() -> None:
    head = ("", "SGD: paper", "ours", *(f"G-SGD with a long name {k}" for k in range(5)))
    wide = Table("T", head, (("line", *"1234567"),), note="N.")
    turned = narrow(wide)
    assert turned.head == ("", "line")
    assert turned.rows[:2] == (("SGD: paper", "1"), ("SGD: ours", "2"))
    assert narrow(turned) == turned
    tall = Table("T", ("", "a" * 70, "b" * 70), tuple((str(k), "x" * 20, "y") for k in range(20)))
    assert narrow(tall) == tall  # it would be wider
    document = replace(DOCUMENT, sections=(replace(DOCUMENT.sections[0], tables=(wide,)),))
    assert "<td>SGD: ours</td>" in page(document, FIGURES)
    assert "| line | 1 | 2 |" in markdown(document, "figures")


def test_what_was_not_run_is_said_before_the_table() -> None:
    assert "### T\n\nNot run: A.\n\n| " in markdown(DOCUMENT, "figures")
    assert "<h3>T</h3>\n<p>Not run: A.</p>\n" in page(DOCUMENT, FIGURES)


def test_markdown_escapes_what_would_split_a_cell() -> None:
    assert "| a \\| b | 1 |" in markdown(DOCUMENT, "figures")


def test_figures_are_written_for_every_section_that_has_panels(tmp_path: Path) -> None:
    written = publish(DOCUMENT, tmp_path)
    assert [path.name for path in written] == ["report.md", "report.html", "s.svg"]
    assert "<svg" in (tmp_path / "figures" / "s.svg").read_text()


def test_curves_of_one_panel_can_be_told_apart() -> None:
    def style(hue: int, control: bool) -> tuple[object, object]:
        axes = Figure().add_subplot()
        _panel(axes, Panel("title", "x", "y", (Series("a", ((1.0, (1.0,)), (2.0, (2.0,))), control, hue),)))
        (line,) = axes.lines
        return line.get_color(), line.get_linestyle()

    styles = [style(hue, control) for hue in range(3 * len(COLOURS)) for control in (False, True)]
    assert len(set(styles[: 2 * len(COLOURS)])) == 2 * len(COLOURS)
    assert len(set(styles[::2])) == 3 * len(COLOURS)


@pytest.mark.parametrize(("high", "ticks"), [(80.0, ["5", "10", "20", "50"]), (1e6, None)])
def test_a_short_logarithmic_axis_has_plain_numbers(high: float, ticks: list[str] | None) -> None:
    axes = Figure().add_subplot()
    _panel(axes, Panel("title", "x", "y", (Series("a", ((0.0, (4.0,)), (1.0, (high,)))),), log_y=True))
    axes.figure.canvas.draw()
    low, top = axes.get_ylim()
    texts = [t.get_text() for t, y in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True) if low <= y <= top]
    assert texts == ticks if ticks else all("10^" in text for text in texts)


def test_long_titles_of_neighbours_do_not_run_into_each_other() -> None:
    title = "narrow networks, 8,000 iterations: plain-34, torchvision's weights, CIFAR-10"
    figure = Figure(figsize=(10.4, 3.4), layout="constrained")
    left, right = (figure.add_subplot(1, 2, k) for k in (1, 2))
    for axes in (left, right):
        _panel(axes, Panel(title, "x", "y", (Series("a", ((0.0, (1.0,)), (1.0, (2.0,)))),)))
    figure.canvas.draw()
    assert left.title.get_window_extent().x1 < right.title.get_window_extent().x0
    assert " ".join(left.get_title().split()) == title


def test_a_curve_of_one_run_has_no_band() -> None:
    axes = Figure().add_subplot()
    one, two = (Series("a", ((0.0, y), (1.0, y))) for y in ((1.0,), (1.0, 2.0)))
    _panel(axes, Panel("title", "x", "y", (one,)))
    assert not axes.collections
    _panel(axes, Panel("title", "x", "y", (two,)))
    assert len(axes.collections) == 1


def test_many_names_stand_below_their_curves() -> None:
    def names_cover(count: int) -> bool:
        axes = Figure(layout="constrained").add_subplot()
        series = tuple(Series(f"s{k}", ((0.0, (1.0,)), (1.0, (2.0,))), False, k) for k in range(count))
        _panel(axes, Panel("title", "x", "y", series))
        axes.figure.canvas.draw()
        legend = axes.get_legend()
        assert legend is not None
        return bool(legend.get_window_extent().overlaps(axes.get_window_extent()))

    assert names_cover(MANY)
    assert not names_cover(MANY + 1)


def test_a_run_of_several_experiments_opens_one_section() -> None:
    shared = set(jobs(Variant().cells(EXPERIMENTS["signs"], lambda recipe: None)))
    shared &= set(jobs(Variant().cells(EXPERIMENTS["one-chain"], lambda recipe: None)))
    assert shared
    document = assemble([record(next(iter(shared)), 0.1)], list(EXPERIMENTS.values()), "x")
    assert len(document.sections) == 1
    assert [t.title for t in document.appendix] == ["Missing", "Environment"]


def test_what_is_recorded_is_not_missing() -> None:
    cells = Variant().cells(EXPERIMENTS["rates"], lambda recipe: None)
    some = [record(recipe, 0.1) for recipe in jobs(cells) if recipe.lr == 1.0]
    rows = {row[0]: row for row in assemble(some, list(EXPERIMENTS.values()), "x").appendix[0].rows}
    every = {row[0]: row for row in assemble([], list(EXPERIMENTS.values()), "x").appendix[0].rows}
    for name in ("rates, CIFAR-10", "one-chain, CIFAR-10"):
        assert int(rows[name][3]) < int(every[name][3]), name


def test_a_curve_has_the_points_that_all_its_runs_have() -> None:
    whole, sparse = record(BASE, 0.2), record(BASE.but(seed=1), 0.4)
    sparse = replace(sparse, metrics=sparse.metrics[1:])
    assert [len(y) for y in curve([whole, sparse], "test_error", 1.0).values()] == [2]
    ended = replace(whole, metrics=whole.metrics[:1])
    assert [len(y) for y in curve([ended, record(BASE.but(seed=1), 0.4)], "test_error", 1.0).values()] == [2, 1]
