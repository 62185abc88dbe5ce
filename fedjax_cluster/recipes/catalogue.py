"""What there is to run: methods, scenarios, data sets, models and recipes, with a line each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.table import Table

from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.data.scenarios.registry import SCENARIOS
from fedjax_cluster.experiments.config import MODELS
from fedjax_cluster.recipes import RECIPES


def show(console: Console | None = None) -> None:
    """Prints the catalogue."""
    console = console or Console()
    for title, registry in (("Methods", REGISTRY), ("Scenarios", SCENARIOS), ("Models", MODELS)):
        console.print(_table(title, registry))
    console.print("[bold]Data sets[/bold]: digits (embedded), or any image classification set of TFDS by its name")
    recipes = Table("name", "reproduces", "minutes", title="Recipes", title_justify="left")
    for name, recipe in RECIPES.items():
        recipes.add_row(name, recipe.title, f"{recipe.minutes:g}")
    console.print(recipes)


def _table(title: str, registry: Mapping[str, Callable]) -> Table:
    table = Table("name", "what it is", title=title, title_justify="left")
    for name, factory in registry.items():
        table.add_row(name.replace("_", "-"), (inspect.getdoc(factory) or "").partition("\n")[0])
    return table
