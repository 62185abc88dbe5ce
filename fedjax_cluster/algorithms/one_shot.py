"""Clustered averaging for methods that cluster once, before training: FLAG and PACFL."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from rich.console import Console

from fedjax_cluster import parallel
from fedjax_cluster.algorithms import round as averaging
from fedjax_cluster.server import Weighting, update_clusters
from fedjax_cluster.types import ClientData, Clusters, Cohort, Costs, DatasetInfo, LocalUpdate, Model, RoundInfo, State


def train_in_clusters(
    model: Model, local: LocalUpdate, optimizer: optax.GradientTransformation, weighting: Weighting
) -> Callable[[Array, State, Cohort], tuple[State, RoundInfo]]:
    """The `step` of a method whose assignment does not change: per cluster, federated averaging.

    θ_k ← θ_k + Σ_i n_i Δθ_i / Σ_i n_i over the round's clients of cluster k (Eq. 8 of FLAG).

    Args:
      model: what is trained.
      local: what a client does.
      optimizer: the server's, its state in `state.server.optimizer`.
      weighting: "examples" or "uniform".
    """

    def step(rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        slots = state.clusters.active.shape[0]
        own = averaging.labels(parallel.gather_rows(cohort, state.clients.membership))
        slot = jnp.maximum(own, 0)
        mapped = parallel.for_each_client(
            lambda client, slot: (slot, averaging.train_client(rng_key, local, model, state.clusters, slot, client)),
            cohort,
            slot,
            num_slots=slots,
            reduce=lambda output: averaging.contribute(output[0], output[1], weighting),
            collect=lambda output: averaging.report(output[1]),
        )
        models, optimizer_state = update_clusters(optimizer, state.server.optimizer, state.clusters, mapped.reduced)
        participants = jnp.sum(cohort.mask.astype(jnp.float32))
        steps = jnp.sum(mapped.collected.num_steps.astype(jnp.float32))
        info = averaging.round_info(
            slot,
            mapped.collected,
            cohort.mask,
            mapped.accepted,
            slots,
            jnp.zeros((), jnp.int32),
            Costs(participants, participants, steps),
        )
        server = state.server._replace(optimizer=optimizer_state)
        return State(models, state.clients, server, state.round + 1), info

    return step


def start_clusters(rng_key: Array, model: Model, info: DatasetInfo, slots: int, found: int) -> Clusters:
    """`slots` models initialised independently, of which the first `found` are in use."""
    models = averaging.init_clusters(rng_key, model, info, slots)
    return models._replace(active=jnp.arange(slots) < found)


def nearest_cluster(distance: Array, weights: Array, known: Array, linkage: str) -> Array:
    """The cluster to which one client is nearest, as the linkage measures distances.

    Args:
      distance: f32[M], from the client to all.
      weights: f32[M, K], one-hot; a row of zeros for a client without a cluster.
      known: bool[M], clients that count.
      linkage: "average", "single" or "complete".

    Returns:
      i32[]; 0 where no cluster has a member.

    >>> weights = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> known = jnp.ones(3, bool)
    >>> int(nearest_cluster(jnp.asarray([3.0, 1.0, 4.0]), weights, known, "average"))
    1
    >>> int(nearest_cluster(jnp.asarray([3.0, 1.0, 4.0]), weights, known, "complete"))
    0
    """
    return jnp.argmin(cluster_distances(distance, weights, known, linkage)).astype(jnp.int32)


def cluster_distances(distance: Array, weights: Array, known: Array, linkage: str) -> Array:
    """f32[K], the distance of one client to each cluster, as in `nearest_cluster`; infinite without members."""
    members = (weights > 0) & known[:, None]
    distance = distance[:, None]
    if linkage == "single":
        return jnp.where(members, distance, jnp.inf).min(0)
    if linkage == "complete":
        return jnp.where(members.any(0), jnp.where(members, distance, -jnp.inf).max(0), jnp.inf)
    count = members.astype(jnp.float32).sum(0)
    total = jnp.where(members, distance, 0.0).sum(0)
    return jnp.where(count > 0, total / jnp.maximum(count, 1.0), jnp.inf)


def largest_cluster(weights: Array) -> Array:
    """i32[], the cluster with most members of weights f32[M, K]."""
    return jnp.argmax(weights.sum(0)).astype(jnp.int32)


def with_largest(labels: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Puts present clients that could not be clustered (label −1) into the largest cluster.

    >>> with_largest(np.array([0, 1, 1, -1, -1]), np.array([True, True, True, True, False])).tolist()
    [0, 1, 1, 1, -1]
    """
    known = labels[labels >= 0]
    largest = int(np.bincount(known).argmax()) if len(known) else 0
    return np.where(present, np.where(labels >= 0, labels, largest), -1).astype(np.int32)


def check_found(method: str, found: int, slots: int, at: str) -> None:
    """Raises a ValueError where a method found more clusters than there are slots."""
    if found > slots:
        raise ValueError(
            f"{method} found {found} clusters at {at}, but clusters is {slots}, the most there can be; "
            f"raise clusters to {found}, or raise threshold to merge more"
        )


def check_classes(method: str, info: DatasetInfo, data: ClientData) -> None:
    """Raises a ValueError where examples have no class, which subspaces by class need."""
    if info.num_classes < 1 or np.ndim(data.y) != 2:
        raise ValueError(
            f"{method} compares clients class by class, but the examples of {info.name} have no class labels; "
            "use a method that clusters by gradients, such as cfl-gp"
        )


def clocked(cluster: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What a part of the clustering gives, and its seconds on the server's clock without compilation."""
    if (lower := getattr(cluster, "lower", None)) is not None:
        cluster = lower(*arguments).compile()
    else:
        # A function of the host that compiles what it needs inside.
        cluster(*arguments)
    started = time.perf_counter()
    result = jax.block_until_ready(cluster(*arguments))
    return result, time.perf_counter() - started


@contextlib.contextmanager
def progress_note(text: str) -> Iterator[Callable[[str], Any]]:
    """Shows on a terminal what goes on before the first round; yields a function that changes the text."""
    with Console(stderr=True).status(text) as status:
        yield status.update
