"""The command line as a user meets it: the main job, one-line errors with status 2, the files it leaves."""

import csv
import errno
import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster import cli, command_results
from fedjax_cluster.experiments import flags
from fedjax_cluster.simulation.run_directory import read_history
from fedjax_cluster.types import Churn
from tests.pages import Page

MAIN = [sys.executable, "-m", "fedjax_cluster"]


pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


def mistake(capsys, *words):
    assert cli.main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("fedjax-cluster: ")
    return captured.err


@pytest.mark.slow
def test_the_main_job_reaches_its_figures():
    """README's first command: CFL-GP on digits, 16 clients, 4 rotations, 200 rounds."""
    done = subprocess.run([*MAIN, "run"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with open("runs/cfl-gp-rotated/summary.json") as file:
        summary = json.load(file)
    assert (summary["clients"], summary["rounds"], summary["num_clusters"]) == (16, 200, 4)
    assert summary["adjusted_rand_index"] == 1.0
    assert summary["accuracy"] >= 0.94
    assert "K, the number of clusters, was 4, the number of the scenario's groups" in done.stderr
    pictures = {"learning_curves.png", "client_features.png", "singular_values.png", "group_by_cluster.png"}
    assert pictures <= set(os.listdir("runs/cfl-gp-rotated/plots"))
    assert "accuracy" in done.stdout
    assert "Traceback" not in done.stderr
    # Another process, which traces and compiles none of the run's larger programs, gets the same run from them.
    whole = os.path.join(os.environ["FEDJAX_CLUSTER_CACHE"], "compiled", "whole")
    kept = sorted(os.listdir(whole))
    assert len(kept) >= 5
    again = subprocess.run([*MAIN, "run", "--run-dir", "again"], capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert sorted(os.listdir(whole)) == kept
    first, second = (read_history(pathlib.Path(path)) for path in ("runs/cfl-gp-rotated", "again"))
    for name in [name for name in first if "seconds" not in name]:
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--clusters", "0"], "clusters is 0"),
        (["run", "--clients", "3", "--clusters", "4"], "only 3 clients"),
        (["run", "--participation", "1.5"], "participation is 1.5"),
        (["run", "--scenario", "rotatd"], "did you mean rotated?"),
        (["run", "nothing"], "found once it is installed, by an entry point in fedjax_cluster.methods"),
        (["run", "cfl-gb"], "unknown method 'cfl-gb'; did you mean cfl-gp? known: cfl, cfl-gp"),
        (["run", "rotated"], "rotated is a scenario, which goes with --scenario rotated; known: cfl,"),
        (["run", "--scenario", "ifca"], "ifca is a method, which stands right after the command"),
        (
            ["compare", "fedavg", "--restarts", "3", "ifca"],
            "Unrecognized options: --restarts, 3, ifca; ifca stands before",
        ),
        (["run", "ifca", "--interval", "3"], "--interval is an option of the methods flag and pacfl"),
        (["run", "ifca", "--seeds", "3"], "--seeds is a flag of compare and sweep"),
        (["run", "--dataste", "x", "--foo"], "--dataste, x, --foo; --dataste: did you mean --dataset?\n"),
        (
            ["run", "--lr", "1", "--epochs", "2"],
            "--lr: did you mean --learning-rate?; --epochs: did you mean --local-epochs?",
        ),
        (["report"], "report needs a run directory"),
        (["report", "nowhere"], "nowhere is not a run directory"),
        (["report", "x" * 300], "too long for a file system"),
        (["run", "--run-dir", "x" * 300], "too long for a file system"),
        (["resume", "x" * 300], "too long for a file system"),
        (["compare", "ifca", "--run-dir", "x" * 300], "too long for a file system"),
        (["reproduce", "cfl-fig3", "--run-dir", "x" * 300], "too long for a file system"),
        (["run", "--decimals", "400"], "decimals is 400"),
        (["run", "--model", "transformer"], "unknown model"),
        (["run", "--dataset", "cifar10"], "TFDS_DATA_DIR"),
        (["run", "--dataset", "no_such_set"], "no_such_set"),
        (["run", "--clients", "x"], "--clients"),
        (["run", "--bogus", "1"], "--bogus"),
        (["run", "--kappa", "0.3"], "but to mixture"),
        (["run", "--batch-size", "0"], "batch_size is 0"),
        (["run", "--learning-rate", "nan"], "learning_rate is nan"),
        (["run", "--learning-rate", "-1"], "learning_rate is -1"),
        (["run", "--test-fraction", "2"], "test_fraction is 2"),
        (["run", "--local-steps", "2", "--local-epochs", "1"], "choose one"),
        (["run", "--stop-after", "0"], "stop_after is 0"),
        (["run", "--beta", "2"], "beta is 2"),
        (["run", "--compression", "0.5"], "compression is 0.5"),
        (["run", "--compression", "nan"], "compression is nan"),
        (["run", "--cluster-until", "-1"], "cluster_until is -1"),
        (["run", "--profile-layers", "conv_7"], "hidden_0/kernel"),
        (["run", "--scenario", "dirichlet", "--alpha", "1", "--angles", "0", "90"], "--angles belongs neither"),
        (["run", "--scenario", "users"], "digits' name no users"),
        (["run", "--dataset", "nowhere.npz"], "no file 'nowhere.npz'"),
        (["run", "--dataset", "./nowhere"], "no file 'nowhere'"),
        (["run", "--label-column", "kind"], "label_column is 'kind', but 'digits' is no table"),
        (["run", "--input-shape", "8", "8"], "input_shape is [8, 8], but 'digits' is neither"),
        (
            ["run", "--scenario", "mixed-datasets", "--dataset", "digits+digits", "--angles", "0"],
            "angles of scenario mixed-datasets cannot be given",
        ),
        (["run", "--optimizer", "adam", "--momentum", "0.9"], "adam has its own"),
        (["run", "--server-learning-rate", "0.5"], "server_learning_rate is 0.5"),
        (["run", "--weight-decay", "nan"], "weight_decay is nan"),
        (["run", "--seed", "-1"], "seed is -1"),
        (["run", "--num-outputs", "3"], "digits has 10 classes"),
        (["run", "--model", "linear", "--init-scale", "inf"], "init_scale is inf"),
        (["run", "ifca", "--clusters", "auto"], "needs a number"),
        (["run", "--clients", "5000"], "1797 examples are too few"),
        (["run", "--eval-every", "0"], "eval_every is 0"),
        (["run", "--checkpoint-every", "-1"], "checkpoint_every is -1"),
        (["compare", "ifca", "--checkpoint-every", "nan"], "checkpoint_every is nan"),
        (["run", "--dry-run", "--checkpoint-every", "-1"], "checkpoint_every is -1"),
        (["run", "--dry-run", "--chunk-size", "0"], "chunk_size is 0"),
        (["sweep", "ifca", "--clusters", "2", "3", "--chunk-size", "-4"], "chunk_size is -4"),
        (["run", "--join", "18"], "--join 18 is not ROUND:CLIENT"),
        (["run", "--leave", "5:-1"], "--leave 5:-1 is not ROUND:CLIENT"),
        (["run", "--join", "30:18"], "names client 18"),
        (["run", "--leave", "5:1", "--leave", "6:1"], "client 1 cannot leave before round 6"),
        (["run", "fedavg", "surplus"], "unexpected 'surplus'"),
        (["resume"], "needs a run directory"),
        (["resume", "nowhere"], "not a run directory"),
        (["compare"], "one or more methods"),
        (["compare", "ifca", "ifca"], "named twice"),
        (["compare", "ifca", "--seeds", "0"], "seeds is 0"),
        (["reproduce"], "cfl-gp-table10"),
        (["reproduce", "table99"], "unknown recipe"),
        (["reproduce", "cfl-gp-table10", "--seeds", "0"], "seeds is 0"),
        (["list", "all"], "takes no arguments"),
        (["dance"], "unknown command"),
    ],
)
def test_a_mistake_is_one_clear_line_and_status_2(capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "empty"))
    assert message in mistake(capsys, *words)
    assert not os.path.exists("runs")


