"""Ditto, FedPer, FedRep, SCAFFOLD, pFedMe and FedProto against plain NumPy; who never took part, and who joins."""

import math

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_cluster import aggregation, faults, local, nn
from fedjax_cluster.algorithms import ditto, fedavg, fedper, fedproto, fedrep, pfedme, scaffold
from fedjax_cluster.algorithms.personal import global_model
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import Churn
from tests.algorithms.test_oracles import assert_models_equal, models_of, start_of
from tests.federations import as_lists, blobs, play
from tests.reference import personal

MODEL = nn.linear()
CLIENTS, ROUNDS = 6, 4
RATE, STEPS = 0.3, 3
OWN = local.sgd(RATE, batch_size=None, steps=STEPS)


def federation_of():
    return blobs(clients=CLIENTS)


def cohorts_of(algorithm, federation, rounds=ROUNDS):
    """Who takes part in each round."""
    state = start_of(algorithm, federation)
    keys = run_keys(0).cohorts
    chosen = [algorithm.select(jax.random.fold_in(keys, number), state) for number in range(rounds)]
    return [np.asarray(each.index)[np.asarray(each.mask)].tolist() for each in chosen]


def rows_of(params):
    """[(kernel, bias)] of softmax models stacked over clients."""
    kernel, bias = (np.asarray(params["output"][part], np.float64) for part in ("kernel", "bias"))
    return list(zip(kernel, bias, strict=True))[:CLIENTS]


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_ditto_is_its_algorithm(participation):
    """Off the defaults: a strong pull, fewer personal steps than global ones, uniform means of unequal clients."""
    federation = federation_of()
    algorithm = ditto(MODEL, local=OWN, proximal=0.7, personal_steps=2, participation=participation)
    start, cohorts = models_of(start_of(algorithm, federation))[0], cohorts_of(algorithm, federation)
    state, reports = play(algorithm, federation, ROUNDS)
    expected, own = personal.ditto(
        start, as_lists(federation), cohorts, rate=RATE, steps=STEPS, proximal=0.7, personal_steps=2
    )
    assert_models_equal(models_of(state), [expected])
    assert_models_equal(rows_of(state.clients.own.params), own)
    assert float(reports[0].costs.gradient_evaluations) == len(cohorts[0]) * (STEPS + 2)
    assert float(reports[0].costs.models_up) == len(cohorts[0])


@pytest.mark.slow
def test_dittos_pull_is_towards_the_model_of_the_round_and_not_the_clients_own():
    """Without the pull everyone trains alone; with a large one all are near the global model."""
    federation = federation_of()
    distance = {}
    for pull in (0.0, 2.0):
        state, _ = play(ditto(MODEL, local=OWN, proximal=pull), federation, ROUNDS)
        middle = models_of(state)[0][0]
        distance[pull] = max(np.abs(kernel - middle).max() for kernel, _ in rows_of(state.clients.own.params))
    assert distance[2.0] < 0.5 * distance[0.0]


@pytest.mark.slow
def test_who_never_took_part_in_ditto_has_the_global_model():
    federation = federation_of()
    algorithm = ditto(MODEL, local=OWN, participation=0.5)
    (chosen,) = cohorts_of(algorithm, federation, 1)
    other = next(client for client in range(CLIENTS) if client not in chosen)
    state, _ = play(algorithm, federation, 1)
    client = jax.tree.map(lambda leaf: leaf[0], federation.train)
    for index, models in ((other, models_of(state)), (chosen[0], rows_of(state.clients.own.params)[chosen[0] :])):
        variables, _ = algorithm.personalize(jax.random.key(0), state, client, jnp.asarray(index))
        np.testing.assert_allclose(variables.params["output"]["kernel"][0], models[0][0], rtol=1e-6)


@pytest.mark.slow
def test_dittos_newcomer_begins_with_the_global_model_and_one_who_comes_back_with_its_own():
    federation = federation_of()
    algorithm = ditto(MODEL, local=OWN, participation=0.5)
    (chosen,) = cohorts_of(algorithm, federation, 1)
    other = next(client for client in range(CLIENTS) if client not in chosen)
    state = jax.tree.map(jnp.asarray, play(algorithm, federation, 1)[0])
    client = jax.tree.map(lambda leaf: leaf[0], federation.train)
    for index in (other, chosen[0]):
        clients = state.clients._replace(present=state.clients.present.at[index].set(False))
        new = algorithm.admit(jax.random.key(0), state._replace(clients=clients), client, jnp.asarray(index))
        expected = models_of(state)[0] if index == other else rows_of(state.clients.own.params)[index]
        np.testing.assert_allclose(rows_of(new.clients.own.params)[index][0], expected[0], rtol=1e-6)
        assert bool(new.clients.present[index])


