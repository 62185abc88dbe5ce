"""What a page needs of a run; `SimulationResult` is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedjax_cluster.types import Event, Federation, State


class FinishedRun(Protocol):
    """A run with its data, its final state and what its method kept at events."""

    @property
    def algorithm(self) -> Any: ...  # the method; its options are attributes

    @property
    def federation(self) -> Federation: ...

    @property
    def state(self) -> State: ...

    @property
    def history(self) -> Mapping[str, np.ndarray]: ...  # columns over rounds

    @property
    def events(self) -> Sequence[Event]: ...

    @property
    def labels(self) -> np.ndarray: ...  # i32[M], −1 without a cluster


class ShownClients(NamedTuple):
    """The n clients with training examples; the others are in no cluster and have no features."""

    index: np.ndarray  # i64[n]
    labels: np.ndarray  # i32[n], clusters; −1 for none
    group: np.ndarray | None  # i32[n], true groups; −1 where unknown, None where none is known
    group_names: Sequence[str]


def shown_clients(run: FinishedRun) -> ShownClients:
    """The clients that a picture of the run shows."""
    federation = run.federation
    index = np.flatnonzero(np.asarray(federation.train.num_examples) > 0)
    group = None if federation.group is None else np.asarray(federation.group)[index]
    if group is not None and not (group >= 0).any():
        group = None
    return ShownClients(index, np.asarray(run.labels)[index], group, federation.info.group_names)
