"""Whether the runs of a comparison have the same data, whoever tells it and in whichever way."""

import pytest

from fedjax_cluster import RunConfig
from fedjax_cluster.experiments import comparison, saved_runs
from fedjax_cluster.experiments.shared_federations import data_settings
from fedjax_cluster.report.tables import comparison_table, differing

BASE = RunConfig(method="fedavg", model="linear", clients=4, rounds=1)


def settings(**changes):
    return data_settings({**BASE.to_json(), **changes})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"scenario_options": {"angles": (0, 90)}}, {"scenario_options": {"angles": [0, 90.0]}}),
        ({"scenario_options": {"angles": [0, 90, 180, 270]}}, {}),  # its default
        ({"population": "people"}, {"population": "people/"}),
    ],
)
def test_what_is_written_in_two_ways_is_the_same(one, other):
    assert settings(**one) == settings(**other)


def test_what_differs_does():
    assert settings(scenario_options={"angles": [0, 90]}) != settings()
    assert settings(test_fraction=0.2) != settings()
    assert data_settings({}) == {}


@pytest.mark.slow
def test_a_comparison_that_was_extended_is_ranked(tmp_path):
    """What was read again had a list where the run before had a tuple: "not ranked, as runs differ in angles"."""
    options = {"scenario_options": {"angles": (0, 90)}}
    one = RunConfig(method="fedavg", model="linear", clients=4, rounds=1, **options)
    other = RunConfig(method="ditto", model="linear", clients=4, rounds=1, **options)
    path = tmp_path / "c"
    comparison.compare({"fedavg": one}, seeds=(0, 1, 2), run_dir=path, progress=False)
    outcomes = comparison.compare({"ditto": other}, seeds=(0, 1), run_dir=path, progress=False)
    everything = saved_runs.with_others(outcomes, path)
    assert differing(everything) == []
    (ditto,) = (each for each in everything if each.label == "ditto")
    assert ditto.not_ended == {2}
    ranks = [dict(zip((column.name for column in comparison_table(everything).columns), row, strict=True))["mean rank"]
             for row in comparison_table(everything).rows]  # fmt: skip
    assert {rank.seeds for rank in ranks} == {"2 of 3"}
