"""Clustered averaging for methods that cluster once, before training: FLAG and PACFL."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console

from fedjax_cluster import nn, parallel, tree
from fedjax_cluster.algorithms.method import AveragingMethod, Defaults
from fedjax_cluster.algorithms.round import cluster_round, cohort_labels, initial_info, train_in_cluster
from fedjax_cluster.algorithms.threshold_search import Axis, Effort, Search, search_threshold
from fedjax_cluster.options import Bound, at_least, changed, option
from fedjax_cluster.parallel import Mapped
from fedjax_cluster.parallel.kept_programs import KeptProgram
from fedjax_cluster.server import Weighting
from fedjax_cluster.types import (
    ClientData,
    Cohort,
    Costs,
    DatasetInfo,
    LocalUpdate,
    Model,
    Population,
    PyTree,
    RoundInfo,
    State,
    Variables,
)

LOG = logging.getLogger(__name__)

MOST_ASKED = 6  # times
Linkage = Literal["average", "single", "complete"]
STEP = Bound(
    lambda value: 1e-4 <= value <= 1 and math.isclose(1 / value, round(1 / value), rel_tol=1e-6),
    "an equal step in which α falls from 1 to 0, such as 0.1 or 0.01, and at least 0.0001",
)


# Of a method's `searches`, which its threshold decides.
SEARCHED = ("a threshold that is searched for", lambda method: method.searches)


class OneShotMethod(AveragingMethod, abstract=True):
    """A method that clusters once, in `init`; then every cluster runs federated averaging."""

    defaults = Defaults(finds_clusters=True)

    clusters: int = option("the most clusters there can be", bound=at_least(1))
    linkage: Linkage = option('"average", "single" or "complete"', default="average")
    weighting: Weighting = option('"examples" weights clients by |D_i|, "uniform" equally', default="examples")

    @property
    def reads_all(self) -> bool:
        return True

    def step(self, rng_key: Array, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        """θ_k ← θ_k + Σ_i n_i Δθ_i / Σ_i n_i over the round's clients of cluster k (Eq. 8 of FLAG)."""
        done = cluster_round(
            train_in_cluster(rng_key, self.local, self.model, state.clusters, state.round),
            state.clusters,
            cohort,
            jnp.maximum(cohort_labels(state, cohort), 0),
            optimizer=self.optimizer,
            weighting=self.weighting,
            aggregation=self.aggregation,
            private=self.private(rng_key, state.clusters),
        )
        return state._replace(clusters=done.clusters, round=state.round + 1), done.info(cohort.mask)


class SearchingMethod(OneShotMethod, abstract=True):
    """A method whose threshold can be chosen on held-out training rows (Algorithm 3 of FLAG)."""

    interval: float = option("step of the searched α, from 1 down to 0", default=0.1, bound=STEP, used=SEARCHED)
    search_clients: int = option(
        "m′, clients that take part in the search", default=30, bound=at_least(1), used=SEARCHED
    )
    search_rounds: int = option(
        "rounds of clustered training of every distinct clustering", default=5, bound=at_least(1), used=SEARCHED
    )
    search_epochs: int | None = option(
        "local epochs of a client in such a round, the paper's 10, with fewer of which little is learnt in so few "
        "rounds; None is what `local` does",
        default=10,
        bound=at_least(1),
        used=SEARCHED,
    )
    elbow: Axis = option(
        'what held-out accuracy is drawn over for its elbow: "clusters", their logarithm "log-clusters", or α '
        '("threshold")',
        default="threshold",
        used=SEARCHED,
    )
    light_model: Model | None = option(
        "trained in the search; None is a hidden layer of 64", default=None, used=SEARCHED
    )

    @property
    def light(self) -> Model:
        """What is trained in the search."""
        return nn.mlp(hidden=(64,)) if self.light_model is None else self.light_model

    @property
    def search_update(self) -> LocalUpdate:
        """A client's training in the search."""
        if self.search_epochs is None:
            return self.local
        return changed(self.local, "given search_epochs", steps=None, epochs=self.search_epochs)

    def search(
        self,
        rng_key: Array,
        population: Population,
        labels: np.ndarray,
        thresholds: np.ndarray,
        note: Callable,
        landmarks: Array | None = None,
    ) -> tuple[Search, Effort]:
        """Algorithm 3 for the clusters at each threshold f32[T]; tells the curve, and of an elbow too fine.

        `labels` are i32[T, M], or i32[T, m] of `landmarks` i32[m], who alone take part then; `thresholds` are as
        `threshold_search.threshold_grid` gives them, of the method's own scale.
        """
        if landmarks is not None:
            found, labels = labels, np.full((len(labels), len(population.data.num_examples)), -1, np.int32)
            labels[:, np.asarray(landmarks)] = found
        found, effort = search_threshold(
            rng_key,
            population,
            labels,
            thresholds,
            model=self.light,
            update=self.search_update,
            num_clients=self.search_clients,
            rounds=self.search_rounds,
            slots=self.clusters,
            axis=self.elbow,
            weighting=self.weighting,
            aggregation=self.aggregation,
            note=note,
        )
        points = zip(found.thresholds, found.num_clusters, found.accuracy, strict=True)
        curve = ", ".join(f"{at:g}: {count} clusters, {accuracy:.3f}" for at, count, accuracy in points)
        LOG.info("%s: held-out accuracy by threshold, as a part of the largest: %s", self.name, curve)
        chosen, elbow = int(found.chosen), int(found.elbow)
        if (wanted := int(found.num_clusters[elbow])) > self.clusters:
            LOG.warning(
                "%s: the elbow is at α = %g with %d clusters, but clusters is %d; took α = %g with %d. "
                "Raise clusters to %d",
                self.name,
                thresholds[elbow],
                wanted,
                self.clusters,
                thresholds[chosen],
                int(found.num_clusters[chosen]),
                wanted,
            )
        return found, effort


