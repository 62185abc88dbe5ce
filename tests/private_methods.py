"""Methods under differential privacy whose clients send much more than the clip lets through."""

import dataclasses
import functools

import jax

from fedjax_cluster import local, nn, parallel, privacy
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.privacy.gaussian import SHOWN
from fedjax_cluster.simulation.segment import run_keys
from tests.federations import blobs

PLAIN = privacy.gaussian(clip=0.5, noise_multiplier=0.0, delta=1e-5)
NOISY = privacy.gaussian(clip=0.5, noise_multiplier=1.5, delta=1e-5)
SHOWING = {"clustering_clip": 0.2, "clustering_noise_multiplier": 0.0}
OWN = {
    "fedgwc": {"sampling": "uniform", "participation": 1.0},
    "fesem": {"start": "random"},
    "gradient_loss": {"start": "random"},
    "ifca": {"start": "random"},
}
ONE_DEVICE = parallel.client_mapping("scan", devices=jax.devices()[:1])


@functools.cache
def build(name, mechanism=PLAIN, **options):
    """A method whose clients send much more than the clip lets through."""
    method = REGISTRY[name]
    if method.sends == SHOWN and not mechanism.shows:
        mechanism = dataclasses.replace(mechanism, **SHOWING)
    clusters = {"clusters": 2} if "clusters" in method.__dataclass_fields__ else {}
    own = local.sgd(0.5, batch_size=4, steps=3)
    return method(nn.mlp((5,)), local=own, privacy=mechanism, **{**OWN.get(name, {}), **clusters, **options})


def placed(federation):
    return parallel.place_population(federation.train, federation.info, ONE_DEVICE)


def started(name, mechanism=PLAIN, **options):
    method, population = build(name, mechanism, **options), placed(blobs(clients=7))
    return method, population, method.init(run_keys(0).initialization, population)[0]
