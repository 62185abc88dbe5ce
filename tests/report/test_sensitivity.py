"""The picture of a sweep shows what the runs ended with."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_cluster.report import sensitivity


def drawn(cells, accuracy, ari=True):
    """The picture of cells whose seeds have these accuracies; an empty list is a failure."""
    runs = [
        SimpleNamespace(
            label=str(at),
            summaries=[{"accuracy": each, **({"adjusted_rand_index": each / 2} if ari else {})} for each in of],
        )
        for at, of in enumerate(accuracy)
    ]
    return sensitivity.sensitivity(runs, {str(at): cell for at, cell in enumerate(cells)})


def test_one_option_is_a_mean_with_a_band_and_what_failed_a_cross(check_layout):
    rates = (1.0, 0.01, 0.1)
    figure = drawn([{"learning_rate": rate} for rate in rates], [[0.8, 0.9], [0.5, 0.7], []])
    upper, lower = figure.axes
    mean, dots, cross = upper.get_lines()
    np.testing.assert_allclose(np.asarray(mean.get_xydata()), [[0.01, 60], [0.1, np.nan], [1, 85]])
    assert sorted(dots.get_ydata()) == pytest.approx([50, 70, 80, 90])
    assert (cross.get_marker(), list(cross.get_xdata())) == ("x", [0.1])
    assert np.isfinite(cross.get_ydata()).all()
    assert (upper.get_xscale(), upper.get_ylabel(), lower.get_xlabel()) == ("log", "Test accuracy (%)", "Learning rate")
    legend = {"mean", "each run", "± sample std over 2 seeds", "failed or not finite"}
    assert {text.get_text() for text in figure.legends[0].get_texts()} == legend
    check_layout(figure)


def test_names_have_no_line_between_them(check_layout):
    figure = drawn([{"optimizer": name} for name in ("sgd", "adam")], [[0.8, 0.9], [0.5, 0.7]], ari=False)
    (axes,) = figure.axes
    assert axes.get_lines()[0].get_linestyle() == "None"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["sgd", "adam"]
    check_layout(figure)


def test_two_options_are_a_map_with_numbers(check_layout):
    cells = [{"learning_rate": rate, "method_options.every": every} for every in (1, 2) for rate in (0.1, 0.01, 1.0)]
    figure = drawn(cells, [[0.1, 0.2], [0.9, 0.9], [], [0.4, 0.4], [0.5, 0.5], [0.6, 0.6]])
    axes = figure.axes[0]
    shown = np.asarray(axes.images[0].get_array().filled(np.nan))
    # Rates ascend along the map, whatever the order of the cells.
    np.testing.assert_allclose(shown, [[90, 15, np.nan], [50, 40, 60]])
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts[1, 0] == "15.0 ± 7.1"
    assert len(texts) == 5
    assert len(axes.patches) == 1
    assert figure.axes[1].images[0].norm.vmax == 1.0
    assert axes.texts[1].get_color() != axes.texts[0].get_color(), "black and white, by the colour beneath"
    check_layout(figure)


def test_every_number_of_a_map_can_be_read(contrast):
    cells = [{"a": a, "b": b} for b in range(20) for a in range(20)]
    axes = drawn(cells, [[0.0025 * at] for at in range(400)]).axes[0]
    (image,) = axes.images
    for text in axes.texts:
        column, row = map(int, text.get_position())
        assert contrast(text.get_color(), image.to_rgba(image.get_array())[row, column, :3]) >= 4.5


def test_draws_of_two_options_are_dots_and_three_have_no_picture():
    cells = [{"learning_rate": 0.1 * at, "clients": at} for at in range(1, 6)]
    figure = drawn(cells, [[0.1 * at] for at in range(1, 5)] + [[]])
    (dots,) = figure.axes[0].collections
    np.testing.assert_allclose(dots.get_array(), [10, 20, 30, 40])
    assert drawn([{"a": 1, "b": 1, "c": 1}], [[0.5]]) is None
    assert drawn([{"a": 1}], [[]]) is None


def test_of_very_many_columns_some_have_names(check_layout):
    values = [round(0.001 * 1.25**power, 6) for power in range(40)]
    cells = [{"learning_rate": value, "optimizer": name} for value in values for name in ("sgd", "adam")]
    figure = drawn(cells, [[0.5]] * len(cells), ari=False)
    figure.canvas.draw()
    labels = figure.axes[0].get_xticklabels()
    assert 10 < len(labels) < 30
    boxes = [label.get_window_extent() for label in labels]
    assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes))
    check_layout(figure)


@pytest.mark.parametrize(
    ("values", "angle"),
    [((0.1, 0.3, 1.0), 0), ((0.0001, 0.00033, 0.001, 0.0033, 0.01, 0.1, 1.0, 3.0), 60), (range(10000, 10020), 90)],
)
def test_names_of_columns_are_turned_where_they_have_no_room(values, angle):
    cells = [{"learning_rate": value, "optimizer": name} for value in values for name in ("sgd", "adam")]
    figure = drawn(cells, [[0.5]] * len(cells), ari=False)
    figure.canvas.draw()
    labels = figure.axes[0].get_xticklabels()
    assert {label.get_rotation() for label in labels} == {angle}
    boxes = [label.get_window_extent() for label in labels]
    if angle in (0, 90):
        assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes))
    # They end where their columns are.
    places = figure.axes[0].transData.transform([(at, 0) for at in range(len(values))])[:, 0]
    ends = [box.x1 for box in boxes] if angle else [(box.x0 + box.x1) / 2 for box in boxes]
    np.testing.assert_allclose(ends, places, atol=0.06 * figure.dpi)


def test_long_names_leave_the_panels_their_room(check_layout):
    names = ("fashion_mnist", "emnist/balanced", "cifar10", "a/very/long/path/to/some/data.npz", "digits")
    one = drawn([{"dataset": name} for name in names], [[0.5, 0.6]] * 5)
    two = drawn([{"optimizer": of, "dataset": n} for n in names for of in ("sgd", f"{names[3]}/other")], [[0.5]] * 10)
    for figure in (one, two):
        check_layout(figure)
        upper, lower = (
            axes.yaxis.label.get_window_extent() for axes in (figure.axes[:2] if figure is one else figure.axes[2:])
        )
        assert not upper.overlaps(lower)
        assert figure.axes[0].get_position().width > 0.5
    assert [label.get_text() for label in one.axes[1].get_xticklabels()][3] == "a/very/long…ome/data.npz"


@pytest.mark.parametrize(("last", "scale"), [(3.0, "linear"), (3e19, "log")])
def test_a_value_that_explodes_leaves_the_others_a_scale(last, scale):
    runs = [SimpleNamespace(label=str(at), summaries=[{"test_loss": loss}]) for at, loss in enumerate((0.3, 0.2, last))]
    figure = sensitivity.sensitivity(runs, {str(at): {"learning_rate": 0.1 * 3**at} for at in range(3)})
    assert figure.axes[0].get_yscale() == scale
