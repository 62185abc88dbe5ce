"""The round loop: history, resumption, interruption, run directories."""

import functools
import pathlib
import signal
import subprocess
import sys
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster import files, local, nn
from fedjax_cluster.algorithms import cfl_gp, fedavg
from fedjax_cluster.simulation.evaluation import chosen_clients
from fedjax_cluster.simulation.loop import simulate
from fedjax_cluster.simulation.run_directory import read_config, read_history
from tests.federations import blobs


@functools.cache
def method(**options):
    return cfl_gp(nn.linear(), clusters=2, local=local.sgd(0.3, batch_size=5, steps=2), **options)


assert_same_state = chex.assert_trees_all_equal


def test_history_has_one_row_a_round_and_figures_where_evaluated():
    result = simulate(method(), blobs(), rounds=23, eval_every=10)
    assert result.history["round"].tolist() == list(range(23))
    evaluated = np.flatnonzero(np.isfinite(result.history["accuracy"]))
    assert evaluated.tolist() == [9, 19, 22]
    assert result.summary["accuracy"] == result.history["accuracy"][-1]
    assert (result.history["seconds"] > 0).all()
    assert result.to_pandas().shape == (23, len(result.history) - 1)


def test_evaluation_equals_a_loop_over_clients():
    federation = blobs()
    result = simulate(method(), federation, rounds=5)
    params = jax.device_get(result.state.clusters.params["output"])
    accuracies = []
    for client, label in enumerate(result.labels):
        scores = federation.test.x[client] @ params["kernel"][label] + params["bias"][label]
        accuracies.append((scores.argmax(-1) == federation.test.y[client]).mean())
        probability = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        np.testing.assert_allclose(result.predict(federation.test.x[client], client), probability, rtol=1e-4, atol=1e-6)
    assert result.summary["accuracy"] == pytest.approx(np.mean(accuracies))
    assert result.summary["accuracy_std"] == pytest.approx(np.std(accuracies))
    assert result.summary["accuracy_worst_decile"] == pytest.approx(min(accuracies))


def test_padding_of_the_test_rows_is_not_evaluated():
    federation = blobs()
    short = federation.test._replace(num_examples=np.full(8, 4, np.int32))
    wrong = short._replace(y=np.where(np.arange(12)[None] < 4, short.y, (short.y + 1) % 3).astype(np.int32))
    figures = [simulate(method(), federation._replace(test=test), rounds=3).summary for test in (short, wrong)]
    assert figures[0]["accuracy"] == figures[1]["accuracy"]


@pytest.mark.slow
def test_costs_of_cfl_gp_follow_the_ledger():
    """Every client trains its own model; in every second round those of other clusters query one more."""
    result = simulate(method(), blobs(clients=8), rounds=4, eval_every=4)
    down = result.history["models_down"]
    assert down[0] == down[2] == 8
    assert down[1] == 8 + 4  # equal groups at the start: half of the clients hold the queried model already
    assert 8 <= down[3] <= 16
    np.testing.assert_array_equal(down, result.history["models_up"])
    np.testing.assert_array_equal(2 * down, result.history["gradient_evaluations"])
    compressed = simulate(method(compression=7.0), blobs(clients=8), rounds=2, eval_every=2)
    assert compressed.history["models_up"][1] == pytest.approx(8 + 4 * 3 / 21)
    assert result.summary["bytes_down"] == pytest.approx(down.sum() * 21 * 4)
    up = compressed.history["models_up"].sum()
    assert compressed.summary["bytes_up"] == pytest.approx(up * 21 * 4)
    assert compressed.summary["models_up"] == pytest.approx(up)


@pytest.mark.slow
def test_clustering_stops_for_good_and_a_run_can_be_extended_without_changing_its_past(tmp_path):
    result = simulate(method(stop_after=4), blobs(), rounds=20)
    clustered = result.history["models_down"] > 8
    settled = result.summary["first_round_of_final_clustering"]
    assert bool(result.state.server.stopped)
    assert not clustered[settled + 5 :].any()
    short = simulate(method(stop_after=4), blobs(), rounds=11, run_dir=tmp_path / "run")
    assert short.history["round"].size == 11
    longer = simulate(method(stop_after=4), blobs(), rounds=20, run_dir=tmp_path / "run")
    assert_same_state(longer.state, result.state)
    np.testing.assert_array_equal(longer.history["loss"], result.history["loss"])


