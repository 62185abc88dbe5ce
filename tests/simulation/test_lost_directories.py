"""Whose a run directory is: told apart by what only one of two runs was given, and kept while the run goes on."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import pytest

from fedjax_cluster import local, nn, privacy
from fedjax_cluster.algorithms import cfl_gp, fedavg, flag
from fedjax_cluster.files import taken
from fedjax_cluster.simulation import run_directory
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.run_directory import ASSIGNMENTS, read_config
from tests.federations import blobs

TRAINING = local.sgd(0.3, batch_size=5, steps=2)
PRIVATE = privacy.gaussian(clip=1.0, noise_multiplier=5.0, delta=1e-5)


def averaged(**options):
    return fedavg(nn.linear(), local=TRAINING, **options)


def start(path, algorithm=None, rounds=2, **options):
    return simulate(algorithm or averaged(), blobs(), rounds=rounds, run_dir=path, progress=False, **options)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (averaged(aggregation="median"), "aggregation is None there and .* here"),
        (averaged(privacy=PRIVATE), "privacy is None there and"),
    ],
)
@pytest.mark.parametrize("rounds", [2, 4])
def test_what_the_first_run_was_not_given_is_another_experiment(tmp_path, algorithm, message, rounds):
    """A median's figures were the mean's, and a run whose first rounds had no noise told an ε."""
    before = start(tmp_path)
    with pytest.raises(ValueError, match=message):
        start(tmp_path, algorithm, rounds)
    assert start(tmp_path).summary == before.summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exact", "options", "message"),
    [
        (
            lambda **more: cfl_gp(nn.linear(), clusters=2, local=TRAINING, **more),
            {"landmarks": 3},
            "landmarks is None there and 3 here",
        ),
        (
            lambda **more: cfl_gp(nn.linear(), clusters=2, local=TRAINING, landmarks=3, **more),
            {"profiles_of": "landmarks"},
            "profiles_of is everybody there and landmarks here",
        ),
        (
            lambda **more: flag(nn.linear(), clusters=2, local=TRAINING, threshold=1.0, gradient_epochs=1, **more),
            {"landmarks": 3},
            "landmarks is None there and 3 here",
        ),
    ],
)
def test_landmarks_are_another_experiment(tmp_path, exact, options, message):
    start(tmp_path, exact())
    with pytest.raises(ValueError, match=message):
        start(tmp_path, exact(**options))


def test_other_random_numbers_are_another_experiment(tmp_path):
    start(tmp_path)
    with jax.threefry_partitionable(False), pytest.raises(ValueError, match="random_numbers is None there and"):
        start(tmp_path)


def rounded(predictions, y, mask):
    return {"mine": jnp.float32(1.0)}


def edited(predictions, y, mask):
    return {"mine": jnp.float32(2.0)}


edited.__qualname__ = "rounded"


def test_metrics_are_part_of_an_experiment(tmp_path):
    start(tmp_path / "with", metrics=[rounded])
    with pytest.raises(ValueError, match="the metrics is another program"):
        start(tmp_path / "with", metrics=[edited])
    with pytest.raises(ValueError, match=r"metrics is .*rounded.* there and None here"):
        start(tmp_path / "with")
    assert start(tmp_path / "with", metrics=[rounded]).history["mine"].tolist()[-1] == 1.0
    start(tmp_path / "without")
    with pytest.raises(ValueError, match="metrics is None there and"):
        start(tmp_path / "without", metrics=[rounded])


@pytest.mark.parametrize("part", [None, pytest.param("model", marks=pytest.mark.slow)])
def test_a_models_own_metrics_are_part_of_an_experiment(tmp_path, part):
    one, other = (nn.linear()._replace(metrics=metrics) for metrics in (rounded, edited))
    start(tmp_path, fedavg(one, local=TRAINING))
    with pytest.raises(ValueError, match="the metrics is another program"):
        start(tmp_path, fedavg(other, local=TRAINING), 2 if part is None else 3)


def own_method(start_of, factor=1.0):
    class own(fedavg, abstract=True):
        """Federated averaging with a start of its own."""

        def init(self, rng_key, population):
            return start_of(fedavg.init(self, rng_key, population))

        def personalize(self, rng_key, state, data, index):
            variables, weights = fedavg.personalize(self, rng_key, state, data, index)
            return jax.tree.map(lambda leaf: leaf * factor, variables), weights

    own.__qualname__ = "own"
    return own(nn.linear(), local=TRAINING)


def as_it_is(started):
    return started


def shifted(started):
    state, info = started
    params = jax.tree.map(lambda leaf: leaf + 1.0, state.clusters.params)
    return state._replace(clusters=state.clusters._replace(params=params)), info


def one_absent(started):
    state, info = started
    return state._replace(clients=state.clients._replace(present=state.clients.present.at[3].set(False))), info


@pytest.mark.slow
def test_another_start_and_other_personal_models_of_a_method_of_ones_own(tmp_path):
    start(tmp_path, own_method(as_it_is))
    start(tmp_path, own_method(as_it_is))
    with pytest.raises(ValueError, match="the method's start is another program"):
        start(tmp_path, own_method(shifted))
    with pytest.raises(ValueError, match="its models of a client is another program"):
        start(tmp_path, own_method(as_it_is, factor=0.0))
    with pytest.raises(ValueError, match="the method's start is another program"):
        start(tmp_path, own_method(one_absent), rounds=3)


# ------------------------------------------------------------------------------------- while it goes on


def at_round(number, what):
    def watch(evaluation):
        if evaluation.round == number:
            what()

    return [watch]


def test_a_run_stays_in_its_directory_when_the_working_directory_changes(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    start("run", rounds=4, eval_every=1, checkpoint_every=0, callbacks=at_round(2, lambda: os.chdir(elsewhere)))
    assert not os.listdir(elsewhere)
    assert {"config.json", "metrics.csv", "summary.json", ASSIGNMENTS} <= set(os.listdir(tmp_path / "run"))
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_removed_config_is_put_back(tmp_path):
    options = {"eval_every": 1, "checkpoint_every": 0}
    callbacks = at_round(2, lambda: (tmp_path / "run" / "config.json").unlink())
    assert start(tmp_path / "run", rounds=4, callbacks=callbacks, **options).kept
    assert read_config(tmp_path / "run")["identity"]["algorithm"] == "fedavg"
    assert start(tmp_path / "run", rounds=6, **options).history["round"].tolist() == list(range(6))


def test_a_removed_directory_is_left_alone_and_what_another_run_made_of_it_too(tmp_path, caplog):
    path, options = tmp_path / "run", {"rounds": 4, "eval_every": 1, "checkpoint_every": 0}
    result = start(path, callbacks=at_round(2, lambda: shutil.rmtree(path)), **options)
    assert result.kept is None
    assert len(result.history["loss"]) == 4
    assert not path.exists()
    assert "was removed, or another run has taken it" in caplog.text

    def give_to_another():
        shutil.rmtree(path)
        start(path, seed=1, **options)

    def files():
        return {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}

    kept = {}
    lost = start(path, callbacks=at_round(2, lambda: (give_to_another(), kept.update(files()))), **options)
    assert lost.kept is None
    assert files() == kept
    assert start(path, seed=1, **options).kept


def test_where_no_checkpoint_fits_what_is_looked_at_is_left_all_the_same(tmp_path, monkeypatch, caplog):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_directory.simulation.checkpoints.Checkpoints, "save", full)
    result = start(tmp_path)
    assert result.kept is False
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 2
    assert (tmp_path / "metrics.csv").is_file()
    assert "cannot save round 2" in caplog.text


def test_what_cannot_be_written_beside_a_checkpoint_loses_no_checkpoint(tmp_path, caplog):
    start(tmp_path)
    for name in ("metrics.csv", ASSIGNMENTS):
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()
    result = start(tmp_path, rounds=4)
    assert result.kept
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 4
    assert {"cannot write metrics.csv", "cannot write assignments.npz"} <= {
        record.getMessage().partition(" in ")[0] for record in caplog.records
    }
    assert any("assignments.npz is damaged" in record.getMessage() for record in caplog.records)


def test_moves_are_written_before_the_checkpoint_that_they_belong_to(tmp_path, monkeypatch):
    """A kill in between lost them, without a word."""
    written = []
    save = run_directory.simulation.checkpoints.Checkpoints.save

    def watched(self, done, saved):
        written.append((tmp_path / ASSIGNMENTS).is_file())
        save(self, done, saved)

    monkeypatch.setattr(run_directory.simulation.checkpoints.Checkpoints, "save", watched)
    start(tmp_path)
    assert written
    assert all(written)


def test_who_lets_go_of_a_directory_that_is_anothers_by_now_leaves_it_the_lock(tmp_path):
    path = tmp_path / "own"
    path.mkdir()
    with taken(path) as still_ours:
        assert still_ours()
        shutil.rmtree(path)
        assert not still_ours()
        path.mkdir()
        other = taken(path)
        assert other.__enter__()()
    assert (path / ".lock").is_file()
    other.__exit__(None, None, None)
    assert not os.listdir(path)
