"""Optax optimisers by name: equal where their name and numbers are, which optax's are not."""

from __future__ import annotations

from typing import Any

import optax

from fedjax_cluster.options import POSITIVE, checked, shown


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
    return made
