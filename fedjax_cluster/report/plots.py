"""Pictures of numbers: curves over rounds, sweeps over a parameter, singular values, ours beside a paper's.

Every function returns a `matplotlib.figure.Figure` and neither shows nor saves it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from fedjax_cluster.files import atomic_file
from fedjax_cluster.report.histories import (
    AGREEMENT,
    History,
    by_seed,
    chosen_metric,
    column_label,
    evaluated,
    has_values,
)
from fedjax_cluster.report.rows import PaperRow, check_rows, is_known, method_name
from fedjax_cluster.report.style import (
    COLORS,
    DOUBLE,
    FILE_DPI,
    NEUTRAL,
    SINGLE,
    legend_above,
    line_look,
    new_figure,
    style,
    wrapped,
)

FORMATS = (".png", ".pdf", ".svg")
MARKED_POINTS = 8
STEPS = (1, 2, 2.5, 5, 10)


def save(figure: Figure, path: str | pathlib.Path) -> pathlib.Path:
    """Writes a figure as PNG (300 dpi), PDF or SVG; the file is whole or not there.

    Args:
      figure: from any function of `report`, or any other figure.
      path: ends in .png, .pdf or .svg; missing folders are made.

    Returns:
      The path.

    Raises:
      ValueError: another ending.
    """
    path = pathlib.Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot write a figure to '{path.name}'; its name must end in {', '.join(FORMATS)}")
    with style(), atomic_file(path) as beside:
        figure.savefig(beside, dpi=FILE_DPI)
    return path


def learning_curves(histories: Mapping[str, History | Sequence[History]], metric: str | None = None) -> Figure:
    """Draws a metric, and beneath it the adjusted Rand index, against communication rounds.

    Several seeds of a method become their mean and a band of ± one standard deviation, over the rounds that all of
    them evaluated. Rounds without a value (NaN) are passed over. The lower panel is left out where no method has an
    ARI.

    Args:
      histories: method -> history of a run, or the histories of its seeds; columns as `SimulationResult.history`.
      metric: a column; None takes `accuracy`, or `test_loss` where there is no accuracy, or else the training loss.

    Returns:
      The figure, one paper column wide.

    Raises:
      ValueError: no histories, no such column, or a column without any value.
    """
    seeds = by_seed(histories)
    metric = chosen_metric(seeds, metric)
    panels = [metric, AGREEMENT] if metric != AGREEMENT and has_values(seeds, AGREEMENT) else [metric]
    with style():
        figure = new_figure(SINGLE, 2.0 if len(panels) == 1 else 3.4)
        column = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(column, panels, strict=True):
            label, factor = column_label(name)
            highest = 1.0 if name == AGREEMENT else np.inf
            for index, (method, runs) in enumerate(seeds.items()):
                rounds, values = evaluated(runs, name, method)
                mean, deviation = factor * values.mean(axis=0), factor * values.std(axis=0)
                _draw_line(axes, rounds, mean, deviation, index, len(seeds), label=method_name(method), highest=highest)
            axes.set_ylabel(label)
            axes.yaxis.set_major_locator(MaxNLocator(7, steps=STEPS, integer=name.startswith("num_")))
            if name == AGREEMENT:
                lowest = min(float(np.min(line.get_ydata())) for line in axes.get_lines())
                axes.set_ylim(min(0.0, lowest) - 0.06, 1.06)
        last = max(float(np.max(history["round"])) for runs in seeds.values() for history in runs)
        column[-1].set_xlim(-0.02 * last - 0.5, 1.02 * last + 0.5)
        column[-1].xaxis.set_major_locator(MaxNLocator(7, steps=STEPS, integer=True, min_n_ticks=1))
        column[-1].set_xlabel("Communication round")
        # A method may have values in one of the panels only.
        entries = {str(line.get_label()): line for axes in column for line in axes.get_lines()}
        legend_above(figure, list(entries.values()), list(entries))
    return figure


def sweep(
    x: Sequence[float],
    series: Mapping[str, tuple[Sequence[float], Sequence[float] | None]],
    x_label: str,
    y_label: str,
    log_x: bool = False,
    paper: Mapping[str, Sequence[float]] | None = None,
) -> Figure:
    """Draws results against a parameter: accuracy over the number of clients, ARI over the compression ratio.

    Args:
      x: the n values of the parameter.
      series: name -> (means [n], standard deviations [n] or None), NaN where there is none; in the unit of `y_label`.
      x_label: axis label with its unit.
      y_label: axis label with its unit.
      log_x: logarithmic axis.
      paper: name of a series -> the paper's values [n]: hollow markers of the same colour and shape.

    Returns:
      The figure, one paper column wide.

    Raises:
      ValueError: no series, lengths that differ from x's, x not above 0 on a logarithmic axis, or a paper's name
        that is no series.
    """
    positions = np.asarray(x, np.float64)
    lines = {
        name: (_column(mean), np.zeros(len(mean)) if std is None else np.nan_to_num(_column(std)))
        for name, (mean, std) in series.items()
    }
    published = {name: _column(values) for name, values in (paper or {}).items()}
    _check_sweep(positions, lines, published, log_x)
    with style():
        figure = new_figure(SINGLE, 2.2)
        axes = figure.subplots()
        for index, (name, (mean, deviation)) in enumerate(lines.items()):
            _draw_line(axes, positions, mean, deviation, index, len(lines), label=method_name(name))
            if name in published:
                known = np.isfinite(published[name])
                look = {**line_look(index), "linestyle": "none", "markerfacecolor": "white", "markersize": 5}
                axes.plot(positions[known], published[name][known], label="_paper", zorder=2.5, **look)
        if log_x:
            axes.set_xscale("log")
        _mark_positions(axes, positions, log_x)
        axes.yaxis.set_major_locator(MaxNLocator(7, steps=STEPS))
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        handles, labels = axes.get_legend_handles_labels()
        if published:
            handles.append(_plain_marker("white"))
            labels.append("paper")
        legend_above(figure, handles, labels)
    return figure


def bars(names: Sequence[str], means: Sequence[float], deviations: Sequence[float], label: str) -> Figure:
    """Draws horizontal bars from zero, each with its value and an error bar.

    Args:
      names: of the n bars, from top to bottom.
      means: [n], NaN where there is no result.
      deviations: [n] standard deviations, NaN where there is none.
      label: what the bars show, with its unit.

    Returns:
      The figure, one paper column wide.

    Raises:
      ValueError: no bars, or lists of different lengths.
    """
    heights, errors = _column(means), np.nan_to_num(_column(deviations))
    if not len(names) or heights.shape != (len(names),) or errors.shape != heights.shape:
        raise ValueError(
            f"{len(names)} names, {len(heights)} means and {len(errors)} deviations; give as many of each, at least one"
        )
    rows = np.arange(len(names))
    with style():
        figure = new_figure(SINGLE, 0.5 + 0.27 * len(names))
        axes = figure.subplots()
        axes.barh(rows, heights, height=0.62, color=COLORS[0])
        known = errors > 0
        axes.errorbar(heights[known], rows[known], xerr=errors[known], fmt="none", ecolor="black", elinewidth=0.9)
        for row, height, error in zip(rows, heights, errors, strict=True):
            end = max(0.0, height + error) if is_known(height) else 0.0
            axes.annotate(_three_digits(height), (end, row), (3, 0), textcoords="offset points", va="center_baseline")
        axes.margins(x=0.14)
        axes.set_yticks(rows, [wrapped(method_name(name), 22) for name in names])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(7, steps=STEPS))
        axes.set_xlabel(label)
    return figure


def bars_against_paper(rows: Sequence[PaperRow]) -> Figure:
    """Draws ours beside the paper's values: filled and hollow markers with error bars of one standard deviation.

    Markers rather than bars from zero: what matters are tenths of a point at 87 %.

    Args:
      rows: a recipe's table; each metric becomes a panel, each column of the table a band, each row a colour.

    Returns:
      The figure: one paper column wide for one metric, two columns for more.

    Raises:
      ValueError: no rows, or not a single value.
    """
    check_rows(rows)
    metrics, columns, methods = (
        list(dict.fromkeys(values)) for values in zip(*((row.metric, row.column, row.row) for row in rows), strict=True)
    )
    # In a table of one column the methods are the bands; otherwise they lie within each column's band.
    by_method = len(columns) == 1
    bands = methods if by_method else columns
    inside = 1 if by_method else len(methods)
    step = 0.8 / inside
    with style():
        figure = new_figure(SINGLE if len(metrics) == 1 else DOUBLE, 0.55 + len(bands) * (0.12 + 0.2 * inside))
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
            axes.xaxis.set_major_locator(MaxNLocator(7, steps=STEPS))
        panels[0].set_yticks(range(len(bands)), [wrapped(method_name(band), 18) for band in bands])
        panels[0].set_ylim(len(bands) - 0.5, -0.5)
        _row_legend(figure, rows, [] if by_method else methods)
    return figure


def singular_values(values: Any, chosen: int | None = None, rounds: Sequence[int] = ()) -> Figure:
    """Draws singular values in descending order and marks the largest gap between neighbours.

    The gap is between absolute values, as in CFL-GP's App. G and `clustering.largest_gaps`.

    Args:
      values: f32[r]; or f32[T, r], one row a time, drawn from light to dark, the gap marked on the last.
      chosen: the number of clusters in use, marked as well.
      rounds: the T rounds, for the legend.

    Returns:
      The figure, one paper column wide.

    Raises:
      ValueError: values not finite, negative or not descending; `chosen` or `rounds` that do not fit them.
    """
    lines = np.atleast_2d(np.asarray(values, np.float64))
    _check_singular_values(lines, chosen, rounds)
    ranks, last = np.arange(1, lines.shape[1] + 1), lines[-1]
    shades = colormaps["Blues"](np.linspace(0.35, 1.0, len(lines))) if len(lines) > 1 else [COLORS[0]]
    with style():
        figure = new_figure(SINGLE, 2.0)
        axes = figure.subplots()
        for index, (line, shade) in enumerate(zip(lines, shades, strict=True)):
            axes.plot(ranks, line, color=shade, marker="o", label=f"round {rounds[index]}" if len(rounds) else "_")
        if len(last) > 1:
            gap = int(np.argmax(last[:-1] - last[1:])) + 1
            axes.axvspan(gap, gap + 1, color="#F3E3B5", linewidth=0, zorder=0, label=f"largest gap, after {gap}")
        if chosen is not None:
            axes.axvline(chosen, color=NEUTRAL, linestyle=(0, (4, 2)), linewidth=0.8, zorder=1, label=f"K = {chosen}")
        axes.set_xlim(0.5, len(last) + 0.5)
        axes.set_ylim(0, 1.08 * lines.max() if lines.max() > 0 else 1)
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
        axes.set_xlabel("Number of the singular value")
        axes.set_ylabel("Singular value")
        legend_above(figure, *axes.get_legend_handles_labels())
    return figure


# ------------------------------------------------------------------------------------------------ parts


def _draw_line(
    axes: Axes,
    x: np.ndarray,
    mean: np.ndarray,
    deviation: np.ndarray,
    index: int,
    count: int,
    *,
    label: str,
    highest: float = np.inf,
) -> None:
    """Line `index` of `count` with sparse, staggered markers, and a band that stays below what is possible."""
    known = np.isfinite(mean)
    if not known.any():
        return
    x, mean, deviation = x[known], mean[known], deviation[known]
    every = max(1, len(x) // MARKED_POINTS)
    look = line_look(index)
    # Earlier lines lie above later ones: the first is the one that the picture is about.
    order = 3 + (count - index) / (count + 1)
    axes.plot(x, mean, label=label, markevery=(index * every // count, every), zorder=order, **look)
    if deviation.any():
        upper = np.minimum(mean + deviation, highest)
        axes.fill_between(x, mean - deviation, upper, color=look["color"], alpha=0.18, linewidth=0)


def _mark_positions(axes: Axes, positions: np.ndarray, log_x: bool) -> None:
    """Ticks where the results are, if their labels do not meet; large powers of ten keep their own."""
    ticks = np.unique(positions)
    scaled = np.log10(ticks) if log_x else ticks
    powers = log_x and np.allclose(scaled, np.round(scaled)) and ticks[-1] >= 1e4
    crowded = len(ticks) > 1 and np.diff(scaled).min() / (scaled[-1] - scaled[0]) < 0.08
    if powers or crowded:
        return
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def _draw_row(axes: Axes, row: PaperRow, y: float, step: float, index: int) -> None:
    look = line_look(index)
    common: dict[str, Any] = {"color": look["color"], "fmt": look["marker"], "elinewidth": 0.9, "linestyle": "none"}
    for value, deviation, shift, face in (
        (row.ours, row.ours_std, -0.2, look["color"]),
        (row.paper, row.paper_std, 0.2, "white"),
    ):
        if is_known(value):
            error = deviation if is_known(deviation) and deviation > 0 else None
            axes.errorbar(value, y + shift * step, xerr=error, markerfacecolor=face, zorder=4, **common)


def _row_legend(figure: Figure, rows: Sequence[PaperRow], methods: Sequence[str]) -> None:
    """Methods by colour and marker where there are several; filled is ours, hollow the paper's."""
    named = methods if len(methods) > 1 else ()
    handles = [Line2D([], [], **{**line_look(index), "linestyle": "none"}) for index in range(len(named))]
    labels = [method_name(method) for method in named]
    for label, face, values in (
        ("ours", NEUTRAL, [row.ours for row in rows]),
        ("paper", "white", [row.paper for row in rows]),
    ):
        if any(is_known(value) for value in values):
            handles.append(_plain_marker(face))
            labels.append(label)
    legend_above(figure, handles, labels, lines=False)


