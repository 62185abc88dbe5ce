"""Clustered federated learning in JAX: every client in one stacked pytree, trained in parallel."""

from fedjax_cluster import algorithms, clustering, cohorts, data, local, nn, parallel, server
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.runs import load_run, resume
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.result import SimulationResult

__version__ = "0.1.0"
