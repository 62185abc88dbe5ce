"""Commands that were ended at an unlucky moment, or beside another: nothing is lost, and what is advised works."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

import fedjax_cluster as fc
from fedjax_cluster import command_results, files, interruption
from fedjax_cluster.experiments import comparison, runs, saved_runs
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.ended_runs import read_run
from fedjax_cluster.interruption import Interrupt
from fedjax_cluster.simulation import loop, requests, run_directory
from fedjax_cluster.simulation.run import Run

SHORT = RunConfig(method="fedavg", clients=4, rounds=4, eval_every=2, model="linear", local_steps=1)


@contextlib.contextmanager
def interrupted_once_done(monkeypatch, rounds):
    """Ctrl-C after the last round, before its evaluation."""
    rounds_until = Run.rounds_until

    def interrupted(run, stop, due):
        told = rounds_until(run, stop, due)
        if run.done == rounds:
            Interrupt.active.number = signal.SIGINT
        return told

    with monkeypatch.context() as patched:
        patched.setattr(Run, "rounds_until", interrupted)
        yield


def test_a_run_without_its_last_evaluation_has_not_ended(tmp_path, monkeypatch, caplog):
    """Its summary has an older accuracy, which a comparison took for that of its last round."""
    path, asked = tmp_path / "fedavg-seed0", dataclasses.replace(SHORT, eval_every=3)
    with interrupted_once_done(monkeypatch, asked.rounds), pytest.raises(KeyboardInterrupt):
        runs.run(asked, run_dir=path, progress=False)
    left = read_run(path)
    assert (left.rounds, left.interrupted) == (4, True)
    assert runs.unfinished(asked, path) == 4
    saved_runs.write_report([path])
    assert (
        f"{path} was interrupted before the evaluation of its last of 4 rounds; go on with: fedjax-cluster"
        in caplog.text
    )
    whole = comparison.Comparison({"fedavg": asked}, (0,), {}, {}, 4)
    files.write_json(tmp_path / "comparison.json", {})
    monkeypatch.setattr(comparison, "read", lambda directory: whole)
    with pytest.raises(ValueError, match="has ended; continue it with resume"):
        saved_runs.read_comparison(tmp_path)
    with monkeypatch.context() as patched:  # killed once more, after the last checkpoint and before its summary
        patched.setattr(run_directory.RunDirectory, "leave", lambda *given, **options: None)
        runs.resume(path, progress=False)
    assert read_run(path).interrupted
    ended = runs.resume(path, progress=False)
    assert not read_run(path).interrupted
    assert read_run(path).summary["accuracy"] == pytest.approx(ended.history["accuracy"][-1])
    (outcome,) = saved_runs.read_comparison(tmp_path)
    assert not outcome.failed


def test_a_run_of_ones_own_without_its_last_evaluation_has_not_ended_either(tmp_path, monkeypatch, caplog):
    federation = fc.data.scenarios.rotated(fc.data.digits(), clients=4, angles=(0, 180))
    method = fc.algorithms.fedavg(fc.nn.linear(), local=fc.local.sgd(0.1, batch_size=32, steps=1))
    with interrupted_once_done(monkeypatch, 4), pytest.raises(KeyboardInterrupt):
        fc.simulate(method, federation, rounds=4, eval_every=3, run_dir=tmp_path, progress=False)
    assert read_run(tmp_path).interrupted
    saved_runs.write_report([tmp_path])
    assert "before the evaluation of its last of 4 rounds; go on by the same call of simulate" in caplog.text


def test_a_run_of_a_comparison_that_somebody_began_to_extend_has_ended(tmp_path, monkeypatch):
    comparison.compare({"fedavg": SHORT}, run_dir=tmp_path, progress=False)
    with monkeypatch.context() as patched:
        patched.setattr(Run, "segment", lambda *given: setattr(Interrupt.active, "number", signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            runs.resume(tmp_path / "fedavg-seed0", 40, progress=False)
    assert read_run(tmp_path / "fedavg-seed0").interrupted
    (outcome,) = saved_runs.read_comparison(tmp_path)
    assert not outcome.failed
    assert len(outcome.summaries) == 1


def test_a_comparison_whose_directory_is_anothers_by_now_leaves_it_alone(tmp_path):
    configs = {"fedavg": SHORT, "ifca": dataclasses.replace(SHORT, method="ifca")}
    others, place = comparison.Comparison({"fedprox": SHORT}, (0,), {}, {}, 4), tmp_path / "both"
    with contextlib.ExitStack() as stack:

        def removed_and_taken(*given):
            shutil.rmtree(place)
            stack.enter_context(comparison._opened(place, None, others, others))

        with pytest.raises(OSError, match="both was removed, or is another's by now"):
            comparison.compare(configs, run_dir=place, progress=False, done=removed_and_taken)
        assert list(comparison.read(place).configs) == ["fedprox"]
        assert {each.name for each in place.iterdir()} == {".lock", "comparison.json"}


@pytest.mark.usefixtures("here")
def test_a_refused_comparison_leaves_the_others_record(pretend):
    """Both had begun before there was any."""
    configs = {"fedavg": RunConfig(method="fedavg", rounds=1)}
    asked = comparison.Comparison(configs, (0,), {}, {}, 4)
    place = pathlib.Path("both")
    with comparison._opened(place, None, asked, asked):
        kept = (place / "comparison.json").read_bytes()
        with pytest.raises(files.Taken), comparison._opened(place, None, asked, asked):
            pass
        assert (place / "comparison.json").read_bytes() == kept
    # It has ended by the time the other asks for the directory.
    with (
        pytest.raises(ValueError, match="another command has changed both"),
        comparison._opened(place, None, asked, asked),
    ):
        pass
    assert (place / "comparison.json").read_bytes() == kept


@pytest.mark.parametrize(("begun", "named"), [(True, ("place",)), (False, ())])
@pytest.mark.usefixtures("here")
def test_only_a_directory_that_can_be_gone_on_with_is_named(begun, named):
    place = pathlib.Path("place")
    place.mkdir()
    if begun:
        (place / "comparison.json").touch()
    with Interrupt() as interrupt:
        interrupt.number = signal.SIGINT
        with pytest.raises(KeyboardInterrupt) as raised, command_results.whole(place):
            raise KeyboardInterrupt
        assert raised.value.args == named


@pytest.mark.parametrize("others", [None, "ifca"])
def test_a_directory_that_is_not_the_runs_any_more_gets_no_pictures(tmp_path, others, capsys):
    path = tmp_path / "run"
    ended = dataclasses.replace(runs.run(SHORT, run_dir=path, progress=False), kept=None)
    shutil.rmtree(path)
    if others:
        identity = {"algorithm": others, "seed": 0}
        fc.files.write_json(path / "config.json", {"identity": identity, "experiment": {}})
    with pytest.raises(
        OSError, match="was removed while the run went on, or is another's by now: only its table is left"
    ):
        command_results.show(ended, path)
    assert "FedAvg" in capsys.readouterr().out
    assert [each.name for each in path.rglob("*")] == (["config.json"] if others else [])


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("--version >&-", 0, ""),
        ("list 2>&-", 0, None),
        ("--help >/dev/full", 1, "fedjax-cluster: No space left on device\n"),
    ],
)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full disk here")
def test_closed_and_full_outputs_are_a_line_at_most(words, status, said):
    command = f"{sys.executable} -m fedjax_cluster {words}"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=100)
    assert ended.returncode == status
    assert ended.stderr == (said or "")


def test_what_a_signal_asked_for_is_not_cut_off(monkeypatch):
    """A last checkpoint may take longer than a compilation is given."""
    ended = []
    monkeypatch.setattr(interruption, "GRACE", 0.05)
    with Interrupt() as interrupt:
        monkeypatch.setattr(interrupt, "_end", ended.append)
        interrupt.noticed = True
        interrupt._end_later(signal.SIGINT)
        time.sleep(0.3)
        assert ended == []
        interrupt.stop_if_wanted()  # the run has ended; what is left is not
        time.sleep(0.3)
    assert ended == [signal.SIGINT]


def test_a_run_has_noticed_when_it_looked():
    with Interrupt() as interrupt, interrupt.patiently():
        assert not loop.heard(interrupt)
        assert not interrupt.noticed
        interrupt.number = signal.SIGINT
        assert loop.heard(interrupt)
        assert interrupt.noticed
        interrupt.number = None


@pytest.mark.parametrize("together", [False, True])
def test_a_signal_while_a_run_ends_is_obeyed_by_its_end(together, monkeypatch, tmp_path):
    """Its last checkpoint is waited for, although nobody has looked for a signal since."""
    waited, finish, time_clustering = [], Run.finish, Run.time_clustering
    monkeypatch.setattr(Run, "finish", lambda run: (waited.append(Interrupt.active.noticed), finish(run))[1])
    monkeypatch.setattr(
        Run, "time_clustering", lambda run: (waited.append(Interrupt.active.noticed), time_clustering(run))[1]
    )
    federation = fc.data.scenarios.rotated(fc.data.digits(), clients=4, angles=(0, 180))
    method = fc.algorithms.fedavg(fc.nn.linear(), local=fc.local.sgd(0.1, batch_size=32, steps=1))
    two = [
        requests.Request(method, federation, seed=seed, rounds=2, eval_every=2, run_dir=tmp_path / str(seed))
        for seed in range(2)
    ]
    with Interrupt() as interrupt:
        requests.carry_out(two, together=together, progress=False, time_clustering=True)
        assert waited == [True] * 4
        assert not interrupt.noticed
