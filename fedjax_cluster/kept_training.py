"""The training of what a client keeps to itself, which no fault spoils."""

from __future__ import annotations

from jax import Array

from fedjax_cluster.faults import Fault
from fedjax_cluster.local import LocalUpdate
from fedjax_cluster.options import changed, option


class steps_alone(Fault):
    """Of a fault, what it does to the number of steps: who is slow is slow in all training of theirs."""

    of: Fault = option("the fault")

    def num_steps(self, usual: Array | int, faulty: Array) -> Array | int:
        return self.of.num_steps(usual, faulty)


def honest(update: LocalUpdate) -> LocalUpdate:
    """The update of what a client keeps to itself: without what a fault does to that which is sent."""
    fault = getattr(update, "fault", None)
    return update if fault is None else changed(update, "made honest", fault=steps_alone(of=fault))
