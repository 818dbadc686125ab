"""Recipes and run folders: identity, refusals on one line, atomic files, one process at a time."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gspace.lab.archive import read_records
from gspace.lab.errors import BusyError, RecordError, RequestError
from gspace.lab.recipe import Recipe
from gspace.lab.record import environment, finite, open_run, read_run, write_atomic

RECIPE = Recipe(iterations=10)


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_a_recipe_survives_json() -> None:
    recipe = Recipe(epochs=2, hidden=(8, 9), milestones=(0.5, 0.75), max_ratio=math.inf, reference="one", seed=3)
    text = json.dumps(recipe.to_dict(), allow_nan=False)
    assert Recipe.from_dict(json.loads(text)) == recipe


def test_identity_is_the_same_for_the_same_run_only() -> None:
    assert Recipe(iterations=10, lr=0.1).identity == RECIPE.identity
    assert Recipe(iterations=10, lr=1).identity == Recipe(iterations=10, lr=1.0).identity
    changed = [
        RECIPE.but(seed=1),
        RECIPE.but(lr=0.2),
        RECIPE.but(quick=True),
        Recipe(epochs=10),
        RECIPE.but(hidden=(64,)),
    ]
    assert len({recipe.identity for recipe in [RECIPE, *changed]}) == 6


def test_identity_depends_on_nothing_but_fields_off_their_default() -> None:
    """Otherwise a field added later would disown every run recorded before."""
    import hashlib

    assert RECIPE.identity == hashlib.sha256(b'{"iterations": 10}').hexdigest()[:12]


REFUSED = {
    "data": ("cifra10", "did you mean 'cifar10'"),
    "model": ("resnet34", "did you mean 'resnet-34'"),
    "optimizer": ("g-sgd", "did you mean 'gsgd'"),
    "init": (3, "must be a text"),
    "lr": (-0.1, "at least 0"),
    "momentum": (2, "at most 1"),
    "batch_size": (0, "at least 1"),
    "seed": (1.5, "a whole number"),
    "nesterov": (1, "true or false"),
    "hidden": (64, "must be a list"),
    "milestones": ((0.75, 0.5), "not in order"),
    "schedule": ("linear", "unknown schedule"),
    "warm_up": (1.5, "warm_up must be at most 1"),
    "weight_decay": (math.nan, "at least 0"),
    "epochs": (3, "a run has one length"),
    "iterations": (None, "a run needs a length"),
    "precision": ("fp16", "unknown precision 'fp16': "),
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_bad_field_is_refused_on_one_line(field: str) -> None:
    value, message = REFUSED[field]
    with pytest.raises(RequestError, match=message) as caught:
        RECIPE.but(**{field: value})
    assert "\n" not in str(caught.value)


def test_a_cosine_with_milestones_is_refused() -> None:
    with pytest.raises(RequestError, match="a cosine has no milestones"):
        Recipe(iterations=10, schedule="cosine", milestones=(0.5,))


def test_an_unknown_field_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="did you mean 'momentum'"):
        Recipe.from_dict({"iterations": 1, "momentun": 0.9})


# --- run folders ------------------------------------------------------------------------------------------------------


def point(iteration: int, error: float = 0.5) -> dict[str, Any]:
    return {"iteration": iteration, "train_loss": 1.0, "train_error": 0.5, "test_loss": None, "test_error": error}


def ended(recipe: Recipe = RECIPE, **changes: Any) -> dict[str, Any]:
    facts = {"status": "finished", "identity": recipe.identity, "iteration": 2, "iterations": 10, "test_error": 0.25}
    return {**facts, **changes}


def state(recipe: Recipe = RECIPE, **entries: Any) -> dict[str, Any]:
    return {"kind": "single", "members": [recipe.folder], **entries}


def test_a_run_folder_holds_what_was_written(tmp_path: Path) -> None:
    with open_run(tmp_path, RECIPE) as run:
        run.begin(environment(note="first"))
        run.begin(environment(note="second"))
        run.append(point(1))
        run.append(point(2, 0.25))
        assert run.load() is None
        run.save(state(iteration=2, weights=torch.arange(3.0)))
        loaded = run.load()
        assert loaded is not None
        assert torch.equal(loaded["weights"], torch.arange(3.0))
        assert run.summary is None
        run.finish(ended())
    record = read_run(tmp_path / RECIPE.folder)
    assert record.recipe == RECIPE
    assert [session["note"] for session in record.sessions] == ["first", "second"]
    assert record.metrics == (point(1), point(2, 0.25))
    assert record.summary == ended()
    assert read_records([tmp_path]) == [record]


def test_a_line_cut_short_is_no_line(tmp_path: Path) -> None:
    with open_run(tmp_path, RECIPE) as run:
        run.append(point(1))
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write('{"iteration": 2, "test_err')
        assert [line["iteration"] for line in read_run(run.folder).metrics] == [1]
        run.rewind(1)
        run.append(point(2))
        assert [line["iteration"] for line in run.metrics] == [1, 2]


def test_rewinding_forgets_later_points(tmp_path: Path) -> None:
    with open_run(tmp_path, RECIPE) as run:
        for i in range(1, 6):
            run.append(point(i))
        run.rewind(3)
        assert [line["iteration"] for line in run.metrics] == [1, 2, 3]


@pytest.mark.parametrize("place", [0, 30, 200, -1])
def test_a_damaged_checkpoint_is_named_and_left(tmp_path: Path, place: int) -> None:
    with open_run(tmp_path, RECIPE) as run:
        run.save(state(weights=torch.zeros(100)))
        path = run.folder / "checkpoint"
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
        with pytest.raises(RecordError, match=r"checkpoint is damaged.*delete it to start this run again"):
            run.load()
        assert path.read_bytes() == content


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    with open_run(tmp_path, RECIPE) as run:
        run.save(state(weights=torch.zeros(100)))
        path = run.folder / "checkpoint"
        path.write_bytes(path.read_bytes()[:10])
        with pytest.raises(RecordError, match="checkpoint is damaged"):
            run.load()


def test_a_folder_of_another_recipe_is_refused(tmp_path: Path) -> None:
    other = RECIPE.but(seed=9)
    (tmp_path / RECIPE.folder).mkdir()
    (tmp_path / RECIPE.folder / "recipe.json").write_text(json.dumps(other.to_dict()))
    with pytest.raises(RecordError, match=r"another recipe's"), open_run(tmp_path, RECIPE):
        pass


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """That of a finished run."""
    with open_run(tmp_path, RECIPE) as run:
        run.begin(environment())
        run.append(point(1))
        run.append(point(2, 0.25))
        run.save(state())
        run.finish(ended())
        return run.folder


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "environment.json"])
def test_a_file_of_another_seeds_run_is_refused(run_folder: Path, name: str) -> None:
    other = RECIPE.but(seed=1)
    with open_run(run_folder.parent, other) as run:
        run.begin(environment())
        run.append(point(1))
        run.append(point(2, 0.25))
        run.finish(ended(other))
        (run_folder / name).write_bytes((run.folder / name).read_bytes())
    with pytest.raises(RecordError, match=f"{name} cannot be read: .*(is another run's|the end of run)"):
        read_run(run_folder)


@pytest.mark.parametrize("members", [[RECIPE.but(seed=1).folder], ["../victim", RECIPE.folder], [], None, [3], "abc"])
def test_a_checkpoint_of_other_runs_is_refused(run_folder: Path, members: Any) -> None:
    with open_run(run_folder.parent, RECIPE) as run:
        run.save(state(members=members))
        with pytest.raises(RecordError, match=r"checkpoint (is that of another run|holds no state).*delete it"):
            run.load()


class Hostile:
    def __reduce__(self):
        return print, ("executed",)


def test_a_hostile_checkpoint_does_not_advise_to_load_it_unsafely(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_run(run_folder.parent, RECIPE) as run:
        run.save(state(weights=Hostile()))
        with pytest.raises(RecordError) as caught:
            run.load()
    assert "weights_only" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_a_renamed_run_folder_is_refused(run_folder: Path) -> None:
    moved = run_folder.rename(run_folder.with_name(RECIPE.but(seed=1).folder))
    with pytest.raises(RecordError, match="is that of another run"):
        read_run(moved)


def test_a_curve_that_ends_before_its_summary_is_refused(run_folder: Path) -> None:
    lines = (run_folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_folder / "metrics.jsonl").write_text(lines[0])
    with pytest.raises(RecordError, match="its curve ends with iteration 1, its summary has 2"):
        read_run(run_folder)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "environment.json", "recipe.json"])
def test_no_bit_of_a_record_flips_silently(run_folder: Path, name: str) -> None:
    """Every byte, one bit each: refused, or of no consequence (white space, a letter of a \\u escape)."""
    path, whole = run_folder / name, read_run(run_folder)
    content = path.read_bytes()
    silent = []
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        try:
            if read_run(run_folder) != whole:
                silent.append(place)
        except RecordError as error:
            assert "\n" not in str(error)  # noqa: PT017 -- most flips are refused, some change nothing
    assert silent == []


def test_no_folder_can_be_made_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RecordError, match="cannot write"), open_run(tmp_path / "runs", RECIPE):
        pass


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"no run folder"):
        read_run(tmp_path)


HOLD = """
import sys, time
from pathlib import Path
from gspace.lab.recipe import Recipe
from gspace.lab.record import open_run
with open_run(Path(sys.argv[1]), Recipe(iterations=10)):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_refused_and_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    folder = tmp_path / RECIPE.folder
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match="in use by another process"), open_run(tmp_path, RECIPE):
            pass
        assert read_run(folder).recipe == RECIPE  # reading needs no lock
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()  # type: ignore[union-attr]
    with open_run(tmp_path, RECIPE):
        pass


