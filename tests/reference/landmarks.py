"""Clusterings by landmark clients, one client, one landmark and one class after the other, in float64."""

import numpy as np

from tests.reference import subspaces

REDUCTIONS = {"average": np.mean, "single": np.min, "complete": np.max}


def extend_labels(distance, landmarks, labels, linkage):
    """The cluster of the nearest landmarks; a landmark's own."""
    known = sorted(set(labels) - {-1})
    found = []
    for client, row in enumerate(np.asarray(distance, np.float64)):
        if client in landmarks:
            found.append(labels[list(landmarks).index(client)])
        else:
            apart = [REDUCTIONS[linkage]([row[a] for a, own in enumerate(labels) if own == k]) for k in known]
            found.append(known[int(np.argmin(apart))])
    return found


def affinity(interactions, landmarks, beta):
    """FedGWC's W of all clients with the landmarks, from as many columns, scaled up to those of all clients."""
    interactions = np.asarray(interactions, np.float64)
    clients = len(interactions)
    found = np.ones((clients, len(landmarks)))
    for k in range(clients):
        for a, j in enumerate(landmarks):
            if k != j:
                columns = [b for b, other in enumerate(landmarks) if other not in (k, j)]
                squared = sum((interactions[k, b] - interactions[j, b]) ** 2 for b in columns)
                found[k, a] = np.exp(-beta * squared * (clients - 2) / max(len(columns), 1))
    return found


def proximity(measured, landmarks, *, delta, beta, reduction="smallest"):
    """FLAG's A of all clients with the landmarks; `measured` is (vectors, class counts, change) of each client."""
    clients, classes = len(measured), len(measured[0][1])
    counts = np.stack([own for _, own, _ in measured])
    flat = [np.concatenate([part.ravel() for part in change]) for _, _, change in measured]
    pairs = [(i, j) for i in landmarks for j in landmarks if i != j]

    def weight(i, j, c):
        logs = [np.log(max(counts[k, c], 2)) for k in (i, j)]
        return max(logs) / min(logs)

    weights = [weight(i, j, c) for i, j in pairs for c in range(classes) if counts[i, c] and counts[j, c]]
    least, most = min(weights, default=1.0), max(weights, default=1.0)

    def raw(i, j):
        total = 0.0
        for c in range(classes):
            own, other = measured[i][0][c], measured[j][0][c]
            angle = subspaces.classwise_angle(own, other, counts[i, c], counts[j, c], reduction)
            share = 1.0
            if counts[i, c] and counts[j, c] and most > least:
                share = 1 - delta + 2 * delta * np.clip((weight(i, j, c) - least) / (most - least), 0, 1)
            total += angle * share / classes
        return total, subspaces.gradient_angle(flat[i], flat[j])

    among = np.array([raw(i, j) for i, j in pairs])
    low, high = among.min(0), among.max(0)
    found = np.zeros((clients, len(landmarks)))
    for i in range(clients):
        for a, j in enumerate(landmarks):
            if i != j:
                scaled = np.where(high > low, (raw(i, j) - low) / np.where(high > low, high - low, 1), 0)
                found[i, a] = beta * scaled[0] + (1 - beta) * scaled[1]
    return found


def projections(profile, landmarks, rank):
    """All profiles on the leading right singular vectors of the landmarks'."""
    profile = np.asarray(profile, np.float64)
    right = np.linalg.svd(profile[landmarks], full_matrices=False)[2][:rank]
    return profile @ right.T
