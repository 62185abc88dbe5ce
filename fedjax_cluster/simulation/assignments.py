"""Who was in which cluster as rounds went on: kept of each round in which somebody moved."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fedjax_cluster.files import UNREADABLE, atomic_file

MOST_KEPT = 4_000_000  # entries; 8 MB


class Assignments(NamedTuple):
    """Clusters of the clients as rounds went on."""

    rounds: np.ndarray  # i32[E], rounds done
    cluster: np.ndarray  # i32[E, M], −1 where a client had none


Kept = Mapping[int, np.ndarray]  # rounds done -> labels i16[M]


def with_moves(kept: Kept, start: int, labels: np.ndarray) -> dict[int, np.ndarray]:
    """What is kept after further rounds: the first round of a run, and each in which a label changed.

    Of very many, every second is left out again, so that moves in between are seen together.

    Args:
      kept: so far.
      start: rounds done before these.
      labels: i16[S, M], after each of them.

    >>> sorted(with_moves({1: np.asarray([0, 0])}, 1, np.asarray([[0, 0], [0, 1], [0, 1]])))
    [1, 3]
    """
    if not len(labels):
        return dict(kept)
    before = kept[max(kept)][None] if kept else labels[:1]
    moved = (labels != np.concatenate([before, labels[:-1]])).any(axis=1)
    moved[0] |= not kept
    all_ = {**kept, **{start + 1 + int(at): np.array(labels[at]) for at in np.flatnonzero(moved)}}
    while len(all_) > 2 and len(all_) * labels.shape[1] > MOST_KEPT:
        rounds = sorted(all_)
        all_ = {at: all_[at] for at in {*rounds[::2], rounds[-1]}}
    return all_


def write_moves(path: pathlib.Path, kept: Kept) -> None:
    """Writes what is kept as a compressed .npz: `rounds` i32[E], `cluster` i16[E, M]."""
    rounds = sorted(kept)
    with atomic_file(path) as beside:
        np.savez_compressed(
            beside, rounds=np.asarray(rounds, np.int32), cluster=np.stack([kept[at] for at in rounds]).astype(np.int16)
        )


def read_moves(path: pathlib.Path, done: int, num_clients: int) -> dict[int, np.ndarray]:
    """What was kept of the first `done` rounds; nothing where the file is missing or damaged: it is only looked at."""
    # Opened here: NumPy leaves a damaged file open.
    with contextlib.suppress(*UNREADABLE), open(path, "rb") as file, np.load(file) as content:
        rounds, cluster = content["rounds"], content["cluster"]
        if cluster.shape == (len(rounds), num_clients):
            return {int(at): row for at, row in zip(rounds, cluster, strict=True) if at <= done}
    return {}
