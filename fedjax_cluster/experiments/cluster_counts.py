"""How many clusters a method takes, and how many it has where nobody says it."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Literal, get_args

from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.data.partition import count_groups
from fedjax_cluster.experiments.robustness import build_fault
from fedjax_cluster.faults import arrivals
from fedjax_cluster.options import Described, described_options
from fedjax_cluster.simulation.churn import fewest_present
from fedjax_cluster.types import Federation

LOG = logging.getLogger(__name__)

FEW_CLUSTERS, MOST_CLUSTERS = 4, 16  # where there are no groups to count; where the method finds how many there are


def takes_clusters(method: str) -> bool:
    """Whether a method has a number of clusters."""
    return _option(method) is not None


def estimates_clusters(method: str) -> bool:
    """Whether a method takes "auto" for its number of clusters."""
    return (found := _option(method)) is not None and Literal["auto"] in get_args(found.hint)


def own_clusters(method: str) -> Any:
    """The default of a method's number of clusters; MISSING where the method must be given one, or has none."""
    return dataclasses.MISSING if (found := _option(method)) is None else found.default


def usual_clusters(method: str, clients: int, groups: int = 0) -> Any:
    """The number of clusters where a configuration has none: the method's own default, else by groups or clients."""
    if not takes_clusters(method):
        return None
    if (usual := own_clusters(method)) is dataclasses.MISSING:
        usual = MOST_CLUSTERS if REGISTRY[method].defaults.finds_clusters else groups or FEW_CLUSTERS
    return min(clients, usual) if isinstance(usual, int) else usual


def clusters_at_start(config: Any, federation: Federation) -> Any:
    """`usual_clusters` of a `RunConfig`: those who join later are not there yet when its clusters begin."""
    late = arrivals(federation, build_fault(config), config.seed)
    clients = fewest_present((*config.churn, *late), federation.train.num_examples, rounds=0)
    return usual_clusters(config.method, max(1, clients), count_groups(federation.group))


def say_clusters(given: Any, run: Any, federation: Federation) -> None:
    """Notes where the number of clusters that a method needs came from the data; of two `RunConfig`."""
    own, finds = own_clusters(run.method), REGISTRY[run.method].defaults.finds_clusters
    if given.clusters is not None or run.clusters in (None, own):
        return
    groups, what = count_groups(federation.group), f"K, the number of clusters, was {run.clusters}"
    if run.clusters != usual_clusters(run.method, len(federation.train.num_examples), groups):
        LOG.info(f"{what}{' at most' * finds}, as there are no more clients at the start")
    elif not finds:
        why = "the number of the scenario's groups" if groups else "as the scenario has no groups"
        why = why if own is dataclasses.MISSING else "as there are no more clients"
        LOG.info(f"{what}, {why}; --clusters gives another")


def _option(method: str) -> Described | None:
    return next((found for found in described_options(REGISTRY[method]) if found.name == "clusters"), None)
