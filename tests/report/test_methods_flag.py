"""FLAG's pictures: what is drawn where."""

from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform

from fedjax_cluster.clustering.linkage import LINKAGES
from fedjax_cluster.report import style
from fedjax_cluster.report.methods import flag

GROUP = np.array([1, 0, 1, 0, 2, 2])
NAMES = ("rain", "sun", "snow")


def distances(seed=0):
    points = np.random.default_rng(seed).normal(size=(6, 2)) + 6 * GROUP[:, None]
    return np.linalg.norm(points[:, None] - points[None], axis=-1)


@pytest.mark.slow
def test_matrices_are_ordered_by_true_group():
    matrices = [distances(seed) for seed in range(3)]
    figure = flag.dissimilarity_matrices(*matrices, GROUP, NAMES)
    order = [1, 3, 0, 2, 4, 5]
    for axes, matrix in zip(figure.axes[:3], matrices, strict=True):
        shown = axes.get_images()[0].get_array()
        off = ~np.eye(6, dtype=bool)
        np.testing.assert_allclose(np.asarray(shown)[off], matrix[np.ix_(order, order)][off])
        assert len(axes.get_lines()) == 4
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == list(NAMES)
    units = ["weighted angle (degrees)", "angle (degrees)", "scaled, without unit"]
    assert [axes.get_xlabel() for axes in figure.axes[3:]] == units


def test_without_groups_clients_keep_their_order():
    figure = flag.dissimilarity_matrices(*[distances()] * 3)
    assert figure.axes[0].get_ylabel() == "Client"
    assert not figure.axes[0].get_lines()


def test_search_shows_accuracy_clusters_and_the_elbow(tmp_path):
    figure = flag.threshold_search([1.0, 0.5, 0.0], [0.4, 0.9, 0.8], [1, 4, 100], 1)
    bars, axes = figure.axes
    assert [patch.get_height() for patch in bars.patches] == [1, 4, 100]
    line, ring = axes.get_lines()
    np.testing.assert_allclose(line.get_ydata(), [40, 90, 80])
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (0.5, 90)
    left, right = bars.get_xlim()
    assert left > right
    assert style.save(figure, tmp_path / "search.png").stat().st_size > 5000


def test_what_was_taken_is_called_the_elbow_only_where_it_is():
    for elbow, name in ((None, "elbow"), (1, "elbow"), (2, "taken")):
        figure = flag.threshold_search([1.0, 0.5, 0.0], [0.4, 0.9, 0.8], [1, 4, 100], 1, elbow)
        assert figure.axes[1].get_lines()[1].get_label() == f"{name}, α = 0.5"


def test_search_without_accuracies_has_no_elbow():
    figure = flag.threshold_search([0.6], [np.nan], [3], 0)
    assert len(figure.axes[1].get_lines()) == 1


def test_a_cut_that_leaves_so_many_clusters_is_midway_between_two_merges():
    heights = hierarchy.linkage(squareform(distances(), checks=False), "average")[:, 2]
    for left, at in ((2, heights[3:].mean()), (5, heights[:2].mean())):
        (cut,) = flag.dendrogram(distances(), num_clusters=left).axes[0].get_lines()
        np.testing.assert_allclose(cut.get_ydata(), at)
    assert not flag.dendrogram(distances(), num_clusters=1).axes[0].get_lines()


@pytest.mark.parametrize("linkage", LINKAGES)
def test_tree_has_scipys_heights_and_the_groups_beneath(linkage):
    distance = distances()
    figure = flag.dendrogram(distance, threshold=3.0, linkage=linkage, group=GROUP, group_names=NAMES)
    (axes,) = figure.axes
    (tree,) = [item for item in axes.collections if isinstance(item, LineCollection)]
    heights = sorted(path.vertices[:, 1].max() for path in tree.get_paths())
    np.testing.assert_allclose(heights, hierarchy.linkage(squareform(distance, checks=False), linkage)[:, 2])
    (cut,) = axes.get_lines()
    assert set(cut.get_ydata()) == {3.0}
    drawn = [patch.get_facecolor() for patch in axes.patches]
    leaves = hierarchy.leaves_list(hierarchy.linkage(squareform(distance, checks=False), linkage))
    for first, second in zip(range(5), range(1, 6), strict=True):
        assert (drawn[first] == drawn[second]) == (GROUP[leaves[first]] == GROUP[leaves[second]])


def test_the_strip_of_groups_stays_beneath_the_tree_of_a_high_cut():
    distance = distances()
    (axes,) = flag.dendrogram(distance, threshold=100 * distance.max(), group=GROUP).axes
    strip = max(patch.get_window_extent().y1 for patch in axes.patches)
    assert strip <= axes.transData.transform((0, 0))[1]


@pytest.mark.parametrize("searched", [True, False])
def test_a_finished_run_is_drawn_from_what_was_harvested(searched, monkeypatch):
    """The seventh client has no examples, the eighth joined later, and the ninth sent infinities: no distances."""
    drawn = []
    tree = flag.dendrogram

    def drawing(distance, **options):
        drawn.append(distance)
        return tree(distance, **options)

    monkeypatch.setattr(flag, "dendrogram", drawing)
    padded = np.zeros((9, 9))
    padded[:6, :6] = distances()
    labels = np.array([0, 0, 0, 1, 1, 1, -1, -1, 0])
    content = {
        **dict.fromkeys(("data", "gradient", "proximity"), padded),
        "thresholds": np.array([1.0, 0.5, 0.0]),
        "accuracy": np.array([0.4, 0.9, 0.8]) if searched else np.full(3, np.nan),
        "num_clusters": np.array([1, 3, 6]),
        "chosen": np.array(1),
        "elbow": np.array(1),
        "labels": labels,
    }
    result = SimpleNamespace(
        federation=SimpleNamespace(
            train=SimpleNamespace(num_examples=np.array([4, 4, 4, 4, 4, 4, 0, 4, 4])),
            group=np.append(GROUP, [-1, 0, 1]),
            info=SimpleNamespace(group_names=NAMES),
        ),
        algorithm=SimpleNamespace(linkage="average", threshold=3.0),
        labels=labels,
        events=(SimpleNamespace(content=content),),
    )
    expected = {"dissimilarity_matrices", "dendrogram"} | ({"threshold_search"} if searched else set())
    assert set(flag.figures(result)) == expected
    result.events = (SimpleNamespace(content={"angles": padded, "labels": labels}),)
    assert set(flag.figures(result)) == {"dendrogram"}
    for distance in drawn:
        np.testing.assert_array_equal(distance, distances())
    result.events = ()
    assert flag.figures(result) == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flag.dissimilarity_matrices(distances(), np.ones((5, 5)), distances()), "gradient has shape"),
        (lambda: flag.dissimilarity_matrices(*[np.full((2, 2), np.nan)] * 3), "not finite"),
        (lambda: flag.dissimilarity_matrices(*[distances()] * 3, GROUP[:4]), "6 clients"),
        (lambda: flag.threshold_search([1.0], [0.5, 0.6], [1], 0), "same length"),
        (lambda: flag.threshold_search([1.0], [0.5], [1], 3), "chosen is 3"),
        (lambda: flag.dendrogram(np.zeros((1, 1))), "single client"),
        (lambda: flag.dendrogram(distances(), linkage="median"), "linkage is 'median'"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
