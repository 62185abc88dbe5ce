"""Of how many clients a start is: of a plan, whose state is made of a few, those of the run."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
from jax import Array


class Planned(NamedTuple):
    """The clients of a run of whose state a plan asks for the shapes, while `init` makes that of a few."""

    clients: int
    rows: int  # with those that fill up the devices


PLANNED: ContextVar[Planned | None] = ContextVar("PLANNED", default=None)


def number_there(present: Array) -> int:
    """How many clients are present at the start, bool[M]."""
    planned = PLANNED.get()
    return int(np.asarray(present).sum()) if planned is None else planned.clients


def rows_there(rows: int) -> int:
    """How many rows there are for clients, where these are so many."""
    planned = PLANNED.get()
    return rows if planned is None else planned.rows


def check_clusters(num_clusters: int, num_clients: int) -> None:
    """Raises a ValueError where there are more clusters than clients at the start."""
    if num_clusters > num_clients:
        raise ValueError(
            f"clusters is {num_clusters} but there are only {num_clients} clients at the start; ask for at most "
            f"{num_clients}"
        )
