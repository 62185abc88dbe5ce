"""Where JAX computes with 64 bits: what is given in 32 stays so, and what is given in 64 is not rounded."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import aggregation, privacy
from fedjax_cluster.nn import losses

RULES = ("geometric-median", "krum", "multi-krum", "trimmed-mean", "median", "bulyan")


@contextlib.contextmanager
def wide_and_strict():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_rules_give_what_they_give_in_32_bits(name):
    value = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)

    def combined():
        rows = aggregation.Rows({"w": jnp.asarray(value)}, jnp.zeros(9, jnp.int32), jnp.ones(9, jnp.float32))
        return aggregation.named(name).combine(rows, 1)["w"]

    narrow = combined()
    with wide_and_strict():
        wide = combined()
    assert wide.dtype == narrow.dtype == jnp.float32
    np.testing.assert_allclose(wide, narrow, rtol=1e-6)


def test_what_is_shown_in_private_is_the_same():
    how = {"clip": 1.0, "noise_multiplier": 1.0, "clustering_clip": 1.0, "clustering_noise_multiplier": 1.0}
    private, message = privacy.gaussian(**how, delta=1e-5), np.ones(3, np.float32)
    narrow = private.shown(jax.random.key(0), jnp.asarray(message))
    with wide_and_strict():
        wide = private.shown(jax.random.key(0), jnp.asarray(message))
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, narrow, rtol=1e-6)


def test_metrics_are_strict_and_targets_are_not_rounded():
    with wide_and_strict():
        predictions = jnp.array([[0.9, 0.1], [0.2, 0.8]], jnp.float32)
        found = losses.classification_metrics(predictions, jnp.array([0, 1], jnp.int32), jnp.ones(2, bool))
        assert (float(found["accuracy"]), found["loss"].dtype) == (1.0, jnp.float32)
        many = jnp.array([[123_456_789.0]])
        assert float(losses.squared_error(many, many)[0]) == 0.0
