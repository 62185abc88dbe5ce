"""Faulty clients: who they are, what becomes of what they send, and what a run tells of the others."""

import dataclasses
import functools
import json
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import faults, local, marked_clients, nn, parallel
from fedjax_cluster.algorithms import REGISTRY, fedavg, ifca
from fedjax_cluster.experiments import flags
from fedjax_cluster.experiments.config import RunConfig, build_algorithm
from fedjax_cluster.experiments.robustness import build_fault
from fedjax_cluster.simulation import arguments
from fedjax_cluster.simulation.evaluation import honest_figures
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import Churn, ClientData, DatasetInfo, Federation, Selection
from tests.devices import needs_two
from tests.federations import INFO, blobs

ONE = parallel.client_mapping("scan", devices=jax.devices()[:1])
MODEL = nn.mlp(hidden=(5,))
LOCAL = local.sgd(0.2, batch_size=4, epochs=1)


@functools.partial(jax.jit, static_argnames="update")
def trained(update, data):
    return update.run(jax.random.key(5), MODEL, MODEL.init(jax.random.key(1), INFO), data)


def sent_by(fault, faulty, update=LOCAL):
    """What client 3 sends with a fault, and without one."""
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[3]), blobs().train)
    spoilt = trained(dataclasses.replace(update, fault=fault), marked_clients.MarkedData.of(data, jnp.asarray(faulty)))
    return spoilt, trained(update, data)


def test_the_faulty_are_drawn_by_the_seed_among_those_with_examples():
    federation = blobs(clients=10)
    count = federation.train.num_examples.copy()
    count[:4] = 0
    fewer = federation._replace(train=federation.train._replace(num_examples=count))
    for share, expected in ((0.2, 1), (0.5, 3), (0.01, 1), (1.0, 6)):
        drawn = faults.sign_flip(share).drawn(fewer, seed=1)
        assert drawn.sum() == expected
        assert not drawn[:4].any()
    draws = {tuple(faults.sign_flip(0.3).drawn(federation, seed)) for seed in range(6)}
    assert len(draws) > 1
    np.testing.assert_array_equal(
        faults.sign_flip(0.3, scale=2).drawn(federation, 4), faults.label_flip(0.3).drawn(federation, 4)
    )


@needs_two
def test_marks_go_where_the_rows_go():
    federation = faults.afflicted(blobs(clients=7), faults.sign_flip(0.4), seed=0)
    marks = faults.faulty_clients(federation)
    x, y, count = federation.train
    assert isinstance(federation.train._replace(y=y), marked_clients.MarkedData)
    doubled = jax.tree.map(lambda leaf: leaf, federation.train)
    np.testing.assert_array_equal(marked_clients.marked(doubled), marks)
    assert marked_clients.marked(blobs().train) is None
    two = parallel.client_mapping("scan", devices=jax.devices()[:2])
    population = parallel.place_population(federation.train, federation.info, two, np.array([9.0, 1, 1, 1, 9, 9, 9]))
    assert population.placement is not None

    @jax.jit
    def seen(population):
        drawn = parallel.gather_cohort(population, Selection(jnp.asarray([5, 2, 0, 8]), jnp.arange(4) < 3))
        return [
            parallel.for_each_client(
                lambda client: (client.mask, client.index, marked_clients.marked(client.data), client.data.x[0, 0]),
                cohort,
                collect=lambda output: output,
            ).collected
            for cohort in (drawn, parallel.whole_population(population))
        ]

    for cohort, expected in zip(seen(population), (3, 7), strict=True):
        rows = [row for row in zip(*map(np.asarray, cohort), strict=True) if row[0]]
        assert len(rows) == expected
        assert all((mark, first) == (marks[index], x[index, 0, 0]) for _, index, mark, first in rows)
    assert len(y) == len(count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "factor"),
    [(faults.sign_flip(scale=3), -3.0), (faults.scaled(factor=50), 50.0), (faults.colluders(scale=-2), -2.0)],
)
def test_the_faulty_send_their_change_many_times_and_the_honest_as_it_is(fault, factor):
    _, plain = sent_by(None, False)
    spoilt = fault.sent(jax.random.key(0), plain, jnp.asarray(True))
    chex.assert_trees_all_close(spoilt.delta, jax.tree.map(lambda leaf: factor * leaf, plain.delta), rtol=1e-6)
    chex.assert_trees_all_equal(spoilt._replace(delta=None), plain._replace(delta=None))
    chex.assert_trees_all_equal(fault.sent(jax.random.key(0), plain, jnp.asarray(False)), plain)


