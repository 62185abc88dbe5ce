"""The page of reproduced figures: what `--page` writes, what it takes up, and the rules of its verdicts."""

import json
import pathlib
import re

import pytest

from fedjax_cluster import cli
from fedjax_cluster.files import sealed
from fedjax_cluster.recipes import RECIPES, catalogue, page, results, verdicts
from fedjax_cluster.recipes.verdicts import verdict


def row(**changes):
    base = {
        "paper": "cfl-gp",
        "recipe": "cfl-gp-table10",
        "quantity": "CFL-GP: accuracy (%)",
        "setting": "C=8",
        "ours": 87.1,
        "seeds": 5,
        "paper_value": 86.8,
        "dataset": "MNIST",
    }
    return {**base, **changes}


COMMITTED = results.RESULTS


def record(*rows):
    return {"ran": {}, "rows": list(rows)}


def left(**changes):
    """A row of a table.json."""
    base = {"row": "CFL-GP", "column": "C=8", "metric": "accuracy (%)", "ours": 88.04, "ours_std": 0.3}
    return {**base, "paper": 86.8, "paper_std": 0.35, "seeds": 2, "dataset": "mnist", **changes}


def line(**changes):
    return next(text for text in page.page(record(row(**changes))).splitlines() if text.startswith("| CFL-GP"))


