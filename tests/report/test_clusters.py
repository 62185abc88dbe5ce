import numpy as np
import pytest
from matplotlib.colors import to_hex

from fedjax_cluster.report import clusters as pictures
from fedjax_cluster.report import style

RNG = np.random.default_rng(0)


def legend_texts(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def drawn(axes):
    """{(x, y): colour} of all points, and the number of different markers."""
    points = {}
    shapes = set()
    for collection in axes.collections:
        colors = collection.get_facecolors()
        shapes.add(collection.get_paths()[0].vertices.tobytes())
        for (x, y), color in zip(np.asarray(collection.get_offsets()), colors, strict=True):
            points[round(float(x), 6), round(float(y), 6)] = to_hex(color)
    return points, len(shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "axis_labels"),
    [
        (1, [("Feature 1", "Client")]),
        (2, [("Feature 1", "Feature 2")]),
        (3, [("Feature 1", "Feature 2"), ("Feature 1", "Feature 3")]),
        (6, [("Feature 1", "Feature 2"), ("Feature 3", "Feature 4")]),
    ],
)
def test_panels_show_the_leading_features(rank, axis_labels, check_layout):
    features = RNG.normal(size=(12, rank))
    figure = pictures.client_features(features, np.arange(12) % 3, np.arange(12) % 4)
    assert [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes] == axis_labels
    assert figure.get_figwidth() == (style.SINGLE if rank <= 2 else style.DOUBLE)
    columns = {1: [(0, None)], 2: [(0, 1)], 3: [(0, 1), (0, 2)], 6: [(0, 1), (2, 3)]}[rank]
    for axes, (across, up) in zip(figure.axes, columns, strict=True):
        vertical = np.arange(12) if up is None else features[:, up]
        expected = {
            (round(float(x), 6), round(float(y), 6)) for x, y in zip(features[:, across], vertical, strict=True)
        }
        assert set(drawn(axes)[0]) == expected
    check_layout(figure)


def test_colour_is_the_group_and_marker_the_cluster(check_layout):
    features = np.stack([np.arange(6.0), np.zeros(6)], 1)
    group, labels = np.asarray([0, 0, 1, 1, 2, -1]), np.asarray([3, 3, 3, 1, 1, -1])
    figure = pictures.client_features(features, group, labels, ("0°", "90°"))
    points, shapes = drawn(figure.axes[0])
    colors = [points[float(client), 0.0] for client in range(6)]
    assert colors[0] == colors[1]
    assert len(set(colors)) == 4
    assert shapes == 3
    texts = legend_texts(figure)
    assert texts == ["True group", "0°", "90°", "group 2", "unknown", "", "Cluster", "1", "3", "none"]
    check_layout(figure)


def test_more_clusters_than_markers_are_told_apart_by_their_numbers(check_layout):
    labels = np.arange(40) % 20
    figure = pictures.client_features(np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 5, labels)
    assert drawn(figure.axes[0])[1] == 20
    assert legend_texts(figure)[-2:] == ["Cluster", "as numbered"]
    check_layout(figure)
    by_cluster = pictures.client_features(np.arange(60.0).reshape(60, 1), None, np.arange(60) % 30)
    assert legend_texts(by_cluster) == ["Cluster", "as numbered"]


def test_the_legend_of_many_groups_takes_several_columns(check_layout):
    figure = pictures.client_features(np.arange(60.0).reshape(60, 1), np.arange(60) % 30, np.arange(60) % 2)
    assert len(legend_texts(figure)) == 1 + 30 + 2 + 2
    assert figure.get_figheight() < 4
    check_layout(figure)


def test_legend_shows_what_is_drawn():
    """The legend's colour of a group, and its marker of a cluster, are those of the points."""
    features = np.asarray([[0.0, 0.0], [1.0, 1.0]])
    figure = pictures.client_features(features, [0, 1], [0, 1], ("a", "b"))
    points, _ = drawn(figure.axes[0])
    handles = dict(zip(legend_texts(figure), figure.legends[0].legend_handles, strict=True))
    assert to_hex(handles["a"].get_color()) == points[0.0, 0.0]
    assert to_hex(handles["b"].get_color()) == points[1.0, 1.0]
    assert handles["0"].get_marker() != handles["1"].get_marker()
    assert handles["0"].get_color() == handles["1"].get_color() == style.NEUTRAL


