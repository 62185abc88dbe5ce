"""Pooling with the clients among the channels, as a TPU does it: the values and derivatives of the plain form."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fedjax_cluster.nn import convolution, max_pool, merged_pooling
from fedjax_cluster.nn.merged_pooling import FEW_CHANNELS, FEWEST_CLIENTS, merged_max_pool
from fedjax_cluster.nn.pooling import _own_max_pool
from fedjax_cluster.nn.windows import Window


def image(*shape):
    return jax.random.normal(jax.random.key(0), shape, jnp.float32)


def derivatives(pool):
    """Values, gradient, directional derivative, and the Hessian of a nonlinear function times a vector."""

    def run(x, direction):
        def nonlinear(x):
            return jnp.sum(pool(jnp.tanh(x)) ** 3)

        return (
            pool(x),
            jax.grad(nonlinear)(x),
            jax.jvp(pool, (x,), (direction,))[1],
            jax.jvp(jax.grad(nonlinear), (x,), (direction,))[1],
            jax.grad(lambda x: jnp.vdot(jax.grad(nonlinear)(x), direction))(x),
        )

    return run


@pytest.mark.parametrize("shape", [(2, 2), (3, 2)])
@pytest.mark.parametrize(("maps", "many"), [(0, False), (1, False), (2, False), (1, True)])
def test_is_the_plain_form(shape, maps, many, monkeypatch):
    """Whatever it is mapped over; rows and columns beyond the last window, and ties, which go to the first.

    Over many clients in XLA's own form.
    """
    monkeypatch.setattr(merged_pooling, "FEWEST_CLIENTS", 2 if many else 100)
    x = jnp.round(4 * image(3, 2, 2, 13, 11, 4)) / 4
    x = x[(0,) * (2 - maps)]
    # Of another axis: the tangent is mapped along with the image wherever its clients are.
    direction = jnp.moveaxis(jnp.sin(x), 0, 1) if maps == 1 else jnp.sin(x)
    merged, plain = (
        derivatives(pool)
        for pool in (lambda x: merged_max_pool(x, shape), lambda x: _own_max_pool(x, shape, Window(shape)))
    )
    if maps == 1:
        merged, plain = (jax.vmap(run, (0, 1)) for run in (merged, plain))
    if maps == 2:
        merged, plain = (jax.vmap(jax.vmap(run)) for run in (merged, plain))
    lowered = jax.jit(merged).lower(x, direction)
    assert ("select_and_scatter" in lowered.as_text()) is many
    chex.assert_trees_all_close(lowered.compile()(x, direction), jax.jit(plain)(x, direction), atol=1e-6)


def test_one_image_and_several_directions():
    x, directions = image(2, 6, 6, 3), image(5, 2, 6, 6, 3)

    def moved(pool):
        return jax.jit(jax.vmap(lambda each: jax.jvp(pool, (x,), (each,))[1]))(directions)

    plain = moved(lambda x: _own_max_pool(x, (2, 2), Window((2, 2))))
    chex.assert_trees_all_equal(moved(lambda x: merged_max_pool(x, (2, 2))), plain)


def network(x, kernel, wider):
    """Few channels, then more: the loss of one client on kernels of its own or of all."""
    out = max_pool(convolution(x, kernel), 2, 2)
    return jnp.sum(jnp.tanh(max_pool(convolution(out, wider), 2, 2)) ** 2)


def kernels(width):
    return image(3, 3, 1, 6) / 3, image(3, 3, 6, width) / 9


@pytest.mark.optimized  # XLA's older code generator, which tests have, gives other gradients for the plain forms
@pytest.mark.parametrize("shared", [False, True])
def test_a_tpu_trains_with_the_clients_among_the_channels(shared, monkeypatch):
    """Fault: a gradient whose images are split into clients first, four times as large in a TPU's memory."""
    x, (kernel, wider) = image(5, 9, 12, 12, 1), kernels(FEW_CHANNELS + 2)
    own = (
        (kernel, wider)
        if shared
        else jax.tree.map(lambda leaf: jnp.stack([leaf * n for n in range(1, 6)]), (kernel, wider))
    )
    axes = (0, None, None) if shared else (0, 0, 0)
    gradients = jax.jit(jax.vmap(jax.value_and_grad(network, (1, 2)), axes))
    text = gradients.trace(x, *own).lower(lowering_platforms=("tpu",)).as_text()
    # The wider layer's are XLA's; those of the first have no window operation at all.
    assert text.count("stablehlo.reduce_window") == text.count("stablehlo.select_and_scatter") == 1
    # Both layers forwards, the kernels' gradients of both and the image's of one.
    assert text.count("feature_group_count = 5") == 5
    forward = jax.jit(jax.vmap(network, axes)).trace(x, *own).lower(lowering_platforms=("tpu",)).as_text()
    # Nothing is gained where nothing is trained.
    assert forward.count("stablehlo.reduce_window") == 2
    assert ("feature_group_count = 5" in forward) is not shared
    expected = gradients(x, *own)
    jax.clear_caches()
    monkeypatch.setattr(lax, "platform_dependent", lambda *given, default, **own: default(*given))
    found = jax.jit(jax.vmap(jax.value_and_grad(lambda *given: network(*given), (1, 2)), axes))(x, *own)
    chex.assert_trees_all_close(
        *jax.tree.map(lambda leaf, scale: leaf / jnp.max(jnp.abs(scale)), (found, expected), (expected,) * 2), atol=1e-5
    )


def test_a_tpu_trains_many_clients_as_xla_has_them():
    """Fault: of 128 clients, whose images fill the lanes, a round takes 1.23 times the cycles."""
    x, (kernel, wider) = image(FEWEST_CLIENTS, 9, 4, 4, 1), kernels(8)
    gradients = jax.jit(jax.vmap(jax.grad(network, (1, 2)), (0, None, None)))
    text = gradients.trace(x, kernel, wider).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.select_and_scatter") == 2
    few = gradients.trace(x[:-1], kernel, wider).lower(lowering_platforms=("tpu",)).as_text()
    assert few.count("stablehlo.select_and_scatter") == 0
    # Their gradients are each client's; of few, the first kernel is copied for each.
    groups = [each.count(f"feature_group_count = {count}") for each, count in ((text, len(x)), (few, len(x) - 1))]
    assert groups == [2, 3]


def test_wide_kernels_are_not_copied_for_each_client():
    """A copy for each of a kernel with more numbers than its images would be most of the memory."""
    x, kernel = image(5, 1, 4, 4, 6), image(4, 4, 6, 20)
    gradient = jax.vmap(jax.grad(lambda x, kernel: jnp.sum(convolution(x, kernel) ** 2)), (0, None))
    assert kernel.size > x[0].size
    text = jax.jit(gradient).trace(x, kernel).lower(lowering_platforms=("tpu",)).as_text()
    assert "feature_group_count = 5" not in text


def test_nobody_is_mapped_over():
    nobody = jnp.zeros((0, 2, 4, 4, 3))
    pooled = jax.vmap(jax.grad(lambda x: jnp.sum(max_pool(x, 2, 2) ** 2)))
    assert jax.jit(pooled)(nobody).shape == nobody.shape
    kernel = image(3, 3, 3, 4)
    convolved = jax.vmap(jax.grad(lambda x, kernel: jnp.sum(convolution(x, kernel) ** 2)), (0, None))
    assert jax.jit(convolved)(nobody, kernel).shape == nobody.shape
