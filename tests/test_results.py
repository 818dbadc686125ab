"""What README and docs say of recorded runs is what `gspace report results/runs` writes."""

import importlib
import json
import re
import shlex
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import cross_entropy

import gspace
from gspace.coordinates import coordinates, off_skeleton

pytest.importorskip("matplotlib")

from gspace.lab import reproduce
from gspace.lab.archive import read_records
from gspace.lab.cli import main
from gspace.lab.document import markdown
from gspace.lab.experiments import EXPERIMENTS
from gspace.lab.models import build_model
from gspace.lab.record import Record
from gspace.lab.report import assemble

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs" / "results" / "report.md"
COMMAND, COUNTING = "gspace report results/runs", " --results results/runs"
BLOCK = re.compile(r"<!-- gspace report results/runs -->\n(.*?)\n<!-- end -->", re.DOTALL)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return read_records([ROOT / "results" / "runs"])


@pytest.fixture(scope="module")
def report(records: list[Record]) -> str:
    return markdown(assemble(records, list(EXPERIMENTS.values()), COMMAND, COUNTING), "figures")


def foreign_tables(text: str, report: str) -> list[str]:
    """Tables marked as the report's that are none of its tables, rows left out apart."""
    tables = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", report, re.MULTILINE)]

    def known(rows: list[str]) -> bool:
        return any(rows[:2] == table[:2] and set(rows) <= set(table) for table in tables)

    return [block for block in BLOCK.findall(text) if not known(block.splitlines())]


def test_every_record_is_of_one_run(records: list[Record]) -> None:
    """Its curve ends where its summary says, and its file has the name of its recipe."""
    for record in records:
        assert record.summary is not None
        assert record.folder.stem == record.recipe.folder
        assert record.summary["identity"] in record.recipe.folder
        if record.summary["status"] == "finished":
            for key in ("iteration", "test_error"):
                assert record.metrics[-1][key] == record.summary[key], record.folder


def test_the_committed_report_is_that_of_the_committed_records(report: str) -> None:
    assert REPORT.read_text(encoding="utf-8") == report, "gspace report results/runs --out docs/results"


@pytest.mark.parametrize("name", ["README.md", "docs/fidelity.md"])
def test_tables_are_those_of_the_report(name: str, report: str) -> None:
    assert BLOCK.search((ROOT / name).read_text(encoding="utf-8"))
    assert foreign_tables((ROOT / name).read_text(encoding="utf-8"), report) == []


def unmarked_tables(text: str) -> list[str]:
    """The rows above their rules of tables that no comment marks as the report's."""
    return re.findall(r"^(\|.*)\n\|[-:| ]+$", BLOCK.sub("", text), re.MULTILINE)


def test_a_table_of_results_cannot_stand_in_the_readme_unmarked() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    others = ["| optimizer | MLP 64-64-64-10 | CNN | ResNet-10 without BatchNorm | with BatchNorm |"]  # tested below
    others += ["| call | what it does |"]
    assert unmarked_tables(text) == others
    bare = text.replace("<!-- gspace report results/runs -->\n", "", 1)
    assert len(unmarked_tables(bare)) == len(others) + 1


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
    first, second = (block.splitlines() for block in BLOCK.findall(text)[:2])
    assert foreign_tables(text.replace(first[2], second[2]), report) != []


def test_every_figure_of_the_report_is_there(report: str) -> None:
    figures = re.findall(r"\]\((figures/.*?)\)", report)
    assert figures
    assert [name for name in figures if not (REPORT.parent / name).exists()] == []


def invariance(name: str) -> dict[str, list[str]]:
    """Rows of the first table after optimizers and networks: the optimizer without its rate, the medians."""
    text = (ROOT / name).read_text(encoding="utf-8")
    rows = text[text.index("| optimizer |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in rows]
    made: dict[str, list[str]] = {}
    for optimizer, *values in cells:
        made.setdefault(optimizer.split(",")[0], [value.split()[0] for value in values])
    return made


def test_the_invariance_of_the_readme_is_the_measured_one() -> None:
    measured, said = invariance("docs/invariance.md"), invariance("README.md")
    assert len(said) == 6
    assert {name: measured[name] for name in said} == said


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
    speed = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert speed == benchmark("step.pages", monkeypatch).page(ROOT / "results")
    compared = [line.split(" | ") for line in speed.splitlines() if " GSGD fused " in line]
    assert len(compared) > 30
    for cells in compared:
        baseline, ours, ratio = (float(cells[k].split()[0]) for k in (7, 8, 9))
        assert ours / baseline == pytest.approx(ratio, rel=0.01, abs=0.01 * ratio + 0.1 / baseline)


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
    for k, layer in layers:
        w, g, new = (layer.edges.view(values[layer.edges.name]) for values in (before, grads, after))
        off = off_skeleton(layer, before[layer.edges.name]) > 0
        expected = (w - 0.3 * factors[k] * g) / layer.columns(ratio, w)
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
    names = ["SGD fused", "SGD foreach", "GSGD fused", "InGSpace(SGD)", "PathSGD", "SGD foreach again"]
    assert timed == {(name, momentum) for name in names for momentum in (0.0, 0.9)}
    assert all(row.median_us > 0 for rows in groups for row in rows)
