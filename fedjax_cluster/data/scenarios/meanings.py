"""Scenarios in which the same image has different labels in different groups of clients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedjax_cluster.data import partition
from fedjax_cluster.data.scenarios.registry import scenario
from fedjax_cluster.data.validation import check_examples
from fedjax_cluster.types import Examples, Federation


@scenario
def label_swap(
    examples: Examples,
    *,
    clients: int,
    num_groups: int = 4,
    pairs: Sequence[tuple[int, int]] | None = None,
    balanced: bool = False,
    seed: int = 0,
    test_fraction: float = 0.3,
    examples_per_client: int | None = None,
) -> Federation:
    """Each group of clients exchanges two labels (the label-swap problem, Sec. VI of CFL, Figs. 5–7).

    Args:
      examples: labelled.
      clients: M, in equal groups of neighbours with random examples.
      num_groups: number of groups; ignored where `pairs` are given.
      pairs: for each group the two labels that it exchanges, such as ((1, 7), (3, 5)); default draws them, all labels
        different where there are enough.
      balanced: every client has equally many examples of each label, in training and test; otherwise a client with few
        examples may have none of the labels that its group exchanges.
      seed: decides the pairs, who gets which example, and who is tested on which.

    Returns:
      A Federation with `group` i32[M]; a group's name shows the labels that it exchanges.

    Raises:
      ValueError: pairs that are not two labels or occur twice, too few examples, or an argument out of range.

    >>> from fedjax_cluster.data import digits
    >>> label_swap(digits(), clients=20, pairs=((1, 7), (3, 5))).info.group_names
    ('1↔7', '3↔5')
    """
    check_examples(examples)
    classes = examples.info.num_classes
    (choose,) = partition.generators(seed, 1)
    drawn = pairs is None
    chosen = (
        _draw_pairs(choose, partition.occurring(examples), num_groups) if drawn else [tuple(pair) for pair in pairs]
    )
    for pair in chosen:
        if len(pair) != 2 or pair[0] == pair[1] or not all(0 <= label < classes for label in pair):
            raise ValueError(f"The pair {pair} is not two different labels: choose between 0 and {classes - 1}.")
    if not chosen or len({frozenset(pair) for pair in chosen}) < len(chosen):
        raise ValueError(f"pairs={tuple(chosen)} are empty or repeat one: give at least one pair, and none twice.")
    tables = np.tile(np.arange(classes), (len(chosen), 1))
    for table, (one, other) in zip(tables, chosen, strict=True):
        table[[one, other]] = other, one
    names = tuple(f"{one}↔{other}" for one, other in chosen)
    return _federate(examples, clients, tables, names, seed, test_fraction, examples_per_client, balanced)


@scenario
def label_permutation(
    examples: Examples,
    *,
    clients: int,
    num_groups: int = 4,
    seed: int = 0,
    test_fraction: float = 0.3,
    examples_per_client: int | None = None,
) -> Federation:
    """Each group of clients permutes all labels in a different way (Sec. VI of CFL, Fig. 8).

    Args:
      examples: labelled.
      clients: M, in equal groups of neighbours with random examples.
      num_groups: number of different random permutations.
      seed: decides the permutations, who gets which example, and who is tested on which.

    Returns:
      A Federation with `group` i32[M].

    Raises:
      ValueError: fewer permutations than groups, too few examples, or an argument out of range.

    >>> from fedjax_cluster.data import digits
    >>> label_permutation(digits(), clients=20).info.group_names[0]
    'permutation 0'
    """
    check_examples(examples)
    classes = examples.info.num_classes
    present = partition.occurring(examples)
    if num_groups > math.factorial(min(len(present), 12)):
        raise ValueError(
            f"{len(present)} labels cannot be permuted in {num_groups} different ways: ask for fewer groups."
        )
    (choose,) = partition.generators(seed, 1)
    tables: dict[bytes, np.ndarray] = {}
    while len(tables) < num_groups:
        permutation = np.arange(classes)
        permutation[present] = choose.permutation(present)
        tables[permutation.tobytes()] = permutation
    names = tuple(f"permutation {i}" for i in range(num_groups))
    stacked = np.array(list(tables.values())).reshape(-1, classes)
    return _federate(examples, clients, stacked, names, seed, test_fraction, examples_per_client)


@scenario
def label_shift(
    examples: Examples,
    *,
    clients: int,
    shifts: Sequence[int] = (0, 5),
    seed: int = 0,
    test_fraction: float = 0.3,
    examples_per_client: int | None = None,
) -> Federation:
    """Each group of clients adds a constant to all labels, modulo the number of classes (F.7 of CFL-GP).

    Args:
      examples: labelled.
      clients: M, in equal groups of neighbours with random examples.
      shifts: what each group adds to its labels.

    Returns:
      A Federation with `group` i32[M].

    Raises:
      ValueError: shifts that amount to the same, too few examples, or an argument out of range.

    >>> from fedjax_cluster.data import digits
    >>> label_shift(digits(), clients=4).group
    array([0, 0, 1, 1], dtype=int32)
    """
    check_examples(examples)
    classes = examples.info.num_classes
    if not shifts or len({shift % classes for shift in shifts}) < len(shifts):
        raise ValueError(
            f"{shifts=} are empty or repeat: give at least one, and different ones modulo the {classes} classes."
        )
    tables = (np.arange(classes) + np.asarray(shifts)[:, None]) % classes
    names = tuple(f"y+{shift}" for shift in shifts)
    return _federate(examples, clients, tables, names, seed, test_fraction, examples_per_client)


def _federate(
    examples: Examples,
    clients: int,
    tables: np.ndarray,
    names: tuple[str, ...],
    seed: int,
    test_fraction: float,
    examples_per_client: int | None,
    balanced: bool = False,
) -> Federation:
    group = partition.assign_groups(clients, len(tables))
    _, deal, part = partition.generators(seed, 3)
    y = np.asarray(examples.y)
    if balanced:
        pools = [np.flatnonzero(y == label) for label in partition.occurring(examples)]
        each = _examples_per_label(pools, clients, examples_per_client)
        of_labels = [_deal_and_split(deal, part, pool, clients, each, test_fraction) for pool in pools]
        # One label after the other would make mini-batches of single labels.
        train, test = (
            [part.permutation(np.concatenate(of_client)) for of_client in zip(*shares, strict=True)]
            for shares in zip(*of_labels, strict=True)
        )
    else:
        train, test = _deal_and_split(deal, part, np.arange(len(y)), clients, examples_per_client, test_fraction)
    return partition.relabel(partition.assemble(examples, train, test, group, names), tables[group])


def _deal_and_split(
    deal: np.random.Generator,
    part: np.random.Generator,
    pool: np.ndarray,
    clients: int,
    each: int | None,
    test_fraction: float,
) -> tuple[partition.Rows, partition.Rows]:
    rows = partition.deal(deal, len(pool), clients, each)
    return partition.split(part, [pool[of_client] for of_client in rows], test_fraction)


def _examples_per_label(pools: Sequence[np.ndarray], clients: int, examples_per_client: int | None) -> int:
    if examples_per_client is None:
        return min(map(len, pools)) // clients
    each, rest = divmod(examples_per_client, len(pools))
    if rest:
        raise ValueError(
            f"examples_per_client={examples_per_client} is no multiple of the {len(pools)} labels, but clients are "
            f"balanced: choose {each * len(pools)} or {(each + 1) * len(pools)}."
        )
    return each


def _draw_pairs(rng: np.random.Generator, labels: np.ndarray, count: int) -> list[tuple[int, int]]:
    classes = len(labels)
    if not 1 <= count <= classes * (classes - 1) // 2:
        raise ValueError(f"{classes} labels do not make {count} different pairs: ask for fewer groups.")
    if 2 * count <= classes:
        drawn = labels[np.sort(rng.permutation(classes)[: 2 * count].reshape(-1, 2), axis=1)]
        return [(int(one), int(other)) for one, other in drawn]
    first, second = np.triu_indices(classes, 1)
    chosen = rng.choice(len(first), count, replace=False)
    return [(int(labels[first[i]]), int(labels[second[i]])) for i in chosen]
