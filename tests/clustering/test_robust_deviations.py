"""Robust deviations against SciPy's, and what few clients can do to them."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_cluster.clustering import robust_deviations


@settings(max_examples=40)
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=20), st.data())
def test_it_is_scipys_deviation_of_those_that_count(values, data):
    values = np.array(values, np.float32)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    found = np.asarray(robust_deviations(values, mask))
    assert not found[~mask].any()
    if not mask.any():
        return
    unit = scipy.stats.median_abs_deviation(values[mask], scale="normal")
    away = values[mask] - np.median(values[mask])
    expected = np.where(away == 0, 0.0, away / unit) if unit else np.sign(away) * np.where(away == 0, 0.0, np.inf)
    np.testing.assert_allclose(found[mask], expected, rtol=1e-5)


def test_less_than_half_cannot_hide():
    values = np.concatenate([np.linspace(0, 1, 11), np.full(9, 1e12)])
    assert (np.asarray(robust_deviations(values))[11:] > 1e6).all()
    assert (np.abs(np.asarray(robust_deviations(values))[:11]) < 3.5).all()


def test_of_nobody_nothing_is_said():
    assert robust_deviations(np.zeros(0)).shape == (0,)


def test_values_that_are_not_finite_are_refused_where_they_count():
    values = jnp.array([1.0, jnp.nan, 2.0])
    assert np.isfinite(robust_deviations(values, jnp.array([True, False, True]))).all()
    with pytest.raises(ValueError, match="values"):
        robust_deviations(values)
