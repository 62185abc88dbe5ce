"""Every registered method through the same protocol (design: shapes, one compilation, mishaps, devices)."""

import dataclasses
import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_cluster import aggregation, faults, kept_training, local, marked_clients, nn, parallel
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.algorithms.round import labels as labels_of
from fedjax_cluster.simulation import run_keys, segment, simulate
from tests.federations import blobs, one_step

METHODS = sorted(REGISTRY)
# Where a test compiles much, one method stands for those that are like it: FedAvg, FedRep.
ALIKE = ("ditto", "fairavg", "fedavgm", "fedper", "fedproto", "fedprox", "local_only", "pfedme", "scaffold")
SEED = ("cfl", "cfl_gp", "fedgwc", "flag", "gradient_loss")
FEWER = [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in METHODS]
FIVE = [name if name in SEED else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
SCAN = parallel.client_mapping("scan", devices=jax.devices()[:1])
# On two devices one absent client is added, and must not change a draw.
CLIENTS = 7


@functools.cache
def build(name, *, clusters=2, participation=1.0):
    factory = REGISTRY[name]
    arguments = {"clusters": clusters} if "clusters" in inspect.signature(factory).parameters else {}
    if name == "fl_hc":  # in the second round, as CFL-GP clusters
        arguments["warm_up"] = 1
    own = local.sgd(0.2, batch_size=4, epochs=1)
    return factory(nn.mlp(hidden=(5,)), local=own, participation=participation, **arguments)


def place(federation, mapping=SCAN):
    return parallel.place_population(federation.train, federation.info, mapping)


@functools.cache
def started(name, participation=1.0):
    """The method at its start on seven clients, on one device."""
    algorithm, population = build(name, participation=participation), place(blobs(clients=CLIENTS))
    return algorithm, population, *algorithm.init(run_keys(0).initialization, population)


def call(test, name):
    """One of these tests, for a method of this name."""
    others = {"participation": 0.4, "clusters": 9, "model": "mlp", "rounds": 1}
    test(name, **{key: value for key, value in others.items() if key in inspect.signature(test).parameters})


@pytest.mark.parametrize("name", METHODS)
def test_argument_names_and_order(name):
    algorithm = build(name)
    expected = {
        "init": ["rng_key", "population"],
        "select": ["rng_key", "state"],
        "step": ["rng_key", "state", "cohort"],
        "personalize": ["rng_key", "state", "data", "index"],
        "admit": ["rng_key", "state", "data", "index"],
        "cluster": ["rng_key", "state", "mapping"],
    }
    for part, names in expected.items():
        function = getattr(algorithm, part)
        if function is not None:
            assert list(inspect.signature(function).parameters) == names
    assert algorithm.name == name
    assert {"membership", "present"} <= set(started(name)[2].clients._fields)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("participation", [0.4, 1.0])
def test_state_and_report_keep_their_shapes(name, participation):
    algorithm, population, state, info = started(name, participation)
    for number in range(3):
        new, report = one_step(algorithm, population, state, number)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        chex.assert_trees_all_equal_shapes_and_dtypes(report, info)
        assert int(new.round) == number + 1
        state = new


@pytest.mark.parametrize("name", METHODS)
def test_a_round_is_of_32_bits_where_jax_is_not(name):
    algorithm, population, state, info = started(name)
    with jax.enable_x64(True):
        new, report = jax.eval_shape(functools.partial(one_step, algorithm), population, state)
    chex.assert_trees_all_equal_shapes_and_dtypes((new, report), (state, info))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_64_bits_change_nothing(name):
    algorithm, federation = build(name), blobs(clients=CLIENTS)
    population = place(federation)
    runs, starts = [], []
    for wide in (False, True):
        with jax.enable_x64(wide):
            starts.append(algorithm.init(run_keys(0).initialization, population)[0])
            run = simulate(algorithm, federation, rounds=4, eval_every=2, mapping=SCAN)
            run.history.pop("seconds")
            runs.append((run.state, run.history, run.labels, run.predict(federation.test.x[0], 0)))
    chex.assert_trees_all_equal(*starts)
    chex.assert_trees_all_equal(*runs)
    chex.assert_trees_all_equal_shapes_and_dtypes(*runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIVE)
def test_the_server_clusters_where_there_is_a_function_for_it(name):
    """The clients' own choices are none of its clusterings; FLAG and PACFL cluster, and measure it, in `init`."""
    algorithm, population, state, info = started(name)
    assert float(info.costs.clusterings) == (name in ("flag", "pacfl", "fesem"))
    assert (float(info.costs.clustering_seconds) > 0) == (name in ("flag", "pacfl"))
    found = []
    for number in range(2):
        state, report = one_step(algorithm, population, state, number)
        found.append(float(report.costs.clusterings))
        assert float(report.costs.clustering_seconds) == 0
    if algorithm.cluster is None:
        assert found == [0, 0]
        return
    label = jax.jit(algorithm.cluster)(jax.random.key(0), state)
    assert (label.shape, label.dtype) == (state.clients.present.shape, jnp.int32)
    counted = {"fesem": [1, 1], "stocfl": [1, 1], "cfl_gp": [0, 1], "fl_hc": [0, 1], "flexcfl": [1, 0]}
    assert found == counted.get(name, [0, 0])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_selection_is_valid_first_and_unique(name, participation):
    algorithm, population, state, _ = started(name, participation)
    count = len(population.data.num_examples)
    for number in range(4):
        index, mask, _ = algorithm.select(jax.random.key(number), state._replace(round=jnp.asarray(number)))
        index, mask = np.asarray(index), np.asarray(mask)
        assert len(set(index[mask])) == mask.sum() > 0
        if name not in ("cfl_gp", "fl_hc", "flexcfl", "fedsoft"):  # some rounds have more, others draw twice
            assert mask.sum() == (CLIENTS if participation == 1 else 3)
        assert (index[~mask] == count).all()
        if len(index) < count:
            assert mask.tolist() == sorted(mask, reverse=True)


def three_rounds(name, participation):
    """Models, labels and models sent after three rounds, step by step on one device."""
    algorithm, population, state, info = started(name, participation)
    down = float(info.costs.models_down)
    for number in range(3):
        state, info = one_step(algorithm, population, state, number)
        down += float(info.costs.models_down)
    return jax.device_get((state.clusters, labels_of(state.clients.membership)[:CLIENTS])), down


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "participation"),
    [
        *(pytest.param(n, 0.4, marks=() if n in ("cfl_gp", "fedavg", "ifca") else pytest.mark.slow) for n in METHODS),
        *(pytest.param(n, 1.0, marks=pytest.mark.slow) for n in SEED),
    ],
)
def test_the_round_loop_chunks_and_devices_change_nothing(name, participation):
    """Scanned in chunks on two devices as step by step on one; equal seeds give equal runs, segments split nothing,
    and the step compiles once."""
    before = segment.run_segment._cache_size()
    algorithm, federation = build.__wrapped__(name, participation=participation), blobs(clients=CLIENTS)
    run = functools.partial(
        simulate, algorithm, federation, mapping=parallel.client_mapping("chunked", 2, devices=jax.devices()[:2])
    )
    runs = [run(rounds=7, seed=seed, eval_every=every) for seed, every in ((3, 7), (3, 2), (4, 7))]
    short = run(rounds=3, seed=0)
    assert segment.run_segment._cache_size() == before + 1
    (clusters, labels), down = three_rounds(name, participation)
    assert short.labels.tolist() == labels.tolist()
    chex.assert_trees_all_close(short.state.clusters, clusters, rtol=1e-4, atol=1e-5)
    assert short.history["models_down"].sum() == pytest.approx(down)
    assert len(runs[0].history["round"]) == 7
    chex.assert_trees_all_equal(*(run.state for run in runs[:2]))
    different = [
        np.array_equal(a, b) for a, b in zip(*(jax.tree.leaves(r.state.clusters) for r in runs[::2]), strict=True)
    ]
    assert not all(different)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEWER)
