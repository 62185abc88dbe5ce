import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import clustering, local, nn, parallel
from fedjax_cluster.algorithms import fedgwc
from fedjax_cluster.algorithms.fedgwc import all_pairs
from fedjax_cluster.algorithms.fedgwc import weighting as gaussian_weighting
from fedjax_cluster.algorithms.round import labels as labels_of
from fedjax_cluster.algorithms.round import one_hot
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import ClientData, Cohort
from tests.federations import blobs
from tests.reference import fedgwc as reference
from tests.reference.interactions import gaussian_rewards
from tests.turns import drawn_batches, linear_models, turns

ROUNDS = 60
ONE_DEVICE = parallel.client_mapping("scan", devices=jax.devices()[:1])
TRAINING = local.sgd(0.2, batch_size=None, steps=3)
EPOCH = local.sgd(0.1, batch_size=4, epochs=1)


def hard_and_easy(clients=12, seed=0):
    """Five of twelve clients have labels that say nothing: their losses stay high."""
    federation = blobs(clients=clients, groups=1, seed=seed)
    group = np.isin(np.arange(clients), (1, 4, 6, 9, 11)).astype(np.int32)
    rng = np.random.default_rng(seed)
    y = np.where(group[:, None] == 1, rng.integers(0, 3, federation.train.y.shape), federation.train.y)
    train = ClientData(federation.train.x, y.astype(np.int32), federation.train.num_examples)
    return federation._replace(train=train, group=group)


def build(**options):
    arguments = {
        "clusters": 2,
        "centre": False,
        "participation": 0.5,
        "tolerance": 1e-3,
        "beta": 0.1,
        "patience": 2,
        "max_children": 2,
    }
    return fedgwc(nn.linear(), **{"local": TRAINING, **arguments, **options})


def run(algorithm, federation, rounds=ROUNDS):
    """The result, and the clients of every round's cohort, from what the state counts."""
    seen, found = [np.zeros(len(federation.train.num_examples))], []

    def record(evaluation):
        seen.append(np.asarray(evaluation.state.clients.seen))
        found.append(np.flatnonzero(seen[-1] > seen[-2]).tolist())

    result = simulate(
        algorithm, federation, rounds=rounds, eval_every=1, eval_clients=1, callbacks=[record], mapping=ONE_DEVICE
    )
    return result, found


def start_of(algorithm, federation):
    population = parallel.place_population(federation.train, federation.info, ONE_DEVICE)
    return algorithm.init(run_keys(0).initialization, population)[0]


PAPER = {"rate": 0.3, "centre": True, "patience": 2, "max_children": 2, "participation": 0.5}
OURS = {
    "rate": "count", "centre": None, "patience": None, "max_children": None, "participation": 0.3,
    "perceived": "columns", "weighting": "uniform", "clusters": 3,
}  # fmt: skip
RELEASED = {
    "variant": "released", "patience": None, "max_children": None, "participation": 0.3, "clusters": 3, "beta": 4.0,
    "tolerance": 3e-3,
}  # fmt: skip


@pytest.mark.parametrize(("calm", "ready"), [(3, False), (4, True)])
def test_by_default_a_cluster_rests_until_everybody_can_have_been_asked(calm, ready):
    """Ten clients, cohorts of three."""
    algorithm = fedgwc(nn.linear(), local=local.sgd(0.1, batch_size=None, steps=1), clusters=3, participation=0.3)
    state = start_of(algorithm, blobs(clients=10, groups=2))
    state = state._replace(server=state.server._replace(calm=jnp.full_like(state.server.calm, calm)))
    assert algorithm.ready(state).tolist() == [ready, False, False]


