"""The matrices of wireless channels: their physics, and those of files."""

import flax.linen as linen
import numpy as np
import pytest
from scipy.io import savemat

import fedjax_cluster as fc
from fedjax_cluster.data import digits, scenarios
from fedjax_cluster.data.scenarios import wireless


def test_the_profiles_are_tables_of_equal_columns():
    """As many paths as 3GPP TR 38.901 has in its Tables 7.7.1-1 to 7.7.1-5; no power above a decibel of all."""
    shapes = {name: len(profile.powers) for name, profile in wireless.PROFILES.items()}
    assert shapes == {"A": 23, "B": 23, "C": 24, "D": 14, "E": 15}
    for profile in wireless.PROFILES.values():
        assert len(profile.delays) == len(profile.angles) == len(profile.powers)
        assert -0.5 < profile.powers.max() <= 0
        assert profile.delays[0] == 0
        assert (np.abs(profile.angles) <= 180).all()
    assert np.square(wireless.RAYS).mean() == pytest.approx(1, abs=1e-3)  # the spread of a cluster is that of its rays


def test_power_departs_at_the_delays_of_the_profile():
    """Averaged over fading, a delay has Σ P sinc²(d − τ), whatever the angles."""
    federation = scenarios.channels(clients=2, profiles=("C",), size=16, examples_per_client=3000)
    x = federation.train.x.astype(float)
    found = np.square(x).sum(axis=(2, 3)).mean(axis=(0, 1))
    profile = wireless.PROFILES["C"]
    taps = np.sinc(np.arange(16) - 2.0 * profile.delays[:, None])  # 100 ns at 20 MHz are two taps
    expected = 10 ** (profile.powers / 10) @ np.square(taps)
    # Each matrix is scaled by its own power, so that the parts are nearly, not exactly, those of the mean power.
    np.testing.assert_allclose(found / found.sum(), expected / expected.sum(), rtol=0.1, atol=0.004)


def test_a_line_of_sight_is_one_angle_and_one_delay():
    federation = scenarios.channels(clients=2, profiles=("D", "A"), size=32, examples_per_client=200)
    power = np.square(federation.train.x).sum(axis=2)
    share = power.max(axis=(2, 3)) / power.sum(axis=(2, 3))
    # A bearing between two of the 32 angles divides the path among both.
    assert np.median(share[0]) > 0.6
    assert np.median(share[1]) < 0.5
    delay = power.sum(axis=2).argmax(axis=2)
    assert (delay[0] == 0).mean() > 0.95
    assert federation.info.group_names == ("CDL-D", "CDL-A")


def test_the_angle_is_the_terminals():
    """The line of sight of CDL-D departs at the bearing: uniform within ±60°, seen by antennas half a wave apart."""
    federation = scenarios.channels(clients=1, profiles=("D",), size=64, examples_per_client=4000)
    place = np.square(federation.train.x[0]).sum(axis=(1, 3)).argmax(axis=1)
    angle = np.rad2deg(np.arcsin((place - 32) / 32))
    assert np.abs(angle).max() < 63
    np.testing.assert_allclose(np.quantile(angle, (0.25, 0.5, 0.75)), (-30, 0, 30), atol=4)


def test_every_matrix_has_a_mean_square_of_one_and_is_its_own_target():
    train = scenarios.channels(clients=5, size=8, examples_per_client=12).train
    np.testing.assert_allclose(np.square(train.x).mean(axis=(2, 3, 4)), 1, rtol=1e-5)
    np.testing.assert_array_equal(train.x, train.y)
    assert len(np.unique(train.x.reshape(40, -1), axis=0)) == 40


