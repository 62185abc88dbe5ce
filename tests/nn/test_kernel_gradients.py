"""Kernels' gradients of much work, which a CPU does in pieces of some images."""

import functools
import importlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fedjax_cluster.nn.convolution import _in_pieces, _on_cpu, _xla, convolution
from fedjax_cluster.nn.windows import Window
from tests.devices import needs_two

# The package's name for it is the function's.
convolution_module = importlib.import_module("fedjax_cluster.nn.convolution")


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def assert_close(actual, expected, tolerance=1e-5):
    """Each leaf within `tolerance` of the largest entry expected in it."""
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * max(np.abs(theirs).max(), 1e-30))


@pytest.mark.slow
@pytest.mark.parametrize("channels", [3, 5])
@pytest.mark.parametrize(("pixels", "loops"), [(1, 6), (84, 3), (126, 2), (10**6, 1)])
@pytest.mark.parametrize("kernel_dilation", [(1, 1), (2, 1)])
def test_pieces_change_nothing_but_rounding(monkeypatch, channels, pixels, loops, kernel_dilation):
    """Six images with outputs of 7 × 6 pixels, in pieces of one, two, three and all of them."""
    monkeypatch.setattr(convolution_module, "PIXELS", pixels)
    window = Window((1, 1), ((1, 1), (2, 0)), (1, 1), kernel_dilation)
    height = 6 * kernel_dilation[0] + 2
    x, outputs = normal(channels, height, 6, 6), normal(7, 6, 6, 4, seed=1)  # with 42 output pixels an image
    form = functools.partial(_in_pieces, window=window)
    traced = str(jax.make_jaxpr(lambda *given: form(*given))(x, outputs))
    assert f"{loops}:i32[]" in traced or f"length={loops}" in traced
    assert_close(jax.jit(lambda *given: form(*given))(x, outputs), _xla(x, outputs, window=window))


def test_pieces_are_of_images_that_divide_the_mini_batch():
    """Of ResNet's layers; of a prime number of images, one at a time where all at once would be too many."""

    def turns(images, side, channels):
        x, outputs = jnp.zeros((channels, side, side, images)), jnp.zeros((side, side, images, channels))
        window = Window(padding=((1, 1), (1, 1)))
        (loop,) = (
            each
            for each in jax.make_jaxpr(functools.partial(_in_pieces, window=window))(x, outputs).eqns
            if each.primitive.name in ("scan", "while")
        )
        return loop.params["length"]

    assert [turns(16, side, channels) for side, channels in ((32, 64), (8, 256), (4, 512))] == [8, 1, 1]
    assert turns(97, 14, 32) == 97
    assert turns(7, 6, 8) == 1
    assert turns(61, 6, 8) == 1  # where single images are too few for a product


def test_pieces_of_narrow_numbers_are_added_up_in_float32(monkeypatch):
    """256 pieces: added up in a format of eight bits, the sum would stop growing."""
    monkeypatch.setattr(convolution_module, "PIXELS", 1)
    x, outputs = jnp.ones((2, 5, 5, 256), jnp.bfloat16), jnp.ones((4, 4, 256, 3), jnp.bfloat16)
    found = jax.jit(lambda *given: _in_pieces(*given, window=Window()))(x, outputs)
    assert found.dtype == jnp.bfloat16
    chex.assert_trees_all_equal(found, jnp.full((2, 2, 2, 3), 256 * 16, jnp.bfloat16))


def test_kernels_gradients_go_by_images_where_there_is_much_work():
    """Of the benchmarks' networks: ResNet's layers at b = 16, the wide CNN's; LeNet-5's, of few features, never."""

    def form(rows, size, channels, features, kernel):
        x = jax.ShapeDtypeStruct((channels, size, size, rows), jnp.float32)
        outputs = jax.ShapeDtypeStruct((size, size, rows, features), jnp.float32)
        window = Window(padding=((kernel // 2,) * 2,) * 2)
        traced = str(jax.make_jaxpr(functools.partial(_on_cpu, window=window))(x, outputs))
        return "pieces" if "scan" in traced else "xla" if "conv_general_dilated" in traced else "one product"

    resnet = {(16, 32, 64, 64, 3), (16, 16, 128, 128, 3), (16, 8, 256, 256, 3), (16, 4, 512, 512, 3)}
    assert {form(*layer) for layer in resnet} == {"pieces"}
    assert [form(rows, 14, 32, 64, 5) for rows in (4, 32, 64)] == ["xla", "pieces", "pieces"]
    assert [form(rows, 28, 1, 32, 5) for rows in (10, 20, 32)] == ["xla", "xla", "pieces"]
    assert [form(rows, 32, 3, 16, 5) for rows in (10, 64)] == ["xla", "xla"]


@pytest.mark.slow
@needs_two
def test_gradients_in_pieces_on_a_mesh(monkeypatch):
    for constant, value in (("LARGE", 1), ("NARROW", 1), ("PIXELS", 1)):
        monkeypatch.setattr(convolution_module, constant, value)
    x, kernel = normal(4, 3, 7, 6, 5), normal(4, 3, 3, 5, 4, seed=1)  # unlike above: JAX remembers programs

    mesh = jax.make_mesh((2,), ("clients",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def gradients(conv):
        return lambda x, kernel: jax.grad(lambda *a: jnp.sum(jnp.sin(conv(*a))), argnums=(0, 1))(x, kernel)

    def loop(x, kernel):
        return lax.map(lambda row: gradients(lambda *given: convolution(*given))(*row), (x, kernel))

    def xla(x, kernel):
        return _xla(x, kernel, window=Window(padding=((1, 1), (1, 1))))

    mapped = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=P("clients"), out_specs=P("clients")))
    assert mapped.lower(x, kernel).as_text().count("stablehlo.while") >= 2  # over clients, and over images
    assert_close(mapped(x, kernel), jax.vmap(gradients(xla))(x, kernel))