@pytest.fixture
def committed():
    return results.read()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The results and the page in a folder of the test, as if Table 10 had been run before runs were recorded."""
    kept = results.read()
    kept["ran"].pop("cfl-gp-table10")
    for each in kept["rows"]:
        if each["recipe"] == "cfl-gp-table10":
            each.pop("ran", None)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "reproduction.md")
    pictures = tmp_path / "figures"
    pictures.mkdir()
    for path in page.FIGURES.glob("*.png"):
        (pictures / path.name).touch()
    monkeypatch.setattr(page, "FIGURES", pictures)
    results.RESULTS.write_text(json.dumps(kept), encoding="utf-8")
    return tmp_path


def reproduced(directory, table, version="everyday", **ran):
    """What `reproduce` leaves."""
    directory.mkdir(parents=True)
    of = {"recipe": "cfl-gp-table10", "version": version, "seeds": 2}
    about = {"commit": "abc", "date": "2026-01-01", "versions": {"jax": "0.1"}, "device": "a chip", **ran}
    (directory / "table.json").write_text(json.dumps(table))
    (directory / "recipe.json").write_text(json.dumps(sealed(of)))
    times = {"runs": 4, "timed_runs": 4, "seconds": 60.0, "processor_seconds": 90.0, "backend": "cpu"}
    (directory / "ran.json").write_text(json.dumps(sealed({**of, **times, **about})))
    (directory / "figure.png").write_bytes(b"a picture")
    return directory


@pytest.mark.slow
def test_the_committed_page_is_what_the_command_writes(elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_prepare_jax", lambda: None)
    kept = COMMITTED.read_text(encoding="utf-8")
    results.RESULTS.write_text(kept, encoding="utf-8")
    text = (page.BENCHMARKS / "reproduction.md").read_text("utf-8")
    assert cli.main(["reproduce", "--page"]) == 0
    assert cli.main(["reproduce", "--page", "--quick"]) == 2
    assert page.PAGE.read_text(encoding="utf-8") == text
    assert results.RESULTS.read_text(encoding="utf-8") == kept


def test_every_row_stands_once_under_its_paper_and_one_of_its_items(committed):
    keys = [results.key(row) for row in committed["rows"]]
    assert len(set(keys)) == len(keys)
    assert all(results.paper_of(row["recipe"]) == row["paper"] for row in committed["rows"])


NUMBERED = {
    "cfl-gp": {"Table": 11, "Fig.": 20},
    "cfl": {"Fig.": 12},
    "gradient-loss": {"Fig.": 5},
    "fedgwc": {"Table": 9, "Fig.": 8},
    "flag": {"Table": 8, "Fig.": 2},
}


def test_every_table_and_figure_of_the_papers_has_a_row():
    for paper, counts in NUMBERED.items():
        names = [item["name"] for name, item in results.items() if name == paper]
        for kind, count in counts.items():
            numbers = {int(found[1]) for name in names if (found := re.match(rf"{kind} (\d+)", name))}
            assert numbers == set(range(1, count + 1)), (paper, kind)
    assert set(NUMBERED) == set(results.papers())


def test_every_recipe_stands_under_an_item_and_every_item_without_one_says_why():
    named = {recipe for _, item in results.items() for recipe in item["recipes"]}
    assert named == set(RECIPES)
    for _, item in results.items():
        assert item["recipes"] or item["differs"].startswith(("No recipe", "No experiment"))
        re.compile(item.get("rows", ""))


# The figures that README.md shows.
HEADLINES = (
    ("cfl-gp-table10", "CFL-GP: accuracy (%)", "C=32"),
    ("cfl-rotated", "CFL: best within five rounds (%)", "half turned by 180°"),
    ("gradient-loss-mnist", "λ = 0.2: runs that reach it (%)", ""),
    ("fedgwc-domains --full", "FedGWC, counted rate, centred (ours): Rand index", "MNIST blur"),
    ("flag-tables-2-3", "FLAG: accuracy (%)", "ρ=20 %, α′=1"),
    ("flag-tables-2-3", "FLAG: accuracy (%)", "ρ=30 %, α′=0.25"),
)


@pytest.mark.parametrize("headline", HEADLINES, ids=lambda headline: headline[0])
def test_the_readme_shows_figures_of_the_page(committed, headline):
    (row,) = (row for row in committed["rows"] if results.key(row) == headline)
    (line,) = (line for line in page.page({**committed, "rows": [row]}).splitlines() if headline[1] in line)
    ours_and_the_papers = line.split(" | ", 2)[2]
    assert ours_and_the_papers in (pathlib.Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_seeds_become_a_mean_and_the_samples_deviation():
    assert "| 2.0 ± 1.0 (3 of 4 seeds: 1, 2, –, 3) |" in line(quantity="CFL-GP: rounds", ours=[1, 2, None, 3], seeds=4)
    assert "| 87.1 (1 seed) |" in line(seeds=1)
    assert "| 2 (1 of 2 seeds) |" in line(quantity="CFL-GP: rounds", ours=[2, None], seeds=2)
    assert "| – (0 of 2 seeds) |" in line(quantity="CFL-GP: rounds", ours=[None, None], seeds=2)
    assert "| 2 (1 seed) |" in line(quantity="CFL-GP: rounds", ours=[2], seeds=1)
    assert "| 1.0 ± 0 (3 seeds, all equal) |" in line(ours=[1.0, 1.0, 1.0], seeds=3, paper_value=1.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "reached"),
        ({"ours": 84.7}, "not"),
        ({"ours": 88.9}, "partly (better)"),
        ({"seeds": 1}, "partly (one seed)"),
        ({"seeds": None}, "partly (seeds not kept)"),
        ({"seeds": "4 of 5 seeds"}, "partly (4 of 5 seeds)"),
        ({"seeds": "4 of 5 seeds", "ours": 80.0, "tolerance": [2.0, "lower"]}, ""),
        ({"seeds": "4 of 5 seeds", "ours": 86.0, "tolerance": [2.0, "lower"]}, "partly (4 of 5 seeds)"),
        ({"tolerance": []}, ""),
        ({"ours": float("nan")}, ""),
        ({"paper_value": float("nan")}, ""),
        ({"ours": [86.0, None, 87.0], "seeds": 3}, "partly (2 of 3 seeds)"),
        ({"paper_dataset": "CIFAR-10"}, ""),
        ({"quantity": "CFL-GP: ARI", "ours": 0.9, "paper_value": 1.0}, "not"),
        ({"quantity": "CFL-GP: ARI", "ours": 0.95, "paper_value": 1.0}, "reached"),
        ({"quantity": "CFL-GP: ARI", "ours": 1.0, "paper_value": 1.0, "paper_dataset": "X"}, "partly (other data)"),
        ({"quantity": "CFL-GP: clusters", "ours": 2.2, "paper_value": 2}, "not"),
        ({"quantity": "CFL-GP: test loss", "ours": 0.01, "paper_value": 1.0}, ""),
        ({"quantity": "CFL-GP: test loss", "ours": 0.05, "paper_value": 0.04, "tolerance": [0.005, "lower"]}, "not"),
        (
            {"quantity": "CFL-GP: test loss", "ours": 0.04, "paper_value": 0.04, "tolerance": [0.005, "lower"]},
            "reached",
        ),
        ({"quantity": "CFL-GP: separation gap", "ours": -0.1, "paper_value": "> 0"}, "not"),
        ({"quantity": "CFL-GP: separation gap", "ours": 0.1, "paper_value": "> 0"}, "reached"),
        ({"paper_value": "86.8 (public code)"}, "reached"),
        ({"paper_value": "about 90"}, ""),
        ({"ours": None}, ""),
        ({"paper_value": None}, ""),
    ],
)
def test_verdicts_follow_the_rules(changes, expected):
    word, _, why = expected.partition(" ")
    assert verdict(row(**changes)) == verdicts.Verdict(word, why.strip("()"))
    assert line(**changes).endswith(f"| {f'**{word}** {why}'.strip() if word else '–'} |")


def test_a_table_replaces_a_row_adds_others_and_leaves_the_rest():
    other = row(paper="cfl", recipe="cfl-fig8", quantity="CFL: splits", ours=3, paper_dataset="CIFAR-10")
    before = record(row(paper_dataset="EMNIST", note="old"), other)
    table = [left(deviation="population"), left(column="C=16", ours=None, ours_std=None)]
    rows = results.with_table(before, "cfl-gp-table10", table)["rows"]
    assert [(r["quantity"], r["setting"]) for r in rows] == [
        ("CFL-GP: accuracy (%)", "C=8"),
        ("CFL-GP: accuracy (%)", "C=16"),
        ("CFL: splits", "C=8"),
    ]
    assert rows[0]["ours_std"] == pytest.approx(0.3 * 2**0.5)
    assert "note" not in rows[0]
    assert rows[2] == other
    table = [left(deviation="sample", valued=2, seeds=3, tolerance=[1.0, "higher"])]
    (named, *_) = results.with_table(record(*rows), "cfl-gp-table10", table)["rows"]
    assert (named["ours_std"], named["seeds"], named["tolerance"]) == (0.3, "2 of 3 seeds", [1.0, "higher"])
    text = page.page(record(*rows))
    assert "| 88.0 ± 0.4 (2 seeds) | 86.8 ± 0.35 | MNIST (paper: EMNIST) | – |" in text
    assert "`cfl-gp-table10`: C=16 | – (2 seeds) | 86.8 ± 0.35 | MNIST (paper: EMNIST) | – |" in text


def test_a_table_without_a_printed_figure_keeps_the_papers_words():
    before = record(row(paper_value="near 90"))
    (after,) = results.with_table(before, "cfl-gp-table10", [left(paper=None, paper_std=None)])["rows"]
    assert after["paper_value"] == "near 90"


def test_a_new_recipes_rows_know_the_papers_data_and_another_recipe_is_refused():
    (after,) = results.with_table(record(), "fedgwc-levels", [left(dataset="fashion_mnist")])["rows"]
    assert (after["paper"], after["paper_dataset"]) == ("fedgwc", "CIFAR-100")
    with pytest.raises(ValueError, match="'table99' stands under no table"):
        results.paper_of("table99")


def test_what_reproduce_left_is_taken_up_with_what_it_ran_on(elsewhere):
    directory = reproduced(elsewhere / "out", [left(deviation="sample")])
    written = page.write([str(directory)])
    assert (page.FIGURES / "cfl-gp-table10.png") in written
    found = results.read()
    assert found["ran"]["cfl-gp-table10"]["commit"] == "abc"
    assert len(found["rows"]) == len(
        json.loads((pathlib.Path(results.__file__).parent / "results.json").read_text())["rows"]
    )
    text = page.PAGE.read_text(encoding="utf-8")
    assert "| 88.0 ± 0.3 (2 seeds) | 86.8 ± 0.35 | MNIST | **reached** |" in text
    assert "| `cfl-gp-table10` | 2 | abc | 2026-01-01 | jax 0.1 | a chip | 60 (90) |" in text
    assert "`cfl-gp-table10` (rows of other settings)" in " ".join(text.split())
    assert "![cfl-gp-table10](figures/cfl-gp-table10.png)" in text
    assert results.seconds_per_run("cfl-gp-table10") == (15.0, "a chip")
    assert results.seconds_per_run("cfl-gp-table10 --full") is None
    page.write([str(reproduced(elsewhere / "busy", [left()], processor_seconds=20.0))])
    assert results.seconds_per_run("cfl-gp-table10") == (5.0, "a chip")


def test_all_pictures_of_a_recipe_are_shown_and_those_of_a_longer_name_are_not(elsewhere):
    directory = reproduced(elsewhere / "out", [left()])
    (directory / "figure.rounds.png").write_bytes(b"another")
    written = page.write([str(directory)])
    assert {path.name for path in written if path.suffix == ".png"} == {
        "cfl-gp-table10.png",
        "cfl-gp-table10.rounds.png",
    }
    (page.FIGURES / "cfl-gp-table10-later.png").touch()
    page.write()
    text = page.PAGE.read_text(encoding="utf-8")
    assert "![cfl-gp-table10](figures/cfl-gp-table10.png)" in text
    assert "![cfl-gp-table10.rounds](figures/cfl-gp-table10.rounds.png)" in text
    assert "table10-later" not in text


def test_a_row_knows_the_data_of_the_table_that_it_belongs_to():
    """FedGWC's domains are CIFAR-100's in Table 4, and CIFAR-10's in Table 7."""
    table = [left(row="IFCA", metric="Rand index", column="blur")]
    for recipe, expected in (("fedgwc-domains", "CIFAR-100"), ("fedgwc-domains-cifar10", "CIFAR-10")):
        before = record(row(paper="fedgwc", recipe=recipe, quantity="IFCA: Rand index", paper_dataset="CIFAR-100"))
        assert results.with_table(before, recipe, table)["rows"][-1]["paper_dataset"] == expected


