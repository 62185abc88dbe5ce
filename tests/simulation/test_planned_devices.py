"""Which devices plans are of: their names, shapes, rates, and what JAX takes of a GPU."""

import jax
import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster import local, nn, parallel
from fedjax_cluster.simulation import advice, devices, planning, segment
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.program_costs import program_costs
from fedjax_cluster.types import DatasetInfo
from tests.devices import needs_two
from tests.federations import blobs

INFO = DatasetInfo("pixels", (4, 4), 3)
LINEAR = fc.algorithms.fedavg(nn.linear(), local=local.sgd(0.1, batch_size=4, steps=1))
DOT = """ENTRY %main (x: KIND[2,3], y: KIND[3,4]) -> f32[2,4] {
  %x = KIND[2,3]{1,0} parameter(0)
  %y = KIND[3,4]{1,0} parameter(1)
  ROOT %d = f32[2,4]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""


class Named:
    """A device that calls itself so."""

    platform, memory_stats = "tpu", staticmethod(dict)

    def __init__(self, name):
        self.device_kind = name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("TPU v5 lite", "v5e"), ("TPU v5e", "v5e"), ("TPU v6 lite", "v6e"), ("TPU v6e", "v6e"), ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA H100 PCIe", None),
        ("TPU v4", None),
    ],
)  # fmt: skip
def test_devices_are_known_by_both_spellings_of_their_names(monkeypatch, name, kind):
    """A v5e that was spelled so had the rates of a v5p."""
    monkeypatch.setattr(jax, "devices", lambda: [Named(name)])
    assert devices.target("local").kind == (None if kind is None else devices.KINDS[kind])


@pytest.mark.parametrize("name", ["v5e:2x2x2", "v5e:32x32", "v6e:16x32"])
def test_shapes_that_no_pod_has_are_refused(name):
    with pytest.raises(ValueError, match="make a torus of two sides and at most 256 chips; give one such as"):
        devices.target(name)


@pytest.mark.parametrize("name", ["h100:8", "v5litepod-8", "a100"])
def test_other_names_are_told_what_there_is(name):
    with pytest.raises(ValueError, match=r"known: .*; of GPUs one, of TPUs the sides of their torus"):
        devices.target(name)


def aimed(platform, memory=10**12, kind="h100"):
    return devices.Target("h100", platform, tuple(jax.devices()[:1]), memory, devices.KINDS[kind], {})


def test_a_gpu_has_what_jax_takes_of_it():
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=.95" in advice.of_gpus(8 * 10**11, aimed("cuda"))[0]
    assert not advice.of_gpus(7 * 10**11, aimed("cuda"))
    assert not advice.of_gpus(8 * 10**11, aimed("tpu"))
    assert not advice.of_gpus(8 * 10**11, aimed("cuda")._replace(name="local"))  # tells what JAX has


@pytest.mark.parametrize(("kind", "rate"), [("f32", 494e12), ("bf16", 989e12), ("f16", 989e12)])
def test_products_of_half_the_bits_take_half_the_time_on_a_gpu(kind, rate):
    costs = program_costs(DOT.replace("KIND", kind))
    assert costs.halves == (kind != "f32")
    least = costs.least._replace(bytes=0.0)
    assert planning._roofline(costs._replace(least=least), aimed("cuda")) == 48 / rate


def test_a_plan_without_a_cpu_backend_takes_the_device_that_is_there(monkeypatch):
    """JAX_PLATFORMS=cuda leaves the CPU out."""
    found = jax.local_devices

    def without(backend=None):
        if backend == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return found()

    monkeypatch.setattr(jax, "local_devices", without)
    assert fc.plan(LINEAR, fc.PopulationShape(6, 8, INFO)).fits


@needs_two
def test_small_leaves_of_what_is_a_clients_own_stay_on_its_device():
    """Ten biases of each client were sent to every chip, in each round."""
    mapping = parallel.client_mapping("chunked", 2, devices=jax.devices()[:2])
    method = fc.algorithms.local_only(nn.linear(), local=local.sgd(0.1, batch_size=4, steps=1))
    federation = blobs(clients=8)
    train = parallel.place_population(federation.train, federation.info, mapping)
    state = parallel.place_state(method.init(jax.random.key(0), train)[0], mapping)
    found = jax.jit(segment._with_numbers_everywhere)(state, train).clients
    assert found.present.sharding.is_fully_replicated
    assert not any(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(found.models))
    one = parallel.client_mapping("scan", devices=jax.devices()[:1])
    runs = [simulate(method, federation, rounds=2, mapping=each, progress=False) for each in (mapping, one)]
    for first, second in zip(*(jax.tree.leaves(run.state.clients.models) for run in runs), strict=True):
        np.testing.assert_allclose(first[:8], second[:8], rtol=1e-5, atol=1e-6)