FULL = """
import resource, sys
from pathlib import Path
import torch
from gspace.lab.errors import RecordError
from gspace.lab.recipe import Recipe
from gspace.lab.record import open_run
with open_run(Path(sys.argv[1]), Recipe(iterations=10)) as run:
    names = "train_loss", "train_error", "test_loss", "test_error"
    run.append({"iteration": 1, **dict.fromkeys(names, 0.5)})
    begun = {"kind": "single", "members": [run.folder.name]}
    run.save({**begun, "weights": torch.zeros(10)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # as on a full disk, writes fail from here on
    try:
        run.save({**begun, "weights": torch.ones(100_000)})
    except RecordError as error:
        print(error)
        print(run.load()["weights"].sum().item(), len(run.metrics))
"""


def test_on_a_full_disk_the_last_checkpoint_stays(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    message, kept = done.stdout.splitlines()
    assert "cannot write" in message
    assert "what was recorded before is intact" in message
    assert kept == "0.0 1"


def test_atomic_writes_replace_or_leave(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"one")
    write_atomic(path, b"t", b"wo")
    assert path.read_bytes() == b"two"
    with pytest.raises(RecordError, match="cannot write"):
        write_atomic(path / "file", b"three")
    assert os.listdir(tmp_path) == ["file"]


def test_numbers_that_json_lacks_become_null() -> None:
    assert finite(1.5) == 1.5
    assert finite(math.nan) is None
    assert finite(-math.inf) is None


def test_what_a_killed_process_was_writing_is_cleared_away(tmp_path: Path) -> None:
    with open_run(tmp_path, RECIPE) as run:
        left = run.folder / "checkpoint.123.part"
        left.write_bytes(b"half")
    with open_run(tmp_path, RECIPE):
        assert not left.exists()
