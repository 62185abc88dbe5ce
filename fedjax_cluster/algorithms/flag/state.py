"""What FLAG's clients send, what the server keeps of it, and the dissimilarities of all pairs (Algorithms 1 and 2)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedjax_cluster import clustering, parallel
from fedjax_cluster.algorithms.threshold_search import Search
from fedjax_cluster.clustering.dissimilarity import dissimilarity_of_bases
from fedjax_cluster.types import Variables


class Clients(NamedTuple):
    """What FLAG keeps of its clients, so that newcomers can be compared with them."""

    membership: Array  # f32[M, K], one-hot
    present: Array  # bool[M]
    vectors: Array  # f32[M, L, f, p], principal vectors of each class
    counts: Array  # i32[M, L], examples of each class; 0 or 1 where counts are not shared
    updates: Array  # f32[M, d], change of the parameters after t_g local epochs
    known: Array  # bool[M]; False for one that sent infinities: it counts in no comparison


class Matrices(NamedTuple):
    """The dissimilarities of all pairs of clients."""

    data: Array  # f32[M, M], V in degrees
    gradient: Array  # f32[M, M], G in degrees
    proximity: Array  # f32[M, M], A in [0, 1]

    BETWEEN_CLIENTS = "data", "gradient", "proximity"


class LandmarkMatrices(NamedTuple):
    """The dissimilarities of all pairs of landmarks, f32[m, m], as in `Matrices`; no newcomer has a row of them."""

    data: Array
    gradient: Array
    proximity: Array


class Server(NamedTuple):
    """What the server keeps."""

    start: Variables | None  # what all clients train from for t_g epochs; None where newcomers are not admitted
    matrices: Matrices
    search: Search


class Sent(NamedTuple):
    """What the landmarks sent, with whom newcomers are compared."""

    vectors: Array  # f32[m, L, f, p], as in `Clients`
    counts: Array  # i32[m, L]
    updates: Array  # f32[m, d]
    known: Array  # bool[m]


class LandmarkServer(NamedTuple):
    """What the server keeps with landmarks."""

    start: Variables | None  # as in `Server`
    matrices: LandmarkMatrices
    search: Search
    landmarks: Array  # i32[m], ascending
    sent: Sent | None  # None where newcomers are not admitted


class Measured(NamedTuple):
    """What one client sends before the clustering."""

    vectors: Array  # f32[L, f, p]
    counts: Array  # i32[L]
    update: Array  # f32[d]
    num_steps: Array  # i32[]


@parallel.kept_program(static_argnames=("angles", "delta", "beta"))
def compare(
    vectors: Array,
    counts: Array,
    updates: Array,
    mask: Array,
    *,
    angles: Literal["smallest", "sum"],
    delta: float,
    beta: float,
) -> Matrices:
    """V, G and A of all pairs of the clients of mask bool[M]."""
    data = dissimilarity_of_bases(vectors, counts, angles, jnp.asarray(delta, vectors.dtype), mask)
    gradient = clustering.gradient_angles(updates, mask)
    return Matrices(data, gradient, clustering.proximity(data, gradient, beta, mask))
