"""Pictures of FedGWC: interactions and affinity, their embedding, convergence, and classes in the final clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster.data.stored import stored
from fedjax_cluster.report import style
from fedjax_cluster.report.clusters import client_features
from fedjax_cluster.report.curves import draw_line, round_axis
from fedjax_cluster.report.names import class_labels
from fedjax_cluster.report.shown_clients import shown_clients, without_newcomers
from fedjax_cluster.report.similarity_matrix import check_matrix, clients_by_cluster, heat_map, without_diagonal
from fedjax_cluster.types import Federation, FinishedRun

MOST_SPLITS = 4  # drawn one by one
MOST_CLASSES_NAMED = 20
MARKED_POINTS = 15  # of a line
FEWEST_EMBEDDED = 3  # clients


def figures(run: FinishedRun) -> dict[str, Figure]:
    """The pictures of a run of `fedgwc`.

    `interaction_matrices` and `spectral_embedding` for each of the first four splits, of the clients that it divided:
    the second split's names end in `_2`, and so on. Without a split they show the final state. `convergence` always;
    for classification `class_distributions` of the final clusters.
    """
    run = without_newcomers(run)
    splits = [event.content for event in run.events if (event.content["labels"] != event.content["previous"]).any()]
    drawn: dict[str, Figure] = {}
    for place, content in enumerate(splits[:MOST_SPLITS] or [run.algorithm.snapshot(jax.device_get(run.state))]):
        ending = f"_{place + 1}" if place else ""
        drawn |= {name + ending: figure for name, figure in _of_one_test(run, content).items()}
    rounds = [event.round + 1 for event in run.events]
    drawn["convergence"] = convergence(_known_averages(run), run.algorithm.tolerance, rounds)
    info = run.federation.info
    of_classes = info.task == "classification" and np.ndim(run.federation.train.y) == 2
    if of_classes and not stored(run.federation) and (run.labels >= 0).any():
        drawn["class_distributions"] = class_distributions(_class_counts(run.federation), run.labels, info.class_names)
    return drawn


def _of_one_test(run: FinishedRun, content: Mapping[str, Any]) -> dict[str, Figure]:
    """P, W and the embedding of the clients whose cluster was tested."""
    index, _, group, names = shown_clients(run)
    place = index
    if "landmarks" in content:  # of whom alone there are matrices
        index = np.asarray(content["landmarks"])
        place, group = np.arange(len(index)), None if group is None else np.asarray(run.federation.group)[index]
    previous, labels = (np.asarray(content[name])[index] for name in ("previous", "labels"))
    labels = np.where(previous == content["parent"], labels, -1)
    interactions, affinity = (np.asarray(content[name])[np.ix_(place, place)] for name in ("interactions", "affinity"))
    if not ((labels >= 0).any() and np.isfinite(interactions).all() and np.isfinite(affinity).all()):
        return {}
    drawn = {"interaction_matrices": interaction_matrices(interactions, affinity, labels, group)}
    if (labels >= 0).sum() >= FEWEST_EMBEDDED:
        drawn["spectral_embedding"] = spectral_embedding(affinity, labels, group, names)
    return drawn


def _known_averages(run: FinishedRun) -> dict[int, tuple[list[float], list[float]]]:
    """Rounds done and running average of each cluster where these are known: 1 at its start, at a test, at the end."""
    known: dict[int, tuple[list[float], list[float]]] = {0: ([0.0], [1.0])}

    def note(cluster: int, at: int, *values: float) -> None:
        rounds, averages = known.setdefault(cluster, ([], []))
        rounds += [at] * len(values)
        averages += values

    for event in run.events:
        parent, labels = int(event.content["parent"]), event.content["labels"]
        # Afterwards it starts from 1 again; NaN breaks the line.
        note(parent, event.round + 1, float(event.content["average"]), np.nan, 1.0)
        for child in np.unique(labels[labels != event.content["previous"]]):
            note(int(child), event.round + 1, 1.0)
    averages = np.asarray(run.state.server.average)
    for cluster in np.flatnonzero(np.asarray(run.state.clusters.active)):
        note(int(cluster), len(run.history["round"]), float(averages[cluster]))
    return known


def _class_counts(federation: Federation) -> np.ndarray:
    """i64[M, L]: training examples of each class."""
    y, count, classes = np.asarray(federation.train.y), federation.train.num_examples, federation.info.num_classes
    return np.stack([np.bincount(row[:n], minlength=classes) for row, n in zip(y, count, strict=True)])


def interaction_matrices(interactions: Any, affinity: Any, labels: Any, group: Any | None = None) -> Figure:
    """Draws P and W side by side over two paper columns, clients ordered by cluster (FedGWC, Figs. 5, 6 and 8).

    Args:
      interactions: f32[M, M], P.
      affinity: f32[M, M], W.
      labels: i32[M], clusters; clients with −1 are left out.
      group: i32[M], true groups: orders within clusters; None orders by cluster only.

    Raises:
      ValueError: matrices that are not both finite and [M, M] for the M labels, or nobody in a cluster.
    """
    labels = np.asarray(labels)
    named = {"interactions": interactions, "affinity": affinity}
    matrices = [check_matrix(matrix, name, len(labels)) for name, matrix in named.items()]
    kept, blocks = clients_by_cluster(labels, group)
    with style.drawing(style.DOUBLE, 2.9) as figure:
        panels = figure.subplots(1, 2)
        for axes, matrix, name in zip(panels, matrices, ("Interaction $P_{ij}$", "Affinity $W_{ij}$"), strict=True):
            shown = without_diagonal(matrix[np.ix_(kept, kept)])
            # A few extreme pairs would leave all others in one tone.
            low, high = np.nanpercentile(shown, [1, 99]) if len(kept) > 1 else (0.0, 1.0)
            image = heat_map(axes, shown, blocks, "white", cmap="viridis", vmin=low, vmax=max(high, low + 1e-6))
            figure.colorbar(image, ax=axes, label=name, extend="both")
            axes.set_xticks(blocks.middles, blocks.names)
            axes.set_yticks(blocks.middles, blocks.names)
            axes.tick_params(length=0)
            axes.set_xlabel("Client $j$, by cluster")
        panels[0].set_ylabel("Client $i$, by cluster")
    return figure


def spectral_embedding(affinity: Any, labels: Any, group: Any | None = None, group_names: Sequence[str] = ()) -> Figure:
    """Draws the clients of one cluster in the plane of the affinity's second and third eigenvectors (Fig. 3).

    Args:
      affinity: f32[M, M], W.
      labels: i32[M], the clusters that the clients were divided into; clients with −1 are left out.
      group: i32[M], true groups; None colours by cluster.
      group_names: what the groups are called.

    Raises:
      ValueError: an affinity that is not finite and [M, M] for the M labels, or fewer than three clients.
    """
    labels = np.asarray(labels)
    affinity, inside = check_matrix(affinity, "affinity", len(labels)), labels >= 0
    if inside.sum() < FEWEST_EMBEDDED:
        raise ValueError(f"the affinity holds {inside.sum()} clients; a plane needs at least three")
    points = embedding(affinity[np.ix_(inside, inside)])
    figure = client_features(points, None if group is None else np.asarray(group)[inside], labels[inside], group_names)
    figure.axes[0].set(xlabel="Second eigenvector of $W$", ylabel="Third eigenvector of $W$")
    return figure


def embedding(affinity: np.ndarray) -> np.ndarray:
    """The clients in the plane of the second and third eigenvectors, f64[M, 2] within ±1.

    Args:
      affinity: f64[M, M], W, of at least three clients.
    """
    weights = affinity * (1 - np.eye(len(affinity)))
    root = 1 / np.sqrt(np.maximum(weights.sum(1), 1e-30))
    vectors = np.linalg.eigh(weights * root[:, None] * root[None])[1]
    points = (vectors * root[:, None])[:, [-2, -3]]
    return points / np.abs(points).max()


def convergence(
    averages: Mapping[int, tuple[Sequence[float], Sequence[float]]], tolerance: float, tests: Sequence[int] = ()
) -> Figure:
    """Draws the running average of P's mean squared change in each cluster against rounds (Fig. 4).

    Args:
      averages: cluster -> (rounds done [n], running averages [n]), joined by a line that NaN breaks.
      tolerance: ε, drawn as a dashed line.
      tests: rounds of splits and of refused ones, drawn as dotted lines.

    Raises:
      ValueError: lists of different lengths, or no value above 0.
    """
    for cluster, (rounds, values) in averages.items():
        if len(rounds) != len(values):
            counts = f"{len(rounds)} rounds and {len(values)} averages"
            raise ValueError(f"cluster {cluster} has {counts}; give one for each")
    lines = {cluster: np.asarray(line, np.float64) for cluster, line in averages.items()}
    if not any((line[1] > 0).any() for line in lines.values()):
        raise ValueError("no average is above 0; there is nothing to draw on a logarithmic scale")
    with style.drawing(style.SINGLE, 2.1) as figure:
        axes = figure.subplots()
        for cluster, (rounds, values) in lines.items():
            marked = max(1, len(rounds) // MARKED_POINTS)
            look = style.line_look(cluster)
            if len(rounds) <= MARKED_POINTS:  # known there alone; the line only says which belong together
                look |= {"linestyle": (0, (1, 1.5)), "linewidth": 0.8}
            axes.plot(rounds, values, label=f"Cluster {cluster}", markevery=marked, **look)
        axes.axhline(tolerance, label=r"Tolerance $\epsilon$", **style.GUIDE)
        for place, test in enumerate(tests):
            axes.axvline(test, label="_" if place else "Split or refused", **{**style.GUIDE, "linestyle": ":"})
        axes.set_yscale("log")
        round_axis(axes)
        axes.set_ylabel("Mean squared change of $P$")
        style.legend_above(figure, *axes.get_legend_handles_labels())
    return figure


def class_distributions(class_counts: Any, labels: Any, class_names: Sequence[str] = ()) -> Figure:
    """Draws which classes each cluster's clients hold, and how unevenly, over two paper columns (Fig. 7).

    Left the mean share of each class over a cluster's clients; right the mean of its clients' shares in descending
    order, on which the Wasserstein-adjusted scores are computed, with one standard deviation.

    Args:
      class_counts: i32[M, L], examples of each class.
      labels: i32[M], clusters; clients with −1 or without examples are left out.
      class_names: what the classes are called; their numbers where there are none.

    Raises:
      ValueError: other lengths, names of some classes alone, or nobody in a cluster.
    """
    counts, labels = np.asarray(class_counts, np.float64), np.asarray(labels)
    if counts.ndim != 2 or len(counts) != len(labels):
        raise ValueError(f"class_counts has shape {counts.shape}, but there are {len(labels)} labels; give [M, L]")
    kept = (labels >= 0) & (counts.sum(1) > 0)
    if not kept.any():
        raise ValueError("no client with examples is in a cluster; there is nothing to draw")
    shares, labels = counts[kept] / counts[kept].sum(1, keepdims=True), labels[kept]
    ranked = -np.sort(-shares, axis=1)
    clusters, classes = np.unique(labels), shares.shape[1]
    named = class_labels(classes, class_names)
    with style.drawing(style.DOUBLE, 2.2) as figure:
        left, right = figure.subplots(1, 2)
        means = np.stack([shares[labels == cluster].mean(0) for cluster in clusters])
        drawn = left.imshow(100 * means, cmap="Blues", vmin=0, aspect="auto", interpolation="nearest")
        figure.colorbar(drawn, ax=left, label="Mean share (%)")
        names = [f"{cluster} ({np.sum(labels == cluster)})" for cluster in clusters]
        left.set_yticks(np.arange(len(clusters)), names)
        shown = np.arange(0, classes, -(-classes // MOST_CLASSES_NAMED))
        turned = 90 if len(class_names) else 0
        left.set_xticks(shown, [named[label] for label in shown.tolist()], rotation=turned)
        left.set(xlabel="Class", ylabel="Cluster (clients)")
        left.grid(False)
        left.tick_params(length=0)
        rank = np.arange(1, classes + 1)
        for cluster in clusters.tolist():
            members = 100 * ranked[labels == cluster]
            look = {"label": f"Cluster {cluster}", "index": cluster, "count": max(clusters) + 1, "highest": 100.0}
            draw_line(right, rank, members.mean(0), members.std(0), **look)
        right.set(xlabel="Rank of the class within a client", ylabel="Share of examples (%)")
        right.set_ylim(bottom=0)
        style.legend_above(figure, *right.get_legend_handles_labels())
    return figure
