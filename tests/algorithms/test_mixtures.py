"""FedEM and FedSoft, which give a client to several clusters, against plain NumPy versions written from the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms.fedem import expectation, fedem
from fedjax_cluster.algorithms.fedsoft import draw_clients, fedsoft
from fedjax_cluster.local import server_key
from fedjax_cluster.simulation.loop import run_keys, simulate
from tests.federations import as_lists, blobs
from tests.reference import fedem as fedem_reference
from tests.reference import fedsoft as fedsoft_reference

ROUNDS = 5
CLIENTS = 7  # on two devices an absent eighth is added
OWN = local.sgd(0.3, batch_size=None, steps=2)


def numpy_models(params):
    params = params["output"]
    return [
        (np.asarray(kernel, np.float64), np.asarray(bias, np.float64))
        for kernel, bias in zip(params["kernel"], params["bias"], strict=True)
    ]


def start_of(algorithm, federation):
    population = parallel.place_population(federation.train, federation.info, parallel.client_mapping("scan"))
    return jax.device_get(algorithm.init(run_keys(0).initialization, population)[0])


def assert_models_equal(ours, theirs):
    for own, other in zip(ours, theirs, strict=True):
        for part, expected in zip(own, other, strict=True):
            np.testing.assert_allclose(part, expected, rtol=2e-4, atol=2e-5)


def test_fedem_is_the_papers_algorithm_and_mixes_predictions():
    federation = blobs(clients=CLIENTS, groups=2)
    algorithm = fedem(nn.linear(), clusters=3, local=OWN)
    start = numpy_models(start_of(algorithm, federation).clusters.params)
    result = simulate(algorithm, federation, rounds=ROUNDS)
    models, mixtures = fedem_reference.fedem(start, as_lists(federation), rate=0.3, steps=2, rounds=ROUNDS)
    assert_models_equal(numpy_models(result.state.clusters.params), models)
    np.testing.assert_allclose(np.asarray(result.state.clients.membership)[:CLIENTS], mixtures, rtol=1e-3, atol=1e-6)
    x = federation.test.x[2]
    expected = fedem_reference.predictions(models, mixtures[2], x.astype(np.float64))
    np.testing.assert_allclose(result.predict(x, 2), expected, rtol=1e-3, atol=1e-5)


def test_responsibilities_survive_losses_that_differ_by_hundreds():
    """exp(−loss) alone would be zero for every learner."""
    responsibility, mixture = expectation(jnp.asarray([0.5, 0.5]), jnp.full((2, 1), 900.0), jnp.asarray(1))
    np.testing.assert_allclose(responsibility[:, 0], [0.5, 0.5])
    np.testing.assert_allclose(mixture, [0.5, 0.5])


def test_fedsoft_is_the_papers_algorithm():
    every = 2
    federation = blobs(clients=CLIENTS, groups=2)
    algorithm = fedsoft(nn.linear(), clusters=2, local=OWN, every=every, proximal=0.7, smallest_importance=0.01)
    start = start_of(algorithm, federation)
    centres = numpy_models(start.clusters.params)
    keys = run_keys(0)

    def draws(number, odds):
        key = jax.random.fold_in(keys.cohorts, number)
        if number % every == 0:
            key = server_key(jax.random.fold_in(keys.local, number))
        return np.asarray(draw_clients(key, jnp.asarray(odds, jnp.float32), 4, jnp.asarray(4)))

    result = simulate(algorithm, federation, rounds=ROUNDS)
    expected, own, shares = fedsoft_reference.fedsoft(
        list(centres),
        [centres[0]] * CLIENTS,
        as_lists(federation),
        draws,
        every=every,
        proximal=0.7,
        smallest=0.01,
        rate=0.3,
        steps=2,
        rounds=ROUNDS,
    )
    np.testing.assert_allclose(np.asarray(result.state.clients.membership)[:CLIENTS], shares, atol=1e-6)
    assert_models_equal(numpy_models(result.state.clusters.params), expected)
    assert_models_equal(numpy_models(result.state.clients.own.params)[:CLIENTS], own)


def test_clients_are_drawn_in_proportion_and_padding_changes_nothing():
    odds = jnp.asarray([[1.0, 0.0], [3.0, 1.0], [0.0, 1.0]])
    times = draw_clients(jax.random.key(0), odds, 4000, jnp.asarray(3000))
    np.testing.assert_allclose(times.sum(0), [3000, 3000])
    np.testing.assert_allclose(times / 3000, [[0.25, 0], [0.75, 0.5], [0, 0.5]], atol=0.03)
    padded = draw_clients(jax.random.key(0), jnp.pad(odds, ((0, 5), (0, 0))), 4000, jnp.asarray(3000))
    np.testing.assert_array_equal(padded[:3], times)


@pytest.mark.parametrize(
    ("argument", "value"), [("every", 0), ("proximal", -1.0), ("proximal", float("nan")), ("smallest_importance", 0.0)]
)
def test_fedsoft_refuses_what_cannot_be(argument, value):
    with pytest.raises(ValueError, match=argument):
        fedsoft(nn.linear(), clusters=2, local=OWN, **{argument: value})
