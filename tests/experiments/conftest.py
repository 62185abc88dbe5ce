"""Runs of comparisons that compute nothing."""

import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster import cli
from fedjax_cluster.experiments import comparison, saved_runs
from fedjax_cluster.interruption import Interrupt
from fedjax_cluster.simulation import SimulationResult

METHODS = ("fedavg", "ifca", "local-only")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_prepare_jax", lambda: None)


@pytest.fixture
def pretend(monkeypatch):
    """Runs that compute nothing and leave what finished ones do.

    `done` has them, `failing` the errors of others by method and seed, or by directory.
    """

    class Pretend:
        def __init__(self):
            self.done: list[tuple[str, int]] = []
            self.directories: list[str] = []
            self.failing: dict[tuple[str, int] | str, BaseException] = {}

        def __call__(self, config, *, run_dir, **rest):
            error = self.failing.get((config.method, config.seed)) or self.failing.get(run_dir.name)
            if error is not None:
                if isinstance(error, KeyboardInterrupt):
                    Interrupt.active.number = 2
                raise error
            rounds = np.arange(config.rounds, dtype=float)
            place = (
                [each.replace("-", "_") for each in METHODS].index(config.method) if config.method != "cfl_gp" else 0
            )
            accuracy = 0.5 + 0.1 * place + 0.01 * config.seed**2 + 0.001 * (64 - config.batch_size)
            history = {"round": rounds, "loss": 1 - rounds / 10, "accuracy": accuracy - rounds[::-1] / 10}
            summary = {"algorithm": config.method, "rounds": config.rounds, "accuracy": accuracy, "seed": config.seed}
            if not (run_dir / "summary.json").exists():
                self.done.append((config.method, config.seed))
                self.directories.append(run_dir.name)
            identity = {"algorithm": config.method, "algorithm_config": {}, "seed": config.seed, "data": 0}
            fc.files.write_json(run_dir / "config.json", {"identity": identity, "experiment": config.to_json()})
            fc.files.write_json(run_dir / "summary.json", {**summary, "clients": 4, "train_loss": 0.5})
            columns = {name: column.tolist() for name, column in history.items()}
            fc.files.write_json(run_dir / "checkpoints" / str(config.rounds) / "history" / "metadata", columns)
            return SimulationResult(None, None, None, history, (), summary, None, None)

    replacement = Pretend()
    monkeypatch.setattr(comparison, "run", replacement)
    monkeypatch.setattr(saved_runs, "leave_run", lambda *given, **options: [])  # there is no state to draw
    return replacement
