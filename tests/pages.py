"""What every page must be: whole, alone in its file, and readable without its pictures."""

import html.parser
import pathlib
import re
from urllib.parse import unquote

VOID = {"meta", "link", "img", "br", "hr"}


class Page(html.parser.HTMLParser):
    """A page's tags, links, images and text; an AssertionError where it is not as it must be."""

    def __init__(self, path):
        super().__init__()
        self.path, self.open = pathlib.Path(path), []
        self.tags, self.links, self.images, self.anchors, self.texts = set(), [], [], set(), []
        source = self.path.read_text(encoding="utf-8")
        assert source.startswith("<!doctype html>")
        self.feed(source)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        assert not self.tags & {"script", "iframe", "object", "embed", "base", "form"}
        assert not re.search(r"url\(|@import|src *= *[\"']?(?!data:)\w", re.sub(r"base64,[^\"]*", "base64,", source))
        for link in self.links:
            if link.startswith("#"):
                assert link[1:] in self.anchors, link
            elif link != "data:,":
                assert "://" not in link
                assert not link.startswith("/")
                assert (self.path.parent / unquote(link)).is_file(), link

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert len(given) == len(attrs), f"an attribute of {tag} twice"
        assert not [name for name in given if name.startswith("on")], "a handler"
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "img":
            assert given["src"].startswith("data:image/png;base64,iVBOR")
            assert len(given["alt"]) > 10, "an image without words for it"
            self.images.append(given["alt"])
        else:
            assert "src" not in given
        if "href" in given:
            self.links.append(given["href"])
        if "id" in given:
            assert given["id"] not in self.anchors
            self.anchors.add(given["id"])

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> of nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip() and self.open[-1:] != ["style"]:
            self.texts.append(" ".join(data.split()))

    @property
    def text(self):
        return "\n".join(self.texts)
