"""Scenarios in which clients hold different labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedjax_cluster.data import partition
from fedjax_cluster.data.dirichlet import ClientSizes, by_class, by_client, divide
from fedjax_cluster.data.scenarios.registry import scenario
from fedjax_cluster.data.validation import check_examples
from fedjax_cluster.types import Examples, Federation

_LEVELS = ("homogeneous", "heterogeneous", "extreme")


@scenario
def dirichlet(
    examples: Examples,
    *,
    clients: int,
    alpha: float = 0.5,
    client_sizes: ClientSizes = "free",
    min_examples: int | None = None,
    seed: int = 0,
    test_fraction: float = 0.3,
    examples_per_client: int | None = None,
) -> Federation:
    """Label proportions that differ from client to client, without groups.

    With free sizes each class is divided among the clients by Dirichlet(α, …, α): labels and sizes differ. With equal
    sizes each client draws its class proportions from Dirichlet(α·p), p the frequencies of the classes (Hsu et al.
    2019; Sec. 9 of FLAG, Sec. 5 of FedGWC): only labels differ. Examples are dealt without replacement: where most of
    them are asked for, as by default, classes are used up, clients get others, and the log tells how many.

    Args:
      examples: labelled.
      clients: M.
      alpha: concentration α ≥ 0. At 0 a client has one class (equal sizes, as long as there are examples of it) or a
        class has one client (free sizes); at infinity all clients are alike.
      client_sizes: `free` or `equal`.
      min_examples: with free sizes, least examples of a client, from 2 on; with fewer it takes some from the largest.
        Default is 10.
      examples_per_client: training and test examples together, on average where sizes are free; default is all.

    Returns:
      A Federation whose `group` is None.

    Raises:
      ValueError: too few examples, or an argument out of range.

    >>> from fedjax_cluster.data import digits
    >>> dirichlet(digits(), clients=5, alpha=0.1, client_sizes="equal").train.num_examples
    array([252, 252, 251, 251, 251], dtype=int32)
    """
    check_examples(examples)
    deal, part = partition.generators(seed, 2)
    rows = divide(deal, np.asarray(examples.y), clients, alpha, client_sizes, examples_per_client, min_examples)
    return partition.federate(examples, rows, part, test_fraction)


@scenario
def heterogeneity_levels(
    examples: Examples,
    *,
    clients: int,
    shares: Sequence[float] = (0.1, 0.9, 0.0),
    alphas: Sequence[float] = (1000.0, 0.05, 0.0),
    seed: int = 0,
    test_fraction: float = 0.3,
    examples_per_client: int | None = None,
) -> Federation:
    """Homogeneous, heterogeneous and extreme clients in one federation (Table 3 of FedGWC).

    Args:
      examples: labelled.
      clients: M.
      shares: share of the clients at each level; the paper's (10, 90, 0) of 100 clients, or (40, 30, 30).
      alphas: the levels' α of `dirichlet` with equal client sizes. 0 gives one class per client as long as the clients
        that draw before, with a larger α, leave classes with enough examples; a warning is logged where they do not.
      examples_per_client: default is four fifths of an equal share, so that the last clients more often find classes.

    Returns:
      A Federation with `group` i32[M], numbered over the levels that have clients.

    Raises:
      ValueError: too few examples, or an argument out of range.

    >>> from fedjax_cluster.data import digits
    >>> federation = heterogeneity_levels(digits(), clients=10, shares=(4, 0, 6))
    >>> federation.group, federation.info.group_names
    (array([0, 0, 0, 0, 1, 1, 1, 1, 1, 1], dtype=int32), ('homogeneous', 'extreme'))
    """
    check_examples(examples)
    if len(shares) != 3 or len(alphas) != 3:
        raise ValueError(
            f"{len(shares)} shares and {len(alphas)} alphas do not fit levels {', '.join(_LEVELS)}: give three each."
        )
    # NOTE: text and captions of the paper disagree on the middle level, 0.5 or 0.05; this is 0.05.
    counts = partition.share_clients(clients, shares, "levels")
    if examples_per_client is None:
        examples_per_client = max(int(0.8 * len(examples.y) / clients), 2)
    sizes = partition.client_sizes(len(examples.y), clients, examples_per_client)
    deal, part = partition.generators(seed, 2)
    rows = by_client(deal, np.asarray(examples.y), sizes, np.repeat(np.asarray(alphas, float), counts))
    return partition.federate(examples, rows, part, test_fraction, *partition.name_groups(counts, _LEVELS))


@scenario
def label_groups(
    examples: Examples,
    *,
    clients: int,
    rho: float = 0.2,
    alpha: float = 1.0,
    num_groups: int = 5,
    overlap: Literal["auto", "never", "random"] = "auto",
    min_examples: int = 10,
    tests_per_label: int | None = None,
    seed: int = 0,
    test_fraction: float = 0.3,
    examples_per_client: int | None = None,
) -> Federation:
    """Groups of clients with the same few labels, in proportions that differ from client to client (Sec. 5 of FLAG).

    Each group holds a share ρ of the labels; the examples of a label are divided among all clients of the groups that
    hold it, in proportions drawn from Dirichlet(α′, …, α′).

    Args:
      examples: labelled.
      clients: M, in equal groups of neighbours.
      rho: ρ in (0, 1], rounded to whole labels, at least one.
      alpha: α′ of the proportions; the smaller, the more they differ.
      num_groups: number of groups; the paper does not give it.
      overlap: `never` keeps the groups' labels apart; `random` draws distinct label sets, which may share labels;
        `auto` keeps them apart where there are enough labels.
      min_examples: least examples of a client, from 2 on; with fewer it takes some from the largest of its group.
      tests_per_label: tests every client on this many test rows of each label that it trains on, drawn from the test
        rows of all clients; by default a client is tested on its test rows, in which labels are as rare as in training.
      seed: decides the groups' labels, who gets which example, and who is tested on which.
      examples_per_client: training and test examples together, on average; default is all.

    Returns:
      A Federation with `group` i32[M]; a group's name lists its labels.

    Raises:
      ValueError: not enough labels or examples, or an argument out of range.

    >>> from fedjax_cluster.data import digits
    >>> label_groups(digits(), clients=10).info.group_names
    ('labels 4 9', 'labels 7 8', 'labels 3 5', 'labels 0 1', 'labels 2 6')
    """
    check_examples(examples)
    group = partition.assign_groups(clients, num_groups)
    choose, deal, part = partition.generators(seed, 3)
    labels, present = np.asarray(examples.y), partition.occurring(examples)
    owned = np.zeros((num_groups, examples.info.num_classes), bool)
    owned[:, present] = _choose_labels(choose, len(present), rho, num_groups, overlap)

    used = deal.permutation(np.flatnonzero(np.isin(labels, np.flatnonzero(owned.any(axis=0)))))
    used = used[: partition.client_sizes(len(used), clients, examples_per_client).sum()]
    rows = by_class(deal, labels[used], clients, alpha, min_examples, owned[group])
    names = tuple(f"labels {' '.join(map(str, np.flatnonzero(of_group)))}" for of_group in owned)
    train, test = partition.split(part, [used[of_client] for of_client in rows], test_fraction)
    if tests_per_label is not None:
        test = _same_of_each_label(part, labels, train, test, tests_per_label)
    return partition.assemble(examples, train, test, group, names)


def _same_of_each_label(
    rng: np.random.Generator, labels: np.ndarray, train: partition.Rows, test: partition.Rows, count: int
) -> partition.Rows:
    """Test rows that several clients may share, `count` of each label that a client trains on."""
    every = rng.permutation(np.concatenate(test))
    pools = {label: every[labels[every] == label] for label in np.unique(labels[np.concatenate(train)])}
    least = min(len(pool) for pool in pools.values())
    if not 1 <= count <= least:
        raise ValueError(
            f"tests_per_label={count!r}, but the rarest label has {least} test rows in all: choose 1 to {least}."
        )
    return [np.concatenate([pools[label][:count] for label in np.unique(labels[part])]) for part in train]


def _choose_labels(rng: np.random.Generator, num_classes: int, rho: float, num_groups: int, overlap: str) -> np.ndarray:
    """bool[groups, classes]: which labels each group owns."""
    count = max(round(rho * num_classes), 1)
    apart = count * num_groups <= num_classes
    if overlap == "never" and not apart:
        raise ValueError(
            f"{num_groups} groups need {count * num_groups} labels, but there are {num_classes}: choose a smaller rho, "
            f"fewer groups, or overlap='random'."
        )
    owned = np.zeros((num_groups, num_classes), bool)
    if apart and overlap != "random":
        owned[np.repeat(np.arange(num_groups), count), rng.permutation(num_classes)[: count * num_groups]] = True
        return owned
    seen = set()
    for _ in range(1000 * num_groups):
        labels = tuple(sorted(rng.choice(num_classes, count, replace=False).tolist()))
        if labels not in seen:
            owned[len(seen), labels] = True
            seen.add(labels)
        if len(seen) == num_groups:
            return owned
    raise ValueError(f"{num_classes} labels give not {num_groups} different sets of {count}: ask for fewer groups.")
