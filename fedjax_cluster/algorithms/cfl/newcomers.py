"""CFL's clients that join a run: led to a leaf of the parameter tree by what they make of the models on their way."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from fedjax_cluster.algorithms.cfl import landmarks as by_landmarks
from fedjax_cluster.algorithms.cfl.splits import admitted, change_on_edges, lead_to_leaf
from fedjax_cluster.algorithms.one_shot import largest_cluster, until_heard
from fedjax_cluster.algorithms.round import cluster_variables, one_hot
from fedjax_cluster.types import ClientData, State


def admit(method: Any, rng_key: Array, state: State, data: ClientData, index: Array) -> State:
    """The state of `method`, a `cfl`, with a client that joins: in the leaf that Algorithm 4 finds."""
    clients, server = state.clients, state.server
    compared = clients if method.landmarks is None else server.kept
    secret = method.secret(state.clusters)

    def ask(key: Array) -> tuple[Array, Array]:
        change = functools.partial(change_on_edges, method, key, state, secret, data, index)
        return lead_to_leaf(server.splits, compared.side, compared.edges, change)

    slot, heard = until_heard(ask, rng_key)
    if method.landmarks is not None:
        return by_landmarks.admit(state, slot, heard, index)
    # As with FLAG and PACFL, whoever cannot be compared is where most are.
    slot = jnp.where(heard, slot, largest_cluster(clients.membership))
    optimizer = method.start_optimizer(cluster_variables(state.clusters, slot).params)
    return state._replace(clients=admitted(clients, index, one_hot(slot, method.clusters), optimizer))
