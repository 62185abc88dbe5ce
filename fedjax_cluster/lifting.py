"""Numbers of a method as arguments of its compiled programs: methods that differ in nothing else share one.

A number is named by its path: `beta`, `local.learning_rate`, `server.learning_rate`. Outside of `one_program` every
number is a constant of the programs, as it always was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeGuard, TypeVar, cast

from jax.core import Tracer

from fedjax_cluster.optimizers import NamedOptimizer, named
from fedjax_cluster.options import Options, checked, described_options, shown, takes_fractions

T = TypeVar("T")
Numbers = Mapping[str, Any]  # path -> number

_SHARED: ContextVar[Numbers | None] = ContextVar("shared", default=None)
ELSEWHERE = "call simulate_many, or simulate, once for each value"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether an option is a floating-point number, or stands for one while a program is traced."""
    return isinstance(value, float | Tracer)


def always(value: float) -> bool:
    """Of an option whose every value decides the shapes of arrays."""
    return True


def is_zero(value: Any) -> bool:
    """Whether an option is the number 0; one that is traced may be any other."""
    return not isinstance(value, Tracer) and value == 0


@contextlib.contextmanager
def one_program(numbers: Numbers) -> Iterator[None]:
    """Inside, these numbers of methods are arguments of the programs that are compiled for them.

    Args:
      numbers: path -> the value that stands for all others where programs are told apart; {} changes nothing.
    """
    token = _SHARED.set(numbers)
    try:
        yield
    finally:
        _SHARED.reset(token)


def lifted(value: T, place: str = "") -> tuple[T, dict[str, float]]:
    """A method, or the part of one at `place`, as programs are told apart by it, and the numbers that they are given.

    >>> from fedjax_cluster import local
    >>> with one_program({"local.learning_rate": 1.0}):
    ...     lifted(local.sgd(0.3, batch_size=8, steps=1), "local.")[1]
    {'learning_rate': 0.3}
    """
    numbers = {path[len(place) :]: number for path, number in (_SHARED.get() or {}).items() if path.startswith(place)}
    own = {path: number_at(value, path) for path in numbers if _has(value, path)}
    own = {path: number for path, number in own.items() if isinstance(number, float)}
    return with_numbers(value, {path: numbers[path] for path in own}), own


def with_numbers(value: T, numbers: Numbers) -> T:
    """A method with other numbers, which are not checked: they may be traced.

    >>> from fedjax_cluster import local
    >>> with_numbers(local.sgd(0.3, batch_size=8, steps=1), {"learning_rate": 0.1}).learning_rate
    0.1
    """
    for path, number in numbers.items():
        value = _replaced(value, path.split("."), number, check=False)
    return value


def with_number(value: T, path: str, number: Any) -> T:
    """A method with another number, checked as its constructor checks it."""
    return _replaced(value, path.split("."), number, check=True)


def number_at(value: Any, path: str) -> Any:
    """The number at a path.

    >>> from fedjax_cluster import local
    >>> number_at(local.sgd(0.3, batch_size=8, steps=1), "learning_rate")
    0.3
    """
    for name in path.split("."):
        value = dict(value.numbers)[name] if isinstance(value, NamedOptimizer) else getattr(value, name)
    return value


def numbers_of(value: Any, place: str = "") -> dict[str, float]:
    """Path -> number, of all floating-point numbers of a method, its local update and its named optimisers.

    >>> from fedjax_cluster import local
    >>> numbers_of(local.sgd(0.3, batch_size=8, steps=1))
    {'learning_rate': 0.3, 'proximal': 0.0, 'weight_decay': 0.0}
    """
    found: dict[str, float] = {}
    for name, part in _parts(value).items():
        if isinstance(part, float):
            found[f"{place}{name}"] = part
        else:
            found |= numbers_of(part, f"{place}{name}.")
    return found


def differing(values: Sequence[Any]) -> list[tuple[list[int], dict[str, float]]]:
    """Groups of methods that are equal but for numbers: their places in `values`, and the numbers in which they differ.

    Numbers that decide shapes are no such numbers. Those that are given for a group are its first method's.
    """
    groups: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(with_numbers(value, dict.fromkeys(_liftable(value), 1.0)), []).append(index)
    found = []
    for members in groups.values():
        numbers = [_liftable(values[index]) for index in members]
        varied = {path: of for path, of in numbers[0].items() if any(each[path] != of for each in numbers)}
        found.append((members, varied))
    return found


