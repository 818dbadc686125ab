"""One attempt: a command of `gspace` in a child of this process, with a fault at one of its file operations.

A child is a fork of a process that has imported everything and started no thread, so that it costs no import. The
library that counts operations (`shim.c`) is in front of libc from the start (`preloaded`).
"""

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MODES = ("ENOSPC", "EIO", "kill before", "kill inside", "kill behind")
VARIABLE = "GSPACE_FAULTS"
PRELOAD = "LD_PRELOAD"


@dataclass(frozen=True)
class Fault:
    """What happens at the n-th file operation; who survives that is killed before the `last` one, if there is one."""

    n: int
    mode: str
    last: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: The exit code; negative for a signal.
        out, err: What it wrote.
        operations: File operations below the folder until it ended, if nothing killed it.
    """

    code: int
    out: str
    err: str
    operations: int = 0

    @property
    def refused(self) -> bool:
        """One line for the user, and no traceback."""
        lines = self.err.strip().splitlines()
        return self.code > 0 and len(lines) >= 1 and lines[-1].startswith("gspace: ") and "Traceback" not in self.err

    @property
    def crashed(self) -> bool:
        """A signal that nobody sent, or a traceback."""
        return (self.code < 0 and -self.code != signal.SIGKILL) or "Traceback" in self.err


def preloaded(folder: Path) -> dict[str, str] | None:
    """The environment in which this program must be started again; None if it is the one we are in."""
    if VARIABLE in os.environ:
        return None
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
    return {
        **os.environ,
        VARIABLE: str(library),
        PRELOAD: os.pathsep.join(filter(None, [str(library), os.environ.get(PRELOAD)])),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }


def attempt(
    call: Callable[[], int], folder: Path, fault: Fault | None = None, seconds: float | None = None, limit: float = 1200
) -> Outcome:
    """Runs `call` in a child; with `seconds`, SIGKILL comes after that time. `limit` ends what hangs."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as count:
        child = os.fork()
        if child == 0:
            _child(call, folder, fault, out.fileno(), err.fileno(), count.fileno())
        end, kill = time.monotonic() + limit, None if seconds is None else time.monotonic() + seconds
        while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
            if kill is not None and time.monotonic() > kill:
                os.kill(child, signal.SIGKILL)
                kill = None
            if time.monotonic() > end:
                os.kill(child, signal.SIGABRT)
            time.sleep(0.002)
        texts = []
        for file in (out, err, count):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return Outcome(os.waitstatus_to_exitcode(done[1]), texts[0], texts[1], int(texts[2] or 0))


def _child(call: Callable[[], int], folder: Path, fault: Fault | None, out: int, err: int, count: int) -> None:
    code = 70
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        library = ctypes.CDLL(os.environ[VARIABLE])
        at, mode, last = (fault.n, MODES.index(fault.mode), fault.last) if fault is not None else (0, 0, 0)
        library.faults_arm(str(folder).encode(), ctypes.c_long(at), mode, ctypes.c_long(last))
        code = call()
        os.pwrite(count, str(library.faults_counted()).encode(), 0)
    except BaseException:  # noqa: BLE001 - the parent looks for a traceback
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def command(arguments: Sequence[str]) -> Callable[[], int]:
    from gspace.lab.cli import main

    return lambda: main(list(arguments))


def damaged(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Other bytes than these: one bit flipped, a cut, a hole of zeros, a part twice, or nothing left."""
    while (drawn := _damaged(content, rng))[1] == content:
        pass
    return drawn


def _damaged(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    kind = rng.choice(["flip"] * 6 + ["cut"] * 3 + ["zeros", "twice", "empty"])
    at = rng.randrange(len(content))
    if kind == "flip":
        return kind, content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if kind == "cut":
        return kind, content[:at]
    if kind == "zeros":
        end = min(len(content), at + rng.randint(1, 64))
        return kind, content[:at] + bytes(end - at) + content[end:]
    return kind, content[:at] + content[max(0, at - 40) :] if kind == "twice" else b""
