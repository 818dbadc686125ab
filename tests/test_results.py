"""What README and docs say of recorded runs is what `gspace report results/runs` writes."""

import importlib
import json
import re
import shlex
import shutil
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import gspace
from gspace.optim.coordinates import coordinates, off_skeleton
from gspace.optim.step import unscaled

pytest.importorskip("matplotlib")

from gspace.lab import reproduce
from gspace.lab.archive import read_records
from gspace.lab.cli import main
from gspace.lab.document import markdown
from gspace.lab.experiments import EXPERIMENTS
from gspace.lab.figures import save
from gspace.lab.models import build_model
from gspace.lab.record import Record
from gspace.lab.report import assemble, homes

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "results" / "runs"
REPORT = ROOT / "docs" / "results" / "report.md"
COMMAND, COUNTING = "gspace report results/runs", " --results results/runs"
BLOCK = re.compile(r"<!-- gspace report results/runs -->\n(.*?)\n<!-- end -->", re.DOTALL)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return read_records([RUNS])


@pytest.fixture(scope="module")
def report(records: list[Record]) -> str:
    return markdown(assemble(records, list(EXPERIMENTS.values()), COMMAND, COUNTING), "figures")


def rows_of(table: str) -> list[dict[str, str]]:
    """Rows by the names of their columns, those of a method's own runs apart from the paper's."""
    head, _, *rows = [line.strip("|").split("|") for line in table.splitlines()]
    names = [name.strip() for name in head]
    paper = ["", *(name.removesuffix(": paper") for name in names)]
    unique = [f"{before}: ours" if name == "ours" else name for before, name in zip(paper, names, strict=False)]
    return [dict(zip_longest(unique, map(str.strip, row), fillvalue="")) for row in rows]


def foreign_tables(text: str, report: str) -> list[str]:
    """Tables marked as the report's that are none of its tables, rows, columns and settings left out apart."""
    tables = [rows_of(table) for table in re.findall(r"(?:^\|.*\n)+", report, re.MULTILINE)]

    def is_part(row: dict[str, str], full: dict[str, str]) -> bool:
        return all(value in (full.get(name), full.get(name, "").split("; ")[0]) for name, value in row.items())

    def known(rows: list[dict[str, str]]) -> bool:
        return any(rows and all(any(is_part(row, full) for full in table) for row in rows) for table in tables)

    return [block for block in BLOCK.findall(text) if not known(rows_of(block))]


def test_every_record_is_of_one_run_and_in_the_file_of_its_experiment(records: list[Record]) -> None:
    """Reading them has compared every digest and checked every value; no line is there twice."""
    home = homes(records)
    assert len(records) == sum(len(path.read_bytes().splitlines()) for path in RUNS.glob("*"))
    for path in RUNS.glob("*"):
        for record in read_records([path]):
            assert record.summary is not None
            assert path == RUNS / f"{home(record.recipe)}.jsonl"


def test_the_committed_report_is_that_of_the_committed_records(report: str) -> None:
    assert REPORT.read_text(encoding="utf-8") == report, "gspace report results/runs --out docs/results"


def test_the_table_of_the_readme_is_that_of_the_report(report: str) -> None:
    assert BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert foreign_tables((ROOT / "README.md").read_text(encoding="utf-8"), report) == []


def unmarked_tables(text: str) -> list[str]:
    """The rows above their rules of tables that no comment marks as the report's."""
    return re.findall(r"^(\|.*)\n\|[-:| ]+$", BLOCK.sub("", text), re.MULTILINE)


def test_a_table_of_results_cannot_stand_in_the_readme_unmarked() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert unmarked_tables(text) == []
    bare = text.replace("<!-- gspace report results/runs -->\n", "", 1)
    assert len(unmarked_tables(bare)) == 1


