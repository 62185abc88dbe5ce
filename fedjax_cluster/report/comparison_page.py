"""The page of a comparison: the table, the curves, each run with a link to its own page, and the settings."""

from __future__ import annotations

import math
import os
import pathlib
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fedjax_cluster.report import web_page as web
from fedjax_cluster.report.judged_by import HONEST, of_honest
from fedjax_cluster.report.names import counted, method_name, option_names
from fedjax_cluster.report.run_page import PAGE, as_text, flat
from fedjax_cluster.report.significance import rounded
from fedjax_cluster.report.table import NOT_FINITE, NOTHING, Number, Spread, Table, spread
from fedjax_cluster.report.tables import differing, diverged, quality
from fedjax_cluster.report.web_page import Html, Section

MOST_TITLED = 4  # methods in the title, or in one place
PICTURES = {
    "sensitivity": (
        "What the options do.",
        "After the last round: mean over the seeds and sample standard deviation; beside a line, grey dots are runs.",
    ),
    "learning_curves": (
        "Learning curves.",
        "Mean over the seeds of what the methods are compared by, after each evaluation; a band is one sample standard "
        "deviation, a cross where a method's run was not finite any more.",
    ),
    "small_multiples": (
        "Each method alone.",
        "The same curves, a panel for each method with the others in grey; the number is the last mean.",
    ),
}


class Compared(Protocol):
    """One method's runs over the seeds."""

    @property
    def label(self) -> str: ...

    @property
    def summaries(self) -> Sequence[Mapping[str, Any]]: ...  # what summary.json holds

    @property
    def failed(self) -> Mapping[int, str]: ...  # seed -> why


class Background(NamedTuple):
    """Where the runs of a comparison are, and with which settings they were made."""

    directories: Mapping[str, Mapping[int, pathlib.Path]]  # label -> seed -> of the run
    settings: Mapping[str, Mapping[str, Any]]  # label -> configuration
    machine: Mapping[str, Any]  # versions and devices of the first run, by name
    cells: Mapping[str, Mapping[str, Any]] = {}  # of a sweep: label -> option -> value


def write_comparison_page(
    directory: str | pathlib.Path,
    compared: Sequence[Compared],
    table: Table,
    plots: Sequence[pathlib.Path],
    background: Background,
    name: str = PAGE,
) -> pathlib.Path:
    """Writes report.html, or a page of another name, into a comparison's directory and returns its path.

    Args:
      directory: where the page is left.
      compared: the methods.
      table: what `tables.comparison_table` says of them.
      plots: pictures; those that are PNG files go into the page.
      background: see there.
    """
    directory = pathlib.Path(directory)
    thing = "cell" if background.cells else "method"
    drawn = [
        web.picture(path, *PICTURES[path.stem], link=_relative(path, directory))
        for path in plots
        if path.suffix == ".png" and path.stem in PICTURES
    ]
    failures = [
        (method_name(each.label), seed, reason) for each in compared for seed, reason in sorted(each.failed.items())
    ]
    sections = [
        Section("results", "Results", web.table(table.without_texts())),
        Section("rounds", "Options" if background.cells else "Over the rounds", web.figures(drawn)),
        Section("runs", "Each run", _runs(directory, compared, background)),
        Section("failures", "What failed", web.grid(failures, (thing, "seed", "why")) if failures else Html("")),
        Section("configuration", "Configuration", _settings(background)),
        Section("environment", "Environment", web.pairs(background.machine.items())),
    ]
    return web.write_page(
        directory / name,
        _title(compared, background),
        lead(compared, thing, _swept(background)),
        sections,
        end="Left by fedjax_cluster. Tables and pictures are in this file, which loads nothing from elsewhere.",
    )


def lead(compared: Sequence[Compared], thing: str = "method", swept: Iterable[str] = ()) -> str:
    """A comparison in one sentence: which method, or cell of a sweep, has the best mean, and which follows.

    Methods may each have their own rounds, but cells only where these are among the options `swept`.
    """
    counts = sorted({len(each.summaries) + len(each.failed) for each in compared})
    seeds = " or ".join(f"{count}" for count in counts) + (" seed" if counts == [1] else " seeds")
    begin = f"{counted(len(compared), thing)} over {seeds}"
    every = [summary for each in compared for summary in each.summaries]
    accuracy = of_honest("accuracy", every)
    accurate = any(quality(summary, accuracy) is not None for summary in every)
    name, factor, decimals, unit = (accuracy, 100, 1, " %") if accurate else ("test_loss", 1, 4, "")
    figures = [[quality(summary, name, factor) for summary in each.summaries] for each in compared]
    ended = [sum(value is not None for value in of) for of in figures]
    found = [spread(of) for of in figures]
    # By the table's rule: a mean over fewer seeds than others have comes after these.
    known = sorted(
        (row for row, value in enumerate(found) if value is not None),
        key=lambda row: (-ended[row], _mean(found, row, -factor if accurate else factor)),
    )
    if not known:
        return f"{begin}: none has a result."
    lengths = {str(summary.get("rounds")) for summary in every}
    apart = differing(compared) + ["rounds"] * (thing == "cell" and "rounds" not in swept and len(lengths) > 1)
    if apart:
        return f"{begin}; not ranked, as runs differ in {' and '.join(apart)}."

    def text(rows: Sequence[int]) -> str:
        row = rows[0]
        total = len(compared[row].summaries) + len(compared[row].failed)
        share = f" ({ended[row]} of {total})" if ended[row] < total else ""
        number = "" if (value := found[row]) is None else Number(*value, decimals=decimals).text()
        names = [method_name(compared[each].label) for each in rows]
        if len(names) > MOST_TITLED:
            names = [names[0], f"{len(names) - 1} more"]
        return f"{' and '.join(names)} with {number}{unit}{share}"

    def alike(rows: Sequence[int]) -> list[int]:
        return [
            row
            for row in rows
            if ended[row] == ended[rows[0]] and _mean(found, row, factor) == _mean(found, rows[0], factor)
        ]

    first = alike(known)
    what = "highest mean test accuracy" if accurate else "lowest mean test loss"
    if accurate and accuracy.endswith(HONEST):
        what += " of honest clients"
    if len(known) == 1:
        return f"{begin}: {text(first)} alone has a result."
    better = -1 if accurate else 1
    if any(_mean(found, row, better) < _mean(found, first[0], better) for row in known):
        what += " of those with the most seeds"
    rest = [row for row in known if row not in first]
    begin += f": {text(first)} {'has' if len(first) == 1 else 'share'} the {what}"
    if not rest:
        return f"{begin}."
    second = alike(rest)
    return f"{begin}; {text(second)} {'follows' if len(second) == 1 else 'follow'}."


