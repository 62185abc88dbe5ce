"""Data sets in the form of the Hugging Face hub, made in memory; skipped where their packages are not installed."""

import numpy as np
import pytest
from PIL import Image

from fedjax_cluster.data import (
    DatasetNotFoundError,
    check_federation,
    from_partitioner,
    huggingface,
    image_folder,
    load,
    scenarios,
)
from fedjax_cluster.data.image_folders import pixels

ROWS = 40


def made(mode="L", sizes=((4, 5),)):
    """Image i has the brightness i, label i mod 3, writer i mod 4."""
    datasets = pytest.importorskip("datasets")
    images = [Image.new(mode, sizes[i % len(sizes)], i if mode == "L" else (i, 1, 2)) for i in range(ROWS)]
    columns = {"image": images, "label": [i % 3 for i in range(ROWS)], "writer": [f"w{i % 4}" for i in range(ROWS)]}
    found = datasets.Dataset.from_dict(columns)
    return found.cast_column("image", datasets.Image()).cast_column("label", datasets.ClassLabel(num_classes=5))


@pytest.fixture
def hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    sets = {}

    def answer(name):
        if name not in sets:
            raise ConnectionError("no\nroute")
        return datasets.DatasetDict(sets[name])

    monkeypatch.setattr(datasets, "load_dataset", answer)
    return sets


def test_the_hubs_images_are_as_those_of_tfds(hub):
    whole = made()
    hub["a/b"] = {"test": whole.select(range(30, ROWS)), "train": whole.select(range(30))}
    examples = huggingface("a/b")
    assert (examples.x.shape, examples.x.dtype, examples.y.dtype) == ((ROWS, 5, 4, 1), np.uint8, np.int32)
    np.testing.assert_array_equal(examples.x[:, 2, 2, 0], np.arange(ROWS))
    np.testing.assert_array_equal(examples.y, np.arange(ROWS) % 3)
    assert examples.info == ("a/b", (5, 4, 1), 5, "classification", (), ())
    np.testing.assert_array_equal(huggingface("a/b", split="test").x[:, 0, 0, 0], np.arange(30, ROWS))


def test_users_and_colours(hub):
    hub["a/b"] = {"train": made("RGB")}
    examples = load("hf:a/b", user_column="writer")
    np.testing.assert_array_equal(examples.x[7, 0, 0], [7, 1, 2])
    federation = scenarios.users(examples)
    check_federation(federation)
    assert len(federation.train.x) == 4
    assert federation.group is None
    grouped = load("hf:a/b", user_column="writer", group_column="writer")
    np.testing.assert_array_equal(scenarios.users(grouped).group, np.arange(4))
    by_writer = huggingface("a/b", label="writer")
    np.testing.assert_array_equal(by_writer.y, np.arange(ROWS) % 4)


@pytest.mark.parametrize("missing", ["", "NA"])
def test_text_that_stands_for_a_missing_label_or_user_is_neither(hub, missing):
    """As in files of one's own: it was one more class, or one more client."""
    datasets = pytest.importorskip("datasets")
    for column, message in (("kind", "the labels hold"), ("writer", "the users hold")):
        rows = {"a": [[0.1 * i] for i in range(8)], "kind": ["cat", "dog"] * 4, "writer": ["u", "v"] * 4}
        rows[column] = [missing, *rows[column][1:]]
        hub["a/b"] = {"train": datasets.Dataset.from_dict(rows)}
        with pytest.raises(ValueError, match=f"{message} '{missing}' in row 1"):
            huggingface("a/b", inputs="a", label="kind", user="writer")


def test_what_cannot_be_read_is_one_line(hub):
    hub["a/b"] = {"train": made(sizes=((4, 5), (5, 4)))}
    for arguments, message in (
        ({"label": "kind"}, "no column 'kind': give label, one of the columns image, label, writer"),
        ({"user": "who"}, "no column 'who'"),
        ({"user": "writer", "group": "who"}, "no column 'who'"),
        ({"group": "writer"}, "no users, who are in groups"),
        ({"split": "unseen"}, "no split 'unseen'"),
        ({}, "differ in shape"),
    ):
        with pytest.raises(ValueError, match=message):
            huggingface("a/b", **arguments)
    with pytest.raises(DatasetNotFoundError, match="cannot be had: no route"):
        huggingface("c/d")
    hub["plain"] = {"train": made().remove_columns("label")}
    with pytest.raises(ValueError, match="0 columns are ClassLabel: give label"):
        huggingface("plain")


def test_partitioners_of_flower_datasets():
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    by_writer = partitioners.NaturalIdPartitioner(partition_by="writer")
    by_writer.dataset = made()
    federation = from_partitioner(by_writer, test_fraction=0.2)
    check_federation(federation)
    assert federation.group is None
    for client in range(4):
        parts = (federation.train, federation.test)
        pixels = np.concatenate([part.x[client, : part.num_examples[client], 0, 0, 0] for part in parts])
        labels = np.concatenate([part.y[client, : part.num_examples[client]] for part in parts])
        np.testing.assert_array_equal(np.sort(pixels), np.arange(client, ROWS, 4))
        np.testing.assert_array_equal(labels, pixels % 3)
    skewed = partitioners.DirichletPartitioner(num_partitions=3, partition_by="label", alpha=1.0, min_partition_size=3)
    skewed.dataset = made()
    held = from_partitioner(skewed)
    assert (held.train.num_examples + held.test.num_examples).sum() == ROWS


def test_without_the_package_it_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        huggingface("ylecun/mnist")
    with pytest.raises(ValueError, match="partitioner is a list"):
        from_partitioner([])


@pytest.mark.parametrize("mode", ["P", "1", "LA", "RGBA"])
def test_images_of_any_mode_are_as_those_of_a_folder(mode, tmp_path):
    """Numbers of a palette are no brightness, and no model wants to see through an image."""
    own = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 5, 3), np.uint8)).convert(mode)
    for name in ("cat/1.png", "dog/1.png"):
        (tmp_path / name).parent.mkdir()
        own.save(tmp_path / name)
    expected = image_folder(tmp_path).x[0]
    found = pixels(own)
    np.testing.assert_array_equal(found.reshape(6, 5, -1), expected)
    assert pixels(np.arange(3)).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="more than 8 bits a pixel: convert it to 8 bits"):
        pixels(Image.new("I;16", (5, 6)))


def test_grey_images_among_coloured_ones_have_three_channels(hub):
    datasets = pytest.importorskip("datasets")
    images = [Image.new("L", (4, 5), i) if i % 2 else Image.new("RGB", (4, 5), (i, 1, 2)) for i in range(ROWS)]
    columns = {"image": images, "label": [i % 3 for i in range(ROWS)]}
    hub["a/b"] = {"train": datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())}
    x = huggingface("a/b", label="label").x
    assert x.shape == (ROWS, 5, 4, 3)
    assert x[[2, 3], 0, 0].tolist() == [[2, 1, 2], [3, 3, 3]]
    hub["c/d"] = {"train": made(), "test": made().select(range(0))}
    with pytest.raises(ValueError, match="has no rows in test: choose another split of train, test"):
        huggingface("c/d", split="test")


def test_a_partition_without_rows_is_named():
    class Partitioner:
        num_partitions = 2

        def load_partition(self, number):
            return [1, 2, 3][: 3 * (1 - number)]

    with pytest.raises(ValueError, match="Client 1 has 0 examples, but training and test need one each"):
        from_partitioner(Partitioner())