def test_an_unwritable_run_directory_is_refused(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write" in mistake(capsys, "run", "--run-dir", str(tmp_path / "file" / "run"))


@pytest.mark.slow
def test_a_directory_of_another_configuration_is_refused(capsys):
    words = ["run", "fedavg", "--clients", "4", "--rounds", "2", "--run-dir", "own"]
    assert cli.main(words) == 0
    assert cli.main(words) == 0
    assert "belongs to another experiment" in mistake(capsys, *words, "--batch-size", "8")
    assert "belongs to another experiment" in mistake(capsys, *words, "--seed", "1")
    for change in (["--learning-rate", "0.9"], ["--hidden", "30"], ["--model", "linear"], ["--eval-clients", "2"]):
        name = change[0].removeprefix("--").replace("-", "_").replace("hidden", "model_options")
        assert f"belongs to another experiment: {name} is" in mistake(capsys, *words, *change)
    assert "has 2 rounds already" in mistake(capsys, *words[:5], "1", *words[6:])


@pytest.mark.slow
def test_resume_extends(capsys, monkeypatch):
    assert cli.main(["run", "fedavg", "--clients", "4", "--rounds", "2", "--run-dir", "own"]) == 0
    assert cli.main(["resume", "own", "--rounds", "3"]) == 0
    assert "rounds is 1" in mistake(capsys, "resume", "own", "--rounds", "1")
    with open("own/summary.json") as file:
        assert json.load(file)["rounds"] == 3
    with open("own/config.json") as file:
        assert json.load(file)["experiment"]["rounds"] == 3


@pytest.mark.parametrize("words", ["run fedavg", "compare fedavg ifca", "sweep ifca --clusters 2 3", "resume own"])
def test_what_does_not_decide_results_reaches_every_run(words, capsys, monkeypatch):
    if words == "resume own":
        assert cli.main(["run", "fedavg", "--clients", "4", "--rounds", "1", "--run-dir", "own"]) == 0

    def simulate(*given, checkpoint_every, mapping, **options):
        raise ValueError(f"a checkpoint every {checkpoint_every} s, {mapping.chunk_size} clients {mapping.strategy}")

    monkeypatch.setattr(fc.simulation.requests, "simulate", simulate)
    said = mistake(capsys, *words.split(), "--checkpoint-every", "7.5", "--chunk-size", "3")
    assert "a checkpoint every 7.5 s, 3 clients chunked" in said


@pytest.mark.parametrize("words", ["run fedavg --tune", "compare fedavg --tune"])
def test_rates_are_tried_with_as_many_clients_at_a_time(words, capsys, monkeypatch):
    def simulate(*given, mapping, **options):
        raise RuntimeError(f"{mapping.chunk_size} at a time")

    monkeypatch.setattr(fc.experiments.tuning, "simulate", simulate)
    with pytest.raises(RuntimeError, match="3 at a time"):
        cli.main([*words.split(), "--chunk-size", "3"])


@pytest.mark.slow
def test_clients_at_a_time_change_no_result_and_a_run_goes_on_with_others(capsys):
    words = ["run", "ifca", "--clients", "7", "--participation", "0.6", "--rounds", "4", "--run-dir"]
    assert cli.main([*words, "one"]) == 0
    assert cli.main([*words[:-2], "2", "--run-dir", "three", "--chunk-size", "3"]) == 0
    assert cli.main(["resume", "three", "--rounds", "4", "--chunk-size", "2"]) == 0
    one, three = map(fc.load_run, ("one", "three"))
    np.testing.assert_array_equal(three.labels, one.labels)
    np.testing.assert_allclose(three.per_client.accuracy, one.per_client.accuracy, atol=1e-5)


@pytest.mark.slow
def test_a_disk_that_fills_keeps_the_run_and_shows_its_table_and_resume_draws_what_is_missing(capsys, monkeypatch):
    def full(figure, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(fc.report.pages, "save", full)
        assert cli.main(["run", "fedavg", "--clients", "4", "--rounds", "2", "--run-dir", "own"]) == 1
        shown = capsys.readouterr()
        assert shown.err.count("\n") == 1
        assert "No space left on device; not all pictures were written; the run is kept, and" in shown.err
        assert "test accuracy" in shown.out
        assert cli.main(["report", "own"]) == 1
        assert "not all was written; the runs are as they were" in capsys.readouterr().err
    assert not os.path.exists("own/plots")
    assert not os.path.exists("own/report.html")
    assert cli.main(["resume", "own"]) == 0
    names = {"client_labels", "learning_curves", "training_curves"}
    assert set(os.listdir("own/plots")) == {f"{name}.png" for name in names}
    assert len(Page("own/report.html").images) == len(names)


@pytest.mark.slow
def test_too_few_file_descriptors_keep_the_run_in_memory_without_the_errors_of_other_threads():
    words = ["run", "fedavg", "--clients", "4", "--rounds", "2", "--model", "linear", "--run-dir", "own"]
    limited = ["bash", "-c", 'ulimit -n 12; exec "$@"', "bash", *MAIN, *words]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "cannot save round 2 in own" in done.stderr
    assert "the end of the run could not be kept in own" in done.stderr
    assert "goes on in memory" in done.stderr
    assert "ERROR:absl" not in done.stderr


@pytest.mark.parametrize("end", [BrokenPipeError(), SystemExit(1)], ids=["print", "rich"])
def test_a_closed_pipe_ends_quietly(capsys, monkeypatch, end):
    def unread(arguments):
        raise end

    monkeypatch.setitem(cli.COMMANDS, "list", unread)
    assert cli.main(["list"]) == 141
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["list"], ["run", "--help"], ["report", "nowhere"]])
def test_nobody_reads(words):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*MAIN, *words], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100)
    os.close(writing)
    told = "nowhere is not a run directory" if words == ["report", "nowhere"] else ""
    assert (done.returncode, done.stderr == "" or told in done.stderr) == (2 if told else 141, True)
    assert "Traceback" not in done.stderr


