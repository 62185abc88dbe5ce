"""Checks of data before any computation starts; every message names the place and the remedy."""

from __future__ import annotations

import logging
import typing
from collections.abc import Mapping

import numpy as np

from fedjax_cluster.data.stored import Rows, dtype_of
from fedjax_cluster.options import LARGEST, checked, shown
from fedjax_cluster.types import ClientData, DatasetInfo, Examples, Federation

LOG = logging.getLogger(__name__)
DARKEST = 16  # images of bytes up to this are of another scale


def check_federation(federation: Federation, num_clusters: int | None = None) -> None:
    """Raises ValueError where a federation cannot be trained on.

    Args:
      federation: x [M, N, ...], y [M, N, ...], num_examples int[M] in each part; `validation`, `group` int[M] or None.
      num_clusters: K, or None where a method estimates it.

    Raises:
      ValueError: K < 1 or K > M, an empty client, arrays that do not fit each other or `info`, NaN or infinity, labels
        that are not integers in [0, num_classes), or images of integers other than uint8.

    >>> from fedjax_cluster.data import scenarios, digits
    >>> check_federation(scenarios.rotated(digits(), clients=8), num_clusters=9)
    Traceback (most recent call last):
    ...
    ValueError: 8 clients cannot fill 9 clusters: ask for at most 8 clusters, or for more clients.
    """
    if not isinstance(federation, Federation):
        raise ValueError(
            f"federation is {shown(federation)}: give a Federation, such as fc.data.scenarios.rotated makes."
        )
    _check_info(federation.info)
    checked("num_clusters", num_clusters, int | None)
    parts = {"train": federation.train, "test": federation.test, "validation": federation.validation}
    clients = None
    for name, data in parts.items():
        if data is None and name == "validation":
            continue
        if not isinstance(data, ClientData):
            raise ValueError(f"The part {name!r} is a {type(data).__name__}: give ClientData(x, y, num_examples).")
        _check_part(name, data, federation.info)
        clients = len(data.x) if clients is None else clients
        if len(data.x) != clients:
            raise ValueError(
                f"The part {name!r} has {len(data.x)} clients, but 'train' has {clients}: give all the same clients."
            )
    assert clients is not None
    _check_alike(parts)
    group = None if federation.group is None else np.asarray(federation.group)
    if group is not None and group.shape != (clients,):
        raise ValueError(
            f"`group` has the shape {list(group.shape)}, but there are {clients} clients: give one integer per client, "
            "or None where the true groups are unknown."
        )
    if group is not None and not np.issubdtype(group.dtype, np.integer):
        raise ValueError(f"`group` has the dtype {group.dtype}, not integers: renumber it, with −1 where unknown.")
    if num_clusters is not None and num_clusters < 1:
        raise ValueError(f"{num_clusters} clusters cannot hold any client: ask for at least 1.")
    if num_clusters is not None and num_clusters > clients:
        raise ValueError(
            f"{clients} clients cannot fill {num_clusters} clusters: ask for at most {clients} clusters, or for more "
            "clients."
        )


def _check_alike(parts: Mapping[str, typing.Any]) -> None:
    """Raises ValueError where some parts are of bytes, which models scale, and some not, or test rows alone on disk."""
    for name, data in parts.items():
        train = parts["train"]
        if data is None or train is None:
            continue
        if name == "test" and isinstance(data.x, Rows) != isinstance(train.x, Rows):
            raise ValueError(
                "The rows of one part are on disk, and those of the other in memory: bring both into memory with "
                "fc.data.in_memory, or write both."
            )
        one, other = dtype_of(train.x), dtype_of(data.x)
        if (one == np.uint8) != (other == np.uint8):
            raise ValueError(
                f"x of 'train' is {one}, but x of {name!r} is {other}: models divide bytes by 255, and nothing else; "
                "give both in one dtype."
            )


def check_examples(examples: Examples, *, labelled: bool = True) -> None:
    """Raises ValueError where a source, with integer labels if `labelled`, cannot be divided among clients."""
    if not isinstance(examples, Examples):
        raise ValueError(
            f"A scenario starts from examples, but was given a {type(examples).__name__}: pass fc.data.digits(), "
            "fc.data.tfds(name) or fc.data.from_arrays(x, y) without client ids."
        )
    _check_info(examples.info)
    x, y = np.asarray(examples.x), np.asarray(examples.y)
    check_lengths(x, y)
    check_finite("x", x)
    if labelled and y.ndim != 1:
        raise ValueError(
            f"{examples.info.name!r} has no single label for each example, as y is {list(y.shape)}: take the scenario "
            "`users` or `size_skew`, or give such labels."
        )
    if labelled and examples.info.task == "regression":
        raise ValueError(
            f"{examples.info.name!r} has values to predict and no classes, which this scenario divides by: take "
            "`users` or `size_skew`."
        )
    if examples.info.task == "classification" or labelled:
        check_labels(y, examples.info.num_classes)
    else:
        check_finite("y", y)


