"""Attacks on clusterings: what each method's server groups clients by is of the rows that they show."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import faults, marked_clients
from fedjax_cluster.simulation.segment import run_keys
from tests.algorithms.test_protocol import CLIENTS, place, started
from tests.federations import blobs, one_step

# What a server groups clients by, where these show it something beside the changes that it averages.
SHOWN = {
    "cfl": lambda state: state.clients.update,
    "cfl_gp": lambda state: state.clients.profile,
    "fedgwc": lambda state: state.server.interactions,
    "fedsoft": lambda state: state.clients.membership,
    "fl_hc": lambda state: (state.server.mean, state.server.distance),
    "flexcfl": lambda state: state.server.mean,
    "flag": lambda state: (state.clients.vectors, state.clients.counts, state.clients.updates),
    "gradient_loss": lambda state: state.clients.membership,
    "ifca": lambda state: state.clients.membership,
    "pacfl": lambda state: state.clients.vectors,
    "stocfl": lambda state: state.server.shown,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in ("ifca", "pacfl") else pytest.param(name, marks=pytest.mark.slow) for name in SHOWN]
)
def test_a_clustering_takes_the_disguised_for_clients_who_have_the_rows_that_they_show(name):
    """Once from honest clients who truly have them; what is averaged is spoilt, and of the rows that they have."""
    fault, federation = faults.disguise(0.3, group=1, scale=-3), blobs(clients=CLIENTS)
    algorithm, _, start, _ = started(name)
    algorithm = dataclasses.replace(algorithm, similarity_of="gradients") if name == "cfl" else algorithm
    assert algorithm.clusters_by == "shown"
    algorithm, hidden = faults.with_fault(algorithm, fault), faults.afflicted(federation, fault, seed=0).train
    nobody, shown = np.zeros(CLIENTS, bool), marked_clients.shown_rows(hidden)
    open_flip = marked_clients.MarkedData.of(federation.train, hidden.faulty, federation.train)
    found = []
    for rows in (hidden, marked_clients.MarkedData.of(shown, nobody, shown), open_flip):
        population = place(federation._replace(train=rows))
        state = start._replace(round=jnp.asarray(0 if name == "fedsoft" else 1))
        if name in ("flag", "pacfl"):
            state, _ = algorithm.init(run_keys(0).initialization, population)
            state = state._replace(clusters=start.clusters)
        if name == "gradient_loss":
            change = jax.tree.map(jnp.negative, state.clusters.params)
            state = state._replace(server=state.server._replace(change=change))
        found.append(
            (
                SHOWN[name](state if name in ("flag", "pacfl") else one_step(algorithm, population, state)[0]),
                one_step(algorithm, population, state)[0].clusters.params,
            )
        )
    chex.assert_trees_all_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(found[0][0], found[2][0], rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-3)
    if name in ("cfl", "cfl_gp", "fedgwc"):  # who trains what was settled before the round
        chex.assert_trees_all_close(found[0][1], found[2][1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cfl", "cfl_gp", "fl_hc", "flag", "flexcfl", "stocfl"])
def test_what_is_sent_to_be_clustered_by_is_as_faulty_as_what_is_averaged(name):
    """FL+HC, FlexCFL and StoCFL were sent honest updates by sign flippers, and so seemed to withstand them."""
    algorithm, _, start, _ = started(name)
    federation, faulty = blobs(clients=CLIENTS), np.arange(CLIENTS) < 2
    found = []
    for scale in (1, 3):
        spoilt = faults.with_fault(algorithm, faults.sign_flip(0.3, scale=scale))
        population = place(federation._replace(train=marked_clients.MarkedData.of(federation.train, faulty)))
        state = start._replace(round=jnp.asarray(1))
        if name == "flag":
            found.append(spoilt.init(run_keys(0).initialization, population)[0].clients.updates)
        elif name == "cfl_gp":
            found.append(one_step(spoilt, population, state)[0].clients.profile)
        else:
            found.append(SHOWN[name](one_step(spoilt, population, state)[0]))
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(*found, rtol=1e-2, atol=1e-3)
