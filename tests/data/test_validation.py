import time

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster.data import check_federation, digits, from_arrays, scenarios
from fedjax_cluster.data.validation import check_examples
from fedjax_cluster.types import ClientData, DatasetInfo, Examples, Federation


def _federation(**train) -> Federation:
    parts = [
        ClientData(np.zeros((4, rows, 2), np.float32), np.zeros((4, rows), np.int32), np.full(4, rows, np.int32))
        for rows in (6, 3)
    ]
    info = DatasetInfo("test", (2,), 3)
    return Federation(parts[0]._replace(**train), parts[1], None, np.zeros(4, np.int32), info)


def _put(shape, dtype, place, value):
    array = np.zeros(shape, dtype)
    array[place] = value
    return array


def test_a_good_federation_passes():
    check_federation(_federation(), 4)
    check_federation(_federation()._replace(group=None))
    check_federation(_federation(x=jnp.zeros((4, 6, 2)), y=jnp.zeros((4, 6), int)), 1)


def test_labels_of_padding_are_not_checked():
    counts = np.array([6, 6, 5, 6], np.int32)
    check_federation(_federation(y=_put((4, 6), np.int32, (2, 5), -1), num_examples=counts))


@pytest.mark.parametrize("name", ["digits", b"digits"])
def test_a_name_in_place_of_examples_is_refused(name):
    for build in (scenarios.rotated, scenarios.shards, scenarios.users):
        with pytest.raises(ValueError, match=f"starts from examples, but was given a {type(name).__name__}: pass fc"):
            build(name, clients=4)
    with pytest.raises(ValueError, match="linear_regression draws its examples"):
        scenarios.linear_regression(name, clients=4)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"num_examples": np.array([6, 0, 6, 0], np.int32)}, "2 of 4 clients have no example in 'train': client 1, 3"),
        ({"num_examples": np.array([6, 7, 6, 6], np.int32)}, "`num_examples` gives client 1 7 examples .* 6 rows"),
        ({"num_examples": np.full(3, 6, np.int32)}, "there are 4 clients: give one integer for each"),
        ({"num_examples": np.full(4, 6.0)}, "give one integer"),
        ({"y": np.zeros((4, 5), np.int32)}, "give one y for each x"),
        ({"x": _put((4, 6, 2), np.float32, (2, 3, 1), np.nan)}, "x of 'train' holds NaN .* client 2"),
        ({"x": _put((4, 6, 2), np.float32, (3, 0, 0), -np.inf)}, "first in client 3"),
        ({"y": _put((4, 6), np.int32, (0, 1), 3)}, "between 0 and 3, but with 3 classes"),
        ({"y": _put((4, 6), np.int32, (0, 1), -1)}, "between -1 and 0"),
        ({"y": np.zeros((4, 6), np.float32)}, "integers from 0 on"),
        ({"x": np.zeros((4, 6, 3), np.float32)}, r"\[3\].*input_shape.*\[2\]"),
        (
            {"x": np.zeros((5, 6, 2)), "y": np.zeros((5, 6), int), "num_examples": np.full(5, 6)},
            "'test' has 4 clients, but 'train' has 5",
        ),
        ({"x": np.zeros((0, 6, 2)), "y": np.zeros((0, 6), int), "num_examples": np.full(0, 6)}, "no clients at all"),
    ],
)
def test_a_bad_federation_is_refused(train, message):
    with pytest.raises(ValueError, match=message):
        check_federation(_federation(**train))


def test_images_of_integers_are_refused_and_unscaled_floats_logged(caplog):
    images = np.random.default_rng(0).integers(0, 256, (30, 8, 8))
    with pytest.raises(ValueError, match=r"x holds images of dtype int32.*uint8"):
        from_arrays(images, np.zeros(30, int))
    good = from_arrays(images.astype(np.uint8), np.arange(30) % 3, np.arange(30) % 5)
    bad = good._replace(train=good.train._replace(x=good.train.x.astype(np.int32)))
    with pytest.raises(ValueError, match=r"x of 'train' holds images of dtype int32"):
        check_federation(bad)
    from_arrays(images / 255, np.zeros(30, int))
    from_arrays(np.zeros((30, 12), int), np.zeros((30, 12), int), num_classes=3, task="language")
    assert not caplog.records
    from_arrays(images.astype(float), np.zeros(30, int))
    assert "floats up to 255" in caplog.text


