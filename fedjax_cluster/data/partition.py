"""How rows are dealt to clients: plain NumPy, row numbers in, row numbers out.

Rows of a client are an integer array; a division is a list of M of them, in which no row appears twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedjax_cluster.types import ClientData, DatasetInfo, Federation

Rows = list[np.ndarray]


def streams(seed: int, count: int) -> list[np.random.Generator]:
    """Independent random streams of one seed, so that one use of chance does not shift another.

    Args:
      seed: a whole number, not negative.
      count: number of streams; the first ones do not depend on it.

    Returns:
      A list of `count` generators.

    Raises:
      ValueError: the seed is no such number.
    """
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed={seed!r} is not a whole number from 0 on.")
    return [np.random.default_rng(child) for child in np.random.SeedSequence(int(seed)).spawn(count)]


def equal_sizes(total: int, parts: int) -> np.ndarray:
    """Sizes that differ by one at most, the larger ones first.

    >>> equal_sizes(10, 4)
    array([3, 3, 2, 2])
    """
    return np.full(parts, total // parts) + (np.arange(parts) < total % parts)


def assign_groups(clients: int, groups: int, what: str = "groups") -> np.ndarray:
    """The group of each client: equal groups of neighbouring clients, a remainder spread over the first ones.

    Args:
      clients: M.
      groups: number of groups, at most M.
      what: what the groups are, for the message.

    Returns:
      i32[M].

    Raises:
      ValueError: no group, or fewer clients than groups.

    >>> assign_groups(7, 3)
    array([0, 0, 0, 1, 1, 2, 2], dtype=int32)
    """
    check_clients(clients)
    if not _is_count(groups):
        raise ValueError(f"{groups!r} {what} cannot hold any client: ask for a whole number from 1 on.")
    if clients < groups:
        raise ValueError(
            f"{clients} clients are too few for {groups} {what}, each of which needs one: ask for at least "
            f"{groups} clients, or for fewer {what}."
        )
    return np.repeat(np.arange(groups), equal_sizes(clients, groups)).astype(np.int32)


def client_sizes(num_rows: int, clients: int, examples_per_client: int | None = None) -> np.ndarray:
    """How many rows each client gets: all rows in equal shares, or a given number each.

    Args:
      num_rows: rows of the source.
      clients: M.
      examples_per_client: training and test rows together; None for all there are.

    Returns:
      int[M], each at least 2.

    Raises:
      ValueError: there are too few rows.
    """
    check_clients(clients)
    if num_rows < 2 * clients:
        raise ValueError(
            f"{num_rows} examples are too few for {clients} clients, each of which needs one to train on and "
            f"one to test on: ask for at most {num_rows // 2} clients."
        )
    if examples_per_client is None:
        return equal_sizes(num_rows, clients)
    if not _is_count(examples_per_client) or examples_per_client < 2:
        raise ValueError(
            f"examples_per_client={examples_per_client!r} is not a whole number from 2 on: a client needs one "
            f"example to train on and one to test on."
        )
    if clients * examples_per_client > num_rows:
        raise ValueError(
            f"{clients} clients with {examples_per_client} examples each need {clients * examples_per_client}, "
            f"but there are {num_rows}: ask for at most {num_rows // clients} each, or at most "
            f"{num_rows // examples_per_client} clients."
        )
    return np.full(clients, examples_per_client)


def share_clients(clients: int, shares: Sequence[float], what: str) -> np.ndarray:
    """Numbers of clients in given proportions, rounded so that they add up.

    Args:
      clients: M.
      shares: positive numbers, or zero for none at all; they need not add up to one.
      what: what the shares are of, for the message.

    Returns:
      int[len(shares)]; at least 1 where the share is not zero.

    Raises:
      ValueError: not such numbers, or a share too small to get a client.

    >>> share_clients(10, (1, 0, 2), "halls")
    array([3, 0, 7])
    """
    check_clients(clients)
    weights = np.asarray(shares, float)
    if weights.ndim != 1 or not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
        raise ValueError(f"shares={shares!r} of {what} are not numbers from 0 on, at least one of them positive.")
    exact = clients * weights / weights.sum()
    counts = np.floor(exact + 1e-9).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: clients - counts.sum()]] += 1
    if (counts[weights > 0] < 1).any():
        raise ValueError(
            f"{clients} clients in the shares {tuple(shares)} leave some {what} without any: ask for more clients, "
            f"or make that share zero."
        )
    return counts


def deal(rng: np.random.Generator, num_rows: int, clients: int, examples_per_client: int | None = None) -> Rows:
    """Rows dealt at random: all in equal shares, or a given number to each."""
    return divide(rng.permutation(num_rows), client_sizes(num_rows, clients, examples_per_client))


def divide(rows: np.ndarray, sizes: Sequence[int] | np.ndarray) -> Rows:
    """Consecutive pieces of `rows`, of the given sizes; what is left over is left out."""
    return np.split(rows[: np.sum(sizes)], np.cumsum(sizes)[:-1])


def limit(rng: np.random.Generator, rows: Rows, max_examples_per_client: int | None) -> Rows:
    """At most so many rows for each client, drawn at random; None for no limit."""
    if max_examples_per_client is None:
        return rows
    return [rng.permutation(part)[:max_examples_per_client] for part in rows]


def split(rng: np.random.Generator, rows: Rows, test_fraction: float) -> tuple[Rows, Rows]:
    """Training and test rows of each client, drawn at random.

    Args:
      rng: NumPy generator.
      rows: a division.
      test_fraction: share of a client's rows that it is tested on, rounded to whole rows, but at least one row
        on either side.

    Returns:
      Two divisions.

    Raises:
      ValueError: the share is not between 0 and 1, or a client has fewer than two rows.
    """
    check_test_fraction(test_fraction)
    train, test = [], []
    for client, part in enumerate(rows):
        if len(part) < 2:
            raise ValueError(
                f"Client {client} has {len(part)} example{'s' * (len(part) != 1)}, but each client needs one to "
                f"train on and one to test on: leave such clients out, or divide the data among fewer."
            )
        count = min(max(round(test_fraction * len(part)), 1), len(part) - 1)
        shuffled = rng.permutation(part)
        train.append(shuffled[count:])
        test.append(shuffled[:count])
    return train, test


def stack(x: np.ndarray, y: np.ndarray, rows: Rows) -> ClientData:
    """Clients side by side, as long as the longest one; padding rows are zero.

    Args:
      x: [rows of the source, ...].
      y: [rows of the source, ...].
      rows: a division into M clients.

    Returns:
      ClientData with x [M, N, ...] and y [M, N, ...] in their dtypes and num_examples i32[M].

    >>> stack(np.arange(5.0), np.arange(5), [np.array([4, 0]), np.array([2])]).x
    array([[4., 0.],
           [2., 0.]])
    """
    counts = np.array([len(part) for part in rows], np.int32)
    filled = np.arange(counts.max(initial=0)) < counts[:, None]
    index = np.zeros(filled.shape, np.int64)
    index[filled] = np.concatenate(rows)
    stacked = []
    for source in (x, y):
        values = np.asarray(source)[index]
        values[~filled] = 0
        stacked.append(values)
    return ClientData(stacked[0], stacked[1], counts)


def federate(
    x: np.ndarray,
    y: np.ndarray,
    rows: Rows,
    *,
    rng: np.random.Generator,
    test_fraction: float,
    info: DatasetInfo,
    group: np.ndarray | None = None,
) -> Federation:
    """A division, split into training and test rows and stacked, as a federation."""
    train, test = split(rng, rows, test_fraction)
    return Federation(stack(x, y, train), stack(x, y, test), None, group, info)


def relabel(federation: Federation, tables: np.ndarray) -> Federation:
    """Every client's label c replaced by `tables[client, c]`; padding stays zero.

    Args:
      federation: M clients with class labels.
      tables: int[M, classes].

    Returns:
      The federation with other labels.
    """

    def renamed(data: ClientData) -> ClientData:
        filled = np.arange(data.y.shape[1]) < data.num_examples[:, None]
        y = np.take_along_axis(tables, data.y, axis=1)
        return data._replace(y=np.where(filled, y, 0).astype(data.y.dtype))

    return federation._replace(train=renamed(federation.train), test=renamed(federation.test))


def join(federations: Sequence[Federation], *, group: np.ndarray | None, info: DatasetInfo) -> Federation:
    """The clients of several federations in one, padded to the longest client; without validation parts."""

    def stacked(parts: Sequence[ClientData]) -> ClientData:
        longest = max(part.x.shape[1] for part in parts)
        x, y = (
            np.concatenate(
                [
                    np.pad(array, [(0, 0), (0, longest - array.shape[1])] + [(0, 0)] * (array.ndim - 2))
                    for array in arrays
                ]
            )
            for arrays in ([part.x for part in parts], [part.y for part in parts])
        )
        return ClientData(x, y, np.concatenate([part.num_examples for part in parts]))

    train, test = stacked([f.train for f in federations]), stacked([f.test for f in federations])
    return Federation(train, test, None, group, info)


def check_clients(clients: int) -> None:
    """Raises ValueError unless `clients` is a whole number from 1 on."""
    if not _is_count(clients):
        raise ValueError(f"clients={clients!r} is not a whole number from 1 on.")


def check_test_fraction(test_fraction: float) -> None:
    """Raises ValueError unless the fraction leaves something on both sides."""
    if not 0.0 < test_fraction < 1.0:
        raise ValueError(
            f"test_fraction={test_fraction!r} is not between 0 and 1, both excluded: every client needs "
            f"examples to train on and others to test on; the default is 0.3."
        )


def _is_count(number: object) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool) and int(number) >= 1
