"""Robust aggregation from the papers, one cluster at a time, in float64 and with loops."""

import itertools
import math

import numpy as np


def median(vectors):
    """Yin et al. 2018, Definition 1."""
    return np.array([sorted_middle(column) for column in np.asarray(vectors, np.float64).T])


def sorted_middle(values):
    values = sorted(values)
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


def trimmed_mean(vectors, share):
    """Yin et al. 2018, Definition 2, with the share of the clients rounded up, and one value left at least."""
    count = len(vectors)
    cut = min(math.ceil(round(share * count, 9)), (count - 1) // 2)
    return np.array([np.mean(sorted(column)[cut : count - cut]) for column in np.asarray(vectors, np.float64).T])


def krum_scores(vectors, byzantine):
    """Blanchard et al. 2017, Sec. 3: the sum of squared distances to the n − f − 2 nearest others."""
    count = len(vectors)
    near = max(count - byzantine - 2, 1)
    scores = []
    for i in range(count):
        others = sorted(sum((vectors[i] - vectors[j]) ** 2) for j in range(count) if j != i)
        scores.append(sum(others[:near]))
    return scores


def krum(vectors, byzantine):
    return vectors[int(np.argmin(krum_scores(vectors, byzantine)))]


def multi_krum(vectors, byzantine, selected=None):
    """Blanchard et al. 2017, Sec. 4."""
    selected = max(len(vectors) - byzantine, 1) if selected is None else selected
    best = np.argsort(krum_scores(vectors, byzantine), kind="stable")[:selected]
    return np.mean(vectors[best], 0)


def bulyan_choice(vectors, byzantine):
    """El Mhamdi et al. 2018, Sec. 4, the first step."""
    left, chosen = list(range(len(vectors))), []
    for _ in range(max(len(vectors) - 2 * byzantine, 1)):
        best = left[int(np.argmin(krum_scores(vectors[left], byzantine)))]
        chosen.append(best)
        left.remove(best)
    return chosen


def bulyan(vectors, byzantine):
    """The second step, by trying every subset of each coordinate's values."""
    chosen = vectors[bulyan_choice(vectors, byzantine)]
    kept = max(len(chosen) - 2 * byzantine, 1)
    result = []
    for column in chosen.T:
        column = sorted(column)
        middle = min(column, key=lambda m: sum(abs(z - m) for z in column))
        subsets = itertools.combinations(column, kept)
        result.append(np.mean(min(subsets, key=lambda subset: sum(abs(x - middle) for x in subset))))
    return np.array(result)


def geometric_median(vectors, weights, iterations, smoothing):
    """Pillutla et al. 2022, Algorithm 2, from the mean of vectors that are cut to the weighted median of lengths."""
    lengths, below = [math.hypot(*v) for v in vectors], 0.0
    for place in sorted(range(len(vectors)), key=lengths.__getitem__):
        below += weights[place]
        if 2 * below >= sum(weights):
            break
    centre = norm_clipping(vectors, weights, lengths[place])
    for _ in range(iterations):
        beta = [w / max(smoothing, math.dist(centre, v)) for v, w in zip(vectors, weights, strict=True)]
        centre = sum(b * v for b, v in zip(beta, vectors, strict=True)) / sum(beta)
    return centre


def norm_clipping(vectors, weights, norm):
    clipped = [v * min(1.0, norm / max(math.hypot(*v), 1e-30)) for v in vectors]
    return sum(w * v for w, v in zip(weights, clipped, strict=True)) / sum(weights)


def of(rule, vectors, weights):
    """What a rule of the package makes of the vectors [n, d] of one cluster."""
    name, options = type(rule).__name__, {f: getattr(rule, f) for f in rule.__dataclass_fields__}
    vectors = np.asarray(vectors, np.float64)
    if name in ("geometric_median", "norm_clipping"):
        return globals()[name](vectors, np.asarray(weights, np.float64), **options)
    return globals()[name](vectors, **options)
