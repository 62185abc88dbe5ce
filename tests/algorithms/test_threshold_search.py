"""FLAG's search for a threshold on held-out rows, Algorithm 3."""

import functools
import shutil
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import clustering, local, nn
from fedjax_cluster.algorithms import threshold_search as flag_search
from fedjax_cluster.algorithms.flag.flag import flag
from fedjax_cluster.algorithms.pacfl import pacfl
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.run_directory import RunDirectory
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import ClientData
from tests.directions import (
    EPOCHS,
    FULL,
    LIGHT,
    ROUNDS,
    SCAN,
    at_threshold,
    lines,
    model_of,
    place,
    true_class_probability,
)
from tests.federations import blobs
from tests.reference import flag as reference


@pytest.mark.slow
@pytest.mark.parametrize(("clusters", "said"), [(1, True), (9, False)])
def test_an_elbow_that_does_not_fit_is_said(clusters, said, caplog):
    algorithm = flag(
        nn.linear(), clusters=clusters, local=FULL, gradient_epochs=EPOCHS, max_vectors=2, interval=0.25,
        light_model=LIGHT._replace(metrics=true_class_probability),
    )  # fmt: skip
    state, _ = algorithm.init(run_keys(0).initialization, place(lines()))
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("fedjax_cluster")]
    assert any("3 clusters, but clusters is 1" in message for message in messages) == said
    assert len(messages) == said
    assert int(state.clusters.active.sum()) == (1 if said else 3)


@functools.cache
def searched():
    federation = lines()
    model = LIGHT._replace(metrics=true_class_probability)
    thresholds = flag_search.threshold_grid(0.25)
    _, state, _ = at_threshold()
    tree = clustering.dendrogram(state.server.matrices.proximity)
    labels = flag_search.cuts(tree, thresholds)
    calls = []
    train = flag_search.train_in_clusters

    def watched(rng_key, population, index, slot, start, **options):
        calls.append((rng_key, index, slot, start))
        return train(rng_key, population, index, slot, start, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flag_search, "train_in_clusters", watched)
        found, effort = flag_search.search_threshold(
            jax.random.key(3), place(federation), labels, thresholds, model=model, update=FULL, num_clients=6,
            rounds=ROUNDS, slots=5,
        )  # fmt: skip
    return thresholds, labels, found, effort, calls


@pytest.mark.slow
def test_the_curve_is_algorithm_3():
    """Held-out scores equal those of NumPy's clustered training on the same rows."""
    thresholds, labels, found, _, calls = searched()
    federation = lines()
    rng_key, index, _, start = calls[0]
    assert len(index) == 6
    split_key, _ = jax.random.split(rng_key)
    kept, held = [], []
    for client in index:
        data = jax.tree.map(lambda leaf, i=client: jnp.asarray(leaf[i]), federation.train)
        parts = flag_search.hold_out(jax.random.fold_in(split_key, client), data)
        for rows, part in zip((kept, held), parts, strict=True):
            count = int(part.num_examples)
            rows.append((np.asarray(part.x[:count], np.float64), np.asarray(part.y[:count])))
    for place_, _ in enumerate(thresholds):
        expected = reference.held_out_score(
            model_of(start), kept, held, labels[place_, index], rate=0.3, steps=2, rounds=ROUNDS
        )
        assert found.accuracy[place_] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_each_distinct_clustering_is_trained_once():
    thresholds, labels, found, effort, calls = searched()
    assert found.num_clusters.tolist() == [1, *(labels[1:].max(1) + 1)]
    distinct = {tuple(np.unique(labels[place_, calls[0][1]], return_inverse=True)[1]) for place_ in range(5)}
    assert len(calls) == len(distinct) < len(thresholds)
    assert effort.models == len(calls) * 6 * ROUNDS
    assert effort.gradients == len(calls) * 6 * ROUNDS * 2
    assert len({tuple(call[1]) for call in calls}) == 1


