import numpy as np
import pytest

from fedjax_cluster.clustering import largest_gaps
from fedjax_cluster.report.methods import cfl_gp


@pytest.mark.slow
def test_largest_gap_is_marked_where_the_clustering_finds_it(check_layout):
    values = np.asarray([9.0, 8.5, 8.0, 7.8, 3.0, 2.9, 2.0], np.float32)
    figure = cfl_gp.singular_values(values)
    (axes,) = figure.axes
    np.testing.assert_array_equal(axes.get_lines()[0].get_xdata(), np.arange(1, 8))
    np.testing.assert_array_equal(axes.get_lines()[0].get_ydata(), values)
    gap = int(largest_gaps(values, 1)[0])
    (span,) = axes.patches
    np.testing.assert_allclose(span.get_extents().transformed(axes.transData.inverted()).intervalx, (gap, gap + 1))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["largest gap, after 4"]
    assert axes.get_ylim()[0] == 0
    check_layout(figure)


@pytest.mark.parametrize(
    ("chosen", "gaps", "told"),
    [
        (4, [(4, 5)], ["first K = 4", "gap after K, the largest"]),
        (2, [(2, 3)], ["first K = 2", "gap after K; the largest is after 4"]),
        (7, [], ["first K = 7"]),
    ],
)
def test_where_k_was_given_that_many_values_are_marked(chosen, gaps, told, check_layout):
    """The picture of the default run said "largest gap, after 2" beside K = 4."""
    figure = cfl_gp.singular_values(np.asarray([9.0, 8.5, 8.0, 7.8, 3.0, 2.9, 2.0]), chosen=chosen)
    (axes,) = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == told
    np.testing.assert_array_equal(axes.get_lines()[1].get_xdata(), np.arange(1, chosen + 1))
    spans = [span.get_extents().transformed(axes.transData.inverted()).intervalx for span in axes.patches]
    assert [tuple(span.round(6)) for span in spans] == gaps
    check_layout(figure)


@pytest.mark.parametrize("values", [[2.0], [0.0, 0.0], np.ones(3)])
def test_few_or_equal_values_can_be_drawn(values, check_layout):
    check_layout(cfl_gp.singular_values(values))


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([1.0, 2.0], {}, "not in descending order"),
        ([np.nan, 1.0], {}, "finite and not negative"),
        ([1.0, -1.0], {}, "finite and not negative"),
        (np.ones((2, 2)), {}, r"shape \(2, 2\)"),
        ([], {}, "shape"),
        ([2.0, 1.0], {"chosen": 3}, "chosen is 3, but there are 2"),
    ],
)
def test_singular_values_that_cannot_be_are_refused(values, options, message):
    with pytest.raises(ValueError, match=message):
        cfl_gp.singular_values(values, **options)
