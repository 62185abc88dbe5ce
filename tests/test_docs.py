"""The site: every block of its pages runs, every message is as quoted, and no public name is missing."""

import contextlib
import io
import itertools
import json
import logging
import pathlib
import re
import shlex

import matplotlib
import pytest

import fedjax_cluster as fc
from docs import reference, tables
from fedjax_cluster import cli
from fedjax_cluster.data.scenarios.registry import SCENARIOS

PAGES = pathlib.Path(__file__).parents[1] / "docs" / "pages"
LONG_PAGES = (
    "command_line.md",
    "concepts.md",
    "data.md",
    "extending.md",
    "index.md",
    "models.md",
    "plans.md",
    "results.md",
    "robustness.md",
    "sweeps.md",
)  # to run
BLOCK = re.compile(r"^```(python|sh|text|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MODULES = ("", "data", "data.scenarios", "nn", "local", "clustering", "algorithms", "report", "parallel")


def test_every_public_name_is_in_the_reference():
    """Faults: a module is added and no page has it; a name is exported by assignment, and passed over."""
    pages = "\n".join(reference.page_text(page) for page in reference.PAGES)
    described = dict(re.findall(r"^## `(fc\.[\w.]+)` \{[^}]*\}\n\n(.*?)(?=^## |\Z)", pages, re.MULTILINE | re.DOTALL))
    for name in MODULES:
        module = reference.module_of(name)
        for each in getattr(module, "__all__", None) or public(module):
            full = f"fc.{name}.{each}".replace("..", ".")
            if hasattr(getattr(module, each), "__path__") or type(getattr(module, each)).__name__ == "module":
                assert full in pages, full
            else:
                assert len(described.get(full, "").strip()) > 20, f"{full} has no documentation on the site"


def test_what_pages_and_notebooks_use_is_there_from_the_start():
    """Fault: a module is found only once something else has imported it, as `fc.types` was."""
    root = PAGES.parents[1]
    texts = [path.read_text() for path in (*PAGES.glob("*.md"), *root.glob("notebooks/*.ipynb"), root / "README.md")]
    used = set(re.findall(r"\bfc\.([a-zA-Z_]+)", "\n".join(texts)))
    assert {"types", "simulate"} <= used <= {*fc.__all__, "__version__", "md"}  # the last names a page


def public(module):
    """Names without an underscore whose values belong to this package, but for modules of the layers below."""
    for name, value in vars(module).items():
        origin = getattr(value, "__module__", None) or ""
        below = type(value).__name__ == "module"
        if not name.startswith("_") and origin.startswith(module.__name__) and not below:
            yield name


def test_every_method_and_scenario_has_its_section_its_options_and_its_costs():
    """Fault: a new method is registered, and the page of methods does not know it."""
    methods, scenarios = ((PAGES / f"{name}.md").read_text() for name in ("methods", "scenarios"))
    shipped = [name for name, cls in fc.algorithms.REGISTRY.items() if cls.__module__.startswith("fedjax_cluster")]
    for name in shipped:
        for line in (f"## {name.replace('_', '-')}\n", f"<!-- options {name} -->", f"<!-- costs {name} -->"):
            assert line in methods
        assert tables.options(name)
    assert set(json.loads(tables.COSTS.read_text())) == set(shipped)
    for name in SCENARIOS:
        assert f"### {name.replace('_', '-')}\n" in scenarios
        assert f"pictures/{name}.svg" in scenarios
        assert f"<!-- arguments {name} -->" in scenarios


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A folder to run in; what a page registers is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    kept = [(registry, dict(registry)) for registry in (fc.algorithms.REGISTRY, SCENARIOS)]
    yield
    for registry, before in kept:
        registry.clear()
        registry.update(before)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow) if page in LONG_PAGES else page
        for page in sorted(path.name for path in PAGES.glob("*.md"))
    ],
)
@pytest.mark.usefixtures("own_folder")
def test_the_blocks_of_a_page_run(page, caplog):
    """Faults: an argument is renamed and a page still has the old name; a message is reworded and quoted as it was."""
    blocks = BLOCK.findall((PAGES / page).read_text(encoding="utf-8"))
    names: dict = {"__name__": "page"}
    caplog.set_level(logging.ERROR, logger="fedjax_cluster")
    for (kind, text), (after, shown) in itertools.pairwise([*blocks, ("", "")]):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if kind == "python":
                said = of_python(text, names, page)
            elif kind == "sh":
                said = of_commands(text)
            else:
                continue
        assert said == (shown.strip() if after == "text" else None), text
        if after == "console":
            assert names_of_lines(printed.getvalue()) == names_of_lines(shown)


def of_python(text, names, page):
    """Runs a block; the message that it ends with, if it does."""
    try:
        exec(compile(text, page, "exec", dont_inherit=True), names)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def of_commands(text):
    """Runs the commands of a block; the line that the last one ends with, if it fails."""
    for line in text.replace("\\\n", " ").strip().splitlines():
        program, *arguments = shlex.split(line)
        assert program == "fedjax-cluster", line
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            status = cli.main(arguments)
        if status:
            return told.getvalue().strip().splitlines()[-1]
    return None


def names_of_lines(table):
    """What stands before the figures, which depend on the machine."""
    return [re.split(r"(?<=\S)  ", line)[0] for line in table.strip().splitlines()]
