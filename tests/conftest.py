"""Strict arithmetic in every test, and two CPU devices, so that sharded code is exercised everywhere."""

import jax
import pytest

from fedjax_cluster import parallel

parallel.use_all_cores(2)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Keeps tests away from the user's cache of data sets."""
    monkeypatch.setenv("FEDJAX_CLUSTER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