def heard(ask: Callable[..., Mapped], rng_key: Array, present: np.ndarray, *given: Any) -> tuple[Mapped, np.ndarray]:
    """What the clients sent; who was silent, or sent infinities, is asked again, until nobody answers twice in a row.

    Whoever a clustering that happens once does not hear of is in a cluster by chance for good.

    Args:
      ask: for a key and what is given, what all clients send.
      present: bool[M].

    Returns:
      What they sent, and how often each was asked, i32[M].
    """
    found, without_news = parallel.fetched(ask(rng_key, *given)), 0
    asked = present.astype(np.int32)
    for turn in range(1, MOST_ASKED):
        missing = present & ~np.asarray(found.accepted)
        if not missing.any() or without_news == 2:
            break
        again = parallel.fetched(ask(jax.random.fold_in(rng_key, turn), *given))
        asked += missing
        new = jnp.asarray(missing & np.asarray(again.accepted))
        without_news = 0 if new.any() else without_news + 1
        collected = tree.where(new, again.collected, found.collected)
        found = found._replace(collected=collected, accepted=found.accepted | new)
    return found, asked


def until_heard(ask: Callable[[Array], tuple[PyTree, Array]], rng_key: Array) -> PyTree:
    """What one client answers, and whether it was heard: who joins is asked again as in `heard`, and for that reason.

    Args:
      ask: for a key, both of them.
      rng_key: that of the first time.
    """

    def again(turn: Array, _: PyTree) -> PyTree:
        return ask(jnp.where(turn == 0, rng_key, jax.random.fold_in(rng_key, turn)))

    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(ask, rng_key))
    first = (jnp.zeros((), jnp.int32), blank)
    return jax.lax.while_loop(
        lambda carried: (carried[0] < MOST_ASKED) & ~carried[1][1],
        lambda carried: (carried[0] + 1, again(*carried)),
        first,
    )[1]


def without_silent(found: Mapped) -> Any:
    """What the clients sent, with zeros for those that were not heard; made on the host, where `heard` left it."""

    def zeroed(leaf: Any) -> np.ndarray:
        values = np.array(leaf)
        values[~np.asarray(found.accepted)] = 0
        return values

    return jax.device_put(jax.tree.map(zeroed, found.collected))


def model_bytes(model: Model, population: Population) -> int:
    """How long a model is, its parameters and statistics of batch norm."""
    return tree.num_bytes(shapes_of(model, population))


def shapes_of(model: Model, population: Population) -> Variables:
    """The shapes of a model's variables."""
    return jax.eval_shape(lambda key: model.init(key, population.info), jax.random.key(0))


