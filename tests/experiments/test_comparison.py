"""Comparisons that finish: a run that fails is a row, an interrupted comparison is taken up as a whole."""

import csv
import dataclasses
import json
import os
import pathlib

import numpy as np
import pytest

import fedjax_cluster as fc
from fedjax_cluster import cli
from fedjax_cluster.experiments import comparison, runs, saved_runs
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.simulation.run_directory import AnotherExperiment

pytestmark = pytest.mark.usefixtures("here")
TINY = {"clients": 4, "clusters": 2, "rounds": 2, "eval_every": 1, "model": "linear"}
CONFIGS = {name: RunConfig(method=name.replace("-", "_"), **TINY) for name in ("fedavg", "ifca", "local-only")}


WORDS = "compare fedavg ifca local-only --clients 4 --clusters 2 --rounds 2 --eval-every 1 --model linear --seeds 3"
SHORT = ("--clients", "4", "--rounds", "1", "--model", "linear")
MISTAKE = ValueError("this cannot be")


def test_a_method_that_fails_is_a_row_and_the_others_run(pretend, capsys):
    pretend.failing = {("ifca", seed): RuntimeError("out of\nmemory") for seed in range(3)}
    pretend.failing["local_only", 1] = MISTAKE
    assert cli.main([*WORDS.split(), "--run-dir", "own"]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == "fedjax-cluster: 2 of 3 methods failed: ifca, local-only (seed 1)"
    with open("own/comparison.csv", newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert rows["IFCA"]["failed"] == "RuntimeError: out of memory"
    assert rows["Local only"]["failed"] == "seed 1: this cannot be"
    assert float(rows["Local only"]["test accuracy (%)"]) == pytest.approx(72)
    assert "IFCA failed: RuntimeError: out of memory" in captured.out
    assert "IFCA & failed" in pathlib.Path("own/comparison.tex").read_text()
    assert pathlib.Path("own/learning_curves.png").exists()
    # What failed is tried again, and nothing else.
    pretend.failing, pretend.done = {}, []
    assert cli.main(["resume", "own"]) == 0
    assert pretend.done == [("ifca", 0), ("ifca", 1), ("ifca", 2), ("local_only", 1)]
    assert "failed" not in capsys.readouterr().out


def test_status_1_where_runs_fail_and_2_where_all_do_for_one_reason(pretend, capsys):
    pretend.failing = {
        (method, seed): ValueError(method) for method in ("fedavg", "ifca", "local_only") for seed in range(3)
    }
    assert cli.main([*WORDS.split(), "--run-dir", "own"]) == 1
    assert "3 of 3 methods failed" in capsys.readouterr().err
    pretend.failing = dict.fromkeys(pretend.failing, MISTAKE)
    assert cli.main([*WORDS.split(), "--run-dir", "other"]) == 2
    assert capsys.readouterr().err == "fedjax-cluster: this cannot be\n"
    assert not os.path.exists("other")


def test_a_configuration_that_one_method_refuses_is_its_row(pretend, capsys):
    words = WORDS.replace("fedavg", "cfl-gp").replace("local-only", "").replace("--clusters 2", "--clusters auto")
    assert cli.main([*words.split(), "--run-dir", "own"]) == 1
    assert "IFCA failed: clusters is 'auto', but ifca needs a number" in capsys.readouterr().out
    assert [method for method, _ in pretend.done] == 3 * ["cfl_gp"]


def test_interrupted_it_names_the_comparison_and_either_way_does_the_rest_only(pretend, capsys):
    pretend.failing = {("ifca", 1): KeyboardInterrupt("own/ifca-seed1")}
    words = [*WORDS.split(), "--run-dir", "own"]
    assert cli.main(words) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; go on with: fedjax-cluster resume own"
    assert not os.path.exists("own/.lock")
    assert cli.main(["report", "own"]) == 0
    shown = capsys.readouterr().out
    assert "IFCA failed: seed 1, 2: has not ended; continue the comparison with resume" in shown
    pretend.done, pretend.failing = [], {("local_only", 0): KeyboardInterrupt()}
    assert cli.main(["resume", "own"]) == 130
    assert pretend.done == [("ifca", 1), ("ifca", 2)]
    pretend.done, pretend.failing = [], {}
    assert cli.main(words) == 0
    assert pretend.done == [("local_only", 0), ("local_only", 1), ("local_only", 2)]
    with open("own/comparison.csv", newline="") as file:
        ranks = {row["method"]: float(row["mean rank"]) for row in csv.DictReader(file)}
    assert ranks == {"FedAvg": 3, "IFCA": 2, "Local only": 1}


@pytest.mark.slow
def test_a_comparison_gets_more_seeds_methods_and_rounds_but_no_other_settings(pretend, capsys):
    assert cli.main([*WORDS.split(), "--run-dir", "own"]) == 0
    pretend.done.clear()
    assert cli.main([*WORDS.replace("--seeds 3", "--seeds 4").split(), "--run-dir", "own"]) == 0
    assert pretend.done == [("fedavg", 3), ("ifca", 3), ("local_only", 3)]
    assert cli.main(["resume", "own", "--rounds", "3"]) == 0
    assert comparison.read(pathlib.Path("own")).configs["ifca"].rounds == 3
    capsys.readouterr()
    for change, message in (
        (["--batch-size", "8"], "for fedavg batch_size is 64 there and 8 here"),
        ([], "rounds is 2, but"),
    ):
        assert cli.main([*WORDS.split(), "--run-dir", "own", *change]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1


def rows_of(path):
    with open(path, newline="") as file:
        return {row["method"]: row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_a_comparison_keeps_the_methods_and_seeds_that_are_not_asked_for_again(pretend):
    words = [*WORDS.split(), "--run-dir", "own"]
    pretend.failing = {("local_only", 2): RuntimeError("out of memory")}
    assert cli.main(words) == 1
    own = pathlib.Path("own")
    table = rows_of(own / "comparison.csv")
    pretend.done.clear()
    fewer = [*words[:2], *words[4:]]
    fewer[fewer.index("3")] = "2"
    assert cli.main(fewer) == 0
    again = json.loads((own / "comparison.json").read_text())
    assert (again["seeds"], again["failed"]) == ([0, 1, 2], {"local-only": {"2": "RuntimeError: out of memory"}})
    assert list(again["configs"]) == ["fedavg", "ifca", "local-only"]
    assert rows_of(own / "comparison.csv") == table
    assert not pretend.done, "what was not asked for is not run"
    # Another method, another seed: what is missing is told, and `resume` does it.
    more = [*words[:1], "cfl-gp", *words[4:]]
    more[more.index("3")] = "4"
    assert cli.main(more) == 0
    assert pretend.done == [("cfl_gp", seed) for seed in range(4)]
    found = rows_of(own / "comparison.csv")
    assert list(found) == ["FedAvg", "IFCA", "Local only", "CFL-GP"]
    assert found["IFCA"]["failed"] == "seed 3: has not ended; continue the comparison with resume"
    # What cannot be run at all leaves the comparison as it was.
    before = (own / "comparison.json").read_text()
    pretend.failing = {("pacfl", seed): MISTAKE for seed in range(3)}
    assert cli.main([*words[:1], "pacfl", *words[4:]]) == 2
    assert (own / "comparison.json").read_text() == before


@pytest.mark.slow
def test_pictures_of_an_older_comparison_are_drawn_anew_or_go(pretend, monkeypatch):
    def drawn():
        return {
            path.name: path.read_bytes() for path in pathlib.Path("own").iterdir() if path.suffix in (".png", ".pdf")
        }

    monkeypatch.setattr(fc.report.small_multiples, "MOST_IN_ONE", 3)
    words = [*WORDS.split(), "--run-dir", "own"]
    assert cli.main(words) == 0
    assert cli.main(["report", "own", "--format", "pdf"]) == 0
    pictures = drawn()
    both = ("pdf", "png")
    assert sorted(pictures) == [f"{name}.{kind}" for name in ("learning_curves", "small_multiples") for kind in both]
    assert cli.main([*words[:1], "cfl-gp", *words[4:]]) == 0
    found = drawn()
    assert sorted(found) == ["learning_curves.pdf", "learning_curves.png"]
    assert all(found[name] != pictures[name] for name in found)


def test_two_processes_do_not_work_in_one_comparison(pretend):
    (path := pathlib.Path("own")).mkdir()
    with fc.files.taken(path), pytest.raises(ValueError, match="own is in use by process"):
        comparison.compare(CONFIGS, run_dir=path, failed=print)
    assert not pretend.done


@pytest.mark.parametrize("content", ["{", "[]", '{"configs": 3}', '{"configs": {}, "seeds": 7, "failed": {}}'])
def test_a_damaged_comparison_is_one_line(content, capsys):
    pathlib.Path("own").mkdir()
    pathlib.Path("own/comparison.json").write_text(content)
    assert cli.main(["resume", "own"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_a_hook_the_error_is_raised(pretend):
    pretend.failing = {("ifca", 0): RuntimeError("out of memory")}
    with pytest.raises(RuntimeError, match="out of memory"):
        comparison.compare(CONFIGS, run_dir="own")
    with pytest.raises(ValueError, match="not the directory of a comparison"):
        comparison.resume("elsewhere")


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("20 clusters of 16 clients")])
def test_what_has_ended_before_an_error_stays_a_comparison(pretend, error):
    """Fault: after a ValueError of a later run comparison.json was deleted, which resume goes on from."""
    pretend.failing = {("ifca", 0): error}
    with pytest.raises(type(error)):
        comparison.compare(CONFIGS, run_dir="own")
    ended, pretend.failing = len(pretend.done), {}
    assert ended > 0
    assert len(comparison.resume("own")) == len(CONFIGS)
    assert len(pretend.done) == len(set(pretend.done)) == len(CONFIGS)


def test_two_labels_with_one_directory_are_refused(pretend):
    configs = {label: RunConfig(method="fedavg", clients=4) for label in ("my method", "my-method")}
    with pytest.raises(ValueError, match="'my method' and 'my-method' would have one directory below own"):
        comparison.compare(configs, run_dir="own")
    assert not pretend.done
    assert not pathlib.Path("own").exists()


def test_all_is_every_registered_method(monkeypatch, capsys):
    given = {}
    monkeypatch.setattr(comparison, "compare", lambda configs, **rest: given.update(configs) or [])
    monkeypatch.setattr(cli, "compared", lambda go_on, directory: go_on() and 0)
    assert cli.main(["compare", "--all", "--clients", "4"]) == 0
    assert [config.method for config in given.values()] == list(fc.algorithms.REGISTRY)
    assert cli.main(["compare", "ifca", "--all"]) == 2
    assert "leave out ifca, or --all" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_comparison_reads_back_what_it_did(monkeypatch):
    configs = {"fedavg": CONFIGS["fedavg"]}
    (one,) = comparison.compare(configs, seeds=(0, 1), run_dir="own", failed=print)
    began = []
    monkeypatch.setattr(fc.simulation.run, "run_segment", lambda *given, **more: began.append(given))
    (two,), (three,) = comparison.resume("own"), saved_runs.read_comparison(pathlib.Path("own"))
    assert not began
    assert one.label == two.label == three.label
    for found in zip(one.summaries, two.summaries, three.summaries, strict=True):
        assert len({summary["accuracy"] for summary in found}) == 1
    assert json.loads(pathlib.Path("own/comparison.json").read_text())["seeds"] == [0, 1]
    assert runs.load_run("own/fedavg-seed1").history["round"][-1] == 1
    with pytest.raises(ValueError, match=r"^own is not a run directory: .* of one, such as own/fedavg-seed0$"):
        runs.load_run("own")


# ------------------------------------------------------------------------------------- whose comparison it is


def test_what_the_first_comparison_was_not_given_is_another(pretend, capsys):
    """The mean's figures were called the median's."""
    words = [*WORDS.replace(" local-only", "").split(), "--run-dir", "own"]
    assert cli.main(words) == 0
    before = pathlib.Path("own/comparison.json").read_text()
    assert cli.main([*words, "--aggregation", "median"]) == 2
    assert "for fedavg aggregation is None there and median here" in capsys.readouterr().err
    assert pathlib.Path("own/comparison.json").read_text() == before


def files_of(path):
    return {each: each.read_bytes() for each in pathlib.Path(path).iterdir() if each.is_file()}


@pytest.mark.slow
def test_a_run_that_is_another_experiment_now_leaves_the_tables_as_they_are(monkeypatch, capsys):
    """Fault: the row of a method whose program had changed since was written anew, without its figures."""
    words = ["compare", "fedavg", "mine", *SHORT, "--run-dir", "own"]
    for warm_up in (10, 3):
        parts = {"__annotations__": {"warm_up": int}, "warm_up": fc.options.option("rounds", default=warm_up)}
        monkeypatch.setitem(fc.algorithms.REGISTRY, "mine", type("mine", (fc.algorithms.fedavg,), parts, abstract=True))
        if warm_up == 10:
            assert cli.main(words) == 0
            before = files_of("own")
    capsys.readouterr()
    for again in (words, [*words, "--seeds", "2"], ["resume", "own"]):
        assert cli.main(again) == 2
        assert files_of("own") == before
        said = capsys.readouterr().err.splitlines()[-1]
        assert "the run directory own/mine-seed0 belongs to another experiment: warm_up is 10 there and 3 here" in said
        assert said.endswith("choose another directory for the comparison; what own has is left as it is")


def test_runs_that_the_tables_did_not_have_may_be_of_another_experiment(pretend):
    another = AnotherExperiment("the run directory belongs to another experiment; choose another directory")
    pretend.failing = {("ifca", 1): MISTAKE}
    assert cli.main([*WORDS.split(), "--run-dir", "own"]) == 1
    pretend.failing = {("ifca", 1): another}
    assert cli.main([*WORDS.split(), "--run-dir", "own"]) == 1
    assert comparison.read(pathlib.Path("own")).failed == {"ifca": {1: str(another)}}
    sweep = ["sweep", "fedavg", "--learning-rate", "0.1", "1", *SHORT, "--run-dir", "swept"]
    pretend.failing = {}
    assert cli.main(sweep) == 0
    before, pretend.failing = files_of("swept"), {"learning-rate-1-seed0": another}
    assert cli.main([*sweep[:4], "3", *sweep[4:]]) == 2
    assert files_of("swept") == before


def own_rows(seed, rows=60, clients=5):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    np.savez("my.npz", x=x, y=(x[:, 0] > 0).astype(np.int32), user=np.arange(rows) % clients)


def test_other_rows_under_the_same_name_are_other_data(pretend, capsys):
    """One table had a method on the file's old rows beside another on its new ones."""
    words = [
        *["compare", "fedavg", "--scenario", "users", "--dataset", "my.npz", "--model", "linear", "--rounds", "2"],
        "--run-dir",
        "own",
    ]
    own_rows(0)
    assert cli.main(words) == 0
    own_rows(1)
    for changed in ([*words[:1], "fairavg", *words[2:]], [*words, "--seeds", "2"]):
        assert cli.main(changed) == 2
        assert "another comparison: its data are my.npz@" in capsys.readouterr().err
    own_rows(0)
    assert cli.main([*words, "--seeds", "2"]) == 0
    assert pretend.done == [("fedavg", 0), ("fedavg", 1)]


def test_methods_that_are_added_get_the_clients_that_there_are(monkeypatch):
    """Of a method whose usual clients are more, the comparison's first methods could not be taken up any more."""
    given = []

    def run(config, *, federation, **rest):
        given.append((config.method, len(federation.train.num_examples)))
        raise RuntimeError(f"{config.method} of {config.seed}")

    own_rows(0, rows=9000)
    monkeypatch.setattr(comparison, "run", run)
    words = [
        *[
            "compare",
            "fedavg",
            "--scenario",
            "dirichlet",
            "--dataset",
            "./my.npz",
            "--model",
            "linear",
            "--rounds",
            "2",
        ],
        "--run-dir",
        "own",
    ]
    clients = {name: fc.algorithms.REGISTRY[name].defaults.clients for name in ("fedavg", "gradient_loss")}
    assert clients["fedavg"] < clients["gradient_loss"]
    for method in ("fedavg", "gradient-loss", "fedavg"):
        cli.main([*words[:1], method, *words[2:]])
    cli.main(["resume", "own"])
    assert {number for _, number in given} == {clients["fedavg"]}
    assert comparison.read(pathlib.Path("own")).clients == clients["fedavg"]


def test_a_runs_directory_is_no_comparisons(pretend, capsys):
    pathlib.Path("own").mkdir()
    pathlib.Path("own/config.json").write_text("{}")
    assert cli.main([*WORDS.split(), "--run-dir", "own"]) == 2
    assert "own holds a run, not a comparison" in capsys.readouterr().err
    assert os.listdir("own") == ["config.json"]


def test_what_failed_is_not_read_from_an_older_run(pretend):
    words = [*WORDS.split(), "--run-dir", "own"]
    assert cli.main(words) == 0
    pretend.failing = {("ifca", 1): MISTAKE}
    assert cli.main(words) == 1
    (ifca,) = [each for each in saved_runs.read_comparison(pathlib.Path("own")) if each.label == "ifca"]
    assert ifca.failed == {1: "this cannot be"}
    assert len(ifca.summaries) == 2


@pytest.mark.parametrize(("first", "second", "every"), [(300, 600, 10), (90, 91, 10), (600, 900, 20), (8, 100, 2)])
def test_more_rounds_keep_the_rounds_of_evaluation(first, second, every):
    short, long = (RunConfig(method="fedavg", rounds=rounds) for rounds in (first, second))
    assert runs.as_begun(long, short).eval_every == short.eval_every == every
    asked = RunConfig(method="fedavg", rounds=second, eval_every=7)
    assert runs.as_begun(asked, short).eval_every == 7
    assert runs.as_begun(long, dataclasses.replace(short, eval_every=35)) == long


def test_a_longer_run_and_comparison_are_taken_up_across_the_usual_rounds_of_evaluation(pretend):
    words = [*WORDS.replace("--eval-every 1 ", "").replace("--rounds 2", "--rounds 300").split(), "--run-dir", "own"]
    assert cli.main(words) == 0
    for more in ("600", "900"):
        assert cli.main([more if word == "300" else word for word in words]) == 0
    assert {config.eval_every for config in comparison.read(pathlib.Path("own")).configs.values()} == {10}


def test_runs_that_could_not_be_kept_are_named_and_end_with_status_1(pretend, monkeypatch, capsys):
    def unkept(config, **given):
        result = pretend(config, **given)
        return dataclasses.replace(result, kept=config.method != "ifca")

    monkeypatch.setattr(comparison, "run", unkept)
    assert cli.main([*WORDS.replace("--seeds 3", "").split(), "--run-dir", "own"]) == 1
    assert "the end of ifca seed 0 could not be kept in own; make room there" in capsys.readouterr().err


@pytest.mark.parametrize(("seeds", "message"), [((0, 0), "seeds has 0 twice"), ((), "seeds has no seed")])
def test_seeds_are_each_given_once(seeds, message):
    with pytest.raises(ValueError, match=message):
        comparison.compare({"a": RunConfig(method="fedavg", clients=4)}, seeds=seeds)
