"""Pictures of recursive splitting: a run with its splits, similarities in the order of clusters, the parameter tree.

Every function returns a `matplotlib.figure.Figure` and neither shows nor saves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedjax_cluster.algorithms.cfl.parameter_tree import ParameterTree
from fedjax_cluster.report.style import (
    DOUBLE,
    FONT_POINTS,
    NEUTRAL,
    SINGLE,
    categorical_colors,
    legend_above,
    line_look,
    new_figure,
    style,
)

GAP = "separation_gap_"
MOST_NAMED = 40
BOUND = "#E69F00"  # stands out from the blues


def split_history(history: Mapping[str, Any]) -> Figure:
    """Draws accuracy with the rounds of splits marked, and the separation gap of every cluster beneath (CFL, Fig. 8).

    Args:
      history: of a run: `round`, `num_clusters`, `accuracy` and, where they were watched, `separation_gap_0` …, one
        column a cluster slot; NaN where there is none.

    Returns:
      The figure, one paper column wide.

    Raises:
      ValueError: no round with an accuracy.
    """
    rounds = np.asarray(history["round"], np.float64) + 1
    accuracy = 100 * np.asarray(history["accuracy"], np.float64)
    known = np.isfinite(accuracy)
    if not known.any():
        raise ValueError("the history has no accuracy in any round; evaluate at least once")
    grown = np.flatnonzero(np.diff(np.asarray(history["num_clusters"], np.float64)) > 0) + 1
    gaps = {name: np.asarray(column) for name, column in history.items() if name.startswith(GAP)}
    gaps = {name: column for name, column in gaps.items() if np.isfinite(column).any()}
    with style():
        figure = new_figure(SINGLE, 3.3 if gaps else 2.1)
        panels = figure.subplots(2 if gaps else 1, 1, sharex=True, squeeze=False)[:, 0]
        panels[0].plot(rounds[known], accuracy[known], color="black", label="mean over clients")
        worst = 100 * np.asarray(history.get("accuracy_worst_decile", np.full(len(rounds), np.nan)), np.float64)
        if np.isfinite(worst).any():
            look = {"color": "black", "linestyle": (0, (1, 1)), "linewidth": 0.9}
            panels[0].plot(rounds[known], worst[known], label="worst tenth", **look)
        panels[0].set_ylabel("Test accuracy (%)")
        for axes in panels:
            for number in grown:
                label = "split" if axes is panels[0] and number == grown[0] else "_split"
                axes.axvline(rounds[number], color=NEUTRAL, linewidth=0.7, linestyle=(0, (3, 2)), zorder=1, label=label)
        if gaps:
            _draw_gaps(panels[1], rounds, gaps)
        lines = [line for axes in panels for line in axes.lines if not str(line.get_label()).startswith("_")]
        legend_above(figure, lines, [str(line.get_label()) for line in lines])
        panels[-1].set_xlabel("Communication round")
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure


def _draw_gaps(axes: Axes, rounds: np.ndarray, gaps: Mapping[str, np.ndarray]) -> None:
    axes.axhline(0, color="black", linewidth=0.6)
    for name, column in gaps.items():
        slot, known = int(name.removeprefix(GAP)), np.isfinite(column)
        look = {**line_look(slot), "marker": None}
        axes.plot(rounds[known], column[known], label=f"cluster {slot}", **look)
    axes.set_ylabel("Separation gap $g(\\alpha)$")


def round_curves(
    series: Mapping[str, tuple[Any, Any]], y_label: str, *, log_y: bool = False, zero: bool | None = None
) -> Figure:
    """Draws quantities against communication rounds.

    Args:
      series: name -> (rounds [n], values [n]).
      y_label: axis label with its unit.
      log_y: logarithmic axis.
      zero: a line at 0; None draws it where values lie on both sides.

    Returns:
      The figure, one paper column wide.

    Raises:
      ValueError: no series.
    """
    if not series:
        raise ValueError("there is no series to draw; give at least one")
    values = np.concatenate([np.asarray(column, np.float64) for _, column in series.values()])
    with style():
        figure = new_figure(SINGLE, 2.2)
        axes = figure.subplots()
        if zero if zero is not None else not log_y and np.nanmin(values) < 0 < np.nanmax(values):
            axes.axhline(0, color="black", linewidth=0.6)
        for index, (name, (rounds, column)) in enumerate(series.items()):
            look = line_look(index)
            axes.plot(rounds, column, label=name, color=look["color"], linestyle=look["linestyle"])
        if log_y:
            axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.set_xlabel("Communication round")
        axes.set_ylabel(y_label)
        legend_above(figure, *axes.get_legend_handles_labels())
    return figure


def split_probability(
    counts: Sequence[int], gammas: Sequence[float], chance: Any, guaranteed: Sequence[float] | None = None
) -> Figure:
    """Draws the chance of a correct split over the number of distributions k and the relative noise γ (CFL, Fig. 3).

    Args:
      counts: the n values of k.
      gammas: the m values of γ, evenly spaced.
      chance: [n, m], in [0, 1].
      guaranteed: [n], the γ up to which Theorem 1 guarantees it.

    Returns:
      The figure, one paper column wide.

    Raises:
      ValueError: a chance of another shape, or outside [0, 1].
    """
    chance = np.asarray(chance, np.float64)
    if chance.shape != (len(counts), len(gammas)) or not ((chance >= 0) & (chance <= 1)).all():
        raise ValueError(f"chance has shape {chance.shape}; give probabilities of shape {(len(counts), len(gammas))}")
    with style():
        figure = new_figure(SINGLE, 2.3)
        axes = figure.subplots()
        places = np.arange(len(counts))
        image = axes.pcolormesh(places, gammas, chance.T, cmap="Blues", vmin=0, vmax=1, shading="nearest")
        if guaranteed is not None:
            axes.plot(places, guaranteed, color=BOUND, marker="o", markersize=3, clip_on=False)
            axes.annotate(
                "guaranteed by Theorem 1",
                (places[-1], guaranteed[-1]),
                (0, 12),
                textcoords="offset points",
                ha="right",
                color=BOUND,
                fontsize=FONT_POINTS,
            )
        axes.set_xticks(places, [str(count) for count in counts])
        axes.set_ylim(0, None)
        axes.grid(False)
        axes.set_xlabel("Number of distributions $k$ ($m = 3k$ clients)")
        axes.set_ylabel("Relative noise $\\gamma$")
        figure.colorbar(image, ax=axes, label="P[correct split]")
    return figure


def ordered_similarity(similarity: Any, labels: Any, group: Any | None = None) -> Figure:
    """Draws a similarity matrix with the clients in the order of their clusters, lines between clusters.

    Args:
      similarity: f32[M, M], cosines.
      labels: i32[M], clusters; clients with −1 are left out.
      group: i32[M], true groups: orders within clusters, and is shown as a strip of colours.

    Returns:
      The figure, one paper column wide.

    Raises:
      ValueError: shapes that do not fit, or no client in a cluster.
    """
    similarity, labels = np.asarray(similarity, np.float64), np.asarray(labels)
    if similarity.ndim != 2 or similarity.shape != (len(labels), len(labels)):
        raise ValueError(f"similarity has shape {similarity.shape} for {len(labels)} labels; it must be [M, M]")
    group = np.zeros(len(labels), int) if group is None else np.asarray(group)
    if group.shape != labels.shape:
        raise ValueError(f"group has shape {group.shape} and labels {labels.shape}; both must be [M]")
    order = np.lexsort((np.arange(len(labels)), group, labels))
    order = order[labels[order] >= 0]
    if not len(order):
        raise ValueError("no client has a cluster; there is nothing to order")
    count, own = len(order), labels[order]
    ends = np.flatnonzero(np.diff(own)) + 1
    with style():
        figure = new_figure(SINGLE, SINGLE * 0.85)
        axes = figure.subplots()
        image = axes.imshow(similarity[np.ix_(order, order)], cmap="RdBu_r", vmin=-1, vmax=1, interpolation="none")
        for end in ends:
            axes.axhline(end - 0.5, color="black", linewidth=0.8)
            axes.axvline(end - 0.5, color="black", linewidth=0.8)
        starts = np.concatenate([[0], ends])
        middles = (starts + np.concatenate([ends, [count]]) - 1) / 2
        axes.set_xticks(middles, [f"cluster {own[start]}" if len(starts) <= 6 else str(own[start]) for start in starts])
        axes.tick_params(length=0)
        axes.grid(False)
        axes.set_yticks(range(count), [str(client) for client in order] if count <= MOST_NAMED else [""] * count)
        axes.set_ylabel("Client")
        if len(np.unique(group[order])) > 1:
            known = np.unique(group[order])
            colors = dict(zip(known.tolist(), categorical_colors(len(known)), strict=True))
            for place, client in enumerate(order):
                axes.plot([count - 0.1] * 2, [place - 0.5, place + 0.5], color=colors[int(group[client])], linewidth=3)
            axes.set_xlim(-0.5, count + 0.3)
            axes.set_xlabel("Clients in the order of clusters; right: true group")
        else:
            axes.set_xlabel("Clients in the order of clusters")
        axes.spines[:].set_visible(False)
        figure.colorbar(image, ax=axes, shrink=0.85, label="Cosine similarity $\\alpha_{ij}$")
    return figure


def parameter_tree(tree: ParameterTree, group_names: Sequence[str] = (), group: Any | None = None) -> Figure:
    """Draws the parameter tree: a box a node, with its clients; edges say in which round it was split off.

    Args:
      tree: from `fedjax_cluster.parameter_tree.parameter_tree`.
      group_names: what the true groups are called.
      group: i32[M], true groups; None leaves them out.

    Returns:
      The figure, two paper columns wide for more than four leaves, else one.
    """
    nodes = tree.nodes
    place: dict[int, float] = {}
    depth = [0] * len(nodes)
    for number, node in enumerate(nodes):
        if node.parent is not None:
            depth[number] = depth[node.parent] + 1
    leaves: list[int] = []

    def lay(number: int) -> float:
        children = nodes[number].children
        if not children:
            leaves.append(number)
            place[number] = float(len(leaves) - 1)
        else:
            place[number] = float(np.mean([lay(child) for child in children]))
        return place[number]

    lay(0)
    with style():
        figure = new_figure(SINGLE if len(leaves) <= 4 else DOUBLE, 0.4 + 0.85 * (max(depth) + 1))
        axes = figure.subplots()
        for number, node in enumerate(nodes):
            x, y = place[number], -float(depth[number])
            for child in node.children:
                axes.plot([x, place[child]], [y, -depth[child]], color=NEUTRAL, linewidth=0.8, zorder=1)
            if node.children:
                since = nodes[node.children[0]].since + 1
                look = {"ha": "center", "va": "center", "fontsize": FONT_POINTS, "color": NEUTRAL, "zorder": 2}
                behind = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
                axes.annotate(f"split in round {since}", (x, y - 0.5), bbox=behind, **look)
            axes.annotate(
                _node_text(node, number, group, group_names),
                (x, y),
                ha="center",
                va="center",
                fontsize=FONT_POINTS,
                bbox={
                    "boxstyle": "round,pad=0.35",
                    "facecolor": "#E8F1F8" if node.children else "#FFF3DC",
                    "edgecolor": NEUTRAL,
                    "linewidth": 0.6,
                },
                zorder=3,
            )
        axes.set_xlim(-0.6, len(leaves) - 0.4)
        axes.set_ylim(-max(depth) - 0.5, 0.5)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.axis("off")
    return figure


def _node_text(node: Any, number: int, group: Any | None, names: Sequence[str]) -> str:
    count = len(node.clients)
    head = "$\\theta^*$" if number == 0 else f"cluster {node.slot}" if not node.children else "$\\theta^*$"
    lines = [head, f"{count} client{'' if count == 1 else 's'}"]
    if group is not None:
        own = np.unique(np.asarray(group)[node.clients])
        own = [int(one) for one in own if one >= 0]
        text = [names[one] if one < len(names) else f"{one}" for one in own]
        if names and len(text) > 2:
            text = [*text[:2], "…"]
        if text:
            lines.append(("" if names else "group " if len(text) == 1 else "groups ") + ", ".join(text))
    return "\n".join(lines)
