"""The lab on the command line: flags from the recipe, results on stdout, one line and its code for every mistake."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspace.lab import bench, cli, demo, display, options, sweep
from gspace.lab.data import KEYS
from gspace.lab.experiments import EXPERIMENTS
from gspace.lab.loop import Moment
from gspace.lab.recipe import Recipe
from gspace.lab.record import CHECKPOINT, METRICS, SUMMARY, Run, open_run, read_run, write_atomic

SOURCE = Path(cli.__file__).resolve().parents[2]
TINY = ["train", "--epochs", "0.5", "--hidden", "4", "--device", "cpu"]


def main(*arguments: str | Path) -> int:
    """The exit code, also where argparse leaves by itself."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as exit:
        return int(exit.code or 0)


# Flags


def parse(*arguments: str) -> Recipe:
    parser = cli.build_parser("train")
    return options.recipe(parser.parse_args(["train", *arguments]))


def test_every_field_of_a_recipe_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("train", "--help") == 0
    text = re.sub(r"(?<=\w-)\n\s+", "", capsys.readouterr().out)  # a line may end within a name
    text = re.sub(r"\s+", " ", text)
    for field in fields(Recipe):
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["help"] in text
        assert all(choice in text for choice in field.metadata["choices"])


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(epochs=1.5),
        Recipe(
            iterations=7, hidden=(3, 4, 5), milestones=(0.5, 0.75), max_ratio=float("inf"), nesterov=True, momentum=0.9
        ),
        Recipe(
            iterations=1, data="cifar10", model="plain-34", optimizer="gsgd", init="skeleton", pin="stages", lr=1e-3
        ),
        Recipe(epochs=2.0, reference="balanced", train_size=10, quick=True, stands_for="mnist"),
    ],
    ids=lambda recipe: recipe.identity,
)
def test_flags_give_back_the_recipe(recipe: Recipe) -> None:
    flags = []
    for name, value in recipe.short().items():
        flag = "--" + name.replace("_", "-")
        flags += (
            [flag] if value is True else [flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
        )
    assert parse(*flags) == recipe


def test_flags_replace_what_a_recipe_file_says(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(Recipe(epochs=3.0, lr=0.5, hidden=(9,)).to_dict()))
    assert parse("--recipe", str(path), "--lr", "0.25", "--iterations", "10") == Recipe(
        iterations=10, lr=0.25, hidden=(9,)
    )


def test_a_recorded_run_with_a_size_its_network_lacks_can_be_run_again(tmp_path: Path) -> None:
    recorded = Recipe(epochs=3.0, model="cnn", width=8, hidden=(9,))
    (tmp_path / "recipe.json").write_text(json.dumps(recorded.to_dict()))
    assert parse("--recipe", str(tmp_path / "recipe.json"), "--width", "4") == recorded.but(width=4)


# Training


def test_train_writes_a_run_folder_and_only_json_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*TINY, "--out", tmp_path, "--json") == 0
    (ended,) = json.loads(capsys.readouterr().out)
    assert ended["summary"]["status"] == "finished"
    assert read_run(Path(ended["folder"])).recipe == Recipe(epochs=0.5, hidden=(4,))
    before = (Path(ended["folder"]) / CHECKPOINT).stat().st_mtime_ns
    assert main(*TINY, "--out", tmp_path, "--json") == 0
    assert (Path(ended["folder"]) / CHECKPOINT).stat().st_mtime_ns == before
    assert json.loads(capsys.readouterr().out) == [ended]


def test_several_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*TINY, "--out", tmp_path, "--seeds", "0-1,3", "--json") == 0
    ended = json.loads(capsys.readouterr().out)
    assert [one["recipe"].get("seed", 0) for one in ended] == [0, 1, 3]


def test_divergence_is_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*TINY, "--lr", "1e30", "--epochs", "2", "--out", tmp_path, "--json") == 0
    (ended,) = json.loads(capsys.readouterr().out)
    assert ended["summary"]["status"] == "diverged"


