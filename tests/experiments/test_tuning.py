"""The learning rate is chosen on training rows that were held out, and on nothing else."""

import dataclasses
import json
import logging
import pathlib
import re
import types

import numpy as np
import pytest

from fedjax_cluster import RunConfig, cli, faults, files, nn, simulate
from fedjax_cluster.experiments import comparison, config_files, runs, tuning
from fedjax_cluster.experiments.config import MODELS, build_algorithm, build_federation
from fedjax_cluster.experiments.robustness import build_fault
from fedjax_cluster.types import ClientData, Federation

pytestmark = pytest.mark.usefixtures("here")
CONFIG = RunConfig(method="ifca", clusters=2, clients=4, rounds=100, model="linear")
GOOD = {0.0111: 0.1, 0.0333: 0.5, 0.1: 0.7, 0.3: 0.8, 0.9: 0.3}


@pytest.fixture
def tried(monkeypatch):
    """Runs that compute nothing: `figures` has the accuracy of each rate, and an exception ends the command there."""

    class Tried:
        figures: dict = GOOD
        honest: dict = dict.fromkeys(GOOD)
        rates: tuple = ()
        given: dict

        def __call__(self, algorithm, federation, **given):
            rate = algorithm.local.learning_rate
            if isinstance(self.figures[rate], BaseException):
                raise self.figures[rate]
            self.rates, self.given = (*self.rates, rate), {**given, "federation": federation, "algorithm": algorithm}
            figures = {"accuracy": self.figures[rate], "test_loss": self.figures[rate]}
            return types.SimpleNamespace(summary={**figures, "accuracy_honest": self.honest[rate]})

    monkeypatch.setattr(tuning, "simulate", replacement := Tried())
    return replacement


def federation(counts, rows=10):
    """Clients whose rows all differ; test rows are NaN, and the groups no groups."""
    number = np.asarray(counts, np.int32)
    x = np.arange(len(counts) * rows, dtype=np.float32).reshape(len(counts), rows, 1) + 1
    data = ClientData(x, x[..., 0].astype(np.int32), number)
    lost = data._replace(x=np.full_like(x, np.nan))
    info = build_federation(CONFIG).info._replace(input_shape=(1,), num_classes=1000)
    return Federation(data, lost, None, np.asarray(counts), info)


@pytest.mark.slow
def test_rows_are_held_out_of_training_rows_alone_and_none_is_on_both_sides():
    given = federation([10, 1, 7, 2])
    found = tuning.held_out(given, seed=3)
    assert found.group is found.validation is None
    assert found.train.num_examples.tolist() == [8, 6, 1]
    assert found.test.num_examples.tolist() == [2, 1, 1]  # a fifth
    for place, client in enumerate((0, 2, 3)):
        kept, held = (part.x[place, : part.num_examples[place], 0] for part in (found.train, found.test))
        assert sorted([*kept, *held]) == given.train.x[client, : given.train.num_examples[client], 0].tolist()
        # Labels go with their rows, and the padding holds nothing of the other part.
        np.testing.assert_array_equal(found.train.y[place, : len(kept)], kept.astype(np.int32))
        assert not found.train.x[place, len(kept) :].any()
        assert not found.test.x[place, len(held) :].any()
    again, other = tuning.held_out(given, seed=3), tuning.held_out(given, seed=4)
    np.testing.assert_array_equal(found.test.x, again.test.x)
    assert (found.test.x != other.test.x).any()
    with pytest.raises(ValueError, match="no client has two training rows"):
        tuning.held_out(federation([1, 1]), seed=0)


@pytest.mark.parametrize(
    ("losses", "place"),
    [
        ([5e-6, 4e-6, 2.7e-6, 1.3e-13, 6e-19], 4),  # far below what decimals tell
        ([1234.56789, 1234.567899, 1234.56785, 1234.567889, 1234.567], 2),  # rounding
        ([1.0, 0.5, 0.50002, None, 0.5], 1),
    ],
)
def test_losses_of_any_size_are_told_apart_by_five_digits(losses, place):
    rates = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert tuning._best(rates, losses, largest=False) == rates[place]


