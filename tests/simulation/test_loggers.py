"""Loggers get the figures of each evaluation under its round, and say what to install."""

import json
import pathlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import fedavg
from fedjax_cluster.simulation import loggers
from fedjax_cluster.simulation.evaluation import Evaluation
from fedjax_cluster.simulation.loop import simulate
from tests.federations import blobs

FIGURES = {"accuracy": np.float32(0.5), "test_loss": float("nan"), "num_clusters": 2.0}


@pytest.fixture
def evaluation():
    return Evaluation(7, None, FIGURES)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_json_lines_are_the_history_of_a_run(tmp_path):
    path = tmp_path / "logs" / "run.jsonl"
    method = fedavg(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1))
    options = {"eval_every": 2, "progress": False, "callbacks": [loggers.json_lines(path)]}
    result = simulate(method, blobs(), rounds=3, run_dir=tmp_path / "run", **options)
    simulate(method, blobs(), rounds=4, run_dir=tmp_path / "run", **options)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["round"] for line in lines] == [2, 3, 4]
    assert lines[1]["accuracy"] == pytest.approx(result.summary["accuracy"])
    assert lines[0]["loss"] == pytest.approx(result.history["loss"][1])


def test_what_is_not_finite_is_left_out(tmp_path, evaluation):
    loggers.json_lines(tmp_path / "log")(evaluation)
    assert json.loads((tmp_path / "log").read_text()) == {"round": 7, "accuracy": 0.5, "num_clusters": 2.0}


def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"cannot write the log .*; choose another file"):
        loggers.json_lines(tmp_path)


def test_tensorboard_gets_scalars(monkeypatch, evaluation):
    calls = []

    class SummaryWriter:
        def __init__(self, folder):
            calls.append(folder)

        def add_scalar(self, *given):
            calls.append(given)

        def flush(self):
            calls.append("flush")

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=SummaryWriter))
    loggers.tensorboard("folder")(evaluation)
    assert calls == [str(pathlib.Path("folder").absolute()), ("accuracy", 0.5, 7), ("num_clusters", 2.0, 7), "flush"]


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")

    def writer(folder):
        pathlib.Path(folder).mkdir(parents=True)

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=writer))
    with pytest.raises(ValueError, match=r"\Acannot write the log .* \(Not a directory\); choose another folder\Z"):
        loggers.tensorboard(tmp_path / "file" / "log")


def test_wandb_gets_a_step(monkeypatch, evaluation):
    calls = []
    run = SimpleNamespace(log=lambda figures, step: calls.append((figures, step)))
    fake = SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    loggers.wandb(project="clusters")(evaluation)
    assert calls == [{"project": "clusters"}, ({"accuracy": 0.5, "num_clusters": 2.0}, 7)]


def test_mlflow_gets_metrics(monkeypatch, evaluation):
    calls = []
    fake = SimpleNamespace(set_experiment=calls.append, log_metrics=lambda figures, step: calls.append((figures, step)))
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    loggers.mlflow("clusters")(evaluation)
    loggers.mlflow()(evaluation)
    logged = ({"accuracy": 0.5, "num_clusters": 2.0}, 7)
    assert calls == ["clusters", logged, logged]


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [
        (lambda: loggers.tensorboard("x"), "tensorboardX", "tensorboard"),
        (loggers.wandb, "wandb", "wandb"),
        (loggers.mlflow, "mlflow", "mlflow"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, make, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"no {package}.*fedjax_cluster\[{extra}\]"):
        make()


def test_processes_beside_the_first_begin_nothing(monkeypatch, evaluation, tmp_path):
    """Each would leave a run of its own without a figure."""
    monkeypatch.setattr(loggers.parallel, "is_first", lambda: False)
    for package in ("wandb", "mlflow", "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(SummaryWriter=None))
    made = (
        loggers.wandb(project="p"),
        loggers.mlflow("p"),
        loggers.tensorboard("p"),
        loggers.json_lines(tmp_path / "l"),
    )
    for log in made:
        log(evaluation)
    assert not (tmp_path / "l").exists()


def test_a_log_has_the_figures_of_the_callbacks_before_it(tmp_path):
    method = fedavg(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1))
    callbacks = [lambda evaluation: {"mine": 1.5 * evaluation.round}, loggers.json_lines(tmp_path / "log")]
    result = simulate(method, blobs(), rounds=2, eval_every=1, progress=False, callbacks=callbacks)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["mine"] for line in lines] == result.history["mine"].tolist() == [1.5, 3.0]


def test_a_log_stays_where_it_was_begun(tmp_path, monkeypatch, evaluation):
    """A run may change the working directory; "~" is one's home, as where data are read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    here, home = loggers.json_lines("logs/a"), loggers.json_lines("~/a")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    here(evaluation), home(evaluation)
    assert len((tmp_path / "logs" / "a").read_text().splitlines()) == 1
    assert len((tmp_path / "home" / "a").read_text().splitlines()) == 1
