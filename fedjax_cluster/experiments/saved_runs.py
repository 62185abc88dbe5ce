"""Runs read back from their directories, and compared."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_cluster import report
from fedjax_cluster.experiments.runs import load_run
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.simulation.run_directory import read_config, read_history


@dataclasses.dataclass(frozen=True)
class SavedRuns:
    """The runs of one method with one configuration, over the seeds."""

    label: str
    summaries: tuple[dict[str, Any], ...]
    histories: tuple[dict[str, np.ndarray], ...]


def find_runs(paths: Sequence[str | pathlib.Path]) -> list[pathlib.Path]:
    """The run directories among and below `paths`, in their order, each once.

    Raises:
      ValueError: a path that holds no run.
    """
    found: dict[pathlib.Path, None] = {}
    for path in map(pathlib.Path, paths):
        runs = sorted(config.parent for config in path.rglob("config.json")) if path.is_dir() else []
        if not runs:
            raise ValueError(f"{path} is not a run directory and holds none; give a directory that a run left")
        found.update(dict.fromkeys(runs))
    return list(found)


def read_runs(paths: Sequence[str | pathlib.Path]) -> list[SavedRuns]:
    """The runs of the directories, grouped where they differ in their seed alone.

    Args:
      paths: run directories, or directories that hold some (a comparison's).

    Returns:
      One entry per method and configuration, named after the method; after the directory too where a method
      occurs with several configurations.

    Raises:
      ValueError: no run there, or one that has not ended.
    """
    groups: dict[str, list[tuple[pathlib.Path, dict[str, Any], dict[str, np.ndarray]]]] = {}
    for path in find_runs(paths):
        groups.setdefault(_without_seed(path), []).append((path, _summary(path), read_history(path)))
    names = [runs[0][1]["algorithm"] for runs in groups.values()]
    labels = [
        name if names.count(name) == 1 else f"{name} ({runs[0][0].name})"
        for name, runs in zip(names, groups.values(), strict=True)
    ]
    return [
        SavedRuns(label, tuple(run[1] for run in runs), tuple(run[2] for run in runs))
        for label, runs in zip(labels, groups.values(), strict=True)
    ]


def write_report(paths: Sequence[str | pathlib.Path], directory: pathlib.Path) -> list[pathlib.Path]:
    """Prints the runs' table, and writes it and their learning curves to `directory`.

    Of a single run it prints the summary and draws the pictures again, in the run's directory.

    Args:
      paths: run directories, or directories that hold some.
      directory: for comparison.md, comparison.csv and learning_curves.png.

    Returns:
      The files written.

    Raises:
      ValueError: no run there, or one that has not ended.
    """
    runs = find_runs(paths)
    if len(runs) == 1:
        report.tables.summary_table(_summary(runs[0]), runs[0]).print()
        return report.pages.write_plots(runs[0], _drawable(runs[0]))
    groups = read_runs(runs)
    table = report.tables.comparison_table(groups)
    table.print()
    table.write(directory / "comparison.md", directory / "comparison.csv")
    figure = report.curves.learning_curves({group.label: group.histories for group in groups})
    picture = report.style.save(figure, directory / "learning_curves.png")
    return [directory / "comparison.md", directory / "comparison.csv", picture]


def _drawable(path: pathlib.Path) -> SimulationResult | dict[str, dict[str, np.ndarray]]:
    """The run with its state where its configuration can rebuild it; else its history alone."""
    config = read_config(path) or {}
    return {config["identity"]["algorithm"]: read_history(path)} if config["experiment"] is None else load_run(path)


def _summary(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads((path / "summary.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} has no summary.json yet; continue the run with resume") from None


def _without_seed(path: pathlib.Path) -> str:
    """What a run shares with those of other seeds."""
    config = read_config(path) or {}
    identity = {name: value for name, value in config["identity"].items() if name not in ("seed", "data")}
    experiment = {name: value for name, value in (config["experiment"] or {}).items() if name != "seed"}
    return json.dumps([identity, experiment], sort_keys=True)
