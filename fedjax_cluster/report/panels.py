"""Pictures of several settings side by side: a panel each, with the same lines or the same groups of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedjax_cluster.report import style
from fedjax_cluster.report.curves import BAND, BOUNDED, ENDED, NO_LINE, NO_VALUE, draw_line, round_axis, shared_legend
from fedjax_cluster.report.histories import (
    History,
    by_seed,
    column_label,
    end_not_finite,
    evaluated,
    finite_part,
    with_gaps,
)
from fedjax_cluster.report.names import group_label, method_name, over_seeds, pictured

CURVE_INCHES, SCATTER_INCHES = 1.45, 1.3  # of a panel's height


def curve_panels(
    panels: Mapping[str, Mapping[str, History | Sequence[History]]],
    metric: str,
    *,
    columns: int = 3,
    label: str = "",
    level: float | None = None,
) -> Figure:
    """Draws a column of histories against communication rounds, a panel for each setting, over two paper columns.

    Means over the seeds, with a band of ± one sample standard deviation; all panels have one vertical axis.

    Args:
      panels: setting -> method -> history of a run, or the histories of its seeds.
      metric: the column.
      columns: panels side by side, at most.
      label: axis label with its unit; "" takes that of the column.
      level: a value to mark by a dashed line, in the column's unit.

    Raises:
      ValueError: no panels, or one without methods.
    """
    if not panels:
        raise ValueError("panels is empty; give at least one setting")
    usual, factor = column_label(metric)
    side = min(columns, len(panels))
    rows = -(-len(panels) // side)
    methods = list(dict.fromkeys(method for of_panel in panels.values() for method in of_panel))
    counts: list[int] = []
    further: dict[str, Any] = {}
    lost: dict[str, list[str]] = {}
    with style.drawing(style.SINGLE if side == 1 else style.DOUBLE, 0.35 + CURVE_INCHES * rows) as figure:
        grid = figure.subplots(rows, side, sharey=True, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        for axes, (title, of_panel) in zip(grid.flat, panels.items(), strict=False):
            for method, runs in by_seed(of_panel).items():
                ended, runs = end_not_finite(runs, metric), [finite_part(run) for run in runs]
                rounds, found = evaluated(runs, metric, method)
                if not len(rounds):
                    lost.setdefault(method, []).append(pictured(title))
                    continue
                counts.append(len(found))
                mean = factor * found.mean(axis=0)
                spread = factor * found.std(axis=0, ddof=1) if len(found) > 1 else np.zeros(len(rounds))
                place: dict[str, Any] = {"index": methods.index(method), "count": len(methods)}
                highest = factor if metric in BOUNDED else np.inf
                name, line = pictured(method_name(method)), with_gaps(runs, rounds + 1, mean, spread)
                draw_line(axes, *line, label=name, highest=highest, **place)
                if ended:
                    further["not finite afterwards"] = axes.plot(rounds[-1] + 1, mean[-1], **ENDED)[0]
            if level is not None:
                axes.axhline(factor * level, **style.GUIDE)
            axes.set_title(pictured(title))
            round_axis(axes)
        for axes in grid[:, 0]:
            axes.set_ylabel(label or usual)
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=style.STEPS))
        if over := over_seeds(counts):
            further[f"± sample std {over}"] = Patch(color=style.NEUTRAL, alpha=2 * BAND, linewidth=0)
        for method, titles in lost.items():
            where = ", ".join(titles) if len(titles) <= 2 else f"{len(titles)} panels"
            further[f"{where}: {pictured(method_name(method))}{NO_VALUE}"] = NO_LINE
        shared_legend(figure, grid.flat[: len(panels)], further)
    return figure


class Cloud(NamedTuple):
    """The clients of one panel."""

    title: str
    features: np.ndarray  # f32[M, r]
    group: np.ndarray  # i32[M], true groups


def feature_panels(grid: Sequence[Sequence[Cloud]], group_names: Sequence[str] = ()) -> Figure:
    """Draws clients at their features in the plane in which these vary most, a panel for each setting.

    Colour and marker tell the true group. Every panel has a scale of its own, the same along both axes, and no ticks:
    features are known up to a rotation.

    Args:
      grid: rows of panels, equally long.
      group_names: what the groups are called; "group 3" where there is no name.

    Raises:
      ValueError: no panels, or features that are not finite [M, r] for the M groups.
    """
    if not grid or not grid[0]:
        raise ValueError("grid is empty; give at least one panel")
    clouds = [cloud for row in grid for cloud in row]
    known = style.distinct(np.concatenate([cloud.group for cloud in clouds]))
    looks = {value: style.line_look(place) for place, value in enumerate(known)}
    width = style.SINGLE if len(grid[0]) == 1 else style.DOUBLE
    with style.drawing(width, 0.1 + (SCATTER_INCHES + 0.2) * len(grid)) as figure:
        panels = figure.subplots(len(grid), len(grid[0]), squeeze=False)
        for axes, cloud in zip(panels.flat, clouds, strict=True):
            _scatter(axes, cloud, looks)
        for axes in panels[:, 0]:
            axes.set_ylabel("Second axis")
        for axes in panels[-1]:
            axes.set_xlabel("First axis")
        dots = [Line2D([], [], **{**look, "linestyle": "none"}) for look in looks.values()]
        style.legend_above(figure, dots, [group_label(value, group_names) for value in looks], lines=False)
    return figure


def _scatter(axes: Axes, cloud: Cloud, looks: Mapping[int, Mapping[str, Any]]) -> None:
    points, group = np.asarray(cloud.features, np.float64), np.asarray(cloud.group)
    if points.ndim != 2 or len(points) != len(group) or not np.isfinite(points).all():
        raise ValueError(f"the features of '{cloud.title}' have shape {points.shape}; give finite [{len(group)}, r]")
    centred = points - points.mean(0)
    plane = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    for value, look in looks.items():
        of_group = plane[group == value]
        axes.scatter(*of_group.T, s=9, color=look["color"], marker=look["marker"], linewidths=0, alpha=0.85)
    axes.set_title(cloud.title)
    axes.set(xticks=[], yticks=[])
    axes.spines[["top", "right"]].set_visible(True)
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.12)
