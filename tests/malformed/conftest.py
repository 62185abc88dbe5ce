"""Stops a run where it would begin to compute."""

import functools
import types

import jax
import pytest

from fedjax_cluster import RunConfig, bench, cli
from fedjax_cluster.data import by_name, check_federation
from fedjax_cluster.files import write_json
from fedjax_cluster.simulation import requests
from fedjax_cluster.simulation.arguments import check_arguments
from fedjax_cluster.simulation.churn import Schedule


class Accepted(BaseException):
    """Nothing was found to be wrong; no failure that a comparison would go on after."""


def begin(algorithm, federation, **given):
    """What `simulate` checks, and the model's shapes."""
    check_arguments(algorithm, federation, **given)
    clusters = getattr(algorithm, "clusters", None)
    check_federation(federation, clusters if isinstance(clusters, int) else None)
    Schedule(given["churn"], algorithm, federation.train.num_examples)
    jax.eval_shape(lambda key: algorithm.model.init(key, federation.info), jax.random.key(0))
    raise Accepted


@pytest.fixture
def stopped(monkeypatch, tmp_path):
    """Raises `Accepted` in place of a run or a benchmark; `left` is the directory of a run that has done nothing."""

    def measure(name):
        raise Accepted

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(requests, "simulate", begin)
    monkeypatch.setattr(by_name, "digits", functools.cache(by_name.digits))
    monkeypatch.setattr(bench, "importlib", types.SimpleNamespace(import_module=measure))
    monkeypatch.setattr(cli, "_prepare_jax", lambda: None)
    identity = {"algorithm": "fedavg", "seed": 0, "data": ""}
    experiment = RunConfig(method="fedavg").to_json()
    write_json(tmp_path / "left" / "config.json", {"version": 2, "identity": identity, "experiment": experiment})
    return Accepted
