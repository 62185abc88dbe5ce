"""The page of reproduced figures: it is what its command writes, and takes up what `reproduce` leaves."""

import json
import pathlib

import pytest

from benchmarks import reproduction


def record(*rows):
    papers = {name: {"title": name, "reference": "Somebody", "notes": ["A note."]} for name in ("cfl", "cfl-gp")}
    return {"papers": papers, "rows": list(rows)}


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


def left(**changes):
    """A row of a table.json."""
    base = {"row": "CFL-GP", "column": "C=8", "metric": "accuracy (%)", "ours": 88.04, "ours_std": 0.3}
    return {**base, "paper": 86.8, "paper_std": 0.35, "seeds": 2, "dataset": "mnist", **changes}


def line(**changes):
    return next(text for text in reproduction.page(record(row(**changes))).splitlines() if text.startswith("| CFL-GP"))


@pytest.fixture
def committed():
    return json.loads(reproduction.RECORD.read_text(encoding="utf-8"))


def test_the_committed_page_is_what_the_command_writes(tmp_path, monkeypatch):
    committed = {name: getattr(reproduction, name) for name in ("PAGE", "RECORD")}
    for name, path in committed.items():
        monkeypatch.setattr(reproduction, name, tmp_path / path.name)
    (tmp_path / committed["RECORD"].name).write_text(committed["RECORD"].read_text(encoding="utf-8"), encoding="utf-8")
    reproduction.main([])
    for path in committed.values():
        assert (tmp_path / path.name).read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), path


def test_every_row_stands_once_and_belongs_to_a_paper(committed):
    keys = [reproduction.key(row) for row in committed["rows"]]
    assert len(set(keys)) == len(keys)
    assert {row["paper"] for row in committed["rows"]} == set(committed["papers"])


# The figures that README.md shows.
HEADLINES = (
    ("cfl-gp-table10", "CFL-GP: accuracy (%)", "C=32"),
    ("cfl-rotated", "CFL: best within five rounds (%)", "half turned by 180°"),
    ("gradient-loss-mnist", "λ = 0.2: runs that reach it (%)", ""),
    ("fedgwc-domains", "FedGWC, counted rate, centred (ours): Rand index", "MNIST blur"),
    ("flag-lenet5-by-label", "FLAG: accuracy, mean of the last 4 evaluations (%)", "ρ=20 %, α′=1"),
    ("flag-tables-2-3", "FLAG: accuracy (%)", "ρ=30 %, α′=0.25"),
)


@pytest.mark.parametrize("headline", HEADLINES, ids=lambda headline: headline[0])
def test_the_readme_shows_figures_of_the_page(committed, headline):
    (row,) = (row for row in committed["rows"] if reproduction.key(row) == headline)
    (line,) = (line for line in reproduction.page({**committed, "rows": [row]}).splitlines() if headline[1] in line)
    ours_and_the_papers = line.split(" | ", 2)[2]
    assert ours_and_the_papers in (pathlib.Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_seeds_become_a_mean_and_the_samples_deviation():
    assert "| 2.0 ± 1.0 (3 of 4 seeds: 1, 2, –, 3) |" in line(quantity="CFL-GP: rounds", ours=[1, 2, None, 3], seeds=4)
    assert "| 87.1 (1 seed) |" in line(seeds=1)
    assert "| 1.0 ± 0 (3 seeds, all equal) |" in line(ours=[1.0, 1.0, 1.0], seeds=3, paper_value=1.0)


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"ours": 84.7}, True),
        ({"ours": 84.9}, False),
        ({"quantity": "CFL-GP: ARI", "ours": 0.9, "paper_value": 1.0}, True),
        ({"quantity": "CFL-GP: ARI", "ours": 0.96, "paper_value": 1.0}, False),
        ({"quantity": "CFL-GP: test loss", "ours": 0.01, "paper_value": 1.0}, False),
        ({"ours": None}, False),
        ({"paper_value": "about 90"}, False),
    ],
)
def test_figures_below_the_papers_are_marked(changes, missed):
    assert ("**not reached**" in line(**changes)) == missed


def test_a_table_replaces_a_row_adds_others_and_leaves_the_rest(tmp_path, monkeypatch):
    other = row(paper="cfl", recipe="cfl-fig8", quantity="CFL: splits", ours=3, paper_dataset="CIFAR-10")
    monkeypatch.setattr(reproduction, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(reproduction, "RECORD", tmp_path / "record.json")
    reproduction.write(record(row(paper_dataset="EMNIST", note="old"), other))
    run = tmp_path / "cfl_gp_table10"
    run.mkdir()
    (run / "table.json").write_text(json.dumps([left(), left(column="C=16", ours=None, ours_std=None)]))
    reproduction.main([str(run)])
    rows = json.loads(reproduction.RECORD.read_text())["rows"]
    assert [(r["quantity"], r["setting"]) for r in rows] == [
        ("CFL-GP: accuracy (%)", "C=8"),
        ("CFL-GP: accuracy (%)", "C=16"),
        ("CFL: splits", "C=8"),
    ]
    assert rows[0]["ours_std"] == pytest.approx(0.3 * 2**0.5)
    table = [left(deviation="sample", valued=2, seeds=3)]
    (named, *_) = reproduction.merged({**record(), "rows": rows}, "cfl-gp-table10", table)["rows"]
    assert (named["ours_std"], named["seeds"]) == (0.3, "2 of 3 seeds")
    assert "note" not in rows[0]
    assert rows[2] == other
    page = reproduction.PAGE.read_text()
    assert "| 88.0 ± 0.4 (2 seeds) | 86.8 ± 0.35 | MNIST (paper: EMNIST) |" in page
    assert "`cfl-gp-table10`: C=16 | – (2 seeds) | 86.8 ± 0.35 | MNIST (paper: EMNIST) |" in page


def test_a_table_without_a_printed_figure_keeps_the_papers_words():
    before = record(row(paper_value="near 90"))
    (after,) = reproduction.merged(before, "cfl-gp-table10", [left(paper=None, paper_std=None)])["rows"]
    assert after["paper_value"] == "near 90"


def test_the_longest_name_decides_whose_paper_a_new_recipe_is():
    assert reproduction.paper_of(record(), "cfl-gp-mixture") == "cfl-gp"
    assert reproduction.paper_of(record(), "cfl-fig5") == "cfl"
    with pytest.raises(ValueError, match="'flag-table5' belongs to none of the papers cfl, cfl-gp"):
        reproduction.paper_of(record(), "flag-table5")
