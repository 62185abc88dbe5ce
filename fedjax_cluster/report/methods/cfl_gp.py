"""Pictures of CFL-GP: the singular values of the clients' gradient profiles, and the clients at their features."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedjax_cluster.algorithms.cfl_gp import profiles
from fedjax_cluster.report import clusters, style
from fedjax_cluster.report.shown_clients import shown_clients, without_newcomers
from fedjax_cluster.types import FinishedRun

FEWEST_SINGULAR_VALUES = 8  # drawn, so that what follows the largest gap is seen


def figures(run: FinishedRun) -> dict[str, Figure]:
    """The pictures of a run of `cfl_gp`: `client_features` and `singular_values`; none before the first update."""
    run = without_newcomers(run)
    who, clients = profiles.profiled(run.state)
    if not np.asarray(clients.updates).any():
        return {}
    index, labels, group, names = shown_clients(run)
    _, num_clusters, width = clients.profile.shape
    if len(clients.present) < len(run.state.clients.present):  # the landmarks' alone are kept
        known = np.isin(index, np.asarray(who))
        index, labels, group = (
            np.searchsorted(who, index[known]),
            labels[known],
            None if group is None else group[known],
        )
    rank = min(len(index), num_clusters * width, max(2 * num_clusters, FEWEST_SINGULAR_VALUES))
    features, values = (np.asarray(part) for part in profiles.client_features(run.state, rank))
    # K-means sees the first K features; two make a picture.
    shown = features[index, : max(num_clusters, 2)]
    return {
        "client_features": clusters.client_features(shown, group, labels, names),
        "singular_values": singular_values(values, chosen=min(num_clusters, rank)),
    }


def singular_values(values: Any, chosen: int | None = None) -> Figure:
    """Draws singular values in descending order, and marks the first K and the gap after them, or the largest gap.

    A gap is the difference of neighbours, as in CFL-GP's App. G and `clustering.largest_gaps`. It need not be largest
    after K: directions that groups share are among the first ones, too.

    Args:
      values: f32[r].
      chosen: K, as many directions as k-means divides clients at; None marks the largest gap.

    Raises:
      ValueError: values not finite, negative or not descending; `chosen` beyond them.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"singular values have shape {values.shape}; give [r], at least one")
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("singular values must be finite and not negative")
    if (np.diff(values) > 1e-6 * values.max()).any():
        raise ValueError("singular values are not in descending order; sort them")
    if chosen is not None and not 1 <= chosen <= len(values):
        raise ValueError(f"chosen is {chosen}, but there are {len(values)} singular values; give 1 to that")
    gap = int(np.argmax(values[:-1] - values[1:])) + 1 if len(values) > 1 else 0
    used = len(values) if chosen is None else chosen
    index, marked = np.arange(1, len(values) + 1), gap if chosen is None else chosen
    with style.drawing(style.SINGLE, 2.0) as figure:
        axes = figure.subplots()
        look: dict[str, Any] = {"color": style.COLORS[0], "marker": "o"}
        axes.plot(index, values, color=style.COLORS[0], zorder=2)
        axes.plot(
            index[:used], values[:used], linestyle="none", **look, label="" if chosen is None else f"first K = {chosen}"
        )
        axes.plot(index[used:], values[used:], linestyle="none", **look, markerfacecolor="white")
        if 0 < marked < len(values):
            axes.axvspan(marked, marked + 1, color="#F3E3B5", linewidth=0, zorder=0, label=_gap_text(gap, chosen))
        axes.set(xlim=(0.5, len(values) + 0.5), ylim=(0, 1.08 * values.max() if values.any() else 1))
        axes.set(xlabel="Index of the singular value", ylabel="Singular value")
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
        style.legend_above(figure, *axes.get_legend_handles_labels())
    return figure


def _gap_text(largest: int, chosen: int | None) -> str:
    """What the marked gap is called."""
    if chosen is None:
        return f"largest gap, after {largest}"
    return "gap after K" + (", the largest" if largest == chosen else f"; the largest is after {largest}")
