"""Data sets in files of one's own: arrays, tables, and folders of images; with users where the files tell them."""

from __future__ import annotations

import csv
import logging
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_cluster.data.own_examples import GROUP, SPLIT, USER, listed, named_examples
from fedjax_cluster.data.waiting import working
from fedjax_cluster.files import UNREADABLE
from fedjax_cluster.options import COUNT, as_path, with_checks
from fedjax_cluster.types import Examples, Task

LOG = logging.getLogger(__name__)
ARRAYS = (".npz",)
TABLES = {".csv": ",", ".tsv": "\t", ".parquet": ""}
LABEL = "label"
BYTES_FROM = 128  # pixels that reach no further are of another scale than 0 to 255


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
def npz(path: str | os.PathLike, *, task: Task | None = None) -> Examples:
    """Arrays in an `.npz` file: `x`, `y` and, where examples belong to users, `user`, perhaps with `group` and `split`.

    Args:
      path: holds x [N, ...] and y [N, ...] as `from_arrays` takes them, except that classes may be text, and user [N]
        of numbers or text; group [N] likewise, the true groups of their users, for the scenario `users`; split [N],
        "train", "test" or "validation", what each row is for there.
      task: "regression" where whole numbers in y are values and no classes.

    Returns:
      Examples, with `user_ids` where there are users, with `group_ids` where their groups are known, and with `split`
      where that is given. Its name is that of the file and a digest of what it holds.

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
            arrays = {name: kept[name] for name in ("x", "y", USER, GROUP, SPLIT) if name in kept}
            names = list(kept)
    except UNREADABLE as error:
        # A single array, saved as .npy, has no names.
        raise ValueError(f"{file} is no .npz file of plain arrays: np.savez writes one; `table` reads .csv.") from error
    if not {"x", "y"} <= set(arrays):
        raise ValueError(f"{file} holds {listed(names)}: name the arrays x, y and, of users, {USER}.")
    if len(names) > len(arrays):
        others = listed([name for name in names if name not in arrays])
        LOG.warning(f"{file}: {others} is left out; what is read are x, y and, of users, {USER}, {GROUP} and {SPLIT}")
    told = (arrays.get(name) for name in (USER, GROUP, SPLIT))
    return named_examples(file, arrays["x"], arrays["y"], *told, task=task)


@with_checks(shape=COUNT)
def table(
    path: str | os.PathLike,
    *,
    label: str = LABEL,
    user: str | None = None,
    group: str | None = None,
    split: str | None = None,
    shape: Sequence[int] | None = None,
    task: Task | None = None,
) -> Examples:
    """A table in a `.csv`, `.tsv` or `.parquet` file: a row an example, one column the labels, the others features.

    Args:
      path: the file; the first line of a `.csv` or `.tsv` names the columns. A first column without a name, the row
        names that pandas and R write, does not count.
      label: column of labels. Whole numbers are kept where they are 0 to K − 1; others, which the log tells, and text
        are numbered in their order; numbers with fractions make it a regression.
      user: column of users; default is `user` where there is one.
      group: column of the users' true groups, which the scenario `users` takes; default is none.
      split: column that says what each row is for, train, test or validation, in the scenario `users`, which alone
        takes such a table; default is none.
      shape: of an example, where the columns are pixels: such as (28, 28) or (28, 28, 1). Whole numbers from 0 to 255
        then become uint8, which models divide by 255, unless none reaches 128: of another scale they stay as they are.
      task: "regression" where whole numbers are values and no classes.

    Returns:
      Examples with x f32 [N, features] or [N, *shape], with `user_ids` where there are users, and with `group_ids` and
      `split` where columns of them are named.

    Raises:
      ValueError: no such file or column, groups without users, features that are not numbers, another number of
        them than `shape` has, or a split that tells of a row in no word of these.

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
        columns = read(file, {"labels": label, "users": user, "groups": group, SPLIT: split})
    x = columns.features
    if shape is not None:
        if math.prod(shape) != x.shape[1]:
            raise ValueError(
                f"{file} has {x.shape[1]} columns of features, but the shape {list(shape)} asks for "
                f"{math.prod(shape)}: correct the shape, or remove columns that are no features."
            )
        x = x.reshape(len(x), *shape)
        if len(shape) > 1 and x.size and x.min() >= 0 and BYTES_FROM <= x.max() <= 255 and (x % 1 == 0).all():
            x = x.astype(np.uint8)
    return named_examples(file, x, columns.labels, columns.users, columns.groups, columns.split, task=task)


class _Columns(NamedTuple):
    features: np.ndarray  # [N, features]
    labels: np.ndarray  # [N]
    users: np.ndarray | None  # [N]
    groups: np.ndarray | None  # [N]
    split: np.ndarray | None  # [N]


