"""PACFL: clusters from the principal angles between the clients' data (Vahidian et al. 2023, Algorithm 1)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedjax_cluster import clustering, cohorts, parallel, tree
from fedjax_cluster.algorithms import one_shot
from fedjax_cluster.algorithms import round as averaging
from fedjax_cluster.clustering.linkage import LINKAGES
from fedjax_cluster.server import Weighting, init_optimizer
from fedjax_cluster.types import (
    ClientData,
    ClusteredAlgorithm,
    Costs,
    LocalUpdate,
    Model,
    Population,
    PyTree,
    RoundInfo,
    Selection,
    State,
)


class Clients(NamedTuple):
    """What PACFL keeps of its clients, so that newcomers can be compared with them."""

    membership: Array  # f32[M, K], one-hot
    present: Array  # bool[M]
    vectors: Array  # f32[M, L, f, p], principal vectors of each class


class Server(NamedTuple):
    optimizer: PyTree
    angles: Array  # f32[M, M], in degrees


def pacfl(
    model: Model,
    *,
    clusters: int,
    local: LocalUpdate,
    server: optax.GradientTransformation | None = None,
    threshold: float = 10.0,
    num_vectors: int = 3,
    angles: Literal["smallest", "sum"] = "smallest",
    linkage: Literal["average", "single", "complete"] = "average",
    weighting: Weighting = "examples",
    participation: float = 1.0,
) -> ClusteredAlgorithm:
    """Principal-angle clustered federated learning.

    Before training every client sends the first p left singular vectors of each class's data; agglomerative
    clustering merges by the principal angles between the clients' spans of all of them, as long as these are at most
    the threshold; then every cluster runs federated averaging.

    Args:
      model: what is trained.
      clusters: the most clusters there can be; how many there are, the threshold decides.
      local: what a client does in a round.
      server: any optax transformation of minus the mean change; None is plain averaging.
      threshold: largest distance at which clusters merge, in degrees; it depends on the data.
      num_vectors: p, principal vectors per class.
      angles: the "smallest" principal angle between two spans, or the "sum" of all, which grows with their dimensions:
        it compares only clients that have equally many classes.
      linkage: "average", "single" or "complete".
      weighting: "examples" weighs clients by |D_i|, "uniform" equally.
      participation: share of the clients in a round, in (0, 1].

    Returns:
      A ClusteredAlgorithm that clusters in `init`; the angles are harvested before the first round.

    Raises:
      ValueError: a parameter out of range; in `init`, more clusters found than `clusters`, or examples without classes.

    >>> from fedjax_cluster import local, nn
    >>> pacfl(nn.linear(), clusters=5, local=local.sgd(0.1, batch_size=10, epochs=1)).config["threshold"]
    10.0
    """
    if clusters < 1:
        raise ValueError(f"clusters is {clusters}; at least one cluster is needed")
    if not threshold >= 0:
        raise ValueError(f"threshold is {threshold}; it is an angle in degrees, 0 or more")
    if num_vectors < 1:
        raise ValueError(f"num_vectors is {num_vectors}; it must be at least 1")
    for name, value, known in (("angles", angles, ("smallest", "sum")), ("linkage", linkage, LINKAGES)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    cohorts.cohort_size(participation, 1)
    optimizer = optax.sgd(1.0) if server is None else server

    def measure(data: ClientData, num_classes: int) -> Array:
        flat = data.x.reshape(data.x.shape[0], -1).astype(jnp.float32)
        rank = min(num_vectors, flat.shape[1])
        return clustering.principal_vectors(flat, data.y, data.num_examples, num_classes, rank)

    @jax.jit
    def measure_all(population: Population):
        return parallel.for_each_client(
            lambda client: measure(client.data, population.info.num_classes),
            parallel.whole_population(population),
            collect=lambda vectors: vectors,
        )

    @jax.jit
    def compare(vectors: Array) -> Array:
        # NOTE: the vectors of different classes are not orthogonal to each other. The public code measures angles
        # between them as they are; principal angles need an orthonormal basis of what they span.
        bases = jax.lax.map(clustering.joint_basis, vectors)
        nonempty = jnp.ones((bases.shape[0], 1), jnp.int32)
        return clustering.classwise_angles(bases[:, None], nonempty, angles)[:, :, 0]

    def merge(between: Array, mask: Array) -> Array:
        return clustering.agglomerative(between, threshold, linkage=linkage, mask=mask)

    def init(rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        averaging.check_clusters(clusters, population)
        one_shot.check_classes("pacfl", population.info, population.data)
        present = np.asarray(averaging.present_clients(population))

        with one_shot.progress_note("PACFL: principal vectors of every client") as note:
            mapped = jax.device_get(measure_all(population))
            known = mapped.accepted
            vectors = jnp.where(known[:, None, None, None], mapped.collected, 0.0)
            note("PACFL: comparing all pairs of clients")
            between, comparing = one_shot.clocked(compare, vectors)
            found, merging = one_shot.clocked(merge, between, known)
        labels = one_shot.with_largest(np.asarray(found), present)
        number = int(labels.max()) + 1
        one_shot.check_found("pacfl", number, clusters, f"{threshold:g}°")
        models = one_shot.start_clusters(rng_key, model, population.info, clusters, number)
        rows = Clients(averaging.one_hot(jnp.asarray(labels), clusters), jnp.asarray(present), vectors)
        sent = float(np.count_nonzero(np.abs(np.asarray(vectors)).max(axis=2))) * vectors.shape[2]
        size = tree.size(models.params) / clusters
        costs = Costs(models_up=sent / size, clusterings=1.0, clustering_seconds=comparing + merging)
        info = averaging.initial_info(clusters, costs)
        info = info._replace(
            num_rejected=jnp.asarray(int((present & ~known).sum()), jnp.int32), event=jnp.asarray(True)
        )
        own = Server(init_optimizer(optimizer, models), between)
        return State(models, rows, own, jnp.zeros((), jnp.int32)), info

    def select(rng_key: Array, state: State) -> Selection:
        return cohorts.uniform(rng_key, state.clients.present, participation)

    def admit(rng_key: Array, state: State, client: ClientData, index: Array) -> State:
        clients = state.clients
        vectors = measure(client, clients.vectors.shape[1])
        vectors = jnp.where(tree.all_finite(vectors), vectors, 0.0)
        row = Clients(jnp.zeros(clients.membership.shape[1]), jnp.asarray(True), vectors)
        clients = tree.scatter(clients, index, row)
        between = compare(clients.vectors)
        to_clusters = one_shot.cluster_distances(between[index], clients.membership, clients.present, linkage)
        # NOTE: PACFL clusters again; here nobody changes, and a newcomer farther away than clusters merge opens one, as
        # long as there are slots.
        active = state.clusters.active
        apart = (to_clusters.min() > threshold) & ~active.all()
        slot = jnp.where(apart, jnp.argmin(active), jnp.argmin(to_clusters)).astype(jnp.int32)
        weights = tree.scatter(clients.membership, index, averaging.one_hot(slot, clients.membership.shape[1]))
        server = state.server._replace(angles=between)
        clusters_now = state.clusters._replace(active=active.at[slot].set(True))
        return State(clusters_now, clients._replace(membership=weights), server, state.round)

    config: dict[str, Any] = averaging.describe(
        local,
        clusters=clusters,
        threshold=threshold,
        num_vectors=num_vectors,
        angles=angles,
        linkage=linkage,
        weighting=weighting,
        participation=participation,
    )
    return ClusteredAlgorithm(
        "pacfl",
        config,
        model,
        init,
        select,
        one_shot.train_in_clusters(model, local, optimizer, weighting),
        averaging.personalize_by_label,
        admit,
        snapshot,
    )


def snapshot(state: State) -> dict[str, Any]:
    """The angles and the clusters, for plots."""
    return {"angles": state.server.angles, "labels": averaging.labels(state.clients.membership)}
