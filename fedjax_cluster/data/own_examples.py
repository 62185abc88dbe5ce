"""Examples of what files of one's own hold: labels, users, groups and parts of rows, and a name that tells it all."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cluster.data.sources import from_arrays
from fedjax_cluster.types import Examples, UserExamples

LOG = logging.getLogger(__name__)
LONGEST_NAME = 40  # characters of a label in the log
USER, GROUP, SPLIT = "user", "group", "split"
MOST_NAMED = 8  # columns in a message
EXACT = 2**53  # from which on float64 has not every whole number
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")  # as it is written
MISSING = ("", "NA", "N/A", "NaN", "nan", "null")  # as pandas and R write what is not there
# What a row is for, by the words for it.
PARTS = {"train": "train", "test": "test", **dict.fromkeys(("validation", "valid", "val"), "validation")}


def named_examples(
    file: Path,
    x: np.ndarray,
    labels: np.ndarray,
    users: np.ndarray | None,
    groups: np.ndarray | None = None,
    split: np.ndarray | None = None,
    *,
    named: bool = False,
    **options: Any,
) -> Examples:
    """Examples named after the file and what it holds, so that a changed file is another experiment.

    Args:
      file: the file or folder.
      x: [N, ...] numbers.
      labels: [N] numbers or text, or [N, ...] numbers.
      users: [N] numbers or text, or None.
      groups: the same of their groups; ignored without users.
      split: [N] words as `row_parts` takes them, or None.
      named: the labels are names of classes, such as 0.5, and never values.
      **options: of `from_arrays`.
    """
    try:
        labels, users, groups, split = map(_decoded, (labels, users, groups, split))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} holds text as bytes that are no UTF-8 ({error}); save it as text") from None
    for what, each in ((USER, users), (GROUP, groups), (SPLIT, split)):
        if each is not None and each.shape != np.shape(labels)[:1]:
            raise ValueError(
                f"{file}: {what} {list(each.shape)} and labels {list(labels.shape)} differ: give one for each."
            )
    if users is not None and "" in users.tolist():
        row = users.tolist().index("") + 1
        raise ValueError(f"{file} has no user in row {row}: give one, or leave the row out.")
    values = options.get("task") == "regression"
    if not values and labels.ndim == 2 and labels.shape[1] == 1 and labels.dtype.kind != "f":
        labels = labels[:, 0]
    try:
        check_there(labels)
        if users is not None:
            check_there(users, "users", "user")
        parts = None if split is None else row_parts(split)
        declared = options.get("num_classes")
        y, names = (numbers(labels).astype(np.float32), ()) if values else classes(labels, declared, named=named)
        examples = from_arrays(x, y, **options)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    assert isinstance(examples, Examples)
    ids = None if users is None else numbers(users, names=True)
    of_group = None if users is None or groups is None else numbers(groups, names=True)
    told = (examples.info, *(None if each is None else each.tolist() for each in (ids, of_group)))
    # Without groups, a split or classes' names, the names that files had before there were any.
    told = told if of_group is not None or parts is not None else told[:2]
    described = repr(told if parts is None else (*told, parts.tolist())).replace(", class_names=()", "", 1)
    digest = hashlib.blake2b(described.encode(), digest_size=4)
    for array in (examples.x, examples.y):
        digest.update(np.ascontiguousarray(array).data)
    info = examples.info._replace(name=f"{file.resolve().name}@{digest.hexdigest()}", class_names=names)
    examples = examples._replace(info=info)
    return examples if ids is None and parts is None else UserExamples.of(examples, ids, of_group, parts)


def _decoded(texts: np.ndarray | None) -> Any:
    """Text for bytes."""
    return np.char.decode(texts, "utf-8") if texts is not None and texts.dtype.kind == "S" else texts


def row_parts(split: np.ndarray) -> np.ndarray:
    """What each row is for, "train", "test" or "validation", of words in any case with spaces around them.

    Args:
      split: [N], "train", "test", or "validation", which "val" and "valid" stand for as well.

    Raises:
      ValueError: something else, or no row to train on or to test on.

    >>> row_parts(np.array(["Train", " test ", "val"])).tolist()
    ['train', 'test', 'validation']
    """
    given = split.tolist()
    # Numbers and booleans too: who writes 1 may mean either.
    parts = [PARTS.get(str(value).strip().lower()) for value in given]
    if None in parts:
        row = parts.index(None)
        raise ValueError(
            f"the split is {given[row]!r} in row {row + 1}, which does not tell what the row is for: write train, test "
            "or validation"
        )
    for part in ("train", "test"):
        if part not in parts:
            raise ValueError(f"the split has no {part} row: give each user rows of both, train and test")
    return np.array(parts)


def classes(
    labels: np.ndarray, declared: int | None = None, *, named: bool = False
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Whole numbers 0 to K − 1 as they are, others and text numbered in their order; values with fractions as f32.

    Args:
      labels: [N], or [N, ...], which is left alone.
      declared: the number of classes where the data tell it: then whole numbers mean what they are.
      named: number those with fractions, too.

    Returns:
      The numbers, and what those that were numbered here are called.

    >>> classes(np.array(["dog", "cat", "dog"]))
    (array([1, 0, 1], dtype=int32), ('cat', 'dog'))
    """
    values = numbers(labels)
    if values.dtype.kind == "f" and not named:
        return values.astype(np.float32), ()
    whole = values.dtype.kind in "iu"
    if values.ndim != 1 or not values.size or (whole and declared is not None):
        return values, ()
    try:
        found, places = np.unique(values, return_inverse=True)
    except TypeError:
        raise ValueError("the labels hold nothing in some rows, or values of several kinds: mend them") from None
    if whole and found[0] == 0 and found[-1] == len(found) - 1:
        return values, ()
    if whole:
        LOG.warning(
            f"the labels {listed(found.tolist())} are numbered 0 to {len(found) - 1} in their order; where they are "
            "values to predict, say so by task='regression' (--task regression)"
        )
    else:
        numbered = listed([f"{number} {str(name)[:LONGEST_NAME]}" for number, name in enumerate(found)])
        LOG.warning(f"the labels are numbered in their order: {numbered}")
    return places.astype(np.int32), tuple(map(str, found.tolist()))


