"""Sources of examples: scikit-learn's digits, TFDS data sets, and arrays in memory."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import logging
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_cluster.data import cache, partition
from fedjax_cluster.data.validation import check_class_names, check_finite, check_labels, check_lengths, check_pixels
from fedjax_cluster.options import COUNT, INSIDE_UNIT, as_path, at_least, with_checks
from fedjax_cluster.quiet import absl_from
from fedjax_cluster.types import DatasetInfo, Examples, Federation, Task, UserFederation

LOG = logging.getLogger(__name__)

_RECORDS_AT_ONCE = 4096
_NAME = re.compile(r"(?P<name>\w+)(/(?P<config>[\w.\-]+))?(:(?P<version>[\d.*]+))?")


class DatasetNotFoundError(FileNotFoundError, ValueError):
    """A known data set whose files are not on this machine."""


def digits() -> Examples:
    """The 1 797 handwritten digits that come with scikit-learn; needs no network.

    Returns:
      Examples with x uint8 [1797, 8, 8] and y i32 [1797] in 0 … 9. The 17 grey levels are spread over 0 … 255, because
      models divide raw images by 255.

    >>> x, y, info = digits()
    >>> x.shape, x.dtype, int(x.max()), info.num_classes
    ((1797, 8, 8), dtype('uint8'), 255, 10)
    """
    # sklearn.datasets.load_digits reads the same file, but importing it takes over a second.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DatasetNotFoundError("The digits come with scikit-learn, which is not installed: install scikit-learn.")
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    return Examples(x, table[:, -1].astype(np.int32), DatasetInfo("digits", (8, 8), 10))


@with_checks()
def tfds(
    name: str, split: str = "all", *, data_dir: str | os.PathLike | None = None, download: bool = False
) -> Examples:
    """An image classification data set of TensorFlow Datasets, read without TensorFlow.

    The files must be in TFDS's array_record (or parquet) format. Decoded images are kept in a memory-mapped cache
    (`FEDJAX_CLUSTER_CACHE`, `XDG_CACHE_HOME` or `~/.cache/fedjax_cluster`), which does not replace the files.

    Args:
      name: TFDS name such as `mnist`, `fashion_mnist` (or `fashion-mnist`), `cifar10`, `emnist/bymerge`, `mnist:3.0.1`.
        Data sets that TFDS does not know are found as well where they are in its format.
      split: `train`, `test` or another split; `all` is train followed by test (70 000 images for MNIST, as in papers).
      data_dir: where TFDS keeps its files; default `TFDS_DATA_DIR`, read at call time, or `~/tensorflow_datasets`.
      download: fetch and prepare the data set where it is absent, which needs TensorFlow.

    Returns:
      Examples with read-only x uint8 [N, H, W, channels] and y i32 [N], in the order of the files.

    Raises:
      ValueError: no such data set (close names are offered), no such split, or not image classification.
      DatasetNotFoundError: the files are absent; the message explains how to get them.

    >>> tfds("mnits")
    Traceback (most recent call last):
    ...
    ValueError: No TFDS data set is called 'mnits'. Close names: mnist, kmnist, emnist.
    """
    with _quiet():
        folder = data_folder(data_dir)
        builder = _builder(name, folder)
        image_feature, label_feature = _image_and_label(name, builder.info)
        builder = _prepared(name, builder, folder, download)
        splits = _splits(name, split, list(builder.info.splits))
        key = f"{builder.info.full_name.replace('/', '-')}-{split}-{_fingerprint(Path(builder.data_path))}"
        arrays = cache.read(key)
        if arrays is None:
            arrays = _decode(builder, splits, image_feature, label_feature)
            cache.write(key, *arrays)

    x, y = arrays
    names = builder.info.features[label_feature].names
    if len(y) and y.min() < 0:
        raise ValueError(f"Split {split!r} of {name!r} has images without labels: choose a split that has them.")
    known = builder.info.full_name.rpartition("/")[0]
    return Examples(x, y, DatasetInfo(known, x.shape[1:], len(names), class_names=more_than_numbers(names)))


def more_than_numbers(names: Sequence[str]) -> tuple[str, ...]:
    """What classes are called; nothing where each is called by its number.

    >>> more_than_numbers(["0", "1"]), more_than_numbers(["cat", "dog"])
    ((), ('cat', 'dog'))
    """
    return () if list(names) == list(map(str, range(len(names)))) else tuple(names)


@with_checks(but=("x", "y", "client_ids"), num_classes=COUNT, test_fraction=INSIDE_UNIT, seed=at_least(0))
def from_arrays(
    x: Any,
    y: Any,
    client_ids: Any = None,
    *,
    num_classes: int | None = None,
    task: Task | None = None,
    class_names: Sequence[str] = (),
    test_fraction: float = 0.3,
    seed: int = 0,
    name: str = "arrays",
) -> Examples | Federation:
    """Arrays in memory as a source, or as a federation where each row belongs to a client.

    Args:
      x: [N, ...] numbers. uint8 is kept, and models scale it to [0, 1]; float64 and int64 become float32 and int32.
      y: [N, ...]; in classification integers 0, 1, …
      client_ids: [N] of any type that can be sorted: one client for each distinct id, in sorted order.
      num_classes: default is the largest label plus one.
      task: default is classification, or regression where y is floating-point and `num_classes` is not given.
      class_names: what the classes are called in pictures and reports, one for each; default is their numbers.
      test_fraction: with ids, the share of each client's rows that it is tested on.
      seed: with ids, decides which rows these are.
      name: appears in reports.

    Returns:
      Examples; with `client_ids` a Federation, whose `user_ids` are the distinct ones and whose `group` is None.

    Raises:
      ValueError: x and y of different lengths or empty, NaN or infinity, labels out of range, a client with one row.

    >>> x, y, _ = digits()
    >>> from_arrays(x, y, client_ids=np.arange(1797) % 3).train.x.shape
    (3, 419, 8, 8)
    """
    x, y = narrow("x", x), narrow("y", y)
    check_lengths(x, y)
    check_finite("x", x)
    if task is None:
        task = "regression" if np.issubdtype(y.dtype, np.floating) and num_classes is None else "classification"
        if task == "regression" and (y % 1 == 0).all():
            raise ValueError(
                "y holds whole numbers as floats, which could be classes or values: convert them to integers, or give "
                "task='regression'."
            )
    if task == "classification":
        if num_classes is None:
            num_classes = int(y.max()) + 1 if np.issubdtype(y.dtype, np.integer) else 0
            if np.issubdtype(y.dtype, np.integer) and y.ndim == 1:
                _check_first(int(y.min()), int(y.max()))
        if y.ndim == 2 and y.shape[1] == 1 and num_classes > 1:
            y = y[:, 0]
        check_labels(y, num_classes)
        y = y.astype(np.int32)
    else:
        check_finite("y", y)
    if task == "language":
        x, y = whole_tokens(x), whole_tokens(y)
        if num_classes is None and x.dtype.kind in "iu" and y.dtype.kind in "iu":
            num_classes = int(max(x.max(), y.max())) + 1
    y = no_pixels(y, task)
    check_pixels("x", x, x.ndim - 1, task)
    info = DatasetInfo(name, x.shape[1:], num_classes or 0, task, class_names=tuple(class_names))
    check_class_names(info)
    if client_ids is None:
        return Examples(x, y, info)
    distinct, client, counts = partition.sorted_ids("client_ids", client_ids, len(x))
    if counts.min() < 2:
        raise ValueError(
            f"The client '{distinct[np.argmin(counts)]}' has a single example, but training and test need one each: "
            f"leave such clients out, or join them."
        )
    rows = partition.divide(np.argsort(client, kind="stable"), counts)
    (rng,) = partition.generators(seed, 1)
    return UserFederation.of(partition.federate(Examples(x, y, info), rows, rng, test_fraction), distinct)


def _check_first(least: int, most: int) -> None:
    """Refuses labels that can be no classes, and tells of classes without any, where nobody gave their number."""
    if least < 0:
        raise ValueError(
            f"y holds whole numbers from {least} to {most}, which are no classes 0, 1, …: renumber them, or give "
            "task='regression' where they are values to predict."
        )
    if least > 0:
        LOG.warning(f"no label is below {least}: numbered from 0, models would have no outputs that nobody needs")


def whole_tokens(tokens: np.ndarray) -> np.ndarray:
    """Tokens as i32: bytes would be divided by 255, as models take them for pixels."""
    return tokens.astype(np.int32) if tokens.dtype.kind in "iu" else tokens


def no_pixels(y: np.ndarray, task: str | None) -> np.ndarray:
    """Values to predict, of which bytes would be divided by 255, as models take them for pixels; with a sign."""
    return y.astype(np.float32) if task == "regression" and y.dtype.kind == "u" else y


def narrow(name: str, values: Any) -> np.ndarray:
    """The array in the dtype that it will have on the device."""
    given = values
    try:
        values = np.asarray(given)
    except ValueError as error:
        raise ValueError(f"{name} is no array, its rows differ in shape: give rows of one shape.") from error
    if np.ma.is_masked(given):
        raise ValueError(f"{name} is a masked array with {np.ma.count_masked(given)} masked values: fill or drop them.")
    if values.dtype == object and not values.ndim:
        raise ValueError(f"{name} is a {type(given).__name__}: give an array with a row for each example.")
    if values.dtype.kind == "f" and values.dtype.itemsize > 4:
        if values.ndim:
            check_finite(name, values)
        return values.astype(np.float32)
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    if values.dtype == bool:
        return values.astype(np.float32 if name == "x" else np.int32)
    if values.dtype in (np.int64, np.uint64, np.uint32):
        limits = np.iinfo(np.int32)
        if values.size and (values.min() < limits.min or values.max() > limits.max):
            raise ValueError(f"{name} holds integers up to {values.max()}, beyond 32 bits: renumber the values.")
        return values.astype(np.int32)
    return values


def data_folder(data_dir: str | os.PathLike | None = None) -> str:
    """Where TFDS keeps its files."""
    # TFDS reads the variable once, when it is imported; here it counts whenever it is set.
    chosen = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return str(as_path("data_dir", chosen))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences TFDS's warnings about absent folders and its choice of an image decoder."""
    with absl_from(logging.ERROR), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _builder(name: str, data_dir: str) -> Any:
    """TFDS's builder of the data set, for files that exist, of any version unless the name asks for one."""
    import tensorflow_datasets

    parts = _NAME.fullmatch(name.strip().lower() if "/" in name else name.strip().lower().replace("-", "_"))
    known = tensorflow_datasets.list_builders(with_community_datasets=False)
    on_disk = parts is not None and os.path.isdir(os.path.join(data_dir, parts["name"]))
    if parts is None or not (parts["name"] in known or on_disk):
        close = difflib.get_close_matches(parts["name"] if parts else name, known)
        advice = f"Close names: {', '.join(close)}." if close else "See tensorflow.org/datasets/catalog."
        raise ValueError(f"No TFDS data set is called {name!r}. {advice}")

    plain = parts["name"] + (f"/{parts['config']}" if parts["config"] else "")
    try:
        # With a version, even any, TFDS prefers the files to its code, whose version may be newer.
        return tensorflow_datasets.builder(f"{plain}:{parts['version'] or '*.*.*'}", data_dir=data_dir)
    except (ValueError, AssertionError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"TFDS knows {parts['name']!r}, but not {name!r} in {data_dir!r} ({reason}): leave the version out, or "
            "correct what follows the first part of the name."
        ) from error


