"""The settings of a run about faulty clients: what is the matter with some, and what the server does about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedjax_cluster import aggregation, faults
from fedjax_cluster.aggregation import BELOW_HALF, Aggregation
from fedjax_cluster.experiments.private_settings import PrivacySettings, build_privacy
from fedjax_cluster.faults import Fault
from fedjax_cluster.options import COUNT, FINITE, POSITIVE, SHARE, Options, at_least, described_options, option

# Flags of aggregation rules and the options that they give; settings of a fault.
RULE_FLAGS = {"trim": "share", "byzantine": "byzantine", "clip": "norm"}
FAULT_FLAGS = tuple(f"fault_{name}" for name in ("share", "scale", "factor", "rate", "steps", "group", "joins"))


class Robustness(PrivacySettings):
    """The part of a configuration that is about faulty clients, and about privacy."""

    aggregation: str | None = option(
        "what the server makes of the changes of a cluster's clients: mean, trimmed-mean, median, krum, multi-krum, "
        "geometric-median, norm-clipping or bulyan",
        default=None,
    )
    trim: float | None = option(
        "share of the clients that trimmed-mean leaves out at either end, 0.2 if not given",
        default=None,
        bound=BELOW_HALF,
    )
    byzantine: int | None = option(
        "f, the most faulty clients in a cluster, for krum, multi-krum and bulyan; 1 if not given",
        default=None,
        bound=at_least(0),
    )
    clip: float | None = option("the largest norm of a change, for norm-clipping", default=None, bound=POSITIVE)
    fault: str | None = option(
        "what is the matter with some clients: sign-flip, label-flip, drop-out, stragglers, scaled, nan-updates, "
        "colluders, or aimed at clusterings disguise, schism or infiltrators; the seed draws them",
        default=None,
    )
    fault_share: float | None = option(
        "of the clients that are faulty; 0.2 if not given, and of drop-out all", default=None, bound=SHARE
    )
    fault_scale: float | None = option(
        "of what sign-flip sends, 10 if not given, colluders and schism, 1, or disguise and infiltrators, -10",
        default=None,
        bound=FINITE,
    )
    fault_factor: float | None = option("of what scaled sends, 100 if not given", default=None, bound=FINITE)
    fault_rate: float | None = option(
        "chance of a client's drop-out in a round, 0.2 if not given", default=None, bound=SHARE
    )
    fault_steps: int | None = option("the most local steps of stragglers, 1 if not given", default=None, bound=COUNT)
    fault_group: int | None = option(
        "that colluders copy, disguise shows or schism divides, 0 if not given", default=None, bound=at_least(0)
    )
    fault_joins: int | None = option("round before which infiltrators join, 5 if not given", default=None, bound=COUNT)

    def __post_init__(self):
        # The mean is what there was before there was a choice.
        if isinstance(self.aggregation, str) and self.aggregation.lower() == "mean":
            object.__setattr__(self, "aggregation", None)
        super().__post_init__()


def without_defaults(content: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """A configuration as JSON without what says nothing here, so that runs of before these settings are still the same.

    Args:
      content: the settings.
      *others: names of such that are not of `Robustness`.

    >>> without_defaults({"rounds": 2, "trim": None, "clients": None})
    {'rounds': 2, 'clients': None}
    """
    own = {*others, *(field.name for field in dataclasses.fields(Robustness))}  # pyright: ignore[reportArgumentType]
    return {name: value for name, value in content.items() if value is not None or name not in own}


def check_robustness(config: Robustness, method: type[Options]) -> None:
    """Raises a ValueError for a rule, fault or mechanism that cannot be, or a rule that a method has no place for."""
    build_fault(config)
    build_privacy(config)
    if build_aggregation(config) is not None and "aggregation" not in {each.name for each in described_options(method)}:
        raise ValueError(
            f"aggregation is {config.aggregation}, but {method.__name__.replace('_', '-')} has no server that averages "
            "models; give no aggregation, or another method"
        )


def server_settings(config: Robustness) -> dict[str, Any]:
    """The options of a method about faulty clients and privacy."""
    return {"aggregation": build_aggregation(config), "privacy": build_privacy(config)}


def build_aggregation(config: Robustness) -> Aggregation | None:
    """What the server makes of the clients' changes; None is their mean.

    Raises:
      ValueError: no such rule, one that lacks its option, or an option of another.
    """
    given = {option: getattr(config, flag) for flag, option in RULE_FLAGS.items() if getattr(config, flag) is not None}
    if config.aggregation is None and given:
        flag = next(flag for flag, option in RULE_FLAGS.items() if option in given)
        raise ValueError(f"{flag} is {getattr(config, flag):g}, but no aggregation is given; give one that has it")
    return None if config.aggregation is None else aggregation.named(config.aggregation, **given)


def build_fault(config: Robustness) -> Fault | None:
    """What is the matter with some clients.

    Raises:
      ValueError: no such fault, or an option of another.
    """
    given = {name: getattr(config, name) for name in FAULT_FLAGS if getattr(config, name) is not None}
    if config.fault is None and given:
        name, value = next(iter(given.items()))
        raise ValueError(f"{name} is {value:g}, but no fault is given; give one, such as sign-flip")
    options = {name.removeprefix("fault_"): value for name, value in given.items()}
    return None if config.fault is None else faults.named(config.fault, **options)


def with_infinity(options: Any, kind: type[str] | type[float]) -> Any:
    """Options with infinity, such as that of a Dirichlet law, as text, which JSON has, or as a number.

    >>> with_infinity({"alphas": (0.1, float("inf"))}, str), with_infinity({"alpha": "inf"}, float)
    ({'alphas': (0.1, 'inf')}, {'alpha': inf})
    """
    if isinstance(options, Mapping):
        return {name: with_infinity(value, kind) for name, value in options.items()}
    if isinstance(options, (list, tuple)):
        return type(options)(with_infinity(value, kind) for value in options)
    return kind(options) if isinstance(options, float | str) and str(options) in ("inf", "-inf") else options
