"""What CFL keeps of a run, what a round's splits change of it, and Algorithm 4, which leads newcomers past them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster import clustering, marked_clients, parallel, tree
from fedjax_cluster.algorithms.round import Report, labels, one_hot, size_of
from fedjax_cluster.inference import full_gradient, score_rows
from fedjax_cluster.local import client_key, shuffled_rows
from fedjax_cluster.parallel import Client
from fedjax_cluster.types import ClientData, Cohort, Model, PyTree, State, Variables

HELD_OUT = 5  # seed of which rows clients hold out: the same ones in all runs, whatever theirs


class Splits(NamedTuple):
    """The splits of a run, in their order, in S = K − 1 rows."""

    params: PyTree  # leaves [S, ...]: θ*, on which the split's updates were computed
    stats: PyTree  # leaves [S, ...]
    parent: Array  # i32[S], the slot that was split and that side 0 keeps; −1 for a row not in use
    child: Array  # i32[S], the slot that side 1 got
    round: Array  # i32[S]


def lead_to_leaf(
    splits: Splits, side: Array, edges: Array, change: Callable[[Variables], Array]
) -> tuple[Array, Array]:
    """Algorithm 4: from the root to a leaf i32[], always to the side that holds the most similar update.

    And whether every update on the way could be compared, bool[]: with one that is not finite nobody is led anywhere.

    `side` i32[M, S] and `edges` f32[M, S, r] are as in `Clients`; `change` gives the newcomer's update from a node's
    model.
    """
    root = jnp.zeros((), jnp.int32)
    slot, _, heard = led_past(splits, side, edges, change, root, root, number_of_splits(splits))
    return slot, heard


def led_past(
    splits: Splits,
    side: Array,
    edges: Array,
    change: Callable[[Variables], Array],
    slot: Array,
    first: Array,
    end: Array,
) -> tuple[Array, Array, Array]:
    """Algorithm 4 from cluster `slot` past splits `first` to `end` − 1: where that leads, and how many it met.

    And whether all that `change` gave could be compared, bool[].
    """

    def visit(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        slot, met, heard = carry
        here = (splits.parent[number] == slot) & (number >= first) & (number < end)

        def choose() -> tuple[Array, Array]:
            params, stats = jax.tree.map(lambda leaf: leaf[number], (splits.params, splits.stats))
            own, others = change(Variables(params, stats)), edges[:, number]
            norms = jnp.linalg.norm(others, axis=1) * jnp.linalg.norm(own)
            cosine = jnp.matmul(others, own, precision="highest") / jnp.maximum(norms, 1e-30)
            most = [jnp.max(jnp.where(side[:, number] == part, cosine, -jnp.inf)) for part in (0, 1)]
            return jnp.where(most[0] > most[1], slot, splits.child[number]), jnp.isfinite(size_of(own))

        slot, finite = parallel.unless(~here, (slot, jnp.asarray(True)), choose)
        return slot, met + here.astype(jnp.int32), heard & finite

    return lax.fori_loop(0, len(splits.parent), visit, (slot, jnp.zeros((), jnp.int32), jnp.asarray(True)))


def change_on_edges(
    method: Any, rng_key: Array, state: State, secret: Any, data: ClientData, index: Array, variables: Variables
) -> Array:
    """What the edges have of a client's change of a split's model, f32[r]; `secret` is the client's transform."""
    rows = method.training_rows(marked_clients.shown_rows(data), index)
    if method.of_gradients:
        sent = full_gradient(method.model, variables, rows)
    else:
        sent = method.local.run(client_key(rng_key, index), method.model, variables, rows, round=state.round).delta
    return on_edges(state.server, secret.apply(tree.ravel(sent)))


def on_edges(server: Any, vector: Array) -> Array:
    """The coordinates f32[r] that are kept of an update f32[D]."""
    return vector[server.coordinates] if len(server.coordinates) else vector


class Clients(NamedTuple):
    """What CFL keeps of its clients; D is d, or what the privacy transform makes of it."""

    membership: Array  # f32[M, K], one-hot; zero for the absent
    present: Array  # bool[M]
    update: Array  # f32[M, D], the latest finite update (or gradient) whose cosines count
    share: Array  # f32[M], the client's weight in its cluster's mean; 0 before its first finite update
    seen: Array  # bool[M], took part since its cluster was last split
    valid: Array  # bool[M], what it sent when it last took part was finite
    side: Array  # i32[M, S], where each split put it; −1 where it was not among those split
    edges: Array  # f32[M, S, r], coordinates of its update before the split
    optimizer: PyTree  # leaves [M, ...], its optimiser's state; empty where that starts afresh every round


