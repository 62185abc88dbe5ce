"""Deep residual networks of images [N, H, W] or [N, H, W, C] with batch statistics: ResNet-18 and MobileNetV2."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as linen
from jax import Array

from fedjax_cluster.nn.initializers import Scheme
from fedjax_cluster.nn.layers import batch_norm, conv, dense, images
from fedjax_cluster.nn.losses import LossName
from fedjax_cluster.nn.wrapping import Normalize, Sized, from_flax
from fedjax_cluster.options import BELOW_ONE, COUNT, POSITIVE, with_checks
from fedjax_cluster.types import Model


@with_checks(width=COUNT, blocks=COUNT, num_outputs=COUNT)
def resnet18(
    width: int = 64,
    *,
    blocks: Sequence[int] = (2, 2, 2, 2),
    init: Scheme = "torch",
    loss: LossName = "auto",
    normalize: Normalize | None = None,
    num_outputs: int | None = None,
) -> Model:
    """ResNet-18 for 32×32 images: a 3×3 stem without pooling, then four stages of two basic blocks.

    CFL-GP trains it on CIFAR-10 with all layers but `output` shared (Appendix F.7).

    Args:
      width: channels of the first stage; each further stage doubles the channels and halves the image.
      blocks: basic blocks in each stage.
      init, loss, normalize, num_outputs: as in `linear`.

    Raises:
      ValueError: an unknown `init` or `loss`, or a size below 1.

    >>> import jax
    >>> from fedjax_cluster.types import DatasetInfo
    >>> info = DatasetInfo("cifar10", (32, 32, 3), 10)
    >>> params, _ = jax.eval_shape(lambda key: resnet18().init(key, info), jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    11173962
    """
    network = Sized(ResNet, scheme=init, width=width, blocks=blocks)
    return from_flax(network, loss=loss, normalize=normalize, num_outputs=num_outputs)


@with_checks(width=POSITIVE, dropout=BELOW_ONE, num_outputs=COUNT)
def mobilenet_v2(
    width: float = 1.0,
    *,
    small_images: bool = False,
    dropout: float = 0.2,
    init: Scheme = "torch",
    loss: LossName = "auto",
    normalize: Normalize | None = None,
    num_outputs: int | None = None,
) -> Model:
    """MobileNetV2 (Sandler et al., 2018), FedGWC's model for Landmarks and iNaturalist.

    Args:
      width: factor on the channels of all layers, which are rounded to multiples of 8.
      small_images: keep the resolution in the stem and the first two stages, for 32×32 images.
      dropout: rate before the output; training then needs `rng_key`.
      init, loss, normalize, num_outputs: as in `linear`.

    Raises:
      ValueError: an unknown `init` or `loss`, a width that is not positive, or a dropout rate outside [0, 1).

    >>> import jax
    >>> from fedjax_cluster.types import DatasetInfo
    >>> info = DatasetInfo("imagenet", (224, 224, 3), 1000)
    >>> params, _ = jax.eval_shape(lambda key: mobilenet_v2().init(key, info), jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    3504872
    """
    network = Sized(MobileNetV2, scheme=init, width=width, small_images=small_images, dropout=dropout)
    return from_flax(network, loss=loss, normalize=normalize, num_outputs=num_outputs)


class BasicBlock(linen.Module):
    """Two 3×3 convolutions and a shortcut."""

    features: int
    strides: int
    scheme: Scheme

    @linen.compact
    def __call__(self, x: Array, train: bool) -> Array:
        shortcut, kernel = x, (3, 3)
        # PyTorch's padding: with strides, "SAME" would pad the other side.
        options = {"use_bias": False, "padding": 1}
        x = conv(x, self.features, kernel, self.scheme, "conv_0", strides=self.strides, **options)
        x = linen.relu(batch_norm(x, train, "norm_0"))
        x = batch_norm(conv(x, self.features, kernel, self.scheme, "conv_1", **options), train, "norm_1")
        if shortcut.shape != x.shape:
            options |= {"padding": 0, "strides": self.strides}
            shortcut = conv(shortcut, self.features, (1, 1), self.scheme, "shortcut", **options)
            shortcut = batch_norm(shortcut, train, "shortcut_norm")
        return linen.relu(x + shortcut)


class ResNet(linen.Module):
    """Stages of basic blocks, mean pooling, and a dense output."""

    width: int
    blocks: tuple[int, ...]
    num_outputs: int
    scheme: Scheme

    @linen.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = conv(images(x), self.width, (3, 3), self.scheme, "conv_0", use_bias=False)
        x = linen.relu(batch_norm(x, train, "norm_0"))
        for stage, count in enumerate(self.blocks):
            for i in range(count):
                strides = 2 if stage > 0 and i == 0 else 1
                x = BasicBlock(self.width * 2**stage, strides, self.scheme, name=f"stage_{stage}_block_{i}")(x, train)
        return dense(x.mean(axis=(1, 2)), self.num_outputs, self.scheme, "output")


class InvertedResidual(linen.Module):
    """Widen by 1×1, filter each channel by 3×3, narrow by 1×1 without a nonlinearity."""

    features: int
    expansion: int
    strides: int
    scheme: Scheme

    @linen.compact
    def __call__(self, x: Array, train: bool) -> Array:
        shortcut, hidden = x, x.shape[-1] * self.expansion
        if self.expansion > 1:
            x = conv(x, hidden, (1, 1), self.scheme, "expand", use_bias=False)
            x = linen.relu6(batch_norm(x, train, "expand_norm"))
        options = {"strides": self.strides, "padding": 1, "feature_group_count": hidden}
        x = conv(x, hidden, (3, 3), self.scheme, "depthwise", use_bias=False, **options)
        x = linen.relu6(batch_norm(x, train, "depthwise_norm"))
        x = batch_norm(conv(x, self.features, (1, 1), self.scheme, "project", use_bias=False), train, "project_norm")
        return x + shortcut if self.strides == 1 and x.shape == shortcut.shape else x


# Expansion, channels, blocks and strides of each stage: Table 2 of Sandler et al.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class MobileNetV2(linen.Module):
    """Inverted residuals, mean pooling, dropout and a dense output."""

    width: float
    small_images: bool
    dropout: float
    num_outputs: int
    scheme: Scheme

    @linen.compact
    def __call__(self, x: Array, train: bool) -> Array:
        first = 1 if self.small_images else 2
        options = {"strides": first, "padding": 1, "use_bias": False}
        x = conv(images(x), _rounded(self.width * 32), (3, 3), self.scheme, "conv_0", **options)
        x = linen.relu6(batch_norm(x, train, "norm_0"))
        for stage, (expansion, features, count, strides) in enumerate(STAGES):
            strides = first if stage == 1 else strides
            for i in range(count):
                step, name = strides if i == 0 else 1, f"stage_{stage}_block_{i}"
                x = InvertedResidual(_rounded(self.width * features), expansion, step, self.scheme, name=name)(x, train)
        x = conv(x, _rounded(1280 * max(1.0, self.width)), (1, 1), self.scheme, "conv_1", use_bias=False)
        x = linen.relu6(batch_norm(x, train, "norm_1"))
        x = linen.Dropout(self.dropout, deterministic=not train)(x.mean(axis=(1, 2)))
        return dense(x, self.num_outputs, self.scheme, "output")


def _rounded(channels: float) -> int:
    """A multiple of 8 close to `channels`: at least 8, and at least nine tenths of them."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8