def _plain_marker(face: str) -> Line2D:
    return Line2D([], [], linestyle="none", marker="o", color=NEUTRAL, markerfacecolor=face)


def _three_digits(value: float) -> str:
    if not is_known(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def _column(values: Sequence[float]) -> np.ndarray:
    return np.asarray(values, np.float64)


# ----------------------------------------------------------------------------------------------- checks


def _check_sweep(
    x: np.ndarray,
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]],
    paper: Mapping[str, np.ndarray],
    log_x: bool,
) -> None:
    if x.ndim != 1 or not len(x) or not np.isfinite(x).all():
        raise ValueError(f"x has shape {x.shape} and must be a list of finite numbers, at least one")
    if log_x and (x <= 0).any():
        raise ValueError(f"x holds {x.min():g}, which a logarithmic axis cannot show; use log_x=False or drop it")
    if not lines:
        raise ValueError("series is empty; give at least one")
    if unknown := sorted(set(paper) - set(lines)):
        raise ValueError(f"paper names '{unknown[0]}', which is none of the series {', '.join(lines)}")
    parts = [(name, part) for name, pair in lines.items() for part in pair]
    for name, values in (*parts, *((f"{name} of the paper", values) for name, values in paper.items())):
        if values.shape != x.shape:
            raise ValueError(f"{name} has values of shape {values.shape}, but x has {len(x)}; give one for each x")
    if not any(np.isfinite(mean).any() for mean, _ in lines.values()):
        raise ValueError("no series has a finite value; there is nothing to draw")


def _check_singular_values(lines: np.ndarray, chosen: int | None, rounds: Sequence[int]) -> None:
    if lines.ndim != 2 or 0 in lines.shape:
        raise ValueError(f"singular values have shape {lines.shape}; give [r], or [T, r] for several rounds")
    if not np.isfinite(lines).all() or (lines < 0).any():
        raise ValueError("singular values must be finite and not negative; leave out the rounds without profiles")
    if (np.diff(lines) > 1e-6 * lines.max()).any():
        raise ValueError("singular values are not in descending order; sort them")
    if chosen is not None and not 1 <= chosen <= lines.shape[1]:
        raise ValueError(f"chosen is {chosen}, but there are {lines.shape[1]} singular values; give 1 to that")
    if len(rounds) and len(rounds) != len(lines):
        raise ValueError(f"rounds names {len(rounds)} rounds for {len(lines)} rows of singular values; name each")
