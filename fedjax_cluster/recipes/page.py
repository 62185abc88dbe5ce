"""The page of all reproduced figures in Markdown: `fedjax-cluster reproduce --page` writes it from the results."""

from __future__ import annotations

import pathlib
import shutil
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedjax_cluster.experiments.reproduction import FIGURE, read_recipe
from fedjax_cluster.recipes import catalogue, results
from fedjax_cluster.recipes.results import Record, base_name
from fedjax_cluster.recipes.verdicts import RULES, counted_verdicts, seeds, verdict

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
PAGE = BENCHMARKS / "reproduction.md"
FIGURES = BENCHMARKS / "figures"
FULL = "--full"
ITEM_COLUMNS = ("table or figure", "the paper's data and model", "ours", "what differs", "verdicts")
COLUMNS = ("quantity", "setting", "ours (mean ± std, seeds)", "paper's", "data set", "verdict")
RAN_COLUMNS = ("recipe", "seeds", "commit", "date", "versions", "device", "seconds (the processor's)")
NOT_KEPT = "not kept"
INTRODUCTION = f"""# Figures of the papers, reproduced

Written by `fedjax-cluster reproduce --page` from `fedjax_cluster/recipes/results.json` and `papers.toml`: change these
and not this page. `fedjax-cluster reproduce RECIPE` computes a recipe's figures, prints them with the paper's, and
tells how it reads what the paper leaves open; `fedjax-cluster reproduce --page RECIPE` takes them up here.

Each paper has a table with a row for each of its tables and figures, then one with the figures that were reproduced.

- A setting begins with its recipe. Baselines stand in the table of the paper whose experiment it is.
- Ours: the mean over the seeds ± their sample standard deviation, which is left out with one seed and where only the
  mean was kept; in brackets the seeds, and each seed's value where it was kept. – is a run that has no value.
- The paper's: as printed, or as its text states it; – where it has none. What the authors' public code gives on our
  data is called so.
- The data set is ours, and the paper's where that is another one: figures on two data sets differ for that reason too.

The verdicts are the command's, baselines' included:

{RULES}"""


ROUNDING = 1e-6  # what float32 leaves of an index of 0


def write(names: Sequence[str] = ()) -> list[pathlib.Path]:
    """Takes up what `reproduce` left of recipes, and writes the page anew; returns the files written.

    Args:
      names: recipes, which lie where `reproduce` leaves them, or directories.

    Raises:
      ValueError: no checkout, or nothing that can be taken up.
    """
    if not BENCHMARKS.is_dir():
        raise ValueError(f"the page stands in a checkout of the repository, and {BENCHMARKS} is not there")
    record = results.read()
    written = [results.RESULTS, PAGE]
    directories = list(map(_directory, names))
    for directory in directories:
        record = results.taken_up(record, directory)
    for directory in directories:
        FIGURES.mkdir(exist_ok=True)
        for picture in sorted(directory.glob(f"{FIGURE}*.png")):
            recipe = read_recipe(directory)
            name = recipe["recipe"] + (FULL if recipe["version"] == "full" else "") + picture.name.removeprefix(FIGURE)
            written.append(pathlib.Path(shutil.copyfile(picture, FIGURES / name)))
    results.write(record)
    PAGE.write_text(page(record, {path.stem for path in FIGURES.glob("*.png")}), encoding="utf-8")
    return written


def _directory(name: str) -> pathlib.Path:
    path = pathlib.Path(name)
    return path if path.is_dir() else catalogue.place_of(catalogue.chosen_recipe(name).name)


