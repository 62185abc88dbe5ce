"""CFL against its NumPy version, and the faults that published codes have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms import cfl
from fedjax_cluster.algorithms.cfl.splits import Division, divide, empty_splits
from fedjax_cluster.algorithms.round import labels as labels_of
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import Variables
from tests.federations import as_lists, blobs
from tests.reference import bipartition as brute_force
from tests.reference import cfl as reference
from tests.reference.federated import change_on
from tests.turns import COUNTS, drawn_batches, linear_models, turns, uneven

FULL = local.sgd(0.3, batch_size=None, steps=2)
MOMENTUM = local.sgd(optax.sgd(0.2, momentum=0.5), batch_size=None, steps=2)
SCAN = parallel.client_mapping("scan", devices=jax.devices()[:1])
ROUNDS = 24


def build(**options):
    settings = {
        **{"clusters": 5, "local": FULL, "epsilon_1": 0.3, "epsilon_2": 0.3, "gamma_max": 0.0, "first_round": 4},
        **options,
    }
    return cfl(nn.linear(), **settings)


@functools.cache
def finished():
    """Twelve clients in three groups, split twice."""
    return simulate(build(gamma_max=0.5), blobs(clients=12, groups=3), rounds=ROUNDS, eval_every=ROUNDS)


def start_of(algorithm, federation):
    population = parallel.place_population(federation.train, federation.info, SCAN)
    state, _ = algorithm.init(run_keys(0).initialization, population)
    return population, state


def runner(algorithm):
    @jax.jit
    def one_round(population, state):
        selection = algorithm.select(jax.random.fold_in(run_keys(0).cohorts, state.round), state)
        cohort = parallel.gather_cohort(population, selection)
        return algorithm.step(jax.random.fold_in(run_keys(0).local, state.round), state, cohort)

    return one_round


def labels(state):
    return labels_of(state.clients.membership).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"gamma_max": 0.5},
        pytest.param(
            {"weighting": "examples", "server": optax.sgd(1.0, momentum=0.5), "clusters": 2}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"similarity_of": "gradients", "epsilon_1": 0.5, "epsilon_2": 0.5, "gamma_max": 0.5}, marks=pytest.mark.slow
        ),
        pytest.param({"local": MOMENTUM, "gamma_max": 0.5}, marks=pytest.mark.slow),
        pytest.param({"local": MOMENTUM, "gamma_max": 0.5, "keep_optimizer": True}, marks=pytest.mark.slow),
        pytest.param(
            {"epsilon_1": None, "epsilon_2": None, "near": 0.5, "far": 0.1, "gamma_max": 0.5, "weighting": "examples"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_is_algorithm_5(options):
    """Twelve clients in three groups; the second case has no slot for the second split; its server keeps its momentum.

    In the next two the clients have a momentum, afresh every round or kept; in the last the bounds are relative.
    """
    federation = blobs(clients=12, groups=3)
    algorithm = build(**options)
    state = start_of(algorithm, federation)[1]
    first = [np.asarray(state.clusters.params["output"][name][0], np.float64) for name in ("kernel", "bias")]
    result = (
        finished()
        if options == {"gamma_max": 0.5}
        else simulate(algorithm, federation, rounds=ROUNDS, eval_every=ROUNDS)
    )
    expected, split_rounds = reference.cfl(
        tuple(first),
        as_lists(federation),
        rate=0.2 if "local" in options else 0.3,
        steps=2,
        rounds=ROUNDS,
        client_momentum=0.5 if "local" in options else 0.0,
        keep=algorithm.keep_optimizer,
        most_clusters=algorithm.clusters,
        momentum=0.5 if "server" in options else 0.0,
        of_gradients=algorithm.of_gradients,
        **{
            name: getattr(algorithm, name)
            for name in ("epsilon_1", "epsilon_2", "near", "far", "gamma_max", "first_round", "weighting")
        },
    )
    assert len(expected) == min(3, algorithm.clusters)
    assert [event.round for event in result.events if len(event.content["parent"])] == sorted(set(split_rounds))
    for slot, (members, model) in enumerate(expected):
        assert np.flatnonzero(result.labels == slot).tolist() == members
        for name, part in zip(("kernel", "bias"), model, strict=True):
            ours = result.state.clusters.params["output"][name][slot]
            np.testing.assert_allclose(ours, part, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_kept_optimizers_are_the_clients_own_in_cohorts_on_any_devices_and_new_for_newcomers():
    federation = blobs(clients=12, groups=3)
    algorithm = build(local=MOMENTUM, keep_optimizer=True, participation=0.5, gamma_max=0.5)
    runs = [
        simulate(algorithm, federation, rounds=8, eval_every=8, mapping=mapping).state
        for mapping in (SCAN, parallel.client_mapping("chunked", chunk_size=2, devices=jax.devices()[:4]))
    ]
    for one, other in zip(*(jax.tree.leaves((run.clusters, run.clients.optimizer)) for run in runs), strict=True):
        # Devices pad the rows of clients, not those of clusters.
        np.testing.assert_allclose(one[:12], other[:12], rtol=1e-4, atol=1e-6)
    velocity = jax.tree.leaves(runs[0].clients.optimizer)[0]
    assert np.all(np.any(np.asarray(velocity)[:12] != 0, axis=tuple(range(1, velocity.ndim))))
    newcomer = jax.tree.map(lambda leaf: jnp.asarray(leaf[3]), federation.train)
    after = algorithm.admit(jax.random.key(0), runs[0], newcomer, jnp.asarray(3))
    kept = jax.tree.leaves(after.clients.optimizer)[0]
    assert not np.any(kept[3])
    np.testing.assert_array_equal(kept[4], velocity[4])
    with pytest.raises(ValueError, match="keeps no state"):
        build(keep_optimizer=True)


def latest_row(variables, x, *, train, rng_key=None):
    """A linear model whose statistics remember the mini-batches."""
    outputs, _ = LINEAR.apply(variables._replace(stats={}), x, train=train, rng_key=rng_key)
    seen = variables.stats["seen"]
    return outputs, {"seen": 0.5 * seen + 0.5 * x[0] if train else seen}


def without_rows(rng_key, info):
    return LINEAR.init(rng_key, info)._replace(stats={"seen": jnp.zeros(6)})


LINEAR = nn.linear()
REMEMBERING = LINEAR._replace(init=without_rows, apply=latest_row)


@pytest.mark.slow
def test_norms_models_and_statistics_in_cohorts_of_unequal_clients():
    """By examples: the criterion's mean, the models and the statistics, before a split and after."""
    federation, own = uneven(), local.sgd(0.3, batch_size=4, steps=3)
    algorithm = cfl(
        REMEMBERING, clusters=3, local=own, epsilon_1=0.6, epsilon_2=0.3, gamma_max=0.5, first_round=3,
        weighting="examples", participation=0.5,
    )  # fmt: skip
    played = turns(algorithm, federation, 9)
    latest, split = {}, 0
    for turn in played:
        batches = drawn_batches(turn, federation)
        before, after = (np.argmax(state.clients.membership, -1) for state in (turn.before, turn.after))
        models = linear_models(turn.before.clusters.params)
        changes = {i: change_on(models[before[i]], batches[i], 0.3)[0] for i in turn.clients}
        latest |= {i: reference.flat(change) for i, change in changes.items()}
        for k in set(before.tolist()):
            known = [i for i in latest if before[i] == k]
            mean = np.average([latest[i] for i in known], 0, [COUNTS[i] for i in known]) if known else [np.nan]
            np.testing.assert_allclose(turn.after.server.mean_norm[k], np.linalg.norm(mean), rtol=1e-3)
            parts = sorted(set(after[before == k].tolist()))
            split += len(parts) > 1
            for part in parts:
                there = [i for i in turn.clients if after[i] == part]
                model, seen = list(models[k]), np.asarray(turn.before.clusters.stats["seen"][k])
                if there:
                    shares = [COUNTS[i] for i in there]
                    model = [
                        leaf + np.average([changes[i][p] for i in there], 0, shares) for p, leaf in enumerate(model)
                    ]
                    seen = np.average([remembered(seen, batches[i]) for i in there], 0, shares)
                ours = linear_models(turn.after.clusters.params)[part]
                for leaf, expected in zip(ours, model, strict=True):
                    np.testing.assert_allclose(leaf, expected, rtol=2e-4, atol=2e-5)
                np.testing.assert_allclose(turn.after.clusters.stats["seen"][part], seen, rtol=1e-4, atol=1e-5)
    assert split