def path_of(value: Any, name: str) -> str:
    """Where an option of this name is; `learning_rate` is the clients' before the server's.

    Raises:
      ValueError: no such option, or one whose values need programs of their own.

    >>> from fedjax_cluster import algorithms, local, nn
    >>> method = algorithms.fedavg(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1))
    >>> path_of(method, "learning_rate")
    'local.learning_rate'
    >>> path_of(method, "participation")
    Traceback (most recent call last):
    ...
    ValueError: participation decides the shapes of a program: call simulate_many, or simulate, once for each value
    """
    name = str(name)
    path = next((at for at in (name, f"local.{name}", f"server.{name}") if _has(value, at)), "")
    if not path:
        known = [*_named_parts(value), *(f"local.{part}" for part in _named_parts(getattr(value, "local", None)))]
        raise ValueError(f"options has {shown(name)}, which {value.name} does not have; it has {', '.join(known)}")
    if (beside := kept_beside(value)) is not None:
        raise ValueError(
            f"{value.name} keeps {beside}, made of its options, which would not follow {name}: make it a property, or "
            f"{ELSEWHERE}"
        )
    *outer, last = path.split(".")
    owner = number_at(value, ".".join(outer)) if outer else value
    if isinstance(number_at(value, path), NamedOptimizer):
        path, owner, last = f"{path}.learning_rate", number_at(value, path), "learning_rate"
    if _decides_shapes(value, path, every=True):
        raise ValueError(f"{path} decides the shapes of a program: {ELSEWHERE}")
    if isinstance(owner, Options):
        hint = next(each.hint for each in described_options(type(owner)) if each.name == last)
        if not takes_fractions(hint):
            raise ValueError(f"{path} is not a number that a program computes with: {ELSEWHERE}")
    return path


def kept_beside(value: Any) -> str | None:
    """An attribute that a method, or an option of it, has made of its options and keeps; None without one.

    With another number as an argument of a program it would still be that of the first.
    """
    if not isinstance(value, Options):
        return None
    cached = {name for name, of in inspect.getmembers_static(type(value)) if isinstance(of, functools.cached_property)}
    parts = _parts(value)
    own = sorted(set(getattr(value, "__dict__", {})) - set(parts) - cached)
    return own[0] if own else next(filter(None, map(kept_beside, parts.values())), None)


def checked_values(path: str, values: Any) -> tuple[float, ...]:
    """The values of an option that is to vary, as floating-point numbers.

    >>> checked_values("beta", [1, 0.5])
    (1.0, 0.5)
    """
    numbers = checked(f"{path} of options", values, Sequence[float])
    if not numbers:
        raise ValueError(f"{path} of options has no values; give at least one")
    if twice := [number for place, number in enumerate(numbers) if number in numbers[:place]]:
        raise ValueError(f"{path} of options has the value {twice[0]:g} twice; give each once")
    named = [f"{number:g}" for number in numbers]  # as tables and pictures have them
    if alike := [number for place, number in enumerate(numbers) if named[place] in named[:place]]:
        other = numbers[named.index(f"{alike[0]:g}")]
        raise ValueError(f"{path} of options has {other!r} and {alike[0]!r}, whose first six digits are the same")
    return numbers


def _liftable(value: Any) -> dict[str, float]:
    if kept_beside(value):
        return {}
    return {path: number for path, number in numbers_of(value).items() if not _decides_shapes(value, path)}


def _decides_shapes(value: Any, path: str, *, every: bool = False) -> bool:
    """Whether a number decides the shapes of arrays; `every`: whether it does whatever it is."""
    *outer, last = path.split(".")
    owner = number_at(value, ".".join(outer)) if outer else value
    if not isinstance(owner, Options):
        return False
    # A subclass that says an option anew need not say this again.
    fields = [vars(cls).get("__dataclass_fields__", {}).get(last) for cls in type(owner).__mro__]
    decides = next(filter(None, (each.metadata.get("shapes") for each in fields if each is not None)), None)
    return decides is not None and (decides is always if every else decides(getattr(owner, last)))


def _parts(value: Any) -> dict[str, Any]:
    if isinstance(value, NamedOptimizer):
        return dict(value.numbers)
    if isinstance(value, Options):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(cast(Any, value))}
    return {}


def _named_parts(value: Any) -> list[str]:
    return list(_parts(value))


def _has(value: Any, path: str) -> bool:
    for name in path.split("."):
        parts = _parts(value)
        if name not in parts:
            return False
        value = parts[name]
    return True


def _replaced(value: Any, names: list[str], number: Any, *, check: bool) -> Any:
    name, *rest = names
    new = _replaced(_parts(value)[name], rest, number, check=check) if rest else number
    if isinstance(value, NamedOptimizer):
        return named(value.optimizer, **{**dict(value.numbers), name: new}) if check else value.with_number(name, new)
    if check:
        return dataclasses.replace(value, **{name: new})
    # Not what is kept beside the options, such as a cached property: it was made of the number that goes.
    made = object.__new__(type(value))
    for field in dataclasses.fields(value):
        object.__setattr__(made, field.name, new if field.name == name else getattr(value, field.name))
    return made
