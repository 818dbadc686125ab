"""A report as one HTML file: tables, and curves that can be hovered and zoomed. It needs no network and no server."""

import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.resources import files

from gspace.lab.document import Document, Panel, Section, Table
from gspace.lab.figures import COLOURS

DIGITS = 5  # significant digits of what is drawn
WIDE = 80  # letters from which on a cell may be broken into lines


def page(document: Document) -> str:
    """The whole file."""
    panels = [panel for section in document.sections for panel in section.panels]
    first = 0
    body = [f"<h1>{_text(document.title)}</h1>", *_paragraphs(document.text), _contents(document.sections)]
    body.append(f"<p>Written by {_code(document.command)}.</p>")
    for table in document.summary:
        body += [f"<h2>{_text(table.title)}</h2>", *_paragraphs(filter(None, [table.note])), _table(table)]
    for section in document.sections:
        body += _section(section, first)
        first += len(section.panels)
    for table in document.appendix:
        body += [f"<h2>{_text(table.title)}</h2>", _table(table)]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">',
            f"<title>{_text(document.title)}</title>",
            f"<style>\n{_file('page.css')}</style>\n</head>\n<body>",
            *body,
            _data("panels", [_panel(panel) for panel in panels]),
            _data("colours", COLOURS),
            f"<script>\n{_file('page.js')}</script>\n</body>\n</html>\n",
        ]
    )


def _section(section: Section, first: int) -> list[str]:
    lines = [f'<h2 id="{section.name}">{_text(section.title)}</h2>', *_paragraphs(section.text)]
    lines.append(f"<p>{_code(section.command)}</p>")
    for table in section.tables:
        lines += [f"<h3>{_text(table.title)}</h3>", *_paragraphs(filter(None, [table.note])), _table(table)]
    if section.panels:
        figures = (
            f'<figure data-panel="{first + k}"><figcaption>{_text(panel.title)}: {_text(panel.y_label)}. '
            f"By {_code(section.command)}.</figcaption></figure>"
            for k, panel in enumerate(section.panels)
        )
        lines += ['<div class="plots">', *figures, "</div>"]
    return lines


def _contents(sections: Sequence[Section]) -> str:
    links = (f'<a href="#{section.name}">{_text(section.title)}</a>' for section in sections)
    return f"<nav>{''.join(links)}</nav>"


def _table(table: Table) -> str:
    head = "".join(f"<th{_kind(table, k, name)}>{_text(name)}</th>" for k, name in enumerate(table.head))
    rows = (
        "".join(f"<td{_kind(table, k, cell)}>{_text(cell)}</td>" for k, cell in enumerate(row)) for row in table.rows
    )
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _kind(table: Table, column: int, text: str) -> str:
    names = (("number", column >= table.numbers), ("wide", len(text) > WIDE))
    found = " ".join(name for name, fits in names if fits)
    return f' class="{found}"' if found else ""


def _panel(panel: Panel) -> dict[str, object]:
    values = asdict(panel)
    for series in values["series"]:
        series.update({key: [float(f"{v:.{DIGITS}g}") for v in series[key]] for key in ("x", "y", "low", "high")})
    return values


def _data(name: str, value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False).replace("</", "<\\/")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _paragraphs(text: Iterable[str]) -> list[str]:
    return [f"<p>{_text(paragraph)}</p>" for paragraph in text]


def _text(text: str) -> str:
    """Escaped; `code` and **bold** as such."""
    strong = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(text))
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", strong)


def _code(text: str) -> str:
    return f"<code>{html.escape(text)}</code>"


def _file(name: str) -> str:
    return (files("gspace.lab") / name).read_text(encoding="utf-8")
