"""Pictures of clients: their features, and their true groups against their clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedjax_cluster.report import style
from fedjax_cluster.report.names import group_label

NAME_WIDTH = 16
NOBODY = "#757575"  # a zero on white, 4.6 to 1
LEGEND_LINES = 24  # in one column
HEADINGS = ("True group", "Cluster")
NO_CLUSTER = "$?$"


def client_features(features: Any, group: Any | None, labels: Any, group_names: Sequence[str] = ()) -> Figure:
    """Draws every client at its features, coloured by true group, its marker by cluster.

    Three features make two panels (1–2 and 1–3), four or more 1–2 and 3–4, over two paper columns; a single one is
    drawn against the clients' indices.

    Args:
      features: f32[M, r], the embedding.
      group: i32[M], true groups, −1 where unknown; None colours by cluster.
      labels: i32[M], clusters, −1 for a client without one.
      group_names: what the groups are called; "group 3" where there is no name.

    Raises:
      ValueError: features that are not a finite [M, r], or other lengths.
    """
    points, group, labels = _check_clients(features, group, labels)
    by = labels if group is None else group
    looks = Looks(style.value_colors(by), _markers(labels))
    pairs = _pairs(points.shape[1])
    entries = _legend_entries(looks, None if group is None else group_names)
    lines = sum(name.count("\n") + 1 for _, name in entries)
    columns = -(-lines // LEGEND_LINES)
    width = style.SINGLE if len(pairs) == columns == 1 else style.DOUBLE
    with style.drawing(width, max(2.6, style.LINE_INCHES * -(-lines // columns) + 0.2)) as figure:
        panels = figure.subplots(1, len(pairs), squeeze=False)[0]
        for axes, (across, up) in zip(panels, pairs, strict=True):
            _scatter(axes, points, across, up, by, labels, looks)
        legend = figure.legend(*zip(*entries, strict=True), loc="outside right upper", handlelength=1, ncols=columns)
        for text in legend.get_texts():
            if text.get_text() in HEADINGS:
                text.set_fontweight("bold")
    return figure


def group_by_cluster(group: Any, labels: Any, group_names: Sequence[str] = ()) -> Figure:
    """Draws the number of clients of each true group in each cluster as a heat table.

    Args:
      group: i32[M], true groups; clients with −1 are left out.
      labels: i32[M], clusters; −1 stands in a column "none".
      group_names: what the groups are called; "group 3" where there is no name.

    Raises:
      ValueError: other lengths, or no client with a known group.
    """
    group, labels = np.asarray(group), np.asarray(labels)
    if group.ndim != 1 or group.shape != labels.shape:
        raise ValueError(f"group has shape {group.shape} and labels {labels.shape}; both must be [M]")
    group, labels = group[group >= 0], labels[group >= 0]
    if not len(group):
        raise ValueError("no client has a true group; the table needs at least one")
    rows, columns = np.unique(group), np.asarray(style.distinct(labels))
    counts = np.asarray([[np.sum((group == row) & (labels == column)) for column in columns] for row in rows])
    names = [style.wrapped(group_label(row, group_names), NAME_WIDTH) for row in rows]
    margin = 0.75 + 0.055 * max(len(line) for name in names for line in name.split("\n"))
    # Cells fill the column, as high as their names ask, and never so narrow that a count does not fit.
    cell = max((style.SINGLE - margin) / len(columns), 0.3)
    high = max(0.26, style.LINE_INCHES * max(name.count("\n") + 1 for name in names) + 0.05)
    with style.drawing(margin + cell * len(columns), 0.65 + high * len(rows)) as figure:
        axes = figure.subplots()
        mesh = axes.pcolormesh(counts, cmap="Blues", vmin=0, vmax=1.25 * counts.max(), edgecolors="white", linewidth=1)
        for (row, column), count in np.ndenumerate(counts):
            tone = style.ink_on(mesh.to_rgba(count)) if count else NOBODY
            axes.text(column + 0.5, row + 0.5, str(count), ha="center", va="center_baseline", color=tone)
        axes.set_xticks(np.arange(len(columns)) + 0.5, ["none" if column < 0 else str(column) for column in columns])
        axes.set_yticks(np.arange(len(rows)) + 0.5, names)
        axes.tick_params(length=0)
        axes.invert_yaxis()
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.set(xlabel="Cluster (entries: number of clients)", ylabel="True group")
    return figure


class Looks(NamedTuple):
    """What tells clients apart."""

    colors: dict[int, str]  # of the true groups, or of the clusters where there are none
    markers: dict[int, str]  # of the clusters


def _pairs(rank: int) -> list[tuple[int, int | None]]:
    """The features across and up of each panel; None is the client's index."""
    few: dict[int, list[tuple[int, int | None]]] = {1: [(0, None)], 2: [(0, 1)], 3: [(0, 1), (0, 2)]}
    return few.get(rank, [(0, 1), (2, 3)])


