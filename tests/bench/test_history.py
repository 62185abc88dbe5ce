"""The history of speeds: what `bench --record` keeps, and when `bench --check` is red."""

import json

import pytest

from fedjax_cluster import bench, cli
from fedjax_cluster.bench import history

MACHINE = {"processor": "a processor", "cores": 2, "device": "2 × cpu", "backend": "cpu", "versions": {"jax": "0.10"}}


def report(ratio, suite="speed", **machine):
    rows = [
        {"what": "MLP", "size": "b=64", "processor_ratio": ratio},
        {"what": "w", "size": "", "processor_ratio": None},
    ]
    return {"suite": suite, **MACHINE, **machine, "rows": rows}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history.json"


def test_records_are_appended_with_their_machine_and_rows_that_have_a_peer(path):
    history.record(path, [report(1.0)])
    history.record(path, [report(1.1), report(2.0, suite="rounds")])
    first, second = history.read(path)
    assert first["ratios"] == {"speed: MLP, b=64": 1.0}
    assert second["ratios"] == {"speed: MLP, b=64": 1.1, "rounds: MLP, b=64": 2.0}
    assert {name: second[name] for name in history.SAME} == {name: MACHINE[name] for name in history.SAME}
    assert second["commit"] is None  # no checkout


def test_a_fifth_slower_is_slower_and_a_twentieth_is_not(path):
    for ratio in (5.0, 1.0, 1.02, 0.98):  # of the last three the median counts
        history.record(path, [report(ratio)])
    assert history.slower(path, [report(1 / 1.2)]) == {"speed: MLP, b=64": (1.0, pytest.approx(1 / 1.2, abs=1e-3))}
    assert history.slower(path, [report(1 / 1.05)]) == {}
    assert history.slower(path, [report(1.3)]) == {}


def test_another_machine_is_not_compared(path):
    history.record(path, [report(1.0)])
    assert history.slower(path, [report(0.1, processor="another")]) is None
    assert history.slower(path, [report(0.1, cores=8)]) is None
    assert history.slower(path, [report(0.1, suite="rounds")]) is None


def measured(monkeypatch, *found):
    """`bench speed` finds these ratios one after the other."""
    left = list(found)
    monkeypatch.setattr(bench, "_run_suite", lambda *_: report(left.pop(0)))
    return left


def test_bench_is_red_where_the_median_of_three_is_slower(path, monkeypatch, capsys):
    measured(monkeypatch, 1.0)
    assert cli.main(["bench", "speed", "--record", str(path)]) == 0
    left = measured(monkeypatch, 0.83, 1.0, 0.84)
    assert cli.main(["bench", "speed", "--check", str(path)]) == 2
    assert not left
    assert "slower than recorded" in capsys.readouterr().err
    measured(monkeypatch, 0.83, 1.0, 0.99)
    assert cli.main(["bench", "speed", "--check", str(path)]) == 0
    left = measured(monkeypatch, 0.95, 0.1)
    assert cli.main(["bench", "speed", "--check", str(path)]) == 0
    assert left == [0.1]  # nothing slow, nothing measured again
    # Recorded first, it would be compared with itself.
    before = path.read_text()
    measured(monkeypatch, *[0.8] * 3)
    assert cli.main(["bench", "speed", "--check", str(path), "--record", str(path)]) == 2
    assert path.read_text() == before


@pytest.mark.parametrize("content", [None, "no json", json.dumps([{"commit": "a"}]), json.dumps({"a": 1})])
def test_what_is_no_history_is_one_line_before_anything_runs(path, monkeypatch, capsys, content):
    left = measured(monkeypatch, 1.0)
    if content is not None:
        path.write_text(content)
    assert cli.main(["bench", "speed", "--check", str(path)]) == 2
    assert left == [1.0]
    assert capsys.readouterr().err.count("\n") == 1
