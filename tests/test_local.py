"""What one client does: batches, steps, proximal term, masks."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedjax_cluster import inference, local, nn, tree
from fedjax_cluster.options import changed
from fedjax_cluster.types import ClientData, Variables
from tests.federations import INFO, blobs
from tests.reference import federated

KEY = jax.random.key(0)


def client(rows=20, valid=20, seed=0):
    federation = blobs(clients=1, groups=1, rows=rows, seed=seed, ragged=False)
    x, y, _ = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), federation.train)
    return ClientData(x, y, jnp.asarray(valid, jnp.int32))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**31))
def test_shuffled_rows_is_a_permutation(num_rows, seed):
    rows = jax.jit(local.shuffled_rows, static_argnums=2)(jax.random.key(seed), 0, 300, num_rows)
    assert sorted(np.asarray(rows)[:num_rows].tolist()) == list(range(num_rows))


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [5, 7])
def test_shuffled_rows_is_uniform(num_rows):
    """Every row is equally likely at every place, and every pair at every pair of places (χ², 1 in 10⁴)."""
    keys = jax.random.split(KEY, 8000)
    rows = np.asarray(jax.vmap(lambda key: local.shuffled_rows(key, 0, num_rows, num_rows))(keys))
    for place in range(num_rows):
        assert stats.chisquare(np.bincount(rows[:, place], minlength=num_rows)).pvalue > 1e-4
    pairs = np.bincount(rows[:, 0] * num_rows + rows[:, 1], minlength=num_rows**2).reshape(num_rows, num_rows)
    assert np.diag(pairs).sum() == 0
    assert stats.chisquare(pairs[~np.eye(num_rows, dtype=bool)]).pvalue > 1e-4


def test_shuffled_rows_starts_anywhere():
    whole = local.shuffled_rows(KEY, 0, 50, 50)
    np.testing.assert_array_equal(local.shuffled_rows(KEY, 30, 10, 50), whole[30:40])


@pytest.mark.slow
@pytest.mark.parametrize("valid", [20, 13, 4, 1])
def test_an_epoch_visits_every_example_once(valid):
    data = client(valid=valid)
    data = data._replace(x=jnp.arange(20.0)[:, None], y=jnp.arange(20, dtype=jnp.int32))
    steps = -(-valid // 6)
    for epoch in range(2):
        seen = []
        for step in range(steps):
            x, _, mask = local.mini_batch(KEY, data, 6, epoch * steps + step)
            assert x.shape == (6, 1)
            seen += np.asarray(x)[np.asarray(mask), 0].tolist()
        assert sorted(seen) == list(range(valid))
    first, second = (local.mini_batch(KEY, data, 6, epoch * steps)[0] for epoch in range(2))
    assert valid < 5 or not np.array_equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 4])
def test_full_batch_steps_equal_numpy(steps):
    data = client(valid=15)
    model = nn.linear()
    start = model.init(KEY, INFO)
    result = local.sgd(0.3, batch_size=None, steps=steps).run(KEY, model, start, data)
    x, y = np.asarray(data.x, np.float64)[:15], np.asarray(data.y)[:15]
    own = tuple(np.asarray(start.params["output"][part], np.float64) for part in ("kernel", "bias"))
    change = federated.local_change(own, x, y, 0.3, steps)
    np.testing.assert_allclose(result.delta["output"]["kernel"], change[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result.delta["output"]["bias"], change[1], rtol=1e-4, atol=1e-6)
    assert result.losses.shape == (steps,)
    assert float(result.losses[0]) == pytest.approx(federated.gradient(*own, x, y)[2], rel=1e-5)
    assert int(result.num_examples) == 15


def test_a_single_step_of_rate_one_is_minus_the_gradient_to_full_precision():
    """θ + Δ − θ would lose the digits that keeping four decimals looks at."""
    data, model = client(), nn.linear()
    start = model.init(KEY, INFO)
    huge = jax.tree.map(lambda leaf: leaf + 1000.0, start.params)
    result = local.sgd(1.0, batch_size=None, steps=1).run(KEY, model, Variables(huge, start.stats), data)
    whole = (data.x, data.y, jnp.ones(20, bool))
    gradient = jax.grad(lambda p: local.mean_loss(model, Variables(p, start.stats), whole, train=True)[0])(huge)
    for ours, expected in zip(jax.tree.leaves(result.delta), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(ours, -expected, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_size", "valid", "expected"),
    [(5, 20, 8), (5, 9, 4), (5, 3, 2), (5, 0, 0), (1, 20, 40), (1, 3, 6), (20, 9, 2)],
)
def test_ragged_clients_take_as_many_steps_as_they_have_batches(batch_size, valid, expected):
    result = local.sgd(0.1, batch_size=batch_size, epochs=2).run(
        KEY, nn.linear(), nn.linear().init(KEY, INFO), client(valid=valid)
    )
    assert int(result.num_steps) == expected
    assert np.all(np.asarray(result.losses)[:expected] > 0)
    assert np.all(np.asarray(result.losses)[expected:] == 0)
    assert bool(jnp.any(result.delta["output"]["kernel"] != 0)) == (valid > 0)


def test_padding_rows_change_nothing():
    data = client(valid=9)
    noise = data._replace(x=data.x.at[9:].set(1e6), y=data.y.at[9:].set(2))
    own = local.sgd(0.1, batch_size=4, epochs=2)
    start = nn.linear().init(KEY, INFO)
    one, other = (own.run(KEY, nn.linear(), start, rows) for rows in (data, noise))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


class OfUnitLength(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4, use_bias=False)(x)
        return linen.Dense(3, name="output")(x / jnp.linalg.norm(x, axis=1, keepdims=True))


@pytest.mark.slow
def test_gradients_are_finite_where_those_of_padding_would_not_be():
    """All clients but the longest were rejected."""
    model, data = nn.from_flax(OfUnitLength()), client(valid=9)
    padded, own = data._replace(x=data.x.at[9:].set(0.0)), local.sgd(0.1, batch_size=None, steps=1)

    @jax.jit
    def gradients(start, x):
        def loss(params):
            return model.loss(model.apply(start._replace(params=params), x, train=False)[0], data.y[:9]).mean()

        step = own.run(KEY, model, start, padded).delta
        return jax.grad(loss)(start.params), inference.full_gradient(model, start, padded, chunk=6), step

    expected, found, step = gradients(jax.jit(lambda: model.init(KEY, INFO))(), data.x[:9])
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(step, jax.tree.map(lambda leaf: -0.1 * leaf, expected), rtol=1e-4, atol=1e-6)


class Normed(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.BatchNorm(use_running_average=not train, momentum=0.0, name="norm")(x)
        return linen.Dense(3, name="output")(x)


@pytest.mark.parametrize("batch_size", [None, 20, 64])
def test_statistics_of_a_whole_batch_are_of_the_clients_rows_and_not_of_padding(batch_size):
    """Padding of zeros made them a fraction of what they are."""
    model, data = nn.from_flax(Normed()), client(valid=5)
    padded = data._replace(x=data.x.at[5:].set(0.0))
    own = local.sgd(0.1, batch_size=batch_size, steps=1)
    result = own.run(KEY, model, model.init(KEY, INFO), padded)
    # Five rows go four times into twenty.
    np.testing.assert_allclose(result.stats["norm"]["mean"], np.asarray(data.x[:5]).mean(0), rtol=1e-5, atol=1e-6)
    short = jax.tree.map(lambda leaf: leaf[:5] if leaf.ndim else leaf, padded)
    alone = own.run(KEY, model, model.init(KEY, INFO), short)
    np.testing.assert_allclose(result.losses, alone.losses, rtol=1e-5)


def test_proximal_term_and_weight_decay_enter_the_gradient():
    data, model = client(), nn.linear()
    start = model.init(KEY, INFO)
    anchor = jax.tree.map(lambda leaf: leaf - 1.0, start.params)
    plain = local.sgd(0.1, batch_size=None, steps=1).run(KEY, model, start, data)
    both = local.sgd(0.1, batch_size=None, steps=1, proximal=0.5, weight_decay=0.2)
    result = both.run(KEY, model, start, data, anchor)
    for ours, bare, params in zip(*map(jax.tree.leaves, (result.delta, plain.delta, start.params)), strict=True):
        np.testing.assert_allclose(ours, bare - 0.1 * (0.5 + 0.2 * params), rtol=1e-4, atol=1e-6)


def test_the_proximal_anchor_is_the_start_and_not_the_current_model():
    data, model = client(), nn.linear()
    start = model.init(KEY, INFO)
    plain, near = (
        local.sgd(0.1, batch_size=None, steps=20, proximal=mu).run(KEY, model, start, data).delta for mu in (0.0, 5.0)
    )
    assert float(optax.tree.norm(near)) < 0.5 * float(optax.tree.norm(plain))


@pytest.mark.slow
def test_any_optax_optimiser():
    own = local.sgd(optax.adam(0.01), batch_size=5, steps=6)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        result = own.run(KEY, nn.linear(), nn.linear().init(KEY, INFO), client())
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(result.delta))
    assert 0.01 < largest <= 0.06 + 1e-6


@pytest.mark.slow
def test_first_loss_is_that_of_the_first_step():
    data, model = client(), nn.linear()
    own = local.sgd(0.1, batch_size=5, steps=3)
    start = model.init(KEY, INFO)
    assert float(own.first_loss(KEY, model, start, data)) == pytest.approx(
        float(own.run(KEY, model, start, data).losses[0]), rel=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_a_known_first_gradient_changes_nothing(steps):
    data, model = client(valid=13), nn.linear()
    own = local.sgd(optax.sgd(0.1, momentum=0.9), batch_size=5, steps=steps, weight_decay=0.1, proximal=0.3)
    start = model.init(KEY, INFO)
    first = own.first_gradient(KEY, model, start, data)
    plain, told = (own.run(KEY, model, start, data, first=known) for known in (None, first))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(told), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    # It is used, not computed again.
    doubled = own.run(KEY, model, start, data, first=first._replace(loss=2 * first.loss))
    assert float(doubled.losses[0]) == pytest.approx(2 * float(plain.losses[0]))


def test_other_options_change_nothing_else():
    own = local.sgd(optax.adam(0.1), batch_size=5, epochs=2, weight_decay=0.1)
    for changes in ({"proximal": 0.5}, {"learning_rate": 0.2}):
        assert changed(own, "tested", **changes).to_json() == {**own.to_json(), **changes}
    with pytest.raises(ValueError, match=r"the local update cannot be tested; use local\.sgd"):
        changed(object(), "tested", proximal=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 1, "epochs": 1}, "exactly one"),
        ({}, "exactly one"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 1, "batch_size": 0}, "batch_size is 0"),
        ({"steps": 1, "proximal": -1.0}, "proximal is -1.0"),
        ({"steps": 1, "learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"steps": 1, "learning_rate": float("nan")}, "learning_rate is nan"),
    ],
)
def test_impossible_numbers_are_refused(arguments, message):
    arguments = {"learning_rate": 0.1, "batch_size": 4, **arguments}
    with pytest.raises(ValueError, match=message):
        local.sgd(arguments.pop("learning_rate"), **arguments)


def test_an_optimizer_handed_back_goes_on_where_it_was():
    """Momentum through two rounds of two steps is momentum through four steps; afresh it is not."""
    data, model = client(valid=15), nn.linear()
    optimizer = optax.sgd(0.2, momentum=0.9)
    start = model.init(KEY, INFO)
    whole = local.sgd(optimizer, batch_size=None, steps=4).run(KEY, model, start, data)
    halves = local.sgd(optimizer, batch_size=None, steps=2)

    def second(first, **more):
        middle = start._replace(params=optax.apply_updates(start.params, first.delta))
        return optax.apply_updates(first.delta, halves.run(KEY, model, middle, data, **more).delta)

    first = halves.run(KEY, model, start, data, optimizer=halves.init_optimizer(start.params))
    kept = tree.ravel(second(first, optimizer=first.optimizer))
    np.testing.assert_allclose(kept, tree.ravel(whole.delta), rtol=1e-4, atol=1e-6)
    assert not np.allclose(tree.ravel(second(first)), kept, rtol=1e-2)
