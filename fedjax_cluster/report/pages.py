"""The pictures that a run leaves in its directory."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from fedjax_cluster.algorithms.cfl_gp.profiles import client_features
from fedjax_cluster.report import cluster_plots, plots
from fedjax_cluster.report.methods import flag as flag_plots
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.simulation.run_directory import read_config, read_history

# Beyond the last gap that one looks for.
FEWEST_SINGULAR_VALUES = 8


def write_plots(directory: str | pathlib.Path, result: SimulationResult | None = None) -> list[pathlib.Path]:
    """Draws all that applies to a run into `directory`/plots.

    `learning_curves.png` always; `group_by_cluster.png` where true groups are known; and the method's own.

    Args:
      directory: the run directory.
      result: the run; None draws what config.json and metrics.csv suffice for, the learning curves.

    Returns:
      The files written.

    Raises:
      ValueError: without a result, `directory` is no run directory or has no metrics yet.
    """
    directory = pathlib.Path(directory)
    figures = _saved_figures(directory) if result is None else _figures(result)
    return [plots.save(figure, directory / "plots" / f"{name}.png") for name, figure in figures.items()]


def _saved_figures(directory: pathlib.Path) -> dict[str, Figure]:
    config = read_config(directory)
    name = config["identity"]["algorithm"] if config else directory.name
    return {"learning_curves": plots.learning_curves({name: read_history(directory)})}


def _figures(result: SimulationResult) -> dict[str, Figure]:
    federation = result.federation
    # Clients without examples are in no cluster and have no features.
    present = np.asarray(federation.train.num_examples) > 0
    labels = result.labels[present]
    group = None if federation.group is None else np.asarray(federation.group)[present]
    names = federation.info.group_names
    figures = {"learning_curves": plots.learning_curves({result.algorithm.name: result.history})}
    if group is not None and (group >= 0).any():
        figures["group_by_cluster"] = cluster_plots.group_by_cluster(group, labels, names)
    own = METHOD_FIGURES.get(result.algorithm.name)
    return figures if own is None else {**figures, **own(result)}


def _gradient_profiles(result: SimulationResult) -> dict[str, Figure]:
    """CFL-GP's features and singular values."""
    federation = result.federation
    if not np.asarray(result.state.clients.updates).any():
        return {}
    present = np.asarray(federation.train.num_examples) > 0
    group = None if federation.group is None else np.asarray(federation.group)[present]
    _, clusters, width = result.state.clients.profile.shape
    rank = min(int(present.sum()), clusters * width, max(2 * clusters, FEWEST_SINGULAR_VALUES))
    features, values = (np.asarray(part) for part in client_features(result.state, rank))
    # K-means sees the first K features; two make a picture.
    shown = features[: len(present)][present][:, : max(clusters, 2)]
    return {
        "client_features": cluster_plots.client_features(
            shown, group, result.labels[present], federation.info.group_names
        ),
        "singular_values": plots.singular_values(values, chosen=min(clusters, rank)),
    }


def _one_shot(result: SimulationResult) -> dict[str, Figure]:
    """FLAG's matrices, search and tree; PACFL's tree."""
    federation, config = result.federation, result.algorithm.config
    if not result.events:
        return {}
    content = result.events[0].content
    between = content["angles"] if "angles" in content else content["proximity"]
    # Who joined later, or sent infinities, was compared with nobody: 0 to all would draw them as like everybody.
    present = np.flatnonzero((content["labels"] >= 0) & (between.any(1) | ~between.any()))
    if len(present) < 2:
        return {}
    pairs = np.ix_(present, present)
    group = None if federation.group is None else np.asarray(federation.group)[present]
    names = federation.info.group_names
    common = {"linkage": config["linkage"], "group": group, "group_names": names}
    if "angles" in content:
        tree = flag_plots.dendrogram(
            content["angles"][pairs],
            threshold=config["threshold"],
            label="Angle at which clusters merge (degrees)",
            **common,
        )
        return {"dendrogram": tree}
    chosen = int(content["chosen"])
    data, gradient, proximity = (content[name][pairs] for name in ("data", "gradient", "proximity"))
    figures = {
        "dissimilarity_matrices": flag_plots.dissimilarity_matrices(data, gradient, proximity, group, names),
        "dendrogram": flag_plots.dendrogram(proximity, threshold=float(content["thresholds"][chosen]), **common),
    }
    if np.isfinite(content["accuracy"]).any():
        figures["threshold_search"] = flag_plots.threshold_search(
            content["thresholds"], content["accuracy"], content["num_clusters"], chosen, int(content["elbow"])
        )
    return figures


# The pictures of a method's own, from a finished run: name of the file -> figure.
METHOD_FIGURES: dict[str, Callable[[SimulationResult], dict[str, Figure]]] = {
    "cfl_gp": _gradient_profiles,
    "flag": _one_shot,
    "pacfl": _one_shot,
}
