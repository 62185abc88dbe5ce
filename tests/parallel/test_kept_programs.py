"""Programs that a folder keeps whole give what compiled ones give, and are found where all that decides is equal."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_cluster import described, local, nn, parallel, server
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.parallel import kept_programs
from fedjax_cluster.simulation.loop import simulate
from tests.devices import needs_two, on_a_cpu
from tests.federations import blobs

pytestmark = on_a_cpu("programs are kept")
traced = []
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


@parallel.kept_program(static_argnames="times")
def spectrum(x, *, times=1):
    """Calls LAPACK, which a process that traces nothing has not made ready."""
    traced.append("spectrum")
    return {"values": jnp.linalg.eigh(x @ x.T)[0] * (times(1) if callable(times) else times)}


@parallel.kept_program(donate_argnames="x")
def halved(x):
    traced.append("halved")
    return x / 2


@parallel.kept_program()
def of_the_host(x):
    traced.append("of_the_host")
    return jax.pure_callback(lambda value: np.asarray(value) + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in which programs are kept, of functions of these tests too."""
    monkeypatch.setattr(described, "KNOWN_PACKAGES", (*described.KNOWN_PACKAGES, __name__.partition(".")[0]))
    fresh(tmp_path)
    yield tmp_path
    kept_programs.keep_in(None)
    kept_programs.forget_loaded()


def fresh(folder):
    """As in another process, but for LAPACK."""
    kept_programs.forget_loaded()
    jax.clear_caches()
    kept_programs.keep_in(folder)
    traced.clear()


def files(folder):
    return sorted(folder.glob("*.program"))


@pytest.mark.slow
def test_a_kept_program_is_neither_traced_nor_compiled_again(folder):
    first = spectrum(ROWS)
    assert len(files(folder)) == 1
    assert traced
    fresh(folder)
    again = spectrum(ROWS)
    assert not traced
    chex.assert_trees_all_equal(again, first)
    np.testing.assert_allclose(again["values"], np.linalg.eigvalsh(ROWS @ ROWS.T), atol=1e-4)


@pytest.mark.slow
def test_lapack_is_ready_before_a_kept_program_calls_it(folder, monkeypatch):
    spectrum(ROWS)
    fresh(folder)
    readied = []
    monkeypatch.setattr(kept_programs, "_prepare_lapack", lambda: readied.append(1))
    spectrum(ROWS)
    assert readied


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", ["shape", "dtype", "weak type", "static", "place", "setting", "source", "processor", "flags"]
)
def test_whatever_decides_a_program_tells_it_apart(folder, monkeypatch, change):
    spectrum(jnp.asarray(ROWS))
    fresh(folder)
    if change == "shape":
        spectrum(jnp.asarray(ROWS[:2]))
    elif change == "dtype":
        spectrum(ROWS.astype(np.int32))
    elif change == "weak type":
        spectrum(jnp.full((4, 3), 1.0))
    elif change == "static":
        spectrum(jnp.asarray(ROWS), times=2)
    elif change == "place":
        spectrum(jax.device_put(ROWS, NamedSharding(parallel.client_mesh(), PartitionSpec("clients"))))
    elif change == "setting":
        with jax.default_matmul_precision("bfloat16"):
            spectrum(jnp.asarray(ROWS))
    else:
        surroundings = kept_programs._surroundings()
        place = {"source": 0, "processor": -1, "flags": 4}[change]
        surroundings = [*surroundings]
        surroundings[place] = "another"
        monkeypatch.setattr(kept_programs, "_surroundings", lambda: surroundings)
        spectrum(jnp.asarray(ROWS))
    assert traced
    assert len(files(folder)) == 2


@pytest.mark.parametrize(
    ("owner", "name", "own"),
    [
        (local.sgd, "run", lambda self, *arguments: None),
        (server, "weighted_mean", jax.jit(lambda *arguments: None)),
        (server, "weighted_mean", functools.wraps(server.weighted_mean)(lambda *arguments: None)),
    ],
    ids=["method", "jitted", "wrapped"],
)
def test_a_package_with_functions_of_somebody_else_finds_no_kept_program(folder, monkeypatch, owner, name, own):
    """A variant that was tried in a notebook was given the program, and the figures, of what it took the place of."""
    halved(jnp.ones(3))
    fresh(folder)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, own)
        halved(jnp.ones(3))
        assert traced
        assert len(files(folder)) == 1
    fresh(folder)
    halved(jnp.ones(3))
    assert not traced


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign"])
def test_a_damaged_program_is_compiled_anew(folder, damage):
    first = spectrum(ROWS)
    (path,) = files(folder)
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    path.write_bytes({"cut": content[:1000], "empty": b"", "foreign": b"not a program" * 10}.get(damage, content))
    fresh(folder)
    chex.assert_trees_all_equal(spectrum(ROWS), first)
    assert traced
    fresh(folder)
    spectrum(ROWS)
    assert not traced, "it was written again"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="this system has no users by number")
