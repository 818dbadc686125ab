"""Readers of the file formats in which the data sets lie on disk.

A reader takes a folder and returns the four arrays (`x_train, y_train, x_test, y_test`, images `(N, height, width)` or
`(N, height, width, 3)`, labels `(N,)`) with the file each came from, or None if its files are not there. A file that is
there but cannot be read whole ends in a `DataError` that names it.
"""

import gzip
import hashlib
import io
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gspace.lab.errors import DataError, reason

KEYS = ("x_train", "y_train", "x_test", "y_test")

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Raw:
    """Arrays as stored, and the file (or folder) each was read from, for error messages."""

    arrays: Mapping[str, Array]
    source: Mapping[str, Path]


def read_npz(root: Path, *, file: str) -> Raw | None:
    """One `.npz` archive with the four arrays."""
    path = root / file
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [key for key in KEYS if key not in archive.files]
            if missing:
                raise DataError(f"{path} has no array {missing[0]!r}: it holds {', '.join(archive.files) or 'nothing'}")
            arrays = {key: archive[key] for key in KEYS}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged: {reason(error)}") from error
    return Raw(arrays, dict.fromkeys(KEYS, path))


IDX_FILES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


def read_idx(root: Path, *, folder: str) -> Raw | None:
    """The four IDX files of the MNIST family, plain or gzipped; the plain one is read where both are there."""
    candidates = {key: [root / folder / name, root / folder / f"{name}.gz"] for key, name in IDX_FILES.items()}
    paths = {key: next((p for p in both if p.is_file()), None) for key, both in candidates.items()}
    if not any(paths.values()):
        return None
    found: dict[str, Path] = {}
    for key, path in paths.items():
        if path is None:
            raise DataError(
                f"{candidates[key][0]} is missing (nor is there a .gz), but other files of its set are there"
            )
        found[key] = path
    return Raw({key: parse_idx(_bytes(path), path) for key, path in found.items()}, found)


def parse_idx(content: bytes, path: Path) -> Array:
    """An IDX file: two zero bytes, type 8 (uint8), number of dimensions, each as big-endian uint32, then the values."""
    dimensions = content[3] if content[:3] == b"\x00\x00\x08" and len(content) > 3 else 0
    start = 4 + 4 * dimensions
    if dimensions == 0 or len(content) < start:
        raise DataError(f"{path} is not an IDX file of bytes: it begins with {content[:4].hex(' ') or 'nothing'}")
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", dimensions, 4))
    expected = start + int(np.prod(shape, dtype=np.int64))
    if len(content) != expected:
        what = "truncated" if len(content) < expected else "damaged"
        raise DataError(f"{path} is {what}: {len(content)} bytes, but its header announces {expected}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


@dataclass(frozen=True)
class Pickles:
    """The pickled batches of one CIFAR set.

    Attributes:
        folder: Where they lie, below the data folder.
        train: File name and MD5 of each training batch, in order.
        test: The same for the test batch.
        label: Key of the labels inside.
    """

    folder: str
    train: tuple[tuple[str, str], ...]
    test: tuple[tuple[str, str], ...]
    label: str


def read_pickles(root: Path, *, layout: Pickles) -> Raw | None:
    """CIFAR's Python batches; rows are 3 planes of 32 × 32, returned as `(N, 32, 32, 3)`."""
    folder = root / layout.folder
    if not folder.is_dir():
        return None
    arrays: dict[str, Array] = {}
    for part, files in (("train", layout.train), ("test", layout.test)):
        batches = [_batch(folder / name, md5, layout.label) for name, md5 in files]
        rows = np.concatenate([x for x, _ in batches])
        arrays[f"x_{part}"] = rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays[f"y_{part}"] = np.concatenate([y for _, y in batches])
    return Raw(arrays, dict.fromkeys(KEYS, folder))


def _batch(path: Path, md5: str, label: str) -> tuple[Array, Array]:
    if not path.is_file():
        raise DataError(f"{path} is missing, but other files of its set are there")
    content = _bytes(path)
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:  # nothing else is unpickled
        raise DataError(f"{path} is damaged: its MD5 is not {md5}")
    entry = unpickle(content, path)
    rows, labels = entry.get(b"data"), np.asarray(entry.get(label.encode()))
    if not isinstance(rows, _Pixels) or rows.array.shape != (*labels.shape, 3072):
        raise DataError(f"{path} is not a CIFAR batch: it has no rows of 3072 pixels with a label each")
    return rows.array, labels


class _Uint8:
    """Stands for `numpy.dtype`: bytes, and nothing else."""

    def __init__(self, name: bytes | str, *flags: int) -> None:
        if name not in (b"u1", "u1"):
            raise pickle.UnpicklingError(f"an array of {name!r}, not of bytes")

    def __setstate__(self, state: object) -> None:
        """Byte order and fields, of which a byte has none."""


class _Pixels:
    """Stands for `numpy.ndarray`: numpy's own takes any bytes for pointers to objects, if a file says so."""

    array: Array = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Uint8, bool, bytes]) -> None:
        _, shape, _, fortran, content = state
        self.array = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


# All that the published batches name, with what is made of it here.
_ALLOWED: Mapping[tuple[str, str], Any] = {
    ("numpy", "dtype"): _Uint8,
    ("numpy", "ndarray"): _Pixels,
    ("numpy.core.multiarray", "_reconstruct"): lambda kind, shape, code: _Pixels(),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data file needs")
        return _ALLOWED[module, name]


def unpickle(content: bytes, path: Path) -> dict[bytes, Any]:
    """A pickled dictionary of byte arrays and lists. No function is called that is not of this module."""
    try:
        entry = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise DataError(f"{path} is refused or damaged: {reason(error)}") from error
    if not isinstance(entry, dict):
        raise DataError(f"{path} is not a CIFAR batch: it holds a {type(entry).__name__}")
    return entry


def _bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or unreadable: {reason(error)}") from error