NETWORK = nn.mlp(hidden=(5,))
PLACES = [("hidden_0", "kernel"), ("hidden_0", "bias"), ("output", "kernel"), ("output", "bias")]


def network_of(params):
    return tuple(np.asarray(params[layer][part], np.float64) for layer, part in PLACES)


def personal_networks(algorithm, state, federation):
    """Each client's model, as `personalize` gives it."""
    give = jax.jit(algorithm.personalize)
    found = []
    for index in range(CLIENTS):
        client = jax.tree.map(lambda leaf, index=index: leaf[index], federation.train)
        variables, mixture = give(jax.random.key(0), state, client, jnp.asarray(index))
        assert mixture.tolist() == [1.0]
        found.append(network_of(jax.tree.map(lambda leaf: leaf[0], variables.params)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "base", "participation"), [(("!output",), (0, 1), 1.0), (("*/kernel",), (0, 2), 0.5)]
)
def test_fedper_is_its_algorithm(layers, base, participation):
    """Off the defaults: any parameters may be the base; clients whose numbers of examples differ."""
    federation = federation_of()
    algorithm = fedper(NETWORK, local=OWN, shared_layers=layers, participation=participation)
    start = network_of(jax.tree.map(lambda leaf: leaf[0], start_of(algorithm, federation).clusters.params))
    cohorts = cohorts_of(algorithm, federation)
    state, reports = play(algorithm, federation, ROUNDS)
    model, own = personal.fedper(start, as_lists(federation), cohorts, rate=RATE, steps=STEPS, base=base)
    assert_models_equal([network_of(jax.tree.map(lambda leaf: leaf[0], state.clusters.params))], [model])
    assert_models_equal(personal_networks(algorithm, state, federation), own)
    share = sum(start[place].size for place in base) / sum(part.size for part in start)
    assert float(reports[0].costs.models_up) == pytest.approx(share * len(cohorts[0]))
    assert float(reports[0].costs.gradient_evaluations) == STEPS * len(cohorts[0])


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedrep_is_its_algorithm(participation):
    """The head first, and the representation under the new head; together, or the other way round, is another."""
    federation = federation_of()
    algorithm = fedrep(NETWORK, local=OWN, head_steps=2, participation=participation)
    start = network_of(jax.tree.map(lambda leaf: leaf[0], start_of(algorithm, federation).clusters.params))
    cohorts, base = cohorts_of(algorithm, federation), (0, 1)
    state, reports = play(algorithm, federation, ROUNDS)
    run = {"rate": RATE, "steps": STEPS, "head_steps": 2, "base": base}
    model, own = personal.fedrep(start, as_lists(federation), cohorts, **run)
    assert_models_equal([network_of(jax.tree.map(lambda leaf: leaf[0], state.clusters.params))], [model])
    never = sorted(set(range(CLIENTS)) - {client for chosen in cohorts for client in chosen})
    for number in never:
        own[number] = personal.descend(own[number], *as_lists(federation)[number], RATE, 2, (2, 3))
    assert_models_equal(personal_networks(algorithm, state, federation), own)
    assert float(reports[0].costs.gradient_evaluations) == (STEPS + 2) * len(cohorts[0])


def test_who_never_took_part_in_fedrep_fits_a_head_to_the_representation():
    """Two steps of the head that all began with, on its own training rows."""
    federation = federation_of()
    algorithm = fedrep(NETWORK, local=OWN, head_steps=2, participation=0.5)
    (chosen,) = cohorts_of(algorithm, federation, 1)
    other = next(client for client in range(CLIENTS) if client not in chosen)
    state, _ = play(algorithm, federation, 1)
    common = network_of(jax.tree.map(lambda leaf: leaf[0], state.clusters.params))
    expected = personal.descend(common, *as_lists(federation)[other], RATE, 2, (2, 3))
    assert_models_equal([personal_networks(algorithm, state, federation)[other]], [expected])


