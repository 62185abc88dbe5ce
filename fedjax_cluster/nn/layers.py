"""Flax layers on this package's convolution, and helpers that the models share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as linen
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax import Array, lax
from jaxtyping import Float, Shaped

from fedjax_cluster.nn.convolution import convolution
from fedjax_cluster.nn.dense_product import dot_general
from fedjax_cluster.nn.initializers import Scheme, layer_init
from fedjax_cluster.nn.pooling import max_pool
from fedjax_cluster.nn.rows_last import convolve
from fedjax_cluster.nn.sums import with_bias
from fedjax_cluster.nn.windows import Padding, Sides, check_fit, explicit_padding, pair
from fedjax_cluster.options import COUNT, checked


class Conv(linen.Module):
    """Two-dimensional convolution with the parameters and the semantics of `flax.linen.Conv`.

    Fast when every client has its own weights; see `fedjax_cluster.nn.convolution`.

    Args:
      features: output channels.
      kernel_size: an integer or (height, width).
      strides, padding, kernel_dilation, feature_group_count: as in `convolution`.
      use_bias: whether there is a bias.
      kernel_init, bias_init: initialisers `(rng_key, shape, dtype) -> Array`; Flax's defaults.
      pool: sides of windows, one beside the other, whose maxima are given; 1 gives all.

    >>> import jax
    >>> variables = Conv(8, (3, 3)).init(jax.random.key(0), jnp.ones((1, 5, 5, 2)))
    >>> jax.tree.map(jnp.shape, variables["params"])
    {'bias': (8,), 'kernel': (3, 3, 2, 8)}
    """

    features: int
    kernel_size: Sides
    strides: Sides = 1
    padding: Padding = "SAME"
    kernel_dilation: Sides = 1
    feature_group_count: int = 1
    use_bias: bool = True
    kernel_init: Any = linen.initializers.lecun_normal()
    bias_init: Any = linen.initializers.zeros
    pool: int = 1

    @linen.compact
    def __call__(self, x: Float[Array, "N H W C"]) -> Float[Array, "N H_out W_out features"]:
        channels = x.shape[-1] // checked("feature_group_count", self.feature_group_count, int, COUNT)
        shape = (*pair(self.kernel_size, "kernel_size"), channels, self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = self.param("bias", self.bias_init, (self.features,), jnp.float32) if self.use_bias else None
        x = convolution(
            x.astype(kernel.dtype),
            kernel,
            strides=self.strides,
            padding=self.padding,
            kernel_dilation=self.kernel_dilation,
            feature_group_count=self.feature_group_count,
        )
        # Maximum and bias commute; in this order the bias, and its gradient, see a part of the values.
        x = x if self.pool == 1 else max_pool(x, self.pool, self.pool)
        return with_bias(x, None if bias is None else bias.reshape(1, 1, 1, -1))


class Dense(linen.Module):
    """A dense layer with the parameters and the semantics of `flax.linen.Dense`.

    In bfloat16 the gradient of its bias is added up in float32, and its product is faster for some widths; see
    `fedjax_cluster.nn.dense_product`.

    Args:
      features: outputs.
      use_bias: whether there is a bias.
      kernel_init, bias_init: initialisers `(rng_key, shape, dtype) -> Array`; Flax's defaults.

    >>> import jax
    >>> variables = Dense(8).init(jax.random.key(0), jnp.ones((1, 5)))
    >>> jax.tree.map(jnp.shape, variables["params"])
    {'bias': (8,), 'kernel': (5, 8)}
    """

    features: int
    use_bias: bool = True
    kernel_init: Any = linen.initializers.lecun_normal()
    bias_init: Any = linen.initializers.zeros

    @linen.compact
    def __call__(self, x: Float[Array, "... inputs"]) -> Float[Array, "... features"]:
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", self.bias_init, (self.features,), jnp.float32) if self.use_bias else None
        x, kernel, bias = promote_dtype(x, kernel, bias)
        y = dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))
        return with_bias(y, None if bias is None else bias.reshape((1,) * (y.ndim - 1) + (-1,)))


class RowsLastConv(linen.Module):
    """`Conv` at stride 1 of images [C, H, W, N], then maxima over `pool` × `pool` windows; with the same parameters."""

    features: int
    kernel_size: Sides
    padding: Padding = "SAME"
    pool: int = 1
    kernel_init: Any = linen.initializers.lecun_normal()
    bias_init: Any = linen.initializers.zeros

    @linen.compact
    def __call__(self, x: Float[Array, "C H W N"]) -> Float[Array, "features H_out W_out N"]:
        size = pair(self.kernel_size, "kernel_size")
        kernel = self.param("kernel", self.kernel_init, (*size, x.shape[0], self.features), jnp.float32)
        bias = self.param("bias", self.bias_init, (self.features,), jnp.float32)
        pads = explicit_padding(self.padding, x.shape[1:3], size, (1, 1))
        check_fit(x.shape[1:3], size, pads)
        edges = ((0, 0, 0), *((low, high, 0) for low, high in pads), (0, 0, 0))
        x = convolve(lax.pad(x.astype(kernel.dtype), jnp.zeros((), kernel.dtype), edges), kernel)
        if self.pool > 1:
            x = max_pool(x, self.pool, self.pool)
        # Maximum and bias commute; in this order the bias, and its gradient, see a quarter of the values.
        return with_bias(x, bias.reshape(-1, 1, 1, 1))


def conv(x: Array, features: int, size: tuple[int, int], scheme: Scheme, name: str, **options: Any) -> Array:
    """A convolution called `name`, initialised by `scheme`; for use inside a compact module."""
    start = layer_init(scheme, math.prod(size) * x.shape[-1] // options.get("feature_group_count", 1))
    return Conv(features, size, kernel_init=start.kernel, bias_init=start.bias, name=name, **options)(x)


def rows_last_conv(x: Array, features: int, size: tuple[int, int], scheme: Scheme, name: str, **options: Any) -> Array:
    """`conv` of images [C, H, W, N], with maxima."""
    start = layer_init(scheme, math.prod(size) * x.shape[0])
    return RowsLastConv(features, size, kernel_init=start.kernel, bias_init=start.bias, name=name, **options)(x)


def dense(x: Array, features: int, scheme: Scheme, name: str) -> Array:
    """A dense layer called `name`, initialised by `scheme`; for use inside a compact module."""
    start = layer_init(scheme, x.shape[-1])
    return Dense(features, kernel_init=start.kernel, bias_init=start.bias, name=name)(x)


def batch_norm(x: Array, train: bool, name: str, axis: int = -1) -> Array:
    """Batch normalisation of the channels along `axis`, with PyTorch's momentum and epsilon; for compact modules."""
    return linen.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, axis=axis, name=name)(x)


def images(x: Shaped[Array, "N H W *C"]) -> Float[Array, "N H W C"]:
    """Images [N, H, W] or [N, H, W, C] as floats [N, H, W, C]."""
    if x.ndim not in (3, 4):
        raise ValueError(f"inputs have shape {x.shape}; a convolutional model takes [N, H, W] or [N, H, W, C]")
    return floats(x if x.ndim == 4 else x[..., None])


def flat(x: Shaped[Array, "N ..."]) -> Float[Array, "N features"]:
    """Rows of any shape as floats [N, features]."""
    return floats(x.reshape(x.shape[0], math.prod(x.shape[1:])))


def floats(x: Array) -> Array:
    """Floats unchanged, so that the inputs decide the precision; anything else as float32."""
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


def sizes_per_layer(name: str, sizes: int | Sequence[int], layers: int) -> tuple[int, ...]:
    """One size per layer, from a common one or a list; ValueError for a list of another length."""
    given = (sizes,) * layers if isinstance(sizes, int) else tuple(sizes)
    if len(given) != layers:
        raise ValueError(f"{name} has {len(given)} entries for {layers} layers; give one for all, or one for each")
    return given
