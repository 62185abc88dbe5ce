import numpy as np
import pytest

from fedjax_cluster.report import panels, style
from fedjax_cluster.report.methods import cfl_toys
from fedjax_cluster.report.panels import Cloud


def texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_a_method_looks_the_same_in_all_panels(make_history, check_layout):
    figure = panels.curve_panels(
        {
            "C=8": {"cfl_gp": [make_history(), make_history(best=0.8)], "ifca": make_history(best=0.7)},
            "C=16": {"ifca": make_history(best=0.6)},
        },
        "accuracy",
    )
    first, second = figure.axes
    colors = {line.get_label(): line.get_color() for line in first.get_lines()}
    assert {line.get_label(): line.get_color() for line in second.get_lines()} == {"IFCA": colors["IFCA"]}
    np.testing.assert_allclose(first.get_lines()[0].get_ydata()[-1], 85)
    np.testing.assert_allclose(second.get_lines()[0].get_ydata()[-1], 60)
    assert (first.get_title(), first.get_ylabel()) == ("C=8", "Test accuracy (%)")
    assert first.get_ylim() == second.get_ylim()
    assert texts(figure) == ["CFL-GP", "IFCA", "± sample std over 2 seeds"]
    check_layout(figure)
    lost = {**make_history(), "accuracy": np.full(20, np.nan)}
    figure = panels.curve_panels({"C=8": {"cfl_gp": make_history(), "ifca": lost}}, "accuracy")
    assert texts(figure) == ["CFL-GP", "C=8: IFCA (no finite value)"]
    with pytest.raises(ValueError, match="panels is empty"):
        panels.curve_panels({}, "accuracy")


def test_clients_are_shown_in_the_plane_where_they_vary_most(check_layout):
    """Groups that differ in the third feature alone are apart along the first axis."""
    group = np.repeat([0, 1], 10)
    points = np.random.default_rng(0).normal(size=(20, 3)) * 0.1
    points[:, 2] += 5 * group
    figure = panels.feature_panels(
        [[Cloud("t = 1", points, group), Cloud("t = 2", points[:10], group[:10])]], ("a", "b")
    )
    one, other = (np.asarray(drawn.get_offsets()) for drawn in figure.axes[0].collections)
    assert abs(one[:, 0].mean() - other[:, 0].mean()) > 4
    assert np.ptp(one[:, 0]) < 1
    assert texts(figure) == ["a", "b"]
    assert figure.axes[0].get_aspect() == 1
    check_layout(figure)
    with pytest.raises(ValueError, match=r"features of 't' have shape \(20, 3\); give finite \[10, r\]"):
        panels.feature_panels([[Cloud("t", points, group[:10])]])
    with pytest.raises(ValueError, match="grid is empty"):
        panels.feature_panels([])


def test_toy_problems_show_where_each_model_decides(check_layout):
    x = np.asarray([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    lines = {0: np.asarray([1.0, 0.0, -0.5]), 1: np.asarray([0.0, 0.0, 1.0])}
    problem = cfl_toys.Problem(
        x, np.asarray([0, 1, 0, 1]), np.asarray([0, 0, 1, 1]), np.asarray([0.0, 1.0, 0.0]), lines
    )
    figure = cfl_toys.toy_problems({"Toy": problem})
    single, own = figure.axes[0].get_lines()  # one that gives all points the same label has none
    np.testing.assert_allclose(single.get_ydata(), [0, 0], atol=1e-12)
    np.testing.assert_allclose(own.get_xdata(), [0.5, 0.5])
    assert own.get_color() == style.COLORS[0]
    check_layout(figure)
    with pytest.raises(ValueError, match="problems is empty"):
        cfl_toys.toy_problems({})


def test_paths_begin_at_the_start_and_carry_the_updates_of_their_rounds(check_layout):
    axis = np.linspace(-1, 1, 21)
    first, second = np.meshgrid(axis, axis)
    steps = np.asarray([[-0.5, -0.5], [0.0, 0.0], [0.25, 0.5]])
    updates = np.arange(12.0).reshape(3, 2, 2)
    path = cfl_toys.Path((axis, axis), [np.maximum(0, first), np.maximum(0, second)], steps, updates)
    figure = cfl_toys.optimisation_paths({"Toy": path}, arrows=(1, 7))
    axes = figure.axes[0]
    np.testing.assert_allclose(np.stack(axes.get_lines()[0].get_data(), 1), steps)
    np.testing.assert_allclose(np.stack(axes.get_lines()[1].get_data(), 1), steps[:1])
    arrows = [drawn for drawn in axes.collections if hasattr(drawn, "U")]
    np.testing.assert_allclose([[arrow.U[0], arrow.V[0]] for arrow in arrows], updates[1])
    assert "both risks are 0" in texts(figure)
    check_layout(figure)
    with pytest.raises(ValueError, match="paths is empty"):
        cfl_toys.optimisation_paths({})
