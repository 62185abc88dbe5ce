"""Clients that join and leave during a run: the schedule, its check, and what it does to a state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import parallel
from fedjax_cluster.cohorts import cohort_size
from fedjax_cluster.data.stored import rows_of_client
from fedjax_cluster.types import Churn, ClientData, ClusteredAlgorithm, Population, State


class Schedule:
    """Who joins and leaves when, in the order of the rounds.

    A client whose first entry is a join is absent until then. Its data are among the population's rows all the time.

    Raises:
      ValueError: a client there is not, one who joins though present or leaves though absent, or a method that admits
        nobody during a run.
    """

    def __init__(self, changes: Sequence[Churn], algorithm: ClusteredAlgorithm, num_examples: Any):
        self.changes = tuple(
            Churn(int(round_number), tuple(map(int, join)), tuple(map(int, leave)))
            for round_number, join, leave in sorted(changes, key=lambda change: change.round)
        )
        count, have_data = len(num_examples), np.asarray(num_examples) > 0
        first = first_joins(self.changes)
        self.absent = np.asarray([client in first for client in range(count)])
        present = have_data & ~self.absent
        if have_data.any() and not present.any():
            raise ValueError("nobody is there before the first join; let at least one client be there from the start")
        for change in self.changes:
            if change.round < 0:
                raise ValueError(f"churn names round {change.round}; rounds are counted from 0")
            for client in (*change.join, *change.leave):
                if not 0 <= client < count:
                    raise ValueError(f"churn names client {client}; the federation has clients 0 to {count - 1}")
            for client in change.leave:
                if not present[client]:
                    raise ValueError(f"client {client} cannot leave before round {change.round}: it is not there then")
                present[client] = False
            for client in change.join:
                if present[client] or not have_data[client]:
                    why = "it is there already" if present[client] else "it has no training examples"
                    raise ValueError(f"client {client} cannot join before round {change.round}: {why}")
                present[client] = True
            if not present.any():
                raise ValueError(f"nobody is left before round {change.round}; keep at least one client")
        if algorithm.admit is None and any(change.join for change in self.changes):
            raise ValueError(f"{algorithm.name} admits no client during a run; leave the joins out of churn")
        self._algorithm = algorithm

    def check_state(self, state: State) -> None:
        """Raises a ValueError where those who are left are not who the method, as it has begun, can go on with."""
        self._check_landmarks(state)
        there, check = ~self.absent, getattr(self._algorithm, "check_present", None)
        if check is None:
            return
        stayed = there.copy()
        for change in self.changes:
            there[list(change.join)], there[list(change.leave)] = True, False
            stayed[list(change.leave)] = False
            check(state, there, stayed)

    def _check_landmarks(self, state: State) -> None:
        """Of so many landmarks that leave the method cannot go by them any more."""
        least = getattr(self._algorithm, "fewest_landmarks", 0)
        landmarks = getattr(state.server, "landmarks", None)
        if landmarks is None or not self.changes:
            return
        theirs = set(np.asarray(parallel.fetched(landmarks)).tolist())
        there, clients = theirs.copy(), int((~self.absent).sum())
        for place, change in enumerate(self.changes):
            there = (there - set(change.leave)) | (theirs & set(change.join))
            clients += len(change.join) - len(change.leave)
            if change.round not in [later.round for later in self.changes[place + 1 :]]:
                self._check_cohort(change.round, len(there), clients)
            if len(there) < least:
                raise ValueError(
                    f"before round {change.round} {len(there)} of the landmarks {sorted(theirs)} are there, but "
                    f"{self._algorithm.name} needs {least}; give more landmarks, or keep them from leaving"
                )

    def _check_cohort(self, number: int, landmarks: int, clients: int) -> None:
        """Of cohorts that are clustered the landmarks are drawn first: all of them, or some would never be again."""
        until = getattr(self._algorithm, "cluster_until", None)
        if not getattr(self._algorithm, "joined_late", False) or (until is not None and number >= until):
            return
        cohort = cohort_size(getattr(self._algorithm, "participation", 1.0), clients)
        if landmarks > cohort:
            raise ValueError(
                f"before round {number} {landmarks} landmarks are there, but a cohort of the {clients} clients has "
                f"only {cohort}; give fewer landmarks or a larger participation, or let fewer clients leave"
            )

    def start(self, population: Population) -> Population:
        """The population as `init` sees it: those who join later have no examples yet."""
        if not self.absent.any():
            return population
        padded = np.zeros(len(population.data.num_examples), bool)
        padded[: len(self.absent)] = self.absent
        count = np.where(padded, 0, np.asarray(population.data.num_examples)).astype(np.int32)
        held = population.data.num_examples
        data = population.data._replace(num_examples=parallel.processes.put(count, getattr(held, "sharding", None)))
        return dataclasses.replace(population, data=data)

    def next_after(self, done: int) -> float:
        """The first round beyond `done` before which somebody joins or leaves."""
        return min((change.round for change in self.changes if change.round > done), default=float("inf"))

    def due(self, done: int) -> tuple[Churn, ...]:
        return tuple(change for change in self.changes if change.round == done)

    def apply(self, rng_key: Array, state: State, data: ClientData, done: int) -> State:
        """The state after the joins and leaves before round `done`.

        It is fetched: operations one by one on arrays divided among devices could hang. `data` are all clients'
        training rows.
        """
        state = parallel.fetched(state)
        for change in self.due(done):
            gone = np.asarray(change.leave, np.int32)
            clients = state.clients
            membership, present = np.array(clients.membership), np.array(clients.present)
            membership[gone], present[gone] = 0.0, False
            state = state._replace(clients=clients._replace(membership=membership, present=present))
            if (recounted := getattr(self._algorithm, "recounted", None)) is not None:
                state = jax.device_get(recounted(state))
            for client in change.join:
                rows = rows_of_client(data, client)
                key = jax.random.fold_in(jax.random.fold_in(rng_key, done), client)
                index = jnp.asarray(client, jnp.int32)
                state = jax.device_get(_admit(key, state, rows, index, algorithm=self._algorithm))
        return state


def first_joins(changes: Sequence[Churn]) -> set[int]:
    """The clients whose first entry, of changes in the order of their rounds, is a join."""
    left: set[int] = set()
    joined: set[int] = set()
    for change in changes:
        left |= set(change.leave) - joined
        joined |= set(change.join) - left
    return joined


def fewest_present(changes: Sequence[Churn], num_examples: Any, rounds: int) -> int:
    """The fewest clients with examples that are there in any of the rounds.

    >>> fewest_present([Churn(2, join=(0,)), Churn(1, leave=(1,)), Churn(9, leave=(2,))], [5, 5, 5, 0], rounds=4)
    1
    """
    changes = sorted(changes, key=lambda change: change.round)
    there = set(np.flatnonzero(np.asarray(num_examples) > 0).tolist()) - first_joins(changes)
    numbers = {0: len(there)}
    for change in changes:
        if change.round < rounds:
            there = (there - set(change.leave)) | set(change.join)
            numbers[max(change.round, 0)] = len(there)
    return min(numbers.values())


@parallel.kept_program(static_argnames="algorithm")
def _admit(rng_key: Array, state: State, data: ClientData, index: Array, *, algorithm: ClusteredAlgorithm) -> State:
    assert algorithm.admit is not None  # by `Schedule`
    return algorithm.admit(rng_key, state, data, index)
