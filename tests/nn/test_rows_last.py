"""Convolution with the rows innermost against XLA's, and networks on it against the same on `nn.convolution`."""

import functools

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
from fedjax_cluster.nn import models, rows_last
from fedjax_cluster.nn.flops import gradient_flops
from fedjax_cluster.nn.rows_last import convolve
from fedjax_cluster.types import DatasetInfo, Variables
from tests.devices import needs_two


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def xla(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("CHWN", "HWIO", "CHWN"))


def assert_close(actual, expected, tolerance=1e-5):
    """Each leaf within `tolerance` of the largest entry expected in it."""
    sizes = jax.tree.map(lambda leaf: max(np.abs(leaf).max(), 1e-30), expected)
    relative = (jax.tree.map(lambda leaf, size: np.asarray(leaf) / size, tree, sizes) for tree in (actual, expected))
    chex.assert_trees_all_close(*relative, rtol=0, atol=tolerance)


def with_gradients(conv):
    return lambda x, kernel: jax.value_and_grad(lambda *a: jnp.sum(jnp.tanh(conv(*a)) ** 2), argnums=(0, 1))(x, kernel)


@pytest.mark.parametrize("size", [(3, 2), (1, 1), (6, 5)])
def test_values_and_gradients_are_those_of_xla(size):
    x, kernel = normal(3, 6, 5, 4), normal(*size, 3, 7, seed=1)
    assert_close(jax.jit(convolve)(x, kernel), xla(x, kernel))
    ours, reference = (jax.jit(with_gradients(conv))(x, kernel) for conv in (convolve, xla))
    assert_close(ours, reference)


@pytest.mark.slow
@pytest.mark.parametrize(("rows_at_once", "pieces"), [(1, 6), (2, 3), (4, 2), (6, 1)])
def test_pieces_change_nothing_but_rounding(monkeypatch, rows_at_once, pieces):
    """Six output rows, whose patches have 2·3·3 × 4·5 numbers each; of four, three are taken, which divide six."""
    x, kernel = normal(3, 7, 6, 5), normal(2, 3, 3, 7, seed=1)
    whole = with_gradients(xla)(x, kernel)
    monkeypatch.setattr(rows_last, "MOST_AT_ONCE", 0)
    monkeypatch.setattr(rows_last, "PIECE", rows_at_once * 4 * 2 * 3 * 3 * 4 * 5)
    traced = jax.make_jaxpr(lambda *a: rows_last.FORMS["y"](*a))(x, kernel)  # a new function is traced anew
    loops = str(traced).count(f"length={pieces}\n")
    assert loops == (pieces > 1)
    forms = {wanted: jax.jit(lambda *a, form=form: form(*a)) for wanted, form in rows_last.FORMS.items()}

    def direct(x, kernel):
        y = forms["y"](x, kernel)
        back = jax.grad(lambda y: jnp.sum(jnp.tanh(y) ** 2))(y)
        return jnp.sum(jnp.tanh(y) ** 2), (forms["x"](kernel, back), forms["kernel"](x, back))

    assert_close(direct(x, kernel), whole)


@pytest.mark.slow
def test_gradients_of_gradients_are_those_of_finite_differences():
    """Of the bilinear function, of its two transposes, and of theirs; central differences are exact for any step."""
    x, kernel, y = normal(2, 5, 4, 3), normal(2, 3, 2, 4, seed=1), normal(4, 4, 2, 3, seed=2)

    def to_x(kernel, y):
        return jax.vjp(lambda x: convolve(x, kernel), x)[1](y)[0]

    def to_kernel(x, y):
        return jax.vjp(lambda kernel: convolve(x, kernel), kernel)[1](y)[0]

    for run, operands in ((convolve, (x, kernel)), (to_x, (kernel, y)), (to_kernel, (x, y))):
        weights = normal(*jax.eval_shape(run, *operands).shape, seed=9)

        def transposes(*operands, run=run, weights=weights):
            return jax.vjp(run, *operands)[1](weights)

        for fn in (run, transposes):
            check_grads(jax.jit(fn), operands, order=1, modes=("fwd", "rev"), atol=2e-5, rtol=2e-5, eps=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 3), (3, None)])
