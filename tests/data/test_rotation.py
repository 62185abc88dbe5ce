import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage

from fedjax_cluster.data import digits
from fedjax_cluster.data.rotation import rotate

ANGLES = (15, 105, 195, 285, 33.3, -20, 400)


def _images(count: int = 20, size: int = 28, margin: int = 0) -> np.ndarray:
    images = np.zeros((count, size, size), np.uint8)
    inner = slice(margin, size - margin)
    images[:, inner, inner] = np.random.default_rng(0).integers(256, size=images[:, inner, inner].shape)
    return images


@pytest.mark.parametrize("quarters", [-1, 0, 1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(3, 7, 7), (3, 8, 8, 3)])
def test_right_angles_are_exact_and_counter_clockwise(quarters, shape):
    images = np.random.default_rng(1).integers(256, size=shape).astype(np.uint8)
    np.testing.assert_array_equal(rotate(images, 90 * quarters), np.rot90(images, quarters, axes=(1, 2)))


@pytest.mark.parametrize("angle", ANGLES)
def test_other_angles_equal_scipy(angle):
    images = _images()
    expected = [
        ndimage.rotate(image.astype(float), angle, reshape=False, order=1, mode="grid-constant") for image in images
    ]
    difference = np.abs(rotate(images, angle) - np.array(expected))
    assert difference.max() <= 0.5 + 1e-3  # half a level by rounding


@pytest.mark.parametrize("angle", ANGLES)
def test_other_angles_equal_pillow(angle):
    # Pillow cuts off what falls half outside and rounds down; with a black margin only the latter remains.
    images = _images(margin=5)
    expected = np.array(
        [np.asarray(Image.fromarray(image).rotate(angle, Image.Resampling.BILINEAR)) for image in images], int
    )
    assert np.abs(rotate(images, angle) - expected).max() <= 1


def test_small_angles_turn_the_way_of_right_angles():
    images, _, _ = digits()
    right = rotate(images, 90).astype(float)
    assert np.abs(rotate(images, 85) - right).mean() < 0.5 * np.abs(rotate(images, -85) - right).mean()


def test_channels_turn_alike():
    image = _images(4)
    colour = np.stack([image, 255 - image, image // 2], axis=-1)
    turned = rotate(colour, 15)
    for channel in range(3):
        np.testing.assert_array_equal(turned[..., channel], rotate(colour[..., channel], 15))


@given(angle=st.floats(-720, 720), count=st.integers(0, 5))
def test_shape_dtype_and_range_are_kept(angle, count):
    images = _images(count, size=9)
    turned = rotate(images, angle)
    assert turned.shape == images.shape
    assert turned.dtype == np.uint8
    middle = rotate(np.full((1, 9, 9), 200, np.uint8), angle)[0, 4, 4]
    assert middle == 200


def test_floats_stay_floats_and_are_not_rounded():
    images = (_images(3) / 255).astype(np.float32)
    turned = rotate(images, 15)
    assert turned.dtype == np.float32
    assert len(np.unique(turned)) > 256


def test_the_source_is_left_alone():
    images = _images(3)
    images.flags.writeable = False
    for angle in (0, 180, 15):
        assert not np.shares_memory(rotate(images, angle), images)


def test_block_boundaries_do_not_show():
    images = _images(2500, size=6)
    whole = rotate(images, 15)
    np.testing.assert_array_equal(whole[1000:1100], rotate(images[1000:1100], 15))
    np.testing.assert_array_equal(whole[2048:], rotate(images[2048:], 15))


def test_images_that_are_not_square():
    images = np.arange(12, dtype=np.uint8).reshape(1, 3, 4)
    np.testing.assert_array_equal(rotate(images, 180), images[:, ::-1, ::-1])
    assert rotate(images, 10).shape == (1, 3, 4)
    with pytest.raises(ValueError, match="3 × 4"):
        rotate(images, 270)
    with pytest.raises(ValueError, match=r"\[N, H, W\]"):
        rotate(np.zeros((5, 2)), 90)
