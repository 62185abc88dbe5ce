"""What a configuration makes of its learning rate, for every method."""

import jax
import numpy as np
import pytest

from fedjax_cluster import parallel
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.data.partition import count_groups
from fedjax_cluster.experiments import flags
from fedjax_cluster.experiments.cluster_counts import say_clusters
from fedjax_cluster.experiments.config import (
    OF_METHOD,
    RunConfig,
    build_algorithm,
    build_federation,
    build_local,
    settled,
)
from fedjax_cluster.options import option
from tests.federations import INFO, blobs

ONE = parallel.client_mapping("scan", devices=jax.devices()[:1])
RATE = 1e-4
FAST = ("fedavg", "gradient_loss")
QUICK = {"flexcfl": {"first_steps": 1}, "flag": {"gradient_epochs": 1, "threshold": 1.0}, "fedrep": {"head_steps": 1}}


def models(name, state):
    """What training moves: with FedSoft and alone the clients' own models, of a single layer that is personal too."""
    own = {"local_only": "models", "fedsoft": "own", "fedper": "own", "fedproto": "own", "fedrep": "own"}
    if name not in own:
        return state.clusters.params
    found = getattr(state.clients, own[name])
    return getattr(found, "params", found)  # a few layers are packed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *(
            pytest.param(name, 1, id=f"{name}-model averaging", marks=() if name in FAST else pytest.mark.slow)
            for name in sorted(REGISTRY)
        ),
        *(
            pytest.param(name, None, id=f"{name}-gradient averaging", marks=() if name in FAST else pytest.mark.slow)
            for name in sorted(REGISTRY)
        ),
    ],
)
def test_one_round_moves_the_models_as_far_as_the_learning_rate_says(name, steps):
    """Gradients are near 1 here: at a rate of 1, which gradient averaging gives the clients, all would fly apart."""
    averaging = {"averaging": "gradients"} if steps is None else {"local_steps": steps}
    options = {"method_options": QUICK.get(name, {}), **averaging}
    config = RunConfig(method=name, model="linear", clusters=2, batch_size=32, learning_rate=RATE, **options)
    algorithm, data = build_algorithm(config), blobs(ragged=False).train
    population = parallel.place_population(data, INFO, ONE)
    start, _ = algorithm.init(jax.random.key(0), population)
    cohort = parallel.gather_cohort(population, algorithm.select(jax.random.key(1), start))
    after, _ = jax.jit(algorithm.step)(jax.random.key(2), start, cohort)
    pairs = zip(*(jax.tree.leaves(models(name, state)) for state in (start, after)), strict=True)
    moved = max(float(np.abs(b - a).max()) for a, b in pairs)
    assert 0.05 * RATE < moved < 20 * RATE
    if name == "flag":
        # What it clusters by has been trained at this rate, too.
        assert 0.05 * RATE < np.abs(after.clients.updates).max() < 20 * RATE


def test_where_gradients_are_averaged_the_rate_is_the_servers():
    own, server = build_local(RunConfig(method="fedavg", averaging="gradients", learning_rate=0.25))
    assert own.learning_rate == 1.0
    updates, _ = server.update({"w": np.ones(1)}, server.init({"w": np.ones(1)}))
    assert float(updates["w"][0]) == -0.25
    own, server = build_local(RunConfig(method="fesem", averaging="gradients", learning_rate=0.25))
    assert (own.learning_rate, own.steps) == (0.25, 1)


@pytest.mark.parametrize("further", [{}, {"momentum": 0.5}, {"optimizer": "adam"}], ids=["sgd", "momentum", "adam"])
@pytest.mark.parametrize("steps", [None, 2], ids=["gradient averaging", "model averaging"])
def test_the_learning_rate_falls_from_round_to_round(steps, further):
    """Whoever's it is: on the clients by the round, on the server by its steps, one a round."""
    if steps is None and "optimizer" in further:
        further = {}  # the clients' alone
    averaging = "models" if steps else "gradients"
    settings = {"averaging": averaging, "learning_rate": 0.4, "learning_rate_decay": 0.5, "local_steps": steps}
    config = RunConfig(method="fedavg", **settings, **further)
    own, server = build_local(config)
    if steps:
        assert [float(own.rate_at(t)) for t in (0, 1, 3)] == pytest.approx([0.4, 0.2, 0.05])
        return
    assert own.learning_rate == 1.0
    state, moves, velocity = server.init({"w": np.ones(1, np.float32)}), [], 0.0
    for number in range(3):
        updates, state = server.update({"w": np.ones(1, np.float32)}, state)
        velocity = 1.0 + further.get("momentum", 0.0) * velocity
        moves.append((float(updates["w"][0]), -0.4 * 0.5**number * velocity))
    np.testing.assert_allclose(*zip(*moves, strict=True), rtol=1e-6)
    assert build_local(RunConfig(method="fedavg", local_steps=2))[0].learning_rate == 0.1


