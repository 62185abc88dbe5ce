"""Data sets of the Hugging Face hub, and what the partitioners of Flower Datasets make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_cluster.data import partition
from fedjax_cluster.data.image_folders import in_colour, pixels
from fedjax_cluster.data.own_examples import check_there, classes, numbers
from fedjax_cluster.data.sources import DatasetNotFoundError, from_arrays, more_than_numbers
from fedjax_cluster.options import INSIDE_UNIT, SEED, with_checks
from fedjax_cluster.types import Examples, Federation, Task, UserExamples

ROWS_AT_ONCE = 4096


@with_checks()
def huggingface(
    name: str,
    *,
    split: str = "all",
    inputs: str | None = None,
    label: str | None = None,
    user: str | None = None,
    group: str | None = None,
    task: Task | None = None,
) -> Examples:
    """A data set of the Hugging Face hub, such as `ylecun/mnist`; needs the package `datasets`.

    Args:
      name: as the hub has it; on the command line after `hf:`.
      split: one of its splits; `all` is train followed by test.
      inputs: column of images or of numbers; default is the only one of images.
      label: column of labels; default is the only one that declares its classes.
      user: column of users; default is none.
      group: column of the users' true groups; default is none.
      task: "regression" where whole numbers in the column of labels are values and no classes.

    Returns:
      Examples with x uint8 [N, H, W, channels] of images, with `user_ids` where a column of users is named, and with
      `group_ids` where one of groups is. The library keeps what it downloads in its own cache; `HF_HUB_OFFLINE=1`
      forbids downloads.

    Raises:
      ValueError: no such column or split, groups without users, images that differ in size, or `datasets` is not
        installed.
      DatasetNotFoundError: it cannot be downloaded.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            "data sets of the Hugging Face hub need the package datasets, which is not installed: pip install datasets"
        ) from error
    try:
        found = datasets.load_dataset(name)
    except Exception as error:
        # Failures of names, network, server and disk have no common base class.
        reason = " ".join(str(error).split())
        raise DatasetNotFoundError(f"{name!r} of the Hugging Face hub cannot be had: {reason}") from error
    wanted = [part for part in ("train", "test") if part in found] if split == "all" else [split]
    if not wanted or any(part not in found for part in wanted):
        raise ValueError(f"{name!r} has no split {split!r}: choose one of all (train, test), {', '.join(found)}")
    if group is not None and user is None:
        raise ValueError(f"group is {group!r}, but there are no users, who are in groups: name their column")
    whole = datasets.concatenate_datasets([found[part] for part in wanted])
    if not len(whole):
        raise ValueError(f"{name!r} has no rows in {' and '.join(wanted)}: choose another split of {', '.join(found)}")
    x, y, declared, users, groups = _columns(whole, inputs, label, user, group)
    if task == "regression" and declared is not None:
        raise ValueError(f"task is 'regression', but the labels of {name!r} are {len(declared)} classes: leave it out")
    examples = _named(x, y, declared, name, task)
    return examples if users is None else UserExamples.of(examples, users, groups)


@with_checks(but=("partitioner",), test_fraction=INSIDE_UNIT, seed=SEED)
def from_partitioner(
    partitioner: Any,
    *,
    inputs: str | None = None,
    label: str | None = None,
    test_fraction: float = 0.3,
    seed: int = 0,
    name: str = "partitions",
) -> Federation:
    """The federation that a partitioner of Flower Datasets (`flwr_datasets.partitioner`) makes: a client a partition.

    Args:
      partitioner: with its data set, that is after `partitioner.dataset = ...`, or from a `FederatedDataset`.
      inputs: column of images or of numbers; default is the only one of images.
      label: column of labels; default is the only one that declares its classes.
      test_fraction: share of each client's rows that it is tested on.
      seed: decides which rows these are.
      name: appears in reports.

    Returns:
      A Federation in the order of the partitions, whose `group` is None.

    Raises:
      ValueError: not a partitioner, no such column, or a partition with a single row.
    """
    if not hasattr(type(partitioner), "num_partitions") or not hasattr(partitioner, "load_partition"):
        raise ValueError(f"partitioner is a {type(partitioner).__name__}; give one of flwr_datasets.partitioner")
    try:
        parts = [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]
    except (AttributeError, IndexError, ValueError) as error:
        raise ValueError(
            f"the {type(partitioner).__name__} cannot divide its data ({error}): set its `dataset` first, and ask for "
            "no more partitions than that has rows"
        ) from error
    for number, part in enumerate(parts):
        if len(part) < 2:
            raise ValueError(
                f"Client {number} has {len(part)} example{'s' * (len(part) != 1)}, but training and test need one "
                "each: leave such clients out, or divide the data among fewer."
            )
    sources = [_columns(part, inputs, label) for part in parts]
    rows_of = _of_one_form([one[0] for one in sources])
    x, y = np.concatenate(rows_of), np.concatenate([one[1] for one in sources])
    examples = _named(x, y, sources[0][2], name)
    rows = partition.divide(np.arange(len(x)), np.array([len(part) for part in parts]))
    (rng,) = partition.generators(seed, 1)
    return partition.federate(examples, rows, rng, test_fraction)


