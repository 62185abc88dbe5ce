"""The best renaming by trying every permutation, as CFL-GP's Algorithm 3, line 3, states it."""

import itertools

import numpy as np


def best_overlap(new: np.ndarray, old: np.ndarray, k: int) -> int:
    """The largest number of clients that keep their cluster."""
    return max(overlap(np.append(names, -1)[new], old) for names in itertools.permutations(range(k)))


def most_kept_names(new: np.ndarray, old: np.ndarray, k: int) -> int:
    """The largest number of names ψ(i) = i among the renamings of largest overlap."""
    best = best_overlap(new, old, k)
    return max(
        sum(name == i for i, name in enumerate(names))
        for names in itertools.permutations(range(k))
        if overlap(np.append(names, -1)[new], old) == best
    )


def overlap(renamed: np.ndarray, old: np.ndarray) -> int:
    return int(((renamed == old) & (renamed >= 0) & (old >= 0)).sum())
