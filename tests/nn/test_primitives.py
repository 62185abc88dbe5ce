"""What the primitives of dense layers and convolutions have in common: precision, dtypes, empty batches."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_cluster import nn
from fedjax_cluster.nn import rows_last
from fedjax_cluster.nn.dense_product import product
from fedjax_cluster.nn.layers import Conv, RowsLastConv

CONV = ("NHWC", "HWIO", "NHWC")
# Operands for which a CPU takes each of the forms, and XLA's own.
CASES = {
    "product": (product, jnp.matmul, (6, 5), (5, 3)),
    "pointwise": (nn.convolution, None, (2, 4, 4, 3), (1, 1, 3, 5)),
    "few channels": (nn.convolution, None, (2, 6, 6, 3), (3, 3, 3, 4)),
    "shifts": (nn.convolution, None, (4, 9, 9, 8), (7, 7, 8, 8)),
    "many features": (nn.convolution, None, (2, 6, 6, 3), (3, 3, 3, 30)),
    "grouped": (functools.partial(nn.convolution, feature_group_count=2), None, (2, 6, 6, 4), (3, 3, 2, 6)),
    "depthwise": (functools.partial(nn.convolution, feature_group_count=4), None, (2, 6, 6, 4), (3, 3, 1, 8)),
    "rows last": (
        rows_last.convolve,
        functools.partial(
            lax.conv_general_dilated, window_strides=(1, 1), padding="VALID", dimension_numbers=("CHWN", "HWIO", "CHWN")
        ),
        (2, 6, 6, 3),
        (3, 3, 2, 4),
    ),
}


def case(name, dtype=jnp.float32):
    """The function, XLA's and the operands."""
    ours, theirs, *shapes = CASES[name]
    options = {} if isinstance(ours, type(nn.convolution)) else ours.keywords
    theirs = theirs or functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=CONV, **options
    )
    rng = np.random.default_rng(0)
    return ours, theirs, [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def of_sines(fn):
    return lambda *operands: jnp.sum(jnp.sin(fn(*operands)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "depthwise"])  # which has no product
@pytest.mark.parametrize("batched", [False, True])
def test_products_have_the_precision_of_where_they_are_written(name, batched):
    """Compiled for a TPU, forward and backward, where the setting holds in the function alone."""
    ours, _, operands = case(name)

    def precisely(*operands):
        with jax.default_matmul_precision("highest"):
            return ours(*operands)

    fn = precisely
    if batched:
        fn, operands = jax.vmap(precisely), [jnp.stack([operand] * 2) for operand in operands]
    whole = jax.jit(jax.value_and_grad(of_sines(fn), (0, 1)))
    text = whole.trace(*operands).lower(lowering_platforms=("tpu",)).as_text()
    products = re.findall(r"stablehlo\.(?:dot_general|convolution).*", text)
    assert len(products) >= 3
    assert all("HIGHEST" in line for line in products), products
    plain = jax.jit(ours).trace(*case(name)[2]).lower(lowering_platforms=("tpu",)).as_text()
    assert "HIGHEST" not in plain


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_numbers_are_added_up_in_wide_ones(name, dtype):
    """Each result is within a rounding of that of the same numbers in float32, as XLA's is."""
    ours, theirs, operands = case(name, dtype)
    wide = [operand.astype(jnp.float32) for operand in operands]
    weights = jnp.asarray(np.random.default_rng(1).normal(size=jax.eval_shape(ours, *operands).shape), dtype)

    def value_and_gradients(fn, operands):
        value, back = jax.vjp(fn, *operands)
        return value, *back(weights.astype(value.dtype))

    found = jax.jit(functools.partial(value_and_gradients, ours))(operands)
    for ours_, exact in zip(found, value_and_gradients(theirs, wide), strict=True):
        assert ours_.dtype == dtype
        error = np.abs(np.asarray(ours_, np.float32) - np.asarray(exact))
        assert (error <= 0.6 * float(jnp.finfo(dtype).eps) * np.abs(exact) + 1e-4).all()


@pytest.mark.slow
def test_four_hundred_ones():
    """Beyond 256, bfloat16 has even numbers alone."""
    ones = jnp.ones((1, 20, 20, 2), jnp.bfloat16)
    kernel = jnp.ones((20, 20, 1, 2), jnp.bfloat16)
    assert nn.convolution(ones, kernel, padding="VALID", feature_group_count=2).tolist() == [[[[400, 400]]]]
    assert nn.avg_pool(ones, 20).tolist() == nn.avg_pool(ones, 20, 20).tolist() == [[[[1, 1]]]]


@pytest.mark.parametrize("name", CASES)
def test_operands_of_two_dtypes_are_refused(name):
    ours, _, (x, kernel) = case(name)
    with pytest.raises(TypeError, match="x is bfloat16 and kernel float32; cast one of them"):
        ours(x.astype(jnp.bfloat16), kernel)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_rows_give_no_rows(name):
    """Nor is there any gradient of a kernel that has met none, also under a map over no clients."""
    ours, theirs, (x, kernel) = case(name)
    nobody = x[..., :0] if name == "rows last" else x[:0]
    found = jax.jit(jax.value_and_grad(of_sines(ours), (0, 1)))(nobody, kernel)
    assert (float(found[0]), float(jnp.abs(found[1][1]).max())) == (0, 0)
    assert found[1][0].shape == nobody.shape
    assert jax.eval_shape(ours, nobody, kernel).shape == jax.eval_shape(theirs, nobody, kernel).shape
    assert ours(nobody, kernel).size == 0
    no_clients = jax.vmap(ours, (0, None))(jnp.zeros((0, *x.shape)), kernel)
    assert no_clients.shape == (0, *jax.eval_shape(ours, x, kernel).shape)


def test_a_layer_whose_rows_come_last_has_no_options_that_it_would_ignore():
    for option in ({"strides": 2}, {"use_bias": False}, {"feature_group_count": 2}, {"kernel_dilation": 2}):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(option))}'"):
            RowsLastConv(4, 3, **option)
    # A negative padding crops.
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, 7, 3)), jnp.float32)
    padding = ((-1, 2), (0, -2))
    layer, turned = Conv(4, 3, padding=padding), x.transpose(3, 1, 2, 0)
    variables = layer.init(jax.random.key(0), x)
    found = RowsLastConv(4, 3, padding=padding).apply(variables, turned)
    np.testing.assert_allclose(found.transpose(3, 1, 2, 0), layer.apply(variables, x), rtol=1e-5, atol=1e-6)
