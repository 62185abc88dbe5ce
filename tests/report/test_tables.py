import csv
import io
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
from rich.console import Console

from fedjax_cluster.report import tables
from fedjax_cluster.report.tables import Column, Number, Table

SUMMARY = {
    "algorithm": "cfl_gp",
    "scenario": "digits",
    "clients": 16,
    "rounds": 100,
    "seed": 3,
    "accuracy": 0.8916,
    "accuracy_std": 0.0517,
    "accuracy_worst_decile": 0.8088,
    "balanced_accuracy": 0.8953,
    "test_loss": 0.8595,
    "adjusted_rand_index": 1.0,
    "num_clusters": 4,
    "first_round_of_final_clustering": 7,
    "first_round_of_ideal_agreement": 1,
    "num_rejected": 0,
    "client_rounds_per_second": 3504.6,
    "compile_seconds": 16.45,
    "run_seconds": 0.457,
    "models_down": 2200.0,
    "models_up": 1600.0,
    "bytes_down": 132.03e6,
    "bytes_up": 96.06e6,
    "gradient_evaluations": 2199.0,
    "loss_evaluations": 12800.0,
}


def runs(label, *changes):
    return SimpleNamespace(label=label, summaries=[{**SUMMARY, **change} for change in changes])


def printed(table, width=80):
    console = Console(width=width, file=io.StringIO())
    table.print(console)
    return console.file.getvalue()


def read_csv(table):
    return list(csv.DictReader(io.StringIO(table.csv())))


# ------------------------------------------------------------------------------------------- comparison


def test_comparison_shows_means_over_the_seeds():
    table = tables.comparison_table(
        [
            runs("cfl_gp", {"accuracy": 0.87}, {"accuracy": 0.89}),
            runs(
                "ifca",
                {"accuracy": 0.80, "adjusted_rand_index": 0.5, "num_clusters": 3, "models_down": 6400},
                {"accuracy": 0.80, "adjusted_rand_index": 1.0, "num_clusters": 4, "models_down": 6400},
            ),
        ]
    )
    assert table.markdown().splitlines() == [
        "| method | test accuracy (%) | ARI | mean rank | clusters | final after round | seed 0 | seed 1 "
        "| models down per client | models up per client | client rounds per second |",
        "| :-- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
        "| CFL-GP | 88.0 ± 1.4 | 1.00 ± 0.00 | 1.0 | 4.0 | 8 | 87.0 | 89.0 | 137.5 | 100 | 3,505 |",
        "| IFCA | 80.0 ± 0.0 | 0.75 ± 0.35 | 2.0 | 3.5 | 8 | 80.0 | 80.0 | 400.0 | 100 | 3,505 |",
        "",
        "mean ± sample standard deviation over 2 seeds; rank 1 is best, runs without a value rank last",
    ]


def test_one_seed_has_no_deviation():
    table = tables.comparison_table([runs("fedavg", {})])
    assert "| FedAvg | 89.2 | 1.00 | 4 | 8 | 137.5 | 100 | 3,505 |" in table.markdown()
    assert table.note == ""


def test_regression_is_compared_by_its_loss():
    table = tables.comparison_table([runs("cfl_gp", {"accuracy": None, "test_loss": 0.04125})])
    assert table.columns[1].name == "test loss"
    assert "| CFL-GP | 0.0413 | 1.00 |" in table.markdown()


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_what_is_missing_is_a_dash_and_an_empty_cell(missing):
    table = tables.comparison_table(
        [runs("ifca", {}), runs("local_only", dict.fromkeys(("accuracy", "adjusted_rand_index", "models_up"), missing))]
    )
    line = next(line for line in table.markdown().splitlines() if "Local only" in line)
    assert line == "| Local only | – | – | 4 | 8 | 137.5 | – | 3,505 |"
    row = read_csv(table)[1]
    assert (
        row["test accuracy (%)"]
        == row["test accuracy (%) sample std"]
        == row["ARI"]
        == row["models up per client"]
        == ""
    )