class Server(NamedTuple):
    """What CFL keeps besides models and clients."""

    splits: Splits  # S = K − 1 rows
    origin: Array  # i32[K], number of the split that a cluster came out of; −1 for the root
    tested: Array  # i32[K], number of the split after which the fall-back was last decided
    mean_norm: Array  # f32[K], norm of the members' mean update: ε₁'s side
    max_norm: Array  # f32[K], largest norm of a member's update: ε₂'s side
    largest: Array  # f32[], largest norm of any update so far
    refused: Array  # i32[K], round since which a split is refused for want of a slot; −1
    fell_back: Array  # i32[K], round in which a cluster went back to its parent's model for good; −1
    similarity: Array  # f32[M, M], of the last round in which a cluster met the criteria
    coordinates: Array  # i32[r], those kept on the tree's edges; none for all

    BETWEEN_CLIENTS = ("similarity",)


class Sent(NamedTuple):
    """What a client sends, and reports."""

    delta: Array  # f32[D]
    gradient: Array | None  # f32[D], where similarities are of gradients
    stats: PyTree
    weight: Array  # f32[]
    gain: Array  # f32[], accuracy of its cluster's model minus that of the parent's, on its held-out rows
    optimizer: PyTree  # after its training, where it is kept
    report: Report


class Division(NamedTuple):
    """Who is where, and how it came about."""

    label: Array  # i32[M]; −1 for the absent
    active: Array  # bool[K]
    side: Array  # i32[M, S], where each split put a client; −1 where it was not among those split
    splits: Splits  # S rows
    origin: Array  # i32[K], number of the split that a cluster came out of; −1 for the root
    refused: Array  # i32[K], round since which a split is refused for want of a slot; −1


def in_own_order(data: ClientData, index: Array) -> ClientData:
    """A client's rows in a random order, the same in all rounds, so that its last ones are no kind of rows alone."""
    places, count = jnp.arange(data.x.shape[0], dtype=jnp.int32), data.num_examples
    order = shuffled_rows(client_key(jax.random.key(HELD_OUT), index), 0, len(places), jnp.maximum(count, 1))
    order = jnp.where(places < count, order, places)
    return data._replace(x=data.x[order], y=data.y[order])


def without_held_out(data: ClientData, index: Array, share: float) -> ClientData:
    """A client's rows in its order but the last ones, a share of all: at least one is held out, and one left."""
    held = jnp.floor(share * data.num_examples.astype(jnp.float32)).astype(jnp.int32)
    held = jnp.clip(held, jnp.minimum(1, data.num_examples - 1), data.num_examples - 1)
    return in_own_order(data, index)._replace(num_examples=data.num_examples - jnp.maximum(held, 0))


def parents_model(server: Server, slot: Array) -> Variables:
    """The model that a cluster's parent had when it was split."""
    origin = jnp.maximum(server.origin[slot], 0)
    return jax.tree.map(lambda leaf: leaf[origin], Variables(server.splits.params, server.splits.stats))


def gain_over_parent(
    model: Model, server: Server, slot: Array, start: Variables, first: Array, client: Client
) -> Array:
    """Accuracy f32[] of a cluster's model minus that of its parent's, on a client's rows from `first` on."""
    before, data = parents_model(server, slot), in_own_order(client.data, client.index)
    return score_rows(model, start, first, data) - score_rows(model, before, first, data)


def on_probation(state: State, after: int | None) -> Array:
    """bool[K]: clusters whose split is to be judged by now, `after` so many rounds; None is never."""
    server = state.server
    if after is None:
        return jnp.zeros(len(server.origin), bool)
    due = state.round >= server.splits.round[jnp.maximum(server.origin, 0)] + after
    return (server.origin >= 0) & (server.tested != server.origin) & due


class Norms(NamedTuple):
    """Norms of the latest updates in each cluster, f32[K]; NaN without any."""

    mean: Array  # of the members' mean
    largest: Array  # of a member's
    typical: Array  # root mean square of the members'
    count: Array  # members whose latest update was finite
    unseen: Array  # members who took part in no round since the last split


