"""Data sets in files of one's own: arrays, tables, and folders of images; with users where the files tell them."""

from __future__ import annotations

import csv
import hashlib
import logging
import math
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedjax_cluster.data.sources import from_arrays
from fedjax_cluster.data.waiting import working
from fedjax_cluster.files import UNREADABLE
from fedjax_cluster.options import COUNT, as_path, with_checks
from fedjax_cluster.types import Examples, UserExamples

LOG = logging.getLogger(__name__)
ARRAYS = (".npz",)
TABLES = {".csv": ",", ".tsv": "\t", ".parquet": ""}
IMAGES = (".png", ".jpg", ".jpeg", ".bmp")
LABEL, USER, GROUP = "label", "user", "group"
MOST_NAMED = 8  # columns in a message


def is_path(name: str) -> bool:
    """Whether a data set's name is that of a file or folder.

    >>> is_path("mine.csv"), is_path("./faces"), is_path("emnist/balanced")
    (True, True, False)
    """
    if Path(name).suffix.lower() in (*ARRAYS, *TABLES) or name.startswith(("./", "../", "/", "~")):
        return True
    return "/" in name and os.path.isdir(name)


def is_table(path: str | os.PathLike) -> bool:
    return Path(path).suffix.lower() in TABLES


@with_checks()
def npz(path: str | os.PathLike) -> Examples:
    """Arrays in an `.npz` file: `x`, `y` and, where examples belong to users, `user`, perhaps with their true `group`.

    Args:
      path: holds x [N, ...] and y [N, ...] as `from_arrays` takes them, except that classes may be text, and user [N]
        of numbers or text; group [N] likewise, the true groups of their users, for the scenario `users`.

    Returns:
      Examples, with `user_ids` where there are users, and with `group_ids` where their groups are known. Its name is
      that of the file and a digest of what it holds.

    Raises:
      ValueError: no such file, not an `.npz` with these arrays, or arrays that `from_arrays` refuses.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/mine.npz", x=np.eye(4), y=[0, 1, 0, 1], user=["a", "a", "b", "b"])
    ...     found = npz(f"{folder}/mine.npz")
    >>> found.x.shape, found.user_ids.tolist()
    ((4, 4), ['a', 'a', 'b', 'b'])
    """
    file = _existing(path)
    try:
        with np.load(file, allow_pickle=False) as kept:
            arrays = {name: kept[name] for name in ("x", "y", USER, GROUP) if name in kept}
            names = list(kept)
    except UNREADABLE as error:
        # A single array, saved as .npy, has no names.
        raise ValueError(f"{file} is no .npz file of plain arrays: np.savez writes one; `table` reads .csv.") from error
    if not {"x", "y"} <= set(arrays):
        raise ValueError(f"{file} holds {_listed(names)}: name the arrays x, y and, of users, {USER}.")
    if len(names) > len(arrays):
        others = _listed([name for name in names if name not in arrays])
        LOG.warning(f"{file}: {others} is left out; what is read are x, y and, of users, {USER} and {GROUP}")
    return named_examples(file, arrays["x"], arrays["y"], arrays.get(USER), arrays.get(GROUP))


@with_checks(shape=COUNT)
def table(
    path: str | os.PathLike,
    *,
    label: str = LABEL,
    user: str | None = None,
    group: str | None = None,
    shape: Sequence[int] | None = None,
) -> Examples:
    """A table in a `.csv`, `.tsv` or `.parquet` file: a row an example, one column the labels, the others features.

    Args:
      path: the file; the first line of a `.csv` or `.tsv` names the columns. A first column without a name, the row
        names that pandas and R write, does not count.
      label: column of labels. Whole numbers from 0 on are kept, other whole numbers and text are numbered in their
        order; numbers with fractions make it a regression.
      user: column of users; default is `user` where there is one.
      group: column of the users' true groups, which the scenario `users` takes; default is none.
      shape: of an example, where the columns are pixels: such as (28, 28) or (28, 28, 1). Whole numbers from 0 to 255
        then become uint8, which models scale.

    Returns:
      Examples with x f32 [N, features] or [N, *shape], with `user_ids` where there are users, and with `group_ids`
      where their groups are named.

    Raises:
      ValueError: no such file or column, groups without users, features that are not numbers, or another number of
        them than `shape` has.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(f"{folder}/mine.csv").write_text("kind,wide,high\\ncat,1,2\\ndog,3,4.5\\n")
    ...     found = table(f"{folder}/mine.csv", label="kind")
    >>> found.x.tolist(), found.y.tolist(), found.info.num_classes
    ([[1.0, 2.0], [3.0, 4.5]], [0, 1], 2)
    """
    file = _existing(path)
    if file.suffix.lower() not in TABLES:
        raise ValueError(f"{file} is no table: give a file ending in {', '.join(TABLES)}; `npz` reads arrays.")
    with working(f"reading {file.name}"):
        read = _read_parquet if file.suffix.lower() == ".parquet" else _read_csv
        columns = read(file, label, user, group)
    x = columns.features
    if shape is not None:
        if math.prod(shape) != x.shape[1]:
            raise ValueError(
                f"{file} has {x.shape[1]} columns of features, but the shape {list(shape)} asks for "
                f"{math.prod(shape)}: correct the shape, or remove columns that are no features."
            )
        x = x.reshape(len(x), *shape)
        if len(shape) > 1 and x.size and x.min() >= 0 and x.max() <= 255 and (x % 1 == 0).all():
            x = x.astype(np.uint8)
    return named_examples(file, x, columns.labels, columns.users, columns.groups)


