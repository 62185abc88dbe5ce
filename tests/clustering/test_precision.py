"""Where a notebook has switched JAX to 64 bits, the clustering functions still run, in float32 and int32."""

import jax
import numpy as np
import pytest

import fedjax_cluster.clustering as fcc

KEY = jax.random.key(0)
POINTS = np.random.default_rng(0).normal(size=(12, 3))
LABELS = np.arange(12) % 3
DISTANCE = np.linalg.norm(POINTS[:, None] - POINTS[None], axis=2)
SUBSPACES = np.eye(3)[LABELS].reshape(12, 1, 3, 1)
COUNTS = np.full((12, 1), 4)
CALLS = {
    "agglomerative": lambda: fcc.agglomerative(DISTANCE, 1.0),
    "classwise_angles": lambda: fcc.classwise_angles(SUBSPACES, COUNTS),
    "data_dissimilarity": lambda: fcc.data_dissimilarity(DISTANCE[:, :, None], COUNTS),
    "interaction_affinity": lambda: fcc.interaction_affinity(DISTANCE, 1.0),
    "largest_gaps": lambda: fcc.largest_gaps(np.arange(5)[::-1], 2),
    "match_labels": lambda: fcc.match_labels(LABELS, LABELS[::-1], 3),
    "optimal_bipartition": lambda: fcc.optimal_bipartition(-DISTANCE),
    "principal_vectors": lambda: fcc.principal_vectors(POINTS, LABELS, 12, 3, 2, share=0.5),
    "profile_embedding": lambda: fcc.profile_embedding(POINTS, 2),
    "spectral_clustering": lambda: fcc.spectral_clustering(KEY, np.exp(-DISTANCE), 3),
    "subspace_embedding": lambda: fcc.subspace_embedding(KEY, POINTS, 2),
    "update_interactions": lambda: fcc.update_interactions(DISTANCE, np.ones(2), np.arange(2), None, 0.1),
    "adjusted_rand_index": lambda: fcc.scores.adjusted_rand_index(LABELS, LABELS[::-1]),
    "purity": lambda: fcc.scores.purity(LABELS, LABELS[::-1]),
    "silhouette": lambda: fcc.scores.silhouette(POINTS, LABELS),
    "wasserstein_adjusted_davies_bouldin": lambda: fcc.scores.wasserstein_adjusted_davies_bouldin(
        np.abs(POINTS), LABELS
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_keep_their_dtypes(name):
    with jax.enable_x64(True):
        result = CALLS[name]()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(result)} <= {"float32", "int32", "bool"}
