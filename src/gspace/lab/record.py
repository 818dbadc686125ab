"""Run folders: what a run was, where it ran, what it measured, and the state it can be continued from.

| file | written | holds |
|---|---|---|
| `recipe.json` | once, first | the recipe |
| `environment.json` | at each start | versions, device and options of every session that worked on the run |
| `metrics.jsonl` | one line at a time | the curve; a line is a JSON object with `iteration` |
| `checkpoint` | every minute or so | weights, optimizer, random state, position; with its SHA-256 |
| `summary.json` | once, last | the result; its presence means the run is finished |

Whole files are written beside their place and renamed, so a reader sees the old or the new one, never a part. A line
that was being written when the process died is not a line. One process works on a folder at a time. What is written
carries a digest, the SHA-256 of an object as JSON and of the run that it belongs to, and a checkpoint the names of its
runs: files of another run are refused. Every reader goes through the same checks.
"""

import hashlib
import io
import json
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock, Timeout

import gspace
from gspace.lab.errors import BusyError, RecordError, reason
from gspace.lab.recipe import Recipe

NAMES = "recipe.json environment.json metrics.jsonl checkpoint summary.json"
RECIPE, ENVIRONMENT, METRICS, CHECKPOINT, SUMMARY = NAMES.split()
_MAGIC = b"gspace-checkpoint-1\n"
_FOLDER = re.compile(r"[\w-]+-seed\d+-[0-9a-f]{12}")
T = TypeVar("T")
Json = dict[str, Any]  # an object of a file

# What a record may hold: a ValueError says what is wrong, whoever reads the file names it. ----------------------------

COLUMNS = ("iteration", "train_loss", "train_error", "test_loss", "test_error")  # the rest follows from the recipe
POINT = {*COLUMNS, "epoch", "lr", "seconds"}
NEEDED = ("status", "identity", "iteration", "iterations", "test_error")
ENDED = {*POINT, *NEEDED, "stacked", "best_test_error", "fit_loss", "fit_error"}
ENDED |= {"images_per_second", "wall_seconds", "overhead_seconds"}
DIGEST = "digest"


def _fits(name: str, value: Any) -> bool:
    """Whether a field can have this value: a name, a count, a share, a time, or a loss, null if it is not finite."""
    if name in ("status", "identity"):
        return isinstance(value, str) if name == "identity" else value in ("finished", "diverged")
    if name.endswith("_loss") and value is None:
        return True
    kinds = (int,) if name in ("iteration", "iterations", "stacked") else (int, float)
    if type(value) not in kinds or not math.isfinite(value):
        return False
    return name.endswith("_loss") or 0 <= value <= (1 if name.endswith("_error") else math.inf)


def _check(value: Json, known: Collection[str], needed: Sequence[str], empty: Collection[str] = ()) -> None:
    for name in needed:
        if name not in value:
            raise ValueError(f"it has no {name!r}")
    for name, entry in value.items():
        if name not in known:
            raise ValueError(f"{name!r} is no field of a record")
        if entry is not None if name in empty else not _fits(name, entry):
            raise ValueError(f"{name} is {entry!r}")


def check_summary(summary: Json, recipe: Recipe) -> Json:
    """The end of a run of this recipe."""
    _check(summary, ENDED, NEEDED, ("test_error",) if summary.get("status") == "diverged" else ())
    if summary["identity"] != recipe.identity:
        raise ValueError(f"it is the end of run {summary['identity']}, not of {recipe.folder}")
    return summary


def check_sessions(sessions: Any) -> tuple[Json, ...]:
    if not isinstance(sessions, list) or not all(isinstance(one, dict) for one in sessions):
        raise ValueError("it has no list of sessions")
    return tuple(sessions)


def check_curve(points: Sequence[Json]) -> tuple[Json, ...]:
    for point in points:
        _check(point, POINT, COLUMNS)
    iterations = [point["iteration"] for point in points]
    if iterations != sorted(set(iterations)):
        raise ValueError("the points of its curve are not in order")
    return tuple(points)


