"""A paper's table as cells: runs and printed values, from the changes that its rows and columns make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedjax_cluster.experiments.config import RunConfig

Changes = Mapping[str, Any]
Printed = Mapping[str, tuple[float, float]]
Shortening = Callable[[Sequence["Cell"]], tuple["Cell", ...]]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entry of a paper's table.

    Attributes:
      row: usually the method.
      column: usually what varies.
      config: the run; its seed is replaced.
      paper: metric -> (mean, standard deviation or NaN) as printed; empty where the paper has none.
    """

    row: str
    column: str
    config: RunConfig
    paper: Printed = dataclasses.field(default_factory=dict)


def changed(config: RunConfig, **changes: Any) -> RunConfig:
    """A configuration with changes; mappings of options are merged, those of another method or model dropped."""
    merged = {
        name: {**getattr(config, name), **value} if name.endswith("_options") else value
        for name, value in changes.items()
    }
    for part in ("method", "model", "scenario"):
        if merged.get(part, getattr(config, part)) != getattr(config, part):
            merged[f"{part}_options"] = dict(changes.get(f"{part}_options", {}))
    if {"local_steps", "local_epochs"} & merged.keys():
        merged = {"averaging": "models", "local_steps": None, "local_epochs": None, **merged}
    return dataclasses.replace(config, **merged)


def varied(symbol: str, name: str, values: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """The columns of a table over one setting, or one option of a part.

    >>> varied("C", "clients", (8, 16))
    {'C=8': {'clients': 8}, 'C=16': {'clients': 16}}
    >>> varied("δ", "method_options.delta", (0.5,))
    {'δ=0.5': {'method_options': {'delta': 0.5}}}
    """
    part, _, option = name.partition(".")
    return {f"{symbol}={value:g}": {part: {option: value} if option else value} for value in values}


def printed(**metrics: str) -> list[dict[str, tuple[float, float]]]:
    """A row of a paper's table: for each metric its columns, `mean±std` or `mean`, `-` where there is none.

    >>> printed(accuracy="86.8±0.35 87.2", adjusted_rand_index="1 -")
    [{'accuracy': (86.8, 0.35), 'adjusted_rand_index': (1.0, nan)}, {'accuracy': (87.2, nan)}]
    """
    columns: list[dict[str, tuple[float, float]]] = []
    for values in zip(*(text.split() for text in metrics.values()), strict=True):
        parts = {name: value.partition("±") for name, value in zip(metrics, values, strict=True) if value != "-"}
        columns.append({name: (float(mean), float(std or "nan")) for name, (mean, _, std) in parts.items()})
    return columns


def headings(**metrics: str) -> dict[str, tuple[str, float]]:
    """What a table shows: name in the summary -> (heading, factor); headings in per cent have the factor 100.

    >>> headings(accuracy="accuracy (%)", test_loss="test loss")
    {'accuracy': ('accuracy (%)', 100.0), 'test_loss': ('test loss', 1.0)}
    """
    return {name: (heading, 100.0 if heading.endswith("(%)") else 1.0) for name, heading in metrics.items()}


def grid(
    base: RunConfig,
    rows: Mapping[str, Changes],
    columns: Mapping[str, Changes],
    paper: Mapping[str, Sequence[Printed]] | None = None,
) -> tuple[Cell, ...]:
    """Cells of a table: `base` with a row's and a column's changes; options are merged, not replaced."""
    paper = paper or {}
    return tuple(
        Cell(row, column, changed(changed(base, **of_row), **of_column), paper[row][place] if row in paper else {})
        for row, of_row in rows.items()
        for place, (column, of_column) in enumerate(columns.items())
    )


def shortened(
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    paper: bool = False,
    options: Mapping[str, Changes] | None = None,
    **changes: Any,
) -> Shortening:
    """How the smaller version of a table comes about.

    Args:
      rows, columns: those that stay; None keeps all.
      paper: whether the paper's values stay, although the runs are shorter.
      options: method -> further options of that method alone.
      **changes: settings of every run.
    """

    def smaller(config: RunConfig) -> RunConfig:
        further = (options or {}).get(config.method)
        return changed(config, **changes, **({"method_options": further} if further else {}))

    return lambda cells: tuple(
        Cell(cell.row, cell.column, smaller(cell.config), cell.paper if paper else {})
        for cell in cells
        if (rows is None or cell.row in rows) and (columns is None or cell.column in columns)
    )
