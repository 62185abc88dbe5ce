"""Runs whose clients' rows are on disk: the cohorts of the next rounds are drawn and read while the devices work."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import cohorts, parallel
from fedjax_cluster.data.stored import stored, too_large
from fedjax_cluster.nn.precision import in_32_bits
from fedjax_cluster.parallel.ahead import CohortsAhead, read_cohorts, row_bytes
from fedjax_cluster.types import ClientData, ClientMapping, ClusteredAlgorithm, Population, Selection, State

MOST_BYTES = 2**26  # of cohorts read at a time; as many again are under way, and a third lot is being computed with
MOST_ROUNDS = 32  # in one lot


def draws_ahead(algorithm: ClusteredAlgorithm) -> bool:
    """Whether a lot is drawn and read while the devices compute with the one before."""
    return bool(getattr(algorithm, "draws_follow", False)) or bool(getattr(algorithm, "draws_ahead", False))


def lot_of(algorithm: ClusteredAlgorithm, data: ClientData, drawn: Selection, clients: int) -> int:
    """Rounds in one lot of a long run, whose rounds each draw so many out of `clients`.

    Raises:
      ValueError: the method takes all clients in a round.
    """
    rows = data.x
    if len(drawn.index) >= clients:
        if getattr(algorithm, "participation", 1.0) < 1:
            first, each = hasattr(algorithm, "first_clients"), bool(getattr(algorithm, "draws_follow", False))
            if draws_ahead(algorithm) and not first:
                less = " or fewer clusters, each of which draws its own" if each else ""
                raise ValueError(
                    f"a round of {algorithm.name} has room for all {clients} clients here: give a smaller "
                    f"participation{less}; {too_large(rows)}"
                )
            way = ", but with cluster_cohort=True" if getattr(algorithm, "cluster_cohort", None) is False else ""
            way = ", but with fewer first_clients" if first else way
            raise ValueError(
                f"{algorithm.name} has all clients in its rounds, whoever takes part{way}; {too_large(rows)}"
            )
        raise ValueError(
            f"{algorithm.name} would take all clients in a round: give a participation below 1, or an option that "
            f"lets it do with a cohort; {too_large(rows)}"
        )
    each = len(drawn.index) * row_bytes(data)
    return max(1, min(MOST_ROUNDS, MOST_BYTES // each)) if draws_ahead(algorithm) else 1


def check_cohorts(algorithm: ClusteredAlgorithm, population: Population, rng_key: Array, state: State) -> None:
    """Raises a ValueError where the clients' rows are on disk, but a round would take all of them."""
    if stored(population.data):
        drawn = jax.eval_shape(lambda: algorithm.select(rng_key, state))
        lot_of(algorithm, population.data, drawn, len(population.data.num_examples))


