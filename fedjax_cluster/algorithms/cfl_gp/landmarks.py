"""CFL-GP by landmark clients, ours: their profiles are embedded and grouped, and all others join the nearest group."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster import clustering, parallel
from fedjax_cluster.algorithms.cfl_gp.profiles import Clients, Kept, embed, imputed, landmark_rows
from fedjax_cluster.algorithms.round import labels, one_hot
from fedjax_cluster.clustering.similarity import matmul
from fedjax_cluster.types import ClientMapping, Cohort, State

SEED = 0  # the landmarks are the same in all runs


class LandmarkServer(NamedTuple):
    grams: Array  # f32[K, 0, 0], as in `start.Server`
    block: Array  # i32[]
    unchanged: Array  # i32[]
    stopped: Array  # bool[]
    coordinates: Array  # i32[d̂]
    landmarks: Array  # i32[m], ascending; one that leaves is not replaced
    kept: Any  # `Kept` of theirs where nobody else's profile is; () where all are with the clients


class Groups(NamedTuple):
    """Where the landmarks' groups lie."""

    directions: Array  # f32[K, d̂, r], of each block
    means: Array  # f32[K', K, r], of each group the mean projection of each block


def landmarks_among(present: Array, number: int) -> Array:
    """i32[m]: the landmarks of the clients that are present at the start, bool[M]."""
    return clustering.draw_landmarks(jax.random.key(SEED), number, present)


def group_landmarks(rng_key: Array, own: Clients, num_clusters: int) -> tuple[Array, Groups]:
    """CFL-GP's clustering of the landmarks alone, with leaves [m, ...]: their clusters i32[m], and where these lie."""
    embed_key, kmeans_key = jax.random.split(rng_key)
    mask, old = own.present, labels(own.membership)
    none = jnp.zeros((num_clusters, 0, 0))
    features, values = embed(embed_key, own, none, mask, num_clusters)
    found = clustering.kmeans(kmeans_key, features, num_clusters, mask=mask).labels
    named = clustering.match_labels(found, jnp.where(mask, old, -1), num_clusters, mask=mask)
    profile = jnp.where(mask[:, None, None], imputed(own, mask), 0.0)
    flat = profile.reshape(len(mask), -1)
    directions = clustering.landmark_directions(flat, clustering.Embedding(features, values))
    directions = directions.reshape(*profile.shape[1:], -1)
    members = jax.nn.one_hot(jnp.where(mask, named, -1), num_clusters)
    count = jnp.maximum(members.sum(0), 1.0)
    means = jnp.einsum("mg,mkr->gkr", members, project(profile, directions), precision="highest")
    return jnp.where(mask, named, old), Groups(directions, means / count[:, None, None])


def project(profile: Array, directions: Array) -> Array:
    """f32[n, K, r]: the part of each block of profiles f32[n, K, d̂] along the directions f32[K, d̂, r]."""
    # Block by block: a product over all at once would bring a copy of the profiles into another order.
    return jnp.stack([matmul(profile[:, k], part) for k, part in enumerate(directions)], axis=1)


def nearest_group(groups: Groups, profile: Array, updates: Array, old: Array) -> Array:
    """i32[n]: the group nearest to profiles f32[n, K, d̂] in the landmarks' embedding.

    Over the blocks that a client has filled: i32[n, K] `updates` above 0; without any it keeps its `old` i32[n].
    """
    filled = (updates > 0)[:, :, None].astype(jnp.float32)
    own = (project(profile, groups.directions) * filled).sum(1)  # [n, r]
    centres = jnp.einsum("nk,gkr->ngr", filled[:, :, 0], groups.means, precision="highest")
    near = jnp.argmin(jnp.square(own[:, None] - centres).sum(-1), axis=1).astype(jnp.int32)
    return jnp.where((updates > 0).any(1), near, old)


class Found(NamedTuple):
    """What the landmarks' clustering gives."""

    label: Array  # i32[m]
    groups: Groups
    complete: Array  # bool[]: every model was queried; before, the groups are those of the random start


def grouped(rng_key: Array, own: Clients, mapping: ClientMapping) -> Found:
    """The landmarks' clustering by what is kept of them, leaves [m, ...], on every device of all clients' mapping."""
    group = functools.partial(group_landmarks, num_clusters=own.membership.shape[1])
    label, groups = parallel.on_each_device(group, mapping)(rng_key, own)
    return Found(label, groups, ((own.updates > 0) & own.present[:, None]).any(0).all())


def placed(found: Found, landmarks: Array, index: Array, old: Array, near: Array) -> Array:
    """i32[C]: new clusters of the clients index i32[C], in `old` ones, −1 for none, and `near` groups i32[C].

    One of the landmarks i32[m] has its own.
    """
    new = jnp.where((old < 0) & ~found.complete, old, near)
    itself = index[:, None] == landmarks[None]
    return jnp.where(itself.any(1), found.label[jnp.argmax(itself, 1)], new)


def group_cohort(rng_key: Array, state: State, cohort: Cohort) -> tuple[Clients, Array]:
    """The cohort's clients in new clusters, and how many changed theirs."""
    clients = state.clients
    rows = parallel.gather_rows(cohort, clients)
    old = labels(rows.membership)
    landmarks, own = landmark_rows(state)
    found = grouped(rng_key, own, cohort.mapping)
    near = nearest_group(found.groups, rows.profile, rows.updates, old)
    new = placed(found, landmarks, cohort.index, old, near)
    label = one_hot(new, clients.membership.shape[1])
    changed = jnp.sum((cohort.mask & (old >= 0) & (new != old)).astype(jnp.int32))
    return clients._replace(membership=parallel.scatter_rows(cohort, clients.membership, label)), changed


def group_all(rng_key: Array, state: State, mapping: ClientMapping) -> Array:
    """i32[M]: everybody's clusters by the profiles that are kept; who has none keeps its own, the absent have −1."""
    clients = state.clients
    old = labels(clients.membership)
    landmarks, own = landmark_rows(state)
    found = grouped(rng_key, own, mapping)
    # Of whose profiles nothing is kept, nothing new is known.
    near = old if state.server.kept else nearest_group(found.groups, clients.profile, clients.updates, old)
    index = jnp.arange(len(clients.present), dtype=jnp.int32)
    return jnp.where(clients.present, placed(found, landmarks, index, old, near), -1)


def forget(server: Any, index: Array) -> Any:
    """The server, with nothing kept of client `index` i32[], which is another from now on."""
    if server.grams.size:
        server = server._replace(grams=server.grams.at[:, index].set(0.0).at[:, :, index].set(0.0))
    if not getattr(server, "kept", ()):
        return server
    fresh = server.landmarks == index
    profile = jnp.where(fresh[:, None, None], 0.0, server.kept.profile)
    return server._replace(kept=Kept(profile, jnp.where(fresh[:, None], 0, server.kept.updates)))
