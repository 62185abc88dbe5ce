"""The methods against plain NumPy versions written from the papers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms import cfl_gp, fedavg, ifca
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.clustering.scores import adjusted_rand_index
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys
from tests.federations import as_lists, blobs
from tests.reference import federated
from tests.turns import COUNTS, drawn_batches, linear_models, turns, uneven

ROUNDS = 9
MINI = local.sgd(0.3, batch_size=4, steps=3)


def models_of(state):
    params = state.clusters.params["output"]
    return [
        (kernel.astype(np.float64), bias.astype(np.float64))
        for kernel, bias in zip(np.asarray(params["kernel"]), np.asarray(params["bias"]), strict=True)
    ]


def start_of(algorithm, federation, seed=0):
    population = parallel.place_population(federation.train, federation.info, parallel.client_mapping("scan"))
    state, _ = jax.device_get(algorithm.init(run_keys(seed).initialization, population))
    return state


def assert_models_equal(ours, theirs):
    for own, other in zip(ours, theirs, strict=True):
        for part, expected in zip(own, other, strict=True):
            np.testing.assert_allclose(part, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_fedavg_weighs_by_examples(steps):
    federation = blobs()
    algorithm = fedavg(nn.linear(), local=local.sgd(0.3, batch_size=None, steps=steps))
    start = models_of(start_of(algorithm, federation))
    result = simulate(algorithm, federation, rounds=ROUNDS)
    expected = federated.fedavg(start[0], as_lists(federation), rate=0.3, steps=steps, rounds=ROUNDS)
    assert_models_equal(models_of(result.state), [expected])


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_ifca_joins_the_least_loss(steps):
    federation = blobs(clients=9, groups=3)
    algorithm = ifca(nn.linear(), clusters=3, local=local.sgd(0.3, batch_size=None, steps=steps))
    start = models_of(start_of(algorithm, federation))
    result = simulate(algorithm, federation, rounds=ROUNDS)
    models, chosen = federated.ifca(start, as_lists(federation), rate=0.3, steps=steps, rounds=ROUNDS)
    assert result.labels.tolist() == chosen.tolist()
    assert_models_equal(models_of(result.state), models)


@pytest.mark.parametrize(("steps", "every"), [(1, 2), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_cfl_gp_is_algorithm_1_and_4(steps, every):
    federation = blobs(clients=9, groups=3)
    if steps == 1:
        own, server = local.sgd(1.0, batch_size=None, steps=1), optax.sgd(0.3)
        scale = 0.3
    else:
        own, server, scale = local.sgd(0.3, batch_size=None, steps=steps), None, 1.0
    algorithm = cfl_gp(nn.linear(), clusters=3, local=own, server=server, every=every)
    start = start_of(algorithm, federation)
    assignment = np.argmax(start.clients.membership, -1)[:9]
    result = simulate(algorithm, federation, rounds=ROUNDS)
    models, chosen, profile = federated.cfl_gp(
        models_of(start), assignment, as_lists(federation), rate=0.3, steps=steps, rounds=ROUNDS, every=every
    )
    assert result.labels.tolist() == chosen.tolist()
    assert_models_equal(models_of(result.state), models)
    # Parameters are ravelled bias first, as the tree orders them; the oracle puts the kernel first.
    ours = scale * np.asarray(result.state.clients.profile)[:9]
    ours = np.concatenate([ours[..., 3:], ours[..., :3]], -1)
    np.testing.assert_allclose(ours, profile, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_cfl_gp_in_cohorts_of_unequal_clients_with_every_option():
    """Catches a profile of other coordinates or mini-batches than the update's, and a β not the client's own."""
    federation = uneven()
    algorithm = cfl_gp(
        nn.linear(), clusters=3, local=MINI, every=1, participation=0.5, cluster_cohort=True, compression=2.0,
        weighting="examples", shared_layers=("output/bias",),
    )  # fmt: skip
    played = turns(algorithm, federation, ROUNDS)
    coordinates = played[0].before.server.coordinates
    profile, updates = np.zeros((9, 3, 10)), np.zeros((9, 3), int)
    for number, turn in enumerate(played):
        assert len(turn.clients) == 5
        models, batches, block = linear_models(turn.before.clusters.params), drawn_batches(turn, federation), number % 3
        before, after = (np.argmax(state.clients.membership, -1) for state in (turn.before, turn.after))
        expected = federated.train_cohort(models, before, batches, 0.3, COUNTS)
        weight = [sum(COUNTS[i] for i in turn.clients if before[i] == k) for k in range(3)]
        assert_models_equal(models_of(turn.after), federated.share_bias(expected, weight))

        changes = {}
        for client in turn.clients:
            kernel, bias = federated.change_on(models[block], batches[client], 0.3)[0]
            changes[client] = np.concatenate([bias, kernel.ravel()])[coordinates]
        federated.fold_in_block(profile, updates, block, changes)
        np.testing.assert_array_equal(turn.after.clients.updates, updates)
        np.testing.assert_allclose(turn.after.clients.profile, profile, rtol=2e-4, atol=2e-6)
        own = federated.imputed(profile[turn.clients], updates[turn.clients]).reshape(5, -1)
        found = np.asarray(federated.spectral_clusters(own, before[turn.clients], 3))
        assert adjusted_rand_index(after[turn.clients], found) == 1.0
        # Of names that keep equally many clients either may be taken.
        assert (after == before)[turn.clients].sum() == (found == before[turn.clients]).sum()
        others = np.setdiff1d(np.arange(9), turn.clients)
        np.testing.assert_array_equal(after[others], before[others])
    assert {1, 2, 3} <= set(updates[:, 0].tolist())


@pytest.mark.slow
@pytest.mark.parametrize("estimate", ["evaluation", "participation"])
def test_ifca_in_cohorts_of_unequal_clients_with_every_option(estimate):
    """Catches another mean, who is scored on what, and who is evaluated where: seen long ago, or never."""
    federation = uneven()
    algorithm = ifca(
        nn.linear(), clusters=3, local=MINI, participation=0.4, start="random", weighting="examples",
        shared_layers=("output/bias",), estimate="participation",
    )  # fmt: skip
    played = turns(algorithm, federation, 3)
    seen = np.full(9, -1)
    for turn in played:
        assert len(turn.clients) == 4
        models = linear_models(turn.before.clusters.params)
        least = least_losses(models, federation)
        expected = federated.train_cohort(models, least, drawn_batches(turn, federation), 0.3, COUNTS)
        weight = [sum(COUNTS[i] for i in turn.clients if least[i] == k) for k in range(3)]
        assert_models_equal(models_of(turn.after), federated.share_bias(expected, weight))
        seen[turn.clients] = least[turn.clients]
        assert np.asarray(labels(turn.after.clients.membership)).tolist() == seen.tolist()

    state = jax.tree.map(jnp.asarray, played[-1].after)
    now = least_losses(models_of(state), federation)
    own = dataclasses.replace(algorithm, estimate=estimate)
    personal = jax.jit(jax.vmap(lambda data, index: own.personalize(jax.random.key(0), state, data, index)))
    variables, _ = personal(jax.tree.map(jnp.asarray, federation.train), jnp.arange(9))
    kept = (seen >= 0) & (seen != now)
    # Somebody would do better elsewhere by now, and somebody never seen elsewhere than in cluster 0.
    assert kept.any()
    assert (now[seen < 0] > 0).any()
    chosen = np.where(kept, seen, now) if estimate == "participation" else now
    kernel = np.asarray(state.clusters.params["output"]["kernel"])
    np.testing.assert_array_equal(variables.params["output"]["kernel"][:, 0], kernel[chosen])


def least_losses(models, federation):
    """The model of least loss on all training rows of each client."""
    return np.asarray(
        [np.argmin([federated.gradient(*model, x, y)[2] for model in models]) for x, y in as_lists(federation)]
    )
