"""How many threads of OpenBLAS a command starts: they wait by spinning."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "given", "threads"),
    [
        ("list", {}, 1),
        ("bench", {}, None),
        ("list", {"OMP_NUM_THREADS": "2"}, 2),
        ("run", {"OPENBLAS_NUM_THREADS": "2"}, 2),
    ],
)
def test_a_command_starts_no_threads_that_spin(command, given, threads):
    """NumPy's are for whoever asks for them, and for the software that `bench` compares with."""
    text = f"import sys; sys.argv = ['fedjax-cluster', {command!r}]; import fedjax_cluster.__main__\n"
    text += "import numpy, threadpoolctl\nprint(*{each['num_threads'] for each in threadpoolctl.threadpool_info()"
    text += " if each['internal_api'] == 'openblas' and 'numpy' in each['filepath']})"
    outside = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", text], env=outside | given, capture_output=True, text=True, check=True)
    if not done.stdout.strip():
        pytest.skip("NumPy has no OpenBLAS here")
    expected = threads if threads is not None else os.cpu_count()
    assert int(done.stdout) == min(expected, os.cpu_count())
