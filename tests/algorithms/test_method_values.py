"""A method is a value: equal options, one hash, one compiled program; a new one brings its flags, checks and tests."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from fedjax_cluster import aggregation, local, nn, parallel
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.algorithms.method import AveragingMethod
from fedjax_cluster.optimizers import named
from fedjax_cluster.options import WARN_ONCE, described_options
from fedjax_cluster.simulation import run_keys
from tests.federations import blobs

METHODS = sorted(REGISTRY)
ONE = parallel.client_mapping("scan", devices=jax.devices()[:1])


def build(name, **given):
    """Anew at each call: model, local update, server's optimiser and method."""
    taken = {option.name for option in described_options(REGISTRY[name])}
    given = {"clusters": 2, "server": named("sgd", learning_rate=0.5), "control": "gradient", **given}
    update = local.sgd(named("sgd", learning_rate=0.2, momentum=0.9), batch_size=4, steps=2)
    return REGISTRY[name](
        nn.mlp(hidden=[5]), local=update, **{key: value for key, value in given.items() if key in taken}
    )


FEW = ("cfl", "fedavg", "flag", "ifca")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_a_method_built_twice_is_one_value_and_traced_once(name):
    chex.clear_trace_counter()
    first, second = build(name), build(name)
    assert first is not second
    assert first == second
    assert hash(first) == hash(second)
    assert first != build(name, participation=0.5)
    federation = blobs(clients=5)
    population = parallel.place_population(federation.train, federation.info, ONE)
    state, _ = first.init(run_keys(0).initialization, population)

    # Traced, not compiled: what is traced once is compiled once.
    @functools.partial(jax.jit, static_argnames="algorithm")
    @chex.assert_max_traces(n=1)
    def one_round(state, *, algorithm):
        selection = algorithm.select(jax.random.key(0), state)
        return algorithm.step(jax.random.key(1), state, parallel.gather_cohort(population, selection))

    client = jax.tree.map(lambda leaf: leaf[2], population.data)

    @functools.partial(jax.jit, static_argnames="algorithm")
    @chex.assert_max_traces(n=1)
    def personal(state, *, algorithm):
        return algorithm.personalize(jax.random.key(0), state, client, jnp.asarray(2))

    for algorithm in (first, second):
        one_round.trace(state, algorithm=algorithm)
        personal.trace(state, algorithm=algorithm)
    with pytest.raises(AssertionError, match="traced"):
        one_round.trace(state, algorithm=build(name, participation=0.5))


@pytest.mark.parametrize("name", METHODS)
def test_every_option_is_described_and_stands_in_help_and_in_the_configuration(name):
    algorithm = build(name)
    for option in described_options(REGISTRY[name]):
        assert option.doc
        assert f"  {option.name}: " in REGISTRY[name].__doc__
        unset = ("model", "aggregation", "privacy", "landmarks", "profiles_of")
        assert option.name in algorithm.config or option.name in unset


def test_every_single_option_counts():
    """Two FedGWCs that differ in one option are two values, whichever option it is."""
    others = {"rate": "participation", "tolerance": 1e-3, "beta": 0.1, "patience": 2, "max_children": 2, "smallest": 2}
    others |= {
        "sampling": "uniform",
        "centre": True,
        "variant": "released",
        "weighting": "uniform",
        "perceived": "rows",
    }
    others |= {
        "perceived": "rows",
        "server_momentum": 0.5,
        "proximal": 0.1,
        "participation": 0.5,
        "landmarks": 3,
        "clusters": 3,
        "server": None,
        "aggregation": aggregation.median(),
    }
    left = {option.name for option in described_options(REGISTRY["fedgwc"])} - set(others)
    # Privacy goes with uniform sampling alone; that it counts, `test_differential_privacy` shows.
    assert left == {"model", "local", "privacy"}
    for name, value in others.items():
        assert build("fedgwc", **{name: value}) != build("fedgwc"), name


def test_numbers_lists_and_choices_are_brought_to_the_type_of_their_option():
    built = build("ifca", shared_layers=["output"], participation=jnp.float32(1))
    assert (built.shared_layers, built.participation) == (("output",), 1.0)
    for options, message in (
        ({"clusters": 2.5}, "clusters is 2.5; it must be a whole number, at least 1"),
        ({"clusters": True}, "clusters is True; it must be a whole number"),
        ({"score_on": "some"}, "score_on is 'some'; it must be 'all' or 'batch'"),
        ({"shared_layers": "output"}, "shared_layers is 'output'; it must be a list of text"),
        ({"participation": float("nan")}, "participation is nan; it must be a number, above 0 and up to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            build("ifca", **options)


def test_a_method_is_frozen_and_its_bases_are_no_methods():
    with pytest.raises(AttributeError):
        build("fedavg").participation = 0.5
    assert AveragingMethod.__name__ not in REGISTRY


START, SEARCHED = 'start="clients"', "a threshold that is searched for"


@pytest.mark.parametrize(
    ("name", "given", "what", "needed"),
    [
        ("ifca", {"start": "random", "start_rounds": 7}, "start_rounds is 7", START),
        ("gradient_loss", {"start": "random", "start_rounds": 8}, "start_rounds is 8", START),
        ("gradient_loss", {"step_size": 0.7}, "step_size is 0.7", 'similarity="euclidean"'),
        ("cfl_gp", {"rounding": "zero"}, "rounding is 'zero'", "decimals"),
        ("cfl", {"transform_seed": 7}, "transform_seed is 7", "transform"),
        ("cfl", {"held_out": 0.3}, "held_out is 0.3", "fall_back_after"),
        ("flag", {"threshold": 0.5, "elbow": "clusters"}, "elbow is 'clusters'", SEARCHED),
        ("pacfl", {"search_clients": 9}, "search_clients is 9", SEARCHED),
    ],
)
def test_options_without_effect_are_named_once(name, given, what, needed, caplog):
    WARN_ONCE.cache_clear()
    method = build(name, **given)
    dataclasses.replace(method, clusters=3)
    assert caplog.messages == [f"{name}: {what}, which has no effect without {needed}"]


def test_options_with_effect_are_not_warned_of(caplog):
    build("ifca", start="clients", start_rounds=7)
    build("gradient_loss", similarity="euclidean", step_size=0.7)
    build("cfl_gp", decimals=2, rounding="zero")
    build("cfl", transform="hadamard", transform_seed=7, fall_back_after=5, held_out=0.3)
    build("flag", elbow="clusters")
    build("pacfl", threshold="search", search_clients=9)
    assert not caplog.messages
