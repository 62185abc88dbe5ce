"""Rows of clients on the devices: gathered, scattered and exchanged bit for bit, and no more of them than must be."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from fedjax_cluster import parallel, tree
from fedjax_cluster.parallel import messages
from fedjax_cluster.parallel import rows as rows_module
from fedjax_cluster.parallel.mapping import on_devices
from fedjax_cluster.types import ClientData, Cohort, Selection
from tests.devices import needs_two
from tests.parallel.test_mapping import mapping_of, population

gather = jax.jit(parallel.gather_cohort)
scatter = jax.jit(parallel.scatter_rows)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(6)), st.integers(1, 4), st.sampled_from([1, 2]))
def test_gather_then_scatter_is_the_identity_on_the_cohort(order, size, devices):
    mapping = mapping_of("scan", None, devices)
    data, all_clients = population(6, mapping)
    index = jnp.asarray([*order[:size], 6, 6, 6, 6][:5], jnp.int32)
    cohort = gather(all_clients, Selection(index, index < 6))
    for row, client in enumerate(np.asarray(cohort.index)):
        expected = data.x[client] if client < 6 else np.zeros_like(data.x[0])
        np.testing.assert_array_equal(cohort.data.x[row], expected)
    rows = parallel.place_rows(mapping, jnp.zeros((6, 2)))
    written = np.asarray(scatter(cohort, rows, jnp.ones((len(cohort.index), 2))))
    assert (written[:, 0] == np.isin(np.arange(6), order[:size])).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float32, bool])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (7,), (3, 5), ()])
def test_gathered_rows_are_those_of_the_clients_bit_for_bit(dtype, shape):
    """On two devices, whatever their type and size: bytes travel as words where four of them make one."""
    mapping = mapping_of("scan", None, 2)
    rows = np.random.default_rng(0).integers(0, 256, (8, *shape)).astype(dtype)
    index, mask = jnp.asarray([6, 1, 8, 3, 0, 8]), jnp.asarray([1, 1, 0, 1, 1, 0], bool)
    data = ClientData(jnp.zeros((6, 1)), jnp.zeros((6, 1)), jnp.ones(6, jnp.int32))
    cohort = Cohort(index, mask, data, None, mapping)
    found = np.asarray(jax.jit(parallel.gather_rows)(cohort, parallel.place_rows(mapping, jnp.asarray(rows))))
    expected = np.concatenate([rows, np.zeros((1, *shape), dtype)])[np.asarray(index)]
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == dtype


MIXED = {
    "flags": np.asarray([[1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 1, 0]], bool),
    "numbers": np.asarray([0.0, -0.0, np.nan, np.inf], np.float32),
    "labels": np.asarray([[-1, 2], [3, -4], [0, 0], [7, 8]], np.int32),
    "bytes": np.arange(32, dtype=np.uint8).reshape(4, 2, 4),
    "odd": np.arange(12, dtype=np.uint8).reshape(4, 3),
    "half": np.asarray([1.5, -0.0, np.nan, 0.0], np.float16),
    "brain": np.asarray([[-0.0, 1.5, np.nan]] * 4, jnp.bfloat16),
    "empty": np.zeros((4, 0), np.float32),
    "no flags": np.zeros((4, 0), bool),
    "long": np.arange(4 * 2000, dtype=np.float32).reshape(4, 2000),
}


def bits(rows):
    return {name: np.asarray(leaf).tobytes() for name, leaf in rows.items()}


@needs_two
def test_leaves_of_several_types_are_gathered_together_bit_for_bit():
    mapping = mapping_of("scan", None, 2)
    index, mask = jnp.asarray([2, 1, 3, 4]), jnp.asarray([1, 1, 1, 0], bool)
    data = ClientData(jnp.zeros((4, 1)), jnp.zeros((4, 1)), jnp.ones(4, jnp.int32))
    cohort = Cohort(index, mask, data, None, mapping)
    gathered = jax.jit(parallel.gather_rows)
    rows = parallel.place_rows(mapping, MIXED)
    found = gathered(cohort, rows)
    expected = {
        name: np.concatenate([leaf, np.zeros_like(leaf[:1])])[np.asarray(index)] for name, leaf in MIXED.items()
    }
    assert bits(found) == bits(expected)
    # One message for all that is short, one for each of the others that hold something.
    sums = re.findall(r" reduce-scatter\(", gathered.lower(cohort, rows).compile().as_text())
    assert len(sums) == 1 + len(("odd", "half", "brain", "long"))


@needs_two
@pytest.mark.parametrize("index", [[2, 1, 3, 4, 4, 4], [4, 4, 4, 0, 4, 4], [3, 4, 1, 4, 4, 2], [4] * 6])
def test_rows_gathered_in_turns_are_the_same_bit_for_bit(monkeypatch, index):
    monkeypatch.setattr(rows_module, "TURN_BYTES", 1)
    mapping = mapping_of("scan", None, 2)
    data = ClientData(jnp.zeros((4, 1)), jnp.zeros((4, 1)), jnp.ones(4, jnp.int32))
    cohort = Cohort(jnp.asarray(index), jnp.asarray(index) < 4, data, None, mapping)
    gathered = jax.jit(lambda cohort, rows: parallel.gather_rows(cohort, rows))
    rows = parallel.place_rows(mapping, MIXED)
    expected = {name: np.concatenate([leaf, np.zeros_like(leaf[:1])])[index] for name, leaf in MIXED.items()}
    seen, send = [], messages.send

    def counted(collective, leaves, longest):
        jax.debug.callback(lambda: seen.append(1))
        return send(collective, leaves, longest)

    monkeypatch.setattr(messages, "send", counted)
    assert bits(gathered(cohort, rows)) == bits(expected)
    jax.effects_barrier()
    # One message on each of two devices for each client whose rows the other one has, and for nobody else.
    away = sum(client < 4 and client // 2 != i // 3 for i, client in enumerate(index))
    assert len(seen) == 2 * away


@needs_two
@pytest.mark.parametrize("index", [[2, 1, 3, 4, 4, 4], [4, 4, 4, 0, 4, 4], [3, 4, 1, 4, 4, 2], [4] * 6])
def test_rows_scattered_in_turns_are_the_same_bit_for_bit(monkeypatch, index):
    mapping, mask = mapping_of("scan", None, 2), np.asarray(index) < 4
    data = ClientData(jnp.zeros((4, 1)), jnp.zeros((4, 1)), jnp.ones(4, jnp.int32))
    cohort = Cohort(jnp.asarray(index), jnp.asarray(mask), data, None, mapping)
    rows = parallel.place_rows(mapping, MIXED)
    values = {name: np.concatenate([leaf, leaf[:2]])[::-1].copy() for name, leaf in MIXED.items()}
    expected = {name: leaf.copy() for name, leaf in MIXED.items()}
    for name, leaf in expected.items():
        leaf[np.asarray(index)[mask]] = values[name][mask]
    for turn_bytes in (1, 2**21):
        monkeypatch.setattr(rows_module, "TURN_BYTES", turn_bytes)
        written = jax.jit(lambda cohort, rows, values: parallel.scatter_rows(cohort, rows, values))
        assert bits(written(cohort, rows, parallel.place_rows(mapping, values))) == bits(expected)


@pytest.mark.parametrize(("sent", "turns"), [(0, 0), (1, 1), (3, 1), (4, 2), (20, 7)])
def test_only_rows_that_are_chosen_are_sent(monkeypatch, sent, turns):
    """20 rows in turns of three."""
    monkeypatch.setattr(messages, "MOST_TURNS", 7)
    rows, calls = np.arange(1.0, 21.0, dtype=np.float32)[:, None], []

    def send(which, target):
        jax.debug.callback(lambda: calls.append(1))
        return tree.scatter(target, which, [jnp.asarray(rows)[jnp.minimum(which, 19)]])

    chosen = np.isin(np.arange(20), np.random.default_rng(0).permutation(20)[:sent])
    (found,) = messages.in_turns(send, jnp.asarray(chosen), [jnp.zeros_like(rows)], turn_bytes=1)
    jax.effects_barrier()
    assert len(calls) == turns
    np.testing.assert_array_equal(found, np.where(chosen[:, None], rows, 0.0))


@given(st.sampled_from([(1, 3), (2, 2), (3, 4), (4, 1)]), st.data())
def test_clients_stay_on_their_device_as_far_as_it_has_room(shape, data):
    devices, share = shape
    size = devices * share
    device = np.asarray(data.draw(st.lists(st.integers(0, devices), min_size=size, max_size=size)))
    order = np.asarray(rows_module._kept_in_place(jnp.asarray(device), devices))
    assert sorted(order) == list(range(size))
    dealt = device[order].reshape(devices, share)
    valid = dealt < devices
    most = -(-valid.sum() // devices)
    assert valid.sum(1).max() <= most
    assert (np.diff(valid.astype(int), axis=1) <= 0).all()  # padding comes last
    stay = (dealt == np.arange(devices)[:, None]).sum(1)
    np.testing.assert_array_equal(stay, np.minimum(np.bincount(device, minlength=devices + 1)[:devices], most))


@needs_two
def test_short_rows_reach_every_device_in_one_message():
    mapping = mapping_of("scan", None, 2)
    send = jax.jit(lambda rows: parallel.to_each_device(rows, mapping))
    rows = parallel.place_rows(mapping, MIXED)
    found = send(rows)
    assert bits(found) == bits(MIXED)
    for name in ("flags", "numbers", "labels", "bytes"):
        assert found[name].sharding.is_fully_replicated
    assert not found["long"].sharding.is_fully_replicated
    assert len(re.findall(r" all-gather\(", send.lower(rows).compile().as_text())) == 1
    assert parallel.to_each_device(MIXED, mapping_of("scan", None, 1)) is MIXED


@pytest.mark.parametrize("devices", [1, 2])
def test_rows_of_nothing_are_gathered_and_scattered(devices):
    """A model without batch-norm statistics, an optimiser without a state: pytrees that have no leaves."""
    _, all_clients = population(6, mapping_of("scan", None, devices))
    index = jnp.asarray([2, 4, 6], jnp.int32)
    cohort = gather(all_clients, Selection(index, index < 6))
    assert parallel.gather_rows(cohort, {"stats": {}}) == {"stats": {}}
    assert scatter(cohort, {"stats": {}}, {"stats": {}}) == {"stats": {}}


@needs_two
@pytest.mark.parametrize("spec", [PartitionSpec(parallel.AXIS), PartitionSpec()])
def test_arrays_of_nothing_neither_go_into_devices_nor_through_them(spec):
    """XLA of JAX 0.11 does not survive compiling it."""
    mapping = mapping_of("scan", None, 2)
    given = {"nothing": jnp.zeros((4, 0, 2), jnp.int32), "rows": jnp.arange(4.0)}
    fn = on_devices(lambda of, one: {**of, "new": of["rows"] + one, "empty": of["nothing"] + 1}, mapping, spec, spec)
    jaxpr = jax.make_jaxpr(fn)(given, jnp.zeros(4)).jaxpr
    (equation,) = [each for each in jaxpr.eqns if each.primitive.name == "shard_map"]
    inner = equation.params["jaxpr"]
    assert all(math.prod(variable.aval.shape) for variable in inner.invars)
    passed = set(map(id, inner.invars)) & set(map(id, inner.outvars))
    assert all(math.prod(variable.aval.shape) for variable in inner.outvars if id(variable) in passed)
    found = jax.jit(fn)(given, jnp.zeros(4))
    assert {name: leaf.shape for name, leaf in found.items()} == {
        "nothing": (4, 0, 2),
        "rows": (4,),
        "new": (4,),
        "empty": (4, 0, 2),
    }


@needs_two
def test_a_smaller_cohort_is_dealt_out_evenly():
    mapping = mapping_of("scan", None, 2)
    _, all_clients = population(10, mapping)
    index = jnp.asarray([3, 1, 4, 9, 10, 10], jnp.int32)
    cohort = gather(all_clients, Selection(index, index < 10))
    assert np.asarray(cohort.mask).reshape(2, -1).sum(1).tolist() == [2, 2]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("width", [4, 5])
def test_gram_equals_numpy(devices, width):
    mapping = mapping_of("scan", None, devices)
    rows = np.random.default_rng(0).normal(size=(6, width)).astype(np.float32)
    ours = jax.jit(lambda rows: parallel.gram(rows, mapping))(parallel.place_rows(mapping, rows))
    np.testing.assert_allclose(ours, rows @ rows.T, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_gram_of_rows_of_other_types_is_that_of_one_device():
    rows = np.random.default_rng(0).normal(size=(4, 3))
    for dtype, wide in (("bfloat16", False), ("float32", True), ("float64", True)):
        with jax.enable_x64(wide):
            ours = [parallel.gram(jnp.asarray(rows, dtype), mapping_of("chunked", 2, devices)) for devices in (1, 2)]
            assert ours[0].dtype == ours[1].dtype
            np.testing.assert_array_equal(*ours)


def test_an_index_of_nobody_takes_and_writes_nothing():
    rows, index = {"a": jnp.arange(3.0)}, jnp.asarray([-1, 1, 3])
    assert tree.take(rows, index)["a"].tolist() == [0.0, 1.0, 0.0]
    assert tree.scatter(rows, index, {"a": jnp.full(3, 9.0)})["a"].tolist() == [0.0, 9.0, 2.0]
