"""One style for all pictures: sizes for a paper's columns, colours that colour-blind readers can tell apart; saving."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib import colormaps
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from fedjax_cluster.files import atomic_file
from fedjax_cluster.report import fonts

# Inches: one column of a two-column paper, and both.
SINGLE, DOUBLE = 3.35, 6.9
SCREEN_DPI, FILE_DPI = 200, 300
COMPRESSION = 4  # of PNG: a picture is saved in a tenth less time than by the default 6, in a file 1 % larger
FORMATS = (".png", ".pdf", ".svg")
FONT_POINTS = 7.0
LINE_INCHES = 1.35 * FONT_POINTS / 72  # a line of a legend

# Okabe and Ito's palette; wine stands for its yellow, which vanishes on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
NEUTRAL = "#555555"
LEGIBLE = 0.179  # luminance on which black and white stand out alike, 4.6 to 1
UNKNOWN = "#C8C8C8"  # clients without a known group or cluster
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")
DASHED = (0, (4, 2))
LINES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)))

GUIDE: dict[str, Any] = {"color": NEUTRAL, "linestyle": DASHED, "linewidth": 0.8, "zorder": 1}  # a line to read by
STEPS = (1, 2, 2.5, 5, 10)  # between ticks, times a power of ten
LOG_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)

STYLE: dict[str, Any] = {
    "font.family": fonts.families(),
    **dict.fromkeys(("font.size", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), FONT_POINTS),
    **dict.fromkeys(("axes.labelsize", "axes.titlesize"), 7.5),
    "legend.frameon": False,
    **dict.fromkeys(("legend.borderaxespad", "legend.borderpad"), 0.2),
    "legend.columnspacing": 1.2,
    "legend.handlelength": 2.2,
    "legend.handletextpad": 0.5,
    "legend.labelspacing": 0.3,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.5,
    **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width", "lines.markeredgewidth"), 0.6),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 2.5),
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "errorbar.capsize": 1.8,
    "pdf.fonttype": 42,
}


class Picture(Figure):
    """A Figure that a notebook shows by itself, although pyplot does not know it."""

    def savefig(self, fname: Any, **options: Any) -> None:
        """As matplotlib's, but that fonts in a PDF are TrueType, where its own default is Type 3."""
        with matplotlib.rc_context({"pdf.fonttype": STYLE["pdf.fonttype"]}), fonts.missing_said_once():
            super().savefig(fname, **options)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        with style():
            self.savefig(buffer, format="png", dpi=self.dpi)
        return buffer.getvalue()


@contextlib.contextmanager
def style() -> Iterator[None]:
    """The project's style, whatever style the caller has set; afterwards matplotlib is as before."""
    with matplotlib.style.context(["default", STYLE]):
        yield


def new_figure(width: float, height: float) -> Picture:
    """An empty figure of `width` × `height` inches with constrained layout."""
    return Picture(figsize=(width, height), dpi=SCREEN_DPI, layout="constrained")


@contextlib.contextmanager
def drawing(width: float, height: float) -> Iterator[Picture]:
    """A new figure, and the style while it is drawn."""
    with style():
        yield new_figure(width, height)


def save(figure: Figure, path: str | pathlib.Path) -> pathlib.Path:
    """Writes a figure as PNG (300 dpi), PDF or SVG, complete or not at all, and returns the path.

    Args:
      figure: any figure.
      path: ends in .png, .pdf or .svg, otherwise ValueError; missing folders are made.
    """
    path = pathlib.Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot write a figure to '{path.name}'; its name must end in {', '.join(FORMATS)}")
    with style(), fonts.missing_said_once(), atomic_file(path) as temporary:
        if path.suffix.lower() == ".png":
            _write_png(figure, temporary)
        else:
            figure.savefig(temporary, dpi=FILE_DPI)
    return path


def _write_png(figure: Figure, path: pathlib.Path) -> None:
    """What `savefig` writes in two thirds of its time: it draws all once more, unseen, to lay it out."""
    dpi, canvas = figure.dpi, figure.canvas
    try:
        figure.set_dpi(FILE_DPI)
        FigureCanvasAgg(figure).print_png(path, pil_kwargs={"compress_level": COMPRESSION})
    finally:
        figure.set_dpi(dpi)
        figure.set_canvas(canvas)


def line_look(index: int) -> dict[str, Any]:
    """Colour, marker and line style of the index-th line; no two of the first 24 share two of the three."""
    looks = {"color": COLORS, "marker": MARKERS, "linestyle": LINES}
    return {name: values[index % len(values)] for name, values in looks.items()}


