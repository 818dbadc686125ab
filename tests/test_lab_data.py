"""Data sets: formats give the same tensors, damage is named, downloads are checked; transforms against loops."""

import gzip
import hashlib
import http.server
import io
import re
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gspace.lab.data import (
    IDX_FILES,
    KEYS,
    SETS,
    DataSet,
    Published,
    Remote,
    data_folder,
    fetch_all,
    load,
    read,
    read_cifar,
    read_idx,
    read_npz,
    subset,
)
from gspace.lab.errors import DataError, RequestError
from gspace.lab.transform import AUGMENTS, epoch_rows, feed, standard

TRAIN, TEST = 7, 3


def arrays(shape: tuple[int, ...], classes: int = 10) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    counts = {"train": TRAIN, "test": TEST}
    return {
        key: random.integers(
            256 if key[0] == "x" else classes, size=(counts[key[2:]], *(shape if key[0] == "x" else ()))
        ).astype(np.uint8)
        for key in KEYS
    }


def digests(content: dict[str, np.ndarray]) -> dict[str, str]:
    return {key: hashlib.sha256(value.tobytes()).hexdigest() for key, value in content.items()}


def write_idx(root: Path, content: dict[str, np.ndarray], *, compress: bool = False) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for key, value in content.items():
        header = bytes([0, 0, 8, value.ndim]) + np.array(value.shape, ">u4").tobytes()
        path = root / (IDX_FILES[key] + (".gz" if compress else ""))
        data = header + value.tobytes()
        path.write_bytes(gzip.compress(data) if compress else data)


def write_cifar(root: Path, content: dict[str, np.ndarray], parts: int, labels: int = 1) -> Path:
    """An archive of CIFAR's binary version, of an (N, 32, 32, 3) set."""
    root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(root / "colour.tar.gz", "w:gz") as archive:
        for part, count in (("train", parts), ("test", 1)):
            pairs = zip(*(np.array_split(content[f"{kind}_{part}"], count) for kind in "xy"), strict=True)
            for k, (x, y) in enumerate(pairs, 1):
                coarse = np.full((len(y), labels - 1), 77, np.uint8)
                rows = np.hstack([coarse, y[:, None], x.transpose(0, 3, 1, 2).reshape(len(x), -1)])
                member = tarfile.TarInfo(f"bin/{'test' if part == 'test' else 'data'}_batch_{k}.bin")
                member.size = rows.nbytes
                archive.addfile(member, io.BytesIO(rows.tobytes()))
    return root / "colour.tar.gz"


GREY = arrays((28, 28))
COLOUR = arrays((32, 32, 3))


def spec_of(content: dict[str, np.ndarray], *readers) -> Published:
    shape = content["x_train"].shape[1:]
    return Published(shape, TRAIN, TEST, 10, readers, sha256=digests(content))


def grey_spec() -> Published:
    return spec_of(GREY, partial(read_npz, file="grey.npz"), partial(read_idx, folder="raw"))


def assert_same(a: DataSet | None, b: DataSet | None) -> None:
    assert a is not None
    assert b is not None
    for name, value in vars(a).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(b, name)), name


def test_npz_idx_and_gzipped_idx_give_identical_tensors(tmp_path: Path) -> None:
    np.savez(tmp_path / "grey.npz", **GREY)
    write_idx(tmp_path / "plain" / "raw", GREY)
    write_idx(tmp_path / "zipped" / "raw", GREY, compress=True)
    first = read("grey", grey_spec(), tmp_path)
    assert_same(first, read("grey", grey_spec(), tmp_path / "plain"))
    assert_same(first, read("grey", grey_spec(), tmp_path / "zipped"))
    assert first is not None
    assert first.x_train.shape == (TRAIN, 1, 28, 28)
    np.testing.assert_array_equal(first.x_train[:, 0].numpy(), GREY["x_train"])


def colour_spec(labels: int = 1) -> Published:
    return spec_of(COLOUR, partial(read_cifar, file="colour.tar.gz", labels=labels))


