"""The autoencoder that compresses channel state information (CFL-GP, Appendix F.6)."""

from __future__ import annotations

from functools import partial

import flax.linen as linen
import jax.numpy as jnp
from jax import Array

from fedjax_cluster.nn.banded import BandedConv
from fedjax_cluster.nn.layers import Dense, batch_norm, flat
from fedjax_cluster.nn.losses import regression_metrics, scale
from fedjax_cluster.nn.wrapping import from_flax
from fedjax_cluster.options import COUNT, with_checks
from fedjax_cluster.types import Model

WIDTHS = (9, 7, 5)  # N_dc of the decoder's three residual blocks
leaky_relu = partial(linen.leaky_relu, negative_slope=0.3)
xavier = linen.initializers.xavier_uniform()
WIDTH_FIRST = (3, 1, 2, 0)  # turns [N, C, H, W] into [W, C, H, N], and back
CHANNELS_LAST, ROWS_LAST = (3, 2, 0, 1), (2, 3, 1, 0)  # [W, C, H, N] into [N, H, W, C], and back


@with_checks(latent=COUNT)
def csi_autoencoder(latent: int = 1024) -> Model:
    """An autoencoder of complex channel matrices with Inception-like blocks: `encoder`, `decoder`.

    CFL-GP, Appendix F.6: latent 1024 for CD1 (4.2 million parameters), 16 for CD2 (72 thousand); the encoder is
    shared among clusters.

    Args:
      latent: N_cl, size of the code; 32×32 complex matrices are compressed 2048 / latent times.

    Returns:
      A `Model` of x = y f32[N, 2, H, W], real and imaginary parts, with batch statistics. Its metrics: "loss", the
      mean squared error, and "nmse", the mean of ‖x − x̂‖²/‖x‖² over examples that are not all zeros, as a ratio
      (10·log₁₀ of it is in dB).

    Raises:
      ValueError: a latent size below 1.

    >>> import jax
    >>> from fedjax_cluster.types import DatasetInfo
    >>> info = DatasetInfo("csi", (2, 32, 32), 0, "reconstruction")
    >>> params, _ = jax.eval_shape(lambda key: csi_autoencoder(16).init(key, info), jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    72407
    """
    return from_flax(CsiAutoencoder(latent), loss="mse")._replace(metrics=_with_nmse)


def _with_nmse(predictions: Array, y: Array, mask: Array) -> dict[str, Array]:
    wanted = flat(scale(y))
    error, power = jnp.square(flat(predictions) - wanted).sum(axis=1), jnp.square(wanted).sum(axis=1)
    counted = mask & (power > 0)  # of zeros, as a blocked channel's, there is no share
    ratios = jnp.where(counted, error / power, 0.0)
    return {**regression_metrics(predictions, y, mask), "nmse": ratios.sum() / counted.sum().astype(jnp.float32)}


class CsiAutoencoder(linen.Module):
    """Encoder and decoder over [N, 2, H, W]."""

    latent: int

    @linen.compact
    def __call__(self, x: Array, train: bool) -> Array:
        if x.ndim != 4:
            raise ValueError(f"inputs have shape {x.shape}; the autoencoder takes [N, 2, H, W]")
        image = x.transpose(WIDTH_FIRST)
        code = Encoder(self.latent, name="encoder")(image, train)
        return Decoder(image.shape[:3], name="decoder")(code, train).transpose(WIDTH_FIRST)


class Encoder(linen.Module):
    """Three parallel paths over the same image; f32[W, 2, H, N] → f32[N, latent]."""

    latent: int

    @linen.compact
    def __call__(self, x: Array, train: bool) -> Array:
        channels = x.shape[1]
        first = _path(x, channels, ((3, 3), (1, 9), (9, 1)), train, "first")
        second = _normalized_conv(x, channels, (3, 3), train, "second_0")
        third = _path(x, channels, ((3, 3), (1, 3), (3, 1)), train, "third")
        paths = jnp.concatenate([first, second, third], axis=1)
        refined = _conv(paths, channels, (1, 1), "refinement")
        return Dense(self.latent, kernel_init=xavier, name="code")(flat(refined.transpose(CHANNELS_LAST)))


class Decoder(linen.Module):
    """From a code back to the image; f32[N, latent] → f32[W, 2, H, N]."""

    shape: tuple[int, ...]

    @linen.compact
    def __call__(self, code: Array, train: bool) -> Array:
        width, channels, height = self.shape
        x = Dense(height * width * channels, kernel_init=xavier, name="expansion")(code)
        x = x.reshape(-1, height, width, channels).transpose(ROWS_LAST)
        x = leaky_relu(_normalized_conv(x, channels, (5, 5), train, "conv_0"))
        for i, features in enumerate(WIDTHS):
            # NOTE: the paper mentions no normalisation in these blocks; here it follows every convolution, as in the
            # encoder and in CRNet (Lu et al., 2020), whose blocks they are. The output is the last block's activation.
            tall = _path(x, features, ((3, 3), (1, 9), (9, 1)), train, f"block_{i}_tall")
            cross = _path(x, features, ((1, 5), (5, 1)), train, f"block_{i}_cross")
            both = jnp.concatenate([tall, cross], axis=1)
            x = leaky_relu(x + _normalized_conv(both, channels, (1, 1), train, f"block_{i}_merge"))
        return x


def _path(x: Array, features: int, kernels: tuple[tuple[int, int], ...], train: bool, name: str) -> Array:
    for i, size in enumerate(kernels):
        x = leaky_relu(_normalized_conv(x, features, size, train, f"{name}_{i}"))
    return x


def _normalized_conv(x: Array, features: int, size: tuple[int, int], train: bool, name: str) -> Array:
    return batch_norm(_conv(x, features, size, name), train, f"{name}_norm", axis=1)


def _conv(x: Array, features: int, size: tuple[int, int], name: str) -> Array:
    return BandedConv(features, size, kernel_init=xavier, name=name)(x)
