"""Clients of a finished run that stand out: who moved, who holds copies, whose update is like no cluster's.

All clients train once from one and the same model, drawn anew, which no client has spoilt. What they send of it is
compared with the medians of the clusters that the run found, coordinate by coordinate, and its length with theirs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_cluster import parallel, tree
from fedjax_cluster.algorithms.round import init_clusters
from fedjax_cluster.clustering import robust_deviations
from fedjax_cluster.data.stored import stored
from fedjax_cluster.faults import spoilt
from fedjax_cluster.local import client_key
from fedjax_cluster.marked_clients import shown_rows
from fedjax_cluster.parallel import Client
from fedjax_cluster.types import ClientData, LocalUpdate, Model, Population, Variables

THRESHOLD = 3.5  # robust deviations (Iglewicz and Hoaglin 1993, Sec. 3.4)
MANY_MOVES = 2  # more than the median
LATE, FEW = 0.5, 0.1  # a move in this last part of the rounds, where no more than so many clients have one
COPIED, USUAL = 0.5, 0.25  # share of rows that another client has, and the median above which that is usual
FAR = 0.5  # of the median cosine
LONG = 2.0  # times the median length, or its inverse
MOST_PAIRED = 500  # clients whose lengths and rows are compared in pairs
LEAST_MEMBERS = 3  # of a cluster whose median tells something of each
LEAST_CLIENTS = 8  # of whom a median tells who is unlike the others
SKETCH_WIDTH, SKETCH_NUMBERS = 4096, 2**24  # numbers kept of an update, and of those of all clients
MOST_BYTES, BLOCK_BYTES = 2**31, 2**26  # of rows that are compared with each other, and of those at a time

_robust_deviations = parallel.kept_program()(robust_deviations)


class Outliers(NamedTuple):
    """What tells of each client; see `reasons`."""

    moves: np.ndarray  # i32[M], changes of the cluster
    last_move: np.ndarray  # i32[M], rounds done then; −1 where there was none
    rounds: int
    copies: np.ndarray | None  # f32[M], share of its rows that another client has too; None: not compared
    twin: np.ndarray | None  # i32[M], the client that has most of them; −1 for none
    length: np.ndarray | None = None  # f32[M], of the update; NaN where it is not finite
    nearest: np.ndarray | None = None  # f32[M], largest cosine of the update with a cluster's median; NaN for none
    nearest_cluster: np.ndarray | None = None  # i32[M]
    own: np.ndarray | None = None  # f32[M], the cosine with its own cluster's; NaN for one of fewer than three clients
    cluster: np.ndarray | None = None  # i32[M]
    shown: np.ndarray | None = None  # f32[M], as `nearest`, of an update from the rows that it shows to clusterings
    examples: np.ndarray | None = None  # i32[M], of which longer updates come, where local training counts epochs

    @property
    def not_compared(self) -> tuple[str, ...]:
        """What nothing is known of: "rows", which may be copies, and "updates"."""
        parts = {"rows": self.copies, "updates": self.length}
        return tuple(name for name, found in parts.items() if found is None)

    def reasons(self) -> dict[int, list[str]]:
        """The clients that stand out, in their order, and in which respects.

        A client stands out that moved between clusters twice more than the median client, or in the last half of the
        rounds when no more than a tenth did; of whose rows half are another client's too, where that is not usual;
        whose update is not finite where most others' are; whose update is more than twice or less than half as long as
        the median, which its number of rows does not explain; or whose cosine with the nearest cluster, or with its
        own, is less than half the median. Lengths, cosines and numbers of moves must be 3.5 robust deviations from the
        median as well.
        """
        told: dict[int, list[str]] = {}
        for client, reason in (*self._moved(), *self._copied(), *self._far()):
            told.setdefault(client, []).append(reason)
        return dict(sorted(told.items()))

    def _moved(self) -> list[tuple[int, str]]:
        usual = float(np.median(self.moves)) if len(self.moves) else 0.0
        often = (_deviations(self.moves) > THRESHOLD) & (self.moves >= usual + MANY_MOVES)
        late = self.last_move > (1 - LATE) * self.rounds
        late &= late.mean() <= FEW
        return [
            (client, f"moved {_times(self.moves[client])}, last in round {self.last_move[client]}; median {usual:g}")
            for client in np.flatnonzero(often | late).tolist()
        ]

    def _copied(self) -> list[tuple[int, str]]:
        if self.copies is None or self.twin is None or np.median(self.copies) > USUAL:
            return []
        return [
            (client, f"{100 * self.copies[client]:.0f} % of its rows are also those of client {self.twin[client]}")
            for client in np.flatnonzero(self.copies >= COPIED).tolist()
        ]

    def _far(self) -> list[tuple[int, str]]:
        if self.length is None:
            return []
        broken = np.isnan(self.length)
        # Where most are, the run diverged, and it is nobody's fault.
        found = [(i, "its update is not finite") for i in np.flatnonzero(broken & (broken.mean() < 0.5)).tolist()]
        sent = self.length > 0
        factor = np.where(sent, self.length / (np.median(self.length[sent]) if sent.any() else 1.0), 1.0)
        away = _other_length(factor, sent)
        if self.examples is not None:
            away &= _other_length(factor / usual_lengths(factor, sent, self.examples), sent)
        found += [
            (i, f"its update is {factor[i]:.2g} times as long as the median") for i in np.flatnonzero(away).tolist()
        ]
        if self.nearest is None or self.own is None or self.nearest_cluster is None or self.cluster is None:
            return found
        far = _low(self.nearest)
        for i in np.flatnonzero(far).tolist():
            found.append((i, f"its update is like no cluster's: the largest cosine is {self.nearest[i]:.2f}"))
        elsewhere = _low(self.own) & (self.nearest_cluster != self.cluster) & ~far
        for i in np.flatnonzero(elsewhere).tolist():
            like = f"like cluster {self.nearest_cluster[i]}'s, cosine {self.nearest[i]:.2f}"
            found.append((i, f"its update is {like}, and not like its own cluster's, {self.own[i]:.2f}"))
        if self.shown is not None:
            for i in np.flatnonzero(_low(self.shown) & ~far).tolist():
                found.append(
                    (i, f"the rows that it shows are like no cluster's: the largest cosine is {self.shown[i]:.2f}")
                )
        return found


def _deviations(values: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """`robust_deviations`, in one program for all that is looked at."""
    known = np.ones(len(values), bool) if mask is None else mask
    return np.asarray(_robust_deviations(values.astype(np.float32), known))


def _other_length(factor: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """bool[M]: which are far from 1, of those that sent something."""
    return (np.abs(_deviations(np.log(factor), sent)) > THRESHOLD) & ((factor > LONG) | (factor < 1 / LONG))


def usual_lengths(length: np.ndarray, sent: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """f32[M]: lengths to expect of so many rows, c·rowsᵖ: where local training counts epochs, more rows are more steps.

    p is the median slope of pairs of clients, on logarithms (Sen 1968); c leaves half of the lengths below.
    """
    rows = np.maximum(examples, 1.0)
    log_length, log_rows = np.log(length[sent]), np.log(rows[sent])
    if not len(log_length):
        return np.ones(len(length), np.float32)
    first, second = np.triu_indices(min(len(log_rows), MOST_PAIRED), 1)
    apart = log_rows[second] - log_rows[first]
    slopes = (log_length[second] - log_length[first])[apart != 0] / apart[apart != 0]
    slope = np.clip(np.median(slopes), 0.0, 1.0) if len(slopes) else 0.0
    level = np.median(log_length - slope * log_rows)
    return np.exp(level + slope * np.log(rows)).astype(np.float32)


def _low(cosine: np.ndarray) -> np.ndarray:
    """bool[M]: which are far below the median, where there is agreement at all."""
    known = np.isfinite(cosine)
    usual = float(np.median(cosine[known])) if known.any() else 0.0
    filled = np.where(known, cosine, usual)
    return known & (_deviations(filled, known) < -THRESHOLD) & (filled < FAR * usual)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def outliers(
    algorithm: Any,
    train: ClientData,
    labels: np.ndarray,
    assignments: tuple[Any, Any],
    rng_key: Array,
    population: Callable[[], Population],
) -> Outliers:
    """What tells of each client of a run; of a population on disk no more than its moves, of seven clients no updates.

    Args:
      algorithm: the method, whose model all clients train by its `local`, where it has one.
      train: all clients' training rows.
      labels: i32[M], their clusters at the end; −1 for none.
      assignments: rounds done i32[E], and the clusters then, i32[E, M].
      rng_key: draws the model and the mini-batches.
      population: the clients on the devices.
    """
    rounds, cluster = (np.asarray(each) for each in assignments)
    changed = cluster[1:] != cluster[:-1]
    # Joining is no move.
    changed &= (cluster[1:] >= 0) & (cluster[:-1] >= 0)
    last = np.max(np.where(changed, rounds[1:, None], -1), axis=0, initial=-1)
    of_moves = (changed.sum(0).astype(np.int32), last.astype(np.int32), int(rounds[-1]))
    update, shown = _without_chance(getattr(algorithm, "local", None)), shown_rows(train)
    if stored(train):
        return Outliers(*of_moves, None, None)
    copies = shared_rows(shown) if np.asarray(train.x).nbytes <= MOST_BYTES else (None, None)
    if update is None or np.sum(np.asarray(train.num_examples) > 0) < LEAST_CLIENTS:
        return Outliers(*of_moves, *copies)
    everybody, count = population(), len(labels)
    width = max(64, min(SKETCH_WIDTH, SKETCH_NUMBERS // count))
    # As most methods draw theirs, whose program is then there already.
    number = getattr(algorithm, "clusters", 1)
    draw = parallel.compile_quickly(init_clusters, static_argnames=("model", "info", "num_clusters"))
    drawn = draw(rng_key, algorithm.model, everybody.info, number if isinstance(number, int) else 1)
    start = jax.tree.map(lambda leaf: parallel.fetched(leaf)[0], Variables(drawn.params, drawn.stats))
    buckets = Buckets.drawn(tree.size(start.params), width)
    train_all = parallel.compile_quickly(_train_all, static_argnames=("update", "model", "width", "of_shown"))
    number = _fastest_round(update, int(rounds[-1]))
    train_all = functools.partial(
        train_all, rng_key, everybody, start, buckets, number, update=update, model=algorithm.model
    )
    direction, length = (each[:count] for each in parallel.fetched(train_all(width=width)))
    length = np.where(np.asarray(train.num_examples) > 0, length, 0.0)
    centre, clusters = cluster_medians(direction, np.where(length > 0, labels, -1))
    cosine = direction @ centre.T
    rows = np.asarray(train.num_examples)
    found = Outliers(*of_moves, *copies, length, examples=rows if len(set(rows.tolist())) > 1 else None)
    if not len(clusters):
        return found
    known = np.where(length > 0, 1.0, np.nan)
    own = np.full(count, np.nan, np.float32)
    for place, cluster in enumerate(clusters):
        own[labels == cluster] = cosine[labels == cluster, place]
    found = found._replace(
        nearest=known * cosine.max(1), nearest_cluster=clusters[cosine.argmax(1)], own=known * own, cluster=labels
    )
    if shown is train:
        return found
    seen = parallel.fetched(train_all(width=width, of_shown=True)[0])[:count]
    return found._replace(shown=np.max(seen @ centre.T, axis=1))


def _fastest_round(update: Any, rounds: int) -> int:
    """The first round of the largest learning rate: nobody goes anywhere at the rate 0 of a warm-up."""
    if getattr(update, "schedule", None) is None:
        return 0
    return int(np.argmax(jax.lax.map(update.schedule, jnp.arange(max(rounds, 1)))))


def _without_chance(update: Any) -> Any:
    """The local update in which a faulty client's change is lost always or never: a chance tells of no client."""
    fault = getattr(update, "fault", None)
    if isinstance(fault, spoilt) and fault.lost < 1:
        update = dataclasses.replace(update, fault=dataclasses.replace(fault, lost=0.0))
    return update


