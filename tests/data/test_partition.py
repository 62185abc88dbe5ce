import chex
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_cluster.data import partition


def _rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(total=st.integers(0, 1000), parts=st.integers(1, 60))
def test_equal_sizes_add_up_and_differ_by_one(total, parts):
    sizes = partition.equal_sizes(total, parts)
    assert len(sizes) == parts
    assert sizes.sum() == total
    assert sizes.max() - sizes.min() <= 1


@given(clients=st.integers(1, 60), groups=st.integers(1, 60))
def test_groups_are_equal_and_contiguous(clients, groups):
    if clients < groups:
        with pytest.raises(ValueError, match=f"at least {groups} clients"):
            partition.assign_groups(clients, groups)
        return
    group = partition.assign_groups(clients, groups)
    assert group.dtype == np.int32
    sizes = np.bincount(group, minlength=groups)
    assert sizes.max() - sizes.min() <= 1
    assert (np.diff(group) >= 0).all()


def test_split_keeps_one_row_on_either_side():
    rows = [np.array([5, 6]), np.arange(10, 20), np.arange(100, 203)]
    train, test = partition.split(_rng(), rows, 0.3)
    assert [len(part) for part in test] == [1, 3, 31]
    for whole, left, right in zip(rows, train, test, strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate([left, right])), whole)
    assert [len(part) for part in partition.split(_rng(), rows, 0.001)[1]] == [1, 1, 1]
    assert [len(part) for part in partition.split(_rng(), rows, 0.999)[0]] == [1, 1, 1]


def test_split_names_the_client_that_is_too_small():
    with pytest.raises(ValueError, match="Client 1 has 1 example,"):
        partition.split(_rng(), [np.arange(3), np.arange(1)], 0.3)


@given(sizes=st.lists(st.integers(0, 8), min_size=1, max_size=8))
def test_stack_pads_with_zeros_only(sizes):
    total = sum(sizes)
    x = np.arange(1, total + 1, dtype=np.uint8)[:, None].repeat(2, axis=1)
    data = partition.stack(x, x[:, 0].astype(np.int32), partition.divide(np.arange(total), sizes))
    dims = chex.Dimensions(M=len(sizes), N=max(sizes), F=2)
    chex.assert_shape(list(data), [dims["MNF"], dims["MN"], dims["M"]])
    assert [array.dtype for array in data] == [np.uint8, np.int32, np.int32]
    np.testing.assert_array_equal(data.num_examples, sizes)
    start = 1
    for client, size in enumerate(sizes):
        np.testing.assert_array_equal(data.y[client, :size], np.arange(start, start + size))
        assert not data.x[client, size:].any()
        assert not data.y[client, size:].any()
        start += size


def test_generators_are_independent_and_reproducible():
    draws = [[rng.random() for rng in partition.generators(seed, 3)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1]
    assert len({*draws[0], *draws[2]}) == 6
    assert partition.generators(0, 1)[0].random() == draws[0][0]


@pytest.mark.parametrize("seed", [-1, 1.5, "0", True, None])
def test_generators_refuse(seed):
    with pytest.raises(ValueError, match="seed="):
        partition.generators(seed, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, 0), "clients=0"),
        ((100, -3), "clients=-3"),
        ((100, 2.0), "clients=2.0"),
        ((100, 51), "at most 50 clients"),
        ((100, 10, 11), "at most 10 each, or at most 9 clients"),
        ((100, 10, 1), "examples_per_client=1"),
        ((100, 10, 2.5), "examples_per_client=2.5"),
    ],
)
def test_client_sizes_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        partition.client_sizes(*arguments)


@pytest.mark.parametrize("fraction", [0, 1, -0.3, 30, float("nan")])
def test_test_fraction_must_leave_something(fraction):
    with pytest.raises(ValueError, match="test_fraction"):
        partition.split(_rng(), [np.arange(4)], fraction)


@given(
    clients=st.integers(1, 50), shares=st.lists(st.one_of(st.just(0.0), st.floats(0.01, 10)), min_size=1, max_size=5)
)
def test_share_clients_adds_up(clients, shares):
    try:
        counts = partition.share_clients(clients, shares, "parts")
    except ValueError:
        exact = clients * np.array(shares) / max(sum(shares), 1e-9)
        assert sum(shares) == 0 or (exact[np.array(shares) > 0] < 1).any()
        return
    assert counts.sum() == clients
    np.testing.assert_array_equal(counts > 0, np.array(shares) > 0)
    assert np.abs(counts - clients * np.array(shares) / sum(shares)).max() < 1


def test_share_clients_is_exact_where_it_can_be():
    np.testing.assert_array_equal(partition.share_clients(100, (0.4, 0.3, 0.3), "parts"), [40, 30, 30])
    np.testing.assert_array_equal(partition.share_clients(10, (10, 0, 90), "parts"), [1, 0, 9])


@pytest.mark.parametrize("shares", [(), (0, 0), (1, -1), (1, float("inf"))])
def test_share_clients_refuses(shares):
    with pytest.raises(ValueError, match="shares="):
        partition.share_clients(10, shares, "parts")
