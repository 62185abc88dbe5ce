"""CFL-GP by landmark clients: with everybody as landmark the paper's, with fewer what NumPy makes of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import faults, local, nn, parallel
from fedjax_cluster.algorithms import cfl_gp
from fedjax_cluster.algorithms.cfl_gp import joining
from fedjax_cluster.algorithms.cfl_gp import landmarks as cfl_gp_landmarks
from fedjax_cluster.algorithms.round import labels as labels_of
from fedjax_cluster.clustering.scores import adjusted_rand_index
from fedjax_cluster.report.methods import cfl_gp as cfl_gp_pictures
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import Churn
from tests.federations import blobs
from tests.reference import federated
from tests.turns import drawn_batches, linear_models, turns, uneven

ONE = parallel.client_mapping("scan", devices=jax.devices()[:1])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"participation": 0.6}], ids=["all", "some"])
def test_cfl_gp_by_everybody_is_the_exact_one(options):
    federation = uneven()
    method = functools.partial(cfl_gp, nn.linear(), clusters=3, local=local.sgd(0.3, batch_size=4, steps=3), **options)
    exact = simulate(method(), federation, rounds=9, mapping=ONE)
    ours = simulate(method(landmarks=9), federation, rounds=9, mapping=ONE)
    assert exact.labels.tolist() == ours.labels.tolist()
    assert exact.history["num_changed"].tolist() == ours.history["num_changed"].tolist()
    np.testing.assert_allclose(ours.state.clients.profile, exact.state.clients.profile, rtol=1e-4, atol=1e-6)
    assert ours.state.server.grams.size == 0


@pytest.mark.slow
def test_cfl_gp_by_some_groups_them_and_others_join_by_the_blocks_that_they_filled():
    federation = blobs(clients=16, groups=3, rows=24, ragged=False)
    algorithm = cfl_gp(
        nn.linear(), clusters=3, local=local.sgd(0.3, batch_size=8, steps=3), every=2, participation=0.6,
        cluster_cohort=True, landmarks=6,
    )  # fmt: skip
    played = turns(algorithm, federation, 10)
    chosen = played[0].after.server.landmarks.tolist()
    partly, joined = 0, set()
    for number, turn in enumerate(played):
        before, after = (np.argmax(state.clients.membership, -1) for state in (turn.before, turn.after))
        if number % 2 == 0:
            np.testing.assert_array_equal(before, after)
            continue
        assert set(chosen) < set(turn.clients)
        profile, filled = np.asarray(turn.after.clients.profile, np.float64), np.asarray(turn.after.clients.updates) > 0
        own = federated.imputed(profile[chosen], np.asarray(turn.after.clients.updates)[chosen])
        named = np.asarray(federated.spectral_clusters(own.reshape(6, -1), before[chosen], 3))
        assert adjusted_rand_index(after[chosen], named) == 1.0
        right = np.linalg.svd(own.reshape(6, -1), full_matrices=False)[2][:3].reshape(3, 3, -1)
        label = after[chosen]
        for client in set(turn.clients) - set(chosen):
            blocks = np.flatnonzero(filled[client])
            partly += len(blocks) < filled[chosen].any(0).sum()
            apart = []
            for group in range(3):
                centre = own[label == group].mean(0)
                apart.append(np.linalg.norm(sum(right[:, k] @ (profile[client, k] - centre[k]) for k in blocks)))
            if filled[chosen].any(0).all():
                assert after[client] == int(np.argmin(apart))
                joined.add(client)
            else:
                assert turn.after.clients.membership[client].sum() == 0
        others = np.setdiff1d(np.arange(16), turn.clients)
        np.testing.assert_array_equal(before[others], after[others])
    assert partly > 0
    last = played[-1].after.clients.membership
    assert set(np.flatnonzero(last.sum(1)).tolist()) == joined | set(chosen)
    label = np.where(last.sum(1) > 0, np.argmax(last, -1), -1)
    assert adjusted_rand_index(label, federation.group) > 0.7


def sole(**options):
    own = {"participation": 0.6, "cluster_cohort": True, "landmarks": 6, "profiles_of": "landmarks", **options}
    return cfl_gp(nn.linear(), clusters=3, local=local.sgd(0.3, batch_size=8, steps=3), every=1, **own)


@pytest.mark.slow
def test_cfl_gp_that_keeps_the_landmarks_profiles_alone_groups_others_by_what_they_show():
    federation = blobs(clients=16, groups=3, rows=24, ragged=False)
    algorithm = sole()
    played = turns(algorithm, federation, 10)
    chosen = played[0].after.server.landmarks.tolist()
    width = played[0].after.server.kept.profile.shape[2]
    profile, updates, joined = np.zeros((6, 3, width)), np.zeros((6, 3), int), set()
    for number, turn in enumerate(played):
        kept, block = turn.after.server.kept, number % 3
        before, after = (np.argmax(state.clients.membership, -1) for state in (turn.before, turn.after))
        asked = linear_models(turn.before.clusters.params)[block]
        shown = {}
        for client, batches in drawn_batches(turn, federation).items():
            kernel, bias = federated.change_on(asked, batches, 0.3)[0]
            shown[client] = np.concatenate([bias, kernel.ravel()])
        federated.fold_in_block(profile, updates, block, {chosen.index(i): shown[i] for i in chosen})
        np.testing.assert_array_equal(kept.updates, updates)
        np.testing.assert_allclose(kept.profile, profile, rtol=1e-4, atol=1e-5)
        own = federated.imputed(profile, updates)
        right = np.linalg.svd(own.reshape(6, -1), full_matrices=False)[2][:3].reshape(3, 3, -1)[:, block]
        label = after[chosen]
        centres = [own[label == group][:, block].mean(0) for group in range(3)]
        for client in set(turn.clients) - set(chosen):
            if not updates.any(0).all():
                assert turn.after.clients.membership[client].sum() == 0
                continue
            joined.add(client)
            assert after[client] == int(np.argmin([np.linalg.norm(right @ (shown[client] - c)) for c in centres]))
        others = np.setdiff1d(np.arange(16), turn.clients)
        np.testing.assert_array_equal(before[others], after[others])
    last = played[-1].after
    assert joined
    assert last.clients.profile == last.clients.updates == ()
    label = np.where(last.clients.membership.sum(1) > 0, np.argmax(last.clients.membership, -1), -1)
    assert adjusted_rand_index(label, federation.group) > 0.7
    # Who was not heard, or is another client by now, has nothing kept.
    state = jax.tree.map(jnp.asarray, last)
    state = state._replace(server=state.server._replace(block=jnp.asarray(1)))
    kept = joining.keep("mean", state.server, jnp.ones((6, width)), jnp.arange(6) == 0)
    np.testing.assert_array_equal(
        kept.updates - last.server.kept.updates, np.eye(6, 3, 1, dtype=int) * (np.arange(6) == 0)[:, None]
    )
    np.testing.assert_array_equal(kept.profile[1:], last.server.kept.profile[1:])
    assert (kept.profile[0, 1] != last.server.kept.profile[0, 1]).all()
    groups = cfl_gp_landmarks.Groups(
        jnp.ones((3, width, 1)), jnp.asarray([0.0, width, 9.0]).reshape(3, 1, 1).repeat(3, 1)
    )
    nearest = joining.nearest_by_block(groups, jnp.asarray(1))
    assert [int(nearest([jnp.full(2, x), jnp.full(width - 2, x)])) for x in (0.1, 1.0, 9 / width)] == [0, 1, 2]
    client = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), federation.train)
    kept = algorithm.admit(jax.random.key(0), state, client, jnp.asarray(chosen[2])).server.kept
    np.testing.assert_array_equal(np.flatnonzero((kept.updates == 0).all(1)), [2])
    np.testing.assert_array_equal(kept.profile, np.where(np.arange(6)[:, None, None] == 2, 0, last.server.kept.profile))
    label = algorithm.cluster(jax.random.key(0), state)
    others = np.setdiff1d(np.arange(16), chosen)
    np.testing.assert_array_equal(np.asarray(label)[others], np.asarray(labels_of(state.clients.membership))[others])


@pytest.mark.slow
def test_cfl_gp_that_keeps_the_profiles_of_landmarks_who_are_everybody_is_the_same():
    whole = sole(landmarks=9, participation=1.0, cluster_cohort=False)
    one, other = (
        simulate(dataclasses.replace(whole, profiles_of=of), uneven(), rounds=7, mapping=ONE)
        for of in ("everybody", "landmarks")
    )
    assert one.labels.tolist() == other.labels.tolist()
    np.testing.assert_allclose(other.state.server.kept.profile, one.state.clients.profile, rtol=1e-5, atol=1e-6)
    assert {"client_features", "singular_values"} <= set(cfl_gp_pictures.figures(other))


@pytest.mark.slow
@pytest.mark.parametrize("profiles_of", ["everybody", "landmarks"])
def test_the_landmarks_that_are_there_are_in_every_clustering_round_whoever_leaves_and_joins(profiles_of):
    """Drawn anew among those present, others came in their place; and of the absent, some trained."""
    algorithm = sole(landmarks=4, profiles_of=profiles_of)
    federation = blobs(clients=12, groups=3, rows=24, ragged=False)
    chosen = simulate(algorithm, federation, rounds=1, mapping=ONE, progress=False).state.server.landmarks.tolist()
    others = [client for client in range(12) if client not in chosen]
    churn = [
        Churn(1, leave=(chosen[0], *others[:4])), Churn(3, join=(others[0],)), Churn(4, join=(chosen[0],)),
        Churn(5, leave=tuple(others[:1] + others[6:])),
    ]  # fmt: skip
    there, select, sizes = set(range(12)), jax.jit(algorithm.select), []
    for number in range(7):
        options = {"rounds": number + 1, "mapping": ONE, "progress": False, "churn": churn}
        state = simulate(algorithm, federation, **options).state
        for change in churn:
            if change.round == number:
                there = (there - set(change.leave)) | set(change.join)
        selected = select(jax.random.fold_in(run_keys(0).cohorts, number), state._replace(round=jnp.asarray(number)))
        drawn = set(np.asarray(selected.index)[np.asarray(selected.mask)].tolist())
        assert drawn <= there
        assert len(drawn & set(chosen)) == min(len(drawn), len(there & set(chosen)))
        assert state.server.landmarks.tolist() == chosen
        sizes.append(len(drawn))
    assert max(sizes) > len(chosen) == min(sizes)


@pytest.mark.slow
def test_landmarks_who_leave_are_told_before_the_first_round():
    """Without them nobody would be in a cluster, nor train one, ever after."""
    algorithm, federation = sole(landmarks=4), blobs(clients=12, groups=3)
    chosen = simulate(algorithm, federation, rounds=1, mapping=ONE, progress=False).state.server.landmarks.tolist()
    few = rf"before round 2 2 of the landmarks \[{', '.join(map(str, chosen))}\] are there, but cfl_gp needs 3"
    churn = [Churn(1, leave=chosen[:1]), Churn(2, leave=chosen[1:2])]
    with pytest.raises(ValueError, match=few):
        simulate(algorithm, federation, rounds=3, mapping=ONE, churn=churn, progress=False)
    back = [Churn(1, leave=chosen[:1]), Churn(2, join=chosen[:1]), Churn(2, leave=chosen[1:2])]
    simulate(algorithm, federation, rounds=3, mapping=ONE, churn=back, progress=False)
    # Of cohorts of three, the fourth would never be clustered again.
    gone = [client for client in range(12) if client not in chosen][:7]
    with pytest.raises(
        ValueError, match="before round 1 4 landmarks are there, but a cohort of the 5 clients has only 3"
    ):
        simulate(algorithm, federation, rounds=3, mapping=ONE, churn=[Churn(1, leave=gone)], progress=False)
    # Of all changes of a round what they come to counts.
    with_others = [Churn(1, leave=gone[:5]), Churn(1, join=gone[5:])]
    simulate(algorithm, federation, rounds=3, mapping=ONE, churn=with_others, progress=False)


@pytest.mark.slow
def test_who_is_in_no_cluster_yet_trains_none_and_pays_for_none():
    """A model and an update were counted for each, though no cluster had them."""
    algorithm = cfl_gp(
        nn.linear(), clusters=2, local=local.sgd(0.3, batch_size=8, steps=3), participation=0.5, cluster_cohort=True,
        landmarks=3, every=5,
    )  # fmt: skip
    result = simulate(algorithm, blobs(clients=9), rounds=1, mapping=ONE, progress=False)
    trained, steps = result.history["models_down"][0], result.history["gradient_evaluations"][0]
    cohort = result.history["num_clients"][0]
    assert 0 < trained < 5
    assert trained == cohort
    assert result.history["models_up"][0] == trained
    assert steps == 3 * trained


@pytest.mark.slow
@pytest.mark.parametrize("ends", [{"stop_after": 1}, {"cluster_until": 4}], ids=["stops", "until"])
def test_who_has_been_in_no_clustering_round_joins_by_its_loss_once_these_have_ended(ends):
    """Fault: who had not joined by then was in no cluster for good, and what it trained was thrown away."""
    algorithm = cfl_gp(
        nn.linear(), clusters=2, local=local.sgd(0.3, batch_size=8, steps=3), participation=0.3, cluster_cohort=True,
        landmarks=3, every=1, **ends,
    )  # fmt: skip
    federation = blobs(clients=20, groups=2, rows=24, ragged=False)
    result = simulate(algorithm, federation, rounds=40, mapping=ONE, progress=False)
    assert bool(result.state.server.stopped) == ("stop_after" in ends)
    assert result.history["clusterings"].sum() < 10
    assert (result.state.clients.membership.sum(1) == 1).all()
    assert adjusted_rand_index(result.labels, federation.group) == 1.0
    asked = result.history["loss_evaluations"]
    # Each once: both models, on three mini-batches at most.
    assert 0 < asked.sum() <= 2 * 3 * 17
    assert (result.history["models_down"] - result.history["num_clients"])[asked > 0].min() >= 1


@pytest.mark.slow
def test_who_sends_nothing_joins_no_cluster():
    algorithm = cfl_gp(
        nn.linear(), clusters=2, local=local.sgd(0.3, batch_size=8, steps=3), participation=0.3, cluster_cohort=True,
        landmarks=3, every=1, cluster_until=4,
    )  # fmt: skip
    federation = blobs(clients=20, groups=2, rows=24, ragged=False)
    options = {"rounds": 40, "mapping": ONE, "progress": False}
    result = simulate(algorithm, federation, fault=faults.nan_updates(share=0.5), **options)
    joined = np.asarray(result.state.clients.membership.sum(1))
    others = np.delete(np.arange(20), result.state.server.landmarks)
    assert (joined[others] == ~result.faulty[others]).all()
    assert result.faulty[others].any()


@pytest.mark.slow
def test_nothing_is_kept_of_a_client_that_comes_back():
    algorithm = cfl_gp(nn.linear(), clusters=2, local=local.sgd(0.3, batch_size=8, steps=3))
    federation = blobs(clients=6, groups=2)
    state = simulate(algorithm, federation, rounds=4, mapping=ONE, progress=False).state
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[4]), federation.train)
    again = algorithm.admit(run_keys(0).local, jax.tree.map(jnp.asarray, state), one, jnp.asarray(4))
    assert np.abs(state.server.grams[:, 4]).max() > 0
    assert not np.any(again.server.grams[:, 4])
    assert not np.any(again.server.grams[:, :, 4])
    np.testing.assert_array_equal(np.delete(again.server.grams, 4, 1)[:, 0, :4], state.server.grams[:, 0, :4])
