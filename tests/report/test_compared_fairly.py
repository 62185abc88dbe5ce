"""Who is ranked, tested and in bold: on the same seeds, on the same data, and by more than rounding."""

import io
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_cluster.report import headlines, option_curves, sensitivity, significance, small_multiples, tables
from fedjax_cluster.report.comparison_page import lead
from fedjax_cluster.report.curves import learning_curves
from fedjax_cluster.report.table import Column, Number, Table
from tests.report.test_tables import read_csv


def of(label, *accuracy, name="accuracy", failed=(), not_ended=(), data=None, **further):
    """A method's runs with seeds 0, 1, …"""
    summaries = [{"rounds": 9, "seed": seed, name: value, **further} for seed, value in enumerate(accuracy)]
    reasons = dict.fromkeys((*failed, *not_ended), "why")
    return SimpleNamespace(
        label=label, summaries=summaries, failed=reasons, not_ended=frozenset(not_ended), data=data or {}
    )


def test_seeds_that_were_not_run_to_their_end_are_no_defeats():
    good, others = of("good", 0.9, not_ended=(1, 2)), [of("slow", 0.1, 0.2, 0.3), of("slower", 0.0, 0.1, 0.2)]
    rows = read_csv(tables.comparison_table([*others, good]))
    assert [row["mean rank"] for row in rows] == ["2", "3", "1"]
    assert {row["mean rank seeds"] for row in rows} == {"1 of 3"}
    # One that failed is one.
    rows = read_csv(tables.comparison_table([*others, of("good", 0.9, failed=(1, 2))]))
    assert [float(row["mean rank"]) for row in rows] == pytest.approx([4 / 3, 7 / 3, 7 / 3])
    assert "mean rank seeds" not in rows[0]


def test_what_differs_by_rounding_is_equal():
    third = [5 / 6, float(np.float32(5 / 6)), 5 / 6]
    table = tables.comparison_table([of("a", *third), of("b", *third[1:], third[1])])
    assert [row["mean rank"] for row in read_csv(table)] == ["1.5", "1.5"]
    assert read_csv(table)[1]["p against best"] == "1"
    losses = np.asarray([[1e-7, 2e-7], [4e-7, 5e-7]])
    assert significance.mean_ranks(losses, higher=False).tolist() == [1.0, 2.0]


def test_runs_of_other_data_are_ranked_nowhere():
    ours = of("a", 0.9, 0.8, 0.85, data={"test_fraction": 0.5, "scenario_options.angles": None})
    other = of("b", 0.5, 0.4, 0.3, data={"test_fraction": 0.3, "scenario_options.angles": [0, 90]})
    table = tables.comparison_table([ours, other])
    assert "not ranked, as runs differ in test fraction and angles" in table.note
    assert not any(word in column.name for column in table.columns for word in ("rank", "best"))
    assert lead([ours, other]).endswith("; not ranked, as runs differ in test fraction and angles.")
    assert "has the highest" in lead([ours, of("c", 0.1, data=ours.data)])


def test_cells_of_other_rounds_are_told_apart_and_not_ranked():
    """Fault: a sweep went on with more rounds, and its longer cells had the best mean."""
    cells = [of("rate 0.1", 0.5), of("rate 0.3", 0.9, rounds=40)]
    values = {"rate 0.1": {"rate": 0.1}, "rate 0.3": {"rate": 0.3}}
    assert [row["rounds"] for row in read_csv(tables.comparison_table(cells, values))] == ["9", "40"]
    assert lead(cells, "cell", ["rate"]).endswith("; not ranked, as runs differ in rounds.")
    assert "has the highest" in lead(cells, "cell", ["rate", "rounds"])
    assert "has the highest" in lead(cells)


def bold(*methods):
    text = tables.comparison_table(methods).latex()
    return [r"\textbf" in line for line in text.splitlines() if line.endswith(r"\\")][1:], text


def test_bold_are_means_of_as_many_seeds_that_are_shown_alike():
    loss = {"name": "test_loss"}
    assert bold(of("a", 4e-5, **loss), of("b", 1e-6, **loss))[0] == [False, True]
    found, text = bold(of("a", 4e-5, 5e-5, **loss), of("b", 1e-6, 2e-6, **loss))
    assert found == [False, True]
    assert r"2e-06 $\pm$ 7e-07" in text
    found, text = bold(of("a", 0.8, 0.9, 0.85), of("b", 0.85, 0.85))
    assert found == [True, False]
    assert "bold: the best mean of those with the most seeds" in text
    assert "bold: the best mean\\par" in bold(of("a", 0.8, 0.9), of("b", 0.85, 0.7))[1]


