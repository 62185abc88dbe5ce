"""Docstrings and formulas as Markdown that needs no script and no network."""

from __future__ import annotations

import re

from latex2mathml.converter import convert

SECTIONS = ("Args", "Returns", "Raises", "Attributes", "References", "Yields")


def from_docstring(text: str) -> str:
    """A docstring of this project's form: sections as lists, doctests as code, nothing else taken for markup."""
    blocks, section = [], ""
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        head = lines[0].removesuffix(":") if lines else ""
        if head in SECTIONS and lines[0].endswith(":"):
            section, lines = head, lines[1:]
            blocks.append(f"**{head}**")
            blocks.append(_items(lines) if head not in ("Returns", "References") else _plain(_dedented(lines)))
        elif lines and lines[0].lstrip().startswith(">>>"):
            blocks.append("```pycon\n" + "\n".join(_dedented(lines)) + "\n```")
        elif lines and all(line.startswith("    ") for line in lines) and not section:
            blocks.append("```python\n" + "\n".join(_dedented(lines)) + "\n```")
        elif lines and lines[0].startswith(".. math::"):
            blocks.append(display(" ".join([lines[0].removeprefix(".. math::"), *lines[1:]]).strip()))
        elif lines:
            blocks.append(_plain(_dedented(lines)))
    return "\n\n".join(blocks) + "\n"


def display(latex: str) -> str:
    """A formula on a line of its own, for `set_formulas`."""
    return f"⟦block {latex.encode().hex()}⟧"


def with_formulas(text: str) -> str:
    """Marks $$…$$ and $…$ outside of code, for `set_formulas`: Markdown would take MathML for paragraphs."""
    parts = re.split(r"(```.*?```|`[^`\n]*`)", text, flags=re.DOTALL)
    for place in range(0, len(parts), 2):
        part = re.sub(r"\$\$(.+?)\$\$", lambda found: display(found[1]), parts[place], flags=re.DOTALL)
        parts[place] = re.sub(r"\$([^$\n]+)\$", lambda found: f"⟦inline {found[1].encode().hex()}⟧", part)
    return "".join(parts)


def set_formulas(html: str) -> str:
    """Replaces the marks by MathML."""

    def formula(found: re.Match) -> str:
        text = convert(bytes.fromhex(found[2]).decode(), display=found[1])
        return f'<span class="formula">{text}</span>' if found[1] == "block" else text

    return re.sub(r"⟦(block|inline) ([0-9a-f]+)⟧", formula, html)


def escaped(text: str) -> str:
    """Text as it stands, but for `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    for place in range(0, len(parts), 2):
        part = parts[place].replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
        parts[place] = re.sub(r"([\\*_\[\]#])", r"\\\1", part)
    return "".join(parts)


def cell(text: str) -> str:
    """Text within a table; code in it cannot hold a bar."""
    return " ".join(re.sub(r"`([^`]*\|[^`]*)`", lambda found: found[1], escaped(text)).split()).replace("|", "&#124;")


def _items(lines: list[str]) -> str:
    items: list[str] = []
    for line in _dedented(lines):
        name, colon, rest = line.partition(": ")
        if not line.startswith(" ") and (colon or line.endswith(":")):
            names = ", ".join(f"`{each.strip()}`" for each in name.removesuffix(":").split(","))
            items.append(f"- {names}: {escaped(rest)}")
        elif items:
            items[-1] += f" {escaped(line.strip())}"
        else:
            items.append(escaped(line))
    return "\n".join(items)


def _plain(lines: list[str]) -> str:
    """A paragraph, or a list where it is one."""
    text = "\n".join(lines)
    marks = [(found[1], escaped(found[2])) for found in re.finditer(r"^(\s*[-•] )?(.*)$", text, re.MULTILINE)]
    return "\n".join((mark or "") + rest for mark, rest in marks).rstrip()


def _dedented(lines: list[str]) -> list[str]:
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return [line[margin:] for line in lines]
