"""Clients who come after a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_cluster import algorithms, faults, local, nn, parallel, privacy
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.algorithms.cfl.parameter_tree import assign_client, parameter_tree
from fedjax_cluster.data import from_arrays
from fedjax_cluster.report.pages import run_figures
from fedjax_cluster.simulation.checkpoints import of_clients
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import ClientData, UserFederation
from tests.algorithms import test_protocol as protocol
from tests.devices import needs_two
from tests.federations import blobs

# Their newcomers' models are not those of the run's clients: their own layers are untrained, a mixture is estimated
# from nothing, or weights and fine-tuning are of the newest models.
OWN = ("ditto", "fedem", "fedper", "fedproto", "fedrep", "fedsoft", "local_only", "per_fedavg", "pfedme")


def run(name, federation=None, rounds=6, fault=None, batch_size=4, **options):
    own = local.sgd(0.2, batch_size=batch_size, epochs=1)
    factory = REGISTRY[name]
    if "clusters" in factory.__dataclass_fields__:
        options.setdefault("clusters", 4 if name in ("flag", "pacfl", "stocfl") else 2)
    if name == "pacfl":
        options["threshold"] = 60.0
    if name == "fl_hc":
        options.setdefault("warm_up", 3)
    algorithm = factory(nn.mlp(hidden=(5,)), local=own, **options)
    federation = blobs(clients=7) if federation is None else federation
    return simulate(algorithm, federation, rounds=rounds, eval_every=rounds, fault=fault, progress=False)


def some(federation, clients, extra=0):
    """These of the clients as a federation, with rows of padding beyond their own."""

    def part(data):
        x, y, count = (np.asarray(leaf)[list(clients)] for leaf in data)
        grow = [(0, 0), (0, extra)]
        return ClientData(np.pad(x, [*grow, (0, 0)], constant_values=7), np.pad(y, grow), count)

    return federation._replace(
        train=part(federation.train), test=part(federation.test), group=federation.group[list(clients)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_newcomer_belongs_where_one_with_its_rows_does_and_moves_nobody(name):
    result = run(name)
    found = result.admit(some(result.federation, (3, 0, 2), extra=5))
    assert found.labels.tolist() == [
        *result.labels,
        *(found.labels[7:] if name == "fedsoft" else result.labels[[3, 0, 2]]),
    ]
    assert found.federation.group.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0, 0]
    np.testing.assert_array_equal(found.per_client.accuracy[:7], result.per_client.accuracy)
    jax.tree.map(np.testing.assert_array_equal, found.state.clusters.params, result.state.clusters.params)
    if name not in OWN:
        x = result.federation.test.x[3]
        np.testing.assert_allclose(found.predict(x, 7), result.predict(x, 3), rtol=1e-4, atol=1e-5)
    assert found.assignments.cluster[0, 7:].tolist() == [-1] * 3
    assert found.assignments.cluster[-1].tolist() == found.labels.tolist()
    assert result.labels.shape == (7,)


def test_a_newcomer_of_those_who_train_alone_has_the_first_model():
    """Fault: that of another draw of the first models."""
    result = run("local_only", rounds=2)
    found = result.admit(some(result.federation, (3, 0)))
    first = jax.tree.map(lambda leaf: leaf[0], result.state.clusters.params)
    for client, same in ((7, True), (8, True), (3, False)):
        own = jax.tree.map(lambda leaf, row=client: leaf[row], found.state.clients.models.params)
        equal = jax.tree.map(lambda one, other: bool((one == other).all()), own, first)
        assert all(jax.tree.leaves(equal)) == same
    np.testing.assert_array_equal(found.per_client.accuracy[:7], result.per_client.accuracy)


@pytest.mark.slow
def test_a_newcomer_is_led_past_the_splits():
    """Rows of zeros stood for clients on a split's first side, which drew the others there."""
    federation = blobs(clients=9, groups=3)
    options = {"clusters": 3, "first_round": 2, "gamma_max": 0.0, "epsilon_1": 10.0, "epsilon_2": 0.0}
    result = run("cfl", federation, rounds=8, batch_size=None, **options)
    assert len(set(result.labels)) == 3
    new = blobs(clients=12, groups=4, seed=5)
    found = result.admit(new)
    parameters = parameter_tree(result)
    expected = [
        assign_client(parameters, jax.tree.map(lambda leaf, own=own: leaf[own], new.train)) for own in range(12)
    ]
    assert found.labels[9:].tolist() == expected
    assert parameter_tree(found).nodes[0].clients.tolist() == list(range(9))  # whom the split divided


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cfl", "cfl_gp", "fedgwc", "flag"])
def test_pictures_are_of_the_run(name):
    options = {"cfl": {"first_round": 2, "gamma_max": 0.0, "epsilon_1": 10.0, "epsilon_2": 0.0}}.get(name, {})
    result = run(name, rounds=6, **options)
    found = result.admit(some(result.federation, (3, 0)))
    assert found.admit(some(result.federation, (1,))).before is result
    assert run_figures(found).keys() == run_figures(result).keys()