def norms_of_updates(state: State) -> Norms:
    """What a cluster's readiness for a split is judged by."""
    clients = state.clients
    members = clients.membership * clients.present.astype(jnp.float32)[:, None]
    valid = members * clients.valid.astype(jnp.float32)[:, None]
    share = valid * clients.share[:, None]
    count, total = jnp.sum(valid, 0), jnp.sum(share, 0)
    mean = jnp.matmul(share.T, clients.update, precision="highest") / jnp.maximum(total, 1e-30)[:, None]
    norms = jnp.linalg.norm(clients.update, axis=1, keepdims=True)
    return Norms(
        mean=jnp.where(total > 0, jnp.linalg.norm(mean, axis=1), jnp.nan),
        largest=jnp.where(total > 0, jnp.max(valid * norms, 0), jnp.nan),
        typical=jnp.sqrt(jnp.sum(valid * norms**2, 0) / jnp.maximum(count, 1.0)),
        count=count,
        unseen=jnp.sum(members * (~clients.seen).astype(jnp.float32)[:, None], 0),
    )


def divide(
    division: Division,
    similarity: Array,
    counted: Array,
    known: Array,
    qualified: Array,
    round_number: Array,
    *,
    gamma_max: float,
) -> Division:
    """Splits the clusters that qualify (bool[K]), one after the other, for as long as there are slots.

    A cluster's clients that are counted (bool[M]) decide the split. The others join the side of the most similar
    update where they sent one before (`known`, bool[M]); else they stay with its slot, as does the first client
    that counts. A split whose similarity across does not bear γ_max is left undone (Eq. 39).
    """
    slots, rows = len(division.active), len(division.splits.parent)

    def parts(members: Array) -> clustering.Bipartition:
        found = clustering.optimal_bipartition(similarity, members & counted)
        return found._replace(labels=_beside_the_like(found.labels, similarity, members & known & ~counted))

    def one(slot: Array, division: Division) -> Division:
        part, max_cross = lax.cond(
            qualified[slot],
            lambda: parts(division.label == slot),
            lambda: clustering.Bipartition(jnp.full_like(division.label, -1), jnp.zeros(())),
        )
        wanted = qualified[slot] & (gamma_max < clustering.largest_safe_noise(max_cross))
        free = jnp.argmin(division.active).astype(jnp.int32)
        split = wanted & ~division.active[free]
        # What is out of range is dropped: nothing is written where nothing is split.
        child = jnp.where(split, free, slots)
        row = jnp.where(split, number_of_splits(division.splits), rows)
        ends = jnp.stack([jnp.where(split, slot, slots), child])
        old = division.splits
        first_refusal = jnp.where(division.refused[slot] < 0, round_number, division.refused[slot])
        refusal = jnp.where(wanted, jnp.where(split, -1, first_refusal), division.refused[slot])
        return Division(
            label=jnp.where(split & (part == 1), free, division.label),
            active=division.active.at[child].set(True, mode="drop"),
            side=division.side.at[:, row].set(part, mode="drop"),
            splits=old._replace(
                parent=old.parent.at[row].set(slot, mode="drop"),
                child=old.child.at[row].set(child, mode="drop"),
                round=old.round.at[row].set(round_number, mode="drop"),
            ),
            origin=division.origin.at[ends].set(row, mode="drop"),
            refused=division.refused.at[slot].set(refusal),
        )

    return lax.fori_loop(0, slots, one, division)


def _beside_the_like(part: Array, similarity: Array, others: Array) -> Array:
    """Sides i32[M] in which the others, bool[M], are where the most similar update is, as Algorithm 4 has newcomers."""
    most = [jnp.max(jnp.where(part == side, similarity, -jnp.inf), axis=1) for side in (0, 1)]
    return jnp.where(others, (most[0] <= most[1]).astype(part.dtype), part)


