"""Texts about different topics, drawn word by word."""

from __future__ import annotations

import numpy as np

from fedjax_cluster.data import partition
from fedjax_cluster.data.scenarios.registry import scenario
from fedjax_cluster.data.scenarios.synthetic import check_drawn, sizes_of_drawn
from fedjax_cluster.types import DatasetInfo, Examples, Federation

DRAWN_PER_CLIENT = 200


@scenario
def topics(
    examples: None = None,
    *,
    clients: int = 20,
    num_groups: int = 4,
    vocabulary: int = 200,
    length: int = 20,
    followers: int = 8,
    common: float = 0.3,
    seed: int = 0,
    test_fraction: float = 0.3,
    examples_per_client: int | None = None,
) -> Federation:
    """Texts of several topics, each client's of one, for next-word prediction (in place of CFL's AG News, Sec. VI-C).

    A word follows another with p(v | u) = common · q₀(v | u) + (1 − common) · q_topic(v | u). Each q(· | u) has
    `followers` words with weights 1, 1/2, 1/3, … that add up to 1. They are drawn so that some words are frequent, as
    in real texts: the r-th in the order of a topic, which is random, with a chance like 1/r.

    Args:
      examples: None; the argument exists because every scenario has it.
      clients: M, in equal groups of neighbours.
      num_groups: topics.
      vocabulary: words.
      length: words of an example, T.
      followers: words that may follow a word, within a topic and in the part that all have in common.
      common: share of the steps that do not depend on the topic; with 1 the topics are the same.
      seed: decides everything that is drawn.
      examples_per_client: training and test examples together; default 200.

    Returns:
      A Federation with x i32[M, N, T], y i32[M, N, T], which is x a word later, and `group` i32[M].

    Raises:
      ValueError: an argument out of range, or examples were given.

    >>> federation = topics(clients=4, vocabulary=50)
    >>> federation.train.x.shape, federation.info.group_names
    ((4, 140, 20), ('topic 1', 'topic 2', 'topic 3', 'topic 4'))
    """
    check_drawn("topics", examples)
    if not 1 <= followers <= vocabulary:
        raise ValueError(f"followers={followers} is not between 1 and the {vocabulary} words: correct one of them.")
    group = partition.assign_groups(clients, num_groups, "topics")
    sizes = sizes_of_drawn(clients, DRAWN_PER_CLIENT if examples_per_client is None else examples_per_client)
    language, draw, part = partition.generators(seed, 3)
    weights = 1 / np.arange(1, followers + 1)
    successors = np.stack([_successors(language, vocabulary, followers) for _ in range(num_groups + 1)])
    text = _texts(draw, successors, weights / weights.sum(), common, np.repeat(group, sizes) + 1, length + 1)
    info = DatasetInfo("topics", (length,), vocabulary, "language")
    rows = partition.divide(np.arange(len(text)), sizes)
    names = tuple(f"topic {number}" for number in range(1, num_groups + 1))
    return partition.federate(Examples(text[:, :-1], text[:, 1:], info), rows, part, test_fraction, group, names)


def _successors(rng: np.random.Generator, vocabulary: int, followers: int) -> np.ndarray:
    """For each word different words that may follow it, the likeliest first; i32[vocabulary, followers]."""
    frequency = 1 / rng.permutation(np.arange(1, vocabulary + 1))
    # The smallest exponential times are a draw without replacement, in its order.
    times = rng.standard_exponential((vocabulary, vocabulary)) / frequency
    return times.argsort(axis=1)[:, :followers].astype(np.int32)


def _texts(
    rng: np.random.Generator, successors: np.ndarray, weights: np.ndarray, common: float, topic: np.ndarray, length: int
) -> np.ndarray:
    """i32[N, length]: a text of each `topic` i32[N]; `successors` are i32[1 + topics, vocabulary, followers]."""
    count, (_, vocabulary, followers) = len(topic), successors.shape
    text = np.empty((count, length), np.int32)
    text[:, 0] = rng.integers(vocabulary, size=count)
    for place in range(1, length):
        of = np.where(rng.random(count) < common, 0, topic)
        text[:, place] = successors[of, text[:, place - 1], rng.choice(followers, size=count, p=weights)]
    return text
