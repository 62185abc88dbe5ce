import numpy as np
import pytest
from matplotlib.colors import to_hex

from fedjax_cluster.report import bars, style


def legend_texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_bars_start_at_zero_and_state_their_values(check_layout):
    figure = bars.bars(["cfl_gp", "ifca", "fesem"], [0.95, 0.8, np.nan], [0.05, np.nan, np.nan], "ARI")
    (axes,) = figure.axes
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], [0.95, 0.8, np.nan])
    assert {bar.get_x() for bar in axes.patches} == {0.0}
    assert [text.get_text() for text in axes.texts] == ["0.950", "0.800", "–"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["CFL-GP", "IFCA", "FeSEM"]
    assert axes.yaxis_inverted(), "the first is on top"
    assert len(axes.collections[0].get_segments()) == 1
    assert legend_texts(figure) == ["± standard deviation"]
    check_layout(figure)


def test_bars_may_be_negative(check_layout):
    figure = bars.bars(["a", "b"], [-19.4, -15.8], [0.1, 0.2], "NMSE (dB)")
    check_layout(figure)
    assert figure.axes[0].get_xlim()[0] < -19.4


def test_names_of_three_lines_have_their_room(check_layout):
    names = [f"FedGWC, constant rate, by columns of P, MNIST {shift}" for shift in ("blur", "noise")] * 3
    check_layout(bars.bars(names, [0.9] * 6, [0.1] * 6, "Rand index"))


@pytest.mark.parametrize(("names", "means"), [([], []), (["a"], [1.0, 2.0])])
def test_bars_refuse_other_lengths(names, means):
    with pytest.raises(ValueError, match="give as many of each"):
        bars.bars(names, means, means, "ARI")


def test_ours_stands_beside_the_papers_value(make_row, check_layout):
    rows = [
        make_row("CFL-GP", "C=8", 87.0, 86.8, ours_std=0.3, paper_std=0.35, seeds=5),
        make_row("IFCA", "C=8", 80.0, 79.3, ours_std=2.0, paper_std=2.6),
        make_row("CFL-GP", "C=16", 87.3, 87.2),
        make_row("IFCA", "C=16", 83.0),
    ]
    figure = bars.bars_against_paper(rows)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "accuracy (%)"
    assert axes.yaxis_inverted(), "the first is on top"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["C=8", "C=16"]
    assert sorted(legend_texts(figure)) == ["CFL-GP", "IFCA", "ours ± sample std over 5 seeds", "paper"]
    points = [container.lines[0] for container in axes.containers]
    assert [line.get_xdata()[0] for line in points] == [87.0, 86.8, 80.0, 79.3, 87.3, 87.2, 83.0]
    filled = [to_hex(line.get_markerfacecolor()) != "#ffffff" for line in points]
    assert filled == [True, False, True, False, True, False, True]
    heights = [line.get_ydata()[0] for line in points]
    assert heights == sorted(heights), "nothing lies on another, the paper beneath ours"
    assert len(set(heights)) == len(heights)
    (error,) = axes.containers[1].lines[2]
    np.testing.assert_allclose(error.get_segments()[0][:, 0], [86.45, 87.15])
    assert not axes.containers[4].has_xerr
    check_layout(figure)


def test_each_metric_has_a_panel(make_row, check_layout):
    rows = [make_row("IFCA", f"C={n}", 80.0, 79.0, metric=metric) for n in (8, 16) for metric in ("accuracy", "ARI")]
    figure = bars.bars_against_paper(rows)
    assert [axes.get_xlabel() for axes in figure.axes] == ["accuracy", "ARI"]
    assert figure.get_figwidth() == style.DOUBLE
    assert legend_texts(figure) == ["ours", "paper"], "a single method needs no entry"
    check_layout(figure)


def test_table_of_one_column_has_a_band_for_each_method(make_row, check_layout):
    figure = bars.bars_against_paper([make_row("cfl_gp", "", 87.0, 86.8), make_row("ifca", "", 80.0, 79.3)])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["CFL-GP", "IFCA"]
    assert legend_texts(figure) == ["ours", "paper"]
    check_layout(figure)


def test_rows_without_any_value_are_refused(make_row):
    with pytest.raises(ValueError, match="none of the 0 rows"):
        bars.bars_against_paper([])
    with pytest.raises(ValueError, match="none of the 1 rows"):
        bars.bars_against_paper([make_row("IFCA", "", np.nan)])


def test_bars_of_one_seed_have_no_error_bars():
    figure = bars.bars(["a", "b"], [1.0, 2.0], None, "x")
    assert [text.get_text() for text in figure.axes[0].texts] == ["1.00", "2.00"]
    assert not figure.legends
