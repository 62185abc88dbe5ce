"""Data sets in files of one's own, as Python and the command line read them."""

import json
import pathlib

import numpy as np
import pandas
import pytest
from PIL import Image

from fedjax_cluster import cli
from fedjax_cluster.data import from_arrays, image_folder, load, npz, scenarios, table
from fedjax_cluster.data.own_examples import numbers
from fedjax_cluster.experiments.config import RunConfig, build_federation
from fedjax_cluster.types import UserExamples

CSV = "label,wide,user,high\ncat,1,u2,10\ndog,2,u1,20.5\ncat,3,u2,30\n"


def write(folder, name, text):
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def people(folder, name="my.npz", *, users=5, rows=20, change=0.0):
    """`users` people of `rows` examples each; person u's examples lie around u."""
    rng = np.random.default_rng(0)
    user = np.repeat([f"person {u}" for u in range(users)], rows)
    y = rng.integers(2, size=len(user))
    x = rng.normal(size=(len(user), 3)).astype(np.float32) + y[:, None] + np.repeat(np.arange(users), rows)[:, None]
    x[0, 0] += change
    np.savez(folder / name, x=x, y=y, user=user)
    return folder / name


def images(folder, places, *, size=(4, 6), mode="L"):
    """An image for each place, all of whose pixels are its number times ten."""
    for number, place in enumerate(places):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        colour = number * 10 if mode == "L" else (number * 10, 1, 2)
        Image.new(mode, size[::-1], colour).save(folder / place)
    return folder


def test_npz_gives_examples_and_their_users(tmp_path):
    examples = npz(people(tmp_path))
    assert isinstance(examples, UserExamples)
    assert (examples.x.shape, examples.x.dtype, examples.y.dtype) == ((100, 3), np.float32, np.int32)
    assert list(np.unique(examples.user_ids)) == [f"person {u}" for u in range(5)]
    assert examples.info[1:4] == ((3,), 2, "classification")
    np.savez(tmp_path / "plain.npz", x=np.zeros((2, 4, 4), np.uint8), y=["b", "a"])
    plain = npz(tmp_path / "plain.npz")
    assert not isinstance(plain, UserExamples)
    assert plain.x.dtype == np.uint8
    np.testing.assert_array_equal(plain.y, [1, 0])


def test_names_tell_what_a_file_holds(tmp_path):
    """The name is the file's and a digest, so that a changed file is another data set, wherever it lies."""
    (tmp_path / "other").mkdir()
    first, again, moved = npz(people(tmp_path)), npz(people(tmp_path)), npz(people(tmp_path / "other"))
    assert first.info.name.startswith("my.npz@")
    assert first.info == again.info == moved.info
    assert npz(people(tmp_path, change=1e-3)).info.name != first.info.name
    with np.load(people(tmp_path)) as kept:
        np.savez(tmp_path / "my.npz", x=kept["x"], y=kept["y"], user=np.roll(kept["user"], 1))
    assert npz(tmp_path / "my.npz").info.name != first.info.name


@pytest.mark.parametrize("kind", ["csv", "tsv", "byte order mark", "quoted", "parquet"])
def test_tables(kind, tmp_path):
    if kind == "parquet":
        path = tmp_path / "my.parquet"
        pandas.read_csv(write(tmp_path, "my.csv", CSV), index_col="wide").reset_index().to_parquet(path)
    else:
        text = {"tsv": CSV.replace(",", "\t"), "byte order mark": "\ufeff" + CSV, "quoted": CSV.replace("cat", '"c,t"')}
        path = write(tmp_path, "my.tsv" if kind == "tsv" else "my.csv", text.get(kind, CSV))
    examples = table(path)
    np.testing.assert_array_equal(examples.x, np.array([[1, 10], [2, 20.5], [3, 30]], np.float32))
    np.testing.assert_array_equal(examples.y, [0, 1, 0])
    assert examples.x.dtype == np.float32
    assert examples.user_ids.tolist() == ["u2", "u1", "u2"]
    assert examples.info[1:4] == ((2,), 2, "classification")