@pytest.mark.parametrize("backend", ["cpu", "cuda", "tpu"])
def test_vmap(axes, backend, monkeypatch):
    x, kernel = normal(2, 6, 5, 3), normal(3, 2, 2, len(backend + str(axes)), seed=1)  # JAX remembers batched programs
    x, kernel = (
        array if axis is None else jnp.stack([array, 2 * array, jnp.cos(array)], axis)
        for array, axis in zip((x, kernel), axes, strict=True)
    )
    expected = jax.jit(jax.vmap(with_gradients(xla), axes))(x, kernel)
    run = jax.jit(jax.vmap(with_gradients(convolve), axes))
    lowered = run.trace(x, kernel).lower(lowering_platforms=(backend,)).as_text()
    assert ("while" in lowered) == (backend == "cpu")
    if backend != "cpu":  # its form, on this machine
        monkeypatch.setattr(lax, "platform_dependent", lambda *given, default, **own: own.get(backend, default)(*given))
        monkeypatch.setattr(rows_last, "FORMS", rows_last.GPU_FORMS if backend == "cuda" else rows_last.XLA_FORMS)
        run = jax.jit(jax.vmap(with_gradients(lambda *given: convolve(*given)), axes))
    assert_close(run(x, kernel), expected)


@pytest.mark.slow
@needs_two
@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("forms", ["FORMS", "XLA_FORMS"])
def test_own_weights_on_a_mesh(forms, together, monkeypatch):
    monkeypatch.setattr(rows_last, "FORMS", getattr(rows_last, forms))
    if forms == "XLA_FORMS":
        monkeypatch.setattr(lax, "platform_dependent", lambda *given, default, **own: default(*given))
    x, kernel = normal(4, 2, 6, 5, 3), normal(4, 3, 3, 2, len(forms), seed=1)  # JAX remembers batched programs
    mesh = jax.make_mesh((2,), ("clients",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def loop(x, kernel):
        one = with_gradients(lambda *given: convolve(*given))
        return lax.map(lambda row: one(*row), (x, kernel), batch_size=together)

    mapped = jax.shard_map(loop, mesh=mesh, in_specs=P("clients"), out_specs=P("clients"))
    assert_close(jax.jit(mapped)(x, kernel), jax.jit(jax.vmap(with_gradients(xla)))(x, kernel))


NETWORKS = {
    "lenet5": (nn.lenet5(), (28, 28)),
    "same padding, colours": (nn.lenet5(padding="SAME"), (16, 16, 3)),
    "a rest beside the windows": (nn.cnn((5, 16), kernel_size=(3, 2), pool=(3, 1), dense=(7,)), (11, 10, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("lenet5", marks=pytest.mark.slow), *list(NETWORKS)[1:]])
def test_networks_are_those_on_the_other_layout(name, monkeypatch):
    """The same parameters, outputs, gradients, and Hessian times a vector."""
    model, shape = NETWORKS[name]
    info, x, y = DatasetInfo(name, shape, 10), normal(7, *shape), jnp.arange(7) % 10

    def loss(params):
        return model.loss(model.apply(Variables(params, {}), x, train=True)[0], y).mean()

    def all_of_it(params):
        gradient = jax.grad(loss)
        return loss(params), gradient(params), jax.jvp(gradient, (params,), (jax.tree.map(jnp.ones_like, params),))[1]

    start = model.init(jax.random.key(0), info)
    ours, flops = jax.jit(all_of_it)(start.params), gradient_flops(model, info, 7)
    monkeypatch.setattr(models, "MOST_FEATURES", 0)
    chex.assert_trees_all_equal(model.init(jax.random.key(0), info), start)
    assert_close(ours, jax.jit(functools.partial(all_of_it))(start.params), 2e-5)
    # To the input's gradient the other layout adds the products with what pads it.
    assert 0.7 < flops / gradient_flops(model, info, 7) <= 1
