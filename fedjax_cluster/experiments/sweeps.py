"""Sweeps: one configuration with several values of some of its options, on a grid or drawn at random, over seeds."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_cluster.experiments import comparison
from fedjax_cluster.experiments.config import KINDS, RunConfig, known_name, needed_options
from fedjax_cluster.experiments.config_files import overridden
from fedjax_cluster.experiments.outcomes import Outcome
from fedjax_cluster.options import COUNT, as_json, checked, shown
from fedjax_cluster.report.names import label_of, option_name, value_text

LOG = logging.getLogger(__name__)

MOST_TRIES = 100  # draws for each cell that is wanted
DIGITS = 3  # of a number that is drawn
Values = Mapping[str, Any]  # option -> value
# What a sweep repeats or runs over by itself.
NOT_SWEPT = {
    "seed": "--seeds N repeats every cell with N seeds",
    "churn": "the clients who join and leave are one value",
}


class Cell(NamedTuple):
    """One row of a sweep."""

    values: dict[str, Any]  # option -> value, as JSON has it
    config: RunConfig | None
    refused: str = ""  # why there is no configuration


def sweep(
    settings: Values, axes: Mapping[str, Sequence[Any]], *, draws: int | None = None, **options: Any
) -> list[Outcome]:
    """Runs a configuration with every combination of some options' values, each over the same seeds.

    Args:
      settings: of `RunConfig`, by name, such as `{"method": "ifca", "rounds": 30}`; what is not there has its default.
      axes: option -> its values; an option of the method, scenario or model by its name, or as "method_options.NAME".
      draws: so many random combinations in place of all; see `drawn`. They depend on the settings' `seed`.
      **options: `seeds` (by default the settings' one), `run_dir`, `failed` and what else `comparison.compare` takes.
        The directory is one of a comparison: `comparison.resume` takes it up, and `report.tables.comparison_table`
        makes its table of the outcomes and `comparison.read(run_dir).cells`. Where no `failed` is given, what fails is
        a warning.

    Returns:
      The outcome of each combination; its label names the values. One that cannot be run, such as more clusters than
      clients, says why in `failed`.

    Raises:
      ValueError: an option that there is not, no or equal values, or no combination that can be run.

    >>> settings = {"method": "fedavg", "model": "linear", "clients": 4, "rounds": 2}
    >>> [each.label for each in sweep(settings, {"learning_rate": (0.1, 1.0)}, progress=False)]
    ['learning rate 0.1', 'learning rate 1']
    """
    places = {name: _place(settings, name) for name in axes}
    chosen = combinations(axes, draws, int(settings.get("seed", 0)))

    def make(values: Values) -> RunConfig:
        changes: dict[str, Any] = {}
        for name, value in values.items():
            part, _, option = places[name].partition(".")
            changes[part] = {**changes.get(part, {}), option: value} if option else value
        return RunConfig(**overridden(settings, changes))

    found = cells(chosen, make)
    seeds = (int(settings.get("seed", 0)),)
    return comparison.compare(**compared(found), **{"failed": _warned, "seeds": seeds, **options})


def _warned(label: str, seed: int, reason: str) -> None:
    LOG.warning("%s seed %s failed: %s", label, seed, reason)


def cells(combined: Iterable[Values], make: Callable[[Values], RunConfig]) -> dict[str, Cell]:
    """Label -> cell, in the order of the combinations; one whose configuration is refused says why.

    Args:
      combined: option -> value.
      make: the configuration of one.

    Raises:
      ValueError: every one is refused; the first's reason.
    """
    found: dict[str, Cell] = {}
    errors: list[ValueError] = []
    for values in combined:
        label, values = label_of(values), {name: as_json(value) for name, value in values.items()}
        try:
            found[label] = Cell(values, make(values))
        except ValueError as error:
            errors.append(error)
            found[label] = Cell(values, None, " ".join(str(error).split()))
    if errors and len(errors) == len(found):
        raise errors[0]
    return found


def compared(found: Mapping[str, Cell]) -> dict[str, Any]:
    """The arguments of `comparison.compare` that are cells."""
    return {
        "configs": {label: cell.config for label, cell in found.items() if cell.config is not None},
        "cells": {label: cell.values for label, cell in found.items()},
        "refused": {label: cell.refused for label, cell in found.items() if cell.config is None},
    }


def grid(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination, the last option's values fastest.

    >>> grid({"clusters": (2, 4), "every": (1,)})
    [{'clusters': 2, 'every': 1}, {'clusters': 4, 'every': 1}]
    """
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def drawn(axes: Mapping[str, Sequence[Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """Random combinations, no two alike; more of them begin with the same.

    Two positive floats are the ends of a log-uniform distribution, other two numbers those of a uniform one (whole
    numbers: both ends can be drawn); of anything else, or of more values, each is equally likely. Numbers are rounded
    to three digits.

    Args:
      axes: option -> its ends, or its values.
      count: combinations; fewer where there are not so many, which the log tells.
      seed: decides the draws.

    >>> [sorted(each) for each in drawn({"learning_rate": (0.01, 1.0)}, 2, 0)]
    [['learning_rate'], ['learning_rate']]
    """
    generator, found = np.random.default_rng(seed), {}
    for _ in range(MOST_TRIES * count):
        values = {name: _draw(generator, of) for name, of in axes.items()}
        found.setdefault(label_of(values), values)
        if len(found) == count:
            break
    else:
        LOG.info(f"only {len(found)} different combinations were found for the {count} draws")
    LOG.info("; ".join(f"{option_name(name)} {_distribution(of)}" for name, of in axes.items()))
    return list(found.values())


def combinations(axes: Mapping[str, Sequence[Any]], draws: int | None, seed: int) -> list[dict[str, Any]]:
    """All combinations of the options' values, or so many random ones; a ValueError for what cannot be swept."""
    if not axes:
        raise ValueError(
            "a sweep needs an option with several values, such as: --learning-rate 0.01 0.03 0.1 "
            "(a single new one goes beside one that is there)"
        )
    for name, values in axes.items():
        if name in NOT_SWEPT:
            raise ValueError(f"{name} cannot be swept: {NOT_SWEPT[name]}")
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise ValueError(f"the values of {name} are {shown(values)}; give a list of them")
        texts = [value_text(value) for value in values]
        if "nan" in texts:
            raise ValueError(f"{name} has nan among its values; give numbers")
        if twice := [text for place, text in enumerate(texts) if text in texts[:place]]:
            raise ValueError(f"{name} has the value {twice[0]} twice; give each once")
        if not texts:
            raise ValueError(f"{name} has no values; give several")
    count = math.prod(map(len, axes.values())) if draws is None else checked("random", draws, int, COUNT)
    if not comparison.RUNS.holds(count):
        raise ValueError(f"the sweep has {count} combinations; at most 10000 runs fit into one")
    return grid(axes) if draws is None else drawn(axes, count, seed)


def _place(settings: Values, name: str) -> str:
    """Where a setting or option is: "learning_rate", "method_options.every"."""
    if name in RunConfig.__dataclass_fields__ and not name.endswith("_options"):
        return name
    known = []
    for kind, (registry, _) in KINDS.items():
        default = RunConfig.__dataclass_fields__[kind].default
        part = known_name(kind, settings.get(kind, default), registry)
        options = needed_options(kind, part)
        if name.removeprefix(f"{kind}_options.") in options:
            return f"{kind}_options.{name.rpartition('.')[2]}"
        known += options
    raise ValueError(
        f"a sweep over {shown(name)}: there is no such setting or option; settings: "
        f"{', '.join(RunConfig.__dataclass_fields__)}; options here: {', '.join(known)}"
    )


def _is_range(values: Sequence[Any]) -> bool:
    return len(values) == 2 and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _is_log(values: Sequence[Any]) -> bool:
    return min(values) > 0 and any(isinstance(value, float) for value in values)


def _draw(generator: np.random.Generator, values: Sequence[Any]) -> Any:
    if not _is_range(values):
        return values[int(generator.integers(len(values)))]
    low, high = sorted(values)
    if all(isinstance(value, int) for value in values):
        return int(generator.integers(low, high + 1))
    number = (
        math.exp(generator.uniform(math.log(low), math.log(high))) if _is_log(values) else generator.uniform(low, high)
    )
    # Rounding leaves nothing beyond the ends.
    return min(max(float(f"{number:.{DIGITS}g}"), low), high)


def _distribution(values: Sequence[Any]) -> str:
    if not _is_range(values):
        return f"is drawn from {', '.join(map(value_text, values))}"
    low, high = sorted(values)
    between = f"between {value_text(low)} and {value_text(high)}"
    if all(isinstance(value, int) for value in values):
        return f"is drawn uniformly from the whole numbers {between}"
    return f"is drawn {'log-uniformly' if _is_log(values) else 'uniformly'} {between}"