def test_a_name_in_brackets_is_no_argument_of_the_line_before():
    text = Table(
        "", (Column("method"), Column("ARI")), (("a", Number(1)), ("[b]", Number(2)), ("*", Number(3)))
    ).latex()
    assert "\n{}[b] & 2" in text
    assert "\n{}* & 3" in text


def history(*accuracy, loss=None):
    rounds = np.arange(float(len(accuracy)))
    loss = np.ones(len(accuracy)) if loss is None else np.asarray(loss)
    return {"round": rounds, "accuracy": np.asarray(accuracy), "loss": loss}


def drawn(figure):
    figure.savefig(io.BytesIO(), format="png")
    return [text.get_text().replace("\n", " ") for legend in figure.legends for text in legend.get_texts()]


def test_any_name_can_be_drawn():
    curves = {"x$^^$": history(0.1, 0.2), "_mine": history(0.3, 0.4)}
    assert " _mine" in drawn(learning_curves(curves))
    drawn(small_multiples.small_multiples(curves))
    cells = {"a": {"x": "$^^$"}, "b": {"x": "_"}}
    drawn(sensitivity.sensitivity([of("a", 0.5), of("b", 0.6)], cells))


def test_pictures_of_options_tell_how_many_runs_there_are_and_which_were_lost():
    runs = [of("a", 0.5, np.nan, 0.7), of("b", 0.7, 0.6, failed=(2,)), of("c", 0.7, 0.6, 0.5)]
    legend = drawn(sensitivity.sensitivity(runs, {name: {"rate": value} for value, name in enumerate("abc")}))
    assert {"± sample std over 2 or 3 seeds", "some runs failed or not finite"} <= set(legend)
    assert "some runs failed or not finite" not in drawn(sensitivity.sensitivity(runs[2:] * 2, {"c": {"rate": 1}}))
    cells = {name: {"rate": value % 2, "every": value // 2} for value, name in enumerate("abcd")}
    figure = sensitivity.sensitivity([*runs, of("d", 0.1, 0.2, 0.3)], cells)
    legend = drawn(figure)
    assert {"mean ± sample std over 2 or 3 seeds", "*: some runs failed or not finite"} <= set(legend)
    assert sum("*" in text.get_text() for text in figure.axes[0].texts) == 2


def test_curves_of_two_options_end_with_a_cross():
    good, lost = history(0.1, 0.2, 0.3), history(0.1, np.nan, np.nan, loss=[1, np.nan, np.nan])
    histories = {"a": [good], "b": [lost], "c": [good], "d": [good]}
    cells = {name: {"rate": value % 2, "every": value // 2} for value, name in enumerate("abcd")}
    assert "not finite afterwards" in drawn(option_curves.option_curves(histories, cells))
    assert "not finite afterwards" not in drawn(option_curves.option_curves({**histories, "b": [good]}, cells))
    nothing = history(np.nan, np.nan, np.nan, loss=[np.nan] * 3)
    assert "not finite afterwards" not in drawn(option_curves.option_curves({**histories, "b": [good, nothing]}, cells))
    legend = drawn(option_curves.option_curves({**histories, "b": [nothing]}, cells))
    assert any(text.endswith(" (no finite value)") for text in legend)


def test_a_run_is_not_said_to_agree_before_it_does():
    summary = {"rounds": 9, "accuracy": 0.9, "num_clusters": 4, "adjusted_rand_index": 0.9961}
    assert "(adjusted Rand index with the groups 0.9961)" in headlines.lead(summary, None)
    once = {**summary, "first_round_of_ideal_agreement": 4}
    assert "0.9961 (1.00 first after round 5)" in tables.summary_table(once).markdown()
    card = next(card for card in headlines.main_figures(once) if card[0] == "Agreement with groups")
    assert card[1:] == ("0.9961", "adjusted Rand index; 1.00 first after round 5")
    assert "4 clusters that agree with the groups" in headlines.lead({**summary, "adjusted_rand_index": 1.0}, None)
    one = {**summary, "num_clusters": 1, "num_unclustered": 6, "clients": 10}
    assert "one cluster, and 6 clients in none" in headlines.lead(one, None)
