"""Methods with something of each client's own in plain NumPy, from their papers: softmax regression and a small MLP.

Every step takes a client's whole data set; `cohorts` lists who takes part in each round.
"""

import numpy as np

from tests.reference.baselines import add, mean
from tests.reference.federated import gradient, local_change


def ditto(model, clients, cohorts, *, rate, steps, proximal, personal_steps):
    """Li et al. 2021, Algorithm 1 with Algorithm 2's mean of the changes, all clients alike."""
    own = [model] * len(clients)
    for chosen in cohorts:
        changes = []
        for number in chosen:
            x, y = clients[number]
            changes.append(local_change(model, x, y, rate, steps))
            personal = own[number]
            for _ in range(personal_steps):
                *slope, _ = gradient(*personal, x, y)
                away = add(personal, model, -1.0)
                personal = add(personal, add(slope, away, proximal), -rate)
            own[number] = personal
        model = add(model, mean(changes))
    return model, own


def mlp_gradient(model, x, y):
    """Gradients of the mean cross entropy of softmax(relu(x W + b) V + c) in W, b, V, c."""
    weights, bias, *head = model
    before = x @ weights + bias
    hidden = np.maximum(before, 0)
    to_weights, to_bias, _ = gradient(*head, hidden, y)
    scores = hidden @ head[0] + head[1]
    scores = np.exp(scores - scores.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    scores[np.arange(len(y)), y] -= 1
    back = scores / len(y) @ head[0].T * (before > 0)
    return x.T @ back, back.sum(0), to_weights, to_bias


def descend(model, x, y, rate, steps, moving):
    """Steps of some of a network's four parts; the others stand still."""
    for _ in range(steps):
        slopes = mlp_gradient(model, x, y)
        model = tuple(
            part - rate * slope if place in moving else part
            for place, (part, slope) in enumerate(zip(model, slopes, strict=True))
        )
    return model


def joined(common, own, base):
    return tuple(common[place] if place in base else own[place] for place in range(len(common)))


def fedper(model, clients, cohorts, *, rate, steps, base):
    """Arivazhagan et al. 2019, Algorithms 1 and 2: all parts move, the mean by examples is of those in `base`."""
    everything = range(len(model))
    own = [model] * len(clients)
    for chosen in cohorts:
        for number in chosen:
            own[number] = descend(joined(model, own[number], base), *clients[number], rate, steps, everything)
        shared = mean([own[number] for number in chosen], [len(clients[number][1]) for number in chosen])
        model = joined(shared, model, base)
    return model, [joined(model, each, base) for each in own]


def fedrep(model, clients, cohorts, *, rate, steps, head_steps, base):
    """Collins et al. 2021, Algorithm 1: the head first, then the representation under it; a mean of all alike."""
    head = [place for place in range(len(model)) if place not in base]
    own = [model] * len(clients)
    for chosen in cohorts:
        for number in chosen:
            start = joined(model, own[number], base)
            fitted = descend(start, *clients[number], rate, head_steps, head)
            own[number] = descend(fitted, *clients[number], rate, steps, base)
        model = joined(mean([own[number] for number in chosen]), model, base)
    return model, [joined(model, each, base) for each in own]


def scaffold(model, clients, cohorts, *, rate, steps, server_rate, control):
    """Karimireddy et al. 2020, Algorithm 1, with option I ("gradient") or II ("steps") for the control variates."""
    zero = tuple(np.zeros_like(part) for part in model)
    common, own = zero, [zero] * len(clients)
    for chosen in cohorts:
        changes, differences = [], []
        for number in chosen:
            x, y = clients[number]
            local = model
            for _ in range(steps):
                *slope, _ = gradient(*local, x, y)
                local = add(local, add(add(slope, common), own[number], -1.0), -rate)
            if control == "gradient":
                new = tuple(gradient(*model, x, y)[:2])
            else:
                new = add(add(own[number], common, -1.0), add(model, local, -1.0), 1 / (steps * rate))
            changes.append(add(local, model, -1.0))
            differences.append(add(new, own[number], -1.0))
            own[number] = new
        model = add(model, mean(changes), server_rate)
        common = add(common, mean(differences), len(chosen) / len(clients))
    return model, common, own


def pfedme(model, clients, cohorts, *, rate, steps, server_rate, strength, inner_steps, inner_rate):
    """Dinh et al. 2020, Algorithm 1; inner steps begin where those of the local step before ended."""
    own = [model] * len(clients)
    for chosen in cohorts:
        sent = []
        for number in chosen:
            x, y = clients[number]
            local = personal = model
            for _ in range(steps):
                for _ in range(inner_steps):
                    *slope, _ = gradient(*personal, x, y)
                    away = add(personal, local, -1.0)
                    personal = add(personal, add(slope, away, strength), -inner_rate)
                local = add(local, add(local, personal, -1.0), -rate * strength)
            own[number] = personal
            sent.append(local)
        model = tuple((1 - server_rate) * part + server_rate * new for part, new in zip(model, mean(sent), strict=True))
    return model, own


def fedproto(model, clients, cohorts, *, rate, steps, strength, classes, weighted):
    """Tan et al. 2022, Algorithm 1, with the public code's distance: of each example, squared, per number."""
    own, known, prototypes = [model] * len(clients), np.zeros(classes, bool), np.zeros((classes, len(model[1])))
    for chosen in cohorts:
        total, weight = np.zeros_like(prototypes), np.zeros(classes)
        for number in chosen:
            x, y = clients[number]
            for _ in range(steps):
                before = x @ own[number][0] + own[number][1]
                hidden = np.maximum(before, 0)
                pull = np.where(known[y][:, None], hidden - prototypes[y], 0.0) * 2 * strength / hidden.size
                back = pull * (before > 0)
                to_weights, to_bias, *to_head = mlp_gradient(own[number], x, y)
                slopes = (to_weights + x.T @ back, to_bias + back.sum(0), *to_head)
                own[number] = add(own[number], slopes, -rate)
            hidden = np.maximum(x @ own[number][0] + own[number][1], 0)
            for label in np.unique(y):
                share = (y == label).sum() if weighted else 1
                total[label] += share * hidden[y == label].mean(0)
                weight[label] += share
        for label in np.flatnonzero(weight):
            prototypes[label], known[label] = total[label] / weight[label], True
    return own, prototypes, known
