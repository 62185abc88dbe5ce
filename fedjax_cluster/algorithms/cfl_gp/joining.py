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
from fedjax_cluster.algorithms.round import Round, Trained, cohort_labels, labels, nearest_by_loss, one_hot
from fedjax_cluster.clustering.similarity import matmul
from fedjax_cluster.local import num_batches, server_key
from fedjax_cluster.parallel import Client
from fedjax_cluster.server import shared_part
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


def slots_by_loss(method: Any, state: State, cohort: Cohort) -> tuple[Array, Array | None, Costs]:
    """The cohort's clusters i32[C], of who has none that of least training loss once clustering has ended; who that is.

    And what it costs. None of the clients, bool[C], where clustering does not end or everybody is in it.
    """
    slot = cohort_labels(state, cohort)
    if not method.joined_late or (method.cluster_until is None and method.stop_after is None):
        return slot, None, Costs()
    until, slots = method.cluster_until, state.clusters.active.shape[0]
    ended = state.server.stopped if until is None else state.server.stopped | (state.round >= until)
    late = cohort.mask & (slot < 0) & ended

    def nearest(client: Client, slot: Array) -> Array:
        return parallel.unless(slot >= 0, slot, lambda: nearest_by_loss(method.model, state.clusters, client.data))

    def ask(slot: Array) -> Array:
        return parallel.for_each_client(nearest, cohort, slot, collect=lambda found: found).collected

    slot = parallel.run_if(jnp.any(late), ask, slot, cohort.mapping)
    # The model that each then trains is counted with its training.
    others = (slots - 1) * (1.0 - shared_part(state.clusters, method.shared_layers))
    batches = jnp.where(late, num_batches(method.local, cohort.data), 0.0)
    return (
        slot,
        late,
        Costs(models_down=others * jnp.sum(late.astype(jnp.float32)), loss_evaluations=slots * batches.sum()),
    )


def joined(state: State, cohort: Cohort, late: Array | None, done: Round) -> State:
    """The state with who is `late`, bool[C] or None, in the cluster that it has trained, if it has sent anything."""
    if late is None:
        return state
    label = one_hot(done.slot, state.clients.membership.shape[1])
    membership = parallel.scatter_rows(cohort, state.clients.membership, label, late & done.accepted)
    return state._replace(clients=state.clients._replace(membership=membership))


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
