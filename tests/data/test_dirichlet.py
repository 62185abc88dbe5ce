import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_cluster.data import dirichlet, partition


def _rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def _labels(count: int, classes: int) -> np.ndarray:
    return _rng(count).integers(classes, size=count)


@given(
    rows=st.integers(20, 300),
    clients=st.integers(1, 10),
    alpha=st.sampled_from([0, 1e-3, 0.1, 1.0, 100.0, np.inf]),
    seed=st.integers(0, 5),
)
def test_by_class_uses_every_row_once_and_starves_nobody(rows, clients, alpha, seed):
    minimum = min(rows // clients, 4)
    parts = dirichlet.by_class(_rng(seed), _labels(rows, 4), clients, alpha, minimum)
    assert len(parts) == clients
    assert min(map(len, parts)) >= minimum
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(rows))


@given(
    rows=st.integers(20, 300),
    clients=st.integers(1, 10),
    alpha=st.sampled_from([0, 1e-3, 0.1, 1.0, 100.0, np.inf]),
    spare=st.booleans(),
)
def test_by_client_keeps_the_sizes_and_repeats_no_row(rows, clients, alpha, spare):
    sizes = partition.equal_sizes(rows // 2 if spare else rows, clients)
    parts = dirichlet.by_client(_rng(), _labels(rows, 4), sizes, alpha)
    np.testing.assert_array_equal([len(part) for part in parts], sizes)
    taken = np.concatenate(parts)
    assert len(np.unique(taken)) == len(taken)
    assert taken.min() >= 0
    assert taken.max() < rows


def _proportions(labels: np.ndarray, parts: partition.Rows) -> np.ndarray:
    counts = np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])
    return counts / counts.sum(axis=1, keepdims=True)


def test_by_client_at_zero_gives_one_class():
    labels = _labels(20_000, 10)
    parts = dirichlet.by_client(_rng(), labels, np.full(20, 100), 0)
    shares = _proportions(labels, parts)
    np.testing.assert_array_equal(shares.max(axis=1), 1.0)
    assert len(np.unique(shares.argmax(axis=1))) > 3


def test_by_client_at_infinity_gives_the_frequencies():
    labels = np.repeat([0, 1, 2], [20_000, 60_000, 20_000])
    parts = dirichlet.by_client(_rng(), labels, np.full(10, 5000), np.inf)
    # Four standard deviations of a multinomial draw of 5 000.
    np.testing.assert_allclose(_proportions(labels, parts), [[0.2, 0.6, 0.2]] * 10, atol=4 * np.sqrt(0.24 / 5000))


def test_by_client_has_the_variance_of_dirichlet():
    # Var q_l = p_l(1 − p_l)/(α + 1) for q ~ Dir(α·p), plus p(1 − p)α/(α + 1)/n for drawing n rows from it.
    alpha, size, clients = 3.0, 100, 400
    labels = np.repeat([0, 1], [150_000, 50_000])
    parts = dirichlet.by_client(_rng(), labels, np.full(clients, size), alpha)
    share = _proportions(labels, parts)[:, 1]
    expected = 0.25 * 0.75 * (1 + alpha / size) / (alpha + 1)
    assert share.mean() == pytest.approx(0.25, abs=4 * np.sqrt(expected / clients))
    assert share.var() == pytest.approx(expected, rel=0.25)


def test_by_client_takes_an_alpha_for_each():
    labels = _labels(50_000, 10)
    alphas = np.array([0.0] * 10 + [1e6] * 10)
    largest = _proportions(labels, dirichlet.by_client(_rng(), labels, np.full(20, 500), alphas)).max(axis=1)
    assert largest[:10].min() == 1.0
    assert largest[10:].max() < 0.2


def test_by_class_at_the_extremes():
    labels = _labels(10_000, 10)
    alike = _proportions(labels, dirichlet.by_class(_rng(), labels, 5, np.inf, 2))
    np.testing.assert_allclose(alike, 0.1, atol=0.02)
    parts = dirichlet.by_class(_rng(), labels, 5, 0, 0)
    owners = np.array([np.bincount(labels[part], minlength=10) > 0 for part in parts])
    np.testing.assert_array_equal(owners.sum(axis=0), 1)


def test_by_class_has_the_variance_of_dirichlet():
    # A client's share of a class has mean 1/M and variance (M − 1)/(M²(αM + 1)).
    labels, clients, alpha = np.repeat(np.arange(300), 1000), 4, 0.5
    parts = dirichlet.by_class(_rng(), labels, clients, alpha, 0)
    share = np.array([np.bincount(labels[part], minlength=300) / 1000 for part in parts])
    assert share.var() == pytest.approx((clients - 1) / (clients**2 * (alpha * clients + 1)), rel=0.1)


def test_by_client_at_zero_uses_up_every_class_before_it_mixes():
    # 4 classes × 100 rows hold 4 × 3 clients of 30 rows with a single class each.
    labels = np.repeat(np.arange(4), 100)
    for seed in range(20):
        parts = dirichlet.by_client(_rng(seed), labels, np.full(12, 30), 0)
        np.testing.assert_array_equal(_proportions(labels, parts).max(axis=1), 1.0)


def test_by_client_lets_those_draw_first_who_need_every_class():
    labels = _labels(2000, 10)
    alphas = np.array([0.0] * 9 + [np.inf])
    uniform = _proportions(labels, dirichlet.by_client(_rng(), labels, np.full(10, 200), alphas))[-1]
    np.testing.assert_allclose(uniform, 0.1, atol=4 * np.sqrt(0.09 / 200))


def test_by_class_keeps_to_the_owners():
    labels = _labels(1000, 4)
    owners = np.array([[1, 1, 0, 0]] * 3 + [[0, 1, 1, 0]] * 3, bool)
    parts = dirichlet.by_class(_rng(), labels, 6, 0.01, 20, owners)
    for part, owned in zip(parts, owners, strict=True):
        assert len(part) >= 20
        assert set(np.unique(labels[part])) <= set(np.flatnonzero(owned))
    taken = np.sort(np.concatenate(parts))
    np.testing.assert_array_equal(taken, np.flatnonzero(labels != 3))


def test_by_class_refuses_what_cannot_be_shared():
    with pytest.raises(ValueError, match="3 clients share 10 examples, too few for 4 each"):
        dirichlet.by_class(_rng(), _labels(10, 2), 3, 1.0, 4)
