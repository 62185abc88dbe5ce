"""A compiler that fails while a plan tries chunk sizes: what it had found, or one line."""

import jax
import pytest

import fedjax_cluster as fc
from fedjax_cluster import parallel
from fedjax_cluster.simulation import other_plans, planning
from fedjax_cluster.simulation.devices import target
from fedjax_cluster.simulation.planning import plan
from tests.simulation.test_planning import INFO, LINEAR


@pytest.fixture
def failing_compiler(monkeypatch):
    """Clients go in chunks, of which none fits; the compiler fails from the call of a given number on."""

    def install(first_failure, message):
        own, calls = planning._compile, []

        def compiled(*given):
            calls.append(given)
            if len(calls) >= first_failure:
                raise jax.errors.JaxRuntimeError(message)
            return own(*given)

        monkeypatch.setattr(planning, "_compile", compiled)
        monkeypatch.setattr(planning, "target", lambda device: target(device)._replace(memory=1000))
        chunked = parallel.client_mapping("chunked", None, None)
        monkeypatch.setattr(parallel, "client_mapping", lambda strategy, chunk_size, devices: chunked)

    return install


FAULT = "INTERNAL: Couldn't find output tile sizes"


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() != 2, reason="a device's share is that of two")
@pytest.mark.parametrize(("clients", "chunk"), [(100, 50), (400, 128)])
def test_what_compiled_before_a_fault_of_the_compiler_is_the_plan(failing_compiler, clients, chunk, monkeypatch):
    """For an H100 chunks of two clients end so, where 128 compile and do not fit."""
    monkeypatch.setattr(parallel, "MOST_AT_A_TIME", {"cpu": 128})
    failing_compiler(2, FAULT)
    found = plan(LINEAR, fc.PopulationShape(clients, 3, INFO))
    assert not found.fits
    assert found.memory is not None
    assert found.costs is not None
    assert (found.chunk, found.compilations) == (chunk, 2)
    assert found.why == "the compiler fails with 1 at a time"


def test_a_fault_of_the_compiler_is_one_line(failing_compiler):
    failing_compiler(1, FAULT)
    with pytest.raises(ValueError, match=r"clients at a time \(INTERNAL: Couldn.t.*; give another chunk_size"):
        plan(LINEAR, fc.PopulationShape(100, 3, INFO))


@pytest.mark.skipif(jax.device_count() != 2, reason="a device's share is that of two")
def test_what_never_fitted_is_said_to_need_more(failing_compiler):
    failing_compiler(1, "RESOURCE_EXHAUSTED: Ran out of memory")
    found = plan(LINEAR, fc.PopulationShape(100, 3, INFO))
    assert not found.fits
    assert found.memory is None
    assert found.chunk == 3  # 50, 12, 3
    assert "RESOURCE_EXHAUSTED" in found.advice[0]


def test_an_evaluation_that_does_not_compile_takes_fewer_at_a_time(monkeypatch):
    """Fault: no plan at all, though what the rounds take at a time compiles."""
    own, calls = other_plans._compiled, []

    def compiled(*given, **options):
        calls.append(given)
        if len(calls) == 1:
            raise jax.errors.JaxRuntimeError(FAULT)
        return own(*given, **options)

    monkeypatch.setattr(other_plans, "_compiled", compiled)
    monkeypatch.setattr(parallel, "MOST_AT_A_TIME", {"cpu": 16})
    chunked = parallel.client_mapping("chunked", None, None)
    monkeypatch.setattr(parallel, "client_mapping", lambda strategy, chunk_size, devices: chunked)
    method = fc.algorithms.fedavg(fc.nn.linear(), local=fc.local.sgd(0.1, batch_size=2, steps=1), participation=0.04)
    found = plan(method, fc.PopulationShape(100, 3, INFO, "float32", test_rows=5))
    assert [each.peak is not None for each in found.others] == [True]
    assert len(calls) == 2
