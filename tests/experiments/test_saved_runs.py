"""Runs read back: which of them are seeds of one experiment, what tells the others apart, and what is damaged."""

import csv
import json
import logging
import shutil

import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster.experiments import runs, saved_runs
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.files import write_json
from tests.pages import Page

HISTORY = "checkpoints/20/history/metadata"
FILES = ("config.json", "summary.json", HISTORY)
DAMAGES = (b"", b"[1, 2]", b'"text"', b"\xff\xfe", b"{", b"null", b"7", b"\0")
ONE_LINE = r"\A[^\n]+\Z"


def keep(path, history):
    """The history of the last checkpoint."""
    columns = {name: column.tolist() for name, column in history.items()}
    write_json(path / "checkpoints" / str(len(history["loss"])) / "history" / "metadata", columns)


@pytest.fixture
def leave(tmp_path):
    """Leaves what a finished run leaves, but for its state."""

    def make(name, *, rounds=20, accuracy=0.5, config=True, identity=(), **settings):
        settings = {"clients": 16, **settings}
        experiment = RunConfig(method=settings.pop("method", "fedavg"), rounds=rounds, **settings)
        seed, method = experiment.seed, experiment.method
        own = {"algorithm": method, "algorithm_config": dict(experiment.method_options), "seed": seed, "data": 7 * seed}
        write_json(
            tmp_path / name / "config.json",
            {"identity": {**own, **dict(identity)}, "experiment": experiment.to_json() if config else None},
        )
        summary = {"algorithm": method, "rounds": rounds, "accuracy": accuracy, "clients": 16, "train_loss": 0.5}
        write_json(tmp_path / name / "summary.json", summary)
        columns = {"loss": np.ones(rounds), "accuracy": np.full(rounds, accuracy)}
        keep(tmp_path / name, {"round": np.arange(rounds, dtype=float), **columns})
        return tmp_path / name

    return make


def grouped(*paths):
    """Label -> number of seeds."""
    outcomes = saved_runs.read_runs(paths)
    found = {outcome.label: len(outcome.summaries) for outcome in outcomes}
    assert len(found) == len(outcomes), "each label once"
    return found


def test_data_that_each_seed_has_of_its_own_are_the_seeds(leave, caplog):
    paths = [
        leave(f"{method}-{seed}", seed=seed, method=method, config=False)
        for method, of in (("fedavg", (0, 1, 2)), ("ifca", (2, 1)))
        for seed in of
    ]
    with caplog.at_level("INFO", logger="fedjax_cluster"):
        assert grouped(*paths) == {"FedAvg": 3, "IFCA": 2}
    assert "the data of the seeds 0, 1, 2 differ: drawn by the seed, they make one row" in caplog.text
    faulty = [leave(f"f-{s}", seed=s, config=False, identity={"data": 50 + s, "fault": "nan"}) for s in range(3)]
    assert sorted(grouped(*paths, *faulty).values()) == [2, 3, 3]
    silent = [leave(f"g-{s}", seed=s, config=False, identity={"fault": "late"}) for s in range(3)]
    assert sorted(grouped(*paths, *faulty, *silent).values()) == [2, 3, 3, 3]
    # A second data set of one seed, or one of two seeds, is no draw of it.
    again = leave("again", seed=1, config=False, identity={"data": 99})
    assert len(grouped(*paths, again)) == 6
    again = leave("again", seed=3, config=False, identity={"data": 14})
    assert len(grouped(*paths, again)) == 5


def test_seeds_are_one_group(leave):
    paths = [leave(f"run-{seed}", seed=seed, accuracy=0.5 + 0.1 * seed) for seed in range(3)]
    (outcome,) = saved_runs.read_runs(paths)
    assert (outcome.label, len(outcome.histories)) == ("FedAvg", 3)
    assert outcome.mean("accuracy") == pytest.approx(0.6)
    assert outcome.std("accuracy") == pytest.approx(0.1), "the sample's deviation"


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({"model": "cnn"}, ["FedAvg, model mlp", "FedAvg, model cnn"]),
        ({"rounds": 30}, ["FedAvg, 20 rounds", "FedAvg, 30 rounds"]),
        ({"local_steps": 5}, ["FedAvg, local steps 10", "FedAvg, local steps 5"]),
        ({"clients": 32, "learning_rate": 1.0},
         ["FedAvg, 16 clients, learning rate 0.1", "FedAvg, 32 clients, learning rate 1.0"]),
        ({"model_options": {"hidden": [5]}}, ["FedAvg", "FedAvg, hidden [5]"]),
        ({"method": "ifca"}, ["FedAvg", "IFCA"]),
        ({"method": "ifca", "method_options": {"score_on": "batch"}}, ["FedAvg", "IFCA"]),
        ({"method": "ifca", "dataset": "mnist"}, ["FedAvg, dataset digits", "IFCA, dataset mnist"]),
        ({"identity": {"weights": 3}}, ["FedAvg", "FedAvg, weights 3"]),
    ],
)  # fmt: skip
def test_labels_say_what_differs(leave, changes, labels):
    found = grouped(leave("one"), leave("same", seed=1), leave("other", **changes))
    assert list(found.items()) == [(labels[0], 2), (labels[1], 1)]


