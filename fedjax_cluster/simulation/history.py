"""The history of a run: one row a round, a column for each thing that rounds and evaluations report."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import parallel
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.clustering.scores.agreement import FEW_LABELS, MANY, agreement
from fedjax_cluster.simulation.ledger import CLUSTERING_SECONDS, ledger
from fedjax_cluster.simulation.private_runs import budget_of
from fedjax_cluster.types import ClusteredAlgorithm, Costs, Federation, RoundInfo, State

LOG = logging.getLogger(__name__)
History = dict[str, np.ndarray]
ARI, PURITY = "adjusted_rand_index", "purity"
# Clients with NaN or infinity among their predictions, which have no metrics.
NOT_FINITE = "num_not_finite"
# Of the honest clients alone, in a run with a fault.
OF_HONEST = ("accuracy_honest", "adjusted_rand_index_honest")

GROWN = 1e3  # times the first round's loss
MOST_BROKEN = 0.9  # of the clients, so that every update of theirs is rejected
BY_CHANCE = 1e-9  # that updates are lost in a row, and nothing has diverged
# The order of metrics.csv; XLA returns them by name.
REPORTED = (
    *("loss", "num_clients", "num_clusters", "num_changed", "num_rejected", "event", "adjusted_rand_index", "purity"),
    *(name for name in Costs._fields if name != CLUSTERING_SECONDS),  # that is no step's to tell
)
FEW_GROUPS = np.dtype(np.int8)
TIMED = ("round", "seconds", CLUSTERING_SECONDS)  # columns that are no figures of a round
# What a summary has beside the metrics, and the ledger's fields.
SUMMARISED = (
    *("algorithm", "scenario", "dataset", "clients", "rounds", "seed", "tuning", "train_loss", "privacy"),
    *("first_round_of_final_clustering", "first_round_of_best_agreement", "first_round_of_ideal_agreement"),
    *("first_round_of_purity_90", "first_round_not_finite", "client_rounds_per_second"),
    *("compile_seconds", "run_seconds", "num_unclustered"),
)


def report_round(info: RoundInfo) -> dict[str, Array]:
    """The scalars of a round that go into the history, without those of all clients."""
    count = info.num_clients.astype(jnp.float32)
    # NaN where every update was rejected: 0 would look like a perfect fit.
    loss = jnp.sum(jnp.where(count > 0, info.loss * count, 0.0)) / jnp.sum(count)
    return {
        "loss": loss,
        "num_clients": jnp.sum(info.num_clients),
        "num_changed": info.num_changed,
        "num_rejected": info.num_rejected,
        **info.costs._asdict(),
        "event": info.event,
    }


def dtype_of_groups(group: Any) -> Any:
    """In which groups are given to programs, None for none: of many clients in few, a type that tells programs so.

    The sort that finds any number of them takes a TPU's compiler longer than all the rest of a round.
    """
    if group is None:
        return None
    group = np.asarray(group)
    return FEW_GROUPS if len(group) > MANY and group.min() >= -1 and group.max() < FEW_LABELS else np.dtype(np.int32)


def clusters_of_all(state: State, group: Array | None) -> dict[str, Array]:
    """What all clients are gone through for; `group` i[M] are true groups, −1 where unknown, or None."""
    slots = state.clusters.active.shape[0]
    assigned = labels(state.clients.membership)
    occupied = jnp.any(assigned[:, None] == jnp.arange(slots)[None], axis=0)
    number = jnp.sum((occupied & state.clusters.active).astype(jnp.float32))
    if group is None:
        return {"num_clusters": number, ARI: jnp.asarray(jnp.nan), PURITY: jnp.asarray(jnp.nan)}
    valid = state.clients.present & (assigned >= 0) & (group >= 0)
    few = group.dtype == FEW_GROUPS and slots <= FEW_LABELS
    scores = agreement(assigned, group.astype(jnp.int32), valid, few=few)
    return {"num_clusters": number} | {
        name: jnp.where(jnp.any(valid), score, jnp.nan) for name, score in zip((ARI, PURITY), scores, strict=True)
    }


def rows_of_rounds(
    reports: Mapping[str, Array], start: int, stop: int, seconds: float, initial: Costs | None
) -> History:
    """The rows of rounds `start` to `stop`, which took `seconds` together, from reports name -> [S].

    What `init` cost, a pilot say, is counted in the first round; None where that is not among them.
    """
    rows = {name: np.asarray(reports[name])[: stop - start].astype(np.float64) for name in REPORTED}
    rows = {"round": np.arange(start, stop, dtype=np.float64), **rows}
    rows["seconds"] = np.full(stop - start, seconds / (stop - start))
    for name, cost in (initial._asdict() if initial is not None else {}).items():
        if name in rows:
            rows[name][0] += float(cost)
    return rows


def with_figures(history: History, figures: Mapping[str, float]) -> History:
    """The history with an evaluation's figures in its last row; the rows before it have none."""
    history, count = dict(history), len(history["round"])
    for name, value in figures.items():
        history[name] = np.append(history.get(name, np.full(count, np.nan))[:-1], float(value))
    return history