def _read_csv(file: Path, named: Mapping[str, str | None]) -> _Columns:
    delimiter = TABLES[file.suffix.lower()]
    options: dict[str, Any] = {"delimiter": delimiter, "quotechar": '"', "comments": None, "skiprows": 1}
    options |= {"encoding": "utf-8-sig", "ndmin": 2}
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            names = [name.strip() for name in next(csv.reader(lines, delimiter=delimiter), [])]
            if not any(names) or any("\n" in name for name in names):
                raise csv.Error("its first line has no names of columns, or part of one")
            places = _places(file, names, named)
            # Counted first, as taking lines apart costs half of what reading them does.
            if names and any(line.count(delimiter) >= len(names) for line in lines):
                lines.seek(0)
                _check_widths(file, len(names), csv.reader(lines, delimiter=delimiter))
    except (OSError, UnicodeError, csv.Error) as error:
        raise ValueError(_what_is_wrong(file, error)) from error
    own = [place for place in places if place is not None]
    others = [place for place, name in enumerate(names) if place not in own and (place or name)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a file without rows, which is refused below
            # Without spaces around them, as the names: "cat " is no other class than "cat".
            texts = np.char.strip(np.loadtxt(file, dtype=str, usecols=own, **options))
            features = np.loadtxt(file, usecols=others, **options)
    except (OSError, ValueError) as error:
        raise ValueError(_what_is_wrong(file, error, names)) from error
    if not len(texts):
        raise ValueError(f"{file} has no rows below the names of its columns: give at least two.")
    labels, users, *others = (None if place is None else texts[:, own.index(place)] for place in places)
    for what, values in (("label", labels), ("user", users)):
        # Text of no length would be one more class, or one more user.
        missing = [] if values is None else np.flatnonzero(values == "")
        if len(missing):
            row = int(missing[0]) + 1
            raise ValueError(f"{file} has no {what} in row {row} below the names: give one, or leave the row out.")
    assert labels is not None
    return _Columns(features, labels, users, *others)


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
    short = re.search(r"invalid column index (\d+) at row (\d+) with (\d+) columns", str(error))
    if short is not None:
        # NumPy counts the rows of texts anew from every 50 000th on.
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = filter(None, csv.reader(lines, delimiter=TABLES[file.suffix.lower()]))
            row = next((number for number, row in enumerate(rows) if len(row) <= int(short[1])), short[2])
        missing = names[int(short[1])]
        return f"{file} has {short[3]} values in row {row} below the names, but none for column {missing!r}."
    if bad is None:
        return f"{file} cannot be read as a table ({error}): correct it."
    what = f"{bad[1]!r} in" if bad[1] else "nothing in"
    return (
        f"{file} has {what} row {int(bad[2]) + 1} below the names, column {names[int(bad[3]) - 1]!r}, where features "
        "are numbers: give numbers, name the column of labels, users, groups or the split, or remove the column."
    )


def _places(file: Path, names: Sequence[str], columns: Mapping[str, str | None]) -> tuple[int | None, ...]:
    """Where the columns of labels, users, groups and the split stand, of which each has the name that it is given."""
    given = dict(columns)
    if given["users"] is None and USER in names and USER not in given.values():
        given["users"] = USER
    for what, name in given.items():
        if name is not None and names.count(name) != 1:
            count = "no" if name not in names else "more than one"
            other = len(names) == 1 and next((mark for mark in (";", "\t", "|", ",") if mark in names[0]), None)
            hint = f". They are divided by {other!r}: write .csv with commas, or .tsv with tabs" if other else ""
            raise ValueError(f"{file} has {count} column {name!r} for the {what}; its columns: {listed(names)}{hint}")
    named = {what: name for what, name in given.items() if name is not None}
    for what, name in named.items():
        first = next(other for other, its in named.items() if its == name)
        if first != what:
            raise ValueError(f"the column {name!r} of {file} cannot be both {first} and {what}: name another one")
    if len(names) - (not names[0]) <= len(named):
        raise ValueError(f"{file} has no column of features besides {listed(names)}: add one")
    if (group := given["groups"]) is not None and given["users"] is None:
        raise ValueError(f"{file} has a column of groups, {group!r}, but none of users, who are in them: name one")
    for what, name in (("groups", GROUP), ("split", SPLIT)):
        if given.get(what) is None and name in names and name not in given.values():
            LOG.warning(f"the column {name!r} of {file} is a feature: where it tells the {what}, name it for these")
    return tuple(None if name is None else names.index(name) for name in given.values())


def _read_parquet(file: Path, named: Mapping[str, str | None]) -> _Columns:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"reading {file} needs pyarrow, which is not installed: install it, or give a .csv") from error
    try:
        schema = pyarrow.parquet.ParquetFile(file).schema_arrow
        # pandas keeps its index in columns of their own.
        index = (schema.pandas_metadata or {}).get("index_columns", [])
        wanted = {*named.values(), *([USER] if named["users"] is None else [])}
        names = [str(name) for name in schema.names if name not in index or name in wanted]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{file} has more than one column {twice[0]!r}: rename one of them")
        places = _places(file, names, named)
        read = pyarrow.parquet.read_table(file, columns=names)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{file} cannot be read as a Parquet file ({error}): write it again.") from error
    # Of an encoded column pyarrow makes the last of its values where there is none.
    encoded = pyarrow.types.is_dictionary
    columns = [each.cast(each.type.value_type) if encoded(each.type) else each for each in read.columns]
    arrays = [column.to_numpy() for column in columns]
    rest = [place for place in range(len(arrays)) if place not in places]
    for place in rest:
        if arrays[place].dtype.kind not in "biuf":
            raise ValueError(
                f"the column {read.column_names[place]!r} of {file} holds no numbers: remove or convert it."
            )
    features = np.stack([arrays[place] for place in rest], axis=1)
    # As of a `.csv`: models would scale bytes.
    features = features if features.dtype.kind == "f" else features.astype(np.float32)
    labels, *others = (None if place is None else arrays[place] for place in places)
    assert labels is not None
    return _Columns(features, labels, *others)


def _existing(path: str | os.PathLike) -> Path:
    file = as_path("path", path)
    if not file.is_file():
        raise ValueError(f"there is no file {str(file)!r}: correct the path")
    return file
