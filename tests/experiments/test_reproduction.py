"""A recipe in its directory: killed and repeated it does the rest, and it takes no other's directory."""

import dataclasses
import json
import math
import signal

import pytest

from fedjax_cluster import cli, files, provenance
from fedjax_cluster.experiments import places, reproduction
from fedjax_cluster.experiments import recipe as recipes
from fedjax_cluster.experiments.cells import headings, shortened
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.reproduction import RAN, reproduce
from fedjax_cluster.recipes import catalogue, figures, studies
from fedjax_cluster.report import style
from fedjax_cluster.simulation import progress

BASE = RunConfig(method="fedavg", clients=4, clusters=2, rounds=3, eval_every=1, examples_per_client=20)
METRICS = headings(accuracy="accuracy (%)", last="last accuracy")


def tiny(**changes):
    settings = {
        "quick": shortened(rounds=1), "metrics": METRICS, "seeds": 2, "figure": figures.sweep("accuracy", "x", "y"),
        "measure": lambda result: {"last": result.history["accuracy"][-1]}, **changes,
    }  # fmt: skip
    base = settings.pop("base", BASE)
    return recipes.table(
        "tiny", "Tiny", "4 clients.", base, {"Global": {}}, {"C=4": {}, "C=5": {"clients": 5}}, **settings
    )


@pytest.fixture
def runs(monkeypatch):
    """Counts the runs that are begun."""
    begun, run = [], reproduction.run

    def counting(config, **options):
        begun.append((config.clients, config.seed))
        return run(config, **options)

    monkeypatch.setattr(reproduction, "run", counting)
    return begun


@pytest.mark.slow
def test_killed_and_repeated_it_does_the_missing_runs_only(tmp_path, runs, monkeypatch, capsys):
    whole, _ = reproduce(tiny(), directory=tmp_path / "whole")
    assert runs == [(4, 0), (4, 1), (5, 0), (5, 1)]
    counting, runs[:] = reproduction.run, []

    def killed(config, **options):
        if len(runs) == 3:
            raise KeyboardInterrupt
        return counting(config, **options)

    monkeypatch.setattr(reproduction, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        reproduce(tiny(), directory=tmp_path / "killed")
    monkeypatch.setattr(reproduction, "run", counting)
    runs[:] = []
    over = tmp_path / "killed" / "runs" / next((tmp_path / "killed" / "runs").glob("*.json")).stem
    over.mkdir()  # as where it is killed between a run's record and the end of its directory
    rows, outcomes = reproduce(tiny(), directory=tmp_path / "killed")
    assert not over.exists()
    assert runs == [(5, 1)]
    assert "3 of 4 runs done before" in capsys.readouterr().err
    assert [row.ours for row in rows] == [row.ours for row in whole]
    assert [len(history["round"]) for history in outcomes["Global", "C=4"].histories] == [3, 3]
    left = json.loads((tmp_path / "killed" / RAN).read_text())
    assert (left["recipe"], left["version"], left["seeds"], left["runs"], left["timed_runs"]) == (
        "tiny", "everyday", 2, 4, 4,
    )  # fmt: skip
    assert left["seconds"] > 0
    assert set(left["versions"]) == {"fedjax_cluster", "jax", "python"}
    assert left["device"]
    runs[:] = []
    reproduce(tiny(), seeds=3, directory=tmp_path / "killed")
    assert runs == [(4, 2), (5, 2)]


@pytest.mark.slow
def test_a_long_run_goes_on_where_its_checkpoint_is(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "CHECKPOINT_SECONDS", 0.0)
    seen = []

    def watch(federation):
        def interrupted(evaluation):
            seen.append(evaluation.round)
            if len(seen) == 2:
                signal.raise_signal(signal.SIGINT)

        return [interrupted]

    with pytest.raises(KeyboardInterrupt):
        reproduce(tiny(watch=watch, seeds=1), directory=tmp_path)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["Global-C=4-seed0"]
    reproduce(tiny(watch=watch, seeds=1), directory=tmp_path)
    assert seen == [1, 2, 3, 1, 2, 3]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"Global-C=4-seed0.json", "Global-C=5-seed0.json"}
    left = json.loads((tmp_path / RAN).read_text())
    assert (left["runs"], left["timed_runs"]) == (2, 1)


