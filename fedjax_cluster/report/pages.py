"""The pictures that a run leaves in its directory."""

from __future__ import annotations

import importlib
import logging
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster.data.stored import stored
from fedjax_cluster.report import client_labels, clusters, curves, timeline
from fedjax_cluster.report.histories import History, by_seed, chosen_metric, has_values
from fedjax_cluster.report.shown_clients import shown_clients, without_newcomers
from fedjax_cluster.report.style import save
from fedjax_cluster.types import FinishedRun

logger = logging.getLogger(__name__)

# The module that draws the pictures of each method alone; imported when there is something to draw.
METHOD_FIGURES = {
    "cfl": "cfl",
    "cfl_gp": "cfl_gp",
    "fedgwc": "fedgwc",
    "flag": "flag",
    "fl_hc": "flag",
    "pacfl": "flag",
}


def write_plots(
    directory: str | pathlib.Path,
    run: FinishedRun | Mapping[str, History],
    *,
    formats: Sequence[str] = ("png",),
    brief: bool = False,
) -> list[pathlib.Path]:
    """Draws all that applies to a run into `directory`/plots, and returns the files written.

    `learning_curves` always; `training_curves` of the loss, and of the number of clusters where it changed;
    `cluster_timeline` where there were several clusters;
    `client_labels` where there are classes; `group_by_cluster` where true groups are known and there can be several
    clusters; and the pictures of its method.

    Args:
      directory: the run directory.
      run: a finished run; or {method: history}, which is enough for the curves.
      formats: "png", "pdf" or "svg": a file of each picture in each.
      brief: only what happened over the rounds.
    """
    figures = round_figures(run) if isinstance(run, Mapping) or brief else run_figures(run)
    folder = pathlib.Path(directory) / "plots"
    return [save(figure, folder / f"{name}.{kind}") for name, figure in figures.items() for kind in formats]


def round_figures(run: FinishedRun | Mapping[str, History]) -> dict[str, Figure]:
    """Name -> picture of what happened over the rounds: curves, and who was in which cluster."""
    histories = run if isinstance(run, Mapping) else {run.algorithm.name: run.history}
    seeds = by_seed(histories)
    shown = chosen_metric(seeds, None)
    alone = not isinstance(run, Mapping) and not _can_cluster(run)
    figures = {"learning_curves": curves.curves(seeds, [shown]) if alone else curves.learning_curves(histories)}
    counts = np.concatenate([np.ravel(history.get("num_clusters", 1)) for runs in seeds.values() for history in runs])
    changed = np.nanmax(counts) > np.nanmin(counts)  # a line that stays at K tells nothing
    columns = [name for name in ("loss", "num_clusters") if name != shown and has_values(seeds, name)]
    if columns := [name for name in columns if changed or name != "num_clusters"]:
        figures["training_curves"] = curves.curves(histories, columns)
    if not isinstance(run, Mapping):
        index, _, group, names = shown_clients(run)
        rounds, cluster = run.assignments
        cluster = np.asarray(cluster)[:, index]
        if len(np.unique(cluster)) > 1:
            users = getattr(run.federation, "user_ids", None)
            called = None if users is None else np.asarray(users)[index]
            figures["cluster_timeline"] = timeline.cluster_timeline(rounds, cluster, group, names, index, called)
    return figures


def _can_cluster(run: FinishedRun) -> bool:
    """Whether there is more than one cluster slot: of one model for all an agreement with groups tells nothing."""
    return run.state.clusters.active.shape[0] > 1


def run_figures(run: FinishedRun) -> dict[str, Figure]:
    """Name -> picture of all that applies to a finished run."""
    run = without_newcomers(run)
    index, labels, group, names = shown_clients(run)
    figures = round_figures(run)
    info = run.federation.info
    if info.task == "classification" and not stored(run.federation) and run.federation.train.y.ndim == 2:
        counts = client_labels.label_counts(run.federation.train, info.num_classes)[index]
        figures["client_labels"] = client_labels.client_labels(counts, group, names, info.class_names)
    if group is not None and _can_cluster(run):
        figures["group_by_cluster"] = clusters.group_by_cluster(group, labels, names)
    module = METHOD_FIGURES.get(run.algorithm.name)
    if module is None:
        return figures
    drawing = importlib.import_module(f"fedjax_cluster.report.methods.{module}")
    try:
        return {**figures, **drawing.figures(run)}
    except ValueError as error:
        # Such as clients' features that are not finite: the other pictures are none the worse.
        logger.warning(f"the pictures of {run.algorithm.name} alone are left out: {error}")
        return figures
