import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from fedjax_cluster.report import client_labels, clusters, curves, pages, run_page
from fedjax_cluster.report.methods import cfl_gp
from fedjax_cluster.report.shown_clients import shown_clients

CLIENTS, CAPACITY, CLUSTERS = 6, 8, 2  # of `make_result`
ROUNDS = ["cluster_timeline.png", "learning_curves.png", "training_curves.png"]
ALL = sorted([*ROUNDS, "client_features.png", "client_labels.png", "group_by_cluster.png", "singular_values.png"])


@pytest.fixture
def given(monkeypatch):
    """Name of each picture -> what it was asked to show."""
    calls = {}

    def spy(module, name):
        draw = getattr(module, name)

        def note(*args, **kwargs):
            calls[name] = (args, kwargs)
            return draw(*args, **kwargs)

        monkeypatch.setattr(module, name, note)

    for module, name in (
        (curves, "learning_curves"),
        (cfl_gp, "singular_values"),
        (clusters, "client_features"),
        (clusters, "group_by_cluster"),
        (client_labels, "client_labels"),
    ):
        spy(module, name)
    return calls


@pytest.mark.slow
def test_everything_that_applies_is_drawn(make_result, tmp_path, given):
    written = pages.write_plots(tmp_path, make_result())
    assert sorted(path.name for path in written) == ALL
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ALL, "and nothing is left half written"
    for path in written:
        with Image.open(path) as image:
            image.verify()
    # The client without examples, and the rows beyond the federation, are not shown.
    (features, group, labels, names), _ = given["client_features"]
    assert features.shape == (5, CLUSTERS)
    np.testing.assert_array_equal(group, [0, 0, 0, 1, 1])
    np.testing.assert_array_equal(labels, [1, 1, 1, 0, 0])
    assert names == ("left", "right")
    assert np.linalg.norm(features[0] - features[1]) < 0.5 * np.linalg.norm(features[0] - features[3])
    (counts, group, names, _), _ = given["client_labels"]
    np.testing.assert_array_equal(counts, [[3, 0]] * 5)
    np.testing.assert_array_equal(group, [0, 0, 0, 1, 1])
    assert names == ("left", "right")
    (group, labels, _), _ = given["group_by_cluster"]
    assert len(group) == len(labels) == 5


def test_the_number_of_clusters_is_drawn_in_steps_where_it_changed(make_result):
    """It was a flat panel where K is given, and a slope between the rounds of a split."""
    run = make_result()
    assert [axes.get_ylabel() for axes in pages.round_figures(run)["training_curves"].axes] == ["Training loss"]
    counts = np.repeat([1.0, 2.0], 10)
    figure = pages.round_figures({"cfl": {**run.history, "num_clusters": counts}})["training_curves"]
    (line,) = figure.axes[1].get_lines()
    np.testing.assert_array_equal(line.get_ydata(), counts)
    assert line.get_drawstyle() == "steps-post"


@pytest.mark.slow
def test_singular_values_are_those_of_the_profiles(make_result, tmp_path, given):
    result = make_result()
    pages.write_plots(tmp_path, result)
    (values,), options = given["singular_values"]
    profile = np.asarray(result.state.clients.profile).reshape(CAPACITY, -1)
    np.testing.assert_allclose(values, np.linalg.svd(profile, compute_uv=False)[:5], rtol=1e-3, atol=1e-3)
    assert options == {"chosen": CLUSTERS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"method": "ifca"}, ["client_labels.png", "group_by_cluster.png"]),
        ({"method": "ifca", "group": None}, ["client_labels.png"]),
        ({"group": None}, ["client_features.png", "client_labels.png", "singular_values.png"]),
        ({"group": np.full(CLIENTS, -1)}, ["client_features.png", "client_labels.png", "singular_values.png"]),
        ({"clustered": False}, ["client_labels.png", "group_by_cluster.png"]),
    ],
)
def test_what_does_not_apply_is_left_out(make_result, tmp_path, options, names):
    written = pages.write_plots(tmp_path, make_result(**options))
    assert sorted(path.name for path in written) == sorted([*ROUNDS, *names])


def test_of_one_model_for_all_no_agreement_with_groups_is_drawn(make_result):
    """FedAvg's adjusted Rand index was a flat line at 0 below its accuracy."""
    run = make_result("ifca")
    assert "Adjusted Rand index" in [axes.get_ylabel() for axes in pages.run_figures(run)["learning_curves"].axes]
    run.state = run.state._replace(clusters=run.state.clusters._replace(active=np.ones(1, bool)))
    drawn = pages.run_figures(run)
    assert [axes.get_ylabel() for axes in drawn["learning_curves"].axes] == ["Test accuracy (%)"]
    assert "group_by_cluster" not in drawn


@pytest.mark.slow
def test_a_regression_has_no_labels(make_result, tmp_path):
    result = make_result("ifca")
    info = result.federation.info._replace(task="regression", num_classes=0)
    result.federation = result.federation._replace(info=info)
    assert "client_labels.png" not in [path.name for path in pages.write_plots(tmp_path, result)]


def test_curves_are_drawn_from_a_history_alone(make_history, tmp_path, given):
    history = make_history()
    paths = pages.write_plots(str(tmp_path), {"ifca": history})
    assert paths == [tmp_path / "plots" / name for name in ("learning_curves.png", "training_curves.png")]
    (histories,), _ = given["learning_curves"]
    assert histories == {"ifca": history}


@pytest.mark.slow
def test_a_run_that_diverged_keeps_the_pictures_that_can_be_drawn(make_result, tmp_path, caplog):
    result = make_result()
    lost = jnp.full_like(result.state.server.grams, jnp.nan)
    result.state = result.state._replace(server=result.state.server._replace(grams=lost))
    result.history = {**result.history, **dict.fromkeys(("loss", "accuracy", "test_loss"), np.full(20, np.nan))}
    written = pages.write_plots(tmp_path, result)
    left = ["learning_curves.png", "client_labels.png", "cluster_timeline.png", "group_by_cluster.png"]
    assert sorted(path.name for path in written) == sorted(left)
    assert "the pictures of cfl_gp alone are left out: " in caplog.text


def test_labels_of_which_a_row_has_several_have_no_picture(make_result):
    result = make_result()
    rows = result.federation.train._replace(y=np.zeros((CLIENTS, 3, 2), np.int32))
    result.federation = result.federation._replace(train=rows)
    assert "client_labels" not in pages.run_figures(result)
    assert "Labels of each cluster" not in run_page._clients(
        result, shown_clients(result), run_page.Told({}, {}, {}, {})
    )
