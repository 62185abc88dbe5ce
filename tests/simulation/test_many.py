"""Many runs of one method: those of `simulate`, from one trace, side by side and in turn."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_cluster as fc
from fedjax_cluster import algorithms, lifting, local, nn, optimizers, parallel
from fedjax_cluster.simulation import requests, run, segment, together
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.memory import Memory
from fedjax_cluster.simulation.together import DoesNotFit
from tests.federations import blobs

ONE = parallel.client_mapping("scan", devices=jax.devices()[:1])
SGD = local.sgd(0.1, batch_size=8, steps=2)
LINEAR = nn.linear()
METHODS = {
    "fedavg": algorithms.fedavg(LINEAR, local=SGD, participation=0.6),
    "ifca": algorithms.ifca(LINEAR, local=SGD, clusters=2, start_rounds=2),
    "cfl_gp": algorithms.cfl_gp(LINEAR, local=SGD, clusters=2, every=1, beta=0.5, participation=0.6),
    # Runs with a large rate are at rest before others, and split in other rounds.
    "cfl": algorithms.cfl(LINEAR, local=SGD, clusters=3, first_round=1, near=0.9, far=0.3, gamma_max=0.0),
    "fedgwc": algorithms.fedgwc(LINEAR, local=SGD, clusters=3, participation=0.4, tolerance=0.5, patience=1),
}
OPTIONS = {
    "fedavg": {"learning_rate": (0.1, 0.3)},
    "ifca": {"learning_rate": (0.1, 0.3)},
    "cfl_gp": {"beta": (0.5, 0.9), "weight_decay": (0.0, 0.1)},
    "cfl": {"learning_rate": (0.1, 0.5)},
    "fedgwc": {"rate": (0.3, 0.8), "proximal": (0.0, 0.5)},
}
ROUNDS = 5


@pytest.fixture
def traces(monkeypatch):
    """How often each method's step was traced."""
    counted = {}

    def count(cls):
        step = cls.step

        @functools.wraps(step)
        def counting(self, *arguments):
            counted[self.name] = counted.get(self.name, 0) + 1
            return step(self, *arguments)

        monkeypatch.setattr(cls, "step", counting)

    for name in METHODS:
        count(algorithms.REGISTRY[name])
    return counted


def alone(method, federation, values, seed, **options):
    for name, value in values.items():
        method = lifting.with_number(method, lifting.path_of(method, name), value)
    return simulate(method, federation, seed=seed, mapping=ONE, progress=False, **options)


