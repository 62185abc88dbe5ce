"""Every method and model compiled for eight v5e that are not there, against a committed table, and lowered for CUDA.

`pytest -m accelerators`; the table is written by `python -m benchmarks.accelerators gates`, after a look at what
changed.
"""

import importlib.metadata
import importlib.util
import json
import re

import jax
import pytest

import fedjax_cluster as fc
from benchmarks.accelerators import GATE_CHUNK, GATE_CLIENTS, GATES, RECORD, SMALL, TOYS, build, gate
from benchmarks.accelerators_page import AT_A_TIME, OF_ONE, ONE_CHIP
from fedjax_cluster import parallel
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.simulation.abstract import abstract_arguments, without_training
from fedjax_cluster.simulation.segment import run_segment

pytestmark = pytest.mark.optimized
TABLE = json.loads(GATES.read_text()) if GATES.is_file() else {}
HERE = importlib.metadata.version("libtpu") if importlib.util.find_spec("libtpu") else None
OF_A_CHIP = ONE_CHIP, OF_ONE, AT_A_TIME
MORE = 1.1  # of the table's temporaries
DEVICES, CLUSTERS, NUMBERS = 8, 4, 8  # NUMBERS: of each client, such as its cluster, which all devices have


@pytest.mark.accelerators
@pytest.mark.skipif(HERE is None, reason='needs pip install "fedjax_cluster[tpu]"')
@pytest.mark.skipif(HERE not in (None, TABLE.get("libtpu")), reason=f"the table is of libtpu {TABLE.get('libtpu')}")
@pytest.mark.parametrize("model", TOYS)
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_neither_messages_nor_temporaries_grow(name, model):
    known = TABLE.get(f"{name} {model}")
    if known is None:
        pytest.skip("not in the table yet; python -m benchmarks.accelerators gates " + name)
    found = gate(name, model)
    assert found["collectives"] == known["collectives"]
    assert found["largest_message"] <= known["largest_message"]
    assert found["temporaries"] <= MORE * known["temporaries"]


@pytest.mark.parametrize("model", TOYS)
def test_no_message_of_the_table_is_larger_than_the_models_or_a_share_of_the_cohort(model):
    """Fault: a table that is written anew, with an array of all clients or a matrix of models × directions in it."""
    params = jax.eval_shape(lambda: TOYS[model].init(jax.random.key(0), SMALL)).params
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    for name in sorted(REGISTRY):
        # Each client begins as a cluster of its own, whose models go with the share's updates.
        models = GATE_CLIENTS + GATE_CLIENTS // DEVICES if name == "stocfl" else max(CLUSTERS, GATE_CLIENTS // DEVICES)
        assert TABLE[f"{name} {model}"]["largest_message"] <= 4 * (models * sum(sizes) + NUMBERS * GATE_CLIENTS), name


def test_nothing_grows_with_the_population_where_clients_are_trained_some_at_a_time():
    """Fault: figures that are compiled anew, with a relayout or a copy of all clients' rows, 1.0 of them, in them."""
    rows = json.loads(RECORD.read_text())
    of_one = [row for row in rows if (row["device"], row["clients"], row.get("chunk_size")) == OF_A_CHIP]
    parts = {
        (row["method"], row["model"]): row["temporaries"] / (OF_ONE * 64 * 788) for row in of_one if row.get("fits")
    }
    assert {model for _, model in parts} == {"mlp", "cnn"}
    assert len(parts) > 20
    assert max(parts.values()) <= 0.2, parts


@pytest.mark.accelerators
@pytest.mark.parametrize("model", TOYS)
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_rounds_are_lowered_for_cuda(name, model):
    """Faults: a kernel without a form for GPUs; what calls back to the host, or LAPACK, from a GPU's program."""
    mapping = parallel.client_mapping("chunked", GATE_CHUNK)
    shape = fc.PopulationShape(GATE_CLIENTS, 8, SMALL, test_rows=0)
    method = without_training(build(name, TOYS[model], 4))
    arguments = abstract_arguments(method, shape, mapping)
    text = run_segment.trace(*arguments, algorithm=method).lower(lowering_platforms=("cuda",)).as_text()
    called = set(re.findall(r"custom_call @([\w.]+)", text))
    assert not {target for target in called if "callback" in target or "lapack" in target}, called
