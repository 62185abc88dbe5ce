"""Clients that join and leave during a run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import cfl, fedavg, fedsoft, ifca, local_only, pacfl
from fedjax_cluster.simulation.evaluation import chosen_clients
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import Churn, ClientData, DatasetInfo, Federation
from tests.federations import blobs

CHANGES = (Churn(3, join=(6,)), Churn(5, join=(7, 6), leave=(2,)), Churn(4, leave=(6,)))
FULL = local.sgd(0.3, batch_size=None, steps=1)


@functools.cache
def method():
    return ifca(nn.linear(), clusters=2, local=FULL)


@functools.cache
def whole():
    return simulate(method(), blobs(), rounds=8, eval_every=8, churn=CHANGES)


@pytest.mark.slow
def test_the_cohorts_follow_the_schedule():
    """Clients 6 and 7 start absent; 6 joins, leaves and comes back."""
    result = whole()
    assert result.history["num_clients"].tolist() == [6, 6, 6, 7, 6, 7, 7, 7]
    assert np.asarray(result.state.clients.present).tolist() == [True, True, False, True, True, True, True, True]
    assert result.labels[2] == -1
    assert (result.labels[[6, 7]] >= 0).all()


@pytest.mark.slow
def test_those_who_are_there_are_evaluated():
    federation = blobs(ragged=False)
    test = federation.test
    wrong = test._replace(y=np.where(np.arange(8)[:, None] == 2, (test.y + 1) % 3, test.y).astype(np.int32))
    figures = [
        simulate(method(), federation._replace(test=own), rounds=8, eval_every=8, churn=CHANGES).summary
        for own in (test, wrong)
    ]
    assert figures[0]["accuracy"] == figures[1]["accuracy"]


@pytest.mark.parametrize("stop", [3, 5, 6])
def test_a_resumed_run_gives_the_same(tmp_path, stop):
    """Also where it was stopped just before somebody joins."""
    simulate(method(), blobs(), rounds=stop, eval_every=8, churn=CHANGES, run_dir=tmp_path / "run")
    resumed = simulate(method(), blobs(), rounds=8, eval_every=8, churn=CHANGES, run_dir=tmp_path / "run")
    for one, other in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(whole().state), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(resumed.history["num_clients"], whole().history["num_clients"])


def test_another_schedule_is_another_experiment(tmp_path):
    simulate(method(), blobs(), rounds=2, eval_every=8, churn=CHANGES, run_dir=tmp_path / "run")
    for other in ((), CHANGES[:1]):
        with pytest.raises(ValueError, match="churn is"):
            simulate(method(), blobs(), rounds=2, eval_every=8, churn=other, run_dir=tmp_path / "run")


@pytest.mark.slow
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
    late = (Churn(15, join=(9, 10, 11)),)
    result = simulate(algorithm, federation, rounds=17, eval_every=17, churn=late)
    assert result.history["num_clusters"][14] == 3
    assert result.history["num_clients"].tolist() == [9] * 15 + [12] * 2
    assert result.summary["adjusted_rand_index"] == 1.0
    assert np.asarray(result.state.clients.seen).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([Churn(2, join=(8,))], "names client 8"),
        ([Churn(-1, leave=(0,))], "names round -1"),
        ([Churn(2, leave=(1,)), Churn(3, leave=(1,))], "client 1 cannot leave before round 3"),
        ([Churn(2, join=(1,)), Churn(3, join=(1,))], "client 1 cannot join before round 3: it is there"),
        ([Churn(1, leave=tuple(range(8)))], "nobody is left before round 1"),
    ],
)
def test_impossible_schedules_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        simulate(method(), blobs(), rounds=4, churn=changes)


def test_changes_of_another_kind_are_told_what_they_are_to_be():
    with pytest.raises(ValueError, match=r"churn is \{'round': 4\}; it must be a list of Churn, in a file"):
        simulate(method(), blobs(), rounds=4, churn={"round": 4})


def test_a_method_that_admits_nobody_takes_no_joins():
    class closed(fedavg, abstract=True):
        """Federated averaging without newcomers."""

        admit = None

    own = closed(nn.linear(), local=FULL)
    with pytest.raises(ValueError, match="closed admits no client"):
        simulate(own, blobs(), rounds=4, churn=[Churn(2, join=(1,))])


@pytest.mark.slow
@pytest.mark.parametrize("build", [local_only, fedsoft])
def test_who_comes_back_goes_on_with_its_own_model(build):
    options = {"clusters": 2} if build is fedsoft else {}
    algorithm = build(nn.linear(), local=FULL, **options)
    left = simulate(algorithm, blobs(), rounds=6, eval_every=6, churn=[Churn(4, leave=(2,))]).state
    client = jax.tree.map(lambda leaf: jnp.asarray(leaf[2]), blobs().train)
    back = algorithm.admit(jax.random.key(0), left, client, jnp.asarray(2))
    rows = (lambda state: state.clients.models) if build is local_only else (lambda state: state.clients.own)
    others = left.clusters.params
    for before, after, centres in zip(
        *map(jax.tree.leaves, (rows(left).params, rows(back).params, others)), strict=True
    ):
        np.testing.assert_array_equal(before[2], after[2])
        assert (np.abs(np.asarray(centres) - np.asarray(after[2])).max(axis=tuple(range(1, centres.ndim))) > 0).all()
    assert build is local_only or bool(back.clients.trained[2])


@pytest.mark.slow
def test_a_newcomer_with_infinite_losses_takes_nobodys_draws():
    federation = blobs()
    wild = federation.train._replace(
        x=np.where(np.arange(8)[:, None, None] == 2, 3e38 * np.sign(federation.train.x), federation.train.x)
    )
    algorithm = fedsoft(nn.mlp(hidden=(8,)), clusters=2, local=FULL, participation=0.5)
    result = simulate(algorithm, federation._replace(train=wild), rounds=8, eval_every=8, churn=[Churn(3, join=(2,))])
    assert np.isfinite(np.asarray(result.state.clients.membership)).all()
    assert (result.history["num_clusters"][3:] > 1).any()


@pytest.mark.slow
def test_a_newcomer_unlike_all_clusters_opens_one_while_there_are_slots():
    """Three groups of clients on axes of their own; the third comes later."""
    rng, group = np.random.default_rng(0), np.arange(9) % 3
    x = np.zeros((9, 12, 6), np.float32)
    for client in range(9):
        x[client, :, 2 * group[client]] = rng.normal(3, 0.1, 12)
    data = ClientData(x, np.zeros((9, 12), np.int32), np.full(9, 12, np.int32))
    info = DatasetInfo("axes", (6,), 2)
    federation = Federation(data, data, None, group.astype(np.int32), info)
    late = [Churn(1, join=tuple(np.flatnonzero(group == 2).tolist()))]
    found = {}
    for slots in (2, 4):
        algorithm = pacfl(nn.linear(), clusters=slots, local=FULL, threshold=10.0, num_vectors=1)
        result = simulate(algorithm, federation, rounds=3, eval_every=3, churn=late)
        found[slots] = result
    assert found[4].history["adjusted_rand_index"][-1] == 1.0
    assert found[4].history["num_clusters"].tolist() == [2, 3, 3]
    assert found[2].history["num_clusters"].tolist() == [2, 2, 2]


@pytest.mark.parametrize(("at", "told"), [(2, False), (3, True)])
def test_who_would_come_after_the_end_is_named(at, told, caplog):
    """A longer run of the same directory may reach it, so that it is no mistake."""
    method = fedavg(nn.linear(), local=FULL)
    simulate(method, blobs(clients=4), rounds=3, churn=[Churn(at, leave=(1, 2))])
    assert ("clients 1, 2 join or leave after 3 rounds or later, but the run has 3" in caplog.text) == told


def test_somebody_is_there_from_the_start():
    with pytest.raises(ValueError, match="nobody is there before the first join; let at least one client be there"):
        simulate(fedavg(nn.linear(), local=FULL), blobs(clients=4), rounds=3, churn=[Churn(1, join=(0, 1, 2, 3))])


def test_an_evaluation_of_nobody_has_no_figures():
    """The summary's accuracy was that of the model after two rounds of six."""
    federation = blobs()
    (client,) = np.flatnonzero([client in chosen_clients(8, 1, seed=0) for client in range(8)])
    options = {"rounds": 4, "eval_every": 2, "eval_clients": 1, "progress": False}
    gone = simulate(method(), federation, churn=[Churn(3, leave=(int(client),))], **options)
    assert np.isfinite(gone.history["accuracy"]).tolist() == [False, True, False, False]
    assert gone.summary["accuracy"] is None
    assert gone.summary["adjusted_rand_index"] == gone.history["adjusted_rand_index"][-1]
