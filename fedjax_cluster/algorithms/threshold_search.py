"""The choice of a threshold on held-out rows (FLAG, Algorithm 3): a light model trained for each clustering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from fedjax_cluster import clustering, parallel, tree
from fedjax_cluster.aggregation import Aggregation
from fedjax_cluster.algorithms.round import Trained, cluster_round, cluster_variables, first_model, train_client
from fedjax_cluster.inference import measure
from fedjax_cluster.local import client_key, shuffled_rows
from fedjax_cluster.parallel import Client
from fedjax_cluster.server import Weighting, with_optimizer
from fedjax_cluster.types import ClientData, Clusters, LocalUpdate, Model, Population, Selection, Variables

Axis = Literal["log-clusters", "clusters", "threshold"]

# α = 1 merges all although sums of scaled distances can round to slightly more.
ROUNDING = 1e-6
# NOTE: a tenth of a small client is too little to tell clusterings apart; it gives these, or a third of its rows.
LEAST_HELD = 20


class Search(NamedTuple):
    """The curve of Fig. 1, from α = 1 down to 0."""

    thresholds: Any  # f32[T], α
    accuracy: Any  # f32[T], mean held-out accuracy of the light model; NaN where it was not trained
    num_clusters: Any  # i32[T]
    chosen: Any  # i32[], place of α among the thresholds: the elbow's, as far as the clusters fit the slots
    elbow: Any  # i32[], place of the elbow


def no_search(tried: int) -> Search:
    """A search of so many thresholds, without its figures."""
    floats, whole = np.zeros(tried, np.float32), np.zeros(tried, np.int32)
    return Search(floats, floats, whole, np.int32(0), np.int32(0))


class Effort(NamedTuple):
    """What a search has cost."""

    models: float  # light models sent, each way
    gradients: float  # mini-batch gradients
    evaluations: float  # held-out evaluations


def threshold_grid(interval: float) -> np.ndarray:
    """α from 1 down to 0.

    >>> threshold_grid(0.25).tolist()
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return np.round(np.linspace(1.0, 0.0, round(1 / interval) + 1), 6).astype(np.float32)


def cuts(dendrogram: clustering.Dendrogram, thresholds: np.ndarray) -> np.ndarray:
    """i32[T, M]: the clusters at each threshold, all cut from one tree."""
    return np.asarray(_cuts(dendrogram, thresholds + np.float32(ROUNDING)))


@parallel.kept_program()
def _cuts(dendrogram: clustering.Dendrogram, thresholds: Array) -> Array:
    return jax.vmap(lambda threshold: clustering.cut_dendrogram(dendrogram, threshold))(thresholds)


def given_threshold(dendrogram: clustering.Dendrogram, threshold: float) -> Search:
    """A search that tried nothing, with one threshold."""
    thresholds = np.asarray([threshold], np.float32)
    number = cuts(dendrogram, thresholds).max(1) + 1
    accuracy = np.full(1, np.nan, np.float32)
    return Search(thresholds, accuracy, number.astype(np.int32), np.int32(0), np.int32(0))


