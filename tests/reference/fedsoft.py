"""FedSoft in plain NumPy, from Ruan & Joe-Wong 2022, Algorithm 1: softmax regression, draws and mini-batches given."""

import numpy as np

from tests.reference.fedem import scores


def best_shares(centres, x, y):
    """Share of the points on which each centre has the least loss, point by point."""
    counts = np.zeros(len(centres))
    for n in range(len(y)):
        losses = [-np.log(scores(centre, x[n : n + 1])[0, y[n]]) for centre in centres]
        counts[int(np.argmin(losses))] += 1
    return counts / len(y)


def proximal_steps(own, centres, importance, batches, proximal, rate):
    """Gradient steps on f(w) + λ/2 Σ_k u_k ‖w − c_k‖² from the client's own model, one on each mini-batch (x, y)."""
    own = [part.copy() for part in own]
    for x, y in batches:
        error = scores(own, x)
        error[np.arange(len(y)), y] -= 1
        gradient = [x.T @ error / len(y), error.mean(0)]
        for u, centre in zip(importance, centres, strict=True):
            for place in range(2):
                gradient[place] = gradient[place] + proximal * u * (own[place] - centre[place])
        own = [part - rate * slope for part, slope in zip(own, gradient, strict=True)]
    return own


def fedsoft(centres, own, clients, draws, cohorts, *, every, proximal, smallest, rate):
    """`draws(round, odds [M][K])` gives how often each cluster draws each client: randomness is the caller's.

    `cohorts` [{client: its mini-batches}] hold all those who are drawn, at least.
    """
    shares = [None] * len(clients)
    for number, cohort in enumerate(cohorts):
        if number % every == 0:
            shares = [best_shares(centres, x, y) for x, y in clients]
        importance = [np.maximum(share, smallest) for share in shares]
        odds = np.asarray([u * len(y) for u, (_, y) in zip(importance, clients, strict=True)])
        times = draws(number, odds)
        for i in np.flatnonzero(times.sum(1) > 0):
            own[i] = proximal_steps(own[i], centres, importance[i], cohort[i], proximal, rate)
        for k in range(len(centres)):
            drawn = [own[i] for i in range(len(clients)) for _ in range(int(times[i][k]))]
            if drawn:
                centres[k] = [np.mean([model[place] for model in drawn], 0) for place in range(2)]
    return centres, own, np.asarray(shares)
