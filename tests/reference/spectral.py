"""Spectral embeddings by full decompositions in float64."""

import numpy as np
import scipy.linalg


def profile_embedding(profile: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 3, line 1, and Eq. 12 of CFL-GP: U maximises Σ‖Uᵀ g_c‖²; the features are Uᵀ g_c."""
    columns = np.asarray(profile, np.float64).T  # G is [D, M], one client per column
    left, singular_values, _ = np.linalg.svd(columns, full_matrices=False)
    return (left[:, :rank].T @ columns).T, singular_values[:rank]


def normalised_rows(affinity: np.ndarray, k: int) -> np.ndarray:
    """Steps 1–4 of Ng, Jordan and Weiss (2001): the rows that k-means clusters."""
    weights = np.array(affinity, np.float64)
    np.fill_diagonal(weights, 0.0)
    root = np.diag(1.0 / np.sqrt(weights.sum(axis=1)))
    laplacian = root @ weights @ root
    size = len(weights)
    _, vectors = scipy.linalg.eigh(laplacian, subset_by_index=[size - k, size - 1])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
