"""Configurations whose clients are a population on disk."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedjax_cluster import data
from fedjax_cluster.data.by_name import READING
from fedjax_cluster.options import as_path, shown
from fedjax_cluster.types import Federation

# What else decides who has which rows.
OTHERS = (*("scenario", "dataset", *READING), *("test_fraction", "examples_per_client", "scenario_options"))


def check_data(config: Any) -> None:
    """Raises a ValueError where a `RunConfig` names data of two kinds, or users where its scenario forgets them."""
    scenario = data.scenarios.SCENARIOS[config.scenario]
    ours = scenario.__module__.startswith(data.__name__)
    for column in ("user_column", "group_column", "split_column"):
        given = getattr(config, column)
        if given is not None and config.population is None and ours and config.scenario != "users":
            whatever = "whatever they are for" if column == "split_column" else "whoever they belong to"
            raise ValueError(
                f"{column} is {shown(given)}, but scenario {config.scenario.replace('_', '-')} divides the rows anew, "
                f"{whatever}; give scenario users, or no {column}"
            )
    if config.population is None:
        return
    as_path("population", config.population)
    for field in dataclasses.fields(config):
        usual = {} if field.name == "scenario_options" else field.default
        if field.name in OTHERS and getattr(config, field.name) != usual:
            raise ValueError(
                f"{field.name} is {shown(getattr(config, field.name))}, but the clients are those of the population "
                f"{config.population}; give one of the two"
            )


def opened(folder: str, clients: int | None) -> Federation:
    """The population in a folder.

    Raises:
      ValueError: there is none, or it has another number of clients than the given one.
    """
    federation = data.open_population(folder)
    present = len(federation.train.num_examples)
    if clients not in (None, present):
        raise ValueError(f"clients is {clients}, but the population {folder} has {present}; leave it out")
    return federation