def _of_one_form(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Rows of all partitions, grey images in three channels where others are coloured."""
    channels = {part.shape[-1] for part in parts if part.ndim == 4}
    if channels == {1, 3}:
        parts = [np.repeat(part, 3, -1) if part.ndim == 4 and part.shape[-1] == 1 else part for part in parts]
    for number, part in enumerate(parts):
        if part.shape[1:] != parts[0].shape[1:]:
            raise ValueError(
                f"the rows of client {number} have the shape {list(part.shape[1:])}, but those of client 0 "
                f"{list(parts[0].shape[1:])}: resize them, and use fc.data.from_arrays"
            )
    return parts


def _named(
    x: np.ndarray, y: np.ndarray, declared: Sequence[str] | None, name: str, task: Task | None = None
) -> Examples:
    count = None if declared is None else len(declared)
    if declared is None and task != "regression":
        check_there(np.asarray(y))
    y, names = (np.asarray(y, np.float32), ()) if task == "regression" else classes(y, count)
    examples = from_arrays(x, y, num_classes=count, name=name, task=task)
    assert isinstance(examples, Examples)
    names = names if declared is None else more_than_numbers(declared)
    return examples._replace(info=examples.info._replace(class_names=names))


def _columns(
    found: Any, inputs: str | None, label: str | None, user: str | None = None, group: str | None = None
) -> tuple[np.ndarray, np.ndarray, Sequence[str] | None, np.ndarray | None, np.ndarray | None]:
    """x, y, the names of the classes where they are declared, users and groups."""
    kinds = {column: type(feature).__name__ for column, feature in found.features.items()}
    inputs = _column("inputs", inputs, kinds, "Image")
    label = _column("label", label, kinds, "ClassLabel")
    for what, given in (("user", user), ("group", group)):
        if given is not None:
            _column(what, given, kinds, "")
    images = kinds[inputs] == "Image"
    chosen = found.select_columns(list(dict.fromkeys(column for column in (inputs, label, user, group) if column)))
    pieces: list[np.ndarray] = []
    rest: dict[str, list[Any]] = {column: [] for column in (label, user, group) if column}
    for start in range(0, len(found), ROWS_AT_ONCE):
        batch = chosen[start : start + ROWS_AT_ONCE]
        rows = [pixels(row) if images else np.asarray(row) for row in batch[inputs]]
        if images:
            rows = in_colour(rows)
        sides = 2 if images else None
        if len({row.shape[:sides] for row in rows} | {piece.shape[1:][:sides] for piece in pieces}) > 1:
            raise ValueError(f"the rows of {inputs!r} differ in shape: resize them, and use fc.data.from_arrays")
        pieces.append(np.stack(rows))
        for column, values in rest.items():
            values.extend(batch[column])
    x = np.concatenate(in_colour(pieces) if images else pieces)
    if images and x.ndim == 3:
        x = x[..., None]
    if user is not None:
        check_there(np.asarray(rest[user]), "users", "user")
    users, groups = (
        None if column is None else numbers(np.asarray(rest[column]), names=True) for column in (user, group)
    )
    return x, np.asarray(rest[label]), getattr(found.features[label], "names", None), users, groups


def _column(what: str, given: str | None, kinds: dict[str, str], kind: str) -> str:
    """The column that is named, or the only one of a kind."""
    fitting = [column for column, own in kinds.items() if own == kind]
    if given is None and len(fitting) == 1:
        return fitting[0]
    if given not in kinds:
        problem = f"there is no column {given!r}" if given is not None else f"{len(fitting)} columns are {kind}"
        raise ValueError(f"{problem}: give {what}, one of the columns {', '.join(kinds)}")
    return given
