"""A run directory with damaged, exchanged or missing files: the same result, or one clear line."""

import functools
import json
import random
import shutil

import chex
import jax
import numpy as np
import pytest

from fedjax_cluster import files, local, nn
from fedjax_cluster.algorithms import cfl, cfl_gp
from fedjax_cluster.simulation import run_directory
from fedjax_cluster.simulation.checkpoints import Saved
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.run_directory import RunDirectory, read_config, read_history
from tests.federations import blobs

TRAINING = local.sgd(0.3, batch_size=5, steps=2)


@functools.cache
def method(**options):
    return cfl_gp(nn.linear(), **{"clusters": 2, "local": TRAINING, **options})


def events_of(result):
    return [(event.round, jax.tree.map(np.asarray, dict(event.content))) for event in result.events]


def run_of_two_checkpoints(path):
    """With events, in rounds of which both checkpoints know."""
    algorithm = cfl(nn.linear(), clusters=2, local=TRAINING, epsilon_1=9.0, epsilon_2=0.0, gamma_max=0.0, first_round=1)
    for rounds in (2, 4):
        result = simulate(algorithm, blobs(), rounds=rounds, eval_every=2, run_dir=path)
    return algorithm, result


def check_the_same_or_refused(algorithm, path, whole):
    """Resumed, the run has the same final result; or it is refused in one line."""
    try:
        found = simulate(algorithm, blobs(), rounds=4, eval_every=2, run_dir=path)
    except ValueError as error:
        if "\n" in str(error):
            raise
        return False
    chex.assert_trees_all_equal(found.state, whole.state)
    chex.assert_trees_all_equal(events_of(found), events_of(whole))
    for name, column in whole.history.items():
        if name != "seconds":
            np.testing.assert_array_equal(found.history[name], column)
    timed = {"compile_seconds", "run_seconds", "client_rounds_per_second"}
    assert {n: v for n, v in found.summary.items() if n not in timed} == {
        n: v for n, v in json.loads(json.dumps(files.plain(whole.summary))).items() if n not in timed
    }
    return True


def damages(path, count):
    """Flips of one bit, truncations, deletions, and exchanges of two files."""
    draw = random.Random(0)
    every = sorted(file for file in path.rglob("*") if file.is_file())
    flips = [("flip", file, draw.randrange(max(1, 8 * file.stat().st_size))) for file in every for _ in range(3)]
    cuts = [("cut", file, draw.randrange(file.stat().st_size or 1)) for file in every]
    swaps = [("swap", *draw.sample(every, 2)) for _ in range(2 * len(every))]
    found = [*flips, *cuts, *swaps, *(("delete", file, None) for file in every)]
    draw.shuffle(found)
    return found[:count]


def damage(kind, file, more):
    data = bytearray(file.read_bytes())
    if kind == "delete":
        file.unlink()
    elif kind == "swap":
        other = more.read_bytes()
        more.write_bytes(data)
        file.write_bytes(other)
    elif kind == "cut":
        file.write_bytes(data[:more])
    elif data:
        data[more // 8] ^= 1 << more % 8
        file.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("count", [12, pytest.param(400, marks=pytest.mark.slow)])
def test_a_damaged_directory_gives_the_same_result_or_one_line(tmp_path, count):
    algorithm, whole = run_of_two_checkpoints(tmp_path / "run")
    assert len(whole.events) > 0
    taken_up = 0
    for kind, file, more in damages(tmp_path / "run", count):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "run", copy)
        moved = copy / more.relative_to(tmp_path / "run") if kind == "swap" else more
        damage(kind, copy / file.relative_to(tmp_path / "run"), moved)
        taken_up += check_the_same_or_refused(algorithm, copy, whole)
        shutil.rmtree(copy)
    assert taken_up >= count / 3


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(tmp_path, caplog):
    algorithm, whole = run_of_two_checkpoints(tmp_path)
    for file in (tmp_path / "checkpoints" / "4" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"damaged")
    assert check_the_same_or_refused(algorithm, tmp_path, whole)
    assert "damaged checkpoint of round 4" in caplog.text
    assert "going on from that of round 2" in caplog.text
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == ["4-0"]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "4"}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["state", "history", "seal.json", "."])
def test_an_older_state_or_history_in_the_newest_ones_place_is_noticed(tmp_path, part):
    algorithm, whole = run_of_two_checkpoints(tmp_path)
    steps = tmp_path / "checkpoints"
    if (steps / "2" / part).is_dir():
        shutil.rmtree(steps / "4" / part)
        shutil.copytree(steps / "2" / part, steps / "4" / part)
    else:
        shutil.copy(steps / "2" / part, steps / "4" / part)
    assert check_the_same_or_refused(algorithm, tmp_path, whole)
    assert (tmp_path / "damaged" / "4-0").exists()


def test_without_a_whole_checkpoint_the_run_is_refused(tmp_path):
    algorithm, _ = run_of_two_checkpoints(tmp_path)
    for step in ("2", "4"):
        (tmp_path / "checkpoints" / step / "seal.json").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be taken up: damaged"):
        simulate(algorithm, blobs(), rounds=5, eval_every=2, run_dir=tmp_path)


@pytest.mark.slow
def test_a_model_of_another_size_is_no_damage_that_is_passed_over(tmp_path, monkeypatch):
    simulate(method(), blobs(), rounds=3, run_dir=tmp_path)
    monkeypatch.setattr(run_directory, "differences", lambda *arguments, **options: [])
    with pytest.raises(ValueError, match="of a model of another size"):
        simulate(method(clusters=3), blobs(), rounds=5, run_dir=tmp_path)


def test_metrics_and_summary_are_written_again_and_never_read_as_results(tmp_path):
    algorithm, whole = run_of_two_checkpoints(tmp_path)
    metrics = (tmp_path / "metrics.csv").read_bytes()
    (tmp_path / "metrics.csv").write_text("round,loss\n0,x\n")
    (tmp_path / "summary.json").write_text("[1]")
    assert read_history(tmp_path)["loss"].tolist() == whole.history["loss"].tolist()
    assert check_the_same_or_refused(algorithm, tmp_path, whole)
    assert (tmp_path / "metrics.csv").read_bytes() == metrics
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 4


def test_a_file_in_a_directorys_place_is_said(tmp_path):
    simulate(method(), blobs(), rounds=2, run_dir=tmp_path)
    (tmp_path / "plots").write_text("")
    with pytest.raises(ValueError, match=r"plots is a file"):
        simulate(method(), blobs(), rounds=3, run_dir=tmp_path)


@pytest.mark.parametrize("name", ["sean", "", "se"])
def test_a_seal_under_a_damaged_name_is_no_missing_seal(name):
    content = files.sealed({"rounds": 4, "accuracy": 0.5})
    assert files.unsealed(content) == {"rounds": 4, "accuracy": 0.5} == files.unsealed({"rounds": 4, "accuracy": 0.5})
    content[name] = content.pop("seal")
    with pytest.raises(ValueError, match="another name"):
        files.unsealed(content)


def test_events_of_a_version_that_kept_no_digests_are_sealed_by_the_next_checkpoint(tmp_path):
    """They were read once, and left out of all later checkpoints."""
    _, whole = run_of_two_checkpoints(tmp_path / "run")
    directory = RunDirectory(tmp_path / "run", read_config(tmp_path / "run")["identity"], None, 8)
    old = Saved(whole.state, whole.history)
    assert len(directory.read_events(old)) == len(whole.events) > 0
    assert len(directory.read_events(old._replace(events=directory._events))) == len(whole.events)
