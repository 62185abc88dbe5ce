"""A model of one's own, functions that nothing here has made: what they take and give, before anything is computed."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_cluster.nn import losses
from fedjax_cluster.types import Federation, Model, Variables

LOG = logging.getLogger(__name__)
ROWS = 2
MASK = jax.ShapeDtypeStruct((ROWS,), np.dtype(bool))
OURS = __name__.partition(".")[0]


def check_model(model: Any, federation: Federation, batch_size: int | None = None, taken: Collection[str] = ()) -> None:
    """Raises a ValueError where a model's functions do not fit together, or not the data; they are traced for it.

    Clients may minimise something else than what is reported of them, which is said. In training they are traced with
    as many rows as a batch has.
    """
    if isinstance(model, Model) and _is_ours(model.metrics) and not _is_ours(model.loss):
        name = getattr(model.loss, "__name__", type(model.loss).__name__)
        LOG.warning(
            "clients minimise the model's loss, %s, but the loss on test rows is that of its metrics, cross entropy or "
            "squared error; give metrics of your own if it should be %s",
            name,
            name,
        )
    if not isinstance(model, Model) or all(map(_is_ours, (model.init, model.predict, model.metrics))):
        return
    x, y = (jax.ShapeDtypeStruct((ROWS, *of.shape[2:]), np.dtype(of.dtype)) for of in federation.train[:2])
    key, info = jax.random.key(0), federation.info
    variables = _traced("init", lambda: model.init(key, info), "a key and the data's description")
    if isinstance(variables, Variables):
        for leaf in jax.tree.leaves(variables.params):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(
                    f"the model's init gives a parameter of {leaf.dtype}, which has no gradient; give floats"
                )
    else:
        given = _kind(variables)
        raise ValueError(f"the model's init returns {given}; it must return fc.types.Variables(params, stats)")
    what = f"x of shape {x.shape}, {x.dtype}"
    _check_call(model.apply)
    outputs = _applied(model, variables, x, None, what)
    rows = min(batch_size or federation.train.x.shape[1], federation.train.x.shape[1])
    batch = jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
    _applied(model, variables, batch, key, f"x of shape {batch.shape}, {x.dtype}, in training")
    predictions = _traced("predict", model.predict, f"outputs of {what}", outputs)
    figures = _traced("metrics", model.metrics, "predictions, y and a mask", predictions, y, MASK)
    shapes = {name: jnp.shape(each) for name, each in figures.items()} if isinstance(figures, Mapping) else None
    if shapes is None or any(shapes.values()):
        given = _kind(figures) if shapes is None else next(f"{name} of shape {of}" for name, of in shapes.items() if of)
        raise ValueError(f"the model's metrics gives {given}; it must give one number for each name, of all the rows")
    if names := [name for name in shapes if name in taken and name != "loss"]:  # which becomes test_loss
        raise ValueError(f"the model's metrics gives {names[0]!r}, which a run has already; give it another name")
    if _is_ours(model.init):
        return
    found = _traced("loss", model.loss, f"outputs of {what}", outputs, y)
    if getattr(found, "shape", None) != (ROWS,):
        raise ValueError(f"the model's loss gives {_kind(found)} for {ROWS} examples; it must give one number for each")
    if model.loss is losses.cross_entropy and outputs.shape[-1] < info.num_classes:
        raise ValueError(
            f"the model's apply gives {outputs.shape[-1]} outputs, but {info.name} has {info.num_classes} classes; "
            "give as many outputs (info.num_classes)"
        )


def _applied(model: Model, variables: Variables, x: Any, rng_key: Any, what: str) -> Any:
    """The outputs, in training with a key; refuses statistics that are not like those of `init`."""
    train = rng_key is not None
    given = _traced("apply", lambda of, x: model.apply(of, x, train=train, rng_key=rng_key), what, variables, x)
    if not isinstance(given, tuple) or len(given) != 2:
        raise ValueError(f"the model's apply returns {_kind(given)}; it must return two: outputs, and variables.stats")
    outputs, stats = given
    when, (found, first) = " in training" if train else "", map(jax.tree.structure, (stats, variables.stats))
    if found != first:
        raise ValueError(
            f"the model's apply returns stats {found}{when}, of which its init had {first}; return variables.stats "
            "where there are none"
        )
    leaves = [[f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(of)] for of in (stats, variables.stats)]
    for one, other in zip(*leaves, strict=True):
        if one != other:
            raise ValueError(f"the model's apply returns {one}{when} in its stats, which is {other} in init; keep that")
    return outputs


def _is_ours(function: Any) -> bool:
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] == OURS


def _check_call(apply: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(apply)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind(None, None, train=True, rng_key=None)
    except TypeError as error:
        raise ValueError(
            f"the model's apply takes {signature}, and is called as apply(variables, x, train=False, rng_key=None): "
            f"{error}"
        ) from error


def _traced(name: str, function: Callable[..., Any], what: str, *arguments: Any) -> Any:
    try:
        return jax.eval_shape(function, *arguments)
    except Exception as error:  # whatever somebody's function raises
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"the model's {name} fails on {what}: {type(error).__name__}: {said}") from error


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" if shape is None else f"an array of shape {shape}"
