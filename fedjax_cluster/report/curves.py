"""Pictures of lines: metrics against communication rounds, and results against a parameter."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedjax_cluster.report import style
from fedjax_cluster.report.histories import (
    ARI,
    History,
    by_seed,
    chosen_metric,
    column_label,
    end_not_finite,
    evaluated,
    finite_part,
    has_values,
    is_wide,
    with_gaps,
)
from fedjax_cluster.report.judged_by import HONEST, of_honest
from fedjax_cluster.report.names import method_name, over_seeds, pictured

BOUNDED = (
    "purity",
    *(f"{name}{of}" for name in (ARI, "accuracy") for of in ("", HONEST)),
    "balanced_accuracy",
    "accuracy_worst_decile",
)  # at most 1
MARKED_POINTS = 8
BAND = 0.15  # opacity
NO_VALUE, NO_LINE = " (no finite value)", Line2D([], [], linestyle="none")
ENDED: dict[str, Any] = {
    **{"color": style.NEUTRAL, "linestyle": "none", "zorder": 5},
    **{"marker": "x", "markersize": 6, "markeredgewidth": 1.2},
}


def learning_curves(histories: Mapping[str, History | Sequence[History]], metric: str | None = None) -> Figure:
    """Draws a metric, and beneath it the adjusted Rand index where a method has one, against communication rounds.

    Args:
      histories: as of `curves`.
      metric: a column; None takes `accuracy`, or `test_loss` where there is no accuracy, or else the training loss.
        Of runs with a fault accuracy and index are those of the honest clients; `metric="accuracy"` is of all.

    Raises:
      ValueError: no histories, no such column, or a column without any value.
    """
    seeds = by_seed(histories)
    metric = chosen_metric(seeds, metric)
    agreement = of_honest(ARI, [history for runs in seeds.values() for history in runs])
    return curves(seeds, [metric, agreement] if metric != agreement and has_values(seeds, agreement) else [metric])


def curves(
    histories: Mapping[str, History | Sequence[History]],
    metrics: Sequence[str],
    *,
    log_rounds: bool = False,
    levels: Mapping[str, float] | None = None,
    bands: bool = True,
) -> Figure:
    """Draws columns of histories against communication rounds, a panel each, one beneath the other.

    Several seeds of a method become their mean and a band of ± one sample standard deviation, over the rounds that all
    of them evaluated. Rounds count from 1; those without a value (NaN) are skipped. Where a run was not finite its
    curve is broken; where it did not become finite again it ends, with a cross: later figures are of a model left
    behind.

    Args:
      histories: method -> history of a run, or the histories of its seeds; columns as `SimulationResult.history`.
      metrics: the columns, from top to bottom.
      log_rounds: a logarithmic axis of rounds, for what happens within the first few of many.
      levels: column -> a value to mark by a dashed line, in the column's unit.
      bands: False leaves the bands out, for many methods.

    Raises:
      ValueError: no histories, no columns, or a column that no history has.
    """
    seeds, levels = by_seed(histories), levels or {}
    if not metrics:
        raise ValueError("metrics is empty; name at least one column")
    last = 1 + max(float(np.max(history["round"])) for runs in seeds.values() for history in runs)
    whole = seeds
    seeds = {method: [finite_part(run) for run in runs] for method, runs in seeds.items()}
    values = {name: {method: evaluated(runs, name, method) for method, runs in seeds.items()} for name in metrics}
    names = {method: _legend_name(method, runs, metrics) for method, runs in seeds.items()}
    legend: dict[str, Any] = {}
    with style.drawing(style.SINGLE, 0.6 + 1.4 * len(metrics)) as figure:
        panels = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(panels, metrics, strict=True):
            label, factor = column_label(chosen_metric(seeds, name))
            for index, (method, runs) in enumerate(seeds.items()):
                rounds, found = values[name][method]
                mean = factor * found.mean(axis=0)
                deviation = factor * found.std(axis=0, ddof=1) if bands and len(found) > 1 else np.zeros(len(rounds))
                place: dict[str, Any] = {"index": index, "count": len(seeds)}
                place["highest"] = factor if name in BOUNDED else np.inf
                place["steps"] = name.startswith("num_")
                draw_line(axes, *with_gaps(runs, rounds + 1, mean, deviation), label=names[method], **place)
                if len(rounds) and end_not_finite(whole[method], name):
                    legend["not finite afterwards"] = axes.plot(rounds[-1] + 1, mean[-1], **ENDED)[0]
            axes.set_ylabel(label)
            means = [found.mean(axis=0) for _, found in values[name].values()]
            value_axis(axes, means, 7, integer=name.startswith("num_"))
            if not any(len(rounds) for rounds, _ in values[name].values()):
                axes.set_yticks([])
                axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", va="center")
            elif name.removesuffix(HONEST) == ARI:
                axes.set_ylim(min(0.0, axes.dataLim.y0) - 0.06, 1.06)  # bands too are within
            elif name.startswith("num_"):
                low, high = axes.get_ylim()
                if high - low < 1:  # a count that stays the same has no ticks between whole numbers
                    axes.set_ylim((low + high) / 2 - 1.2, (low + high) / 2 + 1.2)
            if name in levels:
                axes.axhline(factor * levels[name], **style.GUIDE)
        round_axis(panels[-1])
        panels[-1].set_xlim(0.5 - 0.02 * last, 0.5 + 1.02 * last)
        if log_rounds:
            panels[-1].set(xscale="log", xlim=(0.94, 1.06 * last))
            style.ticks_at(panels[-1].xaxis, [tick for tick in style.LOG_TICKS if tick <= last])
        over = over_seeds(len(found) for of_method in values.values() for _, found in of_method.values() if found.size)
        if bands and over:
            legend[f"± sample std {over}"] = Patch(color=style.NEUTRAL, alpha=2 * BAND, linewidth=0)
        missing = [name for name in names.values() if name.endswith(NO_VALUE)]
        shared_legend(figure, panels, {**dict.fromkeys(missing, NO_LINE), **legend})
    return figure


def value_axis(axes: Axes, lines: Iterable[np.ndarray], ticks: int, *, integer: bool = False) -> None:
    """A vertical axis of a few round numbers; logarithmic where these lines could not be told apart otherwise."""
    if is_wide(lines):
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_locator(MaxNLocator(ticks, steps=style.STEPS, integer=integer))


def _legend_name(method: str, runs: Sequence[History], metrics: Sequence[str]) -> str:
    """The method's name, and how many of its seeds are drawn where some have no value of a column."""
    counts = [sum(has_values({method: [run]}, name) for run in runs) for name in metrics]
    known = [count for count in counts if count]
    name = pictured(method_name(method))
    if not known:
        return name + NO_VALUE
    return name if min(known) == len(runs) else f"{name} ({min(known)} of {len(runs)} seeds)"