def _mean(found: Sequence[Spread | None], row: int, factor: float) -> float:
    """A mean, of which digits that are rounding's do not count, with the sign of `factor`."""
    value = found[row]
    return math.nan if value is None else math.copysign(1.0, factor) * float(rounded(value.mean))


def _title(compared: Sequence[Compared], background: Background) -> str:
    names = [method_name(each.label) for each in compared]
    if background.cells:
        options = option_names(_swept(background))
        methods = dict.fromkeys(method_name(str(of.get("method"))) for of in background.settings.values())
        names = [f"{' and '.join(methods)} over {' and '.join(options.values())}"]
    summaries = [summary for each in compared for summary in each.summaries]
    places = {tuple(str(summary.get(key) or "") for key in ("scenario", "dataset")) for summary in summaries}
    named = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
    text = named if len(names) <= MOST_TITLED else counted(len(names), "method")
    if len(places) != 1:
        return text
    scenario, data = next(iter(places))
    return f"{text} on {' '.join(filter(None, (scenario.replace('_', ' '), data if data != scenario else '')))}"


def _swept(background: Background) -> list[str]:
    return list(dict.fromkeys(option for values in background.cells.values() for option in values))


def _runs(directory: pathlib.Path, compared: Sequence[Compared], background: Background) -> Html:
    """Methods by seeds: the figure of each run, and a link where it has left a page."""
    accuracy = of_honest("accuracy", [summary for each in compared for summary in each.summaries])
    known = {seed for of in background.directories.values() for seed in of}
    # Of what was put beside our runs, too.
    known |= {seed for each in compared for summary in each.summaries if isinstance(seed := summary.get("seed"), int)}
    lines, seeds = {}, sorted(known)
    for each in compared:
        ended = {summary.get("seed"): summary for summary in each.summaries}
        cells: list[object] = []
        for seed in seeds:
            path = background.directories.get(each.label, {}).get(seed)
            text = _figure(ended[seed], accuracy) if seed in ended else "failed" if seed in each.failed else NOTHING
            page = None if path is None else path / PAGE
            there = page is not None and page.is_file()
            cells.append(web.element("a", text, href=_relative(page, directory)) if there and page else text)
        lines[each.label] = (method_name(each.label), *cells)
    if not background.directories or not seeds:
        return Html("")
    headings = ("cell" if background.cells else "method", *(f"seed {seed}" for seed in seeds))
    grid = web.grid(list(lines.values()), headings, numeric=(False, *(True for _ in seeds)))
    return web.joined([web.paragraph("A figure leads to the page of its run.", "note"), grid])


def _relative(path: pathlib.Path, directory: pathlib.Path) -> str:
    """A file as a link in a page of the directory; in one, # and ? begin other parts."""
    return urllib.parse.quote(pathlib.Path(os.path.relpath(path, directory)).as_posix())


def _figure(summary: Mapping[str, Any], of: str) -> str:
    if diverged(summary):
        return NOT_FINITE
    accuracy, loss = quality(summary, of, 100), quality(summary, "test_loss")
    return f"{accuracy:.1f} %" if accuracy is not None else NOTHING if loss is None else f"{loss:.4g}"


def _settings(background: Background) -> Html:
    """What all share, and beneath it what tells them apart, which the rows of a sweep do already."""
    each = {label: dict(flat(content)) for label, content in background.settings.items()}
    names = list(dict.fromkeys(name for content in each.values() for name in content if name != "seed"))
    shown = {name: [as_text(content[name]) if name in content else "" for content in each.values()] for name in names}
    shared = [(name, values[0]) for name, values in shown.items() if len(set(values)) == 1]
    apart = [(name, *values) for name, values in shown.items() if len(set(values)) > 1]
    headings = ("settings that differ", *map(method_name, each))
    return web.columns(
        [
            web.grid(shared, ("settings of all", "")) if shared else Html(""),
            web.grid(apart, headings) if apart and not background.cells else Html(""),
        ]
    )