@pytest.mark.slow
@needs_two
def test_rows_that_fill_up_devices_are_nobody():
    two = parallel.client_mapping("scan", devices=jax.devices()[:2])
    own = local.sgd(0.2, batch_size=4, epochs=1)
    algorithm = algorithms.ifca(nn.mlp(hidden=(5,)), clusters=2, local=own)
    result = simulate(algorithm, blobs(clients=7), rounds=6, eval_every=6, mapping=two, progress=False)
    found = result.admit(some(result.federation, (1, 2)))
    assert found.labels.tolist() == [*result.labels, *result.labels[[1, 2]]]
    again = found.admit(some(result.federation, (0,)))
    assert again.labels.tolist() == [*found.labels, result.labels[0]]


@pytest.mark.slow
def test_users_keep_their_ids_and_faults_their_clients():
    plain = blobs(clients=7)
    users = UserFederation.of(plain, [f"u{client}" for client in range(7)])
    result = run("ifca", users, fault=faults.sign_flip(share=0.2))
    assert result.faulty.any()
    new = UserFederation.of(some(plain, (0, 1)), ["v", "w"])
    found = result.admit(new)
    assert found.user_ids.tolist() == [*(f"u{i}" for i in range(7)), "v", "w"]
    assert found.faulty.tolist() == [*result.faulty.tolist(), False, False]
    np.testing.assert_array_equal(found.predict(plain.test.x[0], "v"), found.predict(plain.test.x[0], 7))
    with pytest.raises(ValueError, match="has a client 'u3' already; give the newcomers other ids"):
        result.admit(UserFederation.of(some(plain, (0,)), ["u3"]))


@pytest.mark.slow
def test_events_and_files_are_of_all(tmp_path):
    result = run("cfl", rounds=12, clusters=3, first_round=2)
    assert any("labels" in event.content for event in result.events)
    found = result.admit(some(result.federation, (1, 0)))
    assert found.assignments.cluster.shape[1] == 9
    assert (found.assignments.cluster[:-1, 7:] == -1).all()
    assert found.write_clients(tmp_path / "clients.csv").read_text().count("\n") == 10
    assert not found.kept


@pytest.mark.slow
def test_what_cannot_be_admitted_is_one_line():
    result = run("ifca", rounds=1)
    plain = blobs(clients=7)
    other = from_arrays(np.random.default_rng(0).normal(size=(20, 6)), np.arange(20) % 2, np.arange(20) % 2)
    empty = some(plain, (0, 1))
    empty = empty._replace(train=empty.train._replace(num_examples=np.array([0, 3], np.int32)))
    integers = some(plain, (0,))
    integers = integers._replace(train=integers.train._replace(x=integers.train.x.astype(np.float64)))
    named = [
        plain._replace(info=plain.info._replace(class_names=names)) for names in (("a", "b", "c"), ("a", "c", "d"))
    ]
    with pytest.raises(ValueError, match="class 1 of the newcomers is 'c', but the federation's is 'b'"):
        run("ifca", named[0], rounds=1).admit(some(named[1], (0,)))
    for newcomers, message in (
        (plain.train, "newcomers is a ClientData; give a Federation"),
        (other, "the newcomers' num_classes is 2, but the federation's is 3"),
        (empty, "1 of 2 clients have no example in 'train': client 0"),
        (integers, "the newcomers' x is float64, but the federation's is float32; convert it"),
    ):
        with pytest.raises(ValueError, match=message):
            result.admit(newcomers)


