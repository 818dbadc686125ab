"""The data sets of the experiments behind one function, `load`: checked, as tensors, on the device.

A set is looked for as `NAME.npz`, in the folders torchvision leaves (`MNIST/raw`, `FashionMNIST/raw`), and as the
archive of its binary version (`cifar-10-binary.tar.gz`), below `data_dir`, else `$GSPACE_DATA`, else `~/.cache/gspace`.
Whatever the format, the pixels are compared with the published set's SHA-256 before anything is trained on them.
No reader runs code out of a file.
"""

import gzip
import hashlib
import json
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gspace.lab.display import DownloadBar
from gspace.lab.errors import DataError, RequestError, reason
from gspace.lab.seeds import generator

KEYS = ("x_train", "y_train", "x_test", "y_test")
IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
IDX_FILES = dict(zip(KEYS, IDX_NAMES, strict=True))
PIXELS = 3 * 32 * 32  # of an image of CIFAR

Folder = str | os.PathLike[str] | None
Device = torch.device | str
Array = np.ndarray[Any, np.dtype[Any]]
Raw = Mapping[str, tuple[Array, Path]]  # the four arrays as stored, each with the file it was read from
Reader = Callable[[Path], Raw | None]  # None if its files are not in the folder


@dataclass(frozen=True)
class DataSet:
    """Images and labels of one data set, all on one device."""

    name: str
    x_train: Tensor  # pixels, uint8 `(N, channel, height, width)`
    y_train: Tensor  # int64 `(N,)`
    x_test: Tensor
    y_test: Tensor
    white: float  # the pixel value that means 1
    mean: Tensor  # per channel over the training images, of pixels in [0, 1]
    std: Tensor

    def to(self, device: Device) -> "DataSet":
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


class Remote(NamedTuple):
    """One file to download: where it is, its SHA-256, and where it belongs below the data folder."""

    url: str
    sha256: str
    path: str


@dataclass(frozen=True)
class Published:
    """What a published data set must look like."""

    shape: tuple[int, ...]  # of one stored image
    train: int  # number of images
    test: int
    classes: int
    readers: tuple[Reader, ...]  # the formats it may lie in, tried in order
    sha256: Mapping[str, str] = field(default_factory=dict)  # of each array's bytes; one without is not compared
    remotes: tuple[Remote, ...] = ()  # where it can be downloaded
    white: float = 255.0


# Formats --------------------------------------------------------------------------------------------------------------


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, EOFError, LookupError, zipfile.BadZipFile, zlib.error, tarfile.TarError) as error:
        raise DataError(f"{path} is damaged: {reason(error)}") from error


def read_npz(root: Path, *, file: str) -> Raw | None:
    path = root / file
    if not path.is_file():
        return None
    with _reading(path), np.load(path, allow_pickle=False) as archive:
        missing = [key for key in KEYS if key not in archive.files]
        if missing:
            raise DataError(f"{path} has no array {missing[0]!r}: it holds {', '.join(archive.files) or 'nothing'}")
        return {key: (archive[key], path) for key in KEYS}


def read_idx(root: Path, *, folder: str) -> Raw | None:
    """The four IDX files of the MNIST family, plain or gzipped; the plain one is read where both are there."""
    candidates = {key: [root / folder / name, root / folder / f"{name}.gz"] for key, name in IDX_FILES.items()}
    found = {key: path for key, both in candidates.items() for path in reversed(both) if path.is_file()}
    missing = [both[0] for key, both in candidates.items() if key not in found]
    if not found:
        return None
    if missing:
        raise DataError(f"{missing[0]} is missing (nor is there a .gz), but other files of its set are there")
    return {key: (_idx(path), path) for key, path in found.items()}


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
    raw: dict[str, tuple[Array, Path]] = {}
    with _reading(path), tarfile.open(path) as archive:
        members = sorted((m for m in archive.getmembers() if m.name.endswith(".bin")), key=lambda member: member.name)
        for part in ("train", "test"):
            found = [archive.extractfile(m) for m in members if ("test" in m.name) == (part == "test")]
            rows = np.frombuffer(b"".join(file.read() for file in found if file), np.uint8)
            rows = rows.reshape(-1, labels + PIXELS)
            raw[f"x_{part}"] = rows[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), path
            raw[f"y_{part}"] = rows[:, labels - 1], path
    return raw


