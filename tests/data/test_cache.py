import multiprocessing

import numpy as np
import pytest

from fedjax_cluster.data import cache


def _arrays(fill: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((50, 20, 20), fill, np.uint8), np.full(50, fill)


def _write_again_and_again(fill: int) -> None:
    for _ in range(60):
        cache.write("shared", *_arrays(fill))


def test_what_is_written_is_read_back_mapped(cache_folder):
    assert cache.read("entry") is None
    assert cache.write("entry", *_arrays(7))
    x, y = cache.read("entry")
    assert isinstance(x, np.memmap)
    np.testing.assert_array_equal(x, _arrays(7)[0])
    np.testing.assert_array_equal(y, _arrays(7)[1])


def test_a_pair_that_does_not_belong_together_is_taken_for_absent(cache_folder):
    cache.write("one", *_arrays(1))
    cache.write("two", *_arrays(2))
    (cache_folder / "one.npz").replace(cache_folder / "two.npz")
    assert cache.read("two") is None


@pytest.mark.slow
def test_writers_and_a_reader_at_once(cache_folder):
    # Two processes write different values under one name; a reader may find nothing, but never a mixture.
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write_again_and_again, args=(fill,)) for fill in (1, 2)]
    for writer in writers:
        writer.start()
    found = 0
    while any(writer.is_alive() for writer in writers):
        if (entry := cache.read("shared")) is not None:
            found += 1
            assert len(np.unique(entry[0])) == 1
            assert entry[0][0, 0, 0] == entry[1][0]
    assert found
    assert all(writer.exitcode == 0 for writer in writers)
    assert sorted(file.name for file in cache_folder.iterdir()) == ["shared.npy", "shared.npz"]


def test_a_failed_write_leaves_the_old_entry_and_no_rubbish(cache_folder, monkeypatch):
    cache.write("entry", *_arrays(3))

    def full_disk(file, array):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full_disk)
    assert not cache.write("entry", *_arrays(4))
    np.testing.assert_array_equal(cache.read("entry")[0], _arrays(3)[0])
    assert len(list(cache_folder.iterdir())) == 2


def test_arrays_that_are_not_contiguous(cache_folder):
    x = np.arange(24, dtype=np.uint8).reshape(4, 6).T
    assert cache.write("entry", x, np.arange(6))
    np.testing.assert_array_equal(cache.read("entry")[0], x)


@pytest.mark.parametrize("kind", ["object", "other"])
def test_foreign_files_are_not_executed(cache_folder, kind):
    cache_folder.mkdir()
    np.save(cache_folder / "entry.npy", np.array([{}], object) if kind == "object" else np.arange(3))
    np.savez(cache_folder / "entry.npz", labels=np.arange(3), checksum=0)
    assert cache.read("entry") is None


def test_without_a_home_nothing_is_kept_and_an_unknown_one_is_named(monkeypatch):
    """As of a container's user without a name."""

    def nobody(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache.Path, "expanduser", nobody)
    monkeypatch.delenv("FEDJAX_CLUSTER_CACHE", raising=False)
    assert not cache.write("entry", *_arrays(1))
    assert cache.read("entry") is None
    assert not any(kept.files for kept in cache.contents())
    monkeypatch.setenv("FEDJAX_CLUSTER_CACHE", "~nobody/x")
    with pytest.raises(ValueError, match="FEDJAX_CLUSTER_CACHE is ~nobody/x, but whose home that is is not known"):
        cache.read("entry")
