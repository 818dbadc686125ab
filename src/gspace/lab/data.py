"""The data sets of the experiments behind one function, `load`: checked, as tensors, on the device.

A set is looked for as `NAME.npz`, in the folders torchvision leaves (`MNIST/raw`, `FashionMNIST/raw`), and as the
archive of its binary version (`cifar-10-binary.tar.gz`), below `data_dir`, else `$GSPACE_DATA`, else `~/.cache/gspace`.
Whatever the format, the pixels are compared with the published set's SHA-256 before anything is trained on them.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspace.lab.download import Remote, fetch_all
from gspace.lab.errors import DataError, MissingDataError, RecipeError
from gspace.lab.formats import IDX_FILES, KEYS, Array, Raw, read_cifar, read_idx, read_npz
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
    images = {key: _channels_first(arrays[key]) for key in ("x_train", "x_test")}
    mean, std = _moments(images["x_train"], spec.white)
    return DataSet(
        name=name,
        x_train=torch.tensor(images["x_train"]),
        y_train=torch.tensor(arrays["y_train"], dtype=torch.int64),
        x_test=torch.tensor(images["x_test"]),
        y_test=torch.tensor(arrays["y_test"], dtype=torch.int64),
        classes=spec.classes,
        white=spec.white,
        mean=mean,
        std=std,
    )


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


ARRAYS = {
    "mnist": (
        "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    ),
    "fashion_mnist": (
        "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    ),
    "cifar10": (
        "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    ),
    "cifar100": (
        "4e1aa1ad5870d15646ed2c077135af5450e3f1adb2106c9c85c99d50fcfeea6e",
        "d8fc1b40c765862b20c7d282b5b90b4ec9bf012299a2da888d5642d928b0fa4e",
        "559556802d6f25382072f003d792bef169b45a63a3ef52883445488c511741de",
        "84741d4922457bf84f68f919fd8c134ca4fb4d075d1d2fe8272b67d910565a14",
    ),
}
"""SHA-256 of the arrays of each published set, in the order of `KEYS`."""


def _mnist(name: str, base: str, folder: str, *sha256: str) -> Published:
    files = (f"{file}.gz" for file in IDX_FILES.values())
    remotes = [Remote(base + file, digest, f"{folder}/{file}") for file, digest in zip(files, sha256, strict=True)]
    readers = partial(read_npz, file=f"{name}.npz"), partial(read_idx, folder=folder)
    return Published((28, 28), 60_000, 10_000, 10, readers, _digests(name), tuple(remotes))


def _cifar(name: str, classes: int, labels: int, file: str, sha256: str) -> Published:
    readers = partial(read_npz, file=f"{name}.npz"), partial(read_cifar, file=file, labels=labels)
    remote = Remote(f"https://www.cs.toronto.edu/~kriz/{file}", sha256, file)
    return Published((32, 32, 3), 50_000, 10_000, classes, readers, _digests(name), (remote,))


def _digests(name: str) -> dict[str, str]:
    return dict(zip(KEYS, ARRAYS[name], strict=True))


SETS: Mapping[str, Published] = {
    "digits": Published((8, 8), 1438, 359, 10, (read_digits,), white=16.0),
    "mnist": _mnist(
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "MNIST/raw",
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    "fashion_mnist": _mnist(
        "fashion_mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "FashionMNIST/raw",
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
    "cifar10": _cifar(
        "cifar10",
        10,
        1,
        "cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    "cifar100": _cifar(
        "cifar100",
        100,
        2,  # coarse and fine
        "cifar-100-binary.tar.gz",
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
}


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
        kept, held = (part.sort().values.to(data.y_train.device) for part in order.split(_sizes(data, validation)))
        data = replace(
            data,
            x_train=data.x_train[kept],
            y_train=data.y_train[kept],
            x_test=data.x_train[held],
            y_test=data.y_train[held],
        )
    for what, size, there in (("train", train, len(data.y_train)), ("test", test, len(data.y_test))):
        if size is not None and size > there:
            raise RecipeError(f"{what}_size {size} is more than the {there} images {data.name} has")
    return replace(
        data,
        x_train=data.x_train[:train],
        y_train=data.y_train[:train],
        x_test=data.x_test[:test],
        y_test=data.y_test[:test],
    )


def _sizes(data: DataSet, validation: int) -> list[int]:
    rest = len(data.y_train) - validation
    if rest <= 0:
        raise RecipeError(
            f"validation {validation} leaves none of the {len(data.y_train)} training images of {data.name}"
        )
    return [rest, validation]
