"""Values whose fields are their options: each states its type, default, bound and one line of documentation, once.

From the fields come the constructor, `help()`, the checks with their messages, the JSON form, equality and hash; the
command line makes its flags of them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, dataclass_transform

import numpy as np

LINE = 118  # characters of help() and of an argument's documentation


class Bound(NamedTuple):
    """What numbers an option takes."""

    holds: Callable[[Any], bool]
    text: str  # completes "it must be"


def at_least(least: float) -> Bound:
    """Finite numbers from `least` on.

    >>> at_least(2).holds(1), at_least(2).text
    (False, 'at least 2')
    """
    return Bound(lambda value: least <= value < math.inf, f"at least {least}")


POSITIVE = Bound(lambda value: 0 < value < math.inf, "positive and finite")
NOT_NEGATIVE = Bound(lambda value: 0 <= value < math.inf, "finite and 0 or more")
SHARE = Bound(lambda value: 0 < value <= 1, "above 0 and up to 1")
UNIT = Bound(lambda value: 0 <= value <= 1, "between 0 and 1")
BELOW_ONE = Bound(lambda value: 0 <= value < 1, "at least 0 and below 1")
INSIDE_UNIT = Bound(lambda value: 0 < value < 1, "above 0 and below 1")


def option(
    doc: str,
    *,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    bound: Bound | None = None,
    kw_only: bool = True,
    init: bool = True,
) -> Any:
    """A field of `Options`.

    Args:
      doc: what it is, one line.
      default: without one, or a factory of it, the option must be given.
      default_factory: makes the default.
      bound: of its numbers; choices, None and the like follow from the field's type.
      kw_only: False takes it by position too.
      init: False fixes it at its default.
    """
    metadata = {"doc": doc, "bound": bound}
    return dataclasses.field(
        default=default, default_factory=default_factory, kw_only=kw_only, init=init, metadata=metadata
    )


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option,))
class Options:
    """A frozen value with options as fields: equal, and equally hashed, where all of its options are equal.

    Subclasses become frozen dataclasses; numbers, lists and choices are checked and brought to the field's type.

    Raises:
      ValueError: an option of another type or out of its bound; says which, and what it may be.

    >>> class decay(Options):
    ...     rate: float = option("λ", bound=POSITIVE)
    >>> decay(rate=1), decay(rate=1) == decay(rate=1.0)
    (decay(rate=1.0), True)
    >>> decay(rate=-1)
    Traceback (most recent call last):
    ...
    ValueError: rate is -1; it must be a number, positive and finite
    """

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        text = inspect.cleandoc(cls.__dict__.get("__doc__") or cls.__name__)
        dataclasses.dataclass(frozen=True)(cls)
        cls.__doc__ = _with_arguments(text, typing.cast(Any, cls))

    def __post_init__(self):
        hints = _hints(type(self))
        for field in dataclasses.fields(typing.cast(Any, self)):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, _checked(field.name, value, hints[field.name], field.metadata))
        self.check()

    def check(self) -> None:
        """Raises a ValueError where options contradict each other."""

    def to_json(self) -> dict[str, Any]:
        """The options as JSON gives them back: lists for tuples, and the same for options that are values."""
        return {field.name: as_json(getattr(self, field.name)) for field in dataclasses.fields(typing.cast(Any, self))}


class Described(NamedTuple):
    """An option as others show it: on the command line, in a list."""

    name: str
    hint: Any
    doc: str
    default: Any  # dataclasses.MISSING where it must be given


def described_options(cls: type[Options]) -> Iterator[Described]:
    """The options that a class's constructor takes, in their order."""
    hints = _hints(cls)
    for field in dataclasses.fields(typing.cast(Any, cls)):
        if field.init:
            yield Described(field.name, hints[field.name], field.metadata.get("doc", ""), field.default)


