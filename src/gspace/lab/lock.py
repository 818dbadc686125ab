"""A lock on a file that the operating system holds: it ends with the process, however the process ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gspace.lab.errors import BusyError


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock on `path`, or raises `BusyError` at once if another process holds it.

    The file stays when the lock is released: deleting it would let two processes lock two files of one name. Its text,
    the holder's process id, is for the reader of an error message; the lock does not depend on it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            raise BusyError(f"{path.parent} is in use by process {holder or '?'}: wait for it or stop it") from error
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
