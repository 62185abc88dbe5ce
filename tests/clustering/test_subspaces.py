import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

import fedjax_cluster.clustering as fcc
from fedjax_cluster.clustering import dissimilarity
from tests.devices import on_a_cpu
from tests.reference import subspaces as reference

N, F, L, P, M = 60, 30, 4, 3, 6


def _client(seed, num_features=F):
    """Class 3 is absent, class 2 has two examples, and rows beyond 50 are padding."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.concatenate([np.zeros(30, int), np.ones(18, int), [2, 2]]))
    y = np.concatenate([y, np.full(N - 50, 3)])
    x = (rng.random((N, num_features)) * np.linspace(3, 0.2, num_features)).astype(np.float32)
    x[50:] = np.nan
    return x, y


@pytest.mark.parametrize("num_features", [F, 100])
def test_principal_vectors_span_what_the_svd_does(num_features):
    """More examples than features, and fewer: the Gram matrix is taken on the smaller side."""
    for seed in range(3):
        x, y = _client(seed, num_features)
        vectors = np.asarray(fcc.principal_vectors(x, y, 50, L, P))
        chex.assert_shape(vectors, chex.Dimensions(L=L, F=num_features, P=P)["LFP"])
        assert vectors.dtype == np.float32
        for label, number in ((0, 3), (1, 3), (2, 2)):
            expected = reference.principal_vectors(x[:50], y[:50], label, P)
            actual = vectors[label][:, :number]
            chex.assert_trees_all_close(actual.T @ actual, np.eye(number), atol=3e-5)
            overlap = np.abs(actual.T @ expected)
            chex.assert_trees_all_close(overlap, np.eye(number), atol=2e-3)
        assert (vectors[2][:, 2:] == 0.0).all()
        assert (vectors[3] == 0.0).all()


@pytest.mark.slow
@pytest.mark.parametrize(("examples", "features"), [(300, 120), (120, 300)])
def test_principal_vectors_of_many_examples_and_features(examples, features):
    """Both are beyond what a whole SVD is taken of; the spectrum falls as that of images does.

    The iteration is on the smaller side; the examples of another class, mixed in, must not matter.
    """
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(size, 90)))[0] for size in (examples, features))
    x = ((left * 0.8 ** np.arange(90)) @ right.T).astype(np.float32)
    y = rng.permutation(np.arange(2 * examples) % 2)
    mixed = rng.normal(size=(2 * examples, features)).astype(np.float32)
    mixed[y == 1] = x
    for rows, labels, label in ((x, np.zeros(examples, int), 0), (mixed, y, 1)):
        vectors = np.asarray(fcc.principal_vectors(rows, labels, len(rows), label + 1, 3))[label]
        chex.assert_trees_all_close(vectors.T @ vectors, np.eye(3), atol=1e-5)
        chex.assert_trees_all_close(np.abs(vectors.T @ right[:, :3]), np.eye(3), atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("features", [90, 700])
def test_principal_vectors_of_classes_of_any_size(features):
    """A class is gathered into an array that just holds it, has a place left, or has one too few; or is the largest."""
    sizes = [31, 32, 33, 128, 129, 247]
    rng = np.random.default_rng(0)
    y = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    x, expected = np.empty((len(y), features), np.float32), []
    for label, size in enumerate(sizes):
        left, right = (np.linalg.qr(rng.normal(size=(n, 25)))[0] for n in (size, features))
        x[y == label] = (left * 0.8 ** np.arange(25)) @ right.T
        expected.append(right[:, :3])
    vectors = np.asarray(fcc.principal_vectors(x, y, len(y), len(sizes), 3))
    overlaps = np.abs(np.einsum("lfp,lfq->lpq", vectors, np.stack(expected)))
    chex.assert_trees_all_close(overlaps, np.stack([np.eye(3)] * len(sizes)), atol=2e-3)


def test_principal_vectors_of_few_examples_among_many():
    """A class of two and an absent one, where the iteration samples more vectors than a class has examples."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 300)).astype(np.float32)
    y = np.where(np.arange(100) < 2, 1, 0)
    vectors = np.asarray(fcc.principal_vectors(x, y, 100, 3, 4))
    expected = reference.principal_vectors(x, y, 1, 2)
    chex.assert_trees_all_close(np.abs(vectors[1][:, :2].T @ expected), np.eye(2), atol=2e-3)
    assert (vectors[1][:, 2:] == 0.0).all()
    assert (vectors[2] == 0.0).all()


