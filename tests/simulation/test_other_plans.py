"""What a plan knows of the programs before the first round and of evaluations: those of a run, with what they take."""

import dataclasses
import importlib

import jax
import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster import parallel
from fedjax_cluster.algorithms import REGISTRY, one_shot_landmarks
from fedjax_cluster.parallel.kept_programs import KeptProgram
from fedjax_cluster.simulation import other_plans, planning
from fedjax_cluster.simulation.devices import target
from fedjax_cluster.simulation.evaluation import evaluate_clients
from fedjax_cluster.simulation.memory import bytes_of, peak_of
from fedjax_cluster.simulation.other_plans import BEFORE, EVALUATION
from fedjax_cluster.simulation.planning import plan
from fedjax_cluster.simulation.segment import run_keys
from fedjax_cluster.types import ClientData, DatasetInfo, Federation

INFO = DatasetInfo("shapes", (3,), 2)
CLIENTS, ROWS = 22, 6
# Method -> the programs that its plan knows, in their order, and whether each has the population among its arguments.
PROGRAMS = {
    "fesem": {"centres_from_clients": True},
    "ifca": {"_losses": True},
    "gradient_loss": {"_losses": True},
    "pacfl": {"measure_all": True, "compare": False},
    "flag": {"measure_all": True, "compare": False},
}
OPTIONS = {"flag": {"threshold": 0.5, "gradient_epochs": 1}, "pacfl": {"threshold": 5.0}}


def build(name, **options):
    local = fc.local.sgd(0.1, batch_size=4, steps=1)
    return REGISTRY[name](fc.nn.linear(), clusters=CLIENTS, local=local, **OPTIONS.get(name, {}), **options)


def federation():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(CLIENTS, ROWS, 3)).astype(np.float32)
    y = rng.integers(0, 2, (CLIENTS, ROWS)).astype(np.int32)
    data = ClientData(x, y, np.full(CLIENTS, ROWS, np.int32))
    return Federation(data, data, None, None, INFO)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_comes_before_the_first_round_is_planned(name, monkeypatch):
    """On an H200 FeSEM's and gradient-and-loss CFL's peaks were 1.6 times the plan's, which knew the rounds alone."""
    peaks = {}

    def watched(call, jitted):
        def called(program, *args, **kwargs):
            traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))
            if hasattr(jitted(program), "lower") and not traced:
                compiled = jitted(program).lower(*args, **kwargs).compile()
                peaks[program.__name__] = peak_of(compiled, "cpu")
            return call(program, *args, **kwargs)

        return called

    monkeypatch.setattr(KeptProgram, "__call__", watched(KeptProgram.__call__, lambda program: program.jitted))
    for path in ("flag.flag", "pacfl"):
        module = importlib.import_module(f"fedjax_cluster.algorithms.{path}")
        monkeypatch.setattr(module, "clocked", watched(module.clocked, lambda program: program))
    given = federation()
    method = build(name)
    train = parallel.place_population(given.train, INFO, parallel.client_mapping())
    method.init(run_keys(0).initialization, train)
    monkeypatch.undo()
    test = bytes_of(given.test, jax.device_count())
    population = bytes_of((given.train.x, given.train.y), jax.device_count())
    first = [other for other in plan(method, given).others if other.when == BEFORE]
    for other, (program, among) in zip(first, PROGRAMS[name].items(), strict=True):
        assert other.peak - test - (not among) * population == pytest.approx(peaks[program], rel=0.05), other


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "gradient_loss", "ditto"])
def test_an_evaluation_is_planned(name):
    """On an H200 gradient-and-loss CFL's took 1.7 times its rounds' memory."""
    given, mapping, keys = federation(), parallel.client_mapping(), run_keys(0)
    taken = {field.name for field in dataclasses.fields(REGISTRY[name])}
    clusters = {"clusters": 4} if "clusters" in taken else {}
    method = REGISTRY[name](fc.nn.mlp(hidden=(50,)), local=fc.local.sgd(0.1, batch_size=4, steps=1), **clusters)
    train, test = (parallel.place_population(part, INFO, mapping) for part in (given.train, given.test))
    state = parallel.place_state(method.init(keys.initialization, train)[0], mapping)
    options = {"model": method.model, "algorithm": method}
    compiled = evaluate_clients.lower(keys.evaluation, state, train, test.data, **options).compile()
    *_, found = plan(method, given).others
    assert found.when == EVALUATION
    assert found.peak == peak_of(compiled, "cpu")