def test_a_mean_of_fewer_seeds_says_so():
    table = tables.comparison_table([runs("ifca", {"accuracy": 0.8}, {"accuracy": None}, {"accuracy": 0.9})])
    assert "| IFCA | 85.0 ± 7.1 (2 of 3) | 1.00 ± 0.00 |" in table.markdown()
    assert table.note.endswith("over 3 seeds; in brackets how many seeds have the figure")
    assert read_csv(table)[0]["test accuracy (%) seeds"] == "2 of 3"


def test_a_run_that_ended_not_finite_is_named_and_no_mean_hides_it():
    # Accuracies of models that were left behind, or none at all.
    lost = {"test_loss": None, "train_loss": None, "adjusted_rand_index": None, "num_rejected": 8}
    table = tables.comparison_table([runs("fedavg", lost, lost), runs("ifca", {}, lost), runs("cfl", {}, {})])
    lines = table.markdown().splitlines()
    assert lines[2].startswith("| FedAvg | not finite | – | – | 4 |")
    assert lines[3].startswith("| IFCA | 89.2 (1 of 2) | 1.00 (1 of 2) | 1.8 | 4 |")
    assert "; runs that ended not finite: FedAvg 2 of 2, IFCA 1 of 2" in table.note
    assert [row["test accuracy (%)"] for row in read_csv(table)] == ["nan", "89.16", "89.16"]
    assert "not finite" in printed(tables.comparison_table([runs("fedavg", {**lost, "accuracy": None})]))


def test_a_last_round_in_which_nobody_took_part_is_no_divergence():
    assert not tables.diverged({**SUMMARY, "train_loss": None})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), None])
def test_figures_that_are_not_finite_are_dashes(value):
    names = [name for name in SUMMARY if isinstance(SUMMARY[name], float)]
    summary = {**SUMMARY, **dict.fromkeys(names, value), "train_loss": value, "num_rejected": 8}
    lines = tables.summary_table(summary).markdown().splitlines()
    assert "| training loss | not finite: the run has diverged |" in lines
    assert not any(name in line for line in lines for name in ("accuracy", "test loss", "nan", "inf ", "None"))
    compared = tables.comparison_table([SimpleNamespace(label="fedavg", summaries=[summary])])
    assert "| FedAvg | not finite | – | 4 | 8 | – | – | – |" in compared.markdown()


def test_methods_of_different_numbers_of_seeds_show_them():
    table = tables.comparison_table([runs("ifca", {}, {}, {}), runs("cfl", {})])
    assert [row[0] for row in table.rows] == ["IFCA (3 seeds)", "CFL (1 seed)"]
    assert table.note.startswith("mean ± sample standard deviation over 3 seeds")


@pytest.mark.parametrize("value", ["high", [1.0], {}])
@pytest.mark.parametrize("name", ["accuracy", "clients", "first_round_of_final_clustering", "train_loss"])
def test_a_figure_that_is_no_number_is_refused(name, value):
    for make in (tables.summary_table, lambda summary: tables.comparison_table([runs("ifca", summary)])):
        with pytest.raises(ValueError, match=f"a summary's {name} is "):
            make({**SUMMARY, name: value})


def test_comparison_as_csv_holds_unrounded_numbers():
    (row,) = read_csv(tables.comparison_table([runs("cfl_gp", {"accuracy": 0.871234}, {"accuracy": 0.891234})]))
    np.testing.assert_allclose(float(row["test accuracy (%)"]), 88.1234)
    np.testing.assert_allclose(float(row["test accuracy (%) sample std"]), 2**0.5)
    assert row["method"] == "CFL-GP"


def test_comparison_fits_a_terminal_of_eighty_characters():
    text = printed(tables.comparison_table([runs(name, {}, {}) for name in ("cfl_gp", "gradient_loss", "per_fedavg")]))
    assert max(map(len, text.splitlines())) <= 80
    assert "89.2 ± 0.0" in text
    assert "seed" in text
    assert "…" not in text


@pytest.mark.parametrize("width", [40, 78, 200])
def test_narrow_console_names_what_it_leaves_out(width):
    text = printed(tables.comparison_table([runs("cfl_gp", {}, {}), runs("ifca", {}, {})]), width=width)
    told = " ".join(text.split()).partition("no room here for: ")[2]
    assert ("3,505" in text) == (width == 200) == ("client rounds per second" not in told)
    assert ("seed 0" in told) == (width == 40)
    assert "…" not in text


