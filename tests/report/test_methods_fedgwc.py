import numpy as np
import pytest

from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import fedgwc as algorithm
from fedjax_cluster.data import digits
from fedjax_cluster.data.scenarios import linear_regression, rotated
from fedjax_cluster.report import pages
from fedjax_cluster.report.methods import fedgwc
from fedjax_cluster.simulation.loop import simulate
from tests.federations import blobs

RNG = np.random.default_rng(0)
GROUP = np.arange(12) % 2
MATRIX = np.where(GROUP[:, None] == GROUP[None], 0.9, 0.2) + 0.01 * RNG.random((12, 12))

ALWAYS = ("learning_curves", "training_curves", "cluster_timeline", "client_labels", "group_by_cluster")


def test_matrices_are_ordered_by_cluster(check_layout):
    figure = fedgwc.interaction_matrices(MATRIX, MATRIX, GROUP)
    check_layout(figure)
    shown = np.asarray(figure.axes[0].images[0].get_array().filled(np.nan), float)
    assert np.nanmin(shown[:6, :6]) > 0.8
    assert np.nanmin(shown[6:, 6:]) > 0.8
    assert np.nanmax(shown[:6, 6:]) < 0.3
    assert len(figure.axes[0].lines) == 2  # one border, across and down


def test_clients_of_other_clusters_are_left_out(check_layout):
    labels = np.where(np.arange(12) < 8, GROUP, -1)
    figure = fedgwc.interaction_matrices(MATRIX, MATRIX, labels, GROUP)
    assert figure.axes[0].images[0].get_array().shape == (8, 8)
    inside = labels >= 0
    affinity = MATRIX * inside[:, None] * inside[None]
    figure = fedgwc.spectral_embedding(affinity, labels, GROUP, ("clean", "blur"))
    check_layout(figure)
    points = np.concatenate([np.asarray(part.get_offsets()) for part in figure.axes[0].collections])
    assert len(points) == 8


def test_the_embedding_separates_blocks():
    figure = fedgwc.spectral_embedding(0.5 * (MATRIX + MATRIX.T), GROUP)
    sides = [np.sign(np.asarray(part.get_offsets())[:, 0]) for part in figure.axes[0].collections]
    assert [set(side.tolist()) for side in sides] in ([{1.0}, {-1.0}], [{-1.0}, {1.0}])


def test_convergence_has_a_line_per_cluster(check_layout):
    averages = {0: ([0, 120, 120, 290], [1, 1e-6, np.nan, 1]), 2: ([120, 290], [1, 1e-3])}
    figure = fedgwc.convergence(averages, 1e-5, (120, 200))
    check_layout(figure)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert set(texts) == {"Cluster 0", "Cluster 2", "Tolerance $\\epsilon$", "Split or refused"}
    assert figure.axes[0].get_yscale() == "log"


def test_class_distributions_are_means_of_shares(check_layout):
    counts = np.asarray([[9, 1, 0], [1, 9, 0], [30, 30, 30], [1, 1, 1], [0, 0, 0]])
    figure = fedgwc.class_distributions(counts, np.asarray([0, 0, 1, 1, 1]), ("cat", "dog", "eel"))
    check_layout(figure)
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["cat", "dog", "eel"]
    shares = np.asarray(figure.axes[0].images[0].get_array(), float)
    np.testing.assert_allclose(shares, [[50, 50, 0], [100 / 3] * 3])
    lines = [np.asarray(line.get_ydata()) for line in figure.axes[1].lines]
    np.testing.assert_allclose(lines, [[90, 10, 0], [100 / 3] * 3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fedgwc.interaction_matrices(MATRIX, MATRIX[:3], GROUP), "affinity has shape"),
        (lambda: fedgwc.interaction_matrices(MATRIX, MATRIX, -np.ones(12, int)), "nothing to draw"),
        (lambda: fedgwc.spectral_embedding(MATRIX, np.where(np.arange(12) < 2, 0, -1)), "at least three"),
        (lambda: fedgwc.convergence({1: ([0, 1], [1.0])}, 1e-5), "cluster 1 has 2 rounds and 1 averages"),
        (lambda: fedgwc.convergence({0: ([0, 1], [0.0, 0.0])}, 1e-5), "logarithmic"),
        (lambda: fedgwc.class_distributions(np.ones((3, 2)), GROUP), "12 labels"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -------------------------------------------------------------------------------------------- finished runs


def finished(federation, rounds, model=None, **options):
    method = algorithm(
        model or nn.mlp((32,)),
        clusters=4,
        local=local.sgd(0.1, batch_size=32, steps=5),
        participation=0.5,
        patience=3,
        **options,
    )
    return simulate(method, federation, rounds=rounds, eval_every=rounds)


@pytest.mark.slow
def test_a_run_has_its_matrices_embedding_convergence_and_classes(check_layout, tmp_path):
    run = finished(rotated(digits(), clients=12), 25, tolerance=0.05, rate="participation")
    split = next(event for event in run.events if (event.content["labels"] != event.content["previous"]).any())
    drawn = fedgwc.figures(run)
    names = {"interaction_matrices", "spectral_embedding", "convergence", "class_distributions"}
    assert names <= set(drawn)
    assert all(name in names or name.rstrip("_234") in names for name in drawn)
    for figure in drawn.values():
        check_layout(figure)
    order = np.lexsort((run.federation.group, split.content["labels"]))
    shown = drawn["interaction_matrices"].axes[0].images[0].get_array()
    off = ~np.eye(12, dtype=bool)
    np.testing.assert_allclose(np.asarray(shown)[off], split.content["interactions"][np.ix_(order, order)][off])
    lines = {line.get_label(): line.get_data() for line in drawn["convergence"].axes[0].lines}
    rounds, averages = lines["Cluster 0"]
    assert (rounds[0], averages[0]) == (0, 1)
    at = list(rounds).index(split.round + 1)
    np.testing.assert_allclose(averages[at], split.content["average"])
    assert averages[at] < 0.05
    assert rounds[-1] == 25
    np.testing.assert_allclose(averages[-1], run.state.server.average[0])
    written = {path.name for path in pages.write_plots(tmp_path, run)}
    assert written == {f"{name}.png" for name in (*drawn, *ALWAYS)}


@pytest.mark.slow
def test_a_run_without_a_split_shows_its_final_state():
    run = finished(blobs(clients=8), 3)
    drawn = fedgwc.figures(run)
    assert set(drawn) == {"interaction_matrices", "spectral_embedding", "convergence", "class_distributions"}
    assert drawn["interaction_matrices"].axes[0].images[0].get_array().shape == (8, 8)


@pytest.mark.slow
def test_regression_has_no_classes():
    run = finished(linear_regression(clients=6, examples_per_client=20), 2, model=nn.linear())
    assert "class_distributions" not in fedgwc.figures(run)
