"""Initial weights of layers: PyTorch's uniform rule, which the papers' codes used, or Flax's."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple, get_args

import jax
from flax.linen import initializers
from jax import Array

Scheme = Literal["torch", "flax"]


class LayerInit(NamedTuple):
    """The two initialisers of a layer, each `(rng_key, shape, dtype) -> Array`."""

    kernel: Any
    bias: Any


@dataclasses.dataclass(frozen=True)
class Uniform:
    """An initialiser `(rng_key, shape, dtype=float32) -> Array` uniform on ±bound, whatever the shape.

    >>> weights = Uniform(0.5)(jax.random.key(0), (1000,))
    >>> bool(abs(weights).max() <= 0.5), Uniform(0.5) == Uniform(1 / 2)
    (True, True)
    """

    bound: float

    def __post_init__(self):
        if not 0 <= self.bound < math.inf:
            raise ValueError(f"bound is {self.bound}; a uniform distribution on ±bound needs a finite bound, 0 or more")

    def __call__(self, rng_key: Array, shape, dtype=jax.numpy.float32, **_) -> Array:
        return jax.random.uniform(rng_key, shape, dtype, -self.bound, self.bound)


def layer_init(scheme: Scheme, fan_in: int) -> LayerInit:
    """The initialisers of a dense or convolutional layer with `fan_in` = height × width × input channels of a group.

    "torch": kernel and bias from U(±1/√fan_in), PyTorch's default for linear and convolutional layers.
    "flax": kernel from a normal distribution of variance 1/fan_in truncated at two deviations (LeCun), bias 0.

    >>> layer_init("torch", 16).bias(jax.random.key(0), (3,)).shape
    (3,)
    """
    if check_scheme(scheme) == "torch":
        return LayerInit(*[Uniform(1.0 / math.sqrt(fan_in))] * 2)
    return LayerInit(initializers.lecun_normal(), initializers.zeros)


def check_scheme(scheme: Scheme) -> Scheme:
    """The scheme; ValueError for an unknown one."""
    if scheme not in get_args(Scheme):
        raise ValueError(f"init is {scheme!r}; choose 'torch' (uniform ±1/√fan_in) or 'flax' (LeCun normal)")
    return scheme
