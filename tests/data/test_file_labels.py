"""Labels, users and numbers as files have them: what is a class, what is missing, what a gap between classes does."""

import logging

import numpy as np
import pandas
import pyarrow.parquet
import pytest

from fedjax_cluster.data import (
    digits,
    from_arrays,
    image_folder,
    joined,
    leaf,
    load,
    npz,
    open_population,
    scenarios,
    table,
    write_population,
)
from fedjax_cluster.data.own_examples import numbers
from fedjax_cluster.experiments.config import RunConfig, build_federation


def csv(path, text):
    path.write_text(text)
    return path


def test_whole_numbers_with_gaps_are_numbered_in_their_order_and_the_log_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        found = table(csv(tmp_path / "a.csv", "label,a\n10,1\n0,2\n250000,3\n10,4\n"))
    assert found.y.tolist() == [1, 0, 2, 1]
    assert found.info.num_classes == 3
    assert "the labels 0, 10, 250000 are numbered 0 to 2" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert table(csv(tmp_path / "b.csv", "label,a\n1,1\n0,2\n2,3\n")).y.tolist() == [1, 0, 2]
    assert not caplog.records


def test_whole_numbers_are_values_where_the_task_is_a_regression(tmp_path):
    path = csv(tmp_path / "a.csv", "label,a\n250000,1\n310000,2\n")
    found = table(path, task="regression")
    assert found.info.task == "regression"
    assert found.y.tolist() == [250000.0, 310000.0]
    np.savez(tmp_path / "a.npz", x=np.eye(3), y=[7, 9, 9])
    assert npz(tmp_path / "a.npz", task="regression").y.dtype == np.float32
    with pytest.raises(ValueError, match="could not convert"):
        table(csv(tmp_path / "b.csv", "label,a\ncat,1\ndog,2\n"), task="regression")
    lines = "".join(f"{5 * row},{row},{row % 2}\n" for row in range(12))
    np.savez(tmp_path / "b.npz", x=np.eye(12), y=5 * np.arange(12), user=np.arange(12) % 2)
    for file in (csv(tmp_path / "c.csv", f"label,a,user\n{lines}"), tmp_path / "b.npz"):
        found = build_federation(RunConfig(dataset=str(file), scenario="users", task="regression"))
        values = np.concatenate(
            [rows.y[m, :n] for rows in (found.train, found.test) for m, n in enumerate(rows.num_examples)]
        )
        assert sorted(values.tolist()) == [5.0 * row for row in range(12)]
    with pytest.raises(ValueError, match="task is 'regression', but 'digits' has classes"):
        load("digits", task="regression")
    with pytest.raises(ValueError, match="has values to predict and no classes, which this scenario divides by"):
        scenarios.dirichlet(table(path, task="regression"), clients=1)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ("1 01 1 01", [1, 0, 1, 0]),
        ("1_0 10 10", [1, 0, 0]),
        ("1e2 2e1 1e2", [1, 0, 1]),
        ("2.0 10.0 2.0", [0, 1, 0]),
        ("10 2 1", [2, 1, 0]),
    ],
)
def test_different_texts_are_different_classes_and_numbers_stand_in_their_order(texts, expected, tmp_path):
    lines = "\n".join(f"{text},{row}" for row, text in enumerate(texts.split()))
    assert table(csv(tmp_path / "a.csv", f"label,a\n{lines}\n")).y.tolist() == expected


