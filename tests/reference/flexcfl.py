"""FlexCFL in plain NumPy: softmax regression, full batches, clusters as sets of clients (its public code)."""

import itertools

import numpy as np

from tests.reference.federated import local_change


def directions(updates, slots):
    """Cosines of updates [n, d] with their leading singular directions."""
    own = np.linalg.svd(updates.T, full_matrices=False)[0][:, :slots]
    return np.array([[one @ other / np.sqrt(one @ one) for other in own.T] for one in updates])


def differences(updates):
    """Mean absolute difference of two updates' cosines with all others."""
    cosine = np.array([[one @ other / np.sqrt((one @ one) * (other @ other)) for other in updates] for one in updates])
    count = len(updates)
    apart = np.zeros((count, count))
    for i, j in itertools.permutations(range(count), 2):
        apart[i, j] = np.mean([abs(cosine[i, z] - cosine[j, z]) for z in range(count) if z not in (i, j)])
    return apart


def best_means(points, slots):
    """The partition with the least sum of squares, of all: labels in the order of first appearance."""
    best, least = None, np.inf
    for label in itertools.product(range(slots), repeat=len(points)):
        if sorted(set(label)) != list(dict.fromkeys(label)) or len(set(label)) < slots:
            continue
        groups = [points[np.array(label) == slot] for slot in range(slots)]
        total = sum(np.sum((group - group.mean(0)) ** 2) for group in groups)
        if total < least - 1e-12:
            best, least = label, total
    return list(best)


def complete_linkage(apart, slots):
    parts = [[place] for place in range(len(apart))]
    while len(parts) > slots:
        _, a, b = min(
            (apart[np.ix_(one, other)].max(), i, j)
            for (i, one), (j, other) in itertools.combinations(enumerate(parts), 2)
        )
        parts[a] += parts.pop(b)
    label = [0] * len(apart)
    for slot, part in enumerate(sorted(parts, key=min)):
        for place in part:
            label[place] = slot
    return label


def flexcfl(model, clients, cohorts, *, rate, steps, first_steps, slots, weight, measure="edc", mixing=0.0):
    """Cluster {client: cluster}, models, and first mean updates after the rounds of these cohorts."""

    def shown(client):
        return local_change(model, *clients[client], rate, first_steps)

    def flat(change):
        return np.concatenate([part.ravel() for part in change])

    first = sorted(cohorts[0])
    changes = [shown(client) for client in first]
    updates = np.array([flat(change) for change in changes])
    found = best_means(directions(updates, slots), slots) if measure == "edc" else None
    label = dict(zip(first, found or complete_linkage(differences(updates), slots), strict=True))
    means, models = [], []
    for slot in range(slots):
        own = [change for client, change in zip(first, changes, strict=True) if label[client] == slot]
        mean = [np.mean(parts, 0) for parts in zip(*own, strict=True)]
        means.append(flat(mean))
        models.append(tuple(start + change for start, change in zip(model, mean, strict=True)))
    for chosen in cohorts:
        for client in chosen:
            if client not in label:
                own = flat(shown(client))
                angle = [own @ mean / np.sqrt((own @ own) * (mean @ mean)) for mean in means]
                label[client] = int(np.argmax(angle))
        after = []
        for slot, start in enumerate(models):
            own = [client for client in chosen if label[client] == slot]
            moves = [local_change(start, *clients[client], rate, steps) for client in own]
            shares = [weight[client] for client in own]
            moved = [np.average(parts, 0, shares) for parts in zip(*moves, strict=True)] if own else [0.0, 0.0]
            after.append(tuple(part + change for part, change in zip(start, moved, strict=True)))
        length = [np.sqrt(sum(np.sum(part**2) for part in one)) for one in after]
        models = []
        for slot in range(slots):
            shares = [1.0 if other == slot else mixing / length[other] for other in range(slots)]
            models.append(tuple(np.average(parts, 0, shares) for parts in zip(*after, strict=True)))
    return label, models, means
