"""Image data sets of OpenML, downloaded once by scikit-learn, and kept decoded."""

from __future__ import annotations

import difflib
import os
import urllib.request
import warnings
from typing import Any, NamedTuple

import numpy as np

from fedjax_cluster.data import cache
from fedjax_cluster.data.sources import DatasetNotFoundError
from fedjax_cluster.data.waiting import working
from fedjax_cluster.options import with_checks
from fedjax_cluster.types import DatasetInfo, Examples

SITE = "https://www.openml.org"
SECONDS_TO_ANSWER = 5.0


class Source(NamedTuple):
    """An image data set of OpenML: a row an image, a column a pixel."""

    name: str
    rows: int
    shape: tuple[int, int, int]  # height, width, channels
    num_classes: int
    class_names: tuple[str, ...] = ()
    channels_first: bool = False  # the columns hold one channel after the other


CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
HIRAGANA = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# By their names in TFDS, which reports and `class_overlap` use.
# NOTE: that OpenML's EMNIST has the orientation of TFDS's, which is transposed, could not be checked.
OPENML = {
    "mnist": Source("mnist_784", 70_000, (28, 28, 1), 10),
    "fashion_mnist": Source("Fashion-MNIST", 70_000, (28, 28, 1), 10, CLOTHES),
    "kmnist": Source("Kuzushiji-MNIST", 70_000, (28, 28, 1), 10, HIRAGANA),
    "emnist/balanced": Source("EMNIST_Balanced", 131_600, (28, 28, 1), 47),
    "cifar10": Source("CIFAR_10", 60_000, (32, 32, 3), 10, OBJECTS, channels_first=True),
}


@with_checks()
def openml(name: str) -> Examples:
    """An image classification data set of OpenML, in the form of `tfds`; needs no TensorFlow.

    scikit-learn downloads it and verifies OpenML's checksum. The decoded images are kept in the cache that `tfds` uses
    too, and are read from there from then on. `FEDJAX_CLUSTER_OFFLINE=1` forbids downloads.

    Args:
      name: OpenML's name or that of TFDS: `mnist_784` or `mnist`, `Fashion-MNIST` or `fashion_mnist`, `CIFAR_10` or
        `cifar10`, `Kuzushiji-MNIST` or `kmnist`, `EMNIST_Balanced` or `emnist/balanced`.

    Returns:
      Examples with read-only x uint8 [N, H, W, channels] and y i32 [N], training and test examples together. They are
      those of `tfds` in another order, under the same name.

    Raises:
      ValueError: no such data set (close names are offered).
      DatasetNotFoundError: it is not in the cache, and cannot be downloaded.

    >>> openml("mnits")
    Traceback (most recent call last):
    ...
    ValueError: 'mnits' is no image set of OpenML that is known here. Close names: mnist, kmnist, fashion_mnist.
    """
    known = openml_name(name)
    if known is None:
        close = difflib.get_close_matches(name.lower(), OPENML, cutoff=0.4) or list(OPENML)
        raise ValueError(
            f"{name!r} is no image set of OpenML that is known here. Close names: {', '.join(close)}."
            if name.strip()
            else f"name is {name!r}; give one of {', '.join(OPENML)}"
        )
    source = OPENML[known]
    arrays = cache.read(_key(source))
    if arrays is None:
        arrays = _decoded(source, *_downloaded(source))
        cache.write(_key(source), *arrays)
    return Examples(*arrays, DatasetInfo(known, source.shape, source.num_classes, class_names=source.class_names))


def openml_name(name: str) -> str | None:
    """The TFDS name of a data set that OpenML has, given that or OpenML's; None where there is none.

    >>> openml_name("Fashion-MNIST"), openml_name("cifar_10"), openml_name("imagenet")
    ('fashion_mnist', 'cifar10', None)
    """
    plain = name.strip().lower().replace("-", "_")
    theirs = {source.name.lower().replace("-", "_"): known for known, source in OPENML.items()}
    return plain if plain in OPENML else theirs.get(plain)


def is_kept(name: str) -> bool:
    """Whether `openml` needs no network for a TFDS name."""
    return cache.holds(_key(OPENML[name]))


def _key(source: Source) -> str:
    return f"openml-{source.name}-1"


def _downloaded(source: Source) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [N, columns] and labels [N] as OpenML has them."""
    import sklearn.datasets

    own = f"{source.name} of OpenML"
    check_online(source.name)
    options: dict[str, Any] = {"version": 1, "as_frame": False, "return_X_y": True, "n_retries": 1}
    # Without types: scikit-learn takes categories for text, which pandas 3 reads as numbers.
    options |= {"parser": "pandas", "read_csv_kwargs": {"dtype": None}}
    try:
        # Its notices of every attempt would come as warnings.
        with warnings.catch_warnings(), working(f"downloading {own}, once"):
            warnings.simplefilter("ignore")
            pixels, labels = sklearn.datasets.fetch_openml(source.name, **options)
            return np.asarray(pixels), np.asarray(labels)
    except Exception as error:
        # Failures of network, server, disk and checksum have no common base class.
        reason = " ".join(str(error).split()) or "no reason given"
        raise DatasetNotFoundError(
            f"{own} could not be downloaded ({type(error).__name__}: {reason}): try again later."
        ) from error


def check_online(name: str) -> None:
    """Raises DatasetNotFoundError at once where nothing can be downloaded: scikit-learn would try for long."""
    if os.environ.get("FEDJAX_CLUSTER_OFFLINE", "0") not in ("", "0"):
        raise DatasetNotFoundError(f"{name} is not in the cache, and FEDJAX_CLUSTER_OFFLINE forbids downloads.")
    try:
        request = urllib.request.Request(SITE, method="HEAD")
        with urllib.request.urlopen(request, timeout=SECONDS_TO_ANSWER):
            pass
    except urllib.request.HTTPError:
        pass  # it answers, if not to this
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise DatasetNotFoundError(
            f"{name} is not in the cache, and {SITE} cannot be reached ({reason}): go online once."
        ) from error


def _decoded(source: Source, pixels: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N, H, W, channels] and labels i32 [N]; a ValueError where they are not what they should be."""
    height, width, channels = source.shape
    y = np.char.strip(labels.astype(str), "'").astype(np.float64).astype(np.int32)
    fits = pixels.shape == (source.rows, height * width * channels) and y.shape == (source.rows,)
    if not (fits and pixels.min() >= 0 and pixels.max() <= 255 and y.min() >= 0 and y.max() < source.num_classes):
        raise ValueError(
            f"OpenML's {source.name} holds other than {source.rows} images of {height} × {width} × {channels} bytes in "
            f"{source.num_classes} classes: report it, and use fc.data.tfds."
        )
    if source.channels_first:
        x = pixels.astype(np.uint8).reshape(-1, channels, height, width).transpose(0, 2, 3, 1)
    else:
        x = pixels.astype(np.uint8).reshape(-1, *source.shape)
    x = np.ascontiguousarray(x)
    x.flags.writeable = y.flags.writeable = False
    return x, y
