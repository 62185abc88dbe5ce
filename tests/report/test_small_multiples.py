import itertools

import numpy as np
import pytest

from fedjax_cluster.report import curves, small_multiples, style


def history(final, *, lost=False):
    rounds = np.arange(10.0)
    loss = np.where(rounds < 5, 1.0, np.nan) if lost else np.ones(10)
    accuracy = np.where(np.isfinite(loss), final * (rounds + 1) / 10, np.nan)
    return {"round": rounds, "loss": loss, "accuracy": accuracy}


HISTORIES = {f"method-{n}": [history(0.1 * n + 0.01 * seed) for seed in range(3)] for n in range(1, 8)}


def test_each_method_has_a_panel_with_its_curve_its_band_and_its_last_mean():
    figure = small_multiples.comparison_figure(HISTORIES)
    panels = figure.axes
    assert [axes.get_title(loc="left") for axes in panels] == list(HISTORIES)
    for n, axes in enumerate(panels, start=1):
        (own,) = [line for line in axes.lines if line.get_color() == style.COLORS[0]]
        assert len(axes.lines) == len(HISTORIES), "the others are behind"
        np.testing.assert_allclose(own.get_xdata(), np.arange(1, 11))
        np.testing.assert_allclose(own.get_ydata()[-1], 100 * (0.1 * n + 0.01))
        assert axes.texts[0].get_text() == f"{100 * (0.1 * n + 0.01):#.3g}".rstrip(".")
        (band,) = axes.collections
        np.testing.assert_allclose(band.get_paths()[0].vertices[:, 1].max(), 100 * (0.1 * n + 0.02), rtol=1e-6)
    assert len({axes.get_ylim() for axes in panels}) == 1
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert any("± sample std over 3 seeds" in text for text in named)
    assert figure.get_figwidth() == style.SINGLE


def test_the_axis_holds_the_bands_which_end_at_what_is_possible():
    wide = {"fedavg": [history(final) for final in (0.2, 0.9)], "cfl_gp": [history(final) for final in (1.0, 0.8)]}
    first, second = small_multiples.small_multiples(wide).axes
    low, high = first.get_ylim()
    bands = [axes.collections[0].get_paths()[0].vertices[:, 1] for axes in (first, second)]
    assert bands[1].max() == pytest.approx(100)
    assert all(low < band.min() and band.max() < high for band in bands)


def test_the_last_mean_stands_at_the_end_of_its_line_and_hides_no_other():
    figure = small_multiples.small_multiples(HISTORIES)
    figure.canvas.draw()
    for axes in figure.axes:
        (number,) = axes.texts
        (own,) = [line for line in axes.lines if line.get_color() == style.COLORS[0]]
        end, box = axes.transData.transform(own.get_xydata()[-1]), number.get_window_extent()
        assert number.get_bbox_patch() is None
        assert 0 < box.x0 - end[0] < 0.1 * figure.dpi
        assert abs((box.y0 + box.y1) / 2 - end[1]) < 0.02 * figure.dpi


def test_few_places_are_left_empty():
    columns = {count: small_multiples.columns_of(count) for count in range(1, 13)}
    assert columns == {1: 1, 2: 2, 3: 3, 4: 4, 5: 3, 6: 3, 7: 4, 8: 4, 9: 3, 10: 4, 11: 4, 12: 4}


def test_nothing_leaves_the_page():
    figure = small_multiples.small_multiples({**HISTORIES, "gradient_loss": HISTORIES["method-1"]})
    figure.canvas.draw()
    page = figure.bbox
    for axes in figure.axes:
        for text in (axes.title, axes._left_title, *axes.texts):
            box = text.get_window_extent()
            assert page.x0 <= box.x0
            assert box.x1 <= page.x1 + 1, text.get_text()
    shown = [figure._supxlabel, figure._supylabel, *figure.legends]
    assert all(page.x0 <= part.get_window_extent().x0 for part in shown)


def test_a_curve_that_was_lost_ends_with_a_cross():
    figure = small_multiples.small_multiples({**HISTORIES, "method-1": [history(0.2, lost=True)]})
    first = figure.axes[0]
    (cross,) = [line for line in first.lines if line.get_marker() == "x"]
    assert cross.get_xdata() == pytest.approx([5])
    assert "not finite afterwards" in [text.get_text() for text in figure.legends[0].get_texts()]
    # Not that of other seeds, beside one that has no value at all.
    nothing = {name: np.full_like(column, np.nan) for name, column in history(0.2).items() if name != "round"}
    seeds = [history(0.2), {**history(0.3), **nothing}]
    figure = small_multiples.small_multiples({**HISTORIES, "method-1": seeds})
    assert not [line for line in figure.axes[0].lines if line.get_marker() == "x"]


def test_a_method_without_a_value_says_so():
    nothing = {"round": np.arange(3.0), "loss": np.ones(3), "accuracy": np.full(3, np.nan)}
    figure = small_multiples.small_multiples({**HISTORIES, "method-1": [nothing]})
    assert figure.axes[0].texts[0].get_text() == "no finite value"


def test_few_methods_share_a_panel():
    few = dict(list(HISTORIES.items())[: small_multiples.MOST_IN_ONE])
    assert len(small_multiples.comparison_figure(few).axes) == 1


def test_one_evaluation_is_a_point_with_its_deviation():
    once = {name: [{key: of[-1:] for key, of in run.items()} for run in runs] for name, runs in HISTORIES.items()}
    for axes in small_multiples.comparison_figure(once).axes:
        assert {line.get_marker() for line in axes.lines} == {"o"}
        ((low, high),) = axes.collections[0].get_segments()
        assert high[1] - low[1] == pytest.approx(2.0)


def test_all_panels_have_the_small_numbers():
    figure = small_multiples.comparison_figure(HISTORIES)
    sizes = {tick.label1.get_fontsize() for axes in figure.axes for tick in axes.yaxis.get_major_ticks()}
    assert sizes == {small_multiples.SMALL}


def test_long_names_are_cut_and_broken_and_take_nothing_from_the_panels():
    names = [f"FedAvg (runs/rotated_digits/group/{'of_many/' * 5}fedavg_rotated_{n})" for n in range(8)]
    figure = small_multiples.comparison_figure({name: [history(0.5)] for name in names})
    figure.canvas.draw()
    titles = [axes._left_title for axes in figure.axes]
    assert len({title.get_text() for title in titles}) == 8, "the end of a name tells it from others"
    boxes = [title.get_window_extent() for title in titles]
    assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes[:4]))
    short = small_multiples.comparison_figure({f"method-{n}": [history(0.5)] for n in range(8)})
    short.canvas.draw()
    heights = [of.axes[0].get_position().height * of.get_figheight() for of in (figure, short)]
    assert heights[0] > 0.9 * heights[1]


def test_a_method_that_explodes_leaves_the_others_a_scale():
    rounds = np.arange(12.0)
    histories = {
        name: {"round": rounds, "loss": np.ones(12), "test_loss": np.linspace(0.5, last, 12)}
        for name, last in (("ifca", 0.1), ("fedavg", 2.0), ("cfl_gp", 3e19))
    }
    axes = small_multiples.small_multiples(histories).axes[0]
    assert axes.get_yscale() == curves.learning_curves(histories).axes[0].get_yscale() == "log"
    low, high = axes.get_xlim()
    assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 2
    del histories["cfl_gp"]
    assert curves.learning_curves(histories).axes[0].get_yscale() == "linear"
