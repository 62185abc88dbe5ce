import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.cluster
import sklearn.datasets
import sklearn.manifold
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_cluster.clustering as fcc
from fedjax_cluster.clustering import krylov
from tests.reference import spectral as reference

M, D, K = 30, 50, 4


def _profile(seed, num_clients=M, noise=0.5):
    rng = np.random.default_rng(seed)
    group = rng.integers(K, size=num_clients)
    profile = rng.normal(size=(K, D))[group] + noise * rng.normal(size=(num_clients, D))
    return profile.astype(np.float32), group


def _assert_same_embedding(actual, expected, tolerance=1e-5):
    """Equal up to a rotation of the features, which is all that an SVD determines."""
    features, singular_values = (np.asarray(part, np.float64) for part in jax.device_get(actual))
    largest = expected[1][0]
    chex.assert_trees_all_close(singular_values, expected[1], atol=tolerance * largest)
    chex.assert_trees_all_close(features @ features.T, expected[0] @ expected[0].T, atol=tolerance * largest**2)


@pytest.mark.parametrize("method", ["eigh", "auto"])
def test_profile_embedding_equals_the_exact_svd(method):
    for seed in range(3):
        profile, _ = _profile(seed)
        actual = fcc.profile_embedding(profile, K, method=method)
        assert {part.dtype for part in actual} == {jnp.dtype("float32")}
        _assert_same_embedding(actual, reference.profile_embedding(profile, K))


def test_features_equal_the_exact_ones_up_to_sign():
    profile, _ = _profile(0)
    features = np.asarray(fcc.profile_embedding(profile, K).features)
    expected = reference.profile_embedding(profile, K)[0]
    chex.assert_trees_all_close(np.abs(features), np.abs(expected), atol=2e-4)
    largest = np.abs(features).argmax(axis=0)
    assert (features[largest, np.arange(K)] > 0).all()


def test_subspace_method_equals_the_exact_svd():
    """300 clients in a noise floor: the block Krylov space is a true subspace here."""
    profile, _ = _profile(1, 300, noise=1.5)
    _assert_same_embedding(
        fcc.profile_embedding(profile, K, method="subspace"), reference.profile_embedding(profile, K), 1e-4
    )


def test_subspace_method_survives_an_exactly_low_rank():
    """Here every Krylov block but the first is rounding noise."""
    profile, _ = _profile(2, 300, noise=0.0)
    embedding = fcc.profile_embedding(profile, K + 2, method="subspace")
    features, singular_values = reference.profile_embedding(profile, K + 2)
    _assert_same_embedding(embedding, (features, singular_values), 1e-3)


def test_matrix_free_embedding_equals_the_exact_svd():
    profile, _ = _profile(3, 300, noise=1.5)
    expected = reference.profile_embedding(profile, K)
    _assert_same_embedding(fcc.subspace_embedding(jax.random.key(0), profile, K, depth=6), expected, 1e-3)


@pytest.mark.parametrize(("clients", "devices"), [(50, 2), (52, 4), (195, 4), (240, 5), (50, 50)])
@pytest.mark.parametrize("noise", [0.0, 1.5])
def test_clients_divided_among_devices_are_embedded_as_on_one(clients, devices, noise):
    """Faults: a part too few, or one that is written where another belongs; a basis that is none where rows are few."""
    profile, _ = _profile(3, clients, noise=noise)
    whole = fcc.subspace_embedding(jax.random.key(0), profile, K)
    divided = fcc.subspace_embedding(jax.random.key(0), profile, K, devices=devices)
    _assert_same_embedding(divided, whole, 1e-3)


@pytest.mark.parametrize("devices", [1, 3, 4])
@pytest.mark.parametrize("kind", ["random", "equal columns", "zero"])
def test_a_basis_is_orthonormal_and_spans_the_block(devices, kind):
    block = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    block = {"random": block, "equal columns": np.repeat(block[:, :1], 6, axis=1), "zero": 0 * block}[kind]
    basis = np.asarray(krylov.orthonormal(jnp.asarray(block), devices))
    np.testing.assert_allclose(basis.T @ basis, np.eye(6), atol=1e-5)
    np.testing.assert_allclose(basis @ (basis.T @ block), block, atol=1e-5)


