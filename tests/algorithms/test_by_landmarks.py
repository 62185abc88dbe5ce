"""Methods by landmark clients: with everybody as landmark the exact ones, with fewer what NumPy makes of them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster import clustering, cohorts, local, nn, parallel, privacy
from fedjax_cluster.algorithms import REGISTRY, cfl_gp, fedgwc, flag, pacfl
from fedjax_cluster.algorithms import round as rounds_of
from fedjax_cluster.algorithms.round import labels as labels_of
from fedjax_cluster.clustering.scores import adjusted_rand_index
from fedjax_cluster.data import in_memory, write_population
from fedjax_cluster.report.methods import fedgwc as fedgwc_pictures
from fedjax_cluster.simulation.abstract import abstract_arguments
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys, run_segment
from fedjax_cluster.types import Churn
from tests.algorithms.test_fedgwc import EPOCH, build, hard_and_easy, start_of
from tests.algorithms.test_flag_by_landmarks import flag_by
from tests.algorithms.test_pacfl_by_landmarks import pacfl_by
from tests.directions import FULL, lines, place
from tests.federations import as_lists, blobs
from tests.reference import fedgwc as reference
from tests.turns import drawn_batches, linear_models, turns

ONE = parallel.client_mapping("scan", devices=jax.devices()[:1])
TWO = parallel.client_mapping("chunked", 2, devices=jax.devices()[:2])
ROUNDS = 60
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
OPTIONS = {
    "paper": {"rate": 0.3, "centre": True, "participation": 0.5, "tolerance": 1e-2},
    # The first split comes before everybody was in a cohort.
    "unheard": {
        "rate": 1.0,
        "centre": False,
        "participation": 0.25,
        "tolerance": 1.0,
        "patience": 3,
        "sampling": "uniform",
        "beta": 0.2,
    },
    "counted": {"rate": "count", "centre": None, "participation": 0.3, "patience": None, "max_children": None},
}


# ------------------------------------------------------------------------------------------ FedGWC


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow("paper"), "counted"])
def test_fedgwc_by_everybody_is_the_exact_one(name):
    """The same cohorts, columns, averages and splits: nothing but the form of the state differs."""
    federation = hard_and_easy()
    own = {"local": EPOCH, "clusters": 3, **OPTIONS[name]}
    exact = simulate(build(**own), federation, rounds=ROUNDS, mapping=ONE)
    ours = simulate(build(**own, landmarks=12), federation, rounds=ROUNDS, mapping=ONE)
    assert len(exact.events) >= 1
    assert [event.round for event in exact.events] == [event.round for event in ours.events]
    assert exact.labels.tolist() == ours.labels.tolist()
    state, server = ours.state, exact.state.server
    assert state.server.landmarks.tolist() == list(range(12))
    np.testing.assert_allclose(state.clients.interactions, server.interactions, rtol=1e-5, atol=1e-6)
    if exact.algorithm.counted:
        np.testing.assert_array_equal(state.clients.meetings, server.meetings)
    np.testing.assert_allclose(state.server.average, server.average, rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(ours.history["loss"], exact.history["loss"], rtol=1e-5)
    for one, other in zip(ours.events, exact.events, strict=True):
        np.testing.assert_allclose(one.content["affinity"], other.content["affinity"], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", slow("counted"), "unheard"])
def test_fedgwc_by_some_is_algorithm_2_on_their_columns(name):
    federation, options = hard_and_easy(24 if name == "unheard" else 12), OPTIONS[name]
    sizes = federation.train.num_examples
    algorithm = build(local=EPOCH, clusters=3, landmarks=7, smallest=2, **options)
    played = turns(algorithm, federation, ROUNDS)
    last, chosen = played[-1].after, played[0].after.server.landmarks
    models, labels, matrix, average, splits = reference.fedgwc(
        linear_models(played[0].before.clusters.params)[0],
        [drawn_batches(turn, federation) for turn in played],
        sizes,
        rate=0.1,
        alpha=options["rate"],
        participation=options["participation"],
        tolerance=algorithm.tolerance,
        beta=algorithm.beta,
        patience=algorithm.patience,
        n_max=algorithm.max_children,
        smallest=2,
        slots=3,
        centre=algorithm.rows_centred,
        landmarks=chosen.tolist(),
        data=as_lists(federation),
    )
    events = [number for number, turn in enumerate(played) if turn.info.event]
    assert splits
    assert events[0] == splits[0][0]
    first = algorithm.snapshot(played[events[0]].after)
    np.testing.assert_allclose(first["affinity"], splits[0][2][np.ix_(chosen, chosen)], rtol=1e-3, atol=1e-5)
    assert float(first["index"]) == pytest.approx(splits[0][3], rel=1e-2)
    assert adjusted_rand_index(first["labels"], splits[0][1]) == 1.0
    found = np.asarray(labels_of(last.clients.membership))
    assert adjusted_rand_index(found, labels) == 1.0
    np.testing.assert_allclose(last.clients.interactions, matrix[:, chosen], rtol=2e-3, atol=2e-4)
    ours = linear_models(last.clusters.params)
    for client, slot in enumerate(labels):
        np.testing.assert_allclose(last.server.average[found[client]], average[slot], rtol=2e-2, atol=1e-8)
        for part, expected in zip(ours[found[client]], models[slot], strict=True):
            np.testing.assert_allclose(part, expected, rtol=2e-3, atol=2e-4)
    if name == "unheard":
        before, after = (np.asarray(turn.after.clients.seen) > 0 for turn in (played[events[0]], played[-1]))
        came = ~before & after
        assert (found != np.asarray(last.clients.drawn_with))[came].any()
        return
    # Half of the landmarks are in every cohort, as they are half of it at most.
    sizes = [len(set(turn.clients) & set(chosen.tolist())) for turn in played[: events[0] + 1]]
    assert min(sizes) >= min(4, len(played[0].clients) // 2)
    assert len({tuple(sorted(set(turn.clients) & set(chosen.tolist()))) for turn in played[: events[0]]}) > 1


@pytest.mark.slow
def test_a_round_by_landmarks_copies_no_clients_rows():
    """Written twice, all memberships were copied in every round: with ten million clients 0.056 s in place of 0.036."""
    shape = fc.PopulationShape(4096, 4, blobs().info, "float32")
    algorithm = build(local=EPOCH, clusters=3, landmarks=7, participation=0.01)
    text = (
        run_segment.trace(*abstract_arguments(algorithm, shape, ONE), algorithm=algorithm).lower().compile().as_text()
    )
    assert "f32[4096,3]" in text
    assert not re.findall(r"= f32\[4096,[37]\]\S* copy\(", text)


@pytest.mark.slow
def test_some_of_each_cluster_are_drawn_before_all_others():
    label, size = jnp.asarray([0] * 6 + [1] * 5 + [-1]), jnp.asarray([3, 2])
    some, most = jnp.asarray([1, 4, 7, 11]), jnp.asarray([1, 1])
    draw = jax.vmap(lambda key: cohorts.per_cluster(key, label, size, 5, first=(some, most)))
    index, mask, _ = draw(jax.random.split(jax.random.key(0), 2000))
    assert np.asarray(mask).all()
    index = np.asarray(index)
    assert ((index < 6).sum(1) == 3).all()
    assert (index == 7).any(1).all()
    found = np.stack([(index == one).any(1) for one in (1, 4)])
    assert found.any(0).all()
    assert 0.1 < found.all(0).mean() < 0.5  # the second comes as anybody may
    assert not (index == 11).any()


@pytest.mark.slow
def test_fedgwc_by_landmarks_takes_newcomers_and_draws_its_matrices():
    algorithm = build(rate="count", clusters=4, landmarks=8, smallest=2)
    churn = [Churn(4, leave=(0, 2)), Churn(9, join=(2,))]
    result = simulate(algorithm, hard_and_easy(), rounds=40, churn=churn, mapping=ONE)
    assert result.labels[0] == -1
    assert result.labels[2] >= 0
    state = start_of(algorithm, hard_and_easy())
    chosen = int(state.server.landmarks[3])
    clients = state.clients._replace(
        interactions=jax.random.uniform(jax.random.key(0), (12, 8)), meetings=jnp.full((12, 8), 3)
    )
    client = jax.tree.map(lambda leaf: jnp.asarray(leaf[chosen]), hard_and_easy().train)
    new = algorithm.admit(jax.random.key(0), state._replace(clients=clients), client, jnp.asarray(chosen)).clients
    assert (np.asarray(new.meetings)[chosen] == 0).all()
    assert (np.asarray(new.meetings)[:, 3] == 0).all()
    assert (np.asarray(new.interactions)[:, 3] == 0).all()
    rest, others = np.delete(np.asarray(clients.interactions), 3, 1), np.delete(np.asarray(new.interactions), 3, 1)
    np.testing.assert_array_equal(np.delete(others, chosen, 0), np.delete(rest, chosen, 0))
    assert (rest == others[chosen]).all(1).sum() == 1
    drawn = fedgwc_pictures.figures(result)
    assert {"interaction_matrices", "convergence"} <= set(drawn)


# ------------------------------------------------------------------------------------------ all of them


def with_landmarks(name, **options):
    own = {"cfl_gp": {"cluster_cohort": True, "participation": 0.6}, "fedgwc": {"participation": 0.4}}[name]
    training = local.sgd(0.1, batch_size=8, steps=2)
    return REGISTRY[name](nn.linear(), local=training, **{"clusters": 2, "landmarks": 5, **own, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "further"),
    [
        ("cfl_gp", {}),
        ("cfl_gp", {"profiles_of": "landmarks"}),
        ("fedgwc", {"tolerance": 1e-2, "beta": 0.1, "smallest": 2}),
        (
            "fedgwc",
            {"rate": 1.0, "tolerance": 1.0, "patience": 2, "max_children": 2, "smallest": 1, "participation": 0.3},
        ),
        (
            "fedgwc",
            {
                **{"rate": 1.0, "tolerance": 1.0, "patience": 2, "max_children": 2, "smallest": 1},
                **{"participation": 0.35, "sampling": "uniform", "landmarks": 16},
            },
        ),
    ],
    ids=["cfl_gp", "cfl_gp, landmarks' profiles", "fedgwc", "fedgwc, split early", "fedgwc, landmarks unheard"],
)
def test_rows_on_disk_devices_and_chunks_change_nothing(name, further, tmp_path):
    """Clients in memory on one device, in chunks on two, and on disk with cohorts read ahead."""
    unheard = further.get("landmarks") == 16
    federation, options = blobs(clients=41 if unheard else 13), {"rounds": 7, "eval_every": 4, "progress": False}
    if name == "fedgwc":
        options["rounds"] = 30
    ours = with_landmarks(name, **further)
    one = simulate(ours, federation, mapping=ONE, **options)
    if "rate" in further:  # somebody chose a cluster after the split, and is drawn with the other
        own = slice(None) if not unheard else one.state.server.landmarks
        assert (one.labels != one.state.clients.drawn_with)[own].any()
    two = simulate(ours, federation, mapping=TWO, **options)
    assert one.labels.tolist() == two.labels.tolist()
    np.testing.assert_allclose(one.history["loss"], two.history["loss"], rtol=1e-4)
    population = write_population(tmp_path / "p", federation, shard_megabytes=0.002)
    streamed = simulate(ours, population, mapping=ONE, **options)
    resident = simulate(ours, in_memory(population), mapping=ONE, **options)
    for a, b in zip(jax.tree.leaves(streamed.state), jax.tree.leaves(resident.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_landmarks_configurations_are_those_of_before():
    assert "landmarks" not in fedgwc(nn.linear(), clusters=2, local=FULL).config
    assert not {"landmarks", "profiles_of"} & set(cfl_gp(nn.linear(), clusters=2, local=FULL).config)
    assert with_landmarks("cfl_gp", profiles_of="landmarks").config["profiles_of"] == "landmarks"
    assert with_landmarks("fedgwc").config["landmarks"] == 5
    assert with_landmarks("fedgwc") != dataclasses.replace(with_landmarks("fedgwc"), landmarks=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cfl", "fedgwc", "flag", "pacfl", "cfl_gp"])
def test_what_does_not_fit_is_refused_in_one_line_with_its_bytes(name, monkeypatch):
    monkeypatch.setattr(rounds_of.parallel, "memory_left", lambda: 300.0)
    factory = {"cfl": REGISTRY["cfl"], "fedgwc": fedgwc, "flag": flag, "pacfl": pacfl, "cfl_gp": cfl_gp}[name]
    algorithm = factory(nn.linear(), clusters=2, local=FULL)
    with pytest.raises(ValueError, match=r"GB, but 3e-07 GB of this device are free") as error:
        algorithm.init(run_keys(0).initialization, place(lines()))
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(f"{name} takes")
    assert ("landmarks" in text) == (name in ("cfl", "fedgwc", "flag", "pacfl"))
    if name == "cfl_gp":
        few = dataclasses.replace(algorithm, landmarks=3)
        with pytest.raises(ValueError, match=r"or give profiles_of='landmarks'$"):
            few.init(run_keys(0).initialization, place(lines()))
        monkeypatch.setattr(rounds_of.parallel, "memory_left", lambda: 4.0 * 3 * 2 * 33)
        dataclasses.replace(few, profiles_of="landmarks").init(run_keys(0).initialization, place(lines()))
    if name == "fedgwc":
        few, population = dataclasses.replace(algorithm, landmarks=3), place(lines())
        size = len(population.data.num_examples)
        # P and the counts, and four matrices of a split.
        wanted = 4.0 * 3 * (2 * size + 4 * (3 + size))
        monkeypatch.setattr(rounds_of.parallel, "memory_left", lambda: wanted)
        few.init(run_keys(0).initialization, population)
        monkeypatch.setattr(rounds_of.parallel, "memory_left", lambda: wanted - 1)
        with pytest.raises(ValueError, match="give fewer landmarks"):
            few.init(run_keys(0).initialization, population)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build_it", "message"),
    [
        (lambda: fedgwc(nn.linear(), clusters=2, local=FULL, landmarks=1), "landmarks is 1"),
        (
            lambda: cfl_gp(nn.linear(), clusters=2, local=FULL, profiles_of="landmarks"),
            "profiles_of is 'landmarks', but there are none; give landmarks=256",
        ),
        (lambda: build(landmarks=3, variant="released"), "told apart by the columns of P"),
        (lambda: build(landmarks=3, perceived="columns"), "told apart by the columns of P"),
        (
            lambda: build(
                landmarks=3, sampling="uniform", privacy=privacy.gaussian(
                    clip=1.0, noise_multiplier=1.0, delta=1e-5, clustering_clip=1.0, clustering_noise_multiplier=1.0
                ),
            ),
            "landmarks are in more rounds than others",
        ),
        (
            lambda: start_of(build(landmarks=13), hard_and_easy()),
            "landmarks is 13, but there are only 12 clients; give at most 12",
        ),
        (lambda: flag_by(10).init(run_keys(0).initialization, place(lines())), "there are only 9 clients"),
        (lambda: pacfl_by(10).init(run_keys(0).initialization, place(lines())), "there are only 9 clients"),
        (
            lambda: with_landmarks("cfl_gp", every=3).init(run_keys(0).initialization, place(lines(6))),
            "landmarks is 5, but a cohort has only 4 clients",
        ),
        (
            lambda: dataclasses.replace(with_landmarks("cfl_gp"), clusters=6).init(
                run_keys(0).initialization, place(lines())
            ),
            "landmarks is 5, but clusters is 6",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(build_it, message):
    with pytest.raises(ValueError, match=message) as error:
        build_it()
    assert "\n" not in str(error.value)


def test_that_landmarks_leave_no_place_for_others_is_said(caplog):
    algorithm = dataclasses.replace(with_landmarks("cfl_gp", every=3), landmarks=4)
    algorithm.init(run_keys(0).initialization, place(lines(6)))
    assert "landmarks is 4, as many as a cohort has clients: others are never in a clustering round" in caplog.text


@pytest.mark.slow
def test_a_clustering_by_landmarks_is_what_cluster_gives():
    """What times the server's clusterings clusters as a round does, everybody in it."""
    federation = blobs(clients=16, groups=3)
    algorithm = cfl_gp(nn.linear(), clusters=3, local=local.sgd(0.3, batch_size=8, steps=3), every=1, landmarks=6)
    played = turns(algorithm, federation, 4)
    state = jax.tree.map(jnp.asarray, played[-1].after)
    found = jax.jit(algorithm.cluster)(jax.random.key(0), state)
    assert clustering.scores.adjusted_rand_index(found, labels_of(state.clients.membership)) == 1.0
