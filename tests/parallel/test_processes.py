"""Two processes with two devices each, over gloo on the loopback: the same run as one, and each its own clients."""

import dataclasses
import json
import os
import re
import signal
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as orbax
import pytest

import fedjax_cluster as fc
from fedjax_cluster import parallel
from fedjax_cluster.parallel import processes
from tests.devices import needs_two
from tests.parallel import in_processes
from tests.parallel.in_processes import CLIENTS, FURTHER, build, federation, played
from tests.parallel.started import ended, free_port, start

# In one worker: the pairs of processes serve many tests, and would be started by each.
pytestmark = pytest.mark.xdist_group("processes")
# What differs in how it gathers, draws or sends stands for the others; with this variable all are run.
CHOSEN = ("cfl", "cfl_gp", "fedsoft", "scaffold")
METHODS = sorted(fc.algorithms.REGISTRY) if "FEDJAX_CLUSTER_ALL_METHODS" in os.environ else CHOSEN
# Each process compiles for itself: three methods took half a minute of processor time.
FAST = ("method fedavg 0.6",)
# In twelve rounds CFL splits, which is an event with a snapshot.
OTHERWISE = {"cfl": "1.0 12", "cfl_gp": "0.6", "fedgwc": "0.4"}
SLOW = tuple(f"method {name} {OTHERWISE.get(name, '1.0')}" for name in METHODS if name != "fedavg")

# The command line's own processes, which count as lost sooner than a user's: tests need not wait a minute.
IMPATIENT = """
import sys
from fedjax_cluster.__main__ import main
from fedjax_cluster.parallel import processes
processes.start_processes.__kwdefaults__["lost_seconds"] = 15
sys.exit(main())
"""


def jobs(folder, *wanted, devices=(2, 2)):
    """Has two processes do jobs of `in_processes`, one after the other."""
    given = {"count": 2, "devices": devices, "port": free_port(), "folder": str(folder), "jobs": wanted}
    started = start(*(["-m", "tests.parallel.in_processes", json.dumps({**given, "id": i})] for i in range(2)))
    said = ended(started)
    assert [process.returncode for process in started] == [0, 0], "\n".join(error for _, error in said)


def compare(folder, job, expected):
    with np.load(folder / f"{job.replace(' ', '-')}.npz") as found:
        assert set(found) == set(expected)
        np.testing.assert_array_equal(found["labels"], expected["labels"])
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, atol=1e-5, rtol=1e-5, err_msg=f"{job}: {name}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    jobs(folder, "shards", *FAST, "refusals", "saved 2")
    return folder


@pytest.fixture(scope="module")
def slow_pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slow-pair")
    fc.data.write_population(folder / "population", federation())
    played("fedavg", 0.6, rounds=2, run_dir=folder / "run")
    jobs(folder, "disk brought", "disk streamed", "saved 3", *(f"further {name}" for name in FURTHER), *SLOW)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("job", [*FAST, *(pytest.param(job, marks=pytest.mark.slow) for job in SLOW)])
def test_two_processes_give_what_one_gives(job, request):
    """Faults: a decision by one process's clock, a fetch of what lies elsewhere, a draw by position on the devices."""
    _, name, participation, *rounds = job.split()
    expected = played(name, float(participation), rounds=int(*rounds or [in_processes.ROUNDS]))
    compare(request.getfixturevalue("pair" if job in FAST else "slow_pair"), job, expected)


def test_each_process_holds_its_own_clients(pair):
    """The process itself looks at its shards; here only that it had some."""
    with np.load(pair / "shards.npz") as found:
        assert 0 < len(found["clients"]) < CLIENTS


@needs_two
def test_processes_that_were_given_different_runs_say_so_together(pair):
    said = [json.loads((pair / f"refusals-{number}.json").read_text()) for number in (0, 1)]
    assert said[0]["one alone"] == "process 1 cannot go on, for a reason that it tells itself; this one ends with it"
    assert "eval_every is 0" in said[1].pop("one alone")
    said[0].pop("one alone")
    assert said[0] == said[1]
    for name in ("seed", "federation", "method", "time_clustering"):
        assert said[0][name] == f"process 1 was given another {name} than process 0; give all processes the same"
    assert "another number of rounds" in said[0]["rounds"]
    assert "another choice of a run_dir or none" in said[0]["run_dir"]
    assert said[0]["clients"] == "there are 1 clients, fewer than the 2 processes; start fewer"
    assert "mapping has devices of 1 of 2 processes" in said[0]["mapping"]


@pytest.mark.slow
def test_one_process_takes_up_a_run_of_two(pair):
    """Faults: rows that fill up four devices are taken for clients; the seal misses what another process wrote."""
    given = {"rounds": 4, "eval_every": 2}
    found, expected = played("fedavg", 0.6, run_dir=pair / "run", **given), played("fedavg", 0.6, **given)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, rtol=1e-5, err_msg=name)
    assert sorted(path.name for path in (pair / "run" / "checkpoints").iterdir()) == ["2", "4"]