def test_failures_are_rows_that_say_why():
    some = SimpleNamespace(label="cfl", summaries=[{**SUMMARY, "seed": 0}], failed={1: "no memory", 2: "no memory"})
    none = SimpleNamespace(label="fedprox", summaries=[], failed=dict.fromkeys(range(3), "proximal does nothing"))
    whole = SimpleNamespace(label="ifca", summaries=[{**SUMMARY, "seed": seed} for seed in range(3)])
    table = tables.comparison_table([some, none, whole])
    lines = table.markdown().splitlines()
    assert lines[2].startswith("| CFL | 89.2 (1 of 3) |")
    assert lines[2].endswith("| seed 1, 2: no memory |")
    assert lines[3].startswith("| FedProx | failed | – |")
    assert lines[3].endswith("| proximal does nothing |")
    assert [row["mean rank"] for row in read_csv(table)] == ["1.83333333", "", "1.16666667"]
    assert (read_csv(table)[1]["test accuracy (%)"], read_csv(table)[1]["failed"]) == ("", "proximal does nothing")
    assert "\nFedProx failed: proximal does nothing\n" in printed(table)
    assert r"FedProx & failed & -- &" in table.latex()
    assert "FedProx failed: proximal does nothing" in table.latex()


def test_the_best_is_tested_against_the_others_over_the_seeds_that_both_have():
    def of(label, **accuracy):
        summaries = [{**SUMMARY, "seed": int(name[1:]), "accuracy": value} for name, value in accuracy.items()]
        return SimpleNamespace(label=label, summaries=summaries)

    best, other = of("ifca", s0=0.9, s1=0.8, s2=0.95, s3=0.85), of("cfl", s3=0.8, s1=0.7, s2=0.7, s0=0.75)
    table = tables.comparison_table([other, best, of("fedavg", s1=0.9, s2=0.5), of("flag", s1=0.6, s2=0.6, s3=0.6)])
    rows = read_csv(table)
    expected = scipy.stats.ttest_rel([0.9, 0.8, 0.95, 0.85], [0.75, 0.7, 0.7, 0.8]).pvalue
    assert float(rows[0]["p against best"]) == pytest.approx(expected)
    assert [row["p against best"] == "" for row in rows] == [False, True, True, False]
    assert rows[3]["p against best seeds"] == "3 of 4"
    assert "| best |" in table.markdown().splitlines()[3]
    # FedAvg and FLAG were not run with seed 0: nobody is ranked by it.
    assert float(rows[1]["mean rank"]) == pytest.approx(np.mean([2, 1]))
    assert "two-sided paired t-test" in table.note
    assert "p against best" not in tables.comparison_table([of("ifca", s0=0.9, s1=0.8), of("cfl", s0=1, s1=1)]).csv()


def test_less_loss_is_better():
    methods = [runs(name, *({"accuracy": None, "test_loss": loss + 0.1 * n**2} for n in range(3))) for name, loss in
               (("cfl", 2.0), ("ifca", 1.0))]  # fmt: skip
    methods[0].summaries[0]["test_loss"] = 2.5
    table = tables.comparison_table(methods)
    assert [row["mean rank"] for row in read_csv(table)] == ["2", "1"]
    assert "| best |" in table.markdown().splitlines()[3]


def test_comparison_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no runs to compare"):
        tables.comparison_table([])
    with pytest.raises(ValueError, match="ifca has no summaries"):
        tables.comparison_table([runs("ifca")])


# ------------------------------------------------------------------------------------------------ recipe


