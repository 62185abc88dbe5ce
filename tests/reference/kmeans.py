"""The best k-means clustering by looking at all of them."""

import itertools
from collections.abc import Iterator

import numpy as np


def inertia(points: np.ndarray, labels: np.ndarray) -> float:
    """Sum of squared distances of the points to the means of their clusters."""
    points = np.asarray(points, np.float64)
    total = 0.0
    for label in set(np.asarray(labels).tolist()) - {-1}:
        members = points[np.asarray(labels) == label]
        total += ((members - members.mean(axis=0)) ** 2).sum()
    return total


def best_inertia(points: np.ndarray, k: int) -> float:
    """Least inertia over all partitions into k clusters, none empty."""
    return min(inertia(points, np.array(labels)) for labels in partitions(len(points), k))


def partitions(number: int, k: int) -> Iterator[tuple[int, ...]]:
    """Every partition into k clusters once: a new cluster takes the next free name."""
    for labels in itertools.product(range(k), repeat=number):
        names = list(dict.fromkeys(labels))
        if names == list(range(k)):
            yield labels
