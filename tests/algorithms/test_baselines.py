"""FedProx, FedAvgM, FairAvg, local training and FeSEM against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_cluster import faults, local, nn, parallel
from fedjax_cluster.algorithms import fairavg, fedavg, fedavgm, fedprox, fesem, local_only
from fedjax_cluster.algorithms.round import labels
from fedjax_cluster.clustering.scores import adjusted_rand_index
from fedjax_cluster.simulation.loop import simulate
from tests.algorithms.test_oracles import assert_models_equal, least_losses, models_of, start_of
from tests.federations import as_lists, blobs, play
from tests.reference import baselines

MODEL = nn.linear()
OWN = local.sgd(0.3, batch_size=None, steps=4)
RUN = {"rate": 0.3, "steps": 4, "rounds": 4}


def run(algorithm, federation):
    """Start model, and state after four rounds."""
    return models_of(start_of(algorithm, federation))[0], play(algorithm, federation, RUN["rounds"])[0]


def test_fedprox_is_held_by_the_start_of_the_round():
    """An anchor that follows the local model leaves plain averaging; one that stays at the first round's, neither."""
    federation = blobs()
    start, state = run(fedprox(MODEL, local=OWN, proximal=2.0), federation)
    expected = baselines.fedprox(start, as_lists(federation), **RUN, proximal=2.0)
    assert_models_equal(models_of(state), [expected])
    plain = baselines.fedprox(start, as_lists(federation), **RUN, proximal=0.0)
    assert max(np.abs(a - b).max() for a, b in zip(expected, plain, strict=True)) > 0.1


def test_fedprox_without_its_term_is_fedavg():
    federation = blobs()
    _, ours = run(fedprox(MODEL, local=OWN, proximal=0.0), federation)
    _, theirs = run(fedavg(MODEL, local=OWN), federation)
    np.testing.assert_array_equal(*(state.clusters.params["output"]["kernel"] for state in (ours, theirs)))


def test_fedavgm_is_the_heavy_ball():
    federation = blobs()
    start, state = run(fedavgm(MODEL, local=OWN, server_momentum=0.8), federation)
    expected = baselines.fedavgm(start, as_lists(federation), **RUN, momentum=0.8)
    assert_models_equal(models_of(state), [expected])


def test_fairavg_weighs_clients_equally():
    federation = blobs()
    start, state = run(fairavg(MODEL, local=OWN), federation)
    assert_models_equal(models_of(state), [baselines.fairavg(start, as_lists(federation), **RUN)])


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_local_only_trains_everyone_alone(momentum):
    """A step of rate 1 and the rate on the server, as gradient averaging has it, is the same as the rate at home."""
    federation = blobs(clients=5)
    if momentum is None:
        algorithm = local_only(MODEL, local=OWN)
    else:
        own = local.sgd(1.0, batch_size=None, steps=1)
        algorithm = local_only(MODEL, local=own, server=optax.sgd(0.3, momentum=momentum))
    start, state = run(algorithm, federation)
    models = state.clients.models.params["output"]
    ours = [(np.asarray(models["kernel"][i]), np.asarray(models["bias"][i])) for i in range(5)]
    if momentum is None:
        expected = baselines.local_only(start, as_lists(federation), **RUN)
    else:
        single = {"rate": 0.3, "steps": 1, "rounds": RUN["rounds"], "momentum": momentum}
        expected = [baselines.fedavgm(start, [client], **single) for client in as_lists(federation)]
    assert_models_equal(ours, expected)


@pytest.mark.slow
def test_local_only_predicts_with_the_clients_own_model():
    federation = blobs(clients=6)
    result = simulate(local_only(MODEL, local=OWN), federation, rounds=2)
    x = federation.test.x[0]
    for client in (1, 4):
        own = result.state.clients.models.params["output"]
        scores = x @ np.asarray(own["kernel"][client]) + np.asarray(own["bias"][client])
        expected = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        np.testing.assert_allclose(result.predict(x, client), expected, rtol=1e-4, atol=1e-6)
    assert result.summary["models_down"] == result.summary["models_up"] == 0


@pytest.mark.parametrize(("layers", "part"), [((), slice(None)), (("output/bias",), slice(1, 2))])
def test_fesem_is_kmeans_on_models(layers, part):
    """Centres that start close together, so that clients do change their cluster."""
    federation = blobs(clients=9, groups=3, rows=12, seed=2)
    algorithm = fesem(nn.linear(init_scale=0.1, zero_bias=True), clusters=3, local=OWN, layers=layers, start="random")
    start = start_of(algorithm, federation)
    first = np.argmax(start.clients.membership, -1)[:9]
    state, _ = play(algorithm, federation, RUN["rounds"])
    centres, chosen = baselines.fesem(models_of(start), first, as_lists(federation), **RUN, part=part)
    assert labels(state.clients.membership).tolist() == chosen.tolist()
    assert chosen.tolist() != first.tolist()
    assert_models_equal(models_of(state), centres)


