import itertools

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.legend import Legend
from matplotlib.text import Text

from fedjax_cluster.report.paper_rows import PaperRow


@pytest.fixture
def make_history():
    """A run's history: accuracy in every 5th round and the last, an ARI in every one."""

    def make(rounds=20, *, best=0.9, agreement=1.0, columns=None):
        number = np.arange(rounds, dtype=np.float64)
        evaluated = (number % 5 == 4) | (number == rounds - 1)
        history = {
            "round": number,
            "loss": 2.0 - number / rounds,
            "num_clusters": np.full(rounds, 4.0),
            "adjusted_rand_index": np.minimum(number / 4, 1.0) * agreement,
            "accuracy": np.where(evaluated, best * (number + 1) / rounds, np.nan),
            "test_loss": np.where(evaluated, 1.0 / (number + 1), np.nan),
        }
        return {**history, **(columns or {})}

    return make


@pytest.fixture
def make_row():
    """A number of a paper's table beside ours."""

    def make(row, column, ours, paper=np.nan, *, metric="accuracy (%)", **others):
        return PaperRow(row, column, metric, ours, paper=paper, **others)

    return make


@pytest.fixture
def check_layout():
    """Draws a figure and checks that nothing is cut off, no legend lies on a panel, and no text is too small."""

    def check(figure):
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw_without_rendering()
        whole = figure.bbox
        for text in figure.findobj(Text):
            if text.get_text() and text.get_visible():
                assert text.get_fontsize() >= 7 or "mathdefault" in text.get_text()
                box = text.get_window_extent(renderer)
                if _is_tick_beyond_limits(figure, text):
                    continue
                assert box.x0 >= whole.x0 - 1, text
                assert box.x1 <= whole.x1 + 1, text
                assert box.y0 >= whole.y0 - 1, text
                assert box.y1 <= whole.y1 + 1, text
        for legend in figure.findobj(Legend):
            for axes in figure.axes:
                assert not legend.get_window_extent(renderer).overlaps(axes.get_window_extent(renderer))
        for axes in figure.axes:
            if axes.get_label() == "<colorbar>":
                continue  # a strip, as narrow as it should be
            assert min(axes.get_window_extent(renderer).size) > 0.5 * figure.dpi  # half an inch
            _check_tick_labels(axes, renderer)

    return check


def _is_tick_beyond_limits(figure, text):
    """Matplotlib keeps tick labels beyond an axis's limits, and does not draw them."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if text in (tick.label1, tick.label2):
                    return not low <= tick.get_loc() <= high
    return False


def _check_tick_labels(axes, renderer):
    """Neighbouring labels of the x axis do not meet."""
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes = [tick.label1.get_window_extent(renderer) for tick in ticks if tick.label1.get_visible()]
    for left, right in itertools.pairwise(boxes):
        assert left.x1 < right.x0
