"""CFL by landmark clients: with everybody as landmark Algorithm 5, with fewer what NumPy makes of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster import cohorts, local, nn, parallel, privacy
from fedjax_cluster.algorithms import cfl
from fedjax_cluster.algorithms.cfl import landmarks as by_landmarks
from fedjax_cluster.algorithms.cfl import parameter_tree as trees
from fedjax_cluster.algorithms.round import labels as labels_of
from fedjax_cluster.clustering.scores import adjusted_rand_index
from fedjax_cluster.data import in_memory, write_population
from fedjax_cluster.report.methods import cfl as pictures
from fedjax_cluster.simulation import run_keys, simulate
from fedjax_cluster.types import Churn
from tests.directions import place
from tests.federations import blobs, play
from tests.reference import cfl as reference
from tests.reference.federated import change_on
from tests.turns import drawn_batches, linear_models, turns, uneven

ONE = parallel.client_mapping("scan", devices=jax.devices()[:1])
RATE, ROUNDS = 0.3, 12


def build(**options):
    own = {
        **{"clusters": 4, "local": local.sgd(RATE, batch_size=8, steps=3), "first_round": 1, "gamma_max": 0.3},
        **{"near": 0.9, "far": 0.1, "landmarks": 6, **options},
    }
    return cfl(nn.linear(), **own)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"similarity_of": "gradients", "weighting": "examples"}, {"transform": "hadamard", "aggregation": "median"}],
    ids=["plain", "gradients", "transformed"],
)
def test_with_everybody_as_landmark_it_is_the_exact_one(options):
    federation = uneven()
    exact, ours = (
        simulate(build(landmarks=number, **options), federation, rounds=ROUNDS, mapping=ONE, progress=False)
        for number in (None, 9)
    )
    assert exact.history["num_clusters"][-1] > 1
    assert exact.labels.tolist() == ours.labels.tolist()
    for name in ("num_clusters", "num_changed", "loss", "accuracy", "models_up", "gradient_evaluations"):
        np.testing.assert_allclose(ours.history[name], exact.history[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(ours.state.server.similarity, exact.state.server.similarity, atol=1e-5)


@pytest.mark.slow
def test_a_round_is_told_of_the_clusters_that_were_trained():
    """In the round of a split too: losses are of the parent's model."""
    exact, ours = (play(build(landmarks=number), uneven(), 4)[1] for number in (None, 9))
    for one, other in zip(exact, ours, strict=True):
        assert one.num_clients.tolist() == other.num_clients.tolist()
        np.testing.assert_allclose(one.loss, other.loss, rtol=1e-5)


def flat(change):
    return np.concatenate([np.asarray(part, np.float64).ravel() for part in change[:2]])


def nearest_side(own, side, updates):
    """0 or 1: that of the landmark with the most similar update; a tie goes to 1, as Algorithm 4 has it here."""
    most = [max(reference.cosine(own, updates[i]) for i in updates if side[i] == part) for part in (0, 1)]
    return 0 if most[0] > most[1] else 1