def test_matrix_free_embedding_resolves_what_the_gram_matrix_cannot():
    left, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(300, 3)))
    right, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(D, 3)))
    exact = np.array([1.0, 0.1, 1e-5])
    profile = ((left * exact[None, :]) @ right.T).astype(np.float32)
    for scale in (1.0, 1e-25):
        embedding = fcc.subspace_embedding(jax.random.key(0), (profile * scale).astype(np.float32), 3)
        chex.assert_trees_all_close(embedding.singular_values, exact * scale, rtol=0.02)


@pytest.mark.parametrize("method", ["eigh", "subspace", "matrix-free"])
def test_masked_clients_equal_the_subset(method):
    """Masked-out rows hold NaN; those that count stand anywhere among them."""
    profile, _ = _profile(4, 300)
    mask = np.random.default_rng(0).random(300) < 0.8
    spoiled = np.where(mask[:, None], profile, np.nan).astype(np.float32)
    if method == "matrix-free":
        embedding = fcc.subspace_embedding(jax.random.key(0), spoiled, K, mask=mask, depth=6)
    else:
        embedding = fcc.profile_embedding(spoiled, K, mask=mask, method=method)
    features = np.asarray(embedding.features)
    assert (features[~mask] == 0.0).all()
    expected = reference.profile_embedding(profile[mask], K)
    _assert_same_embedding((features[mask], embedding.singular_values), expected, 1e-3)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_embedding_ignores_rotations_and_follows_permutations(seed):
    profile, _ = _profile(seed)
    rotation, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(D, D)))
    order = np.random.default_rng(seed).permutation(M)
    plain = fcc.profile_embedding(profile, K)
    exact = (np.asarray(plain.features, np.float64), np.asarray(plain.singular_values, np.float64))
    _assert_same_embedding(fcc.profile_embedding(profile @ rotation.astype(np.float32), K), exact)
    _assert_same_embedding(fcc.profile_embedding(profile[order], K), (exact[0][order], exact[1]))


def test_embed_gram_of_summed_blocks_is_the_profile_embedding():
    profile, _ = _profile(5)
    gram = fcc.block_gram(profile[:, :20]) + fcc.block_gram(profile[:, 20:])
    jitted = jax.jit(lambda gram: fcc.embed_gram(gram, K))
    _assert_same_embedding(jitted(gram), reference.profile_embedding(profile, K))


def _rings():
    points, group = sklearn.datasets.make_circles(60, factor=0.3, noise=0.03, random_state=0)
    squared = ((points[:, None] - points[None]) ** 2).sum(axis=2)
    return np.exp(-20.0 * squared).astype(np.float32), group


def _spectral_clustering(affinity, seed=0, mask=None):
    return np.asarray(fcc.spectral_clustering(jax.random.key(seed), affinity, 2, mask))


def test_spectral_clustering_separates_rings():
    affinity, group = _rings()
    labels = _spectral_clustering(affinity)
    assert labels.dtype == np.int32
    assert fcc.scores.adjusted_rand_index(labels, group) == 1.0