def test_principal_vectors_beyond_the_rank_are_zero():
    x, y = np.random.default_rng(0).random((N, F)).astype(np.float32), np.zeros(N, int)
    x[:] = x[:1] * np.linspace(1, 2, N, dtype=np.float32)[:, None]
    vectors = np.asarray(fcc.principal_vectors(x, y, N, L, P))
    chex.assert_trees_all_close(np.abs(vectors[0, :, 0]), np.abs(x[0]) / np.linalg.norm(x[0]), rtol=1e-4)
    assert (vectors[0, :, 1:] == 0.0).all()


@pytest.mark.parametrize("num_features", [F, 100])
def test_principal_vectors_are_orthonormal_whatever_the_spread(num_features):
    """Third singular value 10⁻⁴ of the first: right singular vectors from a Gram matrix have lost it."""
    rng = np.random.default_rng(0)
    left = np.linalg.qr(rng.normal(size=(num_features, P)))[0] * np.array([1.0, 1e-2, 3e-4])[None, :]
    x = (left @ np.linalg.qr(rng.normal(size=(N, P)))[0].T).T.astype(np.float32)
    vectors = np.asarray(fcc.principal_vectors(x, np.zeros(N, int), N, L, P))[0]
    chex.assert_trees_all_close(vectors.T @ vectors, np.eye(P), atol=1e-5)
    chex.assert_trees_all_close(np.abs(vectors.T @ left).diagonal(), np.array([1.0, 1e-2, 3e-4]), rtol=0.05)


def test_share_limits_the_vectors_of_each_class():
    x, y = _client(0)
    vectors = np.asarray(fcc.principal_vectors(x, y, 50, L, P, share=0.1))
    lengths = np.linalg.norm(vectors, axis=1).round(3)
    assert lengths.tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0], [0, 0, 0]]
    all_of_them = np.asarray(fcc.principal_vectors(x, y, 50, L, P))
    chex.assert_trees_all_close(vectors[0], all_of_them[0], atol=1e-5)
    hundredth = fcc.principal_vectors(np.ones((300, 5)) + np.eye(300, 5), np.zeros(300, int), 300, 1, 5, 0.01)
    assert int((np.abs(hundredth)[0].max(axis=0) > 0).sum()) == 3


def test_principal_vectors_of_raw_bytes_and_small_numbers():
    x, y = _client(1)
    x = np.nan_to_num(x)
    whole = np.round(x * 80).astype(np.uint8)
    expected = np.abs(fcc.principal_vectors(whole, y, 50, L, P))
    tiny = fcc.principal_vectors((whole * 1e-12).astype(np.float32), y, 50, L, P)
    chex.assert_trees_all_close(np.abs(tiny), expected, atol=1e-3)