@pytest.mark.slow
def test_no_clustering_from_t_cl_on():
    result = simulate(method(cluster_until=3), blobs(), rounds=8, eval_every=8)
    assert (result.history["models_down"][3:] == 8).all()


def test_callbacks_and_extra_metrics():
    seen = []

    def extra(predictions, y, mask):
        return {"confidence": jnp.max(predictions, -1).mean()}

    result = simulate(method(), blobs(), rounds=4, eval_every=2, metrics=[extra], callbacks=[seen.append])
    assert [event.round for event in seen] == [2, 4]
    assert 1 / 3 < seen[-1].figures["confidence"] <= 1
    assert result.summary["confidence"] == seen[-1].figures["confidence"]


def test_eval_clients_evaluates_that_many():
    federation = blobs()
    all_of_them, some = (simulate(method(), federation, rounds=2, eval_clients=count).summary for count in (8, 3))
    assert some["accuracy"] * 36 == pytest.approx(round(some["accuracy"] * 36), abs=1e-4)
    assert all_of_them["accuracy_std"] != some["accuracy_std"]


@pytest.mark.slow
def test_numbers_of_numpys_types_do(tmp_path):
    algorithm = cfl_gp(nn.linear(), clusters=np.int64(3), local=local.sgd(1.0, batch_size=8, steps=1))
    result = simulate(algorithm, blobs(), rounds=np.int64(2), seed=np.int64(1), run_dir=tmp_path / "run")
    again = simulate(algorithm, blobs(), rounds=2, seed=1, run_dir=tmp_path / "run")
    assert_same_state(result.state, again.state)


def test_more_eval_clients_than_there_are_is_said(caplog):
    assert chosen_clients(16, 90, seed=0) is None
    assert caplog.messages == ["eval_clients is 90, but there are only 16 clients: all are evaluated"]
    assert chosen_clients(16, 16, seed=0) is None
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("name", "value"), [("rounds", 0), ("eval_every", 0), ("eval_clients", 0)])
def test_impossible_numbers_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        simulate(method(), blobs(), **{"rounds": 2, name: value})


KILLED = """
import sys
sys.path.insert(0, {root!r})
from fedjax_cluster import parallel
from fedjax_cluster.simulation import loop
from tests.simulation.test_simulate import method, blobs
parallel.use_all_cores({devices})
loop.SEGMENT_SECONDS = 0.0
loop.simulate(method(), blobs(), rounds=400, eval_every=50, checkpoint_every=0, run_dir={run!r})
"""


class eventful(cfl_gp, abstract=True):
    """Reports an event in every third round, and one at its start."""

    def init(self, rng_key, population):
        state, info = super().init(rng_key, population)
        return state, info._replace(event=jnp.asarray(True))

    def step(self, rng_key, state, cohort):
        state, info = super().step(rng_key, state, cohort)
        return state, info._replace(event=state.round % 3 == 0)

    def snapshot(self, state):
        return {"membership": state.clients.membership}


@pytest.mark.slow
def test_snapshots_are_taken_at_events_and_read_again(tmp_path):
    own = eventful(nn.linear(), clusters=2, local=local.sgd(0.3, batch_size=5, steps=2))
    whole = simulate(own, blobs(), rounds=10, eval_every=4)
    assert [event.round for event in whole.events] == [-1, 2, 5, 8]
    assert whole.history["event"].tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 1, 0]
    simulate(own, blobs(), rounds=7, eval_every=4, run_dir=tmp_path / "run")
    resumed = simulate(own, blobs(), rounds=10, eval_every=4, run_dir=tmp_path / "run")
    assert [event.round for event in resumed.events] == [-1, 2, 5, 8]
    for one, other in zip(whole.events, resumed.events, strict=True):
        np.testing.assert_array_equal(one.content["membership"], other.content["membership"])