def test_what_another_user_has_put_there_is_not_run(folder, monkeypatch):
    spectrum(ROWS)
    fresh(folder)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    spectrum(ROWS)
    assert traced


def test_what_has_no_value_is_not_kept(folder):
    x = spectrum(ROWS, times=lambda one: 2 * one)
    of_the_host(jnp.ones(3))
    assert not files(folder)
    np.testing.assert_allclose(x["values"], 2 * np.asarray(spectrum(ROWS)["values"]))


def test_functions_of_others_are_not_kept(folder, monkeypatch):
    """The source that a program is looked up by is this package's."""
    monkeypatch.setattr(described, "KNOWN_PACKAGES", described.KNOWN_PACKAGES[:-1])
    spectrum(ROWS)
    assert not files(folder)


def test_functions_of_one_name_are_not_taken_for_one_another(folder):
    def times(factor):
        return parallel.kept_program()(lambda x: x * factor)

    assert [float(times(factor)(2.0)) for factor in (3, 5)] == [6, 10]
    quickly = [parallel.compile_quickly(function) for function in (lambda x: x + 1, lambda x: x * 10)]
    assert [float(function(2.0)) for function in quickly] == [3, 20]
    assert not files(folder)


def test_a_wrapper_is_not_taken_for_what_it_wraps(folder):
    """It has its name, and JAX's own transformations copy it as well."""

    @functools.wraps(nn.losses.cross_entropy)
    def half(*given):
        return nn.losses.cross_entropy(*given) / 2

    for value in (half, jax.grad(jax.nn.softplus), jax.vmap(optax.squared_error)):
        assert not described.described(value)[1], value
    assert described.described(nn.losses.cross_entropy)[1]


def test_equal_options_of_other_types_are_others(folder):
    for times in (1, 1.0):
        spectrum(ROWS, times=times)
    assert len(files(folder)) == 2
    assert described.described(np.float64(0.5), modules=True) != described.described(0.5, modules=True)
    assert described.described({1: 2}, modules=True) != described.described({"1": 2}, modules=True)


def test_a_source_that_was_edited_after_it_was_imported_is_no_key(folder, monkeypatch):
    monkeypatch.setattr(kept_programs, "STARTED", 0.0)
    kept_programs._surroundings.cache_clear()
    spectrum(ROWS)
    kept_programs._surroundings.cache_clear()
    assert not files(folder)


@pytest.mark.parametrize("missing", ["processor", "library", "source"])
def test_where_the_surroundings_are_not_known_nothing_is_kept(folder, monkeypatch, tmp_path, missing):
    kept_programs._surroundings.cache_clear()
    if missing == "processor":
        monkeypatch.setattr(kept_programs, "PROCESSOR", tmp_path / "none")
    elif missing == "library":
        monkeypatch.setattr(kept_programs, "LIBRARIES", ("jax", "no_such_library"))
    else:
        monkeypatch.setattr(kept_programs, "PACKAGE", tmp_path / "none")
    spectrum(ROWS)
    kept_programs._surroundings.cache_clear()
    assert not files(folder)


def test_what_jax_has_compiled_before_is_compiled_for_the_folder_again(folder):
    """What JAX's cache gives back is read and written without an error, and fails when it is called."""
    spectrum.jitted(x=ROWS)
    jax.clear_caches()
    spectrum.jitted(x=ROWS)  # from JAX's cache, which the tests have
    first = spectrum(ROWS)
    fresh(folder)
    chex.assert_trees_all_equal(spectrum(ROWS), first)
    assert not traced