def _prepared(name: str, builder: Any, data_dir: str, download: bool) -> Any:
    """A builder of the same data set with files that can be read row by row: `builder`, or a downloaded one."""
    import tensorflow_datasets

    plain = builder.info.full_name.rpartition("/")[0]
    how_to_get = (
        f"Set TFDS_DATA_DIR to the folder that holds it, or prepare it once where TensorFlow is installed: "
        f"`tfds build {plain} --file_format=array_record --data_dir={data_dir}`"
    )
    if not builder.is_prepared():
        if not download:
            raise DatasetNotFoundError(
                f"{name!r} is not in {data_dir!r}. {how_to_get}, or fc.data.tfds({plain!r}, download=True)."
            )
        # Checked first: TFDS would notice only after minutes of downloading.
        if importlib.util.find_spec("tensorflow") is None:
            raise DatasetNotFoundError(f"Preparing {name!r} needs TensorFlow, which is not installed. {how_to_get}.")
        builder = tensorflow_datasets.builder(plain, data_dir=data_dir, file_format="array_record")
        try:
            builder.download_and_prepare(file_format="array_record")
        except Exception as error:
            # Failures of network, server and disk have no common base class.
            raise DatasetNotFoundError(
                f"{plain!r} could not be downloaded into {data_dir!r} ({type(error).__name__}: {error}). Without a "
                "network, copy the prepared files from another machine."
            ) from error
    formats = {file_format.value for file_format in builder.info.available_file_formats()}
    if not formats & {"array_record", "parquet"}:
        raise DatasetNotFoundError(
            f"The data set {name!r} in {data_dir!r} is in the format {', '.join(sorted(formats))}, which only "
            f"TensorFlow reads. {how_to_get}."
        )
    return builder