def test_a_queue_of_the_reproduce_command_is_a_queue_of_the_train_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "reproduce",
        "table-1",
        "--list",
        "--json",
        "--data",
        "cifar10",
        "--model",
        "plain-34",
        "--seeds",
        "0-2",
    ]
    assert main(*arguments, "--method", "sgd,gsgd", "--out", tmp_path) == 0
    path = tmp_path / "jobs.json"
    path.write_text(capsys.readouterr().out)
    recipes = sweep.read_queue(path)
    assert [(r.seed, r.optimizer) for r in recipes] == [(s, o) for s in range(3) for o in ("sgd", "gsgd")]
    small = [Recipe(epochs=0.5, hidden=(4,), seed=seed).short() for seed in range(2)]
    path.write_text(json.dumps(small))
    assert main("train", "--queue", path, "--out", tmp_path / "runs") == 0
    assert len(list((tmp_path / "runs").glob(f"*/{SUMMARY}"))) == 2


# Reproducing

FEW = ["reproduce", "table-1", "--quick", "--model", "plain-10", "--method", "sgd", "--device", "cpu"]


def test_reproduce_runs_reports_and_then_repeats_its_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*FEW, "--data-dir", tmp_path / "nothing", "--out", tmp_path / "runs"]
    assert main(*arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    written = [Path(line) for line in lines if line.startswith(str(tmp_path))]
    assert [path.suffix for path in written] == [".md", ".html", ".svg"]
    text = written[0].read_text()
    assert "digits in place of CIFAR-10" in text
    assert "quick: small networks on the digits" in text
    assert "`gspace reproduce table-1 --quick`" in text
    contents = [path.read_bytes() for path in written]
    checkpoints = {path: path.stat().st_mtime_ns for path in tmp_path.rglob(CHECKPOINT)}
    assert len(checkpoints) == 1
    assert main(*arguments) == 0
    assert capsys.readouterr().out.splitlines() == [sweep.NOTHING_LEFT, *map(str, written)]
    assert [path.read_bytes() for path in written] == contents
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob(CHECKPOINT)} == checkpoints