def test_one_hot_labels_are_refused():
    with pytest.raises(ValueError, match=r"one-hot.*argmax"):
        from_arrays(np.zeros((6, 2)), np.eye(3, dtype=int)[[0, 1, 2, 0, 1, 2]])


def test_a_federation_has_a_test_part_and_groups_of_whole_numbers():
    with pytest.raises(ValueError, match="'test' is a NoneType"):
        check_federation(_federation()._replace(test=None))
    with pytest.raises(ValueError, match="`group` has the dtype float"):
        check_federation(_federation()._replace(group=np.array([0, 1, np.nan, 1])))


def test_every_part_is_checked():
    good = _federation()
    bad = good.test._replace(num_examples=np.array([3, 3, 0, 3], np.int32))
    with pytest.raises(ValueError, match="no example in 'test': client 2"):
        check_federation(good._replace(test=bad))
    # Some clients may have nothing to choose by, but not all of them.
    check_federation(good._replace(validation=bad))
    with pytest.raises(ValueError, match="4 of 4 clients have no example in 'validation'"):
        check_federation(good._replace(validation=bad._replace(num_examples=np.zeros(4, np.int32))))
    with pytest.raises(ValueError, match="1 of 4 clients have no example in 'validation': client 2"):
        check_federation(good._replace(validation=bad._replace(num_examples=np.array([3, 3, -1, 0], np.int32))))
    with pytest.raises(ValueError, match="NaN"):
        check_federation(good._replace(validation=bad._replace(x=np.full_like(bad.x, np.nan))))


def test_opposite_infinities_do_not_hide_each_other():
    x = _put((4, 6, 2), np.float32, (1, 0), np.inf)
    x[1, 1] = -np.inf
    with pytest.raises(ValueError, match="4 such values"):
        check_federation(_federation(x=x))


def test_large_finite_values_pass():
    check_federation(_federation(x=np.full((4, 6, 2), 3e38)))


def test_regression_may_have_any_finite_y():
    info = DatasetInfo("line", (2,), 0, "regression")
    good = _federation(y=np.full((4, 6), -7.5, np.float32))._replace(info=info)
    check_federation(good)
    y = _put((4, 6), np.float32, (1, 2), np.nan)
    with pytest.raises(ValueError, match=r"y of 'train' holds NaN .* client 1"):
        check_federation(good._replace(train=good.train._replace(y=y)))


@pytest.mark.parametrize("group", [np.zeros(3), np.zeros((4, 1))])
def test_group_has_one_number_per_client(group):
    with pytest.raises(ValueError, match="`group` has the shape"):
        check_federation(_federation()._replace(group=group))


@pytest.mark.parametrize(("clusters", "message"), [(5, "at most 4 clusters"), (0, "at least 1"), (-2, "at least 1")])
def test_clusters_must_fit_the_clients(clusters, message):
    with pytest.raises(ValueError, match=message):
        check_federation(_federation(), clusters)


def test_seventy_thousand_images_take_no_time():
    clients = ClientData(
        np.zeros((70, 1000, 28, 28), np.uint8), np.zeros((70, 1000), np.int32), np.full(70, 1000, np.int32)
    )
    federation = Federation(clients, clients, None, None, DatasetInfo("large", (28, 28), 10))
    start = time.perf_counter()
    check_federation(federation)
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ("mnist", "was given a str"),
        (Examples(np.zeros((3, 2)), np.zeros(2, int), DatasetInfo("short", (2,), 2)), "give one y for each x"),
        (Examples(np.full((3, 2), np.nan), np.zeros(3, int), DatasetInfo("nan", (2,), 2)), "NaN"),
        (Examples(np.zeros((3, 2)), np.array([0, 1, 2]), DatasetInfo("many", (2,), 2)), "between 0 and 1"),
    ],
)
def test_bad_examples_are_refused(examples, message):
    with pytest.raises(ValueError, match=message):
        check_examples(examples)


def test_a_federation_is_no_source():
    with pytest.raises(ValueError, match="was given a Federation"):
        scenarios.rotated(scenarios.rotated(digits(), clients=4), clients=4)
