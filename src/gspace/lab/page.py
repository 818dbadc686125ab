"""A report as one HTML file, its Markdown rendered and its figures in it. It needs no network and no server."""

import html
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files

from markdown_it import MarkdownIt

from gspace.lab.document import Document, Section, markdown, narrow


def page(document: Document, figures: Mapping[str, bytes]) -> str:
    """The whole file; `figures` are SVG, by the names of their sections. Tables that are too wide are turned."""
    render = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = render.parse(markdown(_fitting(document), "figures"))
    links = []
    for k, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            token.attrSet("id", f"section-{k}")
            links.append(f'<a href="#section-{k}">{render.renderInline(tokens[k + 1].content)}</a>')
        for child in token.children or ():
            if child.type == "image":
                child.attrSet("src", _address(figures, str(child.attrGet("src"))))
    body = render.renderer.render(tokens, render.options, {})
    body = body.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
    style = (files("gspace.lab") / "page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{html.escape(document.title)}</title>
<style>
{style}</style>
</head>
<body>
<nav>{"".join(links)}</nav>
{body}</body>
</html>
"""


def _fitting(document: Document) -> Document:
    def turned(section: Section) -> Section:
        return replace(section, tables=tuple(map(narrow, section.tables)))

    return replace(document, sections=tuple(map(turned, document.sections)))


def _address(figures: Mapping[str, bytes], source: str) -> str:
    name = source.removeprefix("figures/").removesuffix(".svg")
    return f"data:image/svg+xml;base64,{b64encode(figures[name]).decode()}"
