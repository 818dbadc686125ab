"""README and pages: their Python runs as it stands, block after block, none left out; links lead somewhere."""

import re
from pathlib import Path
from typing import Any

import pytest

import gspace
from gspace.lab.cli import COMMANDS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RUN = (README, ROOT / "docs" / "usage.md", ROOT / "docs" / "quantization.md")
PAGES = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[str]:
    """The Python blocks, each moved down to the line where it stands, so that a traceback points into the file."""
    return ["\n" * text.count("\n", 0, found.start(1)) + found.group(1) for found in FENCE.finditer(text)]


def run(text: str, name: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(text):
        exec(compile(block, name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_the_code_of_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert blocks(text)[0].lstrip().startswith("import gspace")
    assert len(blocks(text)) == text.count("```python")
    assert "gspace" in run(text, str(path))


def test_a_block_that_raises_is_found_in_its_line() -> None:
    text = "# title\n\n```python\na = 1\n```\n\ntext\n\n```python\nb = a + 1\nb / 0\n```\n"
    with pytest.raises(ZeroDivisionError) as caught:
        run(text, "README.md")
    assert caught.traceback[-1].lineno + 1 == 11


def test_the_readme_is_short() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub and mkdocs write them."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files_that_are_there(path: Path) -> None:
    for link in LINK.findall(path.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def test_the_paper_is_cited_alike() -> None:
    """The citation file and the README name the same authors in the same order."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    names = re.findall(r"given-names: (.*)\n +family-names: (.*)", citation)
    bibtex = " ".join(README.read_text(encoding="utf-8").split("author    = {")[1].split("}")[0].split())
    assert len(names) == 8
    assert " and ".join(f"{given} {family}" for given, family in names) == bibtex


def test_every_public_name_is_called_on_some_page() -> None:
    """All but the types of what calls return."""
    code = "\n".join(block for path in RUN for block in blocks(path.read_text(encoding="utf-8")))
    results = {"Analysis", "Edges", "Equivalence", "Mapping", "PathError", "Pin", "Skeleton", "TraceError", "UnitGroup"}
    assert {name for name in gspace.__all__ if not re.search(rf"gspace\.{name}\b", code)} == results


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_the_commands_of_a_page_exist(path: Path) -> None:
    named = set(re.findall(r"(?:^|`)gspace ([a-z]+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert named
    assert named <= COMMANDS.keys()
