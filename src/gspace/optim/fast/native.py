"""Runs the passes of `kernels.c` on a CPU: compiled where there is a C compiler, once, and kept in the user's cache.

A step is one call. It reads the same tables as the kernels for GPUs (`tables.py`) and gives the same result whatever
the number of threads.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

import torch

try:
    import fcntl
except ImportError:  # Windows: every process may build for itself
    fcntl = None  # type: ignore[assignment]

from gspace.optim.built import Built
from gspace.optim.eager import Rules
from gspace.optim.fast.network import Bound, Given, Kind, Outcome, depths, hyper_parameters
from gspace.optim.fast.tables import LAYOUT, Tile

REAL = {torch.float32: "float", torch.float64: "double"}
# Products are rounded before they are added: what an optimizer leaves alone must come back to the bit.
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-shared"]
THREADS = [["-fopenmp"], ["-fopenmp-simd"], []]  # the first that the compiler understands
WORK = 1 << 15  # weights that are worth a thread

# What the passes are told of a network: types in C, and names.
PLAN = {
    "const int64_t *": "params folds free roots skeleton".split(),
    "const int32_t *": "chunks units lists root order".split(),
    "const double *": ["reference"],
    "REAL *": "partial norms sums factors root_grad coordinates ratio raw".split(),
    "double *": ["products"],
    "int64_t ": "n_chunks n_folds n_roots n_units slots normalized spread threads".split(),
    "double ": "max_ratio max_drift".split(),
}
_TYPES: dict[str, Any] = {"int64_t ": ctypes.c_int64, "double ": ctypes.c_double}


class _Plan(ctypes.Structure):
    _fields_ = [(name, _TYPES.get(kind, ctypes.c_void_p)) for kind, names in PLAN.items() for name in names]


def _cache() -> Path | None:
    """A folder that only this user can write to, None if there is none."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gspace"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        info = folder.stat()
        own = not hasattr(os, "getuid") or (info.st_uid == os.getuid() and not info.st_mode & 0o022)
        return folder if own and os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):  # a RuntimeError says that there is no home
        return None


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))}))
    except OSError:
        return platform.platform() + platform.processor()


def _layout() -> str:
    """For C: the plan; indices into records and tables, the names of each in their order, and how many there are."""
    plan = "".join(f"{kind}{name}; " for kind, names in PLAN.items() for name in names)
    enums = (", ".join(map(str.upper, [*fields, table])) for table, fields in LAYOUT.items())
    lines = [f"typedef struct {{ {plan}}} Plan;", *(f"enum {{ {names} }};" for names in enums)]
    return "\n".join(["#include <stdint.h>", *lines, ""])


@functools.cache
def library(real: str) -> ctypes.CDLL | str:
    """The compiled passes for "float" or "double", or why there are none. They are built, or it is told, once."""
    compiler = next(filter(None, map(shutil.which, filter(None, [os.environ.get("CC"), "cc", "gcc", "clang"]))), None)
    if compiler is None:
        return "no C compiler was found (CC, cc, gcc, clang)"
    try:
        found = _found_or_built(real, compiler)
        for call in (found.step, found.show, found.give):
            call.argtypes, call.restype = [ctypes.c_void_p] * 3, ctypes.c_int
        return found
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        reason = " ".join(f"the compiled step could not be built with {compiler}: {error}".split())
        warnings.warn(f"{reason}. torch's operations take its place, which is slower.", RuntimeWarning, stacklevel=2)
        return reason


def _found_or_built(real: str, compiler: str) -> ctypes.CDLL:
    source = _layout() + resources.files("gspace.optim.fast").joinpath("kernels.c").read_text()
    key = hashlib.sha256("\0".join([source, real, compiler, _processor(), *FLAGS]).encode()).hexdigest()[:16]
    folder = _cache()
    if folder is not None:
        try:
            with _locked(folder):
                return _kept(folder, f"kernels-{real}-{key}", source, real, compiler)
        except OSError:  # the disk is full, perhaps: what follows needs another one
            pass
    with tempfile.TemporaryDirectory(prefix="gspace-") as alone:
        return ctypes.CDLL(str(_built(Path(alone), source, real, compiler)))  # it may go once it is loaded


def _kept(folder: Path, name: str, source: str, real: str, compiler: str) -> ctypes.CDLL:
    """The library in the cache, whose name ends in the digest of what it holds; what does not fit is built again."""
    for path in folder.glob(f"{name}-*.so"):
        if path.stem.rpartition("-")[2] == _digest(path):
            with suppress(OSError):
                return ctypes.CDLL(str(path))
        path.unlink()
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as work:
        made = _built(Path(work), source, real, compiler)
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        return ctypes.CDLL(str(made.replace(folder / f"{name}-{_digest(made)}.so")))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process builds, the others wait; whoever holds the lock clears away what a killed build has left."""
    with (folder / "lock").open("a") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
            for left in folder.glob("build-*"):
                shutil.rmtree(left, ignore_errors=True)
        yield


def _built(work: Path, source: str, real: str, compiler: str) -> Path:
    text, made = work / "kernels.c", work / "kernels.so"
    text.write_text(source)
    done = None
    for more in THREADS:
        command = [compiler, *FLAGS, *more, f"-DREAL={real}", str(text), "-o", str(made), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode == 0 and made.exists():
            return made
    raise subprocess.SubprocessError(done.stderr.strip()[-500:] if done and done.stderr.strip() else "it made nothing")


class NativeStep(Bound):
    """A step by the compiled passes."""

    TILE = Tile(rows=256, width=8192, loops=1, fold=64)  # of a large weight, what one core works on at a time

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.library = library(REAL[self.dtype])
        t = self.tables
        self.order = depths(t.skeleton[:, -1]).argsort(stable=True).int()  # nearest to ground first
        self.products = torch.ones(len(self.order), dtype=torch.float64, device="cpu")
        tensors = {**vars(self), **t._asdict()}
        self.plan = _Plan(
            **{name: tensors[name].data_ptr() for kind, names in PLAN.items() if "*" in kind for name in names},
            n_chunks=len(t.chunks),
            n_folds=len(t.folds),
            n_roots=len(t.roots),
            n_units=len(self.root),
            slots=len(self.parameters),
            normalized=self.normalized,
            spread=self.spread,
            max_ratio=self.max_ratio,
            max_drift=self.max_drift,
        )
        self.address = ctypes.addressof(self.plan)
        self.most_threads = max(1, sum(p.numel() for p in self.parameters) // WORK)

    @classmethod
    def refusal(cls, built: Built, rules: Rules, tile: Tile | None = None) -> str | None:
        dtype, kind = built.weights[0].dtype, built.weights[0].device.type
        if dtype not in REAL or kind != "cpu":
            return f"no compiled step for {dtype} on {kind}"
        found = library(REAL[dtype])
        return found if isinstance(found, str) else super().refusal(built, rules, tile)

    def _take(self, kind: Kind, given: Given) -> Outcome:
        header = array("q", given.places)
        hyper = hyper_parameters(given.groups, read=True)
        self.plan.threads = min(torch.get_num_threads(), self.most_threads)
        function = getattr(self.library, kind)
        return Outcome(function(self.address, header.buffer_info()[0], hyper.buffer_info()[0]))
