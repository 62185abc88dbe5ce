"""PACFL: principal angles between clients' data."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import clustering, nn
from fedjax_cluster.algorithms import one_shot
from fedjax_cluster.algorithms.pacfl import pacfl
from fedjax_cluster.algorithms.round import labels as labels_of
from fedjax_cluster.report.methods.flag import figures
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import Churn
from tests.directions import FULL, LIGHT, SCAN, lines, pacfl_started, true_class_probability
from tests.federations import as_lists
from tests.reference import flag as reference
from tests.reference import linkage


def test_pacfl_takes_principal_angles_between_spans():
    _, state = pacfl_started()
    expected = reference.pacfl_angles(as_lists(lines()), num_classes=3, rank=1)
    np.testing.assert_allclose(state.server.angles, expected, atol=0.1)
    clusters = linkage.agglomerative(expected, "average", 14.0)
    assert labels_of(state.clients.membership).tolist() == reference.as_labels(clusters, 9).tolist()


def test_pacfl_chooses_its_threshold_on_held_out_rows(caplog):
    """As FLAG does, in degrees; the sweep is told, kept and drawn, and counted among the costs."""
    federation = lines(rows=60)
    algorithm = pacfl(
        nn.linear(), clusters=6, local=FULL, threshold="search", interval=0.1, search_epochs=2, search_rounds=3,
        light_model=LIGHT._replace(metrics=true_class_probability),
    )  # fmt: skip
    with caplog.at_level("INFO", "fedjax_cluster"):
        result = simulate(algorithm, federation, rounds=1, mapping=SCAN)
    (event,) = result.events
    degrees, counts, chosen = (event.content[name] for name in ("thresholds", "num_clusters", "chosen"))
    angles = event.content["angles"]
    assert degrees[0] == pytest.approx(float(clustering.dendrogram(angles).heights[-1]), rel=1e-4)
    assert event.content["threshold"] == degrees[chosen]
    for at, count in zip(degrees, counts, strict=True):
        assert len(set(np.asarray(clustering.agglomerative(angles, threshold=at)).tolist())) == count
    curve = event.content["accuracy"]
    assert chosen == reference.elbow(degrees / degrees[0], curve, counts, 6, "threshold") > 0
    assert len(set(result.labels.tolist())) == counts[chosen]
    # Beyond the round itself: so many distinct clusterings of nine clients, three rounds of two epochs each.
    assert result.history["gradient_evaluations"][0] == 9 * 2 + len(set(counts.tolist())) * 9 * 3 * 2
    assert any(f"{counts[-2]} clusters, {curve[-2]:.3f}" in record.getMessage() for record in caplog.records)
    assert set(figures(result)) == {"dendrogram", "threshold_search"}
    with pytest.raises(ValueError, match="threshold is 'elbow'"):
        pacfl(nn.linear(), clusters=2, local=FULL, threshold="elbow")


def test_pacfl_tells_when_it_finds_one_cluster_only(caplog):
    """Whoever gave no threshold reads what to try; nobody does where there are groups, or a threshold was given."""
    alike = lines()._replace(train=lines().train._replace(x=np.ones_like(lines().train.x)))
    for federation, options, told in ((alike, {}, 1), (lines(), {}, 0), (alike, {"threshold": 80.0}, 0)):
        caplog.clear()
        result = simulate(pacfl(nn.linear(), clusters=6, local=FULL, **options), federation, rounds=1, mapping=SCAN)
        assert len([record for record in caplog.records if "no two merges" in record.getMessage()]) == told
        assert (len(set(result.labels.tolist())) == 1) == (federation is alike)


def test_nearest_cluster_measures_as_the_linkage_does():
    distance = jnp.asarray([1.0, 9.0, 4.0, 5.0, 0.1])
    weights = jnp.asarray([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 0]])
    expected = {"average": 1, "single": 0, "complete": 1}
    for name, slot in expected.items():
        assert int(one_shot.nearest_cluster(distance, weights, jnp.ones(5, bool), name)) == slot
    # Without the first client its cluster is 9 away, however it is measured.
    for name in expected:
        assert int(one_shot.nearest_cluster(distance, weights, jnp.arange(5) > 0, name)) == 1


@pytest.mark.slow
def test_a_group_that_comes_back_is_in_its_cluster_again_and_in_no_other():
    """All slots are in use; the one that everybody had left is as good as a new one."""
    federation, method = lines(), pacfl(nn.linear(), clusters=3, local=FULL, threshold=14.0)
    before = simulate(method, federation, rounds=1, mapping=SCAN, progress=False).labels
    away = tuple(np.flatnonzero(before == 1).tolist())
    churn = [Churn(1, leave=away), Churn(2, join=away)]
    after = simulate(method, federation, rounds=3, mapping=SCAN, progress=False, churn=churn).labels
    assert len(set(before.tolist())) == 3
    assert after.tolist() == before.tolist()
