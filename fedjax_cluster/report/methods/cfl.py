"""Pictures of CFL: a run with its splits, the similarities at the last one, the parameter tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedjax_cluster.algorithms.cfl import parameter_tree as trees
from fedjax_cluster.report import style
from fedjax_cluster.report.curves import round_axis, shared_legend
from fedjax_cluster.report.histories import chosen_metric, column_label
from fedjax_cluster.report.names import group_label
from fedjax_cluster.report.shown_clients import shown_clients, without_newcomers
from fedjax_cluster.report.similarity_matrix import similarity_matrix
from fedjax_cluster.types import FinishedRun

GAP = "separation_gap_"
BOUND = "#E69F00"  # stands out from the blues
LEAF_INCHES = 0.75


def figures(run: FinishedRun) -> dict[str, Figure]:
    """The pictures of a run of `cfl`.

    `split_history` always; `similarity_matrix` of the last split, or else of the last round in which a cluster met the
    criteria; `parameter_tree` where there was a split.
    """
    run = without_newcomers(run)
    index, _, group, names = shown_clients(run)
    of_splits = [event for event in run.events if len(event.content["child"])]
    splits = [event.content for event in of_splits]
    drawn = {"split_history": split_history(run.history, sorted({event.round for event in of_splits}))}
    similarity = splits[-1]["similarity"] if splits else np.asarray(run.state.server.similarity)
    known = None if group is None else run.federation.group
    if splits:
        drawn["parameter_tree"] = parameter_tree(trees.parameter_tree(run), names, known)
    landmarks = getattr(run.state.server, "landmarks", None)
    rows = index
    if landmarks is not None:  # of whom alone there are similarities
        index = np.asarray(landmarks)
        rows, group = np.arange(len(index)), None if known is None else np.asarray(known)[index]
    labels = (splits[-1]["labels"] if splits else np.asarray(run.labels))[index]
    if similarity.any() and np.isfinite(similarity).all() and (labels >= 0).any():
        drawn["similarity_matrix"] = similarity_matrix(
            similarity[np.ix_(rows, rows)], labels, group, names, index=index
        )
    return drawn


def split_history(history: Mapping[str, Any], splits: Sequence[int] | None = None) -> Figure:
    """Draws accuracy with the rounds of splits marked, and the separation gap of every cluster beneath (CFL, Fig. 8).

    Args:
      history: of a run: `round`, `num_clusters`, `accuracy` (or `test_loss`, or `loss`) and, where they were watched,
        `separation_gap_0` …, one column a cluster slot; NaN where there is none. Rounds are drawn from 1.
      splits: the rounds of the splits, counted from 0; None takes those with more clusters than before.

    Raises:
      ValueError: no round with an accuracy or a loss.
    """
    metric = chosen_metric({"cfl": [history]}, None)
    label, factor = column_label(metric)
    rounds = np.asarray(history["round"], np.float64) + 1
    counts = np.asarray(history["num_clusters"], np.float64)
    told = np.flatnonzero(np.isfinite(counts))  # of very many clients not in every round
    grown = rounds[told][np.diff(counts[told], prepend=1) > 0] if splits is None else np.asarray(splits) + 1
    gaps = {name: np.asarray(column) for name, column in history.items() if name.startswith(GAP)}
    gaps = {name: column for name, column in gaps.items() if np.isfinite(column).any()}
    dotted = {"linestyle": (0, (1, 1)), "linewidth": 0.9}
    # The worst tenth is one of all clients, the faulty among them.
    honest = metric.endswith("_honest")
    tenth = {} if honest else {"accuracy_worst_decile": ("worst tenth", dotted)}
    curves = {metric: (f"mean over {'honest ' if honest else ''}clients", {}), **tenth}
    with style.drawing(style.SINGLE, 3.3 if gaps else 2.1) as figure:
        panels = figure.subplots(2 if gaps else 1, 1, sharex=True, squeeze=False)[:, 0]
        for name, (text, look) in curves.items():
            values = factor * np.asarray(history.get(name, np.full(len(rounds), np.nan)), np.float64)
            known = np.isfinite(values)
            if known.any():
                panels[0].plot(rounds[known], values[known], color="black", label=text, **look)
        panels[0].set_ylabel(label)
        for axes in panels:
            for place in grown:
                axes.axvline(place, label="split", **style.GUIDE)
        if gaps:
            _draw_gaps(panels[1], rounds, gaps)
        round_axis(panels[-1])
        shared_legend(figure, panels)
    return figure


def _draw_gaps(axes: Axes, rounds: np.ndarray, gaps: Mapping[str, np.ndarray]) -> None:
    axes.axhline(0, color="black", linewidth=0.6)
    for name, column in gaps.items():
        slot, known = int(name.removeprefix(GAP)), np.isfinite(column)
        axes.plot(rounds[known], column[known], label=f"cluster {slot}", **{**style.line_look(slot), "marker": None})
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

    Raises:
      ValueError: a chance of another shape, or outside [0, 1].
    """
    chance = np.asarray(chance, np.float64)
    if chance.shape != (len(counts), len(gammas)) or not ((chance >= 0) & (chance <= 1)).all():
        raise ValueError(f"chance has shape {chance.shape}; give probabilities of shape {(len(counts), len(gammas))}")
    with style.drawing(style.SINGLE, 2.3) as figure:
        axes = figure.subplots()
        places = np.arange(len(counts))
        image = axes.pcolormesh(places, gammas, chance.T, cmap="Blues", vmin=0, vmax=1, shading="nearest")
        if guaranteed is not None:
            axes.plot(places, guaranteed, color=BOUND, marker="o", markersize=3, clip_on=False)
            look = {"textcoords": "offset points", "ha": "right", "color": BOUND, "fontsize": style.FONT_POINTS}
            axes.annotate("guaranteed by Theorem 1", (places[-1], guaranteed[-1]), (0, 12), **look)
        axes.set_xticks(places, [str(count) for count in counts])
        axes.set_ylim(0, None)
        axes.grid(False)
        axes.set(xlabel="Number of distributions $k$ ($m = 3k$ clients)", ylabel="Relative noise $\\gamma$")
        figure.colorbar(image, ax=axes, label="P[correct split]")
    return figure