def remembered(seen, batches):
    for x, _ in batches:
        seen = 0.5 * seen + 0.5 * x[0]
    return seen


# ------------------------------------------------------------------------- the faults that codes copied


def division(label, slots):
    label = np.asarray(label, np.int32)
    rows = slots - 1
    unused = jnp.full(slots, -1, jnp.int32)
    splits = empty_splits(Variables({"w": jnp.zeros(1)}, {}), rows)
    active = jnp.arange(slots) <= label.max()
    return Division(jnp.asarray(label), active, jnp.full((len(label), rows), -1, jnp.int32), splits, unused, unused)


def divided(before, similarity, counted=None, known=None):
    similarity = jnp.asarray(similarity, jnp.float32)
    counted = jnp.ones(len(similarity), bool) if counted is None else jnp.asarray(counted)
    qualified = jnp.arange(len(before.active)) == 0
    known = counted if known is None else known
    return divide(before, similarity, counted, known, qualified, jnp.asarray(7, jnp.int32), gamma_max=0.0)


def test_the_split_is_the_optimum_where_complete_linkage_is_not():
    """A chain of neighbours who are alike at 0.9, and one stranger: the ends of the chain differ most of all."""
    chain = np.array([[1 - 0.45 * abs(i - j) for j in range(5)] for i in range(5)])
    similarity = np.pad(chain, (0, 1), constant_values=-0.1)
    similarity[5, 5] = 1.0
    found = divided(division([0] * 6, 3), similarity).label
    assert found.tolist() == [0, 0, 0, 0, 0, 1]
    assert brute_force.largest_across(similarity, found) == brute_force.best_max_cross(similarity)
    complete = np.array([0, 0, 0, 1, 1, 1])
    assert brute_force.largest_across(similarity, complete) > brute_force.best_max_cross(similarity)


