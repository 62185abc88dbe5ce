"""Federations that the runs of a comparison share, and what of their settings decides them."""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Mapping
from typing import Any

from fedjax_cluster.data.by_name import READING
from fedjax_cluster.data.scenarios import SCENARIOS
from fedjax_cluster.experiments.config import RunConfig, build_federation
from fedjax_cluster.types import Federation

MOST_FEDERATIONS = 8  # that are kept in memory


def shared_federation(config: RunConfig, known: dict[Any, Federation], usual: int | None = None) -> Federation:
    """The configuration's federation; the last few are kept in `known`, as the methods of a comparison share them."""
    key = decides_data(config)
    if key not in known:
        while len(known) >= MOST_FEDERATIONS:
            known.pop(next(iter(known)))
        known[key] = build_federation(config, usual)
    return known[key]


def decides_data(config: RunConfig) -> str:
    """All of a configuration that its federation depends on."""
    names = ("scenario", "dataset", *READING, "population", "clients", "seed", "test_fraction", "examples_per_client")
    return repr([*(getattr(config, name) for name in names), sorted(config.scenario_options.items())])


def data_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration's JSON decides its data, besides the clients' number, which may be a usual one, and the
    seed; a value that is written in several ways is written in one. Nothing of a run without a configuration."""
    if not config:
        return {}
    names = ("scenario", "dataset", *READING, "population", "test_fraction", "examples_per_client")
    found = {name: config.get(name) for name in names}
    if found["population"] is not None:
        found["population"] = str(pathlib.Path(found["population"]))
    scenario, options = SCENARIOS.get(str(config.get("scenario"))), dict(config.get("scenario_options") or {})
    for name, parameter in ({} if scenario is None else inspect.signature(scenario).parameters).items():
        if parameter.default is not parameter.empty:
            options.setdefault(name, parameter.default)
    found |= {f"scenario_options.{name}": value for name, value in options.items()}
    return {name: _one_way(value) for name, value in found.items()}


def _one_way(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_one_way(each) for each in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
