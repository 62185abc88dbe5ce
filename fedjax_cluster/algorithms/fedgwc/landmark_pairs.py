"""FedGWC's interactions of all clients with landmark clients, P [M, m]: ours, for more clients than have pairs.

P's columns of the landmarks are kept with the clients' other numbers, by rows, and gathered and scattered with a
cohort. In every cohort of a cluster are half of its landmarks, drawn anew, as far as they are half of the cohort at
most: who always came along would be in everybody's company alike. A cluster is tested by its landmarks' W, whose
squared distances are scaled up from the landmarks' columns to all; every other client joins the child with whose
landmarks its own mean affinity is largest, and is taken to interact with landmarks that it did not meet as with those
that it met, on average.

Of many clients most were in no cohort when their cluster splits, and nothing is known of them: they go with the largest
child, and choose their cluster by the loss of its model, as newcomers do, when they take part for the first time. In
the round after a split, before which its children have one model, they choose at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import clustering, parallel, tree
from fedjax_cluster.algorithms.fedgwc import weighting as weigh
from fedjax_cluster.algorithms.fedgwc.weighting import Clients, Sent
from fedjax_cluster.algorithms.round import check_memory, labels, nearest_by_loss, one_hot
from fedjax_cluster.local import num_batches
from fedjax_cluster.parallel import Client
from fedjax_cluster.types import ClientData, ClientMapping, Clusters, Cohort, Costs, State

LANDMARKS = 1  # folded into the key of `init`
AT_A_TIME = 2**16  # clients that are compared with the landmarks, so that no further matrix M × m is made


class LandmarkClients(NamedTuple):
    membership: Array  # f32[M, K], one-hot; zero for the absent
    present: Array  # bool[M]
    seen: Array  # f32[M], rounds that a client took part in
    previous: Array  # i32[M], its cluster before the last split
    interactions: Array  # f32[M, m], P's columns of the landmarks
    meetings: Any  # i32[M, m], times a pair met; () under a constant rate
    drawn_with: Array  # i32[M], the cluster in whose cohorts it is drawn: its own as of the last split


class LandmarkServer(NamedTuple):
    landmarks: Array  # i32[m], ascending
    members: Array  # i32[K], clients drawn with each cluster, who would otherwise be counted in every round
    inside: Array  # i32[K], clients in each cluster, with those who have chosen it since
    alike: Array  # bool[], there was a split just before, whose children have one model
    average: Array  # f32[K], the others as in `weighting.Server`
    calm: Array  # i32[K]
    parent: Array  # i32[]
    index: Array  # f32[]
    tested: Array  # f32[]
    refused: Array  # i32[]


def begin(method: Any, rng_key: Array, first: Clients) -> tuple[LandmarkClients, LandmarkServer]:
    """The clients, and interactions of nobody with the landmarks."""
    size, number = len(first.present), method.landmarks
    if number > (there := int(first.present.sum())):
        raise ValueError(f"landmarks is {number}, but there are only {there} clients; give at most {there}, or None")
    # A split compares some clients with the landmarks at a time, in a few matrices.
    wanted = 4.0 * number * (size * (2 if method.counted else 1) + 4 * (number + min(AT_A_TIME, size)))
    what = f"for each of {size} clients and {number} landmarks"
    check_memory(method.name, wanted, what, "give fewer landmarks")
    landmarks = clustering.draw_landmarks(jax.random.fold_in(rng_key, LANDMARKS), number, first.present)
    meetings = jnp.zeros((size, number), jnp.int32) if method.counted else ()
    clients = LandmarkClients(*first, jnp.zeros((size, number)), meetings, labels(first.membership))
    members = members_of(first.membership)
    return clients, LandmarkServer(landmarks, members, members, jnp.asarray(False), **weigh.at_rest(method.clusters))


def members_of(membership: Array) -> Array:
    """i32[K]: the clients of each cluster."""
    return membership.sum(0).astype(jnp.int32)


def drawn_anew(state: State) -> State:
    """The state after a split, or with other clients: all are drawn with the cluster that they are in."""
    membership = jnp.asarray(state.clients.membership)
    clients, members = state.clients._replace(drawn_with=labels(membership)), members_of(membership)
    return state._replace(clients=clients, server=state.server._replace(members=members, inside=members))


def choosing(state: State, cohort: Cohort, seen: Array) -> tuple[Array, Array]:
    """bool[C], twice: who takes part for the first time, and chooses among clusters before its training, or after."""
    first = cohort.mask & (seen == 0) & (jnp.sum(state.clusters.active.astype(jnp.int32)) > 1)
    return first & ~state.server.alike, first & state.server.alike


def chosen(method: Any, state: State, data: ClientData, slot: Array, chooses: Array, anybody: Array) -> Array:
    """The cluster i32[] of a client: of least loss where it `chooses` bool[]; without `anybody` no loss is needed."""

    def least() -> Array:
        return jnp.where(chooses, nearest_by_loss(method.model, state.clusters, data), slot)

    return jax.lax.cond(anybody, least, lambda: slot)


def chosen_after(method: Any, clusters: Clusters, cohort: Cohort, slot: Array, choosing: Array) -> Array:
    """The clusters i32[C] after a round that started from `slot` i32[C] and led to the models `clusters`."""

    def choose(client: Client, slot: Array, chooses: Array) -> Array:
        return jnp.where(chooses, nearest_by_loss(method.model, clusters, client.data), slot)

    def all_choose(slot: Array) -> Array:
        return parallel.for_each_client(choose, cohort, slot, choosing, collect=lambda slot: slot).collected

    return parallel.run_if(jnp.any(choosing), all_choose, slot, cohort.mapping)


def moved(server: LandmarkServer, cohort: Cohort, before: Array, after: Array) -> LandmarkServer:
    """The server after the cohort's clients went from clusters `before` i32[C] to `after` i32[C]."""
    change = (one_hot(where, len(server.inside)) for where in (after, before))
    came, went = (jnp.where(cohort.mask[:, None], each, 0.0).sum(0).astype(jnp.int32) for each in change)
    return server._replace(inside=server.inside + came - went)


