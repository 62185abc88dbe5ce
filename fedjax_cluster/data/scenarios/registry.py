"""Scenarios by name, and the arguments that all of them take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from fedjax_cluster.options import COUNT, with_checks
from fedjax_cluster.types import Federation

SCENARIOS: dict[str, Callable[..., Federation]] = {}

_COMMON_ARGUMENTS = {
    "seed": "decides who gets which example, and who is tested on which.",
    "test_fraction": "share of a client's examples that it is tested on.",
    "examples_per_client": "training and test examples together; default is all there are, in equal shares.",
}

Scenario = TypeVar("Scenario", bound=Callable[..., Federation])


def scenario(build: Scenario) -> Scenario:
    """Registers a scenario under its name, checks its arguments, and documents those that all scenarios take.

    It takes `examples` and, by keyword, `clients`, `seed`, `test_fraction` and `examples_per_client`. The usual meaning
    of the last three is added to the section `Args:` of its docstring where they are left out.
    """
    documentation = inspect.getdoc(build) or ""
    missing = [(name, note) for name, note in _COMMON_ARGUMENTS.items() if f"\n  {name}: " not in documentation]
    notes = "".join(f"\n  {name}: {note}" for name, note in missing)
    build.__doc__ = documentation.replace("\n\nReturns:", f"{notes}\n\nReturns:", 1)
    # Every scenario has more to say of its examples than their type.
    SCENARIOS[build.__name__] = checked = with_checks(but=("examples", "seed"), num_groups=COUNT)(build)
    return checked
