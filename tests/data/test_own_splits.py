"""Rows of one's own that are given for training, testing and validation: they are where the data say."""

import json
import logging
import re

import numpy as np
import pandas
import pytest

from fedjax_cluster import cli
from fedjax_cluster.data import check_federation, joined, load, npz, scenarios, table
from fedjax_cluster.data.own_examples import row_parts
from fedjax_cluster.data.scenarios.registry import SCENARIOS
from fedjax_cluster.experiments.config import RunConfig, build_federation
from fedjax_cluster.types import UserExamples

# Users of unequal sizes: how many rows each has for training, testing and validation.
SIZES = {"ann": (7, 3, 2), "bo": (1, 1, 0), "cy": (4, 9, 5)}
WORDS = {"train": ["train", "Train", "TRAIN", " train "], "test": ["test", "TEST"], "validation": ["val", "Valid"]}
ENDINGS = ("npz", "csv", "parquet")


def written(folder, ending, sizes=SIZES, *, change=None, order=0):
    """A file of shuffled rows, whose only feature tells them apart; and user and part of each, in the order of these.

    Args:
      sizes: user -> number of rows for training, testing and validation.
      change: what rows are called, by their number.
      order: decides how rows are shuffled, and how their parts are written.
    """
    rng = np.random.default_rng(order)
    told = [
        (user, part) for user, counts in sizes.items() for part, n in zip(WORDS, counts, strict=True) for _ in range(n)
    ]
    split = np.array([rng.choice(WORDS[part]) for _, part in told], object)
    for row, word in (change or {}).items():
        split[row] = word
    shuffled = rng.permutation(len(told))
    frame = pandas.DataFrame({"label": np.arange(len(told)) % 2, "number": np.arange(1, len(told) + 1) / 128})
    frame = frame.assign(who=[user for user, _ in told], part=split).iloc[shuffled]
    path = folder / f"own.{ending}"
    if ending == "npz":
        parts = np.array(frame["part"].tolist())
        np.savez(path, x=frame[["number"]], y=frame["label"], user=frame["who"].to_numpy(str), split=parts)
    elif ending == "csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path, index=False)
    return path, told


def examples_of(path, **options):
    if path.suffix == ".npz":
        return npz(path)
    return table(path, user="who", split="part", **options)


def numbers_of(data, client):
    """The numbers of a client's rows."""
    return sorted(int(128 * number) for number in np.asarray(data.x)[client, : data.num_examples[client], 0])


@pytest.mark.parametrize("ending", ENDINGS)
def test_each_row_is_where_the_file_says(ending, tmp_path):
    """Faults: rows are divided at random after all; parts go with other rows than theirs; "val" is no validation."""
    path, told = written(tmp_path, ending)
    federation = scenarios.users(examples_of(path))
    check_federation(federation)
    assert federation.user_ids.tolist() == list(SIZES)
    for client, user in enumerate(SIZES):
        for name, data in zip(WORDS, (federation.train, federation.test, federation.validation), strict=True):
            expected = [number + 1 for number, (owner, part) in enumerate(told) if (owner, part) == (user, name)]
            assert numbers_of(data, client) == expected
            # Labels go with their rows, and the padding holds nothing.
            count = data.num_examples[client]
            np.testing.assert_array_equal(data.y[client, :count], (128 * data.x[client, :count, 0] - 1) % 2)
            assert not data.x[client, count:].any()
    assert [data.num_examples.tolist() for data in federation[:3]] == [[7, 1, 4], [3, 1, 9], [2, 0, 5]]
    by_name = load(str(path), **({} if ending == "npz" else {"user_column": "who", "split_column": "part"}))
    assert by_name.info == examples_of(path).info
    np.testing.assert_array_equal(by_name.split, examples_of(path).split)


