"""FL+HC in plain NumPy: softmax regression, full batches, clusters as sets of clients (Briggs et al. 2020)."""

import itertools

import numpy as np

from tests.reference.federated import local_change
from tests.reference.linkage import REDUCTIONS

DISTANCES = {
    "euclidean": lambda one, other: np.sqrt(np.sum((one - other) ** 2)),
    "manhattan": lambda one, other: np.sum(np.abs(one - other)),
    "cosine": lambda one, other: 1 - one @ other / np.sqrt((one @ one) * (other @ other)),
}


def apart(one, other, metric, linkage):
    """The distance of two clusters of vectors."""
    if linkage == "ward":
        both = np.concatenate([one, other])
        added = [np.sum((part - part.mean(0)) ** 2) for part in (both, one, other)]
        return np.sqrt(2 * (added[0] - added[1] - added[2]))
    return REDUCTIONS[linkage]([[DISTANCES[metric](x, y) for y in other] for x in one])


def merged(updates, metric, linkage, threshold, slots):
    """Clusters of clients {number: update}, in the order of their smallest."""
    clusters = [[number] for number in sorted(updates)]
    while len(clusters) > 1:
        near, a, b = min(
            (apart(*(np.array([updates[number] for number in part]) for part in (one, other)), metric, linkage), i, j)
            for (i, one), (j, other) in itertools.combinations(enumerate(clusters), 2)
        )
        if len(clusters) <= slots and (threshold is None or near > threshold):
            break
        clusters[a] += clusters.pop(b)
    return [sorted(part) for part in sorted(clusters, key=min)]


def fl_hc(
    model,
    clients,
    cohorts,
    *,
    rate,
    steps,
    warm_up,
    metric="euclidean",
    linkage="complete",
    threshold=None,
    slots,
    weight,
    compared=(True, True),
):
    """Cluster {client: cluster}, models, and mean updates after the rounds of these cohorts.

    `compared` says of kernel and bias whether the clustering sees them.
    """

    def update(of, number):
        change = local_change(of, *clients[number], rate, steps)
        return np.concatenate([part.ravel() for part, counts in zip(change, compared, strict=True) if counts])

    label, models, means, anchor = dict.fromkeys(range(len(clients)), 0), [model], None, None
    for number, chosen in enumerate(cohorts):
        if number == warm_up:
            anchor = models[0]
            updates = {client: update(anchor, client) for client in chosen}
            parts = merged(updates, metric, linkage, threshold, slots)
            label = {client: place for place, part in enumerate(parts) for client in part}
            models = [anchor] * len(parts)
            means = [np.mean([updates[client] for client in part], 0) for part in parts]
        elif means is not None:
            for client in chosen:
                if client not in label:
                    own = update(anchor, client)
                    label[client] = int(np.argmin([DISTANCES[metric](own, mean) for mean in means]))
        after = []
        for place, start in enumerate(models):
            own = [client for client in chosen if label[client] == place]
            changes = [local_change(start, *clients[client], rate, steps) for client in own]
            shares = [weight[client] for client in own]
            moved = [np.average(parts, 0, shares) for parts in zip(*changes, strict=True)] if own else [0.0, 0.0]
            after.append(tuple(part + change for part, change in zip(start, moved, strict=True)))
        models = after
    return label, models, means
