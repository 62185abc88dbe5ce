"""Folders of images: which files count, and what damaged ones say."""

import json
import logging

import numpy as np
import pytest
from PIL import Image

from fedjax_cluster.data import image_folder, load


def picture(path, level=200, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), level, np.uint8)).save(path, **options)


def test_all_kinds_count_links_are_followed_and_hidden_folders_left(tmp_path, caplog):
    for name in ("cat/a.png", "dog/b.webp", "eel/c.gif", "fox/d.tif"):
        picture(tmp_path / "faces" / name)
    picture(tmp_path / "elsewhere" / "e.png")
    (tmp_path / "faces" / "gnu").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    picture(tmp_path / "faces" / "cat" / ".ipynb_checkpoints" / "a-checkpoint.png")
    picture(tmp_path / "faces" / ".hidden" / "a.png")
    with caplog.at_level(logging.WARNING):
        found = image_folder(tmp_path / "faces")
    assert found.x.shape == (5, 8, 8, 3)  # .webp has colours
    assert found.y.tolist() == [0, 1, 2, 3, 4]
    assert [record.message for record in caplog.records] == [
        "the labels are numbered in their order: 0 cat, 1 dog, 2 eel, 3 fox, 4 gnu"
    ]


def test_what_is_left_out_is_told(tmp_path, caplog):
    picture(tmp_path / "cat" / "a.png")
    picture(tmp_path / "dog" / "b.png")
    (tmp_path / "dog" / "c.heic").write_bytes(b"x")
    (tmp_path / "eel").mkdir()
    (tmp_path / "README").write_text("x")
    with caplog.at_level(logging.WARNING):
        found = image_folder(tmp_path)
    assert found.info.num_classes == 2
    assert "left out are 1 .heic, eel, which has no images" in caplog.text


def test_a_link_to_a_folder_above_ends(tmp_path):
    picture(tmp_path / "cat" / "a.png")
    (tmp_path / "cat" / "again").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(ValueError, match="folders down"):
        image_folder(tmp_path)


def damaged(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("place", [14, 17, 22, 30, 42, 60])
def test_a_damaged_image_is_named(place, tmp_path):
    """Faults: a broken chunk is a SyntaxError of Pillow's, a cut header a struct.error."""
    for name in ("a", "b"):
        path = tmp_path / name / "1.png"
        path.parent.mkdir()
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8)).astype(np.uint8)).save(path)
    damaged(tmp_path / "b" / "1.png", place)
    with pytest.raises(ValueError, match=r"b/1\.png is (no image|damaged)"):
        image_folder(tmp_path)


def test_folders_are_classes_whatever_they_are_called(tmp_path):
    """Doses and versions are no values to predict."""
    for name in ("0.5", "10.0", "2.0"):
        picture(tmp_path / name / "a.png")
    found = image_folder(tmp_path)
    assert (found.y.tolist(), found.info.class_names) == ([0, 2, 1], ("0.5", "2.0", "10.0"))
    assert (found.info.task, found.info.num_classes) == ("classification", 3)


def test_train_and_test_are_no_users(tmp_path):
    """Fault: two clients, "test" and "train", of whom each is divided again."""
    for place in ("train/cat/a.png", "train/dog/a.png", "test/cat/a.png"):
        picture(tmp_path / place)
    with pytest.raises(ValueError, match="holds test, train, which are parts of the data and no users: give"):
        image_folder(tmp_path)
    picture(tmp_path / "ann" / "cat" / "a.png")
    assert image_folder(tmp_path).user_ids.tolist() == ["ann", "test", "train", "train"]


def test_a_file_of_json_makes_no_images_leafs(tmp_path):
    for place in ("cat/a.png", "dog/a.png"):
        picture(tmp_path / "faces" / place)
    (tmp_path / "faces" / "labels.json").write_text("{}")
    assert load(f"{tmp_path}/faces").x.shape == (2, 8, 8, 1)
    # Nor do images beside LEAF's train and test, or hidden ones, make none of them.
    users = {"a": {"x": [[0.5, 2.0], [1, 2]], "y": [1, 0]}}
    for part in ("train", "test"):
        (tmp_path / "leaf" / part).mkdir(parents=True)
        (tmp_path / "leaf" / part / "a.json").write_text(json.dumps({"user_data": users}))
    picture(tmp_path / "leaf" / "plots" / "a.png")
    assert load(f"{tmp_path}/leaf").x.shape == (4, 2)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.json").write_text(json.dumps({"user_data": users}))
    picture(tmp_path / "one" / ".hidden" / "a.png")
    assert load(f"{tmp_path}/one").x.shape == (2, 2)