def assert_same(found, single, whole=True):
    assert found.algorithm == single.algorithm
    assert found.labels.tolist() == single.labels.tolist()
    mine, own = (jax.device_get(result.state) for result in (found, single))
    chex.assert_trees_all_close(mine.clusters, own.clusters, rtol=1e-5, atol=1e-5)
    if whole:
        chex.assert_trees_all_close(mine, own, rtol=1e-3, atol=1e-4)
    assert list(found.history) == list(single.history)
    for name in set(found.history) - {"seconds"}:
        np.testing.assert_allclose(found.history[name], single.history[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert [event.round for event in found.events] == [event.round for event in single.events]
    for mine, own in zip(found.events, single.events, strict=True):
        chex.assert_trees_all_close(dict(mine.content), dict(own.content), rtol=1e-4, atol=1e-4)
    chex.assert_trees_all_equal(tuple(found.assignments), tuple(single.assignments))
    assert found.summary["rounds"] == single.summary["rounds"] == ROUNDS


def fingerprint(state):
    return tuple(float(np.sum(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(jax.device_get(state)))


FAST = {("fedavg", False), ("cfl", True)}
CASES = [
    pytest.param(name, side, marks=() if (name, side) in FAST else pytest.mark.slow)
    for name in METHODS
    for side in (False, True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side_by_side"), CASES)
def test_runs_are_those_of_simulate_from_one_trace(name, side_by_side, traces):
    """Faults: an option that stays the first run's, a state or a draw of another run, a round counted twice, an event
    that reaches the wrong run, a program for each value."""
    method, federation = METHODS[name], blobs(clients=10)
    options = {"rounds": ROUNDS, "eval_every": 2}
    found = fc.simulate_many(
        method, federation, seeds=(3, 4), options=OPTIONS[name], together=side_by_side, mapping=ONE, progress=False,
        **options,
    )  # fmt: skip
    assert traces == {name: 1}
    assert (found.memory is not None) == found.together == side_by_side
    runs = [(values, seed) for values in found.combinations for seed in found.seeds]
    assert len(found) == len(runs) == 2 * np.prod([len(of) for of in OPTIONS[name].values()])
    singles = [alone(method, federation, values, seed, **options) for values, seed in runs]
    for result, single in zip(found, singles, strict=True):
        assert_same(result, single)
    if name == "cfl":
        # Of the runs some split in a round in which others do not.
        assert len({tuple(event.round for event in single.events) for single in singles}) > 1
    # Each value makes a difference.
    assert len({fingerprint(single.state) for single in singles}) == len(singles)


@pytest.mark.slow
def test_several_federations_of_unequal_clients_run_side_by_side_as_in_turn(monkeypatch):
    """Faults: the rows of another seed's clients, or padding that is trained on; here on two devices."""
    monkeypatch.setattr(requests, "without_mesh_of_cores", lambda mapping: mapping)
    federations = [blobs(clients=7, rows=rows, seed=rows) for rows in (12, 20)]
    method = algorithms.fedavg(LINEAR, local=local.sgd(0.1, batch_size=4, epochs=1), participation=0.5)
    options = {"rounds": ROUNDS, "eval_every": 5, "eval_clients": 4}
    found = fc.simulate_many(
        method, federations, seeds=(0, 1), options={"learning_rate": (0.1, 0.2)}, together=True, progress=False,
        **options,
    )  # fmt: skip
    for place, result in enumerate(found):
        values, own = found.combinations[place // 2], federations[place % 2]
        assert result.federation is own
        single = alone(method, own, values, place % 2, **options)
        assert_same(result, single, whole=False)  # whose state has an absent client for the second device
        np.testing.assert_allclose(result.per_client.accuracy, single.per_client.accuracy, rtol=1e-5)


@pytest.mark.slow
def test_late_joiners_of_cfl_gp_go_side_by_side():
    """Fault: costs that are constants had no shape in a loop of the runs that somebody joins in."""
    method = algorithms.cfl_gp(
        LINEAR, clusters=2, local=SGD, participation=0.3, cluster_cohort=True, landmarks=3, every=1, cluster_until=4
    )
    federation, options = blobs(clients=20, rows=24, ragged=False), {"rounds": 20, "eval_every": 10}
    found = fc.simulate_many(
        method, federation, seeds=(0, 1), together=True, mapping=ONE, progress=False, **options
    )  # fmt: skip
    for seed, result in enumerate(found):
        single = simulate(method, federation, seed=seed, mapping=ONE, progress=False, **options)
        assert result.labels.tolist() == single.labels.tolist()
        np.testing.assert_array_equal(result.history["loss_evaluations"], single.history["loss_evaluations"])
        assert single.history["loss_evaluations"].sum() > 0


def test_more_runs_than_fit_are_divided(monkeypatch):
    given = []

    def play(batch, programs, **options):
        given.append([run.seed for run in batch.runs])
        if len(batch.runs) > 2:
            raise DoesNotFit
        return Memory(0, 0, 0, 0, 0, peak=len(batch.runs))

    monkeypatch.setattr(requests, "play_together", play)
    found = fc.simulate_many(METHODS["fedavg"], blobs(), rounds=1, seeds=range(5), together=True, progress=False)
    assert given == [[0, 1, 2, 3, 4], [0, 1, 2], [0, 1], [2], [3, 4]]
    assert found.memory is not None
    assert found.memory.peak == 2
    assert len(found) == 5


def test_rows_that_a_device_has_no_room_for_twice_are_not_stacked(monkeypatch):
    """Fault: clients of several federations were stacked beside what was placed already, before anybody asked."""
    federations = [blobs(rows=200, seed=seed) for seed in range(2)]
    held = [sum(leaf.nbytes for part in each[:2] for leaf in part[:2]) for each in federations]
    monkeypatch.setattr(parallel, "device_memory", lambda: 1.5 * sum(held) / 0.9)
    began = []
    given = together.Batch.arguments

    def arguments(batch):
        began.append(len(batch.runs))
        return given(batch)

    monkeypatch.setattr(together.Batch, "arguments", arguments)
    options = {"rounds": 1, "seeds": (0, 1), "together": True, "mapping": ONE, "progress": False}
    found = fc.simulate_many(METHODS["fedavg"], federations, **options)
    assert began == [1, 1]
    # What is placed for the other run counts.
    assert found.memory.peak > sum(held)


@pytest.mark.slow
def test_the_memory_is_told_before_anything_is_run_and_by_a_plan(monkeypatch, caplog):
    caplog.set_level("INFO", "fedjax_cluster")
    options = {"seeds": range(3), "together": True, "progress": False, "mapping": ONE}
    found = fc.simulate_many(METHODS["fedavg"], blobs(), rounds=1, **options)
    assert "3 runs in one program: " in caplog.text
    planned = [fc.plan(METHODS["fedavg"], blobs(), runs=runs).memory for runs in (1, 3)]
    assert found.memory.peak == pytest.approx(planned[1].peak, rel=0.01)
    # Side by side runs have one of a CPU's devices, in the plan too.
    assert planned[1].state == found.memory.state
    assert planned[1].state > 2 * planned[0].state
    # A single run is begun although it is said not to fit, as `simulate` would.
    monkeypatch.setattr(parallel, "device_memory", lambda: 1)
    caplog.clear()
    fc.simulate_many(METHODS["fedavg"], blobs(), rounds=1, **options)
    assert caplog.text.count("in one program: ") == 5


@pytest.mark.parametrize(
    ("condition", "calls"), [((1, 0, 0, 0, 0), 1), ((0, 0, 0, 0, 0), 0), ((1, 1, 0, 1, 0), 5), ((0, 1, 0, 0, 1), 2)]
)
def test_events_are_computed_for_the_runs_that_have_them(condition, calls):
    """Beneath a half one after the other; from there on for all, which a loop without a rule does for one already."""
    called = []

    def change(add, carry):
        jax.debug.callback(called.append, add)
        return {"a": carry["a"] + add, "b": carry["b"]}

    def one(condition, add, a):
        carry = {"a": a, "b": jnp.arange(3)}
        return parallel.run_if(condition, functools.partial(change, add), carry, ONE._replace(runs=5))

    add, a = jnp.arange(5.0) + 1, jnp.ones((5, 2))
    found = jax.jit(jax.vmap(one))(jnp.asarray(condition, bool), add, a)
    jax.effects_barrier()
    np.testing.assert_array_equal(found["a"], 1 + np.outer(np.asarray(condition) * np.arange(1, 6), [1, 1]))
    assert found["b"].shape == (5, 3)
    assert len(called) == calls


def test_a_condition_that_all_runs_share_stays_one():
    def one(a):
        return parallel.run_if(jnp.asarray(False), lambda a: a + 1, a, ONE._replace(runs=3))

    np.testing.assert_array_equal(jax.vmap(one)(jnp.arange(3)), np.arange(3))


REFUSED = [
    ({"options": {"clusters": (2, 3)}}, "clusters is not a number that a program computes with: call simulate_many"),
    ({"options": {"participation": (0.5, 1.0)}}, "participation decides the shapes of a program: call simulate_many"),
    ({"options": {"batch_size": (4, 8)}}, "local.batch_size is not a number that a program computes with"),
    ({"options": {"score_on": ("all", "batch")}}, "score_on is not a number that a program computes with"),
    ({"options": {"beta": (0.1,)}}, "options has 'beta', which ifca does not have; it has model, local"),
    ({"options": {"learning_rate": (0.1, -1.0)}}, "learning_rate is -1.0; it must be a number, positive and finite"),
    ({"options": {"learning_rate": ()}}, "local.learning_rate of options has no values"),
    ({"options": {"learning_rate": 0.1}}, "local.learning_rate of options is 0.1; it must be a list of numbers"),
    ({"options": {"learning_rate": (0.1, 0.1)}}, "has the value 0.1 twice; give each once"),
    ({"options": {"learning_rate": (0.1000001, 0.1000002)}}, "whose first six digits are the same"),
    ({"options": {"learning_rate": (0.1,)}, "algorithm": None}, "algorithm is None; it must be a ClusteredAlgorithm"),
    ({"options": {"learning_rate": (0.1,), "local.learning_rate": (0.2,)}}, "which are the same; give one of them"),
    ({"options": (0.1,)}, "give a dictionary of options and lists of their values"),
    ({"seeds": ()}, "seeds has no seed; give at least one"),
    ({"seeds": (1, 1)}, "seeds has 1 twice; give each once"),
    ({"seeds": 3}, "seeds is 3; it must be a list of whole numbers"),
    ({"seeds": range(20_000)}, "options and seeds make 20000 runs; give at most 10000"),
    ({"federation": [blobs()] * 3}, "federation is a list of 3, for 2 seeds"),
    ({"rounds": 0}, "rounds is 0; it must be a whole number, at least 1"),
    ({"together": "yes"}, "together is 'yes'; it must be True or False or None"),
]


@pytest.mark.parametrize(("given", "line"), REFUSED)
def test_bad_input_is_one_line_before_anything_is_computed(given, line, monkeypatch):
    monkeypatch.setattr(requests, "start_run", None)
    monkeypatch.setattr(requests, "simulate", None)
    arguments = {"algorithm": METHODS["ifca"], "federation": blobs(), "rounds": 1, "seeds": (0, 1), **given}
    with pytest.raises(ValueError, match=line) as error:
        fc.simulate_many(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("side_by_side", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_number_that_decides_a_branch_is_refused_by_name(side_by_side):
    method = algorithms.gradient_loss(LINEAR, local=SGD, clusters=2, start="random")
    options = {"learning_rate": (0.1, 0.2), "similarity_weight": (0.5, 1.0)}
    with pytest.raises(ValueError, match="similarity_weight decides the shapes, loops or branches of"):
        fc.simulate_many(method, blobs(), rounds=1, seeds=(0,), options=options, together=side_by_side, progress=False)


@pytest.mark.slow
def test_the_rates_of_named_optimisers_vary_and_the_table_has_mean_and_deviation(traces):
    pandas = pytest.importorskip("pandas")
    own = local.sgd(optimizers.named("sgd", learning_rate=0.1, momentum=0.9), batch_size=8, steps=2)
    method = algorithms.fedavg(LINEAR, local=own, server=optimizers.named("sgd", learning_rate=1.0, momentum=0.5))
    options = {"learning_rate": (0.01, 0.1), "server.learning_rate": (0.5, 1.0)}
    found = fc.simulate_many(method, blobs(), rounds=2, seeds=(0, 1), options=options, progress=False)
    assert traces == {"fedavg": 1}
    changed = algorithms.fedavg(
        LINEAR,
        local=local.sgd(optimizers.named("sgd", learning_rate=0.01, momentum=0.9), batch_size=8, steps=2),
        server=optimizers.named("sgd", learning_rate=0.5, momentum=0.5),
    )
    assert found[0].algorithm == changed
    frame = found.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.index.tolist() == [(0.01, 0.5), (0.01, 1.0), (0.1, 0.5), (0.1, 1.0)]
    accuracy = [result.summary["accuracy"] for result in found[2:4]]
    row = frame.loc[(0.01, 1.0)]
    assert row["accuracy"] == pytest.approx(np.mean(accuracy))
    assert row["accuracy_deviation"] == pytest.approx(np.std(accuracy, ddof=1))
    assert row["seeds"] == 2
    assert found.table().rows[0][0] is not None
    assert repr(found).startswith("8 runs in turn: 4 combinations of learning rate")
    assert [len(figure.axes) > 0 for figure in (found.plot(), found.plot_sensitivity())] == [True, True]


def test_a_data_frame_has_figures_of_ones_own_and_of_the_honest():
    found = fc.simulate_many(
        METHODS["fedavg"],
        blobs(),
        rounds=1,
        seeds=(0, 1),
        metrics=[lambda predictions, y, mask: {"highest": predictions.max()}],
        fault=fc.faults.sign_flip(share=0.3),
        progress=False,
    )
    row = found.to_pandas().iloc[0]
    for name in ("highest", "accuracy_honest", "adjusted_rand_index_honest"):
        of = [result.summary[name] for result in found]
        assert row[name] == pytest.approx(np.mean(of), nan_ok=True)
    assert not {"loss", "seconds", "num_not_finite", "round"} & set(row.index)

    def counted(predictions, y, mask):
        return {"seeds": 7.0, "accuracy_deviation": 8.0}

    frame = fc.simulate_many(
        METHODS["fedavg"], blobs(), rounds=1, seeds=(0, 1), metrics=[counted], progress=False
    ).to_pandas()
    assert frame["seeds"].tolist() == [2]
    assert frame["seeds (metric)"].tolist() == [7.0]
    assert frame["accuracy_deviation (metric)"].tolist() == [8.0]
    assert frame["accuracy_deviation"][0] < 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "cfl_gp"])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_eight_seeds_and_four_rates_are_32_single_runs(name, side_by_side, traces):
    """The acceptance of issue 20; in turn on two devices."""
    method, federation = METHODS[name], blobs(clients=10)
    options = {"rounds": ROUNDS, "eval_every": 5}
    rates = (0.03, 0.1, 0.2, 0.3)
    found = fc.simulate_many(
        method, federation, options={"learning_rate": rates}, together=side_by_side, progress=False, **options
    )
    assert traces == {name: 1}
    assert len(found) == 32
    for place, result in enumerate(found):
        values = {"learning_rate": rates[place // 8]}
        assert_same(result, alone(method, federation, values, place % 8, **options))


@pytest.mark.slow
def test_a_method_has_the_numbers_that_it_is_given():
    method = algorithms.fedavgm(LINEAR, local=SGD)
    numbers = lifting.numbers_of(method)
    assert {"participation", "local.learning_rate"} < set(numbers)
    (members, varied), (other, none) = lifting.differing(
        [method, lifting.with_number(method, "local.learning_rate", 0.5), METHODS["fedavg"]]
    )
    assert (members, varied, other, none) == ([0, 1], {"local.learning_rate": 0.1}, [2], {})
    # Cohorts of other sizes are other programs.
    assert (
        len(lifting.differing([METHODS["fedavg"], lifting.with_number(METHODS["fedavg"], "participation", 1.0)])) == 2
    )
    with lifting.one_program({"local.learning_rate": 1.0}):
        told_apart, given = lifting.lifted(method)
    assert given == {"local.learning_rate": 0.1}
    assert told_apart == lifting.with_number(method, "local.learning_rate", 1.0)
    assert lifting.lifted(method) == (method, {})
    scheduled = algorithms.fedavg(LINEAR, local=local.sgd(optax.constant_schedule(0.1), batch_size=8, steps=2))
    with lifting.one_program({"local.learning_rate": 1.0}):
        assert lifting.lifted(scheduled)[0] == scheduled


def test_runs_side_by_side_are_refused_what_a_run_is_refused():
    """On an accelerator, those of a comparison had the figures of a Krum among too few clients."""
    method = algorithms.fedavg(LINEAR, local=SGD, aggregation=fc.aggregation.krum(byzantine=3))
    wanted = [requests.Request(method, blobs(4), rounds=2, seed=seed) for seed in (0, 1)]
    with pytest.raises(ValueError, match="krum with byzantine 3 needs 9 clients"):
        requests.carry_out(wanted, together=True, mapping=ONE, progress=False)


@pytest.mark.parametrize("options", [None, {"learning_rate": (0.1, 0.3)}])
def test_a_mistake_in_a_method_of_ones_own_is_not_put_down_to_a_number(options):
    class mine(algorithms.fedavg, abstract=True):
        def step(self, rng_key, state, cohort):
            if state.round > 1:  # which is traced
                return super().step(rng_key, state, cohort)
            return super().step(rng_key, state, cohort)

    method = mine(LINEAR, local=SGD)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        fc.simulate_many(method, blobs(), seeds=(0, 1), options=options, rounds=2, mapping=ONE)


@pytest.mark.slow
def test_many_clients_are_compared_where_simulate_compares_them(monkeypatch):
    """Beyond so many clients only at evaluations and events, side by side as alone."""
    for module in (segment, run, together):
        monkeypatch.setattr(module, "MOST_COMPARED", 4)
    method, options = METHODS["cfl_gp"], {"rounds": ROUNDS, "eval_every": 2}
    found = fc.simulate_many(method, blobs(), seeds=(0, 1), together=True, mapping=ONE, progress=False, **options)
    for seed, result in enumerate(found.results):
        single = alone(method, blobs(), {}, seed, **options)
        assert np.isnan(single.history["num_clusters"]).any()
        for name in ("num_clusters", "adjusted_rand_index"):
            np.testing.assert_allclose(result.history[name], single.history[name], rtol=1e-5, err_msg=name)