def has_figures(history: History) -> bool:
    """Whether the last round was evaluated."""
    return bool(np.isfinite(history.get(NOT_FINITE, np.full(1, np.nan))[-1]))


def fewest_rejections(algorithm: ClusteredAlgorithm, num_clients: int) -> float:
    """How many updates in a row must be rejected for a run to have diverged: as many as there are clients, or enough.

    So many as would all be of broken clients by next to no chance, were these nine in ten. One cohort alone may be that
    of a single client with broken data, or one whose clients have all dropped out.
    """
    lost = float(getattr(getattr(getattr(algorithm, "local", None), "fault", None), "lost", 0.0))
    # Of clients who never send anything the number says as much as of others.
    fewest = min(num_clients, np.log(BY_CHANCE) / np.log(MOST_BROKEN))
    return max(fewest, np.log(BY_CHANCE) / np.log(lost)) if 0 < lost < 1 else fewest


def diverged_since(history: History, fewest: float) -> int | None:
    """The 0-based round since which every update was rejected, `fewest` of them at least; else None."""
    useful = np.flatnonzero(history["num_clients"] > 0)
    start = int(useful[-1]) + 1 if len(useful) else 0
    return start if history["num_rejected"][start:].sum() >= max(fewest, 1) else None


def first_round_not_finite(history: History, fewest: float) -> int | None:
    """The 0-based round since which, to its end, a run has diverged or had predictions that are not finite."""
    spoilt = history.get(NOT_FINITE, np.zeros(0))
    evaluated = np.flatnonzero(np.isfinite(spoilt))
    well = np.flatnonzero(spoilt[evaluated] == 0)
    since = evaluated[well[-1] + 1 :] if len(well) else evaluated
    rounds = [diverged_since(history, fewest), int(since[0]) if len(since) else None]
    return min((number for number in rounds if number is not None), default=None)


def append(history: History, rows: History) -> History:
    """The history with further rows; NaN in columns that only one of the two has."""
    before, after = (len(part.get("round", ())) for part in (history, rows))
    missing = functools.partial(np.full, fill_value=np.nan)
    names = [*history, *(name for name in rows if name not in history)]
    return {
        name: np.concatenate([history.get(name, missing(before)), rows.get(name, missing(after))]) for name in names
    }


def warn_of_divergence(history: History, num_clients: int, fewest: float) -> bool:
    """Whether the last evaluation has no figures, or the next will have none; says so, and why."""
    since, spoilt = diverged_since(history, fewest), history.get(NOT_FINITE, np.zeros(1))[-1]
    if since is not None:
        why = f"since round {since + 1} every update was NaN, infinite, too large or missing, and was left out"
    elif spoilt > 0:
        why = f"the predictions for {spoilt:.0f} of {num_clients} clients are NaN or infinite"
    else:
        return False
    LOG.warning("the run has diverged: %s; its figures are NaN. Lower the learning rate, or scale the data", why)
    return True


def warn_of_growth(history: History) -> bool:
    """Whether the training loss is out of all proportion to the first round's, though finite; says so."""
    loss = history["loss"][np.isfinite(history["loss"])]
    if not len(loss) or not loss[-1] > GROWN * max(loss[0], 1.0):
        return False
    LOG.warning(
        f"the training loss has grown from {loss[0]:.3g} to {loss[-1]:.3g}: lower the learning rate, or scale the data"
    )
    return True