def changed(value: Any, purpose: str, **changes: Any) -> Any:
    """Options with `changes`, or a ValueError that says what for: `purpose` completes "the local update cannot be"."""
    known = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    if not set(changes) <= known:
        raise ValueError(f"the local update cannot be {purpose}; use local.sgd")
    return dataclasses.replace(typing.cast(Any, value), **changes)


def as_json(value: Any) -> Any:
    """What JSON gives back of an option; "custom" stands for what has no JSON form."""
    if isinstance(value, Options):
        return value.to_json()
    if hasattr(value, "to_json"):
        return value.to_json()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return [as_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    return "custom"


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _checked(name: str, value: Any, hint: Any, metadata: Mapping[str, Any]) -> Any:
    bound = metadata.get("bound")
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for kind in kinds:
        fits, brought = _brought_to(value, kind)
        if fits and (bound is None or not isinstance(brought, (int, float)) or bound.holds(brought)):
            return brought
    raise ValueError(f"{name} is {value!r}; it must be {_kinds_text(kinds, bound)}")


def _brought_to(value: Any, kind: Any) -> tuple[bool, Any]:
    """Whether a value is of a kind, and the value as Python has it: NumPy's numbers and lists are brought along."""
    if kind is type(None):
        return value is None, None
    if typing.get_origin(kind) is typing.Literal:
        return isinstance(value, str) and value in typing.get_args(kind), value
    if kind is bool:
        return isinstance(value, (bool, np.bool_)), bool(value) if isinstance(value, np.bool_) else value
    truth = isinstance(value, (bool, np.bool_))
    if kind is int:
        whole = hasattr(value, "__index__") and not truth and np.ndim(value) == 0
        return whole, operator.index(typing.cast(Any, value)) if whole else value
    if kind is float:
        real = hasattr(value, "__float__") and not truth and np.ndim(value) == 0
        return real, float(value) if real else value
    if kind is str:
        return isinstance(value, str), value
    if typing.get_origin(kind) in (tuple, Sequence):
        if isinstance(value, str) or not isinstance(value, Sequence):
            return False, value
        items = [_brought_to(item, typing.get_args(kind)[0]) for item in value]
        return all(fits for fits, _ in items), tuple(item for _, item in items)
    return True, value


def _kinds_text(kinds: Sequence[Any], bound: Bound | None) -> str:
    """What an option may be, in words."""
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}
    choices = [repr(choice) for kind in kinds for choice in typing.get_args(kind) if isinstance(choice, str)]
    plain = [words[kind] for kind in kinds if kind in words]
    listed = [f"a list of {words[typing.get_args(kind)[0]]}" for kind in kinds if typing.get_origin(kind) is tuple]
    limited = [f"{text}, {bound.text}" if bound and "number" in text else text for text in plain]
    *others, last = [*choices, *limited, *listed] or ["of another type"]
    if not others:
        return last
    return f"{', '.join(others)}{'' if not limited and not listed else ','} or {last}"


def _with_arguments(text: str, cls: type) -> str:
    """A docstring with its "Args:" made from the fields, before the section that follows the description."""
    entries = []
    for field in dataclasses.fields(typing.cast(Any, cls)):
        if field.init:
            doc = f"{field.name}: {field.metadata.get('doc', '')}".rstrip(": ")
            entries.append(textwrap.fill(doc, LINE, initial_indent="  ", subsequent_indent="    "))
    if not entries:
        return text
    arguments = "Args:\n" + "\n".join(entries)

    def before(*marks: str) -> int:
        return min((place for mark in marks if (place := text.find(f"\n\n{mark}")) >= 0), default=len(text))

    if "\nRaises:" not in text:
        end = before("References:", ">>>")
        text = f"{text[:end]}\n\nRaises:\n  ValueError: an option of another type, or out of its bound.{text[end:]}"
    end = before("Returns:", "Raises:", "References:", ">>>")
    return f"{text[:end]}\n\n{arguments}{text[end:]}"
