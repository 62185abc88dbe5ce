"""Plans beside what a run does: who is evaluated and how many at a time, who is dealt, and what every round does."""

import importlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster import parallel
from fedjax_cluster.parallel import client_mapping
from fedjax_cluster.parallel.loop import IF_NOT_DUE
from fedjax_cluster.simulation.abstract import abstract_arguments, shape_of, work_and_dealing
from fedjax_cluster.simulation.devices import target
from fedjax_cluster.simulation.planning import plan
from fedjax_cluster.simulation.program_costs import program_costs
from fedjax_cluster.simulation.segment import placed_clients
from fedjax_cluster.types import ClientData, DatasetInfo, Federation
from tests.devices import needs_two
from tests.simulation.test_planning import HLO

INFO = DatasetInfo("shapes", (3,), 2)


def build(name, steps=1, **options):
    return fc.algorithms.REGISTRY[name](fc.nn.linear(), local=fc.local.sgd(0.1, batch_size=4, steps=steps), **options)


def evaluation(found):
    return next(each for each in found.others if each.when == "an evaluation")


def test_an_evaluation_takes_more_clients_at_a_time_than_a_cohort_has():
    """Fault: of cohorts of four a peak without what evaluates 64 at a time."""
    shape = fc.PopulationShape(256, 8, INFO, "float32", test_rows=500)
    whole, few = (plan(build("fedper", participation=part), shape, chunk_size=64) for part in (1.0, 4 / 256))
    assert (few.cohort, few.chunk, whole.chunk) == (4, 4, 64) or parallel.num_devices(client_mapping()) > 1
    assert evaluation(few).peak >= 0.9 * evaluation(whole).peak


def test_some_clients_are_evaluated():
    shape = fc.PopulationShape(200, 8, INFO, "float32", test_rows=100)
    every, some = (evaluation(plan(build("fedavg"), shape, eval_clients=count)) for count in (None, 5))
    assert (every.what, some.what) == ("all clients on 100 test rows", "5 clients on 100 test rows")
    assert evaluation(plan(build("fedavg"), shape, eval_clients=500)) == every


@pytest.mark.parametrize("most", [16, 64])
def test_gram_matrices_are_planned_where_a_run_of_so_many_clients_has_them(most, monkeypatch):
    """Fault: the state of a few clients, from which the plan's shapes follow, has what that of many has not."""
    module = importlib.import_module("fedjax_cluster.algorithms.cfl_gp.cfl_gp")
    monkeypatch.setattr(module, "LARGEST_GRAM", most)
    rng, count = np.random.default_rng(0), 40
    x = rng.normal(size=(count, 6, 3)).astype(np.float32)
    data = ClientData(x, (x[..., 0] > 0).astype(np.int32), np.full(count, 6, np.int32))
    federation = Federation(data, data, None, None, INFO)
    algorithm = build("cfl_gp", clusters=4)
    train, _ = placed_clients(algorithm, federation, client_mapping())
    expected, _ = algorithm.init(jax.random.key(0), train)
    _, state, *_ = abstract_arguments(algorithm, shape_of(federation), client_mapping())
    chex.assert_trees_all_equal_shapes_and_dtypes(state, expected)
    assert bool(state.server.grams.size) is (most > count)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cfl_gp", {"clusters": 4, "cluster_cohort": True, "participation": 0.1}),
        ("cfl_gp", {"clusters": 4, "cluster_cohort": True, "participation": 0.1, "landmarks": 8}),
        ("gradient_loss", {"clusters": 4, "pin": True, "participation": 0.1}),
        ("cfl", {"clusters": 4, "landmarks": 256, "min_size": 50}),
        ("ifca", {"clusters": 3, "start": "clients", "start_rounds": 5}),
        ("fedgwc", {"clusters": 4, "landmarks": 4, "participation": 0.5}),
    ],
)
def test_what_a_run_of_so_many_clients_may_be_is_planned_without_a_word(name, options, caplog):
    """Fault: the few clients whose state tells the shapes are too few for it, and the plan refuses or warns."""
    algorithm = build(name, **options)
    caplog.clear()
    found = plan(algorithm, fc.PopulationShape(1000, 8, INFO, "float32", test_rows=0), whole=False)
    assert found.fits
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ifca", {"clusters": 10}, "only 4 clients at the start"),
        ("gradient_loss", {"clusters": 2, "pin": True, "participation": 0.5}, "2 pinned clients take part"),
    ],
)
def test_what_a_run_of_so_few_clients_may_not_be_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        plan(build(name, **options), fc.PopulationShape(4, 8, INFO, "float32"), whole=False)


