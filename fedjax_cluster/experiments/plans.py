"""What a run or a comparison would do, without doing any of it."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_cluster import tree
from fedjax_cluster.algorithms.planned import check_clusters
from fedjax_cluster.data import cache
from fedjax_cluster.experiments import comparison
from fedjax_cluster.experiments.comparison import run_name, shared_federation
from fedjax_cluster.experiments.config import OF_METHOD, RunConfig, build_algorithm, settled, training_text
from fedjax_cluster.experiments.robustness import build_fault
from fedjax_cluster.experiments.runs import as_begun, known_config, rounds_done
from fedjax_cluster.experiments.tuning import FACTORS, check_tuning, grid
from fedjax_cluster.faults import afflict
from fedjax_cluster.files import check_writable
from fedjax_cluster.options import as_json
from fedjax_cluster.report.names import counted, method_name
from fedjax_cluster.report.table import Column, Number, Table
from fedjax_cluster.simulation.arguments import check_arguments
from fedjax_cluster.simulation.churn import Schedule, fewest_present
from fedjax_cluster.simulation.identity import identity_of
from fedjax_cluster.simulation.planning import check_lots
from fedjax_cluster.simulation.run_directory import RunDirectory
from fedjax_cluster.types import Federation

LAYER_OPTIONS = ("shared_layers", "profile_layers", "layers")  # paths of parameters, which need the model
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


def plan(
    config: RunConfig, directory: str | pathlib.Path, federation: Federation | None = None, *, tune: bool = False
) -> Plan:
    """What a run would do in a directory; refuses what the run would refuse before its first round.

    Args:
      config: the run.
      directory: where it would be left; nothing is written there.
      federation: the configuration's, where it has been built already.
      tune: whether the learning rate is chosen first, so that a run which is there has another.

    Raises:
      ValueError: as `experiments.runs.run` raises it, such as for the directory of another experiment.
    """
    given, known = config, known_config(pathlib.Path(directory))
    if tune and known is not None and known.tuning:
        config = dataclasses.replace(config, learning_rate=known.learning_rate, tuning=known.tuning)
    with cache.reading_only():
        config, federation = settled(as_begun(config, known), federation)
    algorithm = build_algorithm(config)
    settings = {name: getattr(config, name) for name in ("rounds", "seed", "eval_every", "eval_clients")}
    fault = build_fault(config)
    churn = check_arguments(algorithm, federation, churn=config.churn, run_dir=directory, fault=fault, **settings)
    algorithm, federation = afflict(algorithm, federation, fault, config.seed)
    schedule = Schedule(churn, algorithm, federation.train.num_examples)
    if isinstance(clusters := getattr(algorithm, "clusters", None), int):
        check_clusters(clusters, fewest_present(schedule.changes, federation.train.num_examples, rounds=0))
    check_lots(algorithm, federation)
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
    for option in LAYER_OPTIONS:
        if isinstance(paths := getattr(algorithm, option, None), tuple):
            tree.match(variables.params, paths)
    leaves = jax.tree.leaves(variables)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables.params))
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    train, test = (int(np.sum(part.num_examples)) for part in (federation.train, federation.test))
    if known is not None and config.tuning != given.tuning and config.rounds != known.rounds:  # tried for longer
        config = dataclasses.replace(config, learning_rate=given.learning_rate, tuning=given.tuning)
    return Plan(config, done, train, test, parameters, size)


def run_table(planned: Plan, directory: pathlib.Path, *, tune: bool = False) -> Table:
    """The configuration of a run, and what it would do."""
    lines = {**_settings(planned.config.to_json()), **_size(planned)}
    first = (
        f"try the learning rates {_text(grid(planned.config.learning_rate))}"
        if tune and not planned.config.tuning
        else None
    )
    lines |= _settings({"first": first, "would do": planned.task(), "directory": str(directory)})
    return Table(TITLE, (Column(""), Column("")), tuple(lines.items()))


def comparison_tables(
    configs: Mapping[str, RunConfig],
    seeds: Sequence[int],
    directory: pathlib.Path,
    cells: Mapping[str, Mapping[str, Any]] | None = None,
    refused: Mapping[str, str] | None = None,
    tune: bool = False,
) -> tuple[Table, Table]:
    """What the runs of a comparison share, and a row a method or cell of what each would do; refusals are told there.

    Args:
      configs, seeds, directory, cells, refused: as of `comparison.compare`.
      tune: whether each method's learning rate is chosen first.

    Raises:
      ValueError: every method is refused, for the first's reason.
    """
    before = comparison.read(directory) if comparison.is_comparison(directory) else None
    configs = {label: as_begun(each, before and before.configs.get(label)) for label, each in configs.items()}
    usual, known, plans, rows, errors = comparison.usual_number(configs, before), {}, [], {}, []
    for label, config in configs.items():
        seeded = dataclasses.replace(config, seed=seeds[0])
        try:
            with cache.reading_only():
                federation = shared_federation(seeded, known, usual)
            planned = plan(seeded, directory / run_name(label, seeds[0]), federation, tune=tune)
            left = sum(
                rounds_done(path) < config.rounds if (path := directory / run_name(label, seed)).exists() else True
                for seed in seeds
            )
            plans.append(planned)
            task = counted(left, "run") + (f" of {len(seeds)}" if left < len(seeds) else "")
            options = " ".join(f"{name} {as_json(value)}" for name, value in config.method_options.items())
            rows[label] = (method_name(label), Number(planned.parameters), task, training_text(config), options)
        except ValueError as error:
            errors.append(error)
            rows[label] = _refusal(label, error)
    if not plans:
        raise errors[0]
    rows |= {label: _refusal(label, why) for label, why in (refused or {}).items()}
    # What is swept is in the cells' names, whatever values were drawn.
    own = {"method", "method_options", "seed", *OF_METHOD, *(option for of in (cells or {}).values() for option in of)}
    shared = _common([config.to_json() for config in configs.values()])
    settings = _settings({name: value for name, value in shared.items() if name not in own})
    sizes = _common([_size(each) for each in plans])
    first = {"first": _tuning(configs.values())} if tune else {}
    lines = {**settings, **first, "seeds": " ".join(map(str, seeds)), **sizes, "directory": str(directory)}
    columns = (
        *(Column("cell" if cells else "method"), Column("parameters")),
        *(Column("would do"), Column("training"), Column("options")),
    )
    in_order = tuple(rows[label] for label in cells or configs)
    return Table(TITLE, (Column(""), Column("")), tuple(lines.items())), Table("", columns, in_order)


def _tuning(configs: Iterable[RunConfig]) -> str:
    try:
        for config in configs:
            check_tuning(config)
    except ValueError as error:
        return f"try no learning rates: {error}"
    return f"try {len(FACTORS)} learning rates of each method"


def _refusal(label: str, why: object) -> tuple[str, None, str, str, str]:
    return method_name(label), None, f"refused: {why}", "", ""


def _common(contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all have, also of mappings within them."""
    first, found = contents[0], {}
    for name, value in first.items():
        others = [content.get(name) for content in contents]
        if isinstance(value, Mapping):
            found[name] = _common([other if isinstance(other, Mapping) else {} for other in others])
        elif all(other == value for other in others):
            found[name] = value
    return found


def _settings(content: Mapping[str, Any]) -> dict[str, str]:
    """The settings that have a value, by name."""
    return {name.replace("_", " "): _text(of) for name, of in content.items() if of not in (None, (), {}, [])}


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
