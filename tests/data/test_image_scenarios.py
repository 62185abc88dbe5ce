import time

import numpy as np
import pytest

from fedjax_cluster.data import digits, scenarios
from fedjax_cluster.data.rotation import rotate
from fedjax_cluster.types import DatasetInfo, Examples

EIGHT = (0, 15, 90, 105, 180, 195, 270, 285)


def test_rotated_turns_each_group_by_its_angle():
    examples = digits()
    upright = scenarios.rotated(examples, clients=16, angles=(0,), seed=5)
    turned = scenarios.rotated(examples, clients=16, angles=EIGHT, seed=5)
    for client, angle in enumerate(np.repeat(EIGHT, 2)):
        for part, flat in ((turned.train, upright.train), (turned.test, upright.test)):
            np.testing.assert_array_equal(part.x[client], rotate(flat.x[client], angle))


@pytest.mark.parametrize(
    ("angles", "names", "group"),
    [
        (EIGHT, ("0°/15°", "90°/105°", "180°/195°", "270°/285°"), [0, 0, 1, 1, 2, 2, 3, 3]),
        ((350, 5, 180), ("350°/5°", "180°"), [0, 0, 1]),
        ((180, -10, 10), ("180°", "-10°/10°"), [0, 1, 1]),
        ((0, 20.5, 41), ("0°", "20.5°", "41°"), [0, 1, 2]),
        ((0, 20, 40), ("0°/20°/40°",), [0, 0, 0]),
        (tuple(range(0, 360, 15)), ("/".join(f"{angle}°" for angle in range(0, 360, 15)),), [0] * 24),
        ((7,), ("7°",), [0]),
    ],
)
def test_rotated_pairs_neighbouring_angles(angles, names, group, numbered):
    federation = scenarios.rotated(numbered(200), clients=len(angles), angles=angles, groups="pairs")
    assert federation.info.group_names == names
    np.testing.assert_array_equal(federation.group, group)


def test_rotated_groups():
    by_angle = scenarios.rotated(digits(), clients=10, angles=(0, 15, 90))
    assert by_angle.info.group_names == ("0°", "15°", "90°")
    np.testing.assert_array_equal(by_angle.group, [0] * 4 + [1] * 3 + [2] * 3)
    open_groups = scenarios.rotated(digits(), clients=10, groups="none")
    assert open_groups.group is None
    np.testing.assert_array_equal(open_groups.train.x, scenarios.rotated(digits(), clients=10).train.x)


def test_rotated_with_label_skew(numbered):
    examples = numbered(2000)

    def largest_share(**arguments):
        federation = scenarios.rotated(examples, clients=10, angles=(0, 180), **arguments)
        return np.mean([np.bincount(labels).max() / len(labels) for labels in federation.train.y])

    assert largest_share(alpha=0.5) > 2 * largest_share()
    free = scenarios.rotated(examples, clients=10, angles=(0, 180), alpha=1.0, client_sizes="free")
    assert np.ptp(free.train.num_examples) > 20
    assert np.sum(free.train.num_examples) + np.sum(free.test.num_examples) == 2000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 3}, "3 clients are too few for 4 angles.*at least 4"),
        ({"angles": ()}, "one or more"),
        ({"angles": (0, float("nan"))}, "one or more"),
        ({"angles": (0, 360)}, "same angle twice"),
        ({"groups": "pair"}, "'pairs'"),
        ({"alpha": -1}, "alpha is -1"),
        ({"alpha": 1, "client_sizes": "any"}, "client_sizes is 'any'"),
        ({"alpha": 1, "min_examples": 100_000}, "client_sizes are 'equal'"),
        ({"min_examples": 100_000}, "min_examples=100000 goes with alpha"),
        ({"angles": (0, 1e30)}, "between -360 and 360"),
        ({"client_sizes": "free"}, "goes with alpha"),
    ],
)
def test_rotated_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenarios.rotated(digits(), **{"clients": 8, **arguments})