@pytest.mark.slow
def test_passes_of_the_head_are_of_its_clients_rows():
    """Clients of unequal sizes take unequally many steps, as in the paper's experiments."""
    federation = blobs(clients=CLIENTS)
    batches = [math.ceil(count / 4) for count in np.asarray(federation.train.num_examples)]
    algorithm = fedrep(NETWORK, local=local.sgd(RATE, batch_size=4, steps=1), head_epochs=3)
    assert len(set(batches)) > 1
    _, reports = play(algorithm, federation, 1)
    assert float(reports[0].costs.gradient_evaluations) == sum(1 + 3 * count for count in batches)


class Normed(linen.Module):
    """A normalisation of its own before the output."""

    @linen.compact
    def __call__(self, x, train=False):
        x = linen.relu(linen.Dense(5, name="hidden")(x))
        x = linen.BatchNorm(use_running_average=not train, momentum=0.5, name="norm")(x)
        return linen.Dense(3, name="output")(x)


@pytest.mark.slow
def test_a_head_fitted_under_its_statistics_is_tested_with_them():
    """Who never took part had a head of its own under the statistics of the start, which no data have seen."""
    federation = federation_of()
    algorithm = fedrep(nn.from_flax(Normed()), local=OWN, shared_layers=("hidden",), participation=0.5)
    (chosen,) = cohorts_of(algorithm, federation, 1)
    other = next(client for client in range(CLIENTS) if client not in chosen)
    state, _ = play(algorithm, federation, 1)
    client = jax.tree.map(lambda leaf: leaf[other], federation.train)
    found, _ = jax.jit(algorithm.personalize)(jax.random.key(0), state, client, jnp.asarray(other))
    fitted = jax.jit(algorithm.fit_head)(jax.random.key(0), global_model(state.clusters), client, state.round)
    np.testing.assert_allclose(found.stats["norm"]["mean"][0], fitted.stats["norm"]["mean"], rtol=1e-6)
    assert np.abs(found.stats["norm"]["mean"]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("method", [fedper, fedrep])
def test_layers_that_nobody_sends_stay_as_they_began(method):
    """A server's weight decay shrank the layers with which newcomers begin."""
    decaying = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1.0))
    algorithm = method(NETWORK, local=OWN, server=decaying)
    begun = start_of(algorithm, federation_of())
    state, _ = play(algorithm, federation_of(), ROUNDS)
    for part in ("kernel", "bias"):
        before, after = (each.clusters.params["output"][part] for each in (begun, state))
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(("layers", "said"), [(("!output",), "each client trains alone"), (("*",), "nothing is a cl")])
def test_a_model_of_which_all_is_shared_or_nothing_is_said(layers, said, caplog):
    """A linear model has nothing but its output, and would be trained without a message."""
    start_of(fedper(MODEL, local=OWN, shared_layers=layers), federation_of())
    assert said in caplog.text


def test_nothing_shared_is_refused():
    with pytest.raises(ValueError, match="shared_layers is empty"):
        fedper(NETWORK, local=OWN, shared_layers=())
    with pytest.raises(ValueError, match="no parameter matches"):
        start_of(fedrep(NETWORK, local=OWN, shared_layers=("trunk",)), federation_of())


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("control", ["steps", "gradient"])
def test_scaffold_is_its_algorithm(control, participation):
    """Off the defaults: the server's rate is not 1; c moves by the share of the clients that took part."""
    federation = federation_of()
    algorithm = scaffold(MODEL, local=OWN, control=control, server=optax.sgd(0.6), participation=participation)
    start, cohorts = models_of(start_of(algorithm, federation))[0], cohorts_of(algorithm, federation)
    state, reports = play(algorithm, federation, ROUNDS)
    run = {"rate": RATE, "steps": STEPS, "server_rate": 0.6, "control": control}
    model, common, own = personal.scaffold(start, as_lists(federation), cohorts, **run)
    assert_models_equal(models_of(state), [model])
    assert_models_equal(rows_of(jax.tree.map(lambda leaf: leaf[None], state.server)), [common])
    assert_models_equal(rows_of(state.clients.own), own)
    passes = 1 if control == "gradient" else 0
    assert float(reports[0].costs.gradient_evaluations) == (STEPS + passes) * len(cohorts[0])
    assert float(reports[0].costs.models_up) == float(reports[0].costs.models_down) == 2 * len(cohorts[0])


