"""Downloads a data file (pooch): checked by SHA-256, and under its own name only when whole.

Archives are unpacked beside their destination and moved there, once their checksum is right.
"""

import shutil
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspace.lab.errors import BusyError, DataError, reason
from gspace.lab.lock import locked

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all if known

CHUNK = 1 << 18
TIMEOUT = 60  # seconds without a byte


@dataclass(frozen=True)
class Remote:
    """One file to download.

    Attributes:
        url: Where it is.
        sha256: Of the file as downloaded.
        path: Where it belongs below the data folder; for a tar archive, the folder it unpacks to.
    """

    url: str
    sha256: str
    path: str


def fetch_all(remotes: Sequence[Remote], root: Path, progress: Progress) -> None:
    """Every remote that is not yet below `root`."""
    for remote in remotes:
        target = root / remote.path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with locked(target.with_name(f".{target.name}.lock")):
                if not target.exists():
                    _fetch_one(remote, target, progress)
        except BusyError as error:
            raise DataError(f"another process is downloading {target}: wait for it, then run this again") from error
        except OSError as error:
            raise DataError(f"cannot write {target}: {error.strerror or error}") from error


def _fetch_one(remote: Remote, target: Path, progress: Progress) -> None:
    name = remote.url.rsplit("/", 1)[-1]
    if not name.endswith(".tar.gz"):
        fetch(remote.url, target, remote.sha256, progress)
        return
    archive = target.with_name(name)
    fetch(remote.url, archive, remote.sha256, progress)
    unpack(archive, target)
    archive.unlink()


def fetch(url: str, target: Path, sha256: str, progress: Progress) -> Path:
    """Downloads `url` to `target`, which is there only when it is whole and has the checksum."""
    import pooch  # here: it brings requests, which nothing else needs
    from requests import RequestException

    pooch.get_logger().setLevel("ERROR")
    bar = Bar(url.rsplit("/", 1)[-1], progress)
    way = pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK, timeout=TIMEOUT)
    try:
        pooch.retrieve(url, f"sha256:{sha256}", target.name, target.parent, downloader=way)
    except RequestException as error:
        raise DataError(f"cannot download {url}: {reason(error)}; run this again") from error
    except ValueError as error:
        raise DataError(f"{url}: the file arrived damaged (SHA-256 differs) and was deleted; run this again") from error
    return target


class Bar:
    """The progress bar that pooch moves on."""

    def __init__(self, name: str, progress: Progress) -> None:
        self.name, self.progress = name, progress
        self.total, self.done = 0, 0

    def update(self, count: int) -> None:
        self.done += count
        self.progress(self.name, min(self.done, self.total or self.done), self.total or None)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None: ...


def unpack(archive: Path, target: Path) -> None:
    """Unpacks a tar archive that holds the folder `target.name`, and moves that folder into place."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        try:
            with tarfile.open(archive) as tar:
                tar.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
                tar.extractall(temporary)
        except (tarfile.TarError, EOFError) as error:
            raise DataError(f"{archive} cannot be unpacked: {error}") from error
        folder = Path(temporary) / target.name
        if not folder.is_dir():
            raise DataError(f"{archive} holds no folder {target.name}")
        shutil.move(folder, target)
