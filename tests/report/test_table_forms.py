"""How a table looks on a console and in LaTeX."""

import io
from types import SimpleNamespace

from rich.console import Console

from fedjax_cluster.algorithms import REGISTRY
from fedjax_cluster.report import tables
from fedjax_cluster.report.names import method_name
from fedjax_cluster.report.paper_rows import PaperRow
from fedjax_cluster.report.table import Column, Number, Table


def printed(table, width):
    text = io.StringIO()
    table.print(Console(file=text, width=width))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def test_a_name_stands_on_the_first_line_of_its_row_and_headings_on_their_last():
    text = "one two three four five six seven eight nine ten"
    assert printed(Table("", (Column(""), Column("")), (("memory", text), ("time", "1 s"))), 30) == [
        "memory  one two three four",
        "        five six seven eight",
        "        nine ten",
        "time    1 s",
    ]
    headed = Table("", (Column("method"), Column("a b c d e f g h i j k")), (("IFCA", Number(1.0)),))
    assert [line.split()[0] for line in printed(headed, 20) if "method" in line or "IFCA" in line] == ["method", "IFCA"]
    lines = printed(headed, 20)
    assert "a b" in lines[0]
    assert "method" not in lines[0]


def of(label, *accuracies, **others):
    summaries = [{"seed": seed, "accuracy": value, **others} for seed, value in enumerate(accuracies)]
    return SimpleNamespace(label=label, summaries=summaries)


def test_a_comparison_in_latex_has_a_short_caption_a_label_and_its_notes_beneath(tmp_path):
    table = tables.comparison_table([of("cfl", 0.8, 0.7, 0.6), of("ifca", 0.9, 0.8, 0.85)])
    table.write(tmp_path / "comparison.tex")
    lines = (tmp_path / "comparison.tex").read_text(encoding="utf-8").splitlines()
    at = lines.index(r"\caption{Comparison of 2 methods over 3 seeds}")
    assert lines[at + 1] == r"\label{tab:comparison}"
    notes = lines[lines.index(r"\end{tabular}") + 1]
    assert notes.startswith(r"\par\footnotesize mean $\pm$ sample standard deviation over 3 seeds; rank 1 is best")
    assert notes.endswith(r"; bold: the best mean\par")
    # A file's name may hold what LaTeX would take for a comment or a command.
    assert r"\label{tab:50--b-}" in table.latex("50%{b#")


def test_the_best_mean_is_bold_in_latex_alone():
    def bold(*runs, cells=None):
        table = tables.comparison_table(runs, cells)
        assert "textbf" not in table.markdown() + table.csv()
        return [line.split(" & ")[0] for line in table.latex().splitlines() if r" & \textbf{" in line]

    assert bold(of("cfl", 0.8, 0.7), of("ifca", 0.9, 0.8), of("fedavg", 0.99, None)) == ["IFCA"]
    assert bold(of("cfl", 0.80001), of("ifca", 0.8), of("fedavg", 0.79)) == ["CFL", "IFCA"], "as far as digits tell"
    assert bold(of("cfl", None, test_loss=2.0), of("ifca", None, test_loss=1.0)) == ["IFCA"]
    assert bold(of("cfl", 0.8)) == []
    assert bold(of("cfl", None), of("ifca", None)) == []
    assert bold(of("cfl", 0.8, dataset="a"), of("ifca", 0.9, dataset="b")) == [], "of other data"
    assert bold(of("a", 0.8), of("b", 0.9), cells={"a": {"every": 1}, "b": {"every": 2}}) == []


def test_every_method_is_called_as_papers_print_it():
    """A new one would stand in tables and pictures as a name of Python."""
    assert [name for name in REGISTRY if method_name(name) == name] == []


def test_any_name_stays_one_row_that_latex_and_markdown_can_set():
    names = ("a\\|b", "two\nlines", " [3] c", "ο, λ′ and ąð", "ϸ\x07: give --tune, - or –- first", "*ΔΑ₁* →<b>")
    table = Table("", (Column("method"), Column("ARI")), tuple((name, Number(1.0)) for name in names))
    rows = table.markdown().splitlines()[2:]
    assert rows[:2] == [r"| a\\\|b | 1 |", "| two lines | 1 |"]
    assert rows[-1] == r"| \*ΔΑ₁\* →\<b> | 1 |"
    lines = table.latex().splitlines()
    lines = lines[lines.index(r"\midrule") + 1 : lines.index(r"\bottomrule")]
    dashes = r"??: give -{}-tune, - or --{}- first & 1 \\"
    signs = r"{}*$\Delta$A$_1$* $\to$$<$b$>$ & 1 \\"
    assert lines[1:] == [r"two lines & 1 \\", r"{}[3] c & 1 \\", r"$o$, $\lambda$$'$ and ?? & 1 \\", dashes, signs]


def test_whole_means_whose_seeds_are_not_all_equal_keep_their_deviation():
    rows = [PaperRow("CFL", "C=8", "splits", 4.0, 0.47, seeds=10), PaperRow("CFL", "C=9", "splits", 3.0, 0.0, seeds=10)]
    assert "4.00 ± 0.47" in tables.recipe_table("", rows).markdown()


def test_options_that_end_alike_have_columns_of_their_own():
    """Of a client's and a server's rate the table had one, under the other's name."""
    cells = {f"{own} {server}": {"learning_rate": own, "server.learning_rate": server}
             for own in (0.1, 0.3) for server in (0.5, 1.0)}  # fmt: skip
    summary = {"seed": 0, "accuracy": 0.5, "num_clusters": 1}
    table = tables.comparison_table([SimpleNamespace(label=label, summaries=[summary]) for label in cells], cells)
    assert table.naming == 2
    assert [column.name for column in table.columns[:2]] == ["learning rate", "server learning rate"]
    assert [row[:2] for row in table.rows] == [
        (str(of[0]), f"{of[1]:g}") for of in map(tuple, map(dict.values, cells.values()))
    ]
