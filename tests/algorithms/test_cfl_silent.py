"""CFL with clients that stop sending before their cluster splits."""

import jax
import numpy as np
import pytest

from fedjax_cluster import faults, local, nn, parallel
from fedjax_cluster.algorithms import cfl
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.clustering.scores import adjusted_rand_index
from fedjax_cluster.simulation.segment import run_keys
from tests.federations import blobs, one_step

LOCAL = local.sgd(0.3, batch_size=None, steps=2)
OPTIONS = {"epsilon_1": 0.3, "epsilon_2": 0.3, "gamma_max": 0.5, "first_round": 4}
SCAN = parallel.client_mapping("scan", devices=jax.devices()[:1])


@pytest.mark.slow
@pytest.mark.parametrize("silent_from", [0, 3])
def test_who_is_silent_when_a_cluster_splits_is_put_by_what_it_sent_before(silent_from):
    """Faults: silence wipes what was sent; old updates count in the criteria, and hold up the others' splits."""
    method = cfl(nn.linear(), clusters=5, local=LOCAL, **OPTIONS)
    silent, federation = faults.afflict(method, blobs(clients=12, groups=3), faults.nan_updates(0.34), seed=1)
    lost = faults.faulty_clients(federation)
    population = parallel.place_population(federation.train, federation.info, SCAN)
    state, _ = method.init(run_keys(0).initialization, population)
    for number in range(14):
        state, _ = one_step(method if number < silent_from else silent, population, state, number)
        if number == silent_from - 1:
            sent = np.asarray(state.clients.update)[lost]
    found = np.asarray(labels(state.clients.membership))[:12]
    assert len(set(found)) == 3
    assert float(adjusted_rand_index(found[~lost], federation.group[~lost])) == 1.0
    assert not np.asarray(state.clients.valid)[:12][lost].any()
    if silent_from:
        np.testing.assert_array_equal(np.asarray(state.clients.update)[lost], sent)
        assert float(adjusted_rand_index(found, federation.group)) == 1.0
    else:
        assert set(found[lost]) == {0}
