"""Writes reproduction.md, our figures and the papers', from results/reproduction.json.

    python benchmarks/reproduction.py                              # the page anew
    python benchmarks/reproduction.py runs/cfl-gp-table10 ...      # first takes up what `fedjax-cluster reproduce` left

A directory's name is the recipe's. A row of its table.json replaces that of the same recipe, quantity and setting, note
included, or is added to the recipe. Figures of a run with --quick do not belong here.
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

PAGE = pathlib.Path(__file__).with_suffix(".md")
RECORD = PAGE.parent / "results" / "reproduction.json"
COLUMNS = ("quantity", "setting", "ours (mean ± std, seeds)", "paper's", "data set")
DATASETS = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "mnist+fashion_mnist": "MNIST and Fashion-MNIST"}
POINTS, AGREEMENT = 2.0, 0.05  # by how much ours may lie below a printed accuracy (%), ARI or Rand index
INTRODUCTION = f"""# Figures of the papers, reproduced

Written by `python benchmarks/reproduction.py` from `results/reproduction.json`: change these and not this page.
`fedjax-cluster reproduce RECIPE` computes a recipe's figures, prints them with the paper's, and tells how it reads what
the paper leaves open; `python benchmarks/reproduction.py runs/RECIPE` takes them up here.

- A setting begins with its recipe. Baselines stand in the table of the paper whose experiment it is.
- Ours: the mean over the seeds ± their sample standard deviation, which is left out with one seed and where only the
  mean was kept; in brackets the seeds, and each seed's value where it was kept. – is a run that has no value.
- The paper's: as printed, or as its text states it; – where it has none.
- The data set is ours, and the paper's where that is another one: figures on two data sets differ for that reason too.
- **Not reached**: our mean is more than {POINTS:g} points of accuracy, or {AGREEMENT:g} of an ARI or a Rand index,
  below the figure that the paper gives for the method.

Not every published figure has been run yet."""


def merged(record: dict[str, Any], recipe: str, table: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record with a recipe's table.json.

    Raises:
      ValueError: a recipe of no known paper.
    """
    rows = list(record["rows"])
    paper = paper_of(record, recipe)
    for new in table:
        dataset = new.get("dataset", "")
        row = {
            "paper": paper,
            "recipe": recipe,
            "quantity": ": ".join(filter(None, (new["row"], new["metric"]))),
            "setting": new["column"],
            "ours": new["ours"],
            "ours_std": new.get("ours_std") if new.get("deviation") == "sample" else _of_sample(new),
            "seeds": f"{new['valued']} of {new['seeds']} seeds" if new.get("valued") else new.get("seeds"),
            "paper_value": new.get("paper"),
            "paper_std": new.get("paper_std"),
            "dataset": DATASETS.get(dataset, dataset) or None,
        }
        siblings = [place for place, old in enumerate(rows) if old["recipe"] == recipe]
        same = [place for place in siblings if key(rows[place]) == key(row)]
        like = rows[(same or siblings)[0]] if siblings else {}
        # What table.json does not know: text in place of a printed number, and the paper's data.
        for name in ("paper_value", "dataset"):
            if row[name] is None and (same or name == "dataset"):
                row[name] = like.get(name)
        row["paper_dataset"] = like.get("paper_dataset")
        row = {name: value for name, value in row.items() if value is not None or name in ("ours", "seeds")}
        if same:
            rows[same[0]] = row
        else:
            rows.insert(siblings[-1] + 1 if siblings else len(rows), row)
    return {**record, "rows": rows}


def paper_of(record: dict[str, Any], recipe: str) -> str:
    """The paper of a recipe: that of its rows, or the longest name of a paper with which its own begins."""
    known = {row["paper"] for row in record["rows"] if row["recipe"] == recipe}
    known = known or {paper for paper in record["papers"] if recipe.startswith(f"{paper}-")}
    if not known:
        raise ValueError(f"recipe {recipe!r} belongs to none of the papers {', '.join(record['papers'])}")
    return max(known, key=len)


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    """What makes a row the same."""
    return row["recipe"], row["quantity"], row["setting"]


