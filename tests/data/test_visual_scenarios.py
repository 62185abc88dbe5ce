import numpy as np
import pytest

from fedjax_cluster.data import digits, scenarios
from fedjax_cluster.types import DatasetInfo, Examples


def _points(count: int = 600, size: int = 21) -> Examples:
    """Black images with one white pixel in the middle."""
    x = np.zeros((count, size, size), np.uint8)
    x[:, size // 2, size // 2] = 255
    return Examples(x, np.zeros(count, np.int32), DatasetInfo("points", (size, size), 1))


def test_blur_spreads_a_point_into_a_bell():
    federation = scenarios.domains(_points(), clients=2, shares=(1, 0, 1), blur=2, clip=False)
    clean, blurred = federation.train.x[:, 0]
    np.testing.assert_array_equal(clean, _points().x[0] / 255)
    place = np.arange(21) - 10
    assert blurred.sum() == pytest.approx(1, abs=1e-3)
    for axis in (0, 1):
        assert (blurred.sum(axis=axis) * place**2).sum() == pytest.approx(4, rel=0.02)


def test_noise_has_the_strength_it_says():
    federation = scenarios.domains(_points(), clients=2, shares=(1, 1, 0), noise=0.5, clip=False)
    assert federation.info.group_names == ("clean", "noise")
    count = federation.train.num_examples[1]
    noise = federation.train.x[1, :count] - _points().x[0] / 255
    assert noise.std() == pytest.approx(0.5, rel=0.02)
    assert noise.mean() == pytest.approx(0, abs=0.01)
    assert federation.train.x.dtype == np.float32
    # Different for each image.
    assert abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.3


def test_clipped_noise_keeps_uint8():
    federation = scenarios.domains(digits(), clients=3, shares=(1, 1, 1), noise=2, blur=1)
    assert federation.train.x.dtype == np.uint8
    noisy = federation.train.x[1]
    # With σ = 2 about four values in five end at black or white.
    assert 0.7 < np.isin(noisy, (0, 255)).mean() < 0.95
    np.testing.assert_array_equal(federation.train.x[0], scenarios.rotated(digits(), clients=3, angles=(0,)).train.x[0])


def test_domains_leave_padding_black():
    federation = scenarios.domains(digits(), clients=19, shares=(1, 1, 1), clip=False)
    assert federation.train.num_examples.min() < federation.train.x.shape[1]
    for part in (federation.train, federation.test):
        beyond = np.arange(part.x.shape[1]) >= part.num_examples[:, None]
        assert not part.x[beyond].any()


def test_noise_and_blur_of_colour_images():
    grey = digits()
    colour = grey._replace(x=np.stack([grey.x] * 3, axis=-1), info=grey.info._replace(input_shape=(8, 8, 3)))
    blurred = scenarios.domains(colour, clients=2, shares=(0, 0, 1), blur=1).train.x
    np.testing.assert_array_equal(blurred[..., 0], blurred[..., 2])
    np.testing.assert_array_equal(blurred[..., 0], scenarios.domains(grey, clients=2, shares=(0, 0, 1), blur=1).train.x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"examples": digits()._replace(x=digits().x.astype(np.float32))}, "uint8 images"),
        ({"shares": (1, 1)}, "three domains"),
        ({"noise": -1}, "noise is -1"),
        ({"blur": float("nan")}, "blur is nan"),
    ],
)
def test_domains_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenarios.domains(**{"examples": digits(), "clients": 10, **arguments})


def test_users_are_clients(numbered):
    examples = numbered(250)
    ids = np.array([f"u{number % 20:02d}" for number in range(240)] + ["once"] + ["few"] * 4 + ["five"] * 5)
    federation = scenarios.users(examples, user_ids=ids, min_examples=5)
    assert len(federation.train.x) == 21
    for client, user in enumerate(["five"] + [f"u{number:02d}" for number in range(20)]):
        held = np.concatenate(
            [part.x[client, : part.num_examples[client], 2, 2] for part in (federation.train, federation.test)]
        )
        np.testing.assert_array_equal(np.sort(held), 1 + np.flatnonzero(ids == user))
    assert federation.group is None


def test_users_can_be_a_sample(numbered):
    ids = np.arange(250) // 10
    draws = [
        scenarios.users(numbered(250), user_ids=ids, clients=6, seed=seed, examples_per_client=4) for seed in (0, 0, 1)
    ]
    users = [set((draw.train.x[:, 0, 2, 2].astype(int) - 1) // 10) for draw in draws]
    assert len(users[0]) == 6
    for draw in draws:
        whose = (draw._replace(validation=None).train.x[:, 0, 2, 2].astype(int) - 1) // 10
        np.testing.assert_array_equal(draw._replace(validation=None).user_ids, whose)
    assert users[0] == users[1] != users[2]
    np.testing.assert_array_equal(draws[0].train.num_examples + draws[0].test.num_examples, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"user_ids": [1, 2]}, "one id for each"),
        ({"clients": 200}, "There are 100 users with 2 examples or more"),
        ({"min_examples": 1}, "min_examples is 1"),
        ({"min_examples": 1000}, "No user has 1000"),
        ({"examples_per_client": 1}, "examples_per_client is 1"),
    ],
)
def test_users_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        scenarios.users(digits(), **{"user_ids": np.arange(1797) % 100, **arguments})