@pytest.mark.parametrize("participation", [pytest.param(1.0, marks=pytest.mark.slow), 0.4])
def test_a_client_without_finite_update_is_left_out_and_counted(name, participation):
    algorithm, population, state, _ = started(name, participation)
    x = population.data.x.at[2].set(jnp.nan)
    broken = parallel.Population(population.data._replace(x=x), population.info, population.mapping)
    rejected = 0
    for number in range(4):
        state, info = one_step(algorithm, broken, state, number)
        rejected += int(info.num_rejected)
    assert rejected >= 1
    chex.assert_tree_all_finite(state.clusters.params)
    assert np.isfinite(np.asarray(state.clients.membership)).all()


ASKED: list[str] = []


class watched(aggregation.Aggregation):
    """A mean that tells whether it was asked."""

    streams = True

    def limit(self, value):
        ASKED.append("rule")
        return value


class witnessed(faults.Fault):
    """A fault that tells whether it was asked."""

    def sent(self, rng_key, result, faulty):
        ASKED.append("fault")
        return result


@pytest.mark.slow
@pytest.mark.parametrize("name", FEWER)
def test_the_server_asks_its_rule_and_what_clients_send_passes_their_fault(name):
    """Traced, not compiled. What clients keep to themselves passes no fault."""
    algorithm, population, state, _ = started(name)
    marked = marked_clients.MarkedData.of(population.data, jnp.zeros(population.data.num_examples.shape, bool))
    population = parallel.Population(marked, population.info, population.mapping)
    averages = "aggregation" in inspect.signature(type(algorithm)).parameters
    assert averages == (name not in ("fedproto", "local_only"))
    algorithm = faults.with_fault(algorithm, witnessed())
    algorithm = dataclasses.replace(algorithm, aggregation=watched()) if averages else algorithm
    ASKED.clear()
    jax.eval_shape(functools.partial(one_step, algorithm), population, state)
    assert set(ASKED) == {"fedproto": {"fault"}, "local_only": set()}.get(name, {"rule", "fault"})
    own = {"ditto": "personal_update", "fedrep": "head_update", "per_fedavg": "fine_tuning"}.get(name)
    assert own is None or isinstance(getattr(algorithm, own).fault, type(None) | kept_training.steps_alone)


