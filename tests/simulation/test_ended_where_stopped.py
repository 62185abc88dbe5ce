"""A run that is stopped between two evaluations and then ends there: its last round is evaluated nevertheless."""

import signal

import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import fedavg
from fedjax_cluster.simulation import loop
from fedjax_cluster.simulation.run import Run
from fedjax_cluster.simulation.run_directory import only_reading
from tests.federations import blobs

METHOD = fedavg(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=2))


def run(directory, rounds, **options):
    return fc.simulate(METHOD, blobs(), rounds=rounds, eval_every=4, run_dir=directory, progress=False, **options)


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run directory of a run that was stopped after three rounds of ten."""

    def stop(run):
        if run.done == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "LONGEST_SEGMENT", 1)
        patch.setattr(Run, "save_in_time", stop)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", 10)
    return tmp_path / "run"


def test_the_last_round_is_evaluated_once(stopped, monkeypatch):
    """Its accuracy was NaN, and that of the summary of an earlier round."""
    found = run(stopped, 3)
    assert np.isfinite(found.history["accuracy"]).tolist() == [False, False, True]
    assert found.summary["accuracy"] == run(None, 3).summary["accuracy"]
    # And kept: it is read back.
    monkeypatch.setattr(loop, "evaluator", None)
    assert run(stopped, 3).summary["accuracy"] == found.summary["accuracy"]


def test_a_run_that_goes_on_is_that_which_was_not_stopped(stopped):
    run(stopped, 3)
    found, whole = run(stopped, 10), run(None, 10)
    assert found.summary["accuracy"] == whole.summary["accuracy"]
    np.testing.assert_array_equal(found.history["loss"], whole.history["loss"])


def test_a_run_that_is_only_read_is_not_evaluated(stopped, monkeypatch):
    monkeypatch.setattr(loop, "evaluator", None)
    with only_reading():
        assert np.isnan(run(stopped, 3).history["loss"]).tolist() == [False] * 3