@pytest.mark.slow
def test_local_training_gives_what_the_fault_makes_of_it_where_a_client_is_marked():
    spoilt, plain = sent_by(faults.sign_flip(scale=3), True)
    chex.assert_trees_all_close(spoilt.delta, jax.tree.map(lambda leaf: -3 * leaf, plain.delta), rtol=1e-6)
    chex.assert_trees_all_equal(*sent_by(faults.sign_flip(scale=3), False))


@pytest.mark.slow
def test_stragglers_send_what_fewer_steps_gave():
    spoilt, _ = sent_by(faults.stragglers(steps=2), True)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf[3]), blobs().train)
    short = trained(local.sgd(0.2, batch_size=4, steps=2), data)
    assert int(spoilt.num_steps) == 2
    chex.assert_trees_all_close(spoilt.delta, short.delta, rtol=1e-6)


@pytest.mark.parametrize("name", ["ditto", "fedrep", "local_only"])
def test_stragglers_are_slow_in_what_they_keep_to_themselves_too(name):
    method = REGISTRY[name](MODEL, local=local.sgd(0.2, batch_size=4, steps=6))

    def gradients(fault):
        run = simulate(method, blobs(), rounds=1, mapping=ONE, fault=fault, progress=False)
        return run.history["gradient_evaluations"][-1], run

    usual, without = gradients(None)
    clients = len(blobs().train.num_examples)
    passes = 1 if name == "local_only" else 2
    assert gradients(faults.stragglers(share=1.0, steps=2))[0] == 2 * passes * clients < usual
    if name != "fedrep":  # whose head starts from a base that was spoilt
        same = gradients(faults.sign_flip(share=1.0))[1]
        own = "models" if name == "local_only" else "own"
        chex.assert_trees_all_equal(getattr(same.state.clients, own), getattr(without.state.clients, own))


def test_stragglers_fine_tune_as_ever():
    """Personalisation at an evaluation is no round."""
    method = REGISTRY["per_fedavg"](MODEL, local=LOCAL, fine_tuning_steps=7)
    assert faults.with_fault(method, faults.stragglers(share=1.0)).fine_tuning.fault is None


def test_a_client_drops_out_as_often_as_the_rate_says():
    result = sent_by(None, False)[1]
    sent = jax.vmap(lambda key: faults.drop_out(0.3).sent(key, result, jnp.asarray(True)).delta["output"]["bias"][0])
    lost = np.isnan(np.asarray(sent(jax.random.split(jax.random.key(0), 1000))))
    assert 0.25 < lost.mean() < 0.35


def test_labels_are_reversed_for_training_alone():
    federation, fault = blobs(), faults.label_flip(0.25)
    after = faults.afflicted(federation, fault, seed=0)
    flipped = faults.faulty_clients(after)
    np.testing.assert_array_equal(after.train.y[flipped], 2 - federation.train.y[flipped])
    np.testing.assert_array_equal(after.train.y[~flipped], federation.train.y[~flipped])
    chex.assert_trees_all_equal(after.test, federation.test)
    real = federation._replace(info=federation.info._replace(num_classes=0, task="regression"))
    with pytest.raises(ValueError, match="have no class labels; take another fault, such as sign_flip"):
        faults.afflicted(real, fault, seed=0)


def test_colluders_hold_copies_of_another_groups_rows():
    federation, fault = blobs(), faults.colluders(0.25, group=1)
    after = faults.afflicted(federation, fault, seed=0)
    copies = faults.faulty_clients(after)
    assert copies.sum() == 2
    assert set(federation.group[copies]) == {0}
    owners = [np.flatnonzero((federation.train.x == after.train.x[i]).all((1, 2))) for i in np.flatnonzero(copies)]
    assert all(federation.group[owner] == 1 for owner in owners)
    assert owners[0] != owners[1]
    np.testing.assert_array_equal(after.group, federation.group)
    for unknown in (federation._replace(group=None), federation._replace(group=np.ones(8, np.int32))):
        with pytest.raises(ValueError, match="give a group beside which there is another"):
            faults.afflicted(unknown, fault, seed=0)