def parsed(content: bytes) -> Json:
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def sealed(value: Mapping[str, Any], identity: str) -> Json:
    """With the digest that makes it a part of the run."""
    text = json.dumps(value, sort_keys=True, allow_nan=False)
    return {**value, DIGEST: hashlib.sha256(f"{identity} {text}".encode()).hexdigest()[:16]}


def unsealed(value: Json, identity: str) -> Json:
    """Without its digest, once that is compared."""
    rest = {name: entry for name, entry in value.items() if name != DIGEST}
    if DIGEST not in value:
        raise ValueError("it has no digest: it was written before gspace 0.2")
    if value[DIGEST] != sealed(rest, identity)[DIGEST]:
        raise ValueError("its digest differs: it was changed, or is another run's")
    return rest


# Run folders ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run folder. Who writes there holds its lock (`open_run`)."""

    folder: Path
    recipe: Recipe

    @property
    def summary(self) -> Json | None:
        """The result; None if the run is not finished, or not begun."""
        return _read(self.folder / SUMMARY, lambda content: check_summary(self._opened(content), self.recipe))

    @property
    def metrics(self) -> tuple[Json, ...]:
        """The whole lines of a file to which a process may be writing, or was when it died."""
        return _read(self.folder / METRICS, self._curve) or ()

    @property
    def sessions(self) -> tuple[Json, ...]:
        """Where and with what it was computed, oldest first."""
        found = _read(self.folder / ENVIRONMENT, lambda content: check_sessions(self._opened(content).get("sessions")))
        return found or ()

    def _curve(self, content: bytes) -> tuple[Json, ...]:
        return check_curve([self._opened(line) for line in content.split(b"\n")[:-1]])

    def _opened(self, content: bytes) -> Json:
        return unsealed(parsed(content), self.recipe.identity)

    def begin(self, environment: Mapping[str, Any]) -> None:
        sessions = [*self.sessions, dict(environment)]
        write_json(self.folder / ENVIRONMENT, sealed({"sessions": sessions}, self.recipe.identity))

    def rewind(self, iteration: int) -> None:
        """Forgets the points of the curve after `iteration`: they will be measured again."""
        lines = [line for line in self.metrics if line["iteration"] <= iteration]
        write_atomic(self.folder / METRICS, "".join(map(self._line, lines)).encode())

    def append(self, line: Mapping[str, Any]) -> None:
        """Adds one point of the curve; it outlives the process at once, the machine from the next checkpoint on."""
        with _writing(self.folder / METRICS), (self.folder / METRICS).open("a") as file:
            file.write(self._line(line))

    def _line(self, point: Mapping[str, Any]) -> str:
        return json.dumps(sealed(point, self.recipe.identity), allow_nan=False) + "\n"

    def sync(self) -> None:
        """The curve, as far as it is written, outlives the machine."""
        with _writing(self.folder / METRICS), (self.folder / METRICS).open("a") as file:
            os.fsync(file.fileno())

    def save(self, state: Mapping[str, Any]) -> None:
        """Replaces the checkpoint, once the curve up to it is safe."""
        self.sync()
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        with buffer.getbuffer() as payload:  # one left in a traceback crashes Python 3.12 at its end
            write_atomic(self.folder / CHECKPOINT, _MAGIC, hashlib.sha256(payload).digest(), payload)

    def load(self) -> dict[str, Any] | None:
        """The checkpoint, on the CPU; None if there is none yet. It names its kind and, as members, its runs."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return None
        content = path.read_bytes()
        start = len(_MAGIC) + hashlib.sha256().digest_size
        payload = content[start:]
        if content[:start] != _MAGIC + hashlib.sha256(payload).digest():
            raise RecordError(f"{path} is damaged (SHA-256 differs): delete it to start this run again")
        try:
            state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
            members = list(state["members"])
            plain = isinstance(state["kind"], str) and all(map(_FOLDER.fullmatch, members))
        except Exception as error:  # nearly anything; torch's message would advise to load it unsafely
            message = f"{path} holds no state of a run alone and is not loaded: delete it to start this run again"
            raise RecordError(message) from error
        if not plain or self.folder.name not in members:
            other = f"{path} is that of another run ({', '.join(members)})"
            raise RecordError(f"{other}: delete it to start this run again")
        return dict(state)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes the result, once the curve is safe; the run is finished."""
        self.sync()
        write_json(self.folder / SUMMARY, sealed(summary, self.recipe.identity))


