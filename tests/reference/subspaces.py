"""FLAG's steps 1–4, class by class and pair by pair, in float64."""

import itertools
import math

import numpy as np
import scipy.linalg


def principal_vectors(x, y, label: int, rank: int) -> np.ndarray:
    """The top left singular vectors of the (features × examples) matrix of one class."""
    left, singular_values, _ = np.linalg.svd(np.asarray(x, np.float64)[y == label].T, full_matrices=False)
    return left[:, : min(rank, int((singular_values > 1e-5 * singular_values[0]).sum()))]


def classwise_angle(first, second, first_count: int, second_count: int, reduction: str) -> float:
    """Eq. 3; SciPy's principal angles use a sine where the cosine is inaccurate."""
    if first_count == 0 and second_count == 0:
        return 0.0
    if first_count == 0 or second_count == 0:
        return 180.0
    angles = np.degrees(scipy.linalg.subspace_angles(first, second))
    return angles.min() if reduction == "smallest" else angles.sum()


def data_dissimilarity(angles: np.ndarray, counts: np.ndarray, delta: float) -> np.ndarray:
    """Eqs. 4–6 with the settled rules: counts at least 2, pairs that share the class set the scale."""
    num_clients, num_classes = counts.shape
    weights = {}
    for i, j in itertools.permutations(range(num_clients), 2):
        for c in range(num_classes):
            if counts[i, c] and counts[j, c]:
                logs = [math.log(max(counts[k, c], 2)) for k in (i, j)]
                weights[i, j, c] = max(logs) / min(logs)
    least, most = min(weights.values(), default=1.0), max(weights.values(), default=1.0)
    dissimilarity = np.zeros((num_clients, num_clients))
    for i, j, c in np.ndindex(num_clients, num_clients, num_classes):
        weight = 1.0
        if (i, j, c) in weights and most > least:
            share = (weights[i, j, c] - least) / (most - least)
            weight = (1 - delta) + share * ((1 + delta) - (1 - delta))
        dissimilarity[i, j] += angles[i, j, c] * weight / num_classes
    return dissimilarity


def gradient_angle(first: np.ndarray, second: np.ndarray) -> float:
    """The angle by its tangent, which is accurate everywhere."""
    a, b = first / np.linalg.norm(first), second / np.linalg.norm(second)
    return math.degrees(2 * math.atan2(np.linalg.norm(a - b), np.linalg.norm(a + b)))


def proximity(data: np.ndarray, gradient: np.ndarray, beta: float) -> np.ndarray:
    off_diagonal = ~np.eye(len(data), dtype=bool)

    def scaled(matrix):
        values = matrix[off_diagonal]
        extent = values.max() - values.min()
        return np.where(off_diagonal, (matrix - values.min()) / extent if extent else 0.0, 0.0)

    return beta * scaled(data) + (1 - beta) * scaled(gradient)
