"""The training loop: against a loop written out, resumed bit for bit, killed, stacked, shared, captured."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gspace import GSGD, init_skeleton_
from gspace.lab import cli, sweep
from gspace.lab.archive import read_records
from gspace.lab.data import load
from gspace.lab.engine import Engine, restore, snapshot
from gspace.lab.errors import BusyError, DeviceError, Interrupted, LabError, RecordError, RequestError
from gspace.lab.learners import (
    activations,
    batches,
    initial_model,
    largest_stack,
    loss_and_errors,
    losses_and_gradients,
    matrices,
    single,
    stack,
    stackable,
)
from gspace.lab.loop import Moment, stop_requests
from gspace.lab.models import build_optimizer
from gspace.lab.recipe import Recipe, changes, drops, learning_rate, steps_per_epoch, total_iterations
from gspace.lab.record import Run, open_run, read_run
from gspace.lab.sweep import read_queue
from gspace.lab.train import train, train_many
from gspace.lab.transform import epoch_rows, feed

SMALL = Recipe(epochs=2, batch_size=64, hidden=(16, 12), eval_every=7)
CNN = Recipe(model="cnn", width=4, iterations=12, batch_size=32, eval_every=5, train_size=200, test_size=50)
PLAIN = CNN.but(model="plain-10", width=2, augment="crop-flip", lr=0.05)

CASES = {
    "sgd": SMALL,
    "sgd with momentum": SMALL.but(momentum=0.9, nesterov=True, weight_decay=1e-3, lr=0.02, milestones=(0.5,)),
    "sgd, cosine": SMALL.but(momentum=0.9, lr=0.02, schedule="cosine", warm_up=0.2),
    "gsgd": SMALL.but(optimizer="gsgd", init="skeleton", lr=0.05),
    "gsgd, usual initialisation": SMALL.but(optimizer="gsgd", lr=0.05),
    "gsgd with momentum": SMALL.but(optimizer="gsgd", init="skeleton", momentum=0.9, lr=0.01, weight_decay=1e-4),
    "frozen": SMALL.but(optimizer="sgd-frozen", init="skeleton"),
    "path-sgd": SMALL.but(optimizer="path-sgd", lr=0.01),
    "cnn": CNN,
    "plain": PLAIN,
    "plain, gsgd by stage": PLAIN.but(optimizer="gsgd", init="skeleton", pin="stages"),
}


def weights(out: Path, recipe: Recipe) -> dict[str, torch.Tensor]:
    with open_run(out, recipe) as run:
        state = run.load()
    assert state is not None
    return state["learner"]["model"]


def curve(out: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """The metrics, less the clock."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_run(out / recipe.folder).metrics]


def result(out: Path, recipe: Recipe) -> dict[str, Any]:
    summary = read_run(out / recipe.folder).summary
    assert summary is not None
    return {k: v for k, v in summary.items() if not k.endswith(("seconds", "per_second"))}


def assert_equal_runs(a: Path, b: Path, recipe: Recipe) -> None:
    assert curve(a, recipe) == curve(b, recipe)
    assert result(a, recipe) == result(b, recipe)
    first, second = weights(a, recipe), weights(b, recipe)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def stop_at(iteration: int) -> Callable[[], int | None]:
    """Asks to stop after so many iterations, as SIGTERM would."""
    calls = iter(range(1, 1_000_000))
    return lambda: signal.SIGTERM if next(calls) == iteration else None


