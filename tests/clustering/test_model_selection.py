import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_cluster.clustering as fcc

KEY = jax.random.key(0)


def _blobs(num_clusters, seed=0, size=60, spread=0.15):
    rng = np.random.default_rng(seed)
    centers = np.array([[0, 0], [3, 0], [0, 3], [3, 3], [6, 1]], np.float32)[:num_clusters]
    return (centers[np.arange(size) % num_clusters] + spread * rng.normal(size=(size, 2))).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gap", "elbow", "silhouette"])
@pytest.mark.parametrize("num_clusters", [2, 4])
def test_finds_well_separated_clusters(method, num_clusters):
    assert fcc.estimate_num_clusters(KEY, _blobs(num_clusters), 6, method) == num_clusters


def test_gap_statistic_can_answer_one():
    rng = np.random.default_rng(0)
    assert fcc.estimate_num_clusters(KEY, rng.normal(size=(60, 2)), 6, "gap") == 1
    assert fcc.estimate_num_clusters(KEY, np.ones((60, 2)), 6, "gap") == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gap", "elbow", "silhouette"])
@pytest.mark.parametrize("unit", [2.0**-90, 2.0**90])
def test_the_unit_of_features_does_not_matter(method, unit):
    features = np.float32(_blobs(3)) * np.float32(unit)
    assert fcc.estimate_num_clusters(KEY, features, 6, method) == 3


@pytest.mark.parametrize("method", ["gap", "elbow", "silhouette"])
def test_masked_clients_do_not_count(method):
    """40 of 60 clients in two of the four blobs: the other two must not be seen."""
    features = _blobs(4)
    mask = np.arange(60) % 4 < 2
    spoiled = np.where(mask[:, None], features, np.nan)
    assert fcc.estimate_num_clusters(KEY, spoiled, 6, method, mask=mask) == 2


def test_rank_before_the_largest_gap():
    """CFL-GP, Appendix G: eight angles in four pairs have gaps after 4 and after 8."""
    rng = np.random.default_rng(0)
    pairs = np.repeat(rng.normal(size=(4, 400)), 2, axis=0)
    angles = pairs + 0.5 * rng.normal(size=(8, 400))
    profile = np.repeat(angles, 8, axis=0) + 0.15 * rng.normal(size=(64, 400))
    singular_values = fcc.profile_embedding(profile, 20).singular_values
    assert fcc.largest_gaps(singular_values, 2).tolist() == [4, 8]
    assert fcc.estimate_num_clusters(KEY, singular_values, 12) == 4
    assert fcc.estimate_num_clusters(KEY, singular_values, 3) <= 3
    # More may be allowed than gaps exist, as where there are few clients.
    assert fcc.estimate_num_clusters(KEY, singular_values[:5], 10) == 4


def test_largest_gaps_in_order():
    values = jnp.array([10.0, 9.0, 5.0, 4.0, 1.0, 0.5])
    assert fcc.largest_gaps(values, 5).tolist() == [2, 4, 1, 3, 5]
    assert jax.jit(lambda v: fcc.largest_gaps(v, 2))(values).tolist() == [2, 4]


@pytest.mark.parametrize(
    ("y", "index"),
    [
        ([10, 4, 1, 0.8, 0.6], 2),
        ([0.2, 0.5, 0.9, 0.91, 0.92], 2),
        ([5, 4, 3, 2, 1], 0),
        ([1, 1, 1, 1, 1], 0),
        ([4, 1, 0, 1, 4], 2),
        ([0.3, 0.2, 0.1, 0.1, 0.1], 2),
    ],
)
def test_elbow_is_farthest_from_the_chord(y, index):
    x = np.linspace(1.0, 0.2, 5)
    assert int(fcc.elbow(x, np.array(y))) == index
    assert int(fcc.elbow(3 * x - 7, 1e-3 * np.array(y))) == index
    for unit in (2.0**-120, 2.0**120):
        assert int(fcc.elbow(x, np.float32(unit) * np.array(y))) == index
        assert int(fcc.elbow(np.float32(unit) * x, np.array(y))) == index
        assert int(fcc.elbow(np.float32(unit) * x, np.float32(unit) * np.array(y))) == index


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fcc.estimate_num_clusters(KEY, _blobs(2), 3, "bic"), "method is 'bic'"),
        (lambda: fcc.estimate_num_clusters(KEY, np.arange(5)[::-1], 3, "elbow"), "only have gaps"),
        (lambda: fcc.estimate_num_clusters(KEY, np.arange(5), 3), "descending"),
        (lambda: fcc.estimate_num_clusters(KEY, _blobs(2), 61), "only 60 clients"),
        (lambda: fcc.estimate_num_clusters(KEY, np.full((5, 2), np.nan), 3), "NaN or infinite"),
        (lambda: jax.jit(lambda x: fcc.estimate_num_clusters(KEY, x, 3))(_blobs(2)), "outside jit"),
        (lambda: fcc.largest_gaps(np.ones(3), 3), "only 2 gaps"),
        (lambda: fcc.elbow(np.ones(3), np.ones(2)), "as many of both"),
        (lambda: fcc.elbow(np.ones(3), np.ones(3)), "vertical"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_singular_values_have_no_mask():
    with pytest.raises(ValueError, match="mask is given with singular values"):
        fcc.estimate_num_clusters(jax.random.key(0), jnp.array([3.0, 2.0, 1.0]), 2, mask=[True])


def test_an_elbow_is_no_end_of_the_curve():
    points = jnp.concatenate([jnp.zeros((5, 1)), 9 + 0.01 * jnp.arange(5.0)[:, None]])
    found = [fcc.estimate_num_clusters(jax.random.key(0), points, most, method="elbow") for most in (2, 3, 4)]
    assert found == [1, 2, 2]


@pytest.mark.parametrize(
    ("y", "away"), [(np.exp(-np.arange(10_000.0) / 500), 5), ((1 - np.arange(1000) / 999) ** 2, 1)]
)
def test_an_elbow_of_a_smooth_curve_is_its_farthest_point(y, away):
    """Ten places before it, and two, are points that differ from it by more than rounding."""
    x = np.arange(float(len(y)))
    expected = np.argmax(np.abs(y - y[0] - (y[-1] - y[0]) / (x[-1] - x[0]) * (x - x[0])))
    assert abs(int(fcc.elbow(x, y)) - expected) <= away
