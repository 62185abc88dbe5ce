"""The plan of a run: from shapes what the run itself has, and the compiler's figures counted right."""

import dataclasses
import importlib
import pathlib
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster import parallel
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.simulation.abstract import abstract_arguments, abstract_cohorts, shape_of, without_training
from fedjax_cluster.simulation.devices import target
from fedjax_cluster.simulation.planning import plan
from fedjax_cluster.simulation.program_costs import program_costs
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.simulation.streaming import MOST_ROUNDS, Stream
from fedjax_cluster.types import ClientData, DatasetInfo
from tests.devices import on_a_cpu

SGD = fc.local.sgd(0.1, batch_size=4, steps=1)
INFO = DatasetInfo("shapes", (3,), 2)
LINEAR = fc.algorithms.fedavg(fc.nn.linear(), local=SGD)
# Of states: cluster models alone, personal models, a matrix over clients, vectors of clients.
METHODS = ("fedavg", "ditto", "fedgwc", "fedproto")


# More landmarks than the small federations have clients, in cohorts and without.
BY_LANDMARKS = (
    ("fedgwc", {"landmarks": 17}),
    ("flag", {"landmarks": 17}),
    ("cfl_gp", {"landmarks": 17}),
    ("cfl_gp", {"landmarks": 13, "profiles_of": "landmarks", "cluster_cohort": True, "participation": 0.6}),
)


def build(name, **options):
    taken = {field.name for field in dataclasses.fields(REGISTRY[name])}
    usual = {"clusters": 3} if "clusters" in taken else {}
    return REGISTRY[name](fc.nn.linear(), local=SGD, **{**usual, **options})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in METHODS), *BY_LANDMARKS])
def test_shapes_are_those_of_the_run(name, options):
    rng = np.random.default_rng(0)
    count = 22  # not the size of which the shapes are derived
    data = fc.types.ClientData(
        rng.normal(size=(count, 6, 3)).astype(np.float32),
        rng.integers(0, 2, (count, 6)).astype(np.int32),
        np.full(count, 6, np.int32),
    )
    mapping, algorithm = parallel.client_mapping(), build(name, **options)
    train = parallel.place_population(data, INFO, mapping)
    state, report = algorithm.init(run_keys(0).initialization, train)
    expected = parallel.place_state(state, mapping), train, report
    shape = shape_of(fc.types.Federation(data, data, None, None, INFO))
    _, state, train, _, report, _ = abstract_arguments(without_training(algorithm), shape, mapping)
    chex.assert_trees_all_equal_shapes_and_dtypes((state, train, report), expected)
    places = jax.tree.map(
        lambda leaf, shape: leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim),
        (expected[0], expected[1].data),
        (state, train.data),
    )
    assert all(jax.tree.leaves(places))


@pytest.mark.parametrize(
    ("options", "most"), [({}, 97), ({"cluster_cohort": True, "participation": 0.3}, 30)], ids=["clients", "cohort"]
)
def test_more_landmarks_than_clients_are_refused(options, most):
    method = build("cfl_gp", landmarks=most + 1, **options)
    with pytest.raises(ValueError, match=f"landmarks is {most + 1}, but only {most} clients can be some; give at most"):
        plan(method, fc.PopulationShape(97 if most == 97 else 100, 4, INFO, "float32"))