# --- against a loop written out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "gsgd"])
def test_the_loop_is_the_textbook_loop(tmp_path: Path, optimizer: str) -> None:
    recipe = SMALL.but(optimizer=optimizer, init="skeleton", lr=0.05, momentum=0.5, milestones=(0.5,))
    train(recipe, tmp_path)

    data = load("digits")
    source = feed(data, "standard", "none")
    model = initial_model(recipe)
    makers = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), 0.05, 0.5),
        "gsgd": lambda: GSGD(model, 0.05, 0.5),
    }
    rule = makers[optimizer]()
    x = (data.x_train.float() / 16 - data.mean) / data.std
    steps = 1438 // 64
    errors, losses = [], []
    for iteration in range(2 * steps):
        if iteration == steps:
            rule.param_groups[0]["lr"] = 0.05 * 0.1
        index = epoch_rows(recipe.seed, iteration // steps, 1438, 64, source.augment)[iteration % steps, :, 0]
        rule.zero_grad()
        found = model(x[index])
        loss = F.cross_entropy(found, data.y_train[index])
        loss.backward()
        rule.step()
        losses.append(loss.item())
        errors.append((found.argmax(1) != data.y_train[index]).double().mean().item())
    for name, value in weights(tmp_path, recipe).items():
        assert torch.equal(value, model.state_dict()[name]), name
    first = curve(tmp_path, recipe)[0]
    assert first["iteration"] == 7
    assert first["train_loss"] == pytest.approx(sum(losses[:7]) / 7, rel=1e-12)
    assert first["train_error"] == pytest.approx(sum(errors[:7]) / 7, rel=1e-12)
    x_test = (data.x_test.float() / 16 - data.mean) / data.std
    last = curve(tmp_path, recipe)[-1]
    assert last["test_error"] == pytest.approx((model(x_test).argmax(1) != data.y_test).double().mean().item())
    assert last["iteration"] == 2 * steps
    assert last["lr"] == pytest.approx(0.005)


@pytest.mark.parametrize("recipe", [SMALL, CNN, PLAIN, CASES["gsgd"]])
def test_in_float64_rounding_does_not_show(tmp_path: Path, recipe: Recipe) -> None:
    summary = train(recipe.but(precision="float64"), tmp_path)
    held = weights(tmp_path, recipe.but(precision="float64"))
    assert {value.dtype for value in held.values() if value.is_floating_point()} == {torch.float64}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        again = train(recipe.but(precision="float64"), tmp_path / "again")
    finally:
        torch.set_num_threads(threads)
    assert summary["fit_loss"] == pytest.approx(again["fit_loss"], rel=1e-12)
    # A few dozen steps from the same start in float32: 24 bits, magnified.
    assert summary["fit_loss"] == pytest.approx(train(recipe, tmp_path)["fit_loss"], rel=1e-4)


def test_runs_of_one_seed_start_from_one_network_whatever_the_optimizer() -> None:
    a = initial_model(SMALL.but(init="skeleton"))
    b = initial_model(SMALL.but(init="skeleton", optimizer="gsgd", lr=0.3))
    c = initial_model(SMALL)
    for p, q, r in zip(a.parameters(), b.parameters(), init_skeleton_(c).parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)
    assert not torch.equal(initial_model(SMALL.but(seed=1))[1].weight, initial_model(SMALL)[1].weight)


def test_torchvisions_draw_has_six_times_the_variance_and_is_the_seeds() -> None:
    recipe = SMALL.but(model="plain-10", width=16)
    own, theirs, again, other, skeleton = (
        initial_model(recipe.but(init=init, seed=seed))
        for init, seed in (
            ("default", 0), ("torchvision", 0), ("torchvision", 0), ("torchvision", 1), ("torchvision-skeleton", 0)
        )
    )  # fmt: skip
    names = [name for name, p in own.named_parameters() if p.dim() == 4]
    for name in names:
        w, v = theirs.get_parameter(name), skeleton.get_parameter(name)
        out, *_, size = w.shape
        assert w.var().item() == pytest.approx(2 / (out * size**2), rel=0.2)
        assert torch.equal(w, again.get_parameter(name))
        assert not torch.equal(w, other.get_parameter(name))
        assert ((v == w) | (v == 1)).all()
    square = own.get_parameter(names[1])
    assert (theirs.get_parameter(names[1]).var() / square.var()).item() == pytest.approx(6, rel=0.2)
    assert torch.equal(own.linear.weight, theirs.linear.weight)


def test_gains_are_drawn_as_torch_drew_them_before_1_2() -> None:
    own, old, again, other, skeleton = (
        initial_model(SMALL.but(model="resnet-10", width=16, init=init, seed=seed))
        for init, seed in (
            ("default", 0), ("uniform-gains", 0), ("uniform-gains", 0), ("uniform-gains", 1),
            ("uniform-gains-skeleton", 0),
        )
    )  # fmt: skip
    norms = [name for name, layer in own.named_modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    gains = torch.cat([old.get_submodule(name).weight for name in norms])
    assert len(gains) == 720
    assert 0 <= gains.min() < 0.02
    assert 0.98 < gains.max() <= 1
    assert gains.mean().item() == pytest.approx(1 / 2, abs=4 * (1 / 12 / len(gains)) ** 0.5)  # four standard errors
    for name, p in own.named_parameters():
        v = old.get_parameter(name)
        drawn = name.removesuffix(".weight") in norms
        assert torch.equal(p, v) != drawn
        assert torch.equal(v, again.get_parameter(name))
        assert torch.equal(v, skeleton.get_parameter(name)) or p.dim() == 4
        assert not (drawn and torch.equal(v, other.get_parameter(name)))


def test_identity_like_starts_are_what_they_say() -> None:
    recipe = SMALL.but(model="resnet-10", width=4)
    own, added, dirac, delta, again, other = (
        initial_model(recipe.but(init=init, seed=seed))
        for init, seed in (
            ("default", 0), ("dirac-added", 0), ("dirac", 0), ("delta-orthogonal", 0), ("delta-orthogonal", 0),
            ("delta-orthogonal", 1),
        )
    )  # fmt: skip
    for name, w in own.named_parameters():
        a, b, c = (model.get_parameter(name) for model in (added, dirac, delta))
        if w.dim() != 4:
            assert torch.equal(a, w)
            assert torch.equal(b, w)
            assert torch.equal(c, w)
            continue
        outputs, inputs, size, _ = w.shape
        one = torch.zeros_like(w)
        for k in range(min(outputs, inputs)):
            one[k, k, size // 2, size // 2] = 1
        assert torch.equal(a, w + one), name
        assert torch.equal(b, one if outputs == inputs else w), name
        centre = c[:, :, size // 2, size // 2]
        torch.testing.assert_close(centre.T @ centre, torch.eye(inputs))  # of rounding in float32
        assert c.count_nonzero() == centre.count_nonzero()
        assert torch.equal(c, again.get_parameter(name))
        assert not torch.equal(c, other.get_parameter(name))


def test_an_identity_convolution_passes_an_image_on() -> None:
    model = initial_model(SMALL.but(model="plain-10", width=4, init="dirac"))
    x = torch.randn(2, 4, 8, 8)
    assert torch.equal(model.get_submodule("stages.0.0.conv")(x), x)


def test_random_signs_are_the_seeds() -> None:
    recipe = SMALL.but(init="skeleton-random-signs")
    a, b, c = (initial_model(recipe.but(seed=seed))[3].weight for seed in (0, 0, 1))
    assert torch.equal(a, b)
    ones = a.abs() == 1
    assert set(a[ones].tolist()) == {-1.0, 1.0}
    assert not torch.equal(a[ones], c[ones])


def test_common_signs_are_one_pattern_and_no_seeds_own() -> None:

    def signs(init: str, seed: int) -> list[torch.Tensor]:
        parameters = initial_model(SMALL.but(init=init, seed=seed)).parameters()
        return [torch.where(p.abs() == 1, p.sign(), 0.0) for p in parameters]

    first, second, own = (
        torch.cat([s.flatten() for s in signs(init, seed)])
        for init, seed in (("common", 0), ("common", 1), ("random", 0))
        for init in (f"skeleton-{init}-signs",)
    )
    assert torch.equal(first, second)
    assert set(first.tolist()) == {-1.0, 0.0, 1.0}
    assert torch.equal(first.abs(), own.abs())
    assert not torch.equal(first, own)


def test_the_frozen_control_leaves_the_free_weights(tmp_path: Path) -> None:
    recipe = CASES["frozen"]
    train(recipe, tmp_path)
    train(recipe.but(optimizer="sgd"), tmp_path)
    frozen, trained = weights(tmp_path, recipe), weights(tmp_path, recipe.but(optimizer="sgd"))
    for name, free in (("3.weight", 16), ("5.weight", 12)):
        assert int((frozen[name] == 1).sum()) >= free
        assert int((trained[name] == 1).sum()) < free


# --- the end of a run -------------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first = train(SMALL, tmp_path)
    before = {p: p.read_bytes() for p in (tmp_path / SMALL.folder).iterdir()}
    assert train(SMALL, tmp_path) == first
    assert {p: p.read_bytes() for p in (tmp_path / SMALL.folder).iterdir()} == before


@pytest.mark.parametrize(
    "recipe", [SMALL.but(lr=1e9), SMALL.but(lr=1e9, optimizer="gsgd", max_ratio=1e30, max_drift=1e30)]
)
def test_divergence_is_a_result(tmp_path: Path, recipe: Recipe) -> None:
    summary = train(recipe, tmp_path)
    assert summary["status"] == "diverged"
    assert summary["test_error"] is None
    assert summary["train_loss"] is None
    assert summary["iteration"] < total_iterations(recipe, 1438)
    assert train(recipe, tmp_path) == summary


def test_progress_reports_every_point_of_the_curve(tmp_path: Path) -> None:
    seen: list[Moment] = []
    train(SMALL, tmp_path, watch=seen.append)
    lines = [line for progress in seen for line in progress.lines]
    assert lines == list(read_run(tmp_path / SMALL.folder).metrics)
    assert seen[-1].iteration == seen[-1].total == 44
    assert seen[-1].seconds_left == 0
    assert all(progress.images_per_second > 0 for progress in seen)


def test_a_display_that_fails_does_not_spoil_the_run(tmp_path: Path) -> None:
    def fail(progress: Moment) -> None:
        if progress.iteration >= 14:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(SMALL, tmp_path / "a", watch=fail, engine=Engine(checkpoint_seconds=0))
    train(SMALL, tmp_path / "a")
    train(SMALL, tmp_path / "b")
    assert_equal_runs(tmp_path / "a", tmp_path / "b", SMALL)


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_run_continues_to_the_same_bits(tmp_path: Path, case: str) -> None:
    recipe = CASES[case]
    for iteration in (5, 3):  # stopped twice, between two points of the curve
        with pytest.raises(Interrupted, match="stopped by SIGTERM") as caught:
            train(recipe, tmp_path / "a", stop=stop_at(iteration))
        assert caught.value.exit_code == 143
    train(recipe, tmp_path / "a")
    train(recipe, tmp_path / "b")
    assert_equal_runs(tmp_path / "a", tmp_path / "b", recipe)
    assert [s["iteration"] for s in read_run(tmp_path / "a" / recipe.folder).sessions] == [0, 5, 8]
    summary = read_run(tmp_path / "a" / recipe.folder).summary
    assert summary["wall_seconds"] > summary["seconds"]  # training and evaluation, those before a stop included


@pytest.mark.parametrize("case", [name for name, recipe in CASES.items() if stackable(recipe)])
def test_a_stopped_stack_continues_to_the_same_bits(tmp_path: Path, case: str) -> None:
    recipes = [CASES[case].but(seed=seed) for seed in range(3)]
    with pytest.raises(Interrupted):
        train_many(recipes, tmp_path / "a", stop=stop_at(10))
    with pytest.raises(RecordError, match="stacked"):
        train(recipes[1], tmp_path / "a")
    train_many([*recipes[1:], CASES[case].but(seed=3)], tmp_path / "a")  # a new run makes a stack of its own
    train_many(recipes, tmp_path / "b")
    for recipe in recipes:
        assert curve(tmp_path / "a", recipe) == curve(tmp_path / "b", recipe)
        assert result(tmp_path / "a", recipe) == result(tmp_path / "b", recipe)
    assert result(tmp_path / "a", CASES[case].but(seed=3))["stacked"] == 1


def test_a_damaged_checkpoint_stops_the_run_and_loses_nothing(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(SMALL, tmp_path, stop=stop_at(10))
    path = tmp_path / SMALL.folder / "checkpoint"
    path.write_bytes(path.read_bytes()[:-1])
    before = {p: p.read_bytes() for p in (tmp_path / SMALL.folder).iterdir()}
    with pytest.raises(RecordError, match="checkpoint is damaged"):
        train(SMALL, tmp_path)
    assert {p: p.read_bytes() for p in (tmp_path / SMALL.folder).iterdir()} == before


DAMAGED_CURVES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "without its last line": lambda path: path.write_text("".join(path.read_text().splitlines(True)[:-1])),
    "without its first line": lambda path: path.write_text("".join(path.read_text().splitlines(True)[1:])),
    "cut within a line": lambda path: path.write_bytes(path.read_bytes()[:-2]),
}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("damage", DAMAGED_CURVES)
def test_a_curve_behind_its_checkpoint_stops_the_run_and_loses_nothing(
    tmp_path: Path, damage: str, stacked: bool
) -> None:
    recipes = [SMALL.but(seed=seed) for seed in range(3 if stacked else 1)]

    def again(out: Path, **session: Any) -> object:
        return train_many(recipes, out, **session) if stacked else train(SMALL, out, **session)

    with pytest.raises(Interrupted):
        again(tmp_path / "a", stop=stop_at(16))  # points at 7 and 14
    path = tmp_path / "a" / recipes[-1].folder / "metrics.jsonl"
    DAMAGED_CURVES[damage](path)
    before = contents(tmp_path)
    checkpoint = tmp_path / "a" / SMALL.folder / "checkpoint"
    iteration = 14 if damage in ("without its last line", "cut within a line") else 7
    says = f"{path} has no point at iteration {iteration}, but the checkpoint is at 16: delete {checkpoint} to start"
    for _ in range(2):
        with pytest.raises(RecordError) as caught:
            again(tmp_path / "a")
        assert str(caught.value).startswith(says)
        assert caught.value.exit_code == 4
        assert contents(tmp_path) == before
    checkpoint.unlink()  # the way out that the message names
    again(tmp_path / "a")
    again(tmp_path / "b")
    for recipe in recipes:
        assert curve(tmp_path / "a", recipe) == curve(tmp_path / "b", recipe)
        assert result(tmp_path / "a", recipe) == result(tmp_path / "b", recipe)


def test_a_curve_behind_the_last_checkpoint_is_noticed(tmp_path: Path) -> None:
    train(SMALL, tmp_path)
    folder = tmp_path / SMALL.folder
    (folder / "summary.json").unlink()  # killed after the last checkpoint, before the summary
    lines = (folder / "metrics.jsonl").read_text().splitlines(True)
    assert train(SMALL, tmp_path)["iteration"] == 44
    (folder / "summary.json").unlink()
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(RecordError, match="no point at iteration 44, but the checkpoint is at 44"):
        train(SMALL, tmp_path)


def test_a_stack_killed_at_its_first_point_begins_again(tmp_path: Path) -> None:
    def die(progress: Moment) -> None:
        raise KeyboardInterrupt

    recipes = [SMALL.but(seed=seed) for seed in range(3)]
    with pytest.raises(KeyboardInterrupt):
        train_many(recipes, tmp_path / "a", watch=die)
    train_many(recipes, tmp_path / "a")
    train_many(recipes, tmp_path / "b")
    for recipe in recipes:
        assert result(tmp_path / "a", recipe) == result(tmp_path / "b", recipe)


def test_the_curves_of_a_stack_are_safe_before_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = [SMALL.but(seed=seed) for seed in range(3)]
    events: list[str] = []
    sync, save = Run.sync, Run.save
    monkeypatch.setattr(Run, "sync", lambda run: (events.append(f"sync {run.recipe.seed}"), sync(run)))
    monkeypatch.setattr(Run, "save", lambda run, state: (save(run, state), events.append(f"save {run.recipe.seed}")))
    with pytest.raises(Interrupted):
        train_many(recipes, tmp_path, stop=stop_at(8))
    assert events[-4:] == ["sync 1", "sync 2", "sync 0", "save 0"]


# --- signals, queues, several processes -------------------------------------------------------------------------------

LONG = Recipe(iterations=10_000_000, batch_size=32, hidden=(16,), eval_every=50, test_size=50, train_size=320)


def arguments(tmp_path: Path, recipes: list[Recipe], *options: str) -> list[str]:
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([recipe.to_dict() for recipe in recipes]))
    return ["train", "--queue", str(path), "--out", str(tmp_path / "runs"), "--device", "cpu", *options]


def start(tmp_path: Path, recipes: list[Recipe]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gspace", *arguments(tmp_path, recipes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored here, and would be there
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        signal.signal(signal.SIGHUP, before)


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_stops_the_run_with_a_checkpoint_and_its_exit_code(tmp_path: Path, signum: int) -> None:
    process = start(tmp_path, [LONG])
    folder = tmp_path / "runs" / LONG.folder
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(read_run(folder).metrics) > 0)
    with pytest.raises(BusyError, match="in use by another process"):
        train(LONG, tmp_path / "runs")
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert f"stopped by {signal.Signals(signum).name} at iteration" in errors
    assert "Traceback" not in errors
    with open_run(tmp_path / "runs", LONG) as run:
        state = run.load()
    assert state is not None
    assert state["iteration"] >= read_run(folder).metrics[-1]["iteration"]


def test_minutes_end_a_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(tmp_path, [LONG], "--minutes", "0.02")) == 128 + signal.SIGALRM
    err = capsys.readouterr().err
    assert re.fullmatch(
        r"gspace: error: the minutes are over at iteration \d+ of 10000000; run again to continue\n", err
    )
    assert (tmp_path / "runs" / LONG.folder / "checkpoint").exists()


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGALRM])
def test_of_ignored_signals_that_of_a_terminal_alone_asks_for_nothing(signum: signal.Signals) -> None:
    before = signal.signal(signum, signal.SIG_IGN)
    try:
        with stop_requests() as stop:
            os.kill(os.getpid(), signum)
            assert stop() == (None if signum == signal.SIGHUP else signum)
        assert signal.getsignal(signum) is signal.SIG_IGN
    finally:
        signal.signal(signum, before)


