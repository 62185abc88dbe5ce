"""Pictures of FLAG, PACFL and FL+HC: the dissimilarities of clients, the search for α, and the dendrogram."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy  # whose parts are loaded when first used
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, MultipleLocator

from fedjax_cluster.clustering.linkage import LINKAGES
from fedjax_cluster.report import style
from fedjax_cluster.report.curves import shared_legend
from fedjax_cluster.report.names import group_label
from fedjax_cluster.report.shown_clients import shown_clients, without_newcomers
from fedjax_cluster.report.similarity_matrix import blocks_of, check_matrix, heat_map, without_diagonal
from fedjax_cluster.types import FinishedRun

BARS = "#BBD3E6"
MOST_NAMED_GROUPS = 12


def figures(run: FinishedRun) -> dict[str, Figure]:
    """The pictures of a run of `flag`, or of `pacfl` or `fl_hc`, of which there are no matrices.

    FLAG: `dissimilarity_matrices`, `dendrogram`, and `threshold_search` where α was searched for. None for a run
    without an event, in which fewer than two clients were compared, or a cohort alone.
    """
    run = without_newcomers(run)
    if not run.events:
        return {}
    content, algorithm = run.events[0].content, run.algorithm
    distance = next((content[name] for name in ("angles", "distance", "proximity") if name in content), None)
    if distance is None:
        return {}
    whose = np.asarray(content["landmarks"]) if "landmarks" in content else np.arange(len(distance))
    # Who joined later, or sent infinities, was compared with nobody: 0 to all would look like everybody.
    compared = np.flatnonzero((content["labels"][whose] >= 0) & (distance.any(1) | ~distance.any()))
    if len(compared) < 2:
        return {}
    pairs, names = np.ix_(compared, compared), run.federation.info.group_names
    group = None if shown_clients(run).group is None else np.asarray(run.federation.group)[whose[compared]]
    tree = functools.partial(dendrogram, distance[pairs], linkage=algorithm.linkage, group=group, group_names=names)
    if "distance" in content:
        found = len(np.unique(content["labels"][compared]))
        label = f"{algorithm.distance.capitalize()} distance at which clusters merge"
        drawn, heading = {"dendrogram": tree(threshold=None, num_clusters=found, label=label)}, ""
    elif "angles" in content:
        # Runs of former versions do not tell the one that was found.
        threshold = content.get("threshold", algorithm.threshold)
        label = "Angle at which clusters merge (degrees)"
        drawn = {"dendrogram": tree(threshold=None if threshold is None else float(threshold), label=label)}
        heading = "Clustering threshold α (degrees)"
    else:
        taken, heading = float(content["thresholds"][int(content["chosen"])]), "Clustering threshold α"
        data, gradient = content["data"][pairs], content["gradient"][pairs]
        drawn = {
            "dissimilarity_matrices": dissimilarity_matrices(
                data, gradient, distance[pairs], group, names, whose="Landmark" if "landmarks" in content else "Client"
            ),
            "dendrogram": tree(threshold=taken),
        }
    if "accuracy" in content and np.isfinite(content["accuracy"]).any():
        thresholds, accuracy, count = (content[name] for name in ("thresholds", "accuracy", "num_clusters"))
        chosen, elbow = int(content["chosen"]), int(content["elbow"])
        drawn["threshold_search"] = threshold_search(thresholds, accuracy, count, chosen, elbow, heading)
    return drawn


def dissimilarity_matrices(
    data: Any,
    gradient: Any,
    proximity: Any,
    group: Any | None = None,
    group_names: Sequence[str] = (),
    *,
    whose: str = "Client",
) -> Figure:
    """Draws FLAG's matrices V, G and A side by side over two paper columns, clients ordered by their true group.

    Args:
      data: f32[M, M], V in degrees.
      gradient: f32[M, M], G in degrees.
      proximity: f32[M, M], A in [0, 1].
      group: i32[M], true groups; lines mark where one ends and the next begins. None keeps the clients' order.
      group_names: what the groups are called.
      whose: what a row is called on the axis.

    Raises:
      ValueError: matrices that are not square, finite and of one size, or a group of another length.
    """
    count = len(np.asarray(data))
    named = {"data": data, "gradient": gradient, "proximity": proximity}
    matrices = [check_matrix(matrix, name, count) for name, matrix in named.items()]
    if group is not None and np.shape(group) != (count,):
        raise ValueError(f"group has shape {np.shape(group)}, but the matrices have {count} clients")
    blocks = blocks_of(np.zeros(count, int) if group is None else np.asarray(group))
    titles = ("Data $V$", "Gradients $G$", "Proximity $A$")
    units = ("weighted angle (degrees)", "angle (degrees)", "scaled, without unit")
    with style.drawing(style.DOUBLE, 3.0) as figure:
        panels = figure.subplots(1, 3, sharey=True)
        for axes, matrix, title, unit in zip(panels, matrices, titles, units, strict=True):
            image = heat_map(axes, without_diagonal(matrix), blocks, "white", cmap="viridis", vmin=0.0)
            axes.set_title(title)
            figure.colorbar(image, ax=axes, location="bottom", shrink=0.9, aspect=30, label=unit)
            if group is not None and len(blocks.values) <= MOST_NAMED_GROUPS:
                axes.set_xticks([])
                axes.set_yticks(blocks.middles, [group_label(value, group_names) for value in blocks.values])
                axes.tick_params(axis="y", length=0)
            else:
                axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
                axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        panels[0].set_ylabel(whose if group is None else f"{whose}, by true group")
    return figure


def threshold_search(
    thresholds: Any,
    accuracy: Any,
    num_clusters: Any,
    chosen: int,
    elbow: int | None = None,
    label: str = "Clustering threshold α",
) -> Figure:
    """Draws the held-out accuracy and the number of clusters against the clustering threshold α (FLAG, Fig. 1).

    Args:
      thresholds: f32[T], α, descending; it falls from left to right.
      accuracy: f32[T] in [0, 1]; NaN where no model was trained.
      num_clusters: i32[T].
      chosen: index of the α that was taken.
      elbow: index of the elbow, which is not taken where it gives more clusters than there are slots; None is `chosen`.
      label: of the horizontal axis, with the thresholds' unit.

    Raises:
      ValueError: lengths that differ, or `chosen` out of range.
    """
    alpha, mean, count = (np.asarray(values, np.float64) for values in (thresholds, accuracy, num_clusters))
    if alpha.ndim != 1 or not alpha.shape == mean.shape == count.shape or not len(alpha):
        shapes = f"thresholds, accuracy and num_clusters have shapes {alpha.shape}, {mean.shape} and {count.shape}"
        raise ValueError(f"{shapes}; give three lists of the same length")
    if not 0 <= int(chosen) < len(alpha):
        raise ValueError(f"chosen is {chosen}, but there are {len(alpha)} thresholds")
    step = float(np.min(np.abs(np.diff(alpha)))) if len(alpha) > 1 else 0.1
    with style.drawing(style.SINGLE, 2.1) as figure:
        bars = figure.subplots()
        axes = bars.twinx()
        bars.bar(alpha, count, width=0.7 * step, color=BARS, label="number of clusters", zorder=1)
        most = 1.6 * count.max()
        bars.set(yscale="log", ylim=(0.8, most), ylabel="Number of clusters")
        style.ticks_at(bars.yaxis, [tick for tick in style.LOG_TICKS if tick <= most])
        bars.grid(False)
        axes.plot(alpha, 100 * mean, color=style.COLORS[1], marker="o", label="held-out accuracy", zorder=3)
        if np.isfinite(mean[int(chosen)]):
            ring = {"markersize": 8, "markerfacecolor": "none", "markeredgecolor": "black", "markeredgewidth": 1.0}
            taken = f"{'elbow' if elbow in (None, chosen) else 'taken'}, α = {alpha[int(chosen)]:.4g}"
            axes.plot(alpha[int(chosen)], 100 * mean[int(chosen)], "o", label=taken, zorder=4, **ring)
        axes.set_ylabel("Held-out accuracy (%)")
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.grid(True, axis="y")
        bars.yaxis.set_label_position("right")
        bars.yaxis.tick_right()
        axes.yaxis.set_label_position("left")
        axes.yaxis.tick_left()
        for panel in (axes, bars):
            panel.spines[:].set_visible(False)
        axes.spines[["left", "bottom"]].set_visible(True)
        bars.set(xlim=(alpha.max() + 0.7 * step, alpha.min() - 0.7 * step), xlabel=label)
        bars.xaxis.set_major_locator(MultipleLocator(0.2) if alpha.max() <= 1 else MaxNLocator(6))
        shared_legend(figure, (axes, bars))
    return figure


def dendrogram(
    distance: Any,
    *,
    threshold: float | None = None,
    num_clusters: int | None = None,
    linkage: str = "average",
    group: Any | None = None,
    group_names: Sequence[str] = (),
    label: str = "Distance at which clusters merge",
) -> Figure:
    """Draws the dendrogram of agglomerative clustering over a strip with the true groups, two paper columns wide.

    Args:
      distance: f32[M, M], symmetric, at least two clients.
      threshold: height of the cut, drawn as a line.
      num_clusters: or how many clusters the cut leaves; it is drawn midway between two merges.
      linkage: "average", "single", "complete" or "ward".
      group: i32[M], true groups, coloured in the strip under the tree.
      group_names: what the groups are called.
      label: of the vertical axis, with the distances' unit.

    Raises:
      ValueError: a matrix that is not square and finite, fewer than two clients, an unknown linkage.
    """
    matrix = check_matrix(distance, "distance", len(distance))
    if len(matrix) < 2:
        raise ValueError("distance has a single client; a tree needs at least two")
    if linkage not in LINKAGES:
        raise ValueError(f"linkage is {linkage!r}; it must be one of {', '.join(LINKAGES)}")
    symmetric = 0.5 * (matrix + matrix.T)
    np.fill_diagonal(symmetric, 0.0)
    merges = scipy.cluster.hierarchy.linkage(scipy.spatial.distance.squareform(symmetric, checks=False), linkage)
    if num_clusters is not None and 1 < num_clusters <= len(merges):
        threshold = float(merges[-num_clusters : len(merges) + 2 - num_clusters, 2].mean())
    drawing = scipy.cluster.hierarchy.dendrogram(merges, no_plot=True)
    # SciPy puts leaf i at 10 i + 5.
    paths = list(np.stack([(np.asarray(drawing["icoord"]) - 5) / 10, drawing["dcoord"]], axis=-1))
    handles: list[Any] = []
    with style.drawing(style.DOUBLE, 2.5) as figure:
        axes = figure.subplots()
        axes.add_collection(LineCollection(paths, colors=style.NEUTRAL, linewidths=0.7))
        top = 1.05 * max(merges[:, 2].max(), 0.0 if threshold is None else threshold)
        low = 0.0 if group is None else -0.09 * top
        if group is not None:
            colors = style.value_colors(group)
            for place, client in enumerate(drawing["leaves"]):
                color = colors[int(np.asarray(group)[client])]
                axes.axvspan(place - 0.5, place + 0.5, 0.012, 0.062, color=color, linewidth=0)
            handles = [Patch(color=color, label=group_label(value, group_names)) for value, color in colors.items()]
        if threshold is not None:
            text = f"cut at {threshold:.3g}{'°' if 'degrees' in label else ''}"
            cut = {"color": "black", "linestyle": style.DASHED, "linewidth": 0.9, "label": text}
            handles += axes.plot([-0.5, len(matrix) - 0.5], 2 * [threshold], **cut)
        axes.set(xlim=(-0.5, len(matrix) - 0.5), ylim=(low, top), xticks=[], ylabel=label)
        axes.set_xlabel("Client" if group is None else "Client, coloured by true group")
        axes.yaxis.set_major_locator(MaxNLocator(6, prune="lower" if low < 0 else None))
        axes.grid(False, axis="x")
        style.legend_above(figure, handles, [handle.get_label() for handle in handles])
    return figure
