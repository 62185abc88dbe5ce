"""Run directories: whose run they hold, and who works in them."""

import csv
import errno
import functools
import importlib.metadata
import json
import logging
import os
import pathlib
import subprocess
import sys

import chex
import flax.linen as linen
import jax
import numpy as np
import optax
import pytest

from fedjax_cluster import files, local, nn, parallel, quiet
from fedjax_cluster.algorithms import REGISTRY, cfl_gp, fedavg
from fedjax_cluster.optimizers import named
from fedjax_cluster.simulation import run_directory
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.run_directory import read_config, read_history
from fedjax_cluster.types import Churn
from tests.federations import blobs

ROOT = pathlib.Path(__file__).parents[2]
TRAINING = local.sgd(0.3, batch_size=5, steps=2)


@functools.cache
def method(**options):
    return cfl_gp(nn.linear(), **{"clusters": 2, "local": TRAINING, **options})


def test_a_run_leaves_its_directory(tmp_path):
    simulate(method(), blobs(), rounds=3, run_dir=tmp_path / "run")
    assert {"config.json", "metrics.csv", "summary.json", "checkpoints"} <= set(os.listdir(tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    promised = """algorithm scenario rounds seed accuracy accuracy_std accuracy_worst_decile balanced_accuracy
        adjusted_rand_index num_clusters first_round_of_final_clustering client_rounds_per_second compile_seconds
        run_seconds models_down models_up"""
    assert set(promised.split()) <= set(summary)
    with (tmp_path / "run" / "metrics.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3
    assert len(read_history(tmp_path / "run")["loss"]) == 3


def test_sources_that_are_not_installed_leave_files_too(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    simulate(method(), blobs(), rounds=3, run_dir=tmp_path / "run")
    assert read_config(tmp_path / "run")["versions"]["fedjax_cluster"] == "0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"algorithm": "other"}, "every is 2 there and 3 here"),
        ({"federation": blobs(seed=5)}, "data is"),
    ],
)
def test_a_directory_of_another_experiment_is_refused(tmp_path, change, message):
    simulate(method(), blobs(), rounds=2, run_dir=tmp_path)
    algorithm = method(every=3) if change.pop("algorithm", None) else method()
    with pytest.raises(ValueError, match=message):
        simulate(algorithm, change.pop("federation", blobs()), rounds=2, run_dir=tmp_path, **change)


def test_a_directory_with_other_files_or_without_permission_is_refused(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        simulate(method(), blobs(), rounds=2, run_dir=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write to the directory"):
        simulate(method(), blobs(), rounds=2, run_dir=tmp_path / "file" / "run")


# ----------------------------------------------------------------------------------------- whose run it is


class Net(linen.Module):
    """A network of the user's own, which may be edited between two runs."""

    width: int = 3

    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(linen.relu(linen.Dense(self.width)(x)))


class Edited(linen.Module):
    width: int = 3

    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(linen.tanh(linen.Dense(self.width)(x)))


Edited.__qualname__ = "Net"


def shaken(**options):
    """A dense layer started otherwise."""
    return nn.from_flax(linen.Dense(3, **options))


def clipped(most):
    return optax.chain(optax.clip(most), optax.sgd(0.3))


def training(optimizer):
    return local.sgd(optimizer, batch_size=5, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "named_difference"),
    [
        ({}, {"model": nn.mlp(hidden=(3,))}, "model.init.network"),
        ({"model": nn.linear()}, {"model": nn.linear(init_scale=0.1)}, "kernel_init"),
        ({"model": nn.from_flax(Net())}, {"model": nn.from_flax(Net(width=4))}, "width is 3 there and 4 here"),
        ({"model": nn.from_flax(Net())}, {"model": nn.from_flax(Edited())}, "the model is another program"),
        (
            {"model": shaken(kernel_init=linen.initializers.normal(0.1))},
            {"model": shaken(kernel_init=linen.initializers.normal(0.2))},
            "the model's initialisation is another program",
        ),
        ({}, {"server": optax.sgd(3.0)}, "server is None there and custom here"),
        ({"server": optax.sgd(1.0)}, {"server": optax.sgd(3.0)}, "the server's optimiser is another program"),
        ({"server": clipped(0.1)}, {"server": clipped(0.2)}, "the server's optimiser is another program"),
        ({"server": named("sgd", learning_rate=1.0)}, {"server": named("sgd", learning_rate=3.0)}, "1.0 there and 3.0"),
        (
            {"local": training(optax.sgd(0.01))},
            {"local": training(optax.sgd(0.01, momentum=0.5))},
            "the local update is another",
        ),
        ({"local": training(optax.sgd(0.01))}, {"local": training(optax.sgd(0.02))}, "the local update is another"),
        ({"local": training(0.01)}, {"local": training(0.02)}, "learning_rate is 0.01 there and 0.02 here"),
    ],
)
def test_another_model_start_or_optimiser_is_refused(tmp_path, first, second, named_difference):
    taken, other = (fedavg(**{"model": nn.linear(), "local": TRAINING, **options}) for options in (first, second))
    identity = functools.partial(run_directory_of, tmp_path)
    identity(taken).open()
    with pytest.raises(ValueError, match="belongs to another experiment") as refused:
        identity(other)
    assert named_difference in str(refused.value)
    assert "\n" not in str(refused.value)


def run_directory_of(path, algorithm, config=None, **options):
    from fedjax_cluster.simulation.identity import identity_of

    options = {"seed": 0, "eval_every": 10, "eval_clients": None, "churn": (), **options}
    return run_directory.RunDirectory(path, identity_of(algorithm, blobs(), **options), config, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"server": clipped(0.1)},
        {"model": nn.from_flax(Net())},
        {"model": shaken(kernel_init=linen.initializers.normal(0.1))},
        {"local": training(optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.5)))},
    ],
)
def test_what_is_known_by_its_program_alone_is_taken_up_again(tmp_path, options):
    options = {"model": nn.linear(), "local": TRAINING, **options}
    run_directory_of(tmp_path, fedavg(**options)).open()
    run_directory_of(tmp_path, fedavg(**options))
    config = json.loads((tmp_path / "config.json").read_text())
    config["identity"]["programs"]["jax"] = "0.1.0"
    files.write_json(tmp_path / "config.json", files.sealed({k: v for k, v in config.items() if k != "seal"}))
    with pytest.raises(ValueError, match=r"made by JAX 0\.1\.0"):
        run_directory_of(tmp_path, fedavg(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_clients": 3}, "eval_clients is None there and 3 here"),
        ({"eval_every": 3}, "eval_every is 10 there and 3 here"),
        ({"churn": (Churn(2, leave=(1,)),)}, r"churn is \[\] there"),
    ],
)
def test_other_evaluations_or_members_are_refused(tmp_path, options, message):
    run_directory_of(tmp_path, method()).open()
    with pytest.raises(ValueError, match=message):
        run_directory_of(tmp_path, method(), **options)


