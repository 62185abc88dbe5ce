"""Learning rates as functions of the round: what counts, equality, resuming; optimisers and schedules by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_cluster import local, nn, optimizers, parallel
from fedjax_cluster.algorithms import cfl, fedavg, per_fedavg
from fedjax_cluster.files import read_json, sealed, write_json
from fedjax_cluster.simulation.identity import identity_of
from fedjax_cluster.simulation.loop import simulate
from tests.algorithms.test_oracles import assert_models_equal, models_of, start_of
from tests.federations import as_lists, blobs, play
from tests.reference import federated

MODEL = nn.linear()
HALVED = {"init_value": 0.4, "transition_steps": 1, "decay_rate": 0.5}
RESTARTS = [{"init_value": 0.0, "peak_value": 0.4, "warmup_steps": 1, "decay_steps": 3, "end_value": 0.1}] * 2


def halving():
    return optimizers.schedule("exponential_decay", **HALVED)


def training(rate, steps=2):
    return fedavg(MODEL, local=local.sgd(rate, batch_size=None, steps=steps))


def rounds_of_numpy(start, clients, rates, steps=2):
    for rate in rates:
        start = federated.fedavg(start, clients, rate=rate, steps=steps, rounds=1)
    return start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "rates"),
    [
        (halving(), [0.4 * 0.5**t for t in range(4)]),
        (optax.exponential_decay(**HALVED), [0.4 * 0.5**t for t in range(4)]),
        (lambda t: jnp.where(t < 2, 0.3, 0.1), [0.3, 0.3, 0.1, 0.1]),
        # A cosine from .4 to .1 in two rounds, after a round of warming up, and all of it again.
        (optimizers.schedule("sgdr_schedule", cosine_kwargs=RESTARTS), [0.0, 0.4, 0.25, 0.0]),
        (optimizers.named("sgd", learning_rate=halving()), [0.4 * 0.5**t for t in range(4)]),
    ],
    ids=["named", "optax", "function", "warm restarts", "in a named optimiser"],
)
def test_a_schedule_counts_rounds_and_not_local_steps(rate, rates):
    """Counted in steps, or begun anew in each round, the rates would be others: of two steps each."""
    federation, algorithm = blobs(), training(rate)
    start = models_of(start_of(algorithm, federation))[0]
    state, _ = play(algorithm, federation, 4)
    expected = rounds_of_numpy(start, as_lists(federation), rates)
    assert_models_equal(models_of(state), [expected])


def test_momentum_starts_anew_where_the_rate_does_not():
    """The state is the round's, the rate the run's."""
    federation = blobs(clients=2, groups=1)
    algorithm = training(optimizers.named("sgd", learning_rate=halving(), momentum=0.9))
    expected = models_of(start_of(algorithm, federation))[0]
    state, _ = play(algorithm, federation, 3)
    clients = as_lists(federation)
    shares = [len(y) / sum(len(y) for _, y in clients) for _, y in clients]
    for number in range(3):
        changes = [federated.local_change(expected, x, y, 0.4 * 0.5**number, 2, 0.9) for x, y in clients]
        expected = tuple(
            part + sum(share * change[place] for share, change in zip(shares, changes, strict=True))
            for place, part in enumerate(expected)
        )
    assert_models_equal(models_of(state), [expected])


def test_a_schedule_without_a_round_is_refused():
    own = local.sgd(halving(), batch_size=4, epochs=1)
    start, client = MODEL.init(jax.random.key(0), blobs().info), jax.tree.map(lambda leaf: leaf[0], blobs().train)
    with pytest.raises(ValueError, match="no round is given"):
        own.run(jax.random.key(0), MODEL, start, client)


@pytest.mark.slow
def test_a_run_that_is_resumed_goes_on_with_its_rate(tmp_path):
    federation, algorithm = blobs(), training(halving())
    whole = simulate(algorithm, federation, rounds=4, run_dir=tmp_path / "whole")
    simulate(algorithm, federation, rounds=2, run_dir=tmp_path / "parts")
    parts = simulate(training(halving()), federation, rounds=4, run_dir=tmp_path / "parts")
    for ours, other in zip(*(jax.tree.leaves(run.state) for run in (whole, parts)), strict=True):
        np.testing.assert_array_equal(ours, other)


def test_equal_schedules_are_one_program_and_one_run():
    assert training(halving()) == training(halving())
    assert hash(training(halving())) == hash(training(halving()))
    other = optimizers.schedule("exponential_decay", **{**HALVED, "decay_rate": 0.6})
    assert training(halving()) != training(other)
    kept = training(halving()).config["local"]["learning_rate"]
    assert kept == {"schedule": "exponential_decay", **HALVED}

    def identity(rate):
        return identity_of(training(rate), blobs(), 0, 10, None, ())

    assert "programs" not in identity(halving())
    assert identity(halving()) != identity(other)
    in_optimizer = (optimizers.named("adam", learning_rate=rate) for rate in (halving(), other))
    one, another = map(identity, in_optimizer)
    assert "programs" not in one
    assert one != another


@pytest.mark.slow
def test_named_optimisers_are_told_apart_by_name_and_numbers(tmp_path):
    """config.json said "optax" for both, and a run of one was taken up with the other."""
    one, another = (training(optimizers.named("sgd", learning_rate=rate, momentum=0.9)) for rate in (0.1, 0.2))
    assert one.config["local"]["learning_rate"] == {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}
    assert training(optax.adam(0.1)).config["local"]["learning_rate"] == "optax"
    simulate(one, blobs(), rounds=1, run_dir=tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"learning_rate is 0\.1 there and 0\.2 here"):
        simulate(another, blobs(), rounds=1, run_dir=tmp_path, progress=False)
    # As runs of before have it.
    content = read_json(tmp_path / "config.json")
    content["identity"]["algorithm_config"]["local"]["learning_rate"] = "optax"
    write_json(tmp_path / "config.json", sealed(content))
    seal = tmp_path / "checkpoints" / "1" / "seal.json"
    write_json(seal, sealed({name: value for name, value in read_json(seal).items() if name != "run"}))
    simulate(one, blobs(), rounds=1, run_dir=tmp_path, progress=False)


def test_closures_are_told_apart_by_their_programs():
    """Equal at round 0, where the rate alone would not tell."""
    federation = blobs()
    same = [identity_of(training(optax.linear_schedule(0.4, end, 9)), federation, 0, 9, None, ()) for end in (0.1, 0.1)]
    other = identity_of(training(optax.linear_schedule(0.4, 0.2, 9)), federation, 0, 9, None, ())
    assert same[0] == same[1]
    assert same[0]["programs"]["the learning rate"] != other["programs"]["the learning rate"]


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(optax.linear_schedule(0.4, 0.1, 9)),
        optax.chain(optax.clip(1.0), optax.adam(optax.exponential_decay(**HALVED))),
        optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.4, 0.1, 9)),
    ],
)
def test_an_optimiser_with_a_schedule_of_its_own_is_refused_where_it_would_restart(optimizer):
    own = local.sgd(optimizer, batch_size=None, steps=2)
    with pytest.raises(ValueError, match="would start anew in every round"):
        fedavg(MODEL, local=own)
    assert cfl(MODEL, local=own, clusters=2, keep_optimizer=True).keep_optimizer


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1, momentum=0.9), optax.adam(0.1), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)]
)
def test_an_optimiser_without_one_is_taken(optimizer):
    assert training(optimizer).name == "fedavg"


def test_fine_tuning_keeps_its_own_rate():
    own = per_fedavg(MODEL, local=local.sgd(halving(), batch_size=None, steps=1), inner_learning_rate=0.3)
    assert own.fine_tuning.rate_at(5) == 0.3  # pyright: ignore[reportAttributeAccessIssue]
    assert float(own.update.rate_at(1)) == pytest.approx(0.2)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: local.sgd(lambda: 0.1, batch_size=4, steps=1),  # pyright: ignore[reportArgumentType]
            "gives no learning rate at 0",
        ),
        (lambda: local.sgd(lambda t: -0.1 - t, batch_size=4, steps=1), r"which is -0\.1 at 0"),
        (lambda: local.sgd(lambda t: float("nan") * t, batch_size=4, steps=1), "which is nan at 0"),
        (
            lambda: local.sgd(nn.mlp, batch_size=4, steps=1),  # pyright: ignore[reportArgumentType]
            "learning_rate is the uncalled mlp",
        ),
        (lambda: optimizers.schedule("linear"), "name is 'linear', a schedule that optax does not have"),
        (lambda: optimizers.schedule("adam", learning_rate=0.1), "which is no schedule of optax"),
        (lambda: optimizers.schedule("constant_schedule", value=lambda t: t), "value is .*; give finite numbers"),
        (lambda: optimizers.schedule("constant_schedule", height=1.0), "takes other arguments"),
        (
            lambda: optimizers.named("adamw", learning_rate=0.1, mask={"output": False}),
            "adamw takes numbers, text, tuples or functions here, which compare by value: unhashable",
        ),
        (lambda: local.sgd(optax.adam(0.1), batch_size=4, steps=1).rate_at(0), "optax optimiser, but a rate"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_equal_clients_on_devices_have_the_rounds_rate():
    """The round's number is shared by all devices."""
    federation, algorithm = blobs(), training(halving())
    mapping = parallel.client_mapping("chunked", 2, devices=jax.devices()[:2])
    both = simulate(algorithm, federation, rounds=3, mapping=mapping).state
    alone, _ = play(algorithm, federation, 3)
    for ours, other in zip(*(jax.tree.leaves(state.clusters.params) for state in (both, alone)), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-6)
