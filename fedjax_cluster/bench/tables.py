"""Results as tables: on the terminal, and between the marks of the READMEs, all in one and the best known in the other.

python -m fedjax_cluster.benchmarks.tables benchmarks/results benchmarks/README.md README.md
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
# The rows of the project's README: suite, what and peer as the results call them, and what a newcomer calls it.
HEADLINES = (
    ("whole", "CFL-GP on mnist, whole process", "", "CFL-GP on rotated MNIST, 32 clients, 200 rounds, whole process"),
    ("peers", "CFL-GP clustering round, MLP 784-200-10", "", "its clustering round, 128 clients, 4 clusters"),
    ("frameworks", "FedAvg round, MLP 784-200-10", "pfl", "FedAvg round, 32 clients × 1 000 examples, MLP"),
    ("frameworks", "FedAvg round, MLP 784-200-10", "Flower", "the same"),
    ("peers", "MLP 784-200-10, local training", "", "local training, MLP, 32 clients × 10 steps"),
    ("peers", "CNN 5×5 (32, 64), local training", "", "local training, CNN, 16 clients × 2 steps"),
    ("convolution", "CNN 5×5 (32, 64), local training", "", "the same, in JAX"),
    ("peers", "FedGWC round, MLP 784-200-10", "", "FedGWC round, 10 clients × 7 steps, MLP"),
    (
        "peers",
        "FedGWC round, a tenth of the clients, MLP 784-200-10",
        "",
        "the same, 10 of 100 clients",
    ),
    ("peers", "IFCA round, MLP 784-200-10", "", "IFCA round, 2 400 clients × 10 full-batch steps, MLP"),
    ("peers", "ResNet-18, local training", "", "local training, ResNet-18, 8 clients × 1 step"),
)
COLUMNS = ("what", "size", "seconds", "GFLOP/s", "of the product", "MB", "times", "in CPU", "peer", "aim")


def as_text(report: Mapping[str, Any]) -> str:
    """One suite's rows in aligned columns under the device."""
    cells = [list(COLUMNS), *(_cells(row) for row in report["rows"])]
    kept = [i for i in range(len(COLUMNS)) if any(row[i] for row in cells[1:])]
    widths = {i: max(len(row[i]) for row in cells) for i in kept}
    lines = ["  ".join(row[i].ljust(widths[i]) for i in kept).rstrip() for row in cells]
    return "\n".join([f"{report['suite']}: {heading(report)}", *lines])


def as_markdown(report: Mapping[str, Any]) -> str:
    """One suite's rows as a table under a heading."""
    rows = [_cells(row) for row in report["rows"]]
    kept = [i for i in range(len(COLUMNS)) if any(row[i] for row in rows)]
    names = [COLUMNS[i] for i in kept]
    lines = [f"### {report['suite']}", "", f"{heading(report)}.", "", _line(names), _line(["---"] * len(names))]
    return "\n".join([*lines, *(_line([row[i] for i in kept]) for row in rows)])


def heading(report: Mapping[str, Any]) -> str:
    """The machine on which a suite ran."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    rate = report["product_gflop_per_second"]
    product = f", one product {rate:.0f} GFLOP/s" if rate else ""
    return (
        f"{report['processor']}, {report['cores']} cores, {report['device']} ({report['backend']}), {versions}{product}"
    )


def read_results(results: pathlib.Path) -> list[dict[str, Any]]:
    """The reports of a folder.

    Raises:
      ValueError: there are none.
    """
    reports = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    if not reports:
        raise ValueError(f"{results} holds no results; run fedjax-cluster bench --output {results}")
    return reports


def all_tables(reports: Sequence[Mapping[str, Any]]) -> str:
    """Every suite's table."""
    return "\n\n".join(as_markdown(report) for report in reports)


def headline_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """How many times faster than its peer each of HEADLINES is."""
    lines = [_line(["what", "beside", "times faster"]), _line(["---"] * 3)]
    for suite, what, peer, name in HEADLINES:
        row = _found(reports, suite, what, peer)
        lines.append(_line([name, row["peer"], f"{float(format(row['ratio'], '.2g')):g}"]))
    return "\n".join(lines)


def _found(reports: Sequence[Mapping[str, Any]], suite: str, what: str, peer: str) -> Mapping[str, Any]:
    rows = [row for report in reports if report["suite"] == suite for row in report["rows"]]
    for row in rows:
        if row["what"] == what and row["peer"].startswith(peer):
            return row
    raise ValueError(f"the results of {suite} have no row {what!r} beside {peer or 'anything'}; run that suite anew")


def write_between_marks(table: str, readme: pathlib.Path) -> None:
    """Puts a text between a file's marks.

    Raises:
      ValueError: a file without marks.
    """
    text = readme.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{readme} has no lines {BEGIN} and {END} between which the tables would stand")
    readme.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


def _cells(row: Mapping[str, Any]) -> list[str]:
    seconds, flops = row["seconds"], row["flops"]
    aim = row["at_least"]
    reached = row["ratio"] if row["ratio"] is not None else row["fraction"]
    mark = "" if aim is None else f"{aim:.3g} {'met' if reached >= aim else 'missed'}"
    return [
        row["what"],
        row["size"],
        _number(seconds),
        f"{flops / seconds / 1e9:.0f}" if flops and seconds else "",
        "" if row["fraction"] is None else f"{row['fraction']:.2f}",
        "" if row["megabytes"] is None else f"{row['megabytes']:.0f}",
        _number(row["ratio"]),
        _number(row["processor_ratio"]),
        row["peer"],
        mark,
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    REPORTS = read_results(pathlib.Path(sys.argv[1]))
    write_between_marks(all_tables(REPORTS), pathlib.Path(sys.argv[2]))
    write_between_marks(headline_table(REPORTS), pathlib.Path(sys.argv[3]))
