"""Leading singular directions of client profiles, and spectral clustering of an affinity."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from fedjax_cluster.clustering import checks
from fedjax_cluster.clustering.checks import Mask
from fedjax_cluster.clustering.kmeans import kmeans_in_slots
from fedjax_cluster.clustering.krylov import krylov_basis, products_of_columns, random_start
from fedjax_cluster.clustering.similarity import gram_in_units, matmul, root, unit

Method = Literal["auto", "eigh", "subspace"]

# Beyond this many clients a full eigendecomposition costs more than the few leading directions are worth.
_EIGH_LIMIT = 512
_OVERSAMPLING = 8
_DEPTH = 8


class Embedding(NamedTuple):
    """Clients in the space of the leading singular vectors, in the unit of their profiles."""

    features: Float[Array, "M rank"]  # each column with its largest entry positive; 0 where masked out
    singular_values: Float[Array, " rank"]  # descending


def profile_embedding(
    profile: Float[ArrayLike, "M D"], rank: int, mask: Mask = None, method: Method = "auto"
) -> Embedding:
    r"""Projects client profiles on their leading singular vectors (CFL-GP, Algorithm 3, line 1, and Eq. 12).

    .. math:: G = \sum_i \sigma_i u_i v_i^\top, \qquad g'_c = \hat U^\top g_c = (\sigma_i v_{ic})_{i \le s}

    with the profiles as the columns of G. The directions v and σ² come from the Gram matrix GᵀG, so singular values
    below about 3·10⁻⁴ of the largest are noise; `subspace_embedding` resolves smaller ones.

    Args:
      profile: one row per client (Gᵀ).
      rank: s, the number of leading singular vectors, static; at most min(M, D).
      mask: clients that count; None means all.
      method: as in `embed_gram`, static.

    Raises:
      ValueError: wrong shapes, rank outside 1..min(M, D), an unknown method, or non-finite profiles.

    >>> features, singular_values = profile_embedding(jnp.diag(jnp.array([3.0, 2.0, 0.0])), 2)
    >>> jnp.abs(features).round(4).tolist(), singular_values.round(4).tolist()
    ([[3.0, 0.0], [0.0, 2.0], [0.0, 0.0]], [3.0, 2.0])
    """
    profile = checks.floats(profile, "profile", 2)
    mask = checks.client_mask(mask, profile.shape[0])
    rank = checks.count(rank, "rank", maximum=min(profile.shape), there_are="singular values exist")
    checks.choice(method, "method", get_args(Method))
    checks.finite(profile, "profile", mask)
    return _profile_embedding(profile, mask, rank, method)


@partial(jax.jit, static_argnames=("rank", "method"))
def _profile_embedding(profile: Array, mask: Array, rank: int, method: str) -> Embedding:
    gram, scale = gram_in_units(profile, mask)
    features, singular_values = _embed_gram(gram, mask, rank, method)
    return Embedding(features * scale, singular_values * scale)


def embed_gram(gram: Float[ArrayLike, "M M"], rank: int, mask: Mask = None, method: Method = "auto") -> Embedding:
    r"""`profile_embedding` from the inner products of the profiles (for its cost see CFL-GP, Appendix D).

    .. math:: A = V \Lambda V^\top, \qquad g' = V_s \Lambda_s^{1/2}, \qquad \sigma = \Lambda^{1/2}

    Args:
      gram: the inner products of all pairs, as `block_gram` gives them.
      rank: s, the number of leading directions, static; at most M.
      mask: clients that count; rows and columns of the others may hold anything.
      method: static. "eigh" decomposes all of A in O(M³). "subspace" finds the leading directions in a block Krylov
        space in O(M²·rank), from a fixed start: equal inputs give equal features. "auto" is "eigh" up to 512 clients.

    Raises:
      ValueError: wrong shapes, rank outside 1..M, an unknown method, or entries not finite.

    >>> embed_gram(jnp.diag(jnp.array([9.0, 4.0, 1.0])), 2).singular_values.round(4).tolist()
    [3.0, 2.0]
    """
    gram, mask = checks.client_matrix(gram, "gram", mask)
    checks.symmetric_matrix(gram, "gram", mask)
    rank = checks.count(rank, "rank", maximum=gram.shape[0], there_are="singular values exist")
    checks.choice(method, "method", get_args(Method))
    return _embed_gram(gram, mask, rank, method)


@partial(jax.jit, static_argnames=("rank", "method"))
def _embed_gram(gram: Array, mask: Array, rank: int, method: str) -> Embedding:
    gram, scale = _in_square_units(jnp.where(mask[:, None] & mask[None, :], gram, 0.0))
    eigenvalues, vectors = _leading_eigenpairs(gram, mask, rank, method)
    singular_values = root(jnp.maximum(eigenvalues, 0.0))
    features = _fix_signs(vectors) * singular_values[None, :]
    return Embedding(jnp.where(mask[:, None], features, 0.0) * scale, singular_values * scale)


def decomposed_cosines(
    gram: Float[ArrayLike, "M M"], rank: int, mask: Mask = None, method: Method = "auto"
) -> Float[Array, "M rank"]:
    r"""Cosines of clients' updates with the leading singular directions of all (FlexCFL's EDC).

    .. math:: \Delta^\top = \sum_k \sigma_k u_k v_k^\top, \qquad E_{ik} = \frac{\langle \Delta_i, u_k \rangle}
              {\|\Delta_i\|} = \frac{\sigma_k v_{ik}}{\sqrt{A_{ii}}}

    with one update per row of Δ and A = ΔΔᵀ. The Euclidean distance of rows of E is the paper's data-driven measure.

    As with `profile_embedding`, directions whose singular values are below about 3·10⁻⁴ of the largest are noise. Here
    that shows in full, as each row is divided by its own length: among updates 300 times longer than others the cosines
    of these are off by .01, at 1000 by .1, and from 3000 on they say nothing. Cosines of rows of length 1 have no such
    limit, but other directions.

    Args:
      gram: A, as `block_gram` gives it.
      rank: how many directions, static; at most M.
      mask: clients that count; None means all.
      method: as in `embed_gram`, static.

    Returns:
      In [-1, 1], each column's sign as in `embed_gram`; 0 for updates of zero and where masked out.

    Raises:
      ValueError: as `embed_gram`.

    >>> updates = jnp.array([[3.0, 0.0], [6.0, 0.0], [0.0, 2.0]])
    >>> decomposed_cosines(updates @ updates.T, 2).round(4).tolist()
    [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    """
    gram = checks.floats(gram, "gram", 2)
    features = embed_gram(gram, rank, mask, method).features
    squared = jnp.diagonal(gram)[:, None]
    counts = (features != 0.0).any(axis=1, keepdims=True) & (squared > 0.0)
    return jnp.where(counts, jnp.clip(features * lax.rsqrt(jnp.where(counts, squared, 1.0)), -1.0, 1.0), 0.0)


def subspace_embedding(
    rng_key: PRNGKeyArray,
    profile: Float[ArrayLike, "M D"],
    rank: int,
    mask: Mask = None,
    depth: int = 4,
    oversampling: int = 8,
    devices: int = 1,
) -> Embedding:
    r"""`profile_embedding` for very many clients: no M×M matrix, and small singular values resolved.

    .. math:: B = \mathrm{orth}[S, GG^\top S, \dots, (GG^\top)^{q-1} S], \qquad B^\top G = U \Sigma W^\top,
              \qquad g' = B U_s \Sigma_s

    with one client per row of G, in O(M·D·rank·q) (CFL-GP, Appendix D; Musco and Musco 2015 for the space).

    Args:
      rng_key: a JAX random key for the start S of the block Krylov space.
      profile: one row per client.
      rank: s, the number of leading singular vectors, static; at most min(M, D).
      mask: clients that count; None means all.
      depth: q, how many blocks span the space, static; more of them resolve closer singular values.
      oversampling: how many directions a block has beyond `rank`, static.
      devices: among how many the clients are divided, in order, static. Of several no message has more than D numbers,
        or rank + oversampling of each device and q times as many as these; the result is the same but for rounding.

    Raises:
      ValueError: wrong shapes, rank outside 1..min(M, D), or non-finite profiles.

    >>> subspace_embedding(jax.random.key(0), jnp.diag(jnp.array([3.0, 2.0, 1.0])), 2).singular_values.round(4).tolist()
    [3.0, 2.0]
    """
    checks.key(rng_key)
    profile = checks.floats(profile, "profile", 2)
    mask = checks.client_mask(mask, profile.shape[0])
    rank = checks.count(rank, "rank", maximum=min(profile.shape), there_are="singular values exist")
    checks.count(depth, "depth")
    checks.count(oversampling, "oversampling", minimum=0)
    checks.count(devices, "devices")
    checks.finite(profile, "profile", mask)
    return _subspace_embedding(rng_key, profile, mask, rank, depth, rank + oversampling, devices)


@partial(jax.jit, static_argnames=("rank", "depth", "width", "devices"))
def _subspace_embedding(
    rng_key: Array, profile: Array, mask: Array, rank: int, depth: int, width: int, devices: int
) -> Embedding:
    profile = jnp.where(mask[:, None], profile, 0.0)
    scale = unit(profile)
    profile = profile / scale

    def apply(block: Array) -> Array:
        # QR between the two products: GGᵀ alone would push small singular values below the rounding.
        return matmul(profile, jnp.linalg.qr(products_of_columns(profile, block, devices))[0])

    start = random_start(rng_key, mask, width).astype(profile.dtype)
    basis = krylov_basis(apply, start, depth, devices)
    # For the same reason the small SVD is that of Bᵀ G, not of its square.
    within = jnp.linalg.qr(products_of_columns(profile, basis, devices), mode="r")
    left, singular_values, _ = jnp.linalg.svd(within.T, full_matrices=False)
    features = _fix_signs(matmul(basis, left[:, :rank])) * singular_values[None, :rank]
    return Embedding(jnp.where(mask[:, None], features, 0.0) * scale, singular_values[:rank] * scale)


def spectral_clustering(
    rng_key: PRNGKeyArray, affinity: Float[ArrayLike, "M M"], k: int, mask: Mask = None
) -> Int[Array, " M"]:
    r"""Clusters the nodes of a weighted graph by the algorithm of Ng, Jordan and Weiss.

    .. math:: L = D^{-1/2} W D^{-1/2}, \quad W_{ii} = 0, \quad D_{ii} = \sum_j W_{ij}

    The rows of its k leading eigenvectors, scaled to length 1, go to k-means (2001; FedGWC, Sec. 4.2, Algorithm 1).

    Args:
      rng_key: a JAX random key, for k-means.
      affinity: symmetric and non-negative; the diagonal is ignored.
      k: number of clusters, static.
      mask: clients that count; None means all.

    Returns:
      Labels in 0..k-1, -1 where masked out; no cluster is empty.

    Raises:
      ValueError: k outside 1..clients that count, or an affinity not square, finite, symmetric or non-negative.

    >>> affinity = jnp.array([[0.0, 1.0, 0.1], [1.0, 0.0, 0.1], [0.1, 0.1, 0.0]])
    >>> labels = spectral_clustering(jax.random.key(0), affinity, 2)
    >>> bool(labels[0] == labels[1] != labels[2])
    True
    """
    checks.key(rng_key)
    affinity, mask = _checked_affinity(affinity, mask)
    k = checks.num_clusters(k, mask)
    return _spectral_clustering(rng_key, affinity, mask, k)


@checks.fused
def _pairs_are_weights(affinity: Any, mask: Any) -> Any:
    return ((affinity >= 0.0) | ~checks.pairs(mask, diagonal=False)).all()


def _checked_affinity(affinity: ArrayLike, mask: Mask) -> tuple[Array, Array]:
    affinity, mask = checks.client_matrix(affinity, "affinity", mask, diagonal=False)
    checks.symmetric_matrix(affinity, "affinity", mask, diagonal=False)
    if not checks.holds(_pairs_are_weights, affinity, mask):
        raise ValueError("affinity holds negative values; degrees need weights >= 0: shift or clip it first.")
    return affinity, mask


@partial(jax.jit, static_argnames="k")
def _spectral_clustering(rng_key: Array, affinity: Array, mask: Array, k: int) -> Array:
    vectors, _ = _laplacian_vectors(affinity, mask, k)
    return _cluster_rows(rng_key, vectors, mask, k)


def spectral_partitions(
    rng_key: PRNGKeyArray, affinity: Float[ArrayLike, "M M"], max_k: int, mask: Mask = None
) -> Int[Array, "{max_k}-1 M"]:
    r"""`spectral_clustering` into 2, 3, …, max_k clusters, from one eigendecomposition (FedGWC, Algorithm 1, line 6).

    Args:
      rng_key: a JAX random key, for k-means.
      affinity: symmetric and non-negative; the diagonal is ignored.
      max_k: the largest number of clusters, static, at least 2.
      mask: clients that count; None means all.

    Returns:
      Row n - 2 holds labels in 0..n-1, -1 where masked out; beyond the clients that count, clusters are empty.

    Raises:
      ValueError: max_k below 2, or an affinity not square, finite, symmetric or non-negative.

    >>> spectral_partitions(jax.random.key(0), 1.0 - jnp.eye(3), 3).shape
    (2, 3)
    """
    checks.key(rng_key)
    affinity, mask = _checked_affinity(affinity, mask)
    checks.count(max_k, "max_k", 2)
    return _spectral_partitions(rng_key, affinity, mask, max_k)


@partial(jax.jit, static_argnames="max_k")
def _spectral_partitions(rng_key: Array, affinity: Array, mask: Array, max_k: int) -> Array:
    vectors, _ = _laplacian_vectors(affinity, mask, min(max_k, affinity.shape[0]))
    vectors = jnp.pad(vectors, ((0, 0), (0, max_k - vectors.shape[1])))
    column = jnp.arange(max_k, dtype=jnp.int32)[None, :]

    def partition(k: Array) -> Array:
        return _cluster_rows(rng_key, jnp.where(column < k, vectors, 0.0), mask, k)

    return lax.map(partition, jnp.arange(2, max_k + 1, dtype=jnp.int32))


def _laplacian_vectors(affinity: Array, mask: Array, rank: int) -> tuple[Array, Array]:
    """Leading eigenvectors [M, rank] of D^(-1/2) W D^(-1/2), and D^(-1/2)'s diagonal [M]."""
    weights = jnp.where(mask[:, None] & mask[None, :] & ~jnp.eye(mask.shape[0], dtype=bool), affinity, 0.0)
    weights, scale = _in_square_units(weights)
    degree = weights.sum(axis=1)
    alone = degree <= 0.0
    # Of a client that is like nobody 1, as SciPy has it: with 0 its own eigenvector would be lost.
    inverse_root = lax.rsqrt(jnp.where(alone, 1.0, degree))
    laplacian = weights * inverse_root[:, None] * inverse_root[None, :]
    # The spectrum lies in [-1, 1]; masked-out clients go below it, so that they never lead.
    laplacian -= 2.0 * jnp.diag((~mask).astype(weights.dtype))
    return _leading_eigenpairs(laplacian, mask, rank, "auto")[1], inverse_root / jnp.where(alone, 1.0, scale)


def _cluster_rows(rng_key: Array, vectors: Array, mask: Array, k: Array | int) -> Array:
    norm = jnp.linalg.norm(vectors, axis=1, keepdims=True)
    rows = vectors / jnp.where(norm > 0.0, norm, 1.0)
    return kmeans_in_slots(rng_key, rows, mask, k, slots=rows.shape[1], num_restarts=10, max_iterations=100).labels


class QrPartition(NamedTuple):
    """A spectral clustering without k-means, and an embedding of the clients."""

    labels: Int[Array, " M"]  # -1 where masked out; a cluster may be empty
    embedding: Float[Array, "M k"]  # the k random-walk eigenvectors after the first; 0 where masked out


def qr_partition(affinity: Float[ArrayLike, "M M"], k: int, mask: Mask = None) -> QrPartition:
    r"""scikit-learn's `SpectralClustering(k, assign_labels="cluster_qr")`, and its `SpectralEmbedding(k)`.

    .. math:: Y = D^{-1/2} X, \quad Y_p = U \Sigma V^\top, \quad
              \text{label}_i = \arg\max_j | (Y U' V')_{ij} |

    with the k leading eigenvectors X of D^(-1/2) W D^(-1/2), p the k rows of Y that QR with column pivoting takes
    first, and U', V' the factors of Y_pᵀ (Damle, Minden and Ying 2019, Algorithm 1).

    Args:
      affinity: symmetric and non-negative; the diagonal is ignored.
      k: number of clusters, static.
      mask: clients that count; None means all.

    Raises:
      ValueError: k not less than the number of clients, or an affinity not square, finite, symmetric or non-negative.

    >>> labels, _ = qr_partition(jnp.array([[0.0, 1.0, 0.1], [1.0, 0.0, 0.1], [0.1, 0.1, 0.0]]), 2)
    >>> bool(labels[0] == labels[1] != labels[2])
    True
    """
    affinity, mask = _checked_affinity(affinity, mask)
    checks.count(k, "k", maximum=affinity.shape[0] - 1, there_are="eigenvectors follow the first")
    return _qr_partition(affinity, mask, k)


@partial(jax.jit, static_argnames="k")
def _qr_partition(affinity: Array, mask: Array, k: int) -> QrPartition:
    vectors, inverse_root = _laplacian_vectors(affinity, mask, k + 1)
    vectors = jnp.where(mask[:, None], vectors * inverse_root[:, None], 0.0)
    leading = rest = vectors[:, :k] / unit(vectors[:, :k])  # whose squares neither overflow nor underflow
    pivots = []
    for _ in range(k):
        pivot = jnp.argmax(jnp.square(rest).sum(axis=1))
        direction = rest[pivot] / jnp.maximum(jnp.linalg.norm(rest[pivot]), 1e-30)
        rest = rest - matmul(rest, direction)[:, None] * direction[None, :]
        pivots.append(pivot)
    left, _, right = jnp.linalg.svd(leading[jnp.stack(pivots)].T)
    labels = jnp.argmax(jnp.abs(matmul(leading, matmul(left, right))), axis=1).astype(jnp.int32)
    return QrPartition(jnp.where(mask, labels, -1), vectors[:, 1:])


def _in_square_units(matrix: Array) -> tuple[Array, Array]:
    """A matrix in units of the square of a power of two, so that no sum of entries overflows, and that power."""
    scale = unit(root(jnp.abs(matrix).max(initial=0.0)))
    return matrix / (scale * scale), scale


def _leading_eigenpairs(matrix: Array, mask: Array, rank: int, method: str) -> tuple[Array, Array]:
    """The `rank` largest eigenvalues, descending, and their vectors [M, rank] of a symmetric matrix."""
    num_clients = matrix.shape[0]
    width = rank + _OVERSAMPLING
    if method == "eigh" or (method == "auto" and num_clients <= _EIGH_LIMIT) or width * _DEPTH >= num_clients:
        eigenvalues, vectors = jnp.linalg.eigh(matrix)
    else:
        start = random_start(jax.random.key(0), mask, width).astype(matrix.dtype)
        basis = krylov_basis(partial(matmul, matrix), start, _DEPTH)
        eigenvalues, rotation = jnp.linalg.eigh(matmul(basis.T, matmul(matrix, basis)))
        vectors = matmul(basis, rotation[:, -rank:])
    return eigenvalues[-rank:][::-1], vectors[:, -rank:][:, ::-1]


def _fix_signs(vectors: Array) -> Array:
    """Each column with its largest entry positive: the sign of an eigenvector is otherwise the solver's."""
    largest = jnp.take_along_axis(vectors, jnp.argmax(jnp.abs(vectors), axis=0)[None, :], axis=0)
    return vectors * jnp.where(largest < 0.0, -1.0, 1.0)