def enlarged(population, factor):
    """Client 2's features times a factor, as far as float32 goes."""
    x, most = np.asarray(population.data.x, np.float64), np.finfo(np.float32).max
    x[2] *= factor
    data = population.data._replace(x=jnp.asarray(np.clip(x, -most, most).astype(np.float32)))
    return parallel.Population(data, population.info, population.mapping)


def not_finite(name, state):
    """The leaves of a state that hold NaN or infinity, without those that begin with it and only report."""
    reports = {"cfl": ["server.mean_norm", "server.max_norm"], "fedgwc": ["server.index"]}.get(name, [])
    leaves, _ = jax.tree.flatten_with_path(jax.device_get(state))
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return [at for at, leaf in named.items() if at not in reports and not np.isfinite(leaf).all()]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEWER)
@pytest.mark.parametrize("model", ["mlp", pytest.param("linear", marks=pytest.mark.slow)])
def test_one_clients_enormous_features_spoil_no_state(name, model):
    """Squares of its finite update, and sums with others', leave float32: it is left out like one with NaN."""
    algorithm, population, *_ = started(name)
    if model == "linear":  # whose gradient is the features themselves
        algorithm = dataclasses.replace(algorithm, model=nn.linear(), local=local.sgd(0.2, batch_size=4, steps=1))
        if "start_rounds" in inspect.signature(type(algorithm)).parameters:
            # Trained on the client alone, a first model knows it so surely that its gradient is 0.
            algorithm = dataclasses.replace(algorithm, start="random")
    # The least leaves an update that is just small enough to be taken.
    for factor in (1e15, 1e36, 1e37, 3e38):
        one = enlarged(population, factor)
        state, info = algorithm.init(run_keys(0).initialization, one)
        rejected = int(info.num_rejected)
        for number in range(4):
            state, info = one_step(algorithm, one, state, number)
            rejected += int(info.num_rejected)
            assert not_finite(name, state) == []
        if factor > 1e15:
            assert rejected >= 1
            assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(state.clusters.params)) < 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedem", pytest.param("cfl", marks=pytest.mark.slow)])
def test_a_step_of_the_server_that_is_not_finite_is_not_taken_and_its_clients_count_as_rejected(name):
    _, population, *_ = started(name)
    algorithm = dataclasses.replace(build(name), model=nn.linear(), server=optax.scale(float("inf")))
    state, _ = algorithm.init(run_keys(0).initialization, population)
    new, info = one_step(algorithm, population, state)
    chex.assert_trees_all_equal(new.clusters, state.clusters)
    assert int(info.num_rejected) == CLIENTS
    assert info.num_clients.sum() == 0
    assert np.isnan(info.loss).all()


@pytest.mark.parametrize("name", METHODS)
def test_the_round_is_handed_on_to_a_schedule(name):
    """Traced alone: where it were not, `run` would say that it needs one."""
    _, population, state, _ = started(name)
    own = local.sgd(lambda number: 0.2 * 0.5**number, batch_size=4, epochs=1)
    algorithm = dataclasses.replace(build(name), local=own)
    jax.eval_shape(functools.partial(one_step, algorithm), population, state)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_clients_train_at_the_rounds_rate(name):
    """At a rate of 0 from the second round on nothing moves any more."""
    _, population, *_ = started(name)
    own = local.sgd(lambda number: jnp.where(number < 1, 0.2, 0.0), batch_size=4, epochs=1)
    algorithm = dataclasses.replace(build(name), local=own)
    before, _ = algorithm.init(run_keys(0).initialization, population)
    first, _ = one_step(algorithm, population, before, 0)
    second, _ = one_step(algorithm, population, first, 1)

    def moved(old, new):
        parts = [(s.clusters.params, *(getattr(s.clients, part, ()) for part in ("models", "own"))) for s in (old, new)]
        return max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, parts), strict=True))

    assert moved(before, first) > 1e-3
    # Velocity goes on; centres are means of who is drawn; personal models have a rate of their own.
    if name not in ("fedavgm", "fedsoft", "fl_hc", "pfedme"):
        assert moved(first, second) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_single_client(name):
    algorithm, population = build(name, clusters=1), place(blobs(clients=1, groups=1))
    state, _ = algorithm.init(run_keys(0).initialization, population)
    state, info = one_step(algorithm, population, state)
    assert labels_of(state.clients.membership).tolist() == [0]
    assert int(info.num_clients.sum()) == 1
    chex.assert_tree_all_finite(state.clusters.params)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEWER)
