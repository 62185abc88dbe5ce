"""Who takes part in a round."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedjax_cluster.local import shuffled_rows
from fedjax_cluster.types import Selection

FEW = 16  # where a cohort is this part of the clients at most, the largest are searched for, and not all are sorted
MANY = 2**16  # clients of whom such a cohort is drawn without a random number for each
MOST_TURNS = 32  # in which clients come at random: as many as are wanted, twice over, and then
MORE = 2**14  # clients or those, as who is missing may be rare


def cohort_size(participation: float, num_clients: int) -> int:
    """C = ⌈participation · M⌉, at least one client.

    Raises:
      ValueError: participation outside (0, 1].

    >>> cohort_size(0.1, 25)
    3
    """
    if not 0 < participation <= 1:
        raise ValueError(
            f"participation is {participation}; it is the share of clients in a round, above 0 and up to 1"
        )
    return max(1, math.ceil(participation * num_clients - 1e-9))


def uniform(rng_key: Array, present: Array, participation: float, *, first: Array | None = None) -> Selection:
    """A uniform draw without replacement of ⌈participation · present⌉ clients; of nobody where nobody is present.

    Args:
      rng_key: decides the draw, whatever absent rows follow the clients.
      present: bool[M].
      participation: share of the present clients, in (0, 1].
      first: bool[M], clients who come before all others; None is nobody.

    Returns:
      A Selection of C = ⌈participation · M⌉ rows.
    """
    if participation == 1:
        return in_place(present)
    size = cohort_size(participation, present.shape[0])
    return drawn(rng_key, present, wanted_clients(participation, present), size, first=first)


def wanted_clients(participation: float, present: Array) -> Array:
    """i32[]: ⌈participation · present⌉ of the clients present bool[M], one at least where there is one."""
    return share_of(participation, jnp.sum(present, dtype=jnp.int32), present.shape[0])


def share_of(participation: float, count: Array, most: int) -> Array:
    """⌈participation · n⌉ of each count n, i32, which is `most` at most; static.

    >>> share_of(0.6, jnp.asarray([0, 1, 100_000]), 100_000).tolist()
    [0, 1, 60000]
    """
    # Products of many clients have no digits left in float32 that would tell a whole number from what is above it. So
    # it is looked up how many clients it takes for one more.
    wanted = np.arange(1, cohort_size(participation, most) + 1)
    fewest = np.floor((wanted - 1) / participation).astype(np.int64)
    while (short := np.ceil(participation * fewest - 1e-9) < wanted).any():
        fewest = fewest + short
    return jnp.searchsorted(jnp.asarray(fewest.astype(np.int32)), count, side="right").astype(jnp.int32)


def drawn(rng_key: Array, present: Array, wanted: Array, size: int, *, first: Array | None = None) -> Selection:
    """A uniform draw without replacement of so many clients.

    Args:
      rng_key, present, first: as in `uniform`.
      wanted: i32[], at most `size`.
      size: rows of the selection, static.

    >>> there = jnp.asarray([True, False, True, True])
    >>> selection = drawn(jax.random.key(0), there, jnp.asarray(2), 3)
    >>> selection.mask.tolist(), bool(there[selection.index[:2]].all())
    ([True, True, False], True)
    """
    capacity = present.shape[0]
    if first is None and capacity > MANY and FEW * size <= capacity:
        return _walked(rng_key, present, wanted, size)
    score = jax.random.uniform(rng_key, (capacity,))
    if first is not None:
        score = score + first.astype(jnp.float32)
    score = jnp.where(present, score, -1.0)
    _, index = jax.lax.top_k(score, size)
    mask = jnp.arange(size) < wanted
    if size == capacity:
        return in_place(jnp.zeros(capacity, bool).at[index].set(mask) & present)
    return Selection(jnp.where(mask, index, capacity), mask)


def _walked(rng_key: Array, present: Array, wanted: Array, size: int) -> Selection:
    """The first `wanted` i32[] clients that are present in a random order of all, of which no more is computed."""
    capacity = present.shape[0]
    # So that rows of nobody after the last client change nothing.
    last = jnp.max(jnp.where(present, jnp.arange(1, capacity + 1, dtype=jnp.int32), 1))

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        place, found, _ = carry
        return (found < wanted) & (place < last)

    def walk(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        place, found, index = carry
        client = shuffled_rows(rng_key, place, size, last)
        there = present[client]
        position = jnp.where(there, found + jnp.cumsum(there.astype(jnp.int32)) - 1, size)
        index = index.at[position].set(client, mode="drop")
        return place + size, found + jnp.sum(there.astype(jnp.int32)), index

    nobody = jnp.full(size, capacity, jnp.int32)
    _, found, index = lax.while_loop(unfinished, walk, (jnp.int32(0), jnp.int32(0), nobody))
    mask = jnp.arange(size) < jnp.minimum(wanted, found)
    return Selection(jnp.where(mask, index, capacity), mask)


def with_these_first(selection: Selection, these: Array, there: Array, capacity: int, when: Array) -> Selection:
    """A selection of as many clients out of `capacity`; `when` bool[] holds, `these` i32[m], ascending, come first.

    Those of them who are `there`, bool[m], that is. One that is in place has everybody already.

    >>> drawn = Selection(jnp.asarray([5, 2, 7, 9]), jnp.asarray([True, True, True, False]))
    >>> these, there = jnp.asarray([2, 3, 8]), jnp.asarray([True, True, False])
    >>> with_these_first(drawn, these, there, 9, jnp.asarray(True)).index.tolist()
    [2, 3, 5, 9]
    """
    index, mask = selection.index, selection.mask
    if len(index) == capacity:
        return selection
    place = jnp.minimum(jnp.searchsorted(these, index), len(these) - 1)
    kept = mask & (these[place] != index)
    joined = jnp.concatenate([these.astype(jnp.int32), index])
    order = jnp.argsort(jnp.concatenate([~there, ~kept]), stable=True)[: len(index)]
    return Selection(jnp.where(when, jnp.where(mask, joined[order], capacity), index), mask)


def in_place(mask: Array) -> Selection:
    """A selection as large as the population: row i is client i where `mask` bool[M] holds."""
    capacity = mask.shape[0]
    return Selection(jnp.where(mask, jnp.arange(capacity, dtype=jnp.int32), capacity), mask)


def everybody_when(when: Array, present: Array, selection: Selection) -> Selection:
    """All who are present, bool[M], in a round where `when` bool[] holds, and else a selection of them; in place.

    >>> drawn = Selection(jnp.asarray([2, 3]), jnp.asarray([True, False]))
    >>> [everybody_when(jnp.asarray(due), jnp.ones(3, bool), drawn).mask.tolist() for due in (True, False)]
    [[True, True, True], [False, False, True]]
    """
    chosen = jnp.zeros_like(present).at[selection.index].set(selection.mask, mode="drop")
    return in_place(jnp.where(when, present, chosen))


def cluster_cohort_sizes(participation: float, num_clients: Array, most: int, smallest: int = 3) -> Array:
    """i32[K]: max(⌈ρ·n_k⌉, smallest) clients of every cluster, all of one with fewer (FedGWC, App. A, Eq. 28).

    Args:
      participation: ρ in (0, 1].
      num_clients: i32[K], n_k.
      most: clients of a cluster at most, static.
      smallest: below which a client's losses could be told from the cohort's mean; the paper's 3.

    >>> cluster_cohort_sizes(0.1, jnp.asarray([50, 12, 2]), 64).tolist()
    [5, 3, 2]
    """
    return jnp.minimum(jnp.maximum(share_of(participation, num_clients, most), smallest), num_clients)


def largest_cluster_cohorts(participation: float, num_clients: int, num_clusters: int, smallest: int = 3) -> int:
    """At least as many clients as `cluster_cohort_sizes` asks for, however M clients are divided among K clusters.

    A bound, which no division need reach.

    >>> largest_cluster_cohorts(0.1, 100, 5)
    22
    """
    # Every cluster beyond the first adds a rounding or, where it is small, the least number of clients.
    return min(num_clients, max(cohort_size(participation, num_clients), smallest) + smallest * (num_clusters - 1))


def per_cluster(
    rng_key: Array,
    label: Array,
    size: Array,
    capacity: int,
    *,
    seen: Array | None = None,
    first: tuple[Array, Array] | None = None,
) -> Selection:
    """A draw without replacement from every cluster, of clients seen seldom before others.

    A cluster's next client is drawn among its others with probability ∝ 1/(1 + times seen).

    Args:
      rng_key: decides the draw; a client's chance does not depend on how many absent rows follow it.
      label: i32[M], the cluster of each client; −1 for one that cannot take part.
      size: i32[K], clients to draw from each cluster.
      capacity: rows of the selection, at least the sum of `size`; it may be more than all clients.
      seen: f32[M], how often each client took part; None draws uniformly.
      first: clients i32[m], of whom so many i32[K] of each cluster are drawn, likewise, before all others.

    Returns:
      A Selection of `capacity` rows.

    >>> selection = per_cluster(jax.random.key(0), jnp.asarray([0, 1, 0, -1]), jnp.asarray([1, 1]), 3)
    >>> selection.mask.tolist(), int(selection.index[2])
    ([True, True, False], 4)
    """
    return per_cluster_of(rng_key, standing(label, seen), size, capacity, first=first)


class Standing(NamedTuple):
    """What draws from clusters depend on, of all clients: counted once, and kept up by the draws themselves."""

    label: Array  # i32[M], −1 for one that cannot take part
    seen: Array | None  # f32[M], how often each took part; None where all are drawn alike
    fewest: Array  # f32[], the least of those who can
    number: Array  # i32[], of how many
    last: Array  # i32[], rows up to the last of them: rows of nobody after it change nothing


def standing(label: Array, seen: Array | None = None) -> Standing:
    """Counts all clients, of labels i32[M] and times seen f32[M]."""
    last = jnp.max(jnp.where(label >= 0, jnp.arange(1, len(label) + 1, dtype=jnp.int32), 1))
    return Standing(label, seen, *_fewest(label, seen), last)


def _fewest(label: Array, seen: Array | None) -> tuple[Array, Array]:
    times = jnp.where(label >= 0, jnp.zeros(len(label)) if seen is None else seen, jnp.inf)
    fewest = jnp.min(times)
    return fewest, jnp.sum((times == fewest).astype(jnp.int32))


def seen_once_more(clients: Standing, selection: Selection) -> Standing:
    """After a draw; all are gone through where nobody is left of those seen least.

    >>> before = standing(jnp.asarray([0, 0, 1]), jnp.asarray([2.0, 1.0, 1.0]))
    >>> after = seen_once_more(before, Selection(jnp.asarray([1, 3]), jnp.asarray([True, False])))
    >>> after.seen.tolist(), float(after.fewest), int(after.number)
    ([2.0, 2.0, 1.0], 1.0, 1)
    """
    if clients.seen is None:
        return clients
    index = jnp.where(selection.mask, selection.index, len(clients.seen))
    before = clients.seen.at[index].get(mode="fill", fill_value=jnp.inf)
    number = clients.number - jnp.sum((before == clients.fewest).astype(jnp.int32))
    # Written from what was gathered, so that XLA needs no copy of all clients for it.
    seen = clients.seen.at[index].set(before + 1.0, mode="drop")
    anew = functools.partial(_fewest, clients.label, seen)
    fewest, number = lax.cond(number > 0, lambda: (clients.fewest, number), anew)
    return clients._replace(seen=seen, fewest=fewest, number=number)


def per_cluster_of(
    rng_key: Array, clients: Standing, size: Array, capacity: int, *, first: tuple[Array, Array] | None = None
) -> Selection:
    """`per_cluster` among clients that have been counted."""
    label, seen, count = clients.label, clients.seen, len(clients.label)
    if count > MANY and FEW * capacity < count:
        index = jnp.sort(_thinned(rng_key, clients, size.astype(jnp.int32), capacity, first))
        return Selection(index, index < count)
    # Gumbel noise on log-probabilities: the largest are a draw one after the other without replacement.
    score = jax.random.gumbel(rng_key, (count,))
    if seen is not None:
        score = score - jnp.log1p(seen)
    cluster = jnp.where(label < 0, size.shape[0], label)
    if first is not None:
        some, most = first
        rank = _rank_in_cluster(-score[some], cluster[some], size.shape[0])
        score = score.at[some].add(jnp.where(rank < jnp.append(most, 0)[cluster[some]], jnp.inf, 0.0))
    if FEW * capacity < count:
        index = jnp.sort(_largest_of_each(score, cluster, size, capacity).reshape(-1))[:capacity]
        return Selection(index, index < count)
    rank = _rank_in_cluster(-score, cluster, size.shape[0])
    chosen = rank < jnp.append(size.astype(jnp.int32), 0)[cluster]
    if capacity == count:
        return in_place(chosen)
    index = jnp.argsort(~chosen, stable=True)[:capacity].astype(jnp.int32)
    index = jnp.pad(index, (0, capacity - len(index)))
    mask = jnp.arange(capacity) < jnp.sum(chosen.astype(jnp.int32))
    return Selection(jnp.where(mask, index, count), mask)


def _thinned(rng_key: Array, clients: Standing, size: Array, capacity: int, first: tuple[Array, Array] | None) -> Array:
    """i32[capacity]: what `per_cluster` draws, and M, with random numbers for those alone who are looked at.

    Clients come at random, and stay with a probability ∝ 1/(1 + times seen): the first of a cluster are a draw one
    after the other without replacement. Should some hardly ever come, as in a small cluster, all are gone through.
    """
    label, seen, fewest, _, last = clients
    count, num_clusters = len(label), len(size)
    begin_key, come_key, rest_key = jax.random.split(rng_key, 3)

    def times(client: Array) -> Array:
        return jnp.zeros(len(client)) if seen is None else seen[client]

    def join(index: Array, taken: Array, client: Array, stays: Array, wanted: Array) -> tuple[Array, Array]:
        """Clients i32[n] that stay, in their order, as far as their clusters want them and they are not there yet."""
        everybody = jnp.concatenate([index, jnp.where(stays, client, count)])
        order = jnp.argsort(everybody, stable=True)
        again = jnp.concatenate([jnp.zeros(1, bool), everybody[order][1:] == everybody[order][:-1]])
        fresh = stays & ~jnp.zeros_like(again).at[order].set(again)[capacity:]
        cluster = jnp.where(fresh, label[client], num_clusters)
        rank = _rank_in_cluster(jnp.arange(len(client)), cluster, num_clusters)
        kept = fresh & (rank < jnp.append(wanted - taken, 0)[cluster])
        place = jnp.where(kept, taken.sum() + jnp.cumsum(kept.astype(jnp.int32)) - 1, capacity)
        index = index.at[place].set(client.astype(jnp.int32), mode="drop")
        return index, taken + jnp.zeros_like(taken).at[cluster].add(kept.astype(jnp.int32), mode="drop")

    def come(turn: Array | int, number: int) -> tuple[Array, Array]:
        who, whether = jax.random.split(jax.random.fold_in(come_key, turn))
        client = jax.random.randint(who, (number,), 0, last)
        often = jax.random.uniform(whether, client.shape) * (1.0 + times(client))
        return client, (label[client] >= 0) & (often < 1.0 + fewest)

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        turn, _, taken = carry
        return jnp.any(taken < size) & (turn < MOST_TURNS)

    def more(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        turn, index, taken = carry
        client, stays = come(turn, max(MORE, 2 * capacity))
        # Only those of clusters that want more: a few, where a small cluster is missing some.
        (place,) = jnp.nonzero(stays & (taken < size)[label[client]], size=2 * capacity, fill_value=len(client))
        return turn + 1, *join(index, taken, client.at[place].get(mode="clip"), place < len(client), size)

    def rest(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        index, taken = carry
        score = jax.random.gumbel(rest_key, (count,)) - jnp.log1p(times(jnp.arange(count)))
        left = jnp.where(label < 0, num_clusters, label).at[index].set(num_clusters, mode="drop")
        found = _largest_of_each(score, left, size - taken, capacity).reshape(-1)
        return join(index, taken, jnp.minimum(found, count - 1), found < count, size)

    drawn = jnp.full(capacity, count, jnp.int32), jnp.zeros(num_clusters, jnp.int32)
    if first is not None:
        some, most = first
        score = jax.random.gumbel(begin_key, some.shape) - jnp.log1p(times(some))
        some = some[jnp.argsort(-score)]
        drawn = join(*drawn, some, label[some] >= 0, jnp.minimum(most.astype(jnp.int32), size))
    drawn = join(*drawn, *come(0, 2 * capacity), size)
    drawn = lax.while_loop(unfinished, more, (jnp.int32(1), *drawn))[1:]
    return lax.cond(jnp.any(drawn[1] < size), rest, lambda carry: carry, drawn)[0]


def _rank_in_cluster(score: Array, cluster: Array, num_clusters: int) -> Array:
    """i32[n]: how many of its cluster i32[n], in 0..K, have less of `score` f32[n], or as much and come before."""
    order = jnp.lexsort((score, cluster))
    members = jnp.zeros(num_clusters + 1, jnp.int32).at[cluster].add(1)
    first = jnp.cumsum(members) - members
    rank = jnp.arange(len(score), dtype=jnp.int32) - first[cluster[order]]
    return jnp.zeros(len(score), jnp.int32).at[order].set(rank)


def _largest_of_each(score: Array, cluster: Array, size: Array, most: int) -> Array:
    """i32[K, most]: of each cluster i32[M] the clients of largest score, as many as `size` i32[K] says, and M."""
    count = len(score)

    def of_cluster(which: tuple[Array, Array]) -> Array:
        number, wanted = which
        found, largest = jax.lax.top_k(jnp.where(cluster == number, score, -jnp.inf), most)
        return jnp.where((jnp.arange(most) < wanted) & (found > -jnp.inf), largest, count).astype(jnp.int32)

    def nobody(_: tuple[Array, Array]) -> Array:
        return jnp.full(most, count, jnp.int32)

    # A cluster without clients costs nothing.
    return jax.lax.map(
        lambda which: jax.lax.cond(which[1] > 0, of_cluster, nobody, which), (jnp.arange(len(size)), size)
    )
