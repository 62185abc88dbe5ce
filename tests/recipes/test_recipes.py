"""How recipes are written and carried out; that each is affordable and stated is asserted with the command line."""

import json

import numpy as np
import pytest

from fedjax_cluster.experiments import recipe as recipes
from fedjax_cluster.experiments import reproduction
from fedjax_cluster.experiments.cells import Cell, changed, grid, headings, printed, shortened
from fedjax_cluster.experiments.comparison import Outcome
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.recipe import Recipe, Study, measured, of_cells, table
from fedjax_cluster.recipes import RECIPES, figures
from fedjax_cluster.report.paper_rows import PaperRow

BASE = RunConfig(method="fedavg", clients=4, clusters=2, rounds=2, eval_every=1, examples_per_client=20)
ROWS = {"IFCA": {"method": "ifca"}, "Global": {}}
COLUMNS = {"C=4": {"clients": 4}, "C=6": {"clients": 6}}
METRICS = headings(accuracy="accuracy (%)")


@pytest.fixture
def cells():
    return grid(BASE, ROWS, COLUMNS, {"IFCA": printed(accuracy="80±1 -")})


@pytest.fixture
def outcomes(cells):
    values = {"IFCA": (0.7, 0.9), "Global": (0.5, 0.5)}
    return {
        (cell.row, cell.column): Outcome(cell.row, tuple({"accuracy": v} for v in values[cell.row]), ())
        for cell in cells
    }


def test_options_are_merged_and_those_of_another_part_dropped():
    config = changed(BASE, method="ifca", method_options={"score_on": "batch"})
    both = {"score_on": "batch", "weighting": "examples"}
    assert changed(config, method_options={"weighting": "examples"}).method_options == both
    assert changed(config, method="fedavg").method_options == {}
    assert changed(config, model="linear").method_options == {"score_on": "batch"}


def test_a_shortened_table_keeps_chosen_rows_and_the_papers_values_only_if_asked(cells):
    short = shortened(rows=("IFCA",), rounds=1, options={"ifca": {"score_on": "batch"}, "fedavg": {}})(cells)
    assert [(cell.row, cell.column) for cell in short] == [("IFCA", "C=4"), ("IFCA", "C=6")]
    assert all(cell.config.rounds == 1 and cell.config.method_options == {"score_on": "batch"} for cell in short)
    assert not any(cell.paper for cell in short)
    assert shortened(columns=("C=4",), paper=True)(cells)[0].paper == {"accuracy": (80.0, 1.0)}


def test_a_light_recipe_keeps_the_whole_table_for_full(cells):
    made = of_cells(
        cells, "light", "", "", light=shortened(rounds=1), quick=shortened(rows=("Global",)), metrics=METRICS, seeds=1,
        figure=figures.bars("accuracy", "Accuracy"),
    )  # fmt: skip
    assert (made.full, len(made.cells), len(made.quick)) == (cells, 4, 2)
    assert {cell.config.rounds for cell in (*made.cells, *made.quick)} == {1}


def test_rows_hold_both_results_the_seeds_and_the_data_set(cells, outcomes):
    rows = measured(cells, outcomes, METRICS)
    assert rows[0] == PaperRow(
        "IFCA", "C=4", "accuracy (%)", 80.0, pytest.approx(200**0.5), 80.0, 1.0, 2, "digits", None, (2.0, "higher")
    )
    assert np.isnan([rows[1].paper, rows[2].paper]).all()
    synthetic = Cell("IFCA", "C=4", changed(BASE, scenario="linear_regression", model="linear"))
    assert measured([synthetic], outcomes, METRICS)[0].dataset == "synthetic"


def test_a_row_says_of_how_many_seeds_it_is(cells):
    some = {(cell.row, cell.column): Outcome(cell.row, ({"accuracy": 0.7}, {"accuracy": None}), ()) for cell in cells}
    assert [(row.valued, row.seeds) for row in measured(cells, some, METRICS)] == [(1, 2)] * 4
    none = {place: Outcome(each.label, ({}, {}), ()) for place, each in some.items()}
    assert [row.valued for row in measured(cells, none, METRICS)] == [None] * 4


def test_no_two_cells_leave_files_of_one_name():
    for recipe in RECIPES.values():
        for cells in (recipe.cells, recipe.full, recipe.quick) if isinstance(recipe, Recipe) else ():
            names = [recipes.file_name(cell) for cell in cells]
            assert len(set(names)) == len(names), recipe.name


def test_a_sweep_shows_the_papers_values_where_there_are_any(cells, outcomes):
    drawn = figures.sweep("accuracy", "Clients", "Accuracy (%)", 100.0, zero_line=True)(cells, outcomes).axes[0]
    lines = {line.get_label(): line for line in drawn.lines}
    np.testing.assert_allclose(lines["IFCA"].get_ydata(), [80, 80])
    np.testing.assert_allclose(lines["_paper"].get_ydata(), [80])
    assert [line.get_label() for line in drawn.lines].count("_paper") == 1


def test_what_is_carried_out_is_left_in_its_directory(tmp_path, capsys):
    made = table(
        "tiny", "Tiny", "4 clients.", BASE, {"Global": {}}, {"C=4": {}}, {"Global": printed(accuracy="50")},
        quick=shortened(rounds=1), metrics=METRICS, seeds=2, first_seed=3, figure=figures.against_paper(METRICS),
        measure=lambda result: {"last": result.history["accuracy"][-1]},
    )  # fmt: skip
    rows, outcomes = reproduction.reproduce(made, directory=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "table.md",
        "table.csv",
        "table.json",
        "figure.png",
        "runs",
        "recipe.json",
        "ran.json",
    }
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"Global-C=4-seed3.json", "Global-C=4-seed4.json"}
    (row,) = json.loads((tmp_path / "table.json").read_text())
    assert row["ours"] == pytest.approx(rows[0].ours)
    assert (row["paper"], row["paper_std"], row["seeds"], row["dataset"]) == (50.0, None, 2, "digits")
    assert row["deviation"] == "sample"
    assert "last" in outcomes["Global", "C=4"].summaries[0]
    assert "Tiny" in capsys.readouterr().err


def test_a_study_has_its_rows_shown_and_no_full_version(tmp_path, cells, outcomes):
    figure = figures.bars("accuracy", "Accuracy")(cells, outcomes)
    study = Study(
        "drawn", "Drawn", "Ours.", 4, 1.0, lambda seeds, quick: ([PaperRow("a", "b", "P", 1.0, seeds=seeds)], figure)
    )
    assert reproduction.reproduce(study, quick=True, directory=tmp_path)[0][0].seeds == 1
    with pytest.raises(ValueError, match="no fuller version"):
        reproduction.reproduce(study, full=True, directory=tmp_path)