def check_undivided(examples: Examples, who: str) -> None:
    """Raises ValueError where examples say which rows are tested on, which `who` would divide in another way."""
    # A name in their place is text, whose `split` is a method.
    if isinstance(examples, Examples) and getattr(examples, "split", None) is not None:
        raise ValueError(
            f"the split of {examples.info.name} is used by the scenario users alone, not by {who}: leave "
            "--split-column or the array split out (put LEAF's files into one folder), or take the scenario users"
        )


def _check_info(info: DatasetInfo) -> None:
    checked("info", info, DatasetInfo)
    for name, hint in typing.get_type_hints(DatasetInfo).items():
        checked(f"info.{name}", getattr(info, name), hint)
    check_class_names(info)


def check_class_names(info: DatasetInfo) -> None:
    """Raises ValueError where some classes have names and some not."""
    if len(info.class_names) not in (0, info.num_classes):
        raise ValueError(
            f"class_names are {len(info.class_names)} and num_classes is {info.num_classes}: give one name for each "
            "class, or none"
        )


def check_lengths(x: np.ndarray, y: np.ndarray) -> None:
    """Raises ValueError unless x and y have as many rows, and at least one."""
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise ValueError(
            f"x {list(x.shape)} and y {list(y.shape)} differ in examples, their first axis: give one y for each x."
        )
    if len(x) == 0:
        raise ValueError("There are no examples at all, x and y are empty: give at least two.")
    if 0 in x.shape:
        raise ValueError(f"x {list(x.shape)} has no features: give at least one for each example.")


def check_finite(name: str, values: np.ndarray, owner: str = "example") -> None:
    """Raises ValueError where values are not finite as float32, which models take; names the first place."""
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{name} has the dtype {values.dtype}, but models take real numbers: convert it.")
    if not np.issubdtype(values.dtype, np.inexact) or values.size == 0:
        return
    # Neither bound holds as soon as one value is not finite, and no array of booleans is needed.
    if float(values.min()) >= -LARGEST and float(values.max()) <= LARGEST:
        return
    bad = ~(np.abs(values.astype(np.float64)) <= LARGEST)
    first = int(np.argmax(bad.reshape(len(values), -1).any(axis=1)))
    what = "values beyond float32" if np.isfinite(values).all() else "NaN or infinity"
    raise ValueError(f"{name} holds {what}, first in {owner} {first} ({bad.sum()} such values): drop or mend them.")


def check_pixels(name: str, x: np.ndarray, input_dimensions: int, task: str, *, quiet: bool = False) -> bool:
    """Raises ValueError for images of integers that models do not scale; warns of what looks unscaled, and tells so."""
    if task == "language":
        return False
    warn = LOG.debug if quiet else LOG.warning
    if x.dtype == np.uint8:
        largest = int(x[:100].max(initial=0))
        dark = input_dimensions >= 2 and 0 < largest <= DARKEST
        if dark:
            warn(f"{name} holds bytes up to {largest}, which models divide by 255: spread them over 0 to 255")
        return dark
    if input_dimensions >= 2 and np.issubdtype(x.dtype, np.integer):
        raise ValueError(
            f"{name} holds images of dtype {x.dtype}, which models do not scale, while they scale uint8 to [0, 1]: "
            "convert them with x.astype(np.uint8), or to floats between 0 and 1."
        )
    some = x[:100]
    whole = np.issubdtype(x.dtype, np.floating) and some.max() > 16 and (some % 1 == 0).all() and some.min() >= 0
    if whole:
        warn(f"{name} holds floats up to {some.max():g}, which models do not scale: give uint8, or divide them")
    return bool(whole)


def pixels_of(x: np.ndarray) -> np.ndarray:
    """Rows as uint8, of which a run is; floats between 0 and 1 as they are, which bytes become in a model.

    Raises:
      ValueError: numbers that are neither.
    """
    if x.dtype.kind not in "iuf":  # bfloat16, and what is true or not
        x = x.astype(np.float32)
    if not x.size or (x.dtype.kind == "f" and x.min() >= 0 and x.max() <= 1):
        return x
    if x.min() >= 0 and x.max() <= 255 and (x.dtype.kind != "f" or (x % 1 == 0).all()):
        return x.astype(np.uint8)
    raise ValueError(
        f"x holds {x.dtype} from {x.min():g} to {x.max():g}, but the clients' rows are bytes, which models divide by "
        "255; give bytes, or floats between 0 and 1"
    )


