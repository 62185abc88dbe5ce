"""Agglomerative clustering from its definition: look at all pairs of clusters, merge the closest."""

import itertools

import numpy as np

REDUCTIONS = {"average": np.mean, "single": np.min, "complete": np.max}


def ward(distance, one, other):
    """√2 times the root of what a merge adds to the squared distances from means, of Euclidean distances of all."""

    def spread(part):
        return np.square(distance[np.ix_(part, part)]).sum() / (2 * len(part))

    return np.sqrt(max(2 * (spread([*one, *other]) - spread(one) - spread(other)), 0.0))


def apart(distance, one, other, linkage):
    if linkage == "ward":
        return ward(distance, one, other)
    return REDUCTIONS[linkage](distance[np.ix_(one, other)])


def agglomerative(distance, linkage: str, threshold: float = np.inf, num_clusters: int = 1) -> list[set[int]]:
    distance = np.asarray(distance, np.float64)
    clusters = [{i} for i in range(len(distance))]
    while len(clusters) > num_clusters:
        nearest, a, b = min(
            (apart(distance, sorted(a), sorted(b), linkage), i, j)
            for (i, a), (j, b) in itertools.combinations(enumerate(clusters), 2)
        )
        if nearest > threshold:
            break
        clusters[a] |= clusters.pop(b)
    return clusters
