"""Shards of sorted labels, and clients of unequal sizes."""

import numpy as np
import pytest

from fedjax_cluster.data import digits, scenarios
from fedjax_cluster.data.scenarios.skews import _sizes
from fedjax_cluster.types import DatasetInfo, Examples


def sizes_of(federation):
    return federation.train.num_examples + federation.test.num_examples


def labels_of(federation):
    """The sorted labels of each client, training and test rows together."""
    parts = (federation.train, federation.test)
    return [
        np.sort(np.concatenate([part.y[client, : part.num_examples[client]] for part in parts]))
        for client in range(len(federation.train.x))
    ]


def balanced(classes=10, each=60):
    y = np.tile(np.arange(classes, dtype=np.int32), each)
    return Examples(np.arange(len(y), dtype=np.float32)[:, None], y, DatasetInfo("balanced", (1,), classes))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shards_are_pieces_of_the_sorted_labels(count):
    """600 rows of ten labels, 20 clients: every shard of 30/s rows lies within one label, as in the paper."""
    owned = labels_of(scenarios.shards(balanced(), clients=20, shards_per_client=count))
    assert [len(labels) for labels in owned] == [30] * 20
    for labels in owned:
        # A label comes in whole shards.
        counts = np.bincount(labels, minlength=10)
        assert (counts % (30 // count) == 0).all()
        assert (counts > 0).sum() <= count


def test_shards_are_dealt_at_random():
    owned = labels_of(scenarios.shards(balanced(), clients=20))
    several = [len(np.unique(labels)) for labels in owned]
    assert sum(number == 2 for number in several) >= 14  # of 20 clients about one gets the same label twice
    first = [labels[0] for labels in owned]
    assert first != sorted(first)


def test_shards_keep_sizes_that_they_do_not_divide():
    federation = scenarios.shards(digits(), clients=7, shards_per_client=4, examples_per_client=15)
    np.testing.assert_array_equal(sizes_of(federation), 15)
    assert scenarios.shards(digits(), clients=7).group is None


def test_a_client_has_no_more_shards_than_examples():
    assert sizes_of(scenarios.shards(balanced(each=6), clients=20, shards_per_client=3)).sum() == 60
    with pytest.raises(ValueError, match="shards_per_client is 4, but clients have 3 examples"):
        scenarios.shards(balanced(each=6), clients=20, shards_per_client=4)


def test_log_normal_sizes_have_their_sigma():
    federation = scenarios.size_skew(balanced(each=20_000), clients=400, sigma=0.8, min_examples=2)
    logs = np.log(sizes_of(federation))
    assert np.std(logs) == pytest.approx(0.8, rel=0.12)
    assert np.mean((logs - logs.mean()) ** 3) / np.std(logs) ** 3 == pytest.approx(0, abs=0.4)


def test_dirichlet_sizes_have_their_variance():
    """Shares of Dirichlet(α, …, α) have the variance (1/M)(1 − 1/M)/(Mα + 1)."""
    federation = scenarios.size_skew(balanced(each=20_000), clients=400, alpha=2.0, min_examples=2)
    shares = sizes_of(federation) / 200_000
    assert np.var(shares) == pytest.approx((1 / 400) * (1 - 1 / 400) / 801, rel=0.25)


def test_sizes_say_nothing_of_labels():
    """Every client, large or small, has the labels in equal shares, up to chance."""
    federation = scenarios.size_skew(balanced(each=2000), clients=12, sigma=1.0)
    sizes = sizes_of(federation)
    assert sizes.max() > 4 * sizes.min()
    for labels in labels_of(federation):
        expected = len(labels) / 10
        assert ((np.bincount(labels, minlength=10) - expected) ** 2 / expected).sum() < 40  # χ² of 9 degrees: 1e-5


@pytest.mark.parametrize("arguments", [{"sigma": 0.0}, {"alpha": float("inf")}])
def test_limits_are_equal_sizes(arguments):
    np.testing.assert_array_equal(sizes_of(scenarios.size_skew(balanced(), clients=12, **arguments)), 50)


def test_the_smallest_have_their_least_and_none_is_lost():
    for arguments in ({"sigma": 5.0}, {"alpha": 0.0}, {"alpha": 0.01}, {"sigma": 100.0}):
        sizes = sizes_of(scenarios.size_skew(balanced(), clients=12, min_examples=20, **arguments))
        assert sizes.min() == 20
        assert sizes.sum() == 600
    np.testing.assert_array_equal(_sizes(10, np.array([1.0, 1.0, 1.0]), 2), [4, 3, 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sigma": 1.0, "alpha": 1.0}, "leave the other out"),
        ({"min_examples": 51}, "too few for 51 each"),
        ({"sigma": -1.0}, "sigma is -1"),
        ({"min_examples": 1}, "min_examples is 1"),
    ],
)
def test_sizes_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenarios.size_skew(balanced(), clients=12, **arguments)