def parameter_tree(tree: trees.ParameterTree, group_names: Sequence[str] = (), group: Any | None = None) -> Figure:
    """Draws the parameter tree: a box for each node with its clients, and the rounds of the splits, counted from 1.

    Two columns wide for more than four leaves, or as many as they need.

    Args:
      tree: from `fedjax_cluster.algorithms.cfl.parameter_tree`.
      group_names: what the true groups are called.
      group: i32[M], true groups; None leaves them out.
    """
    nodes = tree.nodes
    place: dict[int, float] = {}
    depth: list[int] = []
    for node in nodes:
        depth.append(0 if node.parent is None else depth[node.parent] + 1)

    def lay_out(index: int, leaves: int) -> int:
        """Places a node and those below it, right of so many leaves; returns how many there are then."""
        first, children = leaves, nodes[index].children
        for child in children:
            leaves = lay_out(child, leaves)
        place[index] = float(np.mean([place[child] for child in children])) if children else float(first)
        return leaves if children else leaves + 1

    count = lay_out(0, 0)
    width = style.SINGLE if count <= 4 else max(style.DOUBLE, LEAF_INCHES * count)
    text = {"ha": "center", "va": "center", "fontsize": style.FONT_POINTS}
    split = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    box = {"boxstyle": "round,pad=0.35", "edgecolor": style.NEUTRAL, "linewidth": 0.6}
    with style.drawing(width, 0.4 + 0.85 * (max(depth) + 1)) as figure:
        axes = figure.subplots()
        for index, node in enumerate(nodes):
            x, y = place[index], -float(depth[index])
            for child in node.children:
                axes.plot([x, place[child]], [y, y - 1], color=style.NEUTRAL, linewidth=0.8, zorder=1)
            if node.children:
                since = f"split in round {nodes[node.children[0]].since + 1}"
                axes.annotate(since, (x, y - 0.5), bbox=split, color=style.NEUTRAL, zorder=2, **text)
            colored = {**box, "facecolor": "#E8F1F8" if node.children else "#FFF3DC"}
            who = "landmark" if node.children and hasattr(tree.state.server, "landmarks") else "client"
            axes.annotate(_node_text(node, who, group, group_names), (x, y), bbox=colored, zorder=3, **text)
        axes.set(xlim=(-0.6, count - 0.4), ylim=(-max(depth) - 0.5, 0.5), xticks=[], yticks=[])
        axes.axis("off")
    return figure


def _node_text(node: trees.Node, who: str, group: Any | None, names: Sequence[str]) -> str:
    count = len(node.clients)
    head = f"cluster {node.slot}" if node.parent is not None and not node.children else "$\\theta^*$"
    lines = [head, f"{count} {who}{'' if count == 1 else 's'}"]
    known = [] if group is None else [int(value) for value in np.unique(np.asarray(group)[node.clients]) if value >= 0]
    if known and names:
        lines.append(", ".join([group_label(value, names) for value in known[:2]] + ["…"] * (len(known) > 2)))
    elif known:
        lines.append(f"group{'' if len(known) == 1 else 's'} {', '.join(map(str, known))}")
    return "\n".join(lines)
