"""Rows that clients keep and renew where they lie, and contributions of one client in parts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import parallel
from fedjax_cluster.parallel import contributions
from fedjax_cluster.parallel.contributions import Contribution
from fedjax_cluster.types import ClientData, DatasetInfo, Selection
from tests.devices import needs_two

INFO = DatasetInfo("numbers", (2,), 2)
STRATEGIES = [
    ("scan", None, 1),
    ("vmap", None, 1),
    ("chunked", 3, 1),  # of seven rows the last chunk reaches back over two
    pytest.param("scan", None, 2, marks=needs_two),
    pytest.param("chunked", 3, 2, marks=needs_two),
]
CHOSEN = [[0, 1, 2, 3, 4, 5, 6], [6, 2, 3, 0]]
SICK = 2  # gives NaN


def population(strategy, chunk, devices, dealt=False):
    mapping = parallel.client_mapping(strategy, chunk, devices=jax.devices()[:devices])
    x = np.arange(14, dtype=np.float32).reshape(7, 1, 2)
    data = ClientData(x, np.zeros((7, 1), np.int32), np.ones(7, np.int32))
    work = np.array([9, 9, 9, 1, 1, 1, 1], np.float32) if dealt else None
    return parallel.place_population(data, INFO, mapping, work)


def cohort_of(all_clients, chosen):
    size = len(all_clients.data.num_examples)
    if len(chosen) == 7:
        index = jnp.arange(size, dtype=jnp.int32)
        return parallel.gather_cohort(all_clients, Selection(index, index < 7))
    return parallel.gather_cohort(all_clients, Selection(jnp.asarray(chosen, jnp.int32), jnp.ones(len(chosen), bool)))


@pytest.mark.parametrize("dealt", [False, True])
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize(("strategy", "chunk", "devices"), STRATEGIES)
def test_rows_are_renewed_where_they_lie(strategy, chunk, devices, chosen, dealt):
    """Faults: a row done twice in the last chunk, one with NaN written, one of who is away, one in another's place."""
    all_clients = population(strategy, chunk, devices, dealt)
    size = len(all_clients.data.num_examples)
    kept = {"level": jnp.arange(10.0, 10.0 + size), "times": jnp.zeros((size, 2), jnp.int32)}

    @jax.jit
    def run(all_clients, kept):
        cohort = cohort_of(all_clients, chosen)

        def fn(client, own, scale):
            level = own["level"] + scale * client.data.x.sum()
            level = jnp.where(client.index == SICK, jnp.nan, level)
            return own["level"], {"level": level, "times": own["times"] + 1}

        mapped = parallel.for_each_client(
            fn,
            cohort,
            jnp.full(cohort.index.shape, 2.0),
            reduce=lambda output: Contribution(jnp.zeros((), jnp.int32), jnp.ones(()), output[0]),
            collect=lambda output: output[0],
            own=parallel.gather_rows(cohort, kept),
            renew=lambda output: output[1],
        )
        return parallel.put_back(cohort, kept, mapped.own), mapped, cohort.index, cohort.mask

    found, mapped, index, mask = run(all_clients, kept)
    level, times = np.arange(10.0, 10.0 + size), np.zeros((size, 2), int)
    healthy = np.setdiff1d(chosen, [SICK])
    level[healthy] += 2.0 * (4 * healthy + 1)
    times[healthy] += 1
    np.testing.assert_allclose(found["level"], level)
    np.testing.assert_array_equal(found["times"], times)
    # What was collected is of the rows as they were, and who is sick is in no sum.
    before = {int(i): float(x) for i, x, there in zip(index, mapped.collected, mask, strict=True) if there}
    assert before == {i: 10.0 + i for i in chosen}
    assert {int(i) for i, there in zip(index, mapped.accepted, strict=True) if there} == set(healthy.tolist())
    np.testing.assert_allclose(mapped.reduced.total, np.sum(10.0 + healthy))
    assert int(mapped.reduced.num_rejected) == 1


