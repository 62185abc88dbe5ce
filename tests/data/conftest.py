"""Sources for the tests: images that carry their row index, and a small data set in TFDS format."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

from fedjax_cluster.types import DatasetInfo, Examples


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """A separate cache for every test, so that none depends on what another left, or on the user's."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDJAX_CLUSTER_CACHE", str(folder))
    return folder


@pytest.fixture
def numbered():
    """A function of N: images 5 × 5 whose every pixel is the row number plus one.

    The middle pixel survives any rotation, and zero is left to padding. uint8 up to N = 255, uint16 beyond.
    """

    def examples(count: int, num_classes: int = 10) -> Examples:
        rng = np.random.default_rng(count)
        numbers = np.arange(1, count + 1).astype(np.uint8 if count <= 255 else np.uint16)
        x = np.broadcast_to(numbers[:, None, None], (count, 5, 5))
        return Examples(
            x, rng.integers(num_classes, size=count).astype(np.int32), DatasetInfo("numbered", (5, 5), num_classes)
        )

    return examples


@pytest.fixture
def write_tfds():
    """Writes a data set in TFDS format: (folder, name, {split: record numbers}, first_label=0)."""
    return _write_tfds


@pytest.fixture
def tfds_folder(tmp_path, monkeypatch):
    """A folder with the data set `tiny_shapes` 1.2.3 in TFDS format, pointed at by TFDS_DATA_DIR.

    Pixel and label of record i are i and i mod 3; 20 records for training, 6 for test.
    """
    folder = tmp_path / "tfds"
    _write_tfds(folder, "tiny_shapes", {"train": range(20), "test": range(20, 26)})
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    return folder


def _write_tfds(folder: Path, name: str, splits: dict[str, range], *, first_label: int = 0) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter
    from PIL import Image
    from tensorflow_datasets.proto import tf_example_pb2

    place = folder / name / "1.2.3"
    place.mkdir(parents=True)
    for split, numbers in splits.items():
        writer = ArrayRecordWriter(str(place / f"{name}-{split}.array_record-00000-of-00001"), "group_size:1")
        for number in numbers:
            png = io.BytesIO()
            Image.fromarray(np.full((4, 6), number, np.uint8)).save(png, "PNG")
            example = tf_example_pb2.Example()
            example.features.feature["image"].bytes_list.value.append(png.getvalue())
            example.features.feature["label"].int64_list.value.append(number % 3 + first_label)
            writer.write(example.SerializeToString())
        writer.close()
    features = "tensorflow_datasets.core.features."
    shape = {"dimensions": ["4", "6", "1"]}
    image = {
        "pythonClassName": f"{features}image_feature.Image",
        "image": {"dtype": "uint8", "shape": shape, "encodingFormat": "png"},
    }
    label = {"pythonClassName": f"{features}class_label_feature.ClassLabel", "classLabel": {"numClasses": "3"}}
    (place / "features.json").write_text(
        json.dumps(
            {
                "pythonClassName": f"{features}features_dict.FeaturesDict",
                "featuresDict": {"features": {"image": image, "label": label}},
            }
        )
    )
    (place / "dataset_info.json").write_text(
        json.dumps(
            {
                "name": name,
                "version": "1.2.3",
                "fileFormat": "array_record",
                "splits": [
                    {
                        "name": split,
                        "shardLengths": [str(len(numbers))],
                        "numBytes": "1000",
                        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                    }
                    for split, numbers in splits.items()
                ],
                "supervisedKeys": {"tuple": {"items": [{"featureKey": "image"}, {"featureKey": "label"}]}},
            }
        )
    )