def test_fewer_clients_with_validation_rows_than_clusters_are_said():
    given = federation([10, 8, 6, 4])
    given = given._replace(validation=given.train._replace(num_examples=np.asarray([3, 0, 2, 0], np.int32)))
    config = dataclasses.replace(CONFIG, method="ifca", clusters=3)
    with pytest.raises(ValueError, match="clusters is 3, but only 2 of 4 clients have validation rows"):
        tuning.tuned(config, federation=given)


def test_slots_that_nobody_asked_for_are_as_many_as_clients_are_left(tried):
    config = dataclasses.replace(CONFIG, method="cfl", clients=4, clusters=None)
    tuning.tuned(config, federation=federation([10, 8, 1, 4]))
    assert tried.given["algorithm"].clusters == len(tried.given["federation"].train.num_examples) == 3


@pytest.mark.slow
def test_the_best_rate_is_taken_and_told(tried, caplog):
    caplog.set_level(logging.INFO, "fedjax_cluster")
    found = tuning.tuned(CONFIG)
    assert tried.rates == tuple(GOOD)
    assert (tried.given["rounds"], tried.given["federation"].group) == (20, None)
    assert (found.learning_rate, found.rounds) == (0.3, 100)
    assert found.tuning["figures"] == {f"{rate:g}": value for rate, value in GOOD.items()}
    assert "IFCA: learning rate 0.3; accuracy on held-out training rows: 0.0111: 10.0 %, 0.0333" in caplog.text
    assert RunConfig.from_json(json.loads(json.dumps(found.to_json()))) == found
    # Taken over with the rest of a run's settings, but not to another rate.
    assert config_files.overridden(found.to_json(), {"rounds": 9})["tuning"]
    for other in (
        {"learning_rate": 0.2},
        {"scenario": "label_swap"},
        {"model_options": {"bias": False}},
        {"clients": 9},
    ):
        assert "tuning" not in config_files.overridden(found.to_json(), other)
    assert config_files.overridden(found.to_json(), {"scenario": "rotated", "method_options": {}})["tuning"]


@pytest.mark.parametrize(
    ("changes", "rounds"),
    [
        ({"method": "fl_hc", "rounds": 50}, 20),
        ({"method": "fl_hc", "rounds": 12}, 12),
        ({"method": "fl_hc", "rounds": 50, "method_options": {"warm_up": 3}}, 10),
        ({"method": "cfl", "rounds": 60, "method_options": {"first_round": 8}}, 16),
    ],
)
def test_rates_are_tried_beyond_the_first_clustering(tried, changes, rounds):
    """FL+HC's rates were FedAvg's."""
    tuning.tuned(dataclasses.replace(CONFIG, **changes))
    assert tried.given["rounds"] == rounds


def test_equals_go_to_the_nearest_and_what_is_not_finite_is_not_taken(tried, caplog):
    caplog.set_level(logging.INFO, "fedjax_cluster")
    tried.figures = {**GOOD, 0.0111: 0.8000000001, 0.9: float("nan")}
    assert tuning.tuned(CONFIG).learning_rate == 0.3
    tried.figures = {**GOOD, 0.0111: 0.9, 0.9: None}
    assert tuning.tuned(CONFIG).learning_rate == 0.0111
    assert "0.0111 (the end of what was tried: others may be better)" in caplog.text
    assert "0.9: not finite" in caplog.text
    tried.figures = dict.fromkeys(GOOD, float("inf"))
    with pytest.raises(ValueError, match=r"no learning rate of 0\.0111, 0\.0333, 0\.1, 0\.3, 0\.9 has a finite figure"):
        tuning.tuned(CONFIG)


