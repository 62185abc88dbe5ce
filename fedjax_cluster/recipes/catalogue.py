"""What there is to run: the recipes by name, and a table of methods, scenarios, data sets, models and recipes."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib

from rich.console import Console
from rich.table import Table

from fedjax_cluster.data.downloads import OPENML
from fedjax_cluster.experiments import installed, reproduction
from fedjax_cluster.experiments.config import KINDS, known_name
from fedjax_cluster.experiments.recipe import Recipe, Study
from fedjax_cluster.recipes import (
    attacks,
    cfl,
    cfl_cifar10,
    cfl_gp,
    cfl_gp_channels,
    cfl_gp_cifar10,
    cfl_gp_pictures,
    cfl_gp_sweeps,
    cfl_toys,
    fedgwc,
    fedgwc_pictures,
    flag,
    flag_cifar10,
    gradient_loss,
    privacy_costs,
    results,
)

PAPERS = (
    *(cfl_gp, cfl_gp_pictures, cfl_gp_sweeps, cfl_gp_cifar10, cfl_gp_channels, cfl_toys, cfl, cfl_cifar10),
    *(fedgwc, fedgwc_pictures, flag, flag_cifar10, gradient_loss),
    privacy_costs,
    attacks,
)
# Every recipe that a paper's modules define, in their order.
RECIPES: dict[str, Recipe | Study] = {
    each.name: each for paper in PAPERS for each in vars(paper).values() if isinstance(each, Recipe | Study)
}


def overview() -> str:
    """The recipes in one text, for the command line's help."""
    lines = [f"{name}: {each.title} ({_minutes(each)} min)" for name, each in RECIPES.items()]
    return "An experiment of a paper: our results compared with the published ones. ~: not measured, estimated.\n\n" + (
        "\n\n".join(lines)
    )


def _minutes(recipe: Recipe | Study) -> str:
    """Measured minutes, or "~" and an estimate by the FLOPs."""
    measured = results.seconds_per_run(recipe.name)
    return f"~{recipe.minutes:g}" if measured is None else _rounded(_runs(recipe) * measured[0] / 60)


def _rounded(minutes: float) -> str:
    """Two digits, and never an exponent."""
    return f"{float(f'{minutes:.2g}'):g}"


def _runs(recipe: Recipe | Study) -> int:
    """A study is timed as a whole."""
    return recipe.seeds * len(recipe.cells) if isinstance(recipe, Recipe) else 1


def _expected(recipe: Recipe | Study, seeds: int | None, full: bool) -> str:
    """How long a recipe takes, in words, and whether anybody has measured it."""
    measured = results.seconds_per_run(recipe.name + (" --full" if full else ""))
    if full and isinstance(recipe, Recipe) and recipe.full:
        recipe = dataclasses.replace(recipe, cells=recipe.full)
    share = (seeds or recipe.seeds) / recipe.seeds if isinstance(recipe, Recipe) else 1
    if measured is None:
        work = f"{share * recipe.flops:.1e} FLOPs, " if isinstance(recipe, Recipe) else ""
        return f"{work}about {_rounded(share * recipe.minutes)} minutes on two cores by estimate; not measured"
    return f"about {_rounded(share * _runs(recipe) * measured[0] / 60)} minutes, as measured on {measured[1]}"


def reproduce(
    name: str, *, quick: bool = False, full: bool = False, seeds: int | None = None, directory: str | pathlib.Path
) -> None:
    """Carries out the recipe of a name; see `fedjax_cluster.experiments.reproduction.reproduce`."""
    chosen = chosen_recipe(name)
    expected = _expected(chosen, seeds, full)
    reproduction.reproduce(chosen, quick=quick, full=full, seeds=seeds, directory=directory, expected=expected)


def chosen_recipe(name: str) -> Recipe | Study:
    """The recipe of a name, with hyphens or underscores; a ValueError names all where there is none."""
    spelled = {key.replace("-", "_"): each for key, each in RECIPES.items()}
    return spelled[known_name("recipe", name, spelled)]


def place_of(name: str, *, quick: bool = False, full: bool = False) -> pathlib.Path:
    """Where a recipe is carried out by default: beside the runs, with a folder for each version.

    >>> str(place_of("cfl-fig8", quick=True))
    'runs/reproduce/cfl-fig8-quick'
    """
    version = "-quick" if quick else "-full" if full else ""
    return pathlib.Path("runs") / "reproduce" / f"{name}{version}"


def resume(directory: pathlib.Path) -> None:
    """Does what is missing of a reproduction."""
    of = reproduction.read_recipe(directory)
    version = {"quick": of["version"] == "quick", "full": of["version"] == "full"}
    reproduce(of["recipe"], **version, seeds=of["seeds"], directory=directory)


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
    recipes = Table("name", "reproduces", "minutes", title="Recipes (minutes; ~: not measured)", title_justify="left")
    for name, each in RECIPES.items():
        recipes.add_row(name, each.title, _minutes(each))
    console.print(recipes)
