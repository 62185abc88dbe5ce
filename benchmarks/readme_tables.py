"""Writes the measured speeds, results/SUITE-BACKEND.json, into the marked parts of the READMEs.

    python benchmarks/readme_tables.py

All tables go into this folder's README, the best-known ratios into the project's. `populations` is drawn as well.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster.bench import UNFINISHED, tables
from fedjax_cluster.report import style

FOLDER = pathlib.Path(__file__).parent
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
# The rows of the project's README: suite, what and peer in the results, and a newcomer's words for the work.
HEADLINES = (
    ("whole", "CFL-GP on mnist, whole process", "", "CFL-GP on rotated MNIST, 32 clients, 200 rounds, whole process"),
    ("pytorch", "CFL-GP clustering round, MLP 784-200-10", "", "its clustering round, 128 clients, 4 clusters"),
    ("frameworks", "FedAvg round, MLP 784-200-10", "pfl", "FedAvg round, 32 clients × 1 000 examples, MLP"),
    ("frameworks", "FedAvg round, MLP 784-200-10", "Flower", "the same"),
    ("pytorch", "MLP 784-200-10, local training", "", "local training, MLP, 32 clients × 10 steps"),
    ("pytorch", "CNN 5×5 (32, 64), local training", "", "local training, CNN, 16 clients × 2 steps"),
    ("convolution", "CNN 5×5 (32, 64), local training", "", "the same, in JAX"),
    ("pytorch", "LeNet-5, b=10, local training", "", "local training, LeNet-5, 10 clients × 36 steps of 10 images"),
    ("pytorch", "LeNet-5, b=64, local training", "", "the same, 6 steps of 64"),
    ("pytorch", "FedGWC round, MLP 784-200-10", "", "FedGWC round, 10 clients × 7 steps, MLP"),
    ("pytorch", "FedGWC round, a tenth of the clients, MLP 784-200-10", "", "the same, 10 of 100 clients"),
    ("pytorch", "IFCA round, MLP 784-200-10", "", "IFCA round, 2 400 clients × 10 full-batch steps, MLP"),
    ("pytorch", "ResNet-18, local training", "", "local training, ResNet-18, 8 clients × 1 step"),
)


def main() -> None:
    reports = read_results(FOLDER / "results")
    write_between_marks(all_tables(reports), FOLDER / "README.md")
    write_between_marks(headline_table(reports), FOLDER.parent / "README.md")
    for report in reports:
        if report["suite"] == "populations":
            style.save(population_picture(report), FOLDER / "figures" / "populations.png")


def read_results(results: pathlib.Path) -> list[dict[str, Any]]:
    """The suites' reports in a folder, which may hold other results.

    Raises:
      ValueError: there are none.
    """
    found = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(results.glob("*.json"))
        if not path.stem.endswith(UNFINISHED)
    ]
    reports = [report for report in found if "suite" in report and not report.get("smoke")]
    if not reports:
        raise ValueError(f"{results} holds no suite's results; run fedjax-cluster bench --output {results}")
    return reports


def all_tables(reports: Sequence[Mapping[str, Any]]) -> str:
    """Every suite's table under a heading."""
    return "\n\n".join(
        f"### {report['suite']}\n\n{tables.heading(report)}.\n\n{_markdown(tables.filled_columns(report))}"
        for report in reports
    )


def headline_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """How many times faster than its peer each of HEADLINES is."""
    rows = [["what", "compared with", "times faster"]]
    for suite, what, peer, name in HEADLINES:
        row = _found(reports, suite, what, peer)
        rows.append([name, row["peer"], f"{float(format(row['ratio'], '.2g')):g}"])
    return _markdown(rows)


def population_picture(report: Mapping[str, Any]) -> Figure:
    """Seconds a round and memory against the number of clients, a line for each simulator."""
    rows: dict[str, list[tuple[int, float, float]]] = {}
    for row in report["rows"]:
        clients = int(re.match(r"M=(\d+)", row["size"])[1])  # pyright: ignore[reportOptionalSubscript]
        rows.setdefault(row["what"].removeprefix("FedAvg, "), []).append((clients, row["seconds"], row["megabytes"]))
    with style.drawing(3.4, 1.9) as figure:
        panels = figure.subplots(1, 2)
        for index, (name, found) in enumerate(rows.items()):
            clients, seconds, megabytes = zip(*sorted(found), strict=True)
            label = name.partition(", a process")[0]
            panels[0].plot(clients, seconds, label=label, **style.line_look(index))
            panels[1].plot(clients, np.asarray(megabytes) / 1e3, **style.line_look(index))
        for axes, quantity in zip(panels, ("Seconds a round", "Peak memory (GB)"), strict=True):
            axes.set(xscale="log", xlabel="Clients", ylabel=quantity)
        panels[0].set_yscale("log")
        panels[1].set_ylim(bottom=0)
        style.legend_above(figure, *panels[0].get_legend_handles_labels())
    return figure


def _found(reports: Sequence[Mapping[str, Any]], suite: str, what: str, peer: str) -> Mapping[str, Any]:
    rows = [row for report in reports if report["suite"] == suite for row in report["rows"]]
    for row in rows:
        if row["what"] == what and row["peer"].startswith(peer):
            return row
    raise ValueError(f"the results of {suite} have no row {what!r} with {peer or 'any'} peer; run that suite again")


def write_between_marks(table: str, readme: pathlib.Path) -> None:
    """Puts a text between a file's marks.

    Raises:
      ValueError: a file without marks.
    """
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{readme} has no lines {BEGIN} and {END} to hold the tables")
    readme.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *others = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([head, f"| {' | '.join(['---'] * len(rows[0]))} |", *others])


if __name__ == "__main__":
    main()