def test_what_is_known_of_rates_is_known_of_their_data(tried):
    given = federation([10, 10, 10, 10])
    for rows, count in ((given, 5), (given, 5), (given._replace(train=given.train._replace(x=-given.train.x)), 10)):
        tuning.tuned(CONFIG, federation=rows, directory="own")
        assert len(tried.rates) == count


def test_what_is_known_of_rates_is_known_of_the_code_of_a_model_of_ones_own(tried, monkeypatch):
    """A bug was mended, and the same command took the rates of before."""
    linear = nn.linear()

    def scaled(by):
        def apply(variables, x, train=False, **more):
            outputs, stats = linear.apply(variables, x, train=train, **more)
            return by * outputs, stats

        return lambda: linear._replace(apply=apply)

    for by, count in ((1.0, 5), (1.0, 5), (100.0, 10)):
        monkeypatch.setitem(MODELS, "own", scaled(by))
        tuning.tuned(dataclasses.replace(CONFIG, model="own"), directory="own")
        assert len(tried.rates) == count


def test_of_losses_the_lowest_is_taken(tried):
    regression = federation([10, 10, 10, 10])
    regression = regression._replace(info=regression.info._replace(task="regression"))
    assert tuning.tuned(CONFIG, federation=regression).learning_rate == 0.0111


def test_a_private_run_is_not_tuned_on_rows_without_noise(tried):
    config = dataclasses.replace(CONFIG, privacy_clip=0.5, privacy_noise=1.0, privacy_delta=1e-3)
    with pytest.raises(ValueError, match=r"without counting it in ε, but privacy_clip is 0.5; give a learning_rate"):
        tuning.tuned(config)


def validated(counts, validation, rows=10):
    """Such clients with rows for validation, of which none is one for training."""
    given = federation(counts, rows)
    x = -given.train.x[:, : max(validation)]
    return given._replace(
        validation=ClientData(x, given.train.y[:, : max(validation)], np.asarray(validation, np.int32))
    )


def test_validation_rows_decide_where_there_are_some_and_all_training_rows_train(tried, caplog):
    """Faults: a fifth is held out all the same; clients without such rows are evaluated on padding, or refused."""
    caplog.set_level(logging.INFO, "fedjax_cluster")
    given = validated([10, 1, 7, 2], [2, 1, 0, 4])
    found = tuning.tuned(CONFIG, federation=given)
    data = tried.given["federation"]
    assert data.group is data.validation is None
    for part, own in ((data.train, given.train), (data.test, given.validation)):
        for mine, theirs in zip(part, own, strict=True):
            np.testing.assert_array_equal(mine, theirs[[0, 1, 3]])
    assert (found.learning_rate, found.tuning["held_out"]) == (0.3, "validation rows")
    assert found.tuning["figure"] == "accuracy on validation rows"
    assert "on training rows, and evaluated on validation rows, which 3 of 4 clients have" in caplog.text
    assert "learning rate 0.3; accuracy on validation rows: 0.0111" in caplog.text
    assert "held" not in caplog.text
    assert RunConfig.from_json(json.loads(json.dumps(found.to_json()))) == found
    with pytest.raises(ValueError, match="no client has validation rows, which decide; give the learning rate"):
        tuning.tuned(CONFIG, federation=validated([10, 1, 7, 2], [0, 0, 0, 0]))


def test_what_is_known_of_rates_is_known_of_their_validation_rows(tried):
    """Fault: rows for validation have changed, and rates are those of the old ones."""
    given = validated([10, 10, 10, 10], [2, 1, 0, 4])
    other = given._replace(validation=given.validation._replace(x=given.validation.x - 1))
    for rows, count in ((given, 5), (given, 5), (other, 10), (given._replace(validation=None), 15), (other, 15)):
        tuning.tuned(CONFIG, federation=rows, directory="own")
        assert len(tried.rates) == count