@pytest.mark.parametrize(
    ("labels", "expected", "task"),
    [
        ("2 0 1", [2, 0, 1], "classification"),
        ("-1 1 -1", [0, 1, 0], "classification"),
        ("10 9 11", [1, 0, 2], "classification"),
        ("1.0 0.0 1.0", [1, 0, 1], "classification"),
        ("ten 9 ten", [1, 0, 1], "classification"),
        ("0.5 1 2", [0.5, 1, 2], "regression"),
    ],
)
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_labels_of_tables(labels, expected, task, ending, tmp_path):
    path = write(tmp_path, "my.csv", "\n".join(["label,a", *(f"{label},1" for label in labels.split())]))
    if ending == "parquet":
        pandas.read_csv(path).to_parquet(tmp_path / "my.parquet")
    examples = table(tmp_path / f"my.{ending}")
    np.testing.assert_array_equal(examples.y, expected)
    assert examples.info.task == task
    assert examples.y.dtype == (np.int32 if task == "classification" else np.float32)


def test_columns_have_the_names_that_are_given_and_pixels_their_shape(tmp_path):
    rows = "\n".join(f"{row % 3},{row},{row + 1},{row + 2},250,7" for row in range(6))
    path = write(tmp_path, "my.csv", f"kind,a,b,c,d,who\n{rows}\n")
    examples = table(path, label="kind", user="who", shape=(2, 2))
    assert (examples.x.dtype, examples.x.shape) == (np.uint8, (6, 2, 2))
    np.testing.assert_array_equal(examples.x[4], [[4, 5], [6, 250]])
    assert examples.user_ids.tolist() == [7] * 6
    assert load(str(path), label_column="kind", user_column="who", input_shape=(2, 2)).info == examples.info
    assert table(path, label="kind").x.shape == (6, 5)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_row_names_of_pandas_are_no_feature_and_bytes_in_a_table_no_pixels(ending, tmp_path):
    frame = pandas.DataFrame({"label": [0, 1], "a": np.array([3, 200], np.uint8)}, index=[5, 7])
    getattr(frame, f"to_{ending}")(tmp_path / f"my.{ending}")
    x = table(tmp_path / f"my.{ending}").x
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x, [[3], [200]])


@pytest.mark.parametrize("ids", [["7", "007"], ["1.1", "1.10"], [str(10**20), str(10**20 + 1)]])
def test_users_of_different_names_stay_different(ids, tmp_path):
    rows = "".join(f"0,{number},{user}\n" for number in range(2) for user in ids)
    examples = table(write(tmp_path, "my.csv", "label,a,user\n" + rows))
    assert scenarios.users(examples).user_ids.tolist() == sorted(ids)


def test_whole_numbers_beyond_64_bits_are_not_cut():
    np.testing.assert_array_equal(numbers(np.array([1e20, 2e20])), [1e20, 2e20])


def test_folders_by_class(tmp_path):
    folder = images(tmp_path / "pets", ["cat/1.png", "cat/2.png", "dog/1.png", "eel/a.bmp"])
    (folder / "cat" / "notes.txt").write_text("no image")
    (folder / "cat" / ".hidden.png").write_text("no image")
    examples = image_folder(folder)
    assert (examples.x.shape, examples.x.dtype, examples.info.num_classes) == ((4, 4, 6, 1), np.uint8, 3)
    np.testing.assert_array_equal(examples.x[:, 3, 5, 0], [0, 10, 20, 30])
    np.testing.assert_array_equal(examples.y, [0, 0, 1, 2])
    assert not isinstance(examples, UserExamples)
    assert image_folder(folder, size=(2, 3)).x.shape == (4, 2, 3, 1)


def test_folders_by_user_and_class(tmp_path):
    folder = images(tmp_path, ["al/cat/1.png", "al/dog/1.png", "bo/cat/1.png"], mode="RGB")
    examples = load(f"{folder}/")
    assert isinstance(examples, UserExamples)
    assert examples.user_ids.tolist() == ["al", "al", "bo"]
    np.testing.assert_array_equal(examples.y, [0, 1, 0])
    np.testing.assert_array_equal(examples.x[:, 0, 0], [[0, 1, 2], [10, 1, 2], [20, 1, 2]])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "kind,a\nx,1\n", r"no column 'label' for the labels; its columns: kind, a"),
        (
            "a.csv",
            "label;a\nx;1\n",
            r"its columns: label;a. They are divided by ';': write .csv with commas, or .tsv with",
        ),
        ("a.csv", "label,label,a\nx,x,1\n", "more than one column 'label'"),
        ("a.csv", "label,a,b\nx,1,red\ny,2,blue\n", r"'red' in row 1 below the names, column 'b'"),
        ("a.csv", "label,a,b\nx,1,2\ny,,blue\n", r"nothing in row 2 below the names, column 'a'"),
        ("a.csv", "label,a\nx,1\ny,nan\n", "NaN or infinity, first in example 1"),
        ("a.csv", "label,a,b\nx,1,2\ny,1\n", r"2 values in row 2 below the names, but none for column 'b'"),
        ("a.csv", "label,a,b\nx,1,2\n\ny,1,5,2\n", "4 values in row 2 below the names, but 3 columns"),
        ("a.csv", "a,label\n1,x\n2,\n", "no label in row 2 below the names"),
        ("a.csv", "a,label,user\n1,x, \n2,y,v\n", "no user in row 1 below the names"),
        ("a.csv", "label,a\n", "no rows below"),
        ("a.csv", "label;a\n0;1\n", "no column 'label'"),
        ("a.csv", "", "its first line has no names of columns"),
        ("a.csv", "\nlabel,a\nx,1\n", "its first line has no names of columns"),
        ("a.csv", 'label,"a\nb"\nx,1\n', "or part of one"),
        ("a.csv", "label,user\nx,1\n", "no column of features"),
        ("a.csv", b"label,a\n\xff\xfe,1\n", "cannot be read as a table"),
        ("a.parquet", "no such thing", "cannot be read as a Parquet file"),
        ("a.npz", "no such thing", "np.savez writes one; `table` reads .csv"),
    ],
)
def test_files_that_cannot_be_read_say_why_in_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as error:
        load(str(tmp_path / name))
    assert name in str(error.value)