@pytest.mark.parametrize(
    ("accuracy", "counts", "slots", "chosen", "elbow"),
    [
        ([0.5, 0.6, 0.95, 0.94, 0.93], [1, 2, 4, 8, 30], 10, 2, 2),
        ([0.5, 0.9, 0.9, 0.9, 0.8], [1, 4, 4, 7, 30], 10, 1, 1),
        ([0.5, 0.55, 0.6, 0.95, 0.9], [1, 2, 3, 12, 30], 10, 0, 3),
        ([0.9, 0.5, 0.5, 0.6, 0.9], [1, 2, 4, 8, 30], 10, 0, 0),
        ([0.7, 0.7, 0.7, 0.7, 0.7], [1, 2, 4, 8, 30], 10, 0, 0),
        ([np.nan, np.nan, np.nan, np.nan, np.nan], [1, 2, 4, 8, 30], 10, 0, 0),
    ],
    ids=["elbow", "first-of-a-plateau", "slots", "below-the-chord", "flat", "nothing-held-out"],
)
def test_the_elbow(accuracy, counts, slots, chosen, elbow):
    thresholds = flag_search.threshold_grid(0.25)
    found = flag_search.choose(thresholds, np.asarray(accuracy), np.asarray(counts), slots)
    assert found == (chosen, elbow)


@pytest.mark.parametrize("axis", get_args(flag_search.Axis))
def test_the_elbow_is_the_highest_point_above_the_chord(axis):
    rng = np.random.default_rng(5)
    thresholds = flag_search.threshold_grid(0.1)
    for _ in range(100):
        counts = np.sort(np.append(rng.integers(1, 60, 9), (1, 60)))
        # Equal clusterings have equal accuracies.
        accuracy = rng.uniform(0.4, 1.0, 61)[counts].astype(np.float32)
        slots = int(rng.integers(1, 70))
        expected = tuple(reference.elbow(thresholds, accuracy, counts, most, axis) for most in (slots, 60))
        assert flag_search.choose(thresholds, accuracy, counts, slots, axis) == expected


def test_axes_of_the_elbow_disagree():
    """Four clusters, five, and twenty that are better by noise: the curve of five groups that share labels."""
    accuracy = np.asarray([0.61, 0.61, 0.59, 0.85, 0.85, 0.874, 0.874, 0.875, 0.92, 0.88, 0.87])
    counts = np.asarray([1, 1, 2, 4, 4, 5, 5, 7, 20, 67, 100])
    thresholds = flag_search.threshold_grid(0.1)
    chosen = {
        axis: counts[flag_search.choose(thresholds, accuracy, counts, 100, axis)[0]]
        for axis in get_args(flag_search.Axis)
    }
    assert chosen == {"threshold": 4, "clusters": 20, "log-clusters": 5}


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 9, 10, 25, 70, 250])
def test_a_tenth_is_held_out_and_of_few_rows_more(number):
    rows = 250
    data = ClientData(jnp.arange(rows, dtype=jnp.float32)[:, None], jnp.arange(rows), jnp.asarray(number, jnp.int32))
    kept, held = flag_search.hold_out(jax.random.key(number), data)
    left, tested = (np.asarray(part.y[: int(part.num_examples)]) for part in (kept, held))
    assert sorted([*left.tolist(), *tested.tolist()]) == list(range(number))
    assert len(tested) == (0 if number == 1 else max(1, round(number / 10), min(number // 3, 20)))
    assert kept.x.shape == data.x.shape
    assert number < 25 or tested.tolist() != list(range(number))[-len(tested) :]


@pytest.mark.slow
def test_the_search_finds_the_groups():
    algorithm = flag(nn.linear(), clusters=6, local=FULL, gradient_epochs=EPOCHS, max_vectors=2, light_model=LIGHT)
    federation = lines(rows=60, permuted=True)
    result = simulate(algorithm, federation, rounds=1, mapping=SCAN)
    assert result.labels.tolist() == federation.group.tolist()
    (event,) = result.events
    assert event.content["accuracy"].shape == (11,)
    assert event.content["num_clusters"][event.content["chosen"]] == 3
    assert result.history["loss_evaluations"][0] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (flag, {"gradient_epochs": 1, "search_rounds": 1, "light_model": LIGHT}),
        (flag, {"gradient_epochs": 1, "search_rounds": 1, "threshold": 0.6}),
        (flag, {"gradient_epochs": 1, "search_rounds": 1, "newcomers": False}),
        (flag, {"gradient_epochs": 0, "search_rounds": 1, "beta": 1.0}),
        (pacfl, {}),
        (pacfl, {"threshold": "search", "search_rounds": 1, "light_model": LIGHT}),
        (pacfl, {"threshold": 5.0, "landmarks": 4}),
    ],
)
def test_a_run_that_is_opened_again_does_not_cluster_again(tmp_path, monkeypatch, method, options):
    algorithm = method(nn.linear(), clusters=9, local=FULL, **options)
    population = place(lines())

    def shapes(state):
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]

    assert shapes(algorithm.template(jax.random.key(0), population)) == shapes(
        algorithm.init(jax.random.key(0), population)
    )
    whole = simulate(algorithm, lines(), rounds=3, mapping=SCAN)
    first = simulate(algorithm, lines(), rounds=2, mapping=SCAN, run_dir=tmp_path / "run", time_clustering=True)

    def never(*arguments, **options):
        raise AssertionError("clustered again")

    with monkeypatch.context() as patched:
        patched.setattr(method, "init", never)
        again = {"run_dir": tmp_path / "run", "time_clustering": True}
        resumed = simulate(algorithm, lines(), rounds=3, mapping=SCAN, **again)
    assert resumed.history["clustering_seconds"].tolist() == [first.history["clustering_seconds"][0], 0, 0]
    for one, other in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(one, other)
    matrix = "proximity" if method is flag else "angles"
    np.testing.assert_array_equal(resumed.events[0].content[matrix], whole.events[0].content[matrix])
    # A folder that looks like a checkpoint and is none.
    (tmp_path / "empty" / "checkpoints" / "2").mkdir(parents=True)
    shutil.copy(tmp_path / "run" / "config.json", tmp_path / "empty")
    monkeypatch.setattr(RunDirectory, "restore", lambda self, like: None)
    anew = simulate(algorithm, lines(), rounds=3, mapping=SCAN, run_dir=tmp_path / "empty")
    np.testing.assert_array_equal(anew.labels, whole.labels)