def test_the_time_limit_ends_with_its_runs() -> None:
    with stop_requests(minutes=10) as stop:
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 500
        assert stop() is None
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_time_limit_between_two_runs_is_named(tmp_path: Path) -> None:
    session = sweep.Session(stop=lambda: signal.SIGALRM)
    with pytest.raises(Interrupted, match=f"^the minutes are over before {SMALL.folder}; run again to continue$"):
        sweep.run_all([SMALL], tmp_path, session)


def test_a_finished_run_that_another_process_holds_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipes = [SMALL.but(seed=seed) for seed in range(2)]
    train_many(recipes, tmp_path / "runs")
    with open_run(tmp_path / "runs", recipes[0]):
        assert cli.main(arguments(tmp_path, recipes)) == 0
    assert capsys.readouterr() == (f"{sweep.NOTHING_LEFT}\n", "")


def test_a_queue_goes_on_after_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = SMALL.but(batch_size=2000)
    assert cli.main(arguments(tmp_path, [bad, SMALL])) == 1
    shown = capsys.readouterr()
    assert "batch_size 2000 is more than the 1438 training images" in shown.err
    assert f"{SMALL.folder}: status finished" in shown.out
    assert cli.main(arguments(tmp_path, [SMALL])) == 0
    assert capsys.readouterr().out == f"{sweep.NOTHING_LEFT}\n"
    assert cli.main(arguments(tmp_path, [])) == 0
    assert capsys.readouterr().out == ""


