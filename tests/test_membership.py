"""Clients that join and leave during a run."""

import functools

import jax
import numpy as np
import pytest

from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import cfl, fedavg, ifca
from fedjax_cluster.simulation import simulate
from fedjax_cluster.types import Membership
from tests.federations import blobs

CHANGES = (Membership(3, join=(6,)), Membership(5, join=(7, 6), leave=(2,)), Membership(4, leave=(6,)))
FULL = local.sgd(0.3, batch_size=None, steps=1)


@functools.cache
def method():
    return ifca(nn.linear(), clusters=2, local=FULL)


@functools.cache
def whole():
    return simulate(method(), blobs(), rounds=8, eval_every=8, membership=CHANGES)


def test_the_cohorts_follow_the_schedule():
    """Clients 6 and 7 start absent; 6 joins, leaves and comes back."""
    result = whole()
    assert result.history["num_clients"].tolist() == [6, 6, 6, 7, 6, 7, 7, 7]
    assert np.asarray(result.state.clients.present).tolist() == [True, True, False, True, True, True, True, True]
    assert result.labels[2] == -1
    assert (result.labels[[6, 7]] >= 0).all()


def test_those_who_are_there_are_evaluated():
    federation = blobs(ragged=False)
    test = federation.test
    wrong = test._replace(y=np.where(np.arange(8)[:, None] == 2, (test.y + 1) % 3, test.y).astype(np.int32))
    figures = [
        simulate(method(), federation._replace(test=own), rounds=8, eval_every=8, membership=CHANGES).summary
        for own in (test, wrong)
    ]
    assert figures[0]["accuracy"] == figures[1]["accuracy"]


@pytest.mark.parametrize("stop", [3, 5, 6])
def test_a_resumed_run_gives_the_same(tmp_path, stop):
    """Also where it was stopped just before somebody joins."""
    simulate(method(), blobs(), rounds=stop, eval_every=8, membership=CHANGES, run_dir=tmp_path / "run")
    resumed = simulate(method(), blobs(), rounds=8, eval_every=8, membership=CHANGES, run_dir=tmp_path / "run")
    for one, other in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(whole().state), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(resumed.history["num_clients"], whole().history["num_clients"])


def test_another_schedule_is_another_experiment(tmp_path):
    simulate(method(), blobs(), rounds=2, eval_every=8, membership=CHANGES, run_dir=tmp_path / "run")
    for other in ((), CHANGES[:1]):
        with pytest.raises(ValueError, match="membership is"):
            simulate(method(), blobs(), rounds=2, eval_every=8, membership=other, run_dir=tmp_path / "run")


def test_a_newcomer_is_led_down_the_parameter_tree():
    """It joins after the splits, takes part in the next round, and its updates count from then on."""
    algorithm = cfl(
        nn.linear(),
        clusters=3,
        local=local.sgd(0.3, batch_size=None, steps=2),
        epsilon_1=0.3,
        epsilon_2=0.3,
        gamma_max=0.5,
        first_round=4,
    )
    federation = blobs(clients=12, groups=3)
    late = (Membership(15, join=(9, 10, 11)),)
    result = simulate(algorithm, federation, rounds=17, eval_every=17, membership=late)
    assert result.history["num_clusters"][14] == 3
    assert result.history["num_clients"].tolist() == [9] * 15 + [12] * 2
    assert result.summary["adjusted_rand_index"] == 1.0
    assert np.asarray(result.state.clients.seen).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([Membership(2, join=(8,))], "names client 8"),
        ([Membership(-1, leave=(0,))], "names round -1"),
        ([Membership(2, leave=(1,)), Membership(3, leave=(1,))], "client 1 cannot leave before round 3"),
        ([Membership(2, join=(1,)), Membership(3, join=(1,))], "client 1 cannot join before round 3: it is there"),
        ([Membership(1, leave=tuple(range(8)))], "nobody is left before round 1"),
    ],
)
def test_impossible_schedules_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        simulate(method(), blobs(), rounds=4, membership=changes)


def test_a_method_that_admits_nobody_takes_no_joins():
    own = fedavg(nn.linear(), local=FULL)._replace(admit=None)
    with pytest.raises(ValueError, match="fedavg admits no client"):
        simulate(own, blobs(), rounds=4, membership=[Membership(2, join=(1,))])
