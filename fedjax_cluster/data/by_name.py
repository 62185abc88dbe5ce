"""Data sets by what the command line calls them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fedjax_cluster.data.downloads import OPENML, check_online, is_kept, openml, openml_name
from fedjax_cluster.data.hugging_face import huggingface
from fedjax_cluster.data.image_folders import image_folder
from fedjax_cluster.data.leaf_files import is_leaf, leaf
from fedjax_cluster.data.local_files import ARRAYS, TABLES, is_path, is_table, npz, table
from fedjax_cluster.data.sources import DatasetNotFoundError, data_folder, digits, tfds
from fedjax_cluster.options import COUNT, as_path, shown, with_checks
from fedjax_cluster.types import Examples

HUB = "hf:"
OwnTask = Literal["classification", "regression"]
# What a configuration says of how a file is read.
READING = ("label_column", "user_column", "group_column", "split_column", "input_shape", "task")
LOG = logging.getLogger(__name__)


@with_checks(input_shape=COUNT)
def load(
    name: str,
    *,
    label_column: str | None = None,
    user_column: str | None = None,
    group_column: str | None = None,
    split_column: str | None = None,
    input_shape: Sequence[int] | None = None,
    task: OwnTask | None = None,
) -> Examples:
    """A data set by its name: the embedded digits, one's own file or folder, a set of TFDS, or OpenML's copy of it.

    Args:
      name: `digits`; the path of an `.npz`, `.csv`, `.tsv` or `.parquet` file; the path of a folder of images or
        of LEAF's files, with a `/` in it, such as `./faces`; `hf:` and the name that
        `huggingface` takes; or a name that `tfds` or `openml` takes.
      label_column: of a table; default is `label`. Of the hub's data set; default is the only one that declares its
        classes.
      user_column: of a table; default is `user` where there is one. Of the hub's data set; default is none.
      group_column: likewise, of the users' true groups; default is none.
      split_column: of a table, what each row is for, train, test or validation; default is none.
      input_shape: of a table's rows where they are images; the height and width to bring a folder's images to.
      task: "regression" where the whole numbers of a table, an `.npz` file or the hub's data set are values and no
        classes.

    Returns:
      What `digits`, `npz`, `table`, `image_folder`, `leaf`, `tfds` or `openml` returns.

    Raises:
      ValueError: no such data set.
      DatasetNotFoundError: it is not on this machine, and cannot be downloaded; the message tells the ways to get it.

    >>> load("digits").info.name
    'digits'
    """
    path = is_path(name)
    named = {"label": label_column, "user": user_column, "group": group_column, "split": split_column}
    columns: dict[str, Any] = {column: given for column, given in named.items() if given is not None}
    if name.startswith(HUB) and split_column is not None:
        raise ValueError(
            f"split_column is {split_column!r}, but {name} has no column that divides its rows here: leave it out, or "
            "write the rows as a .parquet table"
        )
    if name.startswith(HUB) and input_shape is None:
        return huggingface(name.removeprefix(HUB), task=task, **columns)
    if columns and not (path and is_table(name)):
        column, given = next(iter(columns.items()))
        raise ValueError(f"{column}_column is {given!r}, but {shown(name)} is no table: leave it out")
    if path and is_table(name):
        return table(name, shape=input_shape, task=task, **columns)
    folder = as_path("name", name) if path else Path(name)
    if task == "regression" and (not path or folder.is_dir()):
        raise ValueError(f"task is 'regression', but {shown(name)} has classes: leave it out")
    of_leaf = path and folder.is_dir() and is_leaf(folder)
    if path and folder.is_dir() and not of_leaf:
        return image_folder(name, size=input_shape)
    if input_shape is not None:
        raise ValueError(
            f"input_shape is {list(input_shape)}, but {shown(name)} is neither a table nor a folder of images: leave "
            "it out"
        )
    if of_leaf:
        return leaf(name)
    if path:
        if folder.exists() and folder.suffix.lower() not in ARRAYS:
            raise ValueError(f"{name} is no file that can be read: give one ending in {', '.join((*ARRAYS, *TABLES))}")
        return npz(name, task=task)
    if name == "digits":
        return digits()
    known = openml_name(name)
    if known is None:
        return _tfds_with_hint(name)
    prepared = data_folder()
    # TensorFlow Datasets takes seconds to import: not where it cannot have the files.
    if os.path.isdir(os.path.join(prepared, known.partition("/")[0])):
        try:
            return tfds(known)
        except DatasetNotFoundError:
            pass
    ours, kept = OPENML[known].name, is_kept(known)
    try:
        if not kept:
            check_online(ours)
        once = "" if kept else ", downloaded once"
        LOG.warning(f"{known} is not prepared for TFDS in {prepared!r}: taking {ours} of OpenML{once}")
        return openml(known)
    except DatasetNotFoundError as error:
        raise DatasetNotFoundError(
            f"{known!r} is in no form on this machine. From OpenML: {error} From TFDS: set TFDS_DATA_DIR to a folder "
            f"that holds it, or run `tfds build {known} --file_format=array_record` once where TensorFlow is installed."
        ) from error


def _tfds_with_hint(name: str) -> Examples:
    try:
        return tfds(name)
    except DatasetNotFoundError as error:
        near = [known for known in OPENML if known.partition("/")[0] == name.strip().lower()]
        if not near:
            raise
        raise DatasetNotFoundError(f"{error} OpenML has {', '.join(near)}, which needs no TensorFlow.") from error
    except ValueError as error:
        if not os.path.exists(name):
            raise
        raise ValueError(f"{error} There is a file or folder of that name: write ./{name}") from error