def test_a_bad_queue_is_refused_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    for text, message in (("[", "cannot be read"), ("{}", "no list"), ('[{"optimizer": "sdg"}]', "did you mean 'sgd'")):
        path.write_text(text)
        with pytest.raises(RequestError, match=message):
            read_queue(path)


def test_a_bad_recipe_of_a_queue_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    for bad, message in (({"epochs": 1, "lrr": 1}, "unknown recipe field 'lrr'"), ({}, "a run needs a length")):
        path.write_text(json.dumps([{"epochs": 1}, bad, {"epochs": 2}]))
        with pytest.raises(RequestError) as caught:
            read_queue(path)
        assert str(caught.value).startswith(f"{path}, recipe 2 of 3: ")
        assert message in str(caught.value)


def test_neighbours_are_stacked_and_doubles_run_once() -> None:
    seeds = [SMALL.but(seed=seed) for seed in range(5)]
    groups = list(batches([*seeds, SMALL, CNN, SMALL.but(hidden=(4,)), CNN.but(seed=1)], 3))
    assert [len(group) for group in groups] == [3, 2, 1, 1, 1]


def test_a_device_that_is_absent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="try cpu"):
        train(SMALL, tmp_path, engine=Engine(device="cuda:7"))
    with pytest.raises(DeviceError, match="unknown device 'gpu'"):
        train(SMALL, tmp_path, engine=Engine(device="gpu"))
    with pytest.raises(DeviceError, match="CUDA graph"):
        train(SMALL, tmp_path, engine=Engine(device="cpu", graph=True))