@pytest.mark.slow
def test_the_search_takes_its_own_epochs_and_axis():
    arguments = {"clusters": 9, "gradient_epochs": 0, "max_vectors": 2, "light_model": LIGHT, "interval": 0.5}
    found = {}
    for epochs in (None, 3):
        algorithm = flag(nn.linear(), local=FULL, search_epochs=epochs, elbow="clusters", **arguments)
        _, info = algorithm.init(run_keys(0).initialization, place(lines()))
        found[epochs] = float(info.costs.gradient_evaluations)
        assert algorithm.search_epochs == epochs
        assert algorithm.elbow == "clusters"
    # A whole local data set is one mini-batch: two steps of `local` against three epochs.
    assert found[None] > 0
    assert found[3] / found[None] == 3 / 2


def test_alpha_one_is_one_cluster_whatever_rounding_says():
    distance = np.full((5, 5), np.float32(1.0000001)) * (1 - np.eye(5, dtype=np.float32))
    assert flag_search.cuts(clustering.dendrogram(distance), flag_search.threshold_grid(1.0)).tolist() == [
        [0] * 5,
        list(range(5)),
    ]


@pytest.mark.slow
def test_a_light_model_whose_metrics_have_no_accuracy_is_named():
    light = nn.linear()._replace(metrics=lambda predictions, y, mask: {"nll": jnp.zeros(())})
    own = local.sgd(0.1, batch_size=8, steps=1)
    method = flag(nn.linear(), clusters=8, local=own, light_model=light, interval=0.25, search_rounds=1)
    with pytest.raises(
        ValueError, match="by held-out accuracy, but metrics of light_model are nll; give a light_model"
    ):
        simulate(method, blobs(), rounds=1, progress=False)


def test_light_models_are_averaged_as_the_runs_are(monkeypatch):
    """Fault: with weighting="uniform" the threshold was chosen by models that were averaged by examples."""

    class Asked(Exception):
        pass

    def ask(*arguments, **options):
        raise Asked(options["weighting"])

    monkeypatch.setattr(flag_search, "cluster_round", ask)
    for weighting in ("uniform", "examples"):
        algorithm = flag(
            nn.linear(), clusters=4, local=FULL, gradient_epochs=EPOCHS, max_vectors=2, light_model=LIGHT,
            weighting=weighting,
        )  # fmt: skip
        with pytest.raises(Asked, match=weighting):
            algorithm.init(run_keys(0).initialization, place(lines()))
