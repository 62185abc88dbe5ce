"""What methods and true groups are called in tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence

METHOD_NAMES = {
    "cfl": "CFL",
    "cfl_gp": "CFL-GP",
    "fairavg": "FairAvg",
    "fedavg": "FedAvg",
    "fedavgm": "FedAvgM",
    "fedem": "FedEM",
    "fedgwc": "FedGWC",
    "fedprox": "FedProx",
    "fedsoft": "FedSoft",
    "fesem": "FeSEM",
    "flag": "FLAG",
    "gradient_loss": "Gradient and loss",
    "ifca": "IFCA",
    "local_only": "Local only",
    "pacfl": "PACFL",
    "per_fedavg": "Per-FedAvg",
}


def method_name(name: str) -> str:
    """A method's name as papers print it; any other text unchanged.

    >>> method_name("cfl_gp"), method_name("cfl-gp"), method_name("ours, P=1")
    ('CFL-GP', 'CFL-GP', 'ours, P=1')
    """
    return METHOD_NAMES.get(name.replace("-", "_"), name)


def group_name(group: int, names: Sequence[str]) -> str:
    """A true group's name, or its index where it has none.

    >>> group_name(1, ("rain", "sun")), group_name(2, ("rain", "sun")), group_name(-1, ())
    ('sun', 'group 2', 'unknown')
    """
    if group < 0:
        return "unknown"
    return names[group] if group < len(names) else f"group {group}"
