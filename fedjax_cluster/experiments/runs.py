"""Carrying out a configuration: one run, its resumption, and a finished run read back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

from fedjax_cluster.experiments.cluster_counts import say_clusters
from fedjax_cluster.experiments.config import RunConfig, build_algorithm
from fedjax_cluster.experiments.shared_programs import request_of
from fedjax_cluster.files import check_run_directory, quoted, read_json
from fedjax_cluster.interruption import CHECKPOINT_SECONDS
from fedjax_cluster.options import COUNT, NOT_NEGATIVE, as_path, with_checks
from fedjax_cluster.simulation.evaluation import Evaluation, usual_every
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.simulation.run_directory import SUMMARY, UNEVALUATED, only_reading, read_config, read_history
from fedjax_cluster.types import ClientMapping, Federation


@with_checks(checkpoint_every=NOT_NEGATIVE)
def run(
    config: RunConfig,
    *,
    run_dir: str | pathlib.Path | None = None,
    progress: bool | None = None,
    federation: Federation | None = None,
    callbacks: Sequence[Callable[[Evaluation], Mapping[str, float] | None]] = (),
    time_clustering: bool = False,
    checkpoint_every: float = CHECKPOINT_SECONDS,
    mapping: ClientMapping | None = None,
) -> SimulationResult:
    """Carries out one configuration.

    Args:
      config: the run.
      federation: the configuration's, where it has been built already.
      run_dir, progress, callbacks, time_clustering, checkpoint_every, mapping: see `simulate`.
    """
    # A run that has ended can be read where nothing can be written.
    run_dir = None if run_dir is None else as_path("run_dir", run_dir)
    if run_dir is not None and not os.path.isfile(run_dir / "config.json"):
        check_run_directory(run_dir)
    given = config = config if run_dir is None else as_begun(config, known_config(run_dir))
    config, request = request_of(given, federation, run_dir, callbacks)
    options = {"time_clustering": time_clustering, "checkpoint_every": checkpoint_every, "mapping": mapping}
    result = request.simulate(progress=progress, **options)
    say_clusters(given, config, request.federation)
    return result


@with_checks(rounds=COUNT, checkpoint_every=NOT_NEGATIVE)
def resume(
    run_dir: str | pathlib.Path,
    rounds: int | None = None,
    *,
    progress: bool | None = None,
    time_clustering: bool = False,
    checkpoint_every: float = CHECKPOINT_SECONDS,
    mapping: ClientMapping | None = None,
) -> SimulationResult:
    """Takes an interrupted run up where its last checkpoint left it; `rounds` extends a finished one.

    On other devices, or with other clients at a time, it goes on as well.

    Raises:
      ValueError: not a run directory, one of `simulate` without a configuration, or fewer rounds than were done.
    """
    path = as_path("run_dir", run_dir)
    config, done = _left(path)
    if rounds is not None and rounds < done:
        raise ValueError(f"rounds is {rounds}, but {path} has done {done} already; ask for at least {done}")
    config = dataclasses.replace(config, rounds=max(config.rounds, done) if rounds is None else rounds)
    options = {"time_clustering": time_clustering, "checkpoint_every": checkpoint_every, "mapping": mapping}
    return run(config, run_dir=path, progress=progress, **options)


def load_run(run_dir: str | pathlib.Path) -> SimulationResult:
    """A run as its last checkpoint left it, without running any further; the directory stays as it is.

    Raises:
      ValueError: not a run directory, or one that has no checkpoint yet.
    """
    path = as_path("run_dir", run_dir)
    config, done = _left(path)
    if done == 0:
        raise ValueError(f"{path} has no checkpoint yet; continue it with resume")
    with only_reading():
        return run(dataclasses.replace(config, rounds=done), run_dir=path, progress=False)


def as_begun(config: RunConfig, known: RunConfig | None) -> RunConfig:
    """The configuration, evaluated as often as a shorter run that is `known`, where both leave that to the rounds.

    >>> short, long = RunConfig(method="fedavg", rounds=300), RunConfig(method="fedavg", rounds=900)
    >>> long.eval_every, as_begun(long, short).eval_every
    (30, 10)
    """
    if known is None or config.eval_every != usual_every(config.rounds):
        return config
    # That of fewer rounds, with which it may have begun.
    if not usual_every(1) <= known.eval_every <= max(10, usual_every(known.rounds)):
        return config
    return dataclasses.replace(config, eval_every=known.eval_every)


def known_config(path: pathlib.Path) -> RunConfig | None:
    """The configuration that a directory holds; None where there is none that can be read, of which the run tells."""
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        if experiment := read_config(path)["experiment"]:
            return RunConfig.from_json(experiment)
    return None


def unfinished(config: RunConfig, path: pathlib.Path) -> int | None:
    """How many rounds a directory has of this very run, where these are not all; else None."""
    if (known := known_config(path)) is None:
        return None
    found = {name.name for name in dataclasses.fields(config) if getattr(config, name.name) is None}
    if dataclasses.replace(known, **dict.fromkeys(found)) != as_begun(config, known):
        return None
    done = rounds_done(path)
    return done if 0 < done < config.rounds or (done == config.rounds and _unevaluated(path)) else None


def _unevaluated(path: pathlib.Path) -> bool:
    with contextlib.suppress(ValueError, OSError):
        return bool(read_json(path / SUMMARY).get(UNEVALUATED))
    return False


def _left(path: pathlib.Path) -> tuple[RunConfig, int]:
    """The configuration of a run directory, and the rounds it has done."""
    experiment = read_config(path)["experiment"]
    if experiment is None:
        raise ValueError(
            f"{path} was made by simulate() without a configuration; call simulate() with the same algorithm, "
            f"federation and run_dir to read or continue it, or draw it with: fedjax-cluster report {quoted(path)}"
        )
    try:
        config = RunConfig.from_json(experiment)
        build_algorithm(config)
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"the experiment in {path / 'config.json'} is damaged: {error}") from error
    return config, rounds_done(path)


def rounds_done(path: pathlib.Path) -> int:
    """The rounds that a run directory has; 0 before its first checkpoint."""
    try:
        return len(read_history(path)["round"])
    except ValueError:
        return 0