@pytest.mark.parametrize(
    "options",
    [PAPER, *(pytest.param(each, marks=pytest.mark.slow) for each in (OURS, RELEASED))],
    ids=["paper", "ours", "released"],
)
def test_is_algorithms_1_and_2(options):
    """Partial cohorts of clients with unequally many mini-batches, a split, children with their own cohorts.

    P, averages, models, the affinity and its index, and the split's round agree.
    """
    federation, sizes = hard_and_easy(), hard_and_easy().train.num_examples
    algorithm = build(local=EPOCH, **options)
    played = turns(algorithm, federation, ROUNDS)
    last = played[-1].after
    models, labels, matrix, average, splits = reference.fedgwc(
        linear_models(played[0].before.clusters.params)[0],
        [drawn_batches(turn, federation) for turn in played],
        sizes,
        rate=0.1,
        alpha=options.get("rate"),
        participation=options["participation"],
        tolerance=algorithm.tolerance,
        beta=algorithm.beta,
        patience=options["patience"],
        n_max=options["max_children"],
        smallest=1 if algorithm.released else 3,
        slots=algorithm.clusters,
        weighting=algorithm.weighting,
        centre=algorithm.rows_centred,
        columns=algorithm.by_columns,
        released=algorithm.released,
    )
    events = [number for number, turn in enumerate(played) if turn.info.event]
    assert splits
    assert events[0] == splits[0][0]
    first = algorithm.snapshot(played[events[0]].after)
    assert clustering.scores.adjusted_rand_index(first["labels"], splits[0][1]) == 1.0
    np.testing.assert_allclose(first["affinity"], splits[0][2], rtol=1e-3, atol=1e-5)
    assert float(first["index"]) == pytest.approx(splits[0][3], rel=1e-2)
    found = np.asarray(labels_of(last.clients.membership))
    assert clustering.scores.adjusted_rand_index(found, labels) == 1.0
    np.testing.assert_allclose(last.server.interactions, matrix, rtol=2e-3, atol=2e-4)
    ours = linear_models(last.clusters.params)
    for client, slot in enumerate(labels):
        np.testing.assert_allclose(last.server.average[found[client]], average[slot], rtol=2e-2, atol=1e-8)
        for part, expected in zip(ours[found[client]], models[slot], strict=True):
            np.testing.assert_allclose(part, expected, rtol=2e-3, atol=2e-4)


@pytest.fixture(scope="module")
def split_run():
    """Twelve clients in two cohort sizes' worth of rounds, past the first split, under server momentum."""
    federation = hard_and_easy()
    algorithm = build(clusters=4, rate="count", server_momentum=0.9, smallest=2)
    return algorithm, federation, run(algorithm, federation)


@pytest.mark.slow
def test_a_split_is_an_event_with_its_matrices(split_run):
    _, federation, (result, _) = split_run
    first = result.events[0].content
    assert set(first) == {"interactions", "affinity", "previous", "labels", "parent", "index", "average"}
    assert (first["previous"] == 0).all()
    assert len(set(first["labels"].tolist())) == 2
    assert first["index"] < 1.0
    expected = clustering.interaction_affinity(first["interactions"], 0.1)
    np.testing.assert_allclose(first["affinity"], expected, rtol=1e-5)
    changed = int((first["labels"] != first["previous"]).sum())
    assert result.history["num_changed"][result.events[0].round] == changed
    assert changed <= len(federation.group) // 2  # the larger child stays