def check_labels(labels: np.ndarray, num_classes: int, owner: str = "") -> None:
    """Raises ValueError unless labels are integers in [0, num_classes)."""
    where = f" of {owner}" if owner else ""
    if labels.ndim > 1 and labels.shape[-1] > 1 and (np.sort(labels)[..., -2:] == (0, 1)).all() and labels.min() == 0:
        raise ValueError(
            f"Labels{where} {list(labels.shape)} are one-hot, but classes are integers: give labels.argmax(axis=-1)."
        )
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"The labels{where} have the dtype {labels.dtype}, but classes are integers from 0 on: convert them, for "
            "instance with np.unique(labels, return_inverse=True)[1]."
        )
    if labels.size and (labels.min() < 0 or labels.max() >= num_classes):
        raise ValueError(
            f"The labels{where} lie between {labels.min()} and {labels.max()}, but with {num_classes} classes they "
            f"must lie between 0 and {num_classes - 1}: correct the labels or the number of classes."
        )


def check_tokens(num_classes: int, **tokens: np.ndarray) -> None:
    """Raises ValueError unless tokens, by what they are of, are integers in [0, num_classes)."""
    for which, found in tokens.items():
        if found.size and (found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= (num_classes or np.inf)):
            raise ValueError(
                f"{which} holds {found.dtype} from {found.min()} to {found.max()}, but tokens are integers from 0 on, "
                f"below the {num_classes} classes: correct them, or the number of classes."
            )


def _check_part(name: str, data: ClientData, info: DatasetInfo) -> None:
    if info.task == "regression" and dtype_of(data.y) == np.uint8:
        how = "write the population anew" if isinstance(data.y, Rows) else "give y.astype(np.float32)"
        raise ValueError(f"y of {name!r} holds bytes, which are divided by 255: {how}.")
    if isinstance(data.x, Rows):
        # The rest was checked client by client when it was written.
        if not np.array_equal(np.asarray(data.num_examples), data.x.store.counts[data.x.part]):
            raise ValueError(
                f"`num_examples` of {name!r} is not that of the population on disk, whose rows are read as they are: "
                "leave it, or write another population."
            )
        return
    x, y, counts = (np.asarray(array) for array in data)
    if x.ndim < 2 or y.ndim < 2 or x.shape[:2] != y.shape[:2]:
        raise ValueError(
            f"In {name!r}, x {list(x.shape)} and y {list(y.shape)} differ in clients or rows: give one y for each x."
        )
    clients, rows = x.shape[:2]
    if clients == 0:
        raise ValueError(f"{name!r} has no clients at all: give at least one.")
    if x.shape[2:] != tuple(info.input_shape):
        raise ValueError(
            f"Inputs of {name!r} have the shape {list(x.shape[2:])}, but `info.input_shape` is "
            f"{list(info.input_shape)}: correct one of them."
        )
    _check_counts(name, counts, clients, rows)
    check_finite(f"x of {name!r}", x, "client")
    check_pixels(f"x of {name!r}", x, x.ndim - 2, info.task)
    if info.task == "classification":
        check_labels(y[np.arange(rows) < counts[:, None]], info.num_classes, repr(name))
    else:
        check_finite(f"y of {name!r}", y, "client")
    if info.task == "language":
        check_tokens(info.num_classes, **{f"x of {name!r}": x, f"y of {name!r}": y})
    if info.task == "language" and x.dtype == np.uint8:
        raise ValueError(f"x of {name!r} holds tokens as bytes, which models divide by 255: give x.astype(np.int32).")


def _check_counts(name: str, counts: np.ndarray, clients: int, rows: int) -> None:
    if counts.shape != (clients,) or not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(
            f"`num_examples` of {name!r} is {counts.dtype} of shape {list(counts.shape)}, but there are {clients} "
            "clients: give one integer for each."
        )
    # Not everybody need have rows to choose by.
    least = 0 if name == "validation" and (counts > 0).any() else 1
    if (counts < least).any():
        empty = np.flatnonzero(counts < least)
        listed = ", ".join(map(str, empty[:5])) + (", …" if len(empty) > 5 else "")
        raise ValueError(
            f"{len(empty)} of {clients} clients have no example in {name!r}: client {listed}. Leave them out."
        )
    if (counts > rows).any():
        client = int(np.argmax(counts > rows))
        raise ValueError(
            f"`num_examples` gives client {client} {counts[client]} examples in the {rows} rows of {name!r}: fix it."
        )
