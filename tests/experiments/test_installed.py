"""Methods, scenarios and models of other distributions: found by name in any process, and harmless where broken."""

import logging
import os
import pathlib
import subprocess
import sys
from importlib.metadata import EntryPoint

import jax
import pytest
from jax._src import pretty_printer

from fedjax_cluster import local, nn
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.experiments import installed
from fedjax_cluster.experiments.config import KINDS, Kind, known_name
from fedjax_cluster.simulation import identity
from tests.federations import blobs

ROOT = pathlib.Path(__file__).parents[2]
MODULE = '''
import fedjax_cluster as fc
from fedjax_cluster.options import changed, option


class steady(fc.algorithms.fedavg):
    """Federated averaging that says it is steady."""

    strength: float = option("pull of the round's start model", default=0.1)

    @property
    def update(self):
        return changed(self.local, "pulled", proximal=self.strength)


class fedavg(fc.algorithms.fedavg):
    """An impostor."""


def halves(examples, *, clients, seed=0, test_fraction=0.3):
    """Clients with all examples of digits up to 4, or from 5 on."""
    return fc.data.from_arrays(examples.x, examples.y, (examples.y > 4) * (clients - 1), seed=seed, num_classes=10)


def narrow(width: int = 8):
    """A small network."""
    return fc.nn.mlp(hidden=(width,))
'''
POINTS = """
[fedjax_cluster.methods]
steady = others:steady
fedavg = others:fedavg
gone = others:vanished

[fedjax_cluster.scenarios]
halves = others:halves

[fedjax_cluster.models]
narrow = others:narrow
"""
BROKEN = "fedjax-cluster: method gone of others (others:vanished) is left out: AttributeError module 'others' has no"
READ = """
import sys
import fedjax_cluster as fc
run = fc.load_run(sys.argv[1])
print(run.algorithm.name, run.algorithm.strength, len(run.history["round"]))
print(len(fc.resume(sys.argv[1], 3, progress=False).history["round"]))
"""


@pytest.fixture(scope="module")
def distribution(tmp_path_factory):
    """A folder that holds one, as site-packages would."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "others.py").write_text(MODULE)
    about = folder / "others-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    return folder


@pytest.fixture
def in_process(distribution, tmp_path):
    def call(*arguments):
        path = os.pathsep.join([str(distribution), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300
        )

    return call


@pytest.mark.slow
def test_what_another_distribution_brings_runs_and_is_read_back_in_another_process(in_process):
    """Faults: only the command `run` looks for entry points; a saved run asks the registry before they are loaded."""
    own = "--scenario halves --model narrow --clients 2 --clusters 1 --strength 0.3 --width 9"
    done = in_process(*f"-m fedjax_cluster compare steady {own} --rounds 2 --run-dir here".split())
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(BROKEN) == 1
    read = in_process("-c", READ, "here/steady-seed0")
    assert read.stdout.splitlines() == ["steady 0.3 2", "3"], read.stderr


@pytest.mark.slow
def test_they_are_listed_and_have_their_help(in_process):
    """Faults: `list` shows only what came with the package; a broken entry point ends a command; a class of the name of
    one of our methods registers itself in its place when it is imported.
    """
    listed = in_process("-m", "fedjax_cluster", "list")
    assert listed.returncode == 0, listed.stderr
    assert all(word in listed.stdout for word in ("steady", "halves", "narrow"))
    assert "impostor" not in listed.stdout
    assert "method fedavg of others (others:fedavg) is left out: there is a method of this name" in listed.stderr
    assert (listed.stderr.count(BROKEN), listed.stderr.count("\n")) == (1, 2)
    helped = in_process("-m", "fedjax_cluster", "run", "steady", "--help")
    assert "--strength" in helped.stdout
    assert helped.returncode == 0


class announced:
    """Entry points in place of the installed ones, and registries that a test may change."""

    def __init__(self, monkeypatch):
        self.kinds = {name: Kind(dict(kind.registry), kind.common) for name, kind in KINDS.items()}
        self.patch = monkeypatch

    def load(self, kind, **points):
        given = [EntryPoint(name, value, f"fedjax_cluster.{kind}s") for name, value in points.items()]
        self.patch.setattr(installed, "_done", set())
        self.patch.setattr(installed, "entry_points", lambda group: [at for at in given if at.group == group])
        installed.load(self.kinds)
        return self.kinds[kind].registry


@pytest.mark.parametrize(
    ("kind", "point", "reason"),
    [
        ("method", "json:dumps", "it is the uncalled dumps; a method is a subclass"),
        ("method", "fedjax_cluster.algorithms:fedavg", "its class is called fedavg; call it odd"),
        ("method", "no_such_module:it", "ModuleNotFoundError No module named 'no_such_module'"),
        ("scenario", "json:dumps", "it takes no examples, clients, seed; a scenario takes"),
        ("model", "functools:partial", "it is the uncalled partial; a model is a function"),
        ("model", "math:pi", "it is 3.141592653589793; a model is a function"),
    ],
)
def test_what_cannot_be_taken_is_one_line_of_the_log(monkeypatch, caplog, kind, point, reason):
    """Fault: any object is registered, and fails later without a word of where it came from."""
    caplog.set_level(logging.WARNING, logger="fedjax_cluster")
    registry = announced(monkeypatch).load(kind, odd=point)
    assert "odd" not in registry
    [record] = caplog.records
    assert record.getMessage().startswith(f"{kind} odd ({point}) is left out: {reason}")


def test_a_program_is_the_same_in_a_notebook_and_in_a_batch_job(monkeypatch):
    """Fault: a notebook cannot read the run of a batch job, as the text of a program has colours where JAX finds a
    notebook or a terminal.
    """
    plain = identity.programs(fedavg(), blobs())
    monkeypatch.setattr(pretty_printer, "CAN_USE_COLOR", True)
    assert "\x1b[" in str(jax.make_jaxpr(lambda x: x + 1)(1.0).jaxpr)
    assert identity.programs(fedavg(), blobs()) == plain


def fedavg():
    return REGISTRY["fedavg"](nn.linear(), local=local.sgd(0.1, batch_size=4, steps=1))


def test_they_are_loaded_once(monkeypatch):
    """Fault: every name that is looked up reads all installed distributions again, tens of milliseconds each."""
    known_name("method", "cfl-gp", KINDS["method"].registry)
    monkeypatch.setattr(installed, "entry_points", lambda group: pytest.fail("read again"))
    known_name("method", "cfl-gp", KINDS["method"].registry)
