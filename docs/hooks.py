"""What MkDocs does before and while it reads the pages: makes pages and pictures, links names, sets formulas."""

from __future__ import annotations

import pathlib
import posixpath
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mkdocs.structure.files import File  # noqa: E402

from docs import commands, markdown, pictures, reference, tables  # noqa: E402

ANCHORS = reference.anchors()
MARK = re.compile(r"^<!-- (\w+)(?: ([\w-]+))? -->$", re.MULTILINE)  # <!-- options fedavg -->
MADE = {"options": tables.options, "costs": tables.costs, "arguments": tables.arguments, "help": commands.shown}


def on_files(files, config):
    """Adds the reference, pages of the repository's own and the scenarios' pictures."""
    made = {f"reference/{page}.md": reference.page_text(page) for page in reference.PAGES}
    made |= {"performance.md": repository_page("benchmarks/README.md")}
    made |= {"reproduction.md": repository_page("benchmarks/reproduction.md")}
    made |= {f"pictures/{name}.svg": text for name, text in pictures.all_of_them().items()}
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    for path in sorted((ROOT / "benchmarks" / "figures").glob("*.png")):
        files.append(File.generated(config, f"figures/{path.name}", content=path.read_bytes()))
    return files


def on_page_markdown(text, page, config, files):
    """Fills in tables, sets formulas, and links the names of the reference."""
    text = MARK.sub(lambda found: MADE[found[1]](*filter(None, [found[2]])), text)
    return linked(markdown.with_formulas(text), page.file.src_uri)


def on_page_content(html, page, config, files):
    return markdown.set_formulas(html)


def linked(text: str, page: str) -> str:
    """`fc.clustering.kmeans` as a link to its documentation, outside of code blocks and headings."""
    here = posixpath.dirname(page)

    def link(found: re.Match) -> str:
        place = ANCHORS.get(found[1].partition("(")[0])
        return f"[{found[0]}]({posixpath.relpath(place, here or '.')})" if place else found[0]

    parts = re.split(r"(^```.*?^```|^#.*?$|\[`[^`]*`\])", text, flags=re.DOTALL | re.MULTILINE)
    for number in range(0, len(parts), 2):
        parts[number] = re.sub(r"(?<!`)`(fc(?:\.\w+)+(?:\(\))?)`(?!`)", link, parts[number])
    return "".join(parts)


def repository_page(path: str) -> str:
    """A page of the repository; what it links to elsewhere in the repository becomes plain text."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#|figures/)[^)]*\)", r"\1", text)
