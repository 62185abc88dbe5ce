"""Clients without groups, that differ in a single way: few labels each, or how many examples they have."""

from __future__ import annotations

import numpy as np

from fedjax_cluster.data import partition
from fedjax_cluster.data.dirichlet import FEWEST_EXAMPLES, draw
from fedjax_cluster.data.scenarios.registry import scenario
from fedjax_cluster.data.validation import check_examples
from fedjax_cluster.types import Examples, Federation


@scenario
def shards(
    examples: Examples,
    *,
    clients: int,
    shards_per_client: int = 2,
    seed: int = 0,
    test_fraction: float = 0.3,
    examples_per_client: int | None = None,
) -> Federation:
    """The pathological split: examples sorted by label, cut into shards, a few of which each client gets (FedAvg).

    Sec. 3 of McMahan et al. 2017: MNIST sorted by label in 200 shards of 300, two for each of 100 clients, most of whom
    then have two labels.

    Args:
      examples: labelled.
      clients: M.
      shards_per_client: s; the examples are cut into M·s shards.
      seed: decides who gets which shard, and who is tested on which example.

    Returns:
      A Federation whose `group` is None.

    Raises:
      ValueError: too few examples, more shards than a client has examples, or an argument out of range.

    >>> from fedjax_cluster.data import digits
    >>> federation = shards(digits(), clients=20)
    >>> [len(np.unique(y[:n])) for y, n in zip(federation.train.y[:5], federation.train.num_examples)]
    [2, 2, 1, 2, 2]
    """
    check_examples(examples)
    deal, part = partition.generators(seed, 2)
    sizes = partition.client_sizes(len(examples.y), clients, examples_per_client)
    if shards_per_client > sizes.min():
        raise ValueError(
            f"shards_per_client is {shards_per_client}, but clients have {sizes.min()} examples: ask for at most that "
            "many shards."
        )
    used = deal.permutation(len(examples.y))[: sizes.sum()]
    by_label = used[np.argsort(np.asarray(examples.y)[used], kind="stable")]
    # In the order in which the shards lie: which are whose; their lengths make up the sizes that clients should have.
    places = deal.permutation(clients * shards_per_client).reshape(clients, shards_per_client)
    lengths = np.empty(places.size, int)
    for own, size in zip(places, sizes, strict=True):
        lengths[own] = partition.equal_sizes(int(size), shards_per_client)
    pieces = partition.divide(by_label, lengths)
    rows = [np.concatenate([pieces[place] for place in own]) for own in places]
    return partition.federate(examples, rows, part, test_fraction)


@scenario
def size_skew(
    examples: Examples,
    *,
    clients: int,
    sigma: float | None = None,
    alpha: float | None = None,
    min_examples: int = FEWEST_EXAMPLES,
    seed: int = 0,
    test_fraction: float = 0.3,
    examples_per_client: int | None = None,
) -> Federation:
    """Clients that differ in how many examples they have, and in nothing else: every example falls to any client.

    Args:
      examples: any.
      clients: M.
      sigma: σ of sizes that are proportional to log-normal draws exp(σ·N(0, 1)); 0 makes them equal. Default is 1,
        where no alpha is given.
      alpha: draws the shares of the examples from Dirichlet(α, …, α) in place of that; the smaller, the more they
        differ.
      min_examples: least examples of a client, from 2 on; the others share what is left in their proportions.
      examples_per_client: training and test examples together, on average; default is all.

    Returns:
      A Federation whose `group` is None.

    Raises:
      ValueError: both sigma and alpha, too few examples, or an argument out of range.

    >>> from fedjax_cluster.data import digits
    >>> size_skew(digits(), clients=5, sigma=1.5).train.num_examples
    array([661,  20, 229,  76, 272], dtype=int32)
    """
    check_examples(examples, labelled=False)
    if sigma is not None and alpha is not None:
        raise ValueError(f"sigma is {sigma:g} and alpha {alpha:g}, but sizes follow one of them: leave the other out")
    weigh, deal, part = partition.generators(seed, 3)
    total = int(partition.client_sizes(len(examples.y), clients, examples_per_client).sum())
    if alpha is not None:
        weights = draw(weigh, alpha, np.ones(clients))
    else:
        exponents = (1.0 if sigma is None else sigma) * weigh.normal(size=clients)
        weights = np.exp(exponents - exponents.max())
    sizes = _sizes(total, weights, min_examples)
    return partition.federate(examples, partition.divide(deal.permutation(len(examples.y)), sizes), part, test_fraction)


def _sizes(total: int, weights: np.ndarray, least: int) -> np.ndarray:
    """Sizes that add up to `total` in proportion to `weights`, but none below `least`.

    >>> _sizes(100, np.array([1.0, 3.0, 96.0]), 10)
    array([10, 10, 80])
    """
    if total < least * len(weights):
        raise ValueError(
            f"{len(weights)} clients share {total} examples, too few for {least} each: ask for fewer clients, more "
            "examples per client or a smaller `min_examples`."
        )
    small = np.zeros(len(weights), bool)
    exact = weights / weights.sum() * total
    while (exact[~small] < least).any():
        small |= exact < least
        left = np.where(small, 0.0, weights)
        rest = total - least * small.sum()
        exact = np.where(small, least, left / max(left.sum(), np.finfo(float).tiny) * rest)
    sizes = np.floor(exact + 1e-9).astype(int)
    sizes[np.argsort(sizes - exact, kind="stable")[: total - sizes.sum()]] += 1
    return sizes
