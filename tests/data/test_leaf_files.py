"""LEAF's files, of which small ones are written here in the form of its scripts."""

import json

import numpy as np
import pytest

from fedjax_cluster.data import check_federation, leaf, load, scenarios
from fedjax_cluster.types import UserExamples


def write(folder, name, users):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    counts = [len(data["y"]) for data in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": counts, "user_data": users}), encoding="utf-8")
    return folder


def femnist(folder):
    """Writers a and b; image i of a writer has its first row at (i + 1)/255, and is white elsewhere."""

    def writer(count):
        return {"x": [[(i + 1) / 255] * 28 + [1.0] * 756 for i in range(count)], "y": [10 * i for i in range(count)]}

    write(folder, "train/all_data_0_niid_0_keep_0_train_9.json", {"a": writer(3), "b": writer(2)})
    return write(folder, "test/all_data_0_niid_0_keep_0_test_9.json", {"a": writer(1), "b": writer(1)})


def test_femnist_by_writer(tmp_path):
    examples = leaf(femnist(tmp_path))
    assert isinstance(examples, UserExamples)
    assert (examples.x.shape, examples.x.dtype, examples.info.num_classes) == ((7, 28, 28, 1), np.uint8, 62)
    # The test files come first in their order of names; a user's rows of both belong to one user.
    assert sorted(zip(examples.user_ids, examples.x[:, 0, 5, 0].tolist(), examples.y.tolist(), strict=True)) == [
        ("a", 1, 0),
        ("a", 1, 0),
        ("a", 2, 10),
        ("a", 3, 20),
        ("b", 1, 0),
        ("b", 1, 0),
        ("b", 2, 10),
    ]
    assert (examples.x[:, 1:] == 255).all()
    federation = scenarios.users(load(f"{tmp_path}/"))
    check_federation(federation)
    np.testing.assert_array_equal(federation.train.num_examples + federation.test.num_examples, [4, 3])


def test_shakespeare_by_role(tmp_path):
    text = "To be, or not é!"
    users = {"HAMLET": {"x": [text[i : i + 8] for i in range(8)], "y": [text[i + 8] for i in range(8)]}}
    examples = leaf(write(tmp_path, "all_data.json", {**users, "OPHELIA": {"x": ["\nMy lord"], "y": ["?"]}}))
    assert (examples.x.shape, examples.info.task) == ((9, 8), "language")
    # Every target is the token that follows, and the windows overlap as the text does.
    np.testing.assert_array_equal(examples.x[:, 1:], examples.y[:, :-1])
    np.testing.assert_array_equal(examples.x[1], examples.y[0])
    assert examples.x.max() < examples.info.num_classes
    # A letter that is not ASCII counts as a space.
    assert examples.y[6, -1] == examples.x[0, 2]
    np.testing.assert_array_equal(scenarios.users(examples, min_examples=8).train.num_examples, [6])


def test_other_numbers_stay(tmp_path):
    write(tmp_path, "data.json", {"f_0": {"x": [[0.5, -2.0], [1, 2]], "y": [1.0, 0.0]}})
    examples = leaf(tmp_path)
    np.testing.assert_array_equal(examples.x, np.array([[0.5, -2], [1, 2]], np.float32))
    assert examples.info.task == "classification"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "a.json is no file of LEAF"),
        ("[1", "a.json is no file of LEAF"),
        ('{"user_data": {"a": {"x": [[1], [2]], "y": [0]}}}', "other than one y for each x"),
        ('{"user_data": {"a": {"x": [[1], [2, 3]], "y": [0, 1]}}}', "nor rows of as many numbers"),
        ('{"user_data": {"a": {"x": [[1' + "0" * 400 + ']], "y": [0]}}}', "int too large"),
        ('{"user_data": {"a": {"x": ["abc", "d"], "y": ["d", "e"]}}}', "differ in length"),
        ('{"user_data": {}}', "no examples"),
    ],
)
def test_files_that_are_none_of_leafs_are_refused(content, message, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        leaf(tmp_path)
    assert "\n" not in str(error.value)


def test_folders_without_leafs_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="run LEAF's preprocess"):
        leaf(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        leaf(tmp_path / "nowhere")


def windows(text, begin, end):
    return {"x": [text[i : i + 8] for i in range(begin, end)], "y": [text[i + 8] for i in range(begin, end)]}


def test_texts_stay_divided_as_leaf_divides_them(tmp_path):
    """Fault: windows that slide by one are dealt out at random, and the tests' letters are trained on."""
    text = "".join(chr(97 + i % 26) for i in range(60))
    write(tmp_path, "train/a.json", {"HAMLET": windows(text, 0, 20), "OPHELIA": windows(text, 5, 20)})
    write(tmp_path, "test/a.json", {"HAMLET": windows(text, 30, 36), "OPHELIA": windows(text, 30, 33)})
    federation = scenarios.users(leaf(tmp_path))
    np.testing.assert_array_equal(federation.train.num_examples, [20, 15])
    np.testing.assert_array_equal(federation.test.num_examples, [6, 3])
    # Who is only in one of the two is left out; where all are, LEAF has divided the users, and the scenario the rows.
    write(tmp_path, "train/a.json", {"HAMLET": windows(text, 0, 20), "GHOST": windows(text, 5, 20)})
    np.testing.assert_array_equal(scenarios.users(leaf(tmp_path)).test.num_examples, [6])
    write(tmp_path, "train/a.json", {"HAMLET": windows(text, 0, 20), "OPHELIA": windows(text, 5, 20)})
    write(tmp_path, "test/a.json", {"GHOST": windows(text, 30, 36)})
    federation = scenarios.users(leaf(tmp_path))
    np.testing.assert_array_equal(federation.train.num_examples + federation.test.num_examples, [6, 20, 15])
