import numpy as np
import pytest

from fedjax_cluster.data import digits, from_arrays, joined
from fedjax_cluster.experiments.config import RunConfig, build_federation


def source(count, classes, offset=0, shape=(2, 2), name="source"):
    x = np.arange(count, dtype=np.uint8)[:, None, None] * np.ones(shape, np.uint8) + offset
    return from_arrays(x, np.arange(count) % classes, num_classes=classes, name=name)


def test_each_data_set_has_classes_of_its_own():
    both = joined([source(6, 3, name="a"), source(4, 2, offset=100, name="b")])
    np.testing.assert_array_equal(both.y, [0, 1, 2, 0, 1, 2, 3, 4, 3, 4])
    np.testing.assert_array_equal(both.x[:, 0, 0], [0, 1, 2, 3, 4, 5, 100, 101, 102, 103])
    assert (both.info.name, both.info.num_classes, both.info.input_shape) == ("a+b", 5, (2, 2))
    assert both.y.dtype == np.int32


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="joined needs two or more"):
        joined([source(4, 2)])
    with pytest.raises(ValueError, match="differ in their inputs"):
        joined([source(4, 2), source(4, 2, shape=(3, 3))])
    texts = from_arrays(np.zeros((4, 3), np.int32), np.zeros((4, 3), np.int32), num_classes=5, name="texts")
    with pytest.raises(ValueError, match="'texts' has no single label"):
        joined([texts, texts])


def test_a_configuration_joins_data_sets_for_scenarios_that_divide_one():
    """Eight clusters of 17 of the 20 classes of two data sets, as Fig. 5(c) of gradient-and-loss CFL has 40 of 47."""
    config = RunConfig(
        scenario="class_overlap",
        dataset="digits+digits",
        clients=16,
        scenario_options={"num_groups": 8, "classes_per_group": 17},
    )
    federation = build_federation(config)
    assert federation.info.num_classes == 20
    labels, count = np.asarray(federation.train.y), federation.train.num_examples
    of_group = [
        np.unique(np.concatenate([labels[client, : count[client]] for client in np.flatnonzero(federation.group == g)]))
        for g in range(8)
    ]
    assert all(len(found) <= 17 for found in of_group)
    assert len(np.unique(np.concatenate(of_group))) == 20
    assert len(digits().y) * 2 == count.sum() + federation.test.num_examples.sum()
