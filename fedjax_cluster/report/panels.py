"""Several columns of histories over the same rounds, one beneath the other: purity, loss and accuracy, say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from fedjax_cluster.report.histories import History, Seeds, by_seed, column_label, evaluated
from fedjax_cluster.report.rows import method_name
from fedjax_cluster.report.style import SINGLE, legend_above, line_look, new_figure, style

BOUNDED = ("purity", "adjusted_rand_index", "accuracy", "balanced_accuracy")
MARKED = 8


def curves(
    histories: Mapping[str, History | Sequence[History]],
    metrics: Sequence[str],
    *,
    log_rounds: bool = False,
    levels: Mapping[str, float] | None = None,
    bands: bool = True,
) -> Figure:
    """Draws columns of histories against rounds, a panel each.

    Several seeds become their mean and a band of ± one standard deviation, over the rounds that all of them evaluated.

    Args:
      histories: method -> history of a run, or the histories of its seeds; columns as `SimulationResult.history`.
      metrics: the columns, from top to bottom.
      log_rounds: rounds done on a logarithmic axis, from 1, for what happens within the first few of many.
      levels: column -> a value to mark by a dashed line, in the column's own unit.
      bands: False leaves the bands out, for many methods.

    Returns:
      The figure, one paper column wide.

    Raises:
      ValueError: no histories, no columns, or a column without any value.
    """
    seeds = by_seed(histories)
    if not metrics:
        raise ValueError("metrics is empty; name at least one column")
    with style():
        figure = new_figure(SINGLE, 0.4 + 1.35 * len(metrics))
        panels = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
        for axes, name in zip(panels, metrics, strict=True):
            _draw(axes, seeds, name, bands)
            if levels is not None and name in levels:
                level = levels[name] * column_label(name)[1]
                axes.axhline(level, color="#888888", linestyle=(0, (4, 2)), linewidth=0.7, zorder=1)
        _finish(panels[-1], max(len(history["round"]) for runs in seeds.values() for history in runs), log_rounds)
        entries = {str(line.get_label()): line for axes in panels for line in _named(axes)}
        legend_above(figure, list(entries.values()), list(entries))
    return figure


def _draw(axes: Axes, seeds: Seeds, name: str, bands: bool) -> None:
    label, factor = column_label(name)
    highest = factor if name in BOUNDED else np.inf
    for index, (method, runs) in enumerate(seeds.items()):
        rounds, values = evaluated(runs, name, method)
        if not len(rounds):
            continue
        mean, deviation = factor * values.mean(axis=0), factor * values.std(axis=0)
        every = max(1, len(rounds) // MARKED)
        look = line_look(index)
        # Earlier lines lie above later ones: the first is the one that the picture is about.
        order = 3 + (len(seeds) - index) / (len(seeds) + 1)
        marks = (index * every // len(seeds), every)
        axes.plot(rounds + 1, mean, label=method_name(method), markevery=marks, zorder=order, **look)
        if bands and deviation.any():
            upper = np.minimum(mean + deviation, highest)
            axes.fill_between(rounds + 1, mean - deviation, upper, color=look["color"], alpha=0.12, linewidth=0)
    if not axes.get_lines():
        raise ValueError(f"no history has a value of '{name}'; name another column")
    axes.set_ylabel(label)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=(1, 2, 2.5, 5, 10)))


def _finish(axes: Axes, rounds: int, log_rounds: bool) -> None:
    axes.set_xlabel("Communication rounds done")
    if not log_rounds:
        axes.set_xlim(1 - 0.02 * rounds, 1.02 * rounds)
        axes.xaxis.set_major_locator(MaxNLocator(7, steps=(1, 2, 2.5, 5, 10), integer=True))
        return
    axes.set_xscale("log")
    axes.set_xlim(0.94, 1.06 * rounds)
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if tick <= rounds]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def _named(axes: Axes) -> list[Line2D]:
    return [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
