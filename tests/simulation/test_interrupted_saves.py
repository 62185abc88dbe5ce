"""Saves that are killed, or find no room: what was whole stays, and the run comes to the same end."""

import errno
import os
import pathlib
import stat

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_cluster import files, local, nn
from fedjax_cluster.algorithms import cfl_gp, fedavg
from fedjax_cluster.simulation import checkpoints, identity, run_directory
from fedjax_cluster.simulation.loop import simulate
from tests.federations import blobs
from tests.simulation.test_damaged_runs import run_of_two_checkpoints

METHOD = cfl_gp(nn.linear(), clusters=2, local=local.sgd(0.3, batch_size=5, steps=2))


class Killed(BaseException):
    pass


def killed(*arguments):
    raise Killed


def full(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


def run(path, rounds, **options):
    return simulate(METHOD, blobs(), rounds=rounds, run_dir=path, **{"eval_every": 2, **options})


def steps(path):
    return sorted(child.name for child in (path / "checkpoints").iterdir())


def test_a_full_disk_is_named_with_the_file(tmp_path):
    with pytest.raises(OSError, match="No space left") as raised, files.atomic_file(tmp_path / "config.json"):
        full()
    assert raised.value.filename == str(tmp_path / "config.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_may_be_read_by_whom_any_new_file_may_be(umask, mode, tmp_path):
    """They were everybody's to read and nobody else's to write."""
    new, old = tmp_path / "clients.csv", tmp_path / "shared.csv"
    old.touch()
    old.chmod(0o660)
    before = os.umask(umask)
    try:
        for path in (new, old):
            with files.atomic_file(path) as beside:
                beside.write_text("client")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (new, old)] == [mode, 0o660]
    assert files.STRAY.fullmatch(beside.name)
    assert not files.STRAY.fullmatch(".notes.markdown"), "somebody's own"


def test_a_directory_that_is_gone_again_as_it_is_looked_at_holds_nothing(tmp_path, monkeypatch):
    """Another process of a fresh run has made it to see whether it can, and removed it."""
    monkeypatch.setattr(pathlib.Path, "is_dir", lambda path: True)
    assert run_directory.listed(tmp_path / "gone") == []


def test_what_is_made_to_see_whether_a_directory_can_be_written_is_no_file_of_somebody(tmp_path, monkeypatch):
    """Fault: where a file system has only files with names, another process of a fresh run refuses its directory."""
    made, new_file = [], files.new_file

    def noted(*where):
        made.append(new_file(*where))
        assert run_directory.listed(tmp_path) == []
        return made[-1]

    monkeypatch.setattr(files, "new_file", noted)
    files.check_writable(tmp_path)
    assert len(made) == 1
    assert not list(tmp_path.iterdir())


def test_a_directory_that_a_full_disk_does_not_let_take_is_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(files.socket, "gethostname", full)
    with pytest.raises(OSError, match="No space left") as raised, files.taken(tmp_path):
        pass
    assert raised.value.filename == str(tmp_path / files.LOCK)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def whole():
    return simulate(METHOD, blobs(), rounds=8, eval_every=2)


@pytest.mark.parametrize("before", [0, 2])
def test_killed_before_the_seal(tmp_path, monkeypatch, whole, caplog, before):
    if before:
        run(tmp_path, before)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "write_json", killed)
        with pytest.raises(Killed):
            run(tmp_path, 4)
    assert len(steps(tmp_path)) == (2 if before else 1)
    chex.assert_trees_all_equal(run(tmp_path, 8).state, whole.state)
    assert ("beginning anew" in caplog.text) != bool(before)
    assert "no seal" in caplog.text


def test_without_room_for_the_seals_the_last_whole_checkpoint_stays(tmp_path, monkeypatch, whole, caplog):
    run(tmp_path, 2)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "write_json", full)
        found = run(tmp_path, 8, checkpoint_every=0)
    chex.assert_trees_all_equal(found.state, whole.state)
    assert "No space left" in caplog.text
    assert steps(tmp_path) == ["2"]
    chex.assert_trees_all_equal(run(tmp_path, 8).state, whole.state)
    assert steps(tmp_path) == ["2", "8"]