def test_what_an_optimizer_refuses_is_an_error_of_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="gsgd refuses this recipe: allocation"):
        train(SMALL.but(optimizer="gsgd", allocation="spread", max_ratio=math.inf), tmp_path)


# --- schedules --------------------------------------------------------------------------------------------------------


def test_the_paper_s_schedule() -> None:
    recipe = Recipe(iterations=64_000, lr=1.0, milestones=(0.5, 0.75))
    assert drops(recipe, 64_000) == (32_000, 48_000)
    rates = [learning_rate(recipe, i, 64_000) for i in (0, 31_999, 32_000, 47_999, 48_000, 63_999)]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert total_iterations(Recipe(epochs=100, batch_size=64), 60_000) == 93_700
    assert steps_per_epoch(Recipe(iterations=1), 50_000) == 390


def test_a_cosine_behind_a_warm_up_is_torchs() -> None:
    recipe = Recipe(iterations=50, lr=0.1, schedule="cosine", warm_up=0.1)
    rule = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    rise = torch.optim.lr_scheduler.LinearLR(rule, 1 / 5, total_iters=4)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(rule, 45)
    both = torch.optim.lr_scheduler.SequentialLR(rule, [rise, fall], [5])
    expected = []
    for _ in range(50):
        expected.append(rule.param_groups[0]["lr"])
        rule.step()
        both.step()
    assert [learning_rate(recipe, i, 50) for i in range(50)] == pytest.approx(expected)
    assert list(changes(recipe, 50)) == list(range(50))


def test_a_warm_up_before_steps() -> None:
    recipe = Recipe(iterations=100, lr=1.0, milestones=(0.5,), warm_up=0.04)
    rates = [learning_rate(recipe, i, 100) for i in (0, 3, 4, 49, 50)]
    assert rates == pytest.approx([0.25, 1, 1, 1, 0.1])
    assert 2 in changes(recipe, 100)
    assert tuple(changes(recipe.but(warm_up=0.0), 100)) == (50,)


def test_the_curve_shows_the_rates_of_a_cosine(tmp_path: Path) -> None:
    recipe = CNN.but(schedule="cosine", warm_up=0.25)
    train(recipe, tmp_path)
    found = {line["iteration"]: line["lr"] for line in curve(tmp_path, recipe)}
    assert found == {i: learning_rate(recipe, i - 1, 12) for i in (5, 10, 12)}
    assert found[5] > found[10] > found[12] > 0


