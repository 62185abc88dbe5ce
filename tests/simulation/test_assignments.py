"""Who was in which cluster: kept of each round in which somebody moved, and over an interruption."""

import numpy as np
import pytest

from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import ifca
from fedjax_cluster.simulation import assignments, segment
from fedjax_cluster.simulation.loop import simulate
from tests.federations import blobs


def run(rounds, **options):
    method = ifca(nn.linear(), clusters=2, local=local.sgd(0.1, batch_size=8, steps=1))
    return simulate(method, blobs(), rounds=rounds, eval_every=3, progress=False, **options)


@pytest.fixture(scope="module")
def result():
    return run(6)


@pytest.mark.slow
def test_the_rounds_are_those_in_which_somebody_moved(result):
    rounds, cluster = result.assignments
    moved = 1 + np.flatnonzero(result.history["num_changed"])
    assert set(moved) <= {1, *rounds.tolist()}
    assert rounds[-1] == 6
    np.testing.assert_array_equal(cluster[-1], result.labels)
    for done in (1, 2, 3):
        at = np.flatnonzero(rounds <= done)[-1]
        np.testing.assert_array_equal(cluster[at], run(done).labels, err_msg=f"after {done} rounds")


def test_they_survive_an_interruption_and_the_loss_of_their_file(result, tmp_path):
    run(2, run_dir=tmp_path)
    resumed = run(6, run_dir=tmp_path)
    for whole, part in zip(result.assignments, resumed.assignments, strict=True):
        np.testing.assert_array_equal(whole, part)
    (tmp_path / "assignments.npz").write_bytes(b"PK")
    assert run(6, run_dir=tmp_path).assignments.rounds.tolist() == [6]


def test_rounds_beyond_the_checkpoint_are_forgotten(tmp_path):
    path = tmp_path / "assignments.npz"
    kept = {1: np.zeros(3, np.int16), 4: np.asarray([0, 1, 1], np.int16)}
    assignments.write_moves(path, kept)
    assert sorted(assignments.read_moves(path, 4, 3)) == [1, 4]
    assert sorted(assignments.read_moves(path, 3, 3)) == [1]
    assert assignments.read_moves(path, 4, 5) == {}, "of another number of clients"


def test_very_many_are_thinned_and_the_last_stays(monkeypatch):
    monkeypatch.setattr(assignments, "MOST_KEPT", 8)
    labels = np.arange(9, dtype=np.int16)[:, None] * np.ones(2, np.int16)
    kept = assignments.with_moves({}, 10, labels)
    assert len(kept) <= 4
    assert max(kept) == 19
    assert all((kept[at] == at - 11).all() for at in kept)


@pytest.mark.slow
def test_of_too_many_clients_only_the_end_is_kept(monkeypatch):
    monkeypatch.setattr(segment, "MOST_FOLLOWED", 3)
    method = ifca(nn.linear(), clusters=2, local=local.sgd(0.1, batch_size=8, steps=2))
    result = simulate(method, blobs(), rounds=2, progress=False)
    assert result.assignments.rounds.tolist() == [2]


@pytest.mark.slow
def test_every_bit_of_the_file_may_be_damaged(tmp_path):
    """Compression, an archive's headers and a flag for a password raise errors of many kinds."""
    path = tmp_path / "assignments.npz"
    kept = {1: np.zeros(300, np.int16), 4: np.arange(300, dtype=np.int16) % 7}
    assignments.write_moves(path, kept)
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        found = assignments.read_moves(path, 4, 300)
        assert not found or all(np.array_equal(found[at], kept[at]) for at in (1, 4)), bit
