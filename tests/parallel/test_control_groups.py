"""Limits of containers and schedulers on memory, in files as Linux has them."""

import math

import pytest

from fedjax_cluster import parallel
from fedjax_cluster.parallel import control_groups
from fedjax_cluster.parallel.control_groups import OF_ONE, OF_TWO, memory_of_group


def group(folder, files, limit, used=None, cached=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[0]).write_text(f"{limit}\n")
    if used is not None:
        (folder / files[1]).write_text(f"{used}\n")
        idle, active = files[2]
        (folder / "memory.stat").write_text(f"anon 1\n{idle} {cached // 4}\n{active} {cached - cached // 4}\n")


@pytest.fixture
def system(tmp_path, monkeypatch):
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")
    monkeypatch.setattr(control_groups, "MOUNTED", tmp_path / "mounted")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "base", "files"),
    [("0::/job/step\n", "mounted", OF_TWO), ("5:cpu:/x\n4:cpuset,memory:/job/step\n", "mounted/memory", OF_ONE)],
)
def test_the_tightest_of_all_groups_counts(system, line, base, files):
    """Copies of files can go; of two limits one is the tighter, and the other leaves less."""
    (system / "own").write_text(line)
    assert memory_of_group() == (math.inf, math.inf)
    group(system / base, files, "max" if files is OF_TWO else 2**63 - 4096, 10**9)
    group(system / base / "job", files, 16 * 10**9, 15 * 10**9, 10**9)
    group(system / base / "job" / "step", files, 8 * 10**9, 10**9)
    assert memory_of_group() == (8e9, 2e9)


def test_a_container_sees_its_own_group_at_the_top(system):
    (system / "own").write_text("0::/kubepods/not/here\n")
    group(system / "mounted", OF_TWO, 4 * 10**9, 3 * 10**9)
    assert memory_of_group() == (4e9, 1e9)


def test_what_cannot_be_read_limits_nothing(system):
    assert memory_of_group() == (math.inf, math.inf)
    (system / "own").write_text("0::/\n")
    group(system / "mounted", OF_TWO, "max")
    assert memory_of_group() == (math.inf, math.inf)


def test_memory_is_what_the_group_has(system):
    (system / "own").write_text("0::/\n")
    group(system / "mounted", OF_TWO, 5 * 10**6, 2 * 10**6)
    assert (parallel.device_memory(), parallel.memory_left()) == (5e6, 3e6)
