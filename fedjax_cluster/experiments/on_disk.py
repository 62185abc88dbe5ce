"""Configurations whose clients are a population on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedjax_cluster import data
from fedjax_cluster.data.by_name import READING
from fedjax_cluster.data.scenarios.registry import draws_examples
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
        for field in dataclasses.fields(config):
            given = getattr(config, field.name)
            # Else a data set would stand in the run's configuration that nobody had looked at.
            if draws_examples(config.scenario) and field.name in ("dataset", *READING) and given != field.default:
                raise ValueError(
                    f"{field.name} is {shown(given)}, but scenario {config.scenario.replace('_', '-')} makes its own "
                    f"data; leave {field.name} out, or give another scenario"
                )
        return
    as_path("population", config.population)
    for field in dataclasses.fields(config):
        usual = {} if field.name == "scenario_options" else field.default
        if field.name in OTHERS and getattr(config, field.name) != usual:
            raise ValueError(
                f"{field.name} is {shown(getattr(config, field.name))}, but the clients are those of the population "
                f"{config.population}; give one of the two"
            )


def as_now(content: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of a file, where earlier versions may have put what is called otherwise, or refused, today."""
    # Runs of version 0.1 call it membership.
    content = {{"membership": "churn"}.get(name, name): value for name, value in content.items()}
    scenario = content.get("scenario")
    if content.get("population") is None and isinstance(scenario, str) and scenario in data.scenarios.SCENARIOS:
        unread = ("dataset", *READING) if draws_examples(scenario) else ()
        content = {name: value for name, value in content.items() if name not in unread}
    return content


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
