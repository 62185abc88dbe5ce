"""Runs read back from their directories, and compared."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_cluster import report
from fedjax_cluster.experiments.comparison import Outcome
from fedjax_cluster.experiments.runs import load_run
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.simulation.run_directory import read_config, read_history


def find_runs(paths: Sequence[str | pathlib.Path]) -> list[pathlib.Path]:
    """The run directories among and below `paths`, in their order, each once; a ValueError where a path holds none."""
    found: dict[pathlib.Path, None] = {}
    for path in map(pathlib.Path, paths):
        runs = sorted(config.parent for config in path.rglob("config.json")) if path.is_dir() else []
        if not runs:
            raise ValueError(f"{path} is not a run directory and holds none; give a directory that a run left")
        found.update(dict.fromkeys(runs))
    return list(found)


def read_runs(paths: Sequence[str | pathlib.Path]) -> list[Outcome]:
    """The runs among and below `paths`, grouped where they differ in their seed alone.

    Each is labelled with its method, and with its directory where a method has several configurations.

    Raises:
      ValueError: no run there, or one that has not ended.
    """
    groups: dict[str, list[tuple[pathlib.Path, dict[str, Any], dict[str, np.ndarray]]]] = {}
    for path in find_runs(paths):
        groups.setdefault(_without_seed(path), []).append((path, _summary(path), read_history(path)))
    names = [runs[0][1]["algorithm"] for runs in groups.values()]
    outcomes = []
    for name, runs in zip(names, groups.values(), strict=True):
        directories, summaries, histories = zip(*runs, strict=True)
        label = name if names.count(name) == 1 else f"{name} ({directories[0].name})"
        outcomes.append(Outcome(label, summaries, histories))
    return outcomes


def write_report(paths: Sequence[str | pathlib.Path], directory: pathlib.Path) -> list[pathlib.Path]:
    """Prints the runs' table, and writes it and their learning curves; returns the files written.

    Of a single run it prints the summary and draws the pictures again, in the run's directory; of several it leaves
    comparison.md, comparison.csv and learning_curves.png in `directory`.

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
    written = [directory / "comparison.md", directory / "comparison.csv"]
    table.write(*written)
    figure = report.curves.learning_curves({group.label: group.histories for group in groups})
    return [*written, report.style.save(figure, directory / "learning_curves.png")]


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
