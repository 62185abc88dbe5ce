"""Where JAX is set to 64 bits, the clustering functions compute in the precision of what they are given."""

import jax
import numpy as np
import pytest
import scipy.cluster.hierarchy
import scipy.spatial.distance
import scipy.stats

import fedjax_cluster.clustering as fcc
from fedjax_cluster import clustering
from tests.reference import bipartition, flexcfl, interactions, landmarks, scores, similarity, spectral, subspaces

KEY = jax.random.key(0)
CLIENTS = 12
RNG = np.random.default_rng(0)
POINTS = RNG.normal(size=(CLIENTS, 3))
LABELS = np.arange(CLIENTS) % 3
SOME = np.asarray([1, 4, 5, 8, 9])
DISTANCE = np.linalg.norm(POINTS[:, None] - POINTS[None], axis=2)
AFFINITY = np.exp(-DISTANCE)
VECTORS = np.linalg.qr(RNG.normal(size=(CLIENTS, 1, 8, 3)))[0]
COUNTS = RNG.integers(2, 50, size=(CLIENTS, 1))
ANGLES = np.where(np.eye(CLIENTS, dtype=bool), 0.0, 30 * DISTANCE)[:, :, None]
FREQUENCIES = scores.ranked_frequencies(np.abs(POINTS))


def pairwise(function):
    return np.asarray([[function(i, j) for j in range(CLIENTS)] for i in range(CLIENTS)])


def between_subspaces(reduction):
    def angle(i, j):
        counts = (int(COUNTS[i, 0]), int(COUNTS[j, 0]))
        return 0.0 if i == j else subspaces.classwise_angle(VECTORS[i, 0], VECTORS[j, 0], *counts, reduction)

    return pairwise(angle)[:, :, None]


def squares(embedding):
    """What does not depend on the signs of the vectors."""
    features, singular_values = (np.asarray(part) for part in embedding)
    return features @ features.T, singular_values


def spans(vectors):
    vectors = np.asarray(vectors)
    return vectors @ np.swapaxes(vectors, -1, -2)


def heights(linkage):
    condensed = scipy.spatial.distance.squareform(DISTANCE, checks=False)
    return scipy.cluster.hierarchy.linkage(condensed, linkage)[:, 2]


