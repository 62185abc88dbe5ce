"""What to change where a planned run does not fit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedjax_cluster.simulation.abstract import PopulationShape
from fedjax_cluster.simulation.devices import Target
from fedjax_cluster.types import ClusteredAlgorithm

LONGEST_MESSAGE = 200
LARGE_MATRIX = 0.05  # of a device's memory; methods hold up to some fourteen of all pairs of clients
OF_A_GPU = 0.75  # of its memory, which JAX takes by itself


def of_gpus(peak: int | None, aim: Target) -> tuple[str, ...]:
    """What a run that fits takes of an absent GPU beyond what JAX has by itself; one that is here tells its own."""
    if aim.platform != "cuda" or aim.name == "local" or peak is None or peak <= OF_A_GPU * aim.memory:
        return ()
    return (
        f"XLA_PYTHON_CLIENT_MEM_FRACTION=.95 in the environment: JAX takes {100 * OF_A_GPU:.0f} % of a GPU by itself",
    )


def _without_pairs(algorithm: ClusteredAlgorithm, found: Any) -> list[str]:
    """How a method can do without numbers of all pairs of clients, or profiles of each, where these are large."""
    of_cohort = getattr(algorithm, "cluster_cohort", None)
    if (side := getattr(algorithm, "gram_side", None)) is not None and not side(found.clients):
        profiles = getattr(algorithm, "profiles_of", None) == "everybody"
        large = found.memory is None or found.memory.state > 0.5 * found.available
        ways = 'landmarks=256 and profiles_of="landmarks", say: profiles of these alone; or a higher compression'
        return [ways] if profiles and large else []
    if of_cohort or 4.0 * found.clients**2 < LARGE_MATRIX * found.available:  # every device has all of them
        return []
    if getattr(algorithm, "landmarks", ()) is None:
        return ["landmarks=256, say: numbers for each client and landmark in place of all pairs of clients"]
    if of_cohort is False and not hasattr(algorithm, "landmarks"):
        below = "" if getattr(algorithm, "participation", 1.0) < 1 else " and a participation below 1"
        return [f"cluster_cohort=True{below}: a cohort is compared in place of all pairs of clients"]
    return []


def advice(
    algorithm: ClusteredAlgorithm, found: Any, shape: PopulationShape, everywhere: int, failure: str
) -> tuple[str, ...]:
    """What to change where the run does not fit; `everywhere` bytes are on each device, however many there are."""
    if found.too_large:
        return tuple(f"{each.when}, {each.what}: {each.instead}" for each in found.too_large)
    pairs = _without_pairs(algorithm, found)
    lines = [*pairs]
    if failure and found.memory is None:
        lines.append(f"the compiler says: {failure[:LONGEST_MESSAGE]}")
        if found.chunk > 1:
            lines.append("chunk_size=1, which was not tried")
    memory = found.memory
    held = shape.nbytes() / found.devices if memory is None else memory.population + memory.state
    everywhere, room = (0, found.available) if memory is None else (everywhere, found.available - everywhere)
    if held > found.available and room > 0.2 * found.available:
        needed = math.ceil((held - everywhere) * found.devices / room / 0.8)
        lines.append(f"more devices: {needed} would hold population and state")
    if memory is not None and not pairs and memory.state > 0.5 * found.available:
        lines.append("a smaller model, or a method without a model for each client")
    if memory is not None and not pairs and memory.temporaries > 0.5 * found.available:
        lines.append("a smaller cohort (participation), smaller mini-batches (batch_size), or chunk_size=1")
    if memory is not None and memory.population > 0.5 * found.available:
        dtype = np.dtype(shape.dtype).name
        lines.append(f"fewer rows a client than {shape.rows}, or inputs of fewer bytes than {dtype}")
    return tuple(lines) or ("more devices, or fewer clients",)
