"""Clients that stand out in a finished run: the faulty and nobody else, by what they send, hold and show."""

import functools

import jax
import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster import faults, parallel
from fedjax_cluster.simulation.outliers import Buckets, Outliers, cluster_medians, shared_rows, sketch
from fedjax_cluster.types import ClientData
from tests.federations import blobs

CLIENTS = 24
LOCAL = fc.local.sgd(0.5, batch_size=16, steps=10)


@functools.cache
def digits(angles=(0,)):
    return fc.data.scenarios.rotated(fc.data.digits(), clients=CLIENTS, angles=angles, seed=0)


@functools.cache
def run(fault=None, angles=(0,), **options):
    method = fc.algorithms.fedavg(fc.nn.linear(), local=LOCAL)
    if len(angles) > 1:
        method = fc.algorithms.ifca(fc.nn.linear(), clusters=len(angles), local=LOCAL)
    return fc.simulate(method, digits(angles), rounds=6, eval_every=6, fault=fault, progress=False, **options)


def of(**more):
    """Ten clients of whom none stands out."""
    nobody = {"moves": np.zeros(10, np.int32), "last_move": np.full(10, -1), "rounds": 20, "copies": np.zeros(10)}
    return Outliers(**{**nobody, "twin": np.full(10, -1), **more})


@pytest.mark.slow
def test_without_a_fault_nobody_is_named():
    assert run().outliers.reasons() == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (faults.sign_flip(0.2, scale=1.0), "like no cluster's"),
        (faults.scaled(0.2, factor=0.1), "times as long"),
        pytest.param(faults.label_flip(0.2), "like no cluster's", marks=pytest.mark.slow),
        pytest.param(faults.scaled(0.2, factor=10.0), "times as long", marks=pytest.mark.slow),
        pytest.param(faults.nan_updates(0.2), "not finite", marks=pytest.mark.slow),
        pytest.param(faults.stragglers(0.2, steps=1), "times as long", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_faulty_are_named_and_nobody_else(fault, why):
    found = run(fault)
    reasons = found.outliers.reasons()
    assert set(reasons) == set(np.flatnonzero(found.faulty))
    assert all(why in "; ".join(told) for told in reasons.values())


@pytest.mark.slow
def test_nobody_is_named_for_a_round_that_chance_lost():
    assert run(faults.drop_out(0.3)).outliers.reasons() == {}


@pytest.mark.slow
def test_updates_of_a_few_clients_are_not_compared():
    few = fc.data.scenarios.rotated(fc.data.digits(), clients=7, angles=(0,), seed=0)
    method = fc.algorithms.fedavg(fc.nn.linear(), local=LOCAL)
    found = fc.simulate(method, few, rounds=1, progress=False, fault=faults.sign_flip(0.2)).outliers
    assert found.length is None
    assert found.reasons() == {}


@pytest.mark.slow
def test_who_holds_copies_is_named_with_whom():
    found = run(faults.colluders(0.2, group=1), angles=(0, 180))
    outliers, train = found.outliers, found.federation.train
    reasons = outliers.reasons()
    assert set(np.flatnonzero(found.faulty)) <= set(reasons)
    # The other of a pair is named as well: rows do not tell who copied.
    for client in reasons:
        twin = outliers.twin[client]
        np.testing.assert_array_equal(np.sort(train.x[client], 0), np.sort(train.x[twin], 0))
        assert f"client {twin}" in reasons[client][0]


@pytest.mark.slow
def test_rows_that_are_only_shown_are_looked_at():
    found = run(faults.schism(0.1, group=0), angles=(0, 180))
    reasons = found.outliers.reasons()
    assert set(reasons) == set(np.flatnonzero(found.faulty))
    assert all("rows that it shows" in told[0] for told in reasons.values())


@pytest.mark.slow
def test_devices_change_nothing():
    method = fc.algorithms.fedavg(fc.nn.linear(), local=LOCAL)
    one, two = (
        fc.simulate(
            method,
            digits(),
            rounds=1,
            progress=False,
            fault=faults.sign_flip(0.2),
            mapping=parallel.client_mapping("scan", devices=jax.devices()[:devices]),
        ).outliers
        for devices in (1, 2)
    )
    for mine, other in zip(one, two, strict=True):
        if mine is not None:
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("moves", "last", "named"),
    [
        ([0] * 9 + [1], 8, []),  # once, as groups are found
        ([0] * 9 + [1], 15, [9]),  # late, when nobody else does
        ([0] * 9 + [5], 8, [9]),  # again and again
        ([1] * 9 + [2], 8, []),
        ([3, 4, 5, 6, 7, 3, 4, 5, 6, 8], 8, []),  # as others do
        ([1] * 10, 15, []),  # all late: a split
    ],
)
def test_moves_count_where_others_have_settled(moves, last, named):
    moves = np.array(moves, np.int32)
    assert list(of(moves=moves, last_move=np.where(moves > 0, last, -1)).reasons()) == named


def test_copies_are_nothing_where_they_are_usual():
    assert of(copies=np.full(10, 0.9)).reasons() == {}
    some = np.array([0.6, 0.3, *np.zeros(8)])
    assert list(of(copies=some).reasons()) == [0]


def test_a_run_that_diverged_is_nobodys_fault():
    length = np.ones(10, np.float32)
    length[:2] = np.nan
    assert list(of(length=length).reasons()) == [0, 1]
    length[:6] = np.nan
    assert of(length=length).reasons() == {}