def _image_and_label(name: str, info: Any) -> tuple[str, str]:
    """The names of the image feature and of the label feature."""
    from tensorflow_datasets.core.features import ClassLabel, Image

    image, label = info.supervised_keys or ("image", "label")
    features = info.features
    wanted = ((image, Image), (label, ClassLabel))
    if not all(feature in features and isinstance(features[feature], kind) for feature, kind in wanted):
        raise ValueError(
            f"{name!r} is not an image classification data set (its features: {', '.join(features)}): load it, and "
            "pass the arrays to fc.data.from_arrays."
        )
    if None in features[image].shape:
        raise ValueError(f"The images of {name!r} differ in size: resize them and use fc.data.from_arrays.")
    return image, label


def _splits(name: str, split: str, available: list[str]) -> list[str]:
    wanted = [part for part in ("train", "test") if part in available] if split == "all" else [split]
    if not wanted or any(part not in available for part in wanted):
        raise ValueError(f"{name!r} has no split {split!r}: choose one of all (train, test), {', '.join(available)}.")
    return wanted


def _fingerprint(folder: Path) -> str:
    """Distinguishes files that share name and version, such as those of another folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        if file.suffix == ".json":
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _decode(builder: Any, splits: list[str], image: str, label: str) -> tuple[np.ndarray, np.ndarray]:
    sources = [builder.as_data_source(split=split) for split in splits]
    count = sum(map(len, sources))
    x = np.empty((count, *builder.info.features[image].shape), builder.info.features[image].np_dtype)
    y = np.empty(count, np.int32)
    row = 0
    for source in sources:
        for start in range(0, len(source), _RECORDS_AT_ONCE):
            # One batched request is three times faster than single requests.
            for record in source.__getitems__(range(start, min(start + _RECORDS_AT_ONCE, len(source)))):
                x[row], y[row] = record[image], record[label]
                row += 1
    x.flags.writeable = y.flags.writeable = False
    return x, y
