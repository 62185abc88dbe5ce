"""Models that compute in a narrower format than that of their parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_cluster.keywords import bound
from fedjax_cluster.nn.losses import scale
from fedjax_cluster.options import with_checks
from fedjax_cluster.types import Model, PyTree, Variables

LOG = logging.getLogger(__name__)
LOOKED_FOR = ("jax_debug_nans", "jax_debug_infs")
Precision = Literal["float32", "bfloat16"]
P = ParamSpec("P")
R = TypeVar("R")


@with_checks()
def mixed_precision(model: Model, precision: Precision = "bfloat16") -> Model:
    """The same model computed in another format: parameters and scaled inputs are cast, outputs returned in float32.

    The parameters themselves stay float32 (the master copy that an optimiser updates), and so do their gradients,
    which pass back through the cast. Losses, the statistics of batch norm and, in `nn.Conv`, `nn.Dense` and this
    package's models, the sums in a bias's gradient are float32 too. `local.sgd(…,
    precision="bfloat16")` applies this to training alone; evaluation stays in float32. Equal arguments: equal models.

    Args:
      model: any `Model`; a Flax module that sets its `dtype` keeps it.
      precision: "bfloat16", or "float32" for the unchanged model.

    Raises:
      ValueError: another precision.

    >>> from fedjax_cluster import nn
    >>> from fedjax_cluster.types import DatasetInfo
    >>> model = mixed_precision(nn.mlp((4,)))
    >>> variables = model.init(jax.random.key(0), DatasetInfo("toy", (3,), 2))
    >>> outputs, _ = model.apply(variables, jnp.ones((1, 3)), train=False)
    >>> variables.params["output"]["kernel"].dtype, outputs.dtype
    (dtype('float32'), dtype('float32'))
    """
    return model if precision == "float32" else model._replace(apply=_Narrow(model.apply, precision))


def precision_of(model: Model) -> Precision:
    """What a model computes in, as far as `mixed_precision` made it."""
    return model.apply.precision if isinstance(model.apply, _Narrow) else "float32"


@dataclasses.dataclass(frozen=True)
class _Narrow:
    apply: Callable[..., tuple[Any, PyTree]]
    precision: Precision

    def __call__(
        self, variables: Variables, x: Array, *, train: bool, rng_key: Array | None = None
    ) -> tuple[Any, PyTree]:
        narrow = jnp.dtype(self.precision)
        variables = variables._replace(params=_cast(variables.params, narrow))
        # Scaled first: a format of eight significant bits would round the bytes themselves.
        outputs, stats = self.apply(variables, _cast(scale(x), narrow), train=train, rng_key=rng_key)
        return _cast(outputs, jnp.float32), _cast(stats, jnp.float32)


def in_32_bits(function: Callable[P, R]) -> Callable[P, R]:
    """The function computed in float32 and int32, also where JAX is set to 64 bits: bit by bit as where it is not.

    Nor is it looked through for NaN, which stands for what is not known, such as the loss of a cluster that nobody was
    in: what is wrong with a run is in its log, and in `num_rejected`.

    >>> with jax.enable_x64(True):
    ...     in_32_bits(jnp.zeros)(3).dtype
    dtype('float32')
    """

    @functools.wraps(function)
    def narrow(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with contextlib.ExitStack() as settings:
                if jax.dtypes.canonicalize_dtype(float) != jnp.float32:
                    settings.enter_context(jax.enable_x64(False))
                if any(getattr(jax.config, name) for name in LOOKED_FOR):
                    _tell_of_nan()
                    settings.enter_context(jax.debug_nans(False))
                    settings.enter_context(jax.debug_infs(False))
                return function(*args, **kwargs)
        except TypeError:
            if inspect.isfunction(function):  # where the arguments do not fit, it names what is near a misspelt one
                bound(function.__name__, inspect.signature(function), args, kwargs)
            raise

    return narrow


@functools.cache
def _tell_of_nan() -> None:
    LOG.warning(
        "jax_debug_nans and jax_debug_infs are set aside, as in a run NaN stands for what is not known; to look for "
        "those of a model, apply it by itself"
    )


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)
