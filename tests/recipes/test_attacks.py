"""The study of attacks: what it goes through, and what is counted of a run."""

import numpy as np
import pytest

from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.faults import FAULTS
from fedjax_cluster.recipes import attacks


def test_every_method_fault_and_rule_is_gone_through_and_attackers_of_every_share():
    assert set(attacks.METHODS) == set(REGISTRY)
    cases = attacks.cases(quick=False)
    assert len(cases) == len(set(cases))
    every = {**attacks.ATTACKS, **attacks.BAD_LUCK}
    assert {type(fault) for fault in every.values()} == set(FAULTS.values())
    assert {(name, rule) for name, rule, share in cases if share == 0.2} == {
        (n, r) for n in every for r in attacks.RULES
    }
    for rule in attacks.DRAWN:
        for name in attacks.ATTACKS:
            assert sorted(share for of, by, share in cases if (of, by) == (name, rule)) == [0.1, 0.2, 0.3, 0.4]


@pytest.mark.slow
def test_figures_are_of_the_honest_and_a_median_withstands_what_a_mean_does_not():
    none, mean, median = (
        attacks.found_by("fedavg", case, 0, rounds=4)
        for case in (("none", "mean", 0.0), ("sign flip", "mean", 0.2), ("sign flip", "median", 0.2))
    )
    assert none.finite == mean.finite == median.finite == 1.0
    assert np.isnan(none.agreement)
    assert none.accuracy > mean.accuracy + 20
    assert median.accuracy > mean.accuracy + 10


@pytest.mark.parametrize("case", [("disguise", "mean", 0.2), ("schism", "mean", 0.2)])
def test_what_a_method_has_no_place_for_is_left_out(case):
    assert attacks.found_by("fedavg", case, 0, rounds=2) is None
    assert attacks.found_by("local_only", ("none", "median", 0.0), 0, rounds=2) is None


def test_pictures_show_the_shares_by_attack_and_the_matrix():
    def of_method(base):
        return {case: [attacks.Found(base - 100 * case[2], 0.5, 4.0, 1.0)] for case in attacks.cases(quick=False)}

    drawn = attacks.pictures({"ifca": of_method(90.0), "cfl": of_method(80.0)})
    assert set(drawn) == {"", "accuracy-median", "ari-mean", "ari-median", "matrix"}
    panel = drawn[""].axes[0]
    assert panel.get_title() == "sign flip"
    np.testing.assert_allclose(panel.images[0].get_array(), [[90, 80, 70, 60, 50], [80, 70, 60, 50, 40]])
    np.testing.assert_allclose(drawn["matrix"].axes[0].images[0].get_array()[:, 0], [90, 80])
