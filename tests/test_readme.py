"""README and pages: their Python runs as it stands, block after block, none left out; links lead somewhere."""

import inspect
import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import gspace
from gspace.lab.cli import COMMANDS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
RUN = (README, DOCS / "usage.md", DOCS / "quantization.md", *sorted((DOCS / "tutorials").glob("*.md")))
PAGES = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```python[^\n]*\n.*?^```$(?:\n\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[str]:
    """The Python blocks, each moved down to the line where it stands, so that a traceback points into the file."""
    return ["\n" * text.count("\n", 0, found.start(1)) + found.group(1) for found in FENCE.finditer(text)]


def run(text: str, name: str) -> dict[str, Any]:
    """Runs the blocks one after the other; what a plain block right behind one shows is what that one prints."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = [found.group(1) for found in SHOWN.finditer(text)]
    for block, expected in zip(blocks(text), shown, strict=True):
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(block, name, "exec"), namespace)
        assert (expected or "") in printed.getvalue(), printed.getvalue()
    return namespace


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_the_code_of_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert blocks(text)[0].lstrip().startswith("import gspace")
    assert len(blocks(text)) == text.count("```python")
    assert "gspace" in run(text, str(path))


def test_what_a_page_shows_is_what_its_code_prints() -> None:
    text = "```python\nprint(1 + 1)\n```\n\n```\n{}\n```\n\ntext\n\n```\nno output\n```\n"
    run(text.format(2), "right.md")
    with pytest.raises(AssertionError):
        run(text.format(3), "wrong.md")


def test_a_block_that_raises_is_found_in_its_line() -> None:
    text = "# title\n\n```python\na = 1\n```\n\ntext\n\n```python\nb = a + 1\nb / 0\n```\n"
    with pytest.raises(ZeroDivisionError) as caught:
        run(text, "README.md")
    assert caught.traceback[-1].lineno + 1 == 11


def test_the_readme_is_short() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_page_holds_what_a_merge_left(path: Path) -> None:
    assert not re.search(r"^(<{7}|={7}|>{7})( |$)", path.read_text(encoding="utf-8"), re.MULTILINE)


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


def test_every_page_is_on_the_site() -> None:
    listed = set(re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert pages <= listed, "mkdocs.yml lists the pages"
    assert all((ROOT / name).exists() for name in listed - pages if not name.startswith(("index", "reference/")))


def test_the_paper_is_cited_alike() -> None:
    """The citation file and the README name the same authors in the same order."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    names = re.findall(r"given-names: (.*)\n +family-names: (.*)", citation)
    bibtex = " ".join(README.read_text(encoding="utf-8").split("author    = {")[1].split("}")[0].split())
    assert len(names) == 8
    assert " and ".join(f"{given} {family}" for given, family in names) == bibtex


RESULTS = {"Analysis", "Edges", "Equivalence", "Mapping", "PathError", "Pin", "Skeleton", "TraceError", "UnitGroup"}


def test_every_public_name_is_called_on_some_page() -> None:
    """All but the types of what calls return."""
    code = "\n".join(block for path in RUN for block in blocks(path.read_text(encoding="utf-8")))
    assert {name for name in gspace.__all__ if not re.search(rf"gspace\.{name}\b", code)} == RESULTS


def test_every_public_call_has_an_example() -> None:
    """They run as doctests. Those of `gspace.paths` are one story, told by the module."""
    parts = [gspace, gspace.quantization]
    named = {name: getattr(part, name) for part in parts for name in part.__all__}
    told = {name for name, item in named.items() if re.search(rf">>>.*\b{name}\b", inspect.getdoc(item) or "")}
    assert named.keys() - told - RESULTS - {"Mappings", "Side"} == set()
    story = inspect.getdoc(gspace.paths) or ""
    assert {name for name in gspace.paths.__all__ if f"{name}(" not in story} == {"Basis", "Path", "Wiring"}


# Public only so that other modules of the library may call them.
INSIDE = {"adopt", "chosen", "coordinates", "fits", "lies_apart", "part", "stacked", "told", "use"}


def test_every_public_method_has_an_example() -> None:
    """In a block of a page or in a doctest; what torch's optimizers have too is theirs to show."""
    code = "\n".join(block for path in RUN for block in blocks(path.read_text(encoding="utf-8")))
    classes = {item for part in (gspace, gspace.quantization) for item in vars(part).values() if inspect.isclass(item)}
    wanted: set[str] = set()
    for owner in {base for item in classes for base in item.__mro__ if base.__module__.startswith("gspace")}:
        code += inspect.getdoc(owner) or ""
        for name, item in vars(owner).items():
            if inspect.isroutine(item) or isinstance(item, property):
                code += inspect.getdoc(item) or ""
                wanted |= {name} - set(dir(torch.optim.Optimizer))
    assert {name for name in wanted if name[0] != "_" and not re.search(rf"\.{name}\b", code)} == INSIDE


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_the_commands_of_a_page_exist(path: Path) -> None:
    named = set(re.findall(r"(?:^|`)gspace ([a-z]+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert named
    assert named <= COMMANDS.keys()
