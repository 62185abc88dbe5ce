"""Benchmarks: `fedjax-cluster bench [SUITE]`."""