def finished(loss, **summary):
    history = {"round": np.arange(len(loss), dtype=float), "loss": np.asarray(loss)}
    known = {"accuracy": 0.5, "test_loss": 1.0, "train_loss": history["loss"][-1], "adjusted_rand_index": None}
    return SimpleNamespace(history=history, summary={**known, **summary}, kept=True)


def test_a_diverged_run_says_so(capsys, monkeypatch):
    monkeypatch.setattr(fc.experiments.saved_runs, "leave_run", lambda *what: [])
    monkeypatch.setattr(fc.experiments.saved_runs, "shows_clients", lambda path: False)
    nothing = {"accuracy": None, "test_loss": np.nan}
    with cli._notices_on_stderr():
        command_results.show(finished([2.0, np.nan, 1.0, np.nan, np.inf], **nothing), pathlib.Path("own"))
        command_results.announce("fedavg", 3, finished([np.nan], **nothing))
        command_results.announce("fedavg", 4, finished([1.0]))
    shown = capsys.readouterr()
    assert shown.err.splitlines() == ["fedavg seed 3: not finite", "fedavg seed 4: accuracy 50.0 %"]
    assert "training loss  not finite: the run has diverged" in shown.out


@pytest.mark.slow
def test_clients_join_and_leave_and_resume_knows_it(capsys):
    words = "run fedavg --clients 5 --rounds 3 --run-dir own --join 1:3 --join 2:4 --leave 2:0"
    assert cli.main(words.split()) == 0
    assert "belongs to another experiment" in mistake(capsys, *words.split()[:-2])
    assert cli.main(["resume", "own", "--rounds", "4"]) == 0
    with open("own/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["num_clients"] for row in rows] == ["3", "4", "4", "4"]
    assert [row["round (from 1)"] for row in rows] == ["1", "2", "3", "4"]
    assert cli.main(["report", "own"]) == 0


@pytest.mark.slow
def test_a_run_that_cannot_do_what_it_is_for_says_so_first(capsys):
    words = "run fedgwc --clients 6 --clusters 2 --rounds 1 --participation 1 --model linear --run-dir own"
    assert cli.main(words.split()) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "cannot split" in line]
    assert len(said) == 1
    assert said[0].startswith("fedjax-cluster: fedgwc cannot split: ")