def nearest_cluster(distance: Array, membership: Array, known: Array, linkage: str) -> Array:
    """The cluster i32[] to which one client is nearest, as the linkage measures; 0 where none has a member.

    `distance` f32[M] is from the client to all, of which those that are `known` bool[M] count.

    >>> membership = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> known = jnp.ones(3, bool)
    >>> int(nearest_cluster(jnp.asarray([3.0, 1.0, 4.0]), membership, known, "average"))
    1
    >>> int(nearest_cluster(jnp.asarray([3.0, 1.0, 4.0]), membership, known, "complete"))
    0
    """
    return jnp.argmin(cluster_distances(distance, membership, known, linkage)).astype(jnp.int32)


def cluster_distances(distance: Array, membership: Array, known: Array, linkage: str) -> Array:
    """f32[K], the distance of one client to each cluster, as in `nearest_cluster`; infinite without members."""
    members = (membership > 0) & known[:, None]
    distance = distance[:, None]
    if linkage == "single":
        return jnp.where(members, distance, jnp.inf).min(0)
    if linkage == "complete":
        return jnp.where(members.any(0), jnp.where(members, distance, -jnp.inf).max(0), jnp.inf)
    count = members.astype(jnp.float32).sum(0)
    total = jnp.where(members, distance, 0.0).sum(0)
    return jnp.where(count > 0, total / jnp.maximum(count, 1.0), jnp.inf)


def largest_cluster(membership: Array) -> Array:
    """i32[], the cluster with most members."""
    return jnp.argmax(membership.sum(0)).astype(jnp.int32)


def with_largest(labels: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Puts present clients that could not be clustered (label −1) into the largest cluster.

    >>> with_largest(np.array([0, 1, 1, -1, -1]), np.array([True, True, True, True, False])).tolist()
    [0, 1, 1, 1, -1]
    """
    known = labels[labels >= 0]
    largest = int(np.bincount(known).argmax()) if len(known) else 0
    return np.where(present, np.where(labels >= 0, labels, largest), -1).astype(np.int32)


def clustering_info(num_clusters: int, costs: Costs, present: np.ndarray, known: np.ndarray) -> RoundInfo:
    """The report of an `init` that clustered the clients that are `known` bool[M] of those present: an event."""
    rejected = jnp.asarray(int((present & ~known).sum()), jnp.int32)
    return initial_info(num_clusters, costs)._replace(num_rejected=rejected, event=jnp.asarray(True))


def vectors_sent(vectors: np.ndarray) -> np.ndarray:
    """i64[M], numbers in the principal vectors [M, L, f, p] of each client that are not zero throughout."""
    return np.count_nonzero(np.abs(vectors).max(axis=2), axis=(1, 2)) * vectors.shape[2]


def check_found(method: str, found: int, slots: int, at: str) -> None:
    """Raises a ValueError where a method found more clusters than there are slots."""
    if found > slots:
        raise ValueError(
            f"{method} found {found} clusters at {at}, but clusters is {slots}, the most there can be; "
            f"raise clusters to {found}, or raise threshold to merge more"
        )


def check_classes(method: str, info: DatasetInfo, data: ClientData) -> None:
    """Raises a ValueError where examples have no class, which subspaces by class need."""
    if info.num_classes < 1 or np.ndim(data.y) != 2:
        raise ValueError(
            f"{method} compares clients class by class, but the examples of {info.name} have no class labels; "
            "use a method that clusters by gradients, such as cfl-gp"
        )


def clocked(cluster: Callable[..., Any], *arrays: Any, **static: Any) -> tuple[Any, float]:
    """What `cluster(*arrays, **static)` gives, and its seconds on the server's clock without compilation."""
    if isinstance(cluster, KeptProgram):
        call = cluster.prepared(*arrays, **static)
        if getattr(call, "func", None) is cluster.jitted:  # not compiled yet
            call = functools.partial(cluster.lower(*arrays, **static).compile(), *arrays)
    else:
        call = functools.partial(cluster, *arrays, **static)
        call()
    started = time.perf_counter()
    result = jax.block_until_ready(call())
    return result, time.perf_counter() - started


@contextlib.contextmanager
def progress_note(text: str) -> Iterator[Callable[[str], Any]]:
    """Shows on a terminal what goes on before the first round; yields a function that changes the text."""
    with Console(stderr=True).status(text) as status:
        yield status.update
