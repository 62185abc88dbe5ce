"""What a compiled program takes of a device's memory, by the compiler's figures."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_cluster.data.stored import Rows
from fedjax_cluster.parallel.ahead import CohortsAhead
from fedjax_cluster.simulation.devices import GIB

USABLE = 0.9  # of a device's memory; the rest is the runtime's


class Memory(NamedTuple):
    """Bytes on each device."""

    population: int  # the training rows, with padding; of clients on disk, those of the cohorts that are read
    state: int  # models, personal models, what the server keeps
    temporaries: int
    rest: int  # other arguments, and what of the results has no place among the arguments
    evaluation: int  # test rows, which stay on the device; 0 where only shapes were given
    peak: int  # the compiler's figure for the whole program, and the test rows

    def parts(self) -> dict[str, int]:
        """All but the peak."""
        return {name: value for name, value in self._asdict().items() if name != "peak"}


def memory_of(compiled: Any, arguments: tuple, devices: int, test: int, platform: str) -> Memory:
    """What a program takes of each device, with `test` bytes of test rows, by the compiler's figures."""
    found = compiled.memory_analysis()
    _, state, train, *_ = arguments
    held = train.cohorts.data if isinstance(train, CohortsAhead) else train.data
    population = bytes_of((held.x, held.y), devices)
    clients = bytes_of(state.clients, devices)
    others = bytes_of(state._replace(clients=None), 1)
    rest = found.argument_size_in_bytes - population - clients - others + _results(found)
    peak = peak_of(compiled, platform)
    return Memory(population, clients + others, found.temp_size_in_bytes, max(0, rest), test, peak + test)


def peak_of(compiled: Any, platform: str) -> int:
    """Bytes of a device with a program's arguments and results, by the compiler's figures."""
    found = compiled.memory_analysis()
    total = found.argument_size_in_bytes + found.temp_size_in_bytes + _results(found)
    # On a CPU the compiler's peak is without the temporaries.
    return total if platform == "cpu" else found.peak_memory_in_bytes or total


def _results(found: Any) -> int:
    """Bytes of the results that have no place among the arguments."""
    return found.output_size_in_bytes - found.alias_size_in_bytes


def bytes_of(tree: Any, devices: int) -> int:
    """Bytes on each device of leaves that are divided among so many."""
    # Rows on disk are no leaves of a pytree.
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Rows))
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves) // devices


def size_text(count: float) -> str:
    """Bytes in the unit that suits them.

    >>> size_text(3 * 2**20)
    '3 MiB'
    """
    unit, name = (GIB, "GiB") if count >= GIB else (2**20, "MiB") if count >= 2**20 else (2**10, "KiB")
    return f"{count / unit:,.3g} {name}"
