"""Calls whose arguments do not fit a signature: one line that names what is near, and what is needed."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_LISTED = 15  # arguments; more are read in help()
_Kind = inspect.Parameter


class ArgumentsError(TypeError, ValueError):
    """Arguments that do not fit; a TypeError as Python's own, and a ValueError as all of bad input is here."""


def bound(
    name: str,
    signature: inspect.Signature,
    given: Sequence[Any],
    named: Mapping[str, Any],
    notes: Mapping[str, str] | None = None,
) -> inspect.BoundArguments:
    """The arguments of a call by name.

    Args:
      name: what is called.
      signature: what it takes.
      given: the arguments by position.
      named: the arguments by name.
      notes: what arguments are, by name, for those that are missing.

    Raises:
      ArgumentsError: an argument that it does not have, that is missing or that is given twice.

    >>> bound("cut", inspect.signature(lambda tree, *, height: None), ["oak"], {"hight": 2})
    Traceback (most recent call last):
    ...
    fedjax_cluster.keywords.ArgumentsError: cut has no argument 'hight'; did you mean height? it needs tree and height
    """
    try:
        return signature.bind(*given, **named)
    except TypeError:
        raise ArgumentsError(_reason(name, signature, given, named, notes or {})) from None


def closest(word: str, names: Iterable[str]) -> str | None:
    """The name that a misspelt word may stand for."""
    return next(iter(difflib.get_close_matches(word, list(names), 1)), None)


def listed(words: Sequence[str]) -> str:
    """Words as a sentence has them.

    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _reason(
    name: str, signature: inspect.Signature, given: Sequence[Any], named: Mapping[str, Any], notes: Mapping[str, str]
) -> str:
    takes = {
        each: of
        for each, of in signature.parameters.items()
        if of.kind not in (_Kind.VAR_KEYWORD, _Kind.VAR_POSITIONAL)
    }
    places = [each for each, of in takes.items() if of.kind != _Kind.KEYWORD_ONLY]
    needed = [each for each, of in takes.items() if of.default is _Kind.empty]
    if unknown := [each for each in named if each not in takes]:
        near = closest(unknown[0], set(takes) - set(named))
        hint = f"did you mean {near}? " if near else ""
        words = ", ".join(map(repr, unknown))
        return f"{name} has no argument{'s' * (len(unknown) > 1)} {words}; {hint}{_usage(name, takes, needed)}"
    if len(given) > len(places):
        others = list(takes)[len(places) :][:MOST_LISTED]
        advice = f"; give by name: {', '.join(others)}" if others else ""
        taken = f"only {listed(places)}" if places else "none"
        return f"{name} takes {taken} by position, but {len(given)} were given{advice}"
    if twice := [each for each in places[: len(given)] if each in named]:
        return f"{name} is given {twice[0]} twice, by position and by name; give it once"
    missing = [each for each in needed if each not in named and each not in places[: len(given)]]
    told = [f"{each} ({notes[each]})" if notes.get(each) else each for each in missing]
    return f"{name} lacks {listed(told)}; {_usage(name, takes, needed)}"


def _usage(name: str, takes: Iterable[str], needed: Sequence[str]) -> str:
    """What a call needs and what else it takes."""
    others = [each for each in takes if each not in needed]
    needs = f"it needs {listed(needed)}" if needed else ""
    more = f"help({name}) lists what it takes" if len(others) > MOST_LISTED else f"it may have {', '.join(others)}"
    return "; ".join(filter(None, [needs, more if others else ""])) or "it takes no arguments"