def choose(
    thresholds: np.ndarray, accuracy: np.ndarray, num_clusters: np.ndarray, slots: int, axis: Axis = "threshold"
) -> tuple[int, int]:
    """The elbow of the curve: the point highest above its chord; of equal points the largest α.

    NOTE: points below the chord do not count, although some lie farther from it: they are worse than doing without.

    The paper names the elbow method and shows accuracy over α; Syakur et al. (2018), whom it cites, draw over the
    number of clusters; its logarithm is ours. Chosen on held-out training rows of Fashion-MNIST, five groups that
    share labels (ρ = 30 %, α′ = 1), eight curves of three federations, steps of 0.1: the groups were taken from 4 of
    them over α, whose chord rises more between two merges than the fifth cluster brings; from 6 over the number of
    clusters, which splits further where that helps by chance; from 7 over its logarithm.

    Of curves over thresholds f32[T] descending from 1, drawn over `axis`: the places of the best point whose clusters
    fit the slots, and of the best of all.

    >>> curve = np.array([0.5, 0.9, 0.9, 0.85, 0.8])
    >>> choose(np.array([1.0, 0.75, 0.5, 0.25, 0.0]), curve, np.array([1, 4, 4, 7, 9]), slots=8)
    (1, 1)
    """
    accuracy = np.nan_to_num(np.asarray(accuracy, np.float32))
    count = np.asarray(num_clusters, np.float64)
    along = {"threshold": -np.asarray(thresholds, np.float64), "clusters": count, "log-clusters": np.log(count)}[axis]
    along = (along - along[0]) / (along[-1] - along[0])
    above = np.maximum(accuracy - (accuracy[0] + along * (accuracy[-1] - accuracy[0])), 0.0)
    fitting = np.where(num_clusters <= slots, above, 0.0)
    return int(clustering.elbow(along, _pinned(fitting))), int(clustering.elbow(along, _pinned(above)))


def _pinned(above: np.ndarray) -> np.ndarray:
    """The ends of a curve lie on its chord, whatever rounding says."""
    above = above.copy()
    above[[0, -1]] = 0.0
    return above


def search_threshold(
    rng_key: Array,
    population: Population,
    labels: np.ndarray,
    thresholds: np.ndarray,
    *,
    model: Model,
    update: LocalUpdate,
    num_clients: int,
    rounds: int,
    slots: int,
    axis: Axis = "threshold",
    weighting: Weighting = "examples",
    aggregation: Aggregation | None = None,
    note: Callable[[str], Any] = lambda text: None,
) -> tuple[Search, Effort]:
    """Held-out accuracy of clustered training with the clusters i32[T, M] (−1: not clustered) of each threshold f32[T].

    Every distinct clustering is tried once: m′ clients, the same for all, train the light model of their cluster on
    nine tenths of their training rows, of few rows on less (`hold_out`), and are tested on the others. `note` is told
    what goes on.
    """
    counts = labels.max(1) + 1
    if len(np.unique(counts)) == 1:
        accuracy = np.full(len(thresholds), np.nan, np.float32)
        return Search(thresholds, accuracy, counts.astype(np.int32), np.int32(0), np.int32(0)), Effort(0, 0, 0)

    clients_key, start_key, train_key = jax.random.split(rng_key, 3)
    known = np.flatnonzero(labels[0] >= 0)
    drawn = np.asarray(jax.random.permutation(clients_key, len(known)))[: min(num_clients, len(known))]
    index = np.sort(known[drawn]).astype(np.int32)
    start = jax.device_get(first_model(start_key, model, population.info))
    found: dict[tuple[int, ...], tuple[float, float]] = {}
    accuracy = np.zeros(len(thresholds), np.float32)
    for place, (threshold, count) in enumerate(zip(thresholds, counts, strict=True)):
        # Clusterings that differ only in clients that are not drawn train the same models.
        among = np.unique(labels[place, index], return_inverse=True)[1].astype(np.int32)
        if tuple(among) not in found:
            note(f"Light training with α = {threshold:g}, {count} clusters")
            slot = np.zeros(labels.shape[1], np.int32)
            slot[index] = among
            found[tuple(among)] = parallel.fetched(
                train_in_clusters(
                    train_key,
                    population,
                    index,
                    slot,
                    start,
                    model=model,
                    update=update,
                    rounds=rounds,
                    weighting=weighting,
                    aggregation=aggregation,
                )
            )
        accuracy[place] = found[tuple(among)][0]
    trips = len(found) * len(index)
    effort = Effort(trips * rounds, float(sum(steps for _, steps in found.values())), trips)
    chosen, elbow = map(np.int32, choose(thresholds, accuracy, counts, slots, axis))
    return Search(thresholds, accuracy, counts.astype(np.int32), chosen, elbow), effort


