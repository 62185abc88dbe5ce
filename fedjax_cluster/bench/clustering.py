"""Every clustering function over the number of clients, compared with SciPy, scikit-learn or a NumPy loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.cluster.hierarchy
import scipy.optimize
import scipy.spatial.distance
import sklearn.cluster

from fedjax_cluster import clustering
from fedjax_cluster.bench.measure import Bench

AddRow = Callable[..., Any]  # `Bench.row`


def run(bench: Bench) -> None:
    dimension = 200 if bench.smoke else 100_000
    row = partial(bench.row, repetitions=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn remarks on affinities that it has not made
        for clients in (16,) if bench.smoke else (128, 1000, 4000):
            rng = np.random.default_rng(clients)
            from_similarities(row, clients, rng)
            from_features(row, clients, rng)
            # What grows with M·d or M²·classes stops at a thousand clients.
            if clients <= 1000:
                from_updates(row, clients, min(dimension, 10_000_000 // clients), rng)
                from_bases(row, clients, rng)
            if clients <= 128:
                from_subspaces(row, clients, rng)


def compiled(function: Callable[..., Any], *arrays: Any, **options: Any) -> Callable[[], Any]:
    """A compiled call on arrays that are already on the device."""
    return partial(jax.jit(partial(function, **options)), *map(jnp.asarray, arrays))


def from_similarities(row: AddRow, clients: int, rng: np.random.Generator) -> None:
    size = f"M={clients}"
    points = rng.normal(size=(clients, 8))
    similarity = np.clip(1 - scipy.spatial.distance.squareform(scipy.spatial.distance.pdist(points, "cosine")), -1, 1)
    similarity = similarity.astype(np.float32)

    def scipy_clusters(linkage: str, count: int) -> Any:
        condensed = scipy.spatial.distance.squareform(1 - similarity, checks=False)
        tree = scipy.cluster.hierarchy.linkage(condensed, linkage)
        return scipy.cluster.hierarchy.fcluster(tree, count, "maxclust")

    bipartition = compiled(clustering.optimal_bipartition, similarity)
    single = {"SciPy single linkage": partial(scipy_clusters, "single", 2)}
    row("optimal_bipartition", size, bipartition, peers=single, at_least=0.5)
    if clients > 1000:
        return
    placed, agglomerative = jnp.asarray(similarity), jax.jit(partial(clustering.agglomerative, num_clusters=4))
    average = {"SciPy average linkage": partial(scipy_clusters, "average", 4)}
    row("agglomerative, average, inside jit", size, lambda: agglomerative(1 - placed), peers=average)
    affinity = np.exp(2 * (similarity - 1))
    ours = compiled(clustering.spectral_clustering, jax.random.key(0), affinity, k=4)
    theirs = sklearn.cluster.SpectralClustering(4, affinity="precomputed", random_state=0)
    row("spectral_clustering, k=4", size, ours, peers={"scikit-learn": partial(theirs.fit_predict, affinity)})


def from_features(row: AddRow, clients: int, rng: np.random.Generator) -> None:
    size = f"M={clients}"
    features = (rng.normal(size=(4, 4))[np.arange(clients) % 4] * 4 + rng.normal(size=(clients, 4))).astype(np.float32)
    kmeans = compiled(clustering.kmeans, jax.random.key(0), features, k=4)
    theirs = sklearn.cluster.KMeans(4, n_init=10, random_state=0)  # pyright: ignore[reportArgumentType]
    row("kmeans, k=4, r=4, 10 restarts", size, kmeans, peers={"scikit-learn": partial(theirs.fit, features)})
    new, old = (rng.integers(0, 16, clients).astype(np.int32) for _ in range(2))

    def hungarian() -> Any:
        table = np.zeros((16, 16))
        np.add.at(table, (new, old), 1)
        return scipy.optimize.linear_sum_assignment(-table)

    matched = compiled(clustering.match_labels, new, old, k=16)
    row("match_labels, k=16", size, matched, peers={"SciPy assignment": hungarian})
    interactions = rng.uniform(size=(clients, clients)).astype(np.float32)

    def affinity_by_rows() -> Any:
        out = np.ones((clients, clients), np.float32)
        for i in range(clients):
            squared = (interactions - interactions[i]) ** 2
            inner = squared.sum(1) - squared[:, i] - squared[np.arange(clients), np.arange(clients)]
            out[i] = np.exp(-0.5 * inner)
        return out

    affinity = compiled(clustering.interaction_affinity, interactions, beta=0.5)
    peers = {"NumPy row by row": affinity_by_rows} if clients <= 1000 else {}
    row("interaction_affinity", size, affinity, peers=peers, flops=2.0 * clients**3)
    cohort = (jnp.ones(10), jnp.arange(10, dtype=jnp.int32), jnp.ones(10, bool))
    update = compiled(clustering.update_interactions, interactions, *cohort, 0.1)
    row("update_interactions, cohort of 10", size, update)


def from_updates(row: AddRow, clients: int, dimension: int, rng: np.random.Generator) -> None:
    size, rank, gram = f"M={clients}, d={dimension}", 4, 2.0 * clients**2 * dimension
    directions = rng.normal(size=(rank, dimension))[np.arange(clients) % rank]
    updates = (directions + 0.3 * rng.normal(size=(clients, dimension))).astype(np.float32)
    placed = jnp.asarray(updates)

    def numpy_cosine() -> Any:
        unit = updates / np.linalg.norm(updates, axis=1, keepdims=True)
        return unit @ unit.T

    cosine, angles = (compiled(fn, placed) for fn in (clustering.cosine_similarity, clustering.gradient_angles))
    row("cosine_similarity", size, cosine, peers={"NumPy": numpy_cosine}, flops=gram)
    row("gradient_angles", size, angles, flops=gram)
    embedding = compiled(clustering.profile_embedding, placed, rank=rank)
    full = {"NumPy's full SVD": partial(np.linalg.svd, updates, full_matrices=False)}
    row(f"profile_embedding, rank {rank}", size, embedding, peers=full, flops=gram)


def from_subspaces(row: AddRow, clients: int, rng: np.random.Generator) -> None:
    classes, features, rows, rank = 10, 784, 200, 3
    size = f"M={clients}, {classes} classes, f={features}"
    x = rng.uniform(size=(clients, rows, features)).astype(np.float32)
    y = rng.integers(0, classes, (clients, rows)).astype(np.int32)
    counts = np.stack([np.bincount(labels, minlength=classes) for labels in y]).astype(np.int32)
    of_client = partial(clustering.principal_vectors, num_classes=classes, rank=rank)
    vectors = compiled(
        lambda *data: jax.lax.map(lambda client: of_client(*client), data), x, y, jnp.full(clients, rows)
    )

    def svd_by_class() -> Any:
        return [
            [np.linalg.svd(x[i][y[i] == c].T, full_matrices=False)[0][:, :rank] for c in range(classes)]
            for i in range(clients)
        ]

    row("principal_vectors, rank 3", size, vectors, peers={"NumPy's SVDs": svd_by_class})
    row("classwise_angles", size, compiled(clustering.classwise_angles, vectors(), counts))


def from_bases(row: AddRow, clients: int, rng: np.random.Generator) -> None:
    """The dissimilarities of all pairs against a NumPy loop over some: seconds are those of as many pairs."""
    classes, features, rank, pairs = 10, 784, 3, 200
    bases = np.linalg.qr(rng.normal(size=(clients, classes, features, rank)).astype(np.float32))[0]
    counts = rng.integers(1, 40, (clients, classes)).astype(np.int32)
    first, second = rng.integers(0, clients, (2, pairs))
    weights = np.log(np.maximum(counts, 2))

    def dissimilarity(vectors: jax.Array, counts: jax.Array) -> jax.Array:
        return clustering.data_dissimilarity(clustering.classwise_angles(vectors, counts), counts)

    def by_pair() -> Any:
        out = np.zeros(pairs)
        for pair, (i, j) in enumerate(zip(first, second, strict=True)):
            for c in range(classes):
                cosines = np.linalg.svd(bases[i, c].T @ bases[j, c], compute_uv=False)
                angle = np.degrees(np.arccos(min(float(cosines[0]), 1.0)))
                out[pair] += angle * max(weights[i, c], weights[j, c]) / min(weights[i, c], weights[j, c])
        return out

    row(
        "data_dissimilarity from bases, 200 pairs",
        f"M={clients}, {classes} classes, f={features}",
        compiled(dissimilarity, bases, counts),
        peers={"NumPy pair by pair": by_pair},
        at_least=20.0 if clients >= 1000 else float("nan"),
        rounds=clients * (clients - 1) / 2 / pairs,
    )