def test_files_become_groups(tmp_path):
    """COST2100's have [0, 1] with zero at 0.5; signed ones stay as they are."""
    indoor = np.linspace(0, 1, 40 * 32, dtype=np.float32).reshape(40, 32)
    outdoor = np.random.default_rng(0).normal(size=(30, 2, 4, 4))
    savemat(tmp_path / "DATA_Htrainin.mat", {"HT": indoor})
    np.save(tmp_path / "outdoor.npy", outdoor)
    files = [str(tmp_path / name) for name in ("DATA_Htrainin.mat", "outdoor.npy")]
    federation = scenarios.channels(clients=3, files=files)
    np.testing.assert_array_equal(federation.group, [0, 0, 1])
    assert federation.info == ("channels", (2, 4, 4), 0, "reconstruction", ("DATA_Htrainin", "outdoor"), ())
    rows = [
        np.concatenate([part.x[client, : part.num_examples[client]] for part in (federation.train, federation.test)])
        for client in range(3)
    ]
    assert [len(of_client) for of_client in rows] == [20, 20, 30]
    first = np.sort(np.concatenate(rows[:2]).reshape(40, 32), axis=0)
    np.testing.assert_allclose(first, indoor - 0.5, atol=1e-6)
    np.testing.assert_allclose(np.sort(rows[2].reshape(30, -1), axis=0), np.sort(outdoor.reshape(30, -1), axis=0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"profiles": ("A", "F")}, "not different letters from A to E"),
        ({"profiles": ("a", "A")}, "not different letters"),
        ({"profiles": ()}, "not different letters"),
        ({"clients": 4}, "4 clients are too few for 5"),
        ({"size": 1}, "size is 1"),
        ({"examples": digits()}, "draws its examples"),
        ({"files": ("nowhere.npy",)}, "files: 'nowhere.npy' is not there"),
        ({"files": ("nowhere.mat",)}, "files: 'nowhere.mat' is not there"),
    ],
)
def test_channels_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenarios.channels(**arguments)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((5, 30)), r"holds float64 of shape \[5, 30\]"),
        (np.zeros(32), "real and imaginary parts of square matrices"),
        (np.zeros((5, 32), complex), "holds complex128"),
        (np.zeros((0, 32)), r"shape \[0, 32\]"),
    ],
)
def test_files_of_other_shapes_are_refused(values, message, tmp_path):
    np.save(tmp_path / "one.npy", values)
    with pytest.raises(ValueError, match=message):
        scenarios.channels(files=[str(tmp_path / "one.npy")], clients=2)


def test_files_that_do_not_agree_or_cannot_be_read_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((9, 32)))
    np.save(tmp_path / "b.npy", np.zeros((9, 72)))
    with pytest.raises(ValueError, match="different shapes"):
        scenarios.channels(files=[str(tmp_path / "a.npy"), str(tmp_path / "b.npy")], clients=2)
    (tmp_path / "c.npy").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        scenarios.channels(files=[str(tmp_path / "c.npy")], clients=2)
    savemat(tmp_path / "two.mat", {"HT": np.zeros((4, 32)), "HF": np.zeros(3)})
    with pytest.raises(ValueError, match="2 variables, HT, HF"):
        scenarios.channels(files=[str(tmp_path / "two.mat")], clients=2)


@pytest.mark.parametrize("name", ["damaged.mat", "damaged.npy"])
@pytest.mark.parametrize("content", [b"", b"x" * 20, b"nothing" * 100])
def test_damaged_files_are_refused(name, content, tmp_path):
    """Their readers raise errors of many kinds."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"files: .* cannot be read"):
        scenarios.channels(files=[str(tmp_path / name)], clients=2)


def test_an_archive_is_refused(tmp_path):
    np.savez(tmp_path / "all.npz", x=np.zeros((4, 32)))
    with pytest.raises(ValueError, match="an archive of several arrays"):
        scenarios.channels(files=[str(tmp_path / "all.npz")], clients=2)


class Narrow(linen.Module):
    """A linear autoencoder of eight numbers."""

    @linen.compact
    def __call__(self, x):
        code = linen.Dense(8)(x.reshape(len(x), -1))
        return linen.Dense(x[0].size, name="output")(code).reshape(x.shape)


@pytest.mark.slow
def test_gradients_tell_a_line_of_sight_from_scattering():
    federation = scenarios.channels(clients=6, profiles=("B", "D"), size=8, examples_per_client=100)
    local = fc.local.sgd(0.05, batch_size=20, epochs=1)
    method = fc.algorithms.cfl_gp(fc.nn.from_flax(Narrow(), loss="mse"), clusters=2, local=local, every=1)
    result = fc.simulate(method, federation, rounds=6, progress=False, eval_every=3)
    assert result.summary["adjusted_rand_index"] == 1
    assert result.history["test_loss"][-1] < result.history["test_loss"][2]
