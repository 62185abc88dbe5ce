"""The recipes themselves: affordable, stated, and one of them carried out."""

import dataclasses
import json
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_cluster import cli
from fedjax_cluster.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipes_are_affordable_and_stated(name):
    """At most 30 minutes on two cores, on CIFAR-10 an hour a row; 500 training rows, or the reading says how many."""
    recipe = RECIPES[name]
    rows = {cell.row for cell in recipe.cells}
    assert recipe.minutes <= (60 * len(rows) if "cifar10" in name else 30), recipe.minutes
    assert recipe.reading
    assert recipe.quick
    for cell in recipe.cells:
        stated = re.search("000 images (are )?divided|[0-9]+ examples per client", recipe.reading)
        rows = (cell.config.examples_per_client or 1000) * (1 - cell.config.test_fraction)
        assert stated or rows <= 501


@pytest.mark.slow
def test_quick_recipe_leaves_table_and_figure(capsys):
    assert cli.main(["reproduce", "cfl-gp-linear-regression", "--quick", "--run-dir", "out"]) == 0
    assert {"table.md", "table.csv", "table.json", "figure.png", "runs"} <= set(os.listdir("out"))
    with open("out/table.json") as file:
        rows = json.load(file)
    ours = {row["row"]: row["ours"] for row in rows if row["metric"] == "ARI"}
    assert ours["CFL-GP"] > ours["Global"]
    assert np.isfinite(ours["IFCA"])


@pytest.mark.slow
def test_fuller_recipes_have_all_cells_and_more_work(capsys):
    for recipe in RECIPES.values():
        if getattr(recipe, "full", ()):
            own, fuller = ({(cell.row, cell.column) for cell in cells} for cells in (recipe.cells, recipe.full))
            assert own <= fuller
            assert dataclasses.replace(recipe, cells=recipe.full).flops > recipe.flops
    assert cli.main(["reproduce", "cfl-fig3", "--full", "--run-dir", "out"]) == 2
    assert "no fuller version" in capsys.readouterr().err
    assert cli.main(["reproduce", "flag-table8", "--full", "--quick", "--run-dir", "out"]) == 2
    assert "exclude each other" in capsys.readouterr().err
    assert not os.path.exists("out")


def test_late_accuracy_is_the_mean_of_the_last_four_evaluations():
    rounds = np.arange(30.0)
    accuracy = np.where((rounds + 1) % 5 == 0, rounds / 100, np.nan)
    history = {"round": rounds, "accuracy": accuracy}
    measure = RECIPES["flag-lenet5-by-label"].measure
    result = SimpleNamespace(history=history)
    assert measure(result)["late_accuracy"] == pytest.approx(np.mean([0.14, 0.19, 0.24, 0.29]))
    accuracy[-1] = np.nan  # a run that ends so is not credited with what it had before
    assert np.isnan(measure(result)["late_accuracy"])