def test_arrays_and_tables_that_do_not_fit_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros(3), y=np.zeros(3, int))
    with pytest.raises(ValueError, match="holds images, y: name the arrays x, y"):
        npz(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.zeros(3, int), user=[1, 2])
    with pytest.raises(ValueError, match=r"user \[2\] and labels \[3\] differ"):
        npz(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=np.array([None, None]), y=np.zeros(2, int))
    with pytest.raises(ValueError, match=r"no \.npz file of plain arrays"):
        npz(tmp_path / "a.npz")
    path = write(tmp_path, "my.csv", CSV)
    with pytest.raises(ValueError, match=r"2 columns of features, but the shape \[2, 2\] asks for 4"):
        table(path, shape=(2, 2))
    with pytest.raises(ValueError, match="cannot be both labels and users"):
        table(path, user="label")
    pandas.DataFrame({"label": [0, 1], "a": ["x", "y"]}).to_parquet(tmp_path / "my.parquet")
    with pytest.raises(ValueError, match=r"column 'a' of .* holds no numbers"):
        table(tmp_path / "my.parquet")


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([], "no images"),
        (["1.png"], "images 0 folders down"),
        (["a/b/c/1.png"], "images 3 folders down"),
        (["cat/1.png", "al/cat/1.png"], "images 1 and 2 folders down"),
    ],
)
def test_folders_of_another_form_are_refused(places, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        image_folder(images(tmp_path, places))


def test_images_that_differ_or_cannot_be_read_are_named(tmp_path):
    images(tmp_path, ["cat/1.png"])
    images(tmp_path, ["dog/2.png"], size=(5, 6))
    with pytest.raises(ValueError, match=r"differ in size: .*cat/1.png is 4 × 6 and .*dog/2.png 5 × 6"):
        image_folder(tmp_path)
    assert image_folder(tmp_path, size=(4, 4)).x.shape == (2, 4, 4, 1)
    (tmp_path / "dog" / "3.png").write_text("no image")
    with pytest.raises(ValueError, match=r"dog/3.png is no image"):
        image_folder(tmp_path)
    Image.fromarray(np.full((4, 6), 300, np.uint16)).save(tmp_path / "dog" / "3.png")
    with pytest.raises(ValueError, match=r"dog/3.png has more than 8 bits a pixel"):
        image_folder(tmp_path)


def grouped(folder, ending, groups=("b", "a", "b")):
    """Three users of four rows each, u2 before u1, and the groups of u1, u2 and u3."""
    user = np.repeat(["u2", "u1", "u3"], 4)
    group = [groups[int(name[1]) - 1] for name in user]
    columns = {"label": np.arange(12) % 2, "a": np.arange(12.0), "who": user, "truth": group}
    if ending == "npz":
        np.savez(folder / "g.npz", x=columns["a"][:, None], y=columns["label"], user=user, group=group)
    elif ending == "csv":
        pandas.DataFrame(columns).to_csv(folder / "g.csv", index=False)
    else:
        pandas.DataFrame(columns).to_parquet(folder / "g.parquet")
    return folder / f"g.{ending}"


@pytest.mark.parametrize("ending", ["npz", "csv", "parquet"])
def test_groups_of_users_are_those_of_the_federation(ending, tmp_path):
    names = {} if ending == "npz" else {"user_column": "who", "group_column": "truth"}
    known = load(str(grouped(tmp_path, ending)), **names)
    federation = scenarios.users(known)
    np.testing.assert_array_equal(federation.group, [1, 0, 1])
    assert federation.group.dtype == np.int32
    assert federation.info.group_names == ("a", "b")
    # As texts, or as the number -1, a group that is not known.
    unknown = "b - b".replace("-", "-1" if ending == "csv" else "").split(" ")
    federation = scenarios.users(load(str(grouped(tmp_path, ending, unknown)), **names))
    np.testing.assert_array_equal(federation.group, [0, -1, 0])
    federation = scenarios.users(load(str(grouped(tmp_path, ending, [7, 30, -1])), **names))
    np.testing.assert_array_equal(federation.group, [0, 1, -1])
    assert federation.info.group_names == ("7", "30")
    assert load(str(grouped(tmp_path, ending)), **names).info == known.info
    assert load(str(grouped(tmp_path, ending, ["a", "a", "b"])), **names).info.name != known.info.name


def test_groups_may_be_given_by_hand_and_are_numbered_among_those_who_take_part():
    examples = from_arrays(np.zeros((12, 1)), np.arange(12) % 2)
    users, groups = np.repeat([5, 6, 7], [5, 2, 5]), np.repeat(["x", "y", "z"], [5, 2, 5])
    federation = scenarios.users(examples, user_ids=users, group_ids=groups, min_examples=3)
    np.testing.assert_array_equal(federation.group, [0, 1])
    assert federation.info.group_names == ("x", "z")
    with pytest.raises(ValueError, match="group of user 7 is z in some rows and x in others: a client has one"):
        scenarios.users(examples, user_ids=users, group_ids=np.where(np.arange(12) == 11, "x", groups))
    # Groups of other users do not come with the examples.
    theirs = UserExamples.of(examples, users, groups)
    assert scenarios.users(theirs, user_ids=np.arange(12) % 2).group is None
    assert scenarios.users(theirs, user_ids=theirs.user_ids).group.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("groups", "expected", "names"),
    [
        ([-1.0, 0.0, 2.0], [-1, 0, 1], ("0", "2")),
        ([0.5, np.nan, 1.5], [0, -1, 1], ("0.5", "1.5")),
        ([None, "b", "a"], [-1, 1, 0], ("a", "b")),
        ([pandas.NA, 3, 1], [-1, 1, 0], ("1", "3")),
        ([" ", "b", ""], [-1, 0, -1], ("b",)),
        (["NA", "b", "a"], [-1, 1, 0], ("a", "b")),
        (["10", "2", "NaN"], [1, 0, -1], ("2", "10")),
        ([None, None, None], [-1, -1, -1], ()),
        ([True, False, True], [1, 0, 1], ("0", "1")),
    ],
)
def test_what_stands_for_a_group_that_is_not_known(groups, expected, names):
    examples = from_arrays(np.zeros((12, 1)), np.arange(12) % 2)
    mixed = any(one is None or one is pandas.NA for one in groups)
    given = np.repeat(np.array(groups, object if mixed else None), 4)
    federation = scenarios.users(examples, user_ids=np.repeat([5, 6, 7], 4), group_ids=given)
    assert (federation.group.tolist(), federation.info.group_names) == (expected, names)
    with pytest.raises(ValueError, match=r"group_ids has the shape \[3\] for 12 examples"):
        scenarios.users(examples, user_ids=np.repeat([5, 6, 7], 4), group_ids=given[::4])


