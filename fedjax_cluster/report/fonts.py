"""Names of clients and groups in scripts that matplotlib's own font lacks."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator

import matplotlib
from matplotlib.font_manager import fontManager

logger = logging.getLogger(__name__)

# What systems bring along, or are asked for: Chinese, Japanese, Korean, and many scripts at once.
_SUITABLE = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "WenQuanYi Micro Hei", "Microsoft YaHei", "SimHei"),
    *("PingFang SC", "Hiragino Sans GB", "Hiragino Sans", "Yu Gothic", "IPAexGothic", "Malgun Gothic", "NanumGothic"),
    *("Apple SD Gothic Neo", "Noto Sans Devanagari", "Nirmala UI", "Noto Sans Thai", "Arial Unicode MS"),
)
_MISSING = re.compile(r"Glyph (\d+) ")
_said: list[str] = []


def families() -> list[str]:
    """matplotlib's font, and those of this machine in which it looks for the characters that the first lacks.

    >>> families()[0]
    'sans-serif'
    """
    there = set(fontManager.get_font_names())
    return ["sans-serif", *(name for name in _SUITABLE if name in there)]


@contextlib.contextmanager
def missing_said_once() -> Iterator[None]:
    """Says once a process, in one line, that pictures lack characters, where matplotlib warns of each in each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    missing = []
    for each in caught:
        if found := _MISSING.match(str(each.message)):
            missing.append(chr(int(found[1])))
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if missing and not _said:
        _said.extend(missing)
        some = ", ".join(dict.fromkeys(missing[:3]))
        logger.warning(
            f"no font of this machine has characters of the names in pictures, such as {some}: install one that does, "
            f"such as Noto Sans CJK, and remove fontlist*.json from {matplotlib.get_cachedir()}"
        )
