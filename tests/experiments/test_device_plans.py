"""`fedjax-cluster plan`: its own flags beside those of `run`, and what is wrong said in one line."""

import pytest

from fedjax_cluster import cli

SMALL = ["--clients", "8", "--rows", "4", "--input", "3", "--model", "linear", "--batch-size", "2"]


@pytest.mark.slow
def test_a_population_without_data(capsys):
    assert cli.main(["plan", "fedavg", *SMALL, "--dtype", "float32", "--local-steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert "FedAvg: compiled, not timed" in shown
    assert "8 of 4 rows, 8 a round" in shown
    assert "peak memory" in shown


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--device", "v9"], "device is 'v9'; known: v5e:2x4"),
        (["--rounds", "0"], "rounds"),
        (["--dtype", "float31"], "dtype is 'float31'"),
        (["--clients", "0"], "clients"),
    ],
)
def test_mistakes_are_one_line(words, complaint, capsys):
    assert cli.main(["plan", "fedavg", *SMALL, *words]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert len(said.splitlines()) == 1


def test_rows_need_clients(capsys):
    assert cli.main(["plan", "fedavg", "--rows", "4"]) == 2
    assert "--clients" in capsys.readouterr().err
