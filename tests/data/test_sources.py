import os
import subprocess
import sys
import time

import chex
import numpy as np
import pytest
import sklearn.datasets

from fedjax_cluster.data import DatasetNotFoundError, cache, digits, from_arrays, sources, tfds
from fedjax_cluster.types import Examples, Federation

REAL = os.environ.get("TFDS_DATA_DIR", "")


def needs(name: str):
    return pytest.mark.skipif(not os.path.isdir(os.path.join(REAL, name)), reason=f"TFDS_DATA_DIR holds no {name}")


def test_digits_use_the_whole_range_of_uint8():
    x, y, info = digits()
    assert x.dtype == np.uint8
    assert y.dtype == np.int32
    assert (x.min(), x.max()) == (0, 255)
    assert len(np.unique(x)) == 17
    np.testing.assert_array_equal(np.bincount(y), [178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    assert info == ("digits", (8, 8), 10, "classification", (), ())


def test_digits_are_scikit_learns():
    expected = sklearn.datasets.load_digits()
    x, y, _ = digits()
    chex.assert_trees_all_equal((x, y), (np.rint(expected.images * (255 / 16)).astype(np.uint8), expected.target))


def test_digits_need_scikit_learn(monkeypatch):
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DatasetNotFoundError, match="install scikit-learn"):
        digits()


def test_tfds_reads_train_then_test(tfds_folder):
    x, y, info = tfds("tiny_shapes")
    assert x.shape == (26, 4, 6, 1)
    assert x.dtype == np.uint8
    # array_record keeps the order of writing, so record i is image i.
    np.testing.assert_array_equal(x[:, 0, 0, 0], np.arange(26))
    np.testing.assert_array_equal(y, np.arange(26) % 3)
    assert y.dtype == np.int32
    assert (info.name, info.input_shape, info.num_classes) == ("tiny_shapes", (4, 6, 1), 3)


@pytest.mark.parametrize(("split", "numbers"), [("train", range(20)), ("test", range(20, 26))])
def test_tfds_splits(tfds_folder, split, numbers):
    np.testing.assert_array_equal(tfds("tiny-shapes", split).x[:, 3, 5, 0], numbers)


def test_tfds_second_reading_comes_from_the_cache_and_is_equal(tfds_folder, monkeypatch):
    first = tfds("tiny_shapes")
    monkeypatch.setattr(sources, "_decode", None)
    second = tfds("tiny_shapes")
    assert isinstance(second.x, np.memmap)
    np.testing.assert_array_equal(first.x, second.x)
    np.testing.assert_array_equal(first.y, second.y)
    assert first.info == second.info


def test_tfds_cache_tells_splits_and_folders_apart(tfds_folder, tmp_path, write_tfds):
    assert len(tfds("tiny_shapes", "train").y) == 20
    assert len(tfds("tiny_shapes", "test").y) == 6
    write_tfds(tmp_path / "other", "tiny_shapes", {"train": range(100, 103)})
    other = tfds("tiny_shapes", "train", data_dir=tmp_path / "other")
    np.testing.assert_array_equal(other.x[:, 0, 0, 0], [100, 101, 102])
    assert len(tfds("tiny_shapes", "train").y) == 20


def test_tfds_arrays_are_read_only_whether_cached_or_not(tfds_folder):
    for _ in range(2):
        x, y, _ = tfds("tiny_shapes")
        assert not x.flags.writeable
        assert not y.flags.writeable


@pytest.mark.parametrize("ending", [".npy", ".npz"])
@pytest.mark.parametrize("damage", ["truncated", "emptied", "flipped", "text", "removed"])
def test_tfds_rebuilds_a_damaged_cache(tfds_folder, cache_folder, ending, damage):
    tfds("tiny_shapes")
    (file,) = cache_folder.glob(f"*{ending}")
    intact = file.read_bytes()
    if damage == "removed":
        file.unlink()
    else:
        # A flip in the middle hits the values, not the header.
        flipped = bytearray(intact)
        flipped[len(intact) * 3 // 4] ^= 0x10
        file.write_bytes(
            {"truncated": intact[:-7], "emptied": b"", "flipped": bytes(flipped), "text": b"hello\n"}[damage]
        )
    np.testing.assert_array_equal(tfds("tiny_shapes").x[:, 0, 0, 0], np.arange(26))
    assert isinstance(tfds("tiny_shapes").x, np.memmap)
    assert len(list(cache_folder.iterdir())) == 2


def test_tfds_works_without_a_place_for_the_cache(tfds_folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FEDJAX_CLUSTER_CACHE", str(tmp_path / "file" / "below"))
    assert len(tfds("tiny_shapes").y) == 26


def test_absent_data_set_is_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    start = time.perf_counter()
    with pytest.raises(DatasetNotFoundError, match=r"'mnist'.*tfds build mnist --file_format=array_record") as error:
        tfds("mnist")
    assert time.perf_counter() - start < 5.0
    for remedy in ("TFDS_DATA_DIR", str(tmp_path), "download=True", "TensorFlow"):
        assert remedy in str(error.value)
    # Both the command line's kinds of a user's mistake.
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, FileNotFoundError)


def test_the_cache_does_not_stand_in_for_absent_files(tfds_folder, tmp_path, monkeypatch):
    tfds("tiny_shapes")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="tiny_shapes"):
        tfds("tiny_shapes")


@pytest.mark.skipif(
    sources.importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed: it would download"
)
def test_download_without_tensorflow_is_refused_at_once(tmp_path):
    start = time.perf_counter()
    with pytest.raises(DatasetNotFoundError, match="needs TensorFlow"):
        tfds("cifar10", data_dir=tmp_path, download=True)
    assert time.perf_counter() - start < 5.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mnits", "Close names: mnist"),
        ("fashionmnist", "fashion_mnist"),
        ("", "No TFDS data set is called ''"),
        ("not a name", "No TFDS data set"),
        ("huggingface:mnist", "No TFDS data set"),
        ("mnist:9.9.9", "leave the version out"),
        ("mnist/nonsense", "correct what follows"),
        ("imdb_reviews", "not an image classification data set"),
        ("cats_vs_dogs", "differ in size"),
    ],
)
def test_names_that_cannot_be(tmp_path, name, message):
    with pytest.raises(ValueError, match=message) as error:
        tfds(name, data_dir=tmp_path)
    assert not isinstance(error.value, DatasetNotFoundError)


