"""Whether a method of one's own does what its options say of the mean; one that forgets it runs all the same."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import jax

from fedjax_cluster import parallel
from fedjax_cluster.algorithms.method import Method
from fedjax_cluster.data.stored import stored
from fedjax_cluster.types import ClusteredAlgorithm, Population, State

ADVICE = {"aggregation": "aggregation=self.aggregation", "privacy": "private=self.private(rng_key, state.clusters)"}
OURS = __name__.partition(".")[0]


class _Heeded(Exception):
    """The option was used."""


class _Alarm:
    """Raises `_Heeded` as soon as it is called or one of its attributes is read."""

    def __getattr__(self, _: str) -> Any:
        raise _Heeded

    def __call__(self, *_: Any) -> Any:
        raise _Heeded


def check_heeded(algorithm: ClusteredAlgorithm, rng_key: jax.Array, state: State, population: Population) -> None:
    """Raises a ValueError where the step of a method that is not ours never uses its aggregation or its privacy.

    A round is traced for it, not computed.
    """
    if not isinstance(algorithm, Method) or type(algorithm).__module__.partition(".")[0] == OURS:
        return
    for name in ADVICE:
        given = getattr(algorithm, name, None)
        if given is not None and not stored(population.data) and not _uses(algorithm, name, rng_key, state, population):
            what = "privacy" if name == "privacy" else f"aggregation {given}"
            raise ValueError(
                f"{what} is given, but the step of {algorithm.name} never uses it: pass {ADVICE[name]} to "
                "cluster_round, or give none"
            )


def _uses(algorithm: Method, name: str, rng_key: jax.Array, state: State, population: Population) -> bool:
    watched = copy.copy(algorithm)
    # The server's optimiser reads the privacy as well, for its clip.
    object.__setattr__(watched, "private" if name == "privacy" else name, _Alarm())

    def one_round(rng_key: jax.Array, state: State, population: Population) -> Any:
        cohort = parallel.gather_cohort(population, watched.select(rng_key, state))
        return watched.step(rng_key, state, cohort)

    with contextlib.suppress(_Heeded):
        jax.eval_shape(one_round, rng_key, state, population)
        return False
    return True