# Each call of what it is given in one precision, and the same from the slow versions in float64.
EXACT = {
    "block_gram": (lambda f: fcc.block_gram(f(POINTS)), lambda: POINTS @ POINTS.T),
    "cosine_similarity": (lambda f: fcc.cosine_similarity(f(POINTS)), lambda: similarity.cosine_similarity(POINTS)),
    "pairwise_distances": (
        lambda f: fcc.pairwise_distances(f(POINTS), f(POINTS[:4]), "manhattan"),
        lambda: scipy.spatial.distance.cdist(POINTS, POINTS[:4], "cityblock"),
    ),
    "similarity_differences": (
        lambda f: fcc.similarity_differences(fcc.cosine_similarity(f(POINTS))),
        lambda: flexcfl.differences(POINTS),
    ),
    "decomposed_cosines": (
        lambda f: spans(fcc.decomposed_cosines(f(POINTS @ POINTS.T), 2)),
        lambda: spans(flexcfl.directions(POINTS, 2)),
    ),
    "robust_deviations": (
        lambda f: fcc.robust_deviations(f(POINTS[:, 0])),
        lambda: (
            (POINTS[:, 0] - np.median(POINTS[:, 0])) / scipy.stats.median_abs_deviation(POINTS[:, 0], scale="normal")
        ),
    ),
    "classwise_angles": (lambda f: fcc.classwise_angles(f(VECTORS), COUNTS), lambda: between_subspaces("smallest")),
    "sums_of_angles": (lambda f: fcc.classwise_angles(f(VECTORS), COUNTS, "sum"), lambda: between_subspaces("sum")),
    "data_dissimilarity": (
        lambda f: fcc.data_dissimilarity(f(ANGLES), COUNTS, 0.3),
        lambda: subspaces.data_dissimilarity(ANGLES, COUNTS, 0.3),
    ),
    "gradient_angles": (
        lambda f: fcc.gradient_angles(f(POINTS)),
        lambda: pairwise(lambda i, j: 0.0 if i == j else subspaces.gradient_angle(POINTS[i], POINTS[j])),
    ),
    "proximity": (
        lambda f: fcc.proximity(f(DISTANCE), f(DISTANCE**2), 0.3),
        lambda: subspaces.proximity(DISTANCE, DISTANCE**2, 0.3),
    ),
    "gaussian_rewards": (lambda f: fcc.gaussian_rewards(f(POINTS)), lambda: interactions.gaussian_rewards(POINTS)),
    "update_interactions": (
        lambda f: fcc.update_interactions(f(DISTANCE), np.ones(2), np.arange(2), None, 0.1),
        lambda: interactions.update_interactions(DISTANCE, np.ones(2), np.arange(2), 0.1),
    ),
    "interaction_affinity": (
        lambda f: fcc.interaction_affinity(f(DISTANCE), 0.7),
        lambda: interactions.interaction_affinity(DISTANCE, 0.7),
    ),
    "landmark_affinity": (
        lambda f: fcc.landmark_affinity(f(DISTANCE[:, SOME]), SOME, 0.7),
        lambda: landmarks.affinity(DISTANCE[:, SOME], SOME, 0.7),
    ),
    "landmark_directions": (
        lambda f: fcc.landmark_directions(f(POINTS[SOME]), fcc.profile_embedding(f(POINTS[SOME]), 2)) ** 2,
        lambda: np.linalg.svd(POINTS[SOME], full_matrices=False)[2][:2].T ** 2,
    ),
    "landmark_proximity": (
        lambda f: fcc.landmark_proximity(f(VECTORS), COUNTS, f(POINTS), SOME, delta=0.3, beta=0.4),
        lambda: landmarks.proximity(
            [(VECTORS[i], COUNTS[i], [POINTS[i]]) for i in range(CLIENTS)], SOME, delta=0.3, beta=0.4
        ),
    ),
    "optimal_bipartition": (
        lambda f: fcc.optimal_bipartition(f(-DISTANCE)).max_cross,
        lambda: bipartition.best_max_cross(-DISTANCE),
    ),
    "separation_gap": (
        lambda f: fcc.separation_gap(f(-DISTANCE), LABELS),
        lambda: bipartition.separation_gap(-DISTANCE, LABELS),
    ),
    "cross_similarity_bound": (
        lambda f: fcc.cross_similarity_bound(f(np.asarray(0.9)), 3),
        lambda: bipartition.cross_similarity_bound(0.9, 3),
    ),
    "largest_safe_noise": (lambda f: fcc.largest_safe_noise(f(np.asarray(0.3))), lambda: np.sqrt(0.35)),
    "dendrogram": (lambda f: fcc.dendrogram(f(DISTANCE)).heights, lambda: heights("average")),
    "kmeans": (
        lambda f: fcc.kmeans(KEY, f(POINTS), 3).centers,
        # Where it ends every centre is the mean of its points.
        lambda: [POINTS[np.asarray(fcc.kmeans(KEY, POINTS, 3).labels) == k].mean(0) for k in range(3)],
    ),
    "profile_embedding": (
        lambda f: squares(fcc.profile_embedding(f(POINTS), 2)),
        lambda: squares(spectral.profile_embedding(POINTS, 2)),
    ),
    "subspace_embedding": (
        lambda f: squares(fcc.subspace_embedding(KEY, f(POINTS), 2)),
        lambda: squares(spectral.profile_embedding(POINTS, 2)),
    ),
    "principal_vectors": (
        lambda f: spans(fcc.principal_vectors(f(POINTS), LABELS, CLIENTS, 3, 2)),
        lambda: [spans(subspaces.principal_vectors(POINTS, LABELS, label, 2)) for label in range(3)],
    ),
    "joint_basis": (
        lambda f: spans(fcc.joint_basis(f(VECTORS[:2, 0]))),
        lambda: spans(np.linalg.svd(np.concatenate(VECTORS[:2, 0], 1), full_matrices=False)[0]),
    ),
    "silhouette": (lambda f: fcc.scores.silhouette(f(POINTS), LABELS), lambda: scores.silhouette(POINTS, LABELS)),
    "davies_bouldin": (
        lambda f: fcc.scores.davies_bouldin(f(POINTS), LABELS),
        lambda: scores.davies_bouldin(POINTS, LABELS),
    ),
    "wasserstein_adjusted_silhouette": (
        lambda f: fcc.scores.wasserstein_adjusted_silhouette(f(np.abs(POINTS)), LABELS),
        lambda: scores.silhouette(FREQUENCIES, LABELS),
    ),
    "wasserstein_adjusted_davies_bouldin": (
        lambda f: fcc.scores.wasserstein_adjusted_davies_bouldin(f(np.abs(POINTS)), LABELS),
        lambda: scores.davies_bouldin(FREQUENCIES, LABELS),
    ),
}
LABELLING = {
    "draw_landmarks": lambda f: fcc.draw_landmarks(KEY, 4, np.ones(CLIENTS, bool)),
    "extend_labels": lambda f: fcc.extend_labels(f(DISTANCE[:, SOME]), SOME, LABELS[SOME], 3),
    "agglomerative": lambda f: fcc.agglomerative(f(DISTANCE), 1.0),
    "elbow": lambda f: fcc.elbow(np.arange(5), f(np.arange(5.0)[::-1] ** 2)),
    "estimate_num_clusters": lambda f: np.int32(fcc.estimate_num_clusters(KEY, f(POINTS), 4)),
    "largest_gaps": lambda f: fcc.largest_gaps(f(np.arange(5.0)[::-1] ** 2), 2),
    "match_labels": lambda f: fcc.match_labels(LABELS, LABELS[::-1], 3),
    "qr_partition": lambda f: fcc.qr_partition(f(AFFINITY), 3).labels,
    "spectral_clustering": lambda f: fcc.spectral_clustering(KEY, f(AFFINITY), 3),
    "spectral_partitions": lambda f: fcc.spectral_partitions(KEY, f(AFFINITY), 3),
}
# Of labels alone; exact to float32.
OF_LABELS = {"adjusted_rand_index", "rand_index", "purity"}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_results_have_the_precision_of_what_is_given(name):
    given, expected = EXACT[name]
    with jax.enable_x64(True):
        narrow = given(lambda values: values.astype(np.float32))
        wide = given(lambda values: values)
        exact = expected()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(narrow)} == {"float32"}
    for ours, theirs in zip(jax.tree.leaves(wide), jax.tree.leaves(exact), strict=isinstance(exact, tuple)):
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, exact if not isinstance(exact, tuple) else theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "estimate_num_clusters" else n for n in LABELLING]
)
def test_labels_and_indices_are_the_same_32_bits_in_either_precision(name):
    with jax.enable_x64(True):
        narrow, wide = (LABELLING[name](lambda values, dtype=dtype: values.astype(dtype)) for dtype in ("f4", "f8"))
    assert (narrow.dtype, wide.dtype) == (np.int32, np.int32)
    np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("name", sorted(OF_LABELS))
def test_scores_of_labels_alone_stay_float32(name):
    with jax.enable_x64(True):
        assert getattr(fcc.scores, name)(LABELS, LABELS[::-1]).dtype == np.float32


def test_every_function_is_tried():
    tried = {*EXACT, *LABELLING, *OF_LABELS, "embed_gram", "cut_dendrogram"}  # the last two within others
    named = {name for name in (*clustering.__all__, *clustering.scores.__all__) if name[0].islower()} - {"scores"}
    assert named <= tried