@with_checks(size=COUNT)
def image_folder(path: str | os.PathLike, *, size: Sequence[int] | None = None) -> Examples:
    """A folder of images, by class or by user and class: `folder/class/*.png`, or `folder/user/class/*.png`.

    Args:
      path: the folder; images are `.png`, `.jpg`, `.jpeg` or `.bmp`, other files do not count.
      size: (height, width) to bring the images to; default is their own, which must be one.

    Returns:
      Examples with x uint8 [N, H, W, 3], or [N, H, W, 1] where none has colours, classes numbered in the order of their
      names, and `user_ids` where there are users.

    Raises:
      ValueError: no such folder, no images one or two folders down, an unreadable one, or images that differ in size.
    """
    folder = as_path("path", path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give one that holds images by class, such as {folder}/cat/1.png.")
    if size is not None and len(size) != 2:
        raise ValueError(f"size is {list(size)}; give height and width")
    found = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGES and file.name[0] != ".")
    parts = [file.relative_to(folder).parts[:-1] for file in found]
    depths = sorted({len(above) for above in parts})
    if depths not in ([1], [2]):
        what = f"images {' and '.join(map(str, depths))} folders down" if depths else "no images"
        raise ValueError(
            f"{folder} holds {what}: place all as {folder}/CLASS/*.png, or all as {folder}/USER/CLASS/*.png."
        )
    with working(f"reading {len(found)} images"):
        x = _read_images(found, size)
    users = np.array([above[0] for above in parts]) if depths == [2] else None
    return named_examples(folder, x, np.array([above[-1] for above in parts]), users)


class _Columns(NamedTuple):
    features: np.ndarray  # [N, features]
    labels: np.ndarray  # [N]
    users: np.ndarray | None  # [N]
    groups: np.ndarray | None  # [N]


