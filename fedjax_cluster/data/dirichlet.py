"""Label skew drawn from Dirichlet distributions: row indices in, row indices out, as in `partition`."""

from __future__ import annotations

import logging
from typing import Literal

import numpy as np

from fedjax_cluster.data.partition import Rows, client_sizes

ClientSizes = Literal["free", "equal"]
FEWEST_EXAMPLES = 10  # of a client, where sizes are free and none is given
MOST_MOVED = 0.2  # share of examples of other classes than were drawn that is no news

LOG = logging.getLogger(__name__)


def divide(
    rng: np.random.Generator,
    labels: np.ndarray,
    clients: int,
    alpha: float,
    sizes: ClientSizes,
    examples_per_client: int | None,
    min_examples: int | None,
) -> Rows:
    """Rows of every client, by `by_class` where sizes are "free" and by `by_client` where they are "equal"."""
    counts = client_sizes(len(labels), clients, examples_per_client)
    if sizes == "equal":
        if min_examples is not None:
            raise ValueError(
                f"min_examples={min_examples}, but client_sizes are 'equal': leave it out, or choose 'free'."
            )
        return by_client(rng, labels, counts, alpha)
    used = rng.permutation(len(labels))[: counts.sum()]
    return [used[part] for part in by_class(rng, labels[used], clients, alpha, min_examples or FEWEST_EXAMPLES)]


def by_class(
    rng: np.random.Generator,
    labels: np.ndarray,
    clients: int,
    alpha: float,
    min_examples: int,
    owners: np.ndarray | None = None,
) -> Rows:
    """Each class divided among its owners in proportions drawn from Dirichlet(α, …, α): sizes vary freely.

    At α = 0 a class goes to a single owner, at infinity to all in equal parts. `owners` is bool[M, classes]; None means
    all. A client with fewer than `min_examples` rows takes random ones from the largest that own the same classes.
    """
    if owners is None:
        owners = np.ones((clients, int(labels.max()) + 1), bool)
    pieces: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in range(clients)]
    for label in np.flatnonzero(owners.any(axis=0)):
        members = rng.permutation(np.flatnonzero(labels == label))
        takers = np.flatnonzero(owners[:, label])
        cuts = np.rint(np.cumsum(draw(rng, alpha, np.ones(len(takers))))[:-1] * len(members)).astype(int)
        for client, piece in zip(takers, np.split(members, cuts), strict=True):
            pieces[client].append(piece)
    rows = [rng.permutation(np.concatenate(parts)) for parts in pieces]

    _, alike = np.unique(owners, axis=0, return_inverse=True)
    for kind in range(alike.max() + 1):
        _fill_up(rows, np.flatnonzero(alike == kind), min_examples)
    return rows


def _fill_up(rows: Rows, members: np.ndarray, min_examples: int) -> None:
    """Moves rows from the largest members to those with fewer than `min_examples`."""
    sizes = np.array([len(rows[client]) for client in members])
    if sizes.sum() < min_examples * len(members):
        raise ValueError(
            f"{len(members)} clients share {sizes.sum()} examples, too few for {min_examples} each: ask for fewer "
            f"clients, more examples per client or a smaller `min_examples`."
        )
    for small in np.flatnonzero(sizes < min_examples):
        while sizes[small] < min_examples:
            large = int(np.argmax(sizes))
            count = min(min_examples - sizes[small], max((sizes[large] - min_examples) // 2, 1))
            giver, taker = members[large], members[small]
            rows[taker] = np.concatenate([rows[taker], rows[giver][:count]])
            rows[giver] = rows[giver][count:]
            sizes[small] += count
            sizes[large] -= count


def by_client(rng: np.random.Generator, labels: np.ndarray, sizes: np.ndarray, alpha: float | np.ndarray) -> Rows:
    """Each client draws its rows class by class with probabilities from Dirichlet(α·p): sizes are given.

    p are the frequencies of the classes (Hsu et al. 2019), α one for all or f64[M]; at 0 a client has a single class,
    drawn among those with enough rows left. Clients draw one after the other without replacement, the largest α first
    because they need every class. Once a class is used up, a client's other classes are scaled up.
    """
    _, labels = np.unique(labels, return_inverse=True)
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in range(labels.max() + 1)]
    left = np.array([len(pool) for pool in pools])
    frequencies = left / left.sum()
    alphas = np.broadcast_to(np.asarray(alpha, float), len(sizes))

    order = rng.permutation(len(sizes))
    rows: Rows = [np.empty(0, np.int64)] * len(sizes)
    moved = np.zeros(len(sizes))
    for client in order[np.argsort(-alphas[order], kind="stable")]:
        size = int(sizes[client])
        if alphas[client] == 0:
            shares = draw(rng, 0.0, np.where(left >= min(size, left.max()), left, 0))
        else:
            shares = draw(rng, float(alphas[client]), frequencies)
        counts = _draw_counts(rng, shares, size, left)
        # Beyond what counting a few rows by chance gives: half of the distance between the proportions.
        moved[client] = np.abs(counts / size - shares).sum() / 2 - np.sqrt(shares * (1 - shares) / size).sum() / 2
        rows[client] = np.concatenate([pool[n - c : n] for pool, n, c in zip(pools, left, counts, strict=True)])
        left = left - counts
    single = np.flatnonzero(alphas == 0)
    mixed = sum(len(np.unique(labels[rows[client]])) > 1 for client in single)
    if mixed:
        LOG.warning(
            f"{mixed} of {len(single)} clients of α = 0 have more than one class: clients that drew before left no "
            f"class with {sizes[single].max()} examples. Ask for fewer examples per client"
        )
    drawn = np.flatnonzero(alphas > 0)
    if len(drawn) and (off := moved[drawn].mean()) > MOST_MOVED:
        LOG.warning(
            f"{100 * off:.0f} % of a client's examples, on average, are of other classes than were drawn, as classes "
            "were used up: ask for fewer examples per client"
        )
    return rows


def _draw_counts(rng: np.random.Generator, shares: np.ndarray, size: int, left: np.ndarray) -> np.ndarray:
    counts = np.zeros_like(left)
    while missing := size - counts.sum():
        available = left - counts
        weights = np.where(available > 0, shares, 0.0)
        if weights.sum() < 1e-9:  # the client's classes are used up
            weights = available.astype(float)
        counts += np.minimum(rng.multinomial(missing, weights / weights.sum()), available)
    return counts


def draw(rng: np.random.Generator, alpha: float, base: np.ndarray) -> np.ndarray:
    """One draw from Dirichlet(alpha · base), with its limits at 0 and at infinity."""
    mean = base / base.sum()
    if alpha == 0:
        return np.eye(len(base))[rng.choice(len(base), p=mean)]
    return mean if np.isinf(alpha) else rng.dirichlet(alpha * base)
