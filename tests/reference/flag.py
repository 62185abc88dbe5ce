"""FLAG and PACFL in plain NumPy, from the papers: softmax regression, one client and one pair after the other.

Mini-batches are whole local data sets, so that no random stream has to agree.
"""

import numpy as np
import scipy.linalg

from tests.reference import federated, subspaces


def measure(model, x, y, *, num_classes, rank, share, rate, epochs):
    """What a client sends: per class its principal vectors, its class counts, and its change after t_g epochs."""
    counts = np.bincount(y, minlength=num_classes)
    vectors = []
    for label, count in enumerate(counts):
        kept = min(rank, max(int(share * count), 1))
        vectors.append(subspaces.principal_vectors(x, y, label, kept) if count else None)
    return vectors, counts, federated.local_change(model, x, y, rate, epochs)


def matrices(measured, *, delta, beta, reduction="smallest"):
    """V, G and A of Algorithm 2."""
    clients, classes = len(measured), len(measured[0][1])
    counts = np.stack([own for _, own, _ in measured])
    angles = np.zeros((clients, clients, classes))
    gradient = np.zeros((clients, clients))
    flat = [np.concatenate([part.ravel() for part in change]) for _, _, change in measured]
    for i, j in np.ndindex(clients, clients):
        if i == j:
            continue
        gradient[i, j] = subspaces.gradient_angle(flat[i], flat[j])
        for c in range(classes):
            first, second = measured[i][0][c], measured[j][0][c]
            angles[i, j, c] = subspaces.classwise_angle(first, second, counts[i, c], counts[j, c], reduction)
    data = subspaces.data_dissimilarity(angles, counts, delta)
    return data, gradient, subspaces.proximity(data, gradient, beta)


def as_labels(clusters, count):
    """Clusters as sets of clients → labels in the order of their first clients."""
    labels = np.full(count, -1)
    for number, members in enumerate(sorted(clusters, key=min)):
        labels[sorted(members)] = number
    return labels


def train_clusters(models, labels, clients, *, rate, steps, rounds):
    """Federated averaging by |D_i| in every cluster (Eq. 8)."""
    return [
        federated.fedavg(
            model,
            [client for client, label in zip(clients, labels, strict=True) if label == number],
            rate=rate,
            steps=steps,
            rounds=rounds,
        )
        for number, model in enumerate(models)
        if number in labels
    ]


def held_out_score(start, kept, held, labels, *, rate, steps, rounds):
    """One point of Algorithm 3: clustered training on the kept rows, mean over clients of a score on the held-out ones.

    The score is the probability of the true class, which shows differences that the accuracy of a few rows does not.
    """
    labels = np.unique(labels, return_inverse=True)[1]
    models = train_clusters([start] * (labels.max() + 1), labels, kept, rate=rate, steps=steps, rounds=rounds)
    scores = []
    for (x, y), label in zip(held, labels, strict=True):
        weights, bias = models[label]
        exponential = np.exp(x @ weights + bias)
        scores.append(np.mean(exponential[np.arange(len(y)), y] / exponential.sum(1)))
    return np.mean(scores)


def elbow(thresholds, accuracy, num_clusters, slots, axis):
    """Place of the point highest above the chord from the first to the last that has at most `slots` clusters."""
    drawn = {"threshold": lambda i: 1 - thresholds[i], "clusters": lambda i: num_clusters[i]}
    x = drawn.get(axis, lambda i: np.log2(num_clusters[i]))
    last = len(thresholds) - 1
    best, place = 0.0, 0
    for i in range(1, last):
        slope = (accuracy[last] - accuracy[0]) / (x(last) - x(0))
        height = accuracy[i] - (accuracy[0] + slope * (x(i) - x(0)))
        if num_clusters[i] <= slots and height > best + 1e-6:
            best, place = height, i
    return place


def pacfl_angles(clients, *, num_classes, rank):
    """Smallest principal angle in degrees between what the clients' principal vectors of all classes span."""
    spans = []
    for x, y in clients:
        present = [label for label in range(num_classes) if (y == label).any()]
        spans.append(np.concatenate([subspaces.principal_vectors(x, y, label, rank) for label in present], 1))
    angles = np.zeros((len(spans), len(spans)))
    for i, j in np.ndindex(angles.shape):
        if i != j:
            angles[i, j] = np.degrees(scipy.linalg.subspace_angles(spans[i], spans[j])).min()
    return angles
