"""Runs that diverge say so, and have no figures; what a single client's data does to a run is no divergence."""

import logging

import jax
import numpy as np
import pytest

from fedjax_cluster import cli, faults, local, nn
from fedjax_cluster.algorithms import cfl_gp, fedavg
from fedjax_cluster.faults import with_fault
from fedjax_cluster.report.tables import diverged, summary_table
from fedjax_cluster.simulation.evaluation import federation_figures
from fedjax_cluster.simulation.history import (
    diverged_since,
    fewest_rejections,
    first_round_not_finite,
    summarize,
    warn_of_growth,
)
from fedjax_cluster.simulation.loop import simulate
from tests.federations import blobs

FIGURES = ("accuracy", "accuracy_std", "accuracy_worst_decile", "balanced_accuracy", "test_loss")


def counted(accepted, rejected, **columns):
    return {"num_clients": np.asarray(accepted), "num_rejected": np.asarray(rejected), **columns}


@pytest.mark.parametrize(
    ("accepted", "rejected", "since"),
    [
        ([8, 8, 0, 0], [0, 0, 8, 8], 2),
        ([0, 0], [8, 8], 0),
        ([8, 7, 7], [0, 1, 1], None),
        ([0, 0, 1], [8, 8, 7], None),  # it came back
        ([1, 1, 0], [0, 0, 1], None),  # a cohort of one
        ([1, 0, 0, 0], [0, 3, 0, 5], 1),  # nobody was there in between
    ],
)
def test_a_run_has_diverged_once_as_many_updates_as_clients_were_rejected_in_a_row(accepted, rejected, since):
    assert diverged_since(counted(accepted, rejected), 8) == since


@pytest.mark.parametrize(
    ("fault", "fewest"),
    [(faults.nan_updates(), 8), (faults.drop_out(0.01), 8), (faults.drop_out(0.5), 29.9), (faults.drop_out(1.0), 8)],
)
def test_who_drops_out_has_not_diverged(fault, fewest):
    """Half of the clients are silent: thirty in a row are so by chance once in 1e9 times."""
    method = with_fault(fedavg(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1)), fault)
    assert fewest_rejections(method, 8) == pytest.approx(fewest, abs=0.01)


def test_of_many_clients_some_two_hundred_updates_in_a_row_are_enough():
    """Fault: a thousand clients, ten a round: a run that had diverged at once was not said to have in 99 rounds."""
    method = fedavg(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1))
    assert fewest_rejections(method, 1000) == pytest.approx(196.7, abs=0.1)
    assert 0.9**197 < 1e-9 < 0.9**196


def test_a_run_whose_last_cohorts_are_silent_has_the_figures_of_its_models():
    own = local.sgd(0.1, batch_size=8, steps=1)
    fault = faults.drop_out(0.8)
    options = {"rounds": 6, "eval_every": 3, "progress": False, "fault": fault}
    # One client a round: of a seed's six rounds the last are silent.
    of_seeds = [
        simulate(fedavg(nn.linear(), local=own, participation=0.125), blobs(), seed=seed, **options)
        for seed in range(3)
    ]
    silent = [result for result in of_seeds if not result.history["num_clients"][-1]]
    assert silent
    for result in silent:
        assert result.summary["first_round_not_finite"] is None
        assert not diverged(result.summary)
        assert np.isfinite([result.summary[name] for name in FIGURES]).all()
        assert "diverged" not in repr(result)


def test_the_first_round_not_finite_may_be_that_of_an_evaluation():
    def first(*spoilt):
        history = counted([8] * len(spoilt), [0] * len(spoilt), num_not_finite=np.asarray(spoilt))
        return first_round_not_finite(history, 8)

    assert first(np.nan, 2.0, np.nan, 1.0) == 1
    assert first(2.0, 0.0, np.nan, 1.0) == 3
    assert first(np.nan, 2.0, np.nan, 0.0) is None, "a run that has recovered has its figures"
    assert first_round_not_finite(counted([8, 8], [0, 0]), 8) is None


def test_clients_whose_predictions_are_not_finite_are_not_left_out_of_a_mean():
    """The mean of the others would pass for that of all; a metric that a client has not is another matter."""
    per_client = {"accuracy": np.asarray([0.5, np.nan]), "num_not_finite": np.asarray([0.0, np.nan])}
    assert federation_figures(per_client)["accuracy"] == 0.5
    figures = federation_figures({**per_client, "num_not_finite": np.asarray([0.0, 1.0])})
    assert figures.pop("num_not_finite") == 1
    assert set(figures) == {"accuracy", "accuracy_std", "accuracy_worst_decile"}
    assert np.isnan(list(figures.values())).all()


def test_a_figure_that_overflows_is_not_left_out_of_a_mean():
    per_client = {"loss": np.asarray([0.1, np.inf, np.nan]), "num_not_finite": np.asarray([0.0, 0.0, np.nan])}
    figures = federation_figures(per_client)
    assert figures["num_not_finite"] == 1
    assert np.isnan(figures["test_loss"])