def round_curves(series: Mapping[str, tuple[Any, Any]], y_label: str, *, log_y: bool = False) -> Figure:
    """Draws quantities against communication rounds, each over separate rounds.

    Args:
      series: name -> (rounds [n], values [n]).
      y_label: axis label with its unit.
      log_y: logarithmic axis; a linear one has a line at 0 where values lie on both sides of it.

    Raises:
      ValueError: no series.
    """
    if not series:
        raise ValueError("there is no series to draw; give at least one")
    values = np.concatenate([np.asarray(column, np.float64) for _, column in series.values()])
    with style.drawing(style.SINGLE, 2.2) as figure:
        axes = figure.subplots()
        if not log_y and np.nanmin(values) < 0 < np.nanmax(values):
            axes.axhline(0, color="black", linewidth=0.6)
        for index, (name, (rounds, column)) in enumerate(series.items()):
            axes.plot(rounds, column, label=name, **{**style.line_look(index), "marker": None})
        if log_y:
            axes.set_yscale("log")
        round_axis(axes)
        axes.set_ylabel(y_label)
        style.legend_above(figure, *axes.get_legend_handles_labels())
    return figure


def sweep(
    x: Sequence[float],
    series: Mapping[str, tuple[Sequence[float], Sequence[float] | None]],
    x_label: str,
    y_label: str,
    log_x: bool = False,
    paper: Mapping[str, Sequence[float]] | None = None,
    band: str = "± standard deviation",
    highest: float = np.inf,
) -> Figure:
    """Draws results against a parameter: accuracy over the number of clients, ARI over the compression ratio.

    Args:
      x: the n values of the parameter.
      series: name -> (means [n], standard deviations [n] or None), NaN where there is none; in the unit of `y_label`.
      x_label, y_label: axis labels with their units.
      log_x: logarithmic axis.
      paper: name of a series -> the paper's values [n]: hollow markers of the same colour and shape.
      band: what the deviations are called in the legend.
      highest: what no value can be above, at which bands end.

    Raises:
      ValueError: no series, other lengths than x's, x ≤ 0 on a logarithmic axis, or a paper's name that is no series.
    """
    floats = functools.partial(np.asarray, dtype=np.float64)
    positions = floats(x)
    lines = {
        name: (floats(mean), np.zeros(len(mean)) if std is None else np.nan_to_num(floats(std)))
        for name, (mean, std) in series.items()
    }
    published = {name: floats(values) for name, values in (paper or {}).items()}
    _check_sweep(positions, lines, published, log_x)
    with style.drawing(style.SINGLE, 2.2) as figure:
        axes = figure.subplots()
        for index, (name, (mean, deviation)) in enumerate(lines.items()):
            known, place = np.isfinite(mean), {"label": pictured(method_name(name)), "index": index, "highest": highest}
            draw_line(axes, positions[known], mean[known], deviation[known], count=len(lines), **place)
            if name in published:
                known = np.isfinite(published[name])
                look = {**style.line_look(index), "linestyle": "none", "markerfacecolor": "white", "markersize": 5}
                axes.plot(positions[known], published[name][known], label="_paper", zorder=2.5, **look)
        if log_x:
            axes.set_xscale("log")
        _mark_positions(axes, positions, log_x)
        axes.yaxis.set_major_locator(MaxNLocator(7, steps=style.STEPS))
        if np.isfinite(highest) and np.isclose(*axes.dataLim.intervaly, atol=1e-3 * highest):
            # Where nothing differs, the axis would be of rounding errors, beyond what is possible.
            axes.set_ylim(-0.06 * highest, 1.06 * highest)
        axes.set(xlabel=x_label, ylabel=y_label)
        handles, labels = axes.get_legend_handles_labels()
        without = [name for name, (mean, _) in lines.items() if not np.isfinite(mean).any()]
        missing = [pictured(method_name(name)) + NO_VALUE for name in without]
        handles += [NO_LINE] * len(missing)
        labels += missing
        if any(deviation.any() for _, deviation in lines.values()):
            handles.append(Patch(color=style.NEUTRAL, alpha=2 * BAND, linewidth=0))
            labels.append(band)
        if published:
            handles.append(style.plain_marker("white"))
            labels.append("paper")
        style.legend_above(figure, handles, labels)
    return figure