def test_the_disguised_show_copies_and_train_on_what_they_have():
    federation, fault = blobs(), faults.disguise(0.25, group=1, scale=-3)
    after = faults.afflicted(federation, fault, seed=4)
    hidden, copied = faults.faulty_clients(after), faults.afflicted(federation, faults.colluders(0.25, group=1), seed=4)
    chex.assert_trees_all_equal(tuple(after.train), tuple(federation.train))
    chex.assert_trees_all_equal(tuple(marked_clients.shown_rows(after.train)), tuple(copied.train))
    np.testing.assert_array_equal(hidden, faults.faulty_clients(copied))
    np.testing.assert_array_equal(marked_clients.poses(after.train), hidden)
    assert marked_clients.poses(copied.train) is None
    assert marked_clients.shown_rows(copied.train) is copied.train
    kept = jax.tree.map(lambda leaf: leaf, after.train)._replace(num_examples=None)
    chex.assert_trees_all_equal(marked_clients.shown_rows(kept), marked_clients.shown_rows(after.train))
    row = jax.tree.map(lambda leaf: jnp.asarray(leaf[np.flatnonzero(hidden)[0]]), after.train)
    honestly, spoilt = trained(LOCAL, row), trained(dataclasses.replace(LOCAL, fault=fault), row)
    chex.assert_trees_all_close(spoilt.delta, jax.tree.map(lambda leaf: -3 * leaf, honestly.delta), rtol=1e-6)


def test_a_group_divides_itself_by_what_some_of_its_members_show():
    federation, fault = blobs(), faults.schism(0.25, group=1)
    after = faults.afflicted(federation, fault, seed=0)
    some, shown = faults.faulty_clients(after), marked_clients.shown_rows(after.train)
    assert some.sum() == 2
    assert set(federation.group[some]) == {1}
    chex.assert_trees_all_equal(tuple(after.train), tuple(federation.train))
    for own, told in zip(federation.train, shown, strict=True):
        np.testing.assert_array_equal(told[~some], own[~some])
    np.testing.assert_array_equal(shown.y[some], 2 - federation.train.y[some])
    orders = {
        tuple(np.argmax(shown.x[i, 0] == federation.train.x[i, 0][:, None], axis=1)) for i in np.flatnonzero(some)
    }
    assert len(orders) == 1
    assert orders != {tuple(range(6))}
    assert faults.schism(1.0, group=1).drawn(federation, 0).tolist() == (federation.group == 1).tolist()


def test_of_images_to_be_made_again_a_group_shows_negatives_and_others_their_own():
    """As numbers of another type all targets were 255 times as large as those that clients train on."""
    x = np.random.default_rng(0).integers(0, 256, (4, 8, 6)).astype(np.uint8)
    data, info = ClientData(x, x, np.full(4, 8, np.int32)), DatasetInfo("images", (6,), 0, "reconstruction")
    after = faults.afflicted(Federation(data, data, None, np.array([0, 0, 1, 1], np.int32), info), faults.schism(), 0)
    some, shown = faults.faulty_clients(after), marked_clients.shown_rows(after.train)
    assert shown.y.dtype == np.uint8
    np.testing.assert_array_equal(shown.y[~some], x[~some])
    np.testing.assert_array_equal(shown.y[some], 255 - x[some])


@pytest.mark.slow
def test_infiltrators_are_not_there_until_they_join_the_cluster_that_they_pass_for():
    method = REGISTRY["pacfl"](MODEL, clusters=3, local=LOCAL, threshold=9.0)
    run = {"rounds": 4, "eval_every": 4, "mapping": ONE, "progress": False}
    result = simulate(method, blobs(), fault=faults.infiltrators(0.25, group=1, joins=2), **run)
    rounds, label = result.assignments
    of = {group: set(result.labels[~result.faulty & (blobs().group == group)]) for group in (0, 1)}
    assert of[0] != of[1]
    assert (label[rounds < 2][:, result.faulty] == -1).all()
    assert set(label[rounds >= 2][:, result.faulty].flat) == of[1]
    assert result.history["num_clients"].tolist() == [6, 6, 8, 8]
    plan = arguments.check_arguments(method, blobs(), rounds=4, fault=faults.infiltrators(0.25, group=1))
    assert [(change.round, len(change.join)) for change in plan] == [(5, 2)]


