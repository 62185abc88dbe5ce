"""Pictures of CFL: a run with its splits, the similarities at the last one, the parameter tree.

Every function that returns a `matplotlib.figure.Figure` neither shows nor saves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedjax_cluster.algorithms.cfl import parameter_tree as trees
from fedjax_cluster.report.curves import round_axis, shared_legend, stacked_panels
from fedjax_cluster.report.finished_run import FinishedRun, shown_clients
from fedjax_cluster.report.histories import chosen_metric, column_label
from fedjax_cluster.report.similarity_matrix import similarity_matrix
from fedjax_cluster.report.style import (
    DASHED,
    DOUBLE,
    FONT_POINTS,
    NEUTRAL,
    SINGLE,
    line_look,
    new_figure,
    style,
)

GAP = "separation_gap_"
BOUND = "#E69F00"  # stands out from the blues
LEAF_INCHES = 0.75


def figures(run: FinishedRun) -> dict[str, Figure]:
    """The pictures of a run of `cfl`.

    `split_history` always; `similarity_matrix` of the last split, or else of the last round in which a cluster met the
    criteria; `parameter_tree` where there was a split.
    """
    index, labels, group, names = shown_clients(run)
    drawn = {"split_history": split_history(run.history)}
    splits = [event.content for event in run.events if len(event.content["child"])]
    similarity = splits[-1]["similarity"] if splits else np.asarray(run.state.server.similarity)
    if splits:
        labels = splits[-1]["labels"][index]
    if similarity.any() and (labels >= 0).any():
        drawn["similarity_matrix"] = similarity_matrix(similarity[np.ix_(index, index)], labels, group, names)
    if splits:
        known = None if group is None else run.federation.group
        drawn["parameter_tree"] = parameter_tree(trees.parameter_tree(run), names, known)
    return drawn


def split_history(history: Mapping[str, Any]) -> Figure:
    """Draws accuracy with the rounds of splits marked, and the separation gap of every cluster beneath (CFL, Fig. 8).

    Args:
      history: of a run: `round`, `num_clusters`, `accuracy` (or `test_loss`, or `loss`) and, where they were watched,
        `separation_gap_0` …, one column a cluster slot; NaN where there is none.

    Returns:
      The figure, one paper column wide; rounds count from 1.

    Raises:
      ValueError: no round with an accuracy or a loss.
    """
    metric = chosen_metric({"cfl": [history]}, None)
    label, factor = column_label(metric)
    rounds = np.asarray(history["round"], np.float64) + 1
    grown = np.flatnonzero(np.diff(np.asarray(history["num_clusters"], np.float64)) > 0) + 1
    gaps = {name: np.asarray(column) for name, column in history.items() if name.startswith(GAP)}
    gaps = {name: column for name, column in gaps.items() if np.isfinite(column).any()}
    dotted = {"linestyle": (0, (1, 1)), "linewidth": 0.9}
    curves = {metric: ("mean over clients", {}), "accuracy_worst_decile": ("worst tenth", dotted)}
    with style():
        figure = new_figure(SINGLE, 3.3 if gaps else 2.1)
        panels = stacked_panels(figure, 2 if gaps else 1)
        for name, (text, look) in curves.items():
            values = factor * np.asarray(history.get(name, np.full(len(rounds), np.nan)), np.float64)
            known = np.isfinite(values)
            if known.any():
                panels[0].plot(rounds[known], values[known], color="black", label=text, **look)
        panels[0].set_ylabel(label)
        for axes in panels:
            for place in rounds[grown]:
                axes.axvline(place, color=NEUTRAL, linewidth=0.7, linestyle=DASHED, zorder=1, label="split")
        if gaps:
            _draw_gaps(panels[1], rounds, gaps)
        round_axis(panels[-1])
        shared_legend(figure, panels)
    return figure


def _draw_gaps(axes: Axes, rounds: np.ndarray, gaps: Mapping[str, np.ndarray]) -> None:
    axes.axhline(0, color="black", linewidth=0.6)
    for name, column in gaps.items():
        slot, known = int(name.removeprefix(GAP)), np.isfinite(column)
        axes.plot(rounds[known], column[known], label=f"cluster {slot}", **{**line_look(slot), "marker": None})
    axes.set_ylabel("Separation gap $g(\\alpha)$")


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


def parameter_tree(tree: trees.ParameterTree, group_names: Sequence[str] = (), group: Any | None = None) -> Figure:
    """Draws the parameter tree: a box a node, with its clients; edges say in which round it was split off.

    Args:
      tree: from `fedjax_cluster.algorithms.cfl.parameter_tree`.
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