def test_own_rows_and_what_becomes_of_them_go_together():
    all_clients = population("scan", None, 1)
    cohort = parallel.whole_population(all_clients)
    with pytest.raises(ValueError, match="own and renew go together"):
        parallel.for_each_client(lambda client, own: own, cohort, own=jnp.ones(7))
    with pytest.raises(ValueError, match=r"renew gives an array of shape \(\) in the place of \(2,\)"):
        parallel.for_each_client(lambda client, own: own, cohort, own=jnp.ones((7, 2)), renew=lambda own: own.sum())
    with pytest.raises(ValueError, match="renew gives"):
        parallel.for_each_client(lambda client, own: own, cohort, own=jnp.ones(7), renew=lambda own: (own, own))
    with pytest.raises(ValueError, match="there is no reduce"):
        parallel.for_each_client(lambda client: client.index, cohort, parts=2)
    with pytest.raises(ValueError, match="a cohort of 7 clients"):
        parallel.for_each_client(lambda client, own: own, cohort, own=jnp.ones(6), renew=lambda own: own)


@pytest.mark.parametrize(("strategy", "chunk", "devices"), STRATEGIES)
def test_nothing_else_need_be_asked_for(strategy, chunk, devices):
    """Own rows alone, in their own type, and parts of which nothing is collected."""
    all_clients = population(strategy, chunk, devices)
    size = len(all_clients.data.num_examples)

    def run(all_clients):
        cohort = parallel.whole_population(all_clients)
        rows = jnp.ones(size, jnp.bfloat16)
        kept = parallel.for_each_client(
            lambda client, own: own.astype(jnp.float32) + 1, cohort, own=rows, renew=lambda row: row
        )
        parts = parallel.for_each_client(
            lambda client: client.index,
            cohort,
            num_slots=2,
            parts=2,
            reduce=lambda client, output, number: (Contribution(number, jnp.ones(()), jnp.ones(3)), ()),
        )
        return kept.own, parts.reduced.total

    own, total = jax.jit(run)(all_clients)
    assert own.dtype == jnp.bfloat16
    np.testing.assert_array_equal(own.astype(np.float32)[:7], 2)
    np.testing.assert_array_equal(total, np.full((2, 3), 7))


@pytest.mark.parametrize(("strategy", "chunk"), [("scan", None), ("chunked", 3)])
@pytest.mark.parametrize("what", ["collected", "own"])
def test_who_is_rejected_is_in_no_sum_of_parts(strategy, chunk, what):
    """Fault: FedEM's client whose mixture alone is NaN counts as rejected, but moves the models."""
    cohort = parallel.whole_population(population(strategy, chunk, 1))

    def spoilt(client):
        return jnp.where(client.index == SICK, jnp.nan, 1.0)

    @jax.jit
    def run():
        return parallel.for_each_client(
            lambda client, own: spoilt(client),
            cohort,
            num_slots=2,
            parts=2,
            reduce=lambda client, output, number: (Contribution(number, jnp.ones(()), jnp.ones(())), number),
            collect=lambda output, further: (further, output if what == "collected" else jnp.ones(())),
            own=jnp.zeros(7),
            renew=lambda output: output if what == "own" else jnp.ones(()),
        )

    found = run()
    np.testing.assert_array_equal(found.reduced.total, [6, 6])
    assert int(found.reduced.num_rejected) == 1
    np.testing.assert_array_equal(found.accepted, np.arange(7) != SICK)
    np.testing.assert_array_equal(found.own, np.arange(7) != SICK if what == "own" else np.ones(7))