def test_a_method_that_looks_at_all_rows_has_no_plan_with_rows_on_disk(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 6, 3)).astype(np.float32)
    fc.data.write_population(tmp_path / "rows", ((rows, (rows[:, 0] > 0).astype(np.int32)) for rows in x))
    population = fc.data.open_population(tmp_path / "rows")
    method = build("pacfl", participation=0.25, clusters=2)
    with pytest.raises(ValueError, match="the rows of all 40 clients"):
        plan(method, population)


def test_a_loop_over_landmarks_turns_as_often_as_there_are_landmarks():
    """Fault: it counts as the loop over the cohort does."""
    shape = fc.PopulationShape(4000, 8, INFO, "float32", test_rows=0)
    methods = build("fedavg"), build("cfl", clusters=2, landmarks=16)
    alone, heard = (plan(method, shape, whole=False).costs.least.flops for method in methods)
    assert alone < heard < 1.5 * alone


@needs_two
@pytest.mark.parametrize("short", [55, 30])
def test_devices_know_the_work_of_clients_whom_they_are_not_dealt(short):
    """Fault: where dealing gains nothing, the run's program has the clients' work, and the planned one has not."""
    count = np.where(np.arange(40) < (8 if short == 55 else 20), short, 60).astype(np.int32)
    x = np.ones((40, 60, 3), np.float32)
    data = ClientData(x, np.zeros((40, 60), np.int32), count)
    federation, mapping = Federation(data, data, None, None, INFO), client_mapping()
    local = fc.local.sgd(0.1, batch_size=8, epochs=1)
    algorithm = fc.algorithms.fedavg(fc.nn.linear(), local=local, participation=0.25)
    train, _ = placed_clients(algorithm, federation, mapping)
    known, dealt = work_and_dealing(algorithm, federation, shape_of(federation), 2)
    shape = shape_of(federation)._replace(uneven=known)
    found = abstract_arguments(algorithm, shape, mapping, dealt)[2]
    chex.assert_trees_all_equal_shapes_and_dtypes(found, train)
    assert (found.placement is None) is (short == 55)


def test_profiles_of_all_clients_are_said_to_be_what_is_large(monkeypatch):
    """Fault: CFL-GP's matrices of all pairs are named, which a run of so many clients has not."""
    small = target("local")._replace(memory=2 * 10**6)
    monkeypatch.setattr(importlib.import_module(plan.__module__), "target", lambda device: small)
    shape = fc.PopulationShape(100_000, 4, INFO, "float32")
    advice = plan(build("cfl_gp", clusters=4), shape, whole=False).advice
    assert any('profiles_of="landmarks"' in line for line in advice)
    assert not any("pairs" in line for line in advice)
    # Every device has all of such a matrix: 400 kB, more than a twentieth of two megabytes.
    few = plan(build("cfl", clusters=2), fc.PopulationShape(320, 4, INFO, "float32"), whole=False).advice
    assert any("in place of all pairs" in line for line in few)


def test_wide_numbers_are_counted_as_devices_have_them():
    x = np.random.default_rng(0).normal(size=(40, 6, 3))
    wide = ClientData(x, (x[..., 0] > 0).astype(np.int64), np.full(40, 6, np.int32))
    narrow = ClientData(x.astype(np.float32), wide.y.astype(np.int32), wide.num_examples)
    found = [
        plan(build("fedavg"), Federation(data, data, None, None, INFO), whole=False).memory for data in (wide, narrow)
    ]
    assert found[0] == found[1]
    shapes = (
        fc.PopulationShape(40, 6, INFO, kind, y_dtype=whole)
        for kind, whole in (("float64", "int64"), ("float32", "int32"))
    )
    assert len({(shape.nbytes(), plan(build("fedavg"), shape, whole=False).memory.peak) for shape in shapes}) == 1