def test_threads_that_compile_at_once_leave_jax_as_it_was(folder):
    sizes = range(2, 8)
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda size: spectrum(ROWS[:, :2].repeat(size, 0)), sizes))
    assert jax.config.jax_enable_compilation_cache
    assert len(files(folder)) == len(sizes)
    fresh(folder)
    for size, values in zip(sizes, found, strict=True):
        chex.assert_trees_all_equal(spectrum(ROWS[:, :2].repeat(size, 0)), values)
    assert not traced


@needs_two
def test_devices_in_another_order_are_other_devices(folder):
    first, second = jax.devices()[:2]
    for number in range(2):
        for devices in ([first, second], [second, first]):
            mesh = parallel.client_mesh(devices)
            rows = jax.device_put(ROWS, NamedSharding(mesh, PartitionSpec("clients")))
            assert halved(rows).sharding.mesh.devices.flat[0] == devices[0]
        assert len(files(folder)) == 2
        assert bool(traced) == (number == 0)
        fresh(folder)


def test_where_only_shapes_are_asked_for_nothing_is_computed(folder):
    given = jnp.arange(4.0)
    assert jax.eval_shape(lambda: halved(given)).shape == (4,)
    assert not given.is_deleted()


def test_options_that_cannot_be_described_are_compiled_as_always(folder):
    class Shy:
        def __repr__(self):
            raise AttributeError("no name")

        def __call__(self, one):
            return 3

    assert spectrum(ROWS, times=Shy())["values"].shape == (4,)
    assert not files(folder)


def test_a_folder_that_can_only_be_read_is_read(folder, monkeypatch):
    spectrum(ROWS)
    fresh(folder)
    monkeypatch.setattr(os, "utime", lambda path: (_ for _ in ()).throw(OSError(30, "read-only file system")))
    spectrum(ROWS)
    assert not traced


def test_arguments_without_names_are_refused():
    with pytest.raises(TypeError, match="without names"):
        parallel.kept_program()(lambda *given: given)


def test_donated_arguments_are_given_up_by_kept_programs_too(folder):
    for number in range(2):
        fresh(folder)
        given = jnp.arange(4.0)
        np.testing.assert_array_equal(halved(given), [0, 0.5, 1, 1.5])
        assert given.is_deleted()
        assert bool(traced) == (number == 0)


def test_inside_another_program_nothing_is_kept(folder):
    inside = jax.jit(lambda x: spectrum(x)["values"])(ROWS)
    assert not files(folder)
    np.testing.assert_allclose(inside, spectrum(ROWS)["values"], atol=1e-4)


def test_debugging_and_a_run_without_compilation_see_every_operation(folder):
    with jax.disable_jit():
        spectrum(ROWS)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        halved(jnp.full(2, jnp.nan))
    assert not files(folder)


def test_programs_that_were_not_used_for_longest_make_room(folder, monkeypatch):
    (folder / ".0.program.under_way.program").touch()  # another process is writing
    for number in range(3):
        (folder / f"{number}.program").write_bytes(bytes(1000))
        os.utime(folder / f"{number}.program", (number, number))
    monkeypatch.setattr(kept_programs, "MOST_BYTES", 2500)
    kept_programs._make_room(folder)
    assert [path.name for path in files(folder)][1:] == ["1.program", "2.program"]


def test_a_folder_that_cannot_be_written_is_no_hindrance(folder):
    (folder / "file").touch()
    kept_programs.keep_in(folder / "file" / "inside")
    assert spectrum(ROWS)["values"].shape == (4,)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cfl_gp", "ifca", "flag"))]
)
def test_a_run_of_kept_programs_is_the_same_run(folder, name):
    """Also the next one, and one with another seed, for which nothing is compiled."""
    clusters = {} if name == "fedavg" else {"clusters": 4}
    method = REGISTRY[name](nn.linear(), local=local.sgd(0.1, batch_size=5, epochs=1), **clusters)
    federation, runs = blobs(), []
    for kept in (None, folder, folder):
        fresh(kept)
        runs.append(simulate(method, federation, rounds=3, eval_every=2, progress=False))
    count = len(files(folder))
    assert count >= 3
    for other in runs[1:]:
        chex.assert_trees_all_equal(parallel.fetched(other.state), parallel.fetched(runs[0].state))
        same = {key: value for key, value in other.history.items() if "seconds" not in key}
        chex.assert_trees_all_equal(same, {key: runs[0].history[key] for key in same})
    simulate(method, federation, rounds=5, seed=1, progress=False)
    assert len(files(folder)) == count