@parallel.kept_program(static_argnames=("model", "update", "rounds", "weighting", "aggregation"))
def train_in_clusters(
    rng_key: Array,
    population: Population,
    index: Array,
    slot: Array,
    start: Variables,
    *,
    model: Model,
    update: LocalUpdate,
    rounds: int,
    weighting: Weighting = "examples",
    aggregation: Aggregation | None = None,
) -> tuple[Array, Array]:
    """Clustered training of clients `index` i32[m′] in clusters `slot` i32[M]: held-out accuracy, local steps.

    All clusters start from the same model, so that clusterings differ in nothing else.
    """
    optimizer, slots = optax.sgd(1.0), len(index)
    split_key, rounds_key = jax.random.split(rng_key)
    cohort = parallel.gather_cohort(population, Selection(jnp.asarray(index), jnp.ones(slots, bool)))
    slot = tree.take(jnp.asarray(slot), cohort.index)
    params, stats = tree.broadcast(start, slots)
    clusters = with_optimizer(Clusters(params, stats, jnp.ones(slots, bool)), optimizer)

    def one_round(number: Array, carry: tuple[Clusters, Array]) -> tuple[Clusters, Array]:
        clusters, steps = carry
        key = jax.random.fold_in(rounds_key, number)

        def train(client: Client, slot: Array) -> Trained:
            kept, _ = hold_out(client_key(split_key, client.index), client.data)
            return Trained(slot, train_client(key, update, model, clusters, slot, client._replace(data=kept), number))

        done = cluster_round(
            train, clusters, cohort, slot, optimizer=optimizer, weighting=weighting, aggregation=aggregation
        )
        return done.clusters, steps + jnp.sum(done.reports.num_steps.astype(jnp.float32))

    clusters, steps = lax.fori_loop(0, rounds, one_round, (clusters, jnp.zeros(())))

    def evaluate(client: Client, slot: Array) -> tuple[Array, Array]:
        _, held = hold_out(client_key(split_key, client.index), client.data)
        outputs, _ = model.apply(cluster_variables(clusters, slot), held.x, train=False)
        mask = jnp.arange(held.x.shape[0]) < held.num_examples
        figures = measure(model, model.predict(outputs), held.y, mask)
        if "accuracy" not in figures:
            raise ValueError(
                f"thresholds are compared by held-out accuracy, but metrics of light_model are {', '.join(figures)}; "
                "give a light_model whose metrics have `accuracy`, or a threshold"
            )
        accuracy = figures["accuracy"]
        # Without rows there is none, and a model that diverged has predicted nothing right.
        return jnp.where(jnp.isnan(accuracy), 0.0, accuracy), held.num_examples > 0

    accuracy, some = parallel.for_each_client(evaluate, cohort, slot, collect=lambda output: output).collected
    return jnp.sum(accuracy) / jnp.maximum(jnp.sum(some.astype(jnp.float32)), 1.0), steps


def hold_out(
    rng_key: Array, data: ClientData, share: float = 0.1, least: int = LEAST_HELD
) -> tuple[ClientData, ClientData]:
    """Divides one client's training rows at random: kept [N, ...], and `share` of them held out.

    At least `least` are held out, or a third where there are fewer than three times as many; a single row is kept.
    """
    rows, number = data.x.shape[0], data.num_examples
    fewest = jnp.clip(number // 3, 1, least)
    held = jnp.maximum(jnp.round(share * number.astype(jnp.float32)).astype(jnp.int32), fewest)
    held = jnp.where(number > 1, jnp.minimum(held, number - 1), 0)
    order = shuffled_rows(rng_key, 0, rows, jnp.maximum(number, 1))
    order = jnp.where(jnp.arange(rows) < number, order, 0)
    places = jnp.minimum(number - held + jnp.arange(max(int(np.ceil(share * rows)), least)), rows - 1)
    return (
        data._replace(x=data.x[order], y=data.y[order], num_examples=number - held),
        data._replace(x=data.x[order[places]], y=data.y[order[places]], num_examples=held),
    )
