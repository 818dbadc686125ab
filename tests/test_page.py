"""The page in a real browser: no error, curves on the screen, tables that fit. Skipped where there is no Chromium."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from gspace.lab import cli, demo
from gspace.lab.archive import read_records
from gspace.lab.document import Document, Panel, Section, Series, Table, page
from gspace.lab.experiments import EXPERIMENTS
from gspace.lab.figures import COLOURS, draw
from gspace.lab.report import assemble

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (or named by CHROMIUM)")

FIGURE = b'<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"/>'
EPOCHS = tuple(float(k) for k in range(1, 31))


def falling(label: str, rate: float, control: bool = False, hue: int = 0) -> Series:
    return Series(label, tuple((x, (0.8 * rate**x, rate**x, 1.2 * rate**x)) for x in EPOCHS), control, hue)


LINES = Panel("curves", "epoch", "training loss", (falling("SGD", 0.9), falling("G-SGD", 0.8, True, 1)), log_y=True)
ZERO = Panel("with a zero", "lr", "loss", (Series("x", ((0.01, (0.0,)), (1.0, (0.5, 2.0)))),), True, True)
PANELS = (LINES, ZERO)
DOCUMENT = Document(
    "Title",
    "gspace report runs",
    ("text",),
    (Section("one", "Section", "gspace x", ("text",), (Table("T", ("", "n"), (("a", "1"),)),), PANELS),),
    (),
)


@dataclass(frozen=True)
class Seen:
    """What the browser made of a page: its document after all scripts, and what its console said."""

    dom: str
    console: str


def browse(path: Path, *arguments: str) -> Seen:
    assert BROWSER is not None
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1300,1400"]
    quiet = ["--enable-logging=stderr", "--virtual-time-budget=3000", "--host-resolver-rules=MAP * 0.0.0.0"]
    alone = ["--disable-background-networking", "--no-first-run"]
    profile = f"--user-data-dir={path.parent / 'profile'}"
    result = subprocess.run(
        [BROWSER, *flags, *quiet, *alone, profile, *arguments, path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    console = "\n".join(line for line in result.stderr.splitlines() if "CONSOLE" in line)
    return Seen(result.stdout, console)


def drawn(document: Document, folder: Path) -> dict[str, bytes]:
    """The figures of its sections."""
    made = [draw(section.panels, folder / f"{section.name}.svg") for section in document.sections if section.panels]
    return {path.stem: path.read_bytes() for path in made}


# Leaves in the page which pictures were drawn, and which tables are wider than the window.
LOOK = """<script>
const found = document.body.dataset, images = [...document.images], boxes = [...document.querySelectorAll(".scroll")];
window.addEventListener("load", () => {
  found.images = images.length;
  found.shown = images.filter((image) => image.naturalWidth > 0).length;
  found.tables = boxes.length;
  found.wide = boxes.filter((box) => box.scrollWidth > box.clientWidth).length;
});
</script></body>"""


def looked_at(text: str, path: Path) -> dict[str, int]:
    path.write_text(text.replace("</body>", LOOK))
    seen = browse(path, "--dump-dom")
    assert seen.console == ""
    return {name: int(value) for name, value in re.findall(r'data-(\w+)="(\d+)"', seen.dom)}


def test_the_page_opens_without_an_error_and_shows_its_figures(tmp_path: Path) -> None:
    text = page(DOCUMENT, drawn(DOCUMENT, tmp_path))
    assert looked_at(text, tmp_path / "page.html") == {"images": 1, "shown": 1, "tables": 1, "wide": 0}


def test_a_figure_or_a_table_gone_wrong_would_be_seen(tmp_path: Path) -> None:
    text = page(DOCUMENT, {"one": b"no picture"}).replace(">1</td>", f">{'&nbsp;1' * 300}</td>")
    assert looked_at(text, tmp_path / "page.html") == {"images": 1, "shown": 0, "tables": 1, "wide": 1}


def test_every_table_of_the_recorded_runs_fits_a_laptop(tmp_path: Path) -> None:
    records = read_records([Path(__file__).parents[1] / "results" / "runs"])
    document = assemble(records, list(EXPERIMENTS.values()), "gspace report results/runs")
    figures = {section.name: FIGURE for section in document.sections}
    found = looked_at(page(document, figures), tmp_path / "page.html")
    assert found["tables"] > 20
    assert found["wide"] == 0


def test_the_curves_are_on_the_screen(tmp_path: Path) -> None:
    path, picture = tmp_path / "page.html", tmp_path / "page.png"
    alone = replace(DOCUMENT, sections=(replace(DOCUMENT.sections[0], panels=(LINES,)),))
    path.write_text(page(alone, drawn(alone, tmp_path)))
    browse(path, f"--screenshot={picture}")
    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(int)
    for colour in COLOURS[:2]:
        rgb = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
        close = np.abs(pixels - rgb).max(2) < 12
        rows, columns = close.nonzero()
        assert close.sum() > 200, f"{colour} is hardly there"
        assert np.ptp(columns) > 300, f"{colour} does not run across a panel"
        assert np.ptp(rows) > 60, f"{colour} does not fall"


def test_the_page_of_the_demo_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, (recipe, _) = next(iter(demo.NETWORKS.items()))
    monkeypatch.setattr(demo, "NETWORKS", {name: (recipe.but(epochs=0.5, eval_every=5), 1)})
    monkeypatch.setattr(demo, "STEPS", 12)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 0
    found = looked_at((tmp_path / "report" / "report.html").read_text(), tmp_path / "page.html")
    assert found["images"] == found["shown"] == 2
    assert found["wide"] == 0
