"""The client mapping: equal to a plain loop under every strategy, and no larger collective than the cohort."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import threadpoolctl
from jax.sharding import AxisType, PartitionSpec

from fedjax_cluster import parallel
from fedjax_cluster.parallel import chunks
from fedjax_cluster.parallel.contributions import Contribution
from fedjax_cluster.types import ClientData, Clusters, Cohort, DatasetInfo, Selection, State
from tests.devices import needs_two

INFO = DatasetInfo("rows", (3,), 2)
STRATEGIES = [
    ("scan", None, 1),
    ("vmap", None, 1),
    ("chunked", 3, 1),
    ("scan", None, 2),
    ("chunked", 2, 2),
    ("vmap", None, 2),
]


def population(clients, mapping, rows=4, seed=0):
    rng = np.random.default_rng(seed)
    data = ClientData(
        rng.normal(size=(clients, rows, 3)).astype(np.float32),
        rng.integers(0, 2, (clients, rows)).astype(np.int32),
        rng.integers(1, rows + 1, clients).astype(np.int32),
    )
    return data, parallel.place_population(data, INFO, mapping)


def mapping_of(strategy, chunk, devices):
    return parallel.client_mapping(strategy, chunk, devices=jax.devices()[:devices])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "chunk", "devices"), STRATEGIES)
@pytest.mark.parametrize("chosen", [[4, 0, 6], [5], [0, 1, 2, 3, 4, 5, 6]])
def test_equals_a_plain_loop(strategy, chunk, devices, chosen):
    mapping = mapping_of(strategy, chunk, devices)
    data, all_clients = population(7, mapping)
    bad = 6  # its value is infinite: left out of the sums and counted
    index = jnp.asarray([*chosen, *[7] * (4 - len(chosen) % 4)], jnp.int32)[: max(4, len(chosen))]
    if len(chosen) == 7:
        index = jnp.arange(len(all_clients.data.num_examples), dtype=jnp.int32)
    mask = index < 7

    def fn(client, scale):
        value = client.data.x.sum() * scale
        return client.index, jnp.where(client.index == bad, jnp.inf, value)

    def run(all_clients, index, mask):
        cohort = parallel.gather_cohort(all_clients, Selection(index, mask))
        scale = jnp.arange(len(cohort.index), dtype=jnp.float32) + 1
        return (
            cohort,
            scale,
            parallel.for_each_client(
                fn,
                cohort,
                scale,
                num_slots=3,
                reduce=lambda out: Contribution(out[0] % 3, (1 + out[0]).astype(jnp.float32), {"v": out[1][None]}),
                collect=lambda out: out[0],
            ),
        )

    cohort, scale, mapped = jax.jit(run)(all_clients, index, mask)
    total, weight, count = np.zeros(3), np.zeros(3), np.zeros(3)
    for row, client in enumerate(np.asarray(cohort.index)):
        if client >= 7:
            assert int(mapped.collected[row]) == 0
            assert not mapped.accepted[row]
            continue
        assert int(mapped.collected[row]) == client
        assert bool(mapped.accepted[row]) == (client != bad)
        if client != bad:
            total[client % 3] += (1 + client) * data.x[client].sum() * float(scale[row])
            weight[client % 3] += 1 + client
            count[client % 3] += 1
    assert sorted(np.asarray(cohort.index)[np.asarray(cohort.mask)]) == sorted(chosen)
    np.testing.assert_allclose(mapped.reduced.total["v"][:, 0], total, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mapped.reduced.weight, weight)
    np.testing.assert_array_equal(mapped.reduced.count, count)
    assert int(mapped.reduced.num_rejected) == (bad in chosen)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_clients_function_is_traced_once(devices):
    """On several devices it was traced twice: its shapes were asked for without their mesh."""
    mapping, traced = mapping_of("scan", None, devices), []

    def run(all_clients):
        cohort = parallel.gather_cohort(all_clients, Selection(jnp.arange(8), jnp.arange(8) < 7))
        return parallel.for_each_client(
            lambda client: traced.append(1) or client.index, cohort, collect=lambda out: out
        )

    jax.jit(run).lower(population(8, mapping)[1])
    assert len(traced) == 1


@pytest.mark.parametrize(("strategy", "chunk", "devices"), STRATEGIES)
def test_a_client_may_contribute_to_several_slots(strategy, chunk, devices):
    mapping = mapping_of(strategy, chunk, devices)
    data, all_clients = population(4, mapping)

    def run(all_clients):
        return parallel.for_each_client(
            lambda client: client.data.x.sum(),
            parallel.whole_population(all_clients),
            num_slots=2,
            reduce=lambda total: Contribution(jnp.asarray([0, 1]), jnp.asarray([1.0, 2.0]), jnp.stack([total, -total])),
        )

    mapped = jax.jit(run)(all_clients)
    expected = np.asarray([data.x.sum(), -2 * data.x.sum()])
    np.testing.assert_allclose(mapped.reduced.total, expected, rtol=1e-5)
    np.testing.assert_allclose(mapped.reduced.weight, [4, 8])


def test_masked_clients_cost_nothing_under_scan():
    _, all_clients = population(4, mapping_of("scan", None, 1))
    cohort = parallel.whole_population(all_clients)
    mask = jnp.asarray([True, False, True, False])
    cohort = Cohort(cohort.index, mask, cohort.data, None, cohort.mapping)
    seen = []

    def fn(client):
        jax.debug.callback(lambda index: seen.append(int(index)), client.index)
        return client.index

    parallel.for_each_client(fn, cohort, collect=lambda index: index)
    jax.effects_barrier()
    assert sorted(seen) == [0, 2]


def test_run_if_is_a_condition():
    for condition in (True, False):
        out = jax.jit(lambda c: parallel.run_if(c, lambda x: x + 1, jnp.zeros(3)))(jnp.asarray(condition))
        np.testing.assert_array_equal(out, np.full(3, float(condition)))


@needs_two
def test_collectives_are_no_larger_than_the_cohort():
    """On two devices: a cohort is gathered by a reduce-scatter of its rows; training itself sums models only."""
    mapping = mapping_of("scan", None, 2)
    _, all_clients = population(16, mapping, rows=50)

    def run(all_clients, index, mask):
        cohort = parallel.gather_cohort(all_clients, Selection(index, mask))
        return parallel.for_each_client(
            lambda client: client.data.x.sum((0,)),
            cohort,
            reduce=lambda total: Contribution(jnp.zeros((), jnp.int32), jnp.ones(()), total),
        ).reduced

    index = jnp.asarray([3, 5, 8, 1], jnp.int32)
    text = jax.jit(run).lower(all_clients, index, index < 16).compile().as_text()
    sizes = []
    for line in text.splitlines():
        if re.search(r"= .*\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\(", line):
            shapes = re.findall(r"\w+\[([\d,]*)\]", line.split("=")[1].split("(")[0] + line.split("=")[1])
            sizes.append(max(int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes))
    assert sizes
    assert max(sizes) <= 4 * 50 * 3


@needs_two
def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="strategy is 'loop'"):
        parallel.client_mapping("loop")
    with pytest.raises(ValueError, match="chunk_size is 0"):
        parallel.client_mapping("chunked", 0)
    mesh = jax.make_mesh((2,), ("clients",), axis_types=(AxisType.Auto,))
    assert PartitionSpec("clients") == parallel.row_sharding(mapping_of("scan", None, 2)).spec
    mapping = parallel.ClientMapping("scan", None, mesh)
    _, odd = population(3, parallel.client_mapping("scan", devices=jax.devices()[:1]))
    cohort = parallel.whole_population(odd)
    with pytest.raises(ValueError, match="cannot be divided among 2 devices"):
        parallel.for_each_client(lambda client: client, Cohort(cohort.index, cohort.mask, cohort.data, None, mapping))


def test_automatic_chunks_follow_memory():
    one = (jnp.zeros((100, 10)),)
    bound = parallel.bytes_per_client(lambda x: (x @ x.T).sum(), one)
    assert 100 * 100 * 4 <= bound <= 4 * 100 * 100 * 4


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_the_compiler_says_how_many_clients_fit(devices, monkeypatch):
    """Where the upper bound settles nothing: 20 values of 4 kB one after the other, of which a client holds a few."""
    asked = []

    def compiled(*given, own=chunks.compiled_bytes):
        asked.append(own(*given))
        return asked[-1]

    monkeypatch.setattr(chunks, "compiled_bytes", compiled)
    _, clients = population(32, mapping_of("chunked", None, devices))
    shared = jnp.full((1000,), 0.5)

    def fn(client):
        values = shared * client.data.x.sum()
        for _ in range(20):
            values = jnp.sort(jnp.sin(values))
        return values.sum()

    def run():
        return parallel.for_each_client(fn, parallel.whole_population(clients), collect=lambda found: found).collected

    expected = jax.jit(run)()
    assert not asked  # nothing is compiled where all clients fit anyway
    monkeypatch.setattr(chunks, "free_memory", lambda device: 4 * 80_000)
    found = jax.jit(lambda: run())()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert 2_000 <= asked[0] <= 40_000 < 80_000  # the bound


def test_no_more_clients_at_a_time_than_keep_a_device_busy(monkeypatch):
    """On an accelerator; a run then takes as many as its plan says."""
    one = (jax.ShapeDtypeStruct((3,), jnp.float32),)
    mapping = mapping_of("chunked", None, 1)
    assert chunks.chunk_size(jnp.sin, one, mapping, 32) == 32
    monkeypatch.setattr(chunks, "MOST_AT_A_TIME", {jax.devices()[0].platform: 6})
    assert chunks.chunk_size(jnp.sin, one, mapping, 32) == 6
    assert chunks.chunk_size(jnp.sin, one, mapping._replace(chunk_size=9), 32) == 9


def test_lapack_keeps_to_one_thread_and_numpy_to_its_own():
    found = threadpoolctl.threadpool_info()
    lapack = [library["num_threads"] for library in found if "scipy.libs" in library["filepath"]]
    if not lapack:
        pytest.skip("SciPy brings no BLAS of its own here")
    assert lapack == [1] * len(lapack)
    own = [library["num_threads"] for library in found if "numpy.libs" in library["filepath"]]
    assert all(threads == os.cpu_count() for threads in own) or not own


@needs_two
def test_a_states_buffers_are_its_own_on_several_devices():
    """A round donates them; what they were made of stays as it was, whatever kind of array it is."""
    mapping = mapping_of("scan", None, 2)
    rows, models = jnp.arange(4 * 64.0).reshape(4, 64), np.arange(2 * 64, dtype=np.float32).reshape(2, 64)
    clients = {"rows": rows, "placed": parallel.place_rows(mapping, rows), "host": np.arange(4, dtype=np.float32)}
    state = State(Clusters(models, jnp.asarray(models), jnp.ones(2, bool)), clients, (), jnp.int32(3))
    before = jax.tree.map(np.array, state)
    with_keys = state._replace(clients={**clients, "keys": jax.random.split(jax.random.key(0), 4)})
    here = jax.tree.map(lambda leaf: jax.device_put(leaf, jax.devices()[0]), state)
    assert parallel.place_state(with_keys, mapping).clients["keys"].sharding.spec == PartitionSpec("clients")
    for given in (state, here):
        placed = parallel.place_state(given, mapping)
        assert [leaf.sharding.spec for leaf in placed.clients.values()] == [PartitionSpec("clients")] * 3
        assert placed.clusters.params.sharding.is_fully_replicated
        jax.tree.map(np.testing.assert_array_equal, placed, before)
        turned = jax.jit(lambda state: jax.tree.map(jnp.flip, state), donate_argnums=0)(placed)
        jax.tree.map(lambda leaf, was: np.testing.assert_array_equal(leaf, np.flip(was)), turned, before)
        jax.tree.map(np.testing.assert_array_equal, given, before)