def test_without_groups_colour_and_marker_are_the_cluster(check_layout):
    figure = pictures.client_features(np.asarray([[0.0, 0], [1, 0], [2, 0]]), None, [0, 1, 1])
    points, shapes = drawn(figure.axes[0])
    assert points[1.0, 0.0] == points[2.0, 0.0] != points[0.0, 0.0]
    assert shapes == 2
    assert legend_texts(figure) == ["Cluster", "0", "1"]
    check_layout(figure)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["{}°", "Fashion-MNIST rotated by {}"])
@pytest.mark.parametrize("rank", [2, 4])
def test_eight_groups_and_eight_clusters_keep_a_readable_legend(name, rank, check_layout):
    features, group, labels = RNG.normal(size=(64, rank)), np.arange(64) % 8, np.arange(64) // 8
    figure = pictures.client_features(features, group, labels, [name.format(45 * g) for g in range(8)])
    assert len(set(drawn(figure.axes[0])[0].values())) == 8
    assert drawn(figure.axes[0])[1] == 8
    check_layout(figure)


def test_distances_are_true():
    figure = pictures.client_features(RNG.normal(size=(9, 2)) * [1, 10], None, np.arange(9) % 2)
    assert figure.axes[0].get_aspect() == 1.0


def test_many_groups_and_clients_can_be_drawn(check_layout):
    figure = pictures.client_features(RNG.normal(size=(1000, 2)), np.arange(1000) % 20, np.arange(1000) % 15)
    assert len(set(drawn(figure.axes[0])[0].values())) == 20
    check_layout(figure)


@pytest.mark.parametrize(
    ("features", "group", "labels", "message"),
    [
        (np.zeros(3), None, [0, 0, 0], r"features has shape \(3,\)"),
        (np.zeros((0, 2)), None, [], "at least one client"),
        ([[0.0, 0], [np.nan, 0]], None, [0, 0], "features of client 1 are not finite"),
        (np.zeros((2, 2)), None, [0], r"labels has shape \(1,\), but features has 2 clients"),
        (np.zeros((2, 2)), [0], [0, 0], r"group has shape \(1,\), but features has 2 clients"),
    ],
)
def test_features_that_do_not_fit_are_refused(features, group, labels, message):
    with pytest.raises(ValueError, match=message):
        pictures.client_features(features, group, labels)


def test_table_counts_clients_of_each_group_in_each_cluster(check_layout):
    group = np.asarray([0, 0, 0, 2, 2, -1])
    labels = np.asarray([1, 1, 4, 4, -1, 0])
    figure = pictures.group_by_cluster(group, labels, ("0°", "90°", "180°"))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0°", "180°"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "4", "none"]
    counts = {(text.get_position()[1], text.get_position()[0]): text.get_text() for text in axes.texts}
    assert [[counts[row, column] for column in (0.5, 1.5, 2.5)] for row in (0.5, 1.5)] == [
        ["2", "1", "0"],
        ["0", "1", "1"],
    ]
    np.testing.assert_array_equal(axes.collections[0].get_array().reshape(2, 3), [[2, 1, 0], [0, 1, 1]])
    assert axes.yaxis_inverted(), "the first group is on top"
    check_layout(figure)


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "clusters"), [(1, 1), (8, 8), (20, 11)])
def test_counts_fit_their_cells_and_stand_out(groups, clusters, check_layout, contrast):
    names = [f"Fashion-MNIST rotated by {n}" for n in range(groups)]
    # Cubes and squares of random numbers make cells of all shades.
    group, labels = (np.random.default_rng(seed).uniform(size=20_000) for seed in (1, 2))
    group, labels = (groups * group**3).astype(int), (clusters * labels**2).astype(int)
    figure = pictures.group_by_cluster(group, labels, names)
    check_layout(figure)
    (axes,) = figure.axes
    renderer = figure.canvas.get_renderer()
    cell = axes.get_window_extent(renderer).size / (clusters, groups)
    mesh = axes.collections[0]
    shades = mesh.to_rgba(mesh.get_array()).reshape(-1, 4)
    for text, shade in zip(axes.texts, shades, strict=True):
        assert (text.get_window_extent(renderer).size < cell).all()
        assert contrast(text.get_color(), shade) >= 4.5


def test_table_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"group has shape \(2,\) and labels \(1,\)"):
        pictures.group_by_cluster([0, 1], [0])
    with pytest.raises(ValueError, match="no client has a true group"):
        pictures.group_by_cluster([-1, -1], [0, 1])
