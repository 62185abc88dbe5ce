"""CFL-GP where the server keeps the landmarks' profiles alone: they are heard and grouped, then everybody else joins.

Who is no landmark joins the group that is nearest by the update that it has just made of the queried model, as soon as
it has made it: nobody holds what all of them show.
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
from fedjax_cluster.algorithms.round import Trained, cohort_labels, labels, one_hot
from fedjax_cluster.clustering.similarity import matmul
from fedjax_cluster.local import server_key
from fedjax_cluster.parallel import Client
from fedjax_cluster.types import Cohort, RoundInfo, State


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
