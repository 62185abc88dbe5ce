"""What a simulation returns, and its one-page summary."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.simulation.metrics import ledger, predict
from fedjax_cluster.types import ClientMapping, ClusteredAlgorithm, Event, Federation, State


@dataclasses.dataclass(frozen=True)
class SimulationResult:
    """A finished run.

    Attributes:
      algorithm: the method.
      federation: the data it ran on.
      state: final state.
      history: one row a round: `round` (0-based), `loss`, `num_clients`, `num_clusters`, `num_changed`,
        `num_rejected`, `event` (1 where the method reported one), `adjusted_rand_index`, `purity`, the costs,
        `clustering_seconds` where these were timed, `seconds`, and the metrics on test rows (NaN between evaluations).
      events: what the method kept of its splits and the like, in the order of their rounds.
      summary: what summary.json holds.
    """

    algorithm: ClusteredAlgorithm
    federation: Federation
    state: State
    history: dict[str, np.ndarray]
    events: tuple[Event, ...]
    summary: dict[str, Any]
    evaluation_key: Array
    mapping: ClientMapping

    @property
    def labels(self) -> np.ndarray:
        """i32[M]: the cluster of each client, −1 where it has none."""
        return np.asarray(labels(self.state.clients.membership))[: len(self.federation.train.num_examples)]

    def predict(self, x: Any, client: int) -> np.ndarray:
        """Predictions of one client's personal model for rows x [N, ...].

        Raises:
          ValueError: no such client, no rows, or rows of another shape than the client's.
        """
        train = self.federation.train
        count = len(train.num_examples)
        if not 0 <= client < count:
            raise ValueError(f"client is {client}; the federation has clients 0 to {count - 1}")
        x = np.asarray(x)
        if x.shape[1:] != np.shape(train.x)[2:]:
            raise ValueError(f"x has rows of shape {x.shape[1:]}; the clients' have {np.shape(train.x)[2:]}")
        if not len(x):
            raise ValueError("x has no rows; give at least one")
        row = jax.tree.map(lambda leaf: jnp.asarray(leaf[client]), train)
        key = jax.random.fold_in(self.evaluation_key, client)
        own = self.algorithm
        run = jax.jit(functools.partial(predict, own.model, own.personalize))
        return np.asarray(run(key, self.state, row, jnp.asarray(client), x))

    def plot(self, metric: str | None = None):
        """Draws accuracy (or another column of the history) and ARI against rounds; returns the figure."""
        from fedjax_cluster.report import plots

        return plots.learning_curves({self.algorithm.name: self.history}, metric=metric)

    def to_pandas(self):
        """The history as a data frame indexed by round; needs pandas."""
        import pandas

        return pandas.DataFrame(self.history).set_index("round")


def summarize(
    algorithm: ClusteredAlgorithm,
    federation: Federation,
    state: State,
    history: dict[str, np.ndarray],
    seed: int,
    compile_seconds: float,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One line of figures about a run; `first_round_of_final_clustering` is 0-based."""
    rounds = len(history["round"])
    last = {
        name: _last_value(history.get(name))
        for name in ("accuracy", "accuracy_std", "accuracy_worst_decile", "balanced_accuracy", "test_loss")
    }
    others = {
        name: _last_value(column)
        for name, column in history.items()
        if name not in last and np.isnan(column[: rounds - 1]).any()
    }
    agreement = history["adjusted_rand_index"]
    purity = history.get("purity", np.full(rounds, np.nan))
    changed = np.flatnonzero(history["num_changed"])
    best = np.nanmax(agreement) if np.isfinite(agreement).any() else np.nan
    return {
        "algorithm": algorithm.name,
        "scenario": (config or {}).get("scenario", federation.info.name),
        "dataset": federation.info.name,
        "clients": len(federation.train.num_examples),
        "rounds": rounds,
        "seed": seed,
        **last,
        **others,
        "train_loss": float(history["loss"][-1]),
        "adjusted_rand_index": float(agreement[-1]),
        "purity": float(purity[-1]),
        "num_clusters": int(history["num_clusters"][-1]),
        "first_round_of_final_clustering": int(changed[-1]) if len(changed) else 0,
        "first_round_of_best_agreement": _first(agreement >= best - 1e-6),
        "first_round_of_ideal_agreement": _first(agreement >= 1 - 1e-6),
        "first_round_of_purity_90": _first(purity >= 0.9 - 1e-6),
        "num_rejected": int(history["num_rejected"].sum()),
        "client_rounds_per_second": float(history["num_clients"].sum() / max(history["seconds"].sum(), 1e-9)),
        "compile_seconds": compile_seconds,
        "run_seconds": float(history["seconds"].sum()),
        **ledger(history, state)._asdict(),
    }


def _last_value(column: np.ndarray | None) -> float | None:
    if column is None or not np.isfinite(column).any():
        return None
    return float(column[np.isfinite(column)][-1])


def _first(condition: np.ndarray) -> int | None:
    return int(np.argmax(condition)) if condition.any() else None
