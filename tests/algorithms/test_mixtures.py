"""FedEM and FedSoft, which give a client to several clusters, against plain NumPy versions written from the papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import local, nn
from fedjax_cluster.algorithms.fedem import expectation, fedem
from fedjax_cluster.algorithms.fedsoft import draw_clients, fedsoft
from fedjax_cluster.inference import mixed_predictions
from fedjax_cluster.local import server_key
from fedjax_cluster.simulation.segment import run_keys
from tests.algorithms.test_oracles import assert_models_equal
from tests.federations import as_lists
from tests.reference import fedem as fedem_reference
from tests.reference import fedsoft as fedsoft_reference
from tests.turns import drawn_batches, linear_models, turns, uneven

OWN = local.sgd(0.3, batch_size=4, steps=3)


@pytest.mark.slow
def test_fedem_is_the_papers_algorithm_and_mixes_predictions():
    """In cohorts of unequal clients: who is absent keeps its mixture."""
    federation = uneven()
    algorithm = fedem(nn.linear(), clusters=3, local=OWN, participation=0.4)
    played = turns(algorithm, federation, 3)
    start = linear_models(played[0].before.clusters.params)
    models, mixtures = fedem_reference.fedem(start, as_lists(federation), [turn.rows for turn in played], rate=0.3)
    last = jax.tree.map(jnp.asarray, played[-1].after)
    assert_models_equal(linear_models(last.clusters.params), models)
    np.testing.assert_allclose(last.clients.membership, mixtures, rtol=1e-3, atol=1e-6)
    never = np.flatnonzero(~mixtures.any(1))
    absent = next(i for i in played[0].clients if i not in played[-1].clients)
    x = federation.test.x[absent]
    for client, mixture in (
        (absent, mixtures[absent]),
        (never[0], fedem_reference.expectation(np.full(3, 1 / 3), models, *as_lists(federation)[never[0]])[1]),
    ):
        data = jax.tree.map(lambda leaf, i=client: jnp.asarray(leaf[i]), federation.train)
        variables, shares = algorithm.personalize(jax.random.key(0), last, data, jnp.asarray(client))
        expected = fedem_reference.predictions(models, mixture, x.astype(np.float64))
        ours = mixed_predictions(algorithm.model, variables, shares, jnp.asarray(x))
        np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-5)


def test_responsibilities_survive_losses_that_differ_by_hundreds():
    """exp(−loss) alone would be zero for every learner."""
    responsibility, mixture = expectation(jnp.asarray([0.5, 0.5]), jnp.full((2, 1), 900.0), jnp.asarray(1))
    np.testing.assert_allclose(responsibility[:, 0], [0.5, 0.5])
    np.testing.assert_allclose(mixture, [0.5, 0.5])
    # A share that was 0 after rounding grows again, where a client's data change.
    once = expectation(jnp.asarray([0.5, 0.5]), jnp.asarray([[0.0], [150.0]]), jnp.asarray(1))[1]
    assert once.tolist() == [1.0, 0.0]
    again = expectation(once, jnp.asarray([[150.0], [0.0]]), jnp.asarray(1))[1]
    np.testing.assert_allclose(again, [0.0, 1.0], atol=1e-20)


def test_fedsoft_is_the_papers_algorithm():
    """In cohorts of unequal clients, who are evaluated with their own models, or a centre if they were never drawn."""
    every, rounds = 2, 3
    federation = uneven(groups=2)
    algorithm = fedsoft(
        nn.linear(), clusters=2, local=OWN, every=every, proximal=0.7, smallest_importance=0.01, participation=0.4
    )
    played = turns(algorithm, federation, rounds)
    centres = linear_models(played[0].before.clusters.params)
    keys = run_keys(0)

    def draws(number, odds):
        key = jax.random.fold_in(keys.cohorts, number)
        if number % every == 0:
            key = server_key(jax.random.fold_in(keys.local, number))
        return np.asarray(draw_clients(key, jnp.asarray(odds, jnp.float32), 2, jnp.asarray(2)))

    expected, own, shares = fedsoft_reference.fedsoft(
        list(centres),
        [centres[0]] * 9,
        as_lists(federation),
        draws,
        [drawn_batches(turn, federation) for turn in played],
        every=every,
        proximal=0.7,
        smallest=0.01,
        rate=0.3,
    )
    last = jax.tree.map(jnp.asarray, played[-1].after)
    np.testing.assert_allclose(last.clients.membership, shares, atol=1e-6)
    assert_models_equal(linear_models(last.clusters.params), expected)
    assert_models_equal(linear_models(last.clients.own.params), own)
    trained = [any(part is not start for part, start in zip(model, centres[0], strict=True)) for model in own]
    assert 0 < sum(trained) < 9
    personal = jax.jit(jax.vmap(lambda data, index: algorithm.personalize(jax.random.key(0), last, data, index)))
    variables, _ = personal(jax.tree.map(jnp.asarray, federation.train), jnp.arange(9))
    kept = [own[i] if trained[i] else expected[int(np.argmax(shares[i]))] for i in range(9)]
    assert_models_equal(linear_models(jax.tree.map(lambda leaf: leaf[:, 0], variables.params)), kept)


def test_clients_are_drawn_in_proportion_and_padding_changes_nothing():
    odds = jnp.asarray([[1.0, 0.0], [3.0, 1.0], [0.0, 1.0]])
    times = draw_clients(jax.random.key(0), odds, 4000, jnp.asarray(3000))
    np.testing.assert_allclose(times.sum(0), [3000, 3000])
    np.testing.assert_allclose(times / 3000, [[0.25, 0], [0.75, 0.5], [0, 0.5]], atol=0.03)
    padded = draw_clients(jax.random.key(0), jnp.pad(odds, ((0, 5), (0, 0))), 4000, jnp.asarray(3000))
    np.testing.assert_array_equal(padded[:3], times)


def test_nobody_is_drawn_at_a_point_that_rounding_has_made(monkeypatch):
    """Sums of odds differ where nothing was added, and fall, in float32; whoever is absent there was drawn."""
    odds = jnp.where(jnp.arange(20_000) % 2, jax.random.uniform(jax.random.key(0), (20_000,)), 0.0)
    upper = jnp.cumsum(odds)
    risen = np.flatnonzero((np.asarray(odds)[1:] == 0) & (np.diff(np.asarray(upper)) > 0)) + 1
    assert len(risen)
    points = jnp.concatenate([(upper[risen - 1] + upper[risen]) / 2 / upper[-1], jnp.asarray([0.0, 1.0])])
    monkeypatch.setattr(jax.random, "uniform", lambda *_: points)
    times = draw_clients(jax.random.key(0), odds[:, None], len(points), jnp.asarray(len(points)))
    assert times.sum() == len(points)
    assert not times[odds == 0].any()


@pytest.mark.parametrize(
    ("argument", "value"), [("every", 0), ("proximal", -1.0), ("proximal", float("nan")), ("smallest_importance", 0.0)]
)
def test_fedsoft_refuses_what_cannot_be(argument, value):
    with pytest.raises(ValueError, match=argument):
        fedsoft(nn.linear(), clusters=2, local=OWN, **{argument: value})