@pytest.mark.slow
def test_a_start_that_does_not_fit_is_said(monkeypatch):
    """Rounds of FLAG keep what clients sent divided among the devices; its comparison has all of it on one."""
    method, shape = build("flag"), fc.PopulationShape(100, ROWS, DatasetInfo("shapes", (40,), 10), "float32")
    found = plan(method, shape)
    largest = max(other.peak for other in found.others)
    assert found.fits
    assert found.peak == largest > found.memory.peak
    room = int((largest + found.memory.peak) / 2 / planning.USABLE)
    monkeypatch.setattr(planning, "target", lambda device: target(device)._replace(memory=room))
    found = plan(method, shape)
    assert not found.fits
    assert found.memory.peak <= found.available
    assert found.advice == (
        "before round 1, comparing all pairs: landmarks, who alone are compared pairwise, or fewer of them",
    )
    lines = dict(found.table().rows)
    assert lines["fits"] == "no"
    assert "comparing all pairs" in lines["before round 1 "]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flag", "pacfl"])
def test_with_landmarks_nobody_holds_what_all_send(name, monkeypatch):
    monkeypatch.setattr(one_shot_landmarks, "MOST_JOINED", 4)
    peaks = {}
    for clients in (100, 200):
        shape = fc.PopulationShape(clients, ROWS, DatasetInfo("shapes", (40,), 10), "float32")
        own, comparing, joining, _ = plan(build(name, landmarks=5), shape).others
        assert ("landmark" in own.what, "landmarks" in comparing.what, "nearest" in joining.what) == (True,) * 3
        _, pairs, _ = plan(build(name), shape).others
        assert comparing.peak < pairs.peak / 2
        peaks[clients] = np.array([own.peak, comparing.peak, joining.peak])
    # A hundred (40 features and a class, of each of four) and some numbers on a device.
    assert (peaks[200] - peaks[100] < 100 * (ROWS * 41 * 4 + 50) + 2_000).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fesem", "ifca", "gradient_loss"])
def test_random_starts_compute_nothing_of_the_clients(name):
    shape = fc.PopulationShape(CLIENTS, ROWS, INFO, "float32")
    method = build(name, start="random")
    (found,) = plan(method, shape).others
    assert (found.when, found.what) == (EVALUATION, "all clients on 2 test rows")
    rounds = plan(method, shape, whole=False)
    assert rounds.others == ()
    assert rounds.peak == rounds.memory.peak


def test_methods_without_such_programs_say_so():
    others = {name for name, kind in REGISTRY.items() if kind.first_programs is not REGISTRY["fedavg"].first_programs}
    assert others == set(PROGRAMS)


@pytest.mark.slow
@pytest.mark.parametrize(("message", "refused"), [("INTERNAL: no tile sizes", True), ("RESOURCE_EXHAUSTED", False)])
def test_a_compiler_that_fails_is_told_from_what_does_not_fit(message, refused, monkeypatch):
    def compiled(*given, **static):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(other_plans, "_compiled", compiled)
    shape = fc.PopulationShape(CLIENTS, ROWS, INFO, "float32")
    if refused:
        with pytest.raises(ValueError, match=r"fails with every client's loss \(INTERNAL"):
            plan(build("ifca"), shape)
    else:
        found = plan(build("ifca"), shape)
        assert not found.fits
        assert found.peak is None
        assert "more than there is" in dict(found.table().rows)["before round 1"]