def test_a_figure_of_ones_own_that_is_infinite_spoils_no_other():
    """The run was said to have diverged, its predictions not to be finite, and nothing had a figure."""
    per_client = {
        name: np.asarray(of) for name, of in {"accuracy": [0.5, 1.0], "big": [1, np.inf], "loss": [1, 2]}.items()
    }
    figures = federation_figures(per_client)
    assert (figures["accuracy"], figures["test_loss"], figures["num_not_finite"]) == (0.75, 1.5, 0)
    assert np.isnan(figures["big"])


@pytest.mark.parametrize(
    ("loss", "grown"),
    [([0.1, 2e4], True), ([2.0, np.nan, 1900.0], False), ([2.0, 2100.0, np.nan], True), ([1e-9, 1.0], False)],
)
def test_a_loss_out_of_all_proportion_is_told(caplog, loss, grown):
    with caplog.at_level(logging.WARNING):
        assert warn_of_growth({"loss": np.asarray(loss)}) is grown
    assert ("the training loss has grown from" in caplog.text) is grown


def said(caplog):
    return [record.getMessage() for record in caplog.records if "diverged" in record.getMessage()]


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "decay", "first"), [(1.0, 1000.0, range(3, 9)), (1e30, 0.0, [0])])
def test_a_diverged_run_warns_once_and_has_no_figures_of_before(caplog, rate, decay, first):
    own = local.sgd(rate, batch_size=8, steps=1, weight_decay=decay)
    with caplog.at_level(logging.WARNING):
        result = simulate(fedavg(nn.linear(), local=own), blobs(), rounds=12, eval_every=2)
    summary, history = result.summary, result.history
    round_lost = summary["first_round_not_finite"]
    assert round_lost in first
    assert np.isnan([summary[name] for name in FIGURES]).all()
    assert np.isnan(history["test_loss"][round_lost:]).all()
    assert np.isfinite(history["test_loss"][1:round_lost:2]).all()
    assert "loss" not in summary  # the training loss has its own name
    (message,) = said(caplog)
    assert f"since round {round_lost + 1} " in message
    table = summary_table(summary).markdown()
    assert f"| diverged | in round {round_lost + 1} |" in table
    assert "| training loss | not finite: the run has diverged |" in table
    assert "test loss" not in table


@pytest.mark.slow
def test_an_interrupted_run_that_has_diverged_since_its_last_evaluation_has_no_figures():
    result = simulate(fedavg(nn.linear(), local=local.sgd(0.1, batch_size=8, steps=1)), blobs(), rounds=2)
    history = {name: np.append(column, np.nan) for name, column in result.history.items()}
    history |= counted([8, 8, 0], [0, 0, 8])
    history["num_changed"][-1] = history["num_clusters"][-1] = 0
    summary = summarize(result.algorithm, result.federation, result.state, history, 0, 0.0)
    assert np.isnan(summary["accuracy"])
    assert summary["first_round_not_finite"] == 2


@pytest.mark.slow
def test_predictions_that_are_not_finite_are_counted_and_have_no_figures(caplog):
    """Of NaN the largest is the first: the model would have the share of the first class for its accuracy."""
    federation = blobs()
    x = federation.test.x.copy()
    x[3] = np.sign(x[3]) * 3e38
    method = fedavg(nn.linear(init_scale=10.0), local=local.sgd(0.1, batch_size=8, steps=1))
    with caplog.at_level(logging.WARNING):
        result = simulate(method, federation._replace(test=federation.test._replace(x=x)), rounds=2, eval_every=1)
    assert result.history["num_not_finite"].tolist() == [1, 1]
    assert np.isnan([result.summary[name] for name in FIGURES]).all()
    assert (result.summary["first_round_not_finite"], result.summary["num_rejected"]) == (0, 0)
    (message,) = said(caplog)
    assert "1 of 8 clients" in message


@pytest.mark.slow
def test_the_command_line_ends_with_status_0_and_a_warning(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    arguments = (
        "run fedavg --weight-decay 1000 --learning-rate 1 --local-steps 1 --rounds 30 --model linear --clients 8"
    )
    assert cli.main([*arguments.split(), "--run-dir", "run"]) == 0
    out, error = capfd.readouterr()
    shown = " ".join(out.split())
    assert "training loss not finite: the run has diverged" in shown
    assert "test loss" not in shown
    assert "the run has diverged: since round" in error


@pytest.mark.parametrize("flag", ["jax_debug_nans", "jax_debug_infs"])
def test_nan_that_stands_for_what_is_not_known_is_not_looked_for(flag, monkeypatch):
    """CFL-GP has no loss of a cluster before its first round: the flag ended every run of it there."""
    method = cfl_gp(nn.linear(), clusters=2, local=local.sgd(0.1, batch_size=3, steps=1))
    jax.clear_caches()  # programs that there are already are not looked through
    jax.config.update(flag, True)
    try:
        watched = simulate(method, blobs(), rounds=2, progress=False)
        assert getattr(jax.config, flag)
    finally:
        jax.config.update(flag, False)
    usual = simulate(method, blobs(), rounds=2, progress=False)
    np.testing.assert_array_equal(watched.history["loss"], usual.history["loss"])