def read_digits(root: Path) -> Raw | None:
    """scikit-learn's bundled digits, 8 × 8 with values 0 to 16; every fifth image is a test image."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits come with scikit-learn: pip install scikit-learn") from error
    bunch = load_digits()
    x, y = bunch.images.astype(np.uint8), bunch.target.astype(np.uint8)
    test = np.arange(len(y)) % 5 == 4
    arrays = (x[~test], y[~test], x[test], y[test])
    return {key: (array, Path("scikit-learn's digits")) for key, array in zip(KEYS, arrays, strict=True)}


def _published() -> Iterator[tuple[str, Published]]:
    """The digits, and what `sets.json` says of the others."""
    formats: dict[str, Callable[..., Raw | None]] = {"idx": read_idx, "cifar": read_cifar}
    yield "digits", Published((8, 8), 1438, 359, 10, (read_digits,), white=16.0)
    for name, facts in json.loads((files("gspace.lab") / "sets.json").read_text()).items():
        readers = partial(read_npz, file=f"{name}.npz"), partial(formats[facts.pop("format")], **facts.pop("where"))
        remotes = tuple(Remote(**remote) for remote in facts.pop("remotes"))
        yield name, Published(tuple(facts.pop("shape")), readers=readers, remotes=remotes, **facts)


Sets = Mapping[str, Published]
SETS: Sets = dict(_published())


# From files to tensors ------------------------------------------------------------------------------------------------


def read(name: str, spec: Published, root: Path) -> DataSet | None:
    """The data set as the first reader finds it below `root`, verified; None if no reader does."""
    raw = next((raw for reader in spec.readers if (raw := reader(root)) is not None), None)
    if raw is None:
        return None
    arrays = {key: _verified(key, spec, *stored) for key, stored in raw.items()}
    stored = (arrays[key] if arrays[key].ndim == 4 else arrays[key][..., None] for key in ("x_train", "x_test"))
    x_train, x_test = (np.ascontiguousarray(images.transpose(0, 3, 1, 2)) for images in stored)
    y_train, y_test = (torch.tensor(arrays[key], dtype=torch.int64) for key in ("y_train", "y_test"))
    images = torch.tensor(x_train), y_train, torch.tensor(x_test), y_test
    return DataSet(name, *images, spec.white, *_moments(x_train, spec.white))


def _verified(key: str, spec: Published, array: Array, source: Path) -> Array:
    count = spec.train if key.endswith("train") else spec.test
    shape = (count, *spec.shape) if key.startswith("x") else (count,)
    if array.shape != shape:
        raise DataError(f"{source}: {key} has shape {array.shape}, expected {shape}")
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > (spec.classes - 1 if key[0] == "y" else 255):
        raise DataError(f"{source}: {key} holds values that are no {'labels' if key[0] == 'y' else 'pixels'}")
    array = np.ascontiguousarray(array, np.uint8)
    expected = spec.sha256.get(key)
    if expected is not None and hashlib.sha256(array.data).hexdigest() != expected:
        raise DataError(f"{source}: {key} differs from the published data set (SHA-256)")
    return array


def _moments(images: Array, white: float) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel, from the histogram of the 256 values: exact, in one pass."""
    values = np.arange(256) / white
    counts = np.stack([np.bincount(images[:, c].ravel(), minlength=256) for c in range(images.shape[1])])
    weights = counts / counts.sum(1, keepdims=True)
    mean = weights @ values
    std = np.sqrt(weights @ values**2 - mean**2)
    return torch.tensor(mean, dtype=torch.float32), torch.tensor(std, dtype=torch.float32)


def data_folder(data_dir: Folder = None) -> Path:
    """Where data sets lie: the argument, else `$GSPACE_DATA`, else `~/.cache/gspace`."""
    return Path(data_dir or os.environ.get("GSPACE_DATA") or Path.home() / ".cache" / "gspace").expanduser()


def load(
    name: str, data_dir: Folder = None, device: Device = "cpu", *, download: bool = False, sets: Sets = SETS
) -> DataSet:
    """The data set called `name`, verified, on `device`; downloaded into its folder if absent and asked for."""
    spec, root = sets[name], data_folder(data_dir)
    found = read(name, spec, root)
    if found is None and download:
        fetch_all(spec.remotes, root)
        found = read(name, spec, root)
    if found is None:
        raise DataError(
            f"no data set {name} below {root}: put {name}.npz there, "
            "name another folder with --data-dir or GSPACE_DATA, or pass --download"
        )
    return found.to(device)


def fetch_all(remotes: Sequence[Remote], root: Path) -> None:
    """Every remote that is not yet below `root`. Two processes that download the same do not disturb each other."""
    import pooch  # here: it brings requests, which nothing else needs
    from requests import RequestException

    pooch.get_logger().setLevel("ERROR")
    for remote in remotes:
        target, url = root / remote.path, remote.url
        bar = DownloadBar(target.name)
        way = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 18, timeout=60)
        try:
            pooch.retrieve(url, f"sha256:{remote.sha256}", target.name, target.parent, downloader=way)
        except RequestException as error:
            raise DataError(f"cannot download {url}: {reason(error)}; run this again") from error
        except ValueError as error:
            raise DataError(f"{url}: the file arrived damaged (SHA-256 differs); run this again") from error
        except OSError as error:
            raise DataError(f"cannot write {target}: {error.strerror or error}") from error
        finally:
            bar.close()


def subset(data: DataSet, *, train: int | None = None, test: int | None = None, validation: int = 0) -> DataSet:
    """The first `train` and `test` images; with `validation`, that many training images replace the test images.

    The validation images are chosen once for every seed and every run: the last of one fixed shuffle. Mean and standard
    deviation stay the full training set's.
    """
    if validation:
        order = torch.randperm(len(data.y_train), generator=generator(0, "validation", data.name))
        rest = len(order) - validation
        if rest <= 0:
            raise RequestError(
                f"validation {validation} leaves none of the {len(order)} training images of {data.name}"
            )
        kept, held = (part.sort().values.to(data.y_train.device) for part in order.split([rest, validation]))
        x, y = data.x_train, data.y_train
        data = replace(data, x_train=x[kept], y_train=y[kept], x_test=x[held], y_test=y[held])
    for what, size, there in (("train", train, len(data.y_train)), ("test", test, len(data.y_test))):
        if size is not None and size > there:
            raise RequestError(f"{what}_size {size} is more than the {there} images {data.name} has")
    data = replace(data, x_train=data.x_train[:train], y_train=data.y_train[:train])
    return replace(data, x_test=data.x_test[:test], y_test=data.y_test[:test])
