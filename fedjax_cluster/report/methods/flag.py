"""Pictures of one-shot clustering: the dissimilarities of clients, the search for α, and the tree of merges.

Every function returns a `matplotlib.figure.Figure` and neither shows nor saves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.cluster.hierarchy
import scipy.spatial.distance
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator, MultipleLocator, NullLocator

from fedjax_cluster.report.style import (
    COLORS,
    DOUBLE,
    NEUTRAL,
    SINGLE,
    categorical_colors,
    legend_above,
    new_figure,
    style,
)

LINKAGES = ("average", "single", "complete")
BARS = "#BBD3E6"


def dissimilarity_matrices(
    data: Any, gradient: Any, proximity: Any, group: Any | None = None, group_names: Sequence[str] = ()
) -> Figure:
    """Draws FLAG's matrices V, G and A side by side, clients ordered by their true group.

    Args:
      data: f32[M, M], V in degrees.
      gradient: f32[M, M], G in degrees.
      proximity: f32[M, M], A in [0, 1].
      group: i32[M], true groups; lines mark where one ends and the next begins. None keeps the clients' order.
      group_names: what the groups are called.

    Returns:
      The figure, two paper columns wide.

    Raises:
      ValueError: matrices that are not square, finite and of one size, or a group of another length.
    """
    matrices = [np.asarray(matrix, np.float64) for matrix in (data, gradient, proximity)]
    for name, matrix in zip(("data", "gradient", "proximity"), matrices, strict=True):
        _check_square(matrix, name, len(matrices[0]))
    order, ends, middles, names = _by_group(group, len(matrices[0]), group_names)
    titles = ("Data $V$", "Gradients $G$", "Proximity $A$")
    units = ("weighted angle (degrees)", "angle (degrees)", "scaled, without unit")
    with style():
        figure = new_figure(DOUBLE, 3.0)
        panels = figure.subplots(1, 3, sharey=True)
        for axes, matrix, title, unit in zip(panels, matrices, titles, units, strict=True):
            # The diagonal is 0 by definition and would stretch the scale.
            shown = np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)[np.ix_(order, order)]
            image = axes.imshow(shown, cmap="viridis", interpolation="nearest", vmin=0.0)
            axes.set_title(title)
            axes.grid(False)
            axes.spines[:].set_visible(False)
            for end in ends[:-1]:
                axes.axhline(end - 0.5, color="white", linewidth=0.6)
                axes.axvline(end - 0.5, color="white", linewidth=0.6)
            figure.colorbar(image, ax=axes, location="bottom", shrink=0.9, aspect=30, label=unit)
            _client_ticks(axes, middles, names, len(matrix))
        panels[0].set_ylabel("Client" if group is None else "Client, by true group")
    return figure


def threshold_search(
    thresholds: Any, accuracy: Any, num_clusters: Any, chosen: int, elbow: int | None = None
) -> Figure:
    """Draws the held-out accuracy and the number of clusters against the clustering threshold α (FLAG, Fig. 1).

    Args:
      thresholds: f32[T], descending.
      accuracy: f32[T] in [0, 1]; NaN where no model was trained.
      num_clusters: i32[T].
      chosen: place of the α that was taken.
      elbow: place of the elbow, where its clusters may not have fitted; None is `chosen`.

    Returns:
      The figure, one paper column wide; α falls from left to right.

    Raises:
      ValueError: lengths that differ, or a place that there is not.
    """
    alpha, mean, count = (np.asarray(values, np.float64) for values in (thresholds, accuracy, num_clusters))
    if alpha.ndim != 1 or not alpha.shape == mean.shape == count.shape or not len(alpha):
        raise ValueError(
            f"thresholds, accuracy and num_clusters have shapes {alpha.shape}, {mean.shape} and {count.shape}; "
            "give three lists of the same length"
        )
    if not 0 <= int(chosen) < len(alpha):
        raise ValueError(f"chosen is {chosen}, but there are {len(alpha)} thresholds")
    step = float(np.min(np.abs(np.diff(alpha)))) if len(alpha) > 1 else 0.1
    with style():
        figure = new_figure(SINGLE, 2.1)
        bars = figure.subplots()
        axes = bars.twinx()
        bars.bar(alpha, count, width=0.7 * step, color=BARS, label="number of clusters", zorder=1)
        bars.set_yscale("log")
        most = count.max()
        bars.set_ylim(0.8, 1.6 * most)
        marks = [mark for mark in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if mark <= 1.6 * most]
        bars.yaxis.set_major_locator(FixedLocator(marks))
        bars.yaxis.set_minor_locator(NullLocator())
        bars.set_yticklabels([str(mark) for mark in marks])
        bars.set_ylabel("Number of clusters")
        bars.yaxis.set_label_position("right")
        bars.yaxis.tick_right()
        bars.grid(False)
        axes.plot(alpha, 100 * mean, color=COLORS[1], marker="o", label="held-out accuracy", zorder=3)
        if np.isfinite(mean[int(chosen)]):
            axes.plot(
                alpha[int(chosen)],
                100 * mean[int(chosen)],
                linestyle="none",
                marker="o",
                markersize=8,
                markerfacecolor="none",
                markeredgecolor="black",
                markeredgewidth=1.0,
                label=f"{'elbow' if elbow in (None, chosen) else 'taken'}, α = {alpha[int(chosen)]:g}",
                zorder=4,
            )
        axes.set_ylabel("Held-out accuracy (%)")
        axes.yaxis.set_label_position("left")
        axes.yaxis.tick_left()
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.grid(True, axis="y")
        for panel in (axes, bars):
            panel.spines[:].set_visible(False)
        axes.spines[["left", "bottom"]].set_visible(True)
        bars.set_xlim(alpha.max() + 0.7 * step, alpha.min() - 0.7 * step)
        bars.xaxis.set_major_locator(MultipleLocator(0.2))
        bars.set_xlabel("Clustering threshold α")
        handles = [pair for panel in (axes, bars) for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
        legend_above(figure, *zip(*handles, strict=True))
    return figure


def dendrogram(
    distance: Any,
    *,
    threshold: float | None = None,
    linkage: str = "average",
    group: Any | None = None,
    group_names: Sequence[str] = (),
    label: str = "Distance at which clusters merge",
) -> Figure:
    """Draws the dendrogram of agglomerative clustering over a strip with the clients' true groups.

    Args:
      distance: f32[M, M], symmetric, at least two clients.
      threshold: height of the cut, drawn as a line.
      linkage: "average", "single" or "complete".
      group: i32[M], true groups, coloured in the strip under the tree.
      group_names: what the groups are called.
      label: of the vertical axis, with the distances' unit.

    Returns:
      The figure, two paper columns wide.

    Raises:
      ValueError: a matrix that is not square and finite, fewer than two clients, an unknown linkage.
    """
    matrix = np.asarray(distance, np.float64)
    _check_square(matrix, "distance", len(matrix))
    if len(matrix) < 2:
        raise ValueError("distance has a single client; a tree needs at least two")
    if linkage not in LINKAGES:
        raise ValueError(f"linkage is {linkage!r}; it must be one of {', '.join(LINKAGES)}")
    symmetric = 0.5 * (matrix + matrix.T)
    np.fill_diagonal(symmetric, 0.0)
    merges = scipy.cluster.hierarchy.linkage(scipy.spatial.distance.squareform(symmetric, checks=False), linkage)
    drawing = scipy.cluster.hierarchy.dendrogram(merges, no_plot=True)
    # SciPy puts leaf i at 10 i + 5.
    paths = [
        np.column_stack([(np.asarray(x) - 5) / 10, y])
        for x, y in zip(drawing["icoord"], drawing["dcoord"], strict=True)
    ]
    handles: list[Any] = []
    with style():
        figure = new_figure(DOUBLE, 2.5)
        axes = figure.subplots()
        axes.add_collection(LineCollection(paths, colors=NEUTRAL, linewidths=0.7))
        top = 1.05 * max(merges[:, 2].max(), 0.0 if threshold is None else threshold)
        low = 0.0
        if group is not None:
            group = np.asarray(group)
            low = -0.09 * top
            known = [int(value) for value in np.unique(group)]
            colors = dict(zip(known, categorical_colors(len(known)), strict=True))
            for place, client in enumerate(drawing["leaves"]):
                axes.axvspan(place - 0.5, place + 0.5, 0.012, 0.062, color=colors[int(group[client])], linewidth=0)
            handles = [Patch(color=colors[value], label=_name(value, group_names)) for value in known]
        if threshold is not None:
            (line,) = axes.plot(
                [-0.5, len(matrix) - 0.5],
                [threshold, threshold],
                color="black",
                linestyle=(0, (5, 2)),
                label=f"cut at {threshold:g}",
            )
            handles.append(line)
        axes.set_xlim(-0.5, len(matrix) - 0.5)
        axes.set_ylim(low, top)
        axes.set_xticks([])
        axes.yaxis.set_major_locator(MaxNLocator(6, prune="lower" if low < 0 else None))
        axes.grid(False, axis="x")
        axes.set_xlabel("Client" if group is None else "Client, coloured by true group")
        axes.set_ylabel(label)
        legend_above(figure, handles, [handle.get_label() for handle in handles])
    return figure


# ------------------------------------------------------------------------------------------------- parts


def _by_group(
    group: Any | None, count: int, group_names: Sequence[str]
) -> tuple[np.ndarray, list[int], list[float], list[str]]:
    """The clients' order, where each group ends, where its middle is, and its name."""
    if group is None:
        return np.arange(count), [], [], []
    group = np.asarray(group)
    if group.shape != (count,):
        raise ValueError(f"group has shape {group.shape}, but the matrices have {count} clients")
    order = np.argsort(group, kind="stable")
    values, sizes = np.unique(group, return_counts=True)
    ends = np.cumsum(sizes)
    middles = (ends - sizes / 2 - 0.5).tolist()
    return order, ends.tolist(), middles, [_name(int(value), group_names) for value in values]


def _client_ticks(axes: Axes, middles: Sequence[float], names: Sequence[str], count: int) -> None:
    if middles and len(middles) <= 12:
        axes.set_xticks([])
        axes.set_yticks(middles, names)
        axes.tick_params(axis="y", length=0)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlim(-0.5, count - 0.5)
    axes.set_ylim(count - 0.5, -0.5)


def _name(group: int, names: Sequence[str]) -> str:
    if group < 0:
        return "unknown"
    return names[group] if group < len(names) else f"group {group}"


def _check_square(matrix: np.ndarray, name: str, size: int) -> None:
    if matrix.ndim != 2 or matrix.shape != (size, size) or not size:
        raise ValueError(f"{name} has shape {matrix.shape}; all matrices must be [M, M] of the same clients")
    if not np.isfinite(matrix).all():
        raise ValueError(f"{name} has entries that are not finite; leave out the clients that were not compared")
