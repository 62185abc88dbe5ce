"""CFL by landmark clients, ours, for more clients than have pairs.

The landmarks take part in every round, beside a share of the others, and train first: their updates alone are kept,
judged by ε₁ and ε₂, compared and divided, as Algorithm 5 divides a cluster of these clients. Then everybody trains, and
a client of a cluster that is divided joins the side of the landmark whose update is most like the one that it has just
made, as Algorithm 4 has newcomers. Who was not in that round stays with the side that keeps the parent's slot, and is
led past the splits that it missed by Algorithm 4, a local training each, when it next takes part. Nothing of the size
of a model is kept of anybody else, and nobody's update outlives its client's turn.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster import clustering, cohorts, parallel, tree
from fedjax_cluster.algorithms.cfl.splits import (
    Clients,
    Sent,
    Splits,
    change_on_edges,
    led_past,
    number_of_splits,
    on_edges,
)
from fedjax_cluster.algorithms.heard_landmarks import heard_landmarks
from fedjax_cluster.algorithms.one_shot import largest_cluster
from fedjax_cluster.algorithms.round import clients_info, cohort_labels, labels, one_hot
from fedjax_cluster.local import num_batches
from fedjax_cluster.parallel import Client, Contribution
from fedjax_cluster.server import aggregate_clients, params_part, step_clusters
from fedjax_cluster.types import ONE_DEVICE, Clusters, Cohort, Costs, RoundInfo, Selection, State

SEED = 0  # the landmarks are the same in all runs


class LandmarkClients(NamedTuple):
    membership: Array  # f32[M, K], one-hot; zero for the absent
    present: Array  # bool[M]
    placed: Array  # i32[M], splits that the client was in, or has been led past
    previous: Array  # i32[M], its cluster before the last event


class Kept(NamedTuple):
    """What is kept of the landmarks, as in `splits.Clients`."""

    update: Array  # f32[m, D]
    share: Array  # f32[m]
    seen: Array  # bool[m]
    valid: Array  # bool[m]
    side: Array  # i32[m, S]
    edges: Array  # f32[m, S, r]


class LandmarkServer(NamedTuple):
    """As `splits.Server`, and the landmarks."""

    splits: Splits
    origin: Array
    tested: Array
    mean_norm: Array
    max_norm: Array
    largest: Array
    refused: Array
    fell_back: Array
    similarity: Array  # f32[m, m]
    coordinates: Array
    landmarks: Array  # i32[m], ascending; one that leaves is not replaced
    kept: Kept


class Joined(NamedTuple):
    """A client's part of a round."""

    slot: Array  # i32[], its cluster after the round's splits
    trained: Array  # i32[], the one whose model it trained
    sent: Sent
    met: Array  # i32[], earlier splits that it was led past
    chosen: Array  # bool[], a landmark
    led: Array  # bool[], whether all that it showed on its way could be compared


def landmarks_among(method: Any, present: Array) -> Array:
    """i32[m]: the landmarks of the clients that are present at the start, bool[M]."""
    return clustering.draw_landmarks(jax.random.key(SEED), method.landmarks, present)


def check_options(method: Any) -> None:
    """Raises a ValueError where a `cfl` has options that do not go with its landmarks, if it has some."""
    if method.landmarks is None:
        return
    for name in ("keep_optimizer", "fall_back_after"):
        if getattr(method, name):
            raise ValueError(f"landmarks is given, but {name} keeps something of every client; give one of the two")
    if method.landmarks < method.min_size:
        raise ValueError(
            f"landmarks is {method.landmarks}, but min_size is {method.min_size}, and no cluster of fewer landmarks is "
            f"divided; give at least {method.min_size}"
        )


def select(method: Any, rng_key: Array, state: State) -> Selection:
    """All landmarks that are there, and a share of the others."""
    present, landmarks = state.clients.present, state.server.landmarks
    others, there = present.at[landmarks].set(False), present[landmarks]
    part = cohorts.uniform(rng_key, others, method.participation)
    capacity = len(present)
    if len(part.index) + len(landmarks) >= capacity:
        drawn = jnp.zeros(capacity, bool).at[part.index].set(part.mask, mode="drop")
        return cohorts.in_place(drawn | (present & ~others))
    index = jnp.concatenate([jnp.where(there, landmarks, capacity), part.index])
    return Selection(index.astype(jnp.int32), jnp.concatenate([there, part.mask]))