def _read_csv(file: Path, label: str, user: str | None, group: str | None) -> _Columns:
    delimiter = TABLES[file.suffix.lower()]
    options: dict[str, Any] = {"delimiter": delimiter, "quotechar": '"', "comments": None, "skiprows": 1}
    options |= {"encoding": "utf-8-sig", "ndmin": 2}
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            names = [name.strip() for name in next(csv.reader(lines, delimiter=delimiter), [])]
            # Counted first, as taking lines apart costs half of what reading them does.
            if names and any(line.count(delimiter) >= len(names) for line in lines):
                lines.seek(0)
                _check_widths(file, len(names), csv.reader(lines, delimiter=delimiter))
    except (OSError, UnicodeError, csv.Error) as error:
        raise ValueError(_what_is_wrong(file, error)) from error
    places = _places(file, names, label, user, group)
    own = [place for place in places if place is not None]
    others = [place for place, name in enumerate(names) if place not in own and (place or name)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a file without rows, which is refused below
            texts = np.loadtxt(file, dtype=str, usecols=own, **options)
            features = np.loadtxt(file, usecols=others, **options)
    except (OSError, ValueError) as error:
        raise ValueError(_what_is_wrong(file, error, names)) from error
    if not len(texts):
        raise ValueError(f"{file} has no rows below the names of its columns: give at least two.")
    labels, users, groups = (None if place is None else texts[:, own.index(place)] for place in places)
    for what, values in (("label", labels), ("user", users)):
        # Text of no length would be one more class, or one more user.
        missing = [] if values is None else np.flatnonzero(np.char.strip(values) == "")
        if len(missing):
            row = int(missing[0]) + 1
            raise ValueError(f"{file} has no {what} in row {row} below the names: give one, or leave the row out.")
    assert labels is not None
    return _Columns(features, labels, users, groups)


def _check_widths(file: Path, width: int, rows: Iterable[Sequence[str]]) -> None:
    """Raises a ValueError for a row with more values than columns, of which `loadtxt` would take the first."""
    for number, row in enumerate(row for row in rows if row):
        if any(row[width:]):
            raise ValueError(
                f"{file} has {len(row)} values in row {number} below the names, but {width} columns: give one for each "
                "column, and put text that holds the delimiter in quotes."
            )


def _what_is_wrong(file: Path, error: Exception, names: Sequence[str] = ()) -> str:
    bad = re.search(r"could not convert string '(.*)' to \w+ at row (\d+), column (\d+)", str(error))
    if bad is None:
        return f"{file} cannot be read as a table ({error}): correct it."
    what = f"{bad[1]!r} in" if bad[1] else "nothing in"
    return (
        f"{file} has {what} row {int(bad[2]) + 1} below the names, column {names[int(bad[3]) - 1]!r}, where features "
        "are numbers: give numbers, name the column of labels, users or groups, or remove the column."
    )


def _places(
    file: Path, names: Sequence[str], label: str, user: str | None, group: str | None
) -> tuple[int, int | None, int | None]:
    """Where the columns of labels, users and groups stand."""
    if user is None and USER in names and USER not in (label, group):
        user = USER
    given = {"labels": label, "users": user, "groups": group}
    for what, name in given.items():
        if name is not None and names.count(name) != 1:
            count = "no" if name not in names else "more than one"
            other = len(names) == 1 and next((mark for mark in (";", "\t", "|", ",") if mark in names[0]), None)
            hint = f". They are divided by {other!r}: write .csv with commas, or .tsv with tabs" if other else ""
            raise ValueError(f"{file} has {count} column {name!r} for the {what}; its columns: {_listed(names)}{hint}")
    named = {what: name for what, name in given.items() if name is not None}
    for what, name in named.items():
        first = next(other for other, its in named.items() if its == name)
        if first != what:
            raise ValueError(f"the column {name!r} of {file} cannot be both {first} and {what}: name another one")
    if len(names) - (not names[0]) <= len(named):
        raise ValueError(f"{file} has no column of features besides {_listed(names)}: add one")
    if group is not None and user is None:
        raise ValueError(f"{file} has a column of groups, {group!r}, but none of users, who are in them: name one")
    of_label, of_user, of_group = (None if name is None else names.index(name) for name in given.values())
    assert of_label is not None
    return of_label, of_user, of_group


def _read_parquet(file: Path, label: str, user: str | None, group: str | None) -> _Columns:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"reading {file} needs pyarrow, which is not installed: install it, or give a .csv") from error
    try:
        read = pyarrow.parquet.read_table(file)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"{file} cannot be read as a Parquet file ({error}): write it again.") from error
    # pandas keeps its index in a column of its own.
    read = read.select([name for name in read.column_names if not name.startswith("__index_level_")])
    places = _places(file, read.column_names, label, user, group)
    arrays = [column.to_numpy() for column in read.columns]
    rest = [place for place in range(len(arrays)) if place not in places]
    for place in rest:
        if arrays[place].dtype.kind not in "biuf":
            raise ValueError(
                f"the column {read.column_names[place]!r} of {file} holds no numbers: remove or convert it."
            )
    features = np.stack([arrays[place] for place in rest], axis=1)
    # As of a `.csv`: models would scale bytes.
    features = features if features.dtype.kind == "f" else features.astype(np.float32)
    of_label, *others = places
    return _Columns(features, arrays[of_label], *(None if place is None else arrays[place] for place in others))