def check_there(labels: np.ndarray, what: str = "labels", one: str = "class") -> None:
    """Raises ValueError for text that stands where a label, or a user, is missing."""
    if labels.ndim == 1 and labels.dtype.kind in "UO":
        lacking = [row for row, label in enumerate(labels.tolist()) if isinstance(label, str) and label in MISSING]
        if lacking:
            raise ValueError(
                f"the {what} hold {str(labels[lacking[0]])!r} in row {lacking[0] + 1}, which stands for a missing one: "
                f"leave such rows out, or call the {one} otherwise"
            )


def numbers(values: np.ndarray, *, names: bool = False) -> np.ndarray:
    """Text and floats as whole numbers where all of them are, else text as floats where all are, else as it is.

    Text stays where numbers would make two texts one, as "7" and "007", or those too long for 64 bits; of `names` of
    users and groups also what is not how such a number is written, such as "007" alone, or "1e3".
    """
    if values.dtype.kind == "b":
        return values.astype(np.int32)
    texts = values
    if texts.dtype.kind in "UO":
        written = [str(text).strip() for text in texts.ravel().tolist()]
        if not all(NUMBER.fullmatch(text) if names else "_" not in text for text in written):
            return texts
        try:
            values = texts.astype(str).astype(np.int64)
        except (ValueError, OverflowError):
            try:
                values = texts.astype(np.float64)
            except (ValueError, TypeError):
                return texts
            if names and values.size and np.abs(values).max() >= EXACT:  # one long id would round the others, too
                return texts
        if len(np.unique(values)) < len({str(text).strip() for text in texts.ravel().tolist()}):
            return texts
    if values.dtype.kind == "f" and np.isfinite(values).all() and (values % 1 == 0).all() and values.size:
        return values.astype(np.int64) if np.abs(values).max() < 2**63 else values
    return values


def listed(names: Sequence[Any]) -> str:
    if len(names) > MOST_NAMED:
        # Labels, users and groups often stand last.
        names = [*names[: MOST_NAMED // 2], "…", *names[-MOST_NAMED // 2 :]]
    return ", ".join(map(str, names)) or "nothing"