def draw_line(
    axes: Axes,
    x: np.ndarray,
    mean: np.ndarray,
    deviation: np.ndarray,
    *,
    label: str,
    index: int,
    count: int,
    highest: float = np.inf,
    steps: bool = False,
) -> None:
    """Draws line `index` of `count` with sparse, staggered markers, and a band of ± `deviation` up to `highest`.

    NaN breaks the line; one without a value is not drawn. `steps`: a value holds until the next, as of a count.
    """
    if not np.isfinite(mean).any():
        return
    every = max(1, len(x) // MARKED_POINTS)
    look = style.line_look(index)
    # Earlier lines lie above later ones: the first is the one that the picture is about.
    order = 3 + (count - index) / (count + 1)
    joined = "steps-post" if steps else "default"
    markers = (index * every // count, every)
    axes.plot(x, mean, label=label, markevery=markers, zorder=order, drawstyle=joined, **look)
    if np.nan_to_num(deviation).any():
        upper = np.minimum(mean + deviation, highest)
        step = "post" if steps else None
        axes.fill_between(x, mean - deviation, upper, color=look["color"], alpha=BAND, linewidth=0, step=step)


def round_axis(axes: Axes) -> None:
    """Labels the horizontal axis as communication rounds, with ticks at whole ones."""
    axes.set_xlabel("Communication round")
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=style.STEPS, integer=True, min_n_ticks=1))


def shared_legend(figure: Figure, panels: Iterable[Axes], further: Mapping[str, Any] | None = None) -> None:
    """One legend over all panels; what occurs in several is named once. `further` entries follow: label -> handle."""
    named = (pair for axes in panels for pair in zip(*axes.get_legend_handles_labels(), strict=True))
    entries = {**{str(label): handle for handle, label in named}, **(further or {})}
    style.legend_above(figure, list(entries.values()), list(entries))


def _mark_positions(axes: Axes, positions: np.ndarray, log_x: bool) -> None:
    """Ticks where the results are, unless their labels would overlap; large powers of ten keep matplotlib's."""
    ticks = np.unique(positions)
    scaled = np.log10(ticks) if log_x else ticks
    powers = log_x and np.allclose(scaled, np.round(scaled)) and ticks[-1] >= 1e4
    crowded = len(ticks) > 1 and np.diff(scaled).min() / (scaled[-1] - scaled[0]) < 0.08
    if not (powers or crowded):
        style.ticks_at(axes.xaxis, ticks.tolist())


def _check_sweep(
    x: np.ndarray, lines: Mapping[str, tuple[np.ndarray, np.ndarray]], paper: Mapping[str, np.ndarray], log_x: bool
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
