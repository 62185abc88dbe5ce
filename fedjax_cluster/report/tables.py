"""Tables of a run, of several methods, and of our results with a paper's; on a console, as Markdown and as CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import rich.table
from rich import box
from rich.console import Console
from rich.text import Text

from fedjax_cluster.files import atomic_file
from fedjax_cluster.report.names import method_name, over_seeds
from fedjax_cluster.report.paper_rows import PaperRow, check_rows, is_known

NOTHING = "–"
NOT_FINITE = "not finite"
SAMPLE = "sample std"
FEWEST_CHARACTERS = 12  # of a column of texts that are longer


class Runs(Protocol):
    """One method's runs over the seeds."""

    @property
    def label(self) -> str: ...

    @property
    def summaries(self) -> Sequence[Mapping[str, Any]]: ...  # what summary.json holds


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

    `seeds` tells how many of the seeds it is of where some have no value, such as "2 of 3".

    >>> Number(87.249, 0.21, decimals=1).text(), Number(0.5, decimals=1, signed=True).text()
    ('87.2 ± 0.2', '+0.5')
    >>> Number(87.249, 0.21, decimals=1, seeds="2 of 3").text(), Number(float("nan")).text()
    ('87.2 ± 0.2 (2 of 3)', 'not finite')
    >>> Number(3.6e-7, decimals=3).text()
    '4e-07'
    """

    mean: float
    std: float | None = None
    decimals: int = 0
    signed: bool = False
    seeds: str = ""

    def text(self) -> str:
        if not math.isfinite(self.mean):
            return NOT_FINITE
        sign = "+" if self.signed else ""
        shown = f"{self.mean:{sign},.{self.decimals}f}"
        if self.decimals >= 3 and self.std is None and 0 < abs(self.mean) < 0.5 * 0.1**self.decimals:
            shown = f"{self.mean:{sign}.0e}"
        if not float(shown.replace(",", "")):
            shown = shown.lstrip("+-")
        shown = shown if self.std is None else f"{shown} ± {self.std:,.{self.decimals}f}"
        return f"{shown} ({self.seeds})" if self.seeds else shown


class Column(NamedTuple):
    """A heading; what its numbers' standard deviations are called in CSV, where they stand apart; "" for none."""

    name: str
    deviation: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that can be shown in several ways.

    Attributes:
      title: above it; "" for none.
      columns: the headings; none is shown where all are "".
      rows: a cell per column: text, a Number, or None, which is shown as "–".
      note: beneath it; "" for none.

    >>> print(Table("", (Column("method"), Column("ARI", "std")), (("IFCA", Number(0.9, 0.1, 2)),)).markdown(), end="")
    | method | ARI |
    | :-- | --: |
    | IFCA | 0.90 ± 0.10 |
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str | Number | None, ...], ...]
    note: str = ""

    def print(self, console: Console | None = None) -> None:
        """Prints the table, by default on the standard output."""
        console, headed = console or Console(), any(column.name for column in self.columns)
        shown = rich.table.Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=headed, padding=(0, 1, 0, 0))
        between = 2 * len(self.columns) - 1
        widths = self._widths(console.width - between)
        for index, (column, width) in enumerate(zip(self.columns, widths, strict=True)):
            shown.add_column(Text(column.name), justify=self._side(index), vertical="bottom", width=width)
        for row in self._texts():
            shown.add_row(*map(Text, row))
        # Where even the narrowest columns do not fit, lines that wrap lose nothing; cropped ones would.
        shown.width = sum(widths) + between
        if self.title:
            console.print(Text(self.title, "bold"))
        console.print(shown, crop=False, soft_wrap=shown.width > console.width)
        if self.note:
            console.print(Text(self.note, "italic"))

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [[column.name for column in self.columns]]
        lines.append([":--" if self._side(index) == "left" else "--:" for index in range(len(self.columns))])
        lines += self._texts()
        body = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
        return (f"**{self.title}**\n\n" if self.title else "") + body + (f"\n{self.note}\n" if self.note else "")

    def csv(self) -> str:
        """The table as comma-separated values: numbers unrounded, None empty.

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
                row += _unrounded(cell, list(apart.values()))
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows([names, *rows])
        return buffer.getvalue()

    def write(self, *paths: str | pathlib.Path) -> None:
        """Writes the table to files ending in .md or .csv (otherwise ValueError); each is complete or absent."""
        ways: dict[str, Callable[[], str]] = {".md": self.markdown, ".csv": self.csv}
        targets = [pathlib.Path(path) for path in paths]
        for path in targets:
            if path.suffix not in ways:
                raise ValueError(f"cannot write a table to '{path.name}'; its name must end in {' or '.join(ways)}")
        for path in targets:
            with atomic_file(path) as temporary:
                temporary.write_text(ways[path.suffix](), encoding="utf-8")

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


def comparison_table(runs: Sequence[Runs]) -> Table:
    """Compares methods: accuracy, ARI, clusters, rounds, models sent and speed; means over the seeds.

    Args:
      runs: for each method its label and the summaries of its seeds. Where no run has an accuracy (regression), the
        test loss takes its place. A method whose runs have all diverged has "not finite" there.

    Raises:
      ValueError: no runs, a method without a summary, or a figure that is no number.
    """
    if not runs:
        raise ValueError("there are no runs to compare; give those of one method at least")
    if empty := [method.label for method in runs if not method.summaries]:
        raise ValueError(f"{empty[0]} has no summaries; give one for each seed")
    every = [summary for method in runs for summary in method.summaries]
    counts = [len(method.summaries) for method in runs]

    def column(read: Callable[[Mapping[str, Any]], float | None], decimals: int, deviation: bool = False):
        values = [[read(summary) for summary in method.summaries] for method in runs]
        found = [spread(of_seeds) for of_seeds in values]
        if not deviation:
            found = [value and Spread(value.mean) for value in found]
            # Whole numbers in all rows need no point.
            decimals = decimals if any(value and value.mean % 1 for value in found) else 0
        pairs = zip(found, values, strict=True)
        return [value and Number(*value, decimals=decimals, seeds=_share(of_seeds)) for value, of_seeds in pairs]

    if any(figure(summary, "accuracy") is not None for summary in every):
        heading, best = "test accuracy (%)", column(lambda s: quality(s, "accuracy", 100), 1, True)
    else:
        heading, best = "test loss", column(lambda s: quality(s, "test_loss"), 4, True)
    lost = [sum(map(diverged, method.summaries)) for method in runs]
    best = [number or (Number(math.nan) if count else None) for number, count in zip(best, lost, strict=True)]
    columns = {
        Column(heading, SAMPLE): best,
        Column("ARI", SAMPLE): column(lambda s: figure(s, "adjusted_rand_index"), 2, True),
        Column("clusters"): column(lambda s: figure(s, "num_clusters"), 1),
        Column("final after round"): column(lambda s: figure(s, "first_round_of_final_clustering"), 1),
        Column("models down per client"): column(lambda s: _per_client(s, "models_down"), 1),
        Column("models up per client"): column(lambda s: _per_client(s, "models_up"), 1),
        Column("client rounds per second"): column(_speed, 0),
    }
    names = [method_name(method.label) for method in runs]
    shown = names
    if len(set(counts)) > 1:
        shown = [f"{name} ({n} seed{'s' * (n > 1)})" for name, n in zip(names, counts, strict=True)]
    ended = ", ".join(f"{name} {n} of {all_}" for name, n, all_ in zip(names, lost, counts, strict=True) if n)
    partly = any(number and number.seeds for cells in columns.values() for number in cells)
    notes = [
        f"mean ± sample standard deviation {over_seeds(counts)}" if max(counts) > 1 else "",
        "in brackets how many seeds have the figure" if partly else "",
        f"runs that ended not finite: {ended}" if ended else "",
    ]
    rows = tuple(zip(shown, *columns.values(), strict=True))
    return Table("", (Column("method"), *columns), rows, "; ".join(filter(None, notes)))


def recipe_table(title: str, rows: Sequence[PaperRow]) -> Table:
    """Our values, the paper's, and the difference.

    Args:
      title: what is reproduced.
      rows: one value each. Rows of one metric stand together, with as many digits as its values need.

    Raises:
      ValueError: no rows, or not a single value.
    """
    check_rows(rows)
    lines = []
    for metric in dict.fromkeys(row.metric for row in rows):
        alike = [row for row in rows if row.metric == metric]
        decimals = _decimals(alike)
        for row in alike:
            share = "" if row.valued is None else f"{row.valued} of {row.seeds}"
            ours = _number(row.ours, row.ours_std, decimals, share)
            paper = _number(row.paper, row.paper_std, decimals)
            difference = Number(row.ours - row.paper, None, decimals, True) if ours and paper else None
            lines.append((metric, row.column, method_name(row.row), ours, paper, difference))
    deviations = {"ours": SAMPLE, "paper": "std"}
    names = ("metric", "setting", "method", "ours", "paper", "difference")
    over = over_seeds(row.seeds for row in rows if is_known(row.ours_std))
    notes = [f"ours: mean ± sample standard deviation {over}; the paper's as printed" if over else ""]
    notes += ["in brackets how many seeds have a value"] * any(row.valued is not None for row in rows)
    columns = tuple(Column(name, deviations.get(name, "")) for name in names)
    return Table(title, columns, tuple(lines), "; ".join(filter(None, notes)))


def summary_table(summary: Mapping[str, Any], directory: str | pathlib.Path | None = None) -> Table:
    """One run in some ten lines of two columns without headings; what it has no figure of is left out.

    A run that has diverged says so in place of figures of the models that it left behind.

    Args:
      summary: what summary.json holds.
      directory: where the run was left.

    Raises:
      ValueError: a figure that is no number.
    """

    def line(template: str, *names: str, factor: float = 1.0) -> str | None:
        """The template filled with figures; None where one is missing."""
        values = [figure(summary, name, factor) for name in names]
        return None if None in values else template.format(*values)

    lost = f"{NOT_FINITE}: the run has diverged" if diverged(summary) else None
    accuracy = line("{:.1f} %", "accuracy", factor=100)
    names = "accuracy_std", "accuracy_worst_decile"
    clients = line("std over clients {:.1f}, worst decile {:.1f} %", *names, factor=100)
    agreement = line("{:.2f}", "adjusted_rand_index")
    if agreement and (ideal := line("{:.0f}", "first_round_of_ideal_agreement")):
        agreement += f", first after round {ideal}" if agreement == "1.00" else f" (1.00 first after round {ideal})"
    clustering = line("{:,.0f} times", "clusterings")
    if clustering and (each := line("{:,.3g} ms each", "seconds_per_clustering", factor=1e3)):
        clustering += f", {each}"
    sent = [_per_client(summary, name) for name in ("models_down", "models_up")]
    lines = {
        "diverged": line("in round {:.0f}", "first_round_not_finite"),
        "training loss": lost,
        "test accuracy": None if lost else accuracy and "; ".join(filter(None, (accuracy, clients))),
        "balanced accuracy": None if lost else line("{:.1f} %", "balanced_accuracy", factor=100),
        "test loss": None if lost else line("{:.4g}", "test_loss"),
        "adjusted Rand index": agreement,
        "clusters": line("{:.0f}", "num_clusters"),
        "final clustering": line("after round {:.0f}", "first_round_of_final_clustering"),
        "rejected updates": line("{:,.0f}", "num_rejected") if figure(summary, "num_rejected") else None,
        "models per client": f"{sent[0]:,.1f} down, {sent[1]:,.1f} up" if None not in sent else None,
        "traffic": line("{:,.1f} MB down, {:,.1f} MB up", "bytes_down", "bytes_up", factor=1e-6),
        "mini-batches": line("{:,.0f} gradients, {:,.0f} losses", "gradient_evaluations", "loss_evaluations"),
        "server's clustering": clustering if figure(summary, "clusterings") else None,
        "speed": line("{:,.0f} client-rounds per second", "client_rounds_per_second"),
        "time": line("{:.1f} s compiling, {:.1f} s running", "compile_seconds", "run_seconds"),
        "left in": None if directory is None else str(directory),
    }
    title = f"{method_name(str(summary.get('algorithm', 'run')))} on {summary.get('scenario', 'unknown data')}"
    if count := line("{:.0f} clients", "clients"):
        title += f": {count}, {summary.get('rounds', NOTHING)} rounds, seed {summary.get('seed', NOTHING)}"
    rows = tuple((name, text) for name, text in lines.items() if text)
    return Table(title, (Column(""), Column("")), rows)


def figure(summary: Mapping[str, Any], name: str, factor: float = 1.0) -> float | None:
    """A figure of a summary times `factor`; None where there is no finite one. Rounds count from 1, as in pictures.

    Raises:
      ValueError: what stands there is no number.
    """
    value = summary.get(name)
    if not isinstance(value, int | float | np.floating | np.integer | None):
        raise ValueError(f"a summary's {name} is {value!r}, which is no number; is its summary.json damaged?")
    known = None if value is None else float(value)
    return factor * (known + name.startswith("first_round")) if is_known(known) else None


def diverged(summary: Mapping[str, Any]) -> bool:
    """Whether a run ended without a finite training loss because its updates were rejected."""
    return "train_loss" in summary and figure(summary, "train_loss") is None and figure(summary, "num_rejected") != 0


def quality(summary: Mapping[str, Any], name: str, factor: float = 1.0) -> float | None:
    """A figure of the models; None of those that a run left behind when it diverged."""
    return None if diverged(summary) else figure(summary, name, factor)


def _share(values: Sequence[float | None]) -> str:
    """How many of the seeds have a value, where some have one and others none."""
    known = sum(map(is_known, values))
    return f"{known} of {len(values)}" if 0 < known < len(values) else ""


def _per_client(summary: Mapping[str, Any], name: str) -> float | None:
    clients = figure(summary, "clients")
    return figure(summary, name, 1 / clients) if clients else None


def _speed(summary: Mapping[str, Any]) -> float | None:
    return round(figure(summary, "client_rounds_per_second") or 0) or None


def _number(mean: float, std: float, decimals: int, seeds: str = "") -> Number | None:
    return Number(mean, std if is_known(std) else None, decimals, seeds=seeds) if is_known(mean) else None


def _decimals(rows: Sequence[PaperRow]) -> int:
    """Digits after the point: none for whole numbers, three for small ones, else two."""
    values = [value for row in rows for value in (row.ours, row.paper) if is_known(value)]
    if not any(value % 1 for value in values):
        return 0
    largest = max(abs(value) for value in values)
    return 3 if largest < 0.9 else 2 if largest < 1000 else 1


def _unrounded(cell: str | Number | None, apart: Sequence[str]) -> list[str]:
    """A cell, and the parts of it that stand apart."""
    if not isinstance(cell, Number):
        return [cell or "", *("" for _ in apart)]
    parts = {"std": "" if cell.std is None else f"{cell.std:.9g}", "seeds": cell.seeds}
    return [f"{cell.mean:.9g}", *(parts[name] for name in apart)]
