"""Dividing the rows of a data set among clients, in NumPy: row indices in, row indices out.

The rows of a client are an integer array; a division is a list of M of them, in which no row appears twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_cluster.types import ClientData, DatasetInfo, Examples, Federation

Rows = list[np.ndarray]


def generators(seed: int, count: int) -> list[np.random.Generator]:
    """Independent random generators of one seed; the first ones do not depend on their count."""
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed={seed!r} is not an integer from 0 on: choose one.")
    return [np.random.default_rng(child) for child in np.random.SeedSequence(int(seed)).spawn(count)]


def equal_sizes(total: int, parts: int) -> np.ndarray:
    """Sizes that differ by one at most, the larger ones first.

    >>> equal_sizes(10, 4)
    array([3, 3, 2, 2])
    """
    return np.full(parts, total // parts) + (np.arange(parts) < total % parts)


def assign_groups(clients: int, groups: int, what: str = "groups") -> np.ndarray:
    """The group of each client, i32[M]: equal groups of neighbouring clients, a remainder goes to the first groups.

    >>> assign_groups(7, 3)
    array([0, 0, 0, 1, 1, 2, 2], dtype=int32)
    """
    check_clients(clients)
    if not _is_count(groups):
        raise ValueError(f"{groups!r} {what} cannot hold any client: ask for an integer from 1 on.")
    if clients < groups:
        raise ValueError(f"{clients} clients are too few for {groups} {what}: ask for at least {groups} clients.")
    return np.repeat(np.arange(groups), equal_sizes(clients, groups)).astype(np.int32)


def count_groups(group: Any | None) -> int:
    """How many of the groups of clients i32[M] are known; 0 where there are none.

    >>> count_groups(np.array([0, 3, -1, 3])), count_groups(None)
    (2, 0)
    """
    return 0 if group is None else len(np.unique(np.asarray(group)[np.asarray(group) >= 0]))


def client_sizes(num_rows: int, clients: int, examples_per_client: int | None = None) -> np.ndarray:
    """How many rows each client gets, int[M], at least 2: all rows in equal shares, or `examples_per_client` each."""
    check_clients(clients)
    if num_rows < 2 * clients:
        raise ValueError(
            f"{num_rows} examples are too few for {clients} clients, as training and test need one of each: ask for at "
            f"most {max(num_rows // 2, 1)} clients, of two examples or more."
        )
    if examples_per_client is None:
        return equal_sizes(num_rows, clients)
    if not _is_count(examples_per_client) or examples_per_client < 2:
        raise ValueError(
            f"examples_per_client={examples_per_client!r}, but training and test need one each: choose an integer >= 2."
        )
    if clients * examples_per_client > num_rows:
        raise ValueError(
            f"{clients} clients with {examples_per_client} examples each need more than the {num_rows} there are: ask "
            f"for at most {num_rows // clients} each, or at most {max(num_rows // examples_per_client, 1)} clients."
        )
    return np.full(clients, examples_per_client)


def share_clients(clients: int, shares: Sequence[float], what: str) -> np.ndarray:
    """Clients in each of the proportions `shares`, at least 1 where it is not zero; they add up to `clients`.

    >>> share_clients(10, (1, 0, 2), "halls")
    array([3, 0, 7])
    """
    check_clients(clients)
    weights = np.asarray(shares, float)
    if weights.ndim != 1 or not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
        raise ValueError(f"shares={shares!r} of {what} are not numbers from 0 on with one above 0: correct them.")
    exact = clients * weights / weights.sum()
    counts = np.floor(exact + 1e-9).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: clients - counts.sum()]] += 1
    if (counts[weights > 0] < 1).any():
        raise ValueError(
            f"{clients} clients leave some {what} of {shares=} without any: ask for more, or set that share to 0."
        )
    return counts


def name_groups(counts: np.ndarray, names: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """The group i32[M] of each client and the groups' names, where group i has `counts[i]`; empty ones are skipped."""
    present = np.flatnonzero(counts)
    group = np.repeat(np.arange(len(present)), counts[present]).astype(np.int32)
    return group, tuple(name for name, count in zip(names, counts, strict=True) if count)


def deal(rng: np.random.Generator, num_rows: int, clients: int, examples_per_client: int | None = None) -> Rows:
    """Random rows for each client: all rows in equal shares, or `examples_per_client` each."""
    return divide(rng.permutation(num_rows), client_sizes(num_rows, clients, examples_per_client))


def divide(rows: np.ndarray, sizes: Sequence[int] | np.ndarray) -> Rows:
    """Consecutive pieces of `rows` of the given sizes; the remainder is left out."""
    return np.split(rows[: np.sum(sizes)], np.cumsum(sizes)[:-1])


def split(rng: np.random.Generator, rows: Rows, test_fraction: float) -> tuple[Rows, Rows]:
    """Random training rows and test rows of each client: of the latter a share, rounded, but at least one of either."""
    if not 0.0 < test_fraction < 1.0:
        raise ValueError(
            f"test_fraction={test_fraction!r} leaves no examples for training or test: choose a share between 0 and 1, "
            f"both excluded."
        )
    train, test = [], []
    for client, part in enumerate(rows):
        if len(part) < 2:
            raise ValueError(
                f"Client {client} has {len(part)} example{'s' * (len(part) != 1)}, but training and test need one "
                "each: leave such clients out, or divide the data among fewer."
            )
        count = min(max(round(test_fraction * len(part)), 1), len(part) - 1)
        shuffled = rng.permutation(part)
        train.append(shuffled[count:])
        test.append(shuffled[:count])
    return train, test


