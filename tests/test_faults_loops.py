"""The fault loops of `gspace bench faults`, and that they notice what does not hold."""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "results" / "faults.json"


def run(*options: str) -> dict[str, Any]:
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("needs Linux and a C compiler, for a library in front of libc")
    command = [sys.executable, str(ROOT / "benchmarks" / "faults" / "__main__.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout)["loops"]


def assert_held(loop: dict[str, Any], least: int) -> None:
    assert loop["failed"] == []
    assert loop["held"] == loop["tried"] >= least


def test_a_fault_here_and_there() -> None:
    assert_held(run("--loops", "operations", "--step", "61")["operations"], 15)


@pytest.mark.slow
def test_a_fault_at_every_file_operation() -> None:
    assert_held(run("--loops", "operations")["operations"], 500)


@pytest.mark.slow
def test_random_faults_in_one_run() -> None:
    assert_held(run("--loops", "long", "--faults", "200")["long"], 200)


@pytest.mark.slow
def test_damage_to_every_kind_of_file() -> None:
    damage = run("--loops", "damage", "--damages", "500")["damage"]
    assert_held(damage, 500)
    kinds = {name.split(",")[0] for name in damage["kinds"]}
    assert {"a record", "idx", "npz", "table", "state of GSGD", "checkpoint of a stopped run"} <= kinds


def test_damage_changes_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.faults.attempt import damaged

    rng, content = random.Random(0), bytes(range(1, 200))
    drawn = [damaged(content, rng) for _ in range(300)]
    assert {kind for kind, _ in drawn} == {"flip", "cut", "zeros", "twice", "empty"}
    assert all(changed != content for _, changed in drawn)


def test_a_file_that_is_written_in_place_is_noticed(tmp_path: Path) -> None:
    """A fault at the one write of a plain program. (Python writes again when it forgets the file.)"""
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("needs Linux and a C compiler, for a library in front of libc")
    program = """if True:
        import os, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        from benchmarks.faults.attempt import MODES, Fault, attempt, preloaded
        work = Path(sys.argv[2])
        environment = preloaded(work)
        if environment is not None:
            sys.exit(os.spawnve(os.P_WAIT, sys.executable, [sys.executable, *sys.orig_argv[1:]], environment))
        for mode in MODES:
            file = work / "below" / "file"
            file.parent.mkdir(exist_ok=True)
            file.write_text("old")
            outcome = attempt(lambda: file.write_text("0123456789") and 0, file.parent, Fault(2, mode))
            print(mode, outcome.code, file.read_text(), sep="|")
    """
    command = [sys.executable, "-c", program, str(ROOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "ENOSPC|70|", "EIO|70|0123456789", "kill before|-9|", "kill inside|-9|01234", "kill behind|-9|0123456789"
    ], done.stderr  # fmt: skip


def test_the_recorded_loops_held() -> None:
    """Those that docs/reliability.md tells of."""
    loops = json.loads(RECORD.read_text(encoding="utf-8"))["loops"]
    assert_held(loops["operations"], 500)
    assert_held(loops["long"], 2000)
    assert_held(loops["damage"], 500)
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    for loop in loops.values():
        assert f"| {loop['tried']:,} | {loop['held']:,} |" in page


def test_the_tests_that_the_page_names_are_there() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    there = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", page)
    assert len(named) > 30
    assert [name for name in named if f"def {name}(" not in there] == []
