"""Rows that faulty clients have or show: copies of another group's, and targets the other way round."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_cluster.data.stored import dtype_of, made_anew
from fedjax_cluster.files import digest
from fedjax_cluster.types import ClientData, Federation

STREAM = 0xFA17  # of the seed, so that who is faulty depends on nothing else that is drawn


def copies(federation: Federation, faulty: np.ndarray, group: int, seed: int) -> ClientData:
    """The training rows of all, where each faulty client has a copy of those of a member of the group."""
    members = np.flatnonzero((np.asarray(federation.train.num_examples) > 0) & (np.asarray(federation.group) == group))
    source = np.arange(len(faulty))
    source[faulty] = np.resize(np.random.default_rng([seed, STREAM]).permutation(members), int(faulty.sum()))
    return made_anew(federation.train, lambda _, rows: rows, source=source, told=["copies", digest(source)])


def has_classes(federation: Federation) -> bool:
    return federation.info.num_classes > 1 and np.issubdtype(dtype_of(federation.train.y), np.integer)


def with_reversed(y: Any, those: np.ndarray, federation: Federation) -> np.ndarray:
    """Targets [C, ...], of which those of the clients bool[C] are L − 1 − y; without classes 255 − y (bytes), or −y."""
    y, classes = np.array(y), has_classes(federation)
    pixels = not classes and y.dtype == np.uint8  # in another dtype the losses would not scale them
    if not classes and not pixels and y.dtype.kind == "u":
        y = y.astype(np.int32)
    y[those] = (federation.info.num_classes - 1 if classes else 255 if pixels else 0) - y[those]
    return y
