"""What differential privacy asks of a run, and what a run has spent of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedjax_cluster.cohorts import cohort_size
from fedjax_cluster.privacy.budget import Budget, check_accountant, check_cohorts, spent
from fedjax_cluster.privacy.gaussian import SHOWN
from fedjax_cluster.server import NO_STATISTICS
from fedjax_cluster.types import Churn, Federation


def check_private(
    algorithm: Any, federation: Federation, churn: Sequence[Churn], arriving: Sequence[Churn] = ()
) -> None:
    """Raises a ValueError where a private run cannot be, or its budget not be counted.

    Args:
      arriving: the joins of a fault.
    """
    privacy = getattr(algorithm, "privacy", None)
    if privacy is None:
        return
    check_accountant()
    if churn:
        raise ValueError(
            "privacy is given, but clients join or leave, and its budget is of clients that are there from the start; "
            "leave out the churn, or the privacy"
        )
    if arriving:
        raise ValueError(
            f"privacy is given, but the fault's clients join after {arriving[0].round} rounds, and its budget is of "
            "clients that are there from the start; give another fault, or no privacy"
        )
    clients, cohort = _population(algorithm, federation)
    if privacy.delta * clients >= 1:
        raise ValueError(
            f"delta is {privacy.delta:g}, but there are {clients} clients: to tell all of one of them at random would "
            f"keep to it; give a delta far below {1 / clients:.3g}"
        )
    check_cohorts(privacy, clients, cohort)
    shapes = jax.eval_shape(lambda key: algorithm.model.init(key, federation.info), jax.random.key(0))
    if jax.tree.leaves(shapes.stats):
        raise ValueError(NO_STATISTICS)


def budget_of(algorithm: Any, federation: Federation, rounds: int) -> Budget | None:
    """What so many rounds have spent; None without privacy."""
    privacy = getattr(algorithm, "privacy", None)
    if privacy is None:
        return None
    clients, cohort = _population(algorithm, federation)
    return spent(privacy, clients=clients, cohort=cohort, rounds=rounds, shown=algorithm.times_shown(rounds))


def _population(algorithm: Any, federation: Federation) -> tuple[int, int]:
    """The clients, and those of a round whose secret draw counts."""
    clients = int(np.sum(np.asarray(federation.train.num_examples) > 0))
    # The server sees who shows it something.
    known = algorithm.sends == SHOWN or algorithm.participation == 1
    return clients, clients if known else cohort_size(algorithm.participation, clients)
