"""The figures that recipes of several papers share; each function returns a recipe's `figure`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster import report
from fedjax_cluster.experiments.cells import Cell
from fedjax_cluster.experiments.outcomes import Outcome
from fedjax_cluster.experiments.recipe import Drawing, Outcomes, measured
from fedjax_cluster.report.names import over_seeds
from fedjax_cluster.report.paper_rows import NAN


def sweep(
    metric: str | Mapping[str, str],
    x_label: str,
    y_label: str,
    factor: float = 1.0,
    *,
    log_x: bool = False,
    zero_line: bool = False,
) -> Drawing:
    """A metric against the columns' values, a line per row, the paper's values as hollow markers.

    Args:
      metric: name in the summary; or legend -> name: a line per metric, without the paper's values, for a single row.
      x_label, y_label: axis labels, with units.
      factor: from the summary's unit to the axis'.
      log_x, zero_line: logarithmic axis; a line at 0.
    """

    def figure(cells: Sequence[Cell], outcomes: Outcomes) -> Figure:
        rows, columns = (list(dict.fromkeys(names)) for names in zip(*outcomes, strict=True))
        if isinstance(metric, str):
            lines = {row: (row, metric) for row in rows}
            paper = {row: [cell.paper.get(metric, (NAN,))[0] for cell in cells if cell.row == row] for row in rows}
        else:
            lines, paper = {label: (rows[0], name) for label, name in metric.items()}, {}

        def line(row: str, name: str) -> tuple[list[float], list[float]]:
            along = [outcomes[row, column] for column in columns]
            return [factor * each.mean(name) for each in along], [factor * each.std(name) for each in along]

        drawn = report.curves.sweep(
            [float(column.rpartition("=")[2]) for column in columns],
            {label: line(*where) for label, where in lines.items()},
            x_label=x_label,
            y_label=y_label,
            log_x=log_x,
            paper={row: values for row, values in paper.items() if np.isfinite(values).any()},
            band=_deviation(outcomes),
            highest=factor if all(name in report.curves.BOUNDED for _, name in lines.values()) else np.inf,
        )
        if zero_line:
            drawn.axes[0].axhline(0, color="black", linewidth=0.6)
        return drawn

    return figure


def bars(metric: str, label: str) -> Drawing:
    """A bar per cell with the metric's mean and standard deviation."""

    def figure(cells: Sequence[Cell], outcomes: Outcomes) -> Figure:
        names = [f"{row}, {column}" if column else row for row, column in outcomes]
        means, deviations = zip(*((each.mean(metric), each.std(metric)) for each in outcomes.values()), strict=True)
        return report.bars.bars(names, means, deviations, label, error=_deviation(outcomes))

    return figure


def bars_of_columns(metric: str, label: str) -> Drawing:
    """`bars`, a picture for each column."""

    def figure(cells: Sequence[Cell], outcomes: Outcomes) -> Mapping[str, Figure]:
        columns = dict.fromkeys(column for _, column in outcomes)
        drawn = {}
        for number, column in enumerate(columns):
            own = {(row, ""): each for (row, of), each in outcomes.items() if of == column}
            drawn[str(number + 1) if number else ""] = bars(metric, f"{label}, {column}")(cells, own)
        return drawn

    return figure


def _deviation(outcomes: Outcomes) -> str:
    return f"± sample std {over_seeds(len(each.summaries) for each in outcomes.values())}"


def against_paper(metrics: Mapping[str, tuple[str, float]]) -> Drawing:
    """Our values and the paper's: a panel per metric, a band per column, a colour per row."""
    return lambda cells, outcomes: report.bars.bars_against_paper(measured(cells, outcomes, metrics))


def by_column(metric: str, **options: Any) -> Drawing:
    """A metric against the rounds: a panel for each column, a line for each row; options are `curve_panels`'."""

    def figure(cells: Sequence[Cell], outcomes: Outcomes) -> Figure:
        panels: dict[str, dict[str, Any]] = {}
        for (row, column), outcome in outcomes.items():
            panels.setdefault(column, {})[row] = outcome.histories
        return report.panels.curve_panels(panels, metric, **options)

    return figure


def with_costs_to_accuracy(drawn: Drawing, target: float, x_label: str) -> Drawing:
    """Beside a picture, models sent, and mini-batches computed, a client until a test accuracy, against the columns.

    Both are counted to the first evaluated round of the target. A mini-batch's loss, without its gradient, is a third
    of a gradient: one of the three products of each layer. Where a seed does not reach the target there is no point; a
    row that never does has no line.
    """
    axes = {"models": "Models sent per client", "gradients": "Gradients per client"}

    def figure(cells: Sequence[Cell], outcomes: Outcomes) -> Mapping[str, Any]:
        costs = {
            place: dataclasses.replace(outcome, summaries=_costs_to(outcome, target))
            for place, outcome in outcomes.items()
        }
        reached = {row for (row, _), each in costs.items() if each.valued("models")}
        costs = {place: each for place, each in costs.items() if place[0] in reached}
        further = {
            name: sweep(name, x_label, f"{label} to {100 * target:g} %", log_x=True)(cells, costs)
            for name, label in axes.items()
            if costs
        }
        return {"": drawn(cells, outcomes), **further}

    return figure


def _costs_to(outcome: Outcome, target: float) -> tuple[dict[str, float], ...]:
    costs = []
    for summary, history in zip(outcome.summaries, outcome.histories, strict=True):
        reached = np.flatnonzero(np.asarray(history["accuracy"], float) >= target)
        if not reached.size:
            return tuple({} for _ in outcome.summaries)
        spent = {
            name: np.asarray(history[name], float)[: reached[0] + 1].sum() / summary["clients"]
            for name in ("models_down", "models_up", "gradient_evaluations", "loss_evaluations")
        }
        gradients = spent["gradient_evaluations"] + spent["loss_evaluations"] / 3
        costs.append({"models": spent["models_down"] + spent["models_up"], "gradients": gradients})
    return tuple(costs)


def histories(outcomes: Outcomes) -> dict[str, tuple[dict[str, np.ndarray], ...]]:
    """Row -> the histories of its seeds, for pictures over rounds of a table with one column."""
    return {row: outcome.histories for (row, _), outcome in outcomes.items()}