def test_a_configuration_of_another_version_is_refused_by_name():
    content = {**RunConfig().to_json(), "temperature": 1.0}
    with pytest.raises(ValueError, match=r"settings unknown here: temperature"):
        RunConfig.from_json(content)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "Adam"}, "optimizer is 'Adam'; it must be 'sgd' or 'adam'"),
        ({"optimizer": "adam", "momentum": 0.9}, "adam has its own"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"server_learning_rate": 0.5}, "server_learning_rate is 0.5"),
    ],
)
def test_settings_that_would_do_nothing_or_something_else_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**settings)


def test_a_method_fills_in_what_is_not_given():
    """And nothing of what is: with other steps, averaging or rounds its own no longer hold."""
    own = RunConfig(method="flag")
    assert (own.averaging, own.learning_rate, own.local_epochs, own.local_steps) == ("models", 0.03, 2, None)
    assert (own.momentum, own.batch_size, own.participation, own.rounds) == (0.5, 20, 0.2, 60)
    given = RunConfig(method="flag", local_steps=3, learning_rate=0.2, momentum=0.0, rounds=3000)
    assert (given.local_steps, given.local_epochs, given.learning_rate, given.momentum) == (3, None, 0.2, 0.0)
    assert (given.batch_size, given.eval_every) == (20, 100)
    gradients = RunConfig(method="flag", averaging="gradients")
    assert (gradients.local_steps, gradients.local_epochs, gradients.learning_rate) == (None, None, 0.3)
    assert RunConfig(method="cfl_gp").averaging == "gradients"
    models = RunConfig(method="cfl_gp", averaging="models")
    assert (models.local_steps, models.learning_rate) == (10, 0.1)
    assert RunConfig(method="cfl_gp", local_epochs=2).averaging == "models"
    with pytest.raises(ValueError, match="averaging is 'gradients'"):
        RunConfig(averaging="gradients", local_steps=2)


def test_a_settled_configuration_stays_as_it_is():
    settings = {"scenario": "rotated", "scenario_options": {"angles": (0, 90, 180)}}
    for method, clusters in (("ifca", 3), ("cfl", 16), ("fedavg", None)):
        config, federation = settled(RunConfig(method=method, **settings))
        assert (config.clients, config.clusters) == (16, clusters)
        assert len(federation.train.num_examples) == 16
        assert RunConfig.from_json(config.to_json()) == config
        assert settled(config)[0] == config
    assert settled(RunConfig(method="ifca", scenario="dirichlet", clients=3))[0].clusters == 3, "no groups to count"


@pytest.mark.parametrize(("method", "slots"), [("stocfl", 13), ("cfl", 13), ("ifca", 4)])
def test_clusters_that_nobody_asked_for_are_no_more_than_clients_at_the_start(method, slots):
    """Fault: 16 slots for 16 clients of whom some join later, which every method refused."""
    for late in ({"churn": [[2, [3, 4, 5], []], [4, [], [3]]]}, {"fault": "infiltrators", "fault_share": 0.2}):
        assert settled(RunConfig(method=method, **late))[0].clusters == slots
        assert settled(RunConfig(method=method, clusters=16, **late))[0].clusters == 16


GROUPS = "the number of the scenario's groups"


@pytest.mark.parametrize(
    ("method", "joins", "told"),
    [
        ("ifca", [2, 3, 4, 5, 6, 7], "K, the number of clusters, was 2, as there are no more clients at the start"),
        ("cfl", [7], "K, the number of clusters, was 7 at most, as there are no more clients at the start"),
        (
            "ifca",
            [7],
            "K, the number of clusters, was 4, the number of the scenario's groups; --clusters gives another",
        ),
        ("cfl", [], ""),
    ],
)
def test_clusters_are_said_to_be_few_for_the_clients_at_the_start(method, joins, told, caplog):
    given = RunConfig(method=method, clients=8, churn=[[2, joins, []]])
    with caplog.at_level("INFO"):
        say_clusters(given, *settled(given))
    assert "".join(caplog.messages) == told


