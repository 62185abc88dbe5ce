"""A method of one's own: what its `init` gives, and whether its rounds do what its options say of the mean."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import jax

from fedjax_cluster import parallel
from fedjax_cluster.algorithms.method import Method
from fedjax_cluster.data.stored import stored
from fedjax_cluster.privacy.gaussian import SHOWN
from fedjax_cluster.types import ClusteredAlgorithm, Population, RoundInfo, State

ADVICE = {"aggregation": "aggregation=self.aggregation", "privacy": "private=self.private(rng_key, state.clusters)"}
OURS = __name__.partition(".")[0]


def is_ours(algorithm: ClusteredAlgorithm) -> bool:
    return type(algorithm).__module__.partition(".")[0] == OURS


class _Heeded(Exception):
    """The option was used."""


class _Alarm:
    """Raises `_Heeded` as soon as it is called or one of its attributes is read."""

    def __getattr__(self, _: str) -> Any:
        raise _Heeded

    def __call__(self, *_: Any) -> Any:
        raise _Heeded

    def __eq__(self, _: object) -> bool:
        raise _Heeded

    __hash__ = object.__hash__


def checked_start(algorithm: ClusteredAlgorithm, given: Any, population: Population) -> tuple[State, RoundInfo]:
    """What a method's `init` gave.

    Raises:
      ValueError: something else than a state and what is told of it, or clients whose clusters are not M × K shares.
    """
    name = algorithm.name
    if type(given) is not tuple or len(given) != 2 or not isinstance(given[0], State):
        kinds = (
            f"two, {', '.join(type(each).__name__ for each in given)}" if type(given) is tuple else type(given).__name__
        )
        raise ValueError(
            f"init of {name} returns {kinds}; it must return (State, RoundInfo), as rounds.first_state does"
        )
    state: State = given[0]
    lacking = [each for each in ("membership", "present") if not hasattr(state.clients, each)]
    if lacking:
        raise ValueError(
            f"init of {name} gives clients without {' and '.join(lacking)}; keep rounds.HardClients, or a NamedTuple "
            "of its fields and your own"
        )
    if state.clients.present.dtype != bool:
        raise ValueError(f"init of {name} gives present as {state.clients.present.dtype}; it is bool[M]")
    if (begun := int(parallel.fetched(state.round))) != 0:
        raise ValueError(f"init of {name} gives round {begun}; a run begins at round 0")
    wanted = len(population.data.num_examples), len(state.clusters.active)
    if state.clients.membership.shape != wanted:
        raise ValueError(
            f"init of {name} gives membership of shape {state.clients.membership.shape}; of {wanted[0]} clients and "
            f"{wanted[1]} clusters it is {wanted}"
        )
    return given


@contextlib.contextmanager
def hint_of_tracing(algorithm: ClusteredAlgorithm) -> Iterator[None]:
    """Adds to JAX's error, where a step asks for the value of what is traced, what to write instead."""
    try:
        yield
    except jax.errors.JAXTypeError as error:
        error.add_note(
            f"The step of {algorithm.name} is traced once for all rounds: state.round, and all that is computed of the "
            "state and the cohort, have no value yet. In place of `if` use jnp.where or jax.lax.cond, in place of "
            "numpy jax.numpy."
        )
        raise


def check_heeded(algorithm: ClusteredAlgorithm, rng_key: jax.Array, state: State, population: Population) -> None:
    """Raises a ValueError where the step of a method that is not ours never uses its aggregation or its privacy.

    A round is traced for it, not computed.
    """
    if not isinstance(algorithm, Method) or is_ours(algorithm):
        return
    for name in ADVICE:
        given = getattr(algorithm, name, None)
        if given is not None and not stored(population.data) and not _uses(algorithm, name, rng_key, state, population):
            what = "privacy" if name == "privacy" else f"aggregation {given}"
            raise ValueError(
                f"{what} is given, but the step of {algorithm.name} never uses it: pass {ADVICE[name]} to "
                "cluster_round, or give none"
            )
    shows = algorithm.privacy is not None and algorithm.sends == SHOWN and not stored(population.data)
    if shows and not _shows(algorithm, rng_key, state, population):
        raise ValueError(
            f"privacy is given, and sends of {algorithm.name} is SHOWN, but nothing of it is noised: show "
            "the server self.privacy.shown(client_key(rng_key, client.index), ...) of what it clusters by"
        )


def _uses(algorithm: Method, name: str, rng_key: jax.Array, state: State, population: Population) -> bool:
    watched = copy.copy(algorithm)
    # The server's optimiser reads the privacy as well, for its clip.
    object.__setattr__(watched, "private" if name == "privacy" else name, _Alarm())
    return _heeds(watched, rng_key, state, population)


def _shows(algorithm: Method, rng_key: jax.Array, state: State, population: Population) -> bool:
    """Whether what clients show is noised in a round, or at the start, which is done again for it."""
    watched, mechanism = copy.copy(algorithm), copy.copy(algorithm.privacy)
    # Of a class of its own, it is equal to none whose programs are compiled already.
    object.__setattr__(mechanism, "__class__", type("gaussian", (type(mechanism),), {"shown": _Alarm()}))
    object.__setattr__(watched, "privacy", mechanism)
    if _heeds(watched, rng_key, state, population):
        return True
    with contextlib.suppress(_Heeded):
        watched.init(rng_key, population)
        return False
    return True


def _heeds(watched: Method, rng_key: jax.Array, state: State, population: Population) -> bool:
    def one_round(rng_key: jax.Array, state: State, population: Population) -> Any:
        cohort = parallel.gather_cohort(population, watched.select(rng_key, state))
        with hint_of_tracing(watched):
            return watched.step(rng_key, state, cohort)

    with contextlib.suppress(_Heeded):
        jax.eval_shape(one_round, rng_key, state, population)
        return False
    return True
