"""Landmark clients that train before all others of their cohort, so that these can be compared with them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from fedjax_cluster import parallel
from fedjax_cluster.parallel import Client
from fedjax_cluster.types import Cohort, Population, Selection

LOG = logging.getLogger(__name__)


def heard_landmarks(
    ask: Callable[[Client], Any], landmarks: Array, cohort: Cohort, everybody: bool
) -> tuple[Array, Array, Array]:
    """What the landmarks i32[m] of the cohort show, f32[m, d̂], who of them was heard, bool[m], and who was there.

    With `everybody` all who are there were heard, whatever they show.
    """
    rows, index, mask = len(cohort.mask), cohort.index, cohort.mask
    if cohort.in_place:
        where, there = landmarks, mask[landmarks]
    else:
        index, mask = parallel.to_each_device((index, mask), cohort.mapping)
        itself = (landmarks[:, None] == index[None]) & mask[None]
        where, there = jnp.argmax(itself, 1).astype(jnp.int32), itself.any(1)
    chosen = Selection(jnp.where(there, where, rows), there)
    if len(landmarks) == rows:  # which stay in place
        chosen = Selection(jnp.arange(rows, dtype=jnp.int32), jnp.zeros(rows, bool).at[chosen.index].set(there))
    among = Population(cohort.data, None, cohort.mapping, None, cohort.placement)  # pyright: ignore[reportArgumentType]
    own = parallel.gather_cohort(among, chosen)
    place = own.index
    own = dataclasses.replace(own, index=index.at[place].get(mode="fill", fill_value=rows))
    mapped = parallel.for_each_client(ask, own, collect=lambda shown: shown)
    columns = jnp.concatenate(mapped.collected[0], axis=1)
    those, place = parallel.to_each_device((own.mask if everybody else mapped.accepted, place), cohort.mapping)
    itself = (where[:, None] == place[None]) & those[None] & there[:, None]
    return columns[jnp.argmax(itself, 1)], itself.any(1), there


def check_landmarks(number: int | None, there: int, num_clusters: int, cohort: int | None) -> None:
    """Raises a ValueError where landmarks are too few for the clusters, or too many for the clients or a cohort.

    Without landmarks, None, where the clients of a cohort that are clustered alone are too few.
    """
    if number is None:
        if cohort is not None and cohort < num_clusters:
            raise ValueError(
                f"clusters is {num_clusters}, but cluster_cohort clusters cohorts, of {cohort} clients: give a "
                "participation that draws more, or leave cluster_cohort out"
            )
        return
    if number < num_clusters:
        raise ValueError(f"landmarks is {number}, but clusters is {num_clusters}; give at least {num_clusters}")
    whose, most = ("there are", there) if cohort is None else ("a cohort has", cohort)
    if number > most:
        raise ValueError(f"landmarks is {number}, but {whose} only {most} clients; give at most {most}, or None")
    if number == most < there:
        LOG.warning(
            f"landmarks is {number}, as many as a cohort has clients: others are never in a clustering round; "
            f"give at most {most - 1}"
        )
