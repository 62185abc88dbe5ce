"""Methods with something of each client's own in plain NumPy, from their papers: softmax regression and a small MLP.

Every step takes a client's whole data set; `cohorts` lists who takes part in each round.
"""

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
