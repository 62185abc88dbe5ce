"""The baselines in plain NumPy, from their papers: softmax regression, whole local data sets."""

import numpy as np

from tests.reference.federated import gradient, local_change


def add(model, change, factor=1.0):
    return tuple(part + factor * step for part, step in zip(model, change, strict=True))


def mean(changes, weights=None):
    return tuple(np.average([change[place] for change in changes], 0, weights) for place in range(len(changes[0])))


def fedprox(model, clients, *, rate, steps, rounds, proximal):
    """Every step descends f_i(θ) + μ/2‖θ − θ_start‖², θ_start a copy of the round's start model."""
    sizes = [len(y) for _, y in clients]
    for _ in range(rounds):
        changes = []
        for x, y in clients:
            own = model
            for _ in range(steps):
                *pull, _ = gradient(*own, x, y)
                away = add(own, model, -1.0)
                own = add(own, add(pull, away, proximal), -rate)
            changes.append(add(own, model, -1.0))
        model = add(model, mean(changes, sizes))
    return model


def fedavgm(model, clients, *, rate, steps, rounds, momentum):
    """v ← βv + mean change by examples; θ ← θ + v."""
    sizes = [len(y) for _, y in clients]
    velocity = tuple(np.zeros_like(part) for part in model)
    for _ in range(rounds):
        change = mean([local_change(model, x, y, rate, steps) for x, y in clients], sizes)
        velocity = add(change, velocity, momentum)
        model = add(model, velocity)
    return model


def fairavg(model, clients, *, rate, steps, rounds):
    for _ in range(rounds):
        model = add(model, mean([local_change(model, x, y, rate, steps) for x, y in clients]))
    return model


def local_only(model, clients, *, rate, steps, rounds):
    return [add(model, local_change(model, x, y, rate, steps * rounds)) for x, y in clients]


def fesem(centres, chosen, clients, *, rate, steps, rounds, part=slice(None)):
    """Train from the own centre, join the nearest, average; `part` selects what the distance is measured on."""
    for _ in range(rounds):
        models = [
            add(centres[k], local_change(centres[k], x, y, rate, steps))
            for k, (x, y) in zip(chosen, clients, strict=True)
        ]
        chosen = [int(np.argmin([distance(model, centre, part) for centre in centres])) for model in models]
        centres = [
            mean([model for model, k in zip(models, chosen, strict=True) if k == number])
            if number in chosen
            else centre
            for number, centre in enumerate(centres)
        ]
    return centres, np.asarray(chosen)


def distance(model, centre, part):
    return sum(np.sum((a - b) ** 2) for a, b in zip(model[part], centre[part], strict=True))
