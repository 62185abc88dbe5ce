"""Scores of clusterings by loops over pairs and clusters, in float64."""

import itertools

import numpy as np


def pair_counts(a: np.ndarray, b: np.ndarray) -> tuple[int, int, int, int]:
    """Pairs of clients together in both, in a only, in b only, and in neither."""
    counts = [0, 0, 0, 0]
    for i, j in itertools.combinations(range(len(a)), 2):
        counts[2 * int(a[i] != a[j]) + int(b[i] != b[j])] += 1
    return tuple(counts)


def rand_index(a: np.ndarray, b: np.ndarray) -> float:
    both, in_a, in_b, neither = pair_counts(a, b)
    pairs = both + in_a + in_b + neither
    return (both + neither) / pairs if pairs else 1.0


def adjusted_rand_index(a: np.ndarray, b: np.ndarray) -> float:
    """(index - expected) / (maximum - expected), Hubert and Arabie (1985), Eq. 5."""
    both, in_a, in_b, neither = pair_counts(a, b)
    if in_a == in_b == 0:
        return 1.0
    pairs = both + in_a + in_b + neither
    expected = (both + in_a) * (both + in_b) / pairs
    maximum = ((both + in_a) + (both + in_b)) / 2
    return (both - expected) / (maximum - expected)


def purity(labels: np.ndarray, groups: np.ndarray) -> float:
    clusters = [np.asarray(groups)[np.asarray(labels) == label] for label in set(np.asarray(labels).tolist())]
    return sum(np.unique(cluster, return_counts=True)[1].max() for cluster in clusters) / len(labels)


def silhouette(features: np.ndarray, labels: np.ndarray) -> float:
    features, labels = np.asarray(features, np.float64), np.asarray(labels)
    names = set(labels.tolist())
    if len(names) < 2:
        return np.nan
    total = 0.0
    for i, label in enumerate(labels):
        distance = np.sqrt(((features - features[i]) ** 2).sum(axis=1))
        if (labels == label).sum() > 1:
            within = distance[labels == label].sum() / ((labels == label).sum() - 1)
            between = min(distance[labels == other].mean() for other in names - {label})
            total += (between - within) / max(between, within) if max(between, within) > 0 else 0.0
    return total / len(labels)


def davies_bouldin(features: np.ndarray, labels: np.ndarray) -> float:
    features, labels = np.asarray(features, np.float64), np.asarray(labels)
    names = sorted(set(labels.tolist()))
    if len(names) < 2:
        return np.nan
    centroids = {name: features[labels == name].mean(axis=0) for name in names}
    width = {name: np.sqrt(((features[labels == name] - centroids[name]) ** 2).sum(axis=1)).mean() for name in names}
    total = 0.0
    for i in names:
        ratios = []
        for j in set(names) - {i}:
            apart = np.sqrt(((centroids[i] - centroids[j]) ** 2).sum())
            ratios.append((width[i] + width[j]) / apart if apart > 0 else np.inf)
        total += max(ratios)
    return total / len(names)


def ranked_frequencies(class_counts: np.ndarray) -> np.ndarray:
    """FedGWC, Section 6: each client's class frequencies in descending order."""
    return np.array([sorted(row / row.sum(), reverse=True) for row in np.asarray(class_counts, np.float64)])
