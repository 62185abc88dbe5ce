"""Clients of very different work: dealt to the devices by it, which wait for one another as long as that takes."""

import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms import fedavg, local_only
from fedjax_cluster.cohorts import in_place
from fedjax_cluster.parallel import mapping as machine
from fedjax_cluster.parallel import rows as rows_module
from fedjax_cluster.parallel.contributions import Contribution
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import ClientData, Federation, Selection
from tests.devices import needs_two
from tests.federations import INFO, one_step, run_keys

UNEVEN = (20, 18, 17, 15, 3, 2, 1)
STRATEGIES = [("scan", None), ("vmap", None), ("chunked", 3)]


def clients(sizes, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(len(sizes), max(sizes), 6)).astype(np.float32)
    return ClientData(x, rng.integers(0, 3, x.shape[:2]).astype(np.int32), np.asarray(sizes, np.int32))


def placed(data, mapping, *, dealt):
    return parallel.place_population(data, INFO, mapping, data.num_examples if dealt else None)


def on_devices(count, strategy="scan", chunk=None):
    return parallel.client_mapping(strategy, chunk, devices=jax.devices()[:count])


@jax.jit
def mapped(population, selection, rows):
    """Sums, and by client what was collected, accepted and gathered."""
    cohort = parallel.gather_cohort(population, selection)

    def fn(client, row):
        seen = jnp.arange(client.data.x.shape[0]) < client.data.num_examples
        value = jnp.where(client.index == 2, jnp.inf, jnp.sum(client.data.x[:, 0], where=seen) + row["number"])
        return client.index, value, client.data.num_examples, row

    found = parallel.for_each_client(
        fn,
        cohort,
        parallel.gather_rows(cohort, rows),
        num_slots=3,
        reduce=lambda out: Contribution(out[0] % 3, (1 + out[0]).astype(jnp.float32), out[1]),
        collect=lambda out: (out[0], out[2], out[3]),
    )
    wide = parallel.scatter_rows(cohort, rows, found.collected[2], found.accepted)
    whole = (found.collected, found.accepted)
    empty = jax.tree.map(lambda leaf: jnp.zeros((rows["number"].shape[0], *leaf.shape[1:]), leaf.dtype), whole)
    return found.reduced, parallel.scatter_rows(cohort, empty, whole), wide, cohort


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "chunk"), STRATEGIES)
@pytest.mark.parametrize("chosen", [None, (5, 0, 2, 6, 1)])
def test_clients_dealt_by_work_change_nothing_but_the_order_of_sums(strategy, chunk, chosen):
    data, mapping = clients(UNEVEN), on_devices(2, strategy, chunk)
    rows = parallel.place_rows(mapping, {"number": np.arange(8.0, dtype=np.float32), "wide": np.ones((8, 1100))})
    rows["wide"] = rows["wide"].astype(jnp.float32) * rows["number"][:, None]
    if chosen is None:
        selection = in_place(jnp.asarray([1, 1, 1, 0, 1, 1, 1, 0], bool))
    else:
        selection = Selection(jnp.asarray([*chosen, 8], jnp.int32), jnp.asarray([1, 1, 1, 1, 1, 0], bool))
    plain, plain_clients, plain_rows, _ = mapped(placed(data, mapping, dealt=False), selection, rows)
    population = placed(data, mapping, dealt=True)
    assert population.placement is not None
    sums, by_client, by_row, cohort = mapped(population, selection, rows)
    jax.tree.map(np.testing.assert_array_equal, (by_client, by_row), (plain_clients, plain_rows))
    np.testing.assert_allclose(sums.total, plain.total, rtol=1e-6)
    for field in ("weight", "count", "num_rejected"):
        np.testing.assert_array_equal(getattr(sums, field), getattr(plain, field))
    if chosen is None:
        np.testing.assert_array_equal(cohort.index, selection.index)


@needs_two
def test_devices_have_about_equal_work():
    mapping = on_devices(2)
    population = placed(clients(UNEVEN), mapping, dealt=True)
    order = np.asarray(population.placement.client)
    work = np.asarray([*UNEVEN, 0])
    assert abs(np.subtract(*work[order].reshape(2, -1).sum(1))) <= 2  # 70 and 6 in the clients' order
    np.testing.assert_array_equal(population.data.x[np.argsort(order)][:7], clients(UNEVEN).x)
    np.testing.assert_array_equal(population.data.num_examples, work)
    index = jnp.asarray([0, 4, 1, 5, 2, 8], jnp.int32)
    cohort = jax.jit(parallel.gather_cohort)(population, Selection(index, index < 8))
    # 20 + 3 + 2 and 18 + 17; dealt like cards 55 and 5.
    assert sorted(np.asarray(cohort.data.num_examples).reshape(2, -1).sum(1)) == [25, 35]
    assert sorted(np.asarray(cohort.mask).reshape(2, -1).sum(1)) == [2, 3]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.sampled_from([2, 3]))
def test_dealing_gives_each_device_as_many_rows_largest_first(sizes, devices):
    work = np.pad(np.asarray(sizes, np.float32), (0, 12 - len(sizes)), constant_values=-1)
    order = np.asarray(rows_module._dealt(work, devices))
    assert sorted(order) == list(range(len(work)))
    dealt = work[order].reshape(devices, -1)
    assert (np.diff(dealt) <= 0).all()
    work = np.maximum(dealt, 0).sum(1)
    if (dealt >= 0).all(1).any():  # a device that is full takes no more
        return
    assert np.ptp(work) <= max(sizes)


