"""The privacy budget that follows from what one client can move, and the noise."""

import dataclasses
import math

import pytest
import scipy.stats

from fedjax_cluster import privacy
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.privacy.gaussian import SHOWN
from fedjax_cluster.simulation.private_runs import budget_of
from tests.federations import blobs
from tests.private_methods import NOISY, PLAIN, SHOWING, build


def counted(event, accountant="rdp"):
    dp = pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
    from dp_accounting import rdp

    made = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    return made.compose(event(dp)).get_epsilon(1e-5)


@pytest.mark.parametrize(("z", "cohort", "rounds"), [(0.7, 1000, 1), (1.5, 1000, 60), (1.5, 100, 60), (4.0, 10, 1000)])
def test_epsilon_is_that_of_dp_accounting_for_the_same_parameters(z, cohort, rounds):
    def event(dp):
        one = dp.GaussianDpEvent(z)
        return dp.SelfComposedDpEvent(
            one if cohort == 1000 else dp.SampledWithoutReplacementDpEvent(1000, cohort, one), rounds
        )

    expected = counted(event)
    mechanism = dataclasses.replace(NOISY, noise_multiplier=z)
    found = privacy.spent(mechanism, clients=1000, cohort=cohort, rounds=rounds)
    assert found.epsilon == pytest.approx(expected, rel=1e-12)
    assert found[1:] == (1e-5, "rdp", rounds, 1000, cohort, 0)


def test_what_is_shown_is_counted_beside_the_means():
    mechanism = dataclasses.replace(NOISY, clustering_clip=1.0, clustering_noise_multiplier=3.0)

    def event(dp):
        means, shown = dp.GaussianDpEvent(1.5), dp.GaussianDpEvent(3.0)
        return dp.ComposedDpEvent([dp.SelfComposedDpEvent(means, 20), dp.SelfComposedDpEvent(shown, 10)])

    expected = counted(event)
    found = privacy.spent(mechanism, clients=50, cohort=50, rounds=20, shown=10)
    assert found.epsilon == pytest.approx(expected, rel=1e-12)
    silent = dataclasses.replace(mechanism, clustering_noise_multiplier=0.0)
    assert privacy.spent(silent, clients=50, cohort=50, rounds=20, shown=1).epsilon == math.inf


@pytest.mark.parametrize(("z", "rounds"), [(1.0, 1), (2.0, 10)])
def test_both_accountants_hold_the_exact_epsilon_of_gaussian_noise(z, rounds):
    """Balle & Wang 2018, Theorem 8, of one mechanism of multiplier z/√T; dp-accounting's own conventions aside."""
    pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
    shift = math.sqrt(rounds) / z

    def delta(epsilon):
        tail = scipy.stats.norm.cdf(-epsilon / shift - shift / 2)
        return scipy.stats.norm.cdf(shift / 2 - epsilon / shift) - math.exp(epsilon) * tail

    exact = scipy.optimize.brentq(lambda epsilon: delta(epsilon) - 1e-5, 0, 50)
    found = {}
    for accountant in ("rdp", "pld"):
        mechanism = dataclasses.replace(NOISY, noise_multiplier=z, accountant=accountant)
        found[accountant] = privacy.spent(mechanism, clients=9, cohort=9, rounds=rounds).epsilon
    assert exact <= found["pld"] <= exact * 1.01
    assert exact <= found["rdp"] <= exact * 1.15


def test_noise_is_found_for_a_budget():
    pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
    both, of = dataclasses.replace(NOISY, clustering_clip=1.0, clustering_noise_multiplier=3.0), {"rounds": 40}
    of |= {"clients": 100, "cohort": 100, "shown": 10}
    found = privacy.calibrated(both, 8.0, **of)
    assert privacy.spent(found, **of).epsilon == pytest.approx(8.0, rel=0.01)
    assert found.clustering_noise_multiplier == pytest.approx(2 * found.noise_multiplier)
    tighter = privacy.calibrated(dataclasses.replace(both, accountant="pld"), 8.0, **of)  # asked for 364 TiB
    assert 0.9 < tighter.noise_multiplier / found.noise_multiplier < 1
    assert privacy.spent(tighter, **of).epsilon == pytest.approx(8.0, rel=0.01)
    faint = dataclasses.replace(NOISY, noise_multiplier=1e-3, accountant="pld")
    assert privacy.spent(faint, clients=9, cohort=9, rounds=1).epsilon > 1e4
    for epsilon, mechanism, message in ((0.0, both, "epsilon is 0"), (math.nan, both, "epsilon is nan"),
                                        (8.0, both, "give as shown how"), (8.0, PLAIN, "or some noise")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            privacy.calibrated(mechanism, epsilon, clients=100, cohort=100, rounds=40)


@pytest.mark.parametrize(
    ("epsilon", "clients", "cohort", "rounds"),
    [
        pytest.param(8.0, 1000, 50, 100, marks=pytest.mark.slow),
        pytest.param(1.0, 1000, 50, 100, marks=pytest.mark.slow),
        (3.0, 100, 100, 40),
    ],
)
def test_no_more_is_spent_than_was_asked_for(epsilon, clients, cohort, rounds):
    """Whichever side the search ends on."""
    pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
    of = {"clients": clients, "cohort": cohort, "rounds": rounds}
    left = epsilon - privacy.spent(privacy.calibrated(NOISY, epsilon, **of), **of).epsilon
    assert 0 <= left < 1e-3 * epsilon


@pytest.mark.parametrize("z", [1.0, 3.0])
def test_a_secret_draw_never_costs_more_than_a_round_of_all(z):
    """The law of samples without replacement alone gives twice that for cohorts of nearly all."""
    pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
    mechanism, found = dataclasses.replace(NOISY, noise_multiplier=z), []
    for cohort in (100, 99, 60, 30, 5):
        found.append(privacy.spent(mechanism, clients=100, cohort=cohort, rounds=40).epsilon)
    assert found == sorted(found, reverse=True)
    assert found[0] == found[1] > found[-1]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"rounds": -3}, "rounds"),
        ({"shown": -1}, "shown"),
        ({"cohort": 0}, "cohort is 0, but there are 10 clients; give 1 to 10"),
        ({"cohort": 20}, "cohort is 20"),
        ({"clients": 0}, "clients"),
    ],
)
def test_impossible_numbers_spend_nothing(numbers, message):
    with pytest.raises(ValueError, match=message):
        privacy.spent(NOISY, **{"clients": 10, "cohort": 10, "rounds": 3, **numbers})


def test_only_a_secret_sample_is_counted_as_one():
    """Who shows something to a clustering is seen, and so is everybody where all take part."""
    pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")
    federation = blobs(clients=20)
    cohorts = {}
    for name in ("fedavg", "ifca", "fedem", "cfl_gp", "fedgwc", "cfl"):
        mechanism = dataclasses.replace(NOISY, **{**SHOWING, "clustering_noise_multiplier": 1.0})
        method = build(name, mechanism if REGISTRY[name].sends == SHOWN else NOISY, participation=0.3)
        cohorts[name] = budget_of(method, federation, 4)[5:]
    assert cohorts == {"fedavg": (6, 0), "ifca": (6, 0), "fedem": (6, 0)} | {
        "cfl_gp": (20, 2), "fedgwc": (20, 4), "cfl": (20, 4)
    }  # fmt: skip
    assert budget_of(build("fedavg", NOISY), federation, 4).cohort == 20
