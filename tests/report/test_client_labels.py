import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from fedjax_cluster.data import digits, scenarios
from fedjax_cluster.report import style
from fedjax_cluster.report.client_labels import client_labels, label_counts
from fedjax_cluster.types import ClientData


def heat(figure):
    """[labels, clients] of the heat map; 0 where nothing is drawn."""
    return figure.axes[1].images[0].get_array().filled(0)


def test_counts_leave_padding_out():
    y = np.array([[2, 0, 2, 0], [1, 0, 0, 0]], np.int32)
    np.testing.assert_array_equal(label_counts(ClientData(None, y, np.array([3, 1])), 3), [[1, 0, 2], [0, 1, 0]])


def test_clients_stand_by_group_with_their_shares_and_sizes(check_layout):
    counts = np.array([[6, 2], [0, 4], [5, 5], [1, 0]])
    figure = client_labels(counts, np.array([1, 0, 1, 0]), ("sun", "rain"))
    np.testing.assert_allclose(heat(figure), [[0, 1, 0.75, 0.5], [1, 0, 0.25, 0.5]])
    assert figure.axes[1].images[0].get_array().mask.tolist() == [
        [True, False, False, False],
        [False, True, False, False],
    ]
    assert [tick.get_text() for tick in figure.axes[1].get_xticklabels()] == ["1", "3", "0", "2"]
    values, edges, _ = figure.axes[0].patches[0].get_data()
    np.testing.assert_array_equal(values, [4, 1, 8, 10])
    np.testing.assert_array_equal(edges, np.arange(5) - 0.5)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["sun", "rain"]
    strip = [patch for patch in figure.axes[1].patches if isinstance(patch, Rectangle)]
    colors = {round(patch.get_x() + 0.5): to_hex(patch.get_facecolor()).upper() for patch in strip}
    assert colors == {0: style.COLORS[0], 1: style.COLORS[0], 2: style.COLORS[1], 3: style.COLORS[1]}
    # Above the labels, not on them.
    assert max(patch.get_y() + patch.get_height() for patch in strip) < -0.5
    check_layout(figure)


def test_without_groups_few_clients_keep_their_order_and_many_stand_by_label(check_layout):
    few = client_labels([[0, 3], [3, 0], [1, 2]])
    np.testing.assert_allclose(heat(few)[0], [0, 1, 1 / 3])
    assert not few.legends
    check_layout(few)
    federation = scenarios.shards(digits(), clients=80, shards_per_client=1)
    many = client_labels(label_counts(federation.train, 10))
    frequent = heat(many).argmax(axis=0)
    assert (np.diff(frequent) >= 0).all()
    assert many.axes[1].get_xlabel() == "Client, by most frequent label"
    check_layout(many)


def test_equal_shares_look_equal():
    """Chance among equal shares takes a small part of the scale; a single label takes all of it."""
    assert client_labels(np.full((5, 10), 7)).axes[1].images[0].get_clim() == (0, 0.4)
    assert client_labels(np.eye(10)).axes[1].images[0].get_clim() == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clients", "classes", "groups"), [(1, 1, 1), (3, 2, 0), (17, 10, 2), (20, 62, 20), (1500, 62, 0), (400, 10, 5)]
)
def test_all_sizes_are_one_column_wide_and_readable(clients, classes, groups, check_layout):
    counts = np.random.default_rng(0).integers(0, 5, size=(clients, classes)) + 1
    figure = client_labels(counts, np.arange(clients) % groups if groups else None)
    assert figure.get_figwidth() == style.SINGLE
    check_layout(figure)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2],), r"shape \(2,\)"),
        ((np.zeros((0, 3)),), r"shape \(0, 3\)"),
        (([[1, 2]], [0, 1]), "counts has 1 clients"),
        (([[1, -2]],), "negative"),
        (([[1, np.nan]],), "not finite"),
        (([[1, 2], [0, 0]],), "client 1 has no examples"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        client_labels(*arguments)


@pytest.mark.parametrize("y", [np.zeros((2, 3, 5), np.int32), np.zeros((2, 3), np.float32)])
def test_labels_that_are_no_single_class_are_not_counted(y):
    with pytest.raises(ValueError, match=r"only one whole number an example, \[M, N\], is counted"):
        label_counts(ClientData(None, y, np.asarray([3, 3])), 2)


def test_labels_have_their_names_where_there_are_any(check_layout):
    counts = np.array([[6, 2], [1, 4]])
    figure = client_labels(counts, class_names=("A tiger that is cut", "$5"))
    check_layout(figure)
    assert [tick.get_text() for tick in figure.axes[1].get_yticklabels()] == ["A tiger that i…", r"\$5"]
    assert [tick.get_text() for tick in client_labels(counts).axes[1].get_yticklabels()] == ["0", "1"]
    for wrong in (("a",), ("a", "b", "c")):
        with pytest.raises(ValueError, match="names for 2 classes: give one for each, or none"):
            client_labels(counts, class_names=wrong)