def test_programs_that_a_cache_has_under_other_names_are_compiled_anew(monkeypatch):
    """Fault: the loops of a program are those of who compiled it first, of another version say, and count once."""
    name, asked, compile_ = "jax_compilation_cache_include_metadata_in_key", [], jax.stages.Lowered.compile

    def noted(lowered, *given, **options):
        asked.append(getattr(jax.config, name))
        return compile_(lowered, *given, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", noted)
    before = getattr(jax.config, name)
    plan(build("fedavg"), fc.PopulationShape(8, 8, INFO, "float32"), whole=False)
    assert asked
    assert all(asked)
    assert getattr(jax.config, name) == before


@needs_two
@pytest.mark.parametrize(("part", "clients", "cohort"), [(0.25, 20, 5), (1.0, 7, 7), (0.5, 7, 4), (0.1, 21, 3)])
def test_who_takes_part_is_counted_without_padding(part, clients, cohort):
    found = plan(build("fedavg", participation=part), fc.PopulationShape(clients, 8, INFO, "float32"), whole=False)
    assert found.cohort == cohort
    assert ("clients", f"{clients} of 8 rows, {cohort} a round") in found.table().rows


def test_runs_side_by_side_are_planned_as_often_as_they_turn():
    """Fault: named scopes within a `vmap` are not found, and all clients count as one chunk."""
    shape, options = fc.PopulationShape(8, 8, INFO, "float32"), {"chunk_size": 2, "whole": False}
    one, two = (plan(build("fedavg"), shape, runs=runs, **options).costs for runs in (1, 2))
    devices = parallel.num_devices(client_mapping())
    assert two.flops == 2 * one.flops * devices
    assert (one.unknown, two.unknown) == (0, 0)


@pytest.mark.parametrize("runs", [1, 2])
def test_of_cfl_gp_every_round_trains(runs):
    """Faults: the least is nothing, or a clustering that is not due; the work is two trainings."""
    shape, options = fc.PopulationShape(8, 8, INFO, "float32"), {"whole": False, "chunk_size": 2, "runs": runs}
    plain = plan(build("fedavg"), shape, **options).costs
    found = plan(build("cfl_gp", clusters=2, every=1000), shape, **options).costs
    assert 0.5 * plain.flops < found.least.flops < 2 * plain.flops < found.flops


@needs_two
@pytest.mark.parametrize(("update", "dealt"), [({"steps": 1}, False), ({"epochs": 1}, True)])
def test_clients_are_dealt_as_in_a_run(update, dealt):
    """Fault: messages of clients who are brought to others' devices, where all take as many steps."""
    count = np.array([20, 20, 2, 2, 2, 2, 2, 2], np.int32)
    data = ClientData(np.zeros((8, 20, 3), np.float32), np.zeros((8, 20), np.int32), count)
    federation = Federation(data, data, None, None, INFO)
    method = fc.algorithms.local_only(fc.nn.linear(), local=fc.local.sgd(0.1, batch_size=4, **update))
    placed, _ = placed_clients(method, federation, client_mapping("auto", None, jax.devices()[:2]))
    assert (placed.placement is not None) is dealt
    messages = plan(method, federation, whole=False).costs.messages
    assert ("reduce-scatter" in messages) is dealt


def test_least_is_what_every_round_does():
    """Faults: a clustering that is not due counts in what a round takes at least; a choice counts with both sides."""
    x = jnp.ones((32, 32))

    def cluster(x):
        return jnp.dot(x, x)

    def step(due, part, x):
        x = parallel.run_if(due, cluster, x)
        return jax.lax.cond(part, lambda: jnp.dot(jnp.dot(x, x), x), lambda: x)

    text = jax.jit(step).lower(True, True, x).compile().as_text()
    costs, one = program_costs(text), 2 * 32**3
    assert (costs.flops, costs.least.flops) == (3 * one, 0)


@pytest.mark.parametrize(("scope", "least"), [("sums_of_parts", 1), ("if_due", 0)])
def test_loops_of_one_turn_are_known(scope, least):
    loop = f'metadata={{op_name="jit(f)/while/body/{scope}/while"}}'
    costs, one = program_costs(HLO.replace("LOOP", loop)), 2 * 8 * 16 * 16
    assert (costs.flops, costs.least.flops, costs.unknown) == (one, least * one, 0)
    assert costs.least.message_bytes == least * 8 * 16 * 4


def test_of_a_pair_of_choices_one_sends():
    """Fault: a clustering round of CFL-GP sent what a plain round sends as well."""
    loop = f'metadata={{op_name="jit(f)/while/body/{IF_NOT_DUE}/while"}}'
    costs = program_costs(HLO.replace("LOOP", loop))
    assert (costs.flops, costs.message_bytes()) == (0, 0)
    assert costs.least.message_bytes == 8 * 16 * 4


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"algorithm": None}, "algorithm is None; give a method"),
        ({"federation": None}, "federation is None; give a Federation"),
        ({"federation": fc.PopulationShape(4, 4, None)}, "info is None; give a DatasetInfo"),
        ({"federation": fc.PopulationShape(4, 4, INFO, y_shape=3)}, "y_shape is 3"),
        ({"federation": fc.PopulationShape(4, 4, INFO, None)}, "dtype is None"),
        ({"chunk_size": "4"}, "chunk_size is '4'"),
        ({"chunk_size": 2.5}, "chunk_size is 2.5"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"eval_clients": 0}, "eval_clients is 0"),
    ],
)
def test_mistakes(given, complaint):
    usual = {"algorithm": build("fedavg"), "federation": fc.PopulationShape(4, 4, INFO)}
    with pytest.raises(ValueError, match=complaint):
        plan(**(usual | given))


