"""The compiled program of a run: rounds inside XLA, and the randomness that they draw on."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster import parallel
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.lifting import Numbers, with_numbers
from fedjax_cluster.options import shown
from fedjax_cluster.simulation.history import clusters_of_all, dtype_of_groups, report_round
from fedjax_cluster.simulation.own_methods import hint_of_tracing, is_ours
from fedjax_cluster.types import ClientData, ClientMapping, ClusteredAlgorithm, Federation, Population, RoundInfo, State

# A segment's length follows the clock; this bounds the buffer of its reports.
LONGEST_SEGMENT = 1024
LABELS = "labels"  # i16[M] of a round's report, beside its scalars
OWN = ("own", "models", "optimizer")  # what methods call that of their clients which never leaves them
MOST_FOLLOWED = 2048  # clients whose clusters are reported each round: 4 MB a segment
MOST_COMPARED = 2**16  # clients whose clusters are counted each round, and not only where it is evaluated


class RunKeys(NamedTuple):
    """Separate randomness for each purpose, all from one seed; the data have the scenario's."""

    initialization: Array
    cohorts: Array
    local: Array
    evaluation: Array


def run_keys(seed: int) -> RunKeys:
    """The keys of one seed.

    >>> len(run_keys(0))
    4
    """
    return _split(np.int64(seed))


@parallel.kept_program()
def _split(seed: Array) -> RunKeys:
    return RunKeys(*jax.random.split(jax.random.key(seed), 4))


@parallel.kept_program(static_argnames="algorithm", donate_argnames="state")
def run_segment(
    keys: RunKeys,
    state: State,
    train: Population | parallel.CohortsAhead,
    group: Array | None,
    initial: RoundInfo,
    stop: Array,
    numbers: Numbers | None = None,
    due: Array | None = None,
    *,
    algorithm: ClusteredAlgorithm,
) -> tuple[State, dict[str, Array]]:
    """Rounds from `state.round` up to `stop` or an event: one program whatever the length, bit-identical when split.

    `train` are all clients, or the cohorts of these rounds, drawn and read before. `numbers` take the place of the
    method's own, see `lifting`; `due` is the number of rounds at which the next evaluation is, for `report`.
    """
    start, algorithm = state.round, with_numbers(algorithm, numbers or {})

    def unfinished(carry):
        state, _, event = carry
        return (state.round < stop) & ~event

    def advance(carry):
        state, buffer, _ = carry
        position = state.round - start
        state, row = one_round(algorithm, keys, state, train, group, due)
        buffer = jax.tree.map(lambda all, one: all.at[position].set(one), buffer, row)
        return state, buffer, row["event"]

    row = report(initial, state, train, group, due)
    buffer = jax.tree.map(lambda leaf: jnp.zeros((LONGEST_SEGMENT, *leaf.shape), leaf.dtype), row)
    state, buffer, _ = lax.while_loop(unfinished, advance, (state, buffer, jnp.asarray(False)))
    return parallel.constrain_state(state, train.mapping), buffer


def one_round(
    algorithm: ClusteredAlgorithm,
    keys: RunKeys,
    state: State,
    train: Population | parallel.CohortsAhead,
    group: Array | None,
    due: Array | None = None,
) -> tuple[State, dict[str, Array]]:
    """A round: who takes part, the method's step, and its row of the history."""
    number = state.round
    if not isinstance(train, parallel.CohortsAhead) or len(state.clients.present) <= MOST_COMPARED:
        state = _with_numbers_everywhere(state, train)
    if isinstance(train, parallel.CohortsAhead):
        cohort = train.of_round(number)
    else:
        selection = algorithm.select(jax.random.fold_in(keys.cohorts, number), state)
        cohort = parallel.gather_cohort(train, selection)
    with hint_of_tracing(algorithm):
        done = algorithm.step(jax.random.fold_in(keys.local, number), state, cohort)
    state, info = _checked_step(algorithm.name, state, done)
    # Whatever a step makes of the number, the loop ends.
    return (state := state._replace(round=number + 1)), report(info, state, train, group, due)