def page(record: dict[str, Any]) -> str:
    """The page in Markdown: for each paper a table and its notes."""
    parts = [INTRODUCTION]
    for name, paper in record["papers"].items():
        rows = [_line(_cells(row)) for row in record["rows"] if row["paper"] == name]
        table = [_line(COLUMNS), _line(["---"] * len(COLUMNS)), *rows]
        notes = [
            textwrap.fill(f"- {note}", 120, subsequent_indent="  ", break_on_hyphens=False) for note in paper["notes"]
        ]
        parts += [
            f"## {paper['title']}",
            textwrap.fill(f"{paper['reference']}.", 120),
            "\n".join(table),
            "\n".join(notes),
        ]
    return "\n\n".join(parts) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    ours, spread, seeds = row["ours"], row.get("ours_std"), _seeds(row["seeds"])
    if isinstance(ours, list):
        each = [value for value in ours if value is not None]
        count = "" if len(each) == len(ours) else f"{len(each)} of "
        if len(set(ours)) == 1:
            seeds, ours, spread = f"{seeds}, all equal", ours[0], 0
        else:
            seeds = f"{count}{seeds}: {', '.join(_text(value, row) for value in ours)}"
            ours, spread = statistics.fmean(each), statistics.stdev(each)
    remarks = ["**not reached**"] if _missed(row, ours) else []
    remarks += [row["note"]] if row.get("note") else []
    data = row.get("dataset") or "–"
    if row.get("paper_dataset") not in (None, data):
        data += f" (paper: {row['paper_dataset']})"
    return [
        row["quantity"],
        f"`{row['recipe']}`" + (f": {row['setting']}" if row["setting"] else ""),
        "; ".join([f"{_text(ours, row)}{_plus_minus(_text(spread, row, digits=2))} ({seeds})", *remarks]),
        _as_printed(row.get("paper_value")) + _plus_minus(_as_printed(row.get("paper_std"))),
        data,
    ]


def _missed(row: dict[str, Any], ours: float | str | None) -> bool:
    """Whether an accuracy or an agreement with the true groups is clearly below the printed one."""
    printed = row.get("paper_value")
    higher_is_better = any(name in row["quantity"] for name in ("accuracy", "ARI", "Rand index"))
    if not higher_is_better or not isinstance(ours, int | float) or not isinstance(printed, int | float):
        return False
    return ours < printed - (POINTS if "(%)" in row["quantity"] else AGREEMENT)


def _text(value: float | str | None, row: dict[str, Any], digits: int = 3) -> str:
    """Percentages with one decimal, others with three significant digits."""
    if not isinstance(value, float):
        return _as_printed(value)
    return _as_printed(f"{value:.1f}" if "(%)" in row["quantity"] else float(f"{value:.{digits}g}"))


def _as_printed(value: float | str | None) -> str:
    if isinstance(value, float):
        value = float(f"{value:.6g}")
    return "–" if value is None else str(value).replace("-", "−") if not isinstance(value, str) else value


def _plus_minus(spread: str) -> str:
    return "" if spread == "–" else f" ± {spread}"


def _seeds(seeds: int | list[int] | str | None) -> str:
    match seeds:
        case None:
            return "seeds not kept"
        case int():
            return f"{seeds} seed{'' if seeds == 1 else 's'}"
        case list():
            return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"
    return seeds


def _of_sample(new: dict[str, Any]) -> float | None:
    """The sample's standard deviation of a table.json that does not name it: it divides by the number of seeds."""
    spread, seeds = new.get("ours_std"), new.get("seeds")
    return spread * math.sqrt(seeds / (seeds - 1)) if spread is not None and seeds and seeds > 1 else None


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '∣') for cell in cells)} |"


def write(record: dict[str, Any]) -> None:
    """Leaves the record, a row a line, and its page."""
    rows = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in record["rows"])
    papers = json.dumps(record["papers"], indent=2, ensure_ascii=False).replace("\n", "\n  ")
    RECORD.write_text(f'{{\n  "papers": {papers},\n  "rows": [\n{rows}\n  ]\n}}\n', encoding="utf-8")
    PAGE.write_text(page(record), encoding="utf-8")


def main(directories: Sequence[str]) -> None:
    """Takes up the tables of `directories`, and writes the page."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for directory in map(pathlib.Path, directories):
        left = directory / "table.json"
        if not left.is_file():
            sys.exit(f"{left} is not there; `fedjax-cluster reproduce {directory.name}` leaves it")
        table = json.loads(left.read_text(encoding="utf-8"))
        record = merged(record, directory.resolve().name.replace("_", "-"), table)
    write(record)


if __name__ == "__main__":
    main(sys.argv[1:])
