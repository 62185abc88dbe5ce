"""Gradient-and-loss CFL in plain NumPy, from the paper's Algorithm 1: softmax regression, whole local data sets.

The descent sign is that of algorithms.md; `printed=True` is Eq. 3 as it stands.
"""

import numpy as np

from tests.reference.federated import gradient, train_clusters


def gradient_loss(
    models, clients, *, rate, steps, rounds, weight, similarity="cosine", printed=False, total=False, pinned=None
):
    """Returns the models and the clusters chosen in every round [rounds, M]."""
    changes, history = None, []
    for _ in range(rounds):
        chosen = []
        for number, (x, y) in enumerate(clients):
            scores = [
                score(model, None if changes is None else changes[k], x, y, rate, weight, similarity, printed, total)
                for k, model in enumerate(models)
            ]
            chosen.append(int(np.argmax(scores)) if pinned is None or pinned[number] < 0 else int(pinned[number]))
        trained = train_clusters(models, chosen, clients, rate, steps)
        changes = [flat(new) - flat(old) for new, old in zip(trained, models, strict=True)]
        models = trained
        history.append(chosen)
    return models, np.asarray(history)


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