def test_spectral_clustering_equals_the_oracle():
    """Degrees from 0.02 to 50: rows that are not scaled to length 1 cluster by degree."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        group = rng.permutation(np.repeat(np.arange(2), 30))
        weights = rng.uniform(0.0, 1.0, size=(60, 60)) * np.where(group[:, None] == group[None, :], 1.0, 0.2)
        scale = np.exp(rng.uniform(np.log(0.02), np.log(50.0), size=60))
        affinity = (0.5 * (weights + weights.T) * scale[:, None] * scale[None, :]).astype(np.float32)
        rows = reference.normalised_rows(affinity, 2)
        expected = sklearn.cluster.KMeans(2, n_init=20, random_state=0).fit(rows).labels_
        assert fcc.scores.adjusted_rand_index(_spectral_clustering(affinity, seed), expected) == 1.0


def test_spectral_clustering_ignores_diagonal_and_scale():
    affinity, group = _rings()
    changed = 1e-6 * (affinity + np.diag(np.random.default_rng(0).uniform(1e3, 1e6, 60)))
    labels = _spectral_clustering(changed.astype(np.float32))
    assert fcc.scores.adjusted_rand_index(labels, group) == 1.0


@pytest.mark.parametrize("size", [2.0**-100, 2.0**126])
def test_affinities_of_any_size_are_clustered_alike(size):
    """Degrees of five clients at 1e38 are infinite, and squares of what stands for them 0: labels were arbitrary."""
    group = np.arange(9) % 3
    affinity = np.where(group[:, None] == group[None], 3.0, 0.25).astype(np.float32)
    changed = affinity * np.float32(size)
    plain, large = fcc.qr_partition(affinity, 3), fcc.qr_partition(changed, 3)
    for labels in (fcc.spectral_clustering(jax.random.key(0), changed, 3), large.labels):
        assert fcc.scores.adjusted_rand_index(labels, group) == 1.0
    np.testing.assert_allclose(large.embedding[:, 2] * np.sqrt(size), plain.embedding[:, 2], atol=1e-5)


@pytest.mark.parametrize("method", ["eigh", "subspace"])
@pytest.mark.parametrize("size", [2.0**-100, 2.0**126])
def test_a_gram_matrix_of_any_size_is_embedded_alike(size, method):
    """Squares of singular values may be above the largest number, and products in their search were so from 1e19 on."""
    profile = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32) + 2.0
    gram = (profile @ profile.T) / 64
    plain, large = (fcc.embed_gram(matrix, 3, method=method) for matrix in (gram, gram * np.float32(size)))
    np.testing.assert_allclose(large.singular_values / np.sqrt(size), plain.singular_values, rtol=1e-5)
    np.testing.assert_allclose(large.features / np.sqrt(size), plain.features, atol=1e-4)


def test_spectral_clustering_of_masked_clients_equals_the_subset():
    affinity, group = _rings()
    mask = np.random.default_rng(0).random(60) < 0.8
    spoiled = np.where(mask[:, None] & mask[None, :], affinity, np.nan)
    labels = _spectral_clustering(spoiled, mask=mask)
    assert (labels[~mask] == -1).all()
    assert fcc.scores.adjusted_rand_index(labels, group) == 1.0


def test_masked_clients_never_lead():
    """Two groups in an almost complete graph: the eigenvalue that tells them apart is negative."""
    mask = np.random.default_rng(0).permutation(np.arange(60) < 6)
    group = np.cumsum(mask) % 2
    affinity = np.where(group[:, None] == group[None, :], 1.3, 1.0).astype(np.float32)
    assert np.linalg.eigvalsh(affinity[np.ix_(mask, mask)] - 1.3 * np.eye(6))[-2] < 0.0
    labels = _spectral_clustering(affinity, mask=mask)
    assert fcc.scores.adjusted_rand_index(labels, group) == 1.0


def test_spectral_clustering_of_an_isolated_client():
    affinity, _ = _rings()
    affinity[0, :] = affinity[:, 0] = 0.0
    assert set(_spectral_clustering(affinity).tolist()) == {0, 1}


def _blocks(rng, k, sizes):
    """A random affinity with k blocks: within them above what lies between, clients in random order."""
    group = rng.permutation(np.repeat(np.arange(k), sizes))
    strength = np.where(group[:, None] == group[None, :], rng.uniform(0.5, 1.0), rng.uniform(0.02, 0.1))
    weights = rng.uniform(0.8, 1.2, (len(group), len(group))) * strength
    return (0.5 * (weights + weights.T)).astype(np.float32), group


@pytest.mark.slow
def test_labels_are_scikit_learns_on_100_block_matrices():
    partitions = jax.jit(chex.assert_max_traces(lambda key, affinity: fcc.spectral_partitions(key, affinity, 4), n=1))
    for seed in range(100):
        rng = np.random.default_rng(seed)
        k = 2 + seed % 3
        affinity, _ = _blocks(rng, k, rng.multinomial(24 - 4 * k, np.ones(k) / k) + 4)
        expected = sklearn.cluster.SpectralClustering(k, affinity="precomputed", random_state=0).fit(affinity).labels_
        labels = partitions(jax.random.key(seed), affinity)[k - 2]
        assert fcc.scores.adjusted_rand_index(labels, expected) == 1.0


@pytest.mark.slow
def test_partitions_are_the_clusterings_one_by_one():
    rng = np.random.default_rng(3)
    affinity, _ = _blocks(rng, 4, (7, 6, 6, 5))
    mask = rng.random(24) < 0.9
    partitions = np.asarray(fcc.spectral_partitions(jax.random.key(1), affinity, 4, mask))
    assert (partitions[:, ~mask] == -1).all()
    for k in (2, 3, 4):
        alone = fcc.spectral_clustering(jax.random.key(1), affinity, k, mask)
        assert partitions[k - 2].max() == k - 1
        assert fcc.scores.adjusted_rand_index(partitions[k - 2], alone) == 1.0


@pytest.mark.parametrize("k", [2, 3])
def test_qr_partition_is_scikit_learns(k):
    """Noise without groups, where only the same steps give the same labels."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        affinity = rng.random((20, 20))
        affinity = (0.5 * (affinity + affinity.T)).astype(np.float32)
        np.fill_diagonal(affinity, 0.0)
        clustered = sklearn.cluster.SpectralClustering(
            k, n_components=k, affinity="precomputed", assign_labels="cluster_qr", random_state=0
        ).fit(affinity)
        embedding = sklearn.manifold.SpectralEmbedding(k, affinity="precomputed", random_state=0).fit_transform(
            affinity
        )
        found = fcc.qr_partition(affinity, k)
        assert fcc.scores.adjusted_rand_index(found.labels, clustered.labels_) == 1.0
        ours = np.asarray(found.embedding)
        scale = np.linalg.norm(embedding, axis=0) / np.linalg.norm(ours, axis=0)
        chex.assert_trees_all_close(np.abs(ours * scale), np.abs(embedding), atol=1e-3)
        chex.assert_trees_all_close(scale, scale[0], rtol=1e-3)


