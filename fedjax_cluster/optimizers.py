"""Optax optimisers and schedules by name: equal where their name and numbers are, which optax's are not."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedjax_cluster.options import POSITIVE, as_json, checked, reason_of, shown


@runtime_checkable
class Schedule(Protocol):
    def __call__(self, count: Array | int, /) -> Any:
        """The learning rate f32[] at a count i32[] from 0 on: of rounds on the clients, of its steps on the server."""
        ...


class NamedOptimizer(optax.GradientTransformation):
    """An optax transformation that remembers how it was made; `named` makes them."""

    optimizer: str
    numbers: tuple[tuple[str, Any], ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedOptimizer) and self._identity() == other._identity()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f"named({self.optimizer!r}, {', '.join(f'{name}={value!r}' for name, value in self.numbers)})"

    def _identity(self) -> tuple[Any, ...]:
        return self.optimizer, self.numbers

    def to_json(self) -> dict[str, Any]:
        return {"name": self.optimizer, **dict(self.numbers)}

    def with_rate(self, rate: Array | float) -> optax.GradientTransformation:
        """The same optimiser with another learning rate, which may be traced."""
        return self.with_number("learning_rate", rate)

    def with_number(self, name: str, number: Array | float) -> NamedOptimizer:
        """The same optimiser with another of its numbers, which may be traced and is not checked."""
        numbers = {**dict(self.numbers), name: number}
        made = NamedOptimizer(*getattr(optax, self.optimizer)(**numbers))
        made.optimizer, made.numbers = self.optimizer, tuple(sorted(numbers.items()))
        return made


def named(optimizer: str, **numbers: Any) -> NamedOptimizer:
    """An optimiser of optax that is equal to another of the same name and numbers.

    Methods and local updates that hold such optimisers share one compiled program; with `optax.adam(0.01)` itself each
    call makes another optimiser.

    Args:
      optimizer: a function of optax, such as "sgd" or "adam".
      **numbers: its arguments.

    Raises:
      ValueError: optax has no such optimiser, it takes other arguments, or a rate that is not positive.

    >>> named("sgd", learning_rate=0.1) == named("sgd", learning_rate=0.1)
    True
    """
    make = getattr(optax, optimizer, None) if isinstance(optimizer, str) else None
    if not callable(make):
        raise ValueError(
            f"optimizer is {shown(optimizer)}, which optax does not have; give a name such as 'sgd' or 'adam'"
        )
    rate = numbers.get("learning_rate")
    if rate is not None and not callable(rate):
        numbers["learning_rate"] = checked("learning_rate", rate, float, POSITIVE)
    try:
        transformation = make(**numbers)
    except TypeError as error:
        raise ValueError(f"optimizer is {optimizer!r}, but optax's takes other arguments: {error}") from error
    made = NamedOptimizer(*checked("optimizer", transformation, optax.GradientTransformation))
    made.optimizer, made.numbers = optimizer, tuple(sorted(numbers.items()))
    try:
        hash(made)
    except TypeError as error:
        raise ValueError(
            f"{optimizer} takes numbers, text, tuples or functions here, which compare by value: {error}; give "
            "optax's own optimiser where it takes others"
        ) from None
    return made


@dataclasses.dataclass(frozen=True)
class NamedSchedule:
    """A schedule of optax that remembers how it was made; `schedule` makes them."""

    name: str
    arguments: str  # as JSON, which compares and hashes
    function: Schedule = dataclasses.field(compare=False, repr=False)

    def __call__(self, count: Array | int, /) -> Any:
        return self.function(count)

    def to_json(self) -> dict[str, Any]:
        return {"schedule": self.name, **json.loads(self.arguments)}


def schedule(name: str, **arguments: Any) -> NamedSchedule:
    """A schedule of optax that is equal to another of the same name and arguments.

    `local.sgd` evaluates it at the number of the round; a server's optimiser at the number of its own steps.

    Args:
      name: a function of optax, such as "exponential_decay", "cosine_decay_schedule" or "sgdr_schedule" (warm
        restarts).
      **arguments: its arguments: numbers, lists and dictionaries of them, other schedules.

    Raises:
      ValueError: optax has no such schedule, or it takes other arguments.

    >>> fading = schedule("exponential_decay", init_value=0.5, transition_steps=1, decay_rate=0.5)
    >>> fading == schedule("exponential_decay", init_value=0.5, transition_steps=1, decay_rate=0.5), float(fading(2))
    (True, 0.125)
    """
    make = getattr(optax, name, None) if isinstance(name, str) else None
    if not callable(make) or isinstance(make, type):
        raise ValueError(
            f"name is {shown(name)}, a schedule that optax does not have; give one such as 'exponential_decay'"
        )
    for argument, value in arguments.items():
        if "custom" in (text := json.dumps(as_json(value))) or "NaN" in text or "Infinity" in text:
            raise ValueError(
                f"{argument} is {shown(value)}; give finite numbers, lists and dictionaries of them, or schedules"
            )
    try:
        function = make(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"name is {name!r}, but optax's takes other arguments: {error}") from error
    if not isinstance(function, Schedule):
        raise ValueError(f"name is {name!r}, which is no schedule of optax; give one such as 'exponential_decay'")
    made = NamedSchedule(name, json.dumps(as_json(arguments), sort_keys=True), function)
    given = ", ".join(f"{argument} {shown(value)}" for argument, value in arguments.items())
    check_schedule(f"name is {name!r} with {given}", made)
    return made


def rate_of(function: Schedule, count: Array | int) -> Array:
    """The learning rate f32[] of a schedule at a count i32[]."""
    # Optax's own mix whole numbers with floating-point ones.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.asarray(function(jnp.asarray(count, jnp.int32)), jnp.float32)


def check_schedule(named: str, function: Schedule) -> None:
    """Raises a ValueError where a function gives no learning rate for the count 0; `named` begins its message."""
    try:
        # Methods make variants of themselves while they are traced, too.
        with jax.ensure_compile_time_eval():
            first = float(np.asarray(rate_of(function, 0)))
    except Exception as error:
        raise ValueError(
            f"{named}, which gives no learning rate at 0 ({reason_of(error)}); give a number, or a schedule"
        ) from error
    if not 0 <= first < math.inf:
        raise ValueError(f"{named}, which is {first:g} at 0; a rate must be finite and 0 or more")


def has_schedule(optimizer: optax.GradientTransformation) -> bool:
    """Whether an optimiser counts its steps for a schedule, as far as its state tells.

    >>> has_schedule(optax.sgd(optax.linear_schedule(1.0, 0.0, 9))), has_schedule(optax.adam(0.1))
    (True, False)
    """
    scheduled = (optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState)
    try:
        state = jax.eval_shape(optimizer.init, jax.ShapeDtypeStruct((1,), jnp.float32))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False  # made for the parameters of one model
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, scheduled))
    return any(isinstance(part, scheduled) and bool(getattr(part, "hyperparams_states", True)) for part in parts)