class Buckets(NamedTuple):
    """Where each entry of a vector goes in its sketch, and with which sign."""

    place: np.ndarray  # i32[d]
    sign: np.ndarray  # f32[d]

    @classmethod
    def drawn(cls, length: int, width: int) -> Buckets | None:
        """None for vectors that are no longer than their sketches."""
        rng = np.random.default_rng(0)
        if length <= width:
            return None
        return cls(
            rng.integers(0, width, length, np.int32), np.where(rng.random(length) < 0.5, -1, 1).astype(np.float32)
        )


def sketch(vector: Array, buckets: Buckets | None, width: int) -> Array:
    """f32[width]: sums of entries with random signs, of which inner products are those of the vectors on average.

    The error of a cosine is about 1/√width (Charikar et al. 2002); vectors no longer than that are kept as they are.
    """
    if buckets is None:
        return jnp.pad(vector, (0, width - len(vector)))
    return jnp.zeros(width).at[buckets.place].add(vector * buckets.sign)


def _train_all(
    rng_key: Array,
    population: Population,
    start: Variables,
    buckets: Buckets | None,
    number: Array | int,
    *,
    update: LocalUpdate,
    model: Model,
    width: int,
    of_shown: bool = False,
) -> tuple[Array, Array]:
    """Sketches f32[M, width] of the directions of clients' updates, and their lengths f32[M], NaN where not finite.

    All train from one model, at the rate of a round i32[]; `of_shown`, honestly on the rows that clusterings see.
    """

    def train(client: Client) -> tuple[Array, Array]:
        data = shown_rows(client.data) if of_shown else client.data
        result = update.run(client_key(rng_key, client.index), model, start, data, round=number)
        change = tree.ravel(result.delta).astype(jnp.float32)
        # By the largest entry, so that squares do not overflow.
        largest = jnp.max(jnp.abs(change))
        change = change / jnp.maximum(largest, 1e-30)
        norm = jnp.linalg.norm(change)
        return sketch(change / jnp.maximum(norm, 1e-30), buckets, width), norm * largest

    mapped = parallel.for_each_client(train, parallel.whole_population(population), collect=lambda found: found)
    direction, length = mapped.collected
    finite = jnp.isfinite(length) & jnp.all(jnp.isfinite(direction), 1)
    return jnp.where(finite[:, None], direction, 0.0), jnp.where(finite, length, jnp.nan)