def test_options_of_a_method_are_compared_with_its_own_alone(leave):
    first = leave("first", method="ifca", method_options={"score_on": "batch"})
    second = leave("second", method="ifca", method_options={"score_on": "train"})
    assert list(grouped(leave("avg"), first, second)) == ["FedAvg", "IFCA, score on batch", "IFCA, score on train"]


def test_an_option_that_is_given_as_its_default_is_the_same_experiment(leave):
    known = {"algorithm_config": {"local": {"steps": 1}, "weighting": "examples"}}
    one = leave("one", identity=known, method_options={"weighting": "examples"})
    assert grouped(one, leave("other", seed=1, identity=known)) == {"FedAvg": 2}
    third = leave("third", identity={"algorithm_config": {**known["algorithm_config"], "weighting": "uniform"}})
    assert list(grouped(one, third)) == ["FedAvg, weighting examples", "FedAvg, weighting uniform"]


def test_runs_without_a_configuration_are_seeds_where_even_the_data_are_equal(leave):
    one, other = (leave(f"run-{data}", config=False, identity={"data": data}) for data in (0, 7))
    assert list(grouped(one, other)) == ["FedAvg, data 0", "FedAvg, data 7"]
    alike = [leave(f"alike-{seed}", seed=seed, config=False, identity={"data": 5}) for seed in range(2)]
    assert grouped(*alike) == {"FedAvg": 2}


def test_seeds_whose_rates_were_chosen_are_one_group_where_they_are_the_same(leave):
    """Fault: how a rate had been chosen, which has each seed's own figures, told the seeds of one experiment apart."""
    tuned = [leave(f"t-{seed}", seed=seed, tuning={"figures": {"0.1": 0.5 + seed}, "seed": seed}) for seed in range(2)]
    other = leave("other", learning_rate=0.3, tuning={"figures": {"0.3": 0.5}})
    assert grouped(*tuned, other) == {"FedAvg, learning rate 0.1": 2, "FedAvg, learning rate 0.3": 1}


def test_where_too_much_differs_the_directory_tells(leave):
    many = {"clients": 32, "clusters": 2, "batch_size": 8, "learning_rate": 0.5, "momentum": 0.9}
    one, other = leave("one"), leave("other", **many)
    assert list(grouped(one, other)) == [f"FedAvg ({one})", f"FedAvg ({other})"]


def test_an_experiment_and_seed_given_twice_counts_once_and_is_named(leave, tmp_path, caplog):
    first = leave("first")
    twin = tmp_path / "twin"
    shutil.copytree(first, twin)
    (tmp_path / "link").symlink_to(first)
    with caplog.at_level(logging.WARNING):
        assert grouped(first, twin, first, tmp_path / "link") == {"FedAvg": 1}
    assert [record.message for record in caplog.records] == [
        f"{twin} is not counted: {first} is a run of the same experiment and seed 0"
    ]


def test_every_row_of_a_report_has_its_curve(leave, tmp_path, monkeypatch):
    drawn = []
    draw = fc.report.curves.learning_curves
    monkeypatch.setattr(fc.report.curves, "learning_curves", lambda found: drawn.append(found) or draw(found))
    for rate in (0.1, 0.2):
        for rounds in (2, 3):
            for seed in (0, 1):
                leave(f"{rate}-{rounds}-{seed}", learning_rate=rate, rounds=rounds, seed=seed)
    written = saved_runs.write_report([tmp_path], tmp_path / "out")
    with open(tmp_path / "out" / "comparison.csv", newline="") as file:
        rows = [row["method"] for row in csv.DictReader(file)]
    assert rows == list(drawn[0])
    assert len(set(rows)) == 4
    assert [path.name for path in written] == [
        "comparison.md",
        "comparison.csv",
        "comparison.tex",
        "learning_curves.png",
        "small_multiples.png",
        "report.html",
    ]
    page = Page(tmp_path / "out" / "report.html")
    assert "4 methods over 2 seeds: " in page.text
    assert all(row in page.text for row in rows)
    assert len(page.images) == 2


# ------------------------------------------------------------------------------------- damaged, read-only


def refused(path):
    with pytest.raises(ValueError, match=ONE_LINE) as stop:
        saved_runs.read_runs([path])
    assert path.name in str(stop.value)
    return str(stop.value)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", DAMAGES)
def test_a_damaged_file_is_one_line(leave, name, content):
    path = leave("run")
    (path / name).write_bytes(content)
    refused(path)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"identity": 3, "experiment": None},
        {"identity": {"algorithm": "fedavg", "seed": 0}, "experiment": [1]},
        {"identity": {"algorithm": 1, "seed": 0}, "experiment": None},
        {"identity": {"algorithm": "fedavg", "seed": "0"}, "experiment": None},
    ],
)
def test_a_config_of_wrong_parts_is_one_line(leave, content):
    path = leave("run")
    write_json(path / "config.json", content)
    refused(path)
    for read in (runs.load_run, runs.resume, lambda path: runs.run(RunConfig(), run_dir=path)):
        with pytest.raises(ValueError, match=ONE_LINE):
            read(path)


