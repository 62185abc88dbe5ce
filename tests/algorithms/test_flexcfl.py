"""FlexCFL against its NumPy oracle, and what its clusters do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms.flexcfl import flexcfl, mixed
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import Churn, ClientData, DatasetInfo, Federation
from tests.algorithms.test_oracles import assert_models_equal, models_of, start_of
from tests.federations import as_lists, blobs, play
from tests.reference import flexcfl as reference

CLIENTS, RATE, STEPS, ROUNDS = 9, 0.3, 2, 5
OWN = local.sgd(RATE, batch_size=None, steps=STEPS)
# Options, and of how many clients the first round is.
SETTINGS = {
    "a cohort": ({"participation": 0.3, "first_clients": 2, "weighting": "uniform", "first_steps": 4}, 6),
    "all": ({"first_steps": None, "mixing": 0.4}, CLIENTS),
    # The first client is nearer to the mean update of a cluster that is not its own.
    "no groups": ({"measure": "madc", "first_steps": 3}, CLIENTS),
    "differences": ({"measure": "madc", "participation": 0.5, "first_clients": 1, "first_steps": 1}, 5),
}


def build(slots=3, **options):
    return flexcfl(nn.linear(), clusters=slots, local=OWN, **options)


def cohorts_of(algorithm, federation):
    state, key = start_of(algorithm, federation), run_keys(0).cohorts
    rounds = [state._replace(round=jnp.asarray(number, jnp.int32)) for number in range(ROUNDS)]
    chosen = [algorithm.select(jax.random.fold_in(key, number), each) for number, each in enumerate(rounds)]
    return [np.asarray(each.index)[np.asarray(each.mask)].tolist() for each in chosen]


@pytest.mark.parametrize(
    "setting", [name if name == "a cohort" else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
)
def test_flexcfl_is_its_algorithm(setting):
    """Clients of unequal sizes; every option off its default once."""
    options, first = SETTINGS[setting]
    federation = blobs(clients=CLIENTS, **({"groups": 1, "seed": 4} if setting == "no groups" else {"groups": 3}))
    algorithm = build(**options)
    start, cohorts = models_of(start_of(algorithm, federation))[0], cohorts_of(algorithm, federation)
    sizes = [len(chosen) for chosen in cohorts]
    assert sizes == [first] + [int(np.ceil(options.get("participation", 1) * CLIENTS))] * (ROUNDS - 1)
    state, reports = play(algorithm, federation, ROUNDS)
    data = as_lists(federation)
    weight = {number: 1 if "weighting" in options else len(y) for number, (_, y) in enumerate(data)}
    steps = options.get("first_steps", 50) or STEPS
    given = {key: value for key, value in options.items() if key in ("measure", "mixing")}
    label, models, means = reference.flexcfl(
        start, data, cohorts, rate=RATE, steps=STEPS, first_steps=steps, slots=3, weight=weight, **given
    )
    found = np.asarray(labels(state.clients.membership))[:CLIENTS]
    assert found.tolist() == [label.get(number, -1) for number in range(CLIENTS)]
    assert_models_equal(models_of(state), models)
    np.testing.assert_allclose(state.server.mean, np.roll(means, 3, 1), rtol=2e-4, atol=2e-5)  # ours: the bias first
    known, new = set(), []
    for chosen in cohorts:
        new.append(len(set(chosen) - known))
        known |= set(chosen)
    sent = np.add(sizes, new)
    assert [float(report.costs.models_up) for report in reports] == sent.tolist()
    assert [float(report.costs.models_down) for report in reports] == sent.tolist()
    gradients = np.multiply(sizes, STEPS) + np.multiply(new, steps)
    assert [float(report.costs.gradient_evaluations) for report in reports] == gradients.tolist()
    assert [bool(report.event) for report in reports] == [number == 0 for number in range(ROUNDS)]
    assert [float(report.costs.clusterings) for report in reports] == [1, 0, 0, 0, 0]
    assert [int(report.num_changed) for report in reports] == new


@pytest.mark.slow
def test_newcomers_are_told_by_the_direction_alone():
    federation = blobs(clients=CLIENTS, groups=3, rows=60)
    algorithm = build()
    state = jax.tree.map(jnp.asarray, play(algorithm, federation, 1)[0])
    assert np.asarray(labels(state.clients.membership))[:CLIENTS].tolist() == [0, 1, 2] * 3
    for longest in range(3):
        means = state.server.mean.at[longest].multiply(1e3)
        scaled = state._replace(server=state.server._replace(mean=means))
        for client in range(3):
            data = jax.tree.map(lambda leaf, client=client: jnp.asarray(leaf[client]), federation.train)
            admitted = algorithm.admit(jax.random.key(0), scaled, data, jnp.asarray(client))
            assert int(labels(admitted.clients.membership)[client]) == client


def test_models_of_clusters_in_use_alone_are_mixed():
    params = {"w": jnp.asarray([[3.0, 4.0], [0.0, 2.0], [7.0, 7.0], [0.0, 0.0]])}
    after = mixed(params, jnp.asarray([True, True, False, True]), 0.5)["w"]
    own, other = np.array([3.0, 4.0]), np.array([0.0, 2.0])
    np.testing.assert_allclose(after[0], (own + 0.25 * other) / 1.25, rtol=1e-6)
    np.testing.assert_allclose(after[1], (other + 0.1 * own) / 1.1, rtol=1e-6)
    np.testing.assert_allclose(after[2], [7.0, 7.0])
    # Zeros have no direction.
    np.testing.assert_allclose(after[3], (0.1 * own + 0.25 * other) / 1.35, rtol=1e-6)


@pytest.mark.slow
def test_groups_are_found_and_who_comes_later_joins_them():
    """Five of fifteen clients in a round, nine in the first; three come after it, one of each group."""
    federation = blobs(clients=15, groups=3, rows=60)
    algorithm = build(participation=0.3, first_clients=3)
    churn = [Churn(4, join=(12, 13, 14))]
    result = simulate(algorithm, federation, rounds=14, eval_every=1, churn=churn, progress=False)
    assert result.history["num_clients"].tolist()[:5] == [9, 4, 4, 4, 5]
    known = result.labels >= 0
    assert known.sum() >= 14
    pairs = set(zip(result.labels[known].tolist(), federation.group[known].tolist(), strict=True))
    assert len(pairs) == 3
    # The evaluation of who was not heard yet is by the model of least training loss.
    assert result.history["accuracy"][-1] > 0.9
    event = result.events[0].content
    assert event["similarity"].shape == (3, 3)
    assert (event["labels"] >= 0).sum() == 9


@pytest.mark.slow
def test_who_sends_nothing_finite_is_in_no_cluster():
    federation = blobs(clients=CLIENTS, groups=3, rows=60)
    x = federation.train.x.copy()
    x[4] = np.nan
    state, reports = play(build(), federation._replace(train=federation.train._replace(x=x)), 2)
    found = np.asarray(labels(state.clients.membership))[:CLIENTS].tolist()
    assert found == [-1 if client == 4 else client % 3 for client in range(CLIENTS)]
    assert int(reports[1].num_rejected) == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.clusters.params))
    # Nobody at all: the grouping waits, and there is one model.
    state, reports = play(build(), federation._replace(train=federation.train._replace(x=x * np.nan)), 2)
    assert [float(report.costs.clusterings) for report in reports] == [1, 1]
    assert not any(report.event for report in reports)
    assert (np.asarray(labels(state.clients.membership)) == -1).all()


@pytest.mark.slow
def test_who_overflows_only_where_it_is_compared_is_rejected_too():
    """Fault: nobody took part and nobody was rejected, round after round, and no warning came."""
    x = np.random.default_rng(0).normal(size=(6, 40, 3)).astype(np.float32)
    data = ClientData(x, x.sum(-1), np.full(6, 40, np.int32))
    federation = Federation(data, data, None, None, DatasetInfo("sums", (3,), 0, "regression"))
    diverging = local.sgd(2.0, batch_size=None, steps=1)  # one step is finite, fifty are not
    _, reports = play(flexcfl(nn.linear(), clusters=2, local=diverging), federation, 2)
    assert [(int(report.num_clients.sum()), int(report.num_rejected)) for report in reports] == [(0, 6)] * 2


@pytest.mark.slow
def test_two_devices_group_as_one_does():
    federation = blobs(clients=10, groups=3, rows=40)
    for options in ({"participation": 0.5, "first_clients": 2}, {"measure": "madc", "mixing": 0.1}):
        one, two = (
            simulate(
                build(**options),
                federation,
                rounds=3,
                progress=False,
                mapping=parallel.client_mapping("scan", devices=jax.devices()[:number]),
            )
            for number in (1, 2)
        )
        assert one.labels.tolist() == two.labels.tolist()
        for first, second in zip(*(jax.tree.leaves(run.state.clusters) for run in (one, two)), strict=True):
            np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)
