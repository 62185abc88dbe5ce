"""How recipes are written and carried out."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_cluster.experiments import recipe as recipes
from fedjax_cluster.experiments import reproduction
from fedjax_cluster.experiments.cells import Cell, changed, grid, headings, printed, shortened
from fedjax_cluster.experiments.config import RunConfig
from fedjax_cluster.experiments.outcomes import Outcome
from fedjax_cluster.experiments.recipe import Recipe, Study, measured, of_cells, table
from fedjax_cluster.recipes import RECIPES, cfl_toys, fedgwc_pictures, figures, flag_cifar10
from fedjax_cluster.recipes.studies import rows_over_seeds
from fedjax_cluster.report.paper_rows import PaperRow, Tolerance
from fedjax_cluster.types import Event

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


def test_costs_are_counted_to_the_first_evaluated_round_of_the_target(cells):
    def run(clients, accuracy):
        """Of four rounds, in some of which it was evaluated."""
        counted = {"models_down": [8, 8, 8, 8], "models_up": [4] * 4, "gradient_evaluations": [4, 8, 4, 4]}
        history = {**counted, "loss_evaluations": [12] * 4, "accuracy": accuracy}
        columns = {name: np.asarray(values, float) for name, values in history.items()}
        return {"clients": clients, "accuracy": 0.5}, columns

    def outcome(*runs):
        return Outcome("", *zip(*(run(*each) for each in runs), strict=True))

    unknown = np.nan
    found = {
        ("IFCA", "C=4"): outcome((4, [unknown, 0.5, unknown, 0.6]), (4, [unknown, 0.7, unknown, 0.1])),
        ("IFCA", "C=6"): outcome((6, [unknown, 0.6, unknown, 0.6]), (6, [unknown, 0.59, unknown, 0.59])),
    }
    accuracy = figures.sweep("accuracy", "Clients", "Accuracy")
    drawn = figures.with_costs_to_accuracy(accuracy, 0.6, "Clients")(cells, found)
    (models,), (gradients,) = (
        [line for line in drawn[name].axes[0].lines if line.get_label() == "IFCA"] for name in ("models", "gradients")
    )
    # One of the seeds with six clients does not reach the target: no point there.
    np.testing.assert_allclose(models.get_xydata(), [[4, (12 + 6) / 2]])
    np.testing.assert_allclose(gradients.get_xydata(), [[4, (20 / 4 + 4 + 12 / 4 + 2) / 2]])
    assert "60 %" in drawn["models"].axes[0].get_ylabel()
    assert set(figures.with_costs_to_accuracy(accuracy, 0.8, "Clients")(cells, found)) == {""}


@pytest.mark.slow
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
        "drawn",
        "Drawn",
        "Ours.",
        4,
        1.0,
        lambda seeds, quick, kept: ([PaperRow("a", "b", "P", 1.0, seeds=seeds)], figure),
    )
    assert reproduction.reproduce(study, quick=True, directory=tmp_path)[0][0].seeds == 1
    with pytest.raises(ValueError, match="no fuller version"):
        reproduction.reproduce(study, full=True, directory=tmp_path)


def test_several_pictures_are_each_left_under_its_name(tmp_path, outcomes, cells):
    first, second = (figures.bars("accuracy", label)(cells, outcomes) for label in ("Accuracy", "Again"))
    study = Study("drawn", "Drawn", "Ours.", 1, 1.0, lambda *_: ([PaperRow("a", "b", "P", 1.0)], drawn))
    drawn = {"": first, "again": second}
    reproduction.reproduce(study, directory=tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {"figure.png", "figure.again.png"}


def test_rows_over_seeds_leave_out_seeds_without_a_value():
    found = [{"ARI": 1.0, "round": 3.0}, {"ARI": 0.5, "round": math.nan}, {"ARI": 0.0, "round": math.nan}]
    agreement, first = rows_over_seeds(
        "CFL", "XOR", found, "synthetic", {"ARI": 1.0}, {"round": Tolerance(2.0, "lower")}
    )
    assert (agreement.ours, agreement.ours_std, agreement.paper, agreement.seeds) == (0.5, 0.5, 1.0, 3)
    assert (agreement.valued, agreement.tolerance) == (None, (0.05, "higher"))
    assert (first.ours, first.seeds, first.valued, first.tolerance) == (3.0, 3, 1, (2.0, "lower"))
    assert np.isnan([first.ours_std, first.paper]).all()


def test_panels_are_the_columns_and_lines_the_rows(cells, outcomes):
    history = {"round": np.arange(3.0), "accuracy": np.asarray([0.1, np.nan, 0.5])}
    of_cell = {place: Outcome("", ({},), ({**history, "accuracy": history["accuracy"] + 0.1 * (place[0] == "IFCA")},))
               for place in outcomes}  # fmt: skip
    drawn = figures.by_column("accuracy", columns=2)(cells, of_cell)
    assert [axes.get_title() for axes in drawn.axes] == ["C=4", "C=6"]
    lines = {line.get_label(): line for line in drawn.axes[1].get_lines()}
    np.testing.assert_allclose(lines["IFCA"].get_xdata(), [1, 3])
    np.testing.assert_allclose(lines["IFCA"].get_ydata(), [20, 60])
    np.testing.assert_allclose(lines["Global"].get_ydata(), [10, 50])


@pytest.mark.slow
def test_two_clients_agree_or_pull_apart():
    """CFL, Eqs. 11 to 13: the mean vanishes in both cases; opposite updates of equal norm where the clients differ."""
    path, apart = cfl_toys._two_clients(cfl_toys.TOYS["Incongruent"], seed=0)
    assert apart[cfl_toys.MEAN] < 0.01
    assert apart[cfl_toys.LARGEST] > 0.5
    assert apart[cfl_toys.COSINE] == pytest.approx(-1, abs=1e-3)
    assert not (np.max(np.stack(path.risks), 0) < 1e-6).any()
    np.testing.assert_allclose(path.steps[0], cfl_toys.TOYS["Incongruent"].start)
    np.testing.assert_allclose(path.steps[1] - path.steps[0], cfl_toys.RATE * path.updates[0].mean(0), atol=1e-5)
    path, together = cfl_toys._two_clients(cfl_toys.TOYS["Congruent"], seed=0)
    assert together[cfl_toys.LARGEST] < 0.05
    assert (np.max(np.stack(path.risks), 0) < 1e-6).any()


def test_a_decision_line_is_where_the_two_outputs_are_equal():
    params = {"output": {"kernel": np.asarray([[[0.0, 2.0], [1.0, 0.0]]]), "bias": np.asarray([[0.5, 0.0]])}}
    across = cfl_toys._line(params, 0)
    x = np.asarray([0.75, 1.0])  # 2·0.75 = 1.0 + 0.5
    assert across[:2] @ x + across[2] == pytest.approx(0)


def test_accuracy_settles_where_it_stays_near_its_last_value():
    accuracy = np.asarray([0.5, np.nan, 0.79, 0.6, 0.79, 0.80])
    result = SimpleNamespace(history={"round": np.arange(6.0), "accuracy": accuracy})
    assert flag_cifar10._settled(result) == {"settled": 5.0}
    assert flag_cifar10._settled(SimpleNamespace(history={"round": np.zeros(1), "accuracy": np.ones(1)})) == {
        "settled": 1.0
    }


def test_split_clouds_show_the_clients_that_were_divided():
    """A refused split has no picture; the second one is of the six clients of its cluster alone."""
    affinity = np.kron(np.eye(2), np.ones((5, 5))) + 0.01 + 0.001 * np.arange(10)[:, None] * np.arange(10)
    one, two = np.zeros(10, int), np.repeat([0, 1], (6, 4))
    three = np.repeat([0, 2, 1], (3, 3, 4))

    def event(number, previous, labels):
        content = {"parent": np.asarray(0), "previous": previous, "labels": labels, "affinity": affinity}
        return Event(number, content)

    clouds = fedgwc_pictures.split_clouds([event(4, one, one), event(9, one, two), event(19, two, three)])
    assert [cloud.title for cloud in clouds] == ["Cluster 0, round 10", "Cluster 0, round 20"]
    assert [cloud.features.shape for cloud in clouds] == [(10, 2), (6, 2)]
    np.testing.assert_array_equal(clouds[1].group, [0, 0, 0, 2, 2, 2])