# --- stacks -----------------------------------------------------------------------------------------------------------


def test_a_stack_is_the_grouped_convolution_it_says_it_is() -> None:
    models = [initial_model(SMALL.but(seed=seed)) for seed in range(3)]
    stacked = stack(models)
    x = torch.randn(3, 5, 64)
    found = activations(matrices(stacked, 3), x)[-1]
    for k, model in enumerate(models):
        torch.testing.assert_close(found[k], model(x[k]), rtol=1e-6, atol=1e-6)
    grouped = stacked(x.transpose(0, 1).reshape(5, 3 * 64, 1))
    torch.testing.assert_close(grouped.view(5, 3, 10).transpose(0, 1), found, rtol=1e-5, atol=1e-6)


def test_backpropagation_written_out_is_autograd_s(generator: torch.Generator) -> None:
    shapes = [(3, 7, 11), (3, 6, 7), (3, 5, 6)]
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    x = torch.randn(3, 9, 11, generator=generator, dtype=torch.float64)
    y = torch.randint(5, (3, 9), generator=generator)
    scale = torch.tensor([1.0, 0.3, 2.0], dtype=torch.float64)
    h = x
    for weight in weights[:-1]:
        h = torch.einsum("kbi,koi->kbo", h, weight).relu()
    scores = torch.einsum("kbi,koi->kbo", h, weights[-1])
    expected = torch.stack([F.cross_entropy(s, t) for s, t in zip(scores, y, strict=True)])
    grads = torch.autograd.grad((scale * expected).sum(), weights)
    losses, errors, found = losses_and_gradients([w.detach() for w in weights], x, y, scale)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(found, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert errors.tolist() == (scores.argmax(2) != y).sum(1).tolist()


def test_wide_networks_are_not_stacked_on_a_cpu() -> None:
    paper = Recipe(data="fashion_mnist", inputs="pooled", epochs=100)
    sizes = {h: largest_stack(paper.but(hidden=(h, h)), "cpu") for h in (8, 32, 512, 1024)}
    assert sizes[8] > sizes[32] > sizes[512] >= 5
    assert sizes[1024] == 1
    assert largest_stack(paper.but(hidden=(1024, 1024)), "cuda") >= 5


def test_networks_too_wide_to_stack_are_trained_alone_and_to_the_same_bits(tmp_path: Path) -> None:
    wide = Recipe(hidden=(1600, 1600), iterations=4, eval_every=2, batch_size=8, train_size=80, test_size=40)
    assert largest_stack(wide, "cpu") == 1
    recipes = [wide.but(seed=seed) for seed in range(2)]
    with pytest.raises(Interrupted):
        train(recipes[1], tmp_path / "a", stop=stop_at(1), engine=Engine(device="cpu"))
    train_many(recipes, tmp_path / "a", engine=Engine(device="cpu"))
    for recipe in recipes:
        train(recipe, tmp_path / "b", engine=Engine(device="cpu"))
        assert_equal_runs(tmp_path / "a", tmp_path / "b", recipe)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("case", [name for name, recipe in CASES.items() if stackable(recipe)])
def test_a_stack_gives_the_numbers_of_single_runs(tmp_path: Path, case: str, precision: str, tolerance: float) -> None:
    base = CASES[case].but(precision=precision)
    rates = [base.lr] if base.weight_decay else [base.lr, 0.3 * base.lr]
    recipes = [base.but(seed=seed, lr=lr) for seed in range(3) for lr in rates]
    together = train_many(recipes, tmp_path / "stack")
    for recipe, summary in zip(recipes, together, strict=True):
        alone = train(recipe, tmp_path / "alone")
        assert summary["test_error"] == pytest.approx(alone["test_error"], abs=1e-12)
        for name in ("train_loss", "test_loss", "fit_loss"):
            assert summary[name] == pytest.approx(alone[name], rel=tolerance)
        assert [line["lr"] for line in curve(tmp_path / "stack", recipe)] == [
            line["lr"] for line in curve(tmp_path / "alone", recipe)
        ]


@pytest.mark.parametrize("optimizer", ["sgd", "gsgd"])
def test_one_that_diverges_does_not_disturb_its_stack(tmp_path: Path, optimizer: str) -> None:
    base = SMALL.but(optimizer=optimizer, max_ratio=1e30, max_drift=1e30)
    recipes = [base.but(lr=0.02), base.but(lr=1e9), base.but(lr=0.01)]
    together = train_many(recipes, tmp_path / "stack")
    assert [summary["status"] for summary in together] == ["finished", "diverged", "finished"]
    for recipe, summary in zip(recipes, together, strict=True):
        alone = train(recipe, tmp_path / "alone")
        assert summary["status"] == alone["status"]
        if alone["status"] == "finished":
            assert summary["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-5)


def test_only_what_differs_in_seed_and_rate_is_stacked(tmp_path: Path) -> None:
    refused = [[SMALL, SMALL.but(batch_size=32)], [CNN, CNN.but(seed=1)]]
    decay = SMALL.but(weight_decay=0.1)
    refused.append([decay, decay.but(lr=0.01)])
    for recipes in refused:
        with pytest.raises(RequestError, match="cannot be stacked"):
            train_many(recipes, tmp_path)


# --- capture ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["sgd with momentum", "gsgd with momentum", "plain"])
def test_rehearsing_steps_leaves_no_trace(case: str) -> None:
    """What capture does around its warm-up: snapshot, steps, restore. Training then goes on as if nothing had been."""
    recipe = CASES[case]
    source = feed(load("digits"), recipe.inputs, recipe.augment)
    rows = epoch_rows(0, 0, 1438, recipe.batch_size, source.augment)[:, None]
    plain, rehearsed = (single([recipe], source, Engine(device="cpu").resolve()) for _ in range(2))
    saved = snapshot(rehearsed.live())
    for step in range(3):
        rehearsed.step(rows[step])
    restore(rehearsed.live(), saved)
    for step in range(4):
        plain.step(rows[step])
        rehearsed.step(rows[step])
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(rehearsed.model.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    assert torch.equal(plain.totals, rehearsed.totals)


def test_seeds_share_one_compilation(tmp_path: Path) -> None:
    """aot_eager stands for the compiler: what is tested is that torch follows the step whole and only once."""
    torch.compiler.reset()
    compiled = torch.compile(loss_and_errors, backend="aot_eager", dynamic=False, fullgraph=True)
    for seed in range(3):
        source = feed(load("digits"), PLAIN.inputs, PLAIN.augment)
        model = initial_model(PLAIN.but(seed=seed))
        rows = epoch_rows(seed, 0, 1438, 32, source.augment)[0]
        arguments = (source.images, source.labels, source.augment.take, source.finish, rows, "bf16")
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            loss, errors = compiled(model, *arguments)
        loss.backward()
        expected, count = loss_and_errors(initial_model(PLAIN.but(seed=seed)), *arguments)
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)  # bf16 keeps 8 bits
        assert errors == count


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_captured_step_is_the_eager_step(tmp_path: Path, case: str) -> None:
    recipe = CASES[case]
    train(recipe, tmp_path / "graph", engine=Engine(device="cuda", compile=False, graph=True, deterministic=True))
    train(recipe, tmp_path / "eager", engine=Engine(device="cuda", compile=False, graph=False, deterministic=True))
    for a, b in zip(curve(tmp_path / "graph", recipe), curve(tmp_path / "eager", recipe), strict=True):
        assert a["lr"] == b["lr"]
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-4)  # the warm-up may choose other kernels


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["sgd with momentum", "plain", "plain, gsgd by stage"])
def test_a_gpu_run_continues(tmp_path: Path, case: str) -> None:
    recipe = CASES[case]
    engine = Engine(device="cuda", compile=False, deterministic=True)
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "a", engine=engine, stop=stop_at(6))
    train(recipe, tmp_path / "a", engine=engine)
    train(recipe, tmp_path / "b", engine=engine)
    assert_equal_runs(tmp_path / "a", tmp_path / "b", recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_compiled_and_captured_training_learns(tmp_path: Path, precision: str) -> None:
    recipe = PLAIN.but(width=16, iterations=60, eval_every=20, precision=precision, train_size=None, test_size=None)
    summary = train(recipe, tmp_path, engine=Engine(device="cuda"))
    assert summary["train_loss"] < 2.25 < curve(tmp_path, recipe)[0]["train_loss"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["sgd", "gsgd", "frozen"])
def test_a_stack_on_a_gpu_gives_the_numbers_of_the_cpu(tmp_path: Path, case: str) -> None:
    recipes = [CASES[case].but(seed=seed) for seed in range(3)]
    cpu = train_many(recipes, tmp_path / "cpu", engine=Engine(device="cpu"))
    gpu = train_many(recipes, tmp_path / "gpu", engine=Engine(device="cuda"))
    for a, b in zip(cpu, gpu, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-3)  # 44 steps from other roundings


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("summary.json", "{}"),
        ("summary.json", '{"status": 5}'),
        ("metrics.jsonl", "[1]\n"),
        ("metrics.jsonl", '{"a": 1}\n'),
        ("environment.json", '{"a": 1}'),
    ],
)
def test_a_record_of_another_shape_is_named(tmp_path: Path, name: str, content: str) -> None:
    recipe = CASES["sgd"]
    with pytest.raises(Interrupted):
        train(recipe, tmp_path, stop=stop_at(6))
    path = tmp_path / recipe.folder / name
    path.write_text(content)
    for use in (lambda: train(recipe, tmp_path), lambda: read_run(path.parent)):
        with pytest.raises(RecordError, match=name):
            use()


