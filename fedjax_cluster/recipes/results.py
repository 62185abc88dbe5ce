"""The committed results of recipes: what was found, and with what, on what and how long; see `page`."""

from __future__ import annotations

import functools
import json
import math
import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_cluster.experiments.reproduction import RAN, is_reproduction
from fedjax_cluster.files import atomic_file, read_json

RESULTS = pathlib.Path(__file__).with_name("results.json")
PAPERS = pathlib.Path(__file__).with_name("papers.toml")
DATASETS = {
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "mnist+fashion_mnist": "MNIST and Fashion-MNIST",
    "cifar10": "CIFAR-10",
}

Record = dict[str, Any]  # "ran": recipe -> its last ran.json; "rows": as `_row` makes them


def read() -> Record:
    """The committed results."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


@functools.cache
def papers() -> dict[str, dict[str, Any]]:
    """The papers: title, reference, notes, and an item for each table and figure."""
    return tomllib.loads(PAPERS.read_text(encoding="utf-8"))


def items() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each table, figure and claim of the papers, with the paper's name."""
    return ((name, item) for name, paper in papers().items() for item in paper["items"])


def write(record: Record) -> None:
    """Leaves the results, a row a line."""
    rows = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in record["rows"])
    ran = json.dumps(record["ran"], indent=2, ensure_ascii=False).replace("\n", "\n  ")
    with atomic_file(RESULTS) as beside:
        beside.write_text(f'{{\n  "ran": {ran},\n  "rows": [\n{rows}\n  ]\n}}\n', encoding="utf-8")


def taken_up(record: Record, directory: pathlib.Path) -> Record:
    """The results with what `reproduce` left in a directory.

    Raises:
      ValueError: it is not finished, it is of the quick version, or its recipe belongs to no paper.
    """
    try:
        ran = read_json(directory / RAN)
        table = json.loads((directory / "table.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        begun = "has not ended; continue it with resume" if is_reproduction(directory) else "is not there"
        raise ValueError(f"what reproduce leaves in {directory} {begun} ({error.filename} is missing)") from None
    if ran["version"] == "quick":
        raise ValueError(f"{directory} is of --quick, whose figures are not the recipe's; carry it out without")
    name = ran["recipe"] + (" --full" if ran["version"] == "full" else "")
    merged = with_table(record, name, table)
    about = {key: value for key, value in ran.items() if key not in ("recipe", "version", "study")}
    return {**merged, "ran": {**record["ran"], name: about}}


def with_table(record: Record, recipe: str, table: Sequence[Mapping[str, Any]]) -> Record:
    """The results with a recipe's table.json.

    A row replaces that of the same recipe, quantity and setting, note included, or is added to the recipe.

    Raises:
      ValueError: a recipe of no paper.
    """
    rows = list(record["rows"])
    paper = paper_of(recipe)
    for new in table:
        row = _row(new, paper, recipe)
        siblings = [place for place, old in enumerate(rows) if old["recipe"] == recipe]
        same = [place for place in siblings if key(rows[place]) == key(row)]
        like = rows[(same or siblings)[0]] if siblings else {}
        # What table.json does not know: text in place of a printed number, and the paper's data.
        for name in ("paper_value", "dataset"):
            if row[name] is None and (same or name == "dataset"):
                row[name] = like.get(name)
        if same and like.get("tolerance") == []:  # it is not to be judged
            row["tolerance"] = []
        row["paper_dataset"] = (like.get("paper_dataset") if same else None) or _paper_dataset(row)
        row["paper_dataset"] = row["paper_dataset"] or like.get("paper_dataset")
        row = {name: value for name, value in row.items() if value is not None or name in ("ours", "seeds")}
        if same:
            rows[same[0]] = row
        else:
            rows.insert(siblings[-1] + 1 if siblings else len(rows), row)
    return {**record, "rows": rows}


def _row(new: Mapping[str, Any], paper: str, recipe: str) -> dict[str, Any]:
    dataset = new.get("dataset", "")
    return {
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
        "tolerance": new.get("tolerance"),
        "ran": True,
    }


def _of_sample(new: Mapping[str, Any]) -> float | None:
    """The sample's standard deviation of a table.json that does not name it: it divides by the number of seeds."""
    spread, seeds = new.get("ours_std"), new.get("seeds")
    return spread * math.sqrt(seeds / (seeds - 1)) if spread is not None and seeds and seeds > 1 else None


def base_name(recipe: str) -> str:
    """A recipe's name without its version.

    >>> base_name("flag-table8 --full")
    'flag-table8'
    """
    return recipe.partition(" ")[0]


def paper_of(recipe: str) -> str:
    """The paper that names a recipe in one of its items; a ValueError where none does."""
    for paper, item in items():
        if base_name(recipe) in item["recipes"]:
            return paper
    raise ValueError(f"recipe {recipe!r} stands under no table or figure of {PAPERS.name}; add it there")


def _paper_dataset(row: Mapping[str, Any]) -> str | None:
    """That of the first table or figure which a row belongs to."""
    of = [item for _, item in items() if base_name(row["recipe"]) in item["recipes"]]
    return next((item.get("paper_dataset") for item in of if belongs(row, item)), None)


def belongs(row: Mapping[str, Any], item: Mapping[str, Any]) -> bool:
    """Whether a row of an item's recipe is one of its own."""
    return bool(re.search(item.get("rows", ""), f"{row['quantity']}: {row['setting']}"))


def key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What makes a row the same."""
    return row["recipe"], row["quantity"], row["setting"]


def seconds_per_run(recipe: str) -> tuple[float, str] | None:
    """Measured seconds of a recipe's run, and the device; None where nobody has measured them.

    Args:
      recipe: its name, with " --full" for that version.
    """
    ran = read()["ran"].get(recipe)
    if not ran or not ran["timed_runs"]:
        return None
    # Other work on the machine makes a run wait: no more than the processor's seconds are its own.
    seconds = ran["seconds"]
    if ran["backend"] == "cpu":
        seconds = min(seconds, ran.get("processor_seconds", seconds))
    return seconds / ran["timed_runs"], ran["device"]
