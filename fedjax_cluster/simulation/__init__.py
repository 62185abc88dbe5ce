"""Running a method on a federation: the round loop, what it returns, and the directory that it leaves."""

from fedjax_cluster.simulation.loop import Evaluation, RunKeys, run_keys, simulate
from fedjax_cluster.simulation.result import SimulationResult
