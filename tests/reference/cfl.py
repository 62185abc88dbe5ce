"""CFL in plain NumPy, from Algorithm 5 of the paper: softmax regression, clusters as lists of client numbers.

Bipartitions are found by trying all of them. Everything is deterministic: mini-batches are whole local data sets.
"""

import itertools

import numpy as np

from tests.reference.federated import gradient, local_change


def flat(model):
    return np.concatenate([part.ravel() for part in model])


def cosine(one, other):
    return one @ other / (np.linalg.norm(one) * np.linalg.norm(other))


def best_bipartition(members, updates):
    """The two lists of members whose largest cosine across is smallest (Eq. 25); the first member is in the first."""
    best = None
    for size in range(1, len(members)):
        for rest in itertools.combinations(members[1:], size):
            first = [i for i in members if i not in rest]
            across = max(cosine(updates[i], updates[j]) for i in first for j in rest)
            if best is None or across < best[0]:
                best = (across, first, list(rest))
    return best


def cfl(
    model,
    clients,
    *,
    rate,
    steps,
    rounds,
    epsilon_1=None,
    epsilon_2=None,
    near=0.0,
    far=0.0,
    gamma_max=0.0,
    min_size=3,
    first_round=0,
    most_clusters=99,
    weighting="uniform",
    momentum=0.0,
    of_gradients=False,
    client_momentum=0.0,
    keep=False,
):
    """Returns [(members, model)] in the order in which clusters came to be, and the rounds of the splits.

    A split's first part keeps the place in the list, the other goes to its end. Clients step with `client_momentum`,
    and `keep` their velocities from round to round. Without ε₁ the mean update must be shorter than `near` times the
    root mean square of its clients', and without ε₂ the longest be longer than `far` times the longest of the run.
    """
    clusters = [(list(range(len(clients))), model, [np.zeros_like(part) for part in model])]
    share = [len(y) if weighting == "examples" else 1.0 for _, y in clients]
    split_rounds = []
    velocities = [[0.0, 0.0] for _ in clients]
    longest = 0.0

    def mean(members, vectors):
        total = sum(share[i] for i in members)
        return [sum(share[i] * vectors[i][place] for i in members) / total for place in range(2)]

    def moved(members, start, velocity, changes):
        velocity = [momentum * v + c for v, c in zip(velocity, mean(members, changes), strict=True)]
        return members, tuple(p + v for p, v in zip(start, velocity, strict=True)), velocity

    for number in range(rounds):
        after, born, sent = [], [], []
        count = len(clusters)
        for members, start, _ in clusters:
            changes = {}
            for i in members:
                velocity = velocities[i] if keep else None
                changes[i] = local_change(start, *clients[i], rate, steps, client_momentum, velocity)
            judged = {i: gradient(*start, *clients[i])[:2] for i in members} if of_gradients else changes
            lengths = {i: np.linalg.norm(flat(judged[i])) for i in members}
            longest = max(longest, *lengths.values())
            sent.append((changes, judged, lengths))
        for (members, start, server_velocity), (changes, judged, lengths) in zip(clusters, sent, strict=True):
            vectors = {i: flat(judged[i]) for i in members}
            parts = [members]
            typical = np.sqrt(np.mean([length**2 for length in lengths.values()]))
            bound_1 = near * typical if epsilon_1 is None else epsilon_1
            bound_2 = far * longest if epsilon_2 is None else epsilon_2
            stationary = np.linalg.norm(flat(mean(members, judged))) < bound_1
            moving = max(lengths.values()) > bound_2
            if number >= first_round and len(members) >= min_size and stationary and moving:
                across, one, other = best_bipartition(members, vectors)
                if gamma_max < np.sqrt((1 - across) / 2) and count < most_clusters:
                    parts, count = [one, other], count + 1
                    split_rounds.append(number)
            after.append(moved(parts[0], start, server_velocity, changes))
            born += [moved(part, start, server_velocity, changes) for part in parts[1:]]
        clusters = after + born
    return [(members, start) for members, start, _ in clusters], split_rounds


def assign(path_of_splits, change):
    """Algorithm 4, as numbers of the side taken at each split met.

    Args:
      path_of_splits: nested (model, updates of side 0, updates of side 1, tree of side 0, tree of side 1), or a leaf.
      change: model -> the newcomer's update, flat.
    """
    if not isinstance(path_of_splits, tuple):
        return path_of_splits
    model, first, second, left, right = path_of_splits
    own = change(model)
    nearest = [max(cosine(own, update) for update in side) for side in (first, second)]
    return assign(left if nearest[0] > nearest[1] else right, change)