@pytest.mark.parametrize("command", ["run", "compare"])
def test_several_clients_after_one_flag(command):
    words = ["--join", "30:18", "30:19", "--leave", "50:3", "--join", "50:4"]
    if command == "run":
        config, _ = flags.parse_run("cfl-gp", words, "run")
    else:
        config = flags.parse_compare(["cfl-gp", "ifca"], words, "compare")[0]["ifca"]
    assert config.churn == (Churn(30, (18, 19), ()), Churn(50, (4,), (3,)))
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.slow
def test_compare_prints_one_table_and_leaves_it(capsys):
    words = [
        "compare",
        "fedavg",
        "ifca",
        "--clients",
        "4",
        "--clusters",
        "2",
        "--rounds",
        "3",
        "--seeds",
        "2",
        "--score-on",
        "batch",
    ]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "FedAvg" in shown
    assert "IFCA" in shown
    assert {"comparison.md", "comparison.csv", "learning_curves.png", "ifca-seed1"} <= set(os.listdir("runs/compare"))
    with open("runs/compare/ifca-seed1/config.json") as file:
        assert json.load(file)["experiment"]["method_options"]["score_on"] == "batch"
    # `run` states the options that `compare` left at their defaults.
    one = "run ifca --clients 4 --clusters 2 --rounds 3 --seed 1 --score-on batch --run-dir runs/compare/ifca-seed1"
    assert cli.main(one.split()) == 0
    assert "method_options is" in mistake(capsys, *one.replace("batch", "all").split())
    os.remove("runs/compare/comparison.md")
    assert cli.main(["report", "runs/compare"]) == 0
    assert capsys.readouterr().out.count("IFCA") == 1
    assert os.path.exists("runs/compare/comparison.md")
    page = Page("runs/compare/report.html")
    runs = [f"{method}-seed{seed}/report.html" for method in ("fedavg", "ifca") for seed in (0, 1)]
    assert sorted(link for link in page.links if link.endswith(".html")) == runs
    assert len(page.images) == 2
    brief = Page("runs/compare/ifca-seed0/report.html")
    assert "are added by the command report" in brief.text
    assert cli.main(["report", "runs/compare/ifca-seed0", "--format", "pdf"]) == 0
    whole = Page("runs/compare/ifca-seed0/report.html")
    assert len(whole.images) > len(brief.images)
    assert "test accuracy (%)" in whole.text, "of each client"
    kinds = [{path.stem for path in pathlib.Path("runs/compare/ifca-seed0/plots").glob(f"*.{kind}")} for kind in
             ("png", "pdf")]  # fmt: skip
    assert kinds[0] == kinds[1]
    # A comparison that is taken up leaves the page of a run that has ended as it is.
    assert cli.main(["resume", "runs/compare"]) == 0
    assert len(Page("runs/compare/ifca-seed0/report.html").images) == len(whole.images)
    # Where it goes on, all that `report` had left is of its end too.
    figures = pathlib.Path("runs/compare/ifca-seed0/clients.csv").read_text()
    assert cli.main(["resume", "runs/compare", "--rounds", "6"]) == 0
    assert pathlib.Path("runs/compare/ifca-seed0/clients.csv").read_text() != figures
    assert "group_by_cluster.png" in os.listdir("runs/compare/ifca-seed0/plots")


