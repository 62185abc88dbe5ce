"""Gradient-and-loss CFL: the rule against NumPy, its sign, its batch, pinned clients, costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_cluster import algorithms, local, nn, parallel
from fedjax_cluster.algorithms import fairavg
from fedjax_cluster.algorithms.gradient_loss import _unit_rows
from fedjax_cluster.algorithms.round import labels as labels_of
from fedjax_cluster.clustering.scores import purity
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import Churn, Costs
from tests.algorithms.test_oracles import assert_models_equal, models_of, start_of
from tests.federations import as_lists, blobs, play
from tests.reference import gradient_loss as reference
from tests.turns import COUNTS, drawn_batches, linear_models, turns, uneven

# From the paper's random models; others are tested with the starts.
gradient_loss = functools.partial(algorithms.gradient_loss, start="random")
ifca = functools.partial(algorithms.ifca, start="random")
MODEL = nn.linear()
WHOLE = local.sgd(0.3, batch_size=None, steps=1)
SMALL = local.sgd(0.3, batch_size=4, steps=2)
ON_ONE = parallel.client_mapping("scan", devices=jax.devices()[:1])
BY_LOSS = gradient_loss(MODEL, clusters=3, local=SMALL, similarity_weight=0.0, pin=False)
RANDOM_FIRST = gradient_loss(MODEL, clusters=3, local=SMALL, similarity_weight=0.0, pin=False, first_round="random")


def labels(state):
    return np.asarray(labels_of(state.clients.membership))


@pytest.mark.parametrize(
    ("steps", "options", "oracle"),
    [
        (1, {}, {}),
        pytest.param(
            3, {"similarity_weight": 0.7, "pin": True, "first_round": "random"}, {"weight": 0.7}, marks=pytest.mark.slow
        ),
        pytest.param(
            1, {"sign": "printed", "similarity_weight": 0.7}, {"printed": True, "weight": 0.7}, marks=pytest.mark.slow
        ),
        pytest.param(
            1,
            {"similarity": "euclidean", "similarity_weight": 0.9},
            {"similarity": "euclidean", "weight": 0.9},
            marks=pytest.mark.slow,
        ),
        (1, {"reduction": "sum", "similarity_weight": 0.95, "pin": True}, {"total": True, "weight": 0.95}),
    ],
)
def test_the_rule_is_that_of_the_paper(steps, options, oracle):
    """Catches the sign, the scale of the distance, the reduction, a change taken from the wrong round."""
    federation = blobs(clients=9, groups=3, seed=2)
    own = local.sgd(0.3, batch_size=None, steps=steps)
    algorithm = gradient_loss(MODEL, clusters=3, local=own, **{"similarity_weight": 0.5, "pin": False, **options})
    start = start_of(algorithm, federation)
    pinned = np.where(start.clients.pinned.any(-1), start.clients.pinned.argmax(-1), -1)[:9]
    assert (pinned >= 0).sum() == (3 if algorithm.pin else 0)
    rounds = 5
    began = labels(play(algorithm, federation, 1)[0])
    drawn = began if algorithm.first_round == "random" else None
    assert (began[pinned >= 0] == pinned[pinned >= 0]).all()
    expected, chosen = reference.gradient_loss(
        models_of(start),
        as_lists(federation),
        rate=0.3,
        steps=steps,
        rounds=rounds,
        pinned=pinned,
        first=drawn,
        **{"weight": 0.5, **oracle},
    )
    by_loss = reference.gradient_loss(
        models_of(start), as_lists(federation), rate=0.3, steps=steps, rounds=rounds, weight=0.0
    )[1]
    assert chosen[-1].tolist() != by_loss[-1].tolist()  # or the similarity would not be tested
    # Nor would it be tested that pinned clients stay.
    assert not algorithm.pin or (by_loss[0] != pinned)[pinned >= 0].any()
    state, _ = play(algorithm, federation, rounds)
    assert labels(state).tolist() == chosen[-1].tolist()
    assert_models_equal(models_of(state), expected)


@pytest.mark.slow
def test_cohorts_of_unequal_clients_and_clusters_that_become_empty():
    """Catches a change kept from when somebody was there, and a mean that is not by examples."""
    federation = uneven(seed=1)
    algorithm = gradient_loss(
        MODEL, clusters=3, local=local.sgd(0.3, batch_size=4, steps=3), similarity_weight=0.6, weighting="examples",
        participation=0.5,
    )  # fmt: skip
    changes, occupied, became_empty = None, set(), False
    for turn in turns(algorithm, federation, 6):
        models, changes, chosen = reference.in_cohort(
            linear_models(turn.before.clusters.params), changes, drawn_batches(turn, federation),
            rate=0.3, weight=0.6, examples=COUNTS,
        )  # fmt: skip
        assert len(turn.clients) == 5
        assert labels(turn.after)[turn.clients].tolist() == [chosen[i] for i in turn.clients]
        assert_models_equal(models_of(turn.after), models)
        moved = [reference.flat(model) for model in linear_models(turn.after.server.change)]
        np.testing.assert_allclose(moved, changes, rtol=2e-4, atol=2e-5)
        became_empty |= bool(occupied - set(chosen.values()))
        occupied = set(chosen.values())
    assert became_empty


@pytest.mark.slow
def test_without_similarity_it_is_ifca_on_the_mini_batch():
    federation = blobs(clients=9, groups=3)
    ours, our_reports = play(BY_LOSS, federation, 5)
    theirs, their_reports = play(ifca(MODEL, clusters=3, local=SMALL, score_on="batch"), federation, 5)
    assert labels(ours).tolist() == labels(theirs).tolist()
    for one, other in zip(
        *map(jax.tree.leaves, ((ours.clusters, our_reports), (theirs.clusters, their_reports))), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_the_scoring_batch_is_the_stepping_batch():
    """With one cluster the gradient that scores is the only one that steps: any other batch would show."""
    federation = blobs(clients=6)
    ours, _ = play(gradient_loss(MODEL, clusters=1, local=SMALL), federation, 3)
    theirs, _ = play(fairavg(MODEL, local=SMALL), federation, 3)
    for one, other in zip(*(jax.tree.leaves(state.clusters) for state in (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_the_descent_sign_prefers_the_cluster_that_moves_along(similarity):
    gradient = {"a": jnp.asarray([1.0, 0.0]), "b": jnp.asarray([2.0])}
    along = jax.tree.map(lambda leaf: -0.1 * leaf, gradient)
    against = jax.tree.map(jnp.negative, along)

    def likeness(moved, sign):
        rows = jax.tree.map(lambda leaf: leaf[None], moved)
        moved = jax.tree.map(lambda leaf: leaf[0], _unit_rows(rows)) if similarity == "cosine" else moved
        options = {"similarity": similarity, "sign": sign, "step_size": 0.1}
        return float(gradient_loss(MODEL, clusters=2, local=SMALL, **options).likeness(gradient, moved))

    best = 1.0 if similarity == "cosine" else 0.0
    assert likeness(along, "descent") == pytest.approx(best, abs=1e-6)
    assert likeness(against, "descent") < likeness(along, "descent")
    assert likeness(against, "printed") > likeness(along, "printed")


def test_zero_vectors_are_like_nothing():
    zero, unit = {"a": jnp.zeros((1, 3))}, {"a": jnp.ones((1, 3))}
    np.testing.assert_array_equal(_unit_rows(zero)["a"], zero["a"])
    for gradient, moved in ((zero, unit), (unit, zero), (zero, zero)):
        assert float(gradient_loss(MODEL, clusters=2, local=SMALL).likeness(gradient, _unit_rows(moved))) == 0.0


@pytest.mark.slow
def test_the_printed_sign_loses():
    """Two groups, eight draws: the descent sign finds them, the printed one often does not."""
    found = {}
    for sign in ("descent", "printed"):
        algorithm = gradient_loss(MODEL, clusters=2, local=WHOLE, similarity_weight=0.5, sign=sign, pin=False)
        scores = []
        for seed in range(6):
            federation = blobs(clients=12, ragged=False, seed=seed)
            state, _ = play(algorithm, federation, 6, seed)
            scores.append(float(purity(labels(state), federation.group)))
        found[sign] = np.mean(scores)
    assert found["descent"] > 0.95 > 0.85 > found["printed"]


@pytest.mark.slow
def test_pinned_clients_stay_where_nobody_would_go():
    """The last model is so bad that only who is pinned to it trains it, in every cohort."""
    federation = blobs(clients=12)
    population = parallel.place_population(federation.train, federation.info, ON_ONE)
    for pin, participation in ((True, 0.5), (False, 1.0)):
        algorithm = gradient_loss(MODEL, clusters=3, local=SMALL, pin=pin, participation=participation)
        state, _ = algorithm.init(jax.random.key(3), population)
        ruined = jax.tree.map(lambda leaf: leaf.at[-1].multiply(-1e3), state.clusters.params)
        state = state._replace(clusters=state.clusters._replace(params=ruined))
        step = jax.jit(algorithm.step)
        for number in range(3):
            selection = algorithm.select(jax.random.key(number), state)
            cohort = parallel.gather_cohort(population, selection)
            state, info = step(jax.random.key(number), state, cohort)
            assert int(info.num_clients[-1]) == int(pin)
        client, cluster = np.nonzero(state.clients.pinned)
        assert sorted(cluster) == ([0, 1, 2] if pin else [])
        assert set(client.tolist()) <= set(np.asarray(selection.index).tolist())
        assert np.argmax(state.clients.membership, -1)[client].tolist() == cluster.tolist()


@pytest.mark.slow
def test_the_first_round_may_be_random():
    federation = blobs(clients=40, groups=1)
    drawn, again, by_loss = (
        labels(play(algorithm, federation, 1, seed)[0])
        for algorithm, seed in ((RANDOM_FIRST, 0), (RANDOM_FIRST, 1), (BY_LOSS, 0))
    )
    assert np.bincount(drawn, minlength=3).min() >= 5
    assert drawn.tolist() != again.tolist()
    assert drawn.tolist() != by_loss.tolist()
    assert labels(play(RANDOM_FIRST, federation, 2)[0]).tolist() != drawn.tolist()


@pytest.mark.slow
def test_costs_count_k_gradients_and_the_changes_for_those_who_missed_a_round():
    federation = blobs(clients=10)
    _, reports = play(gradient_loss(MODEL, clusters=3, local=SMALL), federation, 2)
    for report in reports:  # K − 1 gradients more than the S steps
        assert report.costs == Costs(3 * 10, 10, 2 * 10 + 2 * 10, 0)
    half = simulate(
        gradient_loss(MODEL, clusters=3, local=SMALL, participation=0.5), federation, rounds=6, mapping=ON_ONE
    ).history
    assert half["models_down"][0] == 3 * 5
    assert set(half["models_down"][1:]) <= {3 * (5 + stale) for stale in range(6)}
    assert half["models_down"][1:].max() > 3 * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"similarity_weight": 1.5}, "similarity_weight is 1.5"),
        ({"similarity": "dot"}, "similarity is 'dot'"),
        ({"sign": "plus"}, "sign is 'plus'"),
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"first_round": "never"}, "first_round is 'never'"),
        ({"similarity": "euclidean", "server": optax.sgd(0.1)}, "give step_size"),
        ({"similarity": "euclidean", "step_size": -1.0}, "step_size is -1.0"),
        ({"clusters": 0}, "clusters is 0"),
        ({"participation": 0.0}, "participation is 0.0"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        gradient_loss(MODEL, **{"clusters": 2, "local": WHOLE, **options})


def test_a_cohort_of_pinned_clients_only_is_refused():
    federation = blobs(clients=8)
    population = parallel.place_population(federation.train, federation.info, ON_ONE)
    algorithm = gradient_loss(MODEL, clusters=4, local=WHOLE, pin=True, participation=0.5)
    with pytest.raises(ValueError, match="pinned clients take part in every round"):
        algorithm.init(jax.random.key(0), population)
    # Nor may there be such cohorts once some have left: nobody else would ever take part.
    few = gradient_loss(MODEL, clusters=2, local=WHOLE, pin=True, participation=0.3)
    state, _ = few.init(run_keys(0).initialization, population)
    pinned = np.flatnonzero(np.asarray(state.clients.pinned).any(-1)[:8]).tolist()
    others = [client for client in range(8) if client not in pinned]
    with pytest.raises(ValueError, match=r"0\.3 of 5 clients is a cohort of 2, but 2 pinned clients"):
        simulate(few, federation, rounds=3, churn=[Churn(1, leave=tuple(others[:3]))], progress=False)
    assert simulate(few, federation, rounds=3, churn=[Churn(1, leave=(*pinned, others[0]))], progress=False)
    # Who comes back is pinned no more.
    there_and_back = [Churn(1, leave=tuple(pinned)), Churn(2, join=tuple(pinned)), Churn(3, leave=tuple(others[:3]))]
    assert simulate(few, federation, rounds=4, churn=there_and_back, progress=False)
