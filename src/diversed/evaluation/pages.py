"""A report's pieces, and how they become Markdown and one HTML page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

Cells = Sequence[str]


@dataclass(frozen=True)
class Block:
    """A piece of the report. ``text`` is a heading, a paragraph, a list item or a picture's SVG by ``kind``."""

    kind: Literal["title", "heading", "text", "item", "table", "picture"]
    text: str = ""
    header: Cells = ()
    rows: Sequence[Cells] = ()


def to_markdown(blocks: Iterable[Block], picture_names: Iterable[str]) -> str:
    """Markdown, with pictures as links to files of the given names, in order."""
    names = iter(picture_names)
    parts: list[str] = []
    for kind, group in groupby(blocks, key=lambda b: b.kind):
        for b in group:
            if kind == "title":
                parts.append(f"# {b.text}\n\n")
            elif kind == "heading":
                parts.append(f"## {b.text}\n\n")
            elif kind == "text":
                parts.append(f"{b.text}\n\n")
            elif kind == "item":
                parts.append(f"- {b.text}\n")
            elif kind == "picture":
                parts.append(f"![{b.header[0]}]({next(names)})\n\n")
            else:
                lines = [b.header, ["---"] * len(b.header), *b.rows]
                parts.append(f"{b.text}\n\n" if b.text else "")
                parts.append("".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n")
        if kind == "item":
            parts.append("\n")
    return "".join(parts)


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1b1b1f; }
h1, h2 { line-height: 1.2; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
div.wide { overflow-x: auto; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #888; white-space: normal; vertical-align: bottom; }
figure { margin: 1.5rem 0; } figure svg { max-width: 100%; height: auto; } figcaption { color: #555; }
"""


def to_html(blocks: Sequence[Block]) -> str:
    """One page that needs no other file."""
    title = next((b.text for b in blocks if b.kind == "title"), "Report")
    parts: list[str] = []
    for kind, group in groupby(blocks, key=lambda b: b.kind):
        if kind == "item":
            parts.append("<ul>" + "".join(f"<li>{html.escape(b.text)}</li>" for b in group) + "</ul>")
            continue
        for b in group:
            if kind == "picture":
                parts.append(f"<figure>{b.text}<figcaption>{html.escape(b.header[0])}</figcaption></figure>")
            elif kind == "table":
                head = "".join(f"<th>{html.escape(c)}</th>" for c in b.header)
                body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in b.rows)
                caption = f"<caption>{html.escape(b.text)}</caption>" if b.text else ""
                table = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
                parts.append(f'<div class="wide">{table}</div>')
            else:
                tag = {"title": "h1", "heading": "h2", "text": "p"}[kind]
                parts.append(f"<{tag}>{html.escape(b.text)}</{tag}>")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def write_report(blocks: Sequence[Block], folder: Path) -> tuple[Path, Path]:
    """report.md with its pictures, and report.html, into a folder; their paths."""
    markdown, page = folder / "report.md", folder / "report.html"
    pictures = [b for b in blocks if b.kind == "picture"]
    names = [f"pictures/{i:02d}.svg" for i in range(1, len(pictures) + 1)]
    try:
        (folder / "pictures").mkdir(parents=True, exist_ok=True)
        for name, picture in zip(names, pictures, strict=True):
            (folder / name).write_text(picture.text, encoding="utf-8")
        markdown.write_text(to_markdown(blocks, names), encoding="utf-8")
        page.write_text(to_html(blocks), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"output_dir: {str(folder)!r} cannot be written ({error.strerror}): choose another") from error
    return markdown, page
