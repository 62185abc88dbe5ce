"""Several configurations over seeds, on the same federations."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_cluster.experiments.config import RunConfig, build_algorithm, build_federation
from fedjax_cluster.experiments.runs import run
from fedjax_cluster.interruption import CHECKPOINT_SECONDS
from fedjax_cluster.options import NOT_NEGATIVE, SEED, Bound, as_path, checked, with_checks
from fedjax_cluster.simulation import Evaluation, SimulationResult
from fedjax_cluster.types import Federation

RUNS = Bound(lambda value: 1 <= value <= 10_000, "from 1 to 10000 runs")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The runs of one configuration over the seeds."""

    label: str
    summaries: tuple[dict[str, Any], ...]
    histories: tuple[dict[str, np.ndarray], ...]

    def mean(self, name: str) -> float:
        """Mean over the seeds that have a value; NaN where none has."""
        values = self._values(name)
        return float(np.mean(values)) if len(values) else float("nan")

    def std(self, name: str) -> float:
        """Sample standard deviation over the seeds that have a value; NaN for fewer than two."""
        values = self._values(name)
        return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")

    def valued(self, name: str) -> int:
        """How many seeds have a value."""
        return len(self._values(name))

    def _values(self, name: str) -> np.ndarray:
        values = [summary.get(name) for summary in self.summaries]
        return np.asarray([value for value in values if value is not None and np.isfinite(value)], np.float64)


@with_checks(seeds=SEED, checkpoint_every=NOT_NEGATIVE)
def compare(
    configs: dict[str, RunConfig],
    *,
    seeds: Sequence[int] = (0,),
    run_dir: str | pathlib.Path | None = None,
    progress: bool | None = None,
    done: Callable[[str, int, SimulationResult], None] = lambda label, seed, result: None,
    watch: Callable[[Federation], Sequence[Callable[[Evaluation], Mapping[str, float] | None]]] = lambda federation: (),
    time_clustering: bool = False,
    checkpoint_every: float = CHECKPOINT_SECONDS,
) -> list[Outcome]:
    """Runs several configurations over seeds; seed s means the same federation and initial models for all.

    Args:
      configs: label -> configuration; they may differ in anything.
      seeds: one run each.
      run_dir: keeps every run's directory below it, and takes up what is there.
      progress, time_clustering, checkpoint_every: see `simulate`.
      done: called after each run.
      watch: the callbacks of `simulate` for a federation.
    """
    for label, config in configs.items():
        build_algorithm(checked(f"the configuration of {label}", config, RunConfig))  # refused before the first run
    outcomes = []
    federations: dict[Any, Federation] = {}
    for label, config in configs.items():
        summaries, histories = [], []
        for seed in seeds:
            seeded = dataclasses.replace(config, seed=seed)
            federation = _federation(seeded, federations)
            result = run(
                seeded,
                run_dir=None if run_dir is None else as_path("run_dir", run_dir) / f"{label}-seed{seed}",
                progress=progress,
                federation=federation,
                callbacks=watch(federation),
                time_clustering=time_clustering,
                checkpoint_every=checkpoint_every,
            )
            summaries.append(result.summary)
            histories.append(result.history)
            done(label, seed, result)
        outcomes.append(Outcome(label, tuple(summaries), tuple(histories)))
    return outcomes


def _federation(config: RunConfig, known: dict[Any, Federation]) -> Federation:
    """The configuration's federation; the last few are kept, as the methods of a comparison share them."""
    names = ("scenario", "dataset", "clients", "seed", "test_fraction", "examples_per_client")
    key = repr([*(getattr(config, name) for name in names), sorted(config.scenario_options.items())])
    if key not in known:
        while len(known) >= 8:
            known.pop(next(iter(known)))
        known[key] = build_federation(config)
    return known[key]
