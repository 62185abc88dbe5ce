"""Compiled programs are let go before a process has too many of them."""

import gc
import subprocess
import sys

import chex
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import fedjax_cluster as fc
from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms import fedavg
from fedjax_cluster.algorithms.round import init_clusters
from fedjax_cluster.parallel import programs
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import DatasetInfo
from tests.federations import blobs

MOST_PROGRAMS = 50

pytestmark = pytest.mark.skipif(not programs.MAPPINGS.exists(), reason="this system does not count mappings")


def test_programs_are_let_go_when_there_are_too_many(monkeypatch):
    calls = []
    monkeypatch.setattr(jax, "clear_caches", lambda: calls.append(1))
    assert not parallel.release_programs(programs.memory_mappings() + 1000)
    assert not parallel.release_programs()
    assert not calls
    assert parallel.release_programs(programs.memory_mappings() - 100)
    assert len(calls) == 1


@pytest.mark.slow
def test_what_runs_once_compiles_quickly_to_the_same_bits():
    info = DatasetInfo("noise", (5,), 3)
    # The fast tests' programs are not optimised at all.
    options = {"xla_backend_optimization_level": 3}
    fully = jax.jit(init_clusters, static_argnums=(1, 2, 3), compiler_options=options)
    arguments = jax.random.key(0), nn.mlp(hidden=(4,)), info, 2
    quickly = parallel.compile_quickly(init_clusters, static_argnames=("model", "info", "num_clusters"))
    assert parallel.compile_quickly(init_clusters, ("model", "info", "num_clusters")) is quickly  # compiled once
    chex.assert_trees_all_equal(quickly(*arguments), fully(*arguments))


@pytest.mark.slow
def test_a_short_run_has_few_programs():
    """Not one for every operation of an `init`, each of which takes its time to compile or to read."""
    counted = """
import jax
from jax import monitoring
names = []
monitoring.register_event_duration_secs_listener(lambda name, _, **more: names.append(name))
import dataclasses
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster import local, nn
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.types import DatasetInfo
from tests.federations import blobs
for name in ("cfl", "fedgwc", "gradient_loss"):
    names.clear()
    method = REGISTRY[name](nn.linear(), local=local.sgd(0.1, batch_size=5, epochs=1), clusters=2)
    if name == "gradient_loss":  # its starts train clients before the first round
        method = dataclasses.replace(method, start="random")
    simulate(method, blobs(), rounds=2, progress=False)
    print(name, sum("jaxpr_to_mlir" in event for event in names))
    jax.clear_caches()
"""
    done = subprocess.run([sys.executable, "-c", counted], capture_output=True, text=True, check=True)
    counts = {name: int(count) for name, count in (line.split() for line in done.stdout.splitlines())}
    assert len(counts) == 3
    assert max(counts.values()) <= MOST_PROGRAMS, counts


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
