"""FedAvg, IFCA and CFL-GP in plain NumPy, from the papers: softmax regression, one client after the other.

Mini-batches are whole local data sets, so that no random stream has to agree, or given by the caller, as cohorts are.
"""

import itertools

import numpy as np
from sklearn.cluster import KMeans


def gradient(weights, bias, x, y):
    """Gradient of the mean cross entropy of softmax(x W + b), and that loss."""
    scores = x @ weights + bias
    scores = scores - scores.max(1, keepdims=True)
    probability = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    loss = -np.log(probability[np.arange(len(y)), y]).mean()
    probability[np.arange(len(y)), y] -= 1
    return x.T @ probability / len(y), probability.mean(0), loss


def local_change(model, x, y, rate, steps, momentum=0.0, velocity=None):
    """Δθ after full-batch steps from `model` (Algorithm 5 of CFL-GP); a `velocity` list is carried on, and changed."""
    weights, bias = model[0].copy(), model[1].copy()
    velocity = [0.0, 0.0] if velocity is None else velocity
    for _ in range(steps):
        to_weights, to_bias, _ = gradient(weights, bias, x, y)
        velocity[:] = [momentum * v + g for v, g in zip(velocity, (to_weights, to_bias), strict=True)]
        weights, bias = weights - rate * velocity[0], bias - rate * velocity[1]
    return weights - model[0], bias - model[1]


def change_on(model, batches, rate):
    """Δθ after a step on each mini-batch (x, y), and the loss before each step."""
    weights, bias = model[0].copy(), model[1].copy()
    losses = []
    for x, y in batches:
        to_weights, to_bias, loss = gradient(weights, bias, x, y)
        losses.append(loss)
        weights, bias = weights - rate * to_weights, bias - rate * to_bias
    return (weights - model[0], bias - model[1]), losses


def train_cohort(models, chosen, batches, rate, weight):
    """θ_k + mean of the changes of those clients of a cohort {client: its batches} that train it.

    Args:
      chosen: {client: cluster} or a list of clusters.
      weight: {client: weight} or a list of weights in the mean.
    """
    trained = []
    for number, model in enumerate(models):
        own = [client for client in batches if chosen[client] == number]
        changes = [change_on(model, batches[client], rate)[0] for client in own]
        shares = np.asarray([weight[client] for client in own], float)
        trained.append(
            tuple(part + np.average([c[place] for c in changes], 0, shares) for place, part in enumerate(model))
            if own
            else model
        )
    return trained


def share_bias(models, weight):
    """The bias averaged over clusters, weighted as their clients are."""
    bias = np.average([bias for _, bias in models], 0, weight)
    return [(kernel, bias) for kernel, _ in models]


def fedavg(model, clients, *, rate, steps, rounds):
    """One model; mean of the changes weighted by the clients' numbers of examples."""
    total = sum(len(y) for _, y in clients)
    for _ in range(rounds):
        changes = [local_change(model, x, y, rate, steps) for x, y in clients]
        shares = [len(y) / total for _, y in clients]
        model = tuple(
            part + sum(share * change[place] for share, change in zip(shares, changes, strict=True))
            for place, part in enumerate(model)
        )
    return model


def ifca(models, clients, *, rate, steps, rounds):
    """Every client joins the model of least training loss; uniform mean; an empty cluster keeps its model."""
    for _ in range(rounds):
        chosen = [int(np.argmin([gradient(*model, x, y)[2] for model in models])) for x, y in clients]
        models = train_clusters(models, chosen, clients, rate, steps)
    return models, np.asarray(chosen)


def cfl_gp(models, assignment, clients, *, rate, steps, rounds, every):
    """Algorithms 1 and 4 of CFL-GP, with the SVD of the whole profile matrix and assignment by brute force."""
    count = len(models)
    size = sum(part.size for part in models[0])
    profile = np.zeros((len(clients), count, size))
    updates = np.zeros(count, int)
    block = 0
    for number in range(rounds):
        previous = models
        models = train_clusters(models, assignment, clients, rate, steps)
        if number % every == 1 % every:
            share = 1 / (updates[block] + 1)
            for client, (x, y) in enumerate(clients):
                change = local_change(previous[block], x, y, rate, steps)
                flat = np.concatenate([part.ravel() for part in change])
                profile[client, block] = (1 - share) * profile[client, block] + share * flat
            updates[block] += 1
            block = (block + 1) % count
            assignment = spectral_clusters(profile.reshape(len(clients), -1), assignment, count)
    return models, np.asarray(assignment), profile


def train_clusters(models, assignment, clients, rate, steps):
    """θ_k + uniform mean of its clients' changes."""
    trained = []
    for number, model in enumerate(models):
        changes = [
            local_change(model, x, y, rate, steps)
            for (x, y), cluster in zip(clients, assignment, strict=True)
            if cluster == number
        ]
        trained.append(
            tuple(part + np.mean([change[place] for change in changes], 0) for place, part in enumerate(model))
            if changes
            else model
        )
    return trained


def spectral_clusters(profile, old, count):
    """Algorithm 3 of CFL-GP: leading singular vectors, k-means, naming by the largest overlap."""
    _, _, right = np.linalg.svd(profile, full_matrices=False)
    features = profile @ right[:count].T
    found = KMeans(count, n_init=20, random_state=0).fit_predict(features)
    best = max(
        itertools.permutations(range(count)),
        key=lambda names: sum(names[c] == o for c, o in zip(found, old, strict=True)),
    )
    return [best[cluster] for cluster in found]


def fold_in_block(profile, updates, block, changes):
    """The running mean of each client's changes {client: vector} at the model of this block; both are changed."""
    for client, change in changes.items():
        share = 1 / (updates[client, block] + 1)
        profile[client, block] = (1 - share) * profile[client, block] + share * change
        updates[client, block] += 1


def imputed(profile, updates):
    """Profiles in which a block that a client never filled is the mean of those who did."""
    profile = profile.copy()
    for block in range(profile.shape[1]):
        filled = updates[:, block] > 0
        if filled.any():
            profile[~filled, block] = profile[filled, block].mean(0)
    return profile
