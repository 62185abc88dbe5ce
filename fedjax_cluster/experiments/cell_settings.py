"""What all cells of a sweep have alike, and another sweep has not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.files import plain

MAY_DIFFER = {"seed", "rounds", "eval_every", "tuning"}  # the first two may grow, and the third is of the second
DECIDE_OTHERS = {"method", "model", "scenario", "dataset", "population"}  # each of theirs has defaults of its own
OF_STEPS = {"averaging", "local_steps", "local_epochs", "optimizer"}  # each decides the others' defaults, and of these
RATES = {"learning_rate", "momentum"}


def other_settings(before: Iterable[RunConfig], now: Iterable[RunConfig], swept: Iterable[str]) -> list[str]:
    """The settings that are one in all cells `before` and another in all cells `now`, in words.

    Not those that are `swept`, or that follow from these.

    >>> cells = [[RunConfig(learning_rate=0.1, local_steps=steps)] for steps in (1, 20)]
    >>> other_settings(*cells, ["learning_rate"])
    ['local_steps is 1 there and 20 here']
    >>> other_settings(*cells, ["local_steps"])
    []
    """
    names = {option.rpartition(".")[2] for option in swept}
    if names & DECIDE_OTHERS:
        return []
    sides = [[_flat(config.to_json()) for config in of] for of in (before, now)]
    if not all(sides):
        return []
    found = []
    tuned = any("tuning.figures" in config for side in sides for config in side)
    free = MAY_DIFFER | names | (OF_STEPS | RATES if names & OF_STEPS else set())
    free |= {"learning_rate"} if tuned else set()
    for name in dict.fromkeys(name for side in sides for config in side for name in config):
        if name.rpartition(".")[2] in free or name.partition(".")[0] in MAY_DIFFER:
            continue
        old, new = ([config.get(name) for config in side] for side in sides)
        if name == "clients" and None in (old[0], new[0]):  # as many as the others have
            continue
        if old[0] != new[0] and all(each == of[0] for of in (old, new) for each in of):
            found.append(f"{name} is {old[0]} there and {new[0]} here")
    return found


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with each option of its parts by itself."""
    flat: dict[str, Any] = {}
    for name, value in plain(dict(config)).items():
        flat |= {f"{name}.{option}": of for option, of in value.items()} if isinstance(value, dict) else {name: value}
    return flat
