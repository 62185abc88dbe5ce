"""Evaluations of some clients: the same figures, and nothing of the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms import cfl_gp
from fedjax_cluster.simulation.evaluation import chosen_clients, evaluate_clients
from fedjax_cluster.simulation.program_costs import program_costs
from fedjax_cluster.simulation.segment import run_keys
from tests.devices import needs_two
from tests.federations import blobs


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=needs_two)])
def test_nothing_is_computed_of_clients_that_are_not_evaluated(devices):
    """Fault: 50 of ten thousand clients took the time of all; the others' metrics were made and thrown away."""
    algorithm = cfl_gp(nn.linear(), clusters=2, local=local.sgd(0.3, batch_size=5, steps=2))
    federation = blobs(clients=40)
    mapping = parallel.client_mapping("vmap", devices=jax.devices()[:devices])
    population = parallel.place_population(federation.train, federation.info, mapping)
    test = parallel.place_population(federation.test, federation.info, mapping).data
    state, _ = algorithm.init(run_keys(0).initialization, population)
    state = parallel.place_state(state, mapping)
    clients = chosen_clients(40, 5, seed=3)
    found, costs = [], []
    for chosen in (None, jnp.asarray(clients, jnp.int32)):
        given = run_keys(0).evaluation, state, population, test, None, chosen
        options = {"model": algorithm.model, "algorithm": algorithm}
        found.append(jax.device_get(evaluate_clients(*given, **options)))
        costs.append(program_costs(evaluate_clients.lower(*given, **options).compile().as_text()).flops)
    for name, values in found[1].items():
        np.testing.assert_array_equal(values[clients], found[0][name][clients])
        assert np.isnan(np.delete(values, clients)).all()
    assert costs[1] <= 6 / 40 * costs[0]


@needs_two
@pytest.mark.parametrize("number", [2, 30])
def test_chosen_clients_of_a_dealt_population_have_their_own_figures(number):
    """Rows lie where devices have equal work, and some of those chosen are absent, or have no test rows."""
    algorithm = cfl_gp(nn.linear(), clusters=2, local=local.sgd(0.3, batch_size=5, steps=2))
    federation, mapping = blobs(clients=31), parallel.client_mapping("scan", devices=jax.devices()[:2])
    clients = chosen_clients(31, number, seed=1)
    rows, tests = (np.array(part.num_examples) for part in (federation.train, federation.test))
    rows[clients[0]], tests[clients[1]] = 0, 0
    train, test = (federation.train._replace(num_examples=rows), federation.test._replace(num_examples=tests))
    work = np.where(np.arange(31) < 15, 9.0, 1.0)
    population = parallel.place_population(train, federation.info, mapping, work)
    assert population.placement is not None
    placed = parallel.place_population(test, federation.info, mapping).data
    state = parallel.place_state(algorithm.init(run_keys(0).initialization, population)[0], mapping)
    given, options = (run_keys(0).evaluation, state, population, placed, None), {"model": algorithm.model}
    whole = jax.device_get(evaluate_clients(*given, algorithm=algorithm, **options))
    some = jax.device_get(evaluate_clients(*given, jnp.asarray(clients, jnp.int32), algorithm=algorithm, **options))
    for name, values in some.items():
        np.testing.assert_array_equal(values[clients], whole[name][clients])
        assert np.isnan(np.delete(values, clients)).all()
    assert np.isfinite(some["accuracy"][clients[2:]]).all()
    assert np.isnan(some["accuracy"][clients[:2]]).all()
