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
from fedjax_cluster.report.curves import BAND, BOUNDED, ENDED, shared_legend, value_axis
from fedjax_cluster.report.histories import (
    History,
    by_seed,
    chosen_metric,
    column_label,
    end_not_finite,
    evaluated,
    finite_part,
)
from fedjax_cluster.report.names import method_name, over_seeds, pictured

MOST_IN_ONE = 6  # methods in one panel
MOST_COLUMNS, PANEL_INCHES, TITLE_INCHES = 4, 0.72, 0.1
GREY = "#C4C4C4"
SMALL, TITLE_WIDTH, LONGEST_TITLE = 6.0, 52, 48  # points; characters, of a row of titles and of one


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
    ended = {method for method, runs in seeds.items() if end_not_finite(runs, metric)}
    lines = {}
    for method, runs in seeds.items():
        rounds, values = evaluated([finite_part(run) for run in runs], metric, method)
        lines[method] = rounds + 1, factor * values
    columns = columns_of(len(seeds))
    rows = -(-len(seeds) // columns)
    names = (style.shortened(method_name(method), LONGEST_TITLE) for method in seeds)
    titles = [pictured(style.wrapped(name, TITLE_WIDTH // max(columns, 3), within=True)) for name in names]
    # Titles of several lines take nothing from the panels.
    more_lines = sum(
        max(title.count("\n") for title in titles[row * columns : (row + 1) * columns]) for row in range(rows)
    )
    with style.drawing(style.SINGLE, 0.35 + PANEL_INCHES * rows + TITLE_INCHES * more_lines) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for index, axes in enumerate(grid.flat):
            if index >= len(seeds):
                axes.remove()
                continue
            method = list(seeds)[index]
            _draw_panel(axes, lines, method, method in ended, factor if metric in BOUNDED else np.inf)
            axes.set_title(titles[index], fontsize=SMALL, loc="left", pad=2)
            axes.tick_params(labelsize=SMALL, labelbottom=index + columns >= len(seeds))
        grid[0, 0].set_xlim(0.5 - 0.02 * last, 0.5 + 1.02 * last)
        grid[0, 0].xaxis.set_major_locator(MaxNLocator(2, steps=style.STEPS, integer=True, min_n_ticks=2))
        value_axis(grid[0, 0], [values.mean(axis=0) for _, values in lines.values()], 4)
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


def columns_of(count: int) -> int:
    """How many panels stand side by side: of three and four the one that leaves fewer places empty.

    >>> [columns_of(count) for count in (1, 4, 5, 6, 7, 9)]
    [1, 4, 3, 3, 4, 3]
    """
    return count if count <= MOST_COLUMNS else min(MOST_COLUMNS, MOST_COLUMNS - 1, key=lambda each: -count % each)


def _draw_panel(
    axes: Axes, lines: Mapping[str, tuple[np.ndarray, np.ndarray]], method: str, ended: bool, highest: float
) -> None:
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
        edges = mean - deviation, np.minimum(mean + deviation, highest)
        look: dict[str, Any] = {"color": color, "alpha": 2 * BAND, "zorder": 2}
        if len(rounds) > 1:
            axes.fill_between(rounds, *edges, linewidth=0, **look)
        else:
            axes.vlines(rounds, *edges, linewidth=3, **look)
    if ended:
        axes.plot(rounds[-1], mean[-1], label="not finite afterwards", **{**ENDED, "markersize": 4})
    # At the line's end, and beyond the panel where the line ends with it: the layout leaves the room.
    place: dict[str, Any] = {"xytext": (6 if ended else 3, 0), "textcoords": "offset points", "va": "center"}
    number = f"{mean[-1]:#.3g}".rstrip(".")
    axes.annotate(number, (rounds[-1], mean[-1]), fontsize=SMALL, color=color, zorder=6, **place)


def _marker(rounds: np.ndarray, size: float) -> dict[str, Any]:
    """Of one evaluation there is no line to be seen."""
    return {"marker": "o", "markersize": size} if len(rounds) == 1 else {}
