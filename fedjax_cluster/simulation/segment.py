"""The compiled program of a run: rounds inside XLA, and the randomness that they draw on."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedjax_cluster import parallel
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.simulation.history import report_round
from fedjax_cluster.types import ClusteredAlgorithm, Population, RoundInfo, State

# A segment's length follows the clock; this bounds the buffer of its reports.
LONGEST_SEGMENT = 1024
LABELS = "labels"  # i16[M] of a round's report, beside its scalars
MOST_FOLLOWED = 2048  # clients whose clusters are reported each round: 4 MB a segment


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
    return RunKeys(*jax.random.split(jax.random.key(seed), 4))


@functools.partial(jax.jit, static_argnames="algorithm", donate_argnames="state")
def run_segment(
    keys: RunKeys,
    state: State,
    train: Population | parallel.CohortsAhead,
    group: Array | None,
    initial: RoundInfo,
    stop: Array,
    *,
    algorithm: ClusteredAlgorithm,
) -> tuple[State, dict[str, Array]]:
    """Rounds from `state.round` up to `stop` or an event: one program whatever the length, bit-identical when split.

    `train` are all clients, or the cohorts of these rounds, drawn and read before.
    """
    start = state.round

    def one_round(state: State) -> tuple[State, dict[str, Array]]:
        number = state.round
        state = with_numbers_everywhere(state)
        if isinstance(train, parallel.CohortsAhead):
            cohort = train.of_round(number)
        else:
            selection = algorithm.select(jax.random.fold_in(keys.cohorts, number), state)
            cohort = parallel.gather_cohort(train, selection)
        state, info = algorithm.step(jax.random.fold_in(keys.local, number), state, cohort)
        return state, report(info, state)

    def report(info: RoundInfo, state: State) -> dict[str, Array]:
        state = with_numbers_everywhere(state)
        row = report_round(info, state, group)
        assigned = labels(state.clients.membership)
        return row if len(assigned) > MOST_FOLLOWED else {**row, LABELS: assigned.astype(jnp.int16)}

    def with_numbers_everywhere(state: State) -> State:
        # Who is drawn, and what is reported, depends on numbers of all clients.
        return state._replace(clients=parallel.to_each_device(state.clients, train.mapping))

    def unfinished(carry):
        state, _, event = carry
        return (state.round < stop) & ~event

    def advance(carry):
        state, buffer, _ = carry
        position = state.round - start
        state, row = one_round(state)
        buffer = jax.tree.map(lambda all, one: all.at[position].set(one), buffer, row)
        return state, buffer, row["event"]

    row = report(initial, state)
    buffer = jax.tree.map(lambda leaf: jnp.zeros((LONGEST_SEGMENT, *leaf.shape), leaf.dtype), row)
    state, buffer, _ = lax.while_loop(unfinished, advance, (state, buffer, jnp.asarray(False)))
    return parallel.constrain_state(state, train.mapping), buffer
