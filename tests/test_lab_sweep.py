"""Sweeps: fixed slices of a list, and the runs of a list as tasks of a Ray cluster, one node of which dies."""

import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gspace.lab import cli
from gspace.lab.learners import stack_key, stackable
from gspace.lab.recipe import Recipe
from gspace.lab.record import CHECKPOINT, METRICS, Run, read_run
from gspace.lab.sweep import NOTHING_LEFT, read_queue, run_all, share
from gspace.lab.train import Session

BASE = Recipe(model="cnn", width=4, epochs=1.0, batch_size=64)
MLPS = [Recipe(hidden=(8,), epochs=1.0, seed=seed, lr=lr) for lr in (0.1, 0.2) for seed in range(2)]


def queue(folder: Path, recipes: list[Recipe]) -> Path:
    path = folder / "jobs.json"
    path.write_text(json.dumps([recipe.short() for recipe in recipes]))
    assert read_queue(path) == recipes
    return path


def result(folder: Path) -> tuple[Any, ...]:
    """All of a run that does not depend on the clock: its curve, its end, its weights."""
    record = read_run(folder)
    first = Run(folder, record.recipe).load() or {}
    host = folder.with_name(first["members"][0])  # of a stack
    state = Run(host, read_run(host).recipe).load() or {}
    clock = ("seconds", "images_per_second", "wall_seconds", "overhead_seconds")
    kept = [{k: v for k, v in line.items() if k not in clock} for line in (*record.metrics, record.summary or {})]
    return kept, state["iteration"], state["learner"]["model"]


def assert_same_bits(one: Path, other: Path, recipes: list[Recipe]) -> None:
    for recipe in recipes:
        (kept, iteration, weights), (again, there, others) = (result(out / recipe.folder) for out in (one, other))
        assert (kept, iteration) == (again, there)
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_slices_are_a_partition_and_keep_stacks_whole() -> None:
    recipes = [BASE.but(seed=seed, lr=lr) for lr in (0.1, 0.2) for seed in range(20)] + MLPS
    slices = [share(recipes, (k, 3)) for k in (1, 2, 3)]
    assert all(slices)
    assert sorted(recipe.folder for some in slices for recipe in some) == sorted(r.folder for r in recipes)
    homes = {stack_key(recipe): k for k, some in enumerate(slices) for recipe in some if stackable(recipe)}
    assert all(recipe in slices[homes[stack_key(recipe)]] for recipe in MLPS)
    assert share(recipes[7:], (2, 3)) == [recipe for recipe in slices[1] if recipe in recipes[7:]]  # whatever is left


def test_slices_of_a_queue_are_the_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipes = [BASE.but(seed=seed, train_size=128) for seed in range(4)]
    path = queue(tmp_path, recipes)
    command = ["train", "--queue", str(path), "--out", str(tmp_path / "runs"), "--device", "cpu"]
    for k in (1, 2):
        assert cli.main([*command, "--slice", f"{k}/2"]) == 0
        assert capsys.readouterr().out.count("status finished") == len(share(recipes, (k, 2)))
    assert cli.main(command) == 0
    assert capsys.readouterr().out == f"{NOTHING_LEFT}\n"


def test_a_slice_of_a_table_says_what_is_left_to_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = ["reproduce", "path-sgd", "--quick", "--method", "path-sgd", "--data-dir", str(tmp_path), "--device", "cpu"]
    sizes = ["--out", str(tmp_path / "runs")]
    text = ""
    for k in (1, 2, 1, 2):  # a grid of four, then the seeds that it decides
        assert cli.main([*table, *sizes, "--slice", f"{k}/2"]) == 0
        text += capsys.readouterr().out
    assert text.count("status finished") == 4 + 2
    assert "runs are in other slices" in text


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2"])
def test_a_slice_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--epochs", "1", f"--slice={text}"])
    assert "is no slice: write 1/4" in capsys.readouterr().err


def test_options_of_ray_need_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", "--epochs", "1", "--out", str(tmp_path)]
    assert cli.main([*command, "--gpus-per-run", "0.5"]) == 2
    assert "are for --engine ray" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert cli.main([*command, "--engine", "ray"]) == 5
    assert capsys.readouterr().err == "gspace: error: --engine ray needs Ray: pip install ray\n"


@pytest.mark.slow
def test_twelve_runs_on_two_nodes_survive_the_death_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    recipes = [BASE.but(seed=seed, lr=lr, epochs=40.0) for lr in (0.05, 0.1) for seed in range(5)] + MLPS[:2]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert run_all(recipes, tmp_path / "alone", Session()) == 0
    torch.set_num_threads(threads)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    killed = []
    try:
        cluster.add_node(num_cpus=2)
        victim = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()

        def kill() -> None:
            """Once some runs are under way, and not all."""
            while len(list((tmp_path / "ray").glob(f"*/{CHECKPOINT}"))) < 3:
                time.sleep(0.05)
            killed.append(len(list((tmp_path / "ray").glob("*/summary.json"))))
            cluster.remove_node(victim, allow_graceful=False)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        path = queue(tmp_path, recipes)
        command = ["train", "--queue", str(path), "--out", str(tmp_path / "ray"), "--checkpoint-seconds", "0.2"]
        assert cli.main([*command, "--engine", "ray", "--address", cluster.address]) == 0
        killer.join(10)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert killed
    assert killed[0] < 10
    assert capsys.readouterr().out.count("status finished") == 12 + 12
    assert_same_bits(tmp_path / "alone", tmp_path / "ray", recipes)
    sessions = [len(read_run(tmp_path / "ray" / recipe.folder).sessions) for recipe in recipes]
    assert max(sessions) > 1  # at least one was continued


@pytest.mark.slow
def test_the_end_of_the_time_stops_tasks_with_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ray = pytest.importorskip("ray")
    path = queue(tmp_path, [BASE.but(epochs=100_000.0, eval_every=10, seed=seed) for seed in range(2)])
    command = ["train", "--queue", str(path), "--out", str(tmp_path / "ray"), "--engine", "ray"]

    def end_the_time() -> None:
        """Once a run is under way, however long Ray takes to start."""
        while not any(path.read_bytes() for path in tmp_path.rglob(METRICS)):
            time.sleep(0.05)
        signal.setitimer(signal.ITIMER_REAL, 0.1)

    try:
        assert cli.main([*command, "--gpus-per-run", "64"]) == 5
        assert "this machine has fewer" in capsys.readouterr().err
        threading.Thread(target=end_the_time, daemon=True).start()
        assert cli.main([*command, "--minutes", "10"]) == 128 + signal.SIGALRM
    finally:
        ray.shutdown()
    assert "minutes are over with 2 tasks to do; run again to continue" in capsys.readouterr().err
    states = [Run(path.parent, read_run(path.parent).recipe).load() for path in tmp_path.rglob(CHECKPOINT)]
    assert states
    assert all(state is not None and state["iteration"] > 0 for state in states)