def test_groups_of_different_texts_stay_apart():
    of_user = np.arange(40) % 4
    source = from_arrays(np.arange(80.0).reshape(40, 2), of_user // 2)
    found = scenarios.users(source, user_ids=of_user, group_ids=np.array(["1", "01"])[of_user % 2])
    assert found.group.tolist() == [1, 0, 1, 0]
    assert found.info.group_names == ("01", "1")


@pytest.mark.parametrize("missing", ["NA", "NaN", "null"])
def test_text_that_stands_for_a_missing_label_is_no_class(missing, tmp_path):
    with pytest.raises(ValueError, match=f"hold '{missing}' in row 2"):
        table(csv(tmp_path / "a.csv", f"label,a\ncat,1\n{missing},2\ndog,3\n"))
    np.savez(tmp_path / "a.npz", x=np.eye(3), y=["a", "", "b"])
    with pytest.raises(ValueError, match="hold '' in row 2"):
        npz(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.eye(3), y=[0, 1, 0], user=["a", "", "b"])
    with pytest.raises(ValueError, match="no user in row 2"):
        npz(tmp_path / "b.npz")


def test_an_index_that_pandas_has_named_is_no_feature(tmp_path):
    frame = pandas.DataFrame({"label": [0, 1, 0], "a": [0.1, 0.2, 0.3]}, pandas.Index([100, 101, 102], name="id"))
    frame.to_parquet(tmp_path / "a.parquet")
    assert table(tmp_path / "a.parquet").x.shape == (3, 1)
    assert table(tmp_path / "a.parquet", label="id").x.shape == (3, 2)
    twice = pandas.DataFrame([[0, 0.1, 0.2], [1, 0.3, 0.4]], columns=["label", "a", "b"])
    columns = pyarrow.Table.from_pandas(twice).rename_columns(["label", "a", "a"])
    pyarrow.parquet.write_table(columns.replace_schema_metadata(), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="more than one column 'a': rename"):
        table(tmp_path / "b.parquet")


def test_what_is_missing_in_an_encoded_column_is_missing(tmp_path):
    """Fault: of a pandas Categorical with gaps pyarrow makes the last of its categories there, without a word."""
    rows = {"label": ["cat", "dog"] * 6, "who": ["u"] * 6 + ["v"] * 6, "truth": ["left"] * 6 + [None] * 6}
    frame = pandas.DataFrame({name: pandas.Categorical(values) for name, values in rows.items()} | {"a": range(12)})
    path = tmp_path / "a.parquet"
    frame.to_parquet(path)
    federation = scenarios.users(table(path, user="who", group="truth"))
    assert (federation.group.tolist(), federation.info.group_names) == ([0, -1], ("left",))
    for name, message in (("label", "the labels hold nothing in some rows"), ("who", "user_ids holds NaN or None")):
        frame.assign(**{name: frame[name].where(frame.index != 3)}).to_parquet(path)
        with pytest.raises(ValueError, match=message):
            scenarios.users(table(path, user="who", group="truth"))


def test_a_column_of_groups_that_is_a_feature_is_said(tmp_path, caplog):
    text = "label,user,group,a\n" + "".join(f"{row % 2},{row // 4},{row // 8},{row}\n" for row in range(16))
    assert table(csv(tmp_path / "a.csv", text)).x.shape == (16, 2)
    assert "the column 'group' of" in caplog.text
    caplog.clear()
    assert table(csv(tmp_path / "a.csv", text), group="group").x.shape == (16, 1)
    assert "is a feature" not in caplog.text


def test_pixels_of_another_scale_stay_as_they_are(tmp_path):
    rows = "\n".join(f"{row % 2},{row},{16 - row},0,8" for row in range(6))
    path = csv(tmp_path / "a.csv", f"label,a,b,c,d\n{rows}\n")
    assert table(path, shape=(2, 2)).x.dtype == np.float32
    path = csv(tmp_path / "b.csv", f"label,a,b,c,d\n{rows.replace(',8', ',200')}\n")
    assert table(path, shape=(2, 2)).x.dtype == np.uint8


def test_images_of_dark_bytes_are_told(caplog):
    with caplog.at_level(logging.WARNING):
        from_arrays(np.full((4, 3, 3), 16, np.uint8), np.arange(4))
    assert "bytes up to 16" in caplog.text


@pytest.mark.parametrize("kind", [">f4", ">f8", np.longdouble])
def test_numbers_of_other_machines_become_those_of_this_one(kind):
    source = from_arrays(np.eye(4).astype(kind), np.arange(4).astype(">i4")[:, None])
    assert source.x.dtype == np.dtype(np.float32)
    assert source.x.dtype.isnative
    assert source.y.dtype.isnative
    assert source.y.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ({"a": 1}, "x is a dict"),
        (np.zeros((4, 0)), "has no features"),
        (np.ma.masked_less(np.eye(4), 0.5), "12 masked values"),
    ],
)
def test_what_holds_no_rows_of_numbers_is_refused(x, message):
    with pytest.raises(ValueError, match=message):
        from_arrays(x, np.arange(4))


def test_scenarios_choose_among_the_labels_that_occur():
    full = digits()
    later = from_arrays(full.x, full.y + 1)
    occurring = set(range(1, 11))
    for found in (scenarios.label_swap(later, clients=8, num_groups=5), scenarios.label_groups(later, clients=10)):
        named = [
            int(label)
            for name in found.info.group_names
            for label in name.replace("↔", " ").split()
            if label != "labels"
        ]
        assert set(named) == occurring
    overlap = scenarios.class_overlap(later, clients=8)
    assert all(len(name.split()) == 3 and " 0" not in name for name in overlap.info.group_names)
    assert scenarios.label_swap(later, clients=8, balanced=True).train.num_examples.min() == 150
    moved = scenarios.label_permutation(later, clients=8)
    assert set(np.unique(moved.train.y[0, : moved.train.num_examples[0]])) <= occurring
    # The same draws where no label is left out.
    plain = scenarios.label_swap(full, clients=8).info.group_names
    assert [tuple(int(label) + 1 for label in name.split("↔")) for name in plain] == [
        tuple(map(int, name.split("↔"))) for name in scenarios.label_swap(later, clients=8).info.group_names
    ]