@pytest.mark.parametrize("work", [[np.inf] * 3 + [1.0], [1e38, *[3e38] * 5], [np.inf] * 4])
def test_work_beyond_float32_is_dealt_all_the_same(work):
    order = np.asarray(rows_module._dealt(np.asarray(work, np.float32), 2))
    assert sorted(order) == list(range(len(work)))


def test_equal_work_is_dealt_like_cards_and_a_balanced_population_stays():
    np.testing.assert_array_equal(rows_module._dealt(np.ones(6, np.float32), 2), [0, 2, 4, 1, 3, 5])
    assert placed(clients((7, 7, 7)), on_devices(2), dealt=True).work is None
    assert placed(clients((7, 5, 5, 7)), on_devices(2), dealt=True).placement is None
    assert placed(clients(UNEVEN), on_devices(1), dealt=True).placement is None


def test_work_is_the_steps_of_a_round():
    data = clients(UNEVEN)
    assert local.sgd(0.1, batch_size=5, epochs=2).work(data).tolist() == [8, 8, 8, 6, 2, 2, 2]
    assert local.sgd(0.1, batch_size=5, steps=3).work(data).tolist() == [3] * 7
    assert local.sgd(0.1, batch_size=None, epochs=3).work(data).tolist() == [3] * 7


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(fedavg, marks=pytest.mark.slow), local_only])
def test_a_round_of_a_dealt_population_equals_that_of_one_device(kind):
    method, data = kind(nn.linear(), local=local.sgd(0.1, batch_size=5, epochs=1)), clients((20, 18, 3, 2))
    ends = []
    for devices, dealt in ((1, False), (2, True)):
        population = placed(data, on_devices(devices), dealt=dealt)
        state, _ = method.init(run_keys(0).initialization, population)
        state = parallel.place_state(state, population.mapping)
        for number in range(2):
            state, info = one_step(method, population, state, number)
        ends.append((state, info))
    jax.tree.map(lambda *leaves: np.testing.assert_allclose(*leaves, rtol=1e-5, atol=1e-6), *ends)


@pytest.fixture
def flags(monkeypatch):
    def after(given):
        monkeypatch.setenv("XLA_FLAGS", given)
        parallel.use_all_cores(2)
        return os.environ["XLA_FLAGS"].split()

    return after


@needs_two
def test_devices_wait_long_for_one_another_unless_the_user_says_otherwise(flags):
    assert flags("") == [f"--{name}={value}" for name, value in machine.FLAGS.items()]
    own = ["--xla_cpu_collective_call_terminate_timeout_seconds=7", "--xla_cpu_multi_thread_eigen=true"]
    assert flags(" ".join(own)) == [*own, "--xla_cpu_collective_call_warn_stuck_timeout_seconds=3600"]


@needs_two
def test_a_flag_that_xla_does_not_know_is_not_set(flags, monkeypatch):
    """XLA would end the process."""
    monkeypatch.setattr(machine, "FLAGS", {"xla_cpu_collective_call": "1"})  # the beginning of one that there is
    assert flags("") == []


WAITING = """
import time
import jax, numpy as np
from fedjax_cluster import parallel
parallel.use_all_cores(2)
from fedjax_cluster.parallel.contributions import Contribution
from fedjax_cluster.types import ClientData, DatasetInfo

def late(client):
    time.sleep(10 if client else 0)
    return np.float32(1)

def everybody(population):
    def one(client):
        return jax.pure_callback(late, jax.ShapeDtypeStruct((), np.float32), client.index)
    cohort = parallel.whole_population(population)
    return parallel.for_each_client(one, cohort, reduce=lambda value: Contribution(0 * value.astype(int), value, value))

data = ClientData(np.zeros((2, 1, 1), np.float32), np.zeros((2, 1), np.int32), np.ones(2, np.int32))
population = parallel.place_population(data, DatasetInfo("waits", (1,), 2), parallel.client_mapping())
print(jax.jit(everybody)(population).reduced.total)
"""


@pytest.mark.slow
def test_the_flags_decide_how_long_devices_wait_for_one_another():
    """XLA ends the process after 60 s if nothing is said; here after 1 s, so that the test need not wait as long."""
    short = (
        "--xla_cpu_collective_call_terminate_timeout_seconds=1 --xla_cpu_collective_call_warn_stuck_timeout_seconds=1"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", WAITING]
    ours, ended = (subprocess.Popen(command, env=environment | more, **pipes) for more in ({}, {"XLA_FLAGS": short}))
    (printed, said), (_, reason) = (process.communicate(timeout=300) for process in (ours, ended))
    assert ours.returncode == 0, said[-1000:]
    assert printed.split() == ["[2.]"]
    assert "waiting" not in said
    # Of two threads that end the process at once, one may do so before the other has said why.
    assert ended.returncode == -signal.SIGABRT
    assert "Termination timeout" in reason or not reason


@pytest.mark.slow
def test_clients_of_1_and_of_100_000_rows():
    train, test = clients((1, 100_000)), clients((5, 5), seed=1)
    federation = Federation(train, test, None, None, INFO)
    method = fedavg(nn.linear(), local=local.sgd(0.01, batch_size=32, epochs=2))
    one, two = (simulate(method, federation, rounds=3, eval_every=1, mapping=on_devices(devices)) for devices in (1, 2))
    jax.tree.map(lambda *leaves: np.testing.assert_allclose(*leaves, rtol=1e-4, atol=1e-6), one.state, two.state)
    np.testing.assert_allclose(one.history["accuracy"], two.history["accuracy"])
