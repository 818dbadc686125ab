"""Data sets: formats give the same tensors, damage is named, downloads are checked; transforms against loops."""

import gzip
import hashlib
import http.server
import io
import os
import pickle
import re
import subprocess
import sys
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

from gspace.lab.data import SETS, DataSet, Spec, data_folder, load, read, subset
from gspace.lab.download import Remote, fetch, fetch_all, unpack
from gspace.lab.errors import DataError, MissingDataError, RecipeError
from gspace.lab.formats import IDX_FILES, KEYS, Pickles, read_idx, read_npz, read_pickles
from gspace.lab.lock import locked
from gspace.lab.transform import AUGMENTS, epoch_rows, feed, standard

TRAIN, TEST = 7, 3


def silent(name: str, done: int, total: int | None) -> None:
    """Progress that is not shown."""


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


def python2_pickle(pixels: bytes, labels: list[int]) -> bytes:
    """A batch as the published files have it, opcode by opcode: Python 2, protocol 2, numpy before 2."""
    return (
        b"\x80\x02}(U\x06labels](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
        b"U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01M" + len(labels).to_bytes(2, "little") + b"M\x00\x0c\x86"
        b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + len(pixels).to_bytes(4, "little") + pixels + b"tbu."
    )  # fmt: skip


def write_pickles(root: Path, content: dict[str, np.ndarray], parts: int) -> Pickles:
    """CIFAR-style batches of an (N, 32, 32, 3) set, and their layout."""
    folder = root / "batches"
    folder.mkdir(parents=True)

    def write(name: str, x: np.ndarray, y: np.ndarray) -> tuple[str, str]:
        rows = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
        data = python2_pickle(rows.tobytes(), y.tolist())
        (folder / name).write_bytes(data)
        return name, hashlib.md5(data).hexdigest()

    pairs = zip(np.array_split(content["x_train"], parts), np.array_split(content["y_train"], parts), strict=True)
    train = tuple(write(f"data_batch_{i}", x, y) for i, (x, y) in enumerate(pairs, 1))
    return Pickles("batches", train, (write("test_batch", content["x_test"], content["y_test"]),), "labels")


GREY = arrays((28, 28))
COLOUR = arrays((32, 32, 3))


def spec_of(content: dict[str, np.ndarray], *readers) -> Spec:
    shape = content["x_train"].shape[1:]
    return Spec(shape, TRAIN, TEST, 10, readers, sha256=digests(content))


def grey_spec() -> Spec:
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


def test_npz_and_pickled_batches_give_identical_tensors(tmp_path: Path) -> None:
    np.savez(tmp_path / "colour.npz", **COLOUR)
    layout = write_pickles(tmp_path, COLOUR, parts=3)
    npz = read("colour", spec_of(COLOUR, partial(read_npz, file="colour.npz")), tmp_path)
    assert_same(npz, read("colour", spec_of(COLOUR, partial(read_pickles, layout=layout)), tmp_path))
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
    assert not isinstance(caught.value, MissingDataError)


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_a_malicious_pickle_is_refused_before_it_runs(tmp_path: Path) -> None:
    layout = write_pickles(tmp_path, COLOUR, parts=1)
    target = tmp_path / "executed"
    evil = pickle.dumps({b"data": Malicious(target), b"labels": []})
    (tmp_path / "batches" / "data_batch_1").write_bytes(evil)
    layout = replace(layout, train=(("data_batch_1", hashlib.md5(evil).hexdigest()),))
    with pytest.raises(DataError, match=r"data_batch_1.*mkdir"):
        read("colour", spec_of(COLOUR, partial(read_pickles, layout=layout)), tmp_path)
    assert not target.exists()