def test_nothing_in_a_parquet_file_is_no_group(tmp_path):
    path = grouped(tmp_path, "parquet", ["b", None, "b"])
    examples = table(path, user="who", group="truth")
    assert scenarios.users(examples).group.tolist() == [0, -1, 0]
    path = grouped(tmp_path, "parquet", [2, np.nan, 7])
    assert scenarios.users(table(path, user="who", group="truth")).info.group_names == ("2", "7")


def test_groups_need_users(tmp_path):
    with pytest.raises(ValueError, match="has a column of groups, 'truth', but none of users"):
        table(grouped(tmp_path, "csv"), group="truth")
    with pytest.raises(ValueError, match="cannot be both users and groups"):
        table(grouped(tmp_path, "csv"), user="who", group="who")
    with pytest.raises(ValueError, match="no column 'true' for the groups"):
        table(grouped(tmp_path, "csv"), user="who", group="true")
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.zeros(3, int), user=[1, 2, 3], group=[1, 2])
    with pytest.raises(ValueError, match=r"group \[2\] and labels \[3\] differ"):
        npz(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="group_column is 'truth', but scenario rotated divides the rows anew"):
        build_federation(RunConfig(dataset=str(grouped(tmp_path, "csv")), group_column="truth"))


def test_users_come_with_the_examples_or_by_hand(tmp_path):
    examples = npz(people(tmp_path))
    by_hand = scenarios.users(examples, user_ids=examples.user_ids)
    assert len(scenarios.users(examples).train.x) == len(by_hand.train.x) == 5
    with pytest.raises(ValueError, match="name no users"):
        scenarios.users(examples._replace(x=examples.x + 1))


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    def run(words, status=0):
        assert cli.main(words.split()) == status
        captured = capsys.readouterr()
        assert status == 0 or captured.err.count("\n") == 1
        return captured.err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_prepare_jax", lambda: None)
    return run


