"""The recipes by name."""

from __future__ import annotations

import pathlib

from fedjax_cluster.experiments import recipe
from fedjax_cluster.experiments.config import known_name
from fedjax_cluster.experiments.recipe import Recipe, Study
from fedjax_cluster.recipes.cfl import CFL_RECIPES
from fedjax_cluster.recipes.cfl_gp import CFL_GP_RECIPES
from fedjax_cluster.recipes.fedgwc import FEDGWC_RECIPES
from fedjax_cluster.recipes.flag import FLAG_RECIPES
from fedjax_cluster.recipes.flag_parameters import FLAG_PARAMETER_RECIPES
from fedjax_cluster.recipes.gradient_loss import GRADIENT_LOSS_RECIPES
from fedjax_cluster.recipes.mixture import MIXTURE_RECIPES

RECIPES: dict[str, Recipe | Study] = {
    own.name: own
    for own in (
        *CFL_GP_RECIPES,
        *CFL_RECIPES,
        *FEDGWC_RECIPES,
        *FLAG_RECIPES,
        *FLAG_PARAMETER_RECIPES,
        *GRADIENT_LOSS_RECIPES,
        *MIXTURE_RECIPES,
    )
}


def overview() -> str:
    """The recipes in one text, for the command line's help."""
    lines = [f"{name}: {own.title} ({own.flops:.0e} FLOPs, {own.minutes:g} min)" for name, own in RECIPES.items()]
    return "An experiment of a paper, our figures beside theirs.\n\n" + "\n\n".join(lines)


def reproduce(name: str, *, quick: bool, full: bool, seeds: int | None, directory: pathlib.Path) -> None:
    """Carries out the recipe of a name."""
    spelled = {key.replace("-", "_"): own for key, own in RECIPES.items()}
    chosen = spelled[known_name("recipe", name, spelled)]
    recipe.reproduce(chosen, quick=quick, full=full, seeds=seeds, directory=directory)
