"""The linear, dense and convolutional models of the papers.

Layers are named `hidden_0`, `conv_0`, ..., `output`, so that a path such as "output/kernel" selects the last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import flax.linen as linen
from jax import Array

from fedjax_cluster.nn.initializers import Scheme, Uniform, layer_init
from fedjax_cluster.nn.layers import Dense, conv, dense, flat, images, rows_last_conv, sizes_per_layer
from fedjax_cluster.nn.losses import LossName
from fedjax_cluster.nn.rows_last import MOST_FEATURES, ROWS_LAST
from fedjax_cluster.nn.wrapping import Normalize, Sized, from_flax
from fedjax_cluster.options import COUNT, NOT_NEGATIVE, with_checks
from fedjax_cluster.types import Model


@with_checks(init_scale=NOT_NEGATIVE, num_outputs=COUNT)
def linear(
    *,
    init: Scheme = "torch",
    init_scale: float | None = None,
    kernel_init: Any = None,
    use_bias: bool = True,
    zero_bias: bool = False,
    loss: LossName = "auto",
    normalize: Normalize | None = None,
    num_outputs: int | None = None,
) -> Model:
    """A linear model x·W + b of the flattened input; its only layer is `output`.

    The linear regressions of CFL-GP (Appendix F.4) are `linear(init_scale=0.8, zero_bias=True)` and the same with 1.6.

    Args:
      init: "torch" (uniform ±1/√fan_in) or "flax" (LeCun normal, zero bias).
      init_scale: draws the kernel from U(±init_scale) instead.
      kernel_init: any initialiser `(rng_key, shape, dtype) -> Array` of the kernel instead.
      use_bias: False leaves b out.
      zero_bias: initialises b to 0.
      loss, normalize, num_outputs: as in `from_flax`.

    Raises:
      ValueError: an unknown `init` or `loss`, or both `init_scale` and `kernel_init`.

    >>> import jax
    >>> from fedjax_cluster.types import DatasetInfo
    >>> model = linear(init_scale=0.8, zero_bias=True)
    >>> params, _ = model.init(jax.random.key(0), DatasetInfo("line", (2,), 0, "regression"))
    >>> params["output"]["kernel"].shape, params["output"]["bias"]
    ((2, 1), Array([0.], dtype=float32))
    """
    if init_scale is not None and kernel_init is not None:
        raise ValueError("init_scale and kernel_init both determine the initial kernel; give one of them")
    kernel_init = kernel_init if init_scale is None else Uniform(init_scale)
    network = Sized(Linear, scheme=init, kernel_init=kernel_init, use_bias=use_bias, zero_bias=zero_bias)
    return from_flax(network, loss=loss, normalize=normalize, num_outputs=num_outputs)


@with_checks(hidden=COUNT, num_outputs=COUNT)
def mlp(
    hidden: Sequence[int] = (200,),
    *,
    init: Scheme = "torch",
    loss: LossName = "auto",
    normalize: Normalize | None = None,
    num_outputs: int | None = None,
) -> Model:
    """A multilayer perceptron with ReLU: `hidden_0`, ..., `output`.

    With 28×28 images of ten classes, the default is the 784-200-10 network of CFL-GP (Section 5).

    Args:
      hidden: sizes of the hidden layers.
      init, loss, normalize, num_outputs: as in `linear`.

    Raises:
      ValueError: an unknown `init` or `loss`, or a size below 1.

    >>> import jax
    >>> from fedjax_cluster.types import DatasetInfo
    >>> params, _ = mlp().init(jax.random.key(0), DatasetInfo("digits", (28, 28), 10))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    159010
    """
    network = Sized(Mlp, scheme=init, hidden=hidden)
    return from_flax(network, loss=loss, normalize=normalize, num_outputs=num_outputs)


@with_checks(channels=COUNT, kernel_size=COUNT, pool=COUNT, dense=COUNT, num_outputs=COUNT)
def cnn(
    channels: Sequence[int] = (32, 64),
    *,
    kernel_size: int | Sequence[int] = 5,
    pool: int | Sequence[int] = 2,
    dense: Sequence[int] = (512,),
    padding: Literal["SAME", "VALID"] = "SAME",
    init: Scheme = "torch",
    loss: LossName = "auto",
    normalize: Normalize | None = None,
    num_outputs: int | None = None,
) -> Model:
    """A convolutional network: (convolution, ReLU, max pooling) per entry of `channels`, then dense layers.

    The default is the network of McMahan et al. (2017): `conv_0`, `conv_1`, `hidden_0` of 512, `output`. Those of
    gradient-and-loss CFL (Fig. 3) are `cnn(kernel_size=3, pool=(1, 2), dense=(128,), padding="VALID")` for MNIST and
    Fashion-MNIST, with `kernel_size=(5, 3)` for EMNIST, and `lenet5` for CIFAR-10. Inputs: [N, H, W] or [N, H, W, C].

    Args:
      channels: output channels of each convolution.
      kernel_size: side of the square kernels, one for all or one per convolution.
      pool: side of the pooling windows, one for all or one per convolution; 1 for none.
      dense: sizes of the dense layers before the output; () for none.
      padding: "SAME" or "VALID".
      init, loss, normalize, num_outputs: as in `linear`.

    Raises:
      ValueError: an unknown `init` or `loss`, or a size below 1; in `init`, images too small for the layers.

    >>> import jax
    >>> from fedjax_cluster.types import DatasetInfo
    >>> params, _ = cnn().init(jax.random.key(0), DatasetInfo("digits", (28, 28), 10))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    1663370
    """
    network = Sized(
        Cnn,
        scheme=init,
        channels=channels,
        kernel_sizes=sizes_per_layer("kernel_size", kernel_size, len(channels)),
        pools=sizes_per_layer("pool", pool, len(channels)),
        padding=padding,
        hidden=dense,
    )
    return from_flax(network, loss=loss, normalize=normalize, num_outputs=num_outputs)


@with_checks(num_outputs=COUNT)
def lenet5(
    *,
    padding: Literal["SAME", "VALID"] = "VALID",
    init: Scheme = "torch",
    loss: LossName = "auto",
    normalize: Normalize | None = None,
    num_outputs: int | None = None,
) -> Model:
    """LeNet-5 as federated codes have it: ReLU and max pooling, 6 and 16 channels, dense layers of 120 and 84.

    FLAG trains it on images [N, H, W] or [N, H, W, C] (Section 6). The original has tanh and trained subsampling.

    Args:
      padding: of both convolutions; "VALID" leaves 4×4×16 features of a 28×28 image.
      init, loss, normalize, num_outputs: as in `linear`.

    Raises:
      ValueError: an unknown `init` or `loss`; in `init`, images too small for the layers.

    >>> import jax
    >>> from fedjax_cluster.types import DatasetInfo
    >>> params, _ = lenet5().init(jax.random.key(0), DatasetInfo("digits", (28, 28), 10))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    44426
    """
    return cnn(
        (6, 16), dense=(120, 84), padding=padding, init=init, loss=loss, normalize=normalize, num_outputs=num_outputs
    )


class Linear(linen.Module):
    """x·W + b of the flattened input."""

    num_outputs: int
    scheme: Scheme
    kernel_init: Any
    use_bias: bool
    zero_bias: bool

    @linen.compact
    def __call__(self, x: Array) -> Array:
        x = flat(x)
        initial = layer_init(self.scheme, x.shape[-1])
        return Dense(
            self.num_outputs,
            use_bias=self.use_bias,
            kernel_init=self.kernel_init or initial.kernel,
            bias_init=linen.initializers.zeros if self.zero_bias else initial.bias,
            name="output",
        )(x)


class Mlp(linen.Module):
    """Dense layers with ReLU between them."""

    hidden: tuple[int, ...]
    num_outputs: int
    scheme: Scheme

    @linen.compact
    def __call__(self, x: Array) -> Array:
        return _dense_layers(flat(x), self.hidden, self.num_outputs, self.scheme)


class Cnn(linen.Module):
    """Convolutions with max pooling and ReLU, then dense layers."""

    channels: tuple[int, ...]
    kernel_sizes: tuple[int, ...]
    pools: tuple[int, ...]
    padding: str
    hidden: tuple[int, ...]
    num_outputs: int
    scheme: Scheme

    @linen.compact
    def __call__(self, x: Array) -> Array:
        x = images(x)
        if (largest := max(self.kernel_sizes, default=0)) > max(x.shape[1:3]):
            raise ValueError(
                f"kernel_size is {largest}, but images are {x.shape[1]} × {x.shape[2]}: most of its weights would meet "
                f"no pixel; choose at most {max(x.shape[1:3])}"
            )
        # A few channels are no work for a processor's vectors, but the rows are.
        rows_last = max(self.channels, default=0) <= MOST_FEATURES
        x = x.transpose(ROWS_LAST) if rows_last else x
        for i, (features, size, side) in enumerate(zip(self.channels, self.kernel_sizes, self.pools, strict=True)):
            given = x, features, (size, size), self.scheme, f"conv_{i}"
            if rows_last:
                x = rows_last_conv(*given, padding=self.padding, pool=side)
            else:
                x = conv(*given, padding=self.padding, pool=side)
            # ReLU and maximum commute; in this order ReLU is applied to a quarter of the values.
            x = linen.relu(x)
        x = x.transpose(ROWS_LAST) if rows_last else x
        return _dense_layers(flat(x), self.hidden, self.num_outputs, self.scheme)


def _dense_layers(x: Array, hidden: tuple[int, ...], num_outputs: int, scheme: Scheme) -> Array:
    for i, features in enumerate(hidden):
        x = linen.relu(dense(x, features, scheme, f"hidden_{i}"))
    return dense(x, num_outputs, scheme, "output")
