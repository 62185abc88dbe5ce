"""Scenarios by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from fedjax_cluster.data.scenarios.images import mixed_datasets, mixture, rotated
from fedjax_cluster.data.scenarios.labels import dirichlet, heterogeneity_levels, label_groups
from fedjax_cluster.data.scenarios.meanings import label_permutation, label_shift, label_swap
from fedjax_cluster.data.scenarios.natural import users
from fedjax_cluster.data.scenarios.overlap import class_overlap
from fedjax_cluster.data.scenarios.synthetic import linear_regression, xor
from fedjax_cluster.data.scenarios.visual import domains
from fedjax_cluster.types import Federation

SCENARIOS: dict[str, Callable[..., Federation]] = {
    scenario.__name__: scenario
    for scenario in (
        rotated,
        mixture,
        mixed_datasets,
        linear_regression,
        xor,
        dirichlet,
        heterogeneity_levels,
        label_groups,
        class_overlap,
        label_swap,
        label_permutation,
        label_shift,
        domains,
        users,
    )
}


def get_scenario(name: str) -> Callable[..., Federation]:
    """The scenario of a name, with hyphens or underscores.

    Raises:
      ValueError: there is none; the message lists them all, and the closest.

    >>> get_scenario("mixed-datasets").__name__
    'mixed_datasets'
    """
    scenario = SCENARIOS.get(name.strip().lower().replace("-", "_"))
    if scenario is None:
        close = difflib.get_close_matches(name.lower().replace("-", "_"), SCENARIOS, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise ValueError(f"There is no scenario {name!r}. {hint}Scenarios: {', '.join(sorted(SCENARIOS))}.")
    return scenario
