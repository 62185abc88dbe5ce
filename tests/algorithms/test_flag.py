"""FLAG and PACFL against plain NumPy, and what they must tell apart."""

import dataclasses
import functools
import shutil
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import clustering, local, nn, parallel
from fedjax_cluster.algorithms import one_shot
from fedjax_cluster.algorithms import threshold_search as flag_search
from fedjax_cluster.algorithms.flag.flag import flag
from fedjax_cluster.algorithms.pacfl import pacfl
from fedjax_cluster.algorithms.round import labels as labels_of
from fedjax_cluster.data import digits, scenarios
from fedjax_cluster.report.methods.flag import figures
from fedjax_cluster.simulation.loop import run_keys, simulate
from fedjax_cluster.simulation.run_directory import RunDirectory
from fedjax_cluster.types import ClientData, Federation
from tests.federations import INFO, as_lists, blobs
from tests.reference import federated, linkage
from tests.reference import flag as reference
from tests.turns import drawn_batches, linear_models, turns

SCAN = parallel.client_mapping("scan", devices=jax.devices()[:1])
FULL = local.sgd(0.3, batch_size=None, steps=2)
LIGHT = nn.linear()
EPOCHS, ROUNDS = 4, 3


def place(federation):
    return parallel.place_population(federation.train, federation.info, SCAN)


