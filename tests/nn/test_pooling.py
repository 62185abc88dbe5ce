"""Pooling against Flax's: the same values, the same gradients away from ties, a subgradient at ties."""

import functools

import chex
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

from fedjax_cluster.nn import avg_pool, max_pool
from fedjax_cluster.nn.merged_pooling import FEW_CHANNELS

WINDOWS = [
    ((2, 2), (2, 2), "VALID"),  # the image's last row and column are left out
    ((3, 3), (2, 2), "SAME"),
    ((2, 3), (1, 2), ((1, 1), (0, 2))),
    ((2, 2), (3, 3), "VALID"),
    ((12, 11), (12, 11), "VALID"),  # more positions than a byte holds
    ((2, 2), None, "VALID"),
]


def image(*shape):
    return jax.random.normal(jax.random.key(0), shape, jnp.float32)


def flax_avg_pool(*arguments):
    with jax.numpy_dtype_promotion("standard"):  # Flax divides a float by an integer
        return linen.avg_pool(*arguments)


@pytest.mark.parametrize("window", [((2, 2), (2, 2), "VALID"), ((3, 3), (2, 2), "SAME")])
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int32])
def test_integers(window, dtype):
    """Maxima under padding ended in an OverflowError; sums of bytes began anew at 256."""
    x = jnp.arange(200, 250).reshape(1, 5, 5, 2).astype(dtype)
    largest = max_pool(x, *window)
    assert largest.dtype == dtype
    np.testing.assert_array_equal(largest, linen.max_pool(x.astype(jnp.float32), *window))
    np.testing.assert_allclose(avg_pool(x, *window), flax_avg_pool(x.astype(jnp.float32), *window), rtol=1e-6)


@functools.cache
def with_derivatives(pool, arguments):
    """Values, gradient, directional derivative, and the Hessian of a nonlinear function times a vector."""

    @jax.jit
    def run(x, direction):
        out, pull = jax.vjp(lambda x: pool(x, *arguments), x)

        def nonlinear(x):
            return jnp.sum(pool(jnp.tanh(x), *arguments) ** 3)

        return (
            out,
            pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)),
            jax.jvp(lambda x: pool(x, *arguments), (x,), (direction,))[1],
            jax.grad(lambda x: jnp.vdot(jax.grad(nonlinear)(x), direction))(x),
        )

    x = image(2, 13, 11, 3)
    return run(x, jnp.sin(x))


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
def test_max_pool_is_that_of_flax(window):
    (out, *ours), (expected, gradient, *_) = (with_derivatives(pool, window) for pool in (max_pool, linen.max_pool))
    chex.assert_trees_all_equal(out, expected)
    chex.assert_trees_all_close(ours[0], gradient, atol=1e-6)


@pytest.mark.parametrize("window", WINDOWS[:3])
def test_avg_pool_is_that_of_flax(window):
    ours, expected = (with_derivatives(pool, window) for pool in (avg_pool, flax_avg_pool))
    chex.assert_trees_all_close(ours, expected, rtol=1e-7, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("window", [*WINDOWS[:4], ((2, 3), (2, 3), ((0, 1), (1, 0)))])
@pytest.mark.parametrize("pool", [max_pool, avg_pool])
def test_gradients_are_those_of_finite_differences(pool, window):
    """Exact within one linear piece of the maximum: a step of at most 0.4 lets no value overtake the next, 1 apart."""
    x = jax.random.permutation(jax.random.key(0), jnp.arange(84.0) - 42).reshape(1, 7, 6, 2)

    def run(x):
        return pool(x, *window)

    weights = jnp.sin(jnp.arange(run(x).size, dtype=jnp.float32)).reshape(run(x).shape)

    def transpose(x):
        return jax.vjp(run, x)[1](weights)

    for fn in (run, transpose):
        check_grads(jax.jit(fn), (x,), order=1, modes=("fwd", "rev"), atol=5e-4, rtol=5e-4, eps=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS[:3])
def test_max_pool_to_second_order(window):
    """Against finite differences of the gradient, which XLA's maximum does not support."""
    x = image(2, 13, 11, 3)
    direction = jnp.sin(x)
    *_, moved, curvature = with_derivatives(max_pool, window)
    step = 1e-3

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(max_pool(jnp.tanh(x), *window) ** 3))(x)

    def pooled(x):
        return max_pool(x, *window)

    for fn, derivative in ((pooled, moved), (gradient, curvature)):
        differences = (fn(x + step * direction) - fn(x - step * direction)) / (2 * step)
        # A step can move another input past a maximum; that may happen in a few windows only.
        assert np.mean(np.abs(differences - derivative) > 2e-2) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("window", [((2, 2), (2, 2), "VALID"), ((3, 3), (2, 2), "SAME")])
def test_ties_send_the_gradient_to_the_first(window):
    x = jnp.zeros((1, 4, 4, 1))
    out, pull = jax.vjp(lambda x: max_pool(x, *window), x)
    weights = jnp.arange(1.0, out.size + 1).reshape(out.shape)
    (gradient,) = pull(weights)
    expected = np.zeros((4, 4))
    for i in range(2):
        for j in range(2):
            expected[2 * i, 2 * j] = weights[0, i, j, 0]
    chex.assert_trees_all_equal(gradient[0, :, :, 0], expected.astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
def test_an_accelerator_takes_its_own(window, monkeypatch):
    x = image(2, 13, 11, FEW_CHANNELS + 1)

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(max_pool(x, *window) ** 3))(x)

    expected, lowered = gradient(x), jax.jit(gradient).trace(x)
    texts = {each: lowered.lower(lowering_platforms=(each,)).as_text() for each in ("cpu", "tpu", "cuda")}
    assert {each: "reduce_window" in text for each, text in texts.items()} == {"cpu": False, "tpu": True, "cuda": False}
    monkeypatch.setattr(lax, "platform_dependent", lambda *given, default, **own: default(*given))
    chex.assert_trees_all_close(gradient(x), expected, rtol=1e-6)


@pytest.mark.slow
def test_maps_over_clients():
    x = image(3, 2, 6, 6, 4)

    def one(x):
        return jax.value_and_grad(lambda x: jnp.sum(max_pool(x, (2, 2), (2, 2)) ** 2))(x)

    values, gradients = jax.tree.map(lambda *rows: jnp.stack(rows), *[one(client) for client in x])
    for mapped in (jax.vmap(one)(x), lax.map(one, x)):
        chex.assert_trees_all_close(mapped[0], values, rtol=1e-6)
        chex.assert_trees_all_equal(mapped[1], gradients)


def test_infinities_pass():
    x = jnp.full((1, 2, 2, 1), -jnp.inf)
    assert max_pool(x, 2, 2)[0, 0, 0, 0] == -jnp.inf
    assert jnp.isnan(max_pool(x.at[0, 1, 0, 0].set(jnp.nan), 2, 2)[0, 0, 0, 0])


@pytest.mark.parametrize(
    ("shape", "arguments", "complaint"),
    [
        ((4, 4, 1), ((2, 2),), "N, H, W, C"),
        ((1, 4, 4, 1), ((5, 5),), "does not fit"),
        ((1, 4, 4, 1), ((2, 2), 0), "strides"),
        ((1, 4, 4, 1), ((2, 2, 2),), "window_shape"),
        ((1, 4, 4, 1), ((2, 2), 2, "FULL"), "padding"),
    ],
)
@pytest.mark.parametrize("pool", [max_pool, avg_pool])
def test_mistakes_raise(pool, shape, arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        pool(jnp.ones(shape), *arguments)
