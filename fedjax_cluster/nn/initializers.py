"""How layers start: PyTorch's uniform rule, which the papers' codes used, or Flax's."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
from flax.linen import initializers
from jax import Array

Scheme = Literal["torch", "flax"]


class LayerInit(NamedTuple):
    """The two initialisers of a layer, each `(rng_key, shape, dtype) -> Array`."""

    kernel: Any
    bias: Any


def uniform(bound: float):
    """Uniform on ±bound, whatever the shape.

    Args:
      bound: the largest absolute value, at least 0.

    Returns:
      An initialiser `(rng_key, shape, dtype=float32) -> Array`.

    Raises:
      ValueError: a negative or infinite bound.

    >>> import jax
    >>> weights = uniform(0.5)(jax.random.key(0), (1000,))
    >>> bool(abs(weights).max() <= 0.5)
    True
    """
    if not 0 <= bound < math.inf:
        raise ValueError(f"bound is {bound}; a uniform distribution on ±bound needs a finite bound, 0 or more")

    def init(rng_key: Array, shape, dtype=jax.numpy.float32, **_) -> Array:
        return jax.random.uniform(rng_key, shape, dtype, -bound, bound)

    return init


def layer_init(scheme: Scheme, fan_in: int) -> LayerInit:
    """The initialisers of a dense or convolutional layer with `fan_in` inputs per output.

    "torch": kernel and bias from U(±1/√fan_in), PyTorch's default for linear and convolutional layers.
    "flax": kernel from a normal of variance 1/fan_in cut at two deviations (LeCun), bias 0.

    Args:
      scheme: "torch" or "flax".
      fan_in: inputs that enter one output, kernel height × width × input channels of its group.

    Returns:
      A `LayerInit`.

    Raises:
      ValueError: an unknown scheme.

    >>> layer_init("torch", 16).bias(jax.random.key(0), (3,)).shape
    (3,)
    """
    check_scheme(scheme)
    if scheme == "torch":
        return LayerInit(*[uniform(1.0 / math.sqrt(fan_in))] * 2)
    return LayerInit(initializers.lecun_normal(), initializers.zeros)


def check_scheme(scheme: str) -> None:
    """Raise ValueError unless `scheme` names an initialisation."""
    if scheme not in ("torch", "flax"):
        raise ValueError(f"init is {scheme!r}; choose 'torch' (uniform ±1/√fan_in) or 'flax' (LeCun normal)")
