"""The matrix product of dense layers against `x @ kernel`, in every order of derivative and under every map."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from fedjax_cluster import nn
from fedjax_cluster.nn.dense_product import product
from fedjax_cluster.nn.flops import gradient_flops
from fedjax_cluster.types import DatasetInfo, Variables
from tests.devices import needs_two, on_a_cpu

SPREAD = 528  # features that 512 are laid out as


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def with_gradients(dense):
    return lambda x, kernel: jax.value_and_grad(lambda *a: jnp.sum(jnp.tanh(dense(*a)) ** 2), argnums=(0, 1))(x, kernel)


def assert_close(actual, expected, tolerance=1e-5):
    """Each leaf within `tolerance` of the largest entry expected in it."""
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * max(np.abs(theirs).max(), 1e-30))


@pytest.mark.parametrize("inputs", [512, 513])
@pytest.mark.parametrize("rows", [1, 15, 16, 33])
@pytest.mark.parametrize("features", [7, 21])
def test_values_and_gradients(rows, inputs, features):
    x, kernel = normal(rows, inputs), normal(inputs, features, seed=1) / 30
    assert_close(jax.jit(with_gradients(product))(x, kernel), jax.jit(with_gradients(jnp.matmul))(x, kernel))


@pytest.mark.slow
@pytest.mark.parametrize("features", [2, 21])
def test_gradients_of_gradients_are_those_of_finite_differences(features):
    """Of the bilinear function, of its two transposes, and of theirs; central differences are exact for any step."""
    x, kernel, y = normal(16, 512), normal(512, features, seed=1), normal(16, features, seed=2)

    def to_x(kernel, y):
        return jax.vjp(lambda x: product(x, kernel), x)[1](y)[0]

    def to_kernel(x, y):
        return jax.vjp(lambda kernel: product(x, kernel), kernel)[1](y)[0]

    for run, operands in ((product, (x, kernel)), (to_x, (kernel, y)), (to_kernel, (x, y))):
        weights = normal(*jax.eval_shape(run, *operands).shape, seed=9)

        def transposes(*operands, run=run, weights=weights):
            return jax.vjp(run, *operands)[1](weights)

        for fn in (run, transposes):
            check_grads(jax.jit(fn), operands, order=1, modes=("fwd", "rev"), atol=2e-4, rtol=2e-4, eps=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [15, 16])
@pytest.mark.parametrize("inputs", [256, 512, 1536])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "cuda", "tpu"])
def test_rows_are_spread_where_they_would_share_cache_sets(rows, inputs, dtype, mapped, backend):
    """On a CPU alone, from sixteen rows on, if a row has a multiple of 2 KiB."""
    x, kernel = jnp.ones((3, rows, inputs), dtype), jnp.ones((3, inputs, 21), dtype)
    run = jax.vmap(with_gradients(product)) if mapped else with_gradients(product)
    given = (x, kernel) if mapped else (x[0], kernel[0])
    program = jax.jit(run).trace(*given).lower(lowering_platforms=(backend,)).as_text()
    size = jnp.dtype(dtype).itemsize
    expected = backend == "cpu" and rows == 16 and inputs * size in (2048, 6144)
    assert (f"{rows}x{inputs + 64 // size}x" in program) == expected


@pytest.mark.parametrize("mapped", [False, True])
def test_the_precision_is_that_of_where_the_product_is_written(mapped):
    def precise(x, kernel):
        with jax.default_matmul_precision("highest"):
            return product(x, kernel)

    run = jax.vmap(with_gradients(precise)) if mapped else with_gradients(precise)
    shape = (2,) if mapped else ()
    program = jax.jit(run).trace(jnp.ones((*shape, 4, 5)), jnp.ones((*shape, 5, 6)))
    products = [
        line for line in program.lower(lowering_platforms=("tpu",)).as_text().splitlines() if "dot_general" in line
    ]
    assert len(products) == 3
    assert all("HIGHEST" in line for line in products)


@on_a_cpu("the compiled products have these shapes")
def test_the_compiler_leaves_the_products_as_they_are():
    def compiled(features):
        operands = jnp.ones((16, 512)), jnp.ones((512, features))
        return jax.jit(with_gradients(product)).lower(*operands).compile().as_text()

    assert f"f32[{SPREAD},21]" in compiled(21)
    assert "f32[20,512]" in compiled(20)
    assert not any(f"{size}]" in compiled(20) for size in (SPREAD, f"[{SPREAD},20"))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 2), (2, None)])
@pytest.mark.parametrize("features", [2, 21])
def test_vmap(axes, features):
    x, kernel = normal(16, 512), normal(512, features, seed=1) / 30
    x, kernel = (
        array if axis is None else jnp.stack([array, 2 * array, jnp.cos(array)], axis)
        for array, axis in zip((x, kernel), axes, strict=True)
    )
    ours, theirs = (jax.jit(jax.vmap(with_gradients(dense), axes))(x, kernel) for dense in (product, jnp.matmul))
    assert_close(ours, theirs)

    def total(x, kernel, dense):
        return jnp.sum(jnp.tanh(jax.vmap(dense, axes)(x, kernel)) ** 2)

    ours, theirs = (jax.jit(jax.grad(total, (0, 1)), static_argnums=2)(x, kernel, f) for f in (product, jnp.matmul))
    assert_close(ours, theirs)


@needs_two
@pytest.mark.parametrize("shared", [False, True])
def test_on_a_mesh(shared):
    """Clients' own kernels, and one of all of them, whose gradient is summed over the devices."""
    x, kernel = normal(4, 16, 512), normal(4, 512, 3, seed=1) / 30
    kernel = kernel[0] if shared else kernel
    mesh = jax.make_mesh((2,), ("clients",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    axes, spec = (0, None if shared else 0), P() if shared else P("clients")

    def gradients(dense):
        def of_kernel(x, kernel):
            def loss(kernel):
                def one(x, kernel):
                    return jnp.sum(jnp.tanh(dense(x, kernel)) ** 2)

                if shared:
                    return jnp.sum(lax.map(lambda row: one(row, kernel), x))
                return jnp.sum(lax.map(lambda row: one(*row), (x, kernel)))

            return jax.grad(loss)(kernel)

        return of_kernel

    mapped = jax.shard_map(gradients(product), mesh=mesh, in_specs=(P("clients"), spec), out_specs=spec)
    expected = jax.jit(jax.vmap(gradients_of_one, axes))(x, kernel)
    assert_close(jax.jit(mapped)(x, kernel), expected.sum(0) if shared else expected)


def gradients_of_one(x, kernel):
    return jax.grad(lambda kernel: jnp.sum(jnp.tanh(x @ kernel) ** 2))(kernel)


@pytest.mark.slow
def test_networks_have_it_in_every_dense_layer():
    """Outputs, gradients and a Hessian times a vector are Flax's own; the FLOPs are counted."""
    model, info, x, y = nn.mlp((512, 9)), DatasetInfo("wide", (32, 16), 10), normal(16, 32, 16), jnp.arange(16) % 10
    params = model.init(jax.random.key(0), info).params

    def plain(params):
        hidden = x.reshape(16, -1)
        for layer in ("hidden_0", "hidden_1"):
            hidden = jax.nn.relu(hidden @ params[layer]["kernel"] + params[layer]["bias"][None])
        return model.loss(hidden @ params["output"]["kernel"] + params["output"]["bias"][None], y).mean()

    def ours(params):
        return model.loss(model.apply(Variables(params, {}), x, train=True)[0], y).mean()

    def all_of_it(loss):
        gradient = jax.grad(loss)
        return lambda params: (
            loss(params),
            gradient(params),
            jax.jvp(gradient, (params,), (jax.tree.map(jnp.ones_like, params),))[1],
        )

    chex.assert_trees_all_equal_shapes(jax.eval_shape(ours, params), jax.eval_shape(plain, params))
    assert_close(jax.jit(all_of_it(ours))(params), jax.jit(all_of_it(plain))(params), 2e-5)
    assert str(jax.make_jaxpr(jax.grad(ours))(params)).count("dense_product[") == 3 * 3 - 1
    products = 512 * 512 + 512 * 9 + 9 * 10
    assert gradient_flops(model, info, 16) == 16 * 2 * (3 * products - 512 * 512)