@pytest.mark.parametrize("exponent", [-100, 120])
def test_principal_vectors_do_not_depend_on_the_unit_of_many_rows(exponent):
    """Their Gram matrix, the square of the unit, would leave float32."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(70, 90)).astype(np.float32), rng.integers(0, 2, 70)
    expected, found = (fcc.principal_vectors(np.ldexp(x, power), y, 70, 2, 3) for power in (0, exponent))
    np.testing.assert_array_equal(found, expected)
    assert (np.abs(np.linalg.norm(found, axis=1) - 1) < 1e-4).all()


def test_principal_vectors_run_under_vmap():
    clients = [_client(seed) for seed in range(2)]
    x = jnp.nan_to_num(jnp.stack([x for x, _ in clients]))
    y, number = jnp.stack([y for _, y in clients]), jnp.array([50, 0])
    stacked = np.asarray(jax.vmap(lambda x, y, n: fcc.principal_vectors(x, y, n, L, P))(x, y, number))
    alone = fcc.principal_vectors(*clients[0], 50, L, P)
    chex.assert_trees_all_close(np.abs(stacked[0]), np.abs(alone), atol=1e-4)
    assert (stacked[1] == 0.0).all()


def _subspaces(seed, dimensions):
    """f32[M, L, F, P] with the given number of columns used, and the class counts."""
    rng = np.random.default_rng(seed)
    vectors = np.zeros((M, L, F, P), np.float32)
    for client, label in np.ndindex(M, L):
        used = dimensions[client][label]
        vectors[client, label, :, :used] = np.linalg.qr(rng.normal(size=(F, P)))[0][:, :used]
    return vectors, 5 * (np.array(dimensions) > 0)


@pytest.mark.parametrize("reduction", ["smallest", "sum"])
def test_an_empty_subspace_is_at_a_right_angle_to_all(reduction):
    vectors = np.zeros((3, 1, 4, 2), np.float32)
    vectors[0, 0, :2] = vectors[1, 0, :2] = np.eye(2)
    angles = np.asarray(fcc.classwise_angles(vectors, np.ones((3, 1), np.int32), reduction))[..., 0]
    chex.assert_trees_all_close(angles, np.array([[0, 0, 90], [0, 0, 90], [90, 90, 0]]), atol=0.06)


@pytest.mark.parametrize("reduction", ["smallest", "sum"])
def test_classwise_angles_equal_scipy(reduction):
    rng = np.random.default_rng(0)
    dimensions = rng.integers(0, P + 1, size=(M, L))
    vectors, counts = _subspaces(0, dimensions)
    angles = np.asarray(fcc.classwise_angles(vectors, counts, reduction))
    chex.assert_shape(angles, chex.Dimensions(M=M, L=L)["MML"])
    chex.assert_trees_all_equal(angles, np.swapaxes(angles, 0, 1))
    for i, j, c in np.ndindex(M, M, L):
        if i == j:
            assert angles[i, j, c] == 0.0
            continue
        first, second = vectors[i, c][:, : dimensions[i, c]], vectors[j, c][:, : dimensions[j, c]]
        expected = reference.classwise_angle(first, second, counts[i, c], counts[j, c], reduction)
        chex.assert_trees_all_close(angles[i, j, c], expected, atol=0.05)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_classwise_angles_ignore_the_basis(seed):
    vectors, counts = _subspaces(seed, np.full((M, L), P))
    rng = np.random.default_rng(seed)
    rotated = np.empty_like(vectors)
    for client, label in np.ndindex(M, L):
        rotated[client, label] = vectors[client, label] @ np.linalg.qr(rng.normal(size=(P, P)))[0]
    for reduction in ("smallest", "sum"):
        expected = fcc.classwise_angles(vectors, counts, reduction)
        chex.assert_trees_all_close(fcc.classwise_angles(rotated, counts, reduction), expected, atol=0.1)
        chex.assert_trees_all_close(fcc.classwise_angles(-vectors, counts, reduction), expected, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("dimensions", [2, 4, 6])
def test_angles_of_nearly_parallel_and_orthogonal_subspaces(dimensions):
    """Against SciPy, for matrices that are rotated and such that LAPACK takes; 150 clients make two blocks."""
    rng = np.random.default_rng(dimensions)
    basis = np.linalg.qr(rng.normal(size=(F, 2 * dimensions)))[0]
    first, second = basis[:, :dimensions], basis[:, dimensions:]
    tilts = np.radians([0.0, 0.2, 5.0, 60.0, 89.9, 90.0])
    clients = [np.cos(tilt) * first + np.sin(tilt) * second for tilt in tilts]
    vectors = np.stack([clients[i % 6] for i in range(150)])[:, None].astype(np.float32)
    ones = np.ones((150, 1), int)
    smallest = np.asarray(fcc.classwise_angles(vectors, ones))[..., 0]
    total = np.asarray(fcc.classwise_angles(vectors, ones, "sum"))[..., 0]
    chex.assert_trees_all_equal(smallest, smallest.T)
    for i, j in ((0, 1), (0, 3), (140, 5), (2, 149), (144, 147), (0, 5), (130, 6)):
        expected = np.degrees(scipy.linalg.subspace_angles(clients[i % 6], clients[j % 6]))
        chex.assert_trees_all_close(smallest[i, j], expected.min(), atol=0.06)
        chex.assert_trees_all_close(total[i, j], expected.sum(), atol=0.06 * dimensions)


def test_joint_basis_spans_all_classes():
    rng = np.random.default_rng(0)
    vectors = np.stack([np.linalg.qr(rng.normal(size=(F, P)))[0] for _ in range(L)]).astype(np.float32)
    vectors[1] = vectors[0] @ np.linalg.qr(rng.normal(size=(P, P)))[0]
    vectors[2, :, 1:] = 0.0
    basis = np.asarray(fcc.joint_basis(vectors))
    assert basis.shape == (F, L * P)
    used = basis[:, np.abs(basis).max(axis=0) > 0]
    assert used.shape[1] == 2 * P + 1
    chex.assert_trees_all_close(used.T @ used, np.eye(2 * P + 1), atol=1e-5)
    chex.assert_trees_all_close(used @ (used.T @ vectors), vectors, atol=1e-5)


def test_classwise_angles_of_single_vectors():
    vectors, counts = _subspaces(1, np.ones((M, L), int))
    chex.assert_trees_all_close(
        fcc.classwise_angles(vectors[..., :1], counts), fcc.classwise_angles(vectors, counts), atol=0.05
    )
    same = np.repeat(vectors[:1], M, axis=0)
    chex.assert_trees_all_close(fcc.classwise_angles(same, counts), 0.0, atol=0.06)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 1.0]))
def test_data_dissimilarity_equals_the_definition(seed, delta):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4, size=(M, L)) ** 4
    angles = rng.uniform(0, 180, size=(M, M, L)).astype(np.float32)
    angles = 0.5 * (angles + np.swapaxes(angles, 0, 1))
    angles[np.arange(M), np.arange(M)] = 0.0
    expected = reference.data_dissimilarity(angles, counts, delta)
    chex.assert_trees_all_close(fcc.data_dissimilarity(angles, counts, delta), expected, rtol=1e-4, atol=1e-3)
    mask = np.arange(M) < 4
    spoiled = np.where((mask[:, None] & mask[None, :])[..., None], angles, 50.0)
    actual = np.asarray(fcc.data_dissimilarity(spoiled, counts, delta, mask=mask))
    expected = reference.data_dissimilarity(angles[:4, :4], counts[:4], delta)
    chex.assert_trees_all_close(actual[:4, :4], expected, rtol=1e-4, atol=1e-3)
    assert (actual[~mask] == 0.0).all()


def test_equal_class_sizes_weigh_one():
    counts, angles = np.full((M, L), 7), np.full((M, M, L), 40.0, np.float32)
    chex.assert_trees_all_close(fcc.data_dissimilarity(angles, counts), 40.0, rtol=1e-6)
    counts[:, 1:] = 0
    chex.assert_trees_all_close(fcc.data_dissimilarity(angles, counts), 40.0, rtol=1e-6)


def test_one_example_does_not_flatten_the_weights():
    """With ln(n + ε) one example against 600 would weigh 6·10⁶ and all other pairs the same."""
    counts = np.array([[1], [600], [60], [600]])
    angles = np.full((4, 4, 1), 10.0, np.float32)
    weights = np.asarray(fcc.data_dissimilarity(angles, counts)) / 10.0
    chex.assert_trees_all_close([weights[1, 3], weights[0, 1]], [0.5, 1.5], rtol=1e-5)
    assert weights[1, 2] > 0.55


def test_gradient_angles_equal_the_definition():
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(M, 40)).astype(np.float32)
    updates[1] = 3 * updates[0]
    updates[2] = -updates[0]
    angles = np.asarray(fcc.gradient_angles(updates))
    for i, j in np.ndindex(M, M):
        expected = reference.gradient_angle(*updates[[i, j]].astype(np.float64))
        chex.assert_trees_all_close(angles[i, j], expected, atol=0.06)
    updates[3] = 0.0
    angles = np.asarray(fcc.gradient_angles(updates, mask=np.arange(M) != 4))
    chex.assert_trees_all_close(angles[3], np.array([90, 90, 90, 0, 0, 90]), atol=1e-4)
    assert (angles[4] == 0.0).all()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 1.0]))
def test_proximity_equals_the_definition(seed, beta):
    rng = np.random.default_rng(seed)
    data, gradient = (100 * (m + m.T) for m in rng.random((2, M, M)).astype(np.float32))
    actual = np.asarray(fcc.proximity(data, gradient, beta))
    chex.assert_trees_all_close(actual, reference.proximity(data, gradient, beta), atol=1e-5)
    assert actual.min() >= 0.0
    assert actual.max() <= 1.0
    mask = np.arange(M) < 4
    spoiled = np.where(mask[:, None] & mask[None, :], data, np.nan)
    masked = np.asarray(fcc.proximity(spoiled, gradient, beta, mask=mask))
    expected = reference.proximity(data[:4, :4], gradient[:4, :4], beta)
    chex.assert_trees_all_close(masked[:4, :4], expected, atol=1e-5)
    assert (masked[~mask] == 0.0).all()


def test_proximity_of_equal_pairs_is_zero():
    equal = np.full((M, M), 90.0, np.float32)
    assert (np.asarray(fcc.proximity(equal, equal)) == 0.0).all()


def test_proximity_of_pairs_that_are_equal_up_to_rounding_is_zero():
    """All clients' data span one plane, in bases of their own: an arccosine of nearly 1 is not 0."""
    rng = np.random.default_rng(0)
    plane = np.linalg.qr(rng.normal(size=(F, 2)))[0]
    turned = [plane @ np.linalg.qr(rng.normal(size=(2, 2)))[0] for _ in range(M)]
    counts = np.full((M, 1), 9)
    data = fcc.data_dissimilarity(fcc.classwise_angles(np.stack(turned).astype(np.float32)[:, None], counts), counts)
    right = 90 * (1 - np.eye(M, dtype=np.float32))
    assert np.asarray(data).max() > 0.0
    assert (np.asarray(fcc.proximity(data, right)) == 0.0).all()