@pytest.mark.slow
def test_scaffold_of_one_step_and_everyone_is_fedavg():
    """The corrections cancel in the mean."""
    federation, single = federation_of(), local.sgd(RATE, batch_size=None, steps=1)
    ours, _ = play(scaffold(MODEL, local=single), federation, ROUNDS)
    theirs, _ = play(fedavg(MODEL, local=single, weighting="uniform"), federation, ROUNDS)
    assert_models_equal(models_of(ours), models_of(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("rule", [None, aggregation.norm_clipping(norm=0.05)])
@pytest.mark.parametrize("churn", [(), (Churn(1, leave=(1, 4)),), (Churn(1, leave=(1, 4)), Churn(3, join=(4,)))])
def test_scaffolds_common_variate_is_the_mean_of_those_who_are_there(churn, rule):
    """Also after some sent nothing, left and came back: what it is beyond their mean would push every step for ever."""
    own = local.sgd(RATE, batch_size=4, epochs=1)
    algorithm = scaffold(MODEL, local=own, participation=0.6, aggregation=rule)
    fault = faults.drop_out(0.3)
    state = simulate(algorithm, federation_of(), rounds=6, churn=churn, fault=fault, progress=False).state
    own = [leaf[np.asarray(state.clients.present)].mean(0) for leaf in jax.tree.leaves(state.clients.own)]
    for found, expected in zip(jax.tree.leaves(state.server), own, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
        assert np.abs(expected).max() > 1e-3


@pytest.mark.slow
def test_scaffolds_variates_are_limited_as_its_changes_are():
    """A clipped mean was led away by the control variates of one attacker."""
    rule, fault = aggregation.norm_clipping(norm=0.1), faults.scaled(share=0.1, factor=-1e4)
    algorithm = scaffold(MODEL, local=OWN, aggregation=rule)
    state = simulate(algorithm, federation_of(), rounds=2, fault=fault, progress=False).state
    squares = [np.sum(np.square(leaf)) for leaf in jax.tree.leaves(state.server)]
    assert 0 < np.sqrt(sum(squares)) <= 2 * 0.1 + 1e-6


@pytest.mark.slow
def test_scaffold_goes_on_after_a_round_in_which_all_drop_out():
    fault = faults.drop_out(rate=0.75, share=1.0)
    algorithm = scaffold(MODEL, local=OWN, aggregation=aggregation.median())
    result = simulate(algorithm, federation_of(), rounds=12, fault=fault, progress=False)
    refused = result.history["num_rejected"]
    lost = int(np.argmax(refused == refused.max()))
    assert refused[lost] == len(result.labels)
    assert refused[lost + 1 :].min() < refused[lost]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.state))


def test_scaffold_refuses_steps_that_are_no_multiple_of_a_gradient():
    own = local.sgd(optax.sgd(0.1, momentum=0.9), batch_size=None, steps=2)
    with pytest.raises(ValueError, match="control is 'steps', which divides the change by the rate of plain steps"):
        scaffold(MODEL, local=own)
    assert scaffold(MODEL, local=own, control="gradient").control == "gradient"


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_pfedme_is_its_algorithm(participation):
    """Off the defaults: three inner steps, a weak pull, and a server that goes more than the whole way."""
    federation = federation_of()
    algorithm = pfedme(
        MODEL,
        local=OWN,
        regularization=2.0,
        inner_steps=3,
        inner_learning_rate=0.2,
        server=optax.sgd(1.4),
        participation=participation,
    )
    start, cohorts = models_of(start_of(algorithm, federation))[0], cohorts_of(algorithm, federation)
    state, reports = play(algorithm, federation, ROUNDS)
    run = {"rate": RATE, "steps": STEPS, "server_rate": 1.4, "strength": 2.0, "inner_steps": 3, "inner_rate": 0.2}
    model, own = personal.pfedme(start, as_lists(federation), cohorts, **run)
    assert_models_equal(models_of(state), [model])
    took_part = {client for chosen in cohorts for client in chosen}
    ours, expected = rows_of(state.clients.own.params), own
    assert_models_equal([ours[number] for number in took_part], [expected[number] for number in took_part])
    assert float(reports[0].costs.gradient_evaluations) == 3 * STEPS * len(cohorts[0])


def test_pfedme_refuses_inner_steps_that_diverge():
    with pytest.raises(ValueError, match="whose product is above 2"):
        pfedme(MODEL, local=OWN, regularization=30.0, inner_learning_rate=0.1)


def with_a_rare_class(federation, holder):
    """The same, but one client alone has the last class."""
    alone = np.arange(CLIENTS)[:, None] == holder
    y = np.where(alone, federation.train.y, federation.train.y % 2).astype(np.int32)
    return federation._replace(train=federation.train._replace(y=y))


@pytest.mark.parametrize(("participation", "weighting"), [(1.0, "examples"), (0.5, "uniform")])
def test_fedproto_is_its_algorithm(participation, weighting):
    """Off the defaults: a strong pull; a class that one client has, whose prototype stays when it is not drawn."""
    algorithm = fedproto(NETWORK, local=OWN, prototype_weight=3.0, weighting=weighting, participation=participation)
    first, *later = cohorts_of(algorithm, federation_of())
    holder = next((client for client in first if client not in later[-1]), 0)
    federation = with_a_rare_class(federation_of(), holder)
    begun = start_of(algorithm, federation)
    start, cohorts = (
        network_of(jax.tree.map(lambda leaf: leaf[0], begun.clusters.params)),
        cohorts_of(algorithm, federation),
    )
    state, reports = play(algorithm, federation, ROUNDS)
    run = {"rate": RATE, "steps": STEPS, "strength": 3.0, "classes": 3, "weighted": weighting == "examples"}
    own, prototypes, known = personal.fedproto(start, as_lists(federation), cohorts, **run)
    assert_models_equal(personal_networks(algorithm, state, federation), own)
    assert_models_equal([[state.server.mean]], [[prototypes]])
    assert state.server.known.tolist() == known.tolist()
    held = [len(np.unique(as_lists(federation)[number][1])) for number in cohorts[0]]
    share = 5 / sum(part.size for part in start)
    assert float(reports[0].costs.models_down) == 0
    assert float(reports[0].costs.models_up) == pytest.approx(share * sum(held))
    assert float(reports[0].costs.gradient_evaluations) == STEPS * len(cohorts[0])


def test_fedproto_needs_classes_and_a_layer_to_take_embeddings_from():
    federation = federation_of()
    unlabelled = federation._replace(info=federation.info._replace(num_classes=0, task="regression"))
    with pytest.raises(ValueError, match="have no class labels; use another method"):
        start_of(fedproto(nn.mlp(hidden=(5,), num_outputs=1), local=OWN), unlabelled)
    with pytest.raises(ValueError, match="the model calls no layer of Flax Linen named 'output'"):
        start_of(fedproto(nn.from_flax(linen.Dense(3)), local=OWN), federation)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda own: ditto(NETWORK, local=own),
        lambda own: fedper(NETWORK, local=own),
        lambda own: fedrep(NETWORK, local=own),
        lambda own: pfedme(NETWORK, local=own, regularization=1.0),
        lambda own: fedproto(NETWORK, local=own),
    ],
    ids=["ditto", "fedper", "fedrep", "pfedme", "fedproto"],
)
def test_personal_models_beat_the_global_one_where_groups_contradict(build):
    federation, own = blobs(clients=6, groups=3, rows=40), local.sgd(0.2, batch_size=10, epochs=2)
    plain = simulate(fedavg(NETWORK, local=own), federation, rounds=20)
    ours = simulate(build(own), federation, rounds=20)
    assert ours.summary["accuracy"] > plain.summary["accuracy"] + 0.03


@pytest.mark.slow
def test_a_run_with_personal_models_is_resumed_as_it_was(tmp_path):
    """What is the clients' own is part of the state, as is c."""
    federation, algorithm = federation_of(), scaffold(MODEL, local=OWN, participation=0.5)
    whole = simulate(algorithm, federation, rounds=4, run_dir=tmp_path / "whole")
    simulate(algorithm, federation, rounds=2, run_dir=tmp_path / "parts")
    parts = simulate(algorithm, federation, rounds=4, run_dir=tmp_path / "parts")
    for ours, other in zip(*(jax.tree.leaves(run.state) for run in (whole, parts)), strict=True):
        np.testing.assert_array_equal(ours, other)
