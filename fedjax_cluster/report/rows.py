"""What tables and plots have in common: the names of methods, numbers over seeds, a paper's rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeGuard

import numpy as np

METHOD_NAMES = {
    "cfl": "CFL",
    "cfl_gp": "CFL-GP",
    "fairavg": "FairAvg",
    "fedavg": "FedAvg",
    "fedavgm": "FedAvgM",
    "fedem": "FedEM",
    "fedgwc": "FedGWC",
    "fedprox": "FedProx",
    "fedsoft": "FedSoft",
    "fesem": "FeSEM",
    "flag": "FLAG",
    "gradient_loss": "Gradient and loss",
    "ifca": "IFCA",
    "local_only": "Local only",
    "pacfl": "PACFL",
    "per_fedavg": "Per-FedAvg",
}


def method_name(name: str) -> str:
    """A method's name as papers print it; any other text stays as it is.

    >>> method_name("cfl_gp"), method_name("cfl-gp"), method_name("ours, P=1")
    ('CFL-GP', 'CFL-GP', 'ours, P=1')
    """
    return METHOD_NAMES.get(name.replace("-", "_"), name)


class Spread(NamedTuple):
    """Mean and standard deviation over seeds; `std` is None for a single seed."""

    mean: float
    std: float | None = None


def spread(values: Sequence[float | None]) -> Spread | None:
    """Mean and standard deviation (of the population, as in the papers' tables) of the values that are there.

    Args:
      values: one a seed; None and NaN are left out.

    Returns:
      A Spread, or None without values.

    >>> spread([1.0, 3.0, None])
    Spread(mean=2.0, std=1.0)
    >>> spread([2.0])
    Spread(mean=2.0, std=None)
    """
    known = [float(value) for value in values if is_known(value)]
    if not known:
        return None
    return Spread(float(np.mean(known)), float(np.std(known)) if len(known) > 1 else None)


def is_known(value: float | None) -> TypeGuard[float]:
    """Whether there is a number: neither None nor NaN."""
    return value is not None and not math.isnan(value)


class PaperRow(Protocol):
    """One number of a paper's table beside ours, in the unit that `metric` names; NaN where there is none."""

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


def check_rows(rows: Sequence[PaperRow]) -> None:
    """Raises a ValueError where there is nothing to show."""
    if not any(is_known(row.ours) or is_known(row.paper) for row in rows):
        raise ValueError(f"none of the {len(rows)} rows has a value of ours or of the paper; give one at least")
