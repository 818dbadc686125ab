"""Run folders: what a run was, where it ran, what it measured, and the state it can be continued from.

| file | written | holds |
|---|---|---|
| `recipe.json` | once, first | the recipe |
| `environment.json` | at each start | versions, device and options of every session that worked on the run |
| `metrics.jsonl` | one line at a time | the curve; a line is a JSON object with `iteration` |
| `checkpoint` | every minute or so | weights, optimizer, random state, position; with its SHA-256 |
| `summary.json` | once, last | the result; its presence means the run is finished |

Whole files are written beside their place and renamed, so a reader sees the old or the new one, never a part. A line
that was being written when the process died is not a line. One process works on a folder at a time.
"""

import hashlib
import io
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from gspace.lab.errors import RecipeError, RecordError
from gspace.lab.lock import locked
from gspace.lab.recipe import Recipe

RECIPE, ENVIRONMENT, METRICS, CHECKPOINT, SUMMARY, LOCK = (
    "recipe.json",
    "environment.json",
    "metrics.jsonl",
    "checkpoint",
    "summary.json",
    ".lock",
)
_MAGIC = b"gspace-checkpoint-1\n"

Line = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run folder that this process holds the lock of."""

    folder: Path
    recipe: Recipe

    @property
    def summary(self) -> Line | None:
        """The result, if the run is finished."""
        return read_summary(self.folder)

    @property
    def metrics(self) -> list[Line]:
        return _read_lines(self.folder / METRICS)

    def begin(self, environment: Mapping[str, Any]) -> None:
        """Adds a session to `environment.json`."""
        path = self.folder / ENVIRONMENT
        sessions = (_read_json(path, {"sessions": list}) or {"sessions": []})["sessions"]
        write_json(path, {"sessions": [*sessions, dict(environment)]})

    def rewind(self, iteration: int) -> None:
        """Forgets the points of the curve after `iteration`: they will be measured again."""
        lines = [line for line in self.metrics if line["iteration"] <= iteration]
        write_atomic(self.folder / METRICS, "".join(map(_line, lines)).encode())

    def append(self, line: Mapping[str, Any]) -> None:
        """Adds one point of the curve; it outlives the process at once, the machine from the next checkpoint on."""
        with _writing(self.folder / METRICS), (self.folder / METRICS).open("a") as file:
            file.write(_line(line))

    def sync(self) -> None:
        """The curve, as far as it is written, outlives the machine."""
        with _writing(self.folder / METRICS), (self.folder / METRICS).open("a") as file:
            os.fsync(file.fileno())

    def save(self, state: Mapping[str, Any]) -> None:
        """Replaces the checkpoint, once the curve up to it is safe."""
        self.sync()
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        payload = buffer.getbuffer()
        write_atomic(self.folder / CHECKPOINT, _MAGIC, hashlib.sha256(payload).digest(), payload)

    def load(self) -> dict[str, Any] | None:
        """The checkpoint, on the CPU; None if there is none yet."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return None
        content = path.read_bytes()
        start = len(_MAGIC) + hashlib.sha256().digest_size
        payload = content[start:]
        if content[:start] != _MAGIC + hashlib.sha256(payload).digest():
            raise RecordError(f"{path} is damaged (SHA-256 differs): delete it to start this run again")
        state: dict[str, Any] = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        return state

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes the result; the run is finished."""
        write_json(self.folder / SUMMARY, summary)


def make_folder(path: Path) -> None:
    """Makes the folder if need be; one error for all runs that were to be written below it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def open_run(out: Path, recipe: Recipe) -> Iterator[Run]:
    """The recipe's folder below `out`, made if need be, locked until the end of the block."""
    folder = out / recipe.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = locked(folder / LOCK)
        lock.__enter__()
    except OSError as error:
        raise RecordError(f"cannot write {folder}: {error.strerror or error}") from error
    try:
        run = Run(folder, recipe)
        for left in folder.glob("*.part"):  # by a process that was killed while it wrote
            left.unlink(missing_ok=True)
        path = folder / RECIPE
        if not path.exists():
            write_json(path, recipe.to_dict())
        elif _recipe(path) != recipe:
            raise RecordError(f"{path} is another recipe's: choose another folder for this run")
        yield run
    finally:
        lock.__exit__(None, None, None)


@dataclass(frozen=True)
class Record:
    """What a reader finds in a run folder, at any moment of the run."""

    folder: Path
    recipe: Recipe
    sessions: tuple[Line, ...]
    metrics: tuple[Line, ...]
    summary: Line | None


def read_summary(folder: Path) -> Line | None:
    """The result in a run folder; None if the run is not finished, or not begun."""
    return _read_json(folder / SUMMARY, {"status": str})


def read_run(folder: Path) -> Record:
    """A run folder, finished or not, locked or not."""
    path = folder / RECIPE
    if not path.is_file():
        raise RecordError(f"{folder} is no run folder: it has no {RECIPE}")
    environment = _read_json(folder / ENVIRONMENT, {"sessions": list}) or {"sessions": []}
    return Record(
        folder=folder,
        recipe=_recipe(path),
        sessions=tuple(environment["sessions"]),
        metrics=tuple(_read_lines(folder / METRICS)),
        summary=read_summary(folder),
    )


def environment(**options: Any) -> Line:
    """Where and with what a session runs."""
    import gspace

    cuda = torch.cuda.is_available()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "gspace": gspace.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        **options,
    }


def commit() -> str | None:
    """Commit of the source this runs from, "+" if files were changed since; None outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def finite(value: float) -> float | None:
    """`value`, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomic(path, (json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode())


def write_atomic(path: Path, *chunks: bytes | memoryview) -> None:
    """`path` holds either what it held or all of `chunks`, whatever happens in between."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")  # several processes may write a report
    with _writing(path):
        try:
            with temporary.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror or error}; what was recorded before is intact"
        ) from error


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"


def _read_json(path: Path, needs: Mapping[str, type] = MappingProxyType({})) -> Line | None:
    """The object in a file, which has these fields; None if there is no file."""
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise RecordError(f"{path} cannot be read: it holds no JSON object")
    for name, kind in needs.items():
        if not isinstance(value.get(name), kind):
            raise RecordError(f"{path} cannot be read: it holds no {name!r}")
    return value


def _read_lines(path: Path) -> list[Line]:
    """The whole lines of a file to which a process may be writing, or was when it died."""
    if not path.exists():
        return []
    lines: Sequence[bytes] = path.read_bytes().split(b"\n")[:-1]
    try:
        found = [json.loads(line) for line in lines]
    except ValueError as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
    if not all(isinstance(line, dict) and "iteration" in line for line in found):
        raise RecordError(f"{path} cannot be read: a line of it is no point of a curve")
    return found


def _recipe(path: Path) -> Recipe:
    try:
        return Recipe.from_dict(_read_json(path) or {})
    except RecipeError as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