def test_runs_side_by_side_whose_cohorts_end_in_other_chunks():
    """Fault: in a run without a client in the last chunk, those whom it reaches back over are lost."""
    all_clients = population("chunked", 3, 1)
    cohort = parallel.whole_population(all_clients)

    def run(mask, runs=1):
        mapping = cohort.mapping._replace(runs=runs)
        given = dataclasses.replace(cohort, mask=mask, mapping=mapping)
        return parallel.for_each_client(
            lambda client, own: (client.index, own + 1),
            given,
            num_slots=2,
            parts=2,
            reduce=lambda client, output, number: (
                Contribution(
                    number, jnp.ones(()), jnp.where(client.index == 4, jnp.nan, client.index.astype(jnp.float32))
                ),
                100 * (1 + number) + client.index,
            ),
            collect=lambda output, further: (output[0], further),
            own=jnp.arange(0.0, 70.0, 10.0),
            renew=lambda output: output[1],
        )

    masks = jnp.stack([jnp.arange(7) < count for count in (7, 6, 2)])
    together = jax.jit(jax.vmap(lambda mask: run(mask, runs=3)))(masks)
    alone = [jax.jit(run)(mask) for mask in masks]
    jax.tree.map(
        lambda found, *each: np.testing.assert_array_equal(np.where(np.isnan(found), 0, found), np.stack(each)),
        together,
        *alone,
    )


def test_no_second_array_of_all_rows_is_made():
    """Fault: results stacked beside the rows, 4 MB more than these for a thousand models of a thousand numbers."""
    clients, numbers = 1000, 1000
    data = ClientData(
        np.ones((clients, 1, 2), np.float32), np.zeros((clients, 1), np.int32), np.ones(clients, np.int32)
    )
    all_clients = parallel.place_population(
        data, INFO, parallel.client_mapping("scan", None, devices=jax.devices()[:1])
    )

    def run(kept):
        mapped = parallel.for_each_client(
            lambda client, own: own + client.data.x.sum(),
            parallel.whole_population(all_clients),
            own=kept,
            renew=lambda row: row,
        )
        return mapped.own

    compiled = jax.jit(run, donate_argnums=0).lower(jnp.zeros((clients, numbers))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < clients * numbers


@pytest.mark.parametrize("sick", [None, 1])
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize(("strategy", "chunk", "devices"), STRATEGIES)
def test_parts_are_contributions_to_several_slots(strategy, chunk, devices, chosen, sick):
    """Fault: a client of whom only the second part is NaN leaves its first one in the sums."""
    all_clients = population(strategy, chunk, devices)

    def value(client, number):
        found = client.data.x.sum() * (1 + number.astype(jnp.float32))
        return jnp.where((client.index == SICK) & (sick == number), jnp.nan, found)

    def weight(number):
        return 0.5 + number.astype(jnp.float32)

    @jax.jit
    def run(all_clients):
        cohort = cohort_of(all_clients, chosen)
        in_parts = parallel.for_each_client(
            lambda client: client.index,
            cohort,
            num_slots=3,
            parts=3,
            reduce=lambda client, output, number: (
                Contribution(number, weight(number), {"a": value(client, number)}),
                number + output,
            ),
            collect=lambda output, further: (output, further),
        )
        numbers = jnp.arange(3)
        whole = parallel.for_each_client(
            lambda client: (client.index, jax.vmap(lambda number: value(client, number))(numbers)),
            cohort,
            num_slots=3,
            reduce=lambda output: Contribution(numbers, weight(numbers), {"a": output[1]}),
            collect=lambda output: (output[0], output[0] + numbers),
        )
        return in_parts, whole

    in_parts, whole = run(all_clients)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), in_parts, whole)
    assert int(in_parts.reduced.num_rejected) == (sick is not None)


@pytest.mark.parametrize("slots", [(), (2,)])
@pytest.mark.parametrize("shape", [(), (3, 2), (0,)])
def test_sums_are_the_same_in_both_forms(shape, slots):
    """One is a TPU's alone. Who counts nothing has NaN; of several slots, in one."""
    rng = np.random.default_rng(0)
    weights = rng.uniform(size=(7, *slots, 3)).astype(np.float32)
    rows = rng.normal(size=(7, *slots, *shape)).astype(np.float32)
    weights[(4, 0) if slots else 4] = 0.0
    expected = np.einsum("ck,c...->k...", weights.reshape(-1, 3), rows.reshape(weights.size // 3, *shape))
    rows[(4, 0) if slots else 4] = np.nan
    for form in (contributions._sums, contributions._product):
        np.testing.assert_allclose(form(jnp.asarray(weights), jnp.asarray(rows)), expected, rtol=1e-5, atol=1e-6)