@pytest.mark.slow
def test_of_clients_on_disk_the_cohorts_that_are_read_are_held(tmp_path):
    """No plan was made of them: it wanted the test rows of all."""
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(5, 3)).astype(np.float32), np.arange(5, dtype=np.int32) % 2) for _ in range(40)]
    population = fc.data.write_population(tmp_path / "population", rows, test_fraction=0.2)
    method = fc.algorithms.fedavg(fc.nn.linear(), local=SGD, participation=0.1)
    found, whole = plan(method, population), plan(method, fc.data.on_devices(population))
    row, devices = 3 * 4 + 4, jax.device_count()
    assert found.memory.population == 2 * MOST_ROUNDS * found.cohort * found.rows * row // devices
    assert whole.memory.population == 40 * 4 * row // devices
    assert whole.memory.evaluation == 40 * row // devices + 40 * 4  # every device has all counts
    with pytest.raises(ValueError, match="fedavg would take all clients in a round"):
        plan(LINEAR, population)
    with pytest.raises(ValueError, match="go one after the other"):
        plan(method, population, runs=2)

    mapping, keys = parallel.client_mapping(), run_keys(0)
    train = parallel.place_population(population.train, population.info, mapping)
    state = parallel.place_state(method.init(keys.initialization, train)[0], mapping)
    stream = Stream(method, train, keys.cohorts, state, 100)
    expected, _ = stream.cohorts(state)
    stream.close()
    cohorts = abstract_cohorts(method.select(keys.cohorts, state), MOST_ROUNDS, shape_of(population), mapping)
    chex.assert_trees_all_equal_shapes_and_dtypes(cohorts, expected)
    leaves = zip(jax.tree.leaves(cohorts), jax.tree.leaves(expected), strict=True)
    assert all(leaf.sharding.is_equivalent_to(own.sharding, own.ndim) for leaf, own in leaves if own.ndim)


@pytest.mark.slow
def test_a_shape_takes_what_its_data_take_with_the_rows_for_tests():
    rng = np.random.default_rng(0)
    counts = {"train": 10, "test": 5}
    parts = {
        name: ClientData(
            rng.normal(size=(8, rows, 3)).astype(np.float32), np.zeros((8, rows), np.int32), np.full(8, rows, np.int32)
        )
        for name, rows in counts.items()
    }
    of_data = plan(LINEAR, fc.types.Federation(parts["train"], parts["test"], None, None, INFO), whole=False)
    shape = fc.PopulationShape(8, 10, INFO, "float32")
    of_shape, without = (plan(LINEAR, shape._replace(test_rows=rows), whole=False) for rows in (5, 0))
    assert of_shape.memory.peak == of_data.memory.peak
    assert of_shape.memory.evaluation - without.memory.evaluation == 8 // jax.device_count() * 5 * (3 * 4 + 4)
    assert shape.tested_on == 3


@pytest.mark.slow
def test_a_population_that_no_machine_holds_does_not_fit():
    found = plan(LINEAR, fc.PopulationShape(10**6, 10**6, INFO, "float32"))
    assert not found.fits
    assert any("more devices" in line for line in found.advice)
    assert "no" in dict(found.table().rows)["fits"]