def test_the_commands_of_what_is_missing_list_as_many_runs(
    report: str, records: list[Record], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    asked = []
    monkeypatch.setattr(reproduce, "read_records", lambda paths: asked.append(paths) or records)  # read once
    rows = [line.split(" | ") for line in report.split("## Missing")[1].split("\n## ")[0].splitlines() if "`" in line]
    assert len(rows) > 10
    for _, command, which, count, _ in rows:
        assert main([*shlex.split(command.strip("`"))[1:], "--list", "--out", "absent"]) == 0
        left = re.findall(r"^left: (\d+) runs|^decided by these: (\d+) more", capsys.readouterr().out, re.MULTILINE)
        assert sum(int(a or b) for a, b in left) == int(count), command
        assert sum(int(part.split()[0]) for part in which.split(", ")) == int(count), command
    assert asked == [[Path("results/runs")]] * len(rows)


def test_a_changed_number_is_found(report: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    row = next(line for line in BLOCK.findall(text)[0].splitlines() if re.search(r"\d\.\d", line))
    changed = text.replace(row, re.sub(r"(\d\.\d)", "9\\1", row, count=1))
    assert foreign_tables(changed, report) != []


def test_a_row_of_another_table_is_found(report: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    row = BLOCK.findall(text)[0].splitlines()[2]
    name = row.split("|")[1]
    others = [line.split("|") for line in report.splitlines() if line.startswith(f"|{name}|") and line.count("|") > 5]
    assert len(others) > 5
    changed = ["|".join([*other[:5], ""]) for other in others if other[:5] != row.split("|")[:5]]
    assert all(foreign_tables(text.replace(row, line), report) for line in changed)


def test_a_number_in_the_column_of_another_is_found(report: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    row = BLOCK.findall(text)[0].splitlines()[2]
    _, line, first, second, *rest = row.split("|")
    assert foreign_tables(text.replace(row, "|".join(["", line, second, first, *rest])), report) != []


def test_every_figure_of_the_report_is_there(report: str) -> None:
    figures = re.findall(r"\]\((figures/.*?)\)", report)
    assert figures
    assert [name for name in figures if not (REPORT.parent / name).exists()] == []


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module(f"benchmarks.{name}")


def test_the_pages_of_the_benchmarks_are_those_of_their_records(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = json.loads((ROOT / "results" / "stack.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "stack.md").read_text(encoding="utf-8") == benchmark("stack", monkeypatch).page(stack)
    guards = json.loads((ROOT / "results" / "guards.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "guards.md").read_text(encoding="utf-8") == benchmark("guards", monkeypatch).table(guards)
    chain = json.loads((ROOT / "results" / "chain.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "chain.md").read_text(encoding="utf-8") == benchmark("chain", monkeypatch).page(chain)
    gaps = json.loads((ROOT / "results" / "invariance.json").read_text(encoding="utf-8"))
    shown = (ROOT / "docs" / "invariance.md").read_text(encoding="utf-8")
    assert shown == benchmark("invariance", monkeypatch).page(gaps)
    speed = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert speed == benchmark("step.pages", monkeypatch).page(ROOT / "results")
    compared = [line.split(" | ") for line in speed.splitlines() if " GSGD fused " in line]
    assert len(compared) > 30
    for cells in compared:
        baseline, ours, ratio = (float(cells[k].split()[0]) for k in (7, 8, 9))
        assert ours / baseline == pytest.approx(ratio, rel=0.01, abs=0.01 * ratio + 0.1 / baseline)


@pytest.mark.parametrize("name", ["step-cpu", "step-gpu"])
def test_the_figures_of_steps_are_those_of_their_records(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "results" / f"{name}.csv", tmp_path)
    benchmark("step.pages", monkeypatch).draw(tmp_path / f"{name}.csv")
    assert (tmp_path / f"{name}.svg").read_bytes() == (ROOT / "results" / f"{name}.svg").read_bytes()


def twins_record() -> dict[str, Any]:
    return json.loads((ROOT / "results" / "twins.json").read_text(encoding="utf-8"))


def test_the_figure_of_the_readme_is_that_of_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twins, record = benchmark("twins", monkeypatch), twins_record()
    committed, drawn = (ROOT / "docs" / "twins.svg").read_bytes(), tmp_path / "twins.svg"
    assert save(twins.figure(record), drawn).read_bytes() == committed, "gspace bench twins --figure docs/twins.svg"
    record["rows"][0]["train_loss"][40] *= 1.5
    assert save(twins.figure(record), drawn).read_bytes() != committed


def test_twins_trained_again_begin_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    twins, record = benchmark("twins", monkeypatch), twins_record()
    again = twins.measure(1, 20)
    assert twins.apart(again, "G-SGD")[0] < 1e-13 < 0.1 < twins.apart(again, "SGD")[0]
    for key, loss in twins.curves(again).items():
        assert loss == pytest.approx(twins.curves(record)[key][: len(loss)], rel=1e-9), key


def test_the_readme_says_of_twins_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    twins, record = benchmark("twins", monkeypatch), twins_record()
    sgd, gsgd = (twins.apart(record, name) for name in twins.OPTIMIZERS)
    apart = f"is {100 * min(sgd):.0f} to {100 * max(sgd):.0f} % with SGD and {max(gsgd):.0e} with G-SGD"
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"With n = {len(sgd)} seeds the largest gap between the losses of the two copies {apart}" in text


def test_means_in_fidelity_are_those_of_the_report(report: str) -> None:
    """No table is repeated there, and every mean with its deviation stands in the report."""
    text = " ".join((ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8").split())
    said = re.findall(r"\d+\.\d+ ± \d+\.\d+", text)
    assert len(said) >= 5
    assert [number for number in said if number not in report] == []


def test_the_best_point_of_a_curve_is_worth_what_fidelity_says(records: list[Record]) -> None:
    text = " ".join((ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8").split())
    table = (cell for cell in EXPERIMENTS["table-1"].cells(False, lambda recipe: None) if cell.method.key == "sgd")
    ended = {record.recipe: record.summary for record in records if record.summary is not None}
    sums = [[ended[recipe] for recipe in cell.recipes if recipe in ended] for cell in table]
    worth = [fmean(100 * (some["test_error"] - some["best_test_error"]) for some in cell) for cell in sums]
    assert len(worth) == 4
    assert f"of our SGD is {min(worth):.1f} to {max(worth):.1f} below the last one" in text


def test_means_in_the_readme_are_those_of_the_report(report: str) -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split("## Results")[1].split("##")[0].split())
    said = re.findall(r"\d+\.\d+ ± \d+\.\d+", text)
    assert len(said) == 22
    assert [number for number in said if number not in report] == []


def test_the_costs_of_the_readme_are_measured() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Cost")[1].split("##")[0]
    lines = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| iteration ")]
    mlps = [[name, "eager", "float32"] for name in ("mlp-784-5x64-10", "mlp-49-2x1024-10")]
    found = []
    for which in (["plain-34", "compiled graph", "bf16"], *mlps):
        (ours,) = (row for row in rows if row[1:6] == [*which, "", "GSGD fused"])
        theirs = [float(ours[7].split()[0])]  # the baseline, or torch's other SGD where that is faster
        theirs += [float(row[8].split()[0]) for row in rows if row[1:6] == [*which, "", "SGD fused"]]
        found.append(f"{float(ours[8].split()[0]) / min(theirs):.3f}")
    assert re.findall(r"\*\*([\d.]+)×\*\*", text) == found


def test_errors_in_exact_coordinates_are_recorded() -> None:
    methods = json.loads((ROOT / "results" / "exact.json").read_text(encoding="utf-8"))["methods"]
    text = (
        (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8").split("**Exact coordinates")[1].split("\n\n")[0]
    )
    errors = {name: [100 * e for e in row["test_error"]] for name, row in methods.items()}
    pairs = zip(errors['G-SGD "exact"'], errors["SGD, decay 5e-4"], strict=True)
    for values in (*errors.values(), [a - b for a, b in pairs]):
        assert f"{fmean(values):.2f} ± {stdev(values):.2f}" in " ".join(text.split())


class Trained:
    """A small chain with BatchNorm, float64, after a few steps without a guard."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = gspace.init_skeleton_(build_model("plain-10", (3, 8, 8), 10, width=4).double())
        self.at = coordinates(self.model, reference="one")
        self.x, self.y = torch.randn(16, 3, 8, 8).double(), torch.randint(10, (16,))
        self.optimizer = self.fresh()
        for _ in range(5):
            self.step()

    def fresh(self) -> gspace.GSGD:
        return gspace.GSGD(self.model, 0.3, reference="one", max_ratio=float("inf"), max_drift=float("inf"))

    def backward(self) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.x), self.y).backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def test_the_multiplier_of_a_chain_is_that_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, trained = benchmark("chain", monkeypatch), Trained()
    trained.backward()
    before, into = trained.weights(), trained.optimizer.incoming.clone()
    grads = {name: p.grad.clone() for name, p in trained.model.named_parameters() if p.grad is not None}
    layers = list(enumerate(trained.at.layers))
    factors = [chain.multiplier(trained.optimizer, trained.at, k, before[e.edges.name]).clone() for k, e in layers]
    trained.optimizer.step()
    after, ratio = trained.weights(), trained.optimizer.incoming / into
    assert float(ratio.max() - ratio.min()) > 1e-3
    ends = trained.at.plan.ends(ratio, None)
    for k, layer in layers:
        w, g, new = (layer.edges.view(values[layer.edges.name]) for values in (before, grads, after))
        off = off_skeleton(layer, before[layer.edges.name]) > 0
        expected = unscaled(w - 0.3 * factors[k] * g, ends[k])
        torch.testing.assert_close(new[off], expected[off], rtol=1e-12, atol=1e-14)


def test_paths_measured_anew_are_1_and_no_weight_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, trained = benchmark("chain", monkeypatch), Trained()
    sizes, before = chain.path_sizes(trained.at, trained.model), trained.weights()
    torch.testing.assert_close(sizes, (trained.optimizer.incoming * trained.optimizer.outgoing).abs())
    assert float((sizes - 1).abs().max()) > 0.1
    chain.rereference(trained.optimizer)
    assert all(torch.equal(before[name], w) for name, w in trained.weights().items())
    torch.testing.assert_close(trained.optimizer.incoming, torch.ones_like(sizes))
    trained.step()
    torch.testing.assert_close(trained.optimizer.incoming, chain.path_sizes(trained.at, trained.model) / sizes)


def test_a_new_optimizer_measures_paths_as_the_old_one() -> None:
    """The reference "one", which a network on the skeleton has, does not depend on the weights of now."""
    kept, replaced = Trained(), Trained()
    for _ in range(5):
        replaced.optimizer = replaced.fresh()
        kept.step()
        replaced.step()
    for a, b in zip(kept.weights().values(), replaced.weights().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_every_planted_bug_still_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for file, right, wrong in benchmark("mutations", monkeypatch).MUTATIONS.values():
        assert right in (ROOT / "src" / "gspace" / file).read_text(encoding="utf-8")
        assert wrong != right


def test_iterations_of_convolutions_are_timed_with_every_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = benchmark("step.sections", monkeypatch)
    small = sections.Network(partial(build_model, "plain-10", (3, 8, 8), 10, width=4), (3, 8, 8), 2)
    monkeypatch.setattr(sections, "NETWORKS", {"small": small})
    groups = list(sections.iterations(sections.Setting("cpu", repeats=2, networks=["small"])))
    timed = {(row.optimizer, row.momentum) for rows in groups for row in rows}
    names = ["SGD fused", "SGD foreach", "GSGD fused", "InGSpace(SGD)", "PathSGD"]
    again = ["SGD fused again", "SGD foreach again"]
    adam = {(name, 0.0) for name in ("AdamW fused", "InGSpace(AdamW)", "AdamW fused again")}
    assert timed == {(name, momentum) for name in (*names, *again) for momentum in (0.0, 0.9)} | adam
    assert all(row.median_us > 0 for rows in groups for row in rows)
