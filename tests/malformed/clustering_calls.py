"""Clustering functions and scores with values that none of their arguments takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fedjax_cluster import clustering as c
from tests.malformed.calls import (
    ASYMMETRIC,
    BAD_ARRAYS,
    BAD_CHOICES,
    BAD_COUNTS,
    BAD_KEYS,
    BAD_LABELS,
    BAD_MASKS,
    BAD_SCALARS,
    INF,
    KEY,
    LABELS,
    MATRIX,
    NAN,
    NUMBERS,
    OTHERS,
    Spec,
)


def of_arrays(function: Callable[..., Any], given: dict[str, Any], **bad: dict[str, Any]) -> Spec:
    return Spec(function, given, bad)


def clustering() -> Iterator[Spec]:
    """Functions of arrays: what their arguments are tells the values."""
    points = np.arange(8, dtype=np.float32).reshape(4, 2)
    square = {**BAD_ARRAYS, "not square": np.ones((4, 3)), "asymmetric": ASYMMETRIC}
    rows = {name: value for name, value in BAD_ARRAYS.items() if name != "empty"}
    finite_rows = {name: value for name, value in rows.items() if name not in ("of NaN", "infinite", "beyond float32")}
    negative = {**square, "negative": -MATRIX}
    mask, key = {"mask": BAD_MASKS}, {"rng_key": BAD_KEYS}
    tree = c.dendrogram(MATRIX)
    vectors = np.ones((4, 2, 3, 1), np.float32)
    counts = np.ones((4, 2), int)
    bad_counts = {
        "text": "x",
        "floats": counts * 1.5,
        "negative": -counts,
        "of another shape": counts[:3],
        "None": None,
    }
    yield of_arrays(c.optimal_bipartition, {"similarity": MATRIX}, similarity=square, **mask)
    yield of_arrays(
        c.separation_gap, {"similarity": MATRIX, "group": LABELS}, similarity=square, group=BAD_LABELS, **mask
    )
    cosines = {"text": "x", "None": None, "complex": 1j, "2.5": 2.5, "NaN": NAN}
    yield of_arrays(
        c.cross_similarity_bound,
        {"alignment": 0.5, "num_distributions": 2},
        alignment=cosines,
        num_distributions=BAD_COUNTS | {"1": 1},
    )
    yield of_arrays(c.largest_safe_noise, {"max_cross": 0.5}, max_cross=cosines)
    linkage = {"linkage": BAD_CHOICES}
    thresholds = {name: BAD_SCALARS[name] for name in ("text", "NaN", "complex", "an array", "an object")}
    yield of_arrays(c.dendrogram, {"distance": MATRIX}, distance=square, **mask, **linkage)
    yield of_arrays(
        c.agglomerative,
        {"distance": MATRIX, "threshold": 0.6},
        distance=square,
        threshold=thresholds,
        **mask,
        **linkage,
    )
    yield of_arrays(
        c.cut_dendrogram, {"tree": tree, "threshold": 0.6}, tree=OTHERS, threshold=thresholds, num_clusters={"2": 2}
    )
    yield of_arrays(c.cut_dendrogram, {"tree": tree, "num_clusters": 2}, num_clusters=BAD_COUNTS | {"0": 0, "9": 9})
    yield of_arrays(
        c.kmeans,
        {"rng_key": KEY, "points": points, "k": 2},
        points=rows,
        k=BAD_COUNTS | {"0": 0, "9": 9},
        num_restarts=BAD_COUNTS | {"0": 0},
        max_iterations=BAD_COUNTS | {"0": 0},
        **mask,
        **key,
    )
    method = {"method": BAD_CHOICES}
    rank = {"rank": BAD_COUNTS | {"0": 0, "9": 9}}
    yield of_arrays(c.profile_embedding, {"profile": points, "rank": 2}, profile=rows, **rank, **mask, **method)
    yield of_arrays(c.embed_gram, {"gram": MATRIX, "rank": 2}, gram=square, **rank, **mask, **method)
    yield of_arrays(c.decomposed_cosines, {"gram": MATRIX, "rank": 2}, gram=square, **rank, **mask, **method)
    yield of_arrays(c.similarity_differences, {"similarity": MATRIX}, similarity=square, **mask)
    metric = {"metric": BAD_CHOICES}
    yield of_arrays(
        c.pairwise_distances,
        {"points": points, "others": points},
        points=rows,
        others={k: v for k, v in rows.items() if k != "None"},
        **metric,
    )
    yield of_arrays(
        c.subspace_embedding,
        {"rng_key": KEY, "profile": points, "rank": 2},
        profile=rows,
        depth=BAD_COUNTS | {"0": 0},
        oversampling=BAD_COUNTS,
        devices=BAD_COUNTS | {"0": 0},
        **rank,
        **mask,
        **key,
    )
    yield of_arrays(
        c.spectral_clustering,
        {"rng_key": KEY, "affinity": MATRIX, "k": 2},
        affinity=negative,
        k=BAD_COUNTS | {"9": 9},
        **mask,
        **key,
    )
    yield of_arrays(
        c.spectral_partitions,
        {"rng_key": KEY, "affinity": MATRIX, "max_k": 2},
        affinity=negative,
        max_k=BAD_COUNTS | {"1": 1},
        **mask,
        **key,
    )
    yield of_arrays(
        c.qr_partition, {"affinity": MATRIX, "k": 2}, affinity=negative, k=BAD_COUNTS | {"0": 0, "4": 4}, **mask
    )
    yield of_arrays(c.block_gram, {"block": points}, block=finite_rows)
    yield of_arrays(c.cosine_similarity, {"updates": points}, updates=rows, **mask)
    yield of_arrays(c.gradient_angles, {"updates": points}, updates=rows, **mask)
    yield of_arrays(
        c.classwise_angles,
        {"vectors": vectors, "counts": counts},
        vectors=rows,
        counts=bad_counts,
        reduction=BAD_CHOICES,
    )
    yield of_arrays(
        c.data_dissimilarity,
        {"angles": np.ones((4, 4, 2)), "counts": counts},
        angles=rows,
        counts=bad_counts,
        delta=BAD_SCALARS,
        **mask,
    )
    yield of_arrays(
        c.proximity, {"data": MATRIX, "gradient": MATRIX}, data=square, gradient=square, beta=BAD_SCALARS, **mask
    )
    yield of_arrays(c.joint_basis, {"vectors": vectors[0]}, vectors=rows)
    yield of_arrays(
        c.principal_vectors,
        {"x": points, "y": LABELS, "num_examples": 4, "num_classes": 2, "rank": 1},
        x=rows,
        y=BAD_LABELS | {"too large": [0, 1, 2, 0]},
        num_examples={name: NUMBERS[name] for name in ("text", "NaN", "2.5", "an array", "None")},
        num_classes=BAD_COUNTS | {"0": 0},
        share={"text": "x", "NaN": NAN, "0": 0, "-1": -1, "2.5": 2.5},
        **rank,
    )
    yield of_arrays(c.gaussian_rewards, {"losses": points}, losses=rows, **mask)
    yield of_arrays(
        c.update_interactions,
        {"interactions": MATRIX, "rewards": np.ones(2), "index": [0, 1], "mask": None, "rate": 0.5},
        interactions={**BAD_ARRAYS, "not square": np.ones((4, 3))},
        rewards=rows,
        index={
            "text": "x",
            "floats": [0.0, 1.0],
            "a client twice": [1, 1],
            "of another length": [0],
            "of 64 bits": [0, 2**40],
        },
        rate=BAD_SCALARS,
        **mask,
    )
    yield of_arrays(
        c.interaction_affinity,
        {"interactions": MATRIX, "beta": 1.0},
        interactions={**BAD_ARRAYS, "not square": np.ones((4, 3))},
        beta=BAD_SCALARS | {"0": 0, "inf": INF},
        **mask,
    )
    yield of_arrays(
        c.match_labels,
        {"new": LABELS, "old": LABELS, "k": 2},
        new=BAD_LABELS,
        old=BAD_LABELS,
        k=BAD_COUNTS | {"1": 1},
        **mask,
    )
    values = np.array([9.0, 4.0, 1.0])
    ascending = {**rows, "ascending": values[::-1], "empty": []}
    yield of_arrays(
        c.largest_gaps, {"singular_values": values, "count": 1}, singular_values=ascending, count=BAD_COUNTS | {"3": 3}
    )
    yield of_arrays(c.elbow, {"x": values, "y": values}, x={**rows, "that ends where it begins": [1, 2, 1]}, y=rows)
    yield of_arrays(
        c.estimate_num_clusters,
        {"rng_key": KEY, "values": values, "max_clusters": 2},
        values=rows,
        max_clusters=BAD_COUNTS | {"0": 0},
        **method,
        **key,
    )
    for score in (c.scores.adjusted_rand_index, c.scores.rand_index):
        yield of_arrays(
            score, {"labels_a": LABELS, "labels_b": LABELS}, labels_a=BAD_LABELS, labels_b=BAD_LABELS, **mask
        )
    yield of_arrays(c.scores.purity, {"labels": LABELS, "groups": LABELS}, labels=BAD_LABELS, groups=BAD_LABELS, **mask)
    number = {"num_labels": BAD_COUNTS | {"1": 1}}
    for score in (c.scores.silhouette, c.scores.davies_bouldin):
        yield of_arrays(
            score, {"features": points, "labels": LABELS}, features=rows, labels=BAD_LABELS, **mask, **number
        )
    for score in (c.scores.wasserstein_adjusted_silhouette, c.scores.wasserstein_adjusted_davies_bouldin):
        yield of_arrays(
            score,
            {"class_counts": points, "labels": LABELS},
            class_counts={**rows, "negative": -points},
            labels=BAD_LABELS,
            **mask,
            **number,
        )
