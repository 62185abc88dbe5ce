"""Which directory a command takes, what it spares there, and what is said of runs that were not finished."""

import dataclasses
import pathlib

import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster import cli
from fedjax_cluster.experiments import comparison, flags, places, runs, saved_runs
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.simulation import result
from fedjax_cluster.simulation.run_directory import AnotherExperiment
from tests.experiments.test_saved_runs import keep

TINY = ["--clients", "4", "--eval-every", "2", "--model", "linear", "--local-steps", "1"]


class Stopped(Exception):
    pass


def stop(rounds):
    """A callback after which so many rounds are done, and no more."""

    def look(evaluation):
        if evaluation.round >= rounds:
            raise Stopped

    return look


@pytest.fixture
def short():
    return RunConfig(method="fedavg", clients=4, rounds=6, eval_every=2, model="linear", local_steps=1)


def contents(path):
    return {each.relative_to(path): each.read_bytes() for each in path.rglob("*") if each.is_file()}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", [["compare", "fedavg", "fedprox"], ["sweep", "fedavg", "--momentum", ".1", ".2"]])
def test_a_directory_of_other_things_is_no_comparisons(pretend, capsys, words):
    mine = pathlib.Path("mine")
    mine.mkdir()
    for name in ("report.html", "comparison.csv"):
        (mine / name).write_text("mine")
    before = contents(mine)
    for more in ([], ["--dry-run"]):
        assert cli.main([*words, *more, "--rounds", "1", "--run-dir", "mine"]) == 2
        told = capsys.readouterr().err
        assert told == "fedjax-cluster: the run directory mine is not empty and holds no comparison; choose another\n"
    assert (contents(mine), pretend.done) == (before, [])
    with pytest.raises(ValueError, match="holds no comparison; choose another"):
        comparison.compare({"fedavg": RunConfig(method="fedavg", rounds=1)}, run_dir="mine")


@pytest.mark.usefixtures("here")
def test_figures_are_kept_of_a_run_that_has_lost_its_settings(pretend, capsys):
    assert cli.main(["compare", "fedavg", "ifca", "--clients", "4", "--rounds", "2", "--run-dir", "own"]) == 0
    before, run_dir = pathlib.Path("own/comparison.csv").read_text(), pathlib.Path("own/fedavg-seed0")
    (run_dir / "config.json").unlink()
    pretend.failing["fedavg-seed0"] = AnotherExperiment("the run directory is not empty and holds no run")
    capsys.readouterr()
    assert cli.main(["resume", "own"]) == 2
    told = capsys.readouterr().err
    assert f"{run_dir} has lost its config.json: put it back, or delete {run_dir}, and that run is done again" in told
    assert pathlib.Path("own/comparison.csv").read_text() == before


