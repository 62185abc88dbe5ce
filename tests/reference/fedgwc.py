"""FedGWC's Algorithms 1 and 2 in plain NumPy: one client, one pair, one cluster after the other."""

import numpy as np
from sklearn.cluster import KMeans

from tests.reference import federated, interactions, scores, spectral


def local_losses(model, x, y, rate, steps):
    """The loss before each full-batch step, and the change after all of them."""
    weights, bias = model[0].copy(), model[1].copy()
    losses = []
    for _ in range(steps):
        to_weights, to_bias, loss = federated.gradient(weights, bias, x, y)
        losses.append(loss)
        weights, bias = weights - rate * to_weights, bias - rate * to_bias
    return losses, (weights - model[0], bias - model[1])


def best_partition(matrix, beta, n_max, smallest):
    """Algorithm 1: (labels or None, the least index) of one cluster's P."""
    affinity = interactions.interaction_affinity(matrix, beta)
    best, chosen = np.inf, None
    for n in range(2, n_max + 1):
        labels = KMeans(n, n_init=20, random_state=0).fit(spectral.normalised_rows(affinity, n)).labels_
        index = scores.davies_bouldin(affinity, labels)
        if index < best and min(np.bincount(labels, minlength=n)) >= smallest:
            best, chosen = index, labels
    return (chosen, best) if best < 1 else (None, best)


def fedgwc(
    model, clients, cohorts, *, rate, steps, alpha, smoothing, tolerance, beta, patience, n_max, smallest, slots
):
    """Algorithm 2 on given cohorts; `alpha` is a number or "count".

    Returns:
      (models of the clusters, labels, P, running averages, [(round, labels after the split)]).
    """
    count = len(clients)
    members = [list(range(count))]
    models, average, calm = [model], [1.0], [0]
    matrix, met = np.zeros((count, count)), np.zeros((count, count), int)
    splits = []
    for number, cohort in enumerate(cohorts):
        for k in range(len(members)):
            present = [client for client in cohort if client in members[k]]
            losses, changes = zip(*(local_losses(models[k], *clients[i], rate, steps) for i in present), strict=True)
            reward = interactions.gaussian_rewards(np.asarray(losses))
            total = sum(len(clients[i][1]) for i in present)
            shares = [len(clients[i][1]) / total for i in present]
            models[k] = tuple(
                part + sum(share * change[place] for share, change in zip(shares, changes, strict=True))
                for place, part in enumerate(models[k])
            )
            squared = 0.0
            for a, i in enumerate(present):
                for j in present:
                    met[i, j] += 1
                    own = 1 / met[i, j] if alpha == "count" else alpha
                    new = (1 - own) * matrix[i, j] + own * reward[a]
                    squared += (new - matrix[i, j]) ** 2
                    matrix[i, j] = new
            average[k] = (1 - smoothing) * average[k] + smoothing * squared / len(members[k]) ** 2
            calm[k] = calm[k] + 1 if average[k] < tolerance else 0
        due = [k for k in range(len(members)) if calm[k] >= patience]
        if due:
            k = due[0]
            own = np.asarray(members[k])
            found, _ = best_partition(matrix[np.ix_(own, own)], beta, n_max, smallest)
            average[k], calm[k] = 1.0, 0
            if found is not None and len(members) + found.max() <= slots:
                met[np.ix_(own, own)] = np.minimum(met[np.ix_(own, own)], 1)
                parts = sorted((own[found == label].tolist() for label in range(found.max() + 1)), key=len)
                members[k] = parts.pop()
                for part in parts:
                    members.append(part)
                    models.append(models[k])
                    average.append(1.0)
                    calm.append(0)
                labels = np.zeros(count, int)
                for label, part in enumerate(members):
                    labels[part] = label
                splits.append((number, labels))
    labels = np.zeros(count, int)
    for label, part in enumerate(members):
        labels[part] = label
    return models, labels, matrix, average, splits
