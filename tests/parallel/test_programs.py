"""Compiled programs are let go before a process has too many of them."""

import gc

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import fedjax_cluster as fc
from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms import fedavg
from fedjax_cluster.parallel import programs
from fedjax_cluster.simulation.loop import simulate
from tests.federations import blobs

pytestmark = pytest.mark.skipif(not programs.MAPPINGS.exists(), reason="this system does not count mappings")


def test_programs_are_let_go_when_there_are_too_many(monkeypatch):
    calls = []
    monkeypatch.setattr(jax, "clear_caches", lambda: calls.append(1))
    assert not parallel.release_programs(programs.memory_mappings() + 1000)
    assert not parallel.release_programs()
    assert not calls
    assert parallel.release_programs(programs.memory_mappings() - 100)
    assert len(calls) == 1


def test_python_users_keep_compiled_programs_too(monkeypatch, tmp_path):
    before = {name: getattr(jax.config, name) for name in
              ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")}  # fmt: skip
    monkeypatch.setenv("FEDJAX_CLUSTER_CACHE", str(tmp_path))
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.jit(lambda x: x - 3)(1.0)
        assert fc.enable_compilation_cache() == tmp_path / "compiled"
        jax.jit(lambda x: x + 3)(1.0)
        assert any((tmp_path / "compiled").iterdir())
        assert fc.enable_compilation_cache(tmp_path / "other") == tmp_path / "compiled", "the first stays"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_nothing_is_let_go_where_the_system_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setattr(programs, "MAPPINGS", tmp_path / "none")
    assert not parallel.release_programs(0)
    monkeypatch.undo()
    monkeypatch.setattr(programs, "MOST_MAPPINGS", tmp_path / "none")
    assert not parallel.release_programs()


@pytest.mark.slow
def test_fresh_methods_leave_few_mappings(monkeypatch, tmp_path):
    """Each takes some 300 to 1 500; without release they add up."""
    jax.clear_caches()
    gc.collect()
    limit = programs.memory_mappings() + 3000
    (tmp_path / "most").write_text(str(int(limit / programs.SHARE)))
    monkeypatch.setattr(programs, "MOST_MAPPINGS", tmp_path / "most")
    federation, counts = blobs(), []
    for number in range(24):
        method = fedavg(nn.linear(), local=local.sgd(0.1 + number / 1000, batch_size=5, epochs=1))
        simulate(method, federation, rounds=1, progress=False)
        counts.append(programs.memory_mappings())
    assert max(counts) < limit + 1500
