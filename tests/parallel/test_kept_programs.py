"""Programs that a folder keeps whole give what compiled ones give, and are found where all that decides is equal."""

import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_cluster import described, local, nn, parallel
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.parallel import kept_programs
from fedjax_cluster.simulation.loop import simulate
from tests.federations import blobs

traced = []
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


@parallel.kept_program(static_argnames="times")
def spectrum(x, *, times=1):
    """Calls LAPACK, which a process that traces nothing has not made ready."""
    traced.append("spectrum")
    return {"values": jnp.linalg.eigh(x @ x.T)[0] * (times if isinstance(times, int) else times(1))}


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


def test_a_kept_program_is_neither_traced_nor_compiled_again(folder):
    first = spectrum(ROWS)
    assert len(files(folder)) == 1
    assert traced
    fresh(folder)
    again = spectrum(ROWS)
    assert not traced
    chex.assert_trees_all_equal(again, first)
    np.testing.assert_allclose(again["values"], np.linalg.eigvalsh(ROWS @ ROWS.T), atol=1e-4)


def test_lapack_is_ready_before_a_kept_program_calls_it(folder, monkeypatch):
    spectrum(ROWS)
    fresh(folder)
    readied = []
    monkeypatch.setattr(kept_programs, "_prepare_lapack", lambda: readied.append(1))
    spectrum(ROWS)
    assert readied


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
    for number in range(3):
        (folder / f"{number}.program").write_bytes(bytes(1000))
        os.utime(folder / f"{number}.program", (number, number))
    monkeypatch.setattr(kept_programs, "MOST_BYTES", 2500)
    kept_programs._make_room(folder)
    assert [path.name for path in files(folder)] == ["1.program", "2.program"]


def test_a_folder_that_cannot_be_written_is_no_hindrance(folder):
    (folder / "file").touch()
    kept_programs.keep_in(folder / "file" / "inside")
    assert spectrum(ROWS)["values"].shape == (4,)


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