def test_angles_with_clients_that_do_not_count_may_be_anything():
    angles = np.array([[0, 30, np.nan], [30, 0, np.nan], [np.nan] * 3], np.float32)[..., None]
    mask = np.array([True, True, False])
    found = np.asarray(fcc.data_dissimilarity(angles, np.array([[8], [9], [5]]), mask=mask))
    assert found.tolist() == [[0, 30, 0], [30, 0, 0], [0, 0, 0]]


def test_label_groups_are_recovered_from_data_alone():
    """Steps 1–4 of FLAG on two groups with two classes each."""
    rng = np.random.default_rng(0)
    group = np.arange(M) % 2
    basis = rng.normal(size=(L, 2, F))
    vectors, counts = [], np.zeros((M, L), int)
    for client in range(M):
        y = rng.integers(2, size=N) + 2 * group[client]
        x = np.einsum("nr,nrf->nf", rng.normal(size=(N, 2)), basis[y]).astype(np.float32)
        counts[client] = np.bincount(y, minlength=L)
        vectors.append(fcc.principal_vectors(x, y, N, L, P))
    data = fcc.data_dissimilarity(fcc.classwise_angles(jnp.stack(vectors), counts), counts)
    gradient = fcc.gradient_angles(rng.normal(size=(M, 40)))
    labels = fcc.agglomerative(fcc.proximity(data, gradient, 0.9), threshold=0.5)
    chex.assert_trees_all_equal(labels, group)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fcc.principal_vectors(np.ones((3, 2)), np.zeros(3, int), 3, 1, 3), "2 features"),
        (lambda: fcc.principal_vectors(np.ones((3, 2)), np.zeros(3, int), 3, 0, 1), "num_classes is 0"),
        (lambda: fcc.principal_vectors(np.ones((3, 2)), np.full(3, 4), 3, 2, 1), "outside 0..1"),
        (lambda: fcc.principal_vectors(np.ones((3, 2)), np.zeros(3, int), 3, 1, 1, 0.0), "share is 0.0"),
        (lambda: fcc.principal_vectors(np.full((3, 2), np.nan), np.zeros(3, int), 3, 1, 1), "NaN"),
        (lambda: fcc.classwise_angles(np.ones((2, 1, 3, 1)), np.ones((2, 2), int)), "counts has shape"),
        (lambda: fcc.classwise_angles(np.ones((2, 1, 3, 1)), np.ones((2, 1), int), "mean"), "reduction"),
        (lambda: fcc.data_dissimilarity(np.ones((2, 3, 1)), np.ones((3, 1), int)), r"must be \[M, M, L\]"),
        (lambda: fcc.data_dissimilarity(np.ones((2, 2, 1)), np.ones((2, 1), int), 2.0), "delta is 2.0"),
        (lambda: fcc.proximity(np.ones((2, 2)), np.ones((3, 3))), "same clients"),
        (lambda: fcc.proximity(np.ones((2, 2)), np.ones((2, 2)), -1.0), "beta is -1.0"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@on_a_cpu("singular values are LAPACK's")
def test_singular_values_on_a_cpu_are_computed_one_matrix_after_the_other():
    """Catches calls of many at once, with which two devices wait for each other's threads for good."""
    matrices = jnp.asarray(np.random.default_rng(0).normal(size=(5, 5, 3, 2)), jnp.float32)
    found = jax.jit(dissimilarity._singular_values)
    text = found.lower(matrices).as_text()
    calls = [line for line in text.splitlines() if "lapack" in line and "custom_call" in line]
    assert calls
    assert not any(re.search(r"tensor<\d+x5x5xf32>", line) for line in calls)
    expected = np.linalg.svd(np.moveaxis(np.asarray(matrices), (0, 1), (2, 3)), compute_uv=False)
    np.testing.assert_allclose(np.moveaxis(np.asarray(found(matrices)), 0, 2), expected, rtol=1e-5)


@pytest.mark.parametrize("diagonal", [np.nan, np.inf, -1e9])
def test_proximity_ignores_the_diagonals(diagonal):
    data = np.array([[0, 10, 30], [10, 0, 20], [30, 20, 0]], np.float32)
    expected = fcc.proximity(data, 2 * data)
    spoilt = data + np.diag(np.full(3, diagonal, np.float32))
    np.testing.assert_array_equal(fcc.proximity(spoilt, 2 * spoilt), expected)


@on_a_cpu("elsewhere classes are not gathered")
def test_principal_vectors_of_a_flat_spectrum():
    """Of few examples in many features the decomposition is whole: iterations hardly part what lies so near."""
    x = np.random.default_rng(0).uniform(size=(100, 300)).astype(np.float32)
    y = np.arange(100) % 4
    for label, vectors in enumerate(np.asarray(fcc.principal_vectors(x, y, 100, 4, P))):
        expected = reference.principal_vectors(x, y, label, P)
        np.testing.assert_allclose(np.abs((vectors * expected).sum(0)), 1.0, atol=1e-3)


@on_a_cpu("elsewhere classes are not gathered")
@pytest.mark.parametrize("spread", [1e-2, 1e-3])
def test_principal_vectors_of_rows_that_hardly_differ(spread):
    """In float32 a Gram matrix does not hold what is below some thousandth of the mean."""
    x = (5 + spread * np.random.default_rng(0).normal(size=(100, 300))).astype(np.float32)
    y = np.arange(100) % 4
    for label, vectors in enumerate(np.asarray(fcc.principal_vectors(x, y, 100, 4, P))):
        expected = reference.principal_vectors(x, y, label, P)
        np.testing.assert_allclose(np.abs((vectors * expected).sum(0)), 1.0, atol=0.02)
