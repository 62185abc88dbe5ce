"""The clients of a finished run that pictures show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_cluster.types import FinishedRun


class ShownClients(NamedTuple):
    """The n clients with training examples; the others are in no cluster and have no features."""

    index: np.ndarray  # i64[n]
    labels: np.ndarray  # i32[n], clusters; −1 for none
    group: np.ndarray | None  # i32[n], true groups; −1 where unknown, None where none is known
    group_names: Sequence[str]


def without_newcomers(run: FinishedRun) -> FinishedRun:
    """The run as it ended, where clients came after it: its events know only its own."""
    return getattr(run, "before", None) or run


def shown_clients(run: FinishedRun) -> ShownClients:
    """The clients that a picture of the run shows."""
    federation = run.federation
    index = np.flatnonzero(np.asarray(federation.train.num_examples) > 0)
    group = None if federation.group is None else np.asarray(federation.group)[index]
    if group is not None and not (group >= 0).any():
        group = None
    return ShownClients(index, np.asarray(run.labels)[index], group, federation.info.group_names)
