"""Comparisons with other software, `python -m benchmarks.peers` in a checkout; needs the extra `peers`.

Imports nothing here: some of the processes that are timed load neither JAX nor PyTorch.
"""

RATE = 0.1  # the learning rate on both sides