def make_folder(path: Path) -> None:
    """Makes the folder if need be; one error for all runs that were to be written below it."""
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def open_run(out: Path, recipe: Recipe) -> Iterator[Run]:
    """The recipe's folder below `out`, made if need be, locked until the end of the block."""
    folder = out / recipe.folder
    make_folder(folder)
    with _writing(folder):
        try:
            lock = FileLock(folder / ".lock", timeout=0).acquire()
        except Timeout as error:
            raise BusyError(f"{folder} is in use by another process: wait for it or stop it") from error
    with lock:
        for left in folder.glob("*.part"):  # by a process that was killed while it wrote
            left.unlink(missing_ok=True)
        path = folder / RECIPE
        if not path.exists():
            write_json(path, recipe.to_dict())
        elif _read(path, _recipe) != recipe:
            raise RecordError(f"{path} is another recipe's: choose another folder for this run")
        yield Run(folder, recipe)


@dataclass(frozen=True)
class Record:
    """What a reader finds in a run folder, at any moment of the run."""

    recipe: Recipe
    sessions: tuple[Json, ...]
    metrics: tuple[Json, ...]
    summary: Json | None

    @classmethod
    def checked(cls, recipe: Recipe, sessions: Any, points: Sequence[Json], summary: Json | None) -> "Record":
        """As it was read; the curve of a run that has ended must end where its summary says."""
        if summary is not None:
            check_summary(summary, recipe)
            last = points[-1] if points else {}
            for name in ("iteration", "test_error") if summary["status"] == "finished" else ("iteration",):
                if last.get(name) != summary[name]:
                    raise ValueError(f"its curve ends with {name} {last.get(name)}, its summary has {summary[name]}")
        return cls(recipe, check_sessions(sessions), check_curve(points), summary)


def read_run(folder: Path) -> Record:
    """A run folder, finished or not, locked or not."""
    recipe = _read(folder / RECIPE, _recipe)
    if recipe is None:
        raise RecordError(f"{folder} is no run folder: it has no {RECIPE}")
    if recipe.folder != folder.resolve().name:
        raise RecordError(f"{folder / RECIPE} is that of another run, {recipe.folder}")
    run = Run(folder, recipe)
    summary = run.summary  # before the curve: once it is there, the curve is whole
    try:
        return Record.checked(recipe, list(run.sessions), run.metrics, summary)
    except ValueError as error:
        raise RecordError(f"{folder / METRICS} is not that of {SUMMARY}: {error}") from error


def environment(**options: Any) -> Json:
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
    told = ["describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    git = ["git", "-C", str(Path(__file__).parent), *told]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def finite(value: float) -> float | None:
    """`value`, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomic(path, (json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode())


def write_atomic(path: Path, *chunks: bytes | memoryview) -> None:
    """`path` holds either what it held or all of `chunks`, whatever happens in between."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")  # several processes may write a report
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
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
        why = error.strerror or error
        raise RecordError(f"cannot write {path}: {why}; what was recorded before is intact") from error


def _read(path: Path, parse: Callable[[bytes], T]) -> T | None:
    if not path.exists():
        return None
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read: {reason(error)}") from error


def _recipe(content: bytes) -> Recipe:
    return Recipe.from_dict(parsed(content))
