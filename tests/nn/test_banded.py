"""Convolutions as products with band matrices against XLA's, and the autoencoder against itself on XLA's."""

import chex
import flax.linen as linen
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.test_util import check_grads

from fedjax_cluster import nn
from fedjax_cluster.nn import autoencoder
from fedjax_cluster.nn.banded import convolve
from fedjax_cluster.types import DatasetInfo

SIZES = [(1, 9), (9, 1), (3, 3), (5, 2), (2, 4), (1, 1)]


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def xla(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("WCHN", "HWIO", "WCHN"))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_gradients_are_those_of_xla(size):
    """Three clients' own kernels on images of 6 × 5 pixels: as long as an odd and an even kernel, and shorter."""
    x, kernel = normal(3, 6, 2, 5, 4), normal(3, *size, 2, 7, seed=1)

    def with_gradients(conv):
        squares = jax.value_and_grad(lambda *a: jnp.sum(jnp.tanh(conv(*a))), argnums=(0, 1))
        return jax.jit(jax.vmap(lambda x, kernel: (conv(x, kernel), squares(x, kernel))))(x, kernel)

    chex.assert_trees_all_close(with_gradients(convolve), with_gradients(xla), rtol=1e-5, atol=2e-5)


def test_second_derivatives():
    check_grads(convolve, (normal(4, 2, 3, 2), normal(3, 2, 2, 3, seed=1)), order=2, rtol=1e-2)


class XlaConv(linen.Module):
    """`BandedConv` by XLA, with the same parameters."""

    features: int
    kernel_size: tuple[int, int]
    kernel_init: object

    @linen.compact
    def __call__(self, x):
        return xla(x, self.param("kernel", self.kernel_init, (*self.kernel_size, x.shape[1], self.features)))


@pytest.mark.slow
def test_the_autoencoder_equals_itself_on_xlas_convolutions(monkeypatch):
    x, key = normal(6, 2, 8, 12), jax.random.key(3)
    variables = nn.csi_autoencoder(5).init(key, DatasetInfo("csi", (2, 8, 12), 0, "reconstruction"))
    training = [nn.csi_autoencoder(5).apply(variables, x, train=True)]
    monkeypatch.setattr(autoencoder, "BandedConv", XlaConv)
    training.append(nn.csi_autoencoder(5).apply(variables, x, train=True))
    chex.assert_trees_all_close(*training, rtol=1e-4, atol=1e-5)
    chex.assert_shape(training[0][0], x.shape)
