"""A suite's results as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = ("what", "size", "seconds", "GFLOP/s", "of the product", "MB", "ratio", "CPU ratio", "peer", "target")


def as_text(report: Mapping[str, Any]) -> str:
    """One suite's rows in aligned columns under the machine."""
    table = filled_columns(report)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([f"{report['suite']}: {heading(report)}", *lines])


def heading(report: Mapping[str, Any]) -> str:
    """The machine on which a suite ran."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    rate = report["product_gflop_per_second"]
    product = f", one product {rate:.0f} GFLOP/s" if rate else ""
    device = f"{report['device']} ({report['backend']})"
    return f"{report['processor']}, {report['cores']} cores, {device}, {versions}{product}"


def filled_columns(report: Mapping[str, Any]) -> list[list[str]]:
    """The heads and the rows' cells, without the columns that no row fills."""
    rows = [_cells(row) for row in report["rows"]]
    kept = [i for i in range(len(COLUMNS)) if any(row[i] for row in rows)]
    return [[row[i] for i in kept] for row in (COLUMNS, *rows)]


def _cells(row: Mapping[str, Any]) -> list[str]:
    seconds, flops, target = row["seconds"], row["flops"], row["at_least"]
    reached = row["ratio"] if row["ratio"] is not None else row["fraction"]
    return [
        row["what"],
        row["size"],
        _formatted(seconds, ".3g"),
        _formatted(flops / seconds / 1e9, ".0f") if flops and seconds else "",
        _formatted(row["fraction"], ".2f"),
        _formatted(row["megabytes"], ".0f"),
        _formatted(row["ratio"], ".3g"),
        _formatted(row["processor_ratio"], ".3g"),
        row["peer"],
        "" if target is None else f"{target:.3g} {'met' if reached >= target else 'missed'}",
    ]


def _formatted(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