class Walk:
    """A run by landmarks in NumPy, one round after the other."""

    def __init__(self, method, chosen, count, weights):
        self.method, self.chosen, self.weights = method, chosen, weights
        self.label, self.placed = dict.fromkeys(range(count), 0), dict.fromkeys(range(count), 0)
        self.splits, self.used, self.longest, self.late = [], {0}, 0.0, 0
        self.kept, self.seen = {}, set()

    def round(self, number, models, batches):
        """Labels after it, and the models that it should give."""
        shown = {}

        def change(client, model):
            return change_on(model, batches[client], RATE)[0]

        for i in self.chosen:
            shown[i] = self.kept[i] = flat(change(i, models[self.label[i]]))
        before, fresh = dict(self.label), {}
        self.longest = max(self.longest, *(np.linalg.norm(each) for each in self.kept.values()))
        for slot in sorted(self.used):
            members = [i for i in self.chosen if before[i] == slot]
            if len(members) < self.method.min_size or number < self.method.first_round:
                continue
            share = {i: self.weights[i] for i in members}
            mean = sum(share[i] * self.kept[i] for i in members) / sum(share.values())
            lengths = [np.linalg.norm(self.kept[i]) for i in members]
            if np.linalg.norm(mean) >= self.method.near * np.sqrt(np.mean(np.square(lengths))):
                continue
            if max(lengths) <= self.method.far * self.longest:
                continue
            across, _, second = reference.best_bipartition(members, self.kept)
            free = [k for k in range(self.method.clusters) if k not in self.used]
            if self.method.gamma_max < np.sqrt((1 - across) / 2) and free:
                side = {i: int(i in second) for i in members}
                fresh[slot] = (slot, free[0], models[slot], side, {i: self.kept[i] for i in members})
                self.used.add(free[0])
        earlier = list(self.splits)
        self.splits += fresh.values()
        changes, start = {}, {}
        for i in batches:
            slot = self.label[i]
            for parent, child, model, side, updates in earlier[self.placed[i] :] if i not in self.chosen else []:
                if parent == slot:
                    slot = (parent, child)[nearest_side(flat(change(i, model)), side, updates)]
                    self.late += 1
            start[i], changes[i] = slot, change(i, models[slot])
            if slot in fresh:
                parent, child, _, side, updates = fresh[slot]
                part = side[i] if i in self.chosen else nearest_side(flat(changes[i]), side, updates)
                slot = (parent, child)[part]
            self.label[i], self.placed[i] = slot, len(self.splits)
        models = [models[next((s for s, f in fresh.items() if f[1] == k), k)] for k in range(len(models))]
        for k in self.used:
            members = [i for i in batches if self.label[i] == k]
            if members:
                total = sum(self.weights[i] for i in members)
                mean = [sum(self.weights[i] * changes[i][part] for i in members) / total for part in (0, 1)]
                models[k] = tuple(p + m for p, m in zip(models[k], mean, strict=True))
        return models


@pytest.mark.parametrize(
    "options", [{"participation": 0.6}, {"weighting": "examples", "landmarks": 7}], ids=["some", "all"]
)
@pytest.mark.slow
def test_others_join_the_most_similar_landmark_now_or_when_they_next_take_part(options):
    """Sixteen clients of unequal sizes in three groups, all or a part of them in a round."""
    federation = blobs(clients=16, groups=3, rows=24)
    method = build(**options)
    played = turns(method, federation, ROUNDS)
    chosen = played[0].after.server.landmarks.tolist()
    counts = np.asarray(federation.train.num_examples, np.float64)
    walk = Walk(method, chosen, 16, counts if method.weighting == "examples" else np.ones(16))
    for number, turn in enumerate(played):
        assert set(chosen) <= set(turn.clients)
        slots = np.asarray(turn.info.num_clients).sum()
        assert slots == len(turn.clients)
        expected = walk.round(number, linear_models(turn.before.clusters.params), drawn_batches(turn, federation))
        assert labels_of(turn.after.clients.membership).tolist() == [walk.label[i] for i in range(16)]
        assert turn.after.clients.placed.tolist() == [walk.placed[i] for i in range(16)]
        for k, (kernel, bias) in enumerate(linear_models(turn.after.clusters.params)):
            np.testing.assert_allclose(kernel, expected[k][0], rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(bias, expected[k][1], rtol=1e-3, atol=1e-4)
    assert len(walk.splits) >= 2
    assert (walk.late > 0) == (method.participation < 1)
    for name, each in (("models_down", 1), ("models_up", 1), ("gradient_evaluations", 3)):
        more = sum(float(getattr(turn.info.costs, name)) - each * len(turn.clients) for turn in played)
        assert more == each * walk.late, name


@pytest.mark.slow
def test_who_sends_nothing_finite_is_where_it_was_and_is_led_later():
    """A client that diverges in the round of a split keeps its cluster, and has not been past the split."""
    federation = blobs(clients=12, groups=2, rows=24)
    x = np.array(federation.train.x)
    method = build(landmarks=5)
    chosen = turns(method, federation, 1)[0].after.server.landmarks.tolist()
    lost = next(i for i in range(12) if i not in chosen)
    x[lost] = np.nan
    last = turns(method, federation._replace(train=federation.train._replace(x=x)), 5)[-1].after
    assert int(last.clusters.active.sum()) > 1
    assert int(labels_of(last.clients.membership)[lost]) == 0
    assert int(last.clients.placed[lost]) == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(last.clusters.params))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"participation": 0.4}], ids=["all", "some"])