@pytest.mark.parametrize("scale", [2.0**-90, 2.0**-10, 2.0**100])
@pytest.mark.parametrize("method", ["eigh", "subspace"])
def test_profile_embedding_is_in_the_profiles_unit(scale, method):
    """Squares of profiles below 1e-23 are 0 in float32, and those above 1e19 infinite."""
    profile = np.random.default_rng(0).normal(size=(64, 20)).astype(np.float32)
    features, values = fcc.profile_embedding(profile, 3, method=method)
    # Of clients that do not count no unit is made.
    spoilt, mask = np.concatenate([profile * np.float32(scale), np.full((1, 20), np.nan)]), np.arange(65) < 64
    for scaled_profile, masked in ((profile * np.float32(scale), None), (spoilt, mask)):
        scaled, scaled_values = fcc.profile_embedding(scaled_profile, 3, masked, method)
        np.testing.assert_allclose(scaled[:64] / np.float32(scale), features, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(scaled_values / np.float32(scale), values, rtol=1e-5)


@pytest.mark.parametrize("diagonal", [np.nan, np.inf, -5.0])
def test_anything_may_be_on_the_diagonal(diagonal):
    affinity = np.kron(np.eye(3), np.ones((4, 4))).astype(np.float32) + 0.05
    spoilt = affinity.copy()
    np.fill_diagonal(spoilt, diagonal)
    for of in (
        lambda w: fcc.spectral_clustering(jax.random.key(0), w, 3),
        lambda w: fcc.spectral_partitions(jax.random.key(0), w, 3),
        lambda w: fcc.qr_partition(w, 3).labels,
    ):
        np.testing.assert_array_equal(of(spoilt), of(affinity))
    with pytest.raises(ValueError, match="not symmetric"):
        fcc.qr_partition(np.triu(spoilt), 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fcc.profile_embedding(np.ones((3, 2)), 3), "only 2 singular values"),
        (lambda: fcc.profile_embedding(np.ones((3, 2)), 0), "rank is 0"),
        (lambda: fcc.profile_embedding(np.ones((3, 2)), 1, method="svd"), "method is 'svd'"),
        (lambda: fcc.profile_embedding(np.full((3, 2), np.inf), 1), "NaN or infinite"),
        (lambda: fcc.embed_gram(np.ones((3, 2)), 1), "must be square"),
        (lambda: fcc.subspace_embedding(jax.random.key(0), np.ones((3, 2)), 1, depth=0), "depth is 0"),
        (lambda: fcc.spectral_clustering(jax.random.key(0), -np.ones((3, 3)), 2), "negative"),
        (lambda: fcc.spectral_clustering(jax.random.key(0), np.triu(np.ones((3, 3))), 2), "not symmetric"),
        (lambda: fcc.spectral_clustering(jax.random.key(0), np.ones((3, 3)), 4), "only 3 clients"),
        (lambda: fcc.spectral_clustering(jax.random.key(0), np.full((3, 3), np.nan), 2), "NaN or infinite"),
        (lambda: fcc.spectral_partitions(jax.random.key(0), np.ones((3, 3)), 1), "max_k is 1"),
        (lambda: fcc.qr_partition(np.ones((3, 3)), 3), "k is 3"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