def test_more_rows_make_longer_updates():
    rows = np.array([10, 11, 12, 13, 14, 15, 16, 18, 20, 200])
    length = (0.1 * rows).astype(np.float32)
    assert list(of(length=length).reasons()) == [9]
    assert of(length=length, examples=rows).reasons() == {}
    # A step more for one row more is not seen: it is longer than usual with so many rows, not than the median.
    stepped = np.where(rows == 11, 2.1 * length, length)
    assert of(length=stepped, examples=rows).reasons() == {}
    # Of as many rows as others, and of many.
    assert list(of(length=np.where(rows == 12, 50 * length, length), examples=rows).reasons()) == [2]
    assert list(of(length=np.where(rows == 200, 10 * length, length), examples=rows).reasons()) == [9]
    # Nobody sends anything.
    assert of(length=np.zeros(10, np.float32), examples=rows).reasons() == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_of_unequal_clients_nobody_is_named(seed):
    skewed = fc.data.scenarios.size_skew(fc.data.digits(), clients=40, seed=seed)
    for local in (fc.local.sgd(0.1, batch_size=10, epochs=1), fc.local.sgd(0.5, batch_size=16, epochs=5)):
        method = fc.algorithms.fedavg(fc.nn.linear(), local=local)
        assert fc.simulate(method, skewed, rounds=2, eval_every=2, progress=False).outliers.reasons() == {}


def test_whoever_learns_like_another_cluster_is_named():
    cosine = np.full(10, 0.8) + np.arange(10) / 100
    own = cosine.copy()
    own[3] = 0.1
    cluster, nearest = np.repeat([0, 1], 5), np.repeat([0, 1], 5)
    nearest[3] = 1
    given = {"length": np.ones(10), "nearest": cosine, "nearest_cluster": nearest, "cluster": cluster, "own": own}
    reasons = of(**given).reasons()
    assert list(reasons) == [3]
    assert "like cluster 1's, cosine 0.83, and not like its own cluster's, 0.10" in reasons[3][0]
    # Among clients that agree in nothing, none is far.
    assert of(**{**given, "nearest": np.linspace(-0.1, 0.1, 10), "own": np.linspace(-0.1, 0.1, 10)}).reasons() == {}


def test_shared_rows_by_brute_force():
    """Floats that end in zeros, rows that differ in the target alone, and padding that is equal everywhere."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, (9, 7, 3)).astype(np.float32)
    y, number = rng.integers(0, 2, (9, 7)).astype(np.int32), rng.integers(0, 8, 9).astype(np.int32)
    rows = [[(*x[i, j], y[i, j]) for j in range(number[i])] for i in range(9)]
    share, twin = shared_rows(ClientData(x, y, number))
    for i in range(9):
        others = [set(rows[j]) if j != i else set() for j in range(9)]
        expected = np.mean([any(row in other for other in others) for row in rows[i]]) if rows[i] else 0
        np.testing.assert_allclose(share[i], expected, rtol=1e-6)
    x = rng.normal(size=(9, 7, 3)).astype(np.float32)
    x[4, :5], y[4, :5] = x[2, 1:6], y[2, 1:6]
    x[6, 0] = x[4, 6]
    share, twin = shared_rows(ClientData(x, y, np.full(9, 7, np.int32)))
    np.testing.assert_allclose(share[[2, 4]], [5 / 7, 5 / 7 + (y[6, 0] == y[4, 6]) / 7], rtol=1e-6)
    assert twin[[2, 4]].tolist() == [4, 2]


def test_clusters_of_three_have_a_median():
    vectors = np.random.default_rng(1).normal(size=(11, 70)).astype(np.float32)
    labels = np.array([0, 0, 0, 1, 1, 3, 3, 3, 3, -1, -1])
    found, clusters = cluster_medians(vectors, labels)
    assert clusters.tolist() == [0, 3]
    for centre, rows in zip(found, (vectors[:3], vectors[5:9]), strict=True):
        middle = np.sort(rows, 0)[[1, 1] if len(rows) == 3 else [1, 2]].mean(0)
        np.testing.assert_allclose(centre, middle / np.linalg.norm(middle), rtol=1e-5, atol=1e-6)


def test_sketches_keep_cosines():
    rng = np.random.default_rng(2)
    vectors = rng.normal(size=(30, 20_000)).astype(np.float32) + 0.5 * rng.normal(size=20_000).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    buckets = Buckets.drawn(20_000, 1024)
    small = np.asarray(jax.vmap(lambda vector: sketch(vector, buckets, 1024))(vectors))
    assert np.abs(small @ small.T - vectors @ vectors.T).max() < 5 / np.sqrt(1024)
    np.testing.assert_array_equal(sketch(vectors[0, :9], Buckets.drawn(9, 16), 16)[:9], vectors[0, :9])


@pytest.mark.parametrize(
    "rate", [0.5, fc.optimizers.schedule("linear_schedule", init_value=0.0, end_value=0.5, transition_steps=4)]
)
def test_updates_are_compared_where_the_rate_is_largest(rate):
    """At the rate of a warm-up's first round, 0, nobody went anywhere, and nobody stood out."""
    method = fc.algorithms.fedavg(fc.nn.linear(), local=fc.local.sgd(rate, batch_size=16, steps=2))
    result = fc.simulate(method, blobs(), rounds=6, eval_every=6, progress=False)
    assert (result.outliers.length > 0).all()