def test_an_edited_configuration_is_refused(tmp_path):
    simulate(method(), blobs(), rounds=2, run_dir=tmp_path, config={"rounds": 2})
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(ValueError, match="edited or damaged"):
        simulate(method(), blobs(), rounds=3, run_dir=tmp_path)
    (tmp_path / "config.json").write_text(text)
    simulate(method(), blobs(), rounds=3, run_dir=tmp_path, config={"rounds": 3})
    kept = read_config(tmp_path)
    assert kept["experiment"] == {"rounds": 3}
    assert set(kept["versions"]) == {"fedjax_cluster", "jax"}


# --------------------------------------------------------------------------------- who works in it, and where


def test_a_second_process_is_refused_in_one_line(tmp_path):
    simulate(method(), blobs(), rounds=2, run_dir=tmp_path)
    code = f"""
import pathlib, sys
from fedjax_cluster.files import taken
with taken(pathlib.Path({str(tmp_path)!r})):
    print("taken", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert other.stdout.readline() == "taken\n"
    with pytest.raises(ValueError, match=f"in use by process {other.pid} on "):
        simulate(method(), blobs(), rounds=3, run_dir=tmp_path)
    # It may be read all the same.
    assert len(simulate(method(), blobs(), rounds=2, run_dir=tmp_path).history["round"]) == 2
    other.kill()
    other.communicate()
    assert len(simulate(method(), blobs(), rounds=3, run_dir=tmp_path).history["round"]) == 3
    assert not (tmp_path / files.LOCK).exists()


def test_two_names_of_one_lock_are_not_two_locks(tmp_path):
    with files.taken(tmp_path), pytest.raises(files.Taken, match="in use"), files.taken(tmp_path):
        pass
    with files.taken(tmp_path):
        pass
    (tmp_path / files.LOCK).mkdir()
    with pytest.raises(ValueError, match="lock is a directory"), files.taken(tmp_path):
        pass


def test_a_file_system_without_locks_is_not_in_use(tmp_path, monkeypatch, caplog):
    def refused(code):
        def flock(file, how):
            raise OSError(code, os.strerror(code))

        return flock

    for code in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        monkeypatch.setattr(files.fcntl, "flock", refused(code))
        with files.taken(tmp_path) as same:
            assert same()
    assert "has no locks" in caplog.text
    monkeypatch.setattr(files.fcntl, "flock", refused(errno.EWOULDBLOCK))
    with pytest.raises(files.Taken, match="in use by another process"), files.taken(tmp_path):
        pass


def test_a_directory_that_is_removed_on_the_way_is_made_again(tmp_path):
    """Another process, which was refused, removes what is empty."""
    with files.taken(tmp_path / "new" / "run") as same:
        assert same()


@pytest.mark.parametrize("name", ["run[1]", "a\\b", "gs:/run"])
def test_paths_that_orbax_misreads_are_refused_before_anything_is_computed(tmp_path, name):
    with pytest.raises(ValueError, match=r"in its path, which orbax takes for a pattern"):
        simulate(method(), blobs(), rounds=2, run_dir=tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a]b", "a[b", "[]", "x:/y", "ü {1} *?"])
def test_other_odd_paths_are_taken_up(tmp_path, name):
    for rounds in (2, 3):
        run = simulate(method(), blobs(), rounds=rounds, run_dir=tmp_path / name)
    assert len(run.history["round"]) == 3


def test_the_logging_of_others_is_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    absl = logging.getLogger("absl")
    monkeypatch.setattr(absl, "level", logging.NOTSET)
    simulate(method(), blobs(), rounds=2, run_dir=tmp_path)
    assert not logging.getLogger().handlers
    assert absl.level == logging.NOTSET
    # In threads one begins before another ends, and somebody's own handler comes meanwhile.
    own = logging.NullHandler()
    first, second = map(quiet.absl_from, (logging.CRITICAL, logging.ERROR))
    first.__enter__()
    second.__enter__()
    logging.getLogger().addHandler(own)
    first.__exit__(None, None, None)
    assert absl.level == logging.ERROR
    second.__exit__(None, None, None)
    assert absl.level == logging.NOTSET
    assert logging.getLogger().handlers == [own]


def test_what_a_killed_process_left_beside_its_files_is_no_run_of_others(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in (".config.json.abcd0123.json", ".lock"):
        (run / name).write_text("")
    simulate(method(), blobs(), rounds=2, run_dir=run)
    (run / ".metrics.csv.0bcd0123.csv").write_text("")
    simulate(method(), blobs(), rounds=3, run_dir=run)
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_run_can_be_read(tmp_path):
    simulate(method(), blobs(), rounds=2, run_dir=tmp_path)
    tmp_path.chmod(0o555)
    assert len(simulate(method(), blobs(), rounds=2, run_dir=tmp_path).history["round"]) == 2


def test_a_run_that_cannot_be_written_can_be_read_and_not_continued(tmp_path, monkeypatch):
    def refuse(directory):
        raise ValueError(f"cannot write to the directory {directory}")

    simulate(method(), blobs(), rounds=2, run_dir=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    monkeypatch.setattr(run_directory, "check_run_directory", refuse)
    assert len(simulate(method(), blobs(), rounds=2, run_dir=tmp_path).history["round"]) == 2
    with pytest.raises(ValueError, match="cannot write"):
        simulate(method(), blobs(), rounds=3, run_dir=tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_full_disk_keeps_the_last_checkpoint_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    simulate(method(), blobs(), rounds=2, run_dir=tmp_path)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_directory.RunDirectory, "save", full)
    result = simulate(method(), blobs(), rounds=5, run_dir=tmp_path)
    assert len(result.history["round"]) == 5
    assert "No space left on device" in caplog.text
    assert len(read_history(tmp_path)["round"]) == 2


def test_an_evaluation_that_was_due_is_made_up_for(tmp_path):
    def fail(evaluation):
        raise ArithmeticError

    whole = simulate(method(), blobs(), rounds=6, eval_every=3)
    with pytest.raises(ArithmeticError):
        simulate(method(), blobs(), rounds=6, eval_every=3, run_dir=tmp_path, callbacks=[fail], checkpoint_every=0)
    assert len(read_history(tmp_path)["round"]) == 3
    resumed = simulate(method(), blobs(), rounds=6, eval_every=3, run_dir=tmp_path)
    np.testing.assert_array_equal(resumed.history["accuracy"], whole.history["accuracy"])


def test_the_last_checkpoint_holds_the_last_evaluation(tmp_path):
    """Saved before it, and once more after it."""
    result = simulate(method(), blobs(), rounds=6, eval_every=3, run_dir=tmp_path, checkpoint_every=0)
    np.testing.assert_array_equal(read_history(tmp_path)["accuracy"], result.history["accuracy"])
    assert np.isfinite(result.history["accuracy"][-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(REGISTRY) if name != "fedavg")]
)
def test_a_run_moves_to_another_number_of_devices(tmp_path, name):
    """Seven clients, with a padded row on two devices, and without on one."""
    from tests.algorithms.test_protocol import build

    algorithm, federation = build(name, participation=0.4), blobs(clients=7)
    one, two = (parallel.client_mapping("scan", devices=jax.devices()[:count]) for count in (1, 2))
    whole = simulate(algorithm, federation, rounds=4, eval_every=4, mapping=one)
    for first, second in ((one, two), (two, one)):
        run = tmp_path / first.strategy / str(first.mesh is None)
        simulate(algorithm, federation, rounds=2, eval_every=4, mapping=first, run_dir=run)
        found = simulate(algorithm, federation, rounds=4, eval_every=4, mapping=second, run_dir=run)
        assert found.labels.tolist() == whole.labels.tolist()
        chex.assert_trees_all_close(
            jax.device_get(found.state.clusters.params),
            jax.device_get(whole.state.clusters.params),
            rtol=1e-4,
            atol=1e-5,
        )


def test_a_run_directory_may_be_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    simulate(method(), blobs(), rounds=1, run_dir="~/run")
    assert (tmp_path / "run" / "config.json").is_file()
    with pytest.raises(ValueError, match="whose home that is is not known"):
        simulate(method(), blobs(), rounds=1, run_dir="~nobody-has-this-name/run")
