"""The figures that methods are judged by: where some clients are faulty, those of the honest ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

HONEST = "_honest"  # ends the names of figures of the clients that are not faulty


def of_honest(name: str, runs: Iterable[Mapping[str, Any]]) -> str:
    """What `name` is called of the honest clients, where any of the runs tells them apart; else `name` itself.

    Args:
      name: a figure of a summary, or a column of a history.
      runs: summaries or histories.

    >>> of_honest("accuracy", [{"accuracy": 0.5}, {"accuracy": 0.5, "accuracy_honest": 0.9}])
    'accuracy_honest'
    >>> of_honest("accuracy", [{"accuracy": 0.5}])
    'accuracy'
    """
    return f"{name}{HONEST}" if any(_known(run.get(f"{name}{HONEST}")) for run in runs) else name


def value_of(run: Mapping[str, Any], name: str) -> Any:
    """A figure or column of a run; of its honest clients in a run without faults: that of all. None where it has none.

    >>> value_of({"accuracy": 0.5}, "accuracy_honest"), value_of({"accuracy": 0.5}, "test_loss")
    (0.5, None)
    """
    return run.get(name, run.get(name.removesuffix(HONEST)))


def _known(values: Any) -> bool:
    return values is not None and bool(np.isfinite(np.asarray(values, np.float64)).any())
