"""Per-FedAvg: the gradient after an inner step, and personalisation by fine-tuning."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms.fedavg import fedavg
from fedjax_cluster.algorithms.per_fedavg import MetaGradient, per_fedavg
from fedjax_cluster.algorithms.pfedme import pfedme
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys
from tests.federations import as_lists, blobs
from tests.reference import federated
from tests.turns import COUNTS, drawn_batches, linear_models, turns, uneven

ALPHA = 0.4
WHOLE = local.sgd(0.3, batch_size=None, steps=1)


@functools.cache
def started(variant):
    federation = blobs(clients=3, groups=1)
    algorithm = per_fedavg(nn.linear(), local=WHOLE, variant=variant, inner_learning_rate=ALPHA, fine_tuning_steps=2)
    population = parallel.place_population(
        federation.train, federation.info, parallel.client_mapping("scan", devices=jax.devices()[:1])
    )
    state, _ = algorithm.init(run_keys(0).initialization, population)
    new, info = jax.jit(algorithm.step)(jax.random.key(1), state, parallel.whole_population(population))
    return federation, algorithm, population, state, new, info


def model_of(state):
    params = state.clusters.params["output"]
    return tuple(np.asarray(params[name][0], np.float64) for name in ("kernel", "bias"))


def adapted(model, x, y, steps=1):
    change = federated.local_change(model, x, y, ALPHA, steps)
    return tuple(part + delta for part, delta in zip(model, change, strict=True))


def objective_gradient(model, x, y, size=1e-5):
    """Central differences of f(θ − α∇f(θ)) in each parameter."""
    gradients = []
    for place, part in enumerate(model):
        gradient = np.zeros_like(part)
        for entry in np.ndindex(part.shape):
            values = []
            for sign in (1, -1):
                moved = [leaf.copy() for leaf in model]
                moved[place][entry] += sign * size
                values.append(federated.gradient(*adapted(tuple(moved), x, y), x, y)[2])
            gradient[entry] = (values[0] - values[1]) / (2 * size)
        gradients.append(gradient)
    return gradients


def test_hessian_free_is_the_gradient_after_the_inner_step():
    federation, _, _, state, new, info = started("hessian-free")
    start = model_of(state)
    gradients = [objective_gradient(start, x, y) for x, y in as_lists(federation)]
    for place, (before, after) in enumerate(zip(start, model_of(new), strict=True)):
        expected = -0.3 * np.mean([gradient[place] for gradient in gradients], 0)
        np.testing.assert_allclose(after - before, expected, rtol=5e-3, atol=2e-5)
    assert float(info.costs.gradient_evaluations) == 4 * 3


def test_first_order_leaves_the_hessian_out():
    federation, _, _, state, new, info = started("first-order")
    start = model_of(state)
    gradients = [federated.gradient(*adapted(start, x, y), x, y)[:2] for x, y in as_lists(federation)]
    exact = [objective_gradient(start, x, y) for x, y in as_lists(federation)]
    for place, (before, after) in enumerate(zip(start, model_of(new), strict=True)):
        expected = -0.3 * np.mean([gradient[place] for gradient in gradients], 0)
        np.testing.assert_allclose(after - before, expected, rtol=1e-4, atol=1e-5)
        other = -0.3 * np.mean([gradient[place] for gradient in exact], 0)
        assert np.abs(after - before - other).max() > 0.05 * np.abs(other).max()
    assert float(info.costs.gradient_evaluations) == 2 * 3


def test_personalisation_takes_gradient_steps_from_the_global_model():
    federation, algorithm, population, _, state, _ = started("first-order")
    x, y = as_lists(federation)[1]
    client = jax.tree.map(lambda leaf: jnp.asarray(leaf)[1], population.data)
    variables, mixture = jax.jit(algorithm.personalize)(jax.random.key(5), state, client, jnp.asarray(1))
    expected = adapted(model_of(state), x, y, steps=2)
    for name, value in zip(("kernel", "bias"), expected, strict=True):
        np.testing.assert_allclose(variables.params["output"][name][0], value, rtol=1e-4, atol=1e-5)
    assert mixture.tolist() == [1.0]


@pytest.mark.slow
def test_batches_of_a_step_differ():
    """D, D′ and D″ are successive mini-batches: with D = D′ the first-order step would be another."""
    federation = blobs(clients=1, groups=1, rows=16, ragged=False)
    own = local.sgd(0.3, batch_size=4, steps=1)
    seen = []

    def recording(batch_gradient, keys, model, variables, data, number):
        def numbered(keys, model, variables, data, number):
            seen.append(int(number))
            return batch_gradient(keys, model, variables, data, number)

        return plain(numbered, keys, model, variables, data, number)

    plain = MetaGradient("hessian-free", ALPHA, 1e-3)
    model = nn.linear()
    variables = model.init(jax.random.key(0), federation.info)
    client = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), federation.train)
    dataclasses.replace(own, gradient=recording).run(jax.random.key(0), model, variables, client)
    assert seen == [0, 1, 2, 2]


@pytest.mark.slow
def test_every_step_has_mini_batches_of_its_own_in_cohorts_of_unequal_clients():
    """Batches 0 and 1 of the first step, 3 and 4 of the second: with others the model would be another."""
    federation = uneven(groups=1)
    algorithm = per_fedavg(
        nn.linear(), local=local.sgd(0.3, batch_size=4, steps=2), inner_learning_rate=ALPHA, participation=0.5,
        weighting="examples",
    )  # fmt: skip
    for turn in turns(algorithm, federation, 2, batches=6):
        assert len(turn.clients) == 5
        model, changes = linear_models(turn.before.clusters.params)[0], []
        for batches in drawn_batches(turn, federation).values():
            own = model
            for inner, outer in (batches[0:2], batches[3:5]):
                ahead, _ = federated.change_on(own, [inner], ALPHA)
                *slope, _ = federated.gradient(*(part + step for part, step in zip(own, ahead, strict=True)), *outer)
                own = tuple(part - 0.3 * part_slope for part, part_slope in zip(own, slope, strict=True))
            changes.append([end - begun for end, begun in zip(own, model, strict=True)])
        sizes = [COUNTS[i] for i in turn.clients]
        for place, part in enumerate(model_of(turn.after)):
            mean = np.average([change[place] for change in changes], 0, sizes)
            np.testing.assert_allclose(part, model[place] + mean, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_fine_tuned_models_beat_the_global_one_where_groups_contradict():
    federation = blobs(clients=6, groups=3, rows=40)
    own = local.sgd(0.1, batch_size=10, epochs=2)
    plain = simulate(fedavg(nn.linear(), local=own), federation, rounds=20)
    personal = simulate(
        per_fedavg(nn.linear(), local=own, inner_learning_rate=0.1, fine_tuning_steps=20), federation, rounds=20
    )
    assert personal.summary["accuracy"] > plain.summary["accuracy"] + 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "exact"}, "variant is 'exact'"),
        ({"inner_learning_rate": 0.0}, "inner_learning_rate is 0.0"),
        ({"difference": float("nan")}, "difference is nan"),
        ({"fine_tuning_steps": 0}, "fine_tuning_steps is 0"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        per_fedavg(nn.linear(), local=WHOLE, **arguments)


def test_differences_of_gradients_are_refused_in_bfloat16():
    coarse = local.sgd(0.1, batch_size=8, steps=1, precision="bfloat16")
    with pytest.raises(ValueError, match=r"gradients in bfloat16 do not tell its steps of 0\.001 apart"):
        per_fedavg(nn.linear(), local=coarse, variant="hessian-free")
    with pytest.raises(ValueError, match="gradients in bfloat16 do not tell its steps"):
        per_fedavg(nn.mixed_precision(nn.linear()), local=WHOLE, variant="hessian-free")
    assert per_fedavg(nn.linear(), local=coarse, variant="first-order").name == "per_fedavg"


@pytest.mark.parametrize("method", [per_fedavg, pfedme])
def test_a_gradient_of_ones_own_is_refused_by_methods_that_have_theirs(method):
    def mine(batch_gradient, *given):
        return batch_gradient(*given)

    with pytest.raises(ValueError, match=f"but {method.__name__} gives its steps theirs"):
        method(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1, gradient=mine))
