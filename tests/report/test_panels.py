"""Panels over the same rounds: what is drawn is what the histories hold."""

import numpy as np
import pytest

from fedjax_cluster.report import panels


def drawn(axes, label):
    (line,) = [line for line in axes.get_lines() if line.get_label() == label]
    return line


def test_each_column_has_a_panel_and_rounds_count_from_one(make_history, check_layout):
    history = make_history(columns={"purity": np.linspace(0.25, 1.0, 20)})
    figure = panels.curves({"ifca": history}, ["purity", "loss", "accuracy"], levels={"purity": 0.9})
    purity, loss, accuracy = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == ["Purity", "Training loss", "Test accuracy (%)"]
    np.testing.assert_array_equal(drawn(purity, "IFCA").get_xdata(), np.arange(1, 21))
    np.testing.assert_allclose(drawn(loss, "IFCA").get_ydata(), history["loss"])
    np.testing.assert_array_equal(drawn(accuracy, "IFCA").get_xdata(), [5, 10, 15, 20])
    assert [line.get_ydata()[0] for line in purity.get_lines() if line.get_label() != "IFCA"] == [0.9]
    check_layout(figure)


def test_seeds_become_their_mean_and_a_band_within_what_is_possible(make_history):
    runs = [make_history(columns={"purity": np.full(20, value)}) for value in (0.7, 1.0)]
    figure = panels.curves({"a": runs, "b": runs}, ["purity"], log_rounds=True)
    (axes,) = figure.axes
    np.testing.assert_allclose(drawn(axes, "a").get_ydata(), 0.85)
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(0.7)
    assert band.max() == pytest.approx(1.0)
    assert axes.get_xscale() == "log"
    assert axes.get_xticks().tolist() == [1, 2, 5, 10, 20]


@pytest.mark.parametrize(
    ("histories", "metrics", "message"),
    [
        (True, [], "metrics is empty"),
        (True, ["top_5"], "no history has a value of 'top_5'"),
        (False, ["loss"], "empty"),
    ],
)
def test_what_cannot_be_drawn_is_refused(make_history, histories, metrics, message):
    with pytest.raises(ValueError, match=message):
        panels.curves({"ifca": make_history()} if histories else {}, metrics)