@pytest.mark.slow
def test_processes_with_different_numbers_of_devices_say_so(tmp_path):
    jobs(tmp_path, "uneven", devices=(2, 1))
    said = [json.loads((tmp_path / f"uneven-{number}.json").read_text()) for number in (0, 1)]
    assert said == ["process 1 has 1 devices and process 0 has 2; give each process as many"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_clients_that_come_and_go_and_the_clock_of_clusterings_are_no_hindrance(slow_pair, name):
    compare(slow_pair, f"further {name}", played(**FURTHER[name]))


@pytest.mark.slow
def test_two_processes_take_up_a_run_of_one(slow_pair):
    compare(slow_pair, "saved 3", played("fedavg", 0.6, rounds=3))


@pytest.mark.slow
@pytest.mark.parametrize(("job", "participation"), [("disk brought", 1.0), ("disk streamed", 0.6)])
def test_a_population_on_disk_is_read_by_those_who_have_its_clients(slow_pair, job, participation):
    compare(slow_pair, job, played("fedavg", participation))


def test_what_one_process_is_alone():
    assert processes.is_first()
    assert not processes.several()
    assert processes.agreed(3) == 3
    assert processes.agreed_text("runs/a") == "runs/a"
    assert not processes.of_any(False)
    with pytest.raises(KeyError), processes.together():
        raise KeyError("its own")


LOSS = jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: [pair.cc:538] Read error: Connection reset by peer")


def test_nothing_is_asked_of_the_others_once_one_is_lost(monkeypatch):
    """Fault: the message of the next step meets one of the last between two devices here, and gloo ends the process."""
    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(processes, "of_all", lambda _: pytest.fail("asked"))
    with pytest.raises(fc.parallel.ProcessLost, match="was lost"), processes.together():
        raise LOSS


@pytest.mark.parametrize("saving", [True, False])
def test_a_process_lost_at_a_checkpoint_is_no_full_disk_and_no_damage(saving, monkeypatch, tmp_path):
    """Faults: "cannot save … make room"; a checkpoint that is whole is set aside as damaged."""

    def lost(*_, **__):
        monkeypatch.setattr(processes, "several", lambda: True)
        monkeypatch.setattr(processes, "of_all", lambda _: pytest.fail("asked"))
        raise LOSS

    run_dir = tmp_path / "run"
    if not saving:
        played("fedavg", 1.0, rounds=1, run_dir=run_dir)
    monkeypatch.setattr(orbax.CheckpointManager, "save" if saving else "restore", lost)
    with pytest.raises(fc.parallel.ProcessLost, match="was lost"):
        played("fedavg", 1.0, rounds=2, run_dir=run_dir)
    assert not (run_dir / "damaged").exists()
    assert (run_dir / "checkpoints" / "1").exists() is not saving


def test_after_a_clustering_that_could_not_be_timed_the_others_are_not_waited_for(monkeypatch, tmp_path):
    def lost(*_):
        monkeypatch.setattr(processes, "several", lambda: True)
        monkeypatch.setattr(parallel, "several", lambda: True)
        monkeypatch.setattr(processes, "of_all", lambda _: pytest.fail("asked"))
        raise LOSS

    monkeypatch.setattr(fc.simulation.run, "with_clustering_seconds", lost)
    with pytest.raises(fc.parallel.ProcessLost, match="was lost"):
        played("ifca", 1.0, rounds=1, run_dir=tmp_path, time_clustering=True)


def test_who_cannot_read_a_checkpoint_meets_the_others_at_the_same_step(monkeypatch, tmp_path):
    """Fault: an agreement within another; who fails between the two is one step ahead from then on."""
    played("fedavg", 1.0, rounds=1, run_dir=tmp_path)
    run = json.loads((tmp_path / "checkpoints" / "1" / "seal.json").read_text())["run"]
    checkpoints = fc.simulation.checkpoints.Checkpoints(tmp_path / "checkpoints", CLIENTS, run=run)
    asked = {}

    def restore(own):
        """A restoration where this process cannot read a seal, or another cannot."""
        asked[own] = []
        monkeypatch.setattr(processes, "several", lambda: True)
        monkeypatch.setattr(parallel, "several", lambda: True)

        def of_all(value):
            asked[own].append(int(value))
            return np.asarray([int(value), 0 if own else len(asked[own]) == 1])

        def unreadable(step):
            raise OSError("stale")

        monkeypatch.setattr(processes, "of_all", of_all)
        if own:
            monkeypatch.setattr(fc.simulation.checkpoints, "_checked_seal", unreadable)
        with pytest.raises(fc.simulation.checkpoints.Damaged, match="stale" if own else "cannot go on"):
            checkpoints.restore(state, must_be_sealed=True)
        monkeypatch.undo()

    state = fc.simulate(build("fedavg", 1.0), federation(), rounds=1, progress=False).state
    restore(own=False)
    restore(own=True)
    assert len(asked[True]) == len(asked[False])


@pytest.mark.skipif(sys.platform != "linux", reason="how C++ ends elsewhere is not known")
@pytest.mark.parametrize("how", ["abort", "_ZSt9terminatev"])
def test_what_ends_in_c_is_one_line(how):
    """Fault: gloo's threads end by C++'s `terminate`, with two lines of their own."""
    program = f"""
import ctypes
from fedjax_cluster.parallel import processes
undo = processes._at_an_abort("undone")
undo()
processes._at_an_abort("lost")
getattr(ctypes.CDLL("libstdc++.so.6"), {how!r})()
"""
    (ending,) = start(("-c", program))
    assert ended([ending]) == [("", "fedjax-cluster: lost\n")]
    assert ending.returncode == 1


@pytest.mark.skipif(sys.platform != "linux", reason="how C++ ends elsewhere is not known")
def test_what_ends_in_c_is_not_explained_before_there_are_several_processes():
    program = """
import ctypes
from fedjax_cluster.parallel import processes
undo = processes._at_an_abort("undone")
undo()
ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
"""
    (ending,) = start(("-c", program))
    assert "undone" not in ended([ending])[0][1]
    assert ending.returncode == -signal.SIGABRT


def run_words(port, number, run_dir, *more):
    return [
        # Four devices are filled up to eight clients, and those of this process need not be.
        *("-c", IMPATIENT, "run", "ifca", "--clients", "6", "--model", "linear", "--eval-every", "5"),
        *("--checkpoint-every", "0", "--run-dir", str(run_dir), *more),
        *("--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id", str(number)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_lost_process_ends_the_other_with_one_line_and_one_process_goes_on(killed, tmp_path):
    """Faults: the other waits for ever; it ends with a page of C++; what it leaves cannot be taken up."""
    port = free_port()
    started = start(*(run_words(port, number, tmp_path / "run", "--rounds", "1000000") for number in (0, 1)))
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run" / "checkpoints").glob("[0-9]*/seal.json")):
        assert time.monotonic() < deadline, "no checkpoint"
        assert all(process.poll() is None for process in started), ended(started)
        time.sleep(0.2)
    started[killed].send_signal(signal.SIGKILL)
    other = started[1 - killed]
    _, said = other.communicate(timeout=150)
    ended(started)
    assert other.returncode not in (0, None)
    lines = said.splitlines()
    assert len(lines) == 1, said
    assert re.match(f"fedjax-cluster: another process of the run was lost.*resume {tmp_path / 'run'}$", lines[0])
    done = fc.experiments.runs.rounds_done(tmp_path / "run")
    found = fc.resume(tmp_path / "run", done + 5, progress=False)
    config = fc.RunConfig.from_json(json.loads((tmp_path / "run" / "config.json").read_text())["experiment"])
    expected = fc.experiments.runs.run(dataclasses.replace(config, rounds=done + 5), progress=False)
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_allclose(found.per_client.accuracy, expected.per_client.accuracy, atol=1e-5)
    for leaf, other_leaf in zip(*(jax.tree.leaves(run.state.clusters) for run in (found, expected)), strict=True):
        np.testing.assert_allclose(leaf, other_leaf, atol=1e-5)


@pytest.mark.slow
def test_the_first_process_shows_and_the_other_is_silent(tmp_path):
    port = free_port()
    started = start(*(run_words(port, number, tmp_path / "run", "--rounds", "10") for number in (0, 1)))
    (shown, notices), silent = ended(started)
    assert [process.returncode for process in started] == [0, 0]
    assert "accuracy" in shown
    assert "K, the number of clusters, was 4" in notices  # the other has as much to say
    assert silent == ("", "")
    assert {"report.html", "summary.json", "metrics.csv", "plots"} <= set(os.listdir(tmp_path / "run"))
    config = {"method": "ifca", "clients": 6, "model": "linear", "eval_every": 5, "rounds": 10}
    expected = fc.experiments.runs.run(fc.RunConfig(**config), progress=False)
    found = fc.load_run(tmp_path / "run")
    np.testing.assert_allclose(found.history["accuracy"], expected.history["accuracy"], atol=1e-5)


@pytest.mark.slow
def test_no_process_ever_has_the_memory_for_another_ones_clients(tmp_path):
    """VmHWM while a population is brought to the devices and trained on, beyond what a tiny one takes."""
    size = in_processes.write_large(tmp_path / "population")
    jobs(tmp_path, "memory")
    for number in (0, 1):
        grown = json.loads((tmp_path / f"memory-{number}.json").read_text())
        assert 0.4 * size < grown < 0.8 * size
