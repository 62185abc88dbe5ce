"""One value of a paper's table next to ours: what recipes hand to tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeGuard


class PaperRow(Protocol):
    """A value of a paper's table and ours, in the unit that `metric` names; NaN where there is none."""

    @property
    def row(self) -> str: ...  # usually the method

    @property
    def column(self) -> str: ...  # usually what varies

    @property
    def metric(self) -> str: ...  # with its unit

    @property
    def ours(self) -> float: ...  # mean over seeds

    @property
    def ours_std(self) -> float: ...

    @property
    def paper(self) -> float: ...

    @property
    def paper_std(self) -> float: ...


def is_known(value: float | None) -> TypeGuard[float]:
    """Whether a value is there: neither None nor NaN."""
    return value is not None and not math.isnan(value)


def check_rows(rows: Sequence[PaperRow]) -> None:
    """Raises a ValueError where there is nothing to show."""
    if not any(is_known(row.ours) or is_known(row.paper) for row in rows):
        raise ValueError(f"none of the {len(rows)} rows has a value of ours or of the paper; give one at least")
