"""Curves of a sweep over two options: a panel for each value of one, a line for each of the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedjax_cluster.report import style
from fedjax_cluster.report.curves import (
    BAND,
    BOUNDED,
    ENDED,
    NO_LINE,
    NO_VALUE,
    draw_line,
    round_axis,
    shared_legend,
    value_axis,
)
from fedjax_cluster.report.histories import (
    History,
    by_seed,
    chosen_metric,
    column_label,
    end_not_finite,
    evaluated,
    finite_part,
    with_gaps,
)
from fedjax_cluster.report.names import option_names, over_seeds, pictured, value_text
from fedjax_cluster.report.sensitivity import levels_of

MOST_PANELS, MOST_LINES = 5, 6


def can_be_drawn(cells: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether there are two options, with few enough values for panels and lines."""
    options = list(dict.fromkeys(option for values in cells.values() for option in values))
    counts = sorted(len(levels_of([values[option] for values in cells.values()])) for option in options)
    return len(counts) == 2 and counts[0] <= MOST_PANELS and counts[1] <= MOST_LINES


def option_curves(
    histories: Mapping[str, History | Sequence[History]],
    cells: Mapping[str, Mapping[str, Any]],
    metric: str | None = None,
) -> Figure:
    """Draws a metric against communication rounds, a panel for each value of the option with fewer values.

    The seeds of a cell are their mean and a band of ± one sample standard deviation, over the rounds that all of them
    evaluated; a cross is where one of them was not finite any more.

    Args:
      histories: cell -> the histories of its seeds; a cell without any is left out.
      cells: cell -> option -> value, of two options.
      metric: as of `curves.learning_curves`.

    Raises:
      ValueError: no histories, no such column, or more options or values than `can_be_drawn`.
    """
    if not can_be_drawn(cells):
        raise ValueError(
            f"cells have other options than two of at most {MOST_PANELS} and {MOST_LINES} values; draw small_multiples"
        )
    seeds = by_seed(histories)
    metric = chosen_metric(seeds, metric)
    label, factor = column_label(metric)
    options = list(next(iter(cells.values())))
    names = option_names(options)
    across, along = sorted(options, key=lambda option: len(levels_of([of[option] for of in cells.values()])))
    panels_of, lines_of = (levels_of([of[option] for of in cells.values()]) for option in (across, along))
    place = {(value_text(of[across]), value_text(of[along])): cell for cell, of in cells.items()}
    last = 1 + max(float(np.max(history["round"])) for runs in seeds.values() for history in runs)
    counts: list[int] = []
    means: list[np.ndarray] = []
    legend: dict[str, Any] = {}
    with style.drawing(style.SINGLE, 0.6 + 1.05 * len(panels_of)) as figure:
        panels = figure.subplots(len(panels_of), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, panel in zip(panels, panels_of, strict=True):
            lost: list[str] = []
            for index, line in enumerate(lines_of):
                cell = place.get((value_text(panel), value_text(line)), "")
                if cell not in seeds:
                    continue
                runs = [finite_part(run) for run in seeds[cell]]
                rounds, values = evaluated(runs, metric, cell)
                mean = factor * values.mean(axis=0)
                deviation = factor * values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(rounds))
                look = {"index": index, "count": len(lines_of), "highest": factor if metric in BOUNDED else np.inf}
                name = pictured(f"{names[along]} {value_text(line)}")
                draw_line(axes, *with_gaps(runs, rounds + 1, mean, deviation), label=name, **look)
                counts.append(len(values) if values.size else 0)
                means.append(mean)
                if not len(rounds):
                    lost.append(name)
                elif end_not_finite(seeds[cell], metric):
                    legend["not finite afterwards"] = axes.plot(rounds[-1] + 1, mean[-1], **ENDED)[0]
            title = pictured(f"{names[across]} {value_text(panel)}")
            if lost:
                which = ", ".join(lost) if len(lost) <= 2 else f"{len(lost)} lines"
                legend[f"{title}: {which}{NO_VALUE}"] = NO_LINE
            axes.set_title(title, loc="left", fontsize=style.FONT_POINTS, pad=2)
        for axes in panels:
            value_axis(axes, means, 4)
        round_axis(panels[-1])
        panels[-1].set_xlim(0.5 - 0.02 * last, 0.5 + 1.02 * last)
        figure.supylabel(label, fontsize=7.5)
        if over := over_seeds(counts):
            legend[f"± sample std {over}"] = Patch(color=style.NEUTRAL, alpha=2 * BAND, linewidth=0)
        shared_legend(figure, panels, legend)
    return figure