def test_rows_on_disk_devices_and_chunks_change_nothing(options, tmp_path):
    federation, given = blobs(clients=13), {"rounds": 9, "eval_every": 4, "progress": False}
    ours = build(**options)
    one = simulate(ours, federation, mapping=ONE, **given)
    assert one.history["num_clusters"][-1] > 1
    two = simulate(ours, federation, mapping=parallel.client_mapping("chunked", 2), **given)
    assert one.labels.tolist() == two.labels.tolist()
    np.testing.assert_allclose(one.history["loss"], two.history["loss"], rtol=1e-4)
    if not options:  # everybody in a round: too much of what is on disk
        return
    population = write_population(tmp_path / "p", federation, shard_megabytes=0.002)
    streamed = simulate(ours, population, mapping=ONE, **given)
    resident = simulate(ours, in_memory(population), mapping=ONE, **given)
    for a, b in zip(jax.tree.leaves(streamed.state), jax.tree.leaves(resident.state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_it_resumes_and_goes_side_by_side(tmp_path):
    federation, ours = blobs(clients=13), build(participation=0.6)
    whole = simulate(ours, federation, rounds=9, progress=False)
    simulate(ours, federation, rounds=4, run_dir=tmp_path / "run", progress=False)
    resumed = simulate(ours, federation, rounds=9, run_dir=tmp_path / "run", progress=False)
    assert whole.labels.tolist() == resumed.labels.tolist()
    np.testing.assert_allclose(whole.history["loss"], resumed.history["loss"], rtol=1e-6)
    many = fc.simulate_many(ours, federation, rounds=9, seeds=(0, 1), progress=False)
    assert np.asarray(many[0].labels).tolist() == whole.labels.tolist()


@pytest.mark.slow
def test_newcomers_are_led_to_a_leaf_and_a_landmark_that_was_away_is_new():
    federation, ours = blobs(clients=16), build()
    state = jax.tree.map(jnp.asarray, turns(ours, federation, 6)[-1].after)
    chosen = int(state.server.landmarks[2])
    away = next(i for i in range(16) if i not in state.server.landmarks.tolist())
    schedule = [Churn(6, leave=(chosen, away)), Churn(8, join=(chosen, away))]
    result = simulate(ours, federation, rounds=10, churn=schedule, mapping=ONE, progress=False)
    assert (result.labels >= 0).all()
    assert adjusted_rand_index(result.labels, federation.group) > 0.5
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[chosen]), federation.train)
    again = ours.admit(run_keys(0).local, state, one, jnp.asarray(chosen))
    assert not again.server.kept.seen[2]
    assert not again.server.kept.valid[2]
    assert again.server.kept.share[2] == 0
    kept = np.delete(np.asarray(again.server.kept.seen), 2)
    assert kept.all()
    found = simulate(ours, federation, rounds=10, progress=False)
    came = found.admit(blobs(clients=4, seed=0))
    assert came.labels[:16].tolist() == found.labels.tolist()
    assert (came.labels[16:] >= 0).all()


