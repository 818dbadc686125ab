"""A report as data, tables of text and panels of curves, and as what it becomes: Markdown, and one HTML file.

Text is Markdown. What stands in a cell may be a name out of a record, and is no HTML and no link.
"""

import html
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, select_autoescape
from markdown_it import MarkdownIt


class Table(NamedTuple):
    """Rows of text under a head; `numbers` is the first column that holds numbers, the note is said before it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: int = 1
    note: str = ""


@dataclass(frozen=True)
class Series:
    """One curve: the values of its runs at each x; drawn are their mean, and a band from the smallest to the largest.

    A control is dashed. `hue` is the number of its colour, `width` that of the line, where another may lie on it.
    """

    label: str
    points: Sequence[tuple[float, Sequence[float]]]
    control: bool = False
    hue: int = 0
    width: float = 1.3

    @property
    def drawn(self) -> list[tuple[float, ...]]:
        """All x, means, smallest and largest values."""
        return list(zip(*((x, fmean(y), min(y), max(y)) for x, y in self.points), strict=True))


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Section:
    """One experiment at one size: the file name of its figure, and what runs it, if that is to be said."""

    name: str
    title: str
    command: str
    text: tuple[str, ...]
    tables: tuple[Table, ...] = ()
    panels: tuple[Panel, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Document:
    """All of a report; the tables of the summary stand before all sections."""

    title: str
    command: str
    text: tuple[str, ...]
    sections: tuple[Section, ...]
    appendix: tuple[Table, ...]
    summary: tuple[Table, ...] = ()


def markdown(document: Document, figures: str) -> str:
    """The document as Markdown; `figures` is the folder of its figures, relative to the file."""
    return TEMPLATES.get_template("report.md").render(document=document, figures=figures).rstrip() + "\n"


def page(document: Document, figures: Mapping[str, bytes]) -> str:
    """The document as one HTML file that needs no network and no server; tables that are too wide are turned.

    `figures` are SVG, by the names of their sections.
    """
    sections = (replace(section, tables=tuple(map(narrow, section.tables))) for section in document.sections)
    render = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = render.parse(markdown(replace(document, sections=tuple(sections)), "figures"))
    links = []
    for k, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            token.attrSet("id", f"section-{k}")
            links.append((f"section-{k}", render.renderInline(tokens[k + 1].content)))
        for child in token.children or ():
            if child.type == "image":
                picture = figures[Path(str(child.attrGet("src"))).stem]
                child.attrSet("src", f"data:image/svg+xml;base64,{b64encode(picture).decode()}")
    body = render.renderer.render(tokens, render.options, {})
    body = body.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
    return TEMPLATES.get_template("page.html").render(title=document.title, links=links, body=body)


def code(text: str) -> str:
    """As a code span on one line, whatever it holds.

    >>> code("a `b`")
    '`` a `b` ``'
    """
    text = " ".join(text.splitlines())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"


def narrow(table: Table, letters: int = 120) -> Table:
    """With rows and columns exchanged, if it is wider than so many letters and narrower the other way."""
    paper = [name.removesuffix(": paper") for name in ("", *table.head[:-1])]  # before each "ours"
    head = [f"{m}: ours" if name == "ours" else name for m, name in zip(paper, table.head, strict=True)]
    rows = [tuple(head), *table.rows]
    turned = list(zip(*rows, strict=True))
    if table.numbers != 1 or not _width(turned) < _width(rows) > letters:
        return table
    return Table(table.title, turned[0], tuple(turned[1:]), note=table.note)


def _width(rows: Sequence[Sequence[str]]) -> int:
    return sum(3 + max(map(len, column)) for column in zip(*rows, strict=True))


def _cell(text: str) -> str:
    """On one line, without HTML or a link outside of code spans."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    parts[::2] = [html.escape(part, quote=False).replace("](", "]\\(") for part in parts[::2]]
    return "".join(parts).replace("|", "\\|")


TEMPLATES = Environment(
    loader=PackageLoader("gspace.lab"), autoescape=select_autoescape(["html"]), trim_blocks=True, lstrip_blocks=True
)
TEMPLATES.filters |= {"code": code, "cell": _cell}
