"""FedEM in plain NumPy, from Marfoq et al. 2021 (Algorithm 1): softmax regression on given cohorts and mini-batches."""

import numpy as np


def scores(model, x):
    weights, bias = model
    out = x @ weights + bias
    out = out - out.max(1, keepdims=True)
    return np.exp(out) / np.exp(out).sum(1, keepdims=True)


def example_losses(model, x, y):
    return [-np.log(scores(model, x)[n, y[n]]) for n in range(len(y))]


def expectation(prior, models, x, y):
    """q[n][k] and π[k], example by example."""
    losses = [example_losses(model, x, y) for model in models]
    q = np.zeros((len(y), len(models)))
    for n in range(len(y)):
        raw = [prior[k] * np.exp(-losses[k][n]) for k in range(len(models))]
        q[n] = np.asarray(raw) / sum(raw)
    return q, q.mean(0)


def weighted_change(model, x, y, q, rate, batches):
    """Δθ after a step on each mini-batch of rows B, on (1/|B|) Σ_{n ∈ B} q_n ℓ(θ; x_n, y_n)."""
    weights, bias = model[0].copy(), model[1].copy()
    for rows in batches:
        error = scores((weights, bias), x[rows])
        error[np.arange(len(rows)), y[rows]] -= 1
        error *= q[rows, None] / len(rows)
        weights, bias = weights - rate * x[rows].T @ error, bias - rate * error.sum(0)
    return weights - model[0], bias - model[1]


def fedem(models, clients, cohorts, *, rate):
    """Rounds of cohorts {client: its mini-batches' rows}; who was never in one has a mixture of zeros."""
    count = len(models)
    mixtures = np.zeros((len(clients), count))
    for cohort in cohorts:
        total = sum(len(clients[number][1]) for number in cohort)
        sums = [[np.zeros_like(part) for part in model] for model in models]
        for number, batches in cohort.items():
            x, y = clients[number]
            prior = mixtures[number] if mixtures[number].any() else np.full(count, 1 / count)
            q, mixtures[number] = expectation(prior, models, x, y)
            for k, model in enumerate(models):
                change = weighted_change(model, x, y, q[:, k], rate, batches)
                for place in range(2):
                    sums[k][place] += len(y) / total * change[place]
        models = [
            tuple(part + more for part, more in zip(m, s, strict=True)) for m, s in zip(models, sums, strict=True)
        ]
    return models, mixtures


def predictions(models, mixture, x):
    return sum(share * scores(model, x) for share, model in zip(mixture, models, strict=True))