@pytest.mark.slow
def test_clusters_keep_their_cohorts_and_the_sampling_rate(split_run):
    """Eq. 28 and Theorem A.5: ⌈ρ n_k⌉ of each cluster, three at least, all of a smaller one."""
    _, _, (result, found) = split_run
    event = result.events[0]
    for number, cohort in enumerate(found):
        labels = event.content["labels"] if number > event.round else event.content["previous"]
        if len(result.events) > 1 and number > result.events[1].round:
            break
        sizes = np.bincount(labels, minlength=4)
        expected = [min(size, max(-(-size // 2), 3)) for size in sizes]
        assert np.bincount(labels[cohort], minlength=4).tolist() == expected


@pytest.mark.slow
def test_children_inherit_model_and_momentum(split_run):
    algorithm, _, _ = split_run
    state = start_of(algorithm, hard_and_easy())
    moved = jax.tree.map(
        lambda leaf: leaf.at[0].add(jnp.arange(leaf[0].size, dtype=leaf.dtype).reshape(leaf[0].shape)),
        (state.clusters.params, state.clusters.optimizer),
    )
    easy = np.arange(12) % 2
    matrix = jnp.asarray(np.where(easy[:, None] == easy[None], 0.9, 0.1), jnp.float32)
    own = state.server._replace(
        interactions=matrix, meetings=jnp.full((12, 12), 9), average=jnp.zeros(4), calm=jnp.full(4, 5, jnp.int32)
    )
    state = state._replace(clusters=state.clusters._replace(params=moved[0], optimizer=moved[1]), server=own)
    nobody = Cohort(jnp.full(12, 12, jnp.int32), jnp.zeros(12, bool), blobs(clients=12).train, in_place=True)
    new, info = jax.jit(algorithm.step)(jax.random.key(0), state, nobody)
    assert bool(info.event)
    assert new.clusters.active.tolist() == [True, True, False, False]
    labels = np.asarray(labels_of(new.clients.membership))
    assert clustering.scores.adjusted_rand_index(labels, easy) == 1.0
    for before, after in zip(
        jax.tree.leaves(moved), jax.tree.leaves((new.clusters.params, new.clusters.optimizer)), strict=True
    ):
        np.testing.assert_array_equal(after[1], before[0])
        np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(new.server.interactions, matrix)
    assert (np.asarray(new.server.meetings) == 1).all()
    assert new.server.average[:2].tolist() == [1.0, 1.0]
    assert new.server.calm[:2].tolist() == [0, 0]


@pytest.mark.slow
def test_a_split_without_free_slots_is_refused_and_reported():
    result, _ = run(build(rate="count", clusters=1), hard_and_easy())
    assert set(result.labels.tolist()) == {0}
    assert int(result.state.server.refused) > 0
    assert len(result.events) == 1
    assert result.history["event"].sum() == 1


@pytest.mark.slow
def test_interactions_without_structure_never_split():
    """Noise alone gives an index above 1 on the rows of W; two groups in it give one below."""
    mask, most, free = jnp.ones(24, bool), jnp.asarray(3), jnp.asarray(5)

    def children(matrix):
        affinity = clustering.interaction_affinity(matrix, 0.1)
        return gaussian_weighting.partition(jax.random.key(0), affinity, mask, most, free, 3, max_children=3).number

    noise = np.random.default_rng(0).random((25, 24, 24)).astype(np.float32)
    group = np.arange(24) % 2
    contrast = np.where(group[:, None] == group[None], 0.5, -0.5).astype(np.float32)
    found = jax.jit(lambda matrices: jax.lax.map(children, matrices))(np.concatenate([noise, noise + contrast]))
    assert found.tolist() == [1] * 25 + [2] * 25


def test_a_newcomer_is_not_drawn_more_often_than_others():
    algorithm = build(rate="count")
    state = start_of(algorithm, hard_and_easy())
    clients = state.clients._replace(
        seen=jnp.arange(12.0) + 4,
        membership=state.clients.membership.at[5].set(0.0),
        present=state.clients.present.at[5].set(False),
    )
    own = state.server._replace(interactions=jnp.ones((12, 12)), meetings=jnp.ones((12, 12), jnp.int32))
    client = jax.tree.map(lambda leaf: jnp.asarray(leaf[5]), hard_and_easy().train)
    new = algorithm.admit(jax.random.key(0), state._replace(clients=clients, server=own), client, jnp.asarray(5))
    assert float(new.clients.seen[5]) == 4.0
    meetings = new.server.meetings
    assert int(meetings[5].sum()) == int(meetings[:, 5].sum()) == 0
    assert int(meetings.sum()) == 121


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "centre"), [("participation", False), ("count", False), ("count", True)])
def test_newcomers_are_no_cluster_of_their_own(rate, centre):
    """Rewards are noise; rows of zeros for three newcomers would be the best split of all."""
    algorithm = build(rate=rate, centre=centre, clusters=4, max_children=3, participation=0.25, beta=0.5)
    federation, newcomers = blobs(clients=40, groups=1), [3, 7, 8]
    state = start_of(algorithm, federation)
    rest = np.setdiff1d(np.arange(40), newcomers)
    noise = jnp.asarray(0.6 + 0.3 * np.random.default_rng(0).random((40, 40)), jnp.float32)
    own = state.server._replace(interactions=noise, calm=jnp.full(4, 99, jnp.int32), average=jnp.zeros(4))
    if rate == "count":
        own = own._replace(meetings=jnp.ones((40, 40), jnp.int32))
    state = state._replace(server=own)
    for index in newcomers:
        client = jax.tree.map(lambda leaf, index=index: jnp.asarray(leaf[index]), federation.train)
        state = algorithm.admit(jax.random.key(0), state, client, jnp.asarray(index))
    matrix = np.asarray(state.server.interactions)
    taken_for = [int(np.flatnonzero((matrix[rest][:, rest] == matrix[index, rest]).all(1))[0]) for index in newcomers]
    assert len(set(taken_for)) > 1
    np.testing.assert_array_equal(matrix[np.ix_(rest, newcomers)], matrix[np.ix_(rest, rest[taken_for])])
    assert float(state.server.average[0]) == 1.0
    assert int(state.server.calm[0]) == 0

    def split(matrix):
        server = state.server._replace(interactions=jnp.asarray(matrix), calm=own.calm)
        return np.asarray(algorithm.cluster(jax.random.key(0), state._replace(server=server)))

    assert len(set(split(matrix).tolist())) == 1
    seen = np.asarray(all_pairs.affinity(algorithm, state.server, jnp.ones(40, bool)))
    for index, other in zip(newcomers, taken_for, strict=True):
        others = np.setdiff1d(rest, rest[other])
        np.testing.assert_allclose(seen[index, others], seen[rest[other], others], rtol=0.2)
    if centre:
        return  # nothing is known of whose rows are zeros
    matrix = matrix.copy()
    matrix[newcomers] = matrix[:, newcomers] = 0
    labels = split(matrix)
    assert np.flatnonzero(labels == labels[3]).tolist() == newcomers


def test_a_loss_whose_square_is_infinite_spoils_nothing():
    losses = jnp.asarray([[1.0], [2.0], [3.0], [3e19]])
    expected = gaussian_rewards(np.asarray(losses, np.float64))
    np.testing.assert_allclose(clustering.gaussian_rewards(losses), expected, atol=1e-6)
    weight = jnp.ones(4)
    assert np.isfinite(gaussian_weighting.released_rewards(losses, jnp.ones((4, 1), bool), weight)).all()
    slot, pairs = jnp.asarray([0, 1]), jnp.zeros((2, 2))
    met = jax.jit(functools.partial(gaussian_weighting.meet, num_clusters=2, counted=False))
    rewards, both = jnp.asarray([jnp.nan, 0.5]), jnp.ones(2, bool)
    meeting = met(pairs, pairs.astype(jnp.int32), rewards, jnp.arange(2), both, slot, jnp.full(2, 0.5))
    assert np.isnan(meeting.change[0])
    assert float(meeting.change[1]) == 0.0625


@pytest.mark.slow
def test_a_refused_split_after_another_one_is_harvested_with_its_own_clients():
    algorithm = build(rate="count", clusters=2, max_children=2, smallest=2)
    result, _ = run(algorithm, hard_and_easy(), 200)
    refused = [event for event in result.events if len(np.unique(event.content["labels"])) == 2][-1].content
    assert int(result.state.server.refused) > 0
    assert len(result.events) == 2
    own = refused["labels"] == refused["parent"]
    assert own.any()
    np.testing.assert_array_equal(np.diag(refused["affinity"]), own)
    assert 0.0 < refused["average"] < 1e-3


@pytest.mark.slow
def test_a_cluster_whose_clients_were_all_rejected_does_not_come_to_rest():
    federation = hard_and_easy()
    wild = federation.train._replace(x=np.full_like(federation.train.x, 1e30))
    result, _ = run(build(), federation._replace(train=wild), 5)
    assert result.summary["num_rejected"] == 5 * 6
    np.testing.assert_array_equal(result.state.server.average, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("clients", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_released_variant_bears_few_clients(clients):
    algorithm = build(variant="released", max_children=None, participation=1.0, tolerance=10.0)
    run(algorithm, blobs(clients=clients, groups=1), 4)


def test_proposition_a_4_entries_stay_below_one(split_run):
    _, _, (result, _) = split_run
    interactions = np.asarray(result.state.server.interactions)
    assert interactions.min() >= 0.0
    assert interactions.max() <= 1.0


def test_aggregations_go_inside():
    """FedAvgM is the heavy ball, FedProx the local update's own term."""
    assert build(server_momentum=0.9, proximal=0.5, weighting="uniform").update.proximal == 0.5
    assert build().update == TRAINING
    momentum = start_of(build(server_momentum=0.9), hard_and_easy()).clusters.optimizer
    assert any(leaf.shape == (2, 6, 3) for leaf in jax.tree.leaves(momentum))


def test_the_public_codes_affinity_and_cohorts():
    matrix = np.random.default_rng(0).random((6, 6)).astype(np.float32)
    rows = ((matrix - matrix.min()) / (matrix.max() - matrix.min())).T
    affinity = gaussian_weighting.released_affinity(jnp.asarray(matrix.T), 0.5, jnp.ones(6, bool))
    for i in range(6):
        for j in range(6):
            apart = np.delete(rows[i] - rows[j], [i, j])
            expected = np.exp(-0.5 * (apart**2).sum()) if i != j else 0.0
            np.testing.assert_allclose(affinity[i, j], expected, rtol=1e-4, atol=1e-7)
    algorithm = build(variant="released", tolerance=1e-4)
    state = start_of(algorithm, hard_and_easy())
    assert float(state.server.interactions[0, 0]) == pytest.approx(1 / 144)
    weights = one_hot(jnp.asarray([0] * 8 + [1] * 4), 2)
    selection = algorithm.select(jax.random.key(0), state._replace(clients=state.clients._replace(membership=weights)))
    assert int(selection.mask.sum()) == 6 + 4


@pytest.mark.parametrize(
    ("options", "clients", "said"),
    [
        ({"participation": 1.0, "max_children": None}, 12, "12 // 12 = 1; give max_children or a participation of 0.5"),
        ({"participation": 0.1, "max_children": None}, 5, "5 // 3 = 1; give max_children"),
        ({"participation": 1.0}, 12, None),
        ({"participation": 0.5, "max_children": None}, 12, None),
        ({"participation": 1.0, "max_children": None, "clusters": 1}, 12, None),
    ],
)
def test_a_run_that_can_never_split_says_so_at_its_start(options, clients, said, caplog):
    start_of(build(**options), blobs(clients=clients))
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("fedjax_cluster")]
    assert len(messages) == (said is not None)
    assert said is None or said in messages[0]
    assert all(len(message.splitlines()) == 1 for message in messages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, "rate is 0.0"),
        ({"rate": "mean"}, "rate is 'mean'"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"beta": -1.0}, "beta is -1.0"),
        ({"patience": 0}, "patience is 0"),
        ({"max_children": 1}, "max_children is 1"),
        ({"smallest": 0}, "smallest is 0"),
        ({"perceived": "both"}, "perceived is 'both'"),
        ({"sampling": "often"}, "sampling is 'often'"),
        ({"variant": "public"}, "variant is 'public'"),
        ({"participation": 0.0}, "participation is 0.0"),
        ({"server_momentum": 1.0}, "server_momentum is 1.0"),
        ({"centre": True, "variant": "released"}, "centre is ours"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)
