"""What the runs of one configuration over several seeds came to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The runs of one configuration over the seeds.

    Attributes:
      label: what it is called.
      summaries, histories: of each run that ended, in the order of the seeds.
      failed: seed -> why its run failed, in one line.
      not_ended: of these the seeds that were not run to their end, or further than the others.
      data: what decides the data, by the names of its settings.
    """

    label: str
    summaries: tuple[dict[str, Any], ...]
    histories: tuple[dict[str, np.ndarray], ...]
    failed: Mapping[int, str] = dataclasses.field(default_factory=dict)
    not_ended: frozenset[int] = frozenset()
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def mean(self, name: str) -> float:
        """Mean over the seeds that have a value; NaN where none has."""
        values = self._values(name)
        return float(np.mean(values)) if len(values) else float("nan")

    def std(self, name: str) -> float:
        """Sample standard deviation over the seeds that have a value; NaN for fewer than two."""
        values = self._values(name)
        return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")

    def valued(self, name: str) -> int:
        """How many seeds have a value."""
        return len(self._values(name))

    def _values(self, name: str) -> np.ndarray:
        values = [summary.get(name) for summary in self.summaries]
        return np.asarray([value for value in values if value is not None and np.isfinite(value)], np.float64)