def _read_images(files: Sequence[Path], size: Sequence[int] | None) -> np.ndarray:
    """uint8 [N, H, W, channels]."""
    looks = []
    for file in files:
        try:
            with Image.open(file) as image:
                looks.append((image.size, image.mode))
                wide = image.mode[0] in "IF"
        except (OSError, UnidentifiedImageError) as error:
            raise ValueError(f"{file} is no image that can be read: remove or replace it.") from error
        if wide:  # Pillow would cut all beyond 255 down to it.
            raise ValueError(
                f"{file} has more than 8 bits a pixel: convert the images to 8 bits, or give arrays in an .npz file."
            )
    width, height = looks[0][0] if size is None else (size[1], size[0])
    other = next((index for index, (own, _) in enumerate(looks) if own != (width, height)), None)
    if size is None and other is not None:
        own = looks[other][0]
        raise ValueError(
            f"the images differ in size: {files[0]} is {height} × {width} and {files[other]} {own[1]} × {own[0]}; give "
            "a size to bring them to"
        )
    grey = all(mode in ("1", "L", "LA") for _, mode in looks)
    x = np.empty((len(files), height, width, 1 if grey else 3), np.uint8)
    for row, file in enumerate(files):
        try:
            with Image.open(file) as image:
                shown = image.convert("L" if grey else "RGB")
        except OSError as error:
            raise ValueError(f"the image {file} is damaged ({error}): remove or replace it.") from error
        if shown.size != (width, height):
            shown = shown.resize((width, height), Image.Resampling.BILINEAR)
        x[row] = np.asarray(shown).reshape(height, width, -1)
    return x


def named_examples(
    file: Path,
    x: np.ndarray,
    labels: np.ndarray,
    users: np.ndarray | None,
    groups: np.ndarray | None = None,
    **options: Any,
) -> Examples:
    """Examples named after the file and what it holds, so that a changed file is another experiment.

    Args:
      file: the file or folder.
      x: [N, ...] numbers.
      labels: [N] numbers or text, or [N, ...] numbers.
      users: [N] numbers or text, or None.
      groups: the same of their groups; ignored without users.
      **options: of `from_arrays`.
    """
    for what, each in ((USER, users), (GROUP, groups)):
        if each is not None and each.shape != np.shape(labels)[:1]:
            raise ValueError(
                f"{file}: {what} {list(each.shape)} and labels {list(labels.shape)} differ: give one for each."
            )
    try:
        examples = from_arrays(x, class_numbers(np.asarray(labels)), **options)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    assert isinstance(examples, Examples)
    ids = None if users is None else _user_ids(users)
    of_group = None if users is None or groups is None else numbers(groups)
    told = (examples.info, *(None if each is None else each.tolist() for each in (ids, of_group)))
    # Without groups the names that files had before there were any.
    digest = hashlib.blake2b(repr(told if of_group is not None else told[:2]).encode(), digest_size=4)
    for array in (examples.x, examples.y):
        digest.update(np.ascontiguousarray(array).data)
    info = examples.info._replace(name=f"{file.resolve().name}@{digest.hexdigest()}")
    examples = examples._replace(info=info)
    return examples if ids is None else UserExamples.of(examples, ids, of_group)


def class_numbers(labels: np.ndarray) -> np.ndarray:
    """Whole numbers from 0 on as they are, others and text numbered in their order; values with fractions as f32."""
    values = numbers(labels)
    if values.dtype.kind == "f":
        return values.astype(np.float32)
    if values.ndim == 1 and (values.dtype.kind not in "iu" or (values.size and values.min() < 0)):
        try:
            return np.unique(values, return_inverse=True)[1].astype(np.int32)
        except TypeError:
            raise ValueError("the labels hold nothing in some rows, or values of several kinds: mend them") from None
    return values


def _user_ids(users: np.ndarray) -> np.ndarray:
    """Numbers where they are, unless two users would be one, as "7" and "007" or numbers too long for 64 bits."""
    found = numbers(users)
    if users.dtype.kind not in "UO" or found.dtype == users.dtype:
        return found
    texts = {str(user).strip() for user in users.tolist()}
    return found if len(np.unique(found)) == len(texts) else users


def numbers(values: np.ndarray) -> np.ndarray:
    """Text and floats as whole numbers where all of them are, else text as floats where all are, else as it is."""
    if values.dtype.kind == "b":
        return values.astype(np.int32)
    if values.dtype.kind in "UO":
        try:
            values = values.astype(np.int64) if values.dtype.kind == "U" else values.astype(str).astype(np.int64)
        except (ValueError, OverflowError):
            try:
                values = values.astype(np.float64)
            except (ValueError, TypeError):
                return values
    if values.dtype.kind == "f" and np.isfinite(values).all() and (values % 1 == 0).all() and values.size:
        return values.astype(np.int64) if np.abs(values).max() < 2**63 else values
    return values


def _existing(path: str | os.PathLike) -> Path:
    file = as_path("path", path).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no file {str(file)!r}: correct the path")
    return file


def _listed(names: Sequence[str]) -> str:
    if len(names) > MOST_NAMED:
        # Labels, users and groups often stand last.
        names = [*names[: MOST_NAMED // 2], "…", *names[-MOST_NAMED // 2 :]]
    return ", ".join(map(str, names)) or "nothing"