@functools.cache
def lines(clients=9, groups=3, rows=24, seed=0, permuted=False) -> Federation:
    """Classes are directions in ten dimensions with a little noise.

    Each group of clients has its own directions, or the same ones under other labels.
    """
    rng = np.random.default_rng(seed)
    basis = rng.normal(size=(groups, 3, 10))
    if permuted:
        basis = np.stack([np.roll(basis[0], shift, axis=0) for shift in range(groups)])
    group = np.arange(clients, dtype=np.int32) % groups
    count = rng.integers(rows // 2, rows + 1, clients).astype(np.int32)

    def draw(size, count):
        y = rng.integers(0, 3, (clients, size)).astype(np.int32)
        x = rng.normal(3, 1, (clients, size, 1)) * basis[group[:, None], y] + 0.2 * rng.normal(size=(clients, size, 10))
        padding = np.arange(size)[None] >= count[:, None]
        return ClientData(np.where(padding[..., None], 0, x).astype(np.float32), np.where(padding, 0, y), count)

    train, test = draw(rows, count), draw(12, np.full(clients, 12, np.int32))
    return Federation(train, test, None, group, INFO._replace(input_shape=(10,)))


@functools.cache
def at_threshold():
    """FLAG with α = 0.6 on nine clients in three groups, without the search."""
    algorithm = flag(nn.linear(), clusters=4, local=FULL, gradient_epochs=EPOCHS, max_vectors=2, threshold=0.6)
    return algorithm, *algorithm.init(run_keys(0).initialization, place(lines()))


def model_of(variables):
    params = variables.params["output"]
    return tuple(np.asarray(params[name], np.float64) for name in ("kernel", "bias"))


def measured(federation, start, share=0.01):
    arguments = {"num_classes": 3, "rank": 2, "share": share, "rate": 0.3, "epochs": EPOCHS}
    return [reference.measure(start, x, y, **arguments) for x, y in as_lists(federation)]


# ------------------------------------------------------------------------------------------ clustering


def test_matrices_and_clusters_are_algorithm_2():
    _, state, info = at_threshold()
    data, gradient, proximity = reference.matrices(measured(lines(), model_of(state.server.start)), delta=0.5, beta=0.5)
    np.testing.assert_allclose(state.server.matrices.data, data, atol=0.1)
    np.testing.assert_allclose(state.server.matrices.gradient, gradient, atol=0.1)
    np.testing.assert_allclose(state.server.matrices.proximity, proximity, atol=3e-3)
    clusters = linkage.agglomerative(proximity, "average", 0.6)
    assert labels_of(state.clients.membership).tolist() == reference.as_labels(clusters, 9).tolist()
    assert clustering.scores.adjusted_rand_index(labels_of(state.clients.membership), lines().group) == 1.0
    assert state.clusters.active.tolist() == [True, True, True, False]
    assert bool(info.event)


def test_training_is_federated_averaging_in_each_cluster():
    algorithm, state, _ = at_threshold()
    federation = lines()
    result = simulate(algorithm, federation, rounds=ROUNDS, mapping=SCAN)
    starts = [model_of(jax.tree.map(lambda leaf, k=k: leaf[k], state.clusters)) for k in range(3)]
    expected = reference.train_clusters(
        starts, federation.group, as_lists(federation), rate=0.3, steps=2, rounds=ROUNDS
    )
    trained = [model_of(jax.tree.map(lambda leaf, k=k: leaf[k], result.state.clusters)) for k in range(3)]
    for own, other in zip(trained, expected, strict=True):
        for part, value in zip(own, other, strict=True):
            np.testing.assert_allclose(part, value, rtol=1e-3, atol=1e-4)
    (event,) = result.events
    assert event.round == -1
    np.testing.assert_array_equal(event.content["proximity"], state.server.matrices.proximity)
    assert event.content["labels"].tolist() == federation.group.tolist()
    assert result.history["num_changed"].sum() == 0


@pytest.mark.parametrize("method", ["flag", "pacfl"])
def test_rounds_of_some_of_the_clients_are_averages_by_examples(method):
    """Catches a participation that is not heeded, and a mean by clients, by default or at all."""
    algorithm, state = at_threshold()[:2] if method == "flag" else pacfl_started()
    algorithm = dataclasses.replace(algorithm, participation=0.5, local=local.sgd(0.3, batch_size=4, steps=2))
    federation = lines()
    sizes = federation.train.num_examples
    for turn in turns(algorithm, federation, 2, state=state):
        assert len(turn.clients) == 5
        label = np.argmax(turn.before.clients.membership, -1)
        expected = federated.train_cohort(
            linear_models(turn.before.clusters.params), label, drawn_batches(turn, federation), 0.3, sizes
        )
        for own, other in zip(linear_models(turn.after.clusters.params), expected, strict=True):
            for part, value in zip(own, other, strict=True):
                np.testing.assert_allclose(part, value, rtol=1e-3, atol=1e-4)
    assert any(len(set(sizes[label == k].tolist())) > 1 for k in range(3))


def test_costs_of_the_clustering_are_counted():
    _, state, info = at_threshold()
    clients, size = 9, 33  # 10·3 + 3 parameters
    used = np.count_nonzero(np.abs(np.asarray(state.clients.vectors)).max(axis=2))
    assert float(info.costs.models_down) == clients
    assert float(info.costs.models_up) == pytest.approx(clients + used * 10 / size)
    assert float(info.costs.gradient_evaluations) == clients * EPOCHS
    assert used == np.count_nonzero(np.asarray(state.clients.counts))


def test_counts_that_are_not_shared_weigh_all_angles_equally():
    population = place(lines())
    arguments = {"clusters": 4, "local": FULL, "gradient_epochs": 0, "max_vectors": 2, "threshold": 0.6}
    private, _ = flag(nn.linear(), share_class_counts=False, **arguments).init(jax.random.key(0), population)
    uniform, _ = flag(nn.linear(), delta=0.0, **arguments).init(jax.random.key(0), population)
    np.testing.assert_allclose(private.server.matrices.data, uniform.server.matrices.data, rtol=1e-5)
    assert np.asarray(private.clients.counts).max() == 1
    assert np.abs(np.asarray(private.server.matrices.data) - at_threshold()[1].server.matrices.data).max() > 1.0
    # Without local epochs there is no direction: all angles are 90°, and Ĝ is 0.
    off = ~np.eye(9, dtype=bool)
    np.testing.assert_allclose(np.asarray(private.server.matrices.gradient)[off], 90.0)
    np.testing.assert_allclose(np.asarray(private.server.matrices.proximity).max(), 0.5, rtol=1e-5)


def test_a_client_that_cannot_be_measured_is_left_out_and_counted():
    population = place(lines())
    x = population.data.x.at[4].set(jnp.nan)
    broken = dataclasses.replace(population, data=population.data._replace(x=x))
    state, info = at_threshold()[0].init(run_keys(0).initialization, broken)
    others = np.arange(9) != 4
    found = np.asarray(labels_of(state.clients.membership))
    assert clustering.scores.adjusted_rand_index(found[others], lines().group[others]) == 1.0
    assert int(info.num_rejected) == 1
    assert found[4] in (0, 2)  # the largest: the other groups' three members
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.server.matrices, state.clients)))