def test_seeds_divide_alike_and_without_validation_rows_there_are_none(tmp_path):
    path, _ = written(tmp_path, "csv", {"ann": (7, 3, 0), "bo": (2, 1, 0)})
    one, other = (scenarios.users(examples_of(path), seed=seed) for seed in (0, 1))
    assert one.validation is None
    np.testing.assert_array_equal(one.test.x, other.test.x)


def test_users_who_could_not_be_trained_and_tested_are_left_out_and_named(tmp_path, caplog):
    """Faults: they come with no row, which a run refuses; the log names others; rows are counted, not parts."""
    caplog.set_level(logging.WARNING, "fedjax_cluster")
    sizes = {**SIZES, "di": (5, 0, 3), "ed": (0, 4, 0), "flo": (1, 0, 0), "gus": (0, 0, 6)}
    federation = scenarios.users(examples_of(written(tmp_path, "parquet", sizes)[0]))
    assert federation.user_ids.tolist() == ["ann", "bo", "cy"]
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 7 users have fewer than 2 examples and are left out: flo",
        "3 of 7 users have no training or no test row and are left out: di, ed, gus",
    ]
    with pytest.raises(
        ValueError, match="3 users with 2 examples or more, training and test rows among them, too few "
    ):
        scenarios.users(examples_of(written(tmp_path, "csv", sizes)[0]), clients=4)
    with pytest.raises(ValueError, match=r"No user has 2 examples, training and test rows among them: choose .* split"):
        scenarios.users(examples_of(written(tmp_path, "csv", {"ann": (5, 0, 1), "bo": (0, 5, 1)})[0]))


