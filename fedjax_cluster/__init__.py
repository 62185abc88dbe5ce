"""Clustered federated learning in JAX: every client in one stacked pytree, trained in parallel."""

from fedjax_cluster import algorithms, clustering, cohorts, data, local, nn, optimizers, parallel, server
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.runs import load_run, resume
from fedjax_cluster.simulation import SimulationResult, simulate

__version__ = "0.1.0"
