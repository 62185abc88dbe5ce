import itertools
import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.legend import Legend
from matplotlib.text import Text

from fedjax_cluster.algorithms.cfl_gp.profiles import Clients
from fedjax_cluster.algorithms.cfl_gp.start import Server
from fedjax_cluster.report.paper_rows import PaperRow
from fedjax_cluster.types import ClientData, Clusters, DatasetInfo, Federation, State

CLIENTS, CAPACITY, CLUSTERS, WIDTH = 6, 8, 2, 5
GROUP = np.asarray([0, 0, 0, 1, 1, 1], np.int32)


@pytest.fixture
def contrast():
    """The ratio of two colours' luminances, from 1 to 21, as the web's guidelines for accessible text define it."""

    def luminance(color):
        parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
        return np.dot(parts, (0.2126, 0.7152, 0.0722))

    def ratio(one, other):
        less, more = sorted(map(luminance, (one, other)))
        return (more + 0.05) / (less + 0.05)

    return ratio


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
def make_result(make_history):
    """A run of 6 clients on 8 rows of capacity; client 5 has no examples and so is in no cluster."""

    def make(method="cfl_gp", *, group=GROUP, clustered=True):
        rng = np.random.default_rng(0)
        examples = np.asarray([3, 3, 3, 3, 3, 0], np.int32)
        present = np.pad(examples > 0, (0, CAPACITY - CLIENTS))
        profile = np.zeros((CAPACITY, CLUSTERS, WIDTH), np.float32)
        profile[:CLIENTS] = rng.normal(size=(2, CLUSTERS, WIDTH))[GROUP] + 0.1 * rng.normal(
            size=(CLIENTS, CLUSTERS, WIDTH)
        )
        profile[~present] = 0
        weights = np.zeros((CAPACITY, CLUSTERS), np.float32)
        weights[np.flatnonzero(present), [1, 1, 1, 0, 0]] = 1
        clients = Clients(
            jnp.asarray(weights),
            jnp.asarray(present),
            jnp.asarray(profile * clustered),
            jnp.asarray(np.repeat(present[:, None], CLUSTERS, 1) * clustered, jnp.int32),
        )
        grams = jnp.asarray(np.einsum("akd,bkd->kab", profile, profile) * clustered, jnp.float32)
        server = Server(**{**dict.fromkeys(Server._fields), "grams": grams})
        state = State(Clusters({}, {}, jnp.ones(CLUSTERS, bool)), clients, server, jnp.zeros((), jnp.int32))
        rows = ClientData(np.zeros((CLIENTS, 3, 2)), np.zeros((CLIENTS, 3), np.int32), examples)
        federation = Federation(rows, rows, None, group, DatasetInfo("made up", (2,), 2, group_names=("left", "right")))
        labels = np.where(present, weights.argmax(1), -1)[:CLIENTS]
        moved = np.stack([np.where(labels < 0, -1, 1), labels, labels])  # clients 3 and 4 in round 4
        return SimpleNamespace(
            algorithm=SimpleNamespace(name=method),
            federation=federation,
            state=state,
            history=make_history(),
            events=(),
            labels=labels,
            assignments=(np.asarray([1, 4, 20]), moved),
        )

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
    labels = [tick.label1 for tick in ticks if tick.label1.get_visible()]
    for left, right in itertools.pairwise(labels):
        boxes = [label.get_window_extent(renderer) for label in (left, right)]
        if left.get_rotation() % 90:  # the boxes of slanted texts meet before these do
            apart = (boxes[1].x1 - boxes[0].x1) * math.sin(math.radians(left.get_rotation()))
            assert apart > left.get_fontsize() * axes.figure.dpi / 72
        else:
            assert boxes[0].x1 < boxes[1].x0
