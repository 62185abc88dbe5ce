"""The pictures that a run leaves in its directory."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping

from matplotlib.figure import Figure

from fedjax_cluster.report import clusters, curves
from fedjax_cluster.report.histories import History
from fedjax_cluster.report.methods import cfl, cfl_gp, fedgwc, flag
from fedjax_cluster.report.shown_clients import shown_clients
from fedjax_cluster.report.style import save
from fedjax_cluster.types import FinishedRun

# The pictures of each method alone, from a finished run: name of the file -> figure.
METHOD_FIGURES: dict[str, Callable[[FinishedRun], dict[str, Figure]]] = {
    "cfl": cfl.figures,
    "cfl_gp": cfl_gp.figures,
    "fedgwc": fedgwc.figures,
    "flag": flag.figures,
    "pacfl": flag.figures,
}


def write_plots(directory: str | pathlib.Path, run: FinishedRun | Mapping[str, History]) -> list[pathlib.Path]:
    """Draws all that applies to a run into `directory`/plots.

    `learning_curves.png` always; `group_by_cluster.png` where true groups are known; and the pictures of its method.

    Args:
      directory: the run directory.
      run: a finished run; or {method: history}, which is enough for the learning curves.

    Returns:
      The files written.
    """
    figures = {"learning_curves": curves.learning_curves(run)} if isinstance(run, Mapping) else run_figures(run)
    return [save(figure, pathlib.Path(directory) / "plots" / f"{name}.png") for name, figure in figures.items()]


def run_figures(run: FinishedRun) -> dict[str, Figure]:
    """Name -> picture of all that applies to a finished run."""
    _, labels, group, names = shown_clients(run)
    figures = {"learning_curves": curves.learning_curves({run.algorithm.name: run.history})}
    if group is not None:
        figures["group_by_cluster"] = clusters.group_by_cluster(group, labels, names)
    draw = METHOD_FIGURES.get(run.algorithm.name)
    return figures if draw is None else {**figures, **draw(run)}
