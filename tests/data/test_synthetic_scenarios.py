import numpy as np
import pytest

from fedjax_cluster.data import digits, scenarios


def test_linear_regression_has_the_lines_of_the_paper():
    federation = scenarios.linear_regression(clients=6, phi=40, examples_per_client=20_000)
    np.testing.assert_array_equal(federation.group, [0, 0, 1, 1, 2, 2])
    assert federation.info == ("linear_regression", (1,), 0, "regression", ("-40", "0", "40"), ())
    for client, angle in enumerate(np.deg2rad([-40, -40, 0, 0, 40, 40])):
        x, y = federation.train.x[client, :, 0], federation.train.y[client]
        assert x.min() >= 0
        assert x.max() == pytest.approx(np.cos(angle), rel=1e-3)
        assert x.mean() == pytest.approx(np.cos(angle) / 2, abs=0.01)
        slope, offset = np.polyfit(x, y, 1)
        assert slope == pytest.approx(np.tan(angle), abs=0.02)
        assert offset == pytest.approx(0, abs=0.01)
        assert np.var(y - slope * x - offset) == pytest.approx(0.04, rel=0.05)
    assert (federation.train.x[0] != federation.train.x[1]).any()


def test_linear_regression_without_noise_is_exact():
    federation = scenarios.linear_regression(clients=2, angles=(-10, 60), noise=0)
    np.testing.assert_allclose(
        federation.test.y, federation.test.x[..., 0] * np.tan(np.deg2rad([[-10], [60]])), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"phi": 0}, "phi is 0"),
        ({"phi": 90}, "phi is 90"),
        ({"angles": (0, 90)}, "between −90 and 90"),
        ({"angles": ()}, "between −90 and 90"),
        ({"noise": -1}, "noise is -1"),
        ({"clients": 2}, "2 clients are too few for 3"),
        ({"examples": digits()}, "draws its examples"),
    ],
)
def test_linear_regression_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenarios.linear_regression(**arguments)


def test_xor_is_easy_for_each_group_and_hard_for_both():
    federation = scenarios.xor(clients=4, examples_per_client=500)
    x, y = federation.train.x, federation.train.y
    right = x[..., 0] > 0
    upper, lower = federation.group == 0, federation.group == 1
    assert (right[upper] == y[upper]).mean() > 0.99
    assert (right[lower] != y[lower]).mean() > 0.99
    assert (x[upper, :, 1] > 0).mean() > 0.99
    assert (x[lower, :, 1] < 0).mean() > 0.99
    # Label and coordinates are uncorrelated over all, so no line does better than chance.
    centred = (y - y.mean()).ravel()
    for coordinate in range(2):
        assert abs(np.corrcoef(centred, x[..., coordinate].ravel())[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"examples": digits()}, "draws its examples"), ({"noise": -1}, "noise is -1"), ({"clients": 1}, "too few for 2")],
)
def test_xor_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenarios.xor(**arguments)