def _scatter(
    axes: Axes, points: np.ndarray, across: int, up: int | None, by: np.ndarray, labels: np.ndarray, looks: Looks
) -> None:
    vertical = np.arange(len(points)) if up is None else points[:, up]
    size = float(np.clip(2500 / len(points), 7, 20))
    for label, marker in looks.markers.items():
        members = labels == label
        outlined = len(points) <= 200 and not _is_number(marker)
        axes.scatter(
            points[members, across],
            vertical[members],
            # A number is as wide as any marker, so that its digits get smaller with their count.
            s=1.5 * len(str(label)) * size if _is_number(marker) else size,
            marker=marker,
            c=[looks.colors[int(value)] for value in by[members]],
            edgecolors="white" if outlined else "none",
            linewidths=0.3,
            alpha=0.9,
        )
    axes.set(xlabel=f"Feature {across + 1}", ylabel="Client" if up is None else f"Feature {up + 1}")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=up is None))
    if up is not None:
        # Distances are what k-means sees, so both axes have the same scale.
        axes.set_aspect("equal", adjustable="datalim")


def _legend_entries(looks: Looks, group_names: Sequence[str] | None) -> list[tuple[Line2D, str]]:
    """One legend for colours and markers, with headings between; without groups, colour and marker go together."""

    def entry(name: str, color: str, marker: str) -> tuple[Line2D, str]:
        dot = Line2D([], [], linestyle="none", marker=marker, color=color, markersize=4.5, markeredgewidth=0)
        return dot, name

    def heading(name: str) -> tuple[Line2D, str]:
        return Line2D([], [], linestyle="none"), name

    clusters = {label: "none" if label < 0 else str(label) for label in looks.markers}
    if any(map(_is_number, looks.markers.values())):
        first = min(label for label in clusters if label >= 0)
        clusters = {label: "as numbered" if label == first else "none" for label in clusters if label in (first, -1)}
    if group_names is None:
        pairs = [entry(clusters[label], looks.colors[label], looks.markers[label]) for label in clusters]
        return [heading(HEADINGS[1]), *pairs]
    groups = {group: style.wrapped(group_label(group, group_names), NAME_WIDTH) for group in looks.colors}
    return [
        heading(HEADINGS[0]),
        *(entry(name, looks.colors[group], "o") for group, name in groups.items()),
        heading(""),
        heading(HEADINGS[1]),
        *(entry(name, style.NEUTRAL, looks.markers[label]) for label, name in clusters.items()),
    ]


def _markers(labels: np.ndarray) -> dict[int, str]:
    known = style.distinct(labels)
    # More clusters than markers are told apart by their numbers.
    plain = [f"${label}$" for label in known] if len(known) > len(style.MARKERS) else style.MARKERS
    return {label: NO_CLUSTER if label < 0 else plain[index] for index, label in enumerate(known)}


def _is_number(marker: str) -> bool:
    return marker.strip("$").isdigit()


def _check_clients(features: Any, group: Any | None, labels: Any) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    points, labels = np.asarray(features, np.float64), np.asarray(labels)
    if points.ndim != 2 or 0 in points.shape:
        raise ValueError(f"features has shape {points.shape}; give [M, r] with at least one client and one feature")
    if not np.isfinite(points).all():
        missing = int(np.flatnonzero(~np.isfinite(points).all(axis=1))[0])
        raise ValueError(f"the features of client {missing} are not finite; leave out the clients without features")
    group = None if group is None else np.asarray(group)
    for name, values in (("labels", labels), ("group", group)):
        if values is not None and values.shape != (len(points),):
            raise ValueError(f"{name} has shape {values.shape}, but features has {len(points)} clients")
    return points, group, labels