def cluster_medians(directions: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f32[K, d], coordinate by coordinate and of length 1, and the clusters i[K], of those that have three clients.

    Args:
      directions: f32[M, d].
      labels: i[M], −1 for a client that has no part in a median.
    """
    clusters, count = np.unique(labels[labels >= 0], return_counts=True)
    clusters = clusters[count >= LEAST_MEMBERS]
    centre = np.zeros((len(clusters), directions.shape[1]), np.float32)
    for place, cluster in enumerate(clusters):
        centre[place] = np.median(directions[labels == cluster], axis=0)
    return centre / np.maximum(np.linalg.norm(centre, axis=1, keepdims=True), 1e-30), clusters


def shared_rows(train: ClientData) -> tuple[np.ndarray, np.ndarray]:
    """f32[M], the share of each client's rows that another has too, and i32[M], who has most of them.

    Rows are equal where input and target are, byte by byte.
    """
    number = np.asarray(train.num_examples)
    clients, length = len(number), np.shape(train.x)[1]
    owner = np.repeat(np.arange(clients, dtype=np.int32), length)
    own = (np.arange(length) < number[:, None]).reshape(-1)
    rows = _hashes(np.asarray(train.x), 0) + _hashes(np.asarray(train.y), 1)
    owner, rows = owner[own], rows[own]
    _, same = np.unique(rows, return_inverse=True)
    # Each client counts once where it has a row several times.
    pairs = np.unique(np.stack([same, owner], 1), axis=0)
    holders = np.bincount(pairs[:, 0], minlength=same.max(initial=-1) + 1)
    shared = holders[same] > 1
    share = np.bincount(owner[shared], minlength=clients) / np.maximum(number, 1)
    twin = np.full(clients, -1, np.int32)
    if np.median(share) > USUAL:
        return share.astype(np.float32), twin
    pairs = pairs[holders[pairs[:, 0]] > 1]
    first = np.searchsorted(pairs[:, 0], np.arange(len(holders)))
    for client in np.flatnonzero(share >= COPIED).tolist():
        held = np.unique(same[shared & (owner == client)]).tolist()
        others = np.concatenate([pairs[first[row] : first[row] + holders[row], 1] for row in held])
        twin[client] = np.bincount(others[others != client]).argmax()
    return share.astype(np.float32), twin


def _hashes(leaf: np.ndarray, salt: int) -> np.ndarray:
    """u64[M·N]: a number for each row of [M, N, ...], which two different rows have in common with a chance of 2⁻⁶⁴."""
    rows = np.ascontiguousarray(leaf.reshape(leaf.shape[0] * leaf.shape[1], -1)).view(np.uint8)
    rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4))).view(np.uint32)
    odd = np.random.default_rng(salt).integers(0, 2**63, rows.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)

    def of_block(block: np.ndarray) -> np.ndarray:
        words = block.astype(np.uint64)
        # Mixed first: many a float ends in zeros, which a sum of multiples would keep.
        return ((words * np.uint64(0x9E3779B97F4A7C15)) ^ (words >> np.uint64(15))) @ odd

    size = max(1, BLOCK_BYTES // max(1, rows.nbytes // max(1, len(rows))))
    blocks = [of_block(rows[at : at + size]) for at in range(0, len(rows), size)]
    return np.concatenate(blocks) if blocks else np.zeros(0, np.uint64)
