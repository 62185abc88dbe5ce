"""Pictures of CFL's toy problems: what one linear model cannot do (Fig. 1), and paths of a model (Fig. 2)."""

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

AREA = "#D9D9D9"
PANEL_INCHES = 2.4
POINTS = 60  # drawn of each group
LEVELS = 7  # of a risk
DASHES = ("solid", "dashed")


class Problem(NamedTuple):
    """Points of two groups of clients, and lines that separate the labels."""

    x: np.ndarray  # f32[N, 2]
    y: np.ndarray  # i32[N], 0 or 1
    group: np.ndarray  # i32[N], 0 or 1
    single: np.ndarray  # f32[3]: w₁x₁ + w₂x₂ + w₃ = 0 of the model that all share
    of_group: Mapping[int, np.ndarray]  # group -> that of its own model


def toy_problems(problems: Mapping[str, Problem]) -> Figure:
    """Draws two-dimensional problems side by side, each 2.4 inches wide, with the models' decision lines (Fig. 1).

    Args:
      problems: title -> points and lines.

    Raises:
      ValueError: no problems.
    """
    if not problems:
        raise ValueError("problems is empty; give at least one")
    with style.drawing(0.3 + PANEL_INCHES * len(problems), PANEL_INCHES) as figure:
        panels = figure.subplots(1, len(problems), squeeze=False)[0]
        for axes, (title, problem) in zip(panels, problems.items(), strict=True):
            reach = 1.05 * float(np.abs(problem.x).max())
            for group in np.unique(problem.group).tolist():
                for label, face in ((0, "white"), (1, style.COLORS[group])):
                    chosen = problem.x[(problem.group == group) & (problem.y == label)][: POINTS // 2]
                    marker = style.MARKERS[group]
                    look = {"marker": marker, "s": 11, "facecolor": face, "edgecolor": style.COLORS[group]}
                    axes.scatter(*chosen.T, linewidths=0.7, alpha=0.9, **look)
            _decision_line(axes, problem.single, reach, {"color": "black", "linestyle": style.DASHED})
            for group, line in problem.of_group.items():
                _decision_line(axes, line, reach, {"color": style.COLORS[group]})
            axes.set(xlim=(-reach, reach), ylim=(-reach, reach), xlabel="$x_1$", ylabel="$x_2$", title=title)
            axes.set_aspect("equal")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(5, integer=True))
        shown = [Line2D([], [], color=style.COLORS[group], marker=style.MARKERS[group]) for group in (0, 1)]
        shown.append(Line2D([], [], color="black", linestyle=style.DASHED))
        shown += [style.plain_marker(face) for face in ("white", style.NEUTRAL)]
        names = [f"clients of group {group + 1}, and their model" for group in (0, 1)]
        style.legend_above(figure, shown, [*names, "one model for all", "label 0", "label 1"])
    return figure


def _decision_line(axes: Axes, line: np.ndarray, reach: float, look: Mapping[str, Any]) -> None:
    direction, offset = np.asarray(line[:2], np.float64), float(line[2])
    size = float(np.linalg.norm(direction))
    if size < 1e-9:
        return  # a model that gives every point the same label has no line
    middle = -offset * direction / size**2
    along = np.asarray([-direction[1], direction[0]]) / size
    ends = np.stack([middle - 4 * reach * along, middle + 4 * reach * along])
    axes.plot(*ends.T, linewidth=1.4, zorder=4, **look)


class Path(NamedTuple):
    """The path of a model of two parameters, and the clients' risks around it."""

    grid: tuple[np.ndarray, np.ndarray]  # θ₁ f32[a], θ₂ f32[b]
    risks: Sequence[np.ndarray]  # of each client, f32[b, a]
    steps: np.ndarray  # f32[T, 2]: θ before each round
    updates: np.ndarray  # f32[T, 2 clients, 2]: what the clients send then


def optimisation_paths(paths: Mapping[str, Path], *, arrows: Sequence[int] = (0, 3, 8, -1)) -> Figure:
    """Draws the path of a model that two clients train, over their risks, with their updates as arrows (CFL, Fig. 2).

    Grey is where both risks vanish. Side by side, each 2.4 inches wide.

    Args:
      paths: title -> path.
      arrows: rounds whose updates are drawn, at one scale for all.

    Raises:
      ValueError: no paths.
    """
    if not paths:
        raise ValueError("paths is empty; give at least one")
    with style.drawing(0.3 + PANEL_INCHES * len(paths), PANEL_INCHES) as figure:
        panels = figure.subplots(1, len(paths), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (title, path) in zip(panels, paths.items(), strict=True):
            both = np.max(np.stack(list(path.risks)), 0) < 1e-6
            axes.contourf(*path.grid, both.astype(float), levels=[0.5, 1.5], colors=[AREA], zorder=0)
            for place, risk in enumerate(path.risks):
                levels = np.geomspace(0.05, float(risk.max()), LEVELS)
                look = {"colors": style.COLORS[place], "linewidths": 0.5, "alpha": 0.55}
                axes.contour(*path.grid, risk, levels=levels, linestyles=DASHES[place], **look)
            axes.plot(*path.steps.T, color="black", marker=".", markersize=2.5, linewidth=1.0, zorder=4)
            axes.plot(*path.steps[0], color="black", marker="D", markersize=4, linestyle="none", zorder=5)
            for index in arrows:
                if index < len(path.steps):
                    for place, update in enumerate(path.updates[index]):
                        where = {"angles": "xy", "scale_units": "xy", "scale": 2.5, "width": 0.009}
                        axes.quiver(*path.steps[index], *update, color=style.COLORS[place], zorder=6, **where)
            axes.set(xlabel=r"Parameter $\theta_1$", title=title)
            axes.grid(False)
            axes.set_aspect("equal")
        panels[0].set_ylabel(r"Parameter $\theta_2$")
        handles: list[Any] = [Line2D([], [], color=style.COLORS[place], linestyle=DASHES[place]) for place in (0, 1)]
        handles.append(Line2D([], [], color="black", marker=".", markersize=4))
        handles.append(Line2D([], [], color="black", marker="D", linestyle="none", markersize=4))
        handles.append(Patch(color=AREA))
        names = [f"client {place + 1}: risk, and its updates (arrows)" for place in (0, 1)]
        style.legend_above(figure, handles, [*names, "path of the model", "start", "both risks are 0"])
    return figure