def test_the_minutes_are_those_measured_or_an_estimate_that_says_so(elsewhere):
    each = RECIPES["cfl-gp-table10"]
    assert catalogue._minutes(each) == f"~{each.minutes:g}"
    assert "not measured" in catalogue._expected(each, None, False)
    page.write([str(reproduced(elsewhere / "out", [left()]))])
    assert catalogue._minutes(each) == "25"  # 100 runs of 15 s
    assert catalogue._expected(each, 1, False) == "about 5 minutes, as measured on a chip"
    assert "not measured" in catalogue._expected(RECIPES["flag-table8"], None, True)
    assert catalogue._rounded(130.4) == "130"


def test_unfinished_and_quick_figures_are_refused(elsewhere, monkeypatch):
    directory = reproduced(elsewhere / "quick", [left()], version="quick")
    with pytest.raises(ValueError, match="of --quick"):
        page.write([str(directory)])
    (directory / "ran.json").unlink()
    with pytest.raises(ValueError, match="has not ended; continue it with resume"):
        page.write([str(directory)])
    with pytest.raises(ValueError, match="unknown recipe"):
        page.write(["table99"])
    monkeypatch.setattr(page, "BENCHMARKS", elsewhere / "installed")
    with pytest.raises(ValueError, match="stands in a checkout"):
        page.write()
    assert not page.PAGE.exists()


def test_pictures_of_the_whole_recipe_stand_beside_those_of_its_everyday_form(elsewhere):
    """Fault: the one replaces the other, under rows of both."""
    page.write([str(reproduced(elsewhere / "out", [left()]))])
    written = page.write([str(reproduced(elsewhere / "whole", [left()], "full"))])
    assert page.FIGURES / "cfl-gp-table10--full.png" in written
    text = page.PAGE.read_text(encoding="utf-8")
    assert "(figures/cfl-gp-table10.png)" in text
    assert "(figures/cfl-gp-table10--full.png)" in text