def test_recipe_puts_ours_beside_the_paper(make_row):
    table = tables.recipe_table(
        "Table 10",
        [
            make_row("CFL-GP", "C=8", 87.034, 86.8, ours_std=0.3, paper_std=0.35),
            make_row("CFL-GP", "C=8", 1.0, 1.0, metric="ARI", ours_std=0.0),
            make_row("IFCA", "C=8", 79.0, 79.3),
            make_row("IFCA", "C=8", 0.875, metric="ARI"),
            make_row("IFCA", "C=16", np.nan, 82.8),
            make_row("IFCA", "C=16", 3.0, 5.0, metric="first round"),
        ],
    )
    assert table.title == "Table 10"
    assert table.markdown().splitlines()[2:] == [
        "| metric | setting | method | ours | paper | difference |",
        "| :-- | :-- | :-- | --: | --: | --: |",
        "| accuracy (%) | C=8 | CFL-GP | 87.03 ± 0.30 | 86.80 ± 0.35 | +0.23 |",
        "| accuracy (%) | C=8 | IFCA | 79.00 | 79.30 | -0.30 |",
        "| accuracy (%) | C=16 | IFCA | – | 82.80 | – |",
        "| ARI | C=8 | CFL-GP | 1.00 ± 0.00 | 1.00 | 0.00 |",
        "| ARI | C=8 | IFCA | 0.88 | – | – |",
        "| first round | C=16 | IFCA | 3 | 5 | -2 |",
    ]
    first = read_csv(table)[0]
    assert (first["ours"], first["ours sample std"], first["paper"], first["paper std"]) == (
        "87.034",
        "0.3",
        "86.8",
        "0.35",
    )
    np.testing.assert_allclose(float(first["difference"]), 0.234)
    assert max(map(len, printed(table).splitlines())) <= 80


def test_small_losses_keep_three_digits(make_row):
    text = tables.recipe_table("", [make_row("CFL-GP", "", 0.0412, 0.04, metric="test loss")]).markdown()
    assert "| 0.041 | 0.040 | +0.001 |" in text


def test_recipe_without_values_is_refused(make_row):
    with pytest.raises(ValueError, match="none of the 1 rows has a value"):
        tables.recipe_table("Table 10", [make_row("IFCA", "C=8", np.nan)])


# ----------------------------------------------------------------------------------------------- summary


def test_summary_is_short_and_complete():
    lines = [line.rstrip() for line in printed(tables.summary_table(SUMMARY, "runs/cfl-gp")).splitlines()]
    assert lines == [
        "CFL-GP on digits: 16 clients, 100 rounds, seed 3",
        "test accuracy        89.2 %; std over clients 5.2, worst decile 80.9 %",
        "balanced accuracy    89.5 %",
        "test loss            0.8595",
        "adjusted Rand index  1.00, first after round 2",
        "clusters             4",
        "final clustering     after round 8",
        "models per client    137.5 down, 100.0 up",
        "traffic              132.0 MB down, 96.1 MB up",
        "mini-batches         2,199 gradients, 12,800 losses",
        "speed                3,505 client-rounds per second",
        "time                 16.4 s compiling, 0.5 s running",
        "left in              runs/cfl-gp",
    ]


def test_summary_has_the_figures_of_texts_and_of_autoencoders():
    found = SUMMARY | {"perplexity": 19.71, "nmse": 0.0125}
    lines = [" ".join(line.split()) for line in printed(tables.summary_table(found)).splitlines()]
    assert lines[4:6] == ["test perplexity 19.71", "normalized MSE 0.0125"]
    lost = found | {"train_loss": np.nan, "num_rejected": 30}
    assert "19.71" not in printed(tables.summary_table(lost))


def test_summary_leaves_out_what_there_is_not():
    missing = dict.fromkeys(
        ("accuracy", "accuracy_std", "accuracy_worst_decile", "balanced_accuracy", "first_round_of_ideal_agreement")
    )
    text = tables.summary_table({**SUMMARY, **missing, "adjusted_rand_index": float("nan")}).markdown()
    for word in ("accuracy", "Rand", "left in", "rejected", "None", "nan"):
        assert word not in text
    assert "| test loss | 0.8595 |" in text


@pytest.mark.parametrize(
    ("agreement", "ideal", "shown"),
    [(0.666, 5, "0.67 (1.00 first after round 6)"), (0.666, None, "0.67"), (1.0, 0, "1.00, first after round 1")],
)
def test_summary_tells_when_the_clusters_were_right(agreement, ideal, shown):
    summary = {**SUMMARY, "adjusted_rand_index": agreement, "first_round_of_ideal_agreement": ideal}
    assert f"| adjusted Rand index | {shown} |" in tables.summary_table(summary).markdown()


