"""What a run is given, checked before anything is computed: `simulate`'s arguments, and figures beside its own."""

from __future__ import annotations

import functools
import logging
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from fedjax_cluster.cohorts import cohort_size
from fedjax_cluster.data import check_federation
from fedjax_cluster.faults import Fault, arrivals
from fedjax_cluster.options import COUNT, LARGEST_WHOLE, NOT_NEGATIVE, SEED, Bound, as_path, checked, shown, with_checks
from fedjax_cluster.simulation.churn import fewest_present
from fedjax_cluster.simulation.history import NOT_FINITE, OF_HONEST, REPORTED, SUMMARISED, TIMED
from fedjax_cluster.simulation.ledger import Ledger
from fedjax_cluster.simulation.own_models import check_model
from fedjax_cluster.simulation.private_runs import check_private
from fedjax_cluster.types import Churn, ClientMapping, ClusteredAlgorithm, Federation, Measure

# Columns of the history that no metric and no callback may write.
TAKEN = {*REPORTED, *TIMED, "test_loss", NOT_FINITE, "accuracy_std", "accuracy_worst_decile", *OF_HONEST}
TAKEN |= {*SUMMARISED, *Ledger._fields}  # nor would a summary have room for it
LOG = logging.getLogger(__name__)
INT32 = Bound(lambda value: abs(value) <= LARGEST_WHOLE, "of 32 bits")


@with_checks(rounds=COUNT, seed=SEED, eval_every=COUNT, eval_clients=COUNT, checkpoint_every=NOT_NEGATIVE)
def check_arguments(
    algorithm: ClusteredAlgorithm,
    federation: Federation,
    *,
    rounds: int,
    seed: int = 0,
    eval_every: int = 1,
    eval_clients: int | None = None,
    metrics: Sequence[Measure] = (),
    callbacks: Sequence[Callable[..., Any]] = (),
    churn: Any = (),
    run_dir: str | os.PathLike | None = None,
    mapping: ClientMapping | None = None,
    time_clustering: bool = False,
    progress: bool | None = None,
    checkpoint_every: float = 0.0,
    config: Mapping[str, Any] | None = None,
    fault: Fault | None = None,
) -> tuple[Churn, ...]:
    """The churn that `simulate` is given, as values of Python, with the arrivals of a fault.

    Raises:
      ValueError: an argument of another kind or out of its range, a federation that cannot be used, or a client who
        joins and leaves at once.
    """
    if isinstance(jnp.zeros(()), Tracer):
        raise ValueError(
            "a simulation is begun inside a function that JAX traces, as of jax.jit: call it outside of it"
        )
    if run_dir is not None:
        as_path("run_dir", run_dir)
    clusters = getattr(algorithm, "clusters", None)
    check_federation(federation, num_clusters=clusters if isinstance(clusters, int) else None)
    own, arriving = checked_churn(churn), arrivals(federation, fault, seed)
    _check_apart(own, arriving)
    found = (*own, *arriving)
    if late := [change for change in found if change.round >= rounds and (change.join or change.leave)]:
        who = [str(client) for change in late for client in (*change.join, *change.leave)]
        several, one = ("s", "") if len(who) > 1 else ("", "s")
        LOG.warning(
            f"client{several} {', '.join(who)} join{one} or leave{one} after {late[0].round} rounds or later, but the "
            f"run has {rounds}"
        )
    size = getattr(getattr(algorithm, "local", None), "batch_size", None)
    check_model(getattr(algorithm, "model", None), federation, size if isinstance(size, int) else None, TAKEN)
    aggregation = getattr(algorithm, "aggregation", None)
    if aggregation is not None:
        present = fewest_present(found, federation.train.num_examples, rounds)
        usual = functools.partial(cohort_size, getattr(algorithm, "participation", 1.0))
        aggregation.check_clients(getattr(algorithm, "clients_in_round", usual)(present))
    check_private(algorithm, federation, own, arriving)
    return found


def _check_apart(own: Sequence[Churn], late: Sequence[Churn]) -> None:
    """Raises a ValueError where a client whom a fault lets join joins by itself, or leaves before."""
    joining = {client: change.round for change in late for client in change.join}
    for change in own:
        for client in (*change.join, *change.leave):
            if client in joining and (client in change.join or change.round <= joining[client]):
                raise ValueError(
                    f"client {client} is one of the fault's that join after {joining[client]} rounds, and is absent "
                    "until then: it can leave later, and nothing else"
                )


def checked_churn(changes: Any) -> tuple[Churn, ...]:
    """Changes given as `Churn`, or as JSON has them, as values of Python.

    Raises:
      ValueError: something else, or a client who joins and leaves before the same round.

    >>> checked_churn([[30, [18], []]])
    (Churn(round=30, join=(18,), leave=()),)
    """
    if not isinstance(changes, Sequence) or isinstance(changes, str):
        raise ValueError(f"churn is {shown(changes)}; it must be a list of Churn, in a file such as [[4, [3], []]]")
    found = []
    for change in changes:
        if not isinstance(change, Sequence) or isinstance(change, str) or not 1 <= len(change) <= 3:
            raise ValueError(f"churn holds {shown(change)}; it must hold Churn(round, join, leave)")
        before, join, leave = Churn(*change)
        found.append(
            Churn(
                checked("the round of a churn", before, int, INT32),
                checked("join of a churn", join, Sequence[int], INT32),
                checked("leave of a churn", leave, Sequence[int], INT32),
            )
        )
    joining, leaving = ({(change[0], client) for change in found for client in change[side]} for side in (1, 2))
    for before, client in sorted(joining & leaving):
        raise ValueError(f"churn has client {client} join and leave before round {before}; let it do one of the two")
    return tuple(found)


def further_figures(figures: Mapping[str, Any], further: Any, source: str) -> dict[str, Any]:
    """Figures with those of a metric or callback, `source`.

    Raises:
      ValueError: no mapping of names to numbers, or a name that the run has already.

    >>> further_figures({"accuracy": 0.5}, {"accuracy": 1.0}, "a metric")
    Traceback (most recent call last):
    ...
    ValueError: a metric gives 'accuracy', which a run has already; give it another name
    """
    if not isinstance(further, Mapping) or not all(isinstance(name, str) for name in further):
        raise ValueError(f"{source} gives {shown(further)}; it must give a dictionary of names and numbers")
    for name, value in further.items():
        if name in figures or name in TAKEN:
            raise ValueError(f"{source} gives {name!r}, which a run has already; give it another name")
        if not _is_figure(value):
            raise ValueError(f"{source} gives {name!r} as {shown(value)}; it must be a number")
    return {**figures, **further}


def _is_figure(value: Any) -> bool:
    """Whether it is a real number, or an array without axes of one, which a metric's are while they are traced."""
    if isinstance(value, Tracer | Array):
        kinds = (jnp.bool_, jnp.integer, jnp.floating)
        return value.shape == () and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    try:
        real = isinstance(value, numbers.Real | np.bool_) or getattr(value, "shape", None) == ()
        return real and not isinstance(value, str | bytes | np.complexfloating) and isinstance(float(value), float)
    except (OverflowError, TypeError, ValueError):
        return False
