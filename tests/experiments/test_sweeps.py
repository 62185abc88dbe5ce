"""Sweeps: cells of a grid or drawn at random, a table and a picture of them, taken up where they were killed."""

import csv
import json
import pathlib
import re

import numpy as np
import pytest

from fedjax_cluster import cli
from fedjax_cluster.experiments import comparison, flags, plans, saved_runs, sweeps

pytestmark = pytest.mark.usefixtures("here")
LINE = "sweep fedavg --batch-size 8 64 --clients 4 8 --rounds 2 --model linear --seeds 2 --run-dir own"
WORDS = LINE.split()


@pytest.fixture
def undrawn(monkeypatch):
    """Comparisons without their pictures."""
    monkeypatch.setattr(saved_runs, "leave_comparison", lambda *given, **options: [])


def cells(line):
    """Label -> cell of a command line."""
    method, *rest = line.split()
    return flags.parse_sweep(method, rest, "sweep")[0]


@pytest.mark.slow
def test_a_sweep_runs_every_cell_over_seeds_and_leaves_table_picture_and_page(pretend, capsys, monkeypatch):
    pretend.failing = {"batch-size-64-clients-8-seed1": RuntimeError("out of memory")}
    assert cli.main(WORDS) == 1
    said = capsys.readouterr()
    assert "1 of 4 cells failed: batch size 64, clients 8 (seed 1)" in said.err
    assert "batch size 64, clients 8 failed: seed 1: RuntimeError: out of memory" in said.out
    with open("own/comparison.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["batch size"], row["clients"]) for row in rows] == [("8", "4"), ("8", "8"), ("64", "4"), ("64", "8")]
    assert float(rows[0]["test accuracy (%)"]) == pytest.approx(56.1)
    assert float(rows[0]["test accuracy (%) sample std"]) == pytest.approx(np.std([55.6, 56.6], ddof=1))
    assert not {"mean rank", "p against best", "method"} & set(rows[0])
    assert {"sensitivity.png", "learning_curves.png", "comparison.md"} <= {
        path.name for path in pathlib.Path("own").iterdir()
    }
    page = pathlib.Path("own/report.html").read_text()
    assert "FedAvg over batch size and clients" in page
    assert "4 cells over 2 seeds: batch size 8, clients 4 and batch size 8, clients 8 with 56.1 ± 0.7 % share" in page
    # What failed is tried again, and nothing else; the same by either command.
    pretend.failing, pretend.directories = {}, []
    monkeypatch.setattr(saved_runs, "leave_comparison", lambda *given, **options: [])
    assert cli.main(["resume", "own"]) == 0
    assert pretend.directories == ["batch-size-64-clients-8-seed1"]
    assert cli.main(WORDS) == 0
    assert len(pretend.directories) == 1
    assert cli.main(["report", "own"]) == 0
    assert "batch" in capsys.readouterr().out


def test_cells_of_other_settings_want_another_directory(pretend, undrawn, capsys):
    """They were in one table and curve, and nothing told them apart."""
    line = "sweep fedavg --learning-rate {} --clients 4 --rounds 2 --model linear --run-dir own {}"
    assert cli.main(line.format("0.1 0.3", "").split()) == 0
    begun = len(pretend.directories)
    for more, told in (
        ("--local-steps 20", "local_steps is 10 there and 20 here"),
        ("--weight-decay 0.3", "weight_decay is 0.0 there and 0.3 here"),
        ("--fault drop_out", "fault is None there and drop_out here"),
        ("--angles 0 180", "angles is"),
    ):
        capsys.readouterr()
        assert cli.main(line.format("0.9 1.5", more).split()) == 2
        assert f"belongs to another sweep: {told}" in capsys.readouterr().err.replace("scenario_options.", "")
    assert len(pretend.directories) == begun
    assert cli.main(line.format("0.9 1.5", "").replace("--rounds 2", "--rounds 3").split()) == 0
    capsys.readouterr()
    assert cli.main(["report", "own"]) == 0
    # Nothing told the cells of more rounds apart.
    assert re.search(r"\brounds\b", capsys.readouterr().out)
    # What follows from an option that is swept, or from the rounds, is not another setting.
    for words in (
        "fedavg --local-steps 1 2 --rounds 2 --run-dir steps",
        "fedavg --local-steps 10 20 --rounds 2 --run-dir steps",
        "fedavg --learning-rate 0.5 0.6 --rounds 40 --run-dir own",
    ):
        assert cli.main(["sweep", *words.split(), "--clients", "4", "--model", "linear"]) == 0


def test_killed_at_any_run_it_finishes_the_rest_only(pretend, undrawn, capsys):
    pretend.failing = {"batch-size-8-clients-8-seed0": KeyboardInterrupt()}
    assert cli.main(WORDS) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; go on with: fedjax-cluster resume own"
    assert len(pretend.directories) == 2
    pretend.failing = {}
    assert cli.main(WORDS) == 0
    assert len(pretend.directories) == len(set(pretend.directories)) == 8
    # More values and seeds are more runs; other options, or a comparison, want another directory.
    assert cli.main([*WORDS[:4], "32", *WORDS[4:]]) == 0
    assert len(pretend.directories) == 12
    assert cli.main([*WORDS[:3], "16", "24", *WORDS[5:]]) == 0
    assert len(comparison.read(pathlib.Path("own")).cells) == 10
    capsys.readouterr()
    for words in (WORDS[:5] + WORDS[8:], ["compare", "fedavg", "--run-dir", "own"]):
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert "belongs to a sweep of batch_size and clients, not to" in said
        assert said.count("\n") == 1
    assert cli.main([*WORDS[:2], *WORDS[5:8], *WORDS[2:5], *WORDS[8:]]) == 2
    said = capsys.readouterr().err
    assert "belongs to a sweep of batch_size and clients, not to a sweep of clients and batch_size; give the" in said


def test_a_combination_that_cannot_be_is_a_row_also_after_resuming(pretend, undrawn, capsys):
    line = "sweep ifca --clusters 2 6 --clients 4 8 --rounds 2 --model linear --run-dir own"
    pretend.failing = {"clusters-6-clients-8-seed0": KeyboardInterrupt()}
    assert cli.main(line.split()) == 130
    pretend.failing = {}
    assert cli.main(["resume", "own"]) == 0
    why = "clusters (given) 6, clients 4 failed: clusters is 6 but there are only 4 clients"
    assert why in " ".join(capsys.readouterr().out.split())
    outcomes = saved_runs.read_comparison(pathlib.Path("own"))
    assert [each.label for each in outcomes if each.failed] == ["clusters 6, clients 4"]
    assert len(pretend.done) == 3
    assert cli.main(["resume", "own", "--rounds", "4"]) == 0
    assert {config.rounds for config in comparison.read(pathlib.Path("own")).configs.values()} == {4}


def test_any_setting_or_option_is_swept_in_the_order_of_the_words():
    found = cells("cfl-gp --every 1 2 --scenario rotated label-swap --clusters auto 4")
    assert next(iter(found)) == "every 1, scenario rotated, clusters auto"
    assert [cell.config.scenario for cell in found.values()] == 2 * ["rotated", "rotated", "label_swap", "label_swap"]
    assert found["every 2, scenario rotated, clusters 4"].config.method_options["every"] == 2
    # What a method fills in follows from each cell's own values.
    found = cells("cfl-gp --averaging gradients models")
    assert [cell.config.learning_rate for cell in found.values()] == [0.3, 0.1]
    # A list is one value.
    assert cells("ifca --angles 0 90 --learning-rate 0.1 1")["learning rate 1"].config.scenario_options == {
        "angles": [0.0, 90.0]
    }


def test_draws_are_log_uniform_for_positive_floats_and_begin_alike(caplog):
    caplog.set_level("INFO", "fedjax_cluster")
    axes = {"learning_rate": (0.001, 10.0), "batch_size": (8, 64), "optimizer": ("sgd", "adam")}
    few, many = sweeps.drawn(axes, 10, 0), sweeps.drawn(axes, 1000, 0)
    assert many[:10] == few
    rates = np.log10([values["learning_rate"] for values in many])
    # Of uniform draws one in a hundred would lie below 0.1.
    assert 0.45 < np.mean(rates < -1) < 0.55
    assert {values["optimizer"] for values in many} == {"sgd", "adam"}
    assert {values["batch_size"] for values in many} == set(range(8, 65))
    assert (
        "learning rate is drawn log-uniformly between 0.001 and 10; batch size is drawn uniformly from" in caplog.text
    )
    assert list(cells("ifca --momentum 0.0 0.9 --random 2")) != list(
        cells("ifca --momentum 0.0 0.9 --random 2 --seed 1")
    )
    assert len(cells("ifca --batch-size 1 3 --random 9")) == 3
    assert "only 3 different combinations were found for the 9 draws" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "a sweep needs an option with several values"),
        ("--seed 0 1", "seed cannot be swept: --seeds N repeats every cell"),
        ("--learning-rate 0.1 .1", "learning_rate has the value 0.1 twice"),
        ("--learning-rate 0.1 x", "--learning-rate"),
        ("--learning-rate 0.1,1", "--learning-rate is '0.1,1'; it must be FLOAT, or several with spaces between"),
        ("--learning-rate 0.1 nan", "learning_rate has nan among its values; give numbers"),
        ("--learning-rate -1 -2", "learning_rate is -1.0; it must be"),
        ("--no-such-option 1 2", "--no-such-option"),
        ("--learning-rate 0.1 1 --random 0", "random is 0"),
        ("--learning-rate 0.1 1 --seeds 6000", "the sweep has 12000 runs"),
        ("--local-steps 1 2 --local-epochs 1", "local_steps and local_epochs are both given"),
        ("--score-on 1 2", "--score-on"),  # of another method
    ],
)
def test_what_cannot_be_swept_is_one_line(words, message, capsys):
    assert cli.main(["sweep", "fedavg", *words.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not pathlib.Path("runs").exists()


def test_a_dry_sweep_tells_its_cells_and_writes_nothing(capsys):
    assert cli.main([*WORDS[:-2], "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("2 runs") == 4
    assert not pathlib.Path("runs").exists()


def test_a_dry_sweep_plans_each_cell_on_its_own_data_and_lists_what_cannot_be(monkeypatch, capsys):
    real, planned = plans.plan, []

    def plan(config, directory, federation, **rest):
        planned.append((config.clients, len(federation.train.num_examples)))
        return real(config, directory, federation, **rest)

    monkeypatch.setattr(plans, "plan", plan)
    monkeypatch.setenv("COLUMNS", "200")
    line = "sweep ifca --clusters 2 6 --clients 4 8 --model linear --dry-run"
    assert cli.main(line.split()) == 0
    assert planned == [(4, 4), (8, 8), (8, 8)]
    head, _, rows = capsys.readouterr().out.partition("would do")
    assert "test fraction" in head
    assert not any(line.startswith(("clients", "clusters", "examples")) for line in head.splitlines())
    assert rows.count("\nclusters") == 4
    assert "refused: clusters is 6 but there are only 4 clients" in " ".join(rows.split())


def test_help_is_short_and_says_that_flags_take_several_values(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main(["sweep", "cfl", "--help"])
    shown = capsys.readouterr().out
    assert sum(-(-len(line) // 80) or 1 for line in shown.splitlines()) <= 100
    for text in ("--learning-rate FLOAT ...", "--random INT", "--seeds INT", "(default: 0.1)", "every combination"):
        assert text in shown


def test_help_and_mistakes_name_the_words_that_a_sweep_takes(capsys, monkeypatch):
    """Of what is on or off, too, and `None`, which stands for a flag that was not given, is none of them."""
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        cli.main(["sweep", "cfl-gp", "--help-all"])
    shown = capsys.readouterr().out
    assert "--cluster-cohort {True,False} ..." in shown
    assert "{None}" not in shown
    for flag, word, known in (("--optimizer", "momentum", "sgd"), ("--cluster-cohort", "yes", "False")):
        assert cli.main(["sweep", "cfl-gp", flag, word]) == 2
        said = capsys.readouterr().err
        assert f"'{known}'" in said
        assert "None" not in said


def test_from_python_options_have_their_names(pretend):
    axes = {"learning_rate": (0.1, 1.0), "every": [1, 2], "scenario_options.angles": [(0, 90), (0, 180)]}
    settings = {"method": "cfl_gp", "clients": 4, "rounds": 2, "model": "linear", "method_options": {"every": 5}}
    outcomes = sweeps.sweep(settings, axes, run_dir="own", failed=print)
    assert len(outcomes) == 8
    content = json.loads(pathlib.Path("own/comparison.json").read_text())
    last = content["configs"]["learning rate 1, every 2, angles 0 180"]
    assert (last["method_options"], last["scenario_options"]) == ({"every": 2}, {"angles": [0, 180]})
    assert pretend.done == [("cfl_gp", 0)] * 8
    sweeps.sweep({**settings, "seed": 5}, {"every": [1, 2]}, run_dir="other")
    assert pretend.done[8:] == [("cfl_gp", 5)] * 2
    for wrong, message in (
        ({"evry": (1, 2)}, "'evry': there is no such"),
        ({"rounds": 3}, "the values of rounds are 3"),
    ):
        with pytest.raises(ValueError, match=message):
            sweeps.sweep(settings, wrong)


def test_from_python_what_cannot_be_is_an_outcome_too(caplog):
    settings = {"method": "ifca", "model": "linear", "clients": 4, "rounds": 1}
    can, cannot = sweeps.sweep(settings, {"clusters": (2, 9)}, progress=False)
    assert len(can.summaries) == 1
    assert not cannot.summaries
    assert cannot.failed[0].startswith("clusters is 9 but there are only 4 clients")
    assert "clusters 9 seed 0 failed: clusters is 9" in caplog.text
    with pytest.raises(ValueError, match="clusters is 9"):
        sweeps.sweep(settings, {"clusters": (2, 9)}, progress=False, failed=None)


def test_a_name_that_no_file_can_have_is_told_apart():
    names = {comparison.run_name(f"dataset {path}", 0) for path in ("a/b", "a-b", "a b", "x" * 300, "x" * 301)}
    assert len(names) == 4  # a space is a hyphen
    assert all("/" not in name and len(name) < 130 for name in names)
