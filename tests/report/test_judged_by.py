"""Where some clients are faulty, methods are judged by the others, and that is said."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_cluster.command_results import announce
from fedjax_cluster.report import comparison_page, curves, headlines, sensitivity, small_multiples, tables
from fedjax_cluster.report.histories import chosen_metric

PLAIN = {"algorithm": "ifca", "clients": 20, "accuracy": 0.8, "adjusted_rand_index": 0.7, "num_clusters": 4, "seed": 0}
FAULTY = {**PLAIN, "accuracy": 0.6, "accuracy_honest": 0.9, "adjusted_rand_index_honest": 1.0}
WORSE = {**PLAIN, "accuracy": 0.85, "accuracy_honest": 0.7, "adjusted_rand_index_honest": 0.25}
NOBODY_HONEST = {**PLAIN, "accuracy_honest": float("nan"), "adjusted_rand_index_honest": float("nan")}


def runs(label, *summaries):
    summaries = [{**of, "seed": seed} for seed, of in enumerate(summaries)]
    return SimpleNamespace(label=label, summaries=summaries, failed={})


def history(**columns):
    return {"round": np.arange(3), "loss": np.ones(3), "num_clusters": np.full(3, 4), **columns}


def test_tables_rank_by_the_honest():
    table = tables.comparison_table([runs("ifca", WORSE, WORSE), runs("cfl", FAULTY, FAULTY), runs("fedavg", PLAIN)])
    names = [column.name for column in table.columns]
    assert names[:4] == ["method", "honest test accuracy (%)", "honest ARI", "accuracy of all (%)"]
    rows = {row[0].split()[0]: row for row in table.rows}
    # FedAvg ran without a fault: all its clients are honest.
    shown = {name: [number.mean for number in row[1:4]] for name, row in rows.items()}
    assert {name: np.round(values, 2).tolist() for name, values in shown.items()} == {
        "IFCA": [70, 0.25, 85],
        "CFL": [90, 1, 60],
        "FedAvg": [80, 0.7, 80],
    }
    assert [number.best for number in (rows["IFCA"][1], rows["CFL"][1])] == [False, True]
    assert "honest: of the clients that are not faulty" in table.note


@pytest.mark.parametrize("summary", [PLAIN, NOBODY_HONEST])
def test_without_honest_and_faulty_clients_nothing_is_said_of_them(summary):
    table = tables.comparison_table([runs("ifca", summary)])
    assert [column.name for column in table.columns][1:3] == ["test accuracy (%)", "ARI"]
    told = (table.markdown(), tables.summary_table(summary).markdown(), headlines.lead(summary, None))
    assert "honest" not in repr((told, headlines.main_figures(summary)))


def test_a_run_tells_both():
    lines = {row[0]: row[1] for row in tables.summary_table(FAULTY).rows}
    assert lines["test accuracy"] == "60.0 %; of the honest 90.0 %"
    assert lines["adjusted Rand index"] == "0.70; of the honest 1.00"
    lead = headlines.lead(FAULTY, None)
    assert "60.0 % (90.0 % of the honest clients)" in lead
    assert "groups 0.70, of the honest clients 1.00)" in lead
    remarks = {name: remark for name, _, remark in headlines.main_figures(FAULTY)}
    assert remarks["Test accuracy"] == "of the honest clients 90.0 %"
    assert remarks["Agreement with groups"].endswith("of the honest clients 1.00")


def test_the_line_and_the_page_of_a_comparison_have_what_its_table_has(capsys):
    announce("ifca", 0, SimpleNamespace(summary=FAULTY))
    assert capsys.readouterr().err == "ifca seed 0: accuracy 90.0 %, ARI 1.00 (of the honest clients)\n"
    lead = comparison_page.lead([runs("ifca", WORSE), runs("cfl", FAULTY)])
    assert "CFL with 90.0 % has the highest mean test accuracy of honest clients; IFCA with 70.0 % follows" in lead


def test_pictures_draw_the_honest_and_runs_without_a_fault_beside_them():
    faulty = history(
        accuracy=np.full(3, 0.5),
        accuracy_honest=np.full(3, 0.9),
        adjusted_rand_index=np.zeros(3),
        adjusted_rand_index_honest=np.ones(3),
    )
    plain = history(accuracy=np.full(3, 0.8), adjusted_rand_index=np.full(3, 0.5))
    both = {"ifca": faulty, "fedavg": plain}
    upper, lower = curves.learning_curves(both).axes
    assert upper.get_ylabel() == "Honest clients' accuracy (%)"
    assert lower.get_ylabel() == "Honest clients' ARI"
    drawn = [[line.get_ydata()[-1] for line in axes.get_lines()[:2]] for axes in (upper, lower)]
    assert drawn == [[90, 80], [1, 0.5]]
    assert lower.get_ylim() == (-0.06, 1.06)
    assert small_multiples.small_multiples(both).get_supylabel() == "Honest clients' accuracy (%)"
    assert chosen_metric({"fedavg": [plain]}, None) == "accuracy"
    every = curves.learning_curves(both, "accuracy").axes[0]
    assert [line.get_ydata()[-1] for line in every.get_lines()[:2]] == [50, 80]


def test_a_sweep_over_the_share_of_faulty_clients_begins_at_none():
    cells = {"a": {"fault_share": 0.0}, "b": {"fault_share": 0.2}}
    figure = sensitivity.sensitivity([runs("a", PLAIN), runs("b", FAULTY)], cells)
    upper, lower = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == ["Honest clients' accuracy (%)", "Honest clients' ARI"]
    np.testing.assert_allclose([axes.get_lines()[0].get_ydata() for axes in (upper, lower)], [[80, 90], [0.7, 1.0]])
    assert lower.get_ylim()[1] == 1.06
