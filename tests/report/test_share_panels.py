import numpy as np
import pytest

from fedjax_cluster.report.share_panels import share_panels


def test_each_panel_has_its_values_on_one_scale_and_a_cross_where_there_is_none(check_layout):
    """Catches a panel of another title's values, a scale of its own, and a missing value drawn as a dark one."""
    values = np.arange(6.0).reshape(2, 3)
    holes = np.where(values == 4, np.nan, values + 10)
    figure = share_panels({"one": values, "two": holes}, ("IFCA", "CFL"), (0, 10, 40), "Accuracy (%)", (0, 100), side=2)
    one, two, bar = figure.axes
    assert (one.get_title(), two.get_title(), bar.get_xlabel()) == ("one", "two", "Accuracy (%)")
    np.testing.assert_array_equal(one.images[0].get_array(), values)
    np.testing.assert_array_equal(two.images[0].get_array().filled(np.nan), holes)
    assert {axes.images[0].get_clim() for axes in (one, two)} == {(0, 100)}
    assert [len(axes.lines[0].get_xdata()) for axes in (one, two)] == [0, 1]
    assert (two.lines[0].get_xdata()[0], two.lines[0].get_ydata()[0]) == (1, 1)
    assert [label.get_text() for label in one.get_yticklabels()] == ["IFCA", "CFL"]
    check_layout(figure)


def test_panels_that_cannot_be_drawn_are_refused():
    with pytest.raises(ValueError, match=r"panel 'one' has values \[2, 3\]; give \[1, 3\], rows × columns"):
        share_panels({"one": np.zeros((2, 3))}, ("IFCA",), (0, 10, 40), "ARI", (0, 1))
    with pytest.raises(ValueError, match="panels is empty"):
        share_panels({}, ("IFCA",), (0,), "ARI", (0, 1))
