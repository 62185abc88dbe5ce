"""Scenarios by name, and the arguments that all of them take."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

from fedjax_cluster.data.validation import check_undivided
from fedjax_cluster.options import COUNT, INSIDE_UNIT, SHARE, SMALLEST, UNIT, Bound, at_least, with_checks
from fedjax_cluster.types import Federation, UserExamples

LOG = logging.getLogger(__name__)
OURS = __name__.partition(".")[0]
SCENARIOS: dict[str, Callable[..., Federation]] = {}

_COMMON_ARGUMENTS = {
    "seed": "decides who gets which example, and who is tested on which.",
    "test_fraction": "share of a client's examples that it is tested on.",
    "examples_per_client": "training and test examples together; default is all there are, in equal shares.",
}

_BOUNDS = {
    "clients": COUNT,
    "num_groups": COUNT,
    "classes_per_group": COUNT,
    "tests_per_label": COUNT,
    "shards_per_client": COUNT,
    "examples_per_client": at_least(2),
    "min_examples": at_least(2),
    **dict.fromkeys(("vocabulary", "size"), at_least(2)),
    **dict.fromkeys(("length", "followers"), COUNT),
    "common": UNIT,
    "test_fraction": INSIDE_UNIT,
    "kappa": UNIT,
    "sigma": Bound(lambda value: 0 <= value <= 100, "0 to 100"),
    "rho": SHARE,
    "phi": Bound(lambda value: SMALLEST <= value < 90, "above 0 and below 90 degrees"),
    # One class a client or one client a class, to all clients alike; NumPy's draws overflow between the two.
    **dict.fromkeys(("alpha", "alphas"), Bound(lambda value: 0 <= value <= 1e100 or value == math.inf, "0 or more")),
    **dict.fromkeys(("noise", "blur"), Bound(lambda value: 0 <= value <= 1e6, "0 or more, and no more than a million")),
    "seed": Bound(lambda value: value >= 0, "0 or more"),  # NumPy's, which take any number of digits
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
    checked = with_checks(but=("examples",), **_BOUNDS)(build)
    if build.__module__.startswith(f"{OURS}.") and "user_ids" not in inspect.signature(build).parameters:
        checked = _telling_of_users(checked)
    if not build.__module__.startswith(f"{OURS}."):
        checked = _giving_a_federation(checked)
    SCENARIOS[build.__name__] = checked
    return checked


def _giving_a_federation(build: Scenario) -> Scenario:
    """Names the scenario where it returns something else."""

    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Federation:
        found = build(*args, **kwargs)
        if not isinstance(found, Federation):
            raise ValueError(f"scenario {build.__name__} returns a {type(found).__name__}; it must return a Federation")
        return found

    return cast(Scenario, built)


def _telling_of_users(build: Scenario) -> Scenario:
    """Warns where examples name their users, whom a scenario leaves unheeded; refuses those with a split."""
    name = build.__name__.replace("_", "-")

    def plain(examples: Any) -> Any:
        if isinstance(examples, list):
            return [plain(each) for each in examples]
        check_undivided(examples, name)
        if not isinstance(examples, UserExamples) or examples.user_ids is None:
            return examples
        LOG.warning(
            f"{examples.info.name} names users, but {name} divides its examples among "
            "clients of its own; the scenario users has a client for each user"
        )
        return examples._replace()  # a scenario may call another

    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Federation:
        given = {key: plain(value) if key == "examples" else value for key, value in kwargs.items()}
        return build(*map(plain, args[:1]), *args[1:], **given)

    return cast(Scenario, built)


def draws_examples(name: str) -> bool:
    """Whether a scenario makes its own data."""
    return inspect.signature(SCENARIOS[name]).parameters["examples"].default is None