def test_infiltrators_come_when_the_fault_says():
    """One who was told to leave before was there from the first round, and a join was laid to the wrong round."""
    method, fault = REGISTRY["ifca"](MODEL, clusters=2, local=LOCAL), faults.infiltrators(0.25, joins=5)
    who = int(np.flatnonzero(fault.drawn(blobs(), 0))[0])
    check = functools.partial(arguments.check_arguments, method, blobs(), rounds=9, fault=fault)
    for change in (Churn(2, leave=(who,)), Churn(5, leave=(who,)), Churn(3, join=(who,)), Churn(7, join=(who,))):
        with pytest.raises(ValueError, match=f"client {who} is one of the fault's that join after 5 rounds"):
            check(churn=[change])
    assert [change.round for change in check(churn=[Churn(7, leave=(who,))])] == [7, 5]


@pytest.mark.parametrize(
    ("method", "options", "fault", "message"),
    [
        ("fedavg", {}, faults.schism(), "the server of fedavg groups nobody; take another fault, such as sign_flip"),
        ("fedem", {"clusters": 2}, faults.disguise(), "the server of fedem groups nobody"),
        ("fesem", {"clusters": 2}, faults.disguise(), "fesem groups clients by the very changes .* colluders, or"),
        ("cfl", {"clusters": 2}, faults.schism(), "cfl groups clients by the very changes that it averages"),
        ("flag", {"clusters": 2, "newcomers": False}, faults.infiltrators(), "flag admits no client during a run"),
    ],
)
def test_an_attack_on_a_clustering_that_sees_nothing_of_it_is_refused(method, options, fault, message):
    with pytest.raises(ValueError, match=message) as caught:
        simulate(REGISTRY[method](MODEL, local=LOCAL, **options), blobs(), rounds=1, fault=fault)
    assert "\n" not in str(caught.value)
    if method in ("cfl", "fesem"):  # who joins is compared once, before anything of it is averaged
        faults.with_fault(REGISTRY[method](MODEL, local=LOCAL, **options), faults.infiltrators())


def test_figures_of_the_honest_leave_the_others_out():
    per_client = {"accuracy": np.array([1.0, 0.5, np.nan, 0.0]), "num_not_finite": np.array([0.0, 0, 1, 0])}
    honest = np.array([True, True, False, False])
    found = honest_figures(per_client, np.array([0, 1, 1, 1]), np.array([0, 1, 0, 0]), honest)
    assert found == {"accuracy_honest": 0.75, "adjusted_rand_index_honest": 1.0}
    nowhere = honest_figures({}, np.array([0, 1, 1, 1]), None, honest)
    assert np.isnan(nowhere["adjusted_rand_index_honest"])


@pytest.mark.slow
def test_a_run_tells_who_is_faulty_and_goes_on_only_with_the_same_fault(tmp_path):
    method = fedavg(MODEL, local=LOCAL)
    run = {"eval_every": 2, "mapping": ONE, "progress": False}
    fault = faults.nan_updates(0.25)
    result = simulate(method, blobs(), rounds=2, fault=fault, run_dir=tmp_path / "a", **run)
    np.testing.assert_array_equal(result.faulty, fault.drawn(blobs(), 0))
    np.testing.assert_array_equal(result.history["num_rejected"], [2, 2])
    honest = result.per_client.accuracy[~result.faulty].mean()
    assert result.summary["accuracy_honest"] == pytest.approx(float(honest))
    longer = simulate(method, blobs(), rounds=3, fault=fault, run_dir=tmp_path / "a", **run)
    assert len(longer.history["round"]) == 3
    for other in (None, faults.nan_updates(0.5)):
        with pytest.raises(ValueError, match="fault"):
            simulate(method, blobs(), rounds=3, fault=other, run_dir=tmp_path / "a", **run)
    plain = simulate(method, blobs(), rounds=2, run_dir=tmp_path / "b", **run)
    assert not plain.faulty.any()
    assert "accuracy_honest" not in plain.history
    assert '"fault"' not in (tmp_path / "b" / "config.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ditto", "fedrep", "pfedme"])
