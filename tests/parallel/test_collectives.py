"""What passes between devices in a round, read off the compiled programs of eight CPU devices."""

import json
import subprocess
import sys

import pytest

# In one worker: the subprocess that compiles them all serves every test.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("collectives")]

CODE = """
import json, re, sys
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", False)
from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms import REGISTRY
from tests.federations import blobs

BYTES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "u8": 1}
COLLECTIVE = re.compile(r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\\(")

def collectives(text):
    found = []
    for types, kind in COLLECTIVE.findall(text):
        sizes = []
        for name, shape in re.findall(r"(\\w+)\\[([\\d,]*)\\]", types):
            entries = 1
            for side in filter(None, shape.split(",")):
                entries *= int(side)
            sizes.append(BYTES[name] * entries)
        found.append((kind, max(sizes)))
    return found

model, info = nn.mlp(hidden=(5,)), blobs().info
federation = blobs(clients=64, rows=40)
population = parallel.place_population(federation.train, info, parallel.client_mapping())
programs = {}
for name, participation in (("fedavg", 1.0), ("fedavg", 0.25), ("ifca", 0.25)):
    clusters = {"clusters": 2} if name == "ifca" else {}
    own = local.sgd(0.1, batch_size=10, epochs=1)
    algorithm = REGISTRY[name](model, local=own, participation=participation, **clusters)
    state, _ = algorithm.init(jax.random.key(0), population)
    state = parallel.place_state(state, population.mapping)

    def one_round(state, population, algorithm=algorithm):
        selection = algorithm.select(jax.random.key(1), state)
        return algorithm.step(jax.random.key(2), state, parallel.gather_cohort(population, selection))

    text = jax.jit(one_round).lower(state, population).compile().as_text()
    programs[f"{name} {participation}"] = collectives(text)

def of_evaluation(cohort):
    # Every client with a classifier of its own: of everybody where they are in memory, of a cohort where on disk.
    from fedjax_cluster.simulation.evaluation import evaluated

    algorithm = REGISTRY["fedper"](model, local=local.sgd(0.1, batch_size=10, epochs=1))
    state, _ = algorithm.init(jax.random.key(0), population)
    state = parallel.place_state(state, population.mapping)
    of = jax.jit(evaluated, static_argnames=("model", "algorithm"))
    key, test = jax.random.key(1), cohort.data
    return collectives(of.lower(key, state, cohort, test, model=model, algorithm=algorithm).compile().as_text())

programs["evaluation of all"] = of_evaluation(parallel.whole_population(population))
drawn = REGISTRY["fedavg"](model, local=own, participation=0.25).select(jax.random.key(1), state)
programs["evaluation of some"] = of_evaluation(parallel.gather_cohort(population, drawn))

def reported_with_collectives():
    # How many collectives a round has, and those of its draw and scores.
    from fedjax_cluster.simulation import segment

    own = local.sgd(0.1, batch_size=10, epochs=1)
    algorithm = REGISTRY["fedgwc"](model, local=own, participation=0.25, clusters=3)
    state, info = algorithm.init(jax.random.key(0), population)
    state = parallel.place_state(state, population.mapping)
    group = parallel.replicate(population.mapping, jnp.zeros(64, jnp.int32))
    rounds = jax.jit(segment.run_segment, static_argnames="algorithm")
    stop = jnp.asarray(1, jnp.int32)
    text = rounds.lower(
        segment.run_keys(0), state, population, group, info, stop, algorithm=algorithm
    ).compile().as_text()
    lines = [line for line in text.splitlines() if COLLECTIVE.search(line)]
    return len(lines), [line for line in lines if re.search("sort|rand_index|purity|gumbel", line)]

parameters = sum(leaf.size for leaf in jax.tree.leaves(state.clusters.params))
cohort = {p: int(64 * p) * 40 * 6 * 4 for p in (0.25, 1.0)}
print(json.dumps({"programs": programs, "models": 4 * parameters, "cohort": cohort[0.25], "clients": 64,
                  "reported": reported_with_collectives()}))
"""


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_round_of_everybody_holds_no_collective_but_the_final_reduction(found):
    # Beside the sums of the changes only numbers per client (losses, masks) are brought together, for the report.
    own = found["programs"]["fedavg 1.0"]
    assert {kind for kind, _ in own} <= {"all-reduce", "all-gather"}
    largest = max(size for _, size in own)
    assert largest <= found["models"] + 4 * found["clients"]
    assert all(size <= 4 * found["clients"] for kind, size in own if kind == "all-gather")


@pytest.mark.parametrize("program", ["fedavg 0.25", "ifca 0.25"])
def test_a_cohort_is_dealt_out_and_never_brought_to_every_device(found, program):
    """A plain take would all-reduce the cohort's data to every device."""
    own = found["programs"][program]
    assert max(size for _, size in own) <= found["cohort"]
    assert max(size for kind, size in own if kind != "reduce-scatter") < found["cohort"] / 2
    assert any(kind == "reduce-scatter" for kind, _ in own)


@pytest.mark.parametrize("program", ["evaluation of all", "evaluation of some"])
def test_an_evaluation_brings_no_clients_model_to_other_devices(found, program):
    """64 classifiers of 5 × 4 weights and 4 offsets: a closure over them all would be gathered whole."""
    own = found["programs"][program]
    assert max((size for _, size in own), default=0) < 64 * 24 * 4 / 3


def test_cohorts_are_drawn_and_rounds_reported_without_waits_for_other_devices(found):
    """Every sort of clients divided among the devices would be a message of its own, for the draw and both scores."""
    number, own = found["reported"]
    assert not own
    assert number <= 20
