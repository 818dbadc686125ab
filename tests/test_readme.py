"""The Python of the README runs as it stands: block after block, in one namespace, none left out."""

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[str]:
    """The Python blocks, each moved down to the line where it stands, so that a traceback points into the file."""
    return ["\n" * text.count("\n", 0, found.start(1)) + found.group(1) for found in FENCE.finditer(text)]


def run(text: str, name: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(text):
        exec(compile(block, name, "exec"), namespace)
    return namespace


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = README.read_text(encoding="utf-8")
    assert blocks(text)[0].lstrip().startswith("import gspace")
    assert len(blocks(text)) == text.count("```python")
    assert "gspace" in run(text, str(README))


def test_a_block_that_raises_is_found_in_its_line() -> None:
    text = "# title\n\n```python\na = 1\n```\n\ntext\n\n```python\nb = a + 1\nb / 0\n```\n"
    with pytest.raises(ZeroDivisionError) as caught:
        run(text, "README.md")
    assert caught.traceback[-1].lineno + 1 == 11
