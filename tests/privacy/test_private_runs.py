"""Private rounds and runs, and what is refused."""

import dataclasses
import functools
import json
import math

import chex
import jax
import numpy as np
import pytest

from fedjax_cluster import cli, faults, local, nn, parallel, privacy, report
from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.experiments.config import RunConfig, build_algorithm
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.private_runs import check_private
from tests.federations import blobs
from tests.private_methods import NOISY, ONE_DEVICE, PLAIN, build

SETTLED = [name for name, method in REGISTRY.items() if vars(method).get("sends") is not None]


@pytest.mark.slow
def test_chunks_devices_segments_and_resumption_change_no_noise(tmp_path):
    pytest.importorskip("dp_accounting")
    method, federation = build("ifca", NOISY, participation=0.6), blobs(clients=7)
    method = dataclasses.replace(method, model=nn.linear())
    run = functools.partial(simulate, method, federation, progress=False)
    two = parallel.client_mapping("chunked", 2, devices=jax.devices()[:2])
    whole = run(rounds=4, eval_every=4, mapping=two)
    again = run(rounds=4, eval_every=1, mapping=two)
    chex.assert_trees_all_equal(whole.state, again.state)
    alone = run(rounds=4, eval_every=4, mapping=ONE_DEVICE)
    chex.assert_trees_all_close(alone.state.clusters, whole.state.clusters, rtol=1e-4, atol=1e-4)
    run(rounds=2, eval_every=4, mapping=two, run_dir=tmp_path / "run")
    resumed = run(rounds=4, eval_every=4, mapping=two, run_dir=tmp_path / "run")
    chex.assert_trees_all_equal(resumed.state, whole.state)
    assert resumed.privacy == whole.privacy
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"] == whole.privacy._asdict()
    assert f"ε = {whole.privacy.epsilon:.3g} at δ = 1e-05" in repr(whole)
    spent = privacy.spent(PLAIN, clients=7, cohort=7, rounds=4)
    assert spent.epsilon == math.inf
    rows = report.tables.summary_table({"privacy": spent._asdict()}).rows
    assert rows == (("privacy", "ε = ∞, without noise at δ = 1e-05, any one client replaced"),)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cfl", "cfl_gp"])
def test_what_is_shown_to_the_clustering_is_a_message_of_its_own(name):
    """Without privacy it is the very change that is averaged."""
    private, federation = build(name, NOISY), blobs(clients=7)
    run = functools.partial(simulate, rounds=3, eval_every=3, mapping=ONE_DEVICE, progress=False)
    plain = dataclasses.replace(private, privacy=None)
    assert run(private, federation).history["models_up"].max() == 14
    assert run(plain, federation).history["models_up"].max() < 14


BASE = {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
BOTH = {"clustering_clip": 1.0, "clustering_noise_multiplier": 1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 0}, "clip is 0; it must be a number, positive and finite"),
        ({"clip": math.nan}, "clip is nan"),
        ({"noise_multiplier": -1}, "noise_multiplier is -1; it must be a number, finite and 0 or more"),
        ({"noise_multiplier": math.nan}, "noise_multiplier is nan"),
        ({"delta": None}, "noise_multiplier is 1.0, but no delta is given"),
        ({"delta": 1}, "delta is 1; it must be a number, above 0 and below 1"),
        ({"quantile": 1.5}, "quantile is 1.5"),
        ({"clipping": "row"}, "clipping is 'row'; it must be 'flat' or 'layers'"),
        ({"accountant": "prv"}, "accountant is 'prv'; it must be 'rdp' or 'pld'"),
        ({"clustering_clip": 1.0}, "clustering_clip is 1.0, but no clustering_noise_multiplier is given"),
        ({"clustering_noise_multiplier": 1.0}, "but no clustering_clip is given"),
    ],
)
def test_bad_mechanisms_are_refused_in_a_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        privacy.gaussian(**{**BASE, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "more", "message"),
    [
        ("local_only", {}, {}, "local-only sends nothing"),
        ("scaffold", {}, {}, "control variates too, of which no sensitivity is settled"),
        ("fedsoft", {"clusters": 2}, {}, "which is no sample"),
        ("fedproto", {}, {}, "averages prototypes"),
        ("flag", {"clusters": 2}, {}, "none is settled"),
        ("fedavg", {"aggregation": "median"}, {}, "aggregation is median\\(\\), of which no sensitivity is known"),
        ("fedavg", {}, BOTH, "clients of fedavg show nothing to a clustering"),
        ("cfl_gp", {"clusters": 2}, {}, "give its clustering_clip and clustering_noise_multiplier"),
        ("cfl_gp", {"clusters": "auto"}, BOTH, "whose pilot is no part"),
        ("ifca", {"clusters": 2}, {}, "give start 'random'"),
        ("fesem", {"clusters": 2}, {}, "give start 'random'"),
        ("gradient_loss", {"clusters": 2}, {}, "give start 'random'"),
        (
            "gradient_loss",
            {"clusters": 2, "start": "random", "pin": True, "participation": 0.5},
            {},
            "draw is not a sample",
        ),
        ("fedgwc", {"clusters": 2}, BOTH, "whose draw is no sample of equal chances for all; give sampling 'uniform'"),
        ("fedgwc", {"clusters": 2, "sampling": "uniform"}, BOTH, "give local steps"),
        ("cfl", {"clusters": 2, "similarity_of": "gradients"}, BOTH, "give 'updates'"),
        ("cfl", {"clusters": 2, "fall_back_after": 3}, BOTH, "without noise"),
        ("cfl", {"clusters": 2}, {**BOTH, "quantile": 0.5}, "give clipping 'flat', and no quantile"),
        ("fedem", {"clusters": 2}, {"quantile": 0.5}, "fedem clips the changes of all its models together"),
        ("pacfl", {"clusters": 2, "threshold": "search"}, BOTH, "trains on the clients' rows without noise"),
    ],
)
def test_a_method_whose_sensitivity_is_not_settled_is_refused_in_a_line(name, options, more, message):
    with pytest.raises(ValueError, match=message) as caught:
        REGISTRY[name](
            nn.mlp((5,)),
            local=local.sgd(0.1, batch_size=4, epochs=1),
            privacy=privacy.gaussian(**BASE, **more),
            **options,
        )
    assert "\n" not in str(caught.value)


