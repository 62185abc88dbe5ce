"""A run of several processes: the same in all of them, ended together, shown by the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_cluster import parallel
from fedjax_cluster.faults import Fault
from fedjax_cluster.interruption import Interrupt
from fedjax_cluster.simulation.identity import identity_of
from fedjax_cluster.types import Churn, ClientMapping, ClusteredAlgorithm, Federation, Measure

# What processes may differ in, and what a message calls it.
COMPARED = {
    "algorithm": "method",
    "algorithm_config": "set of options",
    "options": "set of options",
    "model": "model",
    "scenario": "federation",
    "clients": "number of clients",
    "data": "federation",
    "task": "federation",
    "num_classes": "federation",
    "input_shape": "federation",
    "seed": "seed",
    "rounds": "number of rounds",
    "eval_every": "eval_every",
    "eval_clients": "eval_clients",
    "churn": "churn",
    "fault": "fault",
    "metrics": "metrics",
    "random_numbers": "settings of JAX's random numbers",
    "strategy": "mapping",
    "time_clustering": "time_clustering",
    "kept": "choice of a run_dir or none",
    "programs": "model, local update or method",
}


def check_processes(
    algorithm: ClusteredAlgorithm,
    federation: Federation,
    seed: int,
    eval_every: int,
    eval_clients: int | None,
    churn: Sequence[Churn],
    fault: Fault | None,
    metrics: Sequence[Measure] = (),
    *,
    mapping: ClientMapping,
    options: Mapping[str, Any],
) -> None:
    """Raises a ValueError where several processes cannot carry out this run together, or were not given the same.

    Every one of them says the same then.
    """
    if not parallel.several():
        return
    with parallel.processes.together():
        parallel.processes.check_devices(len(federation.train.num_examples), mapping.mesh)
        given: dict[str, Any] = identity_of(
            algorithm, federation, seed, eval_every, eval_clients, churn, fault, metrics
        )
    given |= {**options, "strategy": [mapping.strategy, mapping.chunk_size]}
    parallel.processes.check_alike({text: [given.get(each) for each in COMPARED if COMPARED[each] == text]
                                    for text in COMPARED.values()})  # fmt: skip


def heard(interrupt: Interrupt) -> bool:
    """Whether the run is to stop: a signal that one process has heard stops all of them, after the same round."""
    if not parallel.several():
        interrupt.noticed = interrupt.wanted
        return interrupt.wanted
    number = int(parallel.processes.of_all(np.int32(interrupt.number or 0)).max())
    if number:
        interrupt.number, interrupt.noticed = interrupt.number or number, True
    return number > 0


def shown(progress: bool | None) -> bool | None:
    """What of a run's progress this process shows: the first what it is asked to, the others nothing."""
    return progress if parallel.is_first() else False