@pytest.mark.parametrize("name", ["checkpoint", "metrics.jsonl", "summary.json"])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_run_does_not_go_on_with_the_files_of_another_seed(tmp_path: Path, name: str, stacked: bool) -> None:
    recipe, other = SMALL, SMALL.but(seed=1)
    if name == "summary.json":
        train(other, tmp_path)
    else:
        with pytest.raises(Interrupted):
            train(other, tmp_path, stop=stop_at(16))
    with pytest.raises(Interrupted):
        train(recipe, tmp_path, stop=stop_at(16))
    foreign = tmp_path / recipe.folder / name
    foreign.write_bytes((tmp_path / other.folder / name).read_bytes())
    before = contents(tmp_path / recipe.folder)
    with pytest.raises(RecordError, match=name):
        train_many([recipe], tmp_path) if stacked else train(recipe, tmp_path)
    assert contents(tmp_path / recipe.folder) == before


def replace_state(run: Run, **entries: Any) -> None:
    state = run.load()
    assert state is not None
    run.save({**state, **entries})


def test_a_stack_does_not_reach_outside_of_its_folder(tmp_path: Path) -> None:
    recipes = [SMALL.but(seed=seed) for seed in range(2)]
    victim = SMALL.but(seed=2)
    for some, out in (([victim], tmp_path), (recipes, tmp_path / "runs")):
        with pytest.raises(Interrupted):
            train_many(some, out, stop=stop_at(16))
    with open_run(tmp_path / "runs", recipes[0]) as run:
        replace_state(run, members=[recipes[0].folder, f"../{victim.folder}"])
    before = contents(tmp_path / victim.folder)
    with pytest.raises(RecordError, match="checkpoint is that of another run"):
        train_many(recipes[:1], tmp_path / "runs")
    assert contents(tmp_path / victim.folder) == before


