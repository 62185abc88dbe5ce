"""Data sets by what the command line calls them."""

from __future__ import annotations

import logging
import os

from fedjax_cluster.data.downloads import OPENML, check_online, is_kept, openml, openml_name
from fedjax_cluster.data.sources import DatasetNotFoundError, data_folder, digits, tfds
from fedjax_cluster.options import with_checks
from fedjax_cluster.types import Examples

LOG = logging.getLogger(__name__)


@with_checks()
def load(name: str) -> Examples:
    """A data set by its name: the embedded digits, a set of TFDS, or OpenML's copy where none is prepared for TFDS.

    Args:
      name: `digits`, or a name that `tfds` or `openml` takes.

    Returns:
      What `digits`, `tfds` or `openml` returns.

    Raises:
      ValueError: no such data set.
      DatasetNotFoundError: it is not on this machine, and cannot be downloaded; the message tells the ways to get it.

    >>> load("digits").info.name
    'digits'
    """
    if name == "digits":
        return digits()
    known = openml_name(name)
    if known is None:
        return _tfds_with_hint(name)
    folder = data_folder()
    # TensorFlow Datasets takes seconds to import: not where it cannot have the files.
    if os.path.isdir(os.path.join(folder, known.partition("/")[0])):
        try:
            return tfds(known)
        except DatasetNotFoundError:
            pass
    ours, kept = OPENML[known].name, is_kept(known)
    try:
        if not kept:
            check_online(ours)
        once = "" if kept else ", downloaded once"
        LOG.warning(f"{known} is not prepared for TFDS in {folder!r}: taking {ours} of OpenML{once}")
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
