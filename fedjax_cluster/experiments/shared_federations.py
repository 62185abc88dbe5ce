"""Federations that the runs of a comparison share, and what of their settings decides them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedjax_cluster.data.by_name import READING
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
    seed."""
    names = ("scenario", "dataset", *READING, "population", "test_fraction", "examples_per_client")
    options = {f"scenario_options.{name}": value for name, value in (config.get("scenario_options") or {}).items()}
    return {**{name: config.get(name) for name in names}, **options}