def categorical_colors(count: int) -> list[str]:
    """`count` colours for things in no order; beyond the palette's eight, evenly spaced ones of viridis.

    >>> categorical_colors(2)
    ['#0072B2', '#D55E00']
    """
    if count <= len(COLORS):
        return list(COLORS[:count])
    return [to_hex(color) for color in colormaps["viridis"](np.linspace(0, 1, count))]


def plain_marker(face: str) -> Line2D:
    """A grey circle for a legend; white inside stands for a paper's value."""
    return Line2D([], [], linestyle="none", marker="o", color=NEUTRAL, markerfacecolor=face)


def distinct(values: Any) -> list[int]:
    """The values that occur in ascending order, −1 last.

    >>> distinct([4, -1, 2, 4])
    [2, 4, -1]
    """
    return sorted(map(int, np.unique(values)), key=lambda value: value < 0)


def value_colors(values: Any) -> dict[int, str]:
    """A colour for each group or cluster that occurs; grey for −1.

    >>> value_colors([4, -1, 2, 4])
    {2: '#0072B2', 4: '#D55E00', -1: '#C8C8C8'}
    """
    known = [value for value in distinct(values) if value >= 0]
    colors = dict(zip(known, categorical_colors(len(known)), strict=True))
    return {value: colors.get(value, UNKNOWN) for value in distinct(values)}


def ticks_at(axis: Axis, places: Sequence[float]) -> None:
    """Ticks at these places alone, labelled with plain numbers; for a logarithmic axis above all."""
    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


class _WithinWords(textwrap.TextWrapper):
    """Breaks words that are too long, after a slash or underline where there is one."""

    def _split(self, text: str) -> list[str]:
        pieces = (
            [word] if len(word) <= self.width else re.findall(r"[^/_]+[/_]*|[/_]+", word)
            for word in super()._split(text)
        )
        return [piece for of in pieces for piece in of]


def wrapped(text: str, width: int, *, within: bool = False) -> str:
    """Breaks a label into lines of at most `width` characters where it has spaces; if asked for, also long words.

    >>> wrapped("runs/rotated_digits", 12, within=True)
    'runs/\\nrotated_\\ndigits'
    """
    kind = _WithinWords if within else textwrap.TextWrapper
    return "\n".join(kind(width, break_long_words=within).wrap(text)) or text


def shortened(text: str, longest: int) -> str:
    """A label of at most so many characters: its middle goes, as long names are often told apart by their ends.

    >>> shortened("runs/rotated/fedavg-3", 12)
    'runs/…davg-3'
    """
    half = longest // 2
    return text if len(text) <= longest else f"{text[: longest - half - 1].rstrip()}…{text[-half:].lstrip()}"


def ink_on(color: Any) -> str:
    """The colour of text that can be read on a ground of this colour, in red, green and blue from 0 to 1.

    >>> ink_on((0.0, 0.0, 0.4)), ink_on((1.0, 1.0, 0.6))
    ('white', 'black')
    """
    parts = np.asarray(color[:3], np.float64)
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return "white" if linear @ (0.2126, 0.7152, 0.0722) < LEGIBLE else "black"


def legend_above(figure: Figure, handles: Sequence[Any], labels: Sequence[str], *, lines: bool = True) -> None:
    """A legend over the whole drawn figure, read row by row, in as many columns as fit; it makes the figure higher.

    Without labels it draws nothing. `lines`: the handles are lines; otherwise single markers, which need less room.
    """
    if not labels:
        return
    labels = [wrapped(label, 40) for label in labels]
    handle_length = 2.2 if lines else 1.0
    room = figure.get_figwidth() * 72 / FONT_POINTS
    fitting = [n for n in range(1, len(labels) + 1) if _width_in_em(labels, n, handle_length) < room]
    rows = -(-len(labels) // max(fitting, default=1))
    # The fewest columns for these rows fill them evenly: five entries are 3 + 2, not 4 + 1.
    columns = min((n for n in fitting if n * rows >= len(labels)), default=1)
    # Matplotlib fills column by column.
    order = [index for column in range(columns) for index in range(column, len(labels), columns)]
    entries = [handles[index] for index in order], [labels[index] for index in order]
    figure.legend(*entries, loc="outside upper center", ncols=columns, handlelength=handle_length)
    lines_of_text = rows * max(label.count("\n") + 1 for label in labels)
    figure.set_figheight(figure.get_figheight() + lines_of_text * LINE_INCHES)


def _width_in_em(labels: Sequence[str], columns: int, handle_length: float) -> float:
    """Estimated width of a legend; a character takes 0.56 em on average."""
    longest = [max(len(line) for label in labels[n::columns] for line in label.split("\n")) for n in range(columns)]
    return sum(0.56 * length + handle_length + 0.5 for length in longest) + 1.2 * (columns - 1) + 1
