"""One value of a paper's table next to ours: what recipes hand to tables and pictures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeGuard

NAN = math.nan


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


def is_known(value: float | None) -> TypeGuard[float]:
    """Whether a value is there: neither None nor NaN nor infinite."""
    return value is not None and math.isfinite(value)


def check_rows(rows: Sequence[PaperRow]) -> None:
    """Raises a ValueError where there is nothing to show."""
    if not any(is_known(row.ours) or is_known(row.paper) for row in rows):
        raise ValueError(f"none of the {len(rows)} rows has a value of ours or of the paper; give one at least")