def empty_splits(models: Variables, count: int) -> Splits:
    """`count` rows, none in use; `models` is one model."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), models)
    unused = jnp.full(count, -1, jnp.int32)
    return Splits(zeros.params, zeros.stats, unused, unused, unused)


def record_models(splits: Splits, old: Splits, models: Variables) -> Splits:
    """Copies the models [K, ...] of the clusters that `splits` newly names as split."""
    new = (splits.parent >= 0) & (old.parent < 0)
    taken = tree.take(models, jnp.maximum(splits.parent, 0))
    return splits._replace(
        params=tree.where(new, taken.params, splits.params), stats=tree.where(new, taken.stats, splits.stats)
    )


def number_of_splits(splits: Splits) -> Array:
    """i32[]: rows in use."""
    return jnp.sum((splits.parent >= 0).astype(jnp.int32))


def inherit(stacked: PyTree, division: Division, round_number: Array) -> PyTree:
    """Leaves [K, ...] in which a cluster made in this round has what its parent has: model, server momentum."""
    slots, splits = len(division.active), division.splits
    child = jnp.where(splits.round == round_number, splits.child, slots)
    source = jnp.arange(slots, dtype=jnp.int32).at[child].set(splits.parent, mode="drop")
    return jax.tree.map(lambda leaf: leaf[source], stacked)


def remember(state: State, cohort: Cohort, sent: Sent, heard: Array, trained: Array) -> State:
    """Each participant's latest finite update; who sends none counts as seen, so that it holds up nobody.

    Args:
      heard: bool[C], of whom the server has an update, under privacy of all.
      trained: bool[C], whose own optimiser has gone on.
    """
    old = state.clients
    vector = sent.delta if sent.gradient is None else sent.gradient
    seen, valid = parallel.scatter_rows(cohort, (old.seen, old.valid), (jnp.ones_like(heard), heard))
    kept, rows = (old.update, old.share), (vector, sent.weight)
    update, share = parallel.scatter_rows(cohort, kept, rows, cohort.mask & heard)
    optimizer = parallel.scatter_rows(cohort, old.optimizer, sent.optimizer, cohort.mask & trained)
    clients = old._replace(update=update, share=share, seen=seen, valid=valid, optimizer=optimizer)
    return state._replace(clients=clients)


def admitted(clients: Clients, index: Array, membership: Array, optimizer: PyTree) -> Clients:
    """With a client that joins, of whom nothing has been heard, or nothing since it left."""
    new = {
        "membership": membership,
        "present": jnp.asarray(True),
        "share": jnp.zeros(()),
        "seen": jnp.asarray(False),
        "valid": jnp.asarray(False),
        "optimizer": optimizer,
    }
    changed = tree.scatter({name: getattr(clients, name) for name in new}, index, new)
    return clients._replace(**changed)


def fall_back(state: State, slot: Array, gain: Array, accepted: Array, due: Array) -> tuple[State, Array]:
    """Judges clusters that are due (bool[K]) by their participants; those that lost get their parent's model.

    `gain` f32[C] is the accuracy of a client's cluster's model minus that of its parent's (Sec. II-A); also returns who
    fell back, bool[K].
    """
    server, splits = state.server, state.server.splits
    members = one_hot(jnp.where(accepted, slot, -1), len(due))
    judged = due & (jnp.sum(members, 0) > 0)
    fallen = judged & (jnp.sum(gain[:, None] * members, 0) < 0)
    before = tree.take(Variables(splits.params, splits.stats), jnp.maximum(server.origin, 0))
    clusters = state.clusters._replace(
        params=tree.where(fallen, before.params, state.clusters.params),
        stats=tree.where(fallen, before.stats, state.clusters.stats),
    )
    server = server._replace(
        tested=jnp.where(judged, server.origin, server.tested),
        fell_back=jnp.where(fallen, state.round, server.fell_back),
    )
    return state._replace(clusters=clusters, server=server), fallen


def snapshot_of_splits(state: State, membership: Array) -> Mapping[str, Any]:
    """What is kept of a round with splits, refused splits or fall-backs; n splits, M clients.

    `similarity` [M, M]; `labels`, `previous_labels` [M]; `parent`, `child` [n] (slots); `side` [M, n]; `edges` [M, n,
    r] at `coordinates` [r]; `models` [n, d]; `refused` and `fell_back`: slots for which that was so first in this
    round. By landmarks `similarity`, `side` and `edges` are theirs; `membership` f32[M, K] is everybody's.
    """
    own, now = state.server, int(state.round) - 1
    splits = own.splits
    rows = np.flatnonzero(np.asarray(splits.round) == now)
    label = np.asarray(labels(membership))
    previous = label.copy()
    for row in rows[::-1]:
        previous[label == splits.child[row]] = splits.parent[row]
    vectors = [np.asarray(leaf)[rows].reshape(len(rows), leaf[0].size) for leaf in jax.tree.leaves(splits.params)]
    return {
        "similarity": own.similarity,
        "labels": label,
        "previous_labels": previous,
        "parent": np.asarray(splits.parent)[rows],
        "child": np.asarray(splits.child)[rows],
        "side": np.asarray(state.clients.side)[:, rows],
        "edges": np.asarray(state.clients.edges)[:, rows],
        "coordinates": own.coordinates,
        "models": np.concatenate(vectors, 1),
        "refused": np.flatnonzero(np.asarray(own.refused) == now),
        "fell_back": np.flatnonzero(np.asarray(own.fell_back) == now),
    }