@pytest.mark.parametrize("labels", [1, 2])
def test_npz_and_binary_batches_give_identical_tensors(labels: int, tmp_path: Path) -> None:
    np.savez(tmp_path / "colour.npz", **COLOUR)
    write_cifar(tmp_path, COLOUR, 3, labels)
    npz = read("colour", spec_of(COLOUR, partial(read_npz, file="colour.npz")), tmp_path)
    assert_same(npz, read("colour", colour_spec(labels), tmp_path))
    assert npz is not None
    np.testing.assert_array_equal(npz.x_train.permute(0, 2, 3, 1).numpy(), COLOUR["x_train"])


def test_mean_and_std_are_those_of_the_training_pixels(tmp_path: Path) -> None:
    np.savez(tmp_path / "colour.npz", **COLOUR)
    data = read("colour", spec_of(COLOUR, partial(read_npz, file="colour.npz")), tmp_path)
    assert data is not None
    pixels = COLOUR["x_train"].astype(np.float64) / 255
    np.testing.assert_allclose(data.mean.numpy(), pixels.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(data.std.numpy(), pixels.std((0, 1, 2)), rtol=1e-6)


def test_digits_are_bundled() -> None:
    data = load("digits")
    assert data.x_train.shape == (1438, 1, 8, 8)
    assert len(data.y_test) == 359
    assert data.x_train.max() == data.white
    assert set(data.y_test.tolist()) == set(range(10))


# --- damage -----------------------------------------------------------------------------------------------------------


def _npz(root: Path, content: dict[str, np.ndarray]) -> Path:
    np.savez(root / "grey.npz", **content)
    return root / "grey.npz"


def _idx(root: Path, *, compress: bool = False) -> Path:
    write_idx(root / "raw", GREY, compress=compress)
    return root / "raw" / (IDX_FILES["x_train"] + (".gz" if compress else ""))


def _cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-100])
    return path


