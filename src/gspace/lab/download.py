"""Downloads a data file: resumed where it stopped, checked by SHA-256, and under its own name only when whole.

Bytes go to `NAME.part`. A broken connection leaves the part, and the next call asks for the rest (HTTP Range). A whole
file with a wrong checksum is deleted and reported. Archives are unpacked beside their destination and moved there.
"""

import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath

from gspace.lab.errors import BusyError, DataError
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
    """Downloads `url` to `target`, continuing an earlier attempt's `.part`."""
    part = target.with_name(f"{target.name}.part")
    try:
        _transfer(url, part, progress)
    except (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError) as error:
        kept = f"; {part.stat().st_size} bytes are kept, run this again to continue" if part.exists() else ""
        raise DataError(f"cannot download {url}: {getattr(error, 'reason', None) or error}{kept}") from error
    if _digest(part) != sha256:
        part.unlink()
        raise DataError(f"{url}: the file arrived damaged (SHA-256 differs) and was deleted; run this again")
    os.replace(part, target)
    return target


def _transfer(url: str, part: Path, progress: Progress) -> None:
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and done:  # nothing is left to send: the checksum will tell whether the part is whole
            return
        raise
    with response:
        if response.status != 206:  # the server ignored Range and sends all of it
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length is not None else None
        name = url.rsplit("/", 1)[-1]
        with part.open("ab" if done else "wb") as file:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                progress(name, done, total)
        if total is not None and done < total:
            raise ConnectionError(f"the connection broke after {done} of {total} bytes")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(archive: Path, target: Path) -> None:
    """Unpacks a tar archive that holds the folder `target.name`, and moves that folder into place."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        try:
            with tarfile.open(archive) as tar:
                _extract(tar, temporary)
        except (tarfile.TarError, EOFError) as error:
            raise DataError(f"{archive} cannot be unpacked: {error}") from error
        folder = Path(temporary) / target.name
        if not folder.is_dir():
            raise DataError(f"{archive} holds no folder {target.name}")
        shutil.move(folder, target)


def _extract(tar: tarfile.TarFile, folder: str) -> None:
    """Files and folders that stay below `folder`; Python before 3.11.4 has no filter for that."""
    if hasattr(tarfile, "data_filter"):
        tar.extractall(folder, filter="data")
        return
    for member in tar:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name} is no file or folder of its own")
        tar.extract(member, folder)