def test_rotated_is_fast_enough():
    count = 70_000
    examples = Examples(
        np.ones((count, 28, 28, 1), np.uint8), np.zeros(count, np.int32), DatasetInfo("large", (28, 28, 1), 10)
    )
    start = time.perf_counter()
    scenarios.rotated(examples, clients=128, angles=EIGHT)
    assert time.perf_counter() - start < 3.0


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.0])
def test_mixture_turns_the_share_it_says(kappa):
    # An image of which only the first row is bright shows which way it is up.
    x = np.zeros((3000, 4, 4), np.uint8)
    x[:, 0] = 255
    examples = Examples(x, np.zeros(3000, np.int32), DatasetInfo("bars", (4, 4), 1))
    federation = scenarios.mixture(examples, kappa=kappa)
    upright = (federation.train.x[:, :, 0] == 255).all(axis=-1)
    upside_down = (federation.train.x[:, :, -1] == 255).all(axis=-1)
    filled = np.arange(upright.shape[1]) < federation.train.num_examples[:, None]
    np.testing.assert_array_equal(upright ^ upside_down, filled)
    share = upright.sum(axis=1) / federation.train.num_examples
    np.testing.assert_array_equal(share[:8], [1] * 4 + [0] * 4)
    spread = np.sqrt(kappa * (1 - kappa) / 175)
    np.testing.assert_allclose(share[8:], kappa, atol=4 * spread)
    if kappa == 0.3:
        assert len(np.unique(share[8:])) > 1


@pytest.mark.parametrize("kappa", [-0.1, 1.1, float("nan")])
def test_mixture_refuses(kappa):
    with pytest.raises(ValueError, match="kappa"):
        scenarios.mixture(digits(), kappa=kappa)


def test_mixed_datasets_reads_the_paper_as_stated(numbered):
    examples = [numbered(640), numbered(320)]
    federation = scenarios.mixed_datasets(examples, clients=32)
    np.testing.assert_array_equal(np.bincount(federation.group), [4, 4, 4, 4, 16])
    assert federation.info.group_names[3:] == ("numbered 270°/285°", "numbered")
    assert federation.info.num_classes == 10
    np.testing.assert_array_equal(federation.train.num_examples, [28] * 16 + [14] * 16)


def test_mixed_datasets_options(numbered):
    examples = [numbered(400), numbered(300, num_classes=4), numbered(260)]
    angles = [(0, 90), (0, 15), (180,)]

    def build(**arguments):
        return scenarios.mixed_datasets(examples, clients=16, angles=angles, **{"shares": (2, 1, 1), **arguments})

    np.testing.assert_array_equal(np.bincount(build().group), [4, 4, 4, 4])
    np.testing.assert_array_equal(np.bincount(build(groups="angles").group), [4, 4, 2, 2, 4])
    np.testing.assert_array_equal(np.bincount(build(groups="datasets").group), [8, 4, 4])
    np.testing.assert_array_equal(np.bincount(build(groups="datasets", shares=(1, 1, 6)).group), [2, 2, 12])
    separate = build(labels="separate")
    assert separate.info.num_classes == 24
    labels = [np.unique(separate.train.y[separate.group == group, :30]) for group in range(4)]
    np.testing.assert_array_equal(labels[0], range(10))
    np.testing.assert_array_equal(labels[2], range(10, 14))
    np.testing.assert_array_equal(labels[3], range(14, 24))


def test_mixed_datasets_deals_each_set_differently(numbered):
    first, second = np.split(scenarios.mixed_datasets([numbered(80)] * 2, clients=8, angles=[(0,), (0,)]).train.x, 2)
    assert (first != second).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"examples": digits()}, "two or more data sets"),
        ({"examples": [digits()]}, "two or more data sets"),
        ({"examples": [digits(), digits()._replace(x=digits().x[:, :4])]}, r"\[8, 8\]; digits: uint8 \[4, 8\]"),
        ({"clients": 14}, "7 of 14 clients, too few for its 8 angles"),
        ({"shares": (1,)}, "1 entries for 2"),
        ({"shares": (1, -1)}, "numbers from 0 on"),
        ({"shares": (1, 1000)}, "without any"),
        ({"angles": [(0,)]}, "1 entries for 2"),
        ({"angles": [0, 90]}, "it must be a list of lists"),
        ({"groups": "none"}, "'datasets'"),
        ({"labels": "both"}, "'separate'"),
    ],
)
def test_mixed_datasets_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenarios.mixed_datasets(**{"examples": [digits(), digits()], "clients": 20, **arguments})
