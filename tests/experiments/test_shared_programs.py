"""Sweeps and comparisons whose runs share programs: the same results and directories, from fewer compilations."""

import pathlib

import chex
import jax
import numpy as np
import pytest

from fedjax_cluster import RunConfig, cli, lifting
from fedjax_cluster.algorithms import fedavg
from fedjax_cluster.experiments import runs, shared_programs, sweeps, tuning
from fedjax_cluster.interruption import Interrupt
from fedjax_cluster.local import sgd
from fedjax_cluster.simulation import requests
from fedjax_cluster.simulation.run import Run

pytestmark = pytest.mark.usefixtures("here")
SETTINGS = {"method": "fedavg", "model": "linear", "clients": 4, "rounds": 2, "examples_per_client": 20}
AXES = {"learning_rate": (0.1, 0.3)}
LINE = "fedavg --learning-rate 0.1 0.3 --seeds 2 --model linear --clients 4 --rounds 3 --eval-every 2"


@pytest.fixture
def traces(monkeypatch):
    """The rates that rounds were traced with."""
    traced, step = [], fedavg.step

    def counting(self, *arguments):
        traced.append(self.local.learning_rate)
        return step(self, *arguments)

    monkeypatch.setattr(fedavg, "step", counting)
    return traced


@pytest.fixture
def accelerated(monkeypatch):
    """As on a device that runs fill together."""
    monkeypatch.setattr(shared_programs, "pays", lambda mapping: True)


@pytest.mark.slow
def test_a_sweep_of_a_rate_and_the_search_for_one_compile_once(traces):
    outcomes = sweeps.sweep(SETTINGS, AXES, progress=False)
    assert len(traces) == 1
    assert outcomes[0].mean("train_loss") != outcomes[1].mean("train_loss")
    traces.clear()
    found = tuning.tuned(RunConfig(**{**SETTINGS, "rounds": 50}), progress=False)
    assert len(traces) == 1
    assert len(set(found.tuning["figures"].values())) > 1


def test_what_decides_a_program_is_compiled_for_each_value(caplog):
    caplog.set_level("INFO", "fedjax_cluster")
    numbers, calls, own = {"learning_rate": 1.0}, [], sgd(0.1, batch_size=8, steps=1)

    def run():
        calls.append(lifting.lifted(own)[1])
        return jax.jit(lambda x: 1 if x else 0)(0.5) if calls[-1] else "done"

    assert shared_programs.sharing(numbers, run) == "done"
    assert calls == [{"learning_rate": 0.1}, {}]
    assert numbers == {}
    assert "learning_rate decides what the programs are: one is compiled for each value" in caplog.text


@pytest.mark.slow
def test_side_by_side_leaves_what_runs_in_turn_leave_also_after_an_interruption(monkeypatch, accelerated, capsys):
    words = LINE.split()
    played, play, figures = [], requests.play_together, Run.add_figures

    def counted(batch, programs, **options):
        played.append((len(batch.runs), batch.runs[0].done))
        return play(batch, programs, **options)

    def interrupting(self, *given):
        Interrupt.active.number = 2
        return figures(self, *given)

    monkeypatch.setattr(requests, "play_together", counted)
    with monkeypatch.context() as patched:
        patched.setattr(Run, "add_figures", interrupting)
        assert cli.main(["sweep", *words, "--run-dir", "beside"]) == 130
    assert cli.main(["sweep", *words, "--run-dir", "beside"]) == 0
    assert played == [(4, 0), (4, 2)]
    monkeypatch.setattr(shared_programs, "pays", lambda mapping: False)
    assert cli.main(["sweep", *words, "--run-dir", "turn"]) == 0
    assert len(played) == 2
    capsys.readouterr()
    for name in ("learning-rate-0.1-seed0", "learning-rate-0.1-seed1", "learning-rate-0.3-seed1"):
        mine, own = (runs.load_run(f"{folder}/{name}") for folder in ("beside", "turn"))
        np.testing.assert_allclose(mine.history["loss"], own.history["loss"], rtol=1e-5)
        np.testing.assert_allclose(mine.history["accuracy"], own.history["accuracy"], atol=1e-2)
        chex.assert_trees_all_close(mine.state.clusters, own.state.clusters, rtol=1e-5, atol=1e-5)
    mine, own = ({path.name for path in pathlib.Path(folder).iterdir()} for folder in ("beside", "turn"))
    assert mine == own
