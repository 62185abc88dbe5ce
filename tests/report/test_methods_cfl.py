import functools

import numpy as np
import pytest

from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import cfl
from fedjax_cluster.algorithms.cfl.parameter_tree import parameter_tree
from fedjax_cluster.report.methods import cfl as pictures
from fedjax_cluster.simulation.loop import simulate
from tests.federations import blobs


def lines_of(axes):
    """Label -> (x, y) of the lines drawn."""
    return {line.get_label(): line.get_data() for line in axes.lines}


def watched(make_history):
    clusters = np.where(np.arange(20) < 6, 1.0, np.where(np.arange(20) < 12, 2.0, 3.0))
    gap = np.linspace(0.5, -0.1, 20)
    return make_history(
        columns={
            "num_clusters": clusters,
            "separation_gap_0": gap,
            "separation_gap_1": np.where(np.arange(20) < 6, np.nan, gap - 0.3),
            "separation_gap_2": np.full(20, np.nan),
        }
    )


def test_splits_are_marked_in_both_panels_where_clusters_became_more(make_history, check_layout):
    figure = pictures.split_history(watched(make_history))
    accuracy, gaps = figure.axes
    for axes in (accuracy, gaps):
        marks = [line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1]
        assert [mark for mark in marks if mark > 0] == [7, 13]
    assert (accuracy.get_ylabel(), gaps.get_xlabel()) == ("Test accuracy (%)", "Communication round")
    drawn = lines_of(gaps)
    assert {"cluster 0", "cluster 1"} <= set(drawn)
    assert "cluster 2" not in drawn
    assert drawn["cluster 1"][0].tolist() == list(range(7, 21))
    assert [text.get_text() for text in figure.legends[0].get_texts()].count("split") == 1
    check_layout(figure)


def test_without_gaps_there_is_one_panel(make_history, check_layout):
    figure = pictures.split_history(make_history())
    assert len(figure.axes) == 1
    check_layout(figure)
    with pytest.raises(ValueError, match="no history has an accuracy"):
        pictures.split_history(
            make_history(columns=dict.fromkeys(("accuracy", "test_loss", "loss"), np.full(20, np.nan)))
        )


@functools.cache
def grown():
    own = local.sgd(0.3, batch_size=None, steps=2)
    method = cfl(nn.linear(), clusters=4, local=own, epsilon_1=0.3, epsilon_2=0.3, gamma_max=0.5, first_round=4)
    return parameter_tree(simulate(method, blobs(clients=12, groups=3), rounds=10, eval_every=10))


def test_the_tree_names_every_node(check_layout):
    figure = pictures.parameter_tree(grown(), ("one", "two", "three"), np.arange(12) % 3)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert sum(text.startswith("cluster") for text in texts) == 3
    assert sum("4 clients" in text for text in texts) == 3
    assert sum(text.startswith("split in round") for text in texts) == 2
    assert len(figure.axes[0].lines) == 4
    check_layout(figure)


def test_chances_are_drawn_over_distributions_and_noise(check_layout):
    figure = pictures.split_probability([2, 5], [0.0, 0.5, 1.0], np.eye(3)[:2], [0.7, 0.2])
    check_layout(figure)
    with pytest.raises(ValueError, match="chance has shape"):
        pictures.split_probability([2, 5], [0.0, 0.5], np.eye(3))