def test_small_commands(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"fedjax-cluster {fc.__version__}\n"
    for words in (["list", "--help"], ["list", "-h"], ["completion", "--help"]):
        assert cli.main(words) == 0
        assert capsys.readouterr().out.startswith(f"usage: fedjax-cluster {words[0]}")
    assert "one of bash, zsh" in mistake(capsys, "completion", "fish")
    assert "needs a shell" in mistake(capsys, "completion")


def test_the_cache_is_told_and_emptied_and_others_files_stay(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDJAX_CLUSTER_CACHE", str(tmp_path / "kept"))
    fc.data.cache.write("digits", np.zeros((1000, 1000), np.uint8), np.zeros(1000))
    folder = tmp_path / "kept" / "compiled"
    folder.mkdir()
    (folder / "jit_step-cache").write_bytes(b"x" * 200_000)
    for name in ("mine.npy", "own.npz"):
        (tmp_path / "kept" / name).write_bytes(b"mine")
    full, nothing = [["2", "1.0"], ["1", "0.2"]], [["0", "0.0"]] * 2
    for words, title, told in (
        (["cache"], "Kept in", full), (["cache", "--empty"], "Removed from", full), (["cache"], "Kept in", nothing)
    ):  # fmt: skip
        assert cli.main(words) == 0
        shown = capsys.readouterr().out
        assert title in shown
        assert [line.split()[-2:] for line in shown.splitlines() if line.startswith(("data sets", "compiled"))] == told
    left = sorted(path.name for path in (tmp_path / "kept").rglob("*") if path.is_file())
    assert left == ["mine.npy", "own.npz"]


def test_a_momentum_that_could_do_nothing_is_refused(capsys):
    assert cli.main(["run", "fesem", "--averaging", "gradients", "--momentum", "0.9", "--run-dir", "own"]) == 2
    assert "give --local-steps" in capsys.readouterr().err
