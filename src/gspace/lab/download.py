"""Downloads data files (pooch): checked by SHA-256, and under their own names only when whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gspace.lab.display import DownloadBar
from gspace.lab.errors import DataError, reason

CHUNK = 1 << 18
TIMEOUT = 60  # seconds without a byte


@dataclass(frozen=True)
class Remote:
    """One file to download.

    Attributes:
        url: Where it is.
        sha256: Of the file.
        path: Where it belongs below the data folder.
    """

    url: str
    sha256: str
    path: str


def fetch_all(remotes: Sequence[Remote], root: Path) -> None:
    """Every remote that is not yet below `root`. Two processes that download the same do not disturb each other."""
    import pooch  # here: it brings requests, which nothing else needs
    from requests import RequestException

    pooch.get_logger().setLevel("ERROR")
    for remote in remotes:
        target, url = root / remote.path, remote.url
        bar = DownloadBar(target.name)
        way = pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK, timeout=TIMEOUT)
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
