"""What a run or a comparison would do, without doing any of it."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedjax_cluster.data import cache
from fedjax_cluster.experiments.comparison import run_name
from fedjax_cluster.experiments.config import (
    OF_METHOD,
    RunConfig,
    build_algorithm,
    build_federation,
    settled,
    training_text,
    usual_clients,
)
from fedjax_cluster.experiments.robustness import build_fault
from fedjax_cluster.experiments.runs import rounds_done
from fedjax_cluster.faults import afflict
from fedjax_cluster.files import check_writable
from fedjax_cluster.options import as_json
from fedjax_cluster.report.names import counted, method_name
from fedjax_cluster.report.table import Column, Number, Table
from fedjax_cluster.simulation.arguments import check_arguments
from fedjax_cluster.simulation.churn import Schedule
from fedjax_cluster.simulation.identity import identity_of
from fedjax_cluster.simulation.run_directory import RunDirectory
from fedjax_cluster.types import Federation

TITLE = "A dry run: nothing is run, and nothing is written"


class Plan(NamedTuple):
    """A run before it is run."""

    config: RunConfig
    done: int  # rounds that the directory has already
    train_rows: int
    test_rows: int
    parameters: int  # of one model
    bytes: int  # of one model's parameters and statistics

    def task(self) -> str:
        """What is left to do."""
        if self.done >= self.config.rounds:
            return f"nothing: all {self.config.rounds} rounds are done"
        more = f"; {counted(self.done, 'round')} done before" if self.done else ""
        return counted(self.config.rounds - self.done, "round") + more


def plan(config: RunConfig, directory: str | pathlib.Path, federation: Federation | None = None) -> Plan:
    """What a run would do in a directory; refuses what the run would refuse before its first round.

    Args:
      config: the run.
      directory: where it would be left; nothing is written there.
      federation: the configuration's, where it has been built already.

    Raises:
      ValueError: as `experiments.runs.run` raises it, such as for the directory of another experiment.
    """
    with cache.reading_only():
        config, federation = settled(config, federation)
    algorithm = build_algorithm(config)
    settings = {name: getattr(config, name) for name in ("rounds", "seed", "eval_every", "eval_clients")}
    fault = build_fault(config)
    churn = check_arguments(algorithm, federation, churn=config.churn, run_dir=directory, fault=fault, **settings)
    algorithm, federation = afflict(algorithm, federation, fault, config.seed)
    schedule = Schedule(churn, algorithm, federation.train.num_examples)
    path, done = pathlib.Path(directory), 0
    if path.exists():
        identity = identity_of(
            algorithm, federation, config.seed, config.eval_every, config.eval_clients, schedule.changes, fault
        )
        RunDirectory(path, identity, config.to_json(), len(federation.train.num_examples))
        done = rounds_done(path)
        if done > config.rounds:
            raise ValueError(f"{path} has {done} rounds already, but rounds is {config.rounds}; give at least {done}")
    else:
        check_writable(path)
    variables = jax.eval_shape(lambda key: algorithm.model.init(key, federation.info), jax.random.key(0))
    leaves = jax.tree.leaves(variables)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables.params))
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    train, test = (int(np.sum(part.num_examples)) for part in (federation.train, federation.test))
    return Plan(config, done, train, test, parameters, size)


def run_table(planned: Plan, directory: pathlib.Path) -> Table:
    """The configuration of a run, and what it would do."""
    lines = {**_settings(planned.config), **_size(planned), "would do": planned.task(), "directory": str(directory)}
    return Table(TITLE, (Column(""), Column("")), tuple(lines.items()))


def comparison_tables(
    configs: Mapping[str, RunConfig], seeds: Sequence[int], directory: pathlib.Path
) -> tuple[Table, Table]:
    """What the runs of a comparison share, and a row a method of what each would do; a refusal is told in its row.

    Raises:
      ValueError: every method is refused, for the first's reason.
    """
    with cache.reading_only():
        first = next(iter(configs.values()))
        federation = build_federation(dataclasses.replace(first, seed=seeds[0]), usual_clients(configs.values()))
    rows, refused, sizes = [], [], {}
    for label, config in configs.items():
        try:
            plans = [
                plan(dataclasses.replace(config, seed=seeds[0]), directory / run_name(label, seeds[0]), federation)
            ]
            sizes = sizes or _size(plans[0])
            left = sum(
                rounds_done(path) < config.rounds if (path := directory / run_name(label, seed)).exists() else True
                for seed in seeds
            )
            task = counted(left, "run") + (f" of {len(seeds)}" if left < len(seeds) else "")
            options = " ".join(f"{name} {as_json(value)}" for name, value in config.method_options.items())
            rows.append((method_name(label), Number(plans[0].parameters), task, training_text(config), options))
        except ValueError as error:
            refused.append(error)
            rows.append((method_name(label), None, f"refused: {error}", "", ""))
    if len(refused) == len(configs):
        raise refused[0]
    own = {name.replace("_", " ") for name in ("method", "method_options", "seed", *OF_METHOD)}
    shared = {name: text for name, text in _settings(first).items() if name not in own}
    lines = {**shared, "seeds": " ".join(map(str, seeds)), **sizes, "directory": str(directory)}
    columns = (Column("method"), Column("parameters"), Column("would do"), Column("training"), Column("options"))
    return Table(TITLE, (Column(""), Column("")), tuple(lines.items())), Table("", columns, tuple(rows))


def _settings(config: RunConfig) -> dict[str, str]:
    """The settings that have a value, by name."""
    content = {name.replace("_", " "): value for name, value in config.to_json().items()}
    return {name: _text(value) for name, value in content.items() if value not in (None, (), {}, [])}


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(of)}" for name, of in value.items() if of not in (None, (), {}, []))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _size(planned: Plan) -> dict[str, str]:
    return {
        "examples": f"{planned.train_rows:,} for training, {planned.test_rows:,} for testing",
        "model size": f"{planned.parameters:,} parameters, {planned.bytes / 1e6:,.2f} MB",
    }
