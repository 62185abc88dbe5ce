"""Clustering of clients: arrays in, arrays out.

Every function takes NumPy or JAX arrays of any precision and computes in float32, or in float64 what is float64 where
JAX is set to 64 bits (random draws are those of float32); labels and indices come back as int32. Letters in shapes:
M clients, C clients of a cohort, L classes, N examples of a client.
"""

from fedjax_cluster.clustering import scores
from fedjax_cluster.clustering.bipartition import (
    Bipartition,
    cross_similarity_bound,
    largest_safe_noise,
    optimal_bipartition,
    separation_gap,
)
from fedjax_cluster.clustering.dissimilarity import classwise_angles, data_dissimilarity, gradient_angles, proximity
from fedjax_cluster.clustering.distances import pairwise_distances, similarity_differences
from fedjax_cluster.clustering.interactions import gaussian_rewards, interaction_affinity, update_interactions
from fedjax_cluster.clustering.kmeans import KMeans, kmeans
from fedjax_cluster.clustering.landmarks import (
    draw_landmarks,
    extend_labels,
    landmark_affinity,
    landmark_directions,
    landmark_proximity,
)
from fedjax_cluster.clustering.linkage import Dendrogram, agglomerative, cut_dendrogram, dendrogram
from fedjax_cluster.clustering.matching import match_labels
from fedjax_cluster.clustering.model_selection import elbow, estimate_num_clusters, largest_gaps
from fedjax_cluster.clustering.outliers import robust_deviations
from fedjax_cluster.clustering.similarity import block_gram, cosine_similarity
from fedjax_cluster.clustering.spectral import (
    Embedding,
    decomposed_cosines,
    embed_gram,
    profile_embedding,
    qr_partition,
    spectral_clustering,
    spectral_partitions,
    subspace_embedding,
)
from fedjax_cluster.clustering.subspaces import joint_basis, principal_vectors

__all__ = [
    "Bipartition",
    "Dendrogram",
    "Embedding",
    "KMeans",
    "agglomerative",
    "block_gram",
    "classwise_angles",
    "cosine_similarity",
    "cross_similarity_bound",
    "cut_dendrogram",
    "data_dissimilarity",
    "decomposed_cosines",
    "dendrogram",
    "draw_landmarks",
    "elbow",
    "embed_gram",
    "estimate_num_clusters",
    "extend_labels",
    "gaussian_rewards",
    "gradient_angles",
    "interaction_affinity",
    "joint_basis",
    "kmeans",
    "landmark_affinity",
    "landmark_directions",
    "landmark_proximity",
    "largest_gaps",
    "largest_safe_noise",
    "match_labels",
    "optimal_bipartition",
    "pairwise_distances",
    "principal_vectors",
    "profile_embedding",
    "proximity",
    "qr_partition",
    "robust_deviations",
    "scores",
    "separation_gap",
    "similarity_differences",
    "spectral_clustering",
    "spectral_partitions",
    "subspace_embedding",
    "update_interactions",
]
