"""Methods, scenarios and models of other installed distributions, found by their entry points."""

from __future__ import annotations

import inspect
import logging
import typing
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fedjax_cluster.algorithms import Method
from fedjax_cluster.options import shown

GROUP = "fedjax_cluster.{}s"  # fedjax_cluster.methods, .scenarios and .models
OF_A_SCENARIO = ("examples", "clients", "seed")

logger = logging.getLogger(__name__)
_done: set[str] = set()


def load(kinds: Mapping[str, Any]) -> None:
    """Adds to each kind's registry what other distributions announce, once in a process.

    A distribution announces a method by an entry point in the group `fedjax_cluster.methods`, a scenario or a model in
    `fedjax_cluster.scenarios` or `fedjax_cluster.models`: a name, and `module:attribute`. What cannot be taken is told
    in a line of the log, and the rest goes on.

    Args:
      kinds: "method" and so on -> a value whose `registry` has those known by name.
    """
    for kind, of in kinds.items():
        if kind not in _done:
            _done.add(kind)
            for point in entry_points(group=GROUP.format(kind)):
                _take(kind, point, of.registry)


def _take(kind: str, point: EntryPoint, registry: dict[str, Callable[..., Any]]) -> None:
    name, before = point.name.replace("-", "_").lower(), dict(registry)
    # The import of a module registers the methods in it by itself, also one of a name that is taken.
    try:
        found = point.load()
        _check(kind, name, found)
        if before.get(name, found) is not found:
            raise ValueError(f"there is a {kind} of this name already; give it another")
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__ if not isinstance(error, ValueError) else ''} {error}".split())
        origin = f" of {point.dist.name}" if point.dist else ""
        logger.warning(f"{kind} {point.name}{origin} ({point.value}) is left out: {reason}")
        registry.clear()
        registry.update(before)
        return
    registry.update({**before, name: found})


def _check(kind: str, name: str, found: Any) -> None:
    """Raises a ValueError for what is none of its kind."""
    if kind == "method":
        if not (isinstance(found, type) and issubclass(found, Method)):
            raise ValueError(f"it is {shown(found)}; a method is a subclass of fedjax_cluster.algorithms.Method")
        if found.__name__ != name:
            raise ValueError(f"its class is called {found.__name__}; call it {name}, the name that runs keep")
        return
    if not inspect.isfunction(found):
        raise ValueError(f"it is {shown(found)}; a {kind} is a function")
    typing.get_type_hints(found)  # of which flags are made: what cannot be read there is refused here
    missing = [each for each in OF_A_SCENARIO if each not in inspect.signature(found).parameters]
    if kind == "scenario" and missing:
        raise ValueError(f"it takes no {', '.join(missing)}; a scenario takes {', '.join(OF_A_SCENARIO)}")
