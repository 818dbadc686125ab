"""The data sets of the experiments behind one function, `load`: checked, as tensors, on the device.

A set is looked for as `NAME.npz`, in the folders torchvision leaves (`MNIST/raw`, `FashionMNIST/raw`), and as the
archive of its binary version (`cifar-10-binary.tar.gz`), below `data_dir`, else `$GSPACE_DATA`, else `~/.cache/gspace`.
Whatever the format, the pixels are compared with the published set's SHA-256 before anything is trained on them.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspace.lab.download import Remote, fetch_all
from gspace.lab.errors import DataError, MissingDataError, RecipeError
from gspace.lab.formats import Array, Raw, read_cifar, read_idx, read_npz
from gspace.lab.seeds import generator

Reader = Callable[[Path], Raw | None]


@dataclass(frozen=True)
class DataSet:
    """Images and labels of one data set, all on one device.

    Attributes:
        name: Its name in `SETS`.
        x_train, x_test: Pixels, uint8 `(N, channel, height, width)`.
        y_train, y_test: Labels, int64 `(N,)`.
        classes: Number of classes.
        white: The pixel value that means 1.
        mean, std: Per channel over the training images, of pixels in [0, 1], `(channel,)`.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    white: float
    mean: Tensor
    std: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.x_train.shape[1:]
        return channels, height, width

    def to(self, device: torch.device | str) -> "DataSet":
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class Published:
    """What a published data set must look like.

    Attributes:
        shape: Of one stored image.
        train, test: Number of images.
        sha256: Digest of each array's bytes, images in `shape`'s order; an array without one is not compared.
        readers: The formats it may lie in, tried in order.
        remotes: Where it can be downloaded.
    """

    shape: tuple[int, ...]
    train: int
    test: int
    classes: int
    readers: tuple[Reader, ...]
    sha256: Mapping[str, str] = field(default_factory=dict)
    remotes: tuple[Remote, ...] = ()
    white: float = 255.0


def read(name: str, spec: Published, root: Path) -> DataSet | None:
    """The data set as the first reader finds it below `root`, verified; None if no reader does."""
    for reader in spec.readers:
        raw = reader(root)
        if raw is not None:
            return _data_set(name, spec, raw)
    return None


def _data_set(name: str, spec: Published, raw: Raw) -> DataSet:
    arrays = {key: _verified(key, spec, array, raw.source[key]) for key, array in raw.arrays.items()}
    x_train, x_test = (_channels_first(arrays[key]) for key in ("x_train", "x_test"))
    y_train, y_test = (torch.tensor(arrays[key], dtype=torch.int64) for key in ("y_train", "y_test"))
    images = torch.tensor(x_train), y_train, torch.tensor(x_test), y_test
    return DataSet(name, *images, spec.classes, spec.white, *_moments(x_train, spec.white))


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


def _channels_first(images: Array) -> Array:
    return np.ascontiguousarray(images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2))


def _moments(images: Array, white: float) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel, from the histogram of the 256 values: exact, in one pass."""
    values = np.arange(256) / white
    counts = np.stack([np.bincount(images[:, c].ravel(), minlength=256) for c in range(images.shape[1])])
    weights = counts / counts.sum(1, keepdims=True)
    mean = weights @ values
    std = np.sqrt(weights @ values**2 - mean**2)
    return torch.tensor(mean, dtype=torch.float32), torch.tensor(std, dtype=torch.float32)


def read_digits(root: Path) -> Raw | None:
    """scikit-learn's bundled digits, 8 × 8 with values 0 to 16; every fifth image is a test image."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDataError("the digits come with scikit-learn: pip install scikit-learn") from error
    bunch = load_digits()
    x, y = bunch.images.astype(np.uint8), bunch.target.astype(np.uint8)
    test = np.arange(len(y)) % 5 == 4
    arrays = {"x_train": x[~test], "y_train": y[~test], "x_test": x[test], "y_test": y[test]}
    return Raw(arrays, dict.fromkeys(arrays, Path("scikit-learn's digits")))


FORMATS: Mapping[str, Callable[..., Raw | None]] = {"idx": read_idx, "cifar": read_cifar}


def _published() -> Iterator[tuple[str, Published]]:
    """The digits, and what `sets.json` says of the others."""
    yield "digits", Published((8, 8), 1438, 359, 10, (read_digits,), white=16.0)
    for name, facts in json.loads((files("gspace.lab") / "sets.json").read_text()).items():
        readers = partial(read_npz, file=f"{name}.npz"), partial(FORMATS[facts.pop("format")], **facts.pop("where"))
        remotes = tuple(Remote(**remote) for remote in facts.pop("remotes"))
        yield name, Published(tuple(facts.pop("shape")), readers=readers, remotes=remotes, **facts)


SETS: Mapping[str, Published] = dict(_published())


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where data sets lie: the argument, else `$GSPACE_DATA`, else `~/.cache/gspace`."""
    return Path(data_dir or os.environ.get("GSPACE_DATA") or Path.home() / ".cache" / "gspace").expanduser()


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    device: torch.device | str = "cpu",
    *,
    download: bool = False,
    sets: Mapping[str, Published] = SETS,
) -> DataSet:
    """The data set called `name`, verified, on `device`.

    Args:
        data_dir: Folder to look in, see `data_folder`.
        download: Whether a set that is absent is downloaded there.
    """
    spec, root = sets[name], data_folder(data_dir)
    found = read(name, spec, root)
    if found is None and download:
        fetch_all(spec.remotes, root)
        found = read(name, spec, root)
    if found is None:
        raise MissingDataError(
            f"no data set {name} below {root}: put {name}.npz there, "
            "name another folder with --data-dir or GSPACE_DATA, or pass --download"
        )
    return found.to(device)


def subset(data: DataSet, *, train: int | None = None, test: int | None = None, validation: int = 0) -> DataSet:
    """The first `train` and `test` images; with `validation`, that many training images replace the test images.

    The validation images are chosen once for every seed and every run: the last of one fixed shuffle. Mean and standard
    deviation stay the full training set's.
    """
    if validation:
        order = torch.randperm(len(data.y_train), generator=generator(0, "validation", data.name))
        rest = len(order) - validation
        if rest <= 0:
            raise RecipeError(f"validation {validation} leaves none of the {len(order)} training images of {data.name}")
        kept, held = (part.sort().values.to(data.y_train.device) for part in order.split([rest, validation]))
        x, y = data.x_train, data.y_train
        data = replace(data, x_train=x[kept], y_train=y[kept], x_test=x[held], y_test=y[held])
    for what, size, there in (("train", train, len(data.y_train)), ("test", test, len(data.y_test))):
        if size is not None and size > there:
            raise RecipeError(f"{what}_size {size} is more than the {there} images {data.name} has")
    data = replace(data, x_train=data.x_train[:train], y_train=data.y_train[:train])
    return replace(data, x_test=data.x_test[:test], y_test=data.y_test[:test])