def with_everybody(first: State, present: Array, landmarks: Array) -> State:
    """A first state, in which `clients` are the landmarks, with everybody present, bool[M], in the first cluster."""
    membership = one_hot(jnp.where(present, 0, -1), first.clients.membership.shape[1])
    everybody = LandmarkClients(membership, present, jnp.zeros(len(present), jnp.int32), labels(membership))
    server = LandmarkServer(**first.server._asdict(), landmarks=landmarks, kept=_kept(first.clients))
    return first._replace(clients=everybody, server=server)


def of_landmarks(state: State) -> State:
    """The state of the landmarks alone, as CFL has it of everybody."""
    membership, present = tree.take((state.clients.membership, state.clients.present), state.server.landmarks)
    return state._replace(clients=Clients(membership, present, **state.server.kept._asdict(), optimizer=()))


def _kept(clients: Clients) -> Kept:
    return Kept(**{name: getattr(clients, name) for name in Kept._fields})


# ----------------------------------------------------------------------------------------------- a round


def step(method: Any, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
    """A round of `method`, a `cfl` with landmarks."""
    secret, landmarks = method.secret(state.clusters), state.server.landmarks
    send = functools.partial(method.send, rng_key, state, secret, due=jnp.asarray(False), optimizer=())
    after, old, qualified = _divided(method, send, state, cohort)
    splits, kept = after.server.splits, after.clients
    earlier, total = number_of_splits(state.server.splits), number_of_splits(splits)
    label = labels(kept.membership)
    past = functools.partial(led_past, splits, kept.side, kept.edges)

    def train(client: Client, slot: Array, placed: Array) -> Joined:
        itself = landmarks == client.index
        chosen = itself.any()
        change = functools.partial(change_on_edges, method, rng_key, state, secret, client.data, client.index)
        known, none, yes = chosen | (placed >= earlier), jnp.zeros((), jnp.int32), jnp.asarray(True)
        found, met, led = parallel.unless(known, (slot, none, yes), lambda: past(change, slot, placed, earlier))
        # Of what is not finite nothing tells on which side of a split it belongs.
        slot = jnp.where(led, found, slot)
        sent = send(slot=slot, client=client)
        own = on_edges(state.server, _compared(sent))
        joined, _ = parallel.unless(
            chosen | (total == earlier), (slot, none), lambda: past(lambda _: own, slot, earlier, total)[:2]
        )
        return Joined(jnp.where(chosen, label[jnp.argmax(itself)], joined), slot, sent, met, chosen, led)

    slot = jnp.maximum(cohort_labels(state, cohort), 0)
    means, mapped = aggregate_clients(
        train,
        cohort,
        slot,
        parallel.gather_rows(cohort, state.clients.placed),
        num_slots=method.clusters,
        contribute=lambda found: Contribution(
            found.slot, found.sent.weight, {"delta": found.sent.delta, "stats": found.sent.stats}
        ),
        collect=lambda found: (found.slot, found.trained, found.sent.report, found.met, found.chosen, found.led),
        aggregation=method.aggregation,
    )
    new, trained, reports, met, chosen, led = mapped.collected
    accepted = mapped.accepted
    one = jax.tree.map(lambda leaf: leaf[0], state.clusters.params)
    delta = jax.vmap(lambda vector: tree.unravel(secret.invert(vector), one))(means.value["delta"])
    means = means._replace(value={**means.value, "delta": delta})
    clusters, refused = step_clusters(method.optimizer, after.clusters, means)

    # A landmark is where the division put it, whatever it sent.
    there = cohort.mask & ((accepted & led) | chosen)
    rows = one_hot(new, method.clusters), jnp.full(new.shape, total, jnp.int32)
    changed = parallel.scatter_rows(cohort, (state.clients.membership, state.clients.placed), rows, there)

    def divided(changed: tuple[Array, Array]) -> tuple[Array, Array]:
        return changed[0].at[landmarks].set(kept.membership), changed[1].at[landmarks].set(total)

    changed = parallel.run_if(total > earlier, divided, changed, cohort.mapping)
    refusing = jnp.any((state.server.refused < 0) & (after.server.refused >= 0))
    event = jnp.any(label != old) | refusing
    # Only then, as all clients are looked through.
    previous = parallel.run_if(
        event, lambda _: labels(state.clients.membership), state.clients.previous, cohort.mapping
    )
    info = clients_info(
        trained,
        reports,
        cohort.mask,
        accepted & ~refused[new],
        method.clusters,
        jnp.sum((there & (new != slot)).astype(jnp.int32)),
        _costs(method, state.clusters, cohort, reports, met)._replace(
            clusterings=jnp.sum(qualified.astype(jnp.float32))
        ),
        event=event,
    )
    clients = LandmarkClients(changed[0], state.clients.present, changed[1], previous)
    server = after.server._replace(kept=_kept(kept))
    return state._replace(clusters=clusters, clients=clients, server=server, round=state.round + 1), info


def _compared(sent: Sent) -> Array:
    return sent.delta if sent.gradient is None else sent.gradient


def _divided(method: Any, send: Any, state: State, cohort: Cohort) -> tuple[State, Array, Array]:
    """The landmarks' state after their training and division, their clusters i32[m] before, and who qualified."""
    landmarks, own = state.server.landmarks, of_landmarks(state)
    old = labels(own.clients.membership)

    def ask(client: Client) -> Any:
        sent = send(slot=jnp.maximum(old[jnp.argmax(landmarks == client.index)], 0), client=client)
        return [_compared(sent), sent.weight[None]], sent.report.size

    columns, heard, there = heard_landmarks(ask, landmarks, cohort, everybody=False)
    clients = own.clients._replace(
        update=jnp.where(heard[:, None], columns[:, :-1], own.clients.update),
        share=jnp.where(heard, columns[:, -1], own.clients.share),
        seen=own.clients.seen | there,
        valid=jnp.where(there, heard, own.clients.valid),
    )
    alone = ONE_DEVICE._replace(runs=cohort.mapping.runs)

    def decide(own: State) -> tuple[State, Array]:
        server, qualified = method.criteria(own)
        split = functools.partial(method.split, qualified=qualified, mapping=alone)
        return parallel.run_if(jnp.any(qualified), split, own._replace(server=server), alone), qualified

    after, qualified = parallel.on_each_device(decide, cohort.mapping)(own._replace(clients=clients))
    return after, old, qualified


def _costs(method: Any, models: Clusters, cohort: Cohort, reports: Any, met: Array) -> Costs:
    """A round's costs: a model, what is made of it and what is sent for each split that a client was led past."""
    costs = method.costs(models, cohort, reports)
    met = jnp.where(cohort.mask, met, 0).astype(jnp.float32)
    each = num_batches(method.local, cohort.data) if method.of_gradients else reports.num_steps.astype(jnp.float32)
    return costs._replace(
        models_down=costs.models_down + jnp.sum(met),
        models_up=costs.models_up + (params_part(models) if method.of_gradients else 1.0) * jnp.sum(met),
        gradient_evaluations=costs.gradient_evaluations + jnp.sum(jnp.where(met > 0, met * each, 0.0)),
    )


# --------------------------------------------------------------------------------------------- newcomers


def admit(state: State, slot: Array, heard: Array, index: Array) -> State:
    """The state with a client that joins cluster `slot`; of a landmark that was away nothing has been heard.

    One that was not heard, bool[], begins at the root, and is led when it next takes part; a landmark, which is not led
    but divided, is in the largest cluster.
    """
    server, slots = state.server, state.clients.membership.shape[1]
    itself = jnp.any(server.landmarks == index)
    slot = jnp.where(heard, slot, jnp.where(itself, largest_cluster(state.clients.membership), 0))
    past = jnp.where(heard | itself, number_of_splits(server.splits), 0)
    row = LandmarkClients(one_hot(slot, slots), jnp.asarray(True), past, slot)
    fresh = server.landmarks == index
    kept = server.kept._replace(
        share=jnp.where(fresh, 0.0, server.kept.share), seen=server.kept.seen & ~fresh, valid=server.kept.valid & ~fresh
    )
    return state._replace(clients=tree.scatter(state.clients, index, row), server=server._replace(kept=kept))