class Stream:
    """The cohorts of a run, some rounds at a time.

    A draw that depends on nothing but the key, the round, who is present and who is a landmark (`draws_ahead`) is made
    ahead, in a thread that reads the rows while the devices compute. So is one that depends on clusters, which change
    at events alone, and on what draws themselves change, such as how often clients were seen (`standing`); after an
    event it is made anew. Where it depends on all that rounds do, a cohort is drawn when its round comes, and the
    devices wait for its rows.
    """

    def __init__(
        self, algorithm: ClusteredAlgorithm, population: Population, rng_key: Array, state: State, rounds: int
    ):
        """Of a run from the round of `state` to `rounds`; `rng_key` is that of cohorts.

        Raises:
          ValueError: the method takes all clients in a round.
        """
        self._algorithm, self._population, self._key, self._rounds = algorithm, population, rng_key, rounds
        drawn = jax.eval_shape(lambda: algorithm.select(rng_key, state))
        self._follows, self.ahead = bool(getattr(algorithm, "draws_follow", False)), draws_ahead(algorithm)
        lot = lot_of(algorithm, population.data, drawn, len(population.data.num_examples))
        self._lot = max(1, min(lot, rounds - int(state.round)))
        self._work = None if population.work is None else np.asarray(population.work)
        self._standing: Any = None  # what the next lot's draw depends on
        self._current: CohortsAhead | None = None
        self._first = -1  # round of the current lot
        self._next: tuple[int, Future[tuple[CohortsAhead, Any]]] | None = None
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
                self._next = following, self._reader.submit(self._read, self._stands(state), following)
        return self._current, self._first + self._lot

    def forget(self) -> None:
        """Drops what was drawn; to be called when clients have joined or left."""
        self._current = self._next = self._standing = None

    def forget_after_event(self) -> None:
        """Drops what was drawn for other clusters."""
        if self._follows:
            self.forget()

    def close(self) -> None:
        """Ends the reading."""
        self._reader.shutdown(cancel_futures=True)

    def _take(self, state: State, number: int) -> CohortsAhead:
        prepared, self._next = self._next, None
        if prepared is not None and prepared[0] == number:
            found, standing = prepared[1].result()
        else:
            found, standing = self._read(self._stands(state) if self.ahead else state, number)
        if self.ahead:
            self._standing = standing
        return found

    def _stands(self, state: State) -> Any:
        """What a draw ahead depends on, on one device: a draw of several would get in the way of the rounds'."""
        if self._standing is None and self._follows:
            self._standing = parallel.fetched(_counted(state, algorithm=self._algorithm))
        elif self._standing is None:
            server = _alone(state.server, "landmarks") if hasattr(state.server, "landmarks") else None
            self._standing = State(None, _alone(state.clients, "present"), server, np.int32(0))  # pyright: ignore
        return self._standing

    @in_32_bits
    def _read(self, standing: Any, number: int) -> tuple[CohortsAhead, Any]:
        """The lot from round `number` on, and what the next one's draw depends on."""
        given = self._key, standing, np.int32(number), self._work
        options = {"algorithm": self._algorithm, "mapping": self._population.mapping, "rounds": self._lot}
        if self._follows:
            size = len(self._population.data.num_examples)
            drawn, standing = _draw_one_after_another(*given, **options, size=size)
        else:
            drawn = _draw(*given, **options, ahead=self.ahead)
        drawn = parallel.fetched(drawn)
        # Beyond the last round nothing need be read.
        mask = drawn.mask & (number + np.arange(self._lot) < self._rounds)[:, None]
        return read_cohorts(self._population, number, drawn.index, mask, drawn.weights), standing


def _alone(value: Any, name: str) -> Any:
    """A NamedTuple with None for all but one of its arrays, which is fetched."""
    return type(value)(**{**dict.fromkeys(value._fields), name: parallel.fetched(getattr(value, name))})


@parallel.kept_program(static_argnames="algorithm")
def _counted(state: State, *, algorithm: Any) -> Any:
    return algorithm.standing(state)


@parallel.kept_program(static_argnames=("algorithm", "mapping", "rounds", "ahead"))
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


@parallel.kept_program(static_argnames=("algorithm", "mapping", "rounds", "size"), donate_argnames="standing")
def _draw_one_after_another(
    rng_key: Array,
    standing: Any,
    start: Any,
    work: Any,
    *,
    algorithm: Any,
    mapping: ClientMapping,
    rounds: int,
    size: int,
) -> tuple[Selection, Any]:
    """As `_draw`, each after what the one before has changed; and what is left for the next."""

    def one(standing: Any, number: Array) -> tuple[Any, Selection]:
        selection, standing = algorithm.draw(jax.random.fold_in(rng_key, number), standing)
        return standing, parallel.deal(selection, size, mapping, work)

    standing, drawn = jax.lax.scan(one, standing, start + jnp.arange(rounds, dtype=jnp.int32))
    return drawn, standing


def waiting(stream: Stream | None, history: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The share of the rounds' seconds in which the devices waited for rows from disk, if there was any."""
    waited = 0.0 if stream is None else stream.waited
    return {"waiting": waited / max(float(np.sum(history.get("seconds", 0.0))), 1e-9)} if waited else {}
