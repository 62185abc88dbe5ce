"""FedGWC's Algorithms 1 and 2 in plain NumPy: one client, one pair, one cluster after the other."""

import numpy as np
from sklearn.cluster import KMeans, SpectralClustering
from sklearn.manifold import SpectralEmbedding

from tests.reference import federated, interactions, scores, spectral
from tests.reference import landmarks as landmarks_


def centred(matrix, known):
    """Each row less its mean over the others whom the client met; 0 where it met nobody, and on the diagonal."""
    left = np.zeros_like(matrix)
    for i in range(len(matrix)):
        met = [j for j in range(len(matrix)) if known[i, j] and i != j]
        left[i, met] = matrix[i, met] - np.mean(matrix[i, met]) if met else 0.0
    return left


def best_partition(affinity, n_max, smallest):
    """Algorithm 1: (labels or None, the least index) of one cluster's W."""
    best, chosen = np.inf, None
    for n in range(2, n_max + 1):
        labels = KMeans(n, n_init=20, random_state=0).fit(spectral.normalised_rows(affinity, n)).labels_
        index = scores.davies_bouldin(affinity, labels)
        if index < best and min(np.bincount(labels, minlength=n)) >= smallest:
            best, chosen = index, labels
    return (chosen, best) if best < 1 else (None, best)


def released_rewards(losses, examples):
    """The public code's: moments weighted by examples, divided by their sum."""
    losses, share = np.asarray(losses), np.asarray(examples) / np.sum(examples)
    mean = share @ losses
    reward = np.exp(-0.5 * (losses - mean) ** 2 / (share @ (losses - mean) ** 2)).mean(1)
    return reward / reward.sum()


def released_affinity(matrix, beta):
    """The public code's: scaled to [0, 1], with a zero diagonal."""
    affinity = interactions.interaction_affinity((matrix - matrix.min()) / (matrix.max() - matrix.min()), beta)
    np.fill_diagonal(affinity, 0.0)
    return affinity


def released_partition(affinity, n_max):
    """The public code's, of scikit-learn's parts: the index is that of the embedding."""
    best, chosen = np.inf, None
    for n in range(2, n_max + 1):
        own = {"n_components": n, "affinity": "precomputed", "random_state": 0}
        labels = SpectralClustering(n, assign_labels="cluster_qr", **own).fit(affinity).labels_
        index = scores.davies_bouldin(SpectralEmbedding(**own).fit_transform(affinity), labels)
        if index < best and len(set(labels)) == n:
            best, chosen = index, labels
    return (chosen, best) if best < 1 else (None, best)


