"""The pictures that a run leaves in its directory."""

from __future__ import annotations

import importlib
import logging
import pathlib
from collections.abc import Mapping

from matplotlib.figure import Figure

from fedjax_cluster.report import client_labels, clusters, curves
from fedjax_cluster.report.histories import History
from fedjax_cluster.report.shown_clients import shown_clients
from fedjax_cluster.report.style import save
from fedjax_cluster.types import FinishedRun

logger = logging.getLogger(__name__)

# The module that draws the pictures of each method alone; imported when there is something to draw.
METHOD_FIGURES = {"cfl": "cfl", "cfl_gp": "cfl_gp", "fedgwc": "fedgwc", "flag": "flag", "pacfl": "flag"}


def write_plots(directory: str | pathlib.Path, run: FinishedRun | Mapping[str, History]) -> list[pathlib.Path]:
    """Draws all that applies to a run into `directory`/plots, and returns the files written.

    `learning_curves.png` always; `client_labels.png` where there are classes; `group_by_cluster.png` where true groups
    are known; and the pictures of its method.

    Args:
      directory: the run directory.
      run: a finished run; or {method: history}, which is enough for the learning curves.
    """
    figures = {"learning_curves": curves.learning_curves(run)} if isinstance(run, Mapping) else run_figures(run)
    return [save(figure, pathlib.Path(directory) / "plots" / f"{name}.png") for name, figure in figures.items()]


def run_figures(run: FinishedRun) -> dict[str, Figure]:
    """Name -> picture of all that applies to a finished run."""
    index, labels, group, names = shown_clients(run)
    figures = {"learning_curves": curves.learning_curves({run.algorithm.name: run.history})}
    info = run.federation.info
    if info.task == "classification":
        counts = client_labels.label_counts(run.federation.train, info.num_classes)[index]
        figures["client_labels"] = client_labels.client_labels(counts, group, names)
    if group is not None:
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
