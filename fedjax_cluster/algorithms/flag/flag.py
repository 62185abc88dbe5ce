"""FLAG: clusters from the clients' data and gradients, found once before training (Algorithms 1–3)."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedjax_cluster import clustering, cohorts, nn, parallel, tree
from fedjax_cluster.algorithms import one_shot
from fedjax_cluster.algorithms import round as averaging
from fedjax_cluster.algorithms.flag.search import (
    AXES,
    Axis,
    Effort,
    Search,
    clustered_training,
    cuts,
    search_threshold,
    threshold_grid,
)
from fedjax_cluster.clustering.linkage import LINKAGES
from fedjax_cluster.local import client_key
from fedjax_cluster.parallel.loop import Client
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
    Variables,
)

LOG = logging.getLogger(__name__)


class Clients(NamedTuple):
    """What FLAG keeps of its clients, so that newcomers can be compared with them."""

    membership: Array  # f32[M, K], one-hot
    present: Array  # bool[M]
    vectors: Array  # f32[M, L, f, p], principal vectors of each class
    counts: Array  # i32[M, L], examples of each class; 0 or 1 where counts are not shared
    updates: Array  # f32[M, d], change of the parameters after t_g local epochs
    known: Array  # bool[M]; False for one that sent infinities: it counts in no comparison


class Matrices(NamedTuple):
    """The dissimilarities of all pairs of clients."""

    data: Array  # f32[M, M], V in degrees
    gradient: Array  # f32[M, M], G in degrees
    proximity: Array  # f32[M, M], A in [0, 1]


class Server(NamedTuple):
    optimizer: PyTree
    start: Variables | None  # what all clients train from for t_g epochs; None where newcomers are not admitted
    matrices: Matrices
    search: Search


class Measured(NamedTuple):
    """What one client sends before the clustering."""

    vectors: Array  # f32[L, f, p]
    counts: Array  # i32[L]
    update: Array  # f32[d]
    num_steps: Array  # i32[]


def flag(
    model: Model,
    *,
    clusters: int,
    local: LocalUpdate,
    server: optax.GradientTransformation | None = None,
    beta: float = 0.5,
    delta: float = 0.5,
    gradient_epochs: int = 20,
    max_vectors: int = 3,
    vector_share: float = 0.01,
    angles: Literal["smallest", "sum"] = "smallest",
    share_class_counts: bool = True,
    linkage: Literal["average", "single", "complete"] = "average",
    threshold: float | None = None,
    interval: float = 0.1,
    search_clients: int = 30,
    search_rounds: int = 5,
    search_epochs: int | None = None,
    elbow: Axis = "threshold",
    light_model: Model | None = None,
    newcomers: bool = True,
    weighting: Weighting = "examples",
    participation: float = 1.0,
) -> ClusteredAlgorithm:
    """Clustered federated learning combining data and gradient information.

    Before training every client sends principal vectors of each class and its change Δ_i after t_g local epochs from a
    common start; A = β·V̂ + (1−β)·Ĝ joins the classwise angles V between the data and the angles G between the
    changes; agglomerative clustering of A merges up to the distance α; then every cluster runs federated averaging.

    Args:
      model: what is trained.
      clusters: the most clusters there can be; how many there are, FLAG finds. The search passes over thresholds with
        more, and warns where its elbow is one of them.
      local: what a client does in a round; its optimiser and mini-batches also serve the t_g epochs and the search.
      server: any optax transformation of minus the mean change; None is plain averaging.
      beta: β in [0, 1], the part of the data in A.
      delta: δ in [0, 1]: class sizes weigh angles by 1 − δ to 1 + δ.
      gradient_epochs: t_g, local epochs before Δ_i is sent. With 0 no gradient is compared: Ĝ = 0 and A = β·V̂, which
        reaches only up to β; for the data alone give β = 1 as well.
      max_vectors: the most principal vectors per class.
      vector_share: principal vectors per class as a share of its examples, at least 1 vector.
      angles: per class the "smallest" principal angle, or the "sum" of all, which grows with the number of vectors:
        it compares only clients that send equally many.
      share_class_counts: False keeps class sizes from the server, and weighs all angles equally.
      linkage: "average", "single" or "complete".
      threshold: α in [0, 1]; None searches it (Algorithm 3).
      interval: step of the searched α, from 1 down to 0.
      search_clients: m′, clients that take part in the search.
      search_rounds: rounds of clustered training of every distinct clustering.
      search_epochs: local epochs of a client in such a round; None is what `local` does.
      elbow: what held-out accuracy is drawn over for its elbow: "clusters", their logarithm "log-clusters", or
        α ("threshold").
      light_model: trained in the search; None is a hidden layer of 64.
      newcomers: keeps what clients sent, in memory and checkpoints, so that others can join later by proximity.
      weighting: "examples" weighs clients by |D_i|, "uniform" equally.
      participation: R, share of the clients in a round, in (0, 1].

    Returns:
      A ClusteredAlgorithm that clusters in `init`; V, G, A and the curve of α are harvested before the first round.

    Raises:
      ValueError: a parameter out of range; in `init`, more clusters at a given threshold than `clusters`, or examples
        without classes.

    >>> from fedjax_cluster import local, nn
    >>> flag(nn.lenet5(), clusters=10, local=local.sgd(0.01, batch_size=10, epochs=10), participation=0.2).name
    'flag'
    """
    _check(clusters, beta, delta, gradient_epochs, max_vectors, vector_share, threshold, interval, local)
    _choices(angles=(angles, ("smallest", "sum")), linkage=(linkage, LINKAGES), elbow=(elbow, AXES))
    _at_least_one(search_clients=search_clients, search_rounds=search_rounds)
    search_local = local
    if search_epochs is not None:
        _at_least_one(search_epochs=search_epochs)
        if local.rebuild is None:
            raise ValueError("local cannot be rebuilt for search_epochs; give local.sgd(...), or leave it None")
        search_local = local.rebuild(steps=None, epochs=search_epochs)
    cohorts.cohort_size(participation, 1)
    optimizer = optax.sgd(1.0) if server is None else server
    light = nn.mlp(hidden=(64,)) if light_model is None else light_model
    long_update = local.rebuild(steps=None, epochs=gradient_epochs) if local.rebuild and gradient_epochs else None
    train_light = jax.jit(clustered_training(light, search_local, search_rounds))

    # ------------------------------------------------------------------------------ what a client sends

    def measure(rng_key: Array, start: Variables, num_classes: int, client: Client) -> Measured:
        x, y, number = client.data
        rows = jnp.arange(y.shape[0]) < number
        counts = jnp.sum((jax.nn.one_hot(y, num_classes) > 0) & rows[:, None], axis=0, dtype=jnp.int32)
        flat = x.reshape(x.shape[0], -1).astype(jnp.float32)
        rank = min(max_vectors, flat.shape[1])
        vectors = clustering.principal_vectors(flat, y, number, num_classes, rank, vector_share)
        if not share_class_counts:
            counts = (counts > 0).astype(jnp.int32)
        if long_update is None:
            return Measured(vectors, counts, jnp.zeros_like(tree.ravel(start.params)), jnp.zeros((), jnp.int32))
        result = long_update.run(client_key(rng_key, client.index), model, start, client.data)
        return Measured(vectors, counts, tree.ravel(result.delta), jnp.asarray(result.num_steps, jnp.int32))

    @jax.jit
    def measure_all(rng_key: Array, population: Population, start: Variables):
        num_classes = population.info.num_classes
        return parallel.for_each_client(
            lambda client: measure(rng_key, start, num_classes, client),
            parallel.whole_population(population),
            collect=lambda measured: measured,
        )

    @jax.jit
    def compare(vectors: Array, counts: Array, updates: Array, mask: Array) -> Matrices:
        by_class = clustering.classwise_angles(vectors, counts, angles)
        data = clustering.data_dissimilarity(by_class, counts, delta, mask)
        gradient = clustering.gradient_angles(updates, mask)
        return Matrices(data, gradient, clustering.proximity(data, gradient, beta, mask))

    # ------------------------------------------------------------------------------------------- init

    def init(rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        averaging.check_clusters(clusters, population)
        one_shot.check_classes("flag", population.info, population.data)
        start_key, measure_key, search_key = jax.random.split(jax.random.fold_in(rng_key, 0), 3)
        present = np.asarray(averaging.present_clients(population))
        start = jax.device_get(model.init(start_key, population.info))

        with one_shot.progress_note("FLAG: principal vectors and local training of every client") as note:
            mapped = jax.device_get(measure_all(measure_key, population, start))
            known = mapped.accepted
            vectors, counts, updates, num_steps = tree.where(
                jnp.asarray(known), mapped.collected, jax.tree.map(np.zeros_like, mapped.collected)
            )
            note("FLAG: comparing all pairs of clients")
            matrices, comparing = one_shot.clocked(compare, vectors, counts, updates, jnp.asarray(known))
            dendrogram, merging = one_shot.clocked(
                clustering.dendrogram, matrices.proximity, linkage, jnp.asarray(known)
            )
            if threshold is None:
                thresholds = threshold_grid(interval)
                search, effort = search_threshold(
                    search_key,
                    population,
                    cuts(dendrogram, thresholds),
                    thresholds,
                    model=light,
                    train=train_light,
                    num_clients=search_clients,
                    rounds=search_rounds,
                    slots=clusters,
                    axis=elbow,
                    note=note,
                )
            else:
                thresholds, effort = np.asarray([threshold], np.float32), Effort(0, 0, 0)
                number = cuts(dendrogram, thresholds).max(1) + 1
                search = Search(
                    thresholds, np.full(1, np.nan, np.float32), number.astype(np.int32), np.int32(0), np.int32(0)
                )
        alpha = thresholds[int(search.chosen)]
        if (wanted := int(search.num_clusters[int(search.elbow)])) > clusters:
            LOG.warning(
                "flag: the elbow is at α = %g with %d clusters, but clusters is %d; took α = %g with %d. "
                "Raise clusters to %d",
                thresholds[int(search.elbow)],
                wanted,
                clusters,
                alpha,
                int(search.num_clusters[int(search.chosen)]),
                wanted,
            )
        labels = one_shot.with_largest(cuts(dendrogram, alpha[None])[0], present)
        found = int(labels.max()) + 1
        one_shot.check_found("flag", found, clusters, f"α = {alpha:g}")

        measured = Measured(vectors, counts, updates, num_steps)
        state = assemble(rng_key, population, labels, measured, known, start, matrices, search)
        size, light_size = tree.size(start.params), _size(light, population)
        clients = float(present.sum())
        trained = clients if long_update is not None else 0.0
        vector_floats = float(np.count_nonzero(np.abs(np.asarray(vectors)).max(axis=2))) * vectors.shape[2]
        costs = Costs(
            models_down=trained + effort.models * light_size / size,
            models_up=trained + effort.models * light_size / size + vector_floats / size,
            gradient_evaluations=float(np.sum(num_steps)) + effort.gradients,
            loss_evaluations=effort.evaluations,
            clusterings=1.0,
            clustering_seconds=comparing + merging,
        )
        info = averaging.initial_info(clusters, costs)
        info = info._replace(
            num_rejected=jnp.asarray(int((present & ~known).sum()), jnp.int32), event=jnp.asarray(True)
        )
        return state, info

    def assemble(
        rng_key: Array,
        population: Population,
        labels: np.ndarray,
        measured: Measured,
        known: Any,
        start: Variables,
        matrices: Matrices,
        search: Search,
    ) -> State:
        """The state before the first round from what was measured and found."""
        models = one_shot.start_clusters(rng_key, model, population.info, clusters, int(labels.max()) + 1)
        weights = averaging.one_hot(jnp.asarray(labels), clusters)
        present = jnp.asarray(averaging.present_clients(population))
        rows = averaging.HardClients(weights, present)
        if newcomers:
            rows = Clients(weights, present, measured.vectors, measured.counts, measured.update, jnp.asarray(known))
        own = Server(
            init_optimizer(optimizer, models),
            jax.tree.map(jnp.asarray, start) if newcomers else None,
            matrices,
            jax.tree.map(jnp.asarray, search),
        )
        return State(models, rows, own, jnp.zeros((), jnp.int32))

    def blank(rng_key: Array, population: Population) -> tuple[State, RoundInfo]:
        start = model.init(rng_key, population.info)
        mapped = jax.eval_shape(measure_all, rng_key, population, start)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), mapped)
        measured, known = zeros.collected, zeros.accepted
        many = known.shape[0]
        matrices = Matrices(*[jnp.zeros((many, many))] * 3)
        tried = len(threshold_grid(interval)) if threshold is None else 1
        floats, whole = np.zeros(tried, np.float32), np.zeros(tried, np.int32)
        search = Search(floats, floats, whole, np.int32(0), np.int32(0))
        labels = np.zeros(many, np.int32)
        state = assemble(rng_key, population, labels, measured, known, start, matrices, search)
        return state, averaging.initial_info(clusters)

    # ------------------------------------------------------------------------------------ rounds and after

    def select(rng_key: Array, state: State) -> Selection:
        return cohorts.uniform(rng_key, state.clients.present, participation)

    def admit(rng_key: Array, state: State, client: ClientData, index: Array) -> State:
        clients, own = state.clients, state.server
        row = Client(index, jnp.asarray(True), client, None)
        measured = measure(rng_key, own.start, clients.counts.shape[1], row)
        finite = tree.all_finite(measured)
        measured = jax.tree.map(lambda leaf: jnp.where(finite, leaf, jnp.zeros_like(leaf)), measured)
        unassigned = Clients(
            jnp.zeros(clients.membership.shape[1]),
            jnp.asarray(True),
            measured.vectors,
            measured.counts,
            measured.update,
            finite,
        )
        clients = tree.scatter(clients, index, unassigned)
        compared = clients.present & clients.known
        matrices = compare(clients.vectors, clients.counts, clients.updates, compared)
        slot = one_shot.nearest_cluster(matrices.proximity[index], clients.membership, compared, linkage)
        slot = jnp.where(finite, slot, one_shot.largest_cluster(clients.membership))
        weights = tree.scatter(clients.membership, index, averaging.one_hot(slot, clients.membership.shape[1]))
        return state._replace(clients=clients._replace(membership=weights), server=own._replace(matrices=matrices))

    config: dict[str, Any] = averaging.describe(
        local,
        clusters=clusters,
        beta=beta,
        delta=delta,
        gradient_epochs=gradient_epochs,
        max_vectors=max_vectors,
        vector_share=vector_share,
        angles=angles,
        share_class_counts=share_class_counts,
        linkage=linkage,
        threshold=threshold,
        interval=interval,
        search_clients=search_clients,
        search_rounds=search_rounds,
        search_epochs=search_epochs,
        elbow=elbow,
        newcomers=newcomers,
        weighting=weighting,
        participation=participation,
    )
    return ClusteredAlgorithm(
        "flag",
        config,
        model,
        init,
        select,
        one_shot.train_in_clusters(model, local, optimizer, weighting),
        averaging.personalize_by_label,
        admit if newcomers else None,
        snapshot,
        blank=blank,
    )


def snapshot(state: State) -> dict[str, Any]:
    """V, G, A, the curve of α and the clusters, for plots."""
    matrices, search = state.server.matrices, state.server.search
    return {
        "data": matrices.data,
        "gradient": matrices.gradient,
        "proximity": matrices.proximity,
        "thresholds": search.thresholds,
        "accuracy": search.accuracy,
        "num_clusters": search.num_clusters,
        "chosen": search.chosen,
        "elbow": search.elbow,
        "labels": averaging.labels(state.clients.membership),
    }


def _size(model: Model, population: Population) -> int:
    return tree.size(jax.eval_shape(lambda key: model.init(key, population.info), jax.random.key(0)).params)


def _check(clusters, beta, delta, gradient_epochs, max_vectors, vector_share, threshold, interval, local) -> None:
    if clusters < 1:
        raise ValueError(f"clusters is {clusters}; at least one cluster is needed")
    parts = {"beta": beta, "delta": delta, "threshold": 0.0 if threshold is None else threshold}
    for name, value in parts.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; it must lie in [0, 1]")
    if gradient_epochs < 0:
        raise ValueError(f"gradient_epochs is {gradient_epochs}; it must be 0 or more")
    if gradient_epochs and local.rebuild is None:
        raise ValueError("local cannot be rebuilt for t_g epochs; give local.sgd(...), or gradient_epochs=0")
    _at_least_one(max_vectors=max_vectors)
    if not 0 < vector_share <= 1:
        raise ValueError(f"vector_share is {vector_share}; it is a part of a class's examples, in (0, 1]")
    if not (0 < interval <= 1 and math.isclose(1 / interval, round(1 / interval), rel_tol=1e-6)):
        raise ValueError(f"interval is {interval}; α falls from 1 to 0 in equal steps, such as 0.1 or 0.01")


def _choices(**given: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, known) in given.items():
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")


def _at_least_one(**given: int) -> None:
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
