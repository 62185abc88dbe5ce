"""Pictures of FedGWC: interactions and affinity, their embedding, convergence, class distributions, rewards.

Every function returns a `matplotlib.figure.Figure` and neither shows nor saves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedjax_cluster.report.cluster_plots import client_features
from fedjax_cluster.report.style import (
    COLORS,
    DOUBLE,
    NEUTRAL,
    SINGLE,
    legend_above,
    line_look,
    new_figure,
    style,
)


def interaction_matrices(interactions: Any, affinity: Any, labels: Any, group: Any | None = None) -> Figure:
    """Draws P and W side by side, clients ordered by cluster, and by true group within (FedGWC, Figs. 5, 6 and 8).

    Args:
      interactions: f32[M, M], P.
      affinity: f32[M, M], W.
      labels: i32[M], clusters; clients with −1 are left out.
      group: i32[M], true groups; None orders by cluster only.

    Returns:
      The figure, two paper columns wide.

    Raises:
      ValueError: matrices that are not both [M, M] for the M labels, or nobody in a cluster.
    """
    interactions, affinity, labels = np.asarray(interactions), np.asarray(affinity), np.asarray(labels)
    for name, matrix in (("interactions", interactions), ("affinity", affinity)):
        if matrix.shape != 2 * labels.shape:
            raise ValueError(f"{name} has shape {matrix.shape}, but there are {len(labels)} labels; give [M, M]")
    if not (labels >= 0).any():
        raise ValueError("no client is in a cluster; there is nothing to draw")
    inner = np.zeros_like(labels) if group is None else np.asarray(group)
    order = np.lexsort((inner, labels))
    order = order[labels[order] >= 0]
    borders = np.flatnonzero(np.diff(labels[order])) + 1
    with style():
        figure = new_figure(DOUBLE, 2.9)
        panels = figure.subplots(1, 2)
        panel = zip(panels, (interactions, affinity), ("Interaction $P_{ij}$", "Affinity $W_{ij}$"), strict=True)
        for axes, matrix, name in panel:
            shown = matrix[np.ix_(order, order)].astype(np.float64)
            np.fill_diagonal(shown, np.nan)
            _heat_map(figure, axes, shown, borders, name)
        panels[0].set_ylabel("Client $i$, by cluster")
    return figure


def _heat_map(figure: Figure, axes: Axes, matrix: np.ndarray, borders: np.ndarray, name: str) -> None:
    # A few extreme pairs would leave all others in one tone.
    low, high = np.nanpercentile(matrix, [1, 99]) if len(matrix) > 1 else (0.0, 1.0)
    drawn = axes.imshow(matrix, cmap="viridis", vmin=low, vmax=max(high, low + 1e-6), interpolation="nearest")
    for border in borders:
        for line in (axes.axhline, axes.axvline):
            line(border - 0.5, color="white", linewidth=1.0)
    figure.colorbar(drawn, ax=axes, label=name, extend="both")
    axes.set_xlabel("Client $j$, by cluster")
    axes.grid(False)
    axes.spines[:].set_visible(False)


def spectral_embedding(affinity: Any, labels: Any, group: Any | None = None, group_names: Sequence[str] = ()) -> Figure:
    """Draws the clients of one cluster in the plane of the affinity's second and third eigenvectors (Fig. 3).

    Args:
      affinity: f32[M, M], W; rows of zeros are clients outside the cluster, who are left out.
      labels: i32[M], what became of them.
      group: i32[M], true groups; None colours by cluster.
      group_names: what the groups are called.

    Returns:
      The figure, one paper column wide.

    Raises:
      ValueError: matrices that are not [M, M] for the M labels, or fewer than three clients.
    """
    affinity, labels = np.asarray(affinity, np.float64), np.asarray(labels)
    if affinity.shape != 2 * labels.shape:
        raise ValueError(f"affinity has shape {affinity.shape}, but there are {len(labels)} labels; give [M, M]")
    inside = affinity.sum(1) > 0
    if inside.sum() < 3:
        raise ValueError(f"the affinity holds {inside.sum()} clients; a plane needs at least three")
    weights = affinity[np.ix_(inside, inside)] * (1 - np.eye(inside.sum()))
    root = 1 / np.sqrt(np.maximum(weights.sum(1), 1e-30))
    vectors = np.linalg.eigh(weights * root[:, None] * root[None])[1]
    points = (vectors * root[:, None])[:, [-2, -3]]
    points = points / np.abs(points).max()
    return client_features(points, None if group is None else np.asarray(group)[inside], labels[inside], group_names)


def convergence(rounds: Any, averages: Any, tolerance: float, splits: Sequence[int] = ()) -> Figure:
    """Draws the running average of P's mean squared change in each cluster against rounds (Fig. 4).

    Args:
      rounds: i32[n].
      averages: f32[n, K]; NaN where a cluster does not exist.
      tolerance: ε, drawn as a dashed line.
      splits: rounds of splits, drawn as dotted lines.

    Returns:
      The figure, one paper column wide.

    Raises:
      ValueError: other lengths, or no value above 0.
    """
    rounds, averages = np.asarray(rounds), np.asarray(averages, np.float64)
    if averages.ndim != 2 or len(averages) != len(rounds):
        raise ValueError(f"averages has shape {averages.shape}; it must be [{len(rounds)}, K], one row per round")
    if not (averages > 0).any():
        raise ValueError("no average is above 0; there is nothing to draw on a logarithmic scale")
    with style():
        figure = new_figure(SINGLE, 2.1)
        axes = figure.subplots()
        for cluster in np.flatnonzero(np.isfinite(averages).any(0)):
            look = {**line_look(int(cluster)), "marker": "None"}
            axes.plot(rounds, averages[:, cluster], label=f"Cluster {cluster}", **look)
        axes.axhline(tolerance, color=NEUTRAL, linestyle=(0, (4, 2)), linewidth=0.8, label="Tolerance $\\epsilon$")
        for number, split in enumerate(splits):
            dotted = {"color": NEUTRAL, "linestyle": ":", "linewidth": 0.8}
            axes.axvline(split, label=None if number else "Split", **dotted)
        axes.set_yscale("log")
        axes.set_xlabel("Communication round")
        axes.set_ylabel("Mean squared change of $P$")
        legend_above(figure, *axes.get_legend_handles_labels())
    return figure


def class_distributions(class_counts: Any, labels: Any, class_names: Sequence[str] = ()) -> Figure:
    """Draws which classes each cluster's clients hold, and how unevenly (Fig. 7).

    Left the mean share of each class over a cluster's clients; right the mean of its clients' shares in descending
    order, on which the Wasserstein-adjusted scores are computed, with one standard deviation.

    Args:
      class_counts: i32[M, L], examples of each class.
      labels: i32[M], clusters; clients with −1 or without examples are left out.
      class_names: L names; numbers where there are none.

    Returns:
      The figure, two paper columns wide.

    Raises:
      ValueError: other lengths, or nobody in a cluster.
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
    longest = max(map(len, class_names), default=0)
    with style():
        # Long names stand upright.
        figure = new_figure(DOUBLE, 2.2 if longest <= 3 else 2.1 + 0.055 * longest)
        left, right = figure.subplots(1, 2)
        means = np.stack([shares[labels == cluster].mean(0) for cluster in clusters])
        drawn = left.imshow(100 * means, cmap="Blues", vmin=0, aspect="auto", interpolation="nearest")
        figure.colorbar(drawn, ax=left, label="Mean share (%)")
        names = [f"{cluster} ({np.sum(labels == cluster)})" for cluster in clusters]
        left.set_yticks(np.arange(len(clusters)), names)
        step = -(-classes // 20)
        ticks = np.arange(0, classes, step)
        left.set_xticks(ticks, [class_names[tick] if class_names else str(tick) for tick in ticks])
        if longest > 3:
            left.tick_params(axis="x", rotation=90)
        left.set_xlabel("Class")
        left.set_ylabel("Cluster (clients)")
        left.grid(False)
        left.tick_params(length=0)
        for number, cluster in enumerate(clusters):
            own = 100 * ranked[labels == cluster]
            middle, spread = own.mean(0), own.std(0)
            rank = np.arange(1, classes + 1)
            right.plot(rank, middle, label=f"Cluster {cluster}", **line_look(number))
            right.fill_between(
                rank, middle - spread, middle + spread, color=COLORS[number % len(COLORS)], alpha=0.15, linewidth=0
            )
        right.set_xlabel("Rank of the class within a client")
        right.set_ylabel("Share of examples (%)")
        right.set_ylim(bottom=0)
        legend_above(figure, *right.get_legend_handles_labels())
    return figure


def reward_mechanism(losses: Any, rewards: Any) -> Figure:
    """Draws a cohort's losses over its local steps, with the clients of the highest and the lowest reward (Fig. 1).

    Args:
      losses: f32[C, S], of one round's cohort.
      rewards: f32[C].

    Returns:
      The figure, one paper column wide.

    Raises:
      ValueError: other lengths, or fewer than two clients.
    """
    losses, rewards = np.asarray(losses, np.float64), np.asarray(rewards, np.float64)
    if losses.ndim != 2 or rewards.shape != losses.shape[:1] or len(losses) < 2:
        raise ValueError(f"losses has shape {losses.shape}, rewards {rewards.shape}; give [C, S] and [C] with C ≥ 2")
    steps = np.arange(1, losses.shape[1] + 1)
    mean, deviation = losses.mean(0), losses.std(0, ddof=1)
    with style():
        figure = new_figure(SINGLE, 2.2)
        axes = figure.subplots()
        axes.fill_between(steps, mean - deviation, mean + deviation, color=COLORS[5], alpha=0.25, linewidth=0)
        others = np.argsort(rewards)[1:-1]
        axes.plot(steps, losses[others].T, color=NEUTRAL, linewidth=0.5, alpha=0.5)
        axes.plot(steps, mean, color=COLORS[0], linestyle=(0, (4, 2)), label=r"Cohort mean $m_s \pm \sigma_s$")
        for client, name, look in ((np.argmax(rewards), "Highest", 2), (np.argmin(rewards), "Lowest", 1)):
            label = rf"{name} reward, $\omega$ = {rewards[client]:.2f}"
            axes.plot(steps, losses[client], **{**line_look(look), "linestyle": "-"}, label=label)
        axes.set_xticks(steps)
        axes.set_xlabel("Local step $s$")
        axes.set_ylabel("Mini-batch loss")
        legend_above(figure, *axes.get_legend_handles_labels())
    return figure
