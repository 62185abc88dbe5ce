"""A table that can be shown in several ways: on a console, as Markdown, as CSV and as LaTeX."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import itertools
import math
import pathlib
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import rich.table
from rich import box
from rich.console import Console
from rich.text import Text

from fedjax_cluster.files import atomic_file
from fedjax_cluster.report.paper_rows import is_known

NOTHING = "–"
NOT_FINITE = "not finite"
LABEL = re.compile(r"[^\w.:-]")  # what a LaTeX label has none of
MARKDOWN = re.compile(r"[\\|*`]|<(?=[A-Za-z/!?])|(?<!\w)_|_(?!\w)")  # taken for more than a sign
BETWEEN = "\u2060"  # two letters that are not to become one
GREEK = (  # that TeX has commands for
    *("ALPHA", "BETA", "GAMMA", "DELTA", "EPSILON", "ZETA", "ETA", "THETA", "IOTA", "KAPPA", "LAMDA", "MU"),
    *("NU", "XI", "PI", "RHO", "SIGMA", "TAU", "UPSILON", "PHI", "CHI", "PSI", "OMEGA"),
)
SAMPLE = "sample std"
TEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "−": "$-$"},
    **{"±": r"$\pm$", "≥": r"$\geq$", "≤": r"$\leq$", "×": r"$\times$", "<": "$<$", ">": "$>$", "|": "$|$"},
    **{
        "≠": r"$\neq$",
        "∞": r"$\infty$",
        "→": r"$\to$",
        "…": r"\dots{}",
        "′": "$'$",
        "«": r"$\ll$",
        "»": r"$\gg$",
        "ο": "$o$",
    },
    **dict(zip("ΑΒΕΖΗΙΚΜΝΟΡΤΧ", "ABEZHIKMNOPTX", strict=True)),  # TeX has none of its own
    **{sign: f"$_{digit}$" for digit, sign in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    BETWEEN: "{}",
    **dict.fromkeys("ąĄęĘįĮųŲðÐþÞđĐŋŊŉħĦŧŦŀĿĸſ", "?"),  # for which TeX's own fonts have no sign
}
LARGE = 1e6  # from which on digits after the point tell nothing
FEWEST_CHARACTERS = 12  # of a column of texts that are longer


class Spread(NamedTuple):
    """Mean and sample standard deviation over seeds; `std` is None for a single seed."""

    mean: float
    std: float | None = None


def spread(values: Sequence[float | None]) -> Spread | None:
    """Mean and sample standard deviation (divided by n − 1) over seeds; None without values.

    Seeds with None, NaN or an infinity are left out.

    >>> spread([1.0, 2.0, 3.0, None])
    Spread(mean=2.0, std=1.0)
    >>> spread([2.0])
    Spread(mean=2.0, std=None)
    """
    known = [float(value) for value in values if is_known(value)]
    if not known:
        return None
    return Spread(float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else None)


class Number(NamedTuple):
    """A number with its standard deviation, if it has one, and how it is shown.

    `seeds` tells how many of the seeds it is of where some have no value, such as "2 of 3". `best` is bold in LaTeX.

    >>> Number(87.249, 0.21, decimals=1).text(), Number(0.5, decimals=1, signed=True).text()
    ('87.2 ± 0.2', '+0.5')
    >>> Number(87.249, 0.21, decimals=1, seeds="2 of 3").text(), Number(float("nan")).text()
    ('87.2 ± 0.2 (2 of 3)', 'not finite')
    >>> Number(3.6e-7, decimals=3).text(), Number(1.83e16, 1.6e14, decimals=4).text()
    ('4e-07', '1.83e+16 ± 1.6e+14')
    """

    mean: float
    std: float | None = None
    decimals: int = 0
    signed: bool = False
    seeds: str = ""
    best: bool = False

    def text(self) -> str:
        if not math.isfinite(self.mean):
            return NOT_FINITE
        sign = "+" if self.signed else ""
        if self.decimals and max(abs(self.mean), self.std or 0.0) >= LARGE:
            shown = f"{self.mean:{sign}.3g}" + (f" ± {self.std:.3g}" if self.std is not None else "")
            return f"{shown} ({self.seeds})" if self.seeds else shown
        shown = f"{self.mean:{sign},.{self.decimals}f}"
        if self.decimals >= 3 and 0 < max(abs(self.mean), self.std or 0.0) < 0.5 * 0.1**self.decimals:
            shown = f"{self.mean:{sign}.0e}" + ("" if self.std is None else f" ± {self.std:.0e}")
            return f"{shown} ({self.seeds})" if self.seeds else shown
        if not float(shown.replace(",", "")):
            shown = shown.lstrip("+-")
        shown = shown if self.std is None else f"{shown} ± {self.std:,.{self.decimals}f}"
        return f"{shown} ({self.seeds})" if self.seeds else shown


class Column(NamedTuple):
    """A heading; what its numbers' standard deviations are called in CSV, where they stand apart; "" for none.

    Columns of a `group` are spared together where there is little room: on a narrow console, and in LaTeX. Texts of
    such columns always stand beneath the table there.
    """

    name: str
    deviation: str = ""
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that can be shown in several ways.

    Attributes:
      title: above it; "" for none.
      columns: the headings; none is shown where all are "".
      rows: a cell per column: text, a Number, or None, which is shown as "–".
      note: beneath it; "" for none.
      naming: how many columns, from the left, tell one row from another.
      caption: in LaTeX, of a table without a title.
      bold: what numbers in bold are.

    >>> print(Table("", (Column("method"), Column("ARI", "std")), (("IFCA", Number(0.9, 0.1, 2)),)).markdown(), end="")
    | method | ARI |
    | :-- | --: |
    | IFCA | 0.90 ± 0.10 |
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str | Number | None, ...], ...]
    note: str = ""
    naming: int = 1
    caption: str = ""
    bold: str = "the best mean"

    def print(self, console: Console | None = None) -> None:
        """Prints the table, by default on the standard output."""
        console, headed = console or Console(), any(column.name for column in self.columns)
        fitting = self.without_texts()
        while fitting._narrowest() > console.width and (
            groups := [each.group for each in fitting.columns if each.group]
        ):
            fitting = fitting._only([each.group != groups[-1] for each in fitting.columns])
        shown = rich.table.Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=headed, padding=(0, 1, 0, 0))
        between = 2 * len(fitting.columns) - 1
        widths = fitting._widths(console.width - between)
        for index, (column, width) in enumerate(zip(fitting.columns, widths, strict=True)):
            shown.add_column(Text(column.name), justify=fitting._side(index), width=width)
        for row in fitting._texts():
            shown.add_row(*map(Text, row))
        # Where even the narrowest columns do not fit, lines that wrap lose nothing; cropped ones would.
        shown.width = sum(widths) + between
        if self.title:
            console.print(Text(self.title, "bold"))
        console.print(shown, crop=False, soft_wrap=shown.width > console.width)
        left_out = [each.name for each in self.without_texts().columns if each not in fitting.columns]
        notes = [self.note, *self._beneath(), f"no room here for: {', '.join(left_out)}" if left_out else ""]
        for note in filter(None, notes):
            console.print(Text(note, "italic"))

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [[column.name for column in self.columns]]
        lines.append([":--" if self._side(index) == "left" else "--:" for index in range(len(self.columns))])
        lines += self._texts()
        body = "".join("| " + " | ".join(map(_marked_down, line)) + " |\n" for line in lines)
        note = f"\n{_marked_down(self.note)}\n" if self.note else ""
        return (f"**{_marked_down(self.title)}**\n\n" if self.title else "") + body + note

    def latex(self, name: str = "") -> str:
        """The table as a LaTeX float with its notes beneath; needs the package booktabs and nothing else.

        Args:
          name: "comparison" for the label tab:comparison, which a table with a caption has; "" for none.

        >>> cells = (("IFCA", Number(0.9, 0.1, 2, best=True)),)
        >>> print(Table("ARI", (Column("method"), Column("ARI", "std")), cells, "3 seeds").latex("ari"), end="")
        % needs \\usepackage{booktabs}
        \\begin{table}
        \\centering
        \\caption{ARI}
        \\label{tab:ari}
        \\begin{tabular}{lr}
        \\toprule
        method & ARI \\\\
        \\midrule
        IFCA & \\textbf{0.90 $\\pm$ 0.10} \\\\
        \\bottomrule
        \\end{tabular}
        \\par\\footnotesize 3 seeds; bold: the best mean\\par
        \\end{table}
        """
        plain = self._only([not column.group for column in self.columns])
        sides = "".join(plain._side(index)[0] for index in range(len(plain.columns)))
        best = [[isinstance(cell, Number) and cell.best for cell in row] for row in plain.rows]
        lines = [[_tex(column.name) for column in plain.columns]]
        for texts, bold in zip(plain._texts(), best, strict=True):
            lines.append(
                [rf"\textbf{{{_tex(text)}}}" if of else _tex(text) for text, of in zip(texts, bold, strict=True)]
            )
        head, *body = [" & ".join(line) + r" \\" for line in lines]
        # What follows a line's end in brackets, or a star, would be its argument.
        body = [f"{{}}{line}" if line.startswith(("[", "*")) else line for line in body]
        caption = _tex(self.title or self.caption)
        note = "; ".join(filter(None, (self.note, f"bold: {self.bold}" if any(map(any, best)) else "")))
        notes = ". ".join(_tex(part) for part in (note, *self._beneath()) if part)
        parts = [
            "% needs \\usepackage{booktabs}",
            *(r"\begin{table}", r"\centering", *([rf"\caption{{{caption}}}"] if caption else [])),
            *([rf"\label{{tab:{LABEL.sub('-', name)}}}"] if caption and name else []),
            *(rf"\begin{{tabular}}{{{sides}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"),
            *(r"\end{tabular}", *([rf"\par\footnotesize {notes}\par"] if notes else []), r"\end{table}"),
        ]
        return "\n".join(parts) + "\n"

    def csv(self) -> str:
        """The table as comma-separated values: numbers unrounded, None and words among numbers empty.

        Deviations, and of how many seeds a number is where some have none, stand in columns of their own.
        """
        names: list[str] = []
        rows: list[list[str]] = [[] for _ in self.rows]
        for index, column in enumerate(self.columns):
            cells = [row[index] for row in self.rows]
            apart = {f"{column.name} {column.deviation}": "std"} if column.deviation else {}
            if any(isinstance(cell, Number) and cell.seeds for cell in cells):
                apart[f"{column.name} seeds"] = "seeds"
            names += [column.name, *apart]
            for row, cell in zip(rows, cells, strict=True):
                word = isinstance(cell, str) and self._side(index) == "right"
                row += _unrounded(None if word else cell, list(apart.values()))
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows([names, *rows])
        return buffer.getvalue()

    def texts(self) -> tuple[list[str], list[list[str]], list[bool]]:
        """Headings, rows of cells as they are shown, and which columns are of numbers."""
        numeric = [self._side(index) == "right" for index in range(len(self.columns))]
        return [column.name for column in self.columns], self._texts(), numeric

    def write(self, *paths: str | pathlib.Path) -> None:
        """Writes the table to files ending in .md, .csv or .tex (otherwise ValueError); each is complete or absent."""
        ways: dict[str, Callable[[str], str]] = {
            **{".md": lambda _: self.markdown(), ".csv": lambda _: self.csv()},
            ".tex": self.latex,
        }
        targets = [pathlib.Path(path) for path in paths]
        for path in targets:
            if path.suffix not in ways:
                raise ValueError(f"cannot write a table to '{path.name}'; its name must end in {' or '.join(ways)}")
        for path in targets:
            with atomic_file(path) as temporary:
                temporary.write_text(ways[path.suffix](path.stem), encoding="utf-8")

    def _only(self, keep: Sequence[bool]) -> Table:
        """The table with some of its columns."""
        chosen = functools.partial(itertools.compress, selectors=keep)
        return dataclasses.replace(
            self, columns=tuple(chosen(self.columns)), rows=tuple(tuple(chosen(row)) for row in self.rows)
        )

    def without_texts(self) -> Table:
        """The table without what is told beneath it."""
        return self._only([not (each.group and self._side(at) == "left") for at, each in enumerate(self.columns)])

    def _beneath(self) -> list[str]:
        """The texts of columns that can be spared, a line a row: "FedProx failed: it needs a step more"."""
        apart = [at for at, column in enumerate(self.columns) if column.group and self._side(at) == "left"]
        return [
            f"{self._named(row)} {self.columns[at].name}: {row[at]}" for at in apart for row in self.rows if row[at]
        ]

    def _named(self, row: Sequence[object]) -> str:
        """What a row is called: its first cell, or all that name it with their headings."""
        if self.columns[0].name in ("", "method"):
            return str(row[0])
        pairs = zip(self.columns[: self.naming], row, strict=False)
        return ", ".join(f"{column.name} {cell}" for column, cell in pairs)

    def _narrowest(self) -> int:
        return sum(self._widths(0)) + 2 * len(self.columns) - 1

    def _texts(self) -> list[list[str]]:
        return [
            [NOTHING if cell is None else cell.text() if isinstance(cell, Number) else cell for cell in row]
            for row in self.rows
        ]

    def _widths(self, limit: int) -> list[int]:
        """Characters of each column within `limit`: texts and headings may be broken between words, numbers not."""
        widest, narrowest = [], []
        for index, column in enumerate(self.columns):
            cells = [row[index] for row in self._texts()]
            whole = [column.name, *cells]
            parts = column.name.split() + (cells if self._side(index) == "right" else " ".join(cells).split())
            widest.append(max(map(len, whole)))
            narrowest.append(
                max([*map(len, parts), min(FEWEST_CHARACTERS, widest[-1]) * (self._side(index) == "left")])
            )
        while sum(widest) > limit and widest != narrowest:
            spare = [most - least for most, least in zip(widest, narrowest, strict=True)]
            widest[spare.index(max(spare))] -= 1
        return widest

    def _side(self, index: int) -> Literal["left", "right"]:
        return "left" if all(isinstance(row[index], str) for row in self.rows) else "right"


def _unrounded(cell: str | Number | None, apart: Sequence[str]) -> list[str]:
    """A cell, and the parts of it that stand apart."""
    if not isinstance(cell, Number):
        return [cell or "", *("" for _ in apart)]
    parts = {"std": "" if cell.std is None else f"{cell.std:.9g}", "seeds": cell.seeds}
    return [f"{cell.mean:.9g}", *(parts[name] for name in apart)]


def _marked_down(text: str) -> str:
    """Any text for a cell of Markdown.

    >>> print(_marked_down("a|b\\n *c* cfl_gp"))
    a\\|b \\*c\\* cfl_gp
    """
    return MARKDOWN.sub(r"\\\g<0>", " ".join(text.split()))


def _tex(text: str) -> str:
    """Any text for LaTeX, without packages.

    >>> print(_tex("α_1 ≥ 50 % ± Δ₀"))
    $\\alpha$\\_1 $\\geq$ 50 \\% $\\pm$ $\\Delta$$_0$
    """
    apart = re.sub("(?<=[-–])(?=[-–])", BETWEEN, " ".join(text.split()))  # TeX makes one dash of the two before a flag
    return "".join(TEX.get(letter) or _tex_letter(letter) for letter in apart)


def _tex_letter(letter: str) -> str:
    greek, _, name = unicodedata.name(letter, "").partition(" LETTER ")
    if greek.startswith("GREEK ") and name in GREEK:
        command = name.lower().replace("lamda", "lambda")
        return f"$\\{command.capitalize() if greek == 'GREEK CAPITAL' else command}$"
    return letter if letter.isprintable() and ord(letter) < 0x180 else "?"