def test_true_groups_are_never_alike(tmp_path):
    full = digits()
    drawn = scenarios.class_overlap(full, clients=20, num_groups=10).info.group_names
    assert len(set(drawn)) == 10
    refused = [
        (scenarios.class_overlap, {"num_groups": 4, "classes_per_group": 10}, "make 1 different groups"),
        (scenarios.class_overlap, {"table": [[1] * 10, [2] * 10]}, "Cluster 1 of the table has the same"),
        (scenarios.class_overlap, {"table": "mnist", "num_groups": 7}, "are of a drawn table"),
    ]
    for scenario, options, message in refused:
        with pytest.raises(ValueError, match=message):
            scenario(full, clients=10, **options)
    with pytest.raises(ValueError, match=r"slopes \[10.0, 10.0\] repeat"):
        scenarios.linear_regression(clients=4, angles=(10, 10))
    with pytest.raises(ValueError, match="name one twice"):
        scenarios.channels(clients=4, files=["a.npy", "a.npy"])


def test_classes_that_are_used_up_are_told(caplog):
    with caplog.at_level(logging.WARNING):
        scenarios.dirichlet(digits(), clients=10, alpha=0.1, client_sizes="equal")
    assert "of other classes than were drawn" in caplog.text
    caplog.clear()
    plenty = from_arrays(np.zeros((20000, 1)), np.arange(20000) % 10)
    with caplog.at_level(logging.WARNING):
        scenarios.dirichlet(plenty, clients=10, alpha=0.1, client_sizes="equal", examples_per_client=100)
    assert not caplog.records


@pytest.mark.parametrize("name", ["dirichlet", "shards", "label_groups", "class_overlap", "heterogeneity_levels"])
def test_scenarios_of_labels_refuse_texts(name):
    texts = from_arrays(np.zeros((40, 3), np.int32), np.zeros((40, 3), np.int32), num_classes=5, task="language")
    with pytest.raises(ValueError, match="no single label for each example"):
        getattr(scenarios, name)(texts, clients=4)


def test_files_that_are_not_read_say_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv.gz").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"a.csv.gz is no file that can be read: give one ending in .npz, .csv"):
        load("./a.csv.gz")
    with pytest.raises(ValueError, match=r"There is a file or folder of that name: write ./a.csv.gz"):
        load("a.csv.gz")
    csv(tmp_path / "b.csv", "label;a\n0;1,5\n1;2,5\n")
    with pytest.raises(ValueError, match="They are divided by ';'"):
        load("b.csv")


@pytest.mark.parametrize("missing", ["NA", "NaN", "null"])
def test_text_that_stands_for_a_missing_user_is_no_user(missing, tmp_path):
    """Rows of several unknown users would be one client."""
    with pytest.raises(ValueError, match=f"users hold '{missing}' in row 2, .* or call the user otherwise"):
        table(csv(tmp_path / "a.csv", f"label,user,a\ncat,u,1\ndog,{missing},2\ncat,v,3\n"))


def test_spaces_around_values_are_none_of_them(tmp_path):
    """As in the names of columns."""
    found = table(csv(tmp_path / "a.csv", "a, label, user\n1, cat, u\n2,cat , u\n3, dog, v\n4, dog,v\n"))
    assert found.y.tolist() == [0, 0, 1, 1]
    assert found.user_ids.tolist() == ["u", "u", "v", "v"]
    with pytest.raises(ValueError, match="hold 'NA' in row 1"):
        table(csv(tmp_path / "b.csv", "a, label\n1, NA\n2, cat\n"))
    with pytest.raises(ValueError, match="no label in row 2"):
        table(csv(tmp_path / "c.csv", "a, label\n1, cat\n2, \n"))


@pytest.mark.parametrize("labels", [[5, 9, 7, 5], ["e", "i", "g", "e"]])
def test_a_column_of_labels_is_a_row_of_them(labels, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.eye(4), y=np.array(labels)[:, None])
    found = npz(tmp_path / "a.npz")
    assert (found.y.tolist(), found.info.num_classes) == ([0, 2, 1, 0], 3)
    if isinstance(labels[0], int):
        assert npz(tmp_path / "a.npz", task="regression").y.tolist() == [[5.0], [9.0], [7.0], [5.0]]


