"""Measures what each method costs in a round, for the pages: `python -m docs.costs` writes costs.json."""

import json
import pathlib

import fedjax_cluster as fc
from fedjax_cluster.experiments import config

FILE = pathlib.Path(__file__).with_name("costs.json")
CLIENTS, CLUSTERS, ROUNDS = 16, 4, 20
COLUMNS = ("models_down", "models_up", "gradient_evaluations", "loss_evaluations", "clusterings")


def measured(method: str) -> dict[str, float]:
    """Costs of a client and round, and clusterings in all."""
    shared = {"clients": CLIENTS, "clusters": CLUSTERS, "rounds": ROUNDS, "participation": 1.0}
    settings = fc.RunConfig(method=method, averaging="gradients", **shared)
    algorithm, federation = config.build_algorithm(settings), config.build_federation(settings)
    history = fc.simulate(algorithm, federation, rounds=ROUNDS, eval_every=ROUNDS, progress=False).history
    total = {name: float(history[name].sum()) for name in COLUMNS}
    return {name: round(value / (1 if name == "clusterings" else CLIENTS * ROUNDS), 3) for name, value in total.items()}


if __name__ == "__main__":
    fc.parallel.use_all_cores()
    found = {method: measured(method) for method in fc.algorithms.REGISTRY}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
