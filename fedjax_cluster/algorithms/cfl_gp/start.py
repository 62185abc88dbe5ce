"""CFL-GP's first state: what the server keeps, and clients in random groups with empty profiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster.algorithms.cfl_gp.landmarks import LandmarkServer
from fedjax_cluster.algorithms.cfl_gp.profiles import Clients, Kept
from fedjax_cluster.algorithms.round import first_state, one_hot, tie_layers
from fedjax_cluster.algorithms.starts import equal_groups
from fedjax_cluster.lifting import Numbers, with_numbers
from fedjax_cluster.types import Clusters, RoundInfo, State


class Server(NamedTuple):
    grams: Array  # f32[K, M, M]: inner products of each block over clients; [K, 0, 0] for many clients
    block: Array  # i32[], the model to query in the next clustering round
    unchanged: Array  # i32[], rounds since the assignment last changed, where `stop_after` asks
    stopped: Array  # bool[], clustering has ended for good
    coordinates: Array  # i32[d̂], random coordinates of the profile; empty for all

    BETWEEN_CLIENTS = ("grams",)


def start_state(
    rng_key: Array, models: Clusters, present: Array, numbers: Numbers, *, method: Any, num_clusters: int, side: int
) -> tuple[State, RoundInfo]:
    """Clients in random groups of equal size, profiles empty."""
    method = with_numbers(method, numbers)
    models = tie_layers(models, method.shared_layers, method.name)
    assignment_key, coordinate_key = jax.random.split(jax.random.fold_in(rng_key, 0))
    coordinates, width = method.draw_coordinates(coordinate_key, models.params), method.profile_width(models.params)
    grouped = present
    if method.joined_late:
        grouped = jnp.zeros_like(present).at[method.landmarks_of(present)].set(True)
    sole = method.profiles_of == "landmarks"
    rows = len(present)
    clients = Clients(
        one_hot(equal_groups(assignment_key, grouped, num_clusters), num_clusters),
        present,
        # An array [M, K, 0] holds no number, but XLA writes something for each client whenever it loads a program.
        () if sole else jnp.zeros((rows, num_clusters, width)),
        () if sole else jnp.zeros((rows, num_clusters), jnp.int32),
    )
    none = jnp.zeros((), jnp.int32)
    server = Server(jnp.zeros((num_clusters, side, side)), none, none, jnp.asarray(False), coordinates)
    if method.landmarks is not None:
        m = method.landmarks
        kept = Kept(jnp.zeros((m, num_clusters, width)), jnp.zeros((m, num_clusters), jnp.int32)) if sole else ()
        server = LandmarkServer(*server, method.landmarks_of(present), kept)
    return first_state(models, clients, method.optimizer, server)
