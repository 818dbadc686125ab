"""The documentation site: it builds strictly, fetches nothing, and a mistake in it is an error."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("mkdocs", reason="the site is built by mkdocs: pip install '.[docs]'")

ROOT = Path(__file__).parents[1]
RESOURCE = re.compile(r'<(?:link|script|img)\b[^>]*?(?:href|src)="?(https?:[^">\s]+)')


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=quiet, capture_output=True, text=True, timeout=300)


def test_it_builds_strictly_and_asks_no_other_server(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "tutorials/symmetry.html", "reference/optimizers.html"} <= pages.keys()
    assert {url for text in pages.values() for url in RESOURCE.findall(text)} == set()
    assert "&gt;&gt;&gt;" in pages["reference/symmetry.html"], "examples are blocks of code"


MISTAKES = {
    "a link to nowhere": ("docs/limits.md", "# Known limits", "# Known limits\n\n[gone](gone.md)", "gone.md"),
    "an anchor to nowhere": ("docs/limits.md", "# Known limits", "# Known limits\n\n[x](usage.md#gone)", "gone"),
    "a public name without a page": ("src/gspace/__init__.py", '"analyze",', '"analyze", "devices",', "devices"),
    "a name without a docstring": ("src/gspace/group/scaling.py", '"""What undoes these."""', "", "inverse"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error(name: str, tmp_path: Path) -> None:
    path, before, after, said = MISTAKES[name]
    for part in ("docs", "src"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml", *(ROOT / "results").glob("*.svg")):
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(file, copy)
    text = (tmp_path / path).read_text(encoding="utf-8")
    assert before in text
    (tmp_path / path).write_text(text.replace(before, after, 1), encoding="utf-8")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert said in done.stderr
