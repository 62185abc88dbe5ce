"""What a run has cost: models sent, gradients, losses, and the server's time for clustering."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from fedjax_cluster import parallel, tree
from fedjax_cluster.types import ClientMapping, ClusteredAlgorithm, Costs, State

CLUSTERING_SECONDS = "clustering_seconds"
TIMED_CALLS = 5


class Ledger(NamedTuple):
    """What a run has cost in all (Tables 5 and 6 of CFL-GP)."""

    models_down: float  # models sent to clients, in units of d
    models_up: float  # updates sent back, in units of d
    bytes_down: float
    bytes_up: float
    gradient_evaluations: float  # mini-batch gradients
    loss_evaluations: float  # mini-batch losses
    clusterings: float  # times that the server clustered
    clustering_seconds: float | None  # its time for them; None where nobody took it
    seconds_per_clustering: float | None


def ledger(history: dict[str, np.ndarray], state: State) -> Ledger:
    """Sums a history's costs; a model is its parameters and batch-norm statistics, each in its own format."""
    slots = state.clusters.active.shape[0]
    model = tree.num_bytes((state.clusters.params, state.clusters.stats)) / slots
    total = {
        name: float(np.sum(history[name], dtype=np.float64)) for name in Costs._fields if name != "clustering_seconds"
    }
    down, up, clusterings = total["models_down"], total["models_up"], total["clusterings"]
    seconds = 0.0 if clusterings == 0 else None
    if CLUSTERING_SECONDS in history and clusterings > 0:
        # Not where a run was extended without being timed.
        total_time = float(np.sum(history[CLUSTERING_SECONDS][history["clusterings"] > 0]))
        seconds = total_time if np.isfinite(total_time) else None
    return Ledger(
        down,
        up,
        down * model,
        up * model,
        total["gradient_evaluations"],
        total["loss_evaluations"],
        clusterings,
        seconds,
        seconds / clusterings if seconds is not None and clusterings > 0 else None,
    )


def with_clustering_seconds(
    history: dict[str, np.ndarray],
    algorithm: ClusteredAlgorithm,
    rng_key: Array,
    state: State,
    mapping: ClientMapping,
    initial: float,
) -> dict[str, np.ndarray]:
    """The history with a column `clustering_seconds`, the server's time for the clustering of each round.

    Rounds run inside one compiled loop, where no clock can be read. So the method's `cluster` is timed by itself on
    the final state, and a round's time is its number of clusterings times the median of five calls: an estimate.
    `initial` is what a method that clusters in `init` measured there, 0 in a run that is taken up, which has what it
    had. The history is returned unchanged where the server never clustered, or nothing of it can be timed.
    """
    count = history["clusterings"]
    if algorithm.cluster is None and not initial and CLUSTERING_SECONDS in history:  # taken up
        initial = float(np.nan_to_num(history[CLUSTERING_SECONDS][0]))
    if not np.nansum(count) or (algorithm.cluster is None and not initial):
        return history
    if algorithm.cluster is None:
        seconds = at_the_start(initial, len(count))
    else:
        again = _cluster.prepared(rng_key, state, algorithm=algorithm, mapping=mapping)
        seconds = count * seconds_per_call(again)
    return {**history, CLUSTERING_SECONDS: seconds}


def at_the_start(seconds: float, rounds: int) -> np.ndarray:
    """The column of a method that clusters before its first round alone.

    >>> at_the_start(0.5, 3)
    array([0.5, 0. , 0. ])
    """
    return np.append(seconds, np.zeros(rounds - 1))


@parallel.kept_program(static_argnames=("algorithm", "mapping"))
def _cluster(rng_key: Array, state: State, *, algorithm: ClusteredAlgorithm, mapping: ClientMapping) -> Any:
    assert algorithm.cluster is not None
    return algorithm.cluster(rng_key, state, mapping=mapping)


def seconds_per_call(call: Callable[[], Any]) -> float:
    """Median seconds of five calls of a program, without its compilation."""
    seconds = []
    jax.block_until_ready(call())
    for _ in range(TIMED_CALLS):
        started = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))
