"""Every clustering function over the number of clients, beside SciPy, scikit-learn or a NumPy loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.cluster.hierarchy
import scipy.optimize
import scipy.spatial.distance
import sklearn.cluster

from fedjax_cluster import clustering
from fedjax_cluster.bench.measure import Bench


class Case(NamedTuple):
    what: str
    size: str
    run: Callable[[], Any]
    peers: Mapping[str, Callable[[], Any]]
    at_least: float = float("nan")
    flops: float = 0.0
    rounds: float = 1  # times the peer's work that `run` does


def run(bench: Bench) -> None:
    sizes = (16,) if bench.smoke else (128, 1000, 4000)
    for clients in sizes:
        for case in cases(clients, dimension=200 if bench.smoke else 100_000):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # scikit-learn remarks on affinities that are not its own
                bench.row(
                    case.what,
                    case.size,
                    case.run,
                    peers=case.peers,
                    flops=case.flops,
                    at_least=case.at_least,
                    repetitions=5,
                    rounds=case.rounds,
                )


def cases(clients: int, dimension: int) -> list[Case]:
    """The functions at one number of clients; what grows with M·d or M²·classes stops at a thousand clients."""
    rng = np.random.default_rng(clients)
    own = [*from_similarities(clients, rng), *from_features(clients, rng)]
    if clients <= 1000:
        own += from_updates(clients, min(dimension, 10_000_000 // clients), rng)
        own += from_bases(clients, rng)
    if clients <= 128:
        own += from_subspaces(clients, rng)
    return own


def from_similarities(clients: int, rng: np.random.Generator) -> list[Case]:
    size = f"M={clients}"
    points = rng.normal(size=(clients, 8))
    similarity = np.clip(1 - scipy.spatial.distance.squareform(scipy.spatial.distance.pdist(points, "cosine")), -1, 1)
    similarity = similarity.astype(np.float32)
    on_device = jnp.asarray(similarity)
    bipartition = jax.jit(clustering.optimal_bipartition)

    def single_linkage() -> Any:
        condensed = scipy.spatial.distance.squareform(1 - similarity, checks=False)
        tree = scipy.cluster.hierarchy.linkage(condensed, "single")
        return scipy.cluster.hierarchy.fcluster(tree, 2, "maxclust")

    def average_linkage() -> Any:
        condensed = scipy.spatial.distance.squareform(1 - similarity, checks=False)
        tree = scipy.cluster.hierarchy.linkage(condensed, "average")
        return scipy.cluster.hierarchy.fcluster(tree, 4, "maxclust")

    found = [
        Case("optimal_bipartition", size, lambda: bipartition(on_device), {"SciPy single linkage": single_linkage}, 0.5)
    ]
    if clients <= 1000:
        within = jax.jit(partial(clustering.agglomerative, num_clusters=4))
        found.append(
            Case(
                "agglomerative, average, inside jit",
                size,
                lambda: within(1 - on_device),
                {"SciPy average linkage": average_linkage},
            )
        )
    if clients <= 1000:
        affinity = np.exp(2 * (similarity - 1))
        own = jax.jit(partial(clustering.spectral_clustering, k=4))
        theirs = sklearn.cluster.SpectralClustering(4, affinity="precomputed", random_state=0)
        placed = jnp.asarray(affinity)
        found.append(
            Case(
                "spectral_clustering, k=4",
                size,
                lambda: own(jax.random.key(0), placed),
                {"scikit-learn": lambda: theirs.fit_predict(affinity)},
            )
        )
    return found


def from_features(clients: int, rng: np.random.Generator) -> list[Case]:
    size = f"M={clients}"
    features = (rng.normal(size=(4, 4))[np.arange(clients) % 4] * 4 + rng.normal(size=(clients, 4))).astype(np.float32)
    placed = jnp.asarray(features)
    own = jax.jit(partial(clustering.kmeans, k=4))
    theirs = sklearn.cluster.KMeans(4, n_init=10, random_state=0)  # pyright: ignore[reportArgumentType]
    new, old = (rng.integers(0, 16, clients).astype(np.int32) for _ in range(2))
    match = jax.jit(partial(clustering.match_labels, k=16))
    new_placed, old_placed = jnp.asarray(new), jnp.asarray(old)

    def hungarian() -> Any:
        table = np.zeros((16, 16))
        np.add.at(table, (new, old), 1)
        return scipy.optimize.linear_sum_assignment(-table)

    interactions = jnp.asarray(rng.uniform(size=(clients, clients)), jnp.float32)
    affinity = jax.jit(partial(clustering.interaction_affinity, beta=0.5))
    index = jnp.arange(10, dtype=jnp.int32)
    update = jax.jit(clustering.update_interactions)
    rewards, everyone = jnp.ones(10), jnp.ones(10, bool)
    held = np.asarray(interactions)

    def affinity_by_rows() -> Any:
        out = np.ones((clients, clients), np.float32)
        for i in range(clients):
            squared = (held - held[i]) ** 2
            inner = squared.sum(1) - squared[:, i] - squared[np.arange(clients), np.arange(clients)]
            out[i] = np.exp(-0.5 * inner)
        return out

    return [
        Case(
            "kmeans, k=4, r=4, 10 restarts",
            size,
            lambda: own(jax.random.key(0), placed).labels,
            {"scikit-learn": lambda: theirs.fit(features)},
        ),
        Case("match_labels, k=16", size, lambda: match(new_placed, old_placed), {"SciPy assignment": hungarian}),
        Case(
            "interaction_affinity",
            size,
            lambda: affinity(interactions),
            {"NumPy row by row": affinity_by_rows} if clients <= 1000 else {},
            flops=2.0 * clients**3,
        ),
        Case(
            "update_interactions, cohort of 10", size, lambda: update(interactions, rewards, index, everyone, 0.1), {}
        ),
    ]


def from_updates(clients: int, dimension: int, rng: np.random.Generator) -> list[Case]:
    size = f"M={clients}, d={dimension}"
    rank = 4
    directions = rng.normal(size=(rank, dimension))[np.arange(clients) % rank]
    updates = (directions + 0.3 * rng.normal(size=(clients, dimension))).astype(np.float32)
    placed = jnp.asarray(updates)
    cosine = jax.jit(clustering.cosine_similarity)
    embedding = jax.jit(partial(clustering.profile_embedding, rank=rank))
    angles = jax.jit(clustering.gradient_angles)
    gram = 2.0 * clients**2 * dimension

    def numpy_cosine() -> Any:
        unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
        return unit @ unit.T

    return [
        Case("cosine_similarity", size, lambda: cosine(placed), {"NumPy": numpy_cosine}, flops=gram),
        Case("gradient_angles", size, lambda: angles(placed), {}, flops=gram),
        Case(
            f"profile_embedding, rank {rank}",
            size,
            lambda: embedding(placed),
            {"NumPy's full SVD": lambda: np.linalg.svd(updates, full_matrices=False)},
            flops=gram,
        ),
    ]


def from_subspaces(clients: int, rng: np.random.Generator) -> list[Case]:
    classes, features, rows, rank = 10, 784, 200, 3
    size = f"M={clients}, {classes} classes, f={features}"
    x = rng.uniform(size=(clients, rows, features)).astype(np.float32)
    y = rng.integers(0, classes, (clients, rows)).astype(np.int32)
    counts = np.stack([np.bincount(labels, minlength=classes) for labels in y]).astype(np.int32)
    placed, labels, number = jnp.asarray(x), jnp.asarray(y), jnp.full(clients, rows)
    one = partial(clustering.principal_vectors, num_classes=classes, rank=rank)
    vectors_of = jax.jit(lambda x, y, n: jax.lax.map(lambda own: one(*own), (x, y, n)))
    vectors = vectors_of(placed, labels, number)
    table = jnp.asarray(counts)
    angles_of = jax.jit(clustering.classwise_angles)

    def svd_by_class() -> Any:
        return [
            [np.linalg.svd(x[i][y[i] == c].T, full_matrices=False)[0][:, :rank] for c in range(classes)]
            for i in range(clients)
        ]

    return [
        Case(
            "principal_vectors, rank 3",
            size,
            lambda: vectors_of(placed, labels, number),
            {"NumPy's SVDs": svd_by_class},
        ),
        Case("classwise_angles", size, lambda: angles_of(vectors, table), {}),
    ]


def from_bases(clients: int, rng: np.random.Generator) -> list[Case]:
    """The dissimilarities of all pairs beside a NumPy loop over some: seconds are those of as many pairs."""
    classes, features, rank, pairs = 10, 784, 3, 200
    bases = np.linalg.qr(rng.normal(size=(clients, classes, features, rank)).astype(np.float32))[0]
    counts = rng.integers(1, 40, (clients, classes)).astype(np.int32)
    first, second = rng.integers(0, clients, (2, pairs))
    weights = np.log(np.maximum(counts, 2))

    def by_pair() -> Any:
        out = np.zeros(pairs)
        for number, (i, j) in enumerate(zip(first, second, strict=True)):
            for c in range(classes):
                cosines = np.linalg.svd(bases[i, c].T @ bases[j, c], compute_uv=False)
                angle = np.degrees(np.arccos(min(float(cosines[0]), 1.0)))
                out[number] += angle * max(weights[i, c], weights[j, c]) / min(weights[i, c], weights[j, c])
        return out

    vectors, table = jnp.asarray(bases), jnp.asarray(counts)
    return [
        Case(
            "data_dissimilarity from bases, 200 pairs",
            f"M={clients}, {classes} classes, f={features}",
            lambda: dissimilarity(vectors, table),
            {"NumPy pair by pair": by_pair},
            at_least=20.0 if clients >= 1000 else float("nan"),
            rounds=clients * (clients - 1) / 2 / pairs,
        )
    ]


@jax.jit
def dissimilarity(vectors: jax.Array, counts: jax.Array) -> jax.Array:
    return clustering.data_dissimilarity(clustering.classwise_angles(vectors, counts), counts)