def fedgwc(
    model, cohorts, sizes, *, rate, alpha, participation, tolerance, beta, smallest, slots, patience=None, n_max=None,
    weighting="examples", centre=False, columns=False, released=False, landmarks=None, data=None,
):  # fmt: skip
    """Algorithm 2 on given cohorts [{client: its mini-batches}]; `alpha` is a number or "count".

    With `landmarks`, P's columns of these alone are looked at, and whoever takes part for the first time, once there
    are several clusters, joins that of least loss on its rows, `data` [(x, y)]; it is still drawn with the old one. In
    the round after a split it does so after the models were trained.

    Returns:
      (models of the clusters, labels, P, running averages, [(round, labels after the split, W, its index)]).
    """
    count = len(sizes)
    members = [list(range(count))]
    drawn_with, heard = [list(range(count))], set()
    models, average, calm = [model], [1.0], [0]
    matrix, met = np.full((count, count), 1 / count**2 if released else 0.0), np.zeros((count, count), int)
    splits = []

    def cohort_size(k):
        drawn, smallest_cohort = (count, 1) if released else (len(drawn_with[k]), 3)
        return min(max(int(np.ceil(participation * drawn - 1e-9)), smallest_cohort), len(drawn_with[k]))

    for number, cohort in enumerate(cohorts):
        choosing = set(cohort) - heard if landmarks is not None and len(members) > 1 else set()
        after_split = bool(splits) and splits[-1][0] == number - 1
        if not after_split:
            members = of_least_loss(members, models, choosing, data)
        heard |= set(cohort)
        for k in range(len(members)):
            assert sum(client in drawn_with[k] for client in cohort) == cohort_size(k)
            present = [client for client in cohort if client in members[k]]
            if not present:
                continue
            changes, losses = zip(*(federated.change_on(models[k], cohort[i], rate) for i in present), strict=True)
            common = min(map(len, losses))
            losses = [own[:common] for own in losses]
            examples = [sizes[i] for i in present]
            reward = released_rewards(losses, examples) if released else interactions.gaussian_rewards(losses)
            shares = np.ones(len(present)) if weighting == "uniform" else examples
            models[k] = tuple(
                part + np.average([change[place] for change in changes], 0, shares)
                for place, part in enumerate(models[k])
            )
            constant = cohort_size(k) / len(drawn_with[k]) if released else participation if alpha == "count" else alpha
            squared = 0.0
            for a, i in enumerate(present):
                for j in present:
                    met[i, j] += 1
                    own = 1 / met[i, j] if alpha == "count" else constant
                    new = (1 - own) * matrix[i, j] + own * reward[a]
                    squared += (new - matrix[i, j]) ** 2 if landmarks is None or j in landmarks else 0.0
                    matrix[i, j] = new
            pairs = (cohort_size(k) if released else len(members[k])) ** 2
            if landmarks is not None:
                pairs = len(drawn_with[k]) * max(len(set(members[k]) & set(landmarks)), 1)
            average[k] = (1 - constant) * average[k] + constant * squared / pairs
            calm[k] = calm[k] + 1 if average[k] < tolerance else 0
        if after_split:
            members = of_least_loss(members, models, choosing, data)
        most = [
            min(n_max, len(own)) if n_max else min(len(own) // cohort_size(k), 4) for k, own in enumerate(drawn_with)
        ]
        needed = [patience or -(-len(own) // cohort_size(k)) for k, own in enumerate(drawn_with)]
        due = [k for k in range(len(members)) if calm[k] >= needed[k] and most[k] > 1]
        if due:
            k = due[0]
            own = np.asarray(members[k])
            block = np.ix_(own, own)
            perceived = (
                centred(matrix[block], (met if alpha == "count" else matrix)[block] > 0) if centre else matrix[block]
            )
            perceived = perceived.T if columns else perceived
            if landmarks is not None:
                affinity, found, index = by_landmarks(
                    matrix, met if alpha == "count" else matrix, own, landmarks, beta, most[k], smallest, centre
                )
            elif released:
                affinity = released_affinity(perceived, beta)
                found, index = released_partition(affinity, most[k])
            else:
                affinity = interactions.interaction_affinity(perceived, beta)
                found, index = best_partition(affinity, most[k], smallest)
            average[k], calm[k] = 1.0, 0
            if found is not None and len(members) + found.max() <= slots:
                met[block] = np.minimum(met[block], 1)
                parts = sorted((own[found == label].tolist() for label in range(found.max() + 1)), key=len)
                members[k] = parts.pop()
                for part in parts:
                    members.append(part)
                    models.append(models[k])
                    average.append(1.0)
                    calm.append(0)
                drawn_with = [list(own) for own in members]
                whole = np.zeros((count, count))
                whole[block if landmarks is None else np.ix_(own, np.intersect1d(own, landmarks))] = affinity
                splits.append((number, as_labels(members, count), whole, index))
    return models, as_labels(members, count), matrix, average, splits


def of_least_loss(members, models, choosing, data):
    """The clusters' members when those who choose are in the one whose model has the least loss on their rows."""
    for i in choosing:
        least = int(np.argmin([federated.gradient(*model, *data[i])[2] for model in models]))
        members = [sorted({*own, i} if k == least else {*own} - {i}) for k, own in enumerate(members)]
    return members


def by_landmarks(matrix, known, own, chosen, beta, n_max, smallest, centre):
    """W of a cluster's clients with its landmarks, its clusters and their index: the landmarks', which others join."""
    chosen = np.intersect1d(own, chosen)
    places = np.searchsorted(own, chosen)
    rows = matrix[np.ix_(own, chosen)].copy()
    met_landmarks = [[b for b, j in enumerate(chosen) if known[i, j] > 0] for i in own]
    if centre:
        for a, i in enumerate(own):
            met = [b for b, j in enumerate(chosen) if known[i, j] > 0 and i != j]
            mean = np.mean(rows[a, met]) if met else 0.0
            rows[a] = [rows[a, b] - mean if b in met else 0.0 for b in range(len(chosen))]
    else:
        for a, met in enumerate(met_landmarks):
            if met and a not in places:
                rows[a] = [rows[a, b] if b in met else np.mean(rows[a, met]) for b in range(len(chosen))]
    affinity = landmarks_.affinity(rows, places, beta)
    found, index = best_partition(affinity[places], n_max, smallest)
    if found is not None:
        found = np.asarray(landmarks_.extend_labels(1 - affinity, places, found.tolist(), "average"))
        unheard = [a for a, met in enumerate(met_landmarks) if not met and a not in places]
        found[unheard] = np.bincount(np.delete(found, unheard)).argmax()
    return affinity, found, index


def as_labels(members, count):
    labels = np.zeros(count, int)
    for label, part in enumerate(members):
        labels[part] = label
    return labels
