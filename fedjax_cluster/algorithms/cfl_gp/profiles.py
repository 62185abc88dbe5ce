"""The clients' gradient profiles in CFL-GP: their embedding, and the number of clusters read off them (App. G)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster import clustering, parallel, tree
from fedjax_cluster.algorithms.round import check_memory, labels
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.types import ONE_DEVICE, ClientMapping, Cohort, State

Beta = float | Literal["mean"]
# A singular value that is a smaller part of the largest is lost in the rounding of a Gram matrix, which squares them.
RESOLVED = 3e-4


class Clients(NamedTuple):
    """What CFL-GP keeps of its clients."""

    membership: Array  # f32[M, K], one-hot
    present: Array  # bool[M]
    profile: Any  # f32[M, K, d̂]: block k is the running mean of the client's updates at model k; () where not kept
    updates: Any  # i32[M, K]: earlier updates of each block; likewise


class Kept(NamedTuple):
    """The landmarks' profiles where nobody else's is kept."""

    profile: Array  # f32[m, K, d̂]
    updates: Array  # i32[m, K]


def landmark_rows(state: State) -> tuple[Array, Clients]:
    """The landmarks i32[m], and what is kept of them, leaves [m, ...]."""
    landmarks, kept = state.server.landmarks, state.server.kept
    own = tree.take(state.clients, landmarks)
    return landmarks, own._replace(profile=kept.profile, updates=kept.updates) if kept else own


def profiled(state: State) -> tuple[Array | np.ndarray, Clients]:
    """The clients whose profiles are kept, i32[n], and their rows, leaves [n, ...]."""
    if getattr(state.server, "kept", ()):
        return landmark_rows(state)
    return np.arange(len(state.clients.present), dtype=np.int32), state.clients


def embed(
    rng_key: Array, clients: Clients, grams: Array, mask: Array, rank: int, mapping: ClientMapping = ONE_DEVICE
) -> tuple[Array, Array]:
    """Projects profiles on their top singular vectors: features f32[M, rank], singular values f32[rank].

    g'_c = Uᵀ g_c. The Gram matrix of the profiles is the sum of the blocks' f32[K, M, M]; its eigenpairs (λ, V) give
    the features V·√λ. Without Gram matrices, [K, 0, 0], subspace iteration takes the profiles themselves.
    """
    filled, share = _filled(clients, mask)
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
    profiles = imputed(clients, mask).reshape(len(mask), -1)
    # Of CPUs in one memory parts of the profiles would be copied for nothing: 1.2 to 1.3 times the round, measured.
    devices = 1 if parallel.platform(mapping) == "cpu" else parallel.num_devices(mapping)
    return clustering.subspace_embedding(rng_key, profiles, rank, mask=mask, devices=devices)


def imputed(clients: Clients, mask: Array) -> Array:
    """Profiles f32[M, K, d̂] where who never filled a block has the mean of those of mask bool[M] who did."""
    filled, share = _filled(clients, mask)
    mean = jnp.einsum("mk,mkd->kd", share, clients.profile, precision="highest")
    return jnp.where(filled[:, :, None], clients.profile, mean[None])


def _filled(clients: Clients, mask: Array) -> tuple[Array, Array]:
    """bool[M, K]: who of mask bool[M] filled a block, and what share f32[M, K] each has in its mean."""
    filled = (clients.updates > 0) & mask[:, None]
    share = filled.astype(jnp.float32)
    return filled, share / jnp.maximum(share.sum(0, keepdims=True), 1.0)


def fold_in_block(
    beta: Beta, clients: Clients, block: Array, cohort: Cohort, columns: Array, accepted: Array
) -> Clients:
    """Updates block k̃ of the cohort's profiles by what its clients sent, f32[C, d̂], where it was accepted, bool[C]."""
    # Indexing with a traced number would be a gather and a scatter, row by row; the block is one slice.
    profile = lax.dynamic_index_in_dim(clients.profile, block, 1, keepdims=False)
    old = parallel.gather_rows(cohort, profile)
    earlier = parallel.gather_rows(cohort, clients.updates[:, block])
    new = folded(beta, old, earlier, columns, accepted)
    # Without the barrier the old block would be read again by all that follows, after the new one is in its place: XLA
    # would keep a copy of the whole profile to read it from.
    rows = lax.optimization_barrier(parallel.scatter_rows(cohort, profile, new))
    updates = parallel.scatter_rows(cohort, clients.updates[:, block], earlier + accepted.astype(jnp.int32))
    return clients._replace(
        profile=lax.dynamic_update_index_in_dim(clients.profile, rows, block, 1),
        updates=clients.updates.at[:, block].set(updates),
    )


def fold_in_rows(
    beta: Beta, clients: Clients, block: Array, cohort: Cohort, columns: Array, accepted: Array
) -> Clients:
    """`fold_in_block` that touches the cohort's rows alone, for one that is a small part of the clients."""
    profile, updates = parallel.gather_rows(cohort, (clients.profile, clients.updates))
    old, earlier = (lax.dynamic_index_in_dim(leaf, block, 1, keepdims=False) for leaf in (profile, updates))
    new = folded(beta, old, earlier, columns, accepted)
    rows = (
        lax.dynamic_update_index_in_dim(profile, new, block, 1),
        lax.dynamic_update_index_in_dim(updates, earlier + accepted.astype(jnp.int32), block, 1),
    )
    profile, updates = parallel.scatter_rows(cohort, (clients.profile, clients.updates), rows)
    return clients._replace(profile=profile, updates=updates)


