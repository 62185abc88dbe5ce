"""Numbers as arguments of programs: whatever a number decides, a run in a group is what it is alone."""

import dataclasses
import inspect

import chex
import jax
import numpy as np
import pytest

from fedjax_cluster import algorithms, lifting, local, nn, optimizers, parallel, privacy, simulate_many
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.options import option
from fedjax_cluster.simulation.requests import DECIDES
from fedjax_cluster.simulation.segment import run_keys
from tests.algorithms.test_protocol import build, place
from tests.federations import blobs

LINEAR = nn.linear()
SGD = local.sgd(0.2, batch_size=8, steps=1)
OTHERS = (0.5, 0.3, 0.75, 0.0, 2.0, 4.0, 0.05)


def varied():
    for name in sorted(REGISTRY):
        for path in lifting.numbers_of(build(name)):
            fast = path in ("compression", "server_momentum")
            yield pytest.param(name, path, marks=() if fast else pytest.mark.slow, id=f"{name}-{path}")


def with_another(method, option):
    for number in OTHERS:
        try:
            other = lifting.with_number(method, option, number)
        except ValueError:
            continue
        if lifting.number_at(other, option) != lifting.number_at(method, option):
            return other
    raise AssertionError(f"no other value of {option} is known")


def check(one, other, population, together=False):
    """Both in the program of their group, whose numbers are those of the first, as each alone."""
    key = run_keys(0).initialization
    for members, numbers in lifting.differing([one, other]):
        for index in members:
            method = (one, other)[index]
            alone, _ = method.init(key, population)
            with lifting.one_program(numbers):
                grouped, _ = method.init(key, population)
                program, own = lifting.lifted(method)
            chex.assert_trees_all_close(grouped, alone, rtol=1e-6)

            def stepped(state, numbers, program=program):
                changed = lifting.with_numbers(program, numbers)
                cohort = parallel.gather_cohort(population, changed.select(key, state))
                return changed.step(key, state, cohort)[0]

            try:
                after = jax.eval_shape(stepped, grouped, {path: np.float32(number) for path, number in own.items()})
            except DECIDES:
                assert not together
                continue  # it is refused, or has a program of its own
            chex.assert_trees_all_equal_shapes_and_dtypes(after, jax.eval_shape(lambda state: state, grouped))


@pytest.mark.parametrize(("name", "option"), list(varied()))
def test_a_start_and_a_round_in_a_group_have_the_methods_own_numbers(name, option):
    """CFL-GP's start kept the profiles' width of the first value, and FedGWC's state lacked a momentum."""
    method = build(name)
    check(method, with_another(method, option), place(blobs(clients=7)))


@pytest.mark.slow
def test_numbers_that_a_state_begins_with_are_each_runs_own():
    clips = [
        privacy.gaussian(clip=clip, noise_multiplier=1.0, delta=1e-3, quantile=0.5, clustering_clip=1.0,
                         clustering_noise_multiplier=1.0)
        for clip in (0.1, 10.0)
    ]  # fmt: skip
    noises = [dataclasses.replace(clips[0], noise_multiplier=noise) for noise in (0.5, 2.0)]
    stores = [optimizers.named("adagrad", learning_rate=0.1, initial_accumulator_value=each) for each in (0.1, 5.0)]
    population = place(blobs(clients=7))
    for options in ({"privacy": clips}, {"privacy": noises}, {"server": stores}):
        ((name, values),) = options.items()
        made = [algorithms.cfl_gp(LINEAR, local=SGD, clusters=2, every=1, **{name: value}) for value in values]
        check(*made, population, together=True)


@pytest.mark.parametrize(
    ("name", "options"), [("cfl_gp", {"compression": (2.0, 7.0)}), ("fedgwc", {"server_momentum": (0.0, 0.5)})]
)
def test_values_of_which_some_decide_shapes_are_refused_by_simulate_many(name, options):
    arguments = {"clusters": 2} if "clusters" in inspect.signature(REGISTRY[name]).parameters else {}
    method = REGISTRY[name](LINEAR, local=SGD, **arguments)
    (option,) = options
    with pytest.raises(ValueError, match=f"{option} .*decide.? the shapes of a program: call simulate_many"):
        simulate_many(method, blobs(), rounds=1, seeds=(0,), options=options, progress=False)


def test_what_decides_shapes_does_so_in_a_subclass_that_says_it_anew():
    """CFL and FedSoft have words of their own for participation; cells of several shared no program."""

    class own(algorithms.fedavg, abstract=True):
        participation: float = option("of one's own", default=1.0)

    for method in (build("cfl"), build("fedsoft"), own(LINEAR, local=SGD)):
        with pytest.raises(ValueError, match="participation decides the shapes of a program"):
            lifting.path_of(method, "participation")


def test_momenta_that_are_all_above_0_share_a_program():
    made = [dataclasses.replace(build("fedgwc"), server_momentum=each) for each in (0.0, 0.5, 0.9)]
    assert [members for members, _ in lifting.differing(made)] == [[0], [1, 2]]
    assert lifting.path_of(made[0], "server_momentum") == "server_momentum"