PAIRS = {
    "cfl": {},
    "fedgwc counted": {"participation": 0.1},
    "fedgwc constant": {"participation": 0.1, "rate": "participation", "centre": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PAIRS)
def test_matrices_of_all_pairs_are_refused_where_the_compiler_s_do_not_fit(case, monkeypatch):
    """Said to be fewer than there are, a run passed the check of its memory and was killed in its first clustering."""
    told = []
    for name in ("cfl.cfl", "fedgwc.all_pairs"):
        module = importlib.import_module(f"fedjax_cluster.algorithms.{name}")
        monkeypatch.setattr(module, "check_square", lambda name, size, matrices, **_: told.append(matrices))
    method = REGISTRY[case.split()[0]](fc.nn.linear(), clusters=4, local=SGD, **PAIRS[case])
    peaks = {size: plan(method, fc.PopulationShape(size, 10, INFO), whole=False).memory.peak for size in (1000, 3000)}
    of_pairs = (peaks[3000] - 3 * peaks[1000]) / (3000**2 - 3 * 1000**2)
    matrices = told[-1]
    assert 4 * (matrices - 2) < of_pairs <= 4 * matrices


@pytest.mark.slow
def test_more_devices_are_no_help_where_each_has_all_pairs(monkeypatch):
    """P is on every device, however many there are."""
    small = target("local")._replace(memory=2 * 10**6)
    monkeypatch.setattr(importlib.import_module(plan.__module__), "target", lambda device: small)
    found = plan(
        REGISTRY["fedgwc"](fc.nn.linear(), clusters=4, local=SGD), fc.PopulationShape(1000, 10, INFO), whole=False
    )
    assert not found.fits
    assert not any("more devices" in line for line in found.advice)
    assert any("landmarks" in line for line in found.advice)


@pytest.mark.slow
def test_parts_and_chunks():
    """The population's bytes to the byte; the loop over clients counted as often as it turns."""
    shape = fc.PopulationShape(64, 10, INFO, "float32")
    found, twice = (plan(LINEAR, shape._replace(clients=count), chunk_size=8) for count in (64, 128))
    devices = jax.device_count()
    assert found.fits
    assert found.memory.population == 64 * 10 * (3 * 4 + 4) // devices
    assert (found.cohort, found.chunk) == (64, 8)
    assert found.costs.flops > 0
    assert twice.costs.flops == 2 * found.costs.flops


IN_PLACE = """\
%fused (rows: f32[100,8], row: f32[1,8], number: s32[]) -> f32[100,8] {
  %rows = f32[100,8]{1,0} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %number = s32[] parameter(2)
  %twice = f32[1,8]{1,0} add(%row, %row)
  %new = f32[100,8]{1,0} dynamic-update-slice(%rows, %twice, %number, %number)
  ROOT %shown = f32[100,8]{1,0} bitcast(%new)
}

%both (rows: f32[100,8], row: f32[1,8], number: s32[]) -> (f32[1,8], f32[100,8]) {
  %rows = f32[100,8]{1,0} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %number = s32[] parameter(2)
  %twice = f32[1,8]{1,0} add(%row, %row)
  %new = f32[100,8]{1,0} dynamic-update-slice(%rows, %twice, %number, %number)
  ROOT %pair = (f32[1,8]{1,0}, f32[100,8]{1,0}) tuple(%twice, %new)
}

ENTRY %main (rows: f32[100,8], row: f32[1,8], number: s32[]) -> f32[100,8] {
  %rows = f32[100,8]{1,0} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %number = s32[] parameter(2)
  LINE
}
"""


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        ("ROOT %r = f32[100,8]{1,0} add(%rows, %rows)", 800),
        ("ROOT %r = f32[100,8]{1,0} dynamic-update-slice(%rows, %row, %number, %number)", 8),
        ("ROOT %r = f32[100,8]{1,0} fusion(%rows, %row, %number), kind=kLoop, calls=%fused", 8),
        ("ROOT %r = (f32[1,8]{1,0}, f32[100,8]{1,0}) fusion(%rows, %row, %number), kind=kLoop, calls=%both", 16),
        ("ROOT %r = (f32[1,8]{1,0:S(1)}, f32[100,8]{1,0}) fusion(%rows, %row, %number), kind=kLoop, calls=%both", 8),
        ("ROOT %r = f32[100,8]{1,0:T(8,128)S(1)} add(%rows, %rows)", 0),
        ("ROOT %r = f32[100,8]{1,0:T(8,128)S(0)} add(%rows, %rows)", 800),
        ("ROOT %r = (f32[1,8]{1,0}, f32[1,8]{1,0:S(1)}, u32[]) copy-start(%row)", 8),
    ],
)
def test_bytes_are_those_that_reach_the_devices_memory(line, numbers):
    """Of 3 000 updates in place of an array of all clients each was counted as the whole: 5.7 TB a round for 5 GB."""
    found = program_costs(IN_PLACE.replace("LINE", line))
    assert found.bytes == 2 * 4 * numbers


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("(f32[8,2]{1,0}, f32[8,2]{1,0}, u32[], u32[]) collective-permute-start(%x)", 16),
        ("(f32[8,2]{1,0:T(8,128)}, f32[16,2]{1,0:T(8,128)}) all-gather-start(%x)", 32),
        ("((f32[8,2]{1,0}, s32[4]{0}), (f32[16,2]{1,0}, s32[8]{0})) all-gather-start(%x, %y)", 40),
        ("(f32[8,2]{1,0}, s32[4]{0}) all-reduce-start(%x, %y)", 20),
        ("f32[8,2]{1,0} collective-permute(%x)", 16),
        ("(u32[], u32[], u32[], u32[]) collective-permute-start(%x)", 1),
    ],
)
def test_what_is_sent_counts_once_where_it_is_only_begun(line, words):
    """Fault: of CFL's rows, sent round eight chips, source and result were counted, and two marks: 1.3 GB for .6."""
    text = IN_PLACE.replace("LINE", f"%begun = {line}")
    assert program_costs(text).message_bytes() == program_costs(text).largest_message == 4 * words