@pytest.mark.slow
def test_pictures_and_tree_are_of_the_landmarks():
    result = simulate(build(), blobs(clients=16), rounds=8, progress=False)
    content = result.events[0].content
    assert content["similarity"].shape == (6, 6)
    assert content["labels"].shape == content["previous_labels"].shape == (16,)
    assert (content["labels"] != content["previous_labels"]).any()
    assert result.assignments.cluster.shape[1] == 16
    assert content["landmarks"].tolist() == result.state.server.landmarks.tolist()
    drawn = pictures.figures(result)
    assert set(drawn) == {"split_history", "similarity_matrix", "parameter_tree"}
    tree = trees.parameter_tree(result)
    assert set(tree.nodes[0].clients.tolist()) == set(content["landmarks"].tolist())
    below = sum(len(tree.nodes[number].clients) for number in tree.leaves.values())
    assert below == 16


@pytest.mark.slow
def test_an_event_tells_where_everybody_was_before():
    """Also of clients who are led past an earlier split in the very round of the next."""
    federation, method = blobs(clients=16, groups=3, rows=24), build(participation=0.3)
    played = turns(method, federation, ROUNDS)
    both = 0
    for turn in played:
        if not turn.info.event:
            continue
        content = method.snapshot(turn.after)
        before = labels_of(turn.before.clients.membership)
        assert content["previous_labels"].tolist() == before.tolist()
        both += len(content["child"]) > 0 and float(turn.info.costs.models_down) > len(turn.clients)
    assert both > 0


