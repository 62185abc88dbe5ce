from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from fedjax_cluster.algorithms.cfl_gp.cfl_gp import Server
from fedjax_cluster.algorithms.cfl_gp.profiles import Clients
from fedjax_cluster.report import client_labels, clusters, curves, pages
from fedjax_cluster.report.methods import cfl_gp
from fedjax_cluster.types import ClientData, Clusters, DatasetInfo, Federation, State

CLIENTS, CAPACITY, CLUSTERS, WIDTH = 6, 8, 2, 5
GROUP = np.asarray([0, 0, 0, 1, 1, 1], np.int32)
ALL = ["client_features.png", "client_labels.png", "group_by_cluster.png", "learning_curves.png", "singular_values.png"]


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
        algorithm = SimpleNamespace(name=method)
        return SimpleNamespace(
            algorithm=algorithm, federation=federation, state=state, history=make_history(), events=(), labels=labels
        )

    return make


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
    (counts, group, names), _ = given["client_labels"]
    np.testing.assert_array_equal(counts, [[3, 0]] * 5)
    np.testing.assert_array_equal(group, [0, 0, 0, 1, 1])
    assert names == ("left", "right")
    (group, labels, _), _ = given["group_by_cluster"]
    assert len(group) == len(labels) == 5


def test_singular_values_are_those_of_the_profiles(make_result, tmp_path, given):
    result = make_result()
    pages.write_plots(tmp_path, result)
    (values,), options = given["singular_values"]
    profile = np.asarray(result.state.clients.profile).reshape(CAPACITY, -1)
    np.testing.assert_allclose(values, np.linalg.svd(profile, compute_uv=False)[:5], rtol=1e-3, atol=1e-3)
    assert options == {"chosen": CLUSTERS}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"method": "ifca"}, ["client_labels.png", "group_by_cluster.png", "learning_curves.png"]),
        ({"method": "ifca", "group": None}, ["client_labels.png", "learning_curves.png"]),
        ({"group": None}, ["client_features.png", "client_labels.png", "learning_curves.png", "singular_values.png"]),
        (
            {"group": np.full(CLIENTS, -1)},
            ["client_features.png", "client_labels.png", "learning_curves.png", "singular_values.png"],
        ),
        ({"clustered": False}, ["client_labels.png", "group_by_cluster.png", "learning_curves.png"]),
    ],
)
def test_what_does_not_apply_is_left_out(make_result, tmp_path, options, names):
    assert sorted(path.name for path in pages.write_plots(tmp_path, make_result(**options))) == names


def test_a_regression_has_no_labels(make_result, tmp_path):
    result = make_result("ifca")
    info = result.federation.info._replace(task="regression", num_classes=0)
    result.federation = result.federation._replace(info=info)
    assert "client_labels.png" not in [path.name for path in pages.write_plots(tmp_path, result)]


def test_curves_are_drawn_from_a_history_alone(make_history, tmp_path, given):
    history = make_history()
    (path,) = pages.write_plots(str(tmp_path), {"ifca": history})
    assert path == tmp_path / "plots" / "learning_curves.png"
    (histories,), _ = given["learning_curves"]
    assert histories == {"ifca": history}


def test_a_run_that_diverged_keeps_the_pictures_that_can_be_drawn(make_result, tmp_path, caplog):
    result = make_result()
    lost = jnp.full_like(result.state.server.grams, jnp.nan)
    result.state = result.state._replace(server=result.state.server._replace(grams=lost))
    result.history = {**result.history, **dict.fromkeys(("loss", "accuracy", "test_loss"), np.full(20, np.nan))}
    written = pages.write_plots(tmp_path, result)
    assert sorted(path.name for path in written) == ["client_labels.png", "group_by_cluster.png", "learning_curves.png"]
    assert "the pictures of cfl_gp alone are left out: " in caplog.text
