"""One value of a paper's table next to ours: what recipes hand to tables and pictures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeGuard

NAN = math.nan


class Tolerance(NamedTuple):
    """How far ours may be from the paper's value, in the metric's unit, and which side is better."""

    amount: float
    better: Literal["higher", "lower", "neither"] = "higher"


# By the metric's heading, where a recipe states no other.
USUAL = {
    "(%)": Tolerance(2.0),
    "ARI": Tolerance(0.05),
    "Rand index": Tolerance(0.05),
    "purity": Tolerance(0.05),
    "clusters": Tolerance(0.0, "neither"),
    "splits": Tolerance(0.0, "neither"),
    "estimated K": Tolerance(0.0, "neither"),
}


def usual_tolerance(metric: str) -> Tolerance | None:
    """The tolerance of a metric that a recipe says nothing of; None where it has none.

    >>> usual_tolerance("accuracy (%)").amount, usual_tolerance("ARI").amount, usual_tolerance("test loss")
    (2.0, 0.05, None)
    """
    words = metric.replace(":", "").split()
    rounds = "round" in words  # "first round at ARI 1" is no index
    return next((found for name, found in USUAL.items() if not rounds and set(name.split()) <= set(words)), None)


@dataclasses.dataclass(frozen=True)
class PaperRow:
    """A value of a paper's table and ours, in the unit that `metric` names; NaN where there is none."""

    row: str  # usually the method
    column: str  # usually what varies
    metric: str  # with its unit
    ours: float  # mean over the seeds that have a value
    ours_std: float = NAN  # the sample's, over the seeds
    paper: float = NAN
    paper_std: float = NAN
    seeds: int = 1  # runs or draws behind ours
    dataset: str = ""  # that ours had
    valued: int | None = None  # of the seeds, those that have a value; None where all have
    tolerance: Tolerance | None = None  # stated before it ran; None where the metric has none


def is_known(value: float | None) -> TypeGuard[float]:
    """Whether a value is there: neither None nor NaN nor infinite."""
    return value is not None and math.isfinite(value)


def check_rows(rows: Sequence[PaperRow]) -> None:
    """Raises a ValueError where there is nothing to show."""
    if not any(is_known(row.ours) or is_known(row.paper) for row in rows):
        raise ValueError(f"none of the {len(rows)} rows has a value of ours or of the paper; give one at least")
