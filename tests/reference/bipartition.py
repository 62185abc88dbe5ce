"""The best split by trying all of them, and the bounds of CFL's Theorem 1 from the angles in its proof."""

import itertools
import math

import numpy as np


def largest_across(similarity: np.ndarray, labels: np.ndarray) -> float:
    return similarity[np.ix_(labels == 0, labels == 1)].max()


def best_max_cross(similarity: np.ndarray) -> float:
    """Eq. 25 over all splits into two non-empty parts."""
    number = len(similarity)
    splits = (np.array((0, *rest)) for rest in itertools.product((0, 1), repeat=number - 1) if any(rest))
    return min(largest_across(similarity, labels) for labels in splits)


def separation_gap(similarity: np.ndarray, group: np.ndarray) -> float:
    """Definition 2, Eq. 29."""
    together = [similarity[i, j] for i, j in itertools.combinations(range(len(group)), 2) if group[i] == group[j]]
    return min([*together, 1.0]) - best_max_cross(similarity)


def noise_alignment(noise: np.ndarray) -> np.ndarray:
    """Eqs. 60–64: the cosines of the sums of the two angles by which noise can turn a gradient."""
    return np.cos(np.add.outer(np.arcsin(noise), np.arcsin(noise)))


def cross_similarity_bound(alignment: float, k: int) -> float:
    """Eqs. 69–79 with Lemma 4: the angle π/(k−1) between two distributions, less what noise turns."""
    return math.cos(max(0.0, math.pi / (k - 1) - math.acos(min(max(alignment, -1.0), 1.0))))
