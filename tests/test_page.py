"""The page in a real browser: no error, curves on the screen, hover and zoom. Skipped where there is no Chromium."""

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
from gspace.lab.document import Document, Panel, Section, Series, Table
from gspace.lab.figures import COLOURS
from gspace.lab.page import page

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (or named by CHROMIUM)")

EPOCHS = tuple(float(k) for k in range(1, 31))


def falling(label: str, rate: float, control: bool = False, hue: int = 0) -> Series:
    y = tuple(rate**x for x in EPOCHS)
    return Series(label, EPOCHS, y, tuple(0.8 * v for v in y), tuple(1.2 * v for v in y), control, hue)


LINES = Panel("curves", "epoch", "training loss", (falling("SGD", 0.9), falling("G-SGD", 0.8, True, 1)), log_y=True)
POINTS = Panel(
    "points", "", "test error, %", (Series("one", (-0.1, 0.9), (3.0, 2.0), (2.5, 1.5), (3.5, 2.5)),), ticks=("a", "b")
)
ZERO = Panel("with a zero", "lr", "loss", (Series("x", (0.01, 1.0), (0.0, 1.0), (0.0, 0.5), (0.0, 2.0)),), True, True)
PANELS = (LINES, POINTS, ZERO)
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
    profile = f"--user-data-dir={path.parent / 'profile'}"
    result = subprocess.run(
        [BROWSER, *flags, *quiet, profile, *arguments, path.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    console = "\n".join(line for line in result.stderr.splitlines() if "CONSOLE" in line)
    return Seen(result.stdout, console)


def scripted(document: Document, path: Path, script: str) -> Seen:
    """Opens the page and runs a script in it that leaves its findings in `document.body.dataset`."""
    path.write_text(page(document).replace("</body>", f"<script>{script}</script></body>"))
    seen = browse(path, "--dump-dom")
    assert seen.console == ""
    return seen


def test_the_page_opens_without_an_error_and_draws_every_panel(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(DOCUMENT))
    seen = browse(path, "--dump-dom")
    assert seen.console == ""
    assert f'data-drawn="{len(PANELS)}"' in seen.dom
    assert seen.dom.count("<svg") == len(PANELS)
    curves = re.findall(r'class="curve" points="([^"]*)"', seen.dom)
    assert [len(points.split()) for points in curves] == [30, 30, 2]
    assert not re.search(r"NaN|Infinity|undefined", re.sub(r"<script.*?</script>", "", seen.dom, flags=re.DOTALL))


def test_an_error_of_a_page_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(DOCUMENT).replace('document.getElementById("panels")', 'document.getElementById("absent")'))
    assert "TypeError" in browse(path, "--dump-dom").console


def test_the_curves_are_on_the_screen(tmp_path: Path) -> None:
    path, picture = tmp_path / "page.html", tmp_path / "page.png"
    alone = replace(DOCUMENT, sections=(replace(DOCUMENT.sections[0], panels=(LINES,)),))
    path.write_text(page(alone))
    browse(path, f"--screenshot={picture}")
    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(int)
    for colour in COLOURS[:2]:
        rgb = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
        close = np.abs(pixels - rgb).max(2) < 12
        rows, columns = close.nonzero()
        assert close.sum() > 200, f"{colour} is hardly there"
        assert np.ptp(columns) > 300, f"{colour} does not run across a panel"
        assert np.ptp(rows) > 60, f"{colour} does not fall"


HOVER = """
const svg = document.querySelector("svg"), box = svg.getBoundingClientRect();
const at = (x, y) => ({clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true});
svg.dispatchEvent(new PointerEvent("pointermove", at(0.5, 0.5)));
document.body.dataset.tip = document.querySelector(".tip").textContent;
document.body.dataset.shown = String(!document.querySelector(".tip").hidden);
svg.dispatchEvent(new PointerEvent("pointerleave", at(2, 2)));
document.body.dataset.gone = String(document.querySelector(".tip").hidden);
"""


def test_hovering_shows_the_values_under_the_pointer(tmp_path: Path) -> None:
    seen = scripted(DOCUMENT, tmp_path / "page.html", HOVER)
    tip = re.search(r'data-tip="epoch (\d+)SGD: ([\d.]+) \(.*?\)G-SGD: ([\d.]+)', seen.dom)
    assert tip, re.findall(r'data-tip="[^"]*"', seen.dom)
    epoch = int(tip[1])
    assert 12 <= epoch <= 18
    assert float(tip[2]) == pytest.approx(0.9**epoch, rel=1e-3)
    assert float(tip[3]) == pytest.approx(0.8**epoch, rel=1e-3)
    assert 'data-shown="true"' in seen.dom
    assert 'data-gone="true"' in seen.dom


ZOOM = """
const svg = document.querySelector("svg"), box = svg.getBoundingClientRect();
const place = (x, y) => ({clientX: box.left + x * box.width, clientY: box.top + y * box.height});
const at = (x, y) => ({...place(x, y), bubbles: true, pointerId: 1});
svg.setPointerCapture = () => {};
const points = () => document.querySelector(".curve").getAttribute("points");
const span = () => { const x = points().split(" ").map((p) => Number(p.split(",")[0])); return x.at(-1) - x[0]; };
const found = document.body.dataset, before = span(), first = points();
svg.dispatchEvent(new PointerEvent("pointerdown", at(0.4, 0.2)));
svg.dispatchEvent(new PointerEvent("pointermove", at(0.5, 0.3)));
found.selected = String(document.querySelectorAll(".selection").length);
svg.dispatchEvent(new PointerEvent("pointerup", at(0.6, 0.5)));
found.dragged = String(span() / before);
svg.dispatchEvent(new MouseEvent("dblclick", at(0.5, 0.5)));
found.back = String(points() === first);
svg.dispatchEvent(new WheelEvent("wheel", {...at(0.5, 0.5), deltaY: -100, cancelable: true}));
found.wheel = String(span() / before);
svg.dispatchEvent(new MouseEvent("dblclick", at(0.5, 0.5)));
document.querySelector(".legend button").click();
found.hidden = String(document.querySelector("figure").querySelectorAll(".curve").length);
document.querySelector(".legend .log").click();
found.linear = String(document.querySelector(".curve").getAttribute("points") !== first);
"""


def test_dragging_and_the_wheel_zoom_and_a_double_click_goes_back(tmp_path: Path) -> None:
    seen = scripted(DOCUMENT, tmp_path / "page.html", ZOOM)
    found = dict(re.findall(r'data-(\w+)="([^"]*)"', seen.dom))
    plotted = (620 - 62 - 14) / 620  # of the picture's width
    assert float(found["dragged"]) == pytest.approx(plotted / 0.2, rel=0.01)
    assert float(found["wheel"]) == pytest.approx(1 / 0.8, rel=0.01)
    assert (found["selected"], found["back"], found["hidden"], found["linear"]) == ("1", "true", "1", "true")


def test_the_page_of_the_demo_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {name: (recipe.but(epochs=0.5, eval_every=5), 1) for name, (recipe, _) in demo.NETWORKS.items()}
    monkeypatch.setattr(demo, "NETWORKS", short)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 0
    seen = browse(tmp_path / "report" / "report.html", "--dump-dom")
    assert seen.console == ""
    assert 'data-drawn="4"' in seen.dom
    assert seen.dom.count('class="curve"') == 4 * len(demo.METHODS)
