"""CFL-GP's clients that join the landmarks' groups.

Where the server keeps the landmarks' profiles alone, they are heard and grouped, and who is no landmark joins the group
that is nearest by the update that it has just made of the queried model, as soon as it has made it: nobody holds what
all of them show. Who has been in no clustering round when these end joins by its training loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster import parallel
from fedjax_cluster.algorithms.cfl_gp.landmarks import Groups, grouped, landmark_rows, placed
from fedjax_cluster.algorithms.cfl_gp.profiles import Beta, Kept, folded
from fedjax_cluster.algorithms.heard_landmarks import heard_landmarks
from fedjax_cluster.algorithms.round import Trained, cohort_labels, labels, nearest_by_loss, one_hot
from fedjax_cluster.clustering.similarity import matmul
from fedjax_cluster.local import num_batches, server_key
from fedjax_cluster.parallel import Client
from fedjax_cluster.types import Cohort, Costs, RoundInfo, State


def join_and_train(method: Any, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
    """A clustering round of `method`, a `cfl_gp` with `profiles_of="landmarks"`."""
    block, landmarks = state.server.block, state.server.landmarks
    old = labels(parallel.gather_rows(cohort, state.clients.membership))
    nobody = jnp.asarray(False)

    def ask(client: Client) -> Any:
        # Not known from training, which comes afterwards.
        return method.query(rng_key, state, client, nobody, jax.tree.map(lambda leaf: leaf[0], state.clusters.params))

    columns, heard, _ = heard_landmarks(ask, landmarks, cohort, everybody=method.privacy is not None)
    state = state._replace(server=state.server._replace(kept=keep(method.beta, state.server, columns, heard)))
    found = grouped(server_key(rng_key), landmark_rows(state)[1], cohort.mapping)
    nearest = nearest_by_block(found.groups, block)

    def train(client: Client, slot: Array) -> Trained:
        result = method.train_one(rng_key, state, slot, client)
        known = (slot == block) | (client.index == landmarks).any()
        sent, size = method.query(rng_key, state, client, known, result.delta)
        return Trained(slot, result, (nearest(sent), size))

    done = method.run_round(rng_key, train, state, cohort, cohort_labels(state, cohort))
    near, _ = done.extra
    # Of what is shown under privacy nothing is left out: that would tell of a client.
    heard = done.accepted if method.privacy is None else cohort.mask
    new = placed(found, landmarks, cohort.index, old, jnp.where(heard, near, old))
    changed = jnp.sum((cohort.mask & (old >= 0) & (new != old)).astype(jnp.int32))
    label = one_hot(new, state.clients.membership.shape[1])
    membership = parallel.scatter_rows(cohort, state.clients.membership, label)
    state = state._replace(clients=state.clients._replace(membership=membership))
    return method.after_clustering(state, cohort, done, changed, columns.shape[1])


def join_by_loss(method: Any, state: State, cohort: Cohort) -> tuple[State, Costs]:
    """Once clustering has ended, the cohort's clients without a cluster in that of least training loss; and costs."""
    if not method.joined_late or (method.cluster_until is None and method.stop_after is None):
        return state, Costs()
    old = cohort_labels(state, cohort)
    until, late = method.cluster_until, cohort.mask & (old < 0)
    ended = state.server.stopped if until is None else state.server.stopped | (state.round >= until)

    def place(client: Client, slot: Array) -> Array:
        return parallel.unless(slot >= 0, slot, lambda: nearest_by_loss(method.model, state.clusters, client.data))

    def join(carry: tuple[Array, Costs]) -> tuple[Array, Costs]:
        new = parallel.for_each_client(place, cohort, old, collect=lambda found: found).collected
        label, slots = one_hot(new, carry[0].shape[1]), carry[0].shape[1]
        batches = jnp.sum(jnp.where(late, num_batches(method.local, cohort.data), 0.0))
        # The model that each then trains is counted with its training.
        costs = Costs(models_down=(slots - 1) * jnp.sum(late.astype(jnp.float32)), loss_evaluations=slots * batches)
        return parallel.scatter_rows(cohort, carry[0], label, late), jax.tree.map(jnp.asarray, costs)

    nothing = jax.tree.map(jnp.asarray, Costs())
    membership, costs = parallel.run_if(
        ended & jnp.any(late), join, (state.clients.membership, nothing), cohort.mapping
    )
    return state._replace(clients=state.clients._replace(membership=membership)), costs


def keep(beta: Beta, server: Any, columns: Array, heard: Array) -> Kept:
    """The landmarks' profiles after what those have shown, f32[m, d̂], who were heard, bool[m]."""
    kept, block = server.kept, server.block
    new = folded(beta, kept.profile[:, block], kept.updates[:, block], columns, heard)
    return Kept(kept.profile.at[:, block].set(new), kept.updates.at[:, block].add(heard.astype(jnp.int32)))


def nearest_by_block(groups: Groups, block: Array) -> Callable[[list[Array]], Array]:
    """A function of an update, as leaves f32[d̂ₗ], that gives the group i32[] nearest to it by one block."""
    directions = lax.dynamic_index_in_dim(groups.directions, block, 0, keepdims=False)
    means = lax.dynamic_index_in_dim(groups.means, block, 1, keepdims=False)

    def nearest(sent: list[Array]) -> Array:
        # Leaf by leaf, as in `cfl_gp.compress`.
        parts = jnp.split(directions, np.cumsum([len(leaf) for leaf in sent])[:-1].tolist())
        first, *others = (matmul(leaf[None], part) for leaf, part in zip(sent, parts, strict=True))
        return jnp.argmin(jnp.square(sum(others, first) - means).sum(-1)).astype(jnp.int32)

    return nearest
