import functools

import numpy as np
import pytest

from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import cfl
from fedjax_cluster.algorithms.cfl.parameter_tree import parameter_tree
from fedjax_cluster.data import digits
from fedjax_cluster.data.scenarios import linear_regression, rotated
from fedjax_cluster.report import pages
from fedjax_cluster.report.methods import cfl as pictures
from fedjax_cluster.simulation.loop import simulate
from tests.federations import blobs

ALWAYS = ("learning_curves", "training_curves", "cluster_timeline", "client_labels", "group_by_cluster")


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


def test_splits_are_marked_where_clusters_are_counted_in_some_rounds_only(make_history):
    """Fault: of more than 65 536 clients hardly any split was marked: the round before it had no count."""
    counts = np.full(20, np.nan)
    counts[[4, 6, 9, 12, 19]] = 1, 2, 2, 3, 3
    axes = pictures.split_history(make_history(columns={"num_clusters": counts})).axes[0]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_label() == "split"] == [7, 13]


def test_a_split_in_the_first_round_is_marked_and_a_cluster_that_fills_again_is_none(make_history):
    def marked(counts, splits=None):
        figure = pictures.split_history(make_history(4, columns={"num_clusters": np.asarray(counts, float)}), splits)
        return [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_label() == "split"]

    assert marked([2, 2, 2, 2]) == [1]
    assert marked([2, 2, 1, 2], [0]) == [1]


def test_without_gaps_there_is_one_panel(make_history, check_layout):
    figure = pictures.split_history(make_history())
    assert len(figure.axes) == 1
    check_layout(figure)
    lost = dict.fromkeys(("accuracy", "test_loss", "loss"), np.full(20, np.nan))
    check_layout(pictures.split_history(make_history(columns=lost)))
    with pytest.raises(ValueError, match="no history has an accuracy"):
        pictures.split_history({"round": np.arange(20.0), "num_clusters": np.ones(20)})


def finished(federation, rounds=8, **options):
    method = cfl(nn.linear(), clusters=4, local=local.sgd(0.1, batch_size=None, steps=2), **options)
    return simulate(method, federation, rounds=rounds, eval_every=2)


@functools.cache
def split_run():
    return finished(rotated(digits(), clients=12), epsilon_1=9.0, epsilon_2=0.01, gamma_max=0.0, first_round=3)


@pytest.mark.slow
def test_the_tree_names_every_node(check_layout):
    run = split_run()
    figure = pictures.parameter_tree(parameter_tree(run), run.federation.info.group_names, run.federation.group)
    texts = [text.get_text() for text in figure.axes[0].texts]
    sizes = np.bincount(run.labels)
    for slot, size in enumerate(sizes):
        (box,) = [text for text in texts if text.startswith(f"cluster {slot}\n")]
        assert f"{size} client" in box
    assert sum(text.startswith("split in round") for text in texts) == len(sizes) - 1
    assert len(figure.axes[0].lines) == 2 * (len(sizes) - 1)
    check_layout(figure)


@pytest.mark.slow
def test_the_tree_names_groups_by_index_without_names():
    run = split_run()
    texts = [
        text.get_text() for text in pictures.parameter_tree(parameter_tree(run), (), run.federation.group).axes[0].texts
    ]
    assert any(text.endswith("groups 0, 1, 2, 3") for text in texts)


@pytest.mark.slow
def test_a_run_has_its_splits_the_last_similarities_and_the_tree(check_layout, tmp_path):
    run = split_run()
    splits = [event for event in run.events if len(event.content["child"])]
    drawn = pictures.figures(run)
    assert set(drawn) == {"split_history", "similarity_matrix", "parameter_tree"}
    for figure in drawn.values():
        check_layout(figure)
    content = splits[-1].content
    order = np.lexsort((run.federation.group, content["labels"]))
    shown = np.asarray(drawn["similarity_matrix"].axes[0].images[0].get_array())
    np.testing.assert_allclose(shown, content["similarity"][np.ix_(order, order)])
    marks = [line.get_xdata()[0] for line in drawn["split_history"].axes[0].lines if line.get_label() == "split"]
    assert marks == sorted({event.round + 1 for event in splits})
    names = {path.name for path in pages.write_plots(tmp_path, run)}
    assert names == {f"{name}.png" for name in (*drawn, *ALWAYS)}


@pytest.mark.slow
def test_a_run_without_a_split_has_its_curve():
    assert set(pictures.figures(finished(blobs(clients=6), rounds=2))) == {"split_history"}


@pytest.mark.slow
def test_regression_is_drawn_by_its_loss():
    data = linear_regression(clients=6, examples_per_client=20)
    run = finished(data, rounds=4, epsilon_1=9.0, epsilon_2=0.0, gamma_max=0.0, first_round=1)
    drawn = pictures.figures(run)
    assert drawn["split_history"].axes[0].get_ylabel() == "Test loss"
    assert "parameter_tree" in drawn


def test_chances_are_drawn_over_distributions_and_noise(check_layout):
    figure = pictures.split_probability([2, 5], [0.0, 0.5, 1.0], np.eye(3)[:2], [0.7, 0.2])
    check_layout(figure)
    with pytest.raises(ValueError, match="chance has shape"):
        pictures.split_probability([2, 5], [0.0, 0.5], np.eye(3))


def test_the_worst_tenth_of_all_is_no_curve_of_the_honest(make_history):
    columns = {"accuracy_honest": np.linspace(0.5, 0.9, 20), "accuracy_worst_decile": np.linspace(0.1, 0.2, 20)}
    axes = pictures.split_history(make_history(columns=columns)).axes[0]
    assert axes.get_ylabel() == "Honest clients' accuracy (%)"
    assert {"mean over honest clients", "worst tenth"} & set(lines_of(axes)) == {"mean over honest clients"}
