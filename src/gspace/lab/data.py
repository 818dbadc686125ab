"""The data sets of the experiments behind one function, `load`: checked, as tensors, on the device.

A set is looked for as `NAME.npz` and in the folders torchvision leaves (`MNIST/raw`, `FashionMNIST/raw`,
`cifar-10-batches-py`, `cifar-100-python`), below `data_dir`, else `$GSPACE_DATA`, else `~/.cache/gspace`. Whatever the
format, the pixels are compared with the published set's SHA-256 before anything is trained on them.
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

from gspace.lab.download import Progress, Remote, fetch_all
from gspace.lab.errors import DataError, MissingDataError, RecipeError
from gspace.lab.formats import Array, Pickles, Raw, read_idx, read_npz, read_pickles
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
class Spec:
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


def read(name: str, spec: Spec, root: Path) -> DataSet | None:
    """The data set as the first reader finds it below `root`, verified; None if no reader does."""
    for reader in spec.readers:
        raw = reader(root)
        if raw is not None:
            return _data_set(name, spec, raw)
    return None


def _data_set(name: str, spec: Spec, raw: Raw) -> DataSet:
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


def _verified(key: str, spec: Spec, array: Array, source: Path) -> Array:
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


def _mnist_like(base: str, folder: str, sha256: Mapping[str, str], archives: Mapping[str, str], name: str) -> Spec:
    return Spec(
        shape=(28, 28),
        train=60_000,
        test=10_000,
        classes=10,
        readers=(partial(read_npz, file=f"{name}.npz"), partial(read_idx, folder=folder)),
        sha256=sha256,
        remotes=tuple(Remote(base + file, digest, f"{folder}/{file}") for file, digest in archives.items()),
    )


def _cifar(name: str, classes: int, layout: Pickles, sha256: Mapping[str, str], archive: Remote) -> Spec:
    return Spec(
        shape=(32, 32, 3),
        train=50_000,
        test=10_000,
        classes=classes,
        readers=(partial(read_npz, file=f"{name}.npz"), partial(read_pickles, layout=layout)),
        sha256=sha256,
        remotes=(archive,),
    )


SETS: Mapping[str, Spec] = {
    "digits": Spec(shape=(8, 8), train=1438, test=359, classes=10, readers=(read_digits,), white=16.0),
    "mnist": _mnist_like(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "MNIST/raw",
        {
            "x_train": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
            "y_train": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
            "x_test": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
            "y_test": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
        },
        {
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
        "mnist",
    ),
    "fashion_mnist": _mnist_like(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "FashionMNIST/raw",
        {
            "x_train": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
            "y_train": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
            "x_test": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
            "y_test": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
        },
        {
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
        "fashion_mnist",
    ),
    "cifar10": _cifar(
        "cifar10",
        10,
        Pickles(
            folder="cifar-10-batches-py",
            train=(
                ("data_batch_1", "c99cafc152244af753f735de768cd75f"),
                ("data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
                ("data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
                ("data_batch_4", "634d18415352ddfa80567beed471001a"),
                ("data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
            ),
            test=(("test_batch", "40351d587109b95175f43aff81a1287e"),),
            label="labels",
        ),
        {
            "x_train": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "y_train": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
            "x_test": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
            "y_test": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        },
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            "cifar-10-batches-py",
        ),
    ),
    "cifar100": _cifar(
        "cifar100",
        100,
        Pickles(
            folder="cifar-100-python",
            train=(("train", "16019d7e3df5f24257cddd939b257f8d"),),
            test=(("test", "f0ef6b0ae62326f3e7ffdfab6717acfc"),),
            label="fine_labels",
        ),
        {},  # no digest of the arrays at hand: the pickles are checked by MD5, an .npz by shape and range alone
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            "cifar-100-python",
        ),
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
    download: Progress | None = None,
    sets: Mapping[str, Spec] = SETS,
) -> DataSet:
    """The data set called `name`, verified, on `device`.

    Args:
        data_dir: Folder to look in, see `data_folder`.
        download: If given, a set that is absent is downloaded there, and this is told of the progress.
    """
    spec, root = sets[name], data_folder(data_dir)
    found = read(name, spec, root)
    if found is None and download is not None:
        fetch_all(spec.remotes, root, download)
        found = read(name, spec, root)
    if found is None:
        raise MissingDataError(
            f"no data set {name} below {root}: put {name}.npz or torchvision's folder there, "
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