OF_A_GPU = """\
ENTRY %main (x: f32[8,14,14,192], k: f32[384,5,5,32], y: f32[8,14,14,384], a: f32[6,8,20], b: f32[6,20,10]) -> f32[1] {
  %x = f32[8,14,14,192]{3,2,1,0} parameter(0)
  %k = f32[384,5,5,32]{3,2,1,0} parameter(1)
  %y = f32[8,14,14,384]{3,2,1,0} parameter(2)
  %a = f32[6,8,20]{2,1,0} parameter(3)
  %b = f32[6,20,10]{2,1,0} parameter(4)
  LINE
}
"""


@pytest.mark.parametrize(
    ("target", "result", "operands"),
    [
        ("convForward", "f32[8,14,14,384]{3,2,1,0}", "%x, %k"),
        ("convBiasActivationForward", "f32[8,14,14,384]{3,2,1,0}", "%x, %k"),
        ("convBackwardInput", "f32[8,14,14,192]{3,2,1,0}", "%y, %k"),
        ("convBackwardFilter", "f32[384,5,5,32]{3,2,1,0}", "%x, %y"),
    ],
)
def test_convolutions_that_are_left_to_cudnn_count(target, result, operands):
    """Of six clients, 32 channels and 64 features each: no figure of them, and a ResNet's was a hundredth."""
    line = (
        f"ROOT %c = ({result}, u8[0]{{0}}) custom-call({operands}), window={{size=5x5 pad=2_2x2_2}}, "
        f'dim_labels=b01f_o01i->b01f, feature_group_count=6, custom_call_target="__cudnn${target}"'
    )
    assert program_costs(OF_A_GPU.replace("LINE", line)).flops == 2 * 8 * 14 * 14 * 384 * 32 * 25


def test_products_that_are_left_to_cublas_count():
    line = (
        'ROOT %c = (f32[6,8,10]{2,1,0}, s8[9]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
        '"rhs_contracting_dimensions":["1"]}}}'
    )
    assert program_costs(OF_A_GPU.replace("LINE", line)).flops == 2 * 6 * 8 * 10 * 20


MEASURED = """
import ctypes, gc, re, jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 1)
import fedjax_cluster as fc
from fedjax_cluster import parallel
from fedjax_cluster.simulation import planning
from fedjax_cluster.simulation.abstract import abstract_arguments, without_training
from fedjax_cluster.simulation.devices import target
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.simulation.streaming import MOST_ROUNDS, Stream

def resident(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

method = fc.algorithms.METHOD
shape = fc.PopulationShape(CLIENTS, 400, fc.types.DatasetInfo("images", (28, 28), 10), "float32", test_rows=0)
expected = planning.plan(method, shape).memory.peak
mapping, keys = parallel.client_mapping(), run_keys(0)
compiled = planning._compile(method, abstract_arguments(method, shape, mapping), target("local"))

def data(clients):
    x = jnp.full((clients, 400, 28, 28), 0.5) + jnp.arange(clients, dtype=jnp.float32)[:, None, None, None]
    return fc.types.ClientData(x, jnp.zeros((clients, 400), jnp.int32), jnp.full(clients, 400, jnp.int32))

def began():
    train = parallel.Population(data(CLIENTS), shape.info, mapping)
    state, report = method.init(keys.initialization, train)
    return train, parallel.place_state(state, mapping), report

jax.block_until_ready(began())  # what this compiles is no part of the run
gc.collect(); ctypes.CDLL(None).malloc_trim(0)
before = resident("VmRSS")
train, state, report = jax.block_until_ready(began()); ctypes.CDLL(None).malloc_trim(0)  # of what making rows took
open("/proc/self/clear_refs", "w").write("5")
jax.block_until_ready(compiled(keys, state, train, None, report, jnp.asarray(2, jnp.int32)))
print(expected, resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of memory")
@pytest.mark.parametrize(
    ("method", "clients"),
    [
        ("ditto(fc.nn.cnn(), local=fc.local.sgd(0.1, batch_size=32, steps=2))", 48),
        ("fedavg(fc.nn.mlp(), local=fc.local.sgd(0.1, batch_size=32, steps=2))", 300),
    ],
)
def test_the_peak_is_that_of_a_run(method, clients):
    """Ditto's is half temporaries, FedAvg's nearly all population; threads and their stacks take some megabytes."""
    program = MEASURED.replace("METHOD", method).replace("CLIENTS", str(clients))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    expected, measured = map(int, done.stdout.split())
    assert 0.85 < measured / expected < 1.15


HLO = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}
%body (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p = (s32[], f32[8,16]{1,0}) parameter(0)
  %m = f32[8,16]{1,0} get-tuple-element(%p), index=1
  %w = f32[16,16]{1,0} constant(0)
  %d = f32[8,16]{1,0} dot(%m, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %r = f32[8,16]{1,0} all-reduce(%d), to_apply=%add
  ROOT %t = (s32[], f32[8,16]) tuple(%m, %r)
}
%cond (p: (s32[], f32[8,16])) -> pred[] {
  ROOT %c = pred[] constant(true)
}
%rounds (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  ROOT %w1 = (s32[], f32[8,16]{1,0}) while(%p), condition=%cond, body=%body, LOOP
}
ENTRY %main (p: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  ROOT %w0 = (s32[], f32[8,16]{1,0}) while(%p), condition=%cond, body=%rounds
}
"""


