"""First models that are trained on clients far apart: the traversal, its costs, and what it is for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_cluster import faults, local, nn, parallel
from fedjax_cluster.algorithms import gradient_loss, ifca
from fedjax_cluster.algorithms.round import labels, start_models
from fedjax_cluster.algorithms.starts import models_of_clients
from fedjax_cluster.clustering.scores import adjusted_rand_index
from fedjax_cluster.simulation.loop import simulate
from tests.federations import INFO, as_lists, blobs

MODEL = nn.linear()
RATE, ROUNDS = 0.3, 6
WHOLE = local.sgd(1.0, batch_size=None, steps=1)
ONE = parallel.client_mapping("scan", devices=jax.devices()[:1])


def softmax(x, kernel, bias):
    scores = x @ kernel + bias
    scores = np.exp(scores - scores.max(1, keepdims=True))
    return scores / scores.sum(1, keepdims=True)


def loss(model, x, y):
    return -np.log(softmax(x, *model)[np.arange(len(y)), y]).mean()


def descended(model, x, y, momentum=0.0, rounds=ROUNDS):
    """Gradient descent on one client, with heavy-ball momentum."""
    model, velocity = [np.array(part, float) for part in model], [0.0, 0.0]
    for _ in range(rounds):
        error = softmax(x, *model)
        error[np.arange(len(y)), y] -= 1
        gradient = [x.T @ error / len(y), error.mean(0)]
        velocity = [momentum * v + g for v, g in zip(velocity, gradient, strict=True)]
        model = [part - RATE * v for part, v in zip(model, velocity, strict=True)]
    return model


def farthest_first(trained, data, there, first):
    """Eight clients from `first` on, and the four whose models are best together."""
    drawn = [first]
    while len(drawn) < 8:
        least = {i: min(loss(trained[j], *data[i]) for j in drawn) for i in there if i not in drawn}
        drawn.append(max(least, key=least.__getitem__))
    kept = list(drawn)
    while len(kept) > 4:
        rest = [[j for j in kept if j != one] for one in kept]
        kept = min(rest, key=lambda some: sum(min(loss(trained[j], *data[i]) for j in some) for i in there))
    return kept, drawn


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_each_next_client_is_the_one_that_all_models_suit_least(momentum):
    """Against NumPy. Faults: the nearest or a random client, losses of the last model alone, another's rows; the first
    models kept in place of the best; those left out whose going costs most.
    """
    federation = blobs(clients=9, groups=3)
    population = parallel.place_population(federation.train, federation.info, ONE)
    models, present = start_models(MODEL, jax.random.key(0), population, 4)
    server = optax.sgd(RATE, momentum=momentum)
    found, costs = models_of_clients(
        jax.random.key(1), MODEL, WHOLE, server, models, population, present & (jnp.arange(9) != 4), ROUNDS
    )
    data = as_lists(federation)
    first = [np.asarray(models.params["output"][part][0], float) for part in ("kernel", "bias")]
    trained = [descended(first, *rows, momentum) for rows in data]
    ours = [[np.asarray(found.params["output"][part][k]) for part in ("kernel", "bias")] for k in range(4)]
    there = [i for i in range(9) if i != 4]
    expected = [farthest_first(trained, data, there, one) for one in there]
    # The first client is any; the models tell which.
    near = [
        all(np.allclose(a[0], trained[i][0], atol=2e-5) for a, i in zip(ours, kept, strict=True))
        for kept, _ in expected
    ]
    assert any(near)
    kept, drawn = expected[near.index(True)]
    for model, client in zip(ours, kept, strict=True):
        for part, of_client in zip(model, trained[client], strict=True):
            np.testing.assert_allclose(part, of_client, rtol=2e-4, atol=2e-5)
    assert drawn[:4] != kept
    assert {int(federation.group[i]) for i in kept} == {0, 1, 2}
    assert costs.models_down == 8 * ROUNDS + 8 * 8
    assert (costs.models_up, costs.gradient_evaluations, costs.loss_evaluations) == (8 * ROUNDS, 8 * ROUNDS, 8 * 8)


@pytest.mark.slow
@pytest.mark.parametrize("method", [ifca, gradient_loss])
def test_groups_seldom_go_without_a_model(method):
    """Groups here are only mostly apart; from random models fewer of them find one of their own."""
    agreement = {"clients": [], "random": []}
    for start, found in agreement.items():
        algorithm = method(MODEL, clusters=3, local=local.sgd(0.3, batch_size=None, steps=2), start=start)
        for seed in range(4):
            federation = blobs(clients=9, groups=3, ragged=False, seed=seed)
            result = simulate(algorithm, federation, rounds=4, seed=seed, eval_every=4, mapping=ONE)
            found.append(float(adjusted_rand_index(labels(result.state.clients.membership), federation.group)))
    assert np.mean(agreement["clients"]) > 0.85
    assert np.mean(agreement["clients"]) > np.mean(agreement["random"]) + 0.1


@pytest.mark.parametrize("fault", [faults.drop_out(0.4), faults.nan_updates(1.0)])
def test_a_round_in_which_a_client_sends_nothing_is_one_without_a_step(fault):
    """Faults: one lost round spoils the whole training; a lost round moves the server's momentum."""
    federation = blobs(clients=6, groups=2)
    afflicted = faults.afflicted(federation, fault, seed=0)
    population = parallel.place_population(afflicted.train, federation.info, ONE)
    models, present = start_models(MODEL, jax.random.key(0), population, 2)
    spoilt = dataclasses.replace(WHOLE, fault=fault.in_training)
    server = optax.sgd(RATE, momentum=0.5)
    found, _ = models_of_clients(jax.random.key(1), MODEL, spoilt, server, models, population, present, ROUNDS)
    if fault == faults.nan_updates(1.0):
        jax.tree.map(np.testing.assert_array_equal, found.params, models.params)
        return
    first = [np.asarray(models.params["output"][part][0], float) for part in ("kernel", "bias")]
    lost = []
    for k in range(2):
        ours = [np.asarray(found.params["output"][part][k]) for part in ("kernel", "bias")]
        error = {
            rounds: min(
                np.abs(ours[0] - descended(first, *rows, 0.5, rounds)[0]).max() for rows in as_lists(federation)
            )
            for rounds in range(1, ROUNDS + 1)
        }
        assert min(error.values()) < 1e-4
        lost.append(ROUNDS - min(error, key=error.__getitem__))
    assert max(lost) > 0


def test_a_client_whose_training_diverges_is_no_start():
    federation = blobs(clients=6, groups=2)
    population = parallel.place_population(federation.train, federation.info, ONE)
    models, present = start_models(MODEL, jax.random.key(0), population, 2)
    found, _ = models_of_clients(
        jax.random.key(1), MODEL, WHOLE, optax.sgd(float("inf")), models, population, present, ROUNDS
    )
    for one, other in zip(jax.tree.leaves(found.params), jax.tree.leaves(models.params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_number_added_to_the_loss_draws_the_same_clients():
    """Losses may lie below zero, as those of a density do; the first client was drawn over and over then."""
    population = parallel.place_population(blobs(clients=9, groups=3).train, INFO, ONE)
    models, present = start_models(MODEL, jax.random.key(0), population, 2)
    low = MODEL._replace(loss=lambda outputs, y: MODEL.loss(outputs, y) - 9.0)
    found, less = (
        models_of_clients(jax.random.key(1), model, WHOLE, optax.sgd(RATE), models, population, present, 2)[0]
        for model in (MODEL, low)
    )
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), found.params, less.params)