@pytest.mark.parametrize("failure", [full, killed])
def test_a_checkpoint_gives_way_only_to_a_whole_one(tmp_path, monkeypatch, whole, failure):
    """Round 4 is saved before its evaluation, and once more after it."""

    def stop(evaluation):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run(tmp_path, 4, eval_every=4, callbacks=[stop], checkpoint_every=0)
    assert steps(tmp_path)[-1] == "4"
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "write_json", failure)
        if failure is killed:
            with pytest.raises(Killed):
                run(tmp_path, 4, eval_every=4)
        else:
            run(tmp_path, 4, eval_every=4)
    if failure is killed:
        checkpoints.Checkpoints(tmp_path / "checkpoints", len(whole.labels)).close()
    assert (tmp_path / "checkpoints" / "4" / checkpoints.SEAL).is_file()
    again = run(tmp_path, 4, eval_every=4)
    assert steps(tmp_path)[-1] == "4"
    assert np.isfinite(again.history["accuracy"][-1])
    assert not any(name.startswith(".") for name in steps(tmp_path))


def test_no_more_than_two_are_kept(tmp_path):
    run(tmp_path, 8, checkpoint_every=0)
    assert len(steps(tmp_path)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("of", ["events", "summary.json"])
def test_a_disk_that_fills_elsewhere_does_not_end_the_run(tmp_path, monkeypatch, caplog, of):
    algorithm, whole = run_of_two_checkpoints(tmp_path / "whole")
    with monkeypatch.context() as patched:
        if of == "events":
            patched.setattr(np, "savez_compressed", full)
        else:
            patched.setattr(run_directory, "write_json", lambda path, *rest: full() if path.name == of else None)
            (tmp_path / "run").mkdir()
            files.write_json(tmp_path / "run" / "config.json", files.read_json(tmp_path / "whole" / "config.json"))
            config = (tmp_path / "whole" / "config.json").read_bytes()
            (tmp_path / "run" / "config.json").write_bytes(config)
        found = simulate(algorithm, blobs(), rounds=4, eval_every=2, run_dir=tmp_path / "run")
    chex.assert_trees_all_equal(found.state, whole.state)
    assert "No space left" in caplog.text
    again = simulate(algorithm, blobs(), rounds=4, eval_every=2, run_dir=tmp_path / "run")
    chex.assert_trees_all_equal(again.state, whole.state)
    assert len(again.events) == len(whole.events)
    assert (tmp_path / "run" / "summary.json").is_file()


def test_two_that_begin_in_one_directory_at_once(tmp_path):
    """The second is refused in one line, also before there is a checkpoint."""
    with files.taken(tmp_path), pytest.raises(ValueError, match="in use by process") as refused:
        run(tmp_path, 2)
    assert "\n" not in str(refused.value)


def test_a_checkpoint_of_another_run_is_no_checkpoint(tmp_path):
    for seed in (0, 1):
        run(tmp_path / str(seed), 2, seed=seed)
    (tmp_path / "0" / "checkpoints").rename(tmp_path / "aside")
    (tmp_path / "1" / "checkpoints").rename(tmp_path / "0" / "checkpoints")
    with pytest.raises(ValueError, match="that of another run"):
        run(tmp_path / "0", 4)


def test_a_configuration_without_its_seal_is_refused(tmp_path):
    run(tmp_path, 2)
    files.write_json(tmp_path / "config.json", files.read_json(tmp_path / "config.json"))
    with pytest.raises(ValueError, match="has lost its seal"):
        run(tmp_path, 4)


@pytest.mark.slow
def test_constants_of_jitted_functions_tell_programs_apart(tmp_path):
    def digest(factor):
        inner = jax.jit(lambda x: x * jnp.asarray(np.arange(3.0) * factor))
        return identity._Digests().of(
            lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0], jnp.ones(3)
        )

    assert digest(1.0) == digest(1.0) != digest(2.0)

    def masked(signs):
        signs = np.asarray(signs, np.float32)
        step = jax.jit(lambda grads: jax.tree.map(lambda g: g * signs.sum() * jnp.asarray(signs)[0], grads))
        return optax.GradientTransformation(lambda params: (), lambda grads, state, params=None: (step(grads), state))

    def method(signs):
        return fedavg(nn.linear(), local=local.sgd(0.3, batch_size=5, steps=2), server=masked(signs))

    simulate(method([1.0, 2.0]), blobs(), rounds=2, run_dir=tmp_path)
    with pytest.raises(ValueError, match="another program"):
        simulate(method([-1.0, 2.0]), blobs(), rounds=4, run_dir=tmp_path)