def test_unknown_split_lists_those_there_are(tfds_folder):
    with pytest.raises(ValueError, match=r"no split 'validation': choose one of all .*, train, test"):
        tfds("tiny_shapes", "validation")


def test_unlabelled_split_is_refused(tmp_path, write_tfds):
    write_tfds(tmp_path / "tfds", "tiny_shapes", {"train": range(0, 9, 3)}, first_label=-1)
    with pytest.raises(ValueError, match="without labels"):
        tfds("tiny_shapes", data_dir=tmp_path / "tfds")


def test_import_is_quick_and_reading_is_silent(tfds_folder):
    script = (
        "import sys; from fedjax_cluster import data\n"
        "slow = {'tensorflow_datasets', 'sklearn', 'scipy.cluster', 'scipy.ndimage', 'scipy.sparse'}\n"
        "assert not slow & set(sys.modules), f'{slow & set(sys.modules)} imported with the package'\n"
        "assert len(data.tfds('tiny_shapes').y) == 26\n"
        "try: data.tfds('mnist')\n"
        "except data.DatasetNotFoundError: pass\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@needs("mnist")
def test_real_mnist():
    x, y, info = tfds("mnist", "test", data_dir=REAL)
    assert x.shape == (10000, 28, 28, 1)
    # The class counts of the published test set.
    np.testing.assert_array_equal(np.bincount(y), [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009])
    assert info.num_classes == 10
    # A digit lies in the middle 20 × 20 pixels, up to centring.
    assert x[:, 8:20, 8:20].mean() > 5 * x[:, [0, 1, 26, 27]].mean()


@pytest.mark.slow
@needs("fashion_mnist")
def test_real_fashion_mnist():
    x, y, info = tfds("fashion-mnist", "test", data_dir=REAL)
    assert x.shape == (10000, 28, 28, 1)
    np.testing.assert_array_equal(np.bincount(y), [1000] * 10)
    assert info.name == "fashion_mnist"


def test_from_arrays_makes_examples():
    x, y, info = from_arrays(np.zeros((6, 3)), [0, 1, 2, 0, 1, 2], name="mine")
    assert (x.dtype, y.dtype) == (np.float32, np.int32)
    assert info == ("mine", (3,), 3, "classification", (), ())
    assert isinstance(from_arrays(np.zeros((6, 3)), [0] * 6, num_classes=5), Examples)
    assert from_arrays(np.zeros((6, 3)), np.linspace(0, 1, 6)).info.task == "regression"
    assert from_arrays(np.zeros((6, 4, 4), np.uint8), np.zeros(6, int)).x.dtype == np.uint8
    images = np.zeros((6, 4, 4), np.uint8)
    assert from_arrays(images, images, task="reconstruction").info.task == "reconstruction"


def test_from_arrays_makes_a_client_of_each_id():
    ids = np.array(["bo", "al", "cy", "al", "bo", "al", "cy"])
    x = np.arange(7, dtype=np.float32)[:, None]
    federation = from_arrays(x, np.zeros(7, int), ids, test_fraction=0.4)
    assert isinstance(federation, Federation)
    assert federation.group is None
    for client, name in enumerate(["al", "bo", "cy"]):
        held = [
            value
            for part in (federation.train, federation.test)
            for value in part.x[client, : part.num_examples[client], 0]
        ]
        assert sorted(held) == list(np.flatnonzero(ids == name))


def test_from_arrays_split_follows_the_seed():
    x, y, _ = digits()
    ids = np.arange(len(y)) % 4
    first, again, other = (from_arrays(x, y, ids, seed=seed).train.x for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": np.zeros((4, 2)), "y": [0, 1, 2]}, r"\[4, 2\].*\[3\]"),
        ({"x": np.zeros((0, 2)), "y": []}, "no examples at all"),
        ({"x": [[1.0], [np.nan]], "y": [0, 1]}, "x holds NaN or infinity, first in example 1"),
        ({"x": [[1.0], [np.inf]], "y": [0, 1]}, "first in example 1"),
        ({"x": [[1.0], [2.0]], "y": [0.0, np.nan]}, "y holds NaN"),
        ({"x": [[1.0], [2.0]], "y": [0, -1]}, "whole numbers from -1 to 0"),
        ({"x": [[1.0], [2.0]], "y": [0, 7], "num_classes": 7}, "between 0 and 6"),
        ({"x": [[1.0], [2.0]], "y": ["a", "b"]}, "np.unique"),
        ({"x": [[1.0], [2.0]], "y": [0.0, 1.0], "num_classes": 2}, "integers from 0 on"),
        ({"x": [["a"], ["b"]], "y": [0, 1]}, "x has the dtype"),
        ({"x": [[1], [2**40]], "y": [0, 1]}, "32 bits"),
        ({"x": [[1.0], [2.0]], "y": [0, 1], "client_ids": [0]}, "one id for each"),
        ({"x": [[1.0], [2.0], [3.0]], "y": [0, 1, 1], "client_ids": ["a", "a", "b"]}, "client 'b' has a single"),
        ({"x": [[1.0], [2.0]], "y": [0, 1], "client_ids": [0, 0], "test_fraction": 1.0}, "test_fraction is 1.0"),
    ],
)
def test_from_arrays_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        from_arrays(**arguments)


def test_cache_location(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDJAX_CLUSTER_CACHE", str(tmp_path / "mine"))
    assert cache.directory() == tmp_path / "mine"
    monkeypatch.delenv("FEDJAX_CLUSTER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.directory() == tmp_path / "xdg" / "fedjax_cluster"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.directory() == tmp_path / ".cache" / "fedjax_cluster"


def test_labels_that_are_no_classes_are_named(caplog):
    x = np.zeros((6, 2), np.float32)
    with pytest.raises(ValueError, match=r"y holds whole numbers from -3 to 2, .* or give task='regression'"):
        sources.from_arrays(x, np.arange(6) - 3)
    assert sources.from_arrays(x, np.arange(6) % 2 + 1).info.num_classes == 3
    assert "no label is below 1" in caplog.text
