"""What FlexCFL compares clients by, against its definitions."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fedjax_cluster import clustering
from tests.reference import flexcfl as reference


def updates(count, width, seed):
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


@settings(max_examples=10)
@given(st.integers(0, 2**16), st.integers(0, 2))
def test_cosines_with_leading_directions_and_differences_of_cosines(seed, masked):
    """Rows of who does not count are far longer than all others."""
    own = updates(6, 9, seed)
    given, mask = np.concatenate([own, 1e3 * updates(2, 9, seed + 1)]), np.arange(8) < 6
    if masked == 0:
        given, mask = own, None
    elif masked == 1:
        given, mask = given[::-1], mask[::-1]
    gram, counts = given.astype(np.float64) @ given.T.astype(np.float64), slice(None) if mask is None else mask
    found = np.asarray(clustering.decomposed_cosines(gram.astype(np.float32), 3, mask))
    expected = reference.directions(given[counts].astype(np.float64), 3)
    np.testing.assert_allclose(np.abs(found[counts]), np.abs(expected), atol=2e-4)
    np.testing.assert_allclose(found[counts] @ found[counts].T, expected @ expected.T, atol=5e-4)
    cosines = clustering.cosine_similarity(given, mask)
    apart = np.asarray(clustering.similarity_differences(cosines, mask))
    np.testing.assert_allclose(
        apart[counts][:, counts], reference.differences(given[counts].astype(np.float64)), atol=1e-5
    )
    np.testing.assert_array_equal(apart, apart.T)
    if mask is not None:
        assert not found[~mask].any()
        assert not apart[~mask].any()


def test_an_update_of_zero_has_no_direction_and_length_does_not_count():
    rows = np.array([[3.0, 0.0], [0.0, 0.0], [1e-3, 0.0], [0.0, 2.0]], np.float32)
    found = np.asarray(clustering.decomposed_cosines(rows @ rows.T, 2))
    np.testing.assert_allclose(found, [[1, 0], [0, 0], [1, 0], [0, 1]], atol=1e-5)
    # Two directions there are, three are asked for.
    np.testing.assert_allclose(clustering.decomposed_cosines(rows @ rows.T, 3)[:, 2], 0.0, atol=1e-3)
    np.testing.assert_array_equal(clustering.similarity_differences(np.eye(2, dtype=np.float32)), np.zeros((2, 2)))


@pytest.mark.parametrize("longer", [1, 100, 300])
def test_directions_of_updates_far_shorter_than_others(longer):
    """As far as the docstring says: lengths are squared in the Gram matrix, and then divided by."""
    rng = np.random.default_rng(0)
    base, group = np.linalg.qr(rng.normal(size=(2000, 3)))[0].T, rng.permutation(np.repeat(np.arange(3), 4))
    short = base[0] + base[group] + 0.1 * rng.normal(size=(12, 2000)) / np.sqrt(2000)
    long = longer * rng.uniform(0.8, 1.2, (12, 1)) * base[0]
    rows = np.where(group[:, None] == 0, long, short).astype(np.float32) / longer
    found = np.asarray(clustering.decomposed_cosines(rows @ rows.T, 3))
    expected = reference.directions(rows.astype(np.float64), 3)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=0.02)


def test_similarities_must_be_symmetric_and_finite():
    for bad, why in (([[1.0, 0.5], [0.4, 1.0]], "symmetric"), ([[1.0, np.nan], [np.nan, 1.0]], "NaN")):
        with pytest.raises(ValueError, match=why):
            clustering.similarity_differences(np.array(bad, np.float32))
