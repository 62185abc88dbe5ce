"""Slow plain-NumPy versions of the package's functions, written from the definitions: the tests' oracles."""
