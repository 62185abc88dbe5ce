"""Pictures of single results: bars, and ours next to a paper's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedjax_cluster.report import style
from fedjax_cluster.report.names import method_name, over_seeds, pictured
from fedjax_cluster.report.paper_rows import PaperRow, check_rows, is_known


def bars(
    names: Sequence[str],
    means: Sequence[float],
    deviations: Sequence[float] | None,
    label: str,
    *,
    error: str = "± standard deviation",
) -> Figure:
    """Draws horizontal bars from zero, each with its value and an error bar.

    Args:
      names: of the n bars, from top to bottom.
      means: [n], NaN where there is no result.
      deviations: [n] standard deviations, NaN where there is none; None for no error bars.
      label: what the bars show, with its unit.
      error: what the deviations are called in the legend.

    Raises:
      ValueError: no bars, or lists of different lengths.
    """
    spreads = np.full(np.shape(means), np.nan) if deviations is None else np.asarray(deviations, np.float64)
    heights, errors = np.array(means, np.float64), np.nan_to_num(spreads)
    heights[~np.isfinite(heights)] = np.nan
    if not len(names) or heights.shape != (len(names),) or errors.shape != heights.shape:
        raise ValueError(
            f"{len(names)} names, {heights.size} means and {errors.size} deviations; give as many of each, at least one"
        )
    rows = np.arange(len(names))
    written = [pictured(style.wrapped(method_name(name), 22)) for name in names]
    most_lines = max(2, *(name.count("\n") + 1 for name in written))
    with style.drawing(style.SINGLE, 0.5 + 0.135 * most_lines * len(names)) as figure:
        axes = figure.subplots()
        axes.barh(rows, heights, height=0.62, color=style.COLORS[0])
        known = errors > 0
        axes.errorbar(heights[known], rows[known], xerr=errors[known], fmt="none", ecolor="black", elinewidth=0.9)
        for row, height, deviation in zip(rows, heights, errors, strict=True):
            end = max(0.0, height + deviation) if is_known(height) else 0.0
            axes.annotate(_three_digits(height), (end, row), (3, 0), textcoords="offset points", va="center_baseline")
        axes.margins(x=0.14)
        axes.set_yticks(rows, written)
        axes.tick_params(axis="y", length=0)
        axes.set(ylim=(len(names) - 0.5, -0.5), xlabel=label)
        axes.grid(False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(7, steps=style.STEPS))
        if known.any():
            style.legend_above(figure, [Line2D([], [], color="black", linewidth=0.9, marker="|")], [error])
    return figure


def bars_against_paper(rows: Sequence[PaperRow]) -> Figure:
    """Draws ours next to the paper's values: filled and hollow markers with their standard deviations as error bars.

    Markers rather than bars from zero: what matters are tenths of a point at 87 %. Two columns wide for more metrics.

    Args:
      rows: a recipe's table; each metric becomes a panel, each column of the table a band, each row a colour.

    Raises:
      ValueError: no rows, or not a single value.
    """
    check_rows(rows)
    parts = ("metric", "column", "row")
    metrics, columns, methods = (list(dict.fromkeys(getattr(row, part) for row in rows)) for part in parts)
    # In a table of one column the methods are the bands; otherwise they lie within each column's band.
    by_method = len(columns) == 1
    bands, inside = (methods, 1) if by_method else (columns, len(methods))
    step = 0.8 / inside
    width, height = style.SINGLE if len(metrics) == 1 else style.DOUBLE, 0.55 + len(bands) * (0.12 + 0.2 * inside)
    with style.drawing(width, height) as figure:
        panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
        for axes, metric in zip(panels, metrics, strict=True):
            for row in (row for row in rows if row.metric == metric):
                index = methods.index(row.row)
                offset = 0.0 if by_method else (index - (inside - 1) / 2) * step
                _draw_row(axes, row, bands.index(row.row if by_method else row.column) + offset, step, index)
            for band in range(1, len(bands), 2):
                axes.axhspan(band - 0.5, band + 0.5, color="#F5F5F5", zorder=0, linewidth=0)
            axes.set_xlabel(metric)
            axes.grid(False, axis="y")
            axes.tick_params(axis="y", length=0)
            axes.xaxis.set_major_locator(MaxNLocator(7, steps=style.STEPS))
        panels[0].set_yticks(range(len(bands)), [pictured(style.wrapped(method_name(band), 18)) for band in bands])
        panels[0].set_ylim(len(bands) - 0.5, -0.5)
        _row_legend(figure, rows, [] if by_method else methods)
    return figure


def _draw_row(axes: Axes, row: PaperRow, y: float, step: float, index: int) -> None:
    look = style.line_look(index)
    common: dict[str, Any] = {"color": look["color"], "fmt": look["marker"], "elinewidth": 0.9, "linestyle": "none"}
    both = (row.ours, row.ours_std, -0.2, look["color"]), (row.paper, row.paper_std, 0.2, "white")
    for value, deviation, shift, face in both:
        if is_known(value):
            error = deviation if is_known(deviation) and deviation > 0 else None
            axes.errorbar(value, y + shift * step, xerr=error, markerfacecolor=face, zorder=4, **common)


def _row_legend(figure: Figure, rows: Sequence[PaperRow], methods: Sequence[str]) -> None:
    """Methods by colour and marker where there are several; filled is ours, hollow the paper's."""
    named = methods if len(methods) > 1 else ()
    handles = [Line2D([], [], **{**style.line_look(index), "linestyle": "none"}) for index in range(len(named))]
    labels = [pictured(method_name(method)) for method in named]
    over = over_seeds(row.seeds for row in rows if is_known(row.ours_std))
    ours = f"ours ± sample std {over}" if over else "ours"
    for part, text, face in (("ours", ours, style.NEUTRAL), ("paper", "paper", "white")):
        if any(is_known(getattr(row, part)) for row in rows):
            handles.append(style.plain_marker(face))
            labels.append(text)
    style.legend_above(figure, handles, labels, lines=False)


def _three_digits(value: float) -> str:
    if not is_known(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"