@pytest.mark.slow
def test_what_admits_nobody_says_so():
    plain = blobs(clients=7)
    closed = run("flag", rounds=1, newcomers=False)
    with pytest.raises(ValueError, match="flag admits no client"):
        closed.admit(some(plain, (0,)))
    gaussian = privacy.gaussian(clip=1.0, noise_multiplier=1.0, delta=1e-3)
    private = run("fedavg", rounds=1, privacy=gaussian, weighting="uniform")
    with pytest.raises(ValueError, match="the run's privacy is that of its own clients"):
        private.admit(some(plain, (0,)))


@pytest.mark.slow
@needs_two
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_rows_that_fill_up_two_devices_are_left_out_whole(name):
    """What a run on two devices keeps is what one device has: CFL-GP's Gram matrices had a row too many."""
    two = parallel.client_mapping("scan", devices=jax.devices()[:2])
    states = []
    for mapping in (protocol.SCAN, two):
        population = protocol.place(blobs(clients=7), mapping)
        state, _ = protocol.build(name).init(run_keys(0).initialization, population)
        states.append(of_clients(jax.device_get(state), 7))
    one, other = (jax.tree.map(np.shape, state) for state in states)
    assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("landmarks", [None, 6])
def test_a_newcomer_of_cfl_that_sends_nothing_finite_is_led_nowhere(landmarks):
    """It was put on the second side of every split for good."""
    federation = blobs(clients=9, groups=3)
    options = {"clusters": 3, "first_round": 2, "gamma_max": 0.0, "epsilon_1": 10.0, "epsilon_2": 0.0}
    result = run("cfl", federation, rounds=8, batch_size=None, landmarks=landmarks, **options)
    size = np.bincount(result.labels)
    assert len(size) == 3
    x = np.full_like(federation.train.x[:1], np.nan)
    data = jax.tree.map(jnp.asarray, ClientData(x[0], federation.train.y[0], federation.train.num_examples[0]))
    state = jax.tree.map(jnp.asarray, result.state)
    # A landmark is not led.
    client = 4 if landmarks is None else next(i for i in range(9) if i not in state.server.landmarks.tolist())
    found = result.algorithm.admit(jax.random.key(0), state, data, jnp.asarray(client))
    label = int(np.argmax(found.clients.membership[client]))
    if landmarks is None:
        others = np.bincount(np.argmax(np.asarray(state.clients.membership)[:9], 1))
        assert label == int(np.argmax(others))
    else:
        assert (label, int(found.clients.placed[client])) == (0, 0)
    honest = jax.tree.map(lambda leaf: jnp.asarray(leaf[client]), federation.train)
    again = result.algorithm.admit(jax.random.key(0), state, honest, jnp.asarray(client))
    assert int(np.argmax(again.clients.membership[client])) == int(result.labels[client])


@pytest.mark.slow
def test_no_newcomer_has_a_row_among_flags_landmarks():
    """Where all clients are landmarks their matrices grew by rows of zeros, at no distance from anybody."""
    result = run("flag", rounds=1, landmarks=7, threshold=0.5)
    found = result.admit(some(result.federation, (3,)))
    assert {leaf.shape for leaf in jax.tree.leaves(found.state.server.matrices)} == {(7, 7)}


@pytest.mark.slow
def test_groups_of_newcomers_are_told_by_name():
    """All six newcomers were written as "left"."""
    left_and_right = blobs(clients=7)
    info = left_and_right.info
    found = run("ifca", left_and_right._replace(info=info._replace(group_names=("left", "right"))), rounds=1)
    new = blobs(clients=4)._replace(group=np.asarray([0, 1, 1, -1]))
    both = found.admit(new._replace(info=info._replace(group_names=("right", "above")))).federation
    assert both.info.group_names == ("left", "right", "above")
    assert both.group[-4:].tolist() == [1, 2, 2, -1]
    assert found.admit(new).federation.group[-4:].tolist() == [0, 1, 1, -1]  # numbers, where they have no names


def test_validation_rows_that_newcomers_have_not_are_left_out_with_a_word(caplog):
    federation = blobs(clients=7)
    result = run("fedavg", federation._replace(validation=federation.test), rounds=1)
    found = result.admit(some(blobs(clients=7), (3, 0)))
    assert found.federation.validation is None
    assert "validation rows are left out" in caplog.text