def test_faulty_clients_are_validated_with_their_marks_and_what_they_show(tried):
    tried.honest = {**GOOD, 0.0333: 0.9}
    config = dataclasses.replace(CONFIG, fault="disguise", fault_share=0.4, fault_group=1)
    given = validated([10, 1, 8, 10, 9, 10], [3, 2, 4, 0, 1, 2])._replace(group=np.asarray([0, 0, 1, 1, 0, 1]))
    found = tuning.tuned(config, federation=given)
    assert (found.learning_rate, found.tuning["figure"]) == (0.0333, "honest clients' accuracy on validation rows")
    fault, data, left = build_fault(config), tried.given["federation"], [0, 1, 2, 4, 5]
    drawn = fault.drawn(given, config.seed)
    np.testing.assert_array_equal(faults.faulty_clients(data), drawn[left])
    np.testing.assert_array_equal(data.train.x, given.train.x[left])
    np.testing.assert_array_equal(data.test.x, given.validation.x[left])
    everybody = faults.afflicted(given, fault, config.seed).train
    np.testing.assert_array_equal(data.train.shown.x, everybody.shown.x[left])
    assert (data.train.shown.x != data.train.x).any()


@pytest.mark.slow
def test_figures_are_those_of_runs_that_are_tested_on_validation_rows():
    """Fault: test rows, or some training rows, decide."""
    config = RunConfig(method="fedavg", clients=4, rounds=10, model="linear", local_steps=3, examples_per_client=60)
    given = build_federation(config)
    # Of the same images, but with labels that a model has for others.
    own = given.test._replace(y=9 - given.test.y)
    found, usual = (tuning.tuned(config, federation=given._replace(validation=each)) for each in (own, None))
    for rate, figure in found.tuning["figures"].items():
        algorithm = build_algorithm(dataclasses.replace(config, clusters=1, learning_rate=float(rate)))
        expected = simulate(algorithm, given._replace(test=own), rounds=10, eval_every=10)
        assert figure == pytest.approx(expected.summary["accuracy"], abs=1e-6)
        assert figure != usual.tuning["figures"][rate]


@pytest.mark.slow
def test_the_same_clients_are_faulty_and_the_honest_choose(tried):
    tried.honest = {**GOOD, 0.0333: 0.9}
    config = dataclasses.replace(CONFIG, fault="disguise", fault_share=0.4, fault_group=1)
    given = federation([10, 1, 8, 10, 9, 10])._replace(group=np.asarray([0, 0, 1, 1, 0, 1]))
    found = tuning.tuned(config, federation=given)
    assert found.learning_rate == 0.0333
    assert found.tuning["figure"] == "honest clients' accuracy on held-out training rows"
    fault, data = build_fault(config), tried.given["federation"]
    drawn = fault.drawn(given, config.seed)
    assert drawn.sum() == 2
    np.testing.assert_array_equal(faults.faulty_clients(data), drawn[[0, 2, 3, 4, 5]])
    assert tried.given["algorithm"].local.fault == fault.in_training
    # What they show is of others; the honest show what they have kept, and not what was held out.
    shown, own, faulty = data.train.shown, data.train, faults.faulty_clients(data)
    np.testing.assert_array_equal(shown.x[~faulty], own.x[~faulty])
    assert not set(np.unique(shown.x[faulty])[1:]) & set(np.unique(own.x[faulty]))
    # Of those who join, also who comes when.
    tuning.tuned(dataclasses.replace(config, fault="infiltrators", fault_joins=3), federation=given)
    assert [change.round for change in tried.given["churn"]] == [3]
    assert set(tried.given["churn"][0].join) <= set(range(5))
    # And they are seen at work.
    late = dataclasses.replace(config, fault="infiltrators", fault_joins=7, rounds=40)
    tuning.tuned(late, federation=given)
    assert tried.given["rounds"] == 14


