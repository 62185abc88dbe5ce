"""Any Flax module as a `Model` of pure functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as linen
import jax.numpy as jnp
from jax import Array

from fedjax_cluster.nn.losses import LossName, objective, scale
from fedjax_cluster.types import DatasetInfo, Model, Variables

Normalize = tuple[float | Sequence[float], float | Sequence[float]]


def from_flax(
    module: linen.Module | Callable[[int], linen.Module],
    *,
    loss: LossName = "auto",
    normalize: Normalize | None = None,
    num_outputs: int | None = None,
) -> Model:
    """Any Flax module as a `Model`.

    `train`, or `deterministic = not train`, is passed on where the module's `__call__` takes it; `rng_key`
    becomes the "dropout" stream. Only the collections "params" and "batch_stats" may hold variables.

    Args:
      module: a module that maps [N, ...] to [N, outputs], or a function of the number of outputs that gives
        one whose last layer is called `output`: then one model serves any data set.
      loss: "cross_entropy", "mse", or "auto": squared error for one output, cross entropy for more.
      normalize: (mean, standard deviation), numbers or one per channel, taken off the scaled inputs.
      num_outputs: outputs where the data set's description does not tell them (a regression with several).

    Returns:
      A `Model`; raw uint8 inputs are scaled to [0, 1].

    Raises:
      ValueError: an unknown loss; in `init`, a module with other collections of variables, or a task whose
        number of outputs is unknown.

    >>> import flax.linen, jax
    >>> from fedjax_cluster.types import DatasetInfo
    >>> model = from_flax(flax.linen.Dense(3))
    >>> variables = model.init(jax.random.key(0), DatasetInfo("toy", (4,), 3))
    >>> outputs, stats = model.apply(variables, jax.numpy.ones((2, 4)), train=False)
    >>> outputs.shape, stats
    ((2, 3), {})
    """
    task = objective(loss)

    def build(outputs: Callable[[], int]) -> linen.Module:
        return module if isinstance(module, linen.Module) else module(outputs())

    def init(rng_key: Array, info: DatasetInfo) -> Variables:
        built = build(lambda: _num_outputs(info, loss, num_outputs))
        x = jnp.zeros((1, *info.input_shape), jnp.int32 if info.task == "language" else jnp.float32)
        variables = built.init(rng_key, x, **_mode(built, train=False))
        unknown = set(variables) - {"params", "batch_stats"}
        if unknown:
            raise ValueError(
                f"{type(built).__name__} keeps variables in {sorted(unknown)}; a model has 'params' and"
                " 'batch_stats' only: make the others arguments or parameters"
            )
        return Variables(variables.get("params", {}), variables.get("batch_stats", {}))

    def apply(variables: Variables, x: Array, *, train: bool, rng_key: Array | None = None) -> tuple[Any, Any]:
        params, stats = variables
        # The parameters know the number of outputs, so that a model needs no second copy of the description.
        built = build(lambda: _output_size(params))
        collections = {"params": params, "batch_stats": stats} if stats else {"params": params}
        rngs = None if rng_key is None else {"dropout": rng_key}
        inputs = _normalized(scale(x), normalize)
        mode = _mode(built, train=train)
        if train and stats:
            outputs, updated = built.apply(collections, inputs, rngs=rngs, mutable=["batch_stats"], **mode)
            return outputs, updated["batch_stats"]
        return built.apply(collections, inputs, rngs=rngs, **mode), stats

    return Model(init, apply, task.loss, task.predict, task.metrics)


def _num_outputs(info: DatasetInfo, loss: LossName, given: int | None) -> int:
    if given is not None:
        least = info.num_classes if info.task in ("classification", "language") and loss != "mse" else 1
        if given < least:
            raise ValueError(f"num_outputs is {given}, but {info.name} has {least} classes; give at least as many")
        return given
    if info.task in ("classification", "language"):
        if info.num_classes < 2:
            raise ValueError(
                f"{info.name} has num_classes={info.num_classes}; {info.task} needs at least 2, or pass num_outputs"
            )
        return info.num_classes
    outputs = 1 if info.task == "regression" else math.prod(info.input_shape)
    if outputs > 1 and loss == "auto":
        raise ValueError(
            f"{info.name} is a {info.task} task with {outputs} outputs, which loss='auto' would take for classes;"
            " pass loss='mse'"
        )
    return outputs


def _output_size(params: Any) -> int:
    try:
        return params["output"]["kernel"].shape[-1]
    except KeyError:
        raise ValueError(
            f"the parameters have the layers {sorted(params)} and no 'output' with a 'kernel'; a module that is"
            " built from the number of outputs must call its last layer 'output'"
        ) from None


def _mode(module: linen.Module, *, train: bool) -> dict[str, Any]:
    takes = inspect.signature(type(module).__call__).parameters
    flags = {"train": train, "deterministic": not train}
    return {name: value for name, value in flags.items() if name in takes}


def _normalized(x: Array, normalize: Normalize | None) -> Array:
    if normalize is None:
        return x
    parts = [jnp.asarray(part, jnp.float32).reshape(-1) for part in normalize]
    if any(part.size not in (1, x.shape[-1]) for part in parts):
        raise ValueError(
            f"normalize is {normalize!r}, but inputs have shape {x.shape}: give numbers, or one for each of the"
            f" {x.shape[-1]} channels of the last axis"
        )
    mean, deviation = (part.reshape((1,) * (x.ndim - 1) + (-1,)) for part in parts)
    return ((x.astype(jnp.float32) - mean) / deviation).astype(x.dtype if x.dtype == jnp.bfloat16 else jnp.float32)