# A dtype of objects whose flags say that it holds none, an array of it over eight bytes of the file, and its use.
POINTERS = (
    b"\x80\x02}(U\x04datacnumpy\nndarray\ncnumpy\nndarray\n(K\x01\x85cnumpy\ndtype\nU\x01O\x85R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ"
    b"\xff\xff\xff\xffK\x00tbU\x08AAAAAAAAtR\x85RU\x06labels]u."
)
READ = """
import sys
from pathlib import Path
from gspace.lab.errors import DataError
from gspace.lab.formats import Pickles, read_pickles
batch = ("data_batch_1", sys.argv[2])
try:
    print(read_pickles(Path(sys.argv[1]), layout=Pickles("batches", (batch,), (batch,), "labels")).arrays["x_train"])
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize("known", [False, True], ids=["wrong MD5", "right MD5"])
def test_a_hostile_batch_does_not_crash_the_process(tmp_path: Path, known: bool) -> None:
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "data_batch_1").write_bytes(POINTERS)
    md5 = hashlib.md5(POINTERS if known else b"").hexdigest()
    command = [sys.executable, "-c", READ, str(tmp_path), md5]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"ended by signal {-done.returncode}"
    assert ("refused or damaged: an array of b'O'" if known else "damaged: its MD5 is not") in done.stdout


def test_a_batch_is_not_unpickled_before_its_checksum_is_compared(tmp_path: Path) -> None:
    layout = write_pickles(tmp_path, COLOUR, parts=1)
    (tmp_path / "batches" / "data_batch_1").write_bytes(pickle.dumps({b"data": Malicious(tmp_path / "executed")}))
    with pytest.raises(DataError, match="its MD5 is not"):
        read("colour", spec_of(COLOUR, partial(read_pickles, layout=layout)), tmp_path)


@pytest.mark.parametrize("change", [_cut, _flip, Path.unlink])
def test_a_damaged_pickle_is_named(tmp_path: Path, change) -> None:
    layout = write_pickles(tmp_path, COLOUR, parts=3)
    change(tmp_path / "batches" / "data_batch_2")
    with pytest.raises(DataError, match="data_batch_2"):
        read("colour", spec_of(COLOUR, partial(read_pickles, layout=layout)), tmp_path)


def test_an_absent_data_set_says_where_it_was_sought_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=f"{re.escape(str(tmp_path))}.*GSPACE_DATA.*--download"):
        load("cifar10", tmp_path)


def test_the_data_folder_is_the_argument_then_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSPACE_DATA", str(tmp_path / "b"))
    assert data_folder(tmp_path / "a") == tmp_path / "a"
    assert data_folder() == tmp_path / "b"


# --- the real data, where it is ---------------------------------------------------------------------------------------


def real(name: str) -> DataSet:
    try:
        return load(name)
    except MissingDataError as error:
        pytest.skip(f"the real data is not here: {error}")


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_real_images_from_idx_files_are_identical(tmp_path: Path, name: str) -> None:
    data = real(name)
    folder = {"mnist": "MNIST/raw", "fashion_mnist": "FashionMNIST/raw"}[name]
    stored = {key: getattr(data, key).numpy().astype(np.uint8) for key in KEYS}
    write_idx(tmp_path / folder, {key: value[:, 0] if key[0] == "x" else value for key, value in stored.items()})
    assert_same(data, load(name, tmp_path))


def test_real_cifar10_from_pickled_batches_is_identical(tmp_path: Path) -> None:
    data = real("cifar10")
    stored = {key: getattr(data, key).numpy().astype(np.uint8) for key in KEYS}
    content = {key: value.transpose(0, 2, 3, 1) if key[0] == "x" else value for key, value in stored.items()}
    layout = write_pickles(tmp_path, content, parts=5)
    spec = replace(SETS["cifar10"], readers=(partial(read_pickles, layout=layout),))  # pixels still checked by SHA-256
    assert_same(data, load("cifar10", tmp_path, sets={"cifar10": spec}))


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


def test_a_download_is_checked_and_reports_progress(tmp_path: Path, server: Server) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = fetch(server.url(), tmp_path / "file", SHA256, lambda *args: seen.append(args))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert list(tmp_path.iterdir()) == [path]


def test_a_broken_download_leaves_nothing_and_can_be_repeated(tmp_path: Path, server: Server) -> None:
    server.cut = 600_000
    with pytest.raises(DataError, match=r"cannot download .*file\.bin: .*run this again"):
        fetch(server.url(), tmp_path / "file", SHA256, silent)
    assert list(tmp_path.iterdir()) == []
    server.cut = None
    assert fetch(server.url(), tmp_path / "file", SHA256, silent).read_bytes() == CONTENT


def test_a_wrong_checksum_is_reported_and_nothing_is_left(tmp_path: Path, server: Server) -> None:
    with pytest.raises(DataError, match=r"SHA-256 differs.*deleted"):
        fetch(server.url(), tmp_path / "file", hashlib.sha256(b"other").hexdigest(), silent)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_on_the_server_is_reported(tmp_path: Path, server: Server) -> None:
    with pytest.raises(DataError, match=r"nothing\.bin.*Not Found"):
        fetch(server.url("nothing.bin"), tmp_path / "file", SHA256, silent)


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, server: Server) -> None:
    (tmp_path / "data").write_text("a file where a folder should be")
    with pytest.raises(DataError, match=r"cannot write .*data/file: "):
        fetch_all([Remote(server.url(), SHA256, "data/file")], tmp_path, silent)


def test_two_downloads_of_one_file_do_not_meet(tmp_path: Path, server: Server) -> None:
    with locked(tmp_path / ".file.lock"), pytest.raises(DataError, match="another process is downloading"):
        fetch_all([Remote(server.url(), SHA256, "file")], tmp_path, silent)


def test_an_absent_set_is_downloaded_unpacked_and_read(tmp_path: Path, server: Server) -> None:
    layout = write_pickles(tmp_path / "source", COLOUR, parts=2)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(tmp_path / "source" / "batches", "batches")
    server.files["/colour.tar.gz"] = buffer.getvalue()
    remote = Remote(server.url("colour.tar.gz"), hashlib.sha256(buffer.getvalue()).hexdigest(), "batches")
    spec = replace(spec_of(COLOUR, partial(read_pickles, layout=layout)), remotes=(remote,))
    data = load("colour", tmp_path / "data", download=silent, sets={"colour": spec})
    assert_same(data, load("colour", tmp_path / "source", sets={"colour": spec}))
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == [".batches.lock", "batches"]


@pytest.mark.parametrize("name", ["../outside", "batches/link"])
def test_an_archive_that_reaches_outside_is_refused(name: str, tmp_path: Path) -> None:
    archive, target = tmp_path / "a.tar.gz", tmp_path / "in" / "batches"
    target.parent.mkdir()
    member = tarfile.TarInfo(name)
    if name.endswith("link"):
        member.type, member.linkname = tarfile.SYMTYPE, "/etc"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(member)
    with pytest.raises(DataError, match="cannot be unpacked"):
        unpack(archive, target)
    assert list(target.parent.iterdir()) == []


# --- transforms -------------------------------------------------------------------------------------------------------


def small(shape: tuple[int, ...] = (32, 32, 3), images: int = TRAIN) -> DataSet:
    random = torch.Generator().manual_seed(3)
    height, width, channels = (*shape, 1)[:3]
    x = torch.randint(256, (images, channels, height, width), generator=random, dtype=torch.uint8)
    y = torch.randint(10, (images,), generator=random)
    return DataSet(
        "small", x, y, x[:TEST], y[:TEST], 10, 255.0, torch.full((channels,), 0.4), torch.full((channels,), 0.2)
    )


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
    with pytest.raises(RecipeError, match="train_size 101"):
        subset(data, train=101)
    with pytest.raises(RecipeError, match="validation 100"):
        subset(data, validation=100)