def test_the_second_split_names_clients_not_places_in_their_cluster():
    """Cluster 0 is left with clients 1, 3, 4, 6: its parts are {1, 4} and {3, 6}, not places {0, 2} and {1, 3}."""
    label = [1, 0, 1, 0, 0, 1, 0, 1]
    pairs = {1: 0, 4: 0, 3: 1, 6: 1}
    similarity = np.array([[0.9 if pairs.get(i) == pairs.get(j) else -0.5 for j in range(8)] for i in range(8)])
    after = divided(division(label, 4), similarity)
    assert after.label.tolist() == [1, 0, 1, 2, 0, 1, 2, 1]
    assert after.side[:, 0].tolist() == [-1, 0, -1, 1, 0, -1, 1, -1]
    assert (int(after.splits.parent[0]), int(after.splits.child[0]), int(after.splits.round[0])) == (0, 2, 7)
    assert after.origin.tolist() == [0, -1, 0, -1]


def test_the_run_splits_twice_along_the_true_groups():
    result = finished()
    assert result.summary["adjusted_rand_index"] == 1.0
    assert result.history["num_clusters"][-1] == 3
    assert [len(event.content["parent"]) for event in result.events] == [1, 1]
    assert result.history["num_changed"].sum() == 8


@pytest.mark.parametrize(("known", "label"), [(False, [0, 1, 0, 0]), (True, [0, 1, 0, 1])])
def test_uncounted_clients_stay_with_the_parent_unless_an_update_of_theirs_is_known(known, label):
    similarity = np.where(np.arange(4)[:, None] % 2 == np.arange(4) % 2, 1.0, -1.0)
    after = divided(division([0] * 4, 3), similarity, [True, True, True, False], jnp.full(4, known))
    assert after.label.tolist() == label
    assert after.side[:, 0].tolist() == [0, 1, 0, 1 if known else -1]


def test_uncounted_clients_go_with_the_most_similar_one_and_not_with_the_side_that_is_similar_on_the_whole():
    similarity = np.where(np.arange(5)[:, None] % 2 == np.arange(5) % 2, 1.0, -1.0)
    similarity[4, :4] = similarity[:4, 4] = [-0.9, 0.3, 0.9, 0.3]
    after = divided(division([0] * 5, 3), similarity, [True] * 4 + [False], jnp.ones(5, bool))
    assert after.label.tolist() == [0, 1, 0, 1, 0]


# ------------------------------------------------------------------------------------------- events


