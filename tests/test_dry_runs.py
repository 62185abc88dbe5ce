"""A dry run tells what would be done, refuses what the run would refuse, and does nothing."""

import pathlib
import re

import pytest

from fedjax_cluster import cli
from tests.test_cli import mistake

PRIVATE = ("--privacy-clip", "1", "--privacy-noise", "1", "--privacy-delta", "1e-5")
pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


def files():
    return {path: path.stat().st_mtime_ns for path in pathlib.Path().rglob("*")}


@pytest.mark.slow
def test_a_dry_run_tells_all_and_does_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDJAX_CLUSTER_CACHE", str(tmp_path / "kept"))
    words = ["run", "fedavg", "--clients", "4", "--rounds", "2", "--model", "linear", "--run-dir", "own"]
    assert cli.main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for text in ("650 parameters", "would do +2 rounds", "directory +own", "clients +4", "learning rate +0.1"):
        assert re.search(text, shown), text
    assert "belongs neither" in mistake(capsys, *words, "--dry-run", "--kappa", "0.3")
    paths = mistake(capsys, *words[:1], "ifca", *words[2:], "--dry-run", "--shared-layers", "nope")
    assert "no parameter matches the layer pattern 'nope'" in paths
    assert "names client 9" in mistake(capsys, *words, "--dry-run", "--join", "1:9")
    assert cli.main([*words, "--dry-run", "--tune"]) == 0
    assert "first try the learning rates 0.0111 0.0333 0.1 0.3 0.9" in " ".join(capsys.readouterr().out.split())
    assert "or no privacy" in mistake(capsys, *words, "--dry-run", "--tune", *PRIVATE)
    late = mistake(capsys, "run", "ifca", *words[2:], "--dry-run", "--clusters", "4", "--join", "1:3")
    assert "clusters is 4 but there are only 3 clients at the start" in late
    assert not files()
    assert cli.main(words) == 0
    before = files()
    capsys.readouterr()
    assert cli.main([*words, "--dry-run", "--rounds", "3"]) == 0
    assert "1 round; 2 rounds done before" in capsys.readouterr().out
    # Evaluated as often as it was, as the run would be.
    assert cli.main([*words, "--dry-run", "--rounds", "40"]) == 0
    assert "38 rounds; 2 rounds done before" in capsys.readouterr().out
    assert "belongs to another experiment" in mistake(capsys, *words, "--dry-run", "--batch-size", "8")
    assert "has 2 rounds already" in mistake(capsys, *words, "--dry-run", "--rounds", "1")
    assert files() == before


def test_a_dry_comparison_tells_what_each_method_would_do(capsys):
    line = "compare cfl-gp ifca --clients 4 --clusters auto --rounds 2 --model linear --seeds 2 --dry-run --every 3"
    words = line.split()
    assert cli.main([*words, "--tune"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "first try 5 learning rates of each method" in shown
    assert cli.main(["compare", "fedavg", *words[3:5], *words[7:14], "--tune", *PRIVATE]) == 0
    assert "first try no learning rates: tuning tries rates on" in " ".join(capsys.readouterr().out.split())
    assert re.search(r"CFL-GP +650 +2 runs.*every 3", shown)
    assert "gradients, rate 0.3" in shown
    assert "refused: clusters is 'auto', but ifca needs a" in shown
    assert "seeds 0 1" in shown
    assert not files()
    assert "needs a number" in mistake(capsys, *words[:1], *words[2:-2])