def _checked_step(name: str, before: State, done: Any) -> tuple[State, RoundInfo]:
    """What a method's `step` returned; a ValueError where it is no next state, of which XLA's message says little."""
    if not (
        isinstance(done, tuple) and len(done) == 2 and isinstance(done[0], State) and isinstance(done[1], RoundInfo)
    ):
        raise ValueError(f"step of {name} returned {shown(done)}; it returns the next State and a RoundInfo")
    state, info = done
    old, new = jax.tree_util.tree_leaves_with_path(before), jax.tree_util.tree_leaves_with_path(state)
    if (kept := [path for path, _ in old]) != [path for path, _ in new]:
        other = next((path for path, _ in new if path not in kept), None) or next(
            path for path in kept if path not in [path for path, _ in new]
        )
        raise ValueError(
            f"step of {name} returned another structure than it was given: state{jax.tree_util.keystr(other)} is in "
            "one of the two states alone"
        )
    for (path, leaf), (_, after) in zip(old, new, strict=True):
        made, had = jnp.asarray(after), jnp.asarray(leaf)
        if (made.shape, made.dtype) != (had.shape, had.dtype):
            raise ValueError(
                f"step of {name} made state{jax.tree_util.keystr(path)} {made.dtype}{list(made.shape)} of "
                f"{had.dtype}{list(had.shape)}; shapes and dtypes stay as `init` made them"
            )
    return state, info


def report(
    info: RoundInfo,
    state: State,
    train: Population | parallel.CohortsAhead,
    group: Array | None,
    due: Array | None = None,
) -> dict[str, Array]:
    """What a round tells the history.

    The number of clusters and the agreement, for which all clients are gone through, are NaN but in the round with
    which `due` are done, and after an event; None, of at most `MOST_COMPARED` clients, is always.
    """
    row, clients = report_round(info), len(state.clients.present)
    if due is not None:
        compared = functools.partial(clusters_of_all, group=group)
        nothing = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan), jax.eval_shape(compared, state))
        return {**row, **lax.cond((state.round == due) | info.event, compared, lambda _: nothing, state)}
    state = _with_numbers_everywhere(state, train)
    row |= clusters_of_all(state, group)
    assigned = labels(state.clients.membership)
    return row if clients > MOST_FOLLOWED else {**row, LABELS: assigned.astype(jnp.int16)}


def _with_numbers_everywhere(state: State, train: Population | parallel.CohortsAhead) -> State:
    # Who is drawn, and what is reported, depends on numbers of all clients, and on nothing of what is their own.
    own = {name: getattr(state.clients, name) for name in OWN if hasattr(state.clients, name)}
    if not own:
        return state._replace(clients=parallel.to_each_device(state.clients, train.mapping))
    sent = parallel.to_each_device(state.clients._replace(**dict.fromkeys(own, ())), train.mapping)
    return state._replace(clients=sent._replace(**own))


def work_of(algorithm: ClusteredAlgorithm, data: ClientData) -> Any:
    """What a round costs each client, by which several devices are dealt them; None where they are left in order."""
    measure = getattr(getattr(algorithm, "update", None), "work", None)  # a local update of one's own may lack it
    return measure(data) if measure is not None and is_ours(algorithm) else None


def placed_clients(
    algorithm: ClusteredAlgorithm, federation: Federation, mapping: ClientMapping, by_work: bool = True
) -> tuple[Population, Array | None]:
    """A federation's clients on the devices, divided among these by their work, and their true groups, −1 for none.

    A method that is not ours may look at rows in place, and finds them in the order of the clients.
    """
    work = work_of(algorithm, federation.train) if by_work else None
    train = parallel.place_population(federation.train, federation.info, mapping, work)
    if federation.group is None:
        return train, None
    padded = np.full(len(train.data.num_examples), -1, dtype_of_groups(federation.group))
    padded[: len(federation.group)] = federation.group
    placed = parallel.replicate if len(padded) <= MOST_COMPARED else parallel.place_rows
    return train, placed(mapping, padded)