def test_an_event_holds_the_similarities_and_the_edges():
    event = finished().events[0].content
    edges, side = event["edges"][:, 0], event["side"][:, 0]
    unit = edges / np.linalg.norm(edges, axis=1, keepdims=True)
    np.testing.assert_allclose(event["similarity"], unit @ unit.T, atol=1e-5)
    assert (event["labels"] == np.where(side == 1, event["child"][0], event["parent"][0])).all()
    assert (event["previous_labels"] == 0).all()
    assert event["models"].shape == (1, edges.shape[1])


@pytest.mark.slow
def test_a_split_without_a_slot_is_reported_once():
    result = simulate(build(clusters=2, epsilon_2=0.05), blobs(clients=12, groups=3), rounds=ROUNDS, eval_every=ROUNDS)
    refused = [(event.round, slot) for event in result.events for slot in event.content["refused"]]
    assert len(refused) >= 1
    assert len({slot for _, slot in refused}) == len(refused)
    assert result.history["event"].sum() == len(result.events)
    assert result.history["num_clusters"].max() == 2


# ----------------------------------------------------------------------------- partial participation


@pytest.mark.slow
def test_criteria_wait_until_every_member_was_seen():
    algorithm = build(participation=0.5, epsilon_1=1e3, epsilon_2=0.0, first_round=0, clusters=3)
    population, state = start_of(algorithm, blobs(clients=8, groups=2))
    one_round = runner(algorithm)
    seen, splits = np.zeros(8, bool), 0
    for _ in range(12):
        before = labels(state)
        chosen = algorithm.select(jax.random.fold_in(run_keys(0).cohorts, state.round), state)
        seen[np.asarray(chosen.index)[np.asarray(chosen.mask)]] = True
        state, info = one_round(population, state)
        complete = {k: seen[np.asarray(before) == k].all() and before.count(k) >= 3 for k in set(before)}
        changed = {k for k, new in zip(before, labels(state), strict=True) if k != new}
        if splits < 2:
            assert changed == {k for k in complete if complete[k]} or splits + len(changed) == 2
        for k in changed:
            seen[np.asarray(before) == k] = False
            splits += 1
    assert splits == 2
    assert int(info.num_clients.sum()) == 4


@pytest.mark.slow
def test_a_client_without_finite_update_holds_up_no_split():
    federation = blobs(clients=12, groups=3)
    federation.train.x[0] = np.nan
    algorithm = build(gamma_max=0.5)
    population, state = start_of(algorithm, federation)
    one_round = runner(algorithm)
    for _ in range(12):
        state, _ = one_round(population, state)
    found = labels(state)
    assert len(set(found)) == 3
    assert all(len({found[i] for i in range(1, 12) if i % 3 == group}) == 1 for group in range(3))


# ------------------------------------------------------------------------------------------- privacy


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", ["permutation", *(pytest.param(s, marks=pytest.mark.slow) for s in ("hadamard", "householder"))]
)
def test_the_privacy_transform_changes_neither_clusters_nor_models(scheme):
    plain = finished()
    federation = blobs(clients=12, groups=3)
    algorithm = build(gamma_max=0.5, transform=scheme, transform_seed=3)
    population, state = start_of(algorithm, federation)
    one_round = runner(algorithm)
    for _ in range(ROUNDS):
        state, _ = one_round(population, state)
    assert labels(state) == plain.labels.tolist()
    for own, other in zip(
        jax.tree.leaves(state.clusters.params), jax.tree.leaves(plain.state.clusters.params), strict=True
    ):
        np.testing.assert_allclose(own[:3], other[:3], atol=1e-4)
    sent = np.asarray(state.clients.update)
    known = np.asarray(plain.state.clients.update)
    assert not np.allclose(sent[:, : known.shape[1]], known, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(sent, axis=1), np.linalg.norm(known, axis=1), atol=1e-4)


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clusters": 0}, "clusters is 0"),
        ({"min_size": 1}, "min_size is 1"),
        ({"first_round": -1}, "first_round is -1"),
        ({"epsilon_1": -0.1}, "epsilon_1 is -0.1"),
        ({"gamma_max": 1.0}, "gamma_max is 1.0"),
        ({"fall_back_after": 0}, "fall_back_after is 0"),
        ({"held_out": 0.0}, "held_out is 0.0"),
        ({"similarity_of": "losses"}, "similarity_of is 'losses'"),
        ({"transform": "rot13"}, "'rot13'"),
        ({"edge_coordinates": 0}, "edge_coordinates is 0"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)
