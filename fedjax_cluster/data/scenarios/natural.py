"""Scenarios whose clients are given by the data set."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from fedjax_cluster.data import partition
from fedjax_cluster.data.own_examples import MISSING, numbers, row_parts
from fedjax_cluster.data.scenarios.registry import scenario
from fedjax_cluster.data.validation import check_examples
from fedjax_cluster.types import Examples, Federation, UserFederation

logger = logging.getLogger(__name__)

UNKNOWN = ("-1", *MISSING)  # texts for a user's group
TEST_FRACTION = 0.3
TRIED = ("train", "test")


@scenario
def users(
    examples: Examples,
    *,
    user_ids: Any = None,
    group_ids: Any = None,
    clients: int | None = None,
    min_examples: int = 2,
    seed: int = 0,
    test_fraction: float = TEST_FRACTION,
    examples_per_client: int | None = None,
) -> Federation:
    """One client for each user of a data set with a user-id column (FEMNIST, Landmarks-User, iNaturalist-User).

    Where the examples tell which rows are for training, testing and validation, as those of `npz` and `table` with a
    split do, a client's rows are divided so, and `test_fraction` has no place. Users without a row to train on or to
    test on are then left out.

    Args:
      examples: any.
      user_ids: [N], of any type that can be sorted; the user of each example. Default is what the examples tell, as
        those that `npz`, `table` and `image_folder` read from files with users do.
      group_ids: [N] likewise, one for all examples of a user; the true group of the example's user; −1, "", "NA", None
        or NaN where it is not known. Default is what the examples tell, where they tell the users, or no groups.
      clients: M users drawn at random among those with enough examples; default is all of them.
      min_examples: users with fewer are left out; at least 2.
      seed: decides which users and examples take part, and who is tested on which.
      examples_per_client: most examples of a user for training and testing, drawn at random; default is all. Of rows
        that are divided already each part is drawn from, and as large a share of the validation rows.

    Returns:
      A Federation with clients in the order of their ids, which are its `user_ids` [M]; with `group` where there are
      `group_ids`, numbered in their order; with `validation` where there are such rows, which some clients may lack.

    Raises:
      ValueError: ids that do not match the examples, a user in two groups, too few users, an argument out of range, or
        a `test_fraction` of rows that are divided already.

    >>> from fedjax_cluster.data import digits
    >>> writers = np.arange(1797) % 100
    >>> federation = users(digits(), user_ids=writers, group_ids=writers % 3, clients=7)
    >>> federation.train.x.shape, federation.group
    ((7, 13, 8, 8), array([0, 2, 2, 0, 1, 0, 1], dtype=int32))
    """
    check_examples(examples, labelled=False)
    told = getattr(examples, "user_ids", None)
    user_ids = told if user_ids is None else user_ids
    if group_ids is None and user_ids is told:
        group_ids = getattr(examples, "group_ids", None)
    if user_ids is None:
        raise ValueError(
            f"The examples of {examples.info.name!r} name no users: give user_ids in Python, or data with users: an "
            ".npz file with an array `user`, a table with a column of users, or a folder of images by user and class."
        )
    split = _split(examples, test_fraction)
    distinct, user, counts = partition.sorted_ids("user_ids", user_ids, len(examples.y))
    choose, deal, part = partition.generators(seed, 3)
    of_user = partition.divide(np.argsort(user, kind="stable"), counts)
    enough, both, among = counts >= min_examples, np.ones(len(counts), bool), ""
    if split is not None:
        both = np.logical_and(*(np.bincount(user[split == part], minlength=len(counts)) > 0 for part in TRIED))
        among = ", training and test rows among them"
    eligible = np.flatnonzero(enough & both)
    if clients is not None:
        if clients > len(eligible):
            raise ValueError(
                f"There are {len(eligible)} users with {min_examples} examples or more{among}, too few for "
                f"{clients} clients: ask for fewer clients, or for a smaller `min_examples`."
            )
        eligible = np.sort(choose.permutation(eligible)[:clients])
    elif len(eligible) == 0:
        other = ", or another split" if among else ""
        raise ValueError(f"No user has {min_examples} examples{among}: choose a smaller `min_examples`{other}.")
    lacking = {f"fewer than {min_examples} examples": ~enough, "no training or no test row": enough & ~both}
    for lack, whose in lacking.items():
        if few := int(whose.sum()):
            some = ", ".join(map(str, distinct[whose][:3])) + (", …" if few > 3 else "")
            logger.warning(f"{few} of {len(counts)} users have {lack} and are left out: {some}")
    rows = [of_user[i] for i in eligible]
    group, names = (None, ()) if group_ids is None else _groups(group_ids, user, distinct, eligible)
    if split is not None:
        train, test, validation = _as_told(rows, split, deal, examples_per_client)
        validation = validation if any(map(len, validation)) else None
        federation = partition.assemble(examples, train, test, group, names, validation)
    else:
        if examples_per_client is not None:
            rows = [deal.permutation(of_client)[:examples_per_client] for of_client in rows]
        federation = partition.federate(examples, rows, part, test_fraction, group, names)
    return UserFederation.of(federation, distinct[eligible])


def _split(examples: Examples, test_fraction: float) -> np.ndarray | None:
    """What each row is for, [N], where the examples tell it."""
    told = getattr(examples, "split", None)
    if told is None:
        return None
    if test_fraction != TEST_FRACTION:
        raise ValueError(
            f"test_fraction is {test_fraction:g}, but the split of {examples.info.name} tells which rows are tested "
            "on: give one of the two"
        )
    split = row_parts(np.asarray(told))
    if split.shape != (len(examples.y),):
        raise ValueError(
            f"the split has the shape {list(split.shape)} for {len(examples.y)} examples: give one for each."
        )
    return split


def _as_told(
    rows: partition.Rows, split: np.ndarray, deal: np.random.Generator, most: int | None
) -> tuple[partition.Rows, partition.Rows, partition.Rows]:
    """Training, test and validation rows of each client; `most` of the first two, in the proportions that they have."""
    train, test, validation = (
        [of_client[split[of_client] == part] for of_client in rows] for part in (*TRIED, "validation")
    )
    for client in range(len(rows)):
        there = len(train[client]) + len(test[client])
        if most is None or there <= most:
            continue
        tests = min(max(round(most * len(test[client]) / there), 1), most - 1)
        others = max(round(most * len(validation[client]) / there), 1)
        for part, count in ((train, most - tests), (test, tests), (validation, others)):
            part[client] = deal.permutation(part[client])[:count]
    return train, test, validation


def _groups(
    group_ids: Any, user: np.ndarray, distinct: np.ndarray, eligible: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The groups i32[M] of the eligible users, −1 where unknown, and the names of those that occur.

    Args:
      group_ids: [N].
      user: i64[N], the place of each example's user in `distinct`.
      distinct: the users' ids.
      eligible: i64[M], places in `distinct`.
    """
    given = group_ids if hasattr(group_ids, "dtype") else np.asarray(group_ids, object)
    if given.shape != user.shape:
        raise ValueError(f"group_ids has the shape {list(given.shape)} for {len(user)} examples: give one id for each.")
    there = ~partition.is_missing(given)
    there &= np.array([not isinstance(one, str) or one.strip() not in UNKNOWN for one in given.tolist()], bool)
    ids, found, _ = partition.sorted_ids("group_ids", numbers(np.asarray(given)[there], names=True), int(there.sum()))
    known = ids != -1 if ids.dtype.kind in "iuf" else np.array([str(one).strip() not in UNKNOWN for one in ids], bool)
    place = np.full(len(user), -1)
    place[there] = np.where(known, np.arange(len(ids)), -1)[found]
    of_user = np.zeros(len(distinct), int)
    of_user[user] = place
    wrong = np.flatnonzero(of_user[user] != place)
    if len(wrong):
        here = user[wrong[0]]
        both = ["unknown" if one < 0 else str(ids[one]) for one in (place[wrong[0]], of_user[here])]
        raise ValueError(
            f"the group of user {distinct[here]} is {both[0]} in some rows and {both[1]} in others: a client has one "
            "group, so give all its rows the same."
        )
    present = np.unique(of_user[eligible][of_user[eligible] >= 0])
    number = np.full(len(ids) + 1, -1, np.int32)  # the last is that of unknown groups
    number[present] = np.arange(len(present))
    return number[of_user[eligible]], tuple(str(ids[one]) for one in present)
