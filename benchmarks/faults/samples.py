"""Small files of every kind that is read beside runs and records, and what reads each."""

import gzip
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gspace
from benchmarks.faults.attempt import Outcome, attempt, command
from benchmarks.faults.loops import Kept
from gspace.lab.errors import LabError

IMAGES, LABELS = np.arange(20 * 28 * 28, dtype=np.uint8).reshape(20, 28, 28), np.arange(20, dtype=np.uint8) % 10
NAMES = {"x_train": "train-images-idx3", "y_train": "train-labels-idx1", "x_test": "t10k-images-idx3"}
NAMES |= {"y_test": "t10k-labels-idx1"}


def files(work: Path) -> Iterator[Kept]:
    yield from _data(work / "data")
    yield from _state(work / "state")
    yield from _library(work / "library")
    yield from _table(work / "table")


def told(call: Callable[[], Any]) -> Callable[[], int]:
    """What a call gives, as JSON; a refusal is one line."""

    def run() -> int:
        try:
            print(json.dumps(call()))
        except (LabError, ValueError, RuntimeError) as error:
            print(f"gspace: error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        return 0

    return run


def _data(folder: Path) -> Iterator[Kept]:
    """As downloads leave them. Published sets have checksums besides, which files of this size cannot have."""
    from gspace.lab.data import read_idx, read_npz

    arrays = {"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES[:7], "y_test": LABELS[:7]}
    for zipped in (False, True):
        below = folder / ("zipped" if zipped else "plain")
        (below / "raw").mkdir(parents=True)
        for key, name in NAMES.items():
            sizes = b"".join(n.to_bytes(4, "big") for n in arrays[key].shape)
            content = bytes([0, 0, 8, arrays[key].ndim]) + sizes + arrays[key].tobytes()
            path = below / "raw" / f"{name}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(content) if zipped else content)
        read = told(lambda at=below: _digest(read_idx(at, folder="raw")))
        yield Kept("gzipped idx" if zipped else "idx", path, lambda r=read: attempt(r, folder), loose=True)
    np.savez(folder / "set.npz", **arrays)
    read = told(lambda: _digest(read_npz(folder, file="set.npz")))
    yield Kept("npz", folder / "set.npz", lambda r=read: attempt(r, folder), loose=True)


def _digest(raw: Any) -> list[str]:
    return sorted(f"{array.shape} {array.sum()}" for array, _ in raw.values())


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def _step(optimizer: Any) -> list[float]:
    torch.manual_seed(1)
    for p in optimizer.model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return [float(p.detach().abs().sum()) for p in optimizer.model.parameters()]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "GSGD": lambda m: gspace.GSGD(m, 0.05, momentum=0.9),
    "InGSpace": lambda m: gspace.InGSpace(m, torch.optim.AdamW, lr=0.01),
    "PathSGD": lambda m: gspace.PathSGD(m, 0.01, momentum=0.9),
    "FrozenSkeletonSGD": lambda m: gspace.FrozenSkeletonSGD(m, 0.05, momentum=0.9),
}


def _state(folder: Path) -> Iterator[Kept]:
    """torch's files have no checksum that torch compares: what is still a state is loaded, and steps must not crash."""
    folder.mkdir()
    for name, make in OPTIMIZERS.items():
        path = folder / f"{name}.pt"

        def save(make: Callable[[nn.Module], Any] = make, path: Path = path) -> list[float]:
            optimizer = make(_model())
            after = _step(optimizer)
            torch.save(optimizer.state_dict(), path)
            return after

        def load(make: Callable[[nn.Module], Any] = make, path: Path = path) -> list[float]:
            optimizer = make(_model())
            try:
                state = torch.load(path, weights_only=True)
            except Exception as error:  # noqa: BLE001 - whatever torch says of it
                raise ValueError(f"not loaded: {type(error).__name__}") from None
            optimizer.load_state_dict(state)
            return _step(optimizer)

        assert attempt(told(save), folder).code == 0
        read = told(load)
        yield Kept(f"state of {name}", path, lambda r=read: attempt(r, folder), loose=True)


def _library(folder: Path) -> Iterator[Kept]:
    cache = folder / "gspace"
    cache.mkdir(parents=True, mode=0o700)

    def step() -> Any:
        os.environ["XDG_CACHE_HOME"] = str(folder)
        optimizer = OPTIMIZERS["GSGD"](_model())
        return _step(optimizer), optimizer.statistics()["way"]

    def read() -> Outcome:
        return attempt(told(step), folder)

    first = read()
    if "NativeStep" in first.out:  # there is a compiler
        (path,) = cache.glob("*.so")
        yield Kept("cached library", path, read, rebuilt=True)


def _table(folder: Path) -> Iterator[Kept]:
    folder.mkdir()
    (folder / "model.py").write_text(
        "from torch import nn\n\n\ndef build():\n"
        "    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))\n"
    )
    (folder / "table.json").write_text(json.dumps([["0", ["2"]], ["2", ["4"]]]))
    words = ["mappings", f"{folder / 'model.py'}:build", "--check", str(folder / "table.json")]
    yield Kept("table", folder / "table.json", lambda: attempt(command(words), folder), loose=True)