def test_labels_that_are_numbered_keep_their_names(tmp_path):
    found = table(csv(tmp_path / "a.csv", "label,a\ndog,1\ncat,2\neel,3\ndog,4\n"))
    assert (found.y.tolist(), found.info.class_names) == ([1, 0, 2, 1], ("cat", "dog", "eel"))
    assert table(csv(tmp_path / "b.csv", "label,a\n10,1\n0,2\n7,3\n")).info.class_names == ("0", "7", "10")
    # Those that mean themselves have none, and a name changes none of the numbers by which a file is known again.
    assert table(csv(tmp_path / "c.csv", "label,a\n0,1\n1,2\n")).info.class_names == ()
    as_before = table(csv(tmp_path / "d.csv", "label,a\ncat,1\ndog,2\n")).info.name
    assert as_before == "d.csv@76c2e35a"
    both = table(csv(tmp_path / "e.csv", "label,a,user\ncat,1,u\ndog,2,u\ncat,3,v\ndog,4,v\n"))
    federation = scenarios.users(both)
    assert federation.info.class_names == ("cat", "dog")


def test_texts_of_bytes_are_texts(tmp_path):
    written = {"y": ["10", "2", "10", "2"], "user": ["a", "b", "b", "a"]}
    np.savez(tmp_path / "a.npz", x=np.eye(4), **{name: np.array(of, "S") for name, of in written.items()})
    found = npz(tmp_path / "a.npz")
    assert (found.y.tolist(), found.info.class_names) == ([1, 0, 1, 0], ("2", "10"))
    assert list(found.user_ids) == written["user"]


def test_names_of_classes_outlive_disks_and_joins_but_no_permutation(tmp_path):
    x, y, _ = digits()
    named = from_arrays(x, y, class_names=[f"digit {label}" for label in range(10)])
    names = named.info.class_names
    assert names[3] == "digit 3"
    plain = scenarios.dirichlet(named, clients=3)
    assert plain.info.class_names == names
    write_population(tmp_path / "disk", plain)
    assert open_population(tmp_path / "disk").info == plain.info
    numbers = tuple(map(str, range(10)))
    assert joined([named, digits()]).info.class_names == (*names, *numbers)
    assert joined([digits(), digits()]).info.class_names == ()
    apart = scenarios.mixed_datasets([named, named], clients=16, labels="separate")
    assert apart.info.class_names == names + names
    # What a client calls 3 is another's 5, or another data set's 3.
    assert scenarios.label_permutation(named, clients=4).info.class_names == ()
    assert scenarios.mixed_datasets([named, digits()], clients=16).info.class_names == ()
    assert scenarios.mixed_datasets([named, named], clients=16).info.class_names == names
    with pytest.raises(ValueError, match="class_names are 2 and num_classes is 10: give one name for each class"):
        from_arrays(x, y, class_names=["a", "b"])
    with pytest.raises(ValueError, match="class_names"):
        from_arrays(x, y, class_names="0123456789")


def test_an_index_of_users_is_found_as_a_column_is(tmp_path):
    frame = pandas.DataFrame({"a": [0.5, 1.5], "label": [0, 1], "user": ["u", "v"]}).set_index("user")
    frame.to_parquet(tmp_path / "my.parquet")
    examples = table(tmp_path / "my.parquet")
    assert examples.user_ids.tolist() == ["u", "v"]
    assert examples.x.tolist() == [[0.5], [1.5]]


@pytest.mark.parametrize("ids", [["12345678901234567890", "7"], ["9007199254740993", "5.5", "9007199254740999"]])
def test_no_id_is_rounded_for_another_ones_sake(ids):
    """Fault: users called 9007199254740992 and 12345678901234567168, whom nobody knows."""
    assert numbers(np.array(ids), names=True).tolist() == ids


def test_a_short_row_far_down_is_named(tmp_path):
    """Fault: NumPy counts texts by 50 000 rows, and row 1 was to be mended."""
    path = csv(tmp_path / "my.csv", "a,label\n" + "1,0\n1,1\n" * 25_000 + "\n1\n")
    with pytest.raises(ValueError, match="1 values in row 50001 below the names, but none for column 'label'"):
        table(path)


@pytest.mark.parametrize("read", [table, leaf, image_folder, npz, open_population, load])
def test_nobodys_home_is_one_line(read):
    with pytest.raises(ValueError, match=r"~nobody-here/my\.csv', but whose home that is is not known"):
        read("~nobody-here/my.csv")
