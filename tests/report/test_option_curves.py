"""The curves of a sweep over two options stand in the panel of one's value, as the line of the other's."""

import numpy as np
import pytest

from fedjax_cluster.report import option_curves

ROUNDS = np.arange(4.0)


def test_a_panel_has_the_curves_of_its_value(check_layout):
    """Faults: a cell in another panel or line, the deviation of a population, a failed cell that shifts the others."""
    cells = {f"{rate}, {every}": {"method_options.every": every, "learning_rate": rate}
             for rate in (1.0, 0.1, 0.01) for every in (2, 1)}  # fmt: skip
    histories = {
        label: [
            {"round": ROUNDS, "accuracy": np.asarray([np.nan, of["learning_rate"] / 2, np.nan, shift])}
            for shift in (0.2, 0.2 + of["method_options.every"] / 10)
        ]
        for label, of in cells.items()
        if label != "0.1, 2"
    }
    figure = option_curves.option_curves(histories, cells)
    first, second = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["every 1", "every 2"]
    lines = {line.get_label(): line.get_xydata() for line in second.get_lines()}
    assert list(lines) == ["learning rate 0.01", "learning rate 1"]
    np.testing.assert_allclose(lines["learning rate 1"], [[2, 50], [4, 30]])
    assert [line.get_label() for line in first.get_lines()] == [f"learning rate {of}" for of in ("0.01", "0.1", "1")]
    # The same look in each panel, whichever lines there are.
    looks = [{line.get_label(): line.get_color() for line in axes.get_lines()} for axes in figure.axes]
    assert looks[1].items() <= looks[0].items()
    upper = max(point[1] for point in second.collections[0].get_paths()[0].vertices)
    assert upper == pytest.approx(30 + 100 * np.std([0.2, 0.4], ddof=1))
    texts = {text.get_text() for text in figure.legends[0].get_texts()}
    assert "± sample std over 2 seeds" in texts
    check_layout(figure)


@pytest.mark.parametrize(
    "cells", [{"a": {"x": 1}}, {f"{at}": {"x": at, "y": at} for at in range(7)}, {"a": {"x": 1, "y": 1, "z": 1}}]
)
def test_other_options_are_not_drawn_so(cells):
    assert not option_curves.can_be_drawn(cells)
    with pytest.raises(ValueError, match="draw small_multiples"):
        option_curves.option_curves({"a": {"round": ROUNDS, "accuracy": ROUNDS}}, cells)


@pytest.mark.parametrize(("last", "scale"), [(3.0, "linear"), (3e19, "log")])
def test_a_cell_that_explodes_leaves_the_others_a_scale(last, scale):
    cells = {f"{x}-{y}": {"x": x, "y": y} for x in (1, 2) for y in (1, 2)}
    histories = {
        cell: {"round": ROUNDS, "loss": np.ones(len(ROUNDS)), "test_loss": np.linspace(0.5, end, len(ROUNDS))}
        for cell, end in zip(cells, (0.1, 0.2, 0.3, last), strict=True)
    }
    figure = option_curves.option_curves(histories, cells)
    assert {axes.get_yscale() for axes in figure.axes} == {scale}