@pytest.mark.slow
def test_a_round_whose_updates_are_all_rejected_has_no_loss():
    diverging = fedavg(nn.mlp(), local=local.sgd(1e30, batch_size=8, steps=3))
    result = simulate(diverging, blobs(), rounds=1)
    assert result.summary["num_rejected"] == len(blobs().train.num_examples)
    assert np.isnan(result.history["loss"]).all()


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_resumes_to_the_same_state_bit_for_bit(tmp_path, number):
    """Checkpoints after every round; the process dies wherever it happens to be."""
    run = tmp_path / "run"
    root = pathlib.Path(__file__).parents[2]
    code = KILLED.format(root=str(root), run=str(run), devices=2)
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "metrics.csv").exists() and len(read_history(run)["round"]) >= 3:
            break
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate()
    assert process.returncode != 0
    if number == signal.SIGINT:
        assert f"KeyboardInterrupt: {run}" in error
        assert (run / "summary.json").exists()
    done = len(read_history(run)["round"])
    assert 3 <= done < 400
    fresh = method.__wrapped__()  # compiled here, with the optimisations that the other process had
    resumed = simulate(fresh, blobs(), rounds=400, eval_every=50, run_dir=run)
    whole = simulate(fresh, blobs(), rounds=400, eval_every=50)
    assert_same_state(resumed.state, whole.state)
    for name, column in whole.history.items():
        if name != "seconds":
            np.testing.assert_array_equal(resumed.history[name], column)


@pytest.mark.slow
def test_runs_of_a_configuration_can_be_loaded_and_resumed(tmp_path):
    from fedjax_cluster.experiments.config import RunConfig
    from fedjax_cluster.experiments.runs import run

    config = RunConfig(method="fedavg", model="linear", clients=4, rounds=3, eval_every=3)
    first = run(config, run_dir=tmp_path / "run")
    loaded = fc.load_run(tmp_path / "run")
    assert_same_state(loaded.state, first.state)
    assert loaded.summary["client_rounds_per_second"] == pytest.approx(first.summary["client_rounds_per_second"])
    longer = fc.resume(tmp_path / "run", 5)
    assert len(longer.history["round"]) == 5
    with pytest.raises(ValueError, match="has done 5 already"):
        fc.resume(tmp_path / "run", 2)
    # Extended to 8 and killed: it is still one of 8 rounds, also once it has been looked at.
    kept = read_config(tmp_path / "run")
    files.write_json(
        tmp_path / "run" / "config.json", files.sealed({**kept, "experiment": {**kept["experiment"], "rounds": 8}})
    )
    assert len(fc.load_run(tmp_path / "run").history["round"]) == 5
    assert len(fc.resume(tmp_path / "run").history["round"]) == 8
    with pytest.raises(ValueError, match="not a run directory"):
        fc.load_run(tmp_path / "nowhere")
    simulate(
        fedavg(nn.linear(), local=local.sgd(0.1, batch_size=4, steps=1)), blobs(), rounds=1, run_dir=tmp_path / "own"
    )
    with pytest.raises(ValueError, match="call simulate"):
        fc.resume(tmp_path / "own")


class without_round(fedavg, abstract=True):
    """Its step forgets the round."""

    def step(self, rng_key, state, cohort):
        after, info = super().step(rng_key, state, cohort)
        return after._replace(round=state.round), info


@pytest.mark.slow
def test_a_step_that_forgets_the_round_does_not_run_for_ever():
    update = local.sgd(0.1, batch_size=4, steps=1)
    result = simulate(without_round(nn.linear(), local=update), blobs(clients=4), rounds=3)
    same = simulate(fedavg(nn.linear(), local=update), blobs(clients=4), rounds=3)
    assert result.history["round"].tolist() == [0, 1, 2]
    chex.assert_trees_all_equal(result.state.clusters, same.state.clusters)


@pytest.mark.parametrize(
    ("done", "message"),
    [
        (lambda state, info: None, "step of own returned None; it returns the next State"),
        (lambda state, info: (info, state), "it returns the next State and a RoundInfo"),
        (
            lambda state, info: (state._replace(round=state.round.astype(float)), info),
            r"made state.round float32\[\] of int32",
        ),
        (lambda state, info: (state._replace(server={"x": 1}), info), r"structure .*: state.server\['x'\] is in one"),
    ],
)
def test_a_step_that_gives_no_next_state_is_named(done, message):
    class own(fedavg, abstract=True):
        """Whose step returns something else."""

        def step(self, rng_key, state, cohort):
            return done(*super().step(rng_key, state, cohort))

    with pytest.raises(ValueError, match=message):
        simulate(own(nn.linear(), local=local.sgd(0.1, batch_size=4, steps=1)), blobs(clients=4), rounds=1)
