"""CFL's first state: all clients in the first cluster, and no splits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster import tree
from fedjax_cluster.algorithms.cfl.landmarks import landmarks_among, with_everybody
from fedjax_cluster.algorithms.cfl.splits import Clients, Server, empty_splits
from fedjax_cluster.algorithms.round import cluster_variables, first_state, one_hot
from fedjax_cluster.local import server_key
from fedjax_cluster.types import Clusters, RoundInfo, State


def start_state(rng_key: Array, models: Clusters, present: Array, *, method: Any) -> tuple[State, RoundInfo]:
    """Clients that have sent nothing, and a server that has seen nothing, of a `cfl` method."""
    models = models._replace(active=jnp.arange(method.clusters) == 0)
    everybody, one = present, cluster_variables(models, jnp.asarray(0))
    landmarks = None if method.landmarks is None else landmarks_among(method, present)
    present = present if landmarks is None else present[landmarks]
    capacity = len(present)
    width = method.secret(models).size
    kept = width if method.edge_coordinates is None else min(method.edge_coordinates, width)
    coordinates = jnp.zeros(0, jnp.int32)
    if kept < width:
        chosen = jax.random.choice(server_key(rng_key), width, (kept,), replace=False)
        coordinates = jnp.sort(chosen).astype(jnp.int32)
    clients = Clients(
        membership=one_hot(jnp.where(present, 0, -1), method.clusters),
        present=present,
        update=jnp.zeros((capacity, width)),
        share=jnp.zeros(capacity),
        seen=jnp.zeros(capacity, bool),
        valid=jnp.zeros(capacity, bool),
        side=jnp.full((capacity, method.num_splits), -1, jnp.int32),
        edges=jnp.zeros((capacity, method.num_splits, kept)),
        optimizer=tree.broadcast(method.start_optimizer(one.params), capacity),
    )
    never = jnp.full(method.clusters, -1, jnp.int32)
    server = Server(
        splits=empty_splits(one, method.num_splits),
        origin=never,
        tested=never,
        mean_norm=jnp.full(method.clusters, jnp.nan),
        max_norm=jnp.full(method.clusters, jnp.nan),
        largest=jnp.zeros(()),
        refused=never,
        fell_back=never,
        similarity=jnp.zeros((capacity, capacity)),
        coordinates=coordinates,
    )
    state, info = first_state(models, clients, method.optimizer, server)
    return (state if landmarks is None else with_everybody(state, everybody, landmarks)), info