HOSTILE: dict[str, dict[str, Any]] = {
    "another kind": {"kind": "other"},
    "other members": {"members": [SMALL.folder, SMALL.but(seed=1).folder]},
    "a run that no stack has beside it": {"kind": "stacked", "members": [SMALL.folder, CNN.folder]},
    "an iteration too far": {"iteration": 10**9},
    "an iteration that is none": {"iteration": "3"},
    "no learner": {"learner": None},
    "an empty learner": {"learner": {"model": {}, "optimizer": {}}},
    "totals of another size": {"totals": torch.zeros(7, 3)},
    "no random state": {"random": torch.zeros(3)},
}


@pytest.mark.parametrize("change", HOSTILE)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_checkpoint_that_does_not_fit_is_one_line(tmp_path: Path, change: str, stacked: bool) -> None:
    for recipe in (SMALL, SMALL.but(seed=1), CNN):
        with pytest.raises(Interrupted):
            train(recipe, tmp_path, stop=stop_at(4))
    with open_run(tmp_path, SMALL) as run:
        replace_state(run, **HOSTILE[change])
    before = contents(tmp_path)
    with pytest.raises(LabError) as caught:
        train_many([SMALL], tmp_path) if stacked else train(SMALL, tmp_path)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == before


def test_a_stack_goes_on_although_one_of_its_runs_has_ended(tmp_path: Path) -> None:
    """Whoever continues asks for the unfinished ones alone; the ended one is still part of the stack."""
    recipes = [SMALL.but(seed=0, lr=1e6), SMALL.but(seed=1), SMALL.but(seed=2)]
    whole = train_many(recipes, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_many(recipes, tmp_path / "a", stop=stop_at(30))
    ended = [run.summary is not None for run in read_records([tmp_path / "a"])]
    assert ended == [True, False, False]
    rest = train_many(recipes[1:], tmp_path / "a")
    assert [line["test_error"] for line in rest] == [line["test_error"] for line in whole[1:]]


@pytest.fixture
def stopped(tmp_path: Path) -> list[Recipe]:
    """Four runs below `runs`, begun as one stack and stopped."""
    recipes = [SMALL.but(seed=seed) for seed in range(4)]
    with pytest.raises(Interrupted):
        train_many(recipes, tmp_path / "runs", stop=stop_at(30))
    return recipes


def test_a_stopped_stack_continues_as_it_was_begun_whoever_of_it_is_asked_for(
    tmp_path: Path, stopped: list[Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(tmp_path, stopped[1:3])) == 0
    assert [result(tmp_path / "runs", recipe)["stacked"] for recipe in stopped] == [4] * 4
    assert "failed" not in capsys.readouterr().err


def test_a_stack_whose_other_runs_are_in_use_is_left_to_their_process(
    tmp_path: Path, stopped: list[Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    with open_run(tmp_path / "runs", stopped[3]):
        assert sweep.run_all(stopped[:2], tmp_path / "runs", sweep.Session()) == 2
    assert "is in use by another process" in capsys.readouterr().err


def test_errors_are_measured_in_evaluation_mode_and_on_all_images(tmp_path: Path) -> None:
    recipe = Recipe(model="plain-10", width=4, iterations=12, batch_size=64, lr=0.1, eval_every=4)
    summary = train(recipe, tmp_path)
    source = feed(load("digits"), "standard", "none")
    model = initial_model(recipe)
    model.load_state_dict(weights(tmp_path, recipe))
    errors = {}
    with torch.no_grad():
        fit = float(F.cross_entropy(model.eval()(source.images), source.labels))
        for training in (False, True):  # the latter moves the statistics
            wrong = model.train(training)(source.x_test).argmax(1) != source.y_test
            errors[training] = float(wrong.double().mean())
    assert abs(errors[True] - errors[False]) > 0.1  # else this shows nothing
    assert summary["test_error"] == pytest.approx(errors[False])
    assert summary["fit_loss"] == pytest.approx(fit, rel=1e-4)


def test_the_optimizers_of_a_recipe_end_chains_where_it_says() -> None:
    source = feed(load("digits"), "standard", "none")
    recipe = Recipe(model="plain-10", width=4, iterations=3, init="skeleton", optimizer="gsgd")
    sizes = []
    for pin in ("stages", "none"):
        one = recipe.but(pin=pin)
        optimizer: Any = build_optimizer(initial_model(one), one, 0.1, torch.zeros(1, *source.x_test.shape[1:]))
        sizes.append(len(optimizer.incoming) - 1)
        frozen = one.but(optimizer="sgd-frozen")
        control: Any = build_optimizer(initial_model(frozen), frozen, 0.1, torch.zeros(1, *source.x_test.shape[1:]))
        assert sizes[-1] == control.skeleton.H
    assert sizes == [60, 124]


def test_a_run_that_its_last_step_blows_up_has_diverged(tmp_path: Path) -> None:
    summary = train(Recipe(iterations=1, lr=1e30, hidden=(8,)), tmp_path)
    assert (summary["status"], summary["test_error"]) == ("diverged", None)