def test_killed_while_it_tunes_it_goes_on_with_the_rest_and_then_runs(tried, monkeypatch):
    ran = []
    monkeypatch.setattr(runs, "run", lambda config, **given: ran.append(config))
    monkeypatch.setattr(cli, "show", lambda result, run_dir: None)
    words = ["run", "ifca", "--clusters", "2", "--clients", "4", "--model", "linear", "--tune", "--run-dir", "own"]
    tried.figures = {**GOOD, 0.1: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        cli.main(words)
    tried.figures, tried.rates = GOOD, ()
    assert cli.main(words) == 0
    assert tried.rates == (0.1, 0.3, 0.9)
    assert (ran[0].learning_rate, ran[0].tuning["rounds"]) == (0.3, 20)
    assert not list(pathlib.Path("own").glob(".lock"))
    # Other settings are another search.
    assert cli.main([*words, "--batch-size", "32"]) == 0
    assert len(tried.rates) == 8


def test_a_comparison_tunes_each_method_by_itself(tried, pretend, monkeypatch, capsys):
    monkeypatch.setattr(cli.fc.experiments.saved_runs, "leave_comparison", lambda *given, **options: [])
    words = [
        "compare",
        "fedavg",
        "ifca",
        "--clusters",
        "9",
        "--clients",
        "4",
        "--model",
        "linear",
        "--rounds",
        "20",
        "--tune",
        "--run-dir",
        "own",
    ]
    assert cli.main(words) == 2  # more clusters than clients
    words[words.index("9")] = "2"
    assert cli.main(words) == 0
    configs = comparison.read(pathlib.Path("own")).configs
    assert {config.learning_rate for config in configs.values()} == {0.3}
    assert len(tried.rates) == 10
    assert cli.main(words) == 0
    assert len(tried.rates) == 10
    assert "FedAvg: learning rate 0.3" in capsys.readouterr().err


TUNED = "compare fedavg ifca --clients 4 --clusters 2 --model linear --tune --run-dir own"


def test_what_is_known_of_rates_and_cannot_be_read_ends_the_comparison(tried, pretend, capsys):
    """It went on untuned, with status 0."""
    words = TUNED.split()
    pathlib.Path("own").mkdir()
    pathlib.Path("own/tuning.json").write_text('{"half')
    assert cli.main(words) == 2
    assert "cannot read own/tuning.json" in capsys.readouterr().err
    pathlib.Path("own/tuning.json").unlink()
    with files.taken(pathlib.Path("own")):
        assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "own is in use by" in said
    assert "keeps the learning rate" not in said
    assert not pretend.done


def test_a_squared_error_is_tuned_by_its_loss():
    """By the data's classes it was asked for an accuracy, which no rate had."""
    options = {"loss": "mse", "num_outputs": 1}
    given = RunConfig(method="fedavg", model="linear", scenario="xor", clients=4, model_options=options, rounds=2)
    found = tuning.tuned(given, progress=False)
    assert found.tuning["figure"] == "loss on held-out training rows"
    assert all(value is not None for value in found.tuning["figures"].values())


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("run fedavg", "run ifca --clusters 2 --tune", "method is fedavg there and ifca here"),
        ("run fedavg", "run fedavg --tune", "its learning rate is 0.1, as it was given; choose another directory, or "),
        ("compare fedavg ifca --clusters 2", "run fedavg --tune", "own is not empty and holds no run"),
        ("compare fedavg --batch-size 8", "compare fedavg --batch-size 9 --tune", "for fedavg batch_size is 8 there"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_directory_of_another_experiment_is_refused_before_any_rate_is_tried(tried, capsys, first, second, said, dry):
    """All rates were tried, and a tuning.json left there, first."""
    more = ["--clients", "4", "--model", "linear", "--rounds", "2", "--run-dir", "own"]
    assert cli.main([*first.split(), *more]) == 0
    files_there = sorted(pathlib.Path("own").rglob("*"))
    capsys.readouterr()
    if dry and second.startswith("compare"):
        return
    assert cli.main([*second.split(), *more, *dry]) == 2
    found = capsys.readouterr().err
    assert found.count("\n") == 1
    assert re.search(said, found)
    assert "tuning is" not in found
    assert not tried.rates
    assert sorted(pathlib.Path("own").rglob("*")) == files_there