def page(record: Record, figures: Iterable[str] = ()) -> str:
    """The page: for each paper its tables and figures, the single figures and notes; at the end what was run.

    Args:
      record: the results.
      figures: the pictures in `FIGURES`, each called as its recipe, or `recipe.name` where that has several;
        `recipe--full` of that version.
    """
    drawn = sorted(figures)
    parts = [INTRODUCTION]
    for name, paper in results.papers().items():
        rows = [row for row in record["rows"] if row["paper"] == name]
        names = dict.fromkeys(base_name(row["recipe"]) for row in rows)
        own = [picture for each in names for picture in drawn if picture.partition(".")[0].removesuffix(FULL) == each]
        parts += [
            f"## {paper['title']}",
            textwrap.fill(f"{paper['reference']}.", 120),
            _table(ITEM_COLUMNS, (_item_cells(item, rows) for item in paper["items"])),
            _table(COLUMNS, (_cells(row) for row in rows)) if rows else "",
            "\n".join(_note(note) for note in paper["notes"]),
            "\n\n".join(f"`{each}`:\n\n![{each}](figures/{each}.png)" for each in own),
        ]
    parts += ["## What was run", _ran(record)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _item_cells(item: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table's or figure's row; where there is no recipe, the reason in place of what differs."""
    recipes, pattern = item["recipes"], item.get("rows")
    run = [row for row in rows if base_name(row["recipe"]) in recipes]
    found = [verdict(row) for row in run if results.belongs(row, item)]
    without = item.get("elsewhere") or ("not run yet" if recipes else "no recipe")
    verdicts = counted_verdicts(found) if found else without
    if run and pattern == "":
        verdicts = "no numbers printed"
    return [
        f"{item['name']}: {item['shows']}",
        item.get("paper", "–"),
        ", ".join(f"`{recipe}`" for recipe in recipes) or "–",
        item["differs"],
        verdicts,
    ]


def _cells(row: Mapping[str, Any]) -> list[str]:
    ours, spread, of = row["ours"], row.get("ours_std"), _seeds(row["seeds"])
    if isinstance(ours, list):
        each = [value for value in ours if value is not None]
        count = "" if len(each) == len(ours) else f"{len(each)} of "
        if len(set(ours)) == 1 < len(each):
            of, ours, spread = f"{of}, all equal", ours[0], 0
        elif len(each) > 1:
            of = f"{count}{of}: {', '.join(_text(value, row) for value in ours)}"
            ours, spread = statistics.fmean(each), statistics.stdev(each)
        else:
            of, ours, spread = f"{count}{of}", each[0] if each else None, None
    data = row.get("dataset") or "–"
    if row.get("paper_dataset") not in (None, data):
        data += f" (paper: {row['paper_dataset']})"
    notes = [row["note"]] if row.get("note") else []
    return [
        row["quantity"],
        f"`{row['recipe']}`" + (f": {row['setting']}" if row["setting"] else ""),
        "; ".join([f"{_text(ours, row)}{_plus_minus(_text(spread, row, digits=2))} ({of})", *notes]),
        _as_printed(row.get("paper_value")) + _plus_minus(_as_printed(row.get("paper_std"))),
        data,
        str(verdict(row)),
    ]


def _ran(record: Record) -> str:
    """What the results were computed with, a row a recipe; one line for those of which it was not kept."""
    rows = []
    for recipe, ran in record["ran"].items():
        versions = ", ".join(f"{name} {version}" for name, version in ran["versions"].items())
        processor = f"{ran['processor_seconds']:g}" if "processor_seconds" in ran else NOT_KEPT
        taken = f"{ran['seconds']:g} ({processor})"
        if ran["timed_runs"] < ran["runs"]:
            taken += f" for {ran['timed_runs']} of {ran['runs']} runs"
        known = (str(ran["seeds"]), ran["commit"] or NOT_KEPT, ran["date"], versions, ran["device"], taken)
        rows.append((f"`{recipe}`", *known))
    old = dict.fromkeys(row["recipe"] for row in record["rows"] if not row.get("ran"))
    also = {recipe for recipe in old if recipe in record["ran"]}
    listed = ", ".join(f"`{recipe}`" + (" (rows of other settings)" if recipe in also else "") for recipe in old)
    text = "Commit, versions, device and seconds were not kept of the figures of these recipes, which are older"
    lines = textwrap.fill(f"{text}: {listed}.", 120, break_on_hyphens=False)
    return "\n\n".join(filter(None, [_table(RAN_COLUMNS, rows) if rows else "", lines if old else ""]))


def _text(value: float | str | None, row: Mapping[str, Any], digits: int = 3) -> str:
    """Percentages with one decimal, others with three significant digits."""
    if not isinstance(value, float):
        return _as_printed(value)
    if row["quantity"].endswith("ARI") and abs(value) < ROUNDING:
        value = 0.0
    if "(%)" in row["quantity"]:
        return _as_printed(f"{value:.1f}")
    rounded = float(f"{value:.{digits}g}")
    # No digit behind the point where those before it are rounded, or all that are known.
    return _as_printed(f"{rounded:.0f}" if abs(rounded) >= 10 ** (digits - 1) else rounded)


def _as_printed(value: float | str | None) -> str:
    if isinstance(value, float):
        value = float(f"{value:.6g}")
    return "–" if value is None else str(value).replace("-", "−") if not isinstance(value, str) else value


def _plus_minus(spread: str) -> str:
    return "" if spread == "–" else f" ± {spread}"


def _seeds(kept: int | list[int] | str | None) -> str:
    if isinstance(kept, str):
        return kept
    if isinstance(kept, list):
        return f"seed{'' if len(kept) == 1 else 's'} {', '.join(map(str, kept))}"
    runs, _ = seeds(kept)
    return "seeds not kept" if runs is None else f"{runs} seed{'' if runs == 1 else 's'}"


def _note(note: str) -> str:
    return textwrap.fill(f"- {note}", 120, subsequent_indent="  ", break_on_hyphens=False)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(map(_line, [columns, ["---"] * len(columns), *rows]))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |"
