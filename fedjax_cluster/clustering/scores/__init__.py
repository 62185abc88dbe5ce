"""Scores of a clustering; all are scalars and run under jit."""

from fedjax_cluster.clustering.scores.agreement import adjusted_rand_index, purity, rand_index
from fedjax_cluster.clustering.scores.separation import (
    davies_bouldin,
    silhouette,
    wasserstein_adjusted_davies_bouldin,
    wasserstein_adjusted_silhouette,
)

__all__ = [
    "adjusted_rand_index",
    "davies_bouldin",
    "purity",
    "rand_index",
    "silhouette",
    "wasserstein_adjusted_davies_bouldin",
    "wasserstein_adjusted_silhouette",
]
