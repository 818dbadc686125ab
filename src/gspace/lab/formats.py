"""Readers of the file formats in which the data sets lie on disk. None of them runs code out of a file.

A reader takes a folder and returns the four arrays (`x_train, y_train, x_test, y_test`, images `(N, height, width)` or
`(N, height, width, 3)`, labels `(N,)`) with the file each came from, or None if its files are not there. A file that is
there but cannot be read whole ends in a `DataError` that names it.
"""

import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gspace.lab.errors import DataError, reason

KEYS = ("x_train", "y_train", "x_test", "y_test")
PIXELS = 3 * 32 * 32  # of an image of CIFAR

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Raw:
    """Arrays as stored, and the file each was read from, for error messages."""

    arrays: Mapping[str, Array]
    source: Mapping[str, Path]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, EOFError, LookupError, zipfile.BadZipFile, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{path} is damaged: {reason(error)}") from error


def read_npz(root: Path, *, file: str) -> Raw | None:
    """One `.npz` archive with the four arrays."""
    path = root / file
    if not path.is_file():
        return None
    with _reading(path), np.load(path, allow_pickle=False) as archive:
        missing = [key for key in KEYS if key not in archive.files]
        if missing:
            raise DataError(f"{path} has no array {missing[0]!r}: it holds {', '.join(archive.files) or 'nothing'}")
        return Raw({key: archive[key] for key in KEYS}, dict.fromkeys(KEYS, path))


IDX_FILES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


def read_idx(root: Path, *, folder: str) -> Raw | None:
    """The four IDX files of the MNIST family, plain or gzipped; the plain one is read where both are there."""
    candidates = {key: [root / folder / name, root / folder / f"{name}.gz"] for key, name in IDX_FILES.items()}
    found = {key: path for key, both in candidates.items() for path in reversed(both) if path.is_file()}
    missing = [both[0] for key, both in candidates.items() if key not in found]
    if not found:
        return None
    if missing:
        raise DataError(f"{missing[0]} is missing (nor is there a .gz), but other files of its set are there")
    return Raw({key: _idx(path) for key, path in found.items()}, found)


def _idx(path: Path) -> Array:
    """An IDX file: two zero bytes, type 8 (uint8), number of dimensions, each as big-endian uint32, then the values."""
    with _reading(path):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if content[:3] != b"\x00\x00\x08":
            raise ValueError(f"no IDX file of bytes begins with {content[:4].hex(' ') or 'nothing'}")
        shape = np.frombuffer(content, ">u4", content[3], 4).astype(int)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


def read_cifar(root: Path, *, file: str, labels: int) -> Raw | None:
    """The archive of CIFAR's binary version: each image is some labels, the last of which counts, and 3 planes."""
    path = root / file
    if not path.is_file():
        return None
    arrays: dict[str, Array] = {}
    with _reading(path), tarfile.open(path) as archive:
        members = sorted((m for m in archive.getmembers() if m.name.endswith(".bin")), key=lambda member: member.name)
        for part in ("train", "test"):
            files = [archive.extractfile(m) for m in members if ("test" in m.name) == (part == "test")]
            rows = np.frombuffer(b"".join(file.read() for file in files if file), np.uint8)
            rows = rows.reshape(-1, labels + PIXELS)
            arrays[f"x_{part}"] = rows[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            arrays[f"y_{part}"] = rows[:, labels - 1]
    return Raw(arrays, dict.fromkeys(KEYS, path))
