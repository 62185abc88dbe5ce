"""Values whose fields are their options: each states its type, default, bound and one line of documentation, once.

From the fields come the constructor, `help()`, the checks with their messages, the JSON form, equality and hash; the
command line makes its flags of them.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import logging
import operator
import os
import pathlib
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import numpy as np
from jax.core import Tracer

from fedjax_cluster.keywords import bound

LOG = logging.getLogger(__name__)
WARN_ONCE = functools.cache(LOG.warning)  # values are copied with changes many times
LINE = 118  # characters of help() and of an argument's documentation
SHOWN = 80  # characters of a value in a message
LONGEST_NAME, LONGEST_PATH = 255, 4000  # bytes; a run leaves files of its own below its directory
# What devices compute with: beyond these a whole number is cut off, and a number infinite or zero.
LARGEST_WHOLE = 2**31 - 1
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

_UNIONS = (typing.Union, types.UnionType)
_NUMBERS: dict[Any, Callable[[Any], int | float]] = {int: operator.index, float: float}
_WORDS: dict[Any, tuple[str, str]] = {  # of one and of several
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("True or False", "True or False"),
    str: ("text", "text"),
    type(None): ("None", "None"),
}
Function = TypeVar("Function", bound=Callable[..., Any])


class Bound(NamedTuple):
    """What numbers an option takes."""

    holds: Callable[[Any], bool]
    text: str  # completes "it must be"


def at_least(least: float) -> Bound:
    """Numbers from `least` on that 32 bits hold.

    >>> at_least(2).holds(1), at_least(2).holds(2**31), at_least(2).text
    (False, False, 'at least 2')
    """
    return Bound(
        lambda value: least <= value <= (LARGEST_WHOLE if isinstance(value, int) else LARGEST), f"at least {least}"
    )


POSITIVE = Bound(lambda value: SMALLEST <= value <= LARGEST, "positive and finite")
NOT_NEGATIVE = Bound(lambda value: 0 <= value <= LARGEST, "finite and 0 or more")
FINITE = Bound(lambda value: -LARGEST <= value <= LARGEST, "finite")
COUNT = at_least(1)
# JAX's random keys are made of 32 bits: a larger seed would be that of its remainder.
SEED = Bound(lambda value: 0 <= value < 2**32, "0 or more")
SHARE = Bound(lambda value: SMALLEST <= value <= 1, "above 0 and up to 1")
UNIT = Bound(lambda value: 0 <= value <= 1, "between 0 and 1")
BELOW_ONE = Bound(lambda value: 0 <= value < 1, "at least 0 and below 1")
INSIDE_UNIT = Bound(lambda value: SMALLEST <= value < 1, "above 0 and below 1")


def option(
    doc: str,
    *,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    bound: Bound | None = None,
    kw_only: bool = True,
    init: bool = True,
    filled: bool = False,
    used: tuple[str, Callable[[Any], bool]] | None = None,
    shapes: Callable[[float], bool] | None = None,
) -> Any:
    """A field of `Options`.

    Args:
      doc: what it is, one line.
      default: without one, or a factory of it, the option must be given.
      default_factory: makes the default.
      bound: of its numbers; choices, None and the like follow from the field's type.
      kw_only: False takes it by position too.
      init: False fixes it at its default.
      filled: None may be given too, in whose place the class puts a value of the field's type.
      used: in words what it has no effect without, and whether that is there; moved off its default it is warned of.
      shapes: which of its values decide the shapes of arrays, and so have programs of their own.
    """
    metadata = {"doc": doc, "bound": bound, "filled": filled, "used": used, "shapes": shapes}
    return dataclasses.field(
        default=default, default_factory=default_factory, kw_only=kw_only, init=init, metadata=metadata
    )


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option,))
class Options:
    """A frozen value with options as fields: equal, and equally hashed, where all of its options are equal.

    Subclasses become frozen dataclasses; numbers, lists and choices are checked and brought to the field's type.

    Raises:
      ValueError: an option that it does not have, that is missing, of another type or out of its bound; says which, and
        what it may be.

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
        _explain_arguments(cls)
        cls.__doc__ = _with_arguments(text, typing.cast(Any, cls))

    def __post_init__(self):
        hints = _hints(type(self))
        for field in dataclasses.fields(typing.cast(Any, self)):
            value = getattr(self, field.name)
            if value is None and field.metadata.get("filled"):
                continue
            bound = field.metadata.get("bound")
            object.__setattr__(self, field.name, checked(field.name, value, hints[field.name], bound))
        self.check()
        for field in dataclasses.fields(typing.cast(Any, self)):
            used, value = field.metadata.get("used"), getattr(self, field.name)
            if used is not None and value != field.default and not used[1](self):
                given = f"{type(self).__name__}: {field.name} is {shown(value)}"
                WARN_ONCE(f"{given}, which has no effect without {used[0]}")

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
            hint = hints[field.name] | None if field.metadata.get("filled") else hints[field.name]
            yield Described(field.name, hint, field.metadata.get("doc", ""), field.default)


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
        return as_json(value.to_json())
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return [as_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    return "custom"


@functools.cache
def _hints(owner: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(owner)


def checked(name: str, value: Any, hint: Any, bound: Bound | None = None) -> Any:
    """The value of an argument in its hint's type, as Python has it: NumPy's numbers and lists are brought along.

    Raises:
      ValueError: a value of another type or out of the bound; says what was given, and what it may be.

    >>> checked("sizes", np.arange(1, 3), Sequence[int], COUNT)
    (1, 2)
    """
    fits, brought = _brought_to(value, hint, bound)
    if not fits:
        raise ValueError(f"{name} is {shown(value)}; it must be {_kinds_text(hint, bound, value)}")
    return brought


def with_checks(*, but: Sequence[str] = (), **bounds: Bound) -> Callable[[Function], Function]:
    """Has a function's arguments `checked` by their annotations before each call.

    Args:
      but: arguments that the function checks itself.
      **bounds: of the numbers among the arguments.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            given = bound(function.__name__, signature, args, keywords)
            for name, value in given.arguments.items():
                if name not in but:
                    given.arguments[name] = checked(name, value, _hints(function).get(name, Any), bounds.get(name))
            return function(*given.args, **given.kwargs)

        return typing.cast(Function, call)

    return decorate


def takes_fractions(hint: Any) -> bool:
    """Whether an option of this type takes floating-point numbers.

    >>> takes_fractions(int | None), takes_fractions(float | None)
    (False, True)
    """
    return float in _alternatives(hint)


def as_path(name: str, value: Any) -> pathlib.Path:
    """The path that an argument gives, "~" and "~somebody" spelled out; a ValueError where no file system has it."""
    path = pathlib.Path(checked(name, value, str | os.PathLike))
    if not str(value) or "\0" in str(path):
        raise ValueError(f"{name} is {shown(value)}; give the path of a file or folder")
    length = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if length > LONGEST_NAME or len(os.fsencode(path)) > LONGEST_PATH:
        bounds = f"names have at most {LONGEST_NAME} bytes, paths {LONGEST_PATH}"
        raise ValueError(f"{name} is {shown(str(path))}, too long for a file system; {bounds}")
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"{name} is {shown(str(path))}, but whose home that is is not known; give a path") from None


def shown(value: Any) -> str:
    """A value within a message of one line.

    >>> shown(np.zeros((2, 3))), shown(at_least), shown("a" * 99)[:9]
    ('an array of shape [2, 3]', 'the uncalled at_least', "'aaaaaaaa")
    """
    if isinstance(value, type) or inspect.isroutine(value):
        return f"the uncalled {value.__name__}"
    if getattr(value, "ndim", 0):
        return f"an array of shape {list(value.shape)}"
    if hasattr(value, "_fields"):
        return _with_article(type(value).__name__)
    try:
        text = " ".join(repr(value).split())
    except ValueError:
        text = f"{_with_article(type(value).__name__)} of very many digits"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def reason_of(error: BaseException) -> str:
    """What an error says, on one line and not at length."""
    return " ".join(str(error).split())[:150]


def _brought_to(value: Any, kind: Any, bound: Bound | None) -> tuple[bool, Any]:
    """Whether a value is of a kind and within the bound, and the value as Python has it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (kind is float and isinstance(value, Tracer)):
        return True, value
    if origin in _UNIONS:
        tried = (_brought_to(value, part, bound) for part in inner)
        return next((found for found in tried if found[0]), (False, value))
    if origin is typing.Literal:
        return isinstance(value, str) and value in inner, value
    if kind in _NUMBERS:
        number = _number(value, kind)
        return number is not None and (bound is None or bound.holds(number)), number
    if kind is bool:
        return isinstance(value, (bool, np.bool_)), bool(value) if isinstance(value, np.bool_) else value
    if origin in (tuple, collections.abc.Sequence):
        items = value.tolist() if getattr(value, "ndim", 0) else value
        kinds = inner if origin is tuple and Ellipsis not in inner else None
        # A value of several named parts is no list of them.
        listed = isinstance(items, Sequence) and not isinstance(items, (str, bytes)) and not hasattr(items, "_fields")
        if not listed or (kinds and len(kinds) != len(items)):
            return False, value
        found = [_brought_to(item, kinds[place] if kinds else inner[0], bound) for place, item in enumerate(items)]
        return all(fits for fits, _ in found), tuple(item for _, item in found)
    if origin is type:
        return isinstance(value, type) and issubclass(value, inner[0]), value
    return _is_a(value, origin or kind), value


def _is_a(value: Any, kind: Any) -> bool:
    if kind is collections.abc.Callable:
        return callable(value)
    # A class has the attributes of its values, and so may look like one.
    return not isinstance(kind, type) or (isinstance(value, kind) and not isinstance(value, type))


def _number(value: Any, kind: type) -> int | float | None:
    """A whole or a floating-point number; None for what is none: truth values, text, complex numbers, arrays."""
    if getattr(value, "ndim", 0) or getattr(getattr(value, "dtype", None), "kind", "f") in "bcmMOSU":
        return None
    try:
        return None if isinstance(value, (bool, str, bytes)) else _NUMBERS[kind](value)
    except (TypeError, ValueError, OverflowError):
        return None


def _kinds_text(hint: Any, bound: Bound | None, value: Any) -> str:
    """What an argument may be, in words."""
    kinds = _alternatives(hint)
    texts = [_words(kind, bound, value) for kind in kinds if kind is not type(None)]
    *others, last = [*texts, *(["None"] if type(None) in kinds else [])]
    if not others:
        return last
    return f"{', '.join(others)}{',' if any(', ' in text or ' list' in text for text in texts) else ''} or {last}"


def _words(kind: Any, bound: Bound | None, value: Any, plural: bool = False) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if len(_alternatives(kind)) > 1:
        return _either([_words(part, bound, value, plural) for part in inner])
    if origin is typing.Literal:
        return _either([repr(choice) for choice in inner])
    if origin in (tuple, collections.abc.Sequence):
        count = f"{len(inner)} " if origin is tuple and Ellipsis not in inner else ""
        return f"{'lists' if plural else 'a list'} of {count}{_words(inner[0], bound, value, True)}"
    if kind in _WORDS:
        limit = f"{_room(value)}, {bound.text}" if bound and kind in _NUMBERS else ""
        return f"{_WORDS[kind][plural]}{limit}"
    name = "function" if origin is collections.abc.Callable else getattr(origin or kind, "__name__", "value")
    return name if plural else _with_article(name)


def _either(texts: Sequence[str]) -> str:
    *others, last = texts
    return f"{', '.join(others)} or {last}" if others else last


def _room(value: Any) -> str:
    """What a message adds where a number is too large, or too small, to be computed with."""
    whole, number = _number(value, int), _number(value, float)
    if whole is not None:
        return " of 32 bits" if abs(whole) > LARGEST_WHOLE else ""
    small_or_large = number is not None and (0 < abs(number) < SMALLEST or LARGEST < abs(number) < float("inf"))
    return " that float32 holds" if small_or_large else ""


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def _explain_arguments(cls: type) -> None:
    """Has a constructor say what is wrong with its arguments, in a line."""
    make, signature = cls.__init__, inspect.signature(cls)
    notes = {field.name: field.metadata.get("doc", "") for field in dataclasses.fields(typing.cast(Any, cls))}

    @functools.wraps(make)
    def call(self: Any, *args: Any, **keywords: Any) -> None:
        bound(cls.__name__, signature, args, keywords, notes)
        make(self, *args, **keywords)

    cls.__init__ = call


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