def _flip(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def _begin(path: Path, start: bytes) -> Path:
    path.write_bytes(start + path.read_bytes()[len(start) :])
    return path


def _emptied(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def _without(path: Path, missing: Path) -> Path:
    missing.unlink()
    return missing


DAMAGES = {
    "npz truncated": lambda root: _cut(_npz(root, GREY)),
    "npz one bit flipped": lambda root: _flip(_npz(root, GREY)),
    "npz not a zip": lambda root: _begin(_npz(root, GREY), b"hello"),
    "npz array missing": lambda root: _npz(root, {k: v for k, v in GREY.items() if k != "y_test"}),
    "npz wrong shape": lambda root: _npz(root, {**GREY, "x_test": GREY["x_test"][:, :27]}),
    "npz floats": lambda root: _npz(root, {**GREY, "x_test": GREY["x_test"] / 255}),
    "npz labels out of range": lambda root: _npz(root, {**GREY, "y_test": GREY["y_test"] + 200}),
    "npz other pixels": lambda root: _npz(root, {**GREY, "x_train": GREY["x_train"] // 2}),
    "idx truncated": lambda root: _cut(_idx(root)),
    "idx one bit flipped": lambda root: _flip(_idx(root)),
    "idx no header": lambda root: _begin(_idx(root), b"\x1f\x8b"),
    "idx empty": lambda root: _emptied(_idx(root)),
    "gz truncated": lambda root: _cut(_idx(root, compress=True)),
    "gz one bit flipped": lambda root: _flip(_idx(root, compress=True)),
    "idx file missing": lambda root: _without(_idx(root), root / "raw" / IDX_FILES["y_test"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_on_one_line(tmp_path: Path, damage: str) -> None:
    path = DAMAGES[damage](tmp_path)
    with pytest.raises(DataError, match=re.escape(str(path))) as caught:
        read("grey", grey_spec(), tmp_path)
    assert "\n" not in str(caught.value)


CIFAR_DAMAGES = {
    "truncated": _cut,
    "one bit flipped": _flip,
    "not a tar": lambda path: _begin(path, b"hello"),
    "empty": _emptied,
    "images cut": lambda path: write_cifar(path.parent, {**COLOUR, "x_train": COLOUR["x_train"][:, :31]}, 1),
    "one image less": lambda path: write_cifar(path.parent, {k: v[1:] for k, v in COLOUR.items()}, 1),
    "other labels": lambda path: write_cifar(path.parent, {**COLOUR, "y_test": 9 - COLOUR["y_test"]}, 1),
}


@pytest.mark.parametrize("damage", CIFAR_DAMAGES)
def test_a_damaged_archive_is_named_on_one_line(tmp_path: Path, damage: str) -> None:
    path = CIFAR_DAMAGES[damage](write_cifar(tmp_path, COLOUR, 3))
    with pytest.raises(DataError, match=re.escape(str(path))) as caught:
        read("colour", colour_spec(), tmp_path)
    assert "\n" not in str(caught.value)


def test_random_flips_and_cuts_of_data_files_are_named_or_change_nothing(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    small = {key: value[:2] for key, value in GREY.items()}
    write_idx(tmp_path / "raw", small)
    np.savez(tmp_path / "grey.npz", **small)
    specs = (partial(read_npz, file="grey.npz"), tmp_path / "grey.npz"), (
        partial(read_idx, folder="raw"), tmp_path / "raw" / IDX_FILES["y_train"],
    )  # fmt: skip
    refused = 0
    for reader, path in specs:
        spec = Published((28, 28), 2, 2, 10, (reader,), sha256=digests(small))
        whole, content = read("grey", spec, tmp_path), path.read_bytes()
        for _ in range(60):
            place = int(random.integers(len(content)))
            changed = bytes([content[place] ^ 1 << int(random.integers(8))])
            path.write_bytes(content[:place] + (changed + content[place + 1 :] if random.random() < 0.7 else b""))
            try:
                assert_same(whole, read("grey", spec, tmp_path))
            except DataError as error:
                refused += 1
                assert "\n" not in str(error)  # noqa: PT017 -- most changes are refused, some are of no consequence
        path.write_bytes(content)
    assert refused > 60


def test_an_absent_data_set_says_where_it_was_sought_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{re.escape(str(tmp_path))}.*GSPACE_DATA.*--download"):
        load("cifar10", tmp_path)


def test_the_data_folder_is_the_argument_then_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPACE_DATA", str(tmp_path / "b"))
    assert data_folder(tmp_path / "a") == tmp_path / "a"
    assert data_folder() == tmp_path / "b"


# --- the real data, where it is ---------------------------------------------------------------------------------------


def real(name: str) -> DataSet:
    try:
        return load(name)
    except DataError as error:
        if not str(error).startswith("no data set"):
            raise
        pytest.skip(f"the real data is not here: {error}")


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_real_images_from_idx_files_are_identical(tmp_path: Path, name: str) -> None:
    data = real(name)
    folder = {"mnist": "MNIST/raw", "fashion_mnist": "FashionMNIST/raw"}[name]
    stored = {key: getattr(data, key).numpy().astype(np.uint8) for key in KEYS}
    write_idx(tmp_path / folder, {key: value[:, 0] if key[0] == "x" else value for key, value in stored.items()})
    assert_same(data, load(name, tmp_path))


@pytest.mark.parametrize(("name", "labels"), [("cifar10", 1), ("cifar100", 2)])
def test_real_cifar_from_the_binary_version_is_identical(tmp_path: Path, name: str, labels: int) -> None:
    data = real(name)
    stored = {key: getattr(data, key).numpy().astype(np.uint8) for key in KEYS}
    content = {key: value.transpose(0, 2, 3, 1) if key[0] == "x" else value for key, value in stored.items()}
    file = SETS[name].remotes[0].path
    write_cifar(tmp_path, content, 5, labels).rename(tmp_path / file)
    assert_same(data, load(name, tmp_path))  # the pixels are compared with the published SHA-256


# --- downloads --------------------------------------------------------------------------------------------------------

CONTENT = np.random.default_rng(1).integers(256, size=1_500_000).astype(np.uint8).tobytes()
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves CONTENT, or `cut` bytes of it before it breaks the connection."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"/file.bin": CONTENT}
        self.cut: int | None = None

    def url(self, name: str = "file.bin") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path not in self.server.files:
            self.send_error(404)
            return
        content = self.server.files[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: self.server.cut])

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def remote(server: Server, name: str = "file.bin", sha256: str = SHA256) -> list[Remote]:
    return [Remote(server.url(name), sha256, "data/file")]


def test_a_download_is_checked_and_shows_its_progress(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch_all(remote(server), tmp_path)
    assert (tmp_path / "data" / "file").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["file"]
    assert capsys.readouterr().err == "downloading file\n"
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    fetch_all([Remote(server.url(), SHA256, "again")], tmp_path)
    err = capsys.readouterr().err
    assert "again" in err
    assert "MB" in err


def test_a_broken_download_leaves_nothing_and_can_be_repeated(tmp_path: Path, server: Server) -> None:
    server.cut = 600_000
    with pytest.raises(DataError, match=r"cannot download .*file\.bin: .*run this again"):
        fetch_all(remote(server), tmp_path)
    assert list((tmp_path / "data").iterdir()) == []
    server.cut = None
    fetch_all(remote(server), tmp_path)
    assert (tmp_path / "data" / "file").read_bytes() == CONTENT


def test_a_wrong_checksum_is_reported_and_nothing_is_left(tmp_path: Path, server: Server) -> None:
    with pytest.raises(DataError, match=r"SHA-256 differs"):
        fetch_all(remote(server, sha256=hashlib.sha256(b"other").hexdigest()), tmp_path)
    assert list((tmp_path / "data").iterdir()) == []
    with pytest.raises(DataError, match=r"nothing\.bin.*Not Found"):
        fetch_all(remote(server, "nothing.bin"), tmp_path)


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, server: Server) -> None:
    (tmp_path / "data").write_text("a file where a folder should be")
    with pytest.raises(DataError, match=r"cannot write .*data/file: "):
        fetch_all(remote(server), tmp_path)


def test_two_downloads_of_one_file_do_not_disturb_each_other(tmp_path: Path, server: Server) -> None:
    threads = [threading.Thread(target=fetch_all, args=(remote(server), tmp_path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() == CONTENT for path in (tmp_path / "data").iterdir()] == [True]


def test_an_absent_set_is_downloaded_and_read(tmp_path: Path, server: Server) -> None:
    archive = write_cifar(tmp_path / "source", COLOUR, parts=2).read_bytes()
    server.files["/colour.tar.gz"] = archive
    there = Remote(server.url("colour.tar.gz"), hashlib.sha256(archive).hexdigest(), "colour.tar.gz")
    spec = replace(colour_spec(), remotes=(there,))
    data = load("colour", tmp_path / "data", download=True, sets={"colour": spec})
    assert_same(data, load("colour", tmp_path / "source", sets={"colour": spec}))


# --- transforms -------------------------------------------------------------------------------------------------------


def small(shape: tuple[int, ...] = (32, 32, 3), images: int = TRAIN) -> DataSet:
    random = torch.Generator().manual_seed(3)
    height, width, channels = (*shape, 1)[:3]
    x = torch.randint(256, (images, channels, height, width), generator=random, dtype=torch.uint8)
    y = torch.randint(10, (images,), generator=random)
    return DataSet("small", x, y, x[:TEST], y[:TEST], 255.0, torch.full((channels,), 0.4), torch.full((channels,), 0.2))


def test_crop_and_flip_agree_with_a_loop_over_images() -> None:
    data = small()
    source = feed(data, "standard", "crop-flip")
    rows = torch.tensor([[0, 4, 4, 0], [1, 0, 8, 0], [2, 8, 0, 1], [3, 3, 7, 1]])
    x, y = source.batch(rows)
    for k, (index, dy, dx, flip) in enumerate(rows.tolist()):
        padded = F.pad(data.x_train[index].float() / 255, (4, 4, 4, 4))
        crop = padded[:, dy : dy + 32, dx : dx + 32]
        expected = standard(crop.flip(-1) if flip else crop, data.mean, data.std)
        assert torch.equal(x[k], expected)
    assert torch.equal(y, data.y_train[rows[:, 0]])


def test_rows_may_have_a_network_dimension() -> None:
    source = feed(small(), "unit", "crop-flip")
    rows = torch.stack([epoch_rows(seed, 0, TRAIN, 3, source.augment)[0] for seed in range(2)])
    x, y = source.batch(rows)
    assert x.shape == (2, 3, 3, 32, 32)
    assert torch.equal(x[1], source.batch(rows[1])[0])
    assert torch.equal(y[1], source.batch(rows[1])[1])


@pytest.mark.parametrize("augment", AUGMENTS)
def test_still_rows_give_the_images_as_they_are(augment: str) -> None:
    data = small()
    source = feed(data, "unit", augment)
    x, y = source.batch(source.still_rows())
    assert torch.equal(x, data.x_train.float() / 255)
    assert torch.equal(y, data.y_train)


def test_pooled_is_the_mean_of_normalized_squares() -> None:
    data = small((28, 28))
    x = feed(data, "pooled", "none").images
    assert x.shape == (TRAIN, 1, 7, 7)
    square = (data.x_train[0, 0, 4:8, 20:24].double() / 255 - 0.4) / 0.2
    torch.testing.assert_close(x[0, 0, 1, 5].double(), square.mean(), rtol=1e-6, atol=1e-7)


def test_grey_is_luminance_between_0_and_1() -> None:
    data = small()
    x = feed(data, "grey", "none").images
    assert x.shape == (TRAIN, 1, 32, 32)
    red, green, blue = (data.x_train[0, c, 5, 6].item() / 255 for c in range(3))
    torch.testing.assert_close(x[0, 0, 5, 6].item(), 0.299 * red + 0.587 * green + 0.114 * blue, rtol=1e-6, atol=1e-7)
    assert feed(small((28, 28)), "grey", "none").images.shape == (TRAIN, 1, 28, 28)


def test_an_epoch_is_a_permutation_decided_by_seed_and_epoch() -> None:
    augment = AUGMENTS["crop-flip"]
    rows = epoch_rows(0, 0, 103, 10, augment)
    assert rows.shape == (10, 10, 4)
    assert len(rows[..., 0].unique()) == 100
    assert rows[..., 1:3].min() >= 0
    assert rows[..., 1:3].max() <= 8
    assert set(rows[..., 3].unique().tolist()) == {0, 1}
    assert torch.equal(rows, epoch_rows(0, 0, 103, 10, augment))
    assert not torch.equal(rows, epoch_rows(0, 1, 103, 10, augment))
    assert not torch.equal(rows, epoch_rows(1, 0, 103, 10, augment))


def test_offsets_and_flips_are_uniform() -> None:
    rows = epoch_rows(0, 0, 90_000, 90_000, AUGMENTS["crop-flip"])[0]
    for column, count in ((1, 9), (2, 9), (3, 2)):
        shares = torch.bincount(rows[:, column], minlength=count) / len(rows)
        assert (shares - 1 / count).abs().max() < 0.006  # five standard deviations of a share of 1/2


def test_validation_images_are_taken_from_the_training_images_once() -> None:
    data = small(images=100)
    split = subset(data, validation=20)
    assert len(split.y_train) == 80
    assert len(split.y_test) == 20
    whole = {x.numpy().tobytes() for x in data.x_train}
    parts = [{x.numpy().tobytes() for x in images} for images in (split.x_train, split.x_test)]
    assert parts[0] | parts[1] == whole
    assert not parts[0] & parts[1]
    assert torch.equal(split.x_test, subset(data, validation=20).x_test)


def test_a_subset_larger_than_the_set_is_refused() -> None:
    data = small(images=100)
    assert len(subset(data, train=50, test=2).y_train) == 50
    with pytest.raises(RequestError, match="train_size 101"):
        subset(data, train=101)
    with pytest.raises(RequestError, match="validation 100"):
        subset(data, validation=100)
