"""The compiled step for CPUs: built once, kept by its content; where it cannot be built, training goes on."""

import ctypes
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import gspace
import zoo
from gspace.optim.fast import native

needs_compiler = pytest.mark.skipif(
    isinstance(native.library("float"), str), reason="there is no C compiler that builds the step"
)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and no memory of what was built before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "library", native.library.__wrapped__)


def libraries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "gspace").glob("*.so"))


def step() -> str:
    """Takes a step; which way it was."""
    torch.manual_seed(0)
    model = zoo.mlp(5, 6, 3)
    optimizer = gspace.GSGD(model, 0.1)
    model(torch.randn(4, 5)).square().mean().backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)
    return str(optimizer.statistics()["way"])


@needs_compiler
def test_it_is_built_once_and_leaves_nothing_else(tmp_path: Path) -> None:
    assert step() == "NativeStep"
    (made,) = libraries(tmp_path)
    written = made.stat().st_mtime_ns
    assert step() == "NativeStep"
    assert libraries(tmp_path) == [made]
    assert made.stat().st_mtime_ns == written
    assert {path.name for path in made.parent.iterdir()} == {made.name, "lock"}


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "one bit"])
def test_a_damaged_library_is_built_again(tmp_path: Path, damage: str) -> None:
    """Loading a library that was cut ends the process."""
    native.library("float")
    (made,) = libraries(tmp_path)
    content = bytearray(made.read_bytes())
    made.unlink()  # what is loaded stays as it is
    if damage == "one bit":
        content[len(content) // 2] ^= 1
    made.write_bytes({"cut": content[: len(content) // 3], "empty": b"", "garbage": b"x" * 999}.get(damage, content))
    assert step() == "NativeStep"
    (again,) = libraries(tmp_path)
    assert native._digest(again) == again.stem.rpartition("-")[2]


@needs_compiler
def test_what_a_killed_build_left_is_cleared_away(tmp_path: Path) -> None:
    left = tmp_path / "cache" / "gspace" / "build-killed"
    left.mkdir(parents=True, mode=0o700)
    (left / "kernels.c").write_text("half")
    (tmp_path / "cache" / "gspace").chmod(0o700)
    native.library("float")
    assert not left.exists()


def compiler(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cc"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "says"), [("echo nothing works >&2; exit 1", "nothing works"), ("exit 0", "it made nothing")]
)
def test_a_compiler_that_fails_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, text))
    with pytest.warns(RuntimeWarning, match=f"could not be built with .*{says}"):
        assert says in step()


@pytest.mark.parametrize("where", ["neither cache nor temporary folder", "a cache on a full disk"])
def test_disks_that_take_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def full(self: Path, *args: Any, **kwargs: Any) -> int:
        raise OSError(28, "No space left on device")

    if where.startswith("neither"):
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
        monkeypatch.setattr(native.tempfile, "tempdir", "/proc/nowhere")
    else:
        monkeypatch.setattr(Path, "write_text", full)
    with pytest.warns(RuntimeWarning, match="could not be built"):
        assert "torch's operations" in step()


def test_a_failure_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import functools

    monkeypatch.setenv("CC", compiler(tmp_path, "exit 0"))
    monkeypatch.setattr(native, "library", functools.cache(native.library))
    with pytest.warns(RuntimeWarning, match="it made nothing"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()


@needs_compiler
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "gspace"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert native._cache() is None
    assert isinstance(native.library("float"), ctypes.CDLL)
    assert libraries(tmp_path) == []


@needs_compiler
def test_many_processes_build_one_library(tmp_path: Path) -> None:
    code = "from gspace.optim.fast import native; native.library('float')"
    path = str(Path(gspace.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    running = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    assert len(libraries(tmp_path)) == 1
