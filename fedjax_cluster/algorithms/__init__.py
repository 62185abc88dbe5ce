"""The methods: one file each, and the registry."""

from collections.abc import Callable

from fedjax_cluster.algorithms.cfl_gp import cfl_gp
from fedjax_cluster.algorithms.fedavg import fedavg
from fedjax_cluster.algorithms.fedem import fedem
from fedjax_cluster.algorithms.fedsoft import fedsoft
from fedjax_cluster.algorithms.ifca import ifca
from fedjax_cluster.types import ClusteredAlgorithm

REGISTRY: dict[str, Callable[..., ClusteredAlgorithm]] = {
    "cfl_gp": cfl_gp,
    "fedavg": fedavg,
    "fedem": fedem,
    "fedsoft": fedsoft,
    "ifca": ifca,
}