@pytest.mark.parametrize("name", ["method", "clients", "churn", "method_options", "model_options", "local_steps"])
@pytest.mark.parametrize("value", [7.5, "text", [1], {"a": 1}, [[1]], None, {}])
def test_an_experiment_of_wrong_types_is_one_line_or_fits(leave, name, value):
    """None and {} are what some settings may be; those say that there is no checkpoint."""
    path = leave("run")
    content = json.loads((path / "config.json").read_text())
    content["experiment"][name] = value
    (path / "config.json").write_text(json.dumps(content))
    shutil.rmtree(path / "checkpoints")
    with pytest.raises(ValueError, match=ONE_LINE):
        runs.load_run(path)


@pytest.mark.parametrize("name", FILES)
def test_a_directory_in_a_files_place_is_one_line(leave, name):
    path = leave("run")
    (path / name).unlink()
    (path / name).mkdir()
    refused(path)


def test_a_history_without_its_column_or_of_other_rounds_is_one_line(leave):
    path = leave("run")
    keep(path, {"loss": np.ones(20)})
    assert "it has no rounds" in refused(path)
    keep(path, {"round": np.arange(30.0), "loss": np.ones(30)})
    assert "summary of 20 rounds and a history of 30" in refused(path)


@pytest.mark.parametrize("name", ["x" * 300, "a/" * 3000, "file", "file/below", "nowhere"])
def test_a_path_that_is_no_directory_is_one_line(tmp_path, name):
    (tmp_path / "file").write_text("")
    for read in (lambda path: saved_runs.read_runs([path]), runs.load_run, runs.resume):
        with pytest.raises(ValueError, match=ONE_LINE):
            read(tmp_path / name)


def test_a_comparison_in_the_directory_of_a_run_leaves_the_runs_page(leave):
    one, other = leave("one", config=False), leave("other", config=False, identity={"data": 1})
    saved_runs.write_report([one])
    page = (one / "report.html").read_bytes()
    assert one / "comparison.html" in saved_runs.write_report([one, other])
    assert (one / "report.html").read_bytes() == page
    assert 'href="report.html"' in (one / "comparison.html").read_text()


def test_a_directory_that_cannot_be_written_is_reported_all_the_same(leave, tmp_path, monkeypatch, caplog, capsys):
    one, other = leave("one", config=False), leave("other", config=False, identity={"data": 1})

    def unwritable(directory):
        if directory != tmp_path / "out":
            raise ValueError("read-only")

    monkeypatch.setattr(saved_runs, "check_writable", unwritable)
    for paths in ([one], [one, other]):
        with caplog.at_level(logging.WARNING):
            assert saved_runs.write_report(paths) == []
        assert "one cannot be written: pictures are left nowhere; --out DIR" in caplog.records[-1].message
        assert "FedAvg" in capsys.readouterr().out
        assert saved_runs.write_report(paths, tmp_path / "out")
        with pytest.raises(ValueError, match="read-only"):
            saved_runs.write_report(paths, tmp_path / "elsewhere")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("plots", "comparison.md", "comparison.csv", "comparison.tex"),
        *("learning_curves.png", "small_multiples.png", "report.html"),
    }
    assert {path.name for path in one.iterdir()} == {"config.json", "summary.json", "checkpoints"}


def test_a_run_whose_state_cannot_be_read_keeps_its_curves(leave, monkeypatch, caplog):
    path = leave("run")

    def damaged(path):
        raise ValueError("the checkpoint is damaged")

    monkeypatch.setattr(saved_runs, "load_run", damaged)
    *pictures, page = saved_runs.write_report([path], format="svg")
    names = [f"{name}.{kind}" for name in ("learning_curves", "training_curves") for kind in ("png", "svg")]
    assert pictures == [path / "plots" / name for name in names]
    assert len(Page(page).images) == 2
    assert f"only the curves of {path} are drawn" in caplog.text


def test_a_comparisons_report_is_not_replaced_by_that_of_more_runs(leave, monkeypatch, tmp_path):
    """A sweep's table and page were another's, and its picture was gone."""
    one, other = leave("one"), leave("other")
    monkeypatch.setattr(saved_runs.comparison, "is_comparison", lambda path: path == one)
    with pytest.raises(ValueError, match="has a report of its own runs, which this one would replace; leave it elsewh"):
        saved_runs.write_report([one, other])
    assert saved_runs.write_report([one, other], out=tmp_path / "elsewhere")


def test_a_comparison_leaves_pictures_that_are_not_its_own(leave, tmp_path):
    """Fault: a picture of a sweep, put there by hand, goes with what was drawn of fewer runs."""
    (tmp_path / "out").mkdir()
    mine = tmp_path / "out" / "sensitivity.png"
    mine.write_bytes(b"mine")
    runs = [leave(method, method=method) for method in ("fedavg", "ifca")]
    saved_runs.write_report(runs, tmp_path / "out")
    assert mine.read_bytes() == b"mine"
    # What a comparison in the same place has drawn goes with it.
    saved_runs.write_report(runs, tmp_path / "out")
    assert not mine.exists()