@pytest.mark.slow
def test_fesem_may_start_from_models_of_clients():
    """Centres are trained models of three clients; drawn from three groups they are found at once."""
    federation, clients = blobs(clients=9, groups=3, ragged=False, seed=3), slice(None, 9)
    algorithm = fesem(MODEL, clusters=3, local=OWN, start="clients")
    common = models_of(start_of(fedavg(MODEL, local=OWN), federation, seed=1))[0]
    trained = baselines.local_only(common, as_lists(federation), rate=0.3, steps=4, rounds=1)
    begun = start_of(algorithm, federation, seed=1)
    chosen = np.asarray(labels(begun.clients.membership))
    assert chosen[9:].tolist() == [-1] * (len(chosen) - 9)
    distances = np.asarray([[baselines.distance(m, c, slice(None)) for c in models_of(begun)] for m in trained])
    np.testing.assert_allclose(distances.min(0), 0, atol=1e-8)
    assert distances.argmin(1).tolist() == chosen[clients].tolist()
    state, _ = play(algorithm, federation, 2, seed=1)
    assert float(adjusted_rand_index(labels(state.clients.membership)[clients], federation.group)) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.34, 0.8])
def test_fesem_starts_at_clients_that_send_something_and_places_the_others_by_loss(share):
    """Faults: a centre drawn of who sends NaN stays untrained; such clients are all in cluster 0; another draw."""
    federation = blobs(clients=9, groups=3, ragged=False, seed=3)
    algorithm = fesem(MODEL, clusters=3, local=OWN, start="clients")
    honest = start_of(algorithm, federation)
    untrained = models_of(start_of(fesem(MODEL, clusters=3, local=OWN, start="random"), federation))
    method, spoilt = faults.afflict(algorithm, federation, faults.nan_updates(share), seed=1)
    lost = faults.faulty_clients(spoilt)
    begun = start_of(method, spoilt)
    slot = np.asarray(labels(begun.clients.membership))[:9]
    common = models_of(start_of(fedavg(MODEL, local=OWN), federation))[0]
    trained = baselines.local_only(common, as_lists(federation), rate=0.3, steps=4, rounds=1)
    first = [np.argmin([baselines.distance(m, c, slice(None)) for m in trained]) for c in models_of(honest)]
    assert lost[first].any()
    centres = models_of(begun)
    source = [np.argmin([baselines.distance(m, c, slice(None)) for m in trained]) for c in centres]
    count = min(3, int((~lost).sum()))
    assert_models_equal(centres[:count], [trained[i] for i in source[:count]])
    assert_models_equal(centres[count:], untrained[count:])
    assert not lost[source[:count]].any()
    # Of those drawn at first, whoever sent something still is one.
    assert {i for i in first if not lost[i]} <= set(source[:count])
    near = [np.argmin([baselines.distance(model, c, slice(None)) for c in centres]) for model in trained]
    assert slot.tolist() == np.where(lost, least_losses(centres, federation), near).tolist()


def test_fesem_starts_with_clusters_of_equal_size():
    start = start_of(fesem(MODEL, clusters=3, local=OWN, start="random"), blobs(clients=9))
    assert np.asarray(start.clients.membership).sum(0).tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fedprox(MODEL, local=OWN, proximal=-1.0), "proximal is -1.0"),
        (lambda: fedprox(MODEL, local=object()), "must be a LocalUpdate"),
        (lambda: fedavgm(MODEL, local=OWN, server_momentum=1.0), "server_momentum is 1.0"),
        (lambda: fesem(MODEL, clusters=0, local=OWN), "clusters is 0"),
        (lambda: fesem(MODEL, clusters=2, local=OWN, start="best"), "start is 'best'"),
        (lambda: local_only(MODEL, local=OWN, participation=2.0), "participation is 2.0"),
    ],
)
def test_impossible_options_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_fesem_refuses_a_layer_that_is_not_there():
    with pytest.raises(ValueError, match="no parameter matches"):
        start_of(fesem(MODEL, clusters=2, local=OWN, layers=["hidden_7"]), blobs())


def test_configurations_name_what_was_chosen():
    assert fedprox(MODEL, local=OWN, proximal=0.3).update.proximal == 0.3
    assert fairavg(MODEL, local=OWN).weighting == "uniform"
    assert jnp.asarray(fedavgm(MODEL, local=OWN).server_momentum) == pytest.approx(0.9)


def test_a_client_that_diverges_is_no_centre():
    """Its slot keeps a model that somebody can be near to."""
    federation = blobs()
    wild = federation.train._replace(x=np.where(np.arange(8)[:, None, None] % 2 == 0, 1e25, federation.train.x))
    algorithm = fesem(nn.linear(), clusters=4, local=local.sgd(1e3, batch_size=None, steps=3), start="clients")
    population = parallel.place_population(wild, federation.info, parallel.client_mapping())
    state, _ = algorithm.init(jax.random.key(0), population)
    sizes = [np.abs(np.asarray(leaf)).reshape(4, -1).max(1) for leaf in jax.tree.leaves(state.clusters.params)]
    assert (np.max(sizes, axis=0) > 0).all()


@pytest.mark.parametrize(("arguments", "said"), [({"steps": 1}, 1), ({"epochs": 1}, 1), ({"epochs": 2}, 0)])
def test_fedprox_says_where_its_term_is_zero(arguments, said, caplog):
    fedprox(nn.linear(), local=local.sgd(0.1, batch_size=None, **arguments))
    assert len(caplog.records) == said
