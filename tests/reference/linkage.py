"""Agglomerative clustering from its definition: look at all pairs of clusters, merge the closest."""

import itertools

import numpy as np

REDUCTIONS = {"average": np.mean, "single": np.min, "complete": np.max}


def agglomerative(distance, linkage: str, threshold: float = np.inf, num_clusters: int = 1) -> list[set[int]]:
    distance = np.asarray(distance, np.float64)
    clusters = [{i} for i in range(len(distance))]
    while len(clusters) > num_clusters:
        nearest, a, b = min(
            (REDUCTIONS[linkage](distance[np.ix_(sorted(a), sorted(b))]), i, j)
            for (i, a), (j, b) in itertools.combinations(enumerate(clusters), 2)
        )
        if nearest > threshold:
            break
        clusters[a] |= clusters.pop(b)
    return clusters
