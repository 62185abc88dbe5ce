"""Carrying out configurations: one run, its resumption, and comparisons of methods over seeds."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_cluster.experiments.config import RunConfig, build_algorithm, build_federation
from fedjax_cluster.files import check_writable
from fedjax_cluster.simulation.loop import Evaluation, simulate
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.simulation.run_directory import read_config, read_history
from fedjax_cluster.types import ClusteredAlgorithm, Federation


def run(
    config: RunConfig,
    *,
    run_dir: str | pathlib.Path | None = None,
    progress: bool | None = None,
    federation: Federation | None = None,
    algorithm: ClusteredAlgorithm | None = None,
    callbacks: Sequence[Callable[[Evaluation], Mapping[str, float] | None]] = (),
    time_clustering: bool = False,
) -> SimulationResult:
    """Carries out one configuration.

    Args:
      config: the run.
      run_dir: see `simulate`.
      progress: see `simulate`.
      federation: the configuration's, where it has been built already.
      algorithm: the configuration's, where it has been built already: equal objects share one compilation.
      callbacks: see `simulate`.
      time_clustering: see `simulate`.
    """
    if run_dir is not None:
        check_writable(pathlib.Path(run_dir))
    algorithm = build_algorithm(config) if algorithm is None else algorithm
    return simulate(
        algorithm,
        build_federation(config) if federation is None else federation,
        rounds=config.rounds,
        seed=config.seed,
        eval_every=config.eval_every,
        eval_clients=config.eval_clients,
        callbacks=callbacks,
        churn=config.churn,
        run_dir=run_dir,
        time_clustering=time_clustering,
        progress=progress,
        config=config.to_json(),
    )


def resume(
    run_dir: str | pathlib.Path,
    rounds: int | None = None,
    *,
    progress: bool | None = None,
    time_clustering: bool = False,
) -> SimulationResult:
    """Takes an interrupted run up where its last checkpoint left it; `rounds` extends a finished one.

    Raises:
      ValueError: not a run directory, one of `simulate` without a configuration, or fewer rounds than were done.
    """
    path = pathlib.Path(run_dir)
    config = _experiment(path)
    done = _rounds_done(path)
    if rounds is not None and rounds < done:
        raise ValueError(f"rounds is {rounds}, but {path} has done {done} already; ask for at least {done}")
    config = dataclasses.replace(config, rounds=max(config.rounds, done) if rounds is None else rounds)
    return run(config, run_dir=path, progress=progress, time_clustering=time_clustering)


def load_run(run_dir: str | pathlib.Path) -> SimulationResult:
    """A run as its last checkpoint left it, without running any further.

    Raises:
      ValueError: not a run directory, or one that has no checkpoint yet.
    """
    path = pathlib.Path(run_dir)
    config = _experiment(path)
    done = _rounds_done(path)
    if done == 0:
        raise ValueError(f"{path} has no checkpoint yet; continue it with resume")
    return run(dataclasses.replace(config, rounds=done), run_dir=path, progress=False)


def _experiment(path: pathlib.Path) -> RunConfig:
    content = read_config(path)
    assert content is not None
    if content["experiment"] is None:
        raise ValueError(
            f"{path} was made by simulate() without a configuration; call simulate() with the same algorithm, "
            "federation and run_dir to continue it"
        )
    return RunConfig.from_json(content["experiment"])


def _rounds_done(path: pathlib.Path) -> int:
    try:
        return len(read_history(path)["round"])
    except ValueError:
        return 0


# ------------------------------------------------------------------------------------------ comparison


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One method's runs over the seeds."""

    label: str
    config: RunConfig
    summaries: tuple[dict[str, Any], ...]
    histories: tuple[dict[str, np.ndarray], ...]

    def mean(self, name: str) -> float:
        """Mean over the seeds that have a value; NaN where none has."""
        values = self._values(name)
        return float(np.mean(values)) if len(values) else float("nan")

    def std(self, name: str) -> float:
        """Standard deviation over the seeds that have a value; NaN for fewer than two."""
        values = self._values(name)
        return float(np.std(values)) if len(values) > 1 else float("nan")

    def _values(self, name: str) -> np.ndarray:
        values = [summary.get(name) for summary in self.summaries]
        return np.asarray([value for value in values if value is not None and np.isfinite(value)], np.float64)


def compare(
    configs: dict[str, RunConfig],
    *,
    seeds: Sequence[int] = (0,),
    run_dir: str | pathlib.Path | None = None,
    progress: bool | None = None,
    done: Callable[[str, int, SimulationResult], None] = lambda label, seed, result: None,
    watch: Callable[[Federation], Sequence[Callable[[Evaluation], Mapping[str, float] | None]]] = lambda federation: (),
    time_clustering: bool = False,
) -> list[Outcome]:
    """Runs several configurations over seeds; seed s means the same federation and initial models for all.

    Args:
      configs: label -> configuration; they may differ in anything.
      seeds: one run each.
      run_dir: keeps every run's directory below it, and takes up what is there.
      progress: see `simulate`.
      done: called after each run.
      watch: the callbacks of `simulate` for a federation.
      time_clustering: see `simulate`.
    """
    outcomes = []
    federations: dict[Any, Federation] = {}
    for label, config in configs.items():
        algorithm = build_algorithm(config)
        summaries, histories = [], []
        for seed in seeds:
            seeded = dataclasses.replace(config, seed=seed)
            federation = _federation(seeded, federations)
            path = None if run_dir is None else pathlib.Path(run_dir) / f"{label}-seed{seed}"
            result = run(
                seeded,
                run_dir=path,
                progress=progress,
                federation=federation,
                algorithm=algorithm,
                callbacks=watch(federation),
                time_clustering=time_clustering,
            )
            summaries.append(result.summary)
            histories.append(result.history)
            done(label, seed, result)
        outcomes.append(Outcome(label, config, tuple(summaries), tuple(histories)))
    return outcomes


def _federation(config: RunConfig, known: dict[Any, Federation]) -> Federation:
    """The configuration's federation; the last few are kept, as the methods of a comparison share them."""
    key = repr(
        [getattr(config, name) for name in ("scenario", "dataset", "clients", "seed", "test_fraction")]
        + [config.examples_per_client, sorted(config.scenario_options.items())]
    )
    if key not in known:
        while len(known) >= 8:
            known.pop(next(iter(known)))
        known[key] = build_federation(config)
    return known[key]