def last_report(history: History) -> dict[str, float]:
    """What the last round reported, for the progress bar and for callbacks."""
    return {name: float(history[name][-1]) for name in ("loss", "adjusted_rand_index", "num_clusters")}


def summarize(
    algorithm: ClusteredAlgorithm,
    federation: Federation,
    state: State,
    history: dict[str, np.ndarray],
    seed: int,
    compile_seconds: float,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One line of figures about a run, NaN where it ended diverged; first rounds are 0-based."""
    rounds, clients = len(history["round"]), len(federation.train.num_examples)
    given, spent = config or {}, budget_of(algorithm, federation, rounds)
    fewest = fewest_rejections(algorithm, clients)
    lost = diverged_since(history, fewest) is not None or (_last_value(history.get(NOT_FINITE)) or 0) > 0

    evaluated = np.flatnonzero(np.isfinite(history.get(NOT_FINITE, np.full(rounds, np.nan))))

    def latest(column: np.ndarray | None, known: bool = False) -> float | None:
        """Of the last evaluation, also where that has none; of what is known of other rounds too, the last."""
        if lost and column is not None:
            return float("nan")
        return _last_value(column if known or column is None or not len(evaluated) else column[evaluated[-1:]])

    last = {
        name: latest(history.get(name))
        for name in ("accuracy", "accuracy_std", "accuracy_worst_decile", "balanced_accuracy", "test_loss")
    }
    others = {
        name: latest(column, known=name == OF_HONEST[1])
        for name, column in history.items()
        if name in OF_HONEST or (name not in (*last, *REPORTED, *TIMED, NOT_FINITE))
    }
    agreement = history["adjusted_rand_index"]
    purity = history.get("purity", np.full(rounds, np.nan))
    # Of very many clients these are not known of every round; of a run that was interrupted early, of none.
    compared = np.flatnonzero(np.isfinite(history["num_clusters"]))
    row = int(compared[-1]) if len(compared) else -1
    changed = np.flatnonzero(history["num_changed"])
    best = np.nanmax(agreement) if np.isfinite(agreement).any() else np.nan
    return {
        "algorithm": algorithm.name,
        "scenario": federation.info.name if given.get("population") else given.get("scenario", federation.info.name),
        "dataset": federation.info.name,
        "clients": clients,
        "rounds": rounds,
        "seed": seed,
        **({"tuning": config["tuning"]} if config and config.get("tuning") else {}),
        **last,
        **others,
        "train_loss": float(history["loss"][-1]),
        "adjusted_rand_index": float(agreement[row]),
        "purity": float(purity[row]),
        "num_clusters": int(history["num_clusters"][row]) if len(compared) else None,
        "num_unclustered": _unclustered(state),
        "first_round_of_final_clustering": int(changed[-1]) if len(changed) else 0,
        "first_round_of_best_agreement": _first(agreement >= best - 1e-6),
        "first_round_of_ideal_agreement": _first(agreement >= 1 - 1e-6),
        "first_round_of_purity_90": _first(purity >= 0.9 - 1e-6),
        "first_round_not_finite": first_round_not_finite(history, fewest),
        "num_rejected": int(history["num_rejected"].sum()),
        "client_rounds_per_second": float(history["num_clients"].sum() / max(history["seconds"].sum(), 1e-9)),
        "compile_seconds": compile_seconds,
        "run_seconds": float(history["seconds"].sum()),
        **ledger(history, state)._asdict(),
        **({} if spent is None else {"privacy": spent._asdict()}),
    }


def _unclustered(state: State) -> int:
    """Clients that are in no cluster yet, of whom no agreement with the groups is known."""
    return int(parallel.fetched(_number_outside(state.clients.present, state.clients.membership)))


@parallel.kept_program()
def _number_outside(present: Array, membership: Array) -> Array:
    return jnp.sum(present & (membership.max(-1) <= 0))


def _last_value(column: np.ndarray | None) -> float | None:
    if column is None or not np.isfinite(column).any():
        return None
    return float(column[np.isfinite(column)][-1])


def _first(condition: np.ndarray) -> int | None:
    return int(np.argmax(condition)) if condition.any() else None