def test_a_grid_is_followed_by_its_winner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "reproduce",
        "path-sgd",
        "--quick",
        "--method",
        "sgd",
        "--data-dir",
        tmp_path,
        "--out",
        tmp_path / "runs",
    ]
    assert main(*arguments, "--device", "cpu") == 0
    text = (tmp_path / "runs" / "report" / "path-sgd" / "report.md").read_text()
    (chosen,) = re.findall(r"^\| 5 × 64, [^|]* \| \d+\.\d\d ± \d+\.\d\d \(2\); lr ([\d.e-]+) \|", text, re.MULTILINE)
    grid = re.findall(r"^\| lr ([\d.e-]+), [^|]* \| (\d+\.\d\d) \(1\) \|", text, re.MULTILINE)
    assert len(grid) == 4
    errors = {rate: float(error) for rate, error in grid}
    assert errors[chosen] == min(errors.values())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_list_shows_runs_and_cost(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("reproduce", name, "--list", "--out", tmp_path) == 0
    text = capsys.readouterr().out
    assert EXPERIMENTS[name].question in text
    assert re.search(r"left: \d+ runs, about .* on one NVIDIA H200", text)
    decided = name in ("mlp-invariance", "path-sgd", "regularization", "momentum", "one-chain", "rates", "baseline")
    assert ("decided by these: " in text) == decided


def test_committed_records_count_as_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listing = ["reproduce", "path-sgd", "--quick", "--method", "sgd", "--data-dir", tmp_path, "--list", "--json"]

    def listed(*more: str | Path) -> list[dict[str, Any]]:
        assert main(*listing, *more) == 0
        return list(json.loads(capsys.readouterr().out))

    def listed_after(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        (tmp_path / "jobs.json").write_text(json.dumps(jobs))
        assert main("train", "--queue", tmp_path / "jobs.json", "--out", tmp_path / "runs", "--json") == 0
        assert main("report", tmp_path / "runs", "--export", tmp_path / "results") == 0
        capsys.readouterr()
        return listed("--out", tmp_path / "none", "--results", tmp_path / "results")

    before = listed("--out", tmp_path / "none")
    assert len(before) == 4
    assert listed_after(before[1:]) == before[:1]  # a grid is decided when all of it is finished
    after = listed_after(before[:1])
    (winner,) = {recipe.get("lr", 0.1) for recipe in after}  # 0.1 is the default
    assert winner in {recipe.get("lr", 0.1) for recipe in before}
    assert not any("validation" in recipe for recipe in after)


# Mistakes


def damaged_npz(folder: Path) -> None:
    images, labels = np.zeros((60_000, 28, 28), np.uint8), np.zeros(60_000, np.uint8)
    np.savez(folder / "mnist.npz", x_train=images, y_train=labels, x_test=images[:10_000], y_test=labels[:10_000])


def truncated_npz(folder: Path) -> None:
    damaged_npz(folder)
    content = (folder / "mnist.npz").read_bytes()
    (folder / "mnist.npz").write_bytes(content[: len(content) // 2])


def wrong_shape(folder: Path) -> None:
    images, labels = np.zeros((5, 28, 28), np.uint8), np.zeros(5, np.uint8)
    np.savez(folder / "mnist.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)


class Malice:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch malice-was-here",)


def malicious_pickle(folder: Path) -> None:
    np.savez(folder / "cifar10.npz", **{key: np.array([Malice()], dtype=object) for key in KEYS})


def corrupted_checkpoint(folder: Path) -> None:
    assert main(*TINY, "--out", folder) == 0
    (run,) = folder.glob("digits-*")
    (run / SUMMARY).unlink()
    content = bytearray((run / CHECKPOINT).read_bytes())
    content[-100] ^= 1
    (run / CHECKPOINT).write_bytes(content)


def curve_without_points(folder: Path) -> None:
    assert main(*TINY, "--out", folder) == 0
    (run,) = folder.glob("digits-*")
    (run / SUMMARY).unlink()
    (run / METRICS).unlink()


def recipe_file(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "recipe.json").write_text(text)

    return write


def a_file_in_the_way(folder: Path) -> None:
    (folder / "out").write_text("this is no folder")


def nothing(folder: Path) -> None:
    pass


ROOT = "{}"  # the test's folder
MISTAKES: dict[str, tuple[Callable[[Path], None], list[str], int, str]] = {
    "data missing": (nothing, [*TINY, "--data", "mnist", "--data-dir", ROOT], 3, "no data set mnist below"),
    "data truncated": (truncated_npz, [*TINY, "--data", "mnist", "--data-dir", ROOT], 3, "mnist.npz"),
    "wrong checksum": (damaged_npz, [*TINY, "--data", "mnist", "--data-dir", ROOT], 3, "differs from the published"),
    "wrong shape": (wrong_shape, [*TINY, "--data", "mnist", "--data-dir", ROOT], 3, "expected (60000, 28, 28)"),
    "malicious pickle": (
        malicious_pickle,
        [*TINY, "--data", "cifar10", "--data-dir", ROOT],
        3,
        "cifar10.npz is damaged",
    ),
    "unwritable folder": (a_file_in_the_way, [*TINY, "--out", f"{ROOT}/out"], 4, "cannot write"),
    "bad field": (recipe_file('{"epochs": 1, "lrr": 1}'), ["train", "--recipe", f"{ROOT}/recipe.json"], 2, "'lr'?"),
    "bad value's file": (
        recipe_file('{"epochs": -1}'),
        ["train", "--recipe", f"{ROOT}/recipe.json"],
        2,
        "error: epochs must be at least 0",
    ),
    "bad field in a queue": (
        recipe_file('[{"epochs": 1}, {"epochs": 1, "lrr": 1}]'),
        ["train", "--queue", f"{ROOT}/recipe.json"],
        2,
        f"{ROOT}/recipe.json, recipe 2 of 2: unknown recipe field 'lrr'",
    ),
    "demo on a file": (a_file_in_the_way, ["demo", "--out", f"{ROOT}/out"], 4, f"cannot write {ROOT}/out"),
    "bad file": (recipe_file("{"), ["train", "--recipe", f"{ROOT}/recipe.json"], 2, "recipe.json cannot be read"),
    "list as recipe": (recipe_file("[]"), ["train", "--recipe", f"{ROOT}/recipe.json"], 2, "recipe.json is no recipe"),
    "unknown name": (nothing, [*TINY, "--optimizer", "gsdg"], 2, "did you mean 'gsgd'?"),
    "unknown experiment": (nothing, ["reproduce", "tabel-1", "--list"], 2, "did you mean 'table-1'?"),
    "unknown method": (nothing, ["reproduce", "table-1", "--list", "--method", "gsdg"], 2, "did you mean 'gsgd'?"),
    "filters that exclude": (
        nothing,
        ["reproduce", "table-1", "--list", "--seeds", "77"],
        2,
        "no run of the experiment",
    ),
    "quick and shorter": (nothing, ["reproduce", "table-1", "--quick", "--length", "1/2"], 2, "leave --length out"),
    "negative rate": (nothing, [*TINY, "--lr", "-0.1"], 2, "lr must be at least 0, not -0.1"),
    "no number": (nothing, [*TINY, "--lr", "fast"], 2, "lr must be a number, not 'fast'"),
    "no width in the list": (nothing, [*TINY, "--hidden", ","], 2, "hidden must be a whole number, not ''"),
    "no width": (nothing, [*TINY, "--hidden", ""], 2, "hidden must be a whole number, not ''"),
    "width of an MLP": (nothing, [*TINY, "--width", "4"], 2, "--width has no effect on the network 'mlp'"),
    "hidden layers of a CNN": (nothing, [*TINY, "--model", "cnn"], 2, "--hidden has no effect on the network 'cnn'"),
    "width beside a file of an MLP": (
        recipe_file('{"epochs": 1}'),
        ["train", "--recipe", f"{ROOT}/recipe.json", "--width", "4"],
        2,
        "error: --width has no effect on the network 'mlp'",
    ),
    "epochs without end": (nothing, [*TINY, "--epochs", "1e300"], 2, "epochs must be at most 1e+06, not 1e+300"),
    "iterations without end": (
        nothing,
        ["train", "--iterations", "1" + "0" * 12],
        2,
        "iterations must be at most 1e+09, not 1000000000000",
    ),
    "no length": (nothing, ["train"], 2, "a run needs a length"),
    "refused by the optimizer": (
        nothing,
        [*TINY, "--max-ratio", "inf", "--allocation", "spread", "--optimizer", "gsgd"],
        2,
        "finite max_ratio",
    ),
    "GPU asked, none here": (nothing, [*TINY, "--device", "cuda:7"], 5, "CUDA devices are here"),
    "unknown device": (nothing, [*TINY, "--device", "abacus"], 5, "try cpu, cuda or auto"),
    "corrupted checkpoint": (corrupted_checkpoint, [*TINY, "--out", ROOT], 4, "is damaged (SHA-256 differs)"),
    "curve behind its checkpoint": (curve_without_points, [*TINY, "--out", ROOT], 4, "metrics.jsonl has no point at"),
    "bad seeds": (nothing, [*TINY, "--seeds", "few"], 2, "is no list of at most 10,000 seeds"),
    "bad minutes": (nothing, [*TINY, "--minutes", "-1"], 2, "is no positive number"),
    "queue that is none": (recipe_file("3"), ["train", "--queue", f"{ROOT}/recipe.json"], 2, "is no list of recipes"),
    "report on nothing": (nothing, ["report", ROOT], 4, "no runs below"),
    "report on an absent folder": (nothing, ["report", f"{ROOT}/absent"], 4, "does not exist"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_its_code_and_loses_nothing(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, arguments, code, says = MISTAKES[mistake]
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.chdir(tmp_path)
    prepare(root)
    capsys.readouterr()
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != ".lock"}
    found = main(*(argument.replace(ROOT, str(root)) for argument in arguments))
    out, err = capsys.readouterr()
    assert (found, out) == (code, ""), err
    assert err.startswith("gspace: error: ")
    assert err.count("\n") == 1, err
    assert says.replace(ROOT, str(root)) in err
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before
    assert not list(tmp_path.rglob("malice-was-here"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_on_a_full_disk_the_report_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*TINY, "--out", tmp_path / "runs") == 0
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / f"report.md.{os.getpid()}.part").symlink_to("/dev/full")
    capsys.readouterr()
    assert main("report", tmp_path / "runs", "--out", tmp_path / "report") == 4
    err = capsys.readouterr().err
    assert "No space left on device" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "report" / "report.md").exists()


def test_a_run_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe(epochs=0.5, hidden=(4,))
    with open_run(tmp_path, recipe):
        assert main(*TINY, "--out", tmp_path) == 4
    err = capsys.readouterr().err
    assert "is in use by another process" in err
    assert err.count("\n") == 1


def test_runs_in_use_are_named_and_the_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stack waits for all of its MLPs; networks of other kinds are runs of their own."""
    recipes = [Recipe(epochs=0.5, model="cnn", width=2, train_size=64, batch_size=32, seed=seed) for seed in range(3)]
    (tmp_path / "jobs.json").write_text(json.dumps([recipe.short() for recipe in recipes]))
    several = ["train", "--queue", tmp_path / "jobs.json", "--out", tmp_path, "--device", "cpu"]
    with open_run(tmp_path, recipes[1]):
        assert main(*several) == 1
        out, err = capsys.readouterr()
        assert [recipe.folder in out for recipe in recipes] == [True, False, True]
        assert err.startswith(f"{recipes[1].folder}: {tmp_path / recipes[1].folder} is in use by another process")
        assert err.count("\n") == 1
    assert main(*several) == 0
    assert capsys.readouterr().out.count("status finished") == 1


def test_runs_that_are_all_finished_are_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    several = [*TINY, "--seeds", "0-4", "--out", tmp_path]
    assert main(*several) == 0
    assert sweep.NOTHING_LEFT not in capsys.readouterr().out
    assert main(*several) == 0
    assert capsys.readouterr() == (f"{sweep.NOTHING_LEFT}\n", "")
    assert main(*several, "--json") == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 5
    assert err == f"{sweep.NOTHING_LEFT}\n"


def test_the_end_of_the_minutes_is_said_with_the_way_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = ["train", "--iterations", "10000000", "--hidden", "4", "--device", "cpu", "--out", tmp_path]
    assert main(*long, "--minutes", "0.02", "--json") == 128 + signal.SIGALRM
    err = capsys.readouterr().err
    assert re.fullmatch(
        r"gspace: error: the minutes are over at iteration \d+ of 10000000; run again to continue\n", err
    )


@pytest.mark.slow
def test_an_interrupted_command_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "gspace", "train", "--iterations", "20000", "--hidden", "4", "--eval-every", "100"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (128 + signal.SIGTERM, "")
    assert "stopped by SIGTERM at iteration" in err
    assert main(*command[3:], "--out", tmp_path, "--json") == 0
    (ended,) = json.loads(capsys.readouterr().out)
    assert ended["summary"]["iteration"] == 20_000


# What a person sees


def told(recipe: Recipe, iteration: int, error: float) -> Moment:
    line = {"iteration": iteration, "test_error": error}
    return Moment((recipe,), iteration, 100, (0.5,), 1234.0, 61.0, (line,))


def test_the_bars_show_the_run_in_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("COLUMNS", "100")
    with display.display(2) as watch:
        assert watch is not None
        watch(told(Recipe(epochs=1.0), 50, 0.125))
    with display.steps(2) as begin:
        begin("the first")
        begin("the second")
    out, err = capsys.readouterr()
    assert out == ""
    for shown in ("0.5/2 runs", "digits, mlp, sgd, seed 0", "61 s left, loss 0.5000", "1,234 images/s", "the second"):
        assert shown in err


def test_a_log_has_a_line_per_point_and_no_bars(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rich", "rich.console"):  # as if it were not installed
        monkeypatch.setitem(sys.modules, name, None)
    recipe = Recipe(epochs=1.0)
    with display.display(2) as watch, display.steps(2) as begin:
        assert watch is not None
        watch(told(recipe, 50, 0.125))
        begin("the first")
    line = f"  {recipe.folder} 50/100 loss 0.5000 test error % 12.50 1234 images/s 61 s left\n"
    assert capsys.readouterr() == (line, "")
    with display.display(2, quiet=True) as watch:
        assert watch is None


def test_the_demo_ends_in_tables_a_figure_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {name: (recipe.but(epochs=0.25, eval_every=5), 2) for name, (recipe, _) in demo.NETWORKS.items()}
    monkeypatch.setattr(demo, "NETWORKS", short)
    monkeypatch.setattr(demo, "STEPS", 12)
    monkeypatch.setenv("COLUMNS", "140")
    assert main("demo", "--out", tmp_path) == 0
    text = capsys.readouterr().out
    gaps = re.findall(r"^ *(?:MLP|CNN) \[.*?\] +(\S+) +(\S+) +(\S+) *$", text, re.MULTILINE)
    assert len(gaps) == 2
    for sgd, path_sgd, gsgd in gaps:
        assert float(sgd) > 0.1
        assert max(float(path_sgd), float(gsgd)) < 1e-9
    written = [Path(line) for line in text.splitlines() if line.startswith(str(tmp_path))]
    figures = ["headline.svg", "demo.svg"]
    assert [path.name for path in written] == ["report.md", "report.html", *figures]
    markdown = written[0].read_text()
    assert markdown.index("## One network, written twice") < markdown.index("headline.svg") < markdown.index("|---")
    assert all(path.stat().st_size > 1000 for path in written)
    for label in ("SGD", "G-SGD", "Path-SGD", "SGD from skeleton init (control)", "G-SGD against SGD"):
        assert len(re.findall(rf"^ *{re.escape(label)} +[-+]?\d", text, re.MULTILINE)) == 2, label
    assert main("demo", "--out", tmp_path) == 0
    assert "Trained before" in capsys.readouterr().out


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("reproduce", "--help") == 0
    text = capsys.readouterr().out
    assert all(name in text and e.question in text for name, e in EXPERIMENTS.items())
    assert main("train", "--help") == 0
    assert sweep.EXAMPLES in capsys.readouterr().out


# Benchmarks


def test_benchmarks_are_listed_and_run_with_their_options(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "speed.py").write_text('"""How fast."""\nimport sys\nprint(sys.argv[1:], __name__)\nsys.exit(3)\n')
    (tmp_path / "size").mkdir()
    (tmp_path / "size" / "units.py").write_text('UNIT = "mm"\n')
    (tmp_path / "size" / "__main__.py").write_text(
        f'"""How large."""\nfrom {tmp_path.name}.size.units import UNIT\nprint(UNIT)\n'
    )
    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    assert main("bench") == 0
    assert capfd.readouterr().out == "size            How large.\nspeed           How fast.\n"
    assert main("bench", "speed", "--size", "2") == 3
    assert capfd.readouterr().out == "['--size', '2'] __main__\n"
    assert main("bench", "size") == 0
    assert capfd.readouterr().out == "mm\n"
    (tmp_path / "size" / "__main__.py").write_text('"""How large."""\nraise SystemExit("too large")\n')
    assert main("bench", "size") == 1
    assert capfd.readouterr().err == "too large\n"
    assert main("bench", "sped") == 2
    assert "did you mean 'speed'?" in capfd.readouterr().err
    assert main("bench", "nothing") == 2
    assert "there are: " in capfd.readouterr().err
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "absent")
    assert main("bench") == 2
    assert "they come with the source" in capfd.readouterr().err


@pytest.mark.parametrize("seeds", ["4-0", "3-1,5", "0-99999999999", "0-1-2", "", "x"])
def test_seeds_that_are_none(seeds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--epochs", "1", "--out", str(tmp_path), "--seeds", seeds])
    assert caught.value.code == 2
    assert "seeds" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--threads", "-3"], ["--threads", "0"], ["--lr", "inf"], ["--epochs", "0"]])
def test_numbers_that_make_no_sense(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs"
    try:
        code = cli.main(["train", "--epochs", "1", "--out", str(out), *options])
    except SystemExit as exit:
        code = exit.code
    errors = capsys.readouterr().err
    assert code == 2
    assert errors.count("\n") == 1
    assert options[0].strip("-") in errors
    assert not out.exists()


def test_an_interrupted_command_ends_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_parser", interrupted)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "gspace: stopped by SIGINT\n"


COMMAND = [sys.executable, "-m", "gspace"]


@pytest.mark.parametrize("seeds", ["0-1", "0"])
def test_a_reader_that_goes_away_loses_nothing(
    seeds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`gspace train … | head`: what was trained is in a checkpoint, and other runs of the list are not begun."""
    options = ["--iterations", "1000", "--hidden", "4", "--optimizer", "path-sgd", "--eval-every", "50"]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main("train", *options, "--seeds", seeds, "--device", "cpu", "--out", tmp_path) == 128 + signal.SIGPIPE
    assert capfd.readouterr().err == ""
    assert len(list(tmp_path.glob("*/checkpoint"))) == len(list(tmp_path.iterdir())) == 1


def test_a_stack_that_is_killed_at_once_has_what_its_members_point_to(tmp_path: Path) -> None:
    command = [*COMMAND, "train", "--iterations", "1000000", "--hidden", "4", "--seeds", "0-2", "--device", "cpu"]
    process = subprocess.Popen([*command, "--out", str(tmp_path)], stdout=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while len(list(tmp_path.glob("*/checkpoint"))) < 3:
        assert time.monotonic() < end
        time.sleep(0.02)
    process.kill()
    process.wait()
    (host,) = [folder for folder in tmp_path.iterdir() if "-seed0-" in folder.name]
    state = Run(host, read_run(host).recipe).load()  # without the lock: a child of the killed process may hold it yet
    assert state is not None
    assert "learner" in state
    assert len(state["members"]) == 3


def test_what_a_model_prints_is_not_among_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "talks.py").write_text(
        "import torch\n\nclass Talks(torch.nn.Sequential):\n    def forward(self, x):\n        print('fwd')\n"
        "        return super().forward(x)\n\ndef make():\n"
        "    return Talks(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))\n"
    )
    assert main("analyze", f"{tmp_path / 'talks.py'}:make", "--verify", "--json") == 0
    assert json.loads(capsys.readouterr().out)["H"] == 4


def test_an_encoding_without_greek_shows_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "latin-1", write_through=True))
    assert main("train", "--help") == 0
    assert b"--weight-decay" in shown.getvalue()


def test_two_processes_may_write_one_file(tmp_path: Path) -> None:
    other = os.fork()
    try:
        for _ in range(100):
            write_atomic(tmp_path / "file", (b"b" if other else b"a") * 10000)
    finally:
        if not other:
            os._exit(sys.exc_info()[0] is not None)
    assert os.waitpid(other, 0)[1] == 0
    assert (tmp_path / "file").read_bytes() in (b"a" * 10000, b"b" * 10000)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("way", ["command", "module"])
def test_ctrl_c_while_torch_is_imported_shows_no_traceback(way: str) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    module, function = project["project"]["scripts"]["gspace"].split(":")
    script = f"import sys\nfrom {module} import {function}\nsys.exit({function}())"  # what pip installs
    start = ["-c", script] if way == "command" else ["-m", "gspace"]
    command = [sys.executable, "-X", "importtime", *start, "--version"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    assert any("torch" in line for line in process.stderr)  # a first part of it is imported
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    assert out == ""
    assert "Traceback" not in errors
    assert process.returncode == -signal.SIGINT
