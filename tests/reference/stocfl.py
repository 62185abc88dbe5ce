"""StoCFL in plain NumPy: softmax regression, full batches, clusters as sets of clients (Zeng et al. 2023)."""

import numpy as np

from tests.reference.federated import gradient, local_change


def pulled(model, common, x, y, rate, steps, proximal):
    """A cluster's model after descending f(θ) + λ/2·‖θ − ω‖²."""
    for _ in range(steps):
        *slope, _ = gradient(*model, x, y)
        model = tuple(
            part - rate * (to + proximal * (part - middle))
            for part, to, middle in zip(model, slope, common, strict=True)
        )
    return model


def cosine(one, other):
    return one @ other / (np.linalg.norm(one) * np.linalg.norm(other))


def united(parts, tau, slots):
    """The clusters {members, shown, model, slot} linked by cosines of τ; further links until they fit the slots."""
    pairs = [
        (cosine(one["shown"], other["shown"]), place, place + 1 + further)
        for place, one in enumerate(parts)
        for further, other in enumerate(parts[place + 1 :])
    ]
    group = list(range(len(parts)))
    for value, one, other in sorted(pairs, reverse=True):
        if value >= tau or len(set(group)) > slots:
            group = [group[one] if name == group[other] else name for name in group]
    found = []
    for name in dict.fromkeys(group):
        own = [part for part, of in zip(parts, group, strict=True) if of == name]
        former = [part for part in own if part["model"] is not None]
        former.sort(key=lambda part: part["slot"])
        largest = max(former, key=lambda part: len(part["members"])) if former else {"model": None}
        found.append(
            {
                "members": sorted(member for part in own for member in part["members"]),
                "shown": sum(part["shown"] for part in own),
                "model": largest["model"],
                "slot": former[0]["slot"] if former else None,
            }
        )
    free = [slot for slot in range(slots) if slot not in [cluster["slot"] for cluster in found]]
    for cluster in sorted(found, key=lambda cluster: cluster["members"][0]):
        if cluster["slot"] is None:
            cluster["slot"] = free.pop(0)
    return found


def stocfl(model, clients, cohorts, *, rate, steps, proximal, tau, slots, anchor_steps, weight):
    """The clusters after the rounds of these cohorts, the common model, and how many downloads that were of the common
    model were not needed once more; weight {client: weight} of the means.
    """
    anchor = common = model
    clusters, spared = [], len(cohorts[0])  # at first the anchor is the common model
    for chosen in cohorts:
        known = {member for cluster in clusters for member in cluster["members"]}
        arrived = []
        for number in chosen:
            if number not in known:
                change = local_change(anchor, *clients[number], rate, anchor_steps)
                shown = -np.concatenate([part.ravel() for part in change])
                arrived.append({"members": [number], "shown": shown, "model": None, "slot": None})
        clusters = united(clusters + arrived, tau, slots)
        for cluster in clusters:
            start = common if cluster["model"] is None else cluster["model"]
            own = [number for number in chosen if number in cluster["members"]]
            spared += len(own) if cluster["model"] is None else 0
            trained = [pulled(start, common, *clients[number], rate, steps, proximal) for number in own]
            cluster["model"] = mean(trained, [weight[number] for number in own]) if own else start
        trained = [pulled(common, common, *clients[number], rate, steps, 0.0) for number in chosen]
        common = mean(trained, [weight[number] for number in chosen])
    return clusters, common, spared


def mean(models, weights):
    return tuple(np.average(parts, 0, weights) for parts in zip(*models, strict=True))
