"""Results as tables: on the terminal, and in the README between its marks.

python -m fedjax_cluster.benchmarks.tables benchmarks/results benchmarks/README.md
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
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


def write_readme(results: pathlib.Path, readme: pathlib.Path) -> None:
    """Puts the tables of all results between the README's marks.

    Raises:
      ValueError: no results, or a README without marks.
    """
    reports = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    if not reports:
        raise ValueError(f"{results} holds no results; run fedjax-cluster bench --output {results}")
    text = readme.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{readme} has no lines {BEGIN} and {END} between which the tables would stand")
    tables = "\n\n".join(as_markdown(report) for report in reports)
    readme.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}")


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
    write_readme(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