def test_a_directory_that_lost_its_settings_is_no_run(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(AnotherExperiment, match="is not empty and holds no run; choose another"):
        runs.run(RunConfig(method="fedavg", model="linear", clients=4, rounds=1), run_dir=tmp_path)


@pytest.mark.usefixtures("here")
def test_runs_whose_comparison_was_lost_are_taken_up(pretend):
    words = ["compare", "fedavg", "ifca", "--clients", "4", "--clusters", "2", "--rounds", "2", "--run-dir", "own"]
    assert cli.main(words) == 0
    pathlib.Path("own/comparison.json").unlink()
    pretend.done = []
    assert cli.main(words) == 0
    assert pretend.done == []


def test_two_commands_at_once_have_two_directories(monkeypatch, tmp_path):
    """The other begins between this one's look and its first file."""
    monkeypatch.chdir(tmp_path)
    with (
        places.place(None, "fedavg-rotated", kept=True) as one,
        places.place(None, "fedavg-rotated", kept=True) as other,
    ):
        assert [str(one), str(other)] == ["runs/fedavg-rotated", "runs/fedavg-rotated-2"]
        (one / "config.json").write_text("")
    # The second came to nothing, and leaves nothing.
    assert [path.name for path in pathlib.Path("runs").iterdir()] == ["fedavg-rotated"]
    with places.place(None, "fedavg-rotated", kept=True) as third:
        assert str(third) == "runs/fedavg-rotated-2"
    monkeypatch.chdir(third.resolve().parent)
    with places.place(None, "x", kept=True):
        pass
    assert [path.name for path in pathlib.Path().iterdir()] == ["fedavg-rotated"]


def test_a_run_that_was_not_finished_is_named_to_who_begins_it_anew(in_an_empty_directory, capsys, monkeypatch):
    monkeypatch.setattr(cli, "show", lambda result, run_dir: None)
    words = ["run", "fedavg", *TINY, "--rounds"]
    config, _ = flags.parse_run("fedavg", [*TINY, "--rounds", "6"], "run")
    with pytest.raises(Stopped):
        runs.run(config, run_dir="runs/fedavg-rotated", callbacks=[stop(2)], checkpoint_every=0, progress=False)
    assert cli.main([*words, "6"]) == 0
    named = "this run begins anew; runs/fedavg-rotated has 2 of its 6 rounds, which fedjax-cluster resume"
    assert f"{named} runs/fedavg-rotated goes on with" in capsys.readouterr().err
    assert runs.rounds_done(pathlib.Path("runs/fedavg-rotated-2")) == 6
    # Another run is not it, nor is one that has all its rounds.
    runs.resume("runs/fedavg-rotated", progress=False)
    for other in ([*words, "6", "--seed", "1"], [*words, "2"], [*words, "6"]):
        assert cli.main(other) == 0
        assert "begins anew" not in capsys.readouterr().err


def test_an_interrupted_run_is_read_without_a_trace_and_reported_as_one(tmp_path, capsys, caplog, short, monkeypatch):
    monkeypatch.setattr(result.SimulationResult, "write_clients", lambda run, path: path)
    path, whole = tmp_path / "run", tmp_path / "whole"
    with pytest.raises(Stopped):
        runs.run(short, run_dir=path, callbacks=[stop(4)], checkpoint_every=0, progress=False)
    (path / "summary.json").unlink(missing_ok=True)
    before = contents(path)
    read = fc.load_run(path)
    assert len(read.history["round"]) == 4
    assert contents(path) == before
    with pytest.raises(ValueError, match=r"has no summary.json yet; continue the run with resume"):
        saved_runs.write_report([path])
    # As Ctrl-C leaves it: with a summary of the rounds that were done.
    fc.files.write_json(path / "summary.json", {**read.summary})
    saved_runs.write_report([path])
    told = "interrupted after 4 of 6 rounds"
    assert told in capsys.readouterr().out
    assert f"4 clients in 4 true groups, {told}" in (path / "report.html").read_text()
    assert f"{path} was {told}; go on with: fedjax-cluster resume {path}" in caplog.text
    runs.run(short, run_dir=whole, progress=False)
    caplog.clear()
    saved_runs.write_report([path, whole], tmp_path / "both")
    assert [record.message for record in caplog.records] == [
        f"{path} was {told}; go on with: fedjax-cluster resume {path}"
    ]
    # Where the newest checkpoint is damaged, the one before is read, and nothing made up for.
    for file in (path / "checkpoints" / "4").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    before = contents(path)
    assert len(fc.load_run(path).history["round"]) == 2
    assert contents(path) == before


def test_how_often_runs_are_evaluated_is_named_where_it_differs_alone(tmp_path):
    """Where all runs have what is usual for their rounds, the rounds tell it."""

    def leave(name, rounds, every):
        experiment = RunConfig(method="fedavg", clients=4, rounds=rounds, eval_every=every)
        identity = {"algorithm": "fedavg", "algorithm_config": {}, "seed": 0, "data": 0}
        path = tmp_path / name
        fc.files.write_json(path / "config.json", {"identity": identity, "experiment": experiment.to_json()})
        fc.files.write_json(path / "summary.json", {"algorithm": "fedavg", "rounds": rounds})
        keep(path, {name: np.arange(rounds, dtype=float) for name in ("round", "loss")})
        return path

    def labels(*paths):
        return [outcome.label for outcome in saved_runs.read_runs(paths)]

    assert labels(leave("a", 12, 2), leave("b", 8, 2)) == ["FedAvg, 12 rounds", "FedAvg, 8 rounds"]
    assert labels(leave("c", 300, 10), leave("d", 900, 30)) == ["FedAvg, 300 rounds", "FedAvg, 900 rounds"]
    assert labels(leave("e", 300, 10), leave("f", 300, 5)) == ["FedAvg, eval every 10", "FedAvg, eval every 5"]


def test_what_has_no_value_is_nan_in_a_run_that_is_read_back(short, tmp_path):
    config = dataclasses.replace(short, scenario="shards", rounds=2)  # of which no groups are known
    first = runs.run(config, run_dir=tmp_path / "run", progress=False)
    assert np.isnan(first.summary["purity"])
    again = fc.load_run(tmp_path / "run")
    np.testing.assert_equal(again.summary, first.summary)