def test_a_method_must_say_itself_what_its_clients_send(monkeypatch):
    """One made of another may send something else too."""
    monkeypatch.setitem(REGISTRY, "more", None)

    class more(REGISTRY["fedavg"]):
        pass

    with pytest.raises(ValueError, match="more does not say what its clients send"):
        more(nn.linear(), local=local.sgd(0.1, batch_size=4, steps=1), privacy=NOISY)
    assert set(SETTLED) == set(REGISTRY) - {
        "more",
        "scaffold",
        "fedsoft",
        "fedproto",
        "flag",
        "local_only",
        "flexcfl",
        "stocfl",
        "fl_hc",
    }


@pytest.mark.parametrize(
    ("mechanism", "options", "run", "message"),
    [
        ({"delta": 0.2}, {}, {}, r"delta is 0\.2, but there are 8 clients"),
        ({"accountant": "pld"}, {"participation": 0.5}, {}, "has no law for 4 of 8 clients"),
        ({}, {}, {"churn": [(1, (), (2,))]}, "clients join or leave"),
        ({}, {}, {"fault": faults.infiltrators(0.2, joins=3)}, "the fault's clients join after 3 rounds"),
    ],
)
def test_a_run_that_cannot_be_private_is_refused_before_it_begins(mechanism, options, run, message):
    pytest.importorskip("dp_accounting")
    method = dataclasses.replace(build("fedavg"), privacy=dataclasses.replace(NOISY, **mechanism), **options)
    with pytest.raises(ValueError, match=message):
        simulate(method, blobs(), rounds=2, progress=False, **run)


def test_batch_norm_statistics_are_refused():
    """Clients would send them as they are."""
    pytest.importorskip("dp_accounting")
    method = dataclasses.replace(build("fedavg", NOISY), model=nn.resnet18())
    federation = blobs()
    images = federation.train._replace(x=np.zeros((8, 20, 8, 8), np.uint8))
    images = federation._replace(train=images, info=federation.info._replace(input_shape=(8, 8)))
    with pytest.raises(ValueError, match="the model has batch-norm statistics"):
        check_private(method, images, ())


def test_a_missing_accountant_is_told_before_a_run(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "fedjax_cluster\[privacy\]"'):
        simulate(build("fedavg", NOISY), blobs(), rounds=2, progress=False)


def test_settings_give_the_mechanism_and_old_configurations_stay_the_same():
    config = RunConfig(method="cfl_gp", clusters=2, privacy_clip=2.0, privacy_noise=1.0, privacy_delta=1e-6,
                       privacy_clustering_clip=0.5, privacy_clustering_noise=4.0, privacy_quantile=0.4)  # fmt: skip
    expected = privacy.gaussian(clip=2.0, noise_multiplier=1.0, delta=1e-6, clustering_clip=0.5,
                                clustering_noise_multiplier=4.0, quantile=0.4)  # fmt: skip
    made = build_algorithm(config)
    assert made.privacy == expected
    assert RunConfig.from_json(config.to_json()) == config
    assert made.config["privacy"]["clip"] == 2.0
    assert not any("privacy" in name for name in RunConfig(method="fedavg").to_json())
    assert "privacy" not in build_algorithm(RunConfig(method="fedavg")).config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fedavg --privacy-noise 1", "privacy_noise is 1.0, but no privacy_clip is given; give it, such as 1"),
        (
            "fedavg --privacy-clip 1 --privacy-noise 1",
            "privacy_clip is 1.0, but no privacy_delta is given; give it, such as 1e-05",
        ),
        ("fedavg --privacy-clip 0 --privacy-noise 1 --privacy-delta 1e-5", "privacy_clip is 0"),
        ("fedavg --privacy-clip nan --privacy-noise 1 --privacy-delta 1e-5", "privacy_clip is nan"),
        ("fedavg --privacy-clip 1 --privacy-noise -1 --privacy-delta 1e-5", "privacy_noise is -1"),
        ("local-only --privacy-clip 1 --privacy-noise 1 --privacy-delta 1e-5", "nothing to protect"),
        ("fedavg --privacy-clip 1 --privacy-noise 1 --privacy-delta 1e-5 --aggregation krum", "no sensitivity"),
        (
            "fedgwc --privacy-clip 1 --privacy-noise 1 --privacy-delta 1e-5 --privacy-clustering-clip 1 "
            "--privacy-clustering-noise 1",
            "no sample of equal chances",
        ),
    ],
)
def test_command_lines_are_refused_in_a_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_prepare_jax", lambda: None)
    assert cli.main(["run", *words.split(), "--rounds", "1"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
