"""Gradient-and-loss CFL in plain NumPy, from the paper's Algorithm 1: softmax regression, whole local data sets.

The descent sign is that of algorithms.md; `printed=True` is Eq. 3 as it stands.
"""

import numpy as np

from tests.reference.federated import gradient, train_clusters, train_cohort


def gradient_loss(
    models, clients, *, rate, steps, rounds, weight, similarity="cosine", printed=False, total=False, pinned=None,
    first=None,
):  # fmt: skip
    """Returns the models and the clusters chosen in every round [rounds, M]; `first` is what was drawn in the first."""
    changes, history = None, []
    for round_number in range(rounds):
        chosen = []
        for number, (x, y) in enumerate(clients):
            scores = [
                score(model, None if changes is None else changes[k], x, y, rate, weight, similarity, printed, total)
                for k, model in enumerate(models)
            ]
            chosen.append(int(np.argmax(scores)) if pinned is None or pinned[number] < 0 else int(pinned[number]))
        if round_number == 0 and first is not None:
            chosen = [cluster if pin < 0 else pin for cluster, pin in zip(first, pinned, strict=True)]
        trained = train_clusters(models, chosen, clients, rate, steps)
        changes = [flat(new) - flat(old) for new, old in zip(trained, models, strict=True)]
        models = trained
        history.append(chosen)
    return models, np.asarray(history)


def in_cohort(models, changes, batches, *, rate, weight, examples):
    """One round of a cohort {client: its mini-batches}, of which the first scores; clients weigh as their `examples`.

    Returns the models, their changes (zeros for an empty cluster) and {client: its cluster}.
    """
    chosen = {}
    for client, own in batches.items():
        scores = [
            score(model, None if changes is None else changes[k], *own[0], rate, weight, "cosine", False, False)
            for k, model in enumerate(models)
        ]
        chosen[client] = int(np.argmax(scores))
    trained = train_cohort(models, chosen, batches, rate, examples)
    return trained, [flat(new) - flat(old) for new, old in zip(trained, models, strict=True)], chosen


def score(model, change, x, y, rate, weight, similarity, printed, total):
    to_weights, to_bias, loss = gradient(*model, x, y)
    loss = loss * len(y) if total else loss
    if change is None:
        return -loss
    direction = flat((to_weights, to_bias))
    if similarity == "euclidean":
        own = direction if printed else -rate * direction
        likeness = -np.linalg.norm(own - change)
    else:
        own = direction if printed else -direction
        length = np.linalg.norm(own) * np.linalg.norm(change)
        likeness = own @ change / length if length > 0 else 0.0
    return weight * likeness - (1 - weight) * loss


def flat(model):
    return np.concatenate([part.ravel() for part in model])