def test_a_directory_of_something_else_is_refused_and_kept(tmp_path, runs):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not empty and holds no reproduction"):
        reproduce(tiny(), directory=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    kept = tmp_path / "kept"
    reproduce(tiny(), quick=True, directory=kept)
    with pytest.raises(ValueError, match="version is quick there and everyday here"):
        reproduce(tiny(), directory=kept)
    changed = tiny(base=BASE.__class__(**{**BASE.__dict__, "learning_rate": 0.3}))
    count = len(runs)
    with pytest.raises(ValueError, match=r"other settings: learning_rate is .* there and 0\.3 here"):
        reproduce(changed, quick=True, directory=kept)
    assert len(runs) == count
    assert (kept / "table.json").is_file()


@pytest.mark.slow
def test_a_setting_that_a_recipe_has_no_more_is_another_run(tmp_path, runs, capsys):
    """Settings at their usual values are left out, and only those of here were compared."""
    attacked = dataclasses.replace(BASE, fault="sign_flip", fault_share=0.5)
    reproduce(tiny(base=attacked), quick=True, directory=tmp_path)
    count = len(runs)
    with pytest.raises(ValueError, match="other settings: fault is sign_flip there and None here"):
        reproduce(tiny(), quick=True, directory=tmp_path)
    assert len(runs) == count
    for path in (tmp_path / "runs").iterdir():
        record = files.unsealed(files.read_json(path))
        files.write_json(path, files.sealed({**record, "ran": {**record["ran"], "commit": "another"}}))
    capsys.readouterr()
    reproduce(tiny(base=attacked), quick=True, directory=tmp_path)
    assert f"{count} of {count} runs done before, {count} of them by another commit" in capsys.readouterr().err


def test_recipes_keep_to_their_own_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = catalogue.place_of("cfl-gp-linear-regression")
    place.mkdir(parents=True)
    with places.place(None, "cfl_gp-linear_regression", kept=False) as directory:
        assert str(directory) == "runs/cfl-gp-linear-regression"
    versions = ({}, {"quick": True}, {"full": True})
    assert len({catalogue.place_of("flag-table8", **version) for version in versions}) == 3


def part(directory, seed):
    return files.unsealed(json.loads((directory / "runs" / f"seed{seed}.json").read_text()))


def test_of_a_study_that_was_interrupted_the_missing_parts_are_done(tmp_path, capsys):
    asked = []

    def of_seed(seed):
        asked.append(seed)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"ARI": math.nan if seed == 1 else 0.5 * seed}

    def carried_out(seeds, quick, kept):
        found = studies.of_seeds(kept, seeds, of_seed)
        with style.drawing(style.SINGLE, 1.0) as figure:
            return studies.rows_over_seeds("a", "b", found, "digits"), figure

    study = recipes.Study("drawn", "Drawn", "Ours.", 4, 1.0, carried_out)
    with pytest.raises(KeyboardInterrupt):
        reproduce(study, directory=tmp_path)
    ((row,), _), again = reproduce(study, directory=tmp_path), asked[3:]
    # The first seed's pictures are not kept.
    assert (asked[:3], again) == ([1, 2, 3], [3, 0])
    assert (row.ours, row.valued, row.seeds) == (pytest.approx(2.5 / 3), 3, 4)
    told = capsys.readouterr().err
    assert "seed1: done before\nseed2: done before" in told
    ran = json.loads((tmp_path / "ran.json").read_text())
    assert (ran["runs"], ran["timed_runs"]) == (1, 1)
    kept = [json.loads(path.read_text())["seconds"] for path in (tmp_path / "runs").glob("*.json")]
    assert len(kept) == 3
    assert ran["seconds"] >= round(sum(kept), 1)
    # Of fewer seeds the others' time is not counted.
    (tmp_path / "runs" / "seed3.json").write_text(json.dumps(files.sealed({**part(tmp_path, 3), "seconds": 1000.0})))
    reproduce(study, seeds=2, directory=tmp_path)
    ran = json.loads((tmp_path / "ran.json").read_text())
    assert (ran["seeds"], ran["seconds"] < 1000) == (2, True)
    # What other code gave is not mixed with what this gives.
    other = {**part(tmp_path, 2), "found": {"ARI": 77.0}}
    other["ran"]["commit"] = "another"
    (tmp_path / "runs" / "seed2.json").write_text(json.dumps(files.sealed(other)))
    (row,), _ = reproduce(study, directory=tmp_path)
    assert row.ours == pytest.approx(2.5 / 3)
    assert "1 part of another commit or version: done again" in capsys.readouterr().err
    for content in ("{", '{"found": 1}'):
        (tmp_path / "runs" / "seed2.json").write_text(content)
        with pytest.raises(ValueError, match=r"seed2\.json.*delete it, and the part is done again"):
            reproduce(study, directory=tmp_path)


def test_resume_goes_on_with_a_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_prepare_jax", lambda: None)
    monkeypatch.setitem(catalogue.RECIPES, "tiny", tiny())
    assert cli.main(["reproduce", "tiny", "--seeds", "1", "--run-dir", str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "runs" / "Global-C=5-seed0.json").unlink()
    assert cli.main(["resume", str(tmp_path / "out"), "--rounds", "9"]) == 2
    assert cli.main(["resume", str(tmp_path / "out")]) == 0
    assert "1 of 2 runs done before" in capsys.readouterr().err
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 2


def test_without_a_terminal_lines_tell_how_far_a_run_is(monkeypatch, caplog):
    caplog.set_level("INFO", "fedjax_cluster")
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Progress("cfl_gp", 50, 0, enabled=None) as bar:
        for done in (10, 20, 30):
            now[0] += 20
            bar.update(done, {"accuracy": 0.5}, 10.0)
    with progress.Progress("cfl_gp", 50, 0, enabled=False) as bar:
        now[0] += 60
        bar.update(10, {}, 10.0)
    assert [record.message for record in caplog.records] == [
        "cfl-gp: round 20 of 50, accuracy 0.500, 10 client-rounds/s"
    ]


def test_a_commit_is_that_of_a_checkout(tmp_path):
    assert provenance.commit(tmp_path) is None


@pytest.mark.slow
def test_a_recipe_that_fails_as_it_draws_has_not_ended(tmp_path):
    """What tells of the table's runs would be that of an earlier table."""
    reproduce(tiny(seeds=1), directory=tmp_path / "r")
    assert (tmp_path / "r" / RAN).exists()

    with pytest.raises(AttributeError):
        reproduce(tiny(seeds=2, figure=lambda cells, outcomes: {"": None}), directory=tmp_path / "r")
    assert not (tmp_path / "r" / RAN).exists()
