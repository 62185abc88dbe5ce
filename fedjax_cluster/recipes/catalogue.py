"""What there is to run: the recipes by name, and a table of methods, scenarios, data sets, models and recipes."""

from __future__ import annotations

import inspect
import pathlib

from rich.console import Console
from rich.table import Table

from fedjax_cluster.data.downloads import OPENML
from fedjax_cluster.experiments import installed, recipe
from fedjax_cluster.experiments.config import KINDS, known_name
from fedjax_cluster.experiments.recipe import Recipe, Study
from fedjax_cluster.recipes import cfl, cfl_gp, fedgwc, flag, gradient_loss

# Every recipe that a paper's module defines, in its order.
RECIPES: dict[str, Recipe | Study] = {
    each.name: each
    for paper in (cfl_gp, cfl, fedgwc, flag, gradient_loss)
    for each in vars(paper).values()
    if isinstance(each, Recipe | Study)
}


def overview() -> str:
    """The recipes in one text, for the command line's help."""
    lines = [f"{name}: {each.title} ({each.flops:.0e} FLOPs, {each.minutes:g} min)" for name, each in RECIPES.items()]
    return "An experiment of a paper: our results compared with the published ones.\n\n" + "\n\n".join(lines)


def reproduce(name: str, *, quick: bool, full: bool, seeds: int | None, directory: pathlib.Path) -> None:
    """Carries out the recipe of a name; see `fedjax_cluster.experiments.recipe.reproduce`."""
    spelled = {key.replace("-", "_"): each for key, each in RECIPES.items()}
    chosen = spelled[known_name("recipe", name, spelled)]
    recipe.reproduce(chosen, quick=quick, full=full, seeds=seeds, directory=directory)


def show(console: Console | None = None) -> None:
    """Prints the table, a line for each."""
    console = console or Console()
    installed.load(KINDS)
    for kind, (registry, _) in KINDS.items():
        table = Table("name", "what it is", title=f"{kind.capitalize()}s", title_justify="left")
        for name, factory in registry.items():
            table.add_row(name.replace("_", "-"), (inspect.getdoc(factory) or "").partition("\n")[0])
        console.print(table)
    console.print(
        "[bold]Data sets[/bold]: digits (embedded), any image classification set of TFDS by its name; where that is "
        f"not prepared, OpenML's {', '.join(OPENML)} are downloaded"
    )
    recipes = Table("name", "reproduces", "minutes", title="Recipes", title_justify="left")
    for name, each in RECIPES.items():
        recipes.add_row(name, each.title, f"{each.minutes:g}")
    console.print(recipes)
