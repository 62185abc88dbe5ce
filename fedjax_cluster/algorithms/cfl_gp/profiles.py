"""The clients' gradient profiles in CFL-GP: their embedding, and the number of clusters read off them (App. G)."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster import clustering, parallel
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.types import State


class Clients(NamedTuple):
    """What CFL-GP keeps of its clients."""

    membership: Array  # f32[M, K], one-hot
    present: Array  # bool[M]
    profile: Array  # f32[M, K, d̂]: block k is the running mean of the client's updates at model k
    updates: Array  # i32[M, K]: earlier updates of each block


@functools.partial(jax.jit, static_argnames="rank")
def embed(rng_key: Array, clients: Clients, grams: Array, mask: Array, rank: int) -> tuple[Array, Array]:
    """Projects profiles on their top singular vectors: features f32[M, rank], singular values f32[rank].

    g'_c = Uᵀ g_c. The Gram matrix of the profiles is the sum of the blocks' f32[K, M, M]; its eigenpairs (λ, V) give
    the features V·√λ. Without Gram matrices, [K, 0, 0], subspace iteration takes the profiles themselves.
    """
    filled = (clients.updates > 0) & mask[:, None]  # [M, K]
    share = filled.astype(jnp.float32)
    share = share / jnp.maximum(share.sum(0, keepdims=True), 1.0)
    if grams.shape[1]:
        # A block that a client never filled takes the mean of those who did: zero would set it apart from them.
        def impute(gram: Array, filled: Array, share: Array) -> Array:
            weights = jnp.where(filled[:, None], jnp.eye(len(filled)), share[None, :])
            return jnp.linalg.multi_dot([weights, gram, weights.T], precision="highest")

        gram = lax.cond(
            jnp.all(filled | ~jnp.any(filled, 0, keepdims=True) | ~mask[:, None]),
            lambda: grams.sum(0),
            lambda: jax.vmap(impute)(grams, filled.T, share.T).sum(0),
        )
        return clustering.embed_gram(gram, rank, mask=mask)
    mean = jnp.einsum("mk,mkd->kd", share, clients.profile, precision="highest")
    profile = jnp.where(filled[:, :, None], clients.profile, mean[None])
    return clustering.subspace_embedding(rng_key, profile.reshape(len(mask), -1), rank, mask=mask)


class Estimate(NamedTuple):
    """An estimate of the number of clusters, and the ranks it came from."""

    num_clusters: int
    candidates: tuple[int, int]  # ranks before the largest gap of the singular values, and the largest beyond it
    singular_values: np.ndarray


@in_32_bits
def estimate_clusters(
    rng_key: Array, state: State, max_clusters: int, method: Literal["gap", "elbow", "silhouette"] = "silhouette"
) -> Estimate:
    """Estimates K from the profiles (App. G): the largest singular-value gap gives s, features in s dimensions give K.

    Args:
      rng_key: starts k-means.
      state: a CFL-GP state after some clustering rounds.
      max_clusters: largest K considered.
      method: how K is read off the features, see `clustering.estimate_num_clusters`.
    """
    state = _fetched(state)
    present = np.asarray(state.clients.present)
    rank = min(int(present.sum()), 2 * max_clusters)
    features, values = client_features(state, rank)
    first = int(clustering.largest_gaps(values, 1)[0])
    # To keep more directions than the first gap does, one looks beyond it.
    second = first + int(clustering.largest_gaps(values[first:], 1)[0])
    chosen = jnp.asarray(np.asarray(features)[present][:, :first])
    found = clustering.estimate_num_clusters(rng_key, chosen, min(max_clusters, len(chosen)), method=method)
    return Estimate(found, (first, second), np.asarray(values))


@in_32_bits
def client_features(state: State, rank: int) -> tuple[Array, Array]:
    """The clients' features [M, rank] and singular values [rank] of a CFL-GP state, for pictures."""
    state = _fetched(state)
    return embed(jax.random.key(0), state.clients, state.server.grams, state.clients.present, rank)


def _fetched(state: State) -> State:
    """The parts that an embedding needs, on one device (see `round.present_clients`)."""
    clients, grams = state.clients, state.server.grams
    if grams.shape[1]:
        # The Gram matrices stand for the profiles, which are large.
        clients = clients._replace(profile=jnp.zeros((len(clients.present), 0, 0)))
    clients, grams = jax.tree.map(jnp.asarray, parallel.fetched((clients, grams)))
    return state._replace(clients=clients, server=state.server._replace(grams=grams))
