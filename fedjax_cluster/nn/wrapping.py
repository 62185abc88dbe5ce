"""Any Flax module as a `Model` of pure functions, compared by value."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import flax.errors
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster.nn.losses import LossName, objective, scale, wide
from fedjax_cluster.options import COUNT, FINITE, POSITIVE, checked, with_checks
from fedjax_cluster.types import DatasetInfo, Model, PyTree, Variables

Normalize = tuple[float | Sequence[float], float | Sequence[float]]  # mean and standard deviation
Network = linen.Module | Callable[[int], linen.Module]
MODES = {"train": True, "training": True, "is_training": True, "deterministic": False}  # what each is in training
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
LOG = logging.getLogger(__name__)
UNTOLD = (linen.BatchNorm, linen.Dropout)
# Of a Dropout or not: what keeps it as outside of training, and what it does then.
UNTOLD_DO = {
    False: ("use_running_average", "BatchNorm keeps its first statistics"),
    True: ("deterministic", "Dropout drops nothing"),
}
TOLD: set[str] = set()  # modules that were warned of


@with_checks(num_outputs=COUNT)
def from_flax(
    module: Network, *, loss: LossName = "auto", normalize: Normalize | None = None, num_outputs: int | None = None
) -> Model:
    """Any Flax module as a `Model`; raw uint8 inputs are scaled to [0, 1].

    `train`, `training` or `is_training`, or `deterministic = not train`, is passed on where the module's `__call__`
    takes it; `rng_key` becomes the "dropout" stream. Only the collections "params" and "batch_stats" may hold
    variables.

    Models of equal arguments are equal, hash equally and share compiled programs. Flax modules are equal if their
    fields are, `Sized(Class, **fields)` if class and fields are, any other function only to itself.

    Args:
      module: a module that maps [N, ...] to [N, outputs], or a function of the number of outputs that gives one whose
        last layer is called `output`: one model then serves any data set.
      loss: "cross_entropy", "mse", or "auto": squared error for one output, cross entropy for more.
      normalize: (mean, deviation), scalars or one value per channel: scaled inputs x become (x − mean) / deviation.
      num_outputs: number of outputs where the data set's description does not give it (several regression targets).

    Raises:
      TypeError: a module of Flax nnx.
      ValueError: an unknown loss; in `init`, other collections of variables, an unknown number of outputs, or fewer
        than classes, several arrays in place of one, a function that gives no module, or a `__call__` that needs more
        than inputs.

    >>> import jax
    >>> from fedjax_cluster.types import DatasetInfo
    >>> model = from_flax(linen.Dense(3))
    >>> variables = model.init(jax.random.key(0), DatasetInfo("toy", (4,), 3))
    >>> outputs, stats = model.apply(variables, jax.numpy.ones((2, 4)), train=False)
    >>> outputs.shape, stats
    ((2, 3), {})
    >>> model == from_flax(linen.Dense(3)), model == from_flax(linen.Dense(4))
    (True, False)
    """
    _refuse_nnx(module)
    task, network = objective(loss), _hashable(module)
    for name, part, bound in zip(("mean", "deviation"), normalize or (), (FINITE, POSITIVE), strict=False):
        checked(f"the {name} of normalize", part, float | Sequence[float], bound)
    parts = None if normalize is None else tuple(_as_tuple(np.asarray(part).tolist()) for part in normalize)
    return Model(_Init(network, loss, num_outputs), _Apply(network, parts), task.loss, task.predict, task.metrics)


@dataclasses.dataclass(frozen=True, init=False)
class Sized:
    """A function of the number of outputs, compared by value: a Flax module class and its fields but `num_outputs`.

    >>> class Head(linen.Module):
    ...     num_outputs: int
    ...     widths: tuple[int, ...]
    >>> Sized(Head, widths=[3, 4])(2).widths, Sized(Head, widths=[3]) == Sized(Head, widths=(3,))
    ((3, 4), True)
    """

    module: type[linen.Module]
    fields: tuple[tuple[str, Hashable], ...]  # lists as tuples

    def __init__(self, module: type[linen.Module], **fields: Any):
        checked("module", module, type[linen.Module])
        own = {field.name: field for field in dataclasses.fields(module) if field.name not in ("parent", "name")}
        if own.pop("num_outputs", None) is None:
            raise ValueError(f"{module.__name__} has no field num_outputs; add it, or give from_flax a module")
        known, none = set(own), dataclasses.MISSING
        for name, field in own.items():
            if name not in fields and field.default is none and field.default_factory is none:
                raise ValueError(f"{module.__name__} has a field {name} without a default; give it")
        if unknown := sorted(set(fields) - known):
            raise ValueError(
                f"{module.__name__} has no field {unknown[0]}; it has {', '.join(sorted(known)) or 'none'}"
            )
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "fields", tuple((name, _as_tuple(value)) for name, value in sorted(fields.items())))

    def __call__(self, num_outputs: int) -> linen.Module:
        return self.module(num_outputs=num_outputs, **dict(self.fields))  # pyright: ignore[reportCallIssue]


@dataclasses.dataclass(frozen=True, eq=False)
class _ByIdentity:
    """A network that cannot be hashed, such as a module with a list among its fields: equal to itself alone."""

    network: Network


@dataclasses.dataclass(frozen=True)
class _Init:
    network: Network | _ByIdentity
    loss: LossName
    num_outputs: int | None

    def __call__(self, rng_key: Array, info: DatasetInfo) -> Variables:
        module = _build(self.network, lambda: _num_outputs(info, self.loss, self.num_outputs))
        x = jnp.zeros((1, *info.input_shape), jnp.int32 if info.task == "language" else jnp.float32)
        _check_call(module)
        seen: list[linen.Module] = []

        def look(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            seen.extend([context.module] if isinstance(context.module, UNTOLD) else [])
            return call(*args, **kwargs)

        with linen.intercept_methods(look):
            outputs, variables = _first_pass(module, rng_key, x)
        if unknown := set(variables) - {"params", "batch_stats"}:
            raise ValueError(
                f"{type(module).__name__} keeps variables in {sorted(unknown)}; a model has 'params' and"
                " 'batch_stats' only: make the others arguments or parameters"
            )
        if not isinstance(outputs, Array):
            raise ValueError(f"{type(module).__name__} gives a {type(outputs).__name__}; a model gives one array")
        _check_outputs(type(module).__name__, outputs.shape, info, self.loss)
        if seen and type(module).__name__ not in TOLD and not _mode(module, train=True):
            _warn_if_untold(module, variables, rng_key, x)
        return Variables(variables.get("params", {}), variables.get("batch_stats", {}))


@dataclasses.dataclass(frozen=True)
class _Apply:
    network: Network | _ByIdentity
    normalize: tuple[float | tuple[float, ...], ...] | None

    def __call__(
        self, variables: Variables, x: Array, *, train: bool, rng_key: Array | None = None
    ) -> tuple[Any, PyTree]:
        params, stats = variables
        # The parameters give the number of outputs, so that a model needs no second copy of the description.
        module = _build(self.network, lambda: _output_size(params))
        collections = {"params": params, "batch_stats": stats} if stats else {"params": params}
        inputs = _normalized(scale(x), self.normalize)
        options: dict[str, Any] = _mode(module, train=train)
        options["rngs"] = None if rng_key is None else {"dropout": rng_key}
        try:
            if train and stats:
                outputs, updated = module.apply(collections, inputs, mutable=["batch_stats"], **options)
                return wide(outputs), updated["batch_stats"]
            outputs: Any = module.apply(collections, inputs, **options)
            return wide(outputs), stats
        except (TypeError, ValueError) as error:
            if x.dtype == jnp.uint8 and _takes_integers(module, collections, x, options):
                raise ValueError(
                    f"{type(module).__name__} takes integers, but x is uint8, which is taken for pixels from 0 to 255 "
                    "and scaled to [0, 1]; give tokens as int32"
                ) from error
            raise
        except flax.errors.ModifyScopeVariableError as error:
            raise ValueError(
                f"{type(module).__name__} changes its batch statistics outside of training; let its "
                "__call__ take `train`, and give a BatchNorm use_running_average=not train"
            ) from error
        except flax.errors.InvalidRngError as error:
            why = (
                "outside of training; let its __call__ take `train`, and give a Dropout deterministic=not train"
                if rng_key is None
                else 'of another stream than "dropout", the only one that a client is given'
            )
            raise ValueError(f"{type(module).__name__} draws random numbers {why}") from error


def _check_call(module: linen.Module) -> None:
    """Refuses a module whose `__call__` needs more than inputs and what `_mode` passes on."""
    name, (_, *rest) = type(module).__name__, inspect.signature(type(module).__call__).parameters.values()
    mode = _mode(module, train=False)
    needed = [each.name for each in rest[1:] if each.default is each.empty and each.kind not in VARIADIC]
    if missing := [each for each in needed if each not in mode]:
        raise ValueError(
            f"{name}.__call__ needs {missing[0]}; of a model it is given inputs, and {', '.join(MODES)} where it takes "
            f"one of them: give {missing[0]} a default"
        )


def _warn_if_untold(module: linen.Module, variables: Any, rng_key: Array, x: Array) -> None:
    """Warns of layers that are in training as they are outside of it, in a module that is not told of it."""
    still: list[str] = []

    def look(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        layer, given = context.module, args[1] if len(args) > 1 else None
        if context.method_name == "__call__" and isinstance(layer, UNTOLD):
            flag, what = UNTOLD_DO[isinstance(layer, linen.Dropout)]
            given = kwargs.get(flag) if given is None else given
            if (getattr(layer, flag) if given is None else given) and getattr(layer, "rate", 1) > 0:
                still.append(what)
        return call(*args, **kwargs)

    def trained(variables: Any, x: Array) -> Any:
        return module.apply(variables, x, mutable=["batch_stats"], rngs={"dropout": rng_key})

    with linen.intercept_methods(look), contextlib.suppress(Exception):
        jax.eval_shape(trained, variables, x)
    if still:
        TOLD.add(name := type(module).__name__)
        LOG.warning("%s.__call__ takes none of %s: its %s in training", name, ", ".join(MODES), still[0])


def _first_pass(module: linen.Module, rng_key: Array, x: Array) -> tuple[Any, Any]:
    """Outputs and variables for inputs like x; of integers where the module takes no others, as one of tokens does."""
    mode = _mode(module, train=False)
    try:
        return module.init_with_output(rng_key, x, **mode)
    except (TypeError, ValueError):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise
        with contextlib.suppress(TypeError, ValueError):
            return module.init_with_output(rng_key, x.astype(jnp.int32), **mode)
        raise


def _takes_integers(module: linen.Module, collections: PyTree, x: Array, options: dict[str, Any]) -> bool:
    try:
        jax.eval_shape(lambda x: module.apply(collections, x, mutable=["batch_stats"], **options), x.astype(jnp.int32))
    except (TypeError, ValueError):
        return False
    return True


def _hashable(network: Network) -> Network | _ByIdentity:
    try:
        hash(network)
    except TypeError:
        return _ByIdentity(network)
    return network


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list | tuple) else value


def _build(network: Network | _ByIdentity, num_outputs: Callable[[], int]) -> linen.Module:
    network = network.network if isinstance(network, _ByIdentity) else network
    if isinstance(network, linen.Module):
        return network
    count = num_outputs()
    try:
        module = network(count)
    except TypeError as error:
        if not isinstance(network, type):
            raise
        raise ValueError(
            f"{network.__name__}({count}) fails: {error}; give from_flax a module, such as {network.__name__}(), or "
            "Sized of a class that has a field num_outputs"
        ) from error
    if not isinstance(module, linen.Module):
        raise ValueError(
            f"{getattr(network, '__name__', network)}({count}) is a {type(module).__name__}; from_flax takes a Flax"
            " module, or a function of the number of outputs that gives one"
        )
    return module


def _refuse_nnx(module: Any) -> None:
    bases = module.__mro__ if isinstance(module, type) else type(module).__mro__
    if any(base.__module__.startswith("flax.nnx") for base in bases):
        name = module.__name__ if isinstance(module, type) else type(module).__name__
        raise TypeError(
            f"{name} is a module of Flax nnx; from_flax takes Flax linen's. Give a `types.Model` of pure functions,"
            " `init` by nnx.split and `apply` by nnx.merge, as the notebook own_data_and_model does"
        )


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
            f"{info.name} is a {info.task} task with {outputs} outputs, which loss='auto' would take for classes; give"
            " a model that returns its inputs, such as csi_autoencoder for channels, or pass loss='mse'"
        )
    return outputs


def _check_outputs(name: str, shape: tuple[int, ...], info: DatasetInfo, loss: LossName) -> None:
    """Raises a ValueError where classes are left without an output, of which the loss would be NaN."""
    if info.task not in ("classification", "language") or loss == "mse":
        return
    width = shape[-1] if len(shape) > 1 else 1
    regression = loss == "auto" and width == 1
    if width < info.num_classes and not regression:
        raise ValueError(
            f"{name} gives {width} output{'s' * (width != 1)}, but {info.name} has {info.num_classes} classes; give "
            "its last layer as many outputs"
        )


def _output_size(params: Any) -> int:
    try:
        return params["output"]["kernel"].shape[-1]
    except KeyError:
        raise ValueError(
            f"the parameters have the layers {sorted(params)} and no 'output' with a 'kernel'; a module that is"
            " built from the number of outputs must call its last layer 'output'"
        ) from None


def _mode(module: linen.Module, *, train: bool) -> dict[str, Any]:
    accepted = inspect.signature(type(module).__call__).parameters
    return {name: train == positive for name, positive in MODES.items() if name in accepted}


def _normalized(x: Array, normalize: tuple[float | tuple[float, ...], ...] | None) -> Array:
    if normalize is None:
        return x
    parts = [jnp.asarray(part, jnp.float32).reshape(-1) for part in normalize]
    if any(part.size not in (1, x.shape[-1]) for part in parts):
        raise ValueError(
            f"normalize is {normalize!r}, but inputs have shape {x.shape}: give scalars, or one value for each of the"
            f" {x.shape[-1]} channels of the last axis"
        )
    mean, deviation = (part.reshape((1,) * (x.ndim - 1) + (-1,)) for part in parts)
    return ((x.astype(jnp.float32) - mean) / deviation).astype(x.dtype if x.dtype == jnp.bfloat16 else jnp.float32)