def test_who_takes_part_is_who_may():
    """Fault: of clients one after the other nothing counts, as each could be away."""
    mapping = client_mapping("scan", None, jax.devices()[:1])
    data = ClientData(np.ones((4, 32, 32), np.float32), np.zeros((4, 32), np.int32), np.full(4, 32, np.int32))
    population = parallel.place_population(data, INFO, mapping)

    def step(population):
        cohort = parallel.whole_population(population)
        return parallel.for_each_client(lambda client: client.data.x @ client.data.x, cohort, collect=jnp.sum).collected

    costs = program_costs(jax.jit(step).lower(population).compile().as_text())
    assert costs.flops == costs.least.flops == 4 * 2 * 32**3


@pytest.mark.parametrize(
    ("condition", "start", "turns"),
    [
        ("  %n = s32[] constant(5)\n  ROOT %c = pred[] compare(%i, %n), direction=LT", 0, 5),
        ("  %n = s32[] constant(5)\n  ROOT %c = pred[] compare(%i, %n), direction=LT", 2, 3),
        ("  %n = s32[] constant(5)\n  ROOT %c = pred[] compare(%i, %n), direction=GT", 0, 1),
        ("  %n = s32[] constant(5)\n  ROOT %c = pred[] compare(%i, %n), direction=LT", -1, 6),
        ("  %n = s32[] constant(5)\n  ROOT %c = pred[] compare(%i, %n), direction=LT", None, 1),
        ("  %n = s32[] get-tuple-element(%p), index=0\n  ROOT %c = pred[] compare(%i, %n), direction=LT", 0, 1),
    ],
)
def test_a_counter_below_a_constant_tells_how_often_a_loop_turns(condition, start, turns):
    """Fault: FedEM's four learners, and all local steps, count as one where a TPU's compiler writes no number."""
    text = HLO.replace("LOOP", "backend_config={}").replace(
        "  ROOT %c = pred[] constant(true)", f"  %i = s32[] get-tuple-element(%p), index=0\n{condition}"
    )
    first = "get-tuple-element(%p), index=0" if start is None else f"constant({start})"
    begun = f"  %z = s32[] {first}\n  %s = s32[] copy(%z)\n  %t = (s32[], f32[8,16]) tuple(%s, %z)\n  ROOT %w1"
    text = text.replace("  ROOT %w1", begun).replace("condition=%cond, body=%rounds", "condition=%always, body=%rounds")
    text = text.replace("while(%p), condition=%cond", "while(%t), condition=%cond")
    counted = "  %j = s32[] get-tuple-element(%p), index=0\n  %k = s32[] constant(1)\n  %n1 = s32[] add(%j, %k)\n"
    text = text.replace(
        "  ROOT %t = (s32[], f32[8,16]) tuple(%m, %r)", counted + "  ROOT %t = (s32[], f32[8,16]) tuple(%n1, %r)"
    )
    assert program_costs(text).flops == turns * 2 * 8 * 16 * 16
