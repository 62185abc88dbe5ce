"""FedGWC's interactions of all pairs of clients, P [M, M], as the paper has them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import clustering, parallel, tree
from fedjax_cluster.algorithms.fedgwc import weighting as weigh
from fedjax_cluster.algorithms.fedgwc.weighting import Clients, Sent, Server
from fedjax_cluster.algorithms.round import check_square, labels
from fedjax_cluster.types import ClientMapping, Cohort, State

# Matrices M × M at the same time while a cluster is tested, beside P and the counts, by the compiler's figures: P with
# the means taken off, products and distances, W, the matrix whose eigenvectors are wanted, and LAPACK's room to work.
IN_A_TEST = 12


def begin(method: Any, rng_key: Array, first: Clients) -> tuple[Clients, Server]:
    """The clients, and interactions of nobody with nobody."""
    size = len(first.present)
    check_square(method.name, size, (2 if method.counted else 1) + IN_A_TEST, landmarks=True)
    start = 1.0 / float(jnp.sum(first.present)) ** 2 if method.released else 0.0
    server = Server(
        interactions=jnp.full((size, size), start, jnp.float32),
        meetings=jnp.zeros((size, size) if method.counted else (0, 0), jnp.int32),
        **weigh.at_rest(method.clusters),
    )
    return first, server


def learn(method: Any, state: State, cohort: Cohort, sent: Sent) -> State:
    """What a round's losses make of P, and how much that still changes."""
    update = functools.partial(_updated, method)
    sent = parallel.to_each_device(sent, cohort.mapping)
    server = parallel.on_each_device(update, cohort.mapping)(state.server, method.sizes(state), sent)
    return state._replace(server=server)


def _updated(method: Any, server: Server, counts: tuple[Array, Array], sent: Sent) -> Server:
    count, wanted = (number.astype(jnp.float32) for number in counts)
    coefficient = method.coefficient(count, wanted)
    meeting = weigh.meet(
        server.interactions,
        server.meetings,
        weigh.rewards_of(sent, method.clusters, method.released),
        sent.index,
        sent.accepted,
        sent.slot,
        coefficient,
        method.clusters,
        counted=method.counted,
    )
    pairs = jnp.square(jnp.maximum(wanted if method.released else count, 1.0))
    server = server._replace(interactions=meeting.interactions, meetings=meeting.meetings)
    return weigh.with_averages(server, meeting.change / pairs, coefficient, sent, method.tolerance)


def affinity(method: Any, server: Server, mask: Array) -> Array:
    """W f32[M, M] of the clients of mask bool[M]."""
    kept = server.interactions
    if method.rows_centred:
        # A newcomer has met nobody, but has another's interactions.
        known = (kept != 0) | (server.meetings > 0) if method.counted else kept != 0
        kept = weigh.centred(kept, mask, known)
    kept = kept.T if method.by_columns else kept
    alike = weigh.released_affinity if method.released else clustering.interaction_affinity
    return alike(kept, method.beta, mask)


def divide(
    method: Any, rng_key: Array, state: State, parent: Array, most: Array, free: Array, mapping: ClientMapping
) -> weigh.Partition:
    """FedGW_Cluster on cluster `parent` i32[], into at most `most` i32[] with `free` i32[] slots left."""
    mask = labels(state.clients.membership) == parent
    graph, bound = affinity(method, state.server, mask), method.children_bound
    if method.released:
        return weigh.released_partition(graph, mask, most, free, 1, max_children=bound)
    return weigh.partition(rng_key, graph, mask, most, free, method.smallest, max_children=bound)


def children(method: Any, state: State, parent: Array, found: weigh.Partition, mapping: ClientMapping) -> Array:
    """The child i32[M] of each client of a cluster, −1 elsewhere."""
    return found.labels


def count_anew(state: State, family: Array) -> State:
    """The state after a split of the clients `family` bool[M], whose counts start again from 1."""
    pairs = family[:, None] & family[None, :]
    meetings = jnp.where(pairs, jnp.minimum(state.server.meetings, 1), state.server.meetings)
    return state._replace(server=state.server._replace(meetings=meetings))


def join(method: Any, rng_key: Array, state: State, index: Array, row: Clients) -> State:
    """The state with a client `row` that joins, taken for a random one of its cluster's until it has met them."""
    server = state.server
    met = (server.meetings > 0 if method.counted else server.interactions != 0).any(1)
    alike = (labels(state.clients.membership) == row.previous) & met
    drawn = weigh.one_of(rng_key, alike, index)
    server = server._replace(interactions=weigh.as_another(server.interactions, index, drawn))
    if method.counted:
        server = server._replace(meetings=server.meetings.at[index].set(0).at[:, index].set(0))
    return state._replace(clients=tree.scatter(state.clients, index, row), server=server)


def shown(method: Any, state: State, tested: np.ndarray) -> Mapping[str, Any]:
    """P, and W of the clients that were tested, bool[M]."""
    return {"interactions": state.server.interactions, "affinity": affinity(method, state.server, jnp.asarray(tested))}
