"""Self-contained HTML pages: escaped text, tables in boxes that scroll, pictures inside the file; no script.

Functions that build return HTML whose every given text is escaped; only `Html` goes in as it is.
"""

from __future__ import annotations

import base64
import html
import pathlib
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fedjax_cluster.files import atomic_file
from fedjax_cluster.report.page_style import CSS
from fedjax_cluster.report.style import FILE_DPI
from fedjax_cluster.report.table import Table

PIXELS_PER_INCH = 160  # of the screen: text in pictures is then as large as beside them
WIDE = 4.6  # inches, from which on a picture takes the page's width


class Html(str):
    """Text that is HTML already."""


class Section(NamedTuple):
    """A heading with its anchor, and what follows; one without a body is left out."""

    anchor: str
    title: str
    body: Html


def escaped(text: object) -> Html:
    """Any text as HTML.

    >>> escaped('<a href="x">')
    '&lt;a href=&quot;x&quot;&gt;'
    """
    return text if isinstance(text, Html) else Html(html.escape(str(text), quote=True))


def joined(parts: Iterable[object]) -> Html:
    """Texts and HTML after one another, a line each."""
    return Html("\n".join(escaped(part) for part in parts if part != ""))


def element(name: str, body: object = "", **attributes: object) -> Html:
    """An element with its attributes; an underscore at a name's end is left out, others become hyphens.

    >>> element("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{given}>{escaped(body)}</{name}>")


def paragraph(text: object, kind: str = "") -> Html:
    """A paragraph; nothing without a text."""
    return element("p", text, **({"class_": kind} if kind else {})) if text else Html("")


def grid(cells: Sequence[Sequence[object]], headings: Sequence[object] = (), *, numeric: Sequence[bool] = ()) -> Html:
    """A table in a box that scrolls sideways; the first cell of a row is its heading."""
    sides = [*numeric, *(False for _ in range(max(map(len, cells), default=0) - len(numeric)))]

    def row(values: Sequence[object], *, heading: bool) -> Html:
        found = []
        for at, (value, number) in enumerate(zip(values, sides, strict=False)):
            scope = {"scope": "col"} if heading else {"scope": "row"} if at == 0 else {}
            kind = {"class_": "number"} if number else {}
            found.append(element("th" if scope else "td", value, **scope, **kind))
        return element("tr", Html("".join(found)))

    head = element("thead", row(headings, heading=True)) if any(headings) else ""
    body = element("tbody", joined(row(values, heading=False) for values in cells))
    return element("div", element("table", joined([head, body])), class_="scroll", tabindex="0", role="region")


def table(shown: Table) -> Html:
    """A table of the package, with its note."""
    headings, rows, numeric = shown.texts()
    if not rows:
        return paragraph(shown.note, "note")
    return joined([grid(rows, headings, numeric=numeric), paragraph(shown.note, "note")])


def pairs(lines: Iterable[tuple[object, object]]) -> Html:
    """Names and values."""
    cells = list(lines)
    return grid(cells) if cells else Html("")


def folded(title: object, body: object) -> Html:
    """What is shown when its title is clicked."""
    return element("details", joined([element("summary", title), body]))


def picture(path: pathlib.Path, title: str, sentence: str, link: str = "") -> Html:
    """A PNG file inside the page, with its caption; `link` is the file beside the page, for a larger view."""
    content = path.read_bytes()
    width, height = png_size(content)
    scale = PIXELS_PER_INCH / FILE_DPI
    size = f'width="{round(width * scale)}" height="{round(height * scale)}"'
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    image = Html(f'<img src="{source}" alt="{escaped(f"{title} {sentence}".strip())}" {size}>')
    shown = element("a", image, href=link, title="the picture alone") if link else image
    shown = element("div", shown, class_="picture")
    caption = element("figcaption", Html(f"{element('strong', title)} {escaped(sentence)}"))
    kind = {"class_": "wide"} if width > WIDE * FILE_DPI else {}
    return element("figure", joined([shown, caption]), **kind)


def png_size(content: bytes) -> tuple[int, int]:
    """Width and height of a PNG image in pixels.

    Raises:
      ValueError: it is none.
    """
    if content[:8] != b"\x89PNG\r\n\x1a\n" or len(content) < 24:
        raise ValueError("the picture is no PNG file; draw it again with report")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def figures(pictures: Iterable[Html]) -> Html:
    """Pictures side by side, as many as fit."""
    found = list(pictures)
    return element("div", joined(found), class_="figures") if found else Html("")


def columns(parts: Iterable[Html]) -> Html:
    """Tables side by side where there is room."""
    found = [part for part in parts if part]
    return element("div", joined(found), class_="columns") if found else Html("")


def cards(lines: Iterable[tuple[str, str, str]]) -> Html:
    """The main figures at a glance: what, how much, and a remark."""
    shown = [
        element("div", joined([element("span", name), element("b", value), element("small", remark)]), class_="card")
        for name, value, remark in lines
    ]
    return element("div", joined(shown), class_="cards") if shown else Html("")


def write_page(
    path: pathlib.Path, title: str, lead: object, sections: Iterable[Section], *, top: object = "", end: object = ""
) -> pathlib.Path:
    """Writes a page, whole or not at all, and returns its path.

    Args:
      path: the file.
      title: of the page, and its heading.
      lead: one sentence below it.
      sections: those with a body, each with an entry in the contents.
      top: before the contents, such as cards.
      end: at the foot.
    """
    shown = [section for section in sections if section.body]
    links = [element("a", each.title, href=f"#{each.anchor}") for each in shown]
    parts = [
        element("header", joined([element("h1", title), paragraph(lead, "lead"), top])),
        element("nav", joined(links), aria_label="Contents") if links else "",
        element(
            "main",
            joined(
                element("section", joined([element("h2", each.title), each.body]), id=each.anchor) for each in shown
            ),
        ),
        element("footer", paragraph(end)),
    ]
    # The policy lets a browser load nothing at all from elsewhere.
    text = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{escaped(title)}</title>
<style>
{CSS}</style>
</head>
<body>
{joined(parts)}
</body>
</html>
"""
    with atomic_file(path) as beside:
        beside.write_text(text, encoding="utf-8", errors="replace")
    return path
