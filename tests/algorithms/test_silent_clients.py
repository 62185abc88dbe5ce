"""Who sends nothing in a round tells the server nothing: no cluster, no shares; what it cost is counted."""

import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import faults, local, nn, optimizers, parallel
from fedjax_cluster.algorithms import cfl, fedsoft, flag, gradient_loss, ifca
from fedjax_cluster.algorithms.fedgwc import weighting
from fedjax_cluster.simulation.segment import run_keys
from tests.directions import FULL, lines
from tests.federations import blobs, one_step
from tests.private_methods import PLAIN, SHOWING, build

SCAN = parallel.client_mapping("scan", devices=jax.devices()[:1])
LOCAL = local.sgd(0.3, batch_size=4, steps=2)
METHODS = {
    "ifca": functools.partial(ifca, clusters=2, score_on="batch", estimate="participation", start="random"),
    "gradient_loss": functools.partial(gradient_loss, clusters=2),
    "fedsoft": functools.partial(fedsoft, clusters=2),
}


def begun(method, federation, fault, seed=0):
    """The method with its fault, its clients and its first state."""
    method, federation = faults.afflict(method, federation, fault, seed)
    population = parallel.place_population(federation.train, federation.info, SCAN)
    return method, population, *method.init(run_keys(0).initialization, population)


@pytest.mark.parametrize("name", METHODS)
def test_a_round_of_which_nobody_is_heard_changes_nothing(name):
    """Faults: IFCA's identities, and FedSoft's shares, of messages that were lost."""
    method = METHODS[name](nn.linear(), local=LOCAL)
    method, population, state, _ = begun(method, blobs(), faults.drop_out(1.0))
    after, info = one_step(method, population, state)
    for old, new in zip(jax.tree.leaves(state.clusters), jax.tree.leaves(after.clusters), strict=True):
        np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(state.clients.membership, after.clients.membership)
    assert int(info.num_rejected) == 8
    assert int(info.num_changed) == 0


@pytest.mark.slow
def test_silent_clients_do_not_steer_fedsoft():
    """Fault: shares of who sends nothing, by which it is drawn, and its draws are lost to others."""
    honest = blobs(clients=10)
    lost = faults.faulty_clients(faults.afflicted(honest, faults.nan_updates(0.3), 0))
    other = np.where(lost[:, None], 2 - honest.train.y, honest.train.y)
    found = []
    for y in (honest.train.y, other):
        federation = honest._replace(train=honest.train._replace(y=y))
        method = fedsoft(nn.linear(), local=LOCAL, clusters=2, participation=0.7)
        method, population, state, _ = begun(method, federation, faults.nan_updates(0.3))
        for number in range(4):
            state, info = one_step(method, population, state, number)
            # Estimates are in every other round; in the others it is not drawn.
            assert int(info.num_rejected) == (3 if number % 2 == 0 else 0)
        found.append(state)
    assert lost.sum() == 3
    for one, two in zip(jax.tree.leaves(found[0]), jax.tree.leaves(found[1]), strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.asarray(found[0].clients.membership)[:10][lost].any()
    assert np.asarray(found[0].clients.membership)[:10][~lost].any(1).all()


@pytest.mark.slow
@pytest.mark.parametrize("landmarks", [None, 4])
def test_each_time_that_flag_asks_a_client_costs(landmarks):
    """Faults: costs of one asking each, or of the training of those alone that were heard."""
    method = flag(
        nn.linear(), clusters=4, local=FULL, gradient_epochs=4, max_vectors=2, threshold=0.6, landmarks=landmarks
    )
    *_, plain = begun(method, lines(), None)
    silenced = faults.nan_updates(0.34)
    *_, info = begun(method, lines(), silenced)
    lost = faults.faulty_clients(faults.afflicted(lines(), silenced, 0))
    asked = np.where(lost, 3, 1)  # until nobody answers twice in a row
    assert lost.sum() == 3
    assert float(info.costs.models_down) == asked.sum()
    assert float(plain.costs.models_down) == 9
    assert float(info.costs.gradient_evaluations) == 4 * asked.sum()  # t_g epochs of one step
    assert float(info.costs.models_up) > float(plain.costs.models_up) * 1.5


@pytest.mark.parametrize("fault", [faults.drop_out(1.0), faults.sign_flip(1.0)])
def test_a_silent_client_of_private_fedgwc_tells_no_losses(fault):
    """Its true losses decided splits; under privacy whoever sends nothing shows noise alone, here of size 0."""
    method, population, _, _ = begun(build("fedgwc"), blobs(clients=7), fault)
    rows = jax.tree.map(lambda leaf: leaf[0], population.data)
    client = parallel.Client(jnp.asarray(0), jnp.asarray(True), rows, None)
    told = weighting.told(jax.random.key(0), method.update, method.privacy, client, jnp.ones(3))
    assert bool(told.any()) == isinstance(fault, faults.sign_flip)


def test_an_optimiser_of_ones_own_stays_where_an_update_is_rejected_under_privacy():
    """It is the client's; what the server takes for nothing stood in its place."""
    own = local.sgd(optimizers.named("sgd", learning_rate=0.3, momentum=0.9), batch_size=None, steps=2)
    method = cfl(nn.linear(), local=own, clusters=2, keep_optimizer=True, privacy=replace(PLAIN, **SHOWING))
    spoilt, population, state, _ = begun(method, blobs(clients=7), faults.nan_updates(1.0))
    state, _ = one_step(method, population, state)
    before = jax.device_get(state.clients.optimizer)
    assert np.any(jax.tree.leaves(before)[0])
    after, info = one_step(spoilt, population, state, 1)
    assert int(info.num_rejected) == 7
    chex.assert_trees_all_equal(jax.device_get(after.clients.optimizer), before)