@pytest.mark.parametrize(("default", "clients", "has"), [(8, 16, 8), (8, 5, 5), (None, 16, None)])
def test_a_default_number_of_clusters_of_a_methods_own_stands_until_another_is_given(
    monkeypatch, caplog, default, clients, has
):
    """Fault: a method with K = 8 got the number of the scenario's groups, and one that takes None could not have it."""
    own = "own_k"
    parts = {"__annotations__": {"clusters": int | None}, "clusters": option("the largest K", default=default)}
    monkeypatch.setitem(REGISTRY, own, type(own, (REGISTRY["ifca"],), parts, abstract=True))
    given = RunConfig(method=own, clients=clients)
    config, federation = settled(given)
    assert (config.clusters, build_algorithm(config).clusters, count_groups(federation.group)) == (has, has, 4)
    assert settled(config)[0] == config
    with caplog.at_level("INFO"):
        say_clusters(given, config, federation)
    told = f"was {has}, as there are no more clients; --clusters gives another" if has != default else ""
    assert bool(told) == bool(caplog.text)
    assert told in caplog.text
    assert settled(RunConfig(method=own, clusters=3))[0].clusters == 3


def test_a_methods_many_clients_are_few_where_examples_are():
    assert len(build_federation(RunConfig(method="fedgwc")).train.num_examples) == 16
    lines = RunConfig(method="fedgwc", scenario="linear_regression")
    assert len(build_federation(lines).train.num_examples) == 100
    assert len(build_federation(RunConfig(scenario="linear_regression"), usual=20).train.num_examples) == 20


def test_a_configuration_of_before_averaging_was_named_means_what_it_meant():
    content = RunConfig(method="fedavg", averaging="gradients").to_json()
    for steps, averaging in ((None, "gradients"), (4, "models")):
        before = {**content, "local_steps": steps}
        del before["averaging"]
        assert (RunConfig.from_json(before).averaging, RunConfig.from_json(before).local_steps) == (averaging, steps)


def test_a_comparison_may_give_all_methods_the_defaults_of_one():
    configs, _ = flags.parse_compare(["flag", "cfl-gp"], ["--defaults-of", "fedavg"], "compare")
    for config in configs.values():
        assert (config.averaging, config.local_steps, config.local_epochs) == ("models", 10, None)
        assert (config.learning_rate, config.participation, config.rounds, config.momentum) == (0.1, 1.0, 100, 0.0)
    words = ["--defaults-of", "cfl-gp", "--local-epochs", "3", "--rounds", "7"]
    config = flags.parse_compare(["flag", "ifca"], words, "compare")[0]["flag"]
    assert (config.averaging, config.local_epochs, config.rounds, config.batch_size) == ("models", 3, 7, 64)
    # The others' defaults follow from what is given, as they do in that method's own run.
    for words in ("--local-steps 5", "--rounds 9000", "--averaging models", "--optimizer adam --local-steps 2"):
        own, *_ = flags.parse_run("cfl-gp", words.split(), "run")
        shared = flags.parse_compare(["cfl-gp", "flag"], ["--defaults-of", "cfl-gp", *words.split()], "compare")[0]
        for config in shared.values():
            assert [getattr(config, name) for name in OF_METHOD] == [getattr(own, name) for name in OF_METHOD]
    with pytest.raises(ValueError, match=r"--defaults-of: unknown method 'fedagv'; did you mean fedavg"):
        flags.parse_compare(["flag"], ["--defaults-of", "fedagv"], "compare")


@pytest.mark.parametrize("scenario", ["xor", "linear_regression"])
@pytest.mark.parametrize(("name", "value"), [("dataset", "no/such/folder"), ("label_column", "zz")])
def test_data_that_a_scenario_does_not_read_are_refused(scenario, name, value):
    """A folder that was not there stood in the run's config.json, as if its rows had been trained on."""
    with pytest.raises(ValueError, match=f"{name} is '{value}', but scenario .* makes its own data; leave {name} out"):
        RunConfig(scenario=scenario, **{name: value})
    # In a file of before it stands, and means nothing.
    before = {**RunConfig(scenario=scenario).to_json(), name: value}
    assert RunConfig.from_json(before) == RunConfig(scenario=scenario)


def test_a_server_has_a_rate_of_its_own_where_a_method_averages_models_alone():
    given = {"averaging": "gradients", "server_learning_rate": 0.5}
    assert RunConfig(method="fesem", **given).server_learning_rate == 0.5
    with pytest.raises(ValueError, match="under gradient averaging learning_rate is the server's"):
        RunConfig(method="ifca", **given)