def test_summary_tells_of_rejected_updates():
    assert "| rejected updates | 12 |" in tables.summary_table({**SUMMARY, "num_rejected": 12}).markdown()


@pytest.mark.parametrize(
    ("clients", "line"),
    [((4,), "client 4: see"), ((4, 7), "clients 4, 7: see"), (range(20), "8, 9, 10, 11 and 8 more: see")],
)
def test_a_summary_names_the_clients_that_stand_out(clients, line):
    assert f"{line} report.html |" in tables.summary_table(SUMMARY, outlying=clients).markdown()
    assert "standing out" not in tables.summary_table(SUMMARY).markdown()


def test_summary_of_nothing_can_be_printed():
    assert "unknown data" in printed(tables.summary_table({}))


# -------------------------------------------------------------------------------------------------- form


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (Number(1234.5, decimals=1), "1,234.5"),
        (Number(-0.004, decimals=2), "0.00"),
        (Number(0.004, decimals=2, signed=True), "0.00"),
        (Number(-0.5, 0.25, 2), "-0.50 ± 0.25"),
        (Number(3.0, signed=True), "+3"),
    ],
)
def test_number_as_text(number, text):
    assert number.text() == text


def test_markup_and_bars_in_names_are_only_text():
    table = Table("[red]title[/red]", (Column("a"), Column("b")), (("[bold]x|y", Number(1.0)),), "[note]")
    text = printed(table)
    for part in ("[red]title[/red]", "[bold]x|y", "[note]"):
        assert part in text
    assert "| [bold]x\\|y | 1 |" in table.markdown()


def test_table_is_written_in_both_forms(tmp_path):
    table = Table("", (Column("method"), Column("ARI", "std")), (("β, first", Number(0.5, 0.1, 2)),))
    table.write(tmp_path / "new" / "table.md", str(tmp_path / "new" / "table.csv"))
    assert (tmp_path / "new" / "table.md").read_text(encoding="utf-8") == table.markdown()
    assert (tmp_path / "new" / "table.csv").read_bytes().decode() == 'method,ARI,ARI std\n"β, first",0.5,0.1\n'
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["table.csv", "table.md"]


def test_other_endings_are_refused_before_anything_is_written(tmp_path):
    table = Table("", (Column("a"),), (("x",),))
    with pytest.raises(ValueError, match=r"cannot write a table to 'table.txt'; its name must end in .md or .csv"):
        table.write(tmp_path / "table.md", tmp_path / "table.txt")
    assert not list(tmp_path.iterdir())


def test_one_of_a_thing_is_singular():
    table = tables.summary_table(
        {**SUMMARY, "clients": 1, "rounds": 1, "clusterings": 1, "seconds_per_clustering": 0.002}
    )
    assert "1 client, 1 round, seed" in table.title
    assert ("server's clustering", "1 time, 2 ms each") in table.rows


def test_a_sweep_has_its_options_first_and_no_heading_twice():
    """Fault: the option `clusters` and the clusters found share a heading, and a reader of the CSV loses one."""
    runs = [SimpleNamespace(label=name, summaries=[{"accuracy": 0.5, "num_clusters": 3}]) for name in ("a", "b")]
    cells = {"a": {"clusters": 4, "method_options.every": 1}, "b": {"clusters": 8, "method_options.every": 2}}
    table = tables.comparison_table(runs, cells)
    names = [column.name for column in table.columns]
    assert names[:2] == ["clusters (given)", "every"]
    assert len(set(names)) == len(names)
    assert [row[:2] for row in table.rows] == [("4", "1"), ("8", "2")]


def test_runs_of_other_data_are_not_ranked_and_other_rounds_are_told():
    def some(label, **other):
        return runs(label, *({"seed": seed, "accuracy": 0.5 + seed / 10, **other} for seed in range(3)))

    alike = tables.comparison_table([some("ifca"), some("fedavg", rounds=12)])
    names = [column.name for column in alike.columns]
    assert len({row[names.index("rounds")].mean for row in alike.rows}) == 2
    other = tables.comparison_table([some("ifca"), some("fedavg", scenario="dirichlet", clients=9)])
    assert "rank" not in " ".join(column.name for column in other.columns)
    assert "not ranked, as runs differ in scenario and clients" in other.note