def choice_costs(method: Any, clusters: Clusters, cohort: Cohort, now: Array, later: Array, costs: Costs) -> Costs:
    """A round's costs with those of the choices: every cluster's model sent, and its loss on all rows.

    Of those who choose now, bool[C], one of the models is the one that they train; later it is another.
    """
    models = jnp.sum(clusters.active.astype(jnp.float32))
    passes = jnp.where(now | later, num_batches(method.local, cohort.data), 0.0)
    more = (models - 1.0) * jnp.sum(now.astype(jnp.float32)) + models * jnp.sum(later.astype(jnp.float32))
    return costs._replace(
        models_down=costs.models_down + more, loss_evaluations=costs.loss_evaluations + models * jnp.sum(passes)
    )


def company(state: State, wanted: Array) -> tuple[Array, Array]:
    """The landmarks, and how many i32[K] of each cluster's are in its cohort of `wanted` i32[K] clients."""
    landmarks = state.server.landmarks
    drawn_with = state.clients.drawn_with[landmarks]
    there = one_hot(drawn_with, len(wanted)).sum(0).astype(jnp.int32)
    return landmarks, jnp.minimum((there + 1) // 2, wanted // 2)


def learn(method: Any, state: State, cohort: Cohort, sent: Sent) -> State:
    """What a round's losses make of P, and how much that still changes.

    The cohort's clients count where they trained, though those who choose after it may be elsewhere by now.
    """
    sent = parallel.to_each_device(sent, cohort.mapping)
    clients, server = state.clients, state.server

    def rewarded(landmarks: Array, sent: Sent) -> tuple[Array, Array, Array]:
        """Rewards f32[C], who met which landmark in its cluster's cohort, bool[C, m], and where these are, i32[m]."""
        itself = sent.index[:, None] == landmarks[None]
        present = jnp.where(itself, sent.slot[:, None], -1).max(0)
        slot = jnp.where((itself & sent.accepted[:, None]).any(0), present, -1)
        met = sent.accepted[:, None] & (sent.slot[:, None] == slot[None])
        return weigh.rewards_of(sent, method.clusters, False), met, present

    rewards, met, present = parallel.on_each_device(rewarded, cohort.mapping)(server.landmarks, sent)
    place = jnp.where(present < 0, labels(clients.membership[server.landmarks]), present)
    there = one_hot(place, method.clusters).sum(0)
    count, wanted = (number.astype(jnp.float32) for number in method.sizes(state))
    coefficient = method.coefficient(count, wanted)
    rows, times = parallel.gather_rows(cohort, (clients.interactions, clients.meetings))
    if method.counted:
        times = times + met.astype(jnp.int32)
        rate = 1.0 / jnp.maximum(times, 1).astype(jnp.float32)
    else:
        rate = coefficient[sent.slot][:, None]
    step = jnp.where(met, rate * (rewards[:, None] - rows), 0.0)
    change = jax.ops.segment_sum(jnp.square(step).sum(1), sent.slot, method.clusters)
    kept = parallel.scatter_rows(cohort, (clients.interactions, clients.meetings), (rows + step, times))
    pairs = jnp.maximum(count, 1.0) * jnp.maximum(there, 1.0)
    server = weigh.with_averages(server, change / pairs, coefficient, sent, method.tolerance)
    return state._replace(clients=clients._replace(interactions=kept[0], meetings=kept[1]), server=server)


def _perceived(method: Any, rows: Array, mask: Array, itself: Array, column: Array) -> Array:
    """P's rows f32[n, m] of clients mask bool[n], `itself` bool[n, m] and `column` bool[m] as they are compared."""
    if not method.rows_centred:
        return rows
    # Of pairs that met, as no reward is 0, and of what a newcomer has from another until it has met somebody.
    return weigh.less_their_means(rows, (rows != 0) & mask[:, None] & column[None] & ~itself)


def affinity(method: Any, square: Array, own: Array, count: Array) -> Array:
    """W f32[m, m] of the landmarks from their own columns, f32[m, m], for those of own bool[m].

    They stand for a cluster of `count` f32[] clients, whose columns distances are scaled up to.
    """
    kept = _perceived(method, square, own, jnp.eye(len(own), dtype=bool), own)
    scale = jnp.maximum(count - 2.0, 1.0) / jnp.maximum(own.sum().astype(jnp.float32) - 2.0, 1.0)
    return clustering.interaction_affinity(kept, method.beta * scale, own)


def _among_landmarks(state: State, parent: Array) -> tuple[Array, Array, Array]:
    """P of the landmarks among themselves, f32[m, m], which of them are in cluster i32[], and its clients f32[]."""
    clients, landmarks = state.clients, state.server.landmarks
    square = tree.take(clients.interactions, landmarks)
    count = state.server.inside[parent].astype(jnp.float32)
    return square, labels(clients.membership[landmarks]) == parent, count


def divide(
    method: Any, rng_key: Array, state: State, parent: Array, most: Array, free: Array, mapping: ClientMapping
) -> weigh.Partition:
    """FedGW_Cluster on the landmarks of cluster `parent` i32[]; labels i32[m] are theirs alone."""

    def among(rng_key: Array, square: Array, own: Array, count: Array, most: Array, free: Array) -> weigh.Partition:
        graph = affinity(method, square, own, count)
        return weigh.partition(rng_key, graph, own, most, free, method.smallest, max_children=method.children_bound)

    square, own, count = _among_landmarks(state, parent)
    return parallel.on_each_device(among, mapping)(rng_key, square, own, count, most, free)


def children(method: Any, state: State, parent: Array, found: weigh.Partition, mapping: ClientMapping) -> Array:
    """The child i32[M] of each client of a cluster, −1 elsewhere: others than landmarks join the nearest one."""
    clients, landmarks = state.clients, state.server.landmarks
    square, own, count = _among_landmarks(state, parent)
    near = parallel.on_own_rows(functools.partial(_nearest, method), mapping)
    mask = labels(clients.membership) == parent
    joined = near((clients.interactions, mask), (square, own, found.labels, count))
    joined = joined.at[landmarks].set(found.labels)
    largest = jnp.argmax(jax.nn.one_hot(joined, method.children_bound).sum(0)).astype(jnp.int32)
    return jnp.where(mask, jnp.where(joined < 0, largest, joined), -1)


def _nearest(method: Any, clients: tuple, landmarks: tuple) -> Array:
    """The child i32[n] that each client would join if it were no landmark; −1 for those who met none.

    Args:
      method: the method.
      clients: interactions f32[n, m] and mask bool[n] of some.
      landmarks: the same of the landmarks, f32[m, m], their children i32[m], and how many clients count in all, f32[].
    """
    square, own, label, count = landmarks
    kept_square = _perceived(method, square, own, jnp.eye(len(own), dtype=bool), own)
    places, size = jnp.arange(len(own)), len(clients[1])
    step = min(AT_A_TIME, size)

    def some(number: Array, joined: Array) -> Array:
        first = jnp.minimum(number * step, size - step)
        rows, mask = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, step), clients)
        kept = _perceived(method, rows, mask, jnp.zeros_like(rows, bool), own)
        known = (rows != 0) & mask[:, None] & own[None]
        if not method.rows_centred:
            mean = jnp.where(known, kept, 0.0).sum(1) / jnp.maximum(known.sum(1), 1).astype(jnp.float32)
            kept = jnp.where(known, kept, mean[:, None])
        kept, mask = jnp.concatenate([kept_square, kept]), jnp.concatenate([own, mask])
        # Distances are scaled up to all clients, of whom these are a part.
        there = jnp.maximum(mask.sum().astype(jnp.float32) - 2.0, 1.0)
        beta = method.beta * jnp.maximum(count - 2.0, 1.0) / there
        near = clustering.landmark_affinity(kept, places, beta, mask)
        found = clustering.extend_labels(1.0 - near, places, label, method.children_bound, mask=mask)[len(own) :]
        return jax.lax.dynamic_update_slice_in_dim(joined, jnp.where(known.any(1), found, -1), first, 0)

    return jax.lax.fori_loop(0, -(-size // step), some, jnp.full(size, -1, jnp.int32))


def count_anew(state: State, family: Array) -> State:
    """The state after a split of the clients `family` bool[M], whose counts start again from 1."""
    clients = state.clients
    pairs = family[:, None] & family[state.server.landmarks][None]
    meetings = jnp.where(pairs, jnp.minimum(clients.meetings, 1), clients.meetings)
    return state._replace(clients=clients._replace(meetings=meetings))


def join(method: Any, rng_key: Array, state: State, index: Array, row: Clients) -> State:
    """The state with a client `row` that joins, taken for a random one of its cluster's until it has met them."""
    clients, server = state.clients, state.server
    met = (clients.meetings > 0 if method.counted else clients.interactions != 0).any(1)
    alike = (labels(clients.membership) == row.previous) & met
    drawn = weigh.one_of(rng_key, alike, index)
    taken = clients.interactions.at[drawn].get(mode="fill", fill_value=0.0)
    nothing = jnp.zeros(len(server.landmarks), jnp.int32) if method.counted else ()
    clients = tree.scatter(clients, index, LandmarkClients(*row, taken, nothing, row.previous))
    # A column of zeros that nobody met tells nobody apart.
    fresh = (server.landmarks == index)[None]
    clients = clients._replace(interactions=jnp.where(fresh, 0.0, clients.interactions))
    if method.counted:
        clients = clients._replace(meetings=jnp.where(fresh, 0, clients.meetings))
    return state._replace(clients=clients)


def shown(method: Any, state: State, tested: np.ndarray) -> Mapping[str, Any]:
    """P and W of the landmarks alone, and which clients these are."""
    places = np.asarray(state.server.landmarks)
    # Of all clients' numbers these rows alone are taken.
    square = jnp.asarray(state.clients.interactions[places])
    graph = affinity(method, square, jnp.asarray(tested[places]), jnp.float32(tested.sum()))
    return {"interactions": square, "affinity": graph, "landmarks": jnp.asarray(places)}
