"""Runs whose clients' rows are on disk: the cohorts of the next rounds are drawn and read while the devices work."""

from __future__ import annotations

import functools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import cohorts, parallel
from fedjax_cluster.data.stored import Rows, too_large
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.parallel.ahead import CohortsAhead, read_cohorts, row_bytes
from fedjax_cluster.types import ClientMapping, ClusteredAlgorithm, Population, Selection, State

MOST_BYTES = 2**26  # of cohorts read at a time; as many again are under way, and a third lot is being computed with
MOST_ROUNDS = 32  # in one lot


class Stream:
    """The cohorts of a run, some rounds at a time.

    A draw that depends on nothing but the key, the round and who is present (`draws_ahead`) is made ahead, in a thread
    that reads the rows while the devices compute. Where it depends on what rounds did, a cohort is drawn when its round
    comes, and the devices wait for its rows.
    """

    def __init__(
        self, algorithm: ClusteredAlgorithm, population: Population, rng_key: Array, state: State, rounds: int
    ):
        """Of a run from the round of `state` to `rounds`; `rng_key` is that of cohorts.

        Raises:
          ValueError: the method takes all clients in a round.
        """
        rows = population.data.x
        assert isinstance(rows, Rows)
        self._algorithm, self._population, self._key, self._rounds = algorithm, population, rng_key, rounds
        drawn = jax.eval_shape(lambda: algorithm.select(rng_key, state))
        if len(drawn.index) >= len(population.data.num_examples):
            raise ValueError(
                f"{algorithm.name} would take all clients in a round: give a participation below 1, or an option that "
                f"lets it do with a cohort; {too_large(rows)}"
            )
        self.ahead = bool(getattr(algorithm, "draws_ahead", False))
        each = len(drawn.index) * row_bytes(rows.store, "train")
        lot = int(min(MOST_ROUNDS, MOST_BYTES // each, rounds - int(state.round)))
        self._lot = max(1, lot) if self.ahead else 1
        self._work = None if population.work is None else np.asarray(population.work)
        self._present: np.ndarray | None = None
        self._current: CohortsAhead | None = None
        self._first = -1  # round of the current lot
        self._next: tuple[int, Future[CohortsAhead]] | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="cohorts")
        self.waited = 0.0  # seconds that the devices had nothing to do, after the first lot

    def cohorts(self, state: State) -> tuple[CohortsAhead, int]:
        """The lot that the coming round of `state` is in, and the round after its last."""
        number = int(state.round)
        if self._current is None or not self._first <= number < self._first + self._lot:
            started, warm = time.perf_counter(), self._current is not None
            self._current = None
            self._current, self._first = self._take(state, number), number
            self.waited += (time.perf_counter() - started) * warm
            following = number + self._lot
            if self.ahead and following < self._rounds:
                self._next = following, self._reader.submit(self._read, self._standing(state), following)
        return self._current, self._first + self._lot

    def forget(self) -> None:
        """Drops what was drawn; to be called when clients have joined or left."""
        self._current = self._next = self._present = None

    def close(self) -> None:
        """Ends the reading."""
        self._reader.shutdown(cancel_futures=True)

    def _take(self, state: State, number: int) -> CohortsAhead:
        prepared, self._next = self._next, None
        if prepared is not None and prepared[0] == number:
            return prepared[1].result()
        return self._read(self._standing(state) if self.ahead else state, number)

    def _standing(self, state: State) -> State:
        """What a draw ahead may depend on, on one device: a draw of several would get in the way of the rounds'."""
        if self._present is None:
            self._present = np.asarray(parallel.fetched(state.clients.present))
        only = dict.fromkeys(state.clients._fields) | {"present": self._present}
        return State(None, type(state.clients)(**only), None, np.int32(0))  # pyright: ignore[reportArgumentType]

    @in_32_bits
    def _read(self, state: State, number: int) -> CohortsAhead:
        mapping = self._population.mapping
        options = {"algorithm": self._algorithm, "mapping": mapping, "rounds": self._lot, "ahead": self.ahead}
        drawn = parallel.fetched(_draw(self._key, state, np.int32(number), self._work, **options))
        # Beyond the last round nothing need be read.
        mask = drawn.mask & (number + np.arange(self._lot) < self._rounds)[:, None]
        return read_cohorts(self._population, number, drawn.index, mask, drawn.weights)


@functools.partial(jax.jit, static_argnames=("algorithm", "mapping", "rounds", "ahead"))
def _draw(
    rng_key: Array,
    state: State,
    start: Any,
    work: Any,
    *,
    algorithm: ClusteredAlgorithm,
    mapping: ClientMapping,
    rounds: int,
    ahead: bool,
) -> Selection:
    """The selections of rounds from `start` on, leaves [R, C, ...], dealt out among the devices as rounds take them."""
    size = state.clients.present.shape[0]
    if not ahead and size <= cohorts.MANY:
        state = state._replace(clients=parallel.to_each_device(state.clients, mapping))

    def one(number: Array) -> Selection:
        selection = algorithm.select(jax.random.fold_in(rng_key, number), state._replace(round=number))
        return parallel.deal(selection, size, mapping, work)

    numbers = start + jnp.arange(rounds, dtype=jnp.int32)
    # Side by side, what they share is computed once: who is present, of many clients.
    return jax.vmap(one)(numbers) if ahead and size > cohorts.MANY else jax.lax.map(one, numbers)