def test_what_clients_keep_to_themselves_outlives_an_update_that_does_not_arrive(name):
    method = REGISTRY[name](MODEL, local=LOCAL)
    gone, there = (
        simulate(method, blobs(), rounds=1, fault=fault, mapping=ONE, progress=False)
        for fault in (faults.drop_out(1.0, share=0.5), None)
    )
    np.testing.assert_array_equal(gone.history["num_rejected"], [4])
    assert gone.state.clients.trained.all()
    # All began with the same, and nothing that anybody sent has come back yet.
    chex.assert_trees_all_close(gone.state.clients.own, there.state.clients.own, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stocfl", "flexcfl", "fl_hc"])
def test_who_drops_out_is_neither_averaged_nor_compared(name):
    """A client is trained twice in the round in which it is first compared, and silent of both."""
    options = {"stocfl": {"clusters": 12}, "flexcfl": {"clusters": 2, "first_steps": 3}}.get(
        name, {"clusters": 2, "warm_up": 0}
    )
    method = REGISTRY[name](nn.linear(), local=local.sgd(0.2, batch_size=8, steps=2), **options)
    federation = blobs(12)
    fault = faults.drop_out(rate=0.5)
    result = simulate(method, federation, rounds=1, fault=fault, progress=False)
    silent = int(result.history["num_rejected"][-1])
    assert 0 < silent < 12
    assert (result.labels < 0).sum() == silent
    assert result.history["num_clients"][-1] == 12 - silent


@pytest.mark.slow
def test_who_poses_predicts_with_the_model_that_is_evaluated():
    # After one long round some have less loss in another cluster than in that of the rows that they show.
    method = ifca(MODEL, clusters=2, local=local.sgd(0.2, batch_size=4, epochs=5), start_rounds=3)
    result = simulate(method, blobs(), rounds=1, fault=faults.disguise(0.5, scale=1.0), mapping=ONE, progress=False)
    test, index = result.federation.test, np.flatnonzero(result.faulty)
    right = [result.predict(test.x[i], client=int(i)).argmax(-1) == test.y[i] for i in index]
    expected = [own[: test.num_examples[i]].mean() for i, own in zip(index, right, strict=True)]
    np.testing.assert_allclose(result.per_client.accuracy[index], expected, rtol=1e-6)


def test_a_local_update_of_ones_own_is_refused():
    with pytest.raises(ValueError, match=r"the local update is None; use local\.sgd"):
        faults.with_fault(types.SimpleNamespace(local=None), faults.sign_flip())


def test_flags_of_rules_and_faults():
    words = ["--aggregation", "trimmed-mean", "--trim", "0.1", "--fault", "sign-flip", "--fault-share", "0.3"]
    config, _ = flags.parse_run("ifca", [*words, "--fault-scale", "4", "--clusters", "2"], "run")
    assert build_fault(config) == faults.sign_flip(0.3, scale=4)
    assert build_algorithm(config).config["aggregation"] == {"rule": "trimmed_mean", "share": 0.1}
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    words = ["--fault", "infiltrators", "--fault-joins", "3", "--fault-group", "1", "--fault-scale", "-2"]
    config, _ = flags.parse_run("ifca", [*words, "--clusters", "2"], "run")
    assert build_fault(config) == faults.infiltrators(group=1, scale=-2, joins=3)
    plain = RunConfig(method="fedavg", aggregation="mean")
    assert plain == RunConfig(method="fedavg")
    assert not {"aggregation", "fault", "trim"} & plain.to_json().keys()
    assert "aggregation" not in build_algorithm(plain).config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aggregation": "trimmed-mean", "trim": 0.5}, r"trim is 0\.5; .* half or more would leave nothing"),
        ({"trim": 0.1}, r"trim is 0\.1, but no aggregation is given"),
        ({"aggregation": "median", "clip": 1.0}, r"aggregation median has no norm"),
        ({"aggregation": "norm-clipping", "clip": 0.0}, r"clip is 0\.0; it must be a number, positive and finite"),
        ({"aggregation": "norm-clipping"}, r"norm-clipping needs the largest norm"),
        ({"aggregation": "median", "method": "local_only"}, r"local-only has no server that averages models"),
        ({"aggregation": "median", "method": "fedproto"}, r"fedproto has no server that averages models"),
        ({"fault_share": 0.2}, r"fault_share is 0\.2, but no fault is given"),
        ({"fault": "sign-flop"}, r"unknown fault 'sign-flop'; known: sign-flip"),
        ({"fault": "disguise", "fault_joins": 2}, r"fault disguise has no joins; it has share, group, scale"),
        ({"fault": "infiltrators", "fault_joins": 0}, r"joins is 0; it must be a whole number, at least 1"),
        ({"fault": "sign-flip", "fault_rate": 0.2}, r"fault sign-flip has no rate; it has share, scale"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_a_line(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        RunConfig(**{"method": "fedavg", **settings})
    assert "\n" not in str(caught.value)