@pytest.mark.parametrize(
    ("loop", "times", "unknown"),
    [
        ('backend_config={"known_trip_count":{"n":"5"}}', 5, 0),
        ('metadata={op_name="jit(f)/while/body/clients_in_turn_7/while"}', 7, 0),
        ('metadata={op_name="jit(f)/while/body/while"}', 1, 1),
        ('metadata={op_name="jit(f)/while/body/clients_in_turn_7/while/body/vmap()/while"}', 1, 1),
        ('metadata={op_name="jit(f)/blocks_of_turns/while"}', 1, 0),
        ('metadata={op_name="jit(f)/blocks_of_turns/while/body/clients_in_turn_7/while"}', 7, 0),
    ],
)
def test_loops_count_as_often_as_they_turn(loop, times, unknown):
    costs = program_costs(HLO.replace("LOOP", loop))
    assert costs.flops == times * 2 * 8 * 16 * 16
    assert costs.messages == {"all-reduce": (times, times * 8 * 16 * 4)}
    assert costs.unknown == unknown


@on_a_cpu("memory is shared with files that are kept in it")
def test_memory_that_keeps_files_is_free(monkeypatch):
    """Where the system had filled it with files that were read, nothing fitted."""
    monkeypatch.setattr(parallel, "memory_left", lambda: 2.0**40)
    assert target("local").memory == 2**40 // jax.device_count()


@pytest.mark.slow
def test_runs_side_by_side_have_one_device_of_a_cpu(monkeypatch):
    """As `simulate_many` has them, and all memory with it; each of two devices was said to hold half of the clients."""
    monkeypatch.setattr(parallel, "memory_left", lambda: 2.0**40)
    found = plan(LINEAR, fc.PopulationShape(16, 10, INFO, "float32"), runs=2)
    assert (found.devices, found.memory.population, found.available) == (1, 160 * (3 * 4 + 4), int(2**40 * 0.9))


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        (lambda: target("v5e-8"), "device is 'v5e-8'; known"),
        (lambda: plan(LINEAR, fc.PopulationShape(0, 3, INFO)), "clients"),
        (lambda: plan(build("cfl_gp", clusters="auto"), fc.PopulationShape(9, 3, INFO)), "clusters is 'auto', which a"),
        (lambda: plan(LINEAR, fc.PopulationShape(3, 3, INFO, "float31")), "dtype is 'float31'"),
        (lambda: plan(LINEAR, fc.PopulationShape(3, 3, INFO, "U5")), "dtype is 'U5'; give a type of real numbers"),
        (lambda: plan(LINEAR, fc.PopulationShape(3, 3, INFO._replace(input_shape=(0,)))), "input_shape is 0"),
    ],
)
def test_mistakes(mistake, complaint):
    with pytest.raises(ValueError, match=complaint):
        mistake()


def test_a_missing_compiler_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'not installed; pip install "fedjax_cluster\[tpu\]"'):
        target("v5e:2x4")
