"""What each picture of a run shows: where it stands on the page, its title, and one sentence."""

from __future__ import annotations

import re
from typing import NamedTuple

SECTIONS = ROUNDS, MOVES, CLIENTS, METHOD = "rounds", "moves", "clients", "method"  # anchors on the page


class Caption(NamedTuple):
    """Where a picture stands, its title, and what it shows."""

    section: str
    title: str
    sentence: str


CAPTIONS = {
    "learning_curves": Caption(
        ROUNDS,
        "Quality.",
        "Mean over the clients on their test rows after each evaluation, and, where true groups are known, how well "
        "the clusters agree with them: adjusted Rand index 1 is full agreement, 0 is chance.",
    ),
    "training_curves": Caption(
        ROUNDS,
        "Training.",
        "Training loss of those who took part and, where it changed, the number of clusters with a client.",
    ),
    "cluster_timeline": Caption(
        MOVES,
        "Clusters of the clients.",
        "A row is a client, its colour the cluster it was in after a round; the bars above count who moved.",
    ),
    "client_labels": Caption(
        CLIENTS,
        "Labels of the clients.",
        "Above how many training examples a client has, below which share of them has each label; white is none.",
    ),
    "group_by_cluster": Caption(
        CLIENTS,
        "Groups against clusters.",
        "How many clients of each true group the final clusters hold; a single number in each row and column is full "
        "agreement.",
    ),
    "client_features": Caption(
        METHOD,
        "Clients as the server sees them.",
        "Each client whose profile the server keeps, at the features that k-means divides: colour is the true group, "
        "marker the cluster.",
    ),
    "singular_values": Caption(
        METHOD,
        "Singular values of the gradient profiles.",
        "K-means divides the clients at the first K directions. A wide gap after them says that K directions tell the "
        "clients apart; it need not be the widest, as the first directions can be shared by groups.",
    ),
    "split_history": Caption(
        METHOD,
        "Splits.",
        "Quality over the rounds with each split marked; beneath it the separation gap of each cluster, where it was "
        "watched.",
    ),
    "parameter_tree": Caption(
        METHOD, "Parameter tree.", "How clusters were divided: each leaf is a final cluster with the clients in it."
    ),
    "similarity_matrix": Caption(
        METHOD,
        "Similarity of the clients' updates.",
        "Cosine of each pair of clients at the last split, or where there was none as one was last considered, ordered "
        "by cluster: 1 is the same direction.",
    ),
    "interaction_matrices": Caption(
        METHOD,
        "Interactions and affinity.",
        "Left how alike clients' losses were when they met in a round, right the affinity that is divided.",
    ),
    "spectral_embedding": Caption(
        METHOD, "Spectral embedding.", "Clients at the leading eigenvectors of the affinity that was divided."
    ),
    "convergence": Caption(
        METHOD,
        "Convergence.",
        "Running change of the interaction matrix in each cluster, known where there is a marker: at its start, at the "
        "end, and when the cluster is tested, which is below the dashed line.",
    ),
    "class_distributions": Caption(
        METHOD,
        "Classes in the clusters.",
        "Left the mean share of each class, right how unevenly a client's examples are divided among classes.",
    ),
    "dissimilarity_matrices": Caption(
        METHOD,
        "Dissimilarities.",
        "Pairs of clients by their data, by their gradients, and both together; dark blocks are alike.",
    ),
    "dendrogram": Caption(
        METHOD,
        "Dendrogram.",
        "Which clients merge at which distance; what the dashed line cuts apart are the clusters, and a merge on it "
        "is not cut.",
    ),
    "threshold_search": Caption(
        METHOD,
        "Search for the threshold.",
        "Held-out accuracy and number of clusters at each threshold that was tried; the ring is the one taken.",
    ),
}


def caption(name: str) -> Caption:
    """Of a picture by its file's name without ending; a number at the end counts splits.

    >>> caption("spectral_embedding_2").title
    'Spectral embedding, split 2.'
    """
    found = re.fullmatch(r"(.+?)_(\d+)", name)
    base, number = (found[1], found[2]) if found and found[1] in CAPTIONS else (name, "")
    plain = Caption(METHOD, f"{name.replace('_', ' ').capitalize()}.", "")
    known = CAPTIONS.get(base, plain)
    return known._replace(title=f"{known.title.rstrip('.')}, split {number}.") if number else known
