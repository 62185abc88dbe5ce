"""Scenarios whose clients are given by the data set."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_cluster.data import partition
from fedjax_cluster.data.scenarios.registry import scenario
from fedjax_cluster.data.validation import check_examples
from fedjax_cluster.types import Examples, Federation, UserFederation


@scenario
def users(
    examples: Examples,
    *,
    user_ids: Any = None,
    clients: int | None = None,
    min_examples: int = 2,
    seed: int = 0,
    test_fraction: float = 0.3,
    examples_per_client: int | None = None,
) -> Federation:
    """One client for each user of a data set with a user-id column (FEMNIST, Landmarks-User, iNaturalist-User).

    Args:
      examples: any.
      user_ids: [N], of any type that can be sorted; the user of each example. Default is what the examples tell, as
        those that `npz`, `table` and `image_folder` read from files with users do.
      clients: M users drawn at random among those with enough examples; default is all of them.
      min_examples: users with fewer are left out; at least 2.
      seed: decides which users and examples take part, and who is tested on which.
      examples_per_client: most examples of a user, drawn at random; default is all.

    Returns:
      A Federation with clients in the order of their ids, which are its `user_ids` [M], and no `group`.

    Raises:
      ValueError: ids that do not match the examples, too few users, or an argument out of range.

    >>> from fedjax_cluster.data import digits
    >>> users(digits(), user_ids=np.arange(1797) % 100, clients=7).train.x.shape
    (7, 13, 8, 8)
    """
    check_examples(examples, labelled=False)
    if user_ids is None:
        user_ids = getattr(examples, "user_ids", None)
    if user_ids is None:
        raise ValueError(
            f"The examples of {examples.info.name!r} name no users: give user_ids in Python, or data with users: an "
            ".npz file with an array `user`, a table with a column of users, or a folder of images by user and class."
        )
    distinct, user, counts = partition.sorted_ids("user_ids", user_ids, len(examples.y))
    choose, deal, part = partition.generators(seed, 3)
    of_user = partition.divide(np.argsort(user, kind="stable"), counts)
    eligible = np.flatnonzero(counts >= min_examples)
    if clients is not None:
        if clients > len(eligible):
            raise ValueError(
                f"There are {len(eligible)} users with {min_examples} examples or more, too few for {clients} clients: "
                f"ask for fewer clients, or for a smaller `min_examples`."
            )
        eligible = np.sort(choose.permutation(eligible)[:clients])
    elif len(eligible) == 0:
        raise ValueError(f"No user has {min_examples} examples: choose a smaller `min_examples`.")
    rows = [of_user[i] for i in eligible]
    if examples_per_client is not None:
        rows = [deal.permutation(of_client)[:examples_per_client] for of_client in rows]
    return UserFederation.of(partition.federate(examples, rows, part, test_fraction), distinct[eligible])