def test_empty_cluster_keeps_its_model(name):
    algorithm, population, state, _ = started(name)
    slots = state.clusters.active.shape[0]
    if slots == 1:
        pytest.skip("a single cluster is never empty")
    if name == "fedsoft":
        pytest.skip("every cluster draws clients, by the smallest importance where none is its own")
    # The last cluster's model is so bad that nobody would choose it, and nobody is in it.
    rng = np.random.default_rng(0)
    ruined = jax.tree.map(
        lambda leaf: leaf.at[-1].set(1e3 * rng.normal(size=leaf[-1].shape).astype(leaf.dtype)), state.clusters.params
    )
    weights = jnp.where(state.clients.present[:, None], jax.nn.one_hot(0, slots)[None], 0.0)
    clients = state.clients._replace(membership=weights)
    if hasattr(clients, "pinned"):
        clients = clients._replace(pinned=jnp.zeros_like(clients.pinned))
    state = state._replace(clusters=state.clusters._replace(params=ruined), clients=clients)
    if name == "flexcfl":  # whose grouping, in the first round, leaves no cluster empty
        state = state._replace(server=state.server._replace(clustered=jnp.asarray(True)))
    new, info = one_step(algorithm, population, state)
    assert int(info.num_clients[-1]) == 0
    assert np.isnan(info.loss[-1])
    chex.assert_trees_all_equal(*(jax.tree.map(lambda leaf: leaf[-1], tree) for tree in (ruined, new.clusters.params)))


@pytest.mark.parametrize("name", FEWER)
@pytest.mark.parametrize("rounds", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_personalize_gives_a_mixture_from_the_start(name, rounds):
    algorithm, population, state, _ = started(name)
    for number in range(rounds):
        state, _ = one_step(algorithm, population, state, number)
    client = jax.tree.map(lambda leaf: leaf[3], population.data)
    variables, mixture = jax.jit(algorithm.personalize)(jax.random.key(0), state, client, jnp.asarray(3))
    assert mixture.ndim == 1
    assert float(mixture.sum()) == pytest.approx(1.0)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(variables)} == {len(mixture)}


@pytest.mark.parametrize("name", METHODS)
def test_a_newcomer_joins(name):
    algorithm, population, state, _ = started(name)
    if algorithm.admit is None:
        pytest.skip("the method admits nobody during a run")
    absent = jax.tree.map(lambda leaf: leaf.at[5].set(jnp.zeros_like(leaf[5])), state.clients)
    client = jax.tree.map(lambda leaf: leaf[5], population.data)
    new = jax.jit(algorithm.admit)(jax.random.key(1), state._replace(clients=absent), client, jnp.asarray(5))
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
    assert bool(new.clients.present[5])
    # Before its first round FlexCFL has no clusters.
    assert float(new.clients.membership[5].sum()) == pytest.approx(0.0 if name == "flexcfl" else 1.0)
    others = np.arange(CLIENTS) != 5
    np.testing.assert_array_equal(np.asarray(new.clients.membership)[others], np.asarray(absent.membership)[others])


@pytest.mark.slow
@pytest.mark.parametrize("name", FIVE)
def test_a_newcomer_with_enormous_features_spoils_no_state(name):
    algorithm, population, state, _ = started(name)
    if algorithm.admit is None:
        pytest.skip("the method admits nobody during a run")
    absent = jax.tree.map(lambda leaf: leaf.at[5].set(jnp.zeros_like(leaf[5])), state.clients)
    client = jax.tree.map(lambda leaf: leaf[5], population.data)
    for factor in (1e37, jnp.nan):
        broken = client._replace(x=client.x * factor)
        new = jax.jit(algorithm.admit)(jax.random.key(1), state._replace(clients=absent), broken, jnp.asarray(5))
        assert not_finite(name, new) == []


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("clusters", [0, 9])
def test_an_impossible_number_of_clusters_is_refused(name, clusters):
    if "clusters" not in inspect.signature(REGISTRY[name]).parameters:
        pytest.skip("the method has one model")
    with pytest.raises(ValueError, match="cluster"):
        simulate(build(name, clusters=clusters), blobs(clients=8), rounds=1)
