"""Cosines pair by pair."""

import numpy as np


def cosine_similarity(updates: np.ndarray) -> np.ndarray:
    updates = np.asarray(updates, np.float64)
    num_clients = len(updates)
    cosine = np.zeros((num_clients, num_clients))
    for i in range(num_clients):
        for j in range(num_clients):
            norms = np.sqrt(sum(updates[i] ** 2)) * np.sqrt(sum(updates[j] ** 2))
            if norms > 0:
                cosine[i, j] = sum(updates[i] * updates[j]) / norms
    return cosine
