"""Which of a table's differences are more than chance."""

import numpy as np
import pytest

from fedjax_cluster.report import significance


@pytest.mark.parametrize("differences", [0.0, 0.1])
def test_equal_differences_are_certain_of_nothing(differences):
    """Of their spread nothing is known; p was 0."""
    values = np.asarray([[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]]) - [[0.0], [differences]]
    assert significance.paired_tests(values, 0)[1] == (None if differences else (1.0, 3))