def folded(beta: Beta, old: Array, earlier: Array, columns: Array, accepted: Array) -> Array:
    """A block f32[C, d̂] of profiles after another update; i32[C] `earlier` ones are in it."""
    constant = None if beta == "mean" else jnp.full(earlier.shape, beta)
    rate = 1 / (earlier + 1).astype(jnp.float32) if constant is None else constant
    # A client's very first update fills its block; there is nothing to keep of an empty one.
    rate = jnp.where(earlier == 0, 1.0, rate)[:, None]
    return jnp.where(accepted[:, None], (1 - rate) * old + rate * columns, old)


def check_profiles(
    clients: int, num_clusters: int, width: int, copies: int, mapping: ClientMapping, further: str = ""
) -> None:
    """Raises a ValueError where the profiles do not fit into memory; in several copies while all are embedded.

    What can be done is more compression, fewer layers, or `further`.
    """
    devices = 1 if parallel.platform(mapping) == "cpu" else parallel.num_devices(mapping)
    what = f"profiles of {clients} clients × {num_clusters} models × {width} coordinates, {copies} times over"
    advice = "raise compression, or name fewer profile_layers" + (further and f", or give {further}")
    check_memory("cfl_gp", 4.0 * copies * clients * num_clusters * width / devices, what, advice)


def regroup(
    rng_key: Array, clients: Clients, grams: Array, block: Array, mask: Array, mapping: ClientMapping
) -> tuple[Array, Array]:
    """The server's clustering: Gram matrix of the block that changed, embedding, k-means, names; i32[M], grams."""
    num_clusters, old = clients.membership.shape[1], labels(clients.membership)
    embed_key, kmeans_key = jax.random.split(rng_key)

    def embedded(clients: Clients, grams: Array, mask: Array) -> tuple[Array, Array]:
        return embed(embed_key, clients, grams, mask, num_clusters, mapping)

    def group(features: Array, mask: Array, old: Array) -> Array:
        found = clustering.kmeans(kmeans_key, features, num_clusters, mask=mask).labels
        named = clustering.match_labels(found, jnp.where(mask, old, -1), num_clusters, mask=mask)
        return jnp.where(mask, named, old)

    if grams.shape[1]:
        # Read back, not handed over: XLA sees that it is what was written, and copies no profile.
        rows = lax.dynamic_index_in_dim(clients.profile, block, 1, keepdims=False)
        grams = grams.at[block].set(parallel.gram(rows, mapping))
        # The Gram matrices stand for the profiles, which stay where they are.
        light = clients._replace(profile=jnp.zeros((len(mask), 0, 0)))
        features, values = parallel.on_each_device(embedded, mapping)(light, grams, mask)
        lost = values[-1] < RESOLVED * values[0]

        def embed_again(_: Array) -> Array:
            return embedded(clients, grams[:, :0, :0], mask)[0]

        if mapping.runs > 1:
            features = parallel.run_if(lost, embed_again, features, mapping)
        else:  # XLA would do it every round: in each turn of the loop it is the same
            features = lax.cond(lost, embed_again, lambda features: features, features)
    else:
        features, _ = embedded(clients, grams, mask)
    return parallel.on_each_device(group, mapping)(features, mask, old), grams


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
    present = np.asarray(profiled(state)[1].present)
    rank = min(int(present.sum()), 2 * max_clusters)
    features, values = client_features(state, rank)
    if rank < 2:
        return Estimate(1, (1, 1), np.asarray(values))
    first = int(clustering.largest_gaps(values, 1)[0])
    # To keep more directions than the first gap does, one looks beyond it, where there is more than one value.
    second = first + (int(clustering.largest_gaps(values[first:], 1)[0]) if rank > first + 1 else 0)
    chosen = jnp.asarray(np.asarray(features)[present][:, :first])
    found = clustering.estimate_num_clusters(rng_key, chosen, min(max_clusters, len(chosen)), method=method)
    return Estimate(found, (first, second), np.asarray(values))


@in_32_bits
def client_features(state: State, rank: int) -> tuple[Array, Array]:
    """Features [n, rank] of the clients that are `profiled`, and singular values [rank], for pictures."""
    state = _fetched(state)
    _, clients = profiled(state)
    return _embedded(clients, state.server.grams, clients.present, rank)


@parallel.kept_program(static_argnames="rank")
def _embedded(clients: Clients, grams: Array, mask: Array, rank: int) -> tuple[Array, Array]:
    return embed(jax.random.key(0), clients, grams, mask, rank)


def _fetched(state: State) -> State:
    """The parts that an embedding needs, on the host (see `round.present_clients`)."""
    clients = state.clients
    if state.server.grams.shape[1]:
        # The Gram matrices stand for the profiles, which are large.
        clients = clients._replace(profile=np.zeros((len(clients.present), 0, 0), np.float32))
    clients, server = parallel.fetched((clients, state.server))
    return state._replace(clients=clients, server=server)
