"""Every method and model compiled for eight v5e that are not there, against a committed table.

`pytest -m tpu tests/simulation/test_compiled_for_tpus.py`; the table is written by
`python -m benchmarks.accelerators gates`, after a look at what changed.
"""

import importlib.util
import json

import pytest

from benchmarks.accelerators import GATES, TOYS, gate
from fedjax_cluster.algorithms import REGISTRY

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.optimized,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='needs pip install "fedjax_cluster[tpu]"'),
]
TABLE = json.loads(GATES.read_text()) if GATES.is_file() else {}
MORE = 1.1  # of the table's temporaries


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