def test_fewer_rows_of_each_part_keep_the_proportions(tmp_path):
    """Faults: rows of all parts are drawn together; a part is left without any; small users lose rows."""
    sizes = {"ann": (60, 20, 8), "bo": (2, 1, 4), "cy": (30, 1, 1), "di": (1, 30, 0)}
    path, told = written(tmp_path, "csv", sizes)
    federation = scenarios.users(examples_of(path), examples_per_client=8)
    assert [data.num_examples.tolist() for data in federation[:3]] == [[6, 2, 7, 1], [2, 1, 1, 7], [1, 4, 1, 0]]
    for client, user in enumerate(sizes):
        for name, data in zip(WORDS, federation[:3], strict=True):
            there = [number + 1 for number, each in enumerate(told) if each == (user, name)]
            assert set(numbers_of(data, client)) <= set(there)
    again, other = (scenarios.users(examples_of(path), examples_per_client=8, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(again.train.x, federation.train.x)
    assert numbers_of(other.train, 0) != numbers_of(federation.train, 0)


@pytest.mark.parametrize("value", [True, 1, 0, "1", "False", "training", "", "val idation", "nan"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_no_word_for_a_part_is_refused(value, ending, tmp_path):
    """Fault: 1 is taken for one of the two, and a model is tested on what it was trained on."""
    path, _ = written(tmp_path, "csv", order=3)
    frame = pandas.read_csv(path)
    # A column of one kind, as Parquet and NumPy have it.
    frame["part"] = value if ending == "parquet" else frame["part"].where(frame.index != 4, value)
    row = 1 if ending == "parquet" else 5
    if ending == "csv":
        frame.to_csv(path, index=False)
    elif ending == "parquet":
        frame.to_parquet(path := tmp_path / "own.parquet", index=False)
    else:
        path, split = tmp_path / "own.npz", np.array([str(part) for part in frame["part"]])
        np.savez(path, x=frame[["number"]], y=frame["label"], user=frame["who"].to_numpy(str), split=split)
    shown = value if ending == "parquet" else str(value)
    message = (
        f"{path}: the split is {shown!r} in row {row}, which does not tell what the row is for: write train, test or "
        "validation"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        examples_of(path)


@pytest.mark.parametrize("split", [np.array([True, False]), np.array([0, 1]), np.array([0.0, np.nan]), [None, "test"]])
def test_numbers_and_booleans_are_refused_of_any_type(split):
    with pytest.raises(ValueError, match=r"the split is (True|0|0.0|None) in row 1, .*: write train, test or valid"):
        row_parts(np.asarray(split))


def test_there_is_a_row_to_train_on_and_one_to_test_on(tmp_path):
    for sizes, part in (({"ann": (0, 3, 2)}, "train"), ({"ann": (3, 0, 2)}, "test")):
        with pytest.raises(ValueError, match=f"own.csv: the split has no {part} row: give each user rows of both"):
            examples_of(written(tmp_path, "csv", sizes)[0])
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.zeros(3, int), user=[1, 1, 1], split=["train", "test"])
    with pytest.raises(ValueError, match=r"split \[2\] and labels \[3\] differ: give one for each"):
        npz(tmp_path / "a.npz")
    theirs = UserExamples.of(npz(written(tmp_path, "npz")[0]), np.zeros(32), split=["train", "test"])
    with pytest.raises(ValueError, match=r"the split has the shape \[2\] for 32 examples"):
        scenarios.users(theirs)


def test_a_split_is_part_of_what_a_file_is_called(tmp_path):
    """Faults: a run goes on after a row has changed its part; files without a split have other names than before."""
    names = [examples_of(written(tmp_path, "csv")[0]).info.name]
    changes = {0: "test", 1: "validation", 20: "train"}
    names += [examples_of(written(tmp_path, "csv", change={row: word})[0]).info.name for row, word in changes.items()]
    assert len(set(names)) == len(names)
    # As another word for the same, it is the same.
    assert examples_of(written(tmp_path, "csv", change={0: "tRAIN"})[0]).info.name == names[0]
    (tmp_path / "own.csv").write_text("label,a,user\n0,1,u\n1,2,u\n0,3,v\n1,4,v\n")
    assert table(tmp_path / "own.csv").info.name == "own.csv@0d48f2ba"
    x, user, group = np.arange(8.0).reshape(4, 2), [1, 1, 2, 2], ["a", "a", "b", "b"]
    np.savez(tmp_path / "own.npz", x=x, y=[0, 1, 0, 1], user=user, group=group)
    assert npz(tmp_path / "own.npz").info.name == "own.npz@3f7aa42f"


@pytest.mark.parametrize("scenario", sorted(set(SCENARIOS) - {"users"}))
def test_other_scenarios_refuse_a_split(scenario, tmp_path):
    """Fault: a scenario divides rows anew, and tests on some that were given for training."""
    examples = examples_of(written(tmp_path, "csv")[0])
    given = [examples, examples] if scenario == "mixed_datasets" else examples
    with pytest.raises(
        ValueError,
        match=f"the split of own.csv@.* is used by the scenario users alone, not by {scenario}".replace("_", "-"),
    ):
        SCENARIOS[scenario](examples=given, clients=2)


def test_configurations_of_other_scenarios_refuse_a_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "csv")
    written(tmp_path, "npz")
    with pytest.raises(
        ValueError, match=r"split_column is 'part', but scenario rotated .*; give scenario users, or no s"
    ):
        RunConfig(dataset="own.csv", split_column="part")
    with pytest.raises(
        ValueError, match=r"own.npz@.* used by the scenario users alone, not by dirichlet: leave --split-"
    ):
        build_federation(RunConfig(dataset="own.npz", scenario="dirichlet"))
    with pytest.raises(ValueError, match=r"own.npz@.* used by the scenario users alone, not by joined"):
        build_federation(RunConfig(dataset="own.npz+own.npz", scenario="users"))
    with pytest.raises(ValueError, match="not by joined"):
        joined([npz("own.npz"), npz("own.npz")])
    with pytest.raises(ValueError, match="split_column is 'part', but hf:a/b has no column that divides its rows here"):
        load("hf:a/b", label_column="y", split_column="part")
    with pytest.raises(ValueError, match=r"split_column is 'part', but 'own.npz' is no table: leave it out"):
        load("own.npz", split_column="part")
    with pytest.raises(ValueError, match="split_column is 'part', but the clients are those of the population people"):
        RunConfig(population="people", split_column="part")
    # Without its split it is as any other, and says what stands in the column.
    assert len(scenarios.size_skew(npz("own.npz")._replace(), clients=2).train.x) == 2
    with pytest.raises(ValueError, match=r"column 'part', where features are numbers: .* users, groups or the split"):
        table("own.csv", user="who")


def test_a_share_for_testing_is_refused_beside_a_split(tmp_path):
    with pytest.raises(
        ValueError, match=r"test_fraction is 0.5, but the split of own.csv@.* tells which rows are tested"
    ):
        scenarios.users(examples_of(written(tmp_path, "csv")[0]), test_fraction=0.5)


def test_a_split_needs_users_and_other_users_keep_it(tmp_path):
    path, _ = written(tmp_path, "csv")
    alone = table(path.with_suffix(".csv"), user="who", split="part")
    frame = pandas.read_csv(path).drop(columns="who")
    frame.to_csv(path, index=False)
    examples = table(path, split="part")
    with pytest.raises(ValueError, match="name no users"):
        scenarios.users(examples)
    federation = scenarios.users(examples, user_ids=np.arange(32) // 16)
    assert federation.test.num_examples.sum() == (alone.split == "test").sum()
    with pytest.raises(ValueError, match=r"own.csv@.* is used by the scenario users alone"):
        scenarios.rotated(examples, clients=2)


def test_columns_of_a_split_are_named_once(tmp_path):
    path, _ = written(tmp_path, "csv")
    with pytest.raises(ValueError, match="has no column 'parts' for the split; its columns: label, number, who, part"):
        table(path, user="who", split="parts")
    with pytest.raises(ValueError, match=r"the column 'part' of .* cannot be both users and split: name another one"):
        table(path, user="part", split="part")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    def run(words, status=0):
        assert cli.main(words.split()) == status
        return capsys.readouterr().err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_prepare_jax", lambda: None)
    return run


COMMAND = (
    "run fedavg --scenario users --dataset own.csv --user-column who --split-column part --rounds 2 --model linear"
)


def test_a_bad_value_ends_the_command_in_one_line(command, tmp_path):
    written(tmp_path, "csv", change={5: "1"})
    said = command(f"{COMMAND} --run-dir own", 2)
    assert said.count("\n") == 1
    assert "own.csv: the split is '1' in row" in said
    assert not (tmp_path / "own").exists()
    written(tmp_path, "csv")
    assert "test_fraction is 0.4, but the split of own.csv@" in command(f"{COMMAND} --test-fraction 0.4", 2)
    assert "split_column is 'part', but scenario rotated" in command(
        "run fedavg --dataset own.csv --split-column part", 2
    )


@pytest.mark.slow
def test_a_split_runs_from_the_command_line_and_another_is_another_experiment(command, tmp_path):
    written(tmp_path, "csv")
    command(f"{COMMAND} --run-dir own")
    of_clients = np.genfromtxt("own/clients.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    assert of_clients["user"].tolist() == ["ann", "bo", "cy"]
    assert (of_clients["train_examples"].tolist(), of_clients["test_examples"].tolist()) == ([7, 1, 4], [3, 1, 9])
    with open("own/config.json") as file:
        assert json.load(file)["experiment"]["split_column"] == "part"
    command(f"{COMMAND} --run-dir own")
    command("resume own --rounds 3")
    # Validation rows are not looked at, but whose they are is part of the data.
    written(tmp_path, "csv", change={10: "train"})
    assert "belongs to another experiment: scenario is own.csv@" in command(f"{COMMAND} --run-dir own", 2)
    command(f"compare fedavg local-only {COMMAND.partition('fedavg ')[2]} --run-dir both")
    written(tmp_path, "csv")
    assert "its data are own.csv@" in command(
        f"compare fedavg local-only {COMMAND.partition('fedavg ')[2]} --run-dir both", 2
    )