@pytest.mark.slow
def test_users_run_from_the_command_line_and_a_changed_file_is_another_experiment(command, tmp_path):
    people(tmp_path)
    words = "run fedavg --scenario users --dataset my.npz --rounds 2 --model linear --run-dir own"
    command(words)
    with open("own/summary.json") as file:
        summary = json.load(file)
    assert summary["clients"] == 5
    assert summary["dataset"].startswith("my.npz@")
    of_clients = np.genfromtxt("own/clients.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    whole = npz(tmp_path / "my.npz")
    names, rows = np.unique(whole.user_ids, return_counts=True)
    assert of_clients["user"].tolist() == names.tolist()
    np.testing.assert_array_equal(of_clients["train_examples"] + of_clients["test_examples"], rows)
    np.testing.assert_allclose(of_clients["accuracy"].mean(), summary["accuracy"], rtol=1e-6)
    page = pathlib.Path("own/report.html").read_text()
    assert all(f">{name}</td>" in page for name in names)
    command(words)
    command("resume own --rounds 3")
    people(tmp_path, change=1e-3)
    assert "belongs to another experiment: scenario is my.npz@" in command(words.replace("2", "3"), 2)
    assert "too few for 9 clients" in command(f"{words} --clients 9", 2)


@pytest.mark.slow
def test_clusters_are_compared_with_the_groups_of_a_table(command, tmp_path):
    grouped(tmp_path, "csv")
    columns = "--user-column who --group-column truth"
    command(f"run ifca --scenario users --dataset g.csv {columns} --rounds 2 --model linear --run-dir own")
    with open("own/summary.json") as file:
        summary = json.load(file)
    assert (summary["clients"], summary["num_clusters"]) == (3, 2)  # K is the number of groups
    of_clients = np.genfromtxt("own/clients.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    assert list(zip(of_clients["group"], of_clients["group_name"], strict=True)) == [(1, "b"), (0, "a"), (1, "b")]
    assert np.isfinite(summary["adjusted_rand_index"])
    assert "group_column is" in command(f"run ifca --dataset g.csv {columns.split('who ')[1]} --rounds 2", 2)


@pytest.mark.slow
def test_groups_that_are_not_known_are_none_of_k_and_any_name_can_be_drawn(command, tmp_path):
    names = ["C:$\\new$", "", "between $5 and $10, or Donaudampfschifffahrtsgesellschaft"]
    grouped(tmp_path, "csv", names)
    columns = "--user-column who --group-column truth"
    told = command(f"run ifca --scenario users --dataset g.csv {columns} --rounds 2 --model linear --run-dir own")
    assert "K, the number of clusters, was 2, the number of the scenario's groups" in told
    page = pathlib.Path("own/report.html").read_text()
    assert all(name in page for name in names)
    grouped(tmp_path, "csv", ["", "", ""])
    told = command(f"run ifca --scenario users --dataset g.csv {columns} --rounds 2 --model linear --run-dir none")
    assert "as the scenario has no groups" in told


def test_a_file_with_a_plus_in_its_name_and_several_joined(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a+b.npz", "c.npz", "d.npz"):
        people(tmp_path, name)
    alone = build_federation(RunConfig(scenario="dirichlet", dataset="a+b.npz", clients=4))
    assert alone.info.name.startswith("a+b.npz@")
    upright = {"angles": [[0], [0]]}
    joined = build_federation(
        RunConfig(scenario="mixed_datasets", dataset="c.npz+d.npz", clients=4, scenario_options=upright)
    )
    assert [name[:6] for name in joined.info.group_names] == ["c.npz@", "d.npz@"]
