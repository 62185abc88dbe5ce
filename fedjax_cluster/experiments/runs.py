"""Carrying out a configuration: one run, its resumption, and a finished run read back."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedjax_cluster.experiments.config import RunConfig, build_algorithm, build_federation
from fedjax_cluster.files import check_writable, plain, write_json
from fedjax_cluster.simulation.loop import Evaluation, simulate
from fedjax_cluster.simulation.result import SimulationResult
from fedjax_cluster.simulation.run_directory import read_config, read_history
from fedjax_cluster.types import Federation


def run(
    config: RunConfig,
    *,
    run_dir: str | pathlib.Path | None = None,
    progress: bool | None = None,
    federation: Federation | None = None,
    callbacks: Sequence[Callable[[Evaluation], Mapping[str, float] | None]] = (),
    time_clustering: bool = False,
) -> SimulationResult:
    """Carries out one configuration.

    Args:
      config: the run.
      federation: the configuration's, where it has been built already.
      run_dir, progress, callbacks, time_clustering: see `simulate`.
    """
    if run_dir is not None:
        check_writable(pathlib.Path(run_dir))
        if (pathlib.Path(run_dir) / "config.json").exists():
            read_settings(pathlib.Path(run_dir))
            _note_rounds(pathlib.Path(run_dir), config)
    federation = build_federation(config) if federation is None else federation
    return _simulate(
        config, federation, run_dir=run_dir, progress=progress, callbacks=callbacks, time_clustering=time_clustering
    )


def _simulate(config: RunConfig, federation: Federation, **options: Any) -> SimulationResult:
    return simulate(
        build_algorithm(config),
        federation,
        rounds=config.rounds,
        seed=config.seed,
        eval_every=config.eval_every,
        eval_clients=config.eval_clients,
        churn=config.churn,
        config=config.to_json(),
        **options,
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
    config, done = _left(path)
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
    config, done = _left(path)
    if done == 0:
        raise ValueError(f"{path} has no checkpoint yet; continue it with resume")
    config = dataclasses.replace(config, rounds=done)
    return _simulate(config, build_federation(config), run_dir=path, progress=False)


def read_settings(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The identity and the experiment that the config.json of a run directory holds.

    Raises:
      ValueError: it is not a run directory, or the file is damaged.
    """
    with reading(path):
        content: Any = read_config(path)
    parts = [content.get(name) if isinstance(content, dict) else 0 for name in ("identity", "experiment")]
    identity, experiment = parts
    if (
        not (isinstance(identity, dict) and isinstance(experiment, dict | None))
        or not isinstance(identity.get("algorithm"), str)
        or not isinstance(identity.get("seed"), int)
    ):
        raise ValueError(
            f"{path / 'config.json'} is damaged, or no run's: it does not hold a method, seed and experiment"
        )
    return identity, experiment


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[None]:
    """Makes a ValueError that names the directory of what an unreadable file raises."""
    try:
        yield
    except (OSError, UnicodeDecodeError, csv.Error, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {' '.join(str(error).split())}") from error


def _left(path: pathlib.Path) -> tuple[RunConfig, int]:
    """The configuration of a run directory, and the rounds it has done."""
    _, experiment = read_settings(path)
    if experiment is None:
        raise ValueError(
            f"{path} was made by simulate() without a configuration; call simulate() with the same algorithm, "
            "federation and run_dir to continue it"
        )
    try:
        config = RunConfig.from_json(experiment)
        build_algorithm(config)
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"the experiment in {path / 'config.json'} is damaged: {error}") from error
    return config, _rounds_done(path)


def _rounds_done(path: pathlib.Path) -> int:
    try:
        return len(read_history(path).get("round", ()))
    except (ValueError, OSError, csv.Error):
        return 0


def _note_rounds(path: pathlib.Path, config: RunConfig) -> None:
    """Puts the rounds that are wanted into the config.json of a run that is equal otherwise, before any is computed."""
    content: Any = read_config(path)
    known, wanted = content["experiment"], plain(config.to_json())
    same = known and known != wanted and {**wanted, **known, "rounds": config.rounds} == wanted
    if same and _rounds_done(path) <= config.rounds:
        write_json(path / "config.json", {**content, "experiment": wanted})