@pytest.mark.parametrize("method", ["flag", "pacfl"])
def test_a_newcomer_joins_the_nearest_cluster(method):
    federation = lines()
    if method == "flag":
        algorithm, state, _ = at_threshold()
    else:
        algorithm, state = pacfl_started()
    for index in (3, 7):
        absent = jax.tree.map(lambda leaf, i=index: leaf.at[i].set(jnp.zeros_like(leaf[i])), state.clients)
        client = jax.tree.map(lambda leaf, i=index: jnp.asarray(leaf[i]), federation.train)
        new = jax.jit(algorithm.admit)(jax.random.key(9), state._replace(clients=absent), client, jnp.asarray(index))
        assert labels_of(new.clients.membership).tolist() == labels_of(state.clients.membership).tolist()


@pytest.mark.parametrize("linkage_name", ["average", "complete"])
def test_who_could_not_be_measured_disturbs_no_newcomer(linkage_name):
    """Clients 0 and 1 sent infinities; the others come back to where they were, and a third such to the largest."""
    population = place(lines())
    x = population.data.x.at[:2].set(jnp.nan)
    broken = dataclasses.replace(population, data=population.data._replace(x=x))
    algorithm = flag(
        nn.linear(), clusters=5, local=FULL, gradient_epochs=EPOCHS, max_vectors=2, threshold=0.6, linkage=linkage_name
    )
    state, info = algorithm.init(run_keys(0).initialization, broken)
    before = labels_of(state.clients.membership)
    assert int(info.num_rejected) == 2
    assert clustering.scores.adjusted_rand_index(before[2:], lines().group[2:]) == 1.0
    admit = jax.jit(algorithm.admit)
    for index in range(2, 9):
        absent = jax.tree.map(lambda leaf, i=index: leaf.at[i].set(jnp.zeros_like(leaf[i])), state.clients)
        client = jax.tree.map(lambda leaf, i=index: jnp.asarray(leaf[i]), lines().train)
        new = admit(jax.random.key(9), state._replace(clients=absent), client, jnp.asarray(index))
        assert labels_of(new.clients.membership).tolist() == before.tolist()
    sick = client._replace(x=jnp.full_like(client.x, jnp.nan))
    new = admit(jax.random.key(9), state._replace(clients=absent), sick, jnp.asarray(8))
    largest = np.bincount(before[:8]).argmax()
    assert int(labels_of(new.clients.membership)[8]) == largest
    assert not new.clients.known[8]


# ---------------------------------------------------------------------------------------------- search


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


def true_class_probability(predictions, y, mask):
    """Stands for the accuracy, which a few held-out rows round."""
    own = jnp.take_along_axis(predictions, y[:, None], axis=1)[:, 0]
    return {"accuracy": jnp.sum(jnp.where(mask, own, 0.0)) / jnp.sum(mask.astype(jnp.float32))}


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


def test_the_search_finds_the_groups():
    algorithm = flag(nn.linear(), clusters=6, local=FULL, gradient_epochs=EPOCHS, max_vectors=2, light_model=LIGHT)
    federation = lines(rows=60, permuted=True)
    result = simulate(algorithm, federation, rounds=1, mapping=SCAN)
    assert result.labels.tolist() == federation.group.tolist()
    (event,) = result.events
    assert event.content["accuracy"].shape == (11,)
    assert event.content["num_clusters"][event.content["chosen"]] == 3
    assert result.history["loss_evaluations"][0] > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threshold": 0.6},
        pytest.param({"newcomers": False}, marks=pytest.mark.slow),
        pytest.param({"gradient_epochs": 0, "beta": 1.0}, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_opened_again_does_not_cluster_again(tmp_path, monkeypatch, options):
    algorithm = flag(
        nn.linear(), clusters=9, local=FULL, light_model=LIGHT, **{"gradient_epochs": 1, "search_rounds": 1, **options}
    )
    population = place(lines())

    def shapes(state):
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]

    assert shapes(algorithm.template(jax.random.key(0), population)) == shapes(
        algorithm.init(jax.random.key(0), population)
    )
    whole = simulate(algorithm, lines(), rounds=3, mapping=SCAN)
    simulate(algorithm, lines(), rounds=2, mapping=SCAN, run_dir=tmp_path / "run")

    def never(*arguments, **options):
        raise AssertionError("clustered again")

    with monkeypatch.context() as patched:
        patched.setattr(flag, "init", never)
        resumed = simulate(algorithm, lines(), rounds=3, mapping=SCAN, run_dir=tmp_path / "run")
    for one, other in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(resumed.events[0].content["proximity"], whole.events[0].content["proximity"])
    # A folder that looks like a checkpoint and is none.
    (tmp_path / "empty" / "checkpoints" / "2").mkdir(parents=True)
    shutil.copy(tmp_path / "run" / "config.json", tmp_path / "empty")
    monkeypatch.setattr(RunDirectory, "restore", lambda self, like: None)
    anew = simulate(algorithm, lines(), rounds=3, mapping=SCAN, run_dir=tmp_path / "empty")
    np.testing.assert_array_equal(anew.labels, whole.labels)


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


