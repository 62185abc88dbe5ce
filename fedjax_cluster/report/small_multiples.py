"""Many methods' curves, told apart: a panel each, with the others' behind in grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedjax_cluster.report import curves, style
from fedjax_cluster.report.curves import BAND, ENDED, shared_legend
from fedjax_cluster.report.histories import (
    History,
    by_seed,
    chosen_metric,
    column_label,
    evaluated,
    finite_part,
    not_finite_from,
)
from fedjax_cluster.report.names import method_name, over_seeds

MOST_IN_ONE = 6  # methods in one panel
COLUMNS, PANEL_INCHES, TITLE_INCHES = 4, 0.72, 0.1
GREY = "#C4C4C4"
SMALL, TITLE_WIDTH, LONGEST_TITLE = 6.0, 13, 48  # points; characters
ROOM = 0.05  # of the axis, beyond the values


def comparison_figure(histories: Mapping[str, History | Sequence[History]]) -> Figure:
    """The learning curves of a comparison: in one panel for up to six methods, else in small multiples.

    Args:
      histories: as of `curves.curves`.

    Raises:
      ValueError: no histories, or none with a value to draw.
    """
    return curves.learning_curves(histories) if len(histories) <= MOST_IN_ONE else small_multiples(histories)


def small_multiples(histories: Mapping[str, History | Sequence[History]], metric: str | None = None) -> Figure:
    """Draws a metric against communication rounds, a small panel for each method and the others' curves in grey.

    The number in a panel is the last mean over the seeds. Bands and crosses as in `curves.curves`.

    Args:
      histories: method -> history of a run, or the histories of its seeds.
      metric: a column; None takes `accuracy`, or `test_loss` where there is no accuracy, or else the training loss.

    Raises:
      ValueError: no histories, no such column, or a column without any value.
    """
    seeds = by_seed(histories)
    metric = chosen_metric(seeds, metric)
    label, factor = column_label(metric)
    last = 1 + max(float(np.max(history["round"])) for runs in seeds.values() for history in runs)
    ended = {method for method, runs in seeds.items() if any(not_finite_from(run) for run in runs)}
    lines = {}
    for method, runs in seeds.items():
        rounds, values = evaluated([finite_part(run) for run in runs], metric, method)
        lines[method] = rounds + 1, factor * values
    rows, columns = -(-len(seeds) // COLUMNS), min(COLUMNS, len(seeds))
    names = (style.shortened(method_name(method), LONGEST_TITLE) for method in seeds)
    titles = [style.wrapped(name, TITLE_WIDTH, within=True) for name in names]
    # Titles of several lines take nothing from the panels.
    more_lines = sum(
        max(title.count("\n") for title in titles[row * COLUMNS : (row + 1) * COLUMNS]) for row in range(rows)
    )
    with style.drawing(style.SINGLE, 0.35 + PANEL_INCHES * rows + TITLE_INCHES * more_lines) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for index, axes in enumerate(grid.flat):
            if index >= len(seeds):
                axes.remove()
                continue
            method = list(seeds)[index]
            _draw_panel(axes, lines, method, method in ended)
            axes.set_title(titles[index], fontsize=SMALL, loc="left", pad=2)
            axes.tick_params(labelsize=SMALL, labelbottom=index + columns >= len(seeds))
        _set_limits(grid[0, 0], lines, last)
        figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.02, wspace=0.03, hspace=0.03)
        figure.supxlabel("Communication round", fontsize=7.5)
        figure.supylabel(label, fontsize=7.5)
        over = over_seeds(len(values) for _, values in lines.values() if values.size)
        further: dict[str, Any] = {
            "the method, its last mean as a number": Line2D([], [], color=style.COLORS[0]),
            "the others": Line2D([], [], color=GREY, linewidth=0.8),
        }
        if over:
            further[f"± sample std {over}"] = Patch(color=style.COLORS[0], alpha=2 * BAND, linewidth=0)
        shared_legend(figure, grid.flat[: len(seeds)], further)
    return figure


def _draw_panel(axes: Axes, lines: Mapping[str, tuple[np.ndarray, np.ndarray]], method: str, ended: bool) -> None:
    for other, (rounds, values) in lines.items():
        if other != method:
            axes.plot(rounds, values.mean(axis=0), color=GREY, linewidth=0.5, zorder=1, **_marker(rounds, 2))
    rounds, values = lines[method]
    if not len(rounds):
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", va="center", fontsize=SMALL)
        return
    mean, color = values.mean(axis=0), style.COLORS[0]
    axes.plot(rounds, mean, color=color, linewidth=1.2, zorder=3, **_marker(rounds, 3))
    if len(values) > 1:
        deviation = values.std(axis=0, ddof=1)
        look: dict[str, Any] = {"color": color, "alpha": 2 * BAND, "zorder": 2}
        if len(rounds) > 1:
            axes.fill_between(rounds, mean - deviation, mean + deviation, linewidth=0, **look)
        else:
            axes.vlines(rounds, mean - deviation, mean + deviation, linewidth=3, **look)
    if ended:
        axes.plot(rounds[-1], mean[-1], label="not finite afterwards", **{**ENDED, "markersize": 4})
    # In the corner at the right that the curve leaves free.
    everything = np.concatenate([values.mean(axis=0) for _, values in lines.values()])
    above = mean[-1] < (everything.min() + everything.max()) / 2
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}
    place: dict[str, Any] = {"x": 0.97, "y": 0.95 if above else 0.06, "va": "top" if above else "bottom", "ha": "right"}
    number = f"{mean[-1]:#.3g}".rstrip(".")
    axes.text(s=number, transform=axes.transAxes, fontsize=SMALL, zorder=6, bbox=box, **place)


def _marker(rounds: np.ndarray, size: float) -> dict[str, Any]:
    """Of one evaluation there is no line to be seen."""
    return {"marker": "o", "markersize": size} if len(rounds) == 1 else {}


def _set_limits(axes: Axes, lines: Mapping[str, tuple[np.ndarray, np.ndarray]], last: float) -> None:
    """Of all panels: from the lowest mean to the highest, whatever a band does."""
    means = np.concatenate([values.mean(axis=0) for _, values in lines.values()])
    if len(means):
        low, high = float(means.min()), float(means.max())
        room = ROOM * (high - low or abs(high) or 1.0)
        axes.set_ylim(low - room, high + room)
    axes.set_xlim(0.5 - 0.02 * last, 0.5 + 1.02 * last)
    axes.xaxis.set_major_locator(MaxNLocator(2, steps=style.STEPS, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=style.STEPS))