@pytest.mark.slow
def test_nothing_of_a_models_size_is_kept_of_others():
    """Nor is anything with an update of everybody in the compiled round."""
    federation, method = blobs(clients=40, rows=8), build(landmarks=4, local=local.sgd(RATE, batch_size=8, steps=1))
    population = parallel.place_population(federation.train, federation.info, ONE)
    state, _ = method.init(run_keys(0).initialization, population)
    assert max(leaf[0].size for leaf in jax.tree.leaves(state.clients)) == method.clusters

    @functools.partial(jax.jit)
    def one_round(population, state):
        cohort = parallel.gather_cohort(population, method.select(run_keys(0).cohorts, state))
        return method.step(run_keys(0).local, state, cohort)

    width = 6 * 3 + 3
    assert f"f32[40,{width}]" not in one_round.lower(population, state).compile().as_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"landmarks": 1}, "landmarks is 1"),
        ({"landmarks": 2}, "landmarks is 2, but min_size is 3, and no cluster of fewer landmarks is divided"),
        ({"fall_back_after": 3}, "landmarks is given, but fall_back_after keeps something of every client"),
        (
            {"keep_optimizer": True, "local": local.sgd(0.1, batch_size=8, steps=1)},
            "landmarks is given, but keep_optimizer keeps something of every client",
        ),
        (
            {
                "privacy": privacy.gaussian(
                    clip=1.0, noise_multiplier=1.0, delta=1e-5, clustering_clip=1.0, clustering_noise_multiplier=1.0
                )
            },
            "landmarks are in more rounds than others",
        ),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"landmarks": 13}, "landmarks is 13, but there are only 12 clients; give at most 12"),
        ({"churn": [Churn(3, leave=(0, 1, 2, 3, 4, 5, 6, 7, 8, 9))]}, "of the landmarks .* are there, but cfl needs 3"),
    ],
)
def test_other_numbers_of_landmarks_are_refused_before_the_first_round(options, message):
    churn = options.pop("churn", [])
    with pytest.raises(ValueError, match=message):
        simulate(build(**options), blobs(clients=12), rounds=9, churn=churn, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("participation", [0.2, 0.5, 0.9])
def test_all_landmarks_and_a_share_of_the_others_take_part(participation):
    """A few landmarks had all places of a small cohort, and nobody else ever took part."""
    federation = blobs(clients=14)
    method = build(participation=participation, landmarks=6)
    played = turns(method, federation, 3)
    chosen = set(played[0].after.server.landmarks.tolist())
    heard = [set(turn.clients) for turn in played]
    assert all(chosen <= each for each in heard)
    assert {len(each - chosen) for each in heard} == {int(np.ceil(participation * 8 - 1e-9))}
    assert len(set.union(*heard)) > 6 + int(np.ceil(participation * 8)) or participation == 0.9


@pytest.mark.slow
def test_a_landmark_that_was_heard_and_is_away_is_where_the_division_put_it():
    """Away from a round, in which its cluster is divided by its earlier update."""
    federation = blobs(clients=16, groups=2)
    method = build(landmarks=7, first_round=2, clusters=2)
    population = parallel.place_population(federation.train, federation.info, ONE)
    state, _ = method.init(run_keys(0).initialization, population)
    landmarks = np.asarray(state.server.landmarks)

    @jax.jit
    def one_round(state, mask):
        cohort = parallel.gather_cohort(population, cohorts.in_place(mask))
        return method.step(jax.random.fold_in(run_keys(0).local, state.round), state, cohort)[0]

    def played(away):
        found = state
        for number in range(3):
            mask = np.ones(16, bool)
            mask[away] = number < 2
            found = one_round(found, jnp.asarray(mask))
        return found, np.asarray(found.server.kept.side)[:, 0]

    _, side = played([])
    away = [int(np.flatnonzero(side == part)[0]) for part in (0, 1)]
    state, side = played(landmarks[away])
    assert side[away].max() == 1
    now = np.asarray(labels_of(state.clients.membership))[landmarks]
    assert now.tolist() == side.tolist()
    assert (np.asarray(state.clients.placed)[landmarks] == 1).all()


def test_without_landmarks_the_configuration_is_that_of_before():
    assert "landmarks" not in build(landmarks=None).config
    assert build().config["landmarks"] == 6
    assert dataclasses.replace(build(), landmarks=None) != build()


@pytest.mark.slow
def test_whose_way_could_not_be_compared_is_where_it_was_and_is_led_later(monkeypatch):
    """Fault: a client that diverges from an old split's model went to its child, and was never led again."""
    federation = blobs(clients=12, groups=2, rows=24)
    method = build(participation=0.6, local=local.sgd(0.31, batch_size=8, steps=3))

    def late(state):
        behind = np.asarray(state.clients.placed) < int((np.asarray(state.server.splits.parent) >= 0).sum())
        behind[state.server.landmarks] = False
        return behind

    states = [turn.after for turn in turns(method, federation, 8)]
    number = next(number for number, state in enumerate(states) if late(state).any())
    state, behind = states[number], late(states[number])

    def astray(splits, side, edges, change, slot, first, end):
        return slot + 1, jnp.ones((), jnp.int32), jnp.asarray(False)

    @jax.jit
    def play_one(state, number):
        selection = method.select(jax.random.fold_in(run_keys(0).cohorts, number), state)
        cohort = parallel.gather_cohort(place(federation), selection)
        return method.step(jax.random.fold_in(run_keys(0).local, number), state, cohort)[0]

    monkeypatch.setattr(by_landmarks, "led_past", astray)
    later = jax.tree.map(jnp.asarray, state)
    for more in range(number + 1, number + 5):
        later = play_one(later, jnp.asarray(more))
    for kept in ("placed", "membership"):
        np.testing.assert_array_equal(*(np.asarray(getattr(each.clients, kept))[behind] for each in (state, later)))


@pytest.mark.slow
def test_a_landmark_that_returns_and_is_not_heard_is_where_most_are():
    """Fault: it was put at the root to be led later; but landmarks are divided and not led."""
    federation = blobs(clients=12, groups=2, rows=24)
    state = jax.tree.map(jnp.asarray, turns(build(), federation, 6)[-1].after)
    splits = int((np.asarray(state.server.splits.parent) >= 0).sum())
    sizes = np.asarray(state.clients.membership.sum(0))
    other = next(i for i in range(12) if i not in state.server.landmarks.tolist())
    for client, slot, placed in ((int(state.server.landmarks[1]), sizes.argmax(), splits), (other, 0, 0)):
        found = by_landmarks.admit(state, *map(jnp.asarray, (3, False, client))).clients
        assert (int(labels_of(found.membership)[client]), int(found.placed[client])) == (slot, placed)
