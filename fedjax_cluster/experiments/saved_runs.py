"""Runs read back from their directories, and put side by side."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_cluster.report import pages as run_page
from fedjax_cluster.report import plots, tables
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
    """The runs of the directories, those that differ in their seed alone together.

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
    """Prints the runs' table, and leaves it and their learning curves in `directory`.

    A single run gets its summary and its pictures anew instead, in its own directory.
    """
    runs = find_runs(paths)
    if len(runs) == 1:
        tables.summary_table(_summary(runs[0]), runs[0]).print()
        return run_page.write_plots(runs[0], _loaded(runs[0]))
    groups = read_runs(runs)
    table = tables.comparison_table(groups)
    table.print()
    table.write(directory / "comparison.md", directory / "comparison.csv")
    figure = plots.learning_curves({group.label: group.histories for group in groups})
    picture = plots.save(figure, directory / "learning_curves.png")
    return [directory / "comparison.md", directory / "comparison.csv", picture]


def _loaded(path: pathlib.Path):
    """The run with its state where its configuration can rebuild it; None where only its figures were kept."""
    from fedjax_cluster.experiments.runs import load_run

    config = read_config(path)
    return load_run(path) if config and config["experiment"] is not None else None


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