def stack(x: np.ndarray, y: np.ndarray, rows: Rows) -> ClientData:
    """The clients stacked: x [M, N, ...], y [M, N, ...] and num_examples i32[M]; rows beyond a client's are zero.

    >>> stack(np.arange(5.0), np.arange(5), [np.array([4, 0]), np.array([2])]).x
    array([[4., 0.],
           [2., 0.]])
    """
    counts = np.array([len(part) for part in rows], np.int32)
    filled = np.arange(counts.max(initial=0)) < counts[:, None]
    index = np.zeros(filled.shape, np.int64)
    index[filled] = np.concatenate(rows)
    stacked_x, stacked_y = (np.asarray(source)[index] for source in (x, y))
    stacked_x[~filled] = 0
    stacked_y[~filled] = 0
    return ClientData(stacked_x, stacked_y, counts)


def federate(
    examples: Examples,
    rows: Rows,
    rng: np.random.Generator,
    test_fraction: float,
    group: np.ndarray | None = None,
    group_names: tuple[str, ...] = (),
) -> Federation:
    """A division, split into training and test rows and stacked."""
    return assemble(examples, *split(rng, rows, test_fraction), group, group_names)


def assemble(
    examples: Examples,
    train: Rows,
    test: Rows,
    group: np.ndarray | None = None,
    group_names: tuple[str, ...] = (),
    validation: Rows | None = None,
) -> Federation:
    """Training, test and perhaps validation rows, stacked, with the true group of each client and the groups' names."""
    info = examples.info if group is None else examples.info._replace(group_names=group_names)
    held = None if validation is None else stack(examples.x, examples.y, validation)
    return Federation(stack(examples.x, examples.y, train), stack(examples.x, examples.y, test), held, group, info)


def relabel(federation: Federation, tables: np.ndarray) -> Federation:
    """The federation with label c of every client replaced by `tables[client, c]`, int[M, classes]; padding stays 0."""

    def renamed(data: ClientData) -> ClientData:
        filled = np.arange(data.y.shape[1]) < data.num_examples[:, None]
        y = np.take_along_axis(tables, data.y, axis=1)
        return data._replace(y=np.where(filled, y, 0).astype(data.y.dtype))

    # A label means no longer the same to all.
    info = federation.info._replace(class_names=())
    return federation._replace(train=renamed(federation.train), test=renamed(federation.test), info=info)


def join(federations: Sequence[Federation], *, group: np.ndarray | None, info: DatasetInfo) -> Federation:
    """The clients of several federations in one, padded to the longest client; without validation parts."""

    def stacked(parts: Sequence[ClientData]) -> ClientData:
        longest = max(part.x.shape[1] for part in parts)

        def padded(array: np.ndarray) -> np.ndarray:
            return np.pad(array, [(0, 0), (0, longest - array.shape[1])] + [(0, 0)] * (array.ndim - 2))

        pairs = zip(*(part[:2] for part in parts), strict=True)
        x, y = (np.concatenate([padded(array) for array in arrays]) for arrays in pairs)
        return ClientData(x, y, np.concatenate([part.num_examples for part in parts]))

    train, test = stacked([f.train for f in federations]), stacked([f.test for f in federations])
    return Federation(train, test, None, group, info)


def sorted_ids(name: str, ids: Any, num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct ids in their order, for each row the place of its id among them, and the rows of each.

    Raises:
      ValueError: not one id for each row, a missing one, or ids that cannot be sorted.
    """
    # As objects, since NaN among text would become text.
    given = ids if hasattr(ids, "dtype") else np.asarray(ids, object)
    if given.shape != (num_rows,):
        raise ValueError(f"{name} has the shape {list(given.shape)} for {num_rows} examples: give one id for each.")
    missing = is_missing(given)
    if missing.any():
        raise ValueError(
            f"{name} holds NaN or None, first for example {np.argmax(missing)}: give an id, or leave the example out."
        )
    try:
        return np.unique(np.asarray(ids), return_inverse=True, return_counts=True)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be sorted, as it holds values of several kinds: give numbers, or text."
        ) from error


def is_missing(ids: Any) -> np.ndarray:
    """bool[N]: None, NaN, or what pandas has in their place."""

    def lacks(one: Any) -> bool:
        try:
            return one is None or bool(one != one)
        except TypeError:  # pandas.NA
            return True

    return np.array([lacks(one) for one in ids.tolist()], bool)


def occurring(examples: Examples) -> np.ndarray:
    """i64[L]: the labels that examples have, of which scenarios choose; numbers between them may be none's."""
    return np.unique(np.asarray(examples.y))


def check_clients(clients: int) -> None:
    """Raises ValueError unless `clients` is an integer from 1 on."""
    if not _is_count(clients):
        raise ValueError(f"clients={clients!r} is not an integer from 1 on: choose one.")


def _is_count(number: object) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool) and int(number) >= 1
