"""A method of one's own: its start is looked at, and an aggregation or a privacy that it forgets is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import local, nn, parallel
from fedjax_cluster.algorithms import REGISTRY, fedavg
from fedjax_cluster.algorithms import round as rounds
from fedjax_cluster.algorithms.method import AveragingMethod
from fedjax_cluster.local import client_key
from fedjax_cluster.privacy.gaussian import ONE, SHOWN
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.own_methods import _shows, _uses
from fedjax_cluster.simulation.segment import run_keys
from tests import private_methods
from tests.algorithms import test_protocol as protocol
from tests.federations import blobs

SLOW = [pytest.param(name, marks=pytest.mark.slow) if name != "ifca" else name for name in sorted(REGISTRY)]
GIVEN = {"aggregation": "median", "privacy": private_methods.NOISY}
PASSED = {
    "aggregation": lambda self, key, state: {"aggregation": self.aggregation},
    "privacy": lambda self, key, state: {"private": self.private(key, state.clusters)},
}


def method_that_passes(*names):
    class own(AveragingMethod, abstract=True):
        """Federated averaging, with what it hands on."""

        sends = ONE
        init = fedavg.init

        def step(self, rng_key, state, cohort):
            slot = rounds.cohort_labels(state, cohort)
            train = rounds.train_in_cluster(rng_key, self.update, self.model, state.clusters, state.round)
            passed = {key: value for name in names for key, value in PASSED[name](self, rng_key, state).items()}
            done = rounds.cluster_round(
                train, state.clusters, cohort, slot, optimizer=self.optimizer, weighting="examples", **passed
            )
            return state._replace(clusters=done.clusters, round=state.round + 1), done.info(cohort.mask)

    return own


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_step_forgets_is_refused(name):
    def run(*passed):
        method = method_that_passes(*passed)(
            nn.linear(), local=local.sgd(0.1, batch_size=4, steps=1), **{name: GIVEN[name]}
        )
        return simulate(method, blobs(clients=4), rounds=1, progress=False)

    (other,) = set(GIVEN) - {name}
    with pytest.raises(ValueError, match=f"^{name}.* is given, but the step of own never uses it: pass .*=self"):
        run(other) if name == "aggregation" else run()
    assert run(name).history["round"].tolist() == [0.0]


def test_what_is_shown_is_counted_and_noised_or_refused():
    """Its budget left the clustering out, whether or not what that saw had noise."""
    privacy = dataclasses.replace(private_methods.NOISY, clustering_clip=0.2, clustering_noise_multiplier=3.0)

    class showing(method_that_passes("privacy"), abstract=True):
        """Says that it shows something."""

        sends = SHOWN

    class counting(showing, abstract=True):
        """Says how often."""

        sends = SHOWN

        def times_shown(self, rounds):
            return rounds

    class noising(counting, abstract=True):
        """Shows it with noise."""

        sends = SHOWN

        def step(self, rng_key, state, cohort):
            def show(client):
                return self.privacy.shown(client_key(rng_key, client.index), jnp.ones(3))

            parallel.for_each_client(show, cohort, collect=lambda shown: shown)
            return super().step(rng_key, state, cohort)

    def run(method):
        own = method(nn.linear(), local=local.sgd(0.1, batch_size=4, steps=1), privacy=privacy)
        return simulate(own, blobs(clients=4), rounds=2, progress=False)

    with pytest.raises(
        ValueError, match=r"does not say how often a client shows .* give the method times_shown\(round"
    ):
        run(showing)
    with pytest.raises(
        ValueError, match=r"sends of counting is SHOWN, but nothing of it is noised: show the server self"
    ):
        run(counting)
    pytest.importorskip("dp_accounting")
    assert run(noising).privacy.shown == 2


def test_a_step_that_only_compares_its_aggregation_heeds_it():
    class comparing(fedavg, abstract=True):
        """Does something else for the median."""

        def step(self, rng_key, state, cohort):
            return state if self.aggregation == "median" else state._replace(round=state.round + 1)

    method = comparing(nn.linear(), local=local.sgd(0.1, batch_size=4, steps=1), aggregation="median")
    population = protocol.place(blobs(clients=7))
    state, _ = method.init(run_keys(0).initialization, population)
    assert _uses(method, "aggregation", run_keys(0).local, state, population)


def test_a_step_that_asks_for_a_value_is_told_what_to_write():
    class asking(fedavg, abstract=True):
        """Stands still but in round 1."""

        def step(self, rng_key, state, cohort):
            return super().step(rng_key, state, cohort) if state.round == 1 else (state, None)

    method = asking(nn.linear(), local=local.sgd(0.1, batch_size=4, steps=1))
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        simulate(method, blobs(clients=4), rounds=1, progress=False)
    assert any(note.startswith("The step of asking is traced once") for note in error.value.__notes__)


@pytest.mark.parametrize("name", SLOW)
def test_our_methods_forget_neither(name):
    for option, given in GIVEN.items():
        if option == "privacy":
            if vars(REGISTRY[name]).get("sends") is None:
                continue
            method, population = private_methods.build(name, given), private_methods.placed(blobs(clients=7))
        else:
            field = REGISTRY[name].__dataclass_fields__.get(option)
            if field is None or not field.init:
                continue
            method, population = protocol.build(name), protocol.place(blobs(clients=7))
        state, _ = method.init(run_keys(0).initialization, population)
        assert _uses(method, option, run_keys(0).local, state, population), option
        if option == "privacy" and method.sends == SHOWN:
            assert _shows(method, run_keys(0).local, state, population)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda given: given[0], r"init of own returns State; it must return \(State, RoundInfo\)"),
        (lambda given: (given[1], given[0]), "returns two, RoundInfo, State; it must"),
        (
            lambda given: (given[0]._replace(clients=given[0].clients[:1]), given[1]),
            "gives clients without membership and present; keep rounds.HardClients",
        ),
        (
            lambda given: (given[0]._replace(clients=given[0].clients._replace(membership=np.ones((4, 2)))), given[1]),
            r"gives membership of shape \(4, 2\); of 4 clients and 1 clusters it is \(4, 1\)",
        ),
    ],
)
def test_what_init_gives_is_looked_at(spoil, message):
    class own(method_that_passes(), abstract=True):
        """Starts as it should not."""

        def init(self, rng_key, population):
            return spoil(super().init(rng_key, population))

    method = own(nn.linear(), local=local.sgd(0.1, batch_size=4, steps=1))
    with pytest.raises(ValueError, match=message):
        simulate(method, blobs(clients=4), rounds=1, progress=False, mapping=private_methods.ONE_DEVICE)