# ----------------------------------------------------------------------------------------------- PACFL


@functools.cache
def pacfl_started():
    algorithm = pacfl(nn.linear(), clusters=5, local=FULL, threshold=14.0, num_vectors=1)
    return algorithm, algorithm.init(run_keys(0).initialization, place(lines()))[0]


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


def test_nearest_cluster_measures_as_the_linkage_does():
    distance = jnp.asarray([1.0, 9.0, 4.0, 5.0, 0.1])
    weights = jnp.asarray([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 0]])
    expected = {"average": 1, "single": 0, "complete": 1}
    for name, slot in expected.items():
        assert int(one_shot.nearest_cluster(distance, weights, jnp.ones(5, bool), name)) == slot
    # Without the first client its cluster is 9 away, however it is measured.
    for name in expected:
        assert int(one_shot.nearest_cluster(distance, weights, jnp.arange(5) > 0, name)) == 1


# ------------------------------------------------------------------------------- what must be told apart


@pytest.mark.slow
def test_permuted_labels_are_seen_by_flag_and_not_by_pacfl():
    """Concept shift: the same images under permuted labels span the same space."""
    federation = scenarios.label_permutation(digits(), clients=12, num_groups=3, seed=0)
    own = local.sgd(0.1, batch_size=10, epochs=2)
    found = {}
    for name, algorithm in {
        "flag": flag(nn.mlp(hidden=(16,)), clusters=8, local=own, gradient_epochs=10),
        "pacfl": pacfl(nn.mlp(hidden=(16,)), clusters=12, local=own, threshold=10.0),
    }.items():
        state, _ = algorithm.init(run_keys(0).initialization, place(federation))
        found[name] = clustering.scores.adjusted_rand_index(labels_of(state.clients.membership), federation.group)
    assert found["flag"] == 1.0
    assert found["pacfl"] < 0.5


# ------------------------------------------------------------------------------------------------ input


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        (flag, {"clusters": 0}, "clusters is 0"),
        (flag, {"beta": 1.5}, "beta is 1.5"),
        (flag, {"delta": -0.1}, "delta is -0.1"),
        (flag, {"threshold": 2.0}, "threshold is 2.0"),
        (flag, {"gradient_epochs": -1}, "gradient_epochs is -1"),
        (flag, {"max_vectors": 0}, "max_vectors is 0"),
        (flag, {"vector_share": 0.0}, "vector_share is 0.0"),
        (flag, {"interval": 0.3}, "interval is 0.3"),
        (flag, {"linkage": "ward"}, "linkage is 'ward'"),
        (flag, {"angles": "mean"}, "angles is 'mean'"),
        (flag, {"search_clients": 0}, "search_clients is 0"),
        (flag, {"search_epochs": 0}, "search_epochs is 0"),
        (flag, {"elbow": "alpha"}, "elbow is 'alpha'"),
        (flag, {"local": object(), "gradient_epochs": 0, "search_epochs": 2}, "must be a LocalUpdate"),
        (flag, {"local": object()}, "must be a LocalUpdate"),
        (pacfl, {"clusters": 0}, "clusters is 0"),
        (pacfl, {"threshold": -1.0}, "threshold is -1.0"),
        (pacfl, {"num_vectors": 0}, "num_vectors is 0"),
        (pacfl, {"angles": "mean"}, "angles is 'mean'"),
    ],
)
def test_mistakes_are_named(method, arguments, message):
    with pytest.raises(ValueError, match=message):
        method(nn.linear(), **{"clusters": 2, "local": FULL, **arguments})


def test_more_clusters_than_slots_are_refused():
    algorithm = pacfl(nn.linear(), clusters=2, local=FULL, threshold=0.0, num_vectors=1)
    with pytest.raises(ValueError, match="found 9 clusters at 0°, but clusters is 2"):
        algorithm.init(jax.random.key(0), place(lines()))


def test_examples_without_classes_are_refused():
    population = place(blobs())
    regression = dataclasses.replace(population, info=population.info._replace(num_classes=0, task="regression"))
    for method in (flag, pacfl):
        with pytest.raises(ValueError, match="class by class"):
            method(nn.linear(), clusters=2, local=FULL).init(jax.random.key(0), regression)
