"""Strict arithmetic in every test, and two CPU devices, so that sharded code is exercised everywhere."""

import functools
import gc

import hypothesis
import jax
import pytest

from fedjax_cluster import parallel

parallel.use_all_cores(2)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tests time nothing: the first example of a property compiles, and a busy machine is slow.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# Compilation is most of a test's time; tests marked `optimized` get the programs that users run.
jax.config.update("jax_disable_most_optimizations", True)
# XLA's older code generator takes a third of the newer one's time.
QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
quick = dict(QUICK)


def compile_quickly():
    """Adds `quick` to the options of every compilation.

    XLA_FLAGS would give them to `optimized` tests, and to the processes that tests start, as well. With a release of
    JAX that does not know them, or keeps its function elsewhere, tests are slower, not wrong.
    """
    try:
        jax.jit(lambda x: x).lower(0.0).compile(compiler_options=QUICK)
        from jax._src import compiler

        own = compiler.get_compile_options
    except (jax.errors.JaxRuntimeError, ImportError, AttributeError):
        return

    def options(*args, env_options_overrides=None, **kwargs):
        return own(*args, env_options_overrides={**quick, **(env_options_overrides or {})}, **kwargs)

    compiler.get_compile_options = options


compile_quickly()


def share_contexts():
    """One MLIR context for the programs of a file, where JAX makes one for each.

    A context's dialects take a quarter of a small program's time, and a new one goes through all that are still alive.
    """
    try:
        from jax._src.interpreters import mlir
        from jax._src.lib.mlir import ir

        own, shared = mlir.make_ir_context, functools.cache(mlir.make_ir_context)
    except (ImportError, AttributeError):
        return functools.cache(lambda: None)

    def context():
        # What is lowered while another program is would become a part of that one.
        return shared() if ir.Context.current is None else own()

    mlir.make_ir_context = context
    return shared


context = share_contexts()


def pytest_configure(config):
    """Compiled programs are kept for the other worker, the slow pass and the next run."""
    if (cache := getattr(config, "cache", None)) is not None:
        parallel.enable_compilation_cache(cache.mkdir("compiled"), whole=False)


MOST_MAPPINGS, MOST_BETWEEN_FILES = 35_000, 20_000  # of memory, which compiled programs take
TESTS_BETWEEN_COUNTS = 10


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test downloads a data set."""
    monkeypatch.setenv("FEDJAX_CLUSTER_OFFLINE", "1")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Keeps tests away from the user's cache of data sets."""
    monkeypatch.setenv("FEDJAX_CLUSTER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def in_an_empty_directory(tmp_path, monkeypatch):
    """For the command line within the tests' process."""
    monkeypatch.chdir(tmp_path)
    # The command prepares JAX itself; here the tests have done it.
    monkeypatch.setattr("fedjax_cluster.cli._prepare_jax", lambda: None)


def pytest_collection_modifyitems(items):
    """Tests marked `optimized` come last in their file: they have no use for what the others compiled."""
    items.sort(key=lambda item: "optimized" in item.keywords)


def pytest_collection_finish():
    """What was imported stays; what is traced comes and goes, so that cycles are looked for less often."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def optimisations(request):
    """Full compilation for tests marked `optimized`."""
    fully = "optimized" in request.keywords
    if fully == bool(quick):
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", not fully)
        quick.clear()
        quick.update({} if fully else QUICK)


@pytest.fixture(params=["quick", pytest.param("optimized", marks=[pytest.mark.optimized, pytest.mark.slow])])
def compilation(request):
    """For tests whose values must hold compiled either way; only the slow pass takes the time to optimise."""
    return request.param


def pytest_runtest_teardown(item, nextitem):
    """Lets go of compiled programs before they are too many, rather between two files than within one."""
    session = item.session
    session.tests_done = getattr(session, "tests_done", 0) + 1
    leaves_file = nextitem is None or nextitem.path != item.path
    if leaves_file:
        context.cache_clear()
    if leaves_file or session.tests_done % TESTS_BETWEEN_COUNTS == 0:
        parallel.release_programs(MOST_BETWEEN_FILES if leaves_file else MOST_MAPPINGS)
